"""The live decision in plain Python, on a new snapshot at every instant, beside forecasts and replays."""

from __future__ import annotations

import math

import msgspec

from gpusched.model.limits import leaf_of
from gpusched.model.plan import Start
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.alone import SingleJobView
from gpusched.sched.decide import decide
from gpusched.sched.eligible import ineligible
from gpusched.sched.topology.spread import rack_wait_until

HALF_LIFE_S = 7 * 86400.0


class Plain:
    """The same in plain Python: the live `decide` on a new snapshot at every instant."""

    def __init__(self, snap: Snapshot, lasts: dict[str, float], ends: dict[str, float]) -> None:
        self.snap, self.lasts, self.ends = snap, lasts, ends
        self.used = {u: 3600 * h for u, h in snap.usage.items()}
        self.starts: dict[str, float] = {}
        self.nodes: dict[str, tuple[str, ...]] = {}
        self.partition = {n.name: n.partition for n in snap.nodes}
        self.fair = {name for name, p in snap.policies.items() if p.order == "fairshare"}

    def run(self) -> dict[str, float]:
        touched = set(self.snap.policies)
        touched |= self.end_jobs() | self.freed()  # also what ends in the very first instant
        while True:
            self.limits_now()
            self.begin(touched)
            given_up = {j.id: t for j in self.snap.pending if (t := self.gives_up(j)) is not None}
            times = [*self.ends.values(), *(j.eligible_time for j in self.snap.pending if j.eligible_time)]
            later = [t for t in (*times, *given_up.values(), *self.frees()) if t > self.snap.now]
            if not later:
                return self.starts
            self.move_to(min(later))
            touched = {
                j.spec.partition
                for j in self.snap.pending
                if given_up.get(j.id) == self.snap.now and ineligible(j, self.snap.now, self.snap.policies) is None
            }
            touched |= self.end_jobs() | self.freed()
            touched |= {j.spec.partition for j in self.snap.pending if j.eligible_time == self.snap.now}
            touched |= self.fair if touched else set()

    def gives_up(self, job: PendingView) -> float | None:
        """When it asks for something else than now."""
        until = rack_wait_until(job, self.snap.policies[job.spec.partition])
        if until <= self.snap.now:
            return None
        then = msgspec.structs.replace(self.snap, now=until)
        return None if SingleJobView(self.snap).asks(job) == SingleJobView(then).asks(job) else until

    def limits_now(self) -> None:
        """Bounds as they stand, where there are any."""

    def frees(self) -> list[float]:
        """When what was used of limits of GPU hours counts no more."""
        return []

    def freed(self) -> set[str]:
        """Partitions in which a limit may have let somebody go since the last instant."""
        return set()

    def move_to(self, time: float) -> None:
        rate = math.log(2) / HALF_LIFE_S
        kept = math.exp(-rate * (time - self.snap.now))
        held: dict[str, float] = {}
        for job in self.snap.running:
            leaf = leaf_of(job.user, job.group)
            held[leaf] = held.get(leaf, 0) + self.holds(job)
        users = self.used.keys() | held.keys()
        self.used = {u: self.used.get(u, 0.0) * kept + held.get(u, 0) * (1 - kept) / rate for u in users}
        usage = {u: s / 3600 for u, s in self.used.items()}
        self.snap = msgspec.structs.replace(self.snap, now=time, usage=usage)

    def holds(self, job: RunningView) -> float:
        return sum(len(p.gpus) for p in job.allocation.parts)

    def end_jobs(self) -> set[str]:
        over = [j for j in self.snap.running if self.ends[j.id] <= self.snap.now]
        gone = {j.id for j in over}
        for job in over:
            del self.ends[job.id]
        waiting = [self.released(j, gone) for j in self.snap.pending]
        for job in over:
            waiting = [self.more_room(j, 1) if j.array_id and j.array_id == job.array_id else j for j in waiting]
        touched = {self.partition.get(p.node, "") for j in over for p in j.allocation.parts[:1]}
        touched |= {
            j.spec.partition for j, k in zip(waiting, self.snap.pending, strict=True) if j.dependency != k.dependency
        }
        arrays = {job.array_id for job in over if job.array_id}
        touched |= {j.spec.partition for j in waiting if j.array_id in arrays and j.array_room is not None}
        left = tuple(j for j in self.snap.running if j.id not in gone)
        self.snap = msgspec.structs.replace(self.snap, running=left, pending=tuple(waiting))
        return touched

    def released(self, job: PendingView, gone: set[str]) -> PendingView:
        if job.dependency != "waiting" or not job.spec.dependencies:
            return job
        left = tuple(d for d in job.spec.dependencies if d.job_id not in gone)
        spec = msgspec.structs.replace(job.spec, dependencies=left)
        return msgspec.structs.replace(job, spec=spec, dependency="waiting" if left else "")

    @staticmethod
    def more_room(job: PendingView, by: int) -> PendingView:
        return job if job.array_room is None else msgspec.structs.replace(job, array_room=job.array_room + by)

    def begin(self, touched: set[str]) -> None:
        """Starts what the live decision starts in these partitions."""
        views = {j.id: j for j in self.snap.pending}
        for action in decide(self.snap).actions:
            assert isinstance(action, Start)
            job = views[action.job_id]
            if job.spec.partition not in touched:
                continue
            now = self.snap.now
            self.starts[job.id] = now
            self.nodes[job.id] = tuple(part.node for part in action.allocation.parts)
            self.ends[job.id] = now + self.lasts[job.id]
            view = RunningView(
                id=job.id, user=job.user, allocation=action.allocation, start_time=now,
                expected_end=now + job.spec.time_limit_s, array_id=job.array_id, spec=job.spec, group=job.group,
            )  # fmt: skip
            left = [j for j in self.snap.pending if j.id != job.id]
            left = [self.more_room(j, -1) if j.array_id and j.array_id == job.array_id else j for j in left]
            self.snap = msgspec.structs.replace(self.snap, running=(*self.snap.running, view), pending=tuple(left))
