"""gpusched's own history: the jobs of its store with their submissions and real run times."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.errors import GpuschedError, NoHistory
from gpusched.model.ids import id_key
from gpusched.model.jobs import ACTIVE, ENDED, DependencyKind, JobRecord, JobSpec
from gpusched.model.progress import JobProgress, speeds_of
from gpusched.model.units import count_of
from gpusched.queue.store import DATABASE, Reader, RunRecord
from gpusched.sched.sizing.live import pace_of
from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.trace import Ints, ProgressRecords, Trace


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace of a state folder (or of its database): groups are partitions, the epoch is the first submission.

    A job's run time is the sum over its attempts; of a resizable one, what all its work takes at its base size, by its
    own pace at each (see `_scale`), without the times of stopping. Steps that a job reported twice count once.
    One with a begin time counts as submitted then. Jobs that never ran, and those that have not ended, are left out.
    ``strict`` changes nothing: the store has no bad rows.

    Raises:
        GpuschedError: There is no store, or it has no such job.
    """
    folder = path if path.is_dir() else path.parent
    reader = Reader.open(folder)
    if reader is None:
        raise GpuschedError(f"{folder}: there is no {DATABASE}", "name a state folder of gpusched")
    try:
        return trace_of(reader, name=f"history of {folder}")
    finally:
        reader.close()


def trace_of(reader: Reader, *, name: str, since: float | None = None, until: float | None = None) -> Trace:
    """Return the trace of an open store: jobs submitted in [``since``, ``until``), Unix seconds.

    Raises:
        NoHistory: No such job.
    """
    past = _Past.of(reader, since or 0.0)
    jobs = [j for j in reader.rows(states=ENDED, since=since) if (since is None or _submit(j) >= since)
            and (until is None or _submit(j) < until)]  # fmt: skip
    ran = {job.id: past.work_s(job) for job in jobs}
    kept = [j for j in jobs if ran[j.id] > 0]
    if not kept:
        raise NoHistory(f"{name}: no job has run and ended")
    kept.sort(key=lambda job: (_submit(job), id_key(job.id)))
    notes = []
    if left_out := sum(job.count for job in jobs) - len(kept):
        notes.append(f"{count_of(left_out, 'job')} {LEFT_OUT} {'is' if left_out == 1 else 'are'} excluded")
    submits, durations = [_submit(job) for job in kept], [ran[job.id] for job in kept]
    trace = _assembled(name, kept, submits, durations, past.first_start, notes, reader.array_limits())
    return past.with_progress(trace, kept)


def window_of(reader: Reader, *, name: str, since: float, until: float) -> tuple[Trace, int]:
    """Return `trace_of` plus earlier jobs that ran or waited when the window began, and their number.

    They are the trace's first rows, with what was left of their run times then: those that ran, in the order in which
    they began, and those that waited, in order of submission (`carried_first`). One that has not ended is taken to end
    with the window. Jobs that have waited ever since are left out, as their run times are unknown.

    Raises:
        NoHistory: No job was submitted in the window and has run and ended.
    """
    new = trace_of(reader, name=name, since=since, until=until)
    before = [job for job in reader.rows(since=since) if _submit(job) < since]
    # Not of all jobs that ever were: there may be millions.
    begin = min((job.submit_time for job in before), default=since)
    past = _Past.of(reader, begin)
    past, first_start = past.cut(until), past.first_start
    before = [job for job in before if job.id in past.runs]
    left = {job.id: past.work_s(job, since) for job in before}
    before = [job for job in before if left[job.id] > 0]
    ran = {job.id for job in before if first_start[job.id] < since}
    before.sort(key=lambda j: (j.id not in ran, first_start[j.id] if j.id in ran else _submit(j), id_key(j.id)))
    known = set(new.ids)
    after = {job.id: job for job in reader.rows(states=ENDED, since=since) if job.id in known}
    jobs = [*before, *(after[job_id] for job_id in new.ids)]
    submits = [_submit(job) for job in jobs]
    durations = [left[job.id] for job in before] + new.duration.tolist()
    notes = [note for note in new.notes if LEFT_OUT in note]
    # The first start of a job of the window may come after it.
    trace = _assembled(name, jobs, submits, durations, first_start, notes, reader.array_limits())
    trace = past.with_progress(trace, jobs)
    limit = trace.limit.copy()  # of the limit, too, what was left when the window began
    limit[: len(before)] -= [past.had_s(job, since) for job in before]
    trace = replace(trace, limit=np.maximum(limit, 1.0))
    return carried_first(trace, len(ran), len(before), since), len(before)


def carried_first(trace: Trace, running: int, carried: int, since: float) -> Trace:
    """Let the first ``carried`` jobs join the queue at ``since`` (Unix seconds), which becomes the trace's epoch.

    Those of them that ran then, the first ``running``, join a moment before the others: so they have their GPUs when a
    policy first decides about jobs that waited, whatever it prefers.
    """
    if carried == 0:
        return trace
    lead_s = EARLIER_S if 0 < running < carried else 0.0
    epoch = since - lead_s
    submit = trace.submit + (trace.epoch or 0.0) - epoch
    arrival = submit.copy()
    arrival[:running], arrival[running:carried] = 0.0, lead_s
    return replace(trace, submit=submit, arrival=np.maximum.accumulate(arrival), epoch=epoch)


LEFT_OUT = "that never ran"
EARLIER_S = 0.001


def _assembled(
    name: str, jobs: list[JobRecord], submits: list[float], durations: list[float], first_start: dict[str, float],
    notes: list[str], array_limits: Mapping[str, int] = {},
) -> Trace:  # fmt: skip
    """Return the trace of these jobs, in this order; ``array_limits``: array -> how many tasks may run at once."""
    submit = np.array(submits)
    depends_on, more = _dependencies(jobs)

    def whole(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    trace = assemble(
        name=name,
        epoch=float(submit[0]),
        ids=tuple(job.id for job in jobs),
        submit=submit - submit[0],
        duration=np.array(durations),
        gpus=whole([_size(job) for job in jobs]),
        names={
            "user": intern([job.user for job in jobs]),
            "group": intern([job.spec.partition for job in jobs]),
            "model": intern([job.spec.name for job in jobs]),
            "gpu_type": intern(["|".join(job.spec.gpu_types) for job in jobs]),
            "status": intern([str(job.state) for job in jobs]),
        },
        columns={
            "limit": np.array([float(job.spec.time_limit_s) for job in jobs]),
            "nodes": whole([_nodes(job) for job in jobs]),
            "cores": whole([_of_all(job, job.spec.cores_per_node, "base_cores") for job in jobs]),
            "memory_mib": whole([_of_all(job, job.spec.memory_mib_per_node, "base_memory_mib") for job in jobs]),
            "depends_on": np.where(depends_on < np.arange(len(depends_on)), depends_on, -1),
            "wait": np.maximum(0.0, np.array([first_start[job.id] for job in jobs]) - submit),
        },
        notes=(*more, *notes),
    )
    (account, accounts), (qos, classes) = (intern([getattr(job.spec, n) for job in jobs]) for n in ("group", "qos"))
    policy, policies = intern([job.policy or "" for job in jobs])
    profile, profiles = intern([job.spec.profile for job in jobs])
    priority, tasks = whole([job.priority for job in jobs]), Counter(job.array_id for job in jobs)
    # One that binds nothing is left out: replays without limits are faster.
    bounds = [array_limits.get(job.array_id or "", tasks[job.array_id]) for job in jobs]
    bounded = np.array([bound < tasks[job.array_id] for job, bound in zip(jobs, bounds, strict=True)], np.bool_)
    specs = [job.spec for job in jobs]
    lists, node_lists = intern(["|".join(names) for spec in specs for names in (spec.nodelist, spec.exclude)])
    split = [spec.max_nodes or -1 for spec in specs]
    wide = [spec.nodes > 1 or spec.max_nodes is not None or spec.elastic is not None for spec in specs]
    waits = [spec.placement_wait_s if spec.placement_wait_s is not None else -1 for spec in specs]
    one_rack = np.array([spec.max_spread == "rack" for spec in specs], np.bool_) & wide
    exclusive = np.array([spec.exclusive for spec in specs], np.bool_)
    share_mib = whole([-1 if job.spec.gpu_memory_mib is None else job.spec.gpu_memory_mib for job in jobs])
    return replace(
        trace, preemptible=np.array([job.spec.preemptible for job in jobs], np.bool_), account=account, qos=qos,
        accounts=accounts, classes=classes, priority=priority if priority.any() else None,
        array=intern([job.array_id or "" for job in jobs])[0] if bounded.any() else None,
        array_limit=np.where(bounded, whole(bounds), -1) if bounded.any() else None, policy=policy, policies=policies,
        share_mib=_if_any(share_mib),
        nodelist=_if_any(lists[::2]), exclude=_if_any(lists[1::2]), node_lists=node_lists,
        max_nodes=_if_any(whole(split)), one_rack=one_rack if one_rack.any() else None,
        exclusive=exclusive if exclusive.any() else None,
        placement_wait=_if_any(np.where(wide, np.array(waits, np.int64), -1)),
        profile=profile if profiles else None, profiles=profiles,
        command=intern([_program(job.spec) for job in jobs])[0],
        image=intern([job.spec.image or "" for job in jobs])[0],
    )  # fmt: skip


def _if_any(column: Ints) -> Ints | None:
    """Return the column; None where it is -1 of every job."""
    return column if (column >= 0).any() else None


def _program(spec: JobSpec) -> str:
    """Return a digest of what a job runs: its script, function, and command line; numbers in it count."""
    parts = (spec.script or "", spec.function, *spec.command)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if any(parts) else ""


def as_submitted(jobs: list[JobRecord]) -> Trace:
    """Return the trace of at least one job: of ended ones the last run time; those that run are endless.

    Others have not begun. Of a resized one all attempts count that its time limit counted.
    """
    jobs = sorted(jobs, key=lambda job: (_submit(job), id_key(job.id)))
    start, ran = dict.fromkeys((job.id for job in jobs), np.inf), dict.fromkeys((job.id for job in jobs), 1.0)
    for job in jobs:
        if job.state in ENDED and job.start_time is not None and job.end_time is not None:
            start[job.id], ran[job.id] = job.start_time, max(job.ran_s, 1e-3)
            ran[job.id] += job.resizes.had_s if job.resizes is not None else 0.0
        elif job.state in ACTIVE and job.start_time is not None:
            start[job.id], ran[job.id] = job.start_time, np.inf
    return _assembled("queue", jobs, [_submit(job) for job in jobs], list(ran.values()), start, [])


def _of_all(job: JobRecord, per_node: int, base: str) -> int:
    return job.spec.nodes * per_node if job.spec.elastic is None else int(getattr(job.spec.elastic, base))


def _submit(job: JobRecord) -> float:
    return max(job.submit_time, job.spec.begin_time or 0.0)


class _Past(NamedTuple):
    """Attempts since a time, with their progress; unended ones are taken to end at ``until``."""

    runs: dict[str, list[RunRecord]]
    first_start: dict[str, float]
    progress: dict[str, tuple[JobProgress, ...]]
    until: float | None

    @classmethod
    def of(cls, reader: Reader, since: float) -> _Past:
        runs: dict[str, list[RunRecord]] = {}
        first: dict[str, float] = {}
        for run in reader.runs(since, np.inf):
            first.setdefault(run.job_id, run.start_time)
            runs.setdefault(run.job_id, []).append(run)
        return cls(runs, first, reader.progress_since(since), None)

    def cut(self, until: float) -> _Past:
        """Return what was before ``until``."""
        before = {job_id: [run for run in runs if run.start_time < until] for job_id, runs in self.runs.items()}
        return self._replace(runs={job_id: runs for job_id, runs in before.items() if runs}, until=until)

    def work_s(self, job: JobRecord, since: float = 0.0) -> float:
        """Return the seconds that a job's work after ``since`` takes at its `_size`."""
        scale = _scale(job, self.progress.get(job.id, ()))
        return sum((run.work_s * scale(run.gpus) for run in self.attempts(job, since)), 0.0)

    def attempts(self, job: JobRecord, since: float = 0.0) -> list[_Attempt]:
        """Return the work of its attempts after ``since``."""
        by_attempt = {one.attempt: one for one in self.progress.get(job.id, ())}
        found = []
        for run in self.runs.get(job.id, ()):
            end = self._end(run)
            if end is None:
                continue
            if run.worked_until is not None:
                end = min(end, run.worked_until)
            else:
                end -= _made_again_s(by_attempt.get(run.attempt), by_attempt.get(run.attempt + 1))
            begin = max(run.start_time, since)
            found.append(_Attempt(round(run.gpus), begin, max(0.0, end - begin)))
        return found

    def had_s(self, job: JobRecord, before: float) -> float:
        """Return the seconds of a job's limit used by then."""
        if job.resizes is None:
            return max(0.0, before - job.start_time) if job.start_time else 0.0
        ran = ((run, self._end(run)) for run in self.runs[job.id])
        return sum(max(0.0, min(before, end) - run.start_time) for run, end in ran if end is not None)

    def _nodes_of(self, job: JobRecord) -> set[str]:
        return {node for run in self.runs.get(job.id, ()) for node in run.nodes}

    def _end(self, run: RunRecord) -> float | None:
        if self.until is None:
            return run.end_time
        return self.until if run.end_time is None else min(run.end_time, self.until)

    def with_progress(self, trace: Trace, jobs: Sequence[JobRecord]) -> Trace:
        """Add these jobs' nodes to the trace, and reported progress, if there is any or jobs are resizable."""
        known = {text: at for at, text in enumerate(trace.node_lists)}
        ran_on = [known.setdefault("|".join(sorted(self._nodes_of(job))), len(known)) for job in jobs]
        trace = replace(trace, ran_on=np.array(ran_on, np.int64), node_lists=tuple(known))
        if not any(job.id in self.progress or job.spec.elastic is not None for job in jobs):
            return trace
        sizes: list[tuple[int, int, float]] = []
        runs: list[tuple[int, int, float, float]] = []
        for row, job in enumerate(jobs):
            speeds = speeds_of(self.progress.get(job.id, ()))
            sizes += [(row, gpus, speeds.get(gpus, np.nan)) for gpus in _sizes(job)]
            runs += [(row, r.gpus, r.begin - _submit(job), r.work_s) for r in self.attempts(job)]
        size, run = np.array(sizes, np.float64).reshape(-1, 3), np.array(runs, np.float64).reshape(-1, 4)
        last = [self.progress.get(job.id, ())[-1:] for job in jobs]
        costs = [job.resizes.cost_s if job.resizes is not None else None for job in jobs]
        ranks = np.array([job.spec.elastic.rank_gpus if job.spec.elastic else 0 for job in jobs], np.int64)
        progress = ProgressRecords(
            steps=np.array([one[0].step if one else None for one in last], np.float64),
            cost_s=np.array(costs, np.float64),
            cooldown_s=np.array([job.spec.elastic.cooldown_s if job.spec.elastic else 0 for job in jobs], np.float64),
            size_job=size[:, 0].astype(np.int64), size_gpus=size[:, 1].astype(np.int64), steps_per_s=size[:, 2],
            run_job=run[:, 0].astype(np.int64), run_gpus=run[:, 1].astype(np.int64), run_after_s=run[:, 2],
            run_s=run[:, 3], rank_gpus=ranks if ranks.any() else None,
        )  # fmt: skip
        resizable = sum(job.spec.elastic is not None for job in jobs)
        reporting = int(np.isfinite(progress.steps).sum())
        note = f"{count_of(reporting, 'job')} reported progress; {resizable} resizable: {OWN_PACE}"
        return replace(trace, progress=progress, notes=(*trace.notes, note))


class _Attempt(NamedTuple):
    """Useful work of an attempt: its GPUs, begin (Unix seconds), and seconds."""

    gpus: int
    begin: float
    work_s: float


OWN_PACE = (
    "they run at their own pace at each size, interpolated as a power between sizes, or as GPUs ** 0.8 if unknown"
)


def _size(job: JobRecord) -> int:
    """Return the number of GPUs that the job's run time refers to."""
    return job.spec.gpus if job.spec.elastic is None else job.spec.elastic.base_gpus


def _nodes(job: JobRecord) -> int:
    """Return the nodes of the job at its `_size`; 0: the fewest."""
    if job.spec.elastic is None:
        return job.spec.nodes if job.spec.max_nodes is None else 0
    # At which number of nodes a job that a resize stops had its base size is forgotten: the fewest, as it is started.
    return job.spec.elastic.base_gpus // job.spec.elastic.rank_gpus if job.spec.elastic.rank_gpus else 0


def _sizes(job: JobRecord) -> tuple[int, ...]:
    return (job.spec.gpus,) if job.spec.elastic is None else job.spec.elastic.sizes


def _scale(job: JobRecord, progress: Sequence[JobProgress]) -> Callable[[int], float]:
    """Return a job's speed as a function of its GPUs, relative to its `_size`, as size policies estimate it."""
    speeds, own = speeds_of(progress), _size(job)
    if job.spec.elastic is None or own < 1:
        return lambda gpus: 1.0
    return lambda gpus: 1.0 if gpus == own else pace_of(speeds, gpus) / pace_of(speeds, own)


def _made_again_s(one: JobProgress | None, after: JobProgress | None) -> float:
    """Return seconds of an attempt of which the next one repeated the steps, from an earlier checkpoint."""
    if one is None or after is None or one.step is None or one.first_step is None or after.first_step is None:
        return 0.0
    pace = speeds_of([one]).get(one.gpus, 0.0)
    return max(0.0, one.step - max(after.first_step, one.first_step)) / pace if pace > 0 else 0.0


def _dependencies(jobs: list[JobRecord]) -> tuple[Ints, list[str]]:
    """Return each job's last-ended dependency as a row; ``after`` (started) is dropped."""
    last: dict[str | None, int] = {}  # of an array, its task that ended last: as many may depend on it as it has
    for row, job in enumerate(jobs):
        last[job.array_id] = max(last.get(job.array_id, row), row, key=lambda r: jobs[r].end_time or 0.0)
    last |= {job.id: row for row, job in enumerate(jobs)}
    sizes: dict[str | None, int] = dict(Counter(job.array_id for job in jobs))
    sizes |= dict.fromkeys((job.id for job in jobs), 1)
    found = np.full(len(jobs), -1, np.int64)
    simplified = 0
    for row, job in enumerate(jobs):
        others = [d.job_id for d in job.spec.dependencies if d.kind != DependencyKind.AFTER and d.job_id in last]
        count = sum(sizes[other] for other in others)
        simplified += len(job.spec.dependencies) != count or count > 1
        if others:
            found[row] = max((last[other] for other in others), key=lambda r: jobs[r].end_time or 0.0)
    whose = count_of(simplified, "job's", "jobs'")
    note = f"{whose} dependencies were simplified or dropped"
    return found, [note] if simplified else []
