"""Subsets of traces, and traces scaled to a load. Offered load = GPU seconds requested / available.

The span over which load is measured runs from the first to the last submission.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from gpusched.errors import UsageError
from gpusched.model.slicetables import gpus_counted
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of, in_calendar, parse_duration
from gpusched.traces.file import FLOATS, INTS, NAMES, SOME
from gpusched.traces.readers.draft import moved
from gpusched.traces.trace import NO_RUNS, Floats, Ints, OtherRuns, ProgressRecords, Trace

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ].*)?")


def select(trace: Trace, jobs: npt.NDArray[np.bool_] | npt.NDArray[np.int64], note: str | None = None) -> Trace:
    """Select jobs of a trace (``bool[jobs]``, or indices), in order; ``note`` is added to its notes.

    Indices ascend, but where no job waits for another. A job waits for no job that is not among them.
    """
    order = np.flatnonzero(jobs) if jobs.dtype == np.bool_ else jobs.astype(np.int64)
    columns = {name: getattr(trace, name)[order] for name in (*FLOATS, *INTS) if name != "depends_on"}
    some = {name: getattr(trace, name) for name in SOME}
    columns |= {name: None if rows is None else rows[order] for name, rows in some.items()}
    return replace(
        trace, ids=tuple([trace.ids[i] for i in order.tolist()]), depends_on=moved(trace.depends_on, order),
        progress=None if trace.progress is None else _select_progress(trace.progress, order),
        notes=trace.notes + ((note,) if note else ()), **columns,
    )  # fmt: skip


def _select_progress(progress: ProgressRecords, order: Ints) -> ProgressRecords:
    """Return the records of these jobs, renumbered from 0."""
    place = np.full(len(progress.steps), -1, np.int64)
    place[order] = np.arange(len(order))
    size, run = place[progress.size_job], place[progress.run_job]
    return ProgressRecords(
        steps=progress.steps[order], cost_s=progress.cost_s[order], cooldown_s=progress.cooldown_s[order],
        size_job=size[size >= 0], size_gpus=progress.size_gpus[size >= 0], steps_per_s=progress.steps_per_s[size >= 0],
        run_job=run[run >= 0], run_gpus=progress.run_gpus[run >= 0], run_after_s=progress.run_after_s[run >= 0],
        run_s=progress.run_s[run >= 0], rank_gpus=None if progress.rank_gpus is None else progress.rank_gpus[order],
    )  # fmt: skip


def of_whole_gpus(trace: Trace) -> Trace:
    """Select the jobs that are not in MIG slices, with a note of how many are left out; unchanged without any.

    Raises:
        UsageError: All are in slices.
    """
    if trace.profile is None or not (sliced := int(np.count_nonzero(trace.profile >= 0))):
        return trace
    if sliced == len(trace):
        raise UsageError(f"{trace.name}: all jobs are in MIG slices", "this agent decides about whole GPUs only")
    note = f"{count_of(sliced, 'job')} in MIG slices {'is' if sliced == 1 else 'are'} excluded"
    return replace(select(trace, trace.profile < 0, note), profile=None, profiles=())


def slice_trace(
    trace: Trace, *, since: float | str | None = None, until: float | str | None = None, vc: str | None = None,
    user: str | None = None, jobs: int | None = None,
) -> Trace:  # fmt: skip
    """Select the first ``jobs`` jobs that meet all conditions. Times stay those of the whole trace.

    Submitted in [since, until): seconds of the trace's time, or text for `parse_trace_time`. ``vc``: the group
    (virtual cluster, partition, queue); what ran in others is kept in `Trace.others`.

    Raises:
        UsageError: No job is left; or there is no such group or user.
    """
    chosen = np.ones(len(trace), np.bool_)
    if since is not None:
        chosen &= trace.submit >= (parse_trace_time(trace, since) if isinstance(since, str) else since)
    if until is not None:
        chosen &= trace.submit < (parse_trace_time(trace, until) if isinstance(until, str) else until)
    for column, name, what in (("group", vc, "virtual cluster"), ("user", user, "user")):
        if name is not None:
            names = getattr(trace, NAMES[column])
            if name not in names:
                raise UsageError(f"{trace.name}: no {what} '{name}'{did_you_mean(name, names)}")
            own = getattr(trace, column) == names.index(name)
            if column == "group":
                trace = replace(trace, others=_runs(trace, chosen & ~own))
            chosen &= own
    if not chosen.any():
        raise UsageError(f"{trace.name}: no job left of {len(trace)}", f"it has jobs submitted {span_text(trace)}")
    rows = np.flatnonzero(chosen)
    return select(trace, rows if jobs is None else rows[:jobs])


def _runs(trace: Trace, jobs: npt.NDArray[np.bool_]) -> OtherRuns:
    """Return the runs of these jobs, where it is recorded when they began, from when they join the queue here on."""
    begin = np.maximum(trace.submit + trace.wait, trace.arrivals)
    rows = np.flatnonzero(jobs & (begin + trace.duration > begin))  # no end goes before its own beginning
    account, qos = (np.full(len(rows), -1) if of is None else of[rows] for of in (trace.account, trace.qos))
    begin, duration, limit = begin[rows], trace.duration[rows], trace.limit[rows]
    limit = np.where(np.isnan(limit), duration, limit)
    return OtherRuns(trace.user[rows], account, qos, gpus_used(trace)[rows], begin, begin + duration, limit)


def parse_trace_time(trace: Trace, text: str) -> float:
    """Parse a trace time into seconds: ``2017-10-01T12:00`` (UTC by default), or ``30d`` after its first submission.

    Raises:
        UsageError: Neither; or a date where the trace has no calendar.
    """
    text = text.strip()
    if _DATE.fullmatch(text) is None:
        try:
            return float(trace.submit[0]) + parse_duration(text)
        except ValueError:
            raise UsageError(
                f"'{text}' is neither a time nor a span", "for example 2017-10-01T12:00, or 30d after the start"
            ) from None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a time", "for example 2017-10-01T12:00") from None
    if trace.epoch is None:
        raise UsageError(f"{trace.name} has no calendar", "use for example 30d (after its first submission)")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() - trace.epoch


def span_text(trace: Trace) -> str:
    """Return the period of submissions, for people."""
    first, last = float(trace.submit[0]), float(trace.submit[-1])
    if trace.epoch is None:
        return f"from {first:.0f} s to {last:.0f} s"
    times = (in_calendar(trace.epoch + t) for t in (first, last))
    dates = [datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M") for t in times]
    return f"from {dates[0]} to {dates[1]}"


def gpu_seconds(trace: Trace) -> float:
    """Return the sum of GPUs (or used parts of them, or MIG slices) times run time, in GPU seconds."""
    return float(np.sum(gpus_used(trace) * trace.duration))


def gpus_used(trace: Trace) -> Floats:
    """Return the GPUs that each job uses: parts of shared ones, and MIG slices by their share of a GPU."""
    used: Floats = trace.gpus * (trace.gpu_milli / 1000.0)
    if trace.profile is not None:  # the last one, of -1, stands for whole GPUs
        used = used * np.array([gpus_counted(1, name) for name in (*trace.profiles, "")])[trace.profile]
    return used


def span_s(trace: Trace) -> float:
    """Return seconds from the first to the last submission."""
    return float(trace.submit[-1] - trace.submit[0])


def offered_load(trace: Trace, gpus: int) -> float:
    """Return GPU seconds over the capacity of ``gpus`` GPUs in the span; infinite where all jobs come at once."""
    span = span_s(trace)
    return gpu_seconds(trace) / (gpus * span) if span > 0 else math.inf


def nodes_for_load(trace: Trace, gpus_per_node: int, load: float) -> int:
    """Return the number of nodes for which the offered load is nearest to ``load``; arrivals are unchanged.

    At least as many as the largest job needs, so the load may come out lower: `offered_load` says what it is.

    Raises:
        UsageError: The load is not above 0, or all jobs are submitted at once.
    """
    _check_load(trace, load)
    nodes = round(gpu_seconds(trace) / (load * gpus_per_node * span_s(trace)))
    largest = trace.gpus if trace.profile is None else np.where(trace.profile < 0, trace.gpus, gpus_used(trace))
    return max(1, nodes, math.ceil(float(largest.max()) / gpus_per_node))


def scale_arrivals(trace: Trace, gpus: int, load: float) -> Trace:
    """Scale the times between submissions so that the jobs offer ``load``.

    ``gpus``: of the cluster. Recorded waiting times and the calendar no longer hold and are dropped.

    Raises:
        UsageError: The load is not above 0, or all jobs are submitted at once.
    """
    _check_load(trace, load)
    factor = offered_load(trace, gpus) / load
    first = trace.submit[0]
    note = f"times between submissions x {factor:.6g}, for an offered load of {load:g} on {count_of(gpus, 'GPU')}"
    return replace(
        trace, submit=first + (trace.submit - first) * factor, wait=np.full(len(trace), np.nan), epoch=None,
        others=NO_RUNS, notes=(*trace.notes, note),
    )  # fmt: skip


def _check_load(trace: Trace, load: float) -> None:
    if not (0 < load < math.inf):
        raise UsageError(f"a load of {load:g} cannot be reached", "for example 0.9")
    if span_s(trace) <= 0 or gpu_seconds(trace) <= 0:
        raise UsageError(f"{trace.name}: has no load to scale", "it needs GPU jobs submitted at different times")
