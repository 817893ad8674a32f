"""Limits in plain Python: remaining amounts while a plan is checked, and why a job that exceeds one waits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from msgspec.structs import replace

from gpusched.model.limits import WEEK_S, Bound, limit_units
from gpusched.model.plan import Action, Reason, ReasonCode, Resize, Start
from gpusched.model.slicetables import gpus_counted
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.model.units import count_of, format_duration
from gpusched.sched.eligible import ARRAY_FULL

_SLACK = 1e-6  # shares of GPUs are fractions


class Rooms:
    """The remaining amounts of arrays, users, groups and classes, while jobs start one by one."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.reasons = LimitReasons(snapshot)
        self._bounds, self._now = snapshot.bounds, snapshot.now
        self._room = [bound.room for bound in snapshot.bounds]
        self._arrays: dict[str, int] = {}

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Return the bounds with their present usage."""
        left = zip(self._bounds, self._room, strict=True)
        return tuple(replace(bound, used=bound.rule.limit - room) for bound, room in left)

    def full(self, job: PendingView, gpus: int | None = None) -> Reason | None:
        """Return why the job may not start, by the first limit it exceeds, or None. ``gpus``: instead of its own."""
        room = self.array_room(job)
        if room is not None and room <= 0:
            return ARRAY_FULL
        return self._exceeded((at, self._cost(at, job, gpus)) for at in job.bounds)

    def _exceeded(self, costs: Iterable[tuple[int, float]]) -> Reason | None:
        """Return the reason of the first (bound, amount) that exceeds what is left."""
        found = next(((at, cost) for at, cost in costs if cost > max(self._room[at], 0) + _SLACK), None)
        return None if found is None else self.reasons.of(*found, self._room[found[0]])

    def beyond(self, job: PendingView) -> Reason | None:
        """Return the limit that the job alone exceeds, such as one lowered since submission, or None."""
        at = next((at for at in job.bounds if self._cost(at, job, None) > self._bounds[at].rule.limit), None)
        return None if at is None else self.reasons.of(at, self._cost(at, job, None), self._room[at])

    def array_room(self, job: PendingView) -> int | None:
        """Return how many more tasks of the job's array may start; None: no bound."""
        return None if job.array_room is None else self._arrays.get(job.array_id or job.id, job.array_room)

    def take(self, job: PendingView, gpus: int | None = None) -> None:
        """Record the job's start."""
        if job.array_room is not None:
            name = job.array_id or job.id
            self._arrays[name] = self._arrays.get(name, job.array_room) - 1
        for at in job.bounds:
            self._room[at] -= self._cost(at, job, gpus)

    def refuse_resize(self, job: RunningView, gpus: int) -> str | None:
        """Return why a running job may not have so many GPUs; if it may, record it and return None."""
        costs = self._growth(job, gpus)
        if (why := self._exceeded(costs)) is not None:
            return why.message
        for at, cost in costs:
            self._room[at] -= cost
        return None

    def exceeds(self, job: PendingView | RunningView, gpus: int) -> bool:
        """Return whether one of the job's limits leaves too little for so many GPUs."""
        if isinstance(job, PendingView):
            costs = [(at, self._cost(at, job, gpus)) for at in job.bounds]
        else:
            costs = self._growth(job, gpus)
        return any(cost > max(self._room[at], 0) + _SLACK for at, cost in costs)

    def _growth(self, job: RunningView, gpus: int) -> list[tuple[int, float]]:
        """Return what a running job takes more with so many GPUs, as (bound, amount); the job count is unchanged."""
        more, left = gpus - job.allocation.gpus, max(0.0, job.expected_end - self._now)
        units = ((at, self._bounds[at].rule.unit) for at in job.bounds if more > 0)
        return [(at, limit_units(unit, more, left)) for at, unit in units if unit != "jobs"]

    def _cost(self, at: int, job: PendingView, gpus: int | None) -> float:
        counted = gpus_counted(job.spec.gpus if gpus is None else gpus, job.spec.profile)
        return limit_units(self._bounds[at].rule.unit, counted, max(0.0, job.limit_s))


def with_limits_after(actions: Iterable[Action], snapshot: Snapshot, partition: str) -> Snapshot:
    """Return the snapshot with what these starts, and growth, in other partitions take of limits and arrays.

    The snapshot itself if they take nothing of what jobs of the partition count for.
    """
    if not snapshot.bounds and all(job.array_room is None for job in snapshot.pending):
        return snapshot
    rooms, pending = Rooms(snapshot), {job.id: job for job in snapshot.pending}
    running, charged = {job.id: job for job in snapshot.running}, set[int]()
    for action in actions:
        if isinstance(action, Start):
            rooms.take(pending[action.job_id], action.allocation.gpus)
            charged.update(pending[action.job_id].bounds)
        elif isinstance(action, Resize) and rooms.refuse_resize(running[action.job_id], action.gpus) is None:
            charged.update(running[action.job_id].bounds)
    jobs: tuple[PendingView | RunningView, ...] = (*snapshot.pending, *snapshot.running)
    own = [job for job in jobs if job.spec and job.spec.partition == partition]
    left = {j.id: room for j in own if isinstance(j, PendingView) and (room := rooms.array_room(j)) != j.array_room}
    if not left and not any(charged.intersection(job.bounds) for job in own):
        return snapshot
    waiting = (replace(job, array_room=left[job.id]) if job.id in left else job for job in snapshot.pending)
    return replace(snapshot, bounds=rooms.bounds, pending=tuple(waiting))


class LimitReasons:
    """The reasons of jobs that exceed a limit; equal ones are one object."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._known: dict[tuple[int, float, float], Reason] = {}

    def of(self, at: int, cost: float, room: float) -> Reason:
        """Return the reason of a job that takes ``cost`` of bound ``at``, which has ``room`` left."""
        key = (at, cost, room)
        if key not in self._known:
            bound = self._snapshot.bounds[at]
            when = None if cost > bound.rule.limit else frees_at(self._releases[at], cost - room)
            message = limit_message(bound, cost, bound.rule.limit - room)
            if when is not None:
                message += f"; quota frees within {format_duration(max(0.0, when - self._snapshot.now))}"
            self._known[key] = Reason(code=ReasonCode(bound.rule.reason), message=message)
        return self._known[key]

    @cached_property
    def _releases(self) -> list[list[tuple[float, float]]]:
        return releases_of_bounds(self._snapshot)


def releases_of_bounds(snapshot: Snapshot) -> list[list[tuple[float, float]]]:
    """Return when each bound's used amounts free at the latest: (Unix seconds, amount), ascending.

    A running job's GPU seconds come back seven days after its limit, for it may use them all.
    """
    found: list[list[tuple[float, float]]] = [list(bound.frees) for bound in snapshot.bounds]
    for job in snapshot.running:
        counted = gpus_counted(job.allocation.gpus, job.spec.profile if job.spec is not None else "")
        for at in job.bounds:
            unit = snapshot.bounds[at].rule.unit
            left = max(0.0, job.expected_end - snapshot.now)
            until = job.expected_end + WEEK_S if unit == "gpu_s" else max(job.expected_end, snapshot.now)
            found[at].append((until, limit_units(unit, counted, left)))
    return [sorted(releases) for releases in found]


def frees_at(releases: list[tuple[float, float]], needs: float) -> float | None:
    """Return when ``needs`` more of a bound has freed at the latest; None: unknown."""
    for time, amount in releases:
        needs -= amount
        if needs <= _SLACK:
            return time
    return None


def limit_message(bound: Bound, cost: float, used: float) -> str:
    """Return why a job that takes ``cost`` of a bound waits, where running jobs take ``used``."""
    rule = bound.rule
    if rule.unit == "jobs":
        return f"limit of {rule.subject}: {used:g} of {count_of(rule.limit, 'job')} running"
    if rule.unit == "gpus":
        limit, needs = count_of(rule.limit, "GPU"), f"this job needs {_plain(cost)}"
        if cost > rule.limit:
            return f"limit of {rule.subject}: at most {limit} at once; {needs}"
        return f"limit of {rule.subject}: {_plain(used)} of {limit} in use; {needs}"
    if cost > rule.limit:
        return f"limit of {rule.subject}: {hours(rule.limit)} GPU hours in seven days; this job may use {hours(cost)}"
    return (
        f"limit of {rule.subject}: {hours(used)} of {hours(rule.limit)} GPU hours in seven days used or running; "
        f"this job may use {hours(cost)}"
    )


def _plain(gpus: float) -> str:
    """Return a number of GPUs, parts of them with two digits."""
    return f"{round(gpus, 2):.12g}"


def hours(gpu_s: float) -> str:
    """Return GPU seconds as GPU hours, with one decimal where it is not 0."""
    return f"{gpu_s / 3600:.1f}".removesuffix(".0")
