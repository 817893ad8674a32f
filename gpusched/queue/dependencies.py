"""Whether what jobs wait for has come: of a job by itself, and of the tasks of an array that share a row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from gpusched.model.arrays import indices_of, wanted
from gpusched.model.indices import Spans, both, each, lowest, without
from gpusched.model.jobs import ACTIVE, ENDED, Dependency, DependencyKind, JobRecord, JobState

Verdict = tuple[str, str]  # "" met, "waiting" or "never", with a message
BY_TASK = frozenset({DependencyKind.AFTERCORR, DependencyKind.CHAIN})  # each task of an array waits for another one
_CHAIN_ENDS = frozenset({JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.CANCELLED})
_AT_ONCE = 500


class Dependencies:
    """Asks about other jobs, each once.

    Args:
        lookup: All rows of an id (an array's own: of all its tasks), as `Reader.standing`.
        queue: All that wait or hold resources.
        ended_well: As `Reader.ended_well`; without it each task is looked up.
    """

    def __init__(
        self,
        lookup: Callable[[str], list[JobRecord]],
        queue: Iterable[JobRecord],
        ended_well: Callable[[str, Sequence[int]], dict[int, bool]] | None = None,
    ) -> None:
        self._lookup = cache(lookup)
        self._queue = queue
        self._ended_well = ended_well or self._looked_up
        self._of_name: dict[tuple[str, str], _Same] | None = None

    def of(self, job: JobRecord) -> Verdict:
        """Of a job, or of a task by itself."""
        return self._worst(job, job.spec.dependencies)

    def of_tasks(self, row: JobRecord, most: int | None) -> list[tuple[int, Verdict]]:
        """The tasks of a row that could start, ``most`` at the most; where none could, one that tells why.

        With None: all tasks, also those that cannot.
        """
        own = [d for d in row.spec.dependencies if d.kind in BY_TASK]
        shared = self._worst(row, [d for d in row.spec.dependencies if d.kind not in BY_TASK])
        if not own or shared[0] == "never":
            many = row.count if most is None else 1 if shared[0] else most
            return [(index, shared) for index in lowest(row.tasks, many)]
        able: list[tuple[int, Verdict]] = []
        stuck: list[tuple[int, Verdict]] = []
        for index, verdict in self._by_task(row, own):
            verdict = verdict if verdict[0] == "never" or not shared[0] else shared
            (stuck if verdict[0] else able).append((index, verdict))
            if most is not None and (verdict[0] == "waiting" or len(able) >= most):  # all behind it wait, too
                break
        return sorted(able + stuck) if most is None else able or stuck[-1:]

    def _by_task(self, row: JobRecord, own: Sequence[Dependency]) -> Iterator[tuple[int, Verdict]]:
        """All tasks of a row by what each of them waits for: those first whose partners have ended."""
        if any(d.kind is DependencyKind.CHAIN for d in own):
            (head,) = lowest(row.tasks, 1)
            of_head = self._worst(row, own, head)
            behind = of_head if of_head[0] == "never" else ("waiting", "chain: waits for the previous link")
            yield from ((index, of_head if index == head else behind) for index in each(row.tasks))
            return
        waiting: Spans = ()
        for dependency in own:
            others = self._lookup(dependency.job_id)
            spans = sorted(span for other in others if other.state not in ENDED for span in indices_of(other))
            waiting = tuple(sorted((*waiting, *both(without(row.tasks, waiting), tuple(spans)))))
        left = each(without(row.tasks, waiting))
        while some := list(islice(left, _AT_ONCE)):
            yield from self._by_partner(row, own, some)
        for index in each(waiting):
            yield index, ("waiting", f"{own[0].kind}: waits for job {own[0].job_id}_{index}")

    def _by_partner(self, row: JobRecord, own: Sequence[Dependency], some: list[int]) -> Iterator[tuple[int, Verdict]]:
        found: dict[int, Verdict] = dict.fromkeys(some, ("", ""))
        for dependency in own:
            others = self._lookup(dependency.job_id)
            if not others or others[0].array_id is None:  # no array: they all wait for that one
                verdict = self._one(row, dependency, None)
                found = {i: v if v[0] or not verdict[0] else verdict for i, v in found.items()}
                continue
            well = self._ended_well(dependency.job_id, some)
            found |= {i: ("never", _not_well(dependency, i, well)) for i in some if not well.get(i, False)}
        yield from found.items()

    def _looked_up(self, array_id: str, indices: Sequence[int]) -> dict[int, bool]:
        found = ((i, self._lookup(f"{array_id}_{i}")) for i in indices)
        return {i: jobs[0].state is JobState.COMPLETED for i, jobs in found if jobs and jobs[0].state in ENDED}

    def _worst(self, job: JobRecord, dependencies: Sequence[Dependency], index: int | None = None) -> Verdict:
        worst = ("", "")
        for dependency in dependencies:
            verdict = self._one(job, dependency, job.array_index if index is None else index)
            if verdict[0] == "never":
                return verdict
            if verdict[0]:
                worst = worst if worst[0] else verdict
        return worst

    def _one(self, job: JobRecord, dependency: Dependency, index: int | None) -> Verdict:
        kind, name = dependency.kind, dependency.job_id
        if kind is DependencyKind.SINGLETON:
            return self._alone(job)
        if kind is DependencyKind.CHAIN:
            before = self._lookup(f"{job.array_id}_{index - 1}") if index else []
            return self._all(dependency, f"{job.array_id}_{(index or 0) - 1}", before) if before else ("", "")
        if kind is DependencyKind.AFTERCORR and index is not None:
            others = self._lookup(name)
            if others and others[0].array_id is not None and not wanted(name)[1]:
                name = f"{name}_{index}"
        return self._all(dependency, name, self._lookup(name))

    def _all(self, dependency: Dependency, name: str, others: list[JobRecord]) -> Verdict:
        if not others:
            return "never", f"{dependency.kind}:{name}: no such job"
        waiting = [job for job in others if not _met(dependency.kind, job)]
        for job in waiting:
            if job.state in ENDED:
                return "never", f"{dependency.kind}:{name}: job {job.id} ended {job.state}"
        if waiting:
            return "waiting", _waits(dependency.kind, waiting)
        return "", ""

    def _alone(self, job: JobRecord) -> Verdict:
        """Of all jobs of one user with one name one is active at a time, the tasks of an array counted as one."""
        if self._of_name is None:
            self._of_name = {}
            for other in self._queue:
                same = self._of_name.setdefault((other.user, other.spec.name), _Same([], []))
                (same.active if other.state in ACTIVE else same.waiting).append(other)
            for same in self._of_name.values():
                same.waiting.sort(key=_place)
        same = self._of_name.get((job.user, job.spec.name), _Same([], []))
        active = [other for other in same.active if _place(other)[1] != _place(job)[1]]
        earlier = bisect_left(same.waiting, _place(job), key=_place)
        before = active or same.waiting[: min(1, earlier)]
        more = len(active) + earlier - 1
        return ("waiting", _waits(DependencyKind.SINGLETON, before[:1], more)) if before else ("", "")


class _Same(NamedTuple):
    """Jobs of one user with one name: those that hold resources, and those that wait, in order of submission."""

    active: list[JobRecord]
    waiting: list[JobRecord]


def _place(job: JobRecord) -> tuple[float, str]:
    return job.submit_time, job.array_id or job.id


def _waits(kind: DependencyKind, jobs: list[JobRecord], more: int = 0) -> str:
    many = sum(job.count for job in jobs) + more
    first = f"{jobs[0].array_id}_{jobs[0].tasks[0][0]}" if jobs[0].tasks else jobs[0].id
    return f"{kind}: waits for job {first} ({jobs[0].state})" + (f" and {many - 1} more" if many > 1 else "")


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
