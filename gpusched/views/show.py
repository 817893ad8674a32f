"""The page of one job: its request, its nodes and its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpusched.model.arrays import indices_of
from gpusched.model.events import Event
from gpusched.model.forecast import SpreadStart
from gpusched.model.indices import expand_spans
from gpusched.model.interference import PlaceCost
from gpusched.model.jobs import DependencyKind, JobRecord, JobSpec
from gpusched.model.outputs import shown_path
from gpusched.model.progress import JobProgress
from gpusched.model.slices import gpu_label
from gpusched.model.slurm import SlurmFacts
from gpusched.model.units import count_of, format_duration, format_memory, iso_utc, local_time
from gpusched.views import common
from gpusched.views.jobs import (
    elapsed_s,
    job_dict,
    memory_is_counted,
    preemptions_line,
    progress_line,
    queue_position,
    resizes_line,
    resources_line,
)
from gpusched.views.why import sizes_dict, spread_dict, spread_lines

if TYPE_CHECKING:
    from gpusched.sched.sizing.explain import SizesNow


_TASKS_WIDTH = 100


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One job with all its details.

    ``tasks``: the whole array, if one was requested. ``progress``: of its latest attempt that reports any; ``speeds``:
    GPUs -> steps per second. ``sizes``: of a pending resizable job, the sizes that its policy would give it.
    ``partner``: the job that shares its GPUs, and ``shared``: which ones and the cost, as a line. ``spreads``: when a
    pending job would start at each spread. ``place_cost``: the cost of its placement, if known.
    """

    job: JobRecord
    now: float
    events: tuple[Event, ...] = ()
    energy_j: float | None = None
    tasks: tuple[JobRecord, ...] = ()
    progress: JobProgress | None = None
    speeds: Mapping[int, float] = {}
    sizes: SizesNow | None = None
    partner: str | None = None
    shared: str = ""
    spreads: tuple[SpreadStart, ...] = ()
    place_cost: PlaceCost | None = None
    warning: str = ""


def page_dict(page: Page) -> dict[str, Any]:
    """Return everything as JSON: the keys of ``status --json``, request, allocation, attempts and events."""
    job = page.job
    slower = None if page.place_cost is None else page.place_cost.slower
    fields = job_dict(job, page.now, page.energy_j, progress=page.progress, partner=page.partner, slower=slower)
    return fields | {
        "spec": msgspec.to_builtins(job.spec) | {"begin_time": iso_utc(job.spec.begin_time)},
        "allocation": [
            {"rank": p.rank, "node": p.node, "gpus": list(p.gpus), "cores": p.cores, "memory_mib": p.memory_mib}
            | ({"slices": [gpu_label(n, job.spec.profile) for n in p.gpus]} if job.spec.profile else {})
            for p in (job.allocation.parts if job.allocation else ())
        ],
        "excluded_nodes": list(job.excluded_nodes),
        "attempts": _attempts(page.events),
        "events": [
            {"time": iso_utc(e.time), "kind": e.kind, "node": e.node, "user": e.user, "data": e.data}
            for e in page.events
        ],
        "place_costs": [msgspec.to_builtins(cost) for cost in (page.place_cost.costs if page.place_cost else ())],
        "sizes_now": None if page.sizes is None else sizes_dict(page.sizes),
        "spreads": [spread_dict(start) for start in page.spreads],
        "speeds": {str(gpus): speed for gpus, speed in sorted(page.speeds.items())},
        "tasks": [job_dict(j, page.now) for j in page.tasks],
    }


def _attempts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return one entry per start: nodes, time and outcome."""
    attempts: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "starting":
            nodes = event.data.get("nodes") or {}
            attempts.append(
                {
                    "attempt": event.data.get("attempt"),
                    "time": iso_utc(event.time),
                    "nodes": list(nodes),
                    "outcome": None,
                    "message": None,
                }
            )
        elif attempts and event.kind in ("ended", "requeued"):
            attempts[-1]["outcome"] = event.data.get("outcome") or event.data.get("to")
            attempts[-1]["message"] = event.data.get("message") or event.data.get("reason") or None
    return attempts


def page_lines(page: Page) -> Iterator[str]:
    """Return the page for people, line by line."""
    width = 13
    for label, value in _fields(page):
        yield f"{label + ':':<{width}} {common.clean(value)}"
    if page.tasks:
        states: dict[str, list[int]] = {}
        for task in page.tasks:
            states.setdefault(task.state, []).extend(expand_spans(indices_of(task)))
        counts = ((state, len(indices), common.ranges(indices)) for state, indices in states.items())
        yield f"{'tasks:':<{width}} " + ", ".join(
            f"{state} [{common.shorten(text, _TASKS_WIDTH)}] ({count})" if count > 1 else f"{state} [{text}]"
            for state, count, text in counts
        )
    if page.events:
        yield "events:"
        for event in page.events:
            yield f"  {local_time(event.time)}  {common.clean(event_line(event))}"
    if page.warning:
        yield f"warning: {page.warning}"


def _fields(page: Page) -> Iterator[tuple[str, str]]:
    job, spec = page.job, page.job.spec
    yield "job", f"{job.id}  {spec.name}"
    yield "state", str(job.state) + (f" ({reason})" if (reason := queue_position(job)) else "")
    yield "user", job.user
    yield "partition", spec.partition + (f", flavor {spec.flavor}" if spec.flavor else "")
    yield "requested", f"{resources_line(job)}, {format_duration(spec.time_limit_s)}"
    if job.slurm is None:
        yield "image", spec.image or common.UNKNOWN
        if spec.script is not None:
            lines = spec.script.count("\n") + (not spec.script.endswith("\n"))
            yield "script", f"{count_of(lines, 'line')} (gpusched show {job.id} --script)"
        if spec.function:
            yield "function", f"{spec.function} ({spec.command[-1] if spec.command else common.UNKNOWN})"
        elif spec.script is None or spec.command:
            yield "command" if spec.script is None else "arguments", _command(spec.command)
    else:
        yield from _slurm(job.slurm)
    yield from _optional(job)
    if spec.elastic is not None:
        now = f"; {page.sizes.message}" if page.sizes is not None else f", now {spec.gpus}"
        yield "sizes", f"{common.ranges(spec.elastic.sizes)} GPUs{now}{_ranges(spec)}"
    if line := resizes_line(job):
        yield "resized", line
    for line in spread_lines(page.spreads, page.now):
        yield "placement", line
    for part in job.allocation.parts if job.allocation else ():
        gpus = common.ranges(part.gpus) or ("unknown" if job.slurm and spec.gpus_per_node else "none")
        if spec.profile:
            gpus = ", ".join(gpu_label(number, spec.profile) for number in part.gpus)
        memory = f", {format_memory(part.memory_mib)}" if memory_is_counted(job) else ""
        what = "slices" if spec.profile else "GPUs"
        yield "on", f"{part.node}: {what} {gpus}, {count_of(part.cores, 'core')}{memory}"
    if page.shared:
        yield "shared", page.shared
    if page.place_cost is not None and page.place_cost.lines:
        yield "place", "; ".join(page.place_cost.lines)
    yield "submitted", local_time(job.submit_time)
    yield "started", local_time(job.start_time) + (f" (attempt {job.attempt})" if job.attempt > 1 else "")
    yield "ended", local_time(job.end_time)
    yield "elapsed", format_duration(elapsed_s(job, page.now))
    yield from _progress(page)
    yield "exit code", common.UNKNOWN if job.exit_code is None else str(job.exit_code)
    yield "energy", common.energy(page.energy_j if page.energy_j is not None else job.energy_j)
    if job.policy:
        yield "decided by", f"{job.policy} {job.policy_version or ''}".strip()


def _slurm(facts: SlurmFacts) -> Iterator[tuple[str, str]]:
    reason = f" ({facts.reason})" if facts.reason else ""
    factor = f", site factor {facts.site_factor}" if facts.site_factor else ""
    yield "in Slurm", f"{facts.state}{reason}, priority {facts.priority}{factor}"
    yield "account", facts.account + (f", qos {facts.qos}" if facts.qos else "")
    if len(facts.partitions) > 1:
        yield "partitions", ", ".join(facts.partitions)
    if facts.reservation:
        yield "reservation", facts.reservation
    if facts.pinned:
        yield "sent to", f"{common.compress_names(facts.pinned)}, {local_time(facts.pinned_at)}"
    if facts.restarts or not facts.requeue:
        yield "requeued", count_of(facts.restarts, "time") if facts.requeue else "never: --no-requeue"


def _progress(page: Page) -> Iterator[tuple[str, str]]:
    progress = page.progress
    if progress is None:
        return
    ended = page.job.end_time
    if line := progress_line(progress, page.now if ended is None else ended):
        yield "progress", line
    if page.job.spec.elastic is not None and page.speeds:
        yield (
            "speeds",
            ", ".join(f"{count_of(gpus, 'GPU')} {speed:.3g} steps/s" for gpus, speed in sorted(page.speeds.items())),
        )
    if progress.saved_step is not None:
        yield "saved", f"up to step {progress.saved_step:,.0f}, {local_time(progress.saved_at)}"
    if progress.trouble:
        yield "job file", progress.trouble


def private_fields(job: JobRecord) -> list[tuple[str, str]]:
    """Return what the job runs and where its output goes: hidden from viewers without an account here."""
    spec = job.spec
    return [
        ("image", spec.image or ""),
        ("command", _command(spec.command) if job.slurm is None else ""),
        ("workdir", spec.workdir or ""),
        ("output", shown_path(spec.output, job) or ""),
        ("error", shown_path(spec.error, job) or ""),
        ("env", " ".join(spec.env)),
        ("mounts", _mounts(spec)),
        ("comment", spec.comment),
        ("script", spec.script or ""),
    ]


def _mounts(spec: JobSpec) -> str:
    return " ".join(f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in spec.mounts)


def _optional(job: JobRecord) -> Iterator[tuple[str, str]]:
    spec = job.spec
    yield from (
        (label, value)
        for label, value in (
            ("workdir", spec.workdir or ""),
            ("output", shown_path(spec.output, job) or ""),
            ("errors", shown_path(spec.error, job) or ""),
            ("env", " ".join(spec.env)),
            ("secrets", " ".join(spec.secret_names)),
            ("mounts", _mounts(spec)),
            ("depends on", ", ".join(d.text for d in spec.dependencies if d.kind is not DependencyKind.CHAIN)),
            ("chain", _link(job)),
            ("only on", ", ".join(spec.nodelist)),
            ("GPU types", ", ".join(spec.gpu_types)),
            ("not on", ", ".join(dict.fromkeys((*spec.exclude, *job.excluded_nodes)))),
            ("not before", local_time(job.eligible_time) if _is_delayed(job) else ""),
            ("priority", str(job.priority) if job.priority else ""),
            ("held by", job.held_by),
            ("group", spec.group),
            ("class", spec.qos),
            ("preemptible", "yes" if spec.preemptible else ""),
            ("exclusive", "yes" if spec.exclusive else ""),
            ("may share", f"{spec.share}, {format_memory(spec.gpu_memory_mib or 0)} of each GPU" if spec.share else ""),
            (
                "max spread",
                spec.max_spread + (f", on up to {count_of(spec.max_nodes, 'node')}" if spec.max_nodes else ""),
            ),
            ("stopped", preemptions_line(job)),
            ("comment", spec.comment),
        )
        if value
    )


def _link(job: JobRecord) -> str:
    if not any(d.kind is DependencyKind.CHAIN for d in job.spec.dependencies):
        return ""
    return f"link {job.array_index}; the next starts when it ends or reaches its time limit, unless it fails"


def _is_delayed(job: JobRecord) -> bool:
    """Return whether the job has a begin time: Slurm records an eligible time for every job."""
    return bool(job.eligible_time) and (job.slurm is None or (job.eligible_time or 0.0) > job.submit_time)


def _command(command: Sequence[str]) -> str:
    import shlex

    return common.shorten(shlex.join(command), 400) if command else "(default of the image)"


def event_line(event: Event) -> str:
    """Return the event in one line."""
    data = dict(event.data)
    words = [event.kind]
    if event.node:
        words.append(f"on {event.node}")
    if isinstance(nodes := data.pop("nodes", None), dict):
        words.append("on " + ", ".join(f"{n} (GPUs {common.ranges(g)})" if g else n for n, g in nodes.items()))
    before, after = data.pop("from", None), data.pop("to", None)
    if before is not None and after is not None:
        words.append(f"{before} -> {after}")
    words += [f"{k}={_plain(k, v)}" for k, v in data.items() if v not in ("", None)]
    return " ".join(words)


def _plain(key: str, value: Any) -> Any:
    """Return a value for people: Unix times as local time, MiB as memory, others unchanged."""
    if isinstance(value, dict):
        return {k: _plain(k, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(key, v) for v in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if key.endswith("_mib"):
        return format_memory(int(value))
    return local_time(value) if _UNIX_TIMES[0] <= value < _UNIX_TIMES[1] and not key.endswith("_s") else value


_UNIX_TIMES = (1e9, 1e10)  # Unix seconds of the years 2001 to 2286; no count in an event is as large


def _ranges(spec: JobSpec) -> str:
    """Return the core and memory ranges of a resizable job and what it has; "" if they follow its GPUs."""
    elastic, (cores, memory), text = spec.elastic, spec.amounts, ""
    if elastic is not None and elastic.cores is not None:
        text += f"; {elastic.cores[0]}-{elastic.cores[1]} CPU cores, now {cores}"
    if elastic is not None and elastic.memory_mib is not None:
        minimum, maximum = map(format_memory, elastic.memory_mib)
        text += f"; {minimum}-{maximum} of memory, now {format_memory(memory)}"
    return text
