"""Whether dependencies are met: of single jobs, and of the tasks of an array that share a row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from gpusched.model.arrays import indices_of, split_task_ids
from gpusched.model.indices import Spans, difference, expand_spans, intersection, lowest
from gpusched.model.jobs import ACTIVE, ENDED, Dependency, DependencyKind, JobRecord, JobState

Verdict = tuple[str, str]  # "" met, "waiting" or "never", with a message
BY_TASK = frozenset({DependencyKind.AFTERCORR, DependencyKind.CHAIN})  # each task of an array waits for another one
_CHAIN_ENDS = frozenset({JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.CANCELLED})
_CHUNK = 500


class Dependencies:
    """Evaluates dependencies; looks up each other job once.

    Args:
        lookup: All rows of an id (an array's own: of all its tasks), as `Reader.dependency_rows`.
        queue: All pending and active jobs.
        completed_tasks: As `Reader.completed_tasks`; without it each task is looked up.
    """

    def __init__(
        self,
        lookup: Callable[[str], list[JobRecord]],
        queue: Iterable[JobRecord],
        completed_tasks: Callable[[str, Sequence[int]], dict[int, bool]] | None = None,
    ) -> None:
        self._lookup = cache(lookup)
        self._known: dict[tuple[str, str], Verdict] = {}  # of those that are the same for all jobs
        self._queue = queue
        self._ended_well = completed_tasks or self._ended_well_by_lookup
        self._of_name: dict[tuple[str, str], _SameName] | None = None

    def of(self, job: JobRecord) -> Verdict:
        """Return the verdict on a job, or on a single task."""
        return self._evaluate_all(job, job.spec.dependencies)

    def of_tasks(self, row: JobRecord, limit: int | None) -> list[tuple[int, Verdict]]:
        """Return up to ``limit`` tasks of a row that could start; if none could, one that has the reason.

        With None, return all tasks, startable or not.
        """
        own = [d for d in row.spec.dependencies if d.kind in BY_TASK]
        shared = self._evaluate_all(row, [d for d in row.spec.dependencies if d.kind not in BY_TASK])
        if not own or shared[0] == "never":
            count = row.count if limit is None else 1 if shared[0] else limit
            return [(index, shared) for index in lowest(row.tasks, count)]
        startable: list[tuple[int, Verdict]] = []
        blocked: list[tuple[int, Verdict]] = []
        for index, verdict in self._by_task(row, own):
            verdict = verdict if verdict[0] == "never" or not shared[0] else shared
            (blocked if verdict[0] else startable).append((index, verdict))
            if limit is not None and (
                verdict[0] == "waiting" or len(startable) >= limit
            ):  # the rest of the row waits, too
                break
        return sorted(startable + blocked) if limit is None else startable or blocked[-1:]

    def _by_task(self, row: JobRecord, own: Sequence[Dependency]) -> Iterator[tuple[int, Verdict]]:
        """Yield all tasks of a row with their verdicts, first those with ended partners."""
        if any(d.kind is DependencyKind.CHAIN for d in own):
            (head,) = lowest(row.tasks, 1)
            of_head = self._evaluate_all(row, own, head)
            behind = of_head if of_head[0] == "never" else ("waiting", "chain: waits for the previous link")
            yield from ((index, of_head if index == head else behind) for index in expand_spans(row.tasks))
            return
        waiting: Spans = ()
        for dependency in own:
            partners = (other for other in self._partners(dependency) if other.state not in ENDED)
            spans = sorted(span for other in partners for span in indices_of(other))
            waiting = tuple(sorted((*waiting, *intersection(difference(row.tasks, waiting), tuple(spans)))))
        left = expand_spans(difference(row.tasks, waiting))
        while chunk := list(islice(left, _CHUNK)):
            yield from self._by_partner(row, own, chunk)
        array = next((d.job_id for d in own if self._partners(d)), "")
        for index in expand_spans(waiting):
            yield index, ("waiting", f"{own[0].kind}: waits for job {array}_{index}")

    def _by_partner(self, row: JobRecord, own: Sequence[Dependency], some: list[int]) -> Iterator[tuple[int, Verdict]]:
        found: dict[int, Verdict] = dict.fromkeys(some, ("", ""))
        for dependency in own:
            if not self._partners(dependency):
                verdict = self._evaluate(row, dependency, None)
                found = {i: v if v[0] or not verdict[0] else verdict for i, v in found.items()}
                continue
            well = self._ended_well(dependency.job_id, some)
            found |= {i: ("never", _not_well(dependency, i, well)) for i in some if not well.get(i, False)}
        yield from found.items()

    def _partners(self, dependency: Dependency) -> list[JobRecord]:
        """Return the rows of an array whose tasks are waited for one by one; []: all wait for the same job or task."""
        others = [] if split_task_ids(dependency.job_id)[1] else self._lookup(dependency.job_id)
        return others if others and others[0].array_id is not None else []

    def _ended_well_by_lookup(self, array_id: str, indices: Sequence[int]) -> dict[int, bool]:
        found = ((i, self._lookup(f"{array_id}_{i}")) for i in indices)
        return {i: jobs[0].state is JobState.COMPLETED for i, jobs in found if jobs and jobs[0].state in ENDED}

    def _evaluate_all(self, job: JobRecord, dependencies: Sequence[Dependency], index: int | None = None) -> Verdict:
        worst = ("", "")
        index = job.array_index if index is None else index
        for dependency in dependencies:
            key = dependency.job_id, dependency.kind._value_  # which has its hash, as the kind has not
            verdict = self._known.get(key) or self._evaluate(job, dependency, index)
            if verdict[0] == "never":
                return verdict
            if verdict[0]:
                worst = worst if worst[0] else verdict
        return worst

    def _evaluate(self, job: JobRecord, dependency: Dependency, index: int | None) -> Verdict:
        kind, name = dependency.kind, dependency.job_id
        if kind is DependencyKind.SINGLETON:
            return self._singleton(job)
        if kind is DependencyKind.CHAIN:
            before = self._lookup(f"{job.array_id}_{index - 1}") if index else []
            return self._evaluate_jobs(dependency, f"{job.array_id}_{(index or 0) - 1}", before) if before else ("", "")
        if kind is DependencyKind.AFTERCORR and index is not None and self._partners(dependency):
            name = f"{name}_{index}"
        verdict = self._evaluate_jobs(dependency, name, self._lookup(name))
        if kind is not DependencyKind.AFTERCORR:
            self._known[name, kind._value_] = verdict
        return verdict

    def _evaluate_jobs(self, dependency: Dependency, name: str, others: list[JobRecord]) -> Verdict:
        if not others:
            return "never", f"{dependency.kind}:{name}: no such job"
        waiting = [job for job in others if not _met(dependency.kind, job)]
        for job in waiting:
            if job.state in ENDED:
                return "never", f"{dependency.kind}:{name}: job {job.id} ended {job.state}"
        if waiting:
            return "waiting", _waiting_message(dependency.kind, waiting)
        return "", ""

    def _singleton(self, job: JobRecord) -> Verdict:
        """Evaluate singleton: one active job per user and name, the tasks of an array counted as one."""
        if self._of_name is None:
            self._of_name = {}
            for other in self._queue:
                same = self._of_name.setdefault((other.user, other.spec.name), _SameName([], []))
                (same.active if other.state in ACTIVE else same.waiting).append(other)
            for same in self._of_name.values():
                same.waiting.sort(key=_submit_order)
        same = self._of_name.get((job.user, job.spec.name), _SameName([], []))
        active = [other for other in same.active if _submit_order(other)[1] != _submit_order(job)[1]]
        earlier = bisect_left(same.waiting, _submit_order(job), key=_submit_order)
        before = active or same.waiting[: min(1, earlier)]
        more = len(active) + earlier - 1
        return ("waiting", _waiting_message(DependencyKind.SINGLETON, before[:1], more)) if before else ("", "")


class _SameName(NamedTuple):
    """Jobs of one user with one name: those that hold resources, and those that wait, in order of submission."""

    active: list[JobRecord]
    waiting: list[JobRecord]


def _submit_order(job: JobRecord) -> tuple[float, str]:
    return job.submit_time, job.array_id or job.id


def _waiting_message(kind: DependencyKind, jobs: list[JobRecord], more: int = 0) -> str:
    count = sum(job.count for job in jobs) + more
    first = f"{jobs[0].array_id}_{jobs[0].tasks[0][0]}" if jobs[0].tasks else jobs[0].id
    return f"{kind}: waits for job {first} ({jobs[0].state})" + (f" and {count - 1} more" if count > 1 else "")


def _not_well(dependency: Dependency, index: int, well: dict[int, bool]) -> str:
    name = f"{dependency.job_id}_{index}"
    return f"{dependency.kind}:{name}: " + ("it did not complete" if index in well else "no such job")


def _met(kind: DependencyKind, job: JobRecord) -> bool:
    if kind is DependencyKind.AFTER:
        return job.start_time is not None or job.state is JobState.CANCELLED
    if job.state not in ENDED:
        return False
    if kind is DependencyKind.AFTERANY:
        return True
    if kind is DependencyKind.CHAIN:
        return job.state not in _CHAIN_ENDS
    return (job.state is JobState.COMPLETED) == (kind in (DependencyKind.AFTEROK, DependencyKind.AFTERCORR))
