"""Which nodes the lease has, and which jobs may be put into it."""

from __future__ import annotations

from collections.abc import Collection, Set

from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.controller.slurm.requests import NO_LIMIT_S
from gpusched.controller.slurm.reserved import LATE_S, in_the_way, others
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import JobRecord
from gpusched.model.resources import Inventory
from gpusched.model.slurm import LEASE, SlurmJob, SlurmReservation
from gpusched.model.units import count_of, format_duration
from gpusched.queue.store import Store

PIN_S = 30.0
"""A start that has not come about by then is withdrawn."""


class SlurmQueue:
    """What waits, as Slurm has it, beside what the store has of it.

    ``jobs``: Slurm's id -> any job. waiting: those that are PENDING. views: the store's id -> as it was decided on.
    """

    def __init__(self, told: SlurmReading, decided: SlurmDecision | None, store: Store) -> None:
        self.told, self._store = told, store
        self.jobs = {job.id: job for job in told.jobs}
        self.waiting = {job.id: job for job in told.jobs if job.state in ("PENDING", "RESV_DEL_HOLD")}
        self.views = {view.id: view for view in decided.snapshot.pending} if decided is not None else {}
        self._names = {slurm_id(name): name for name in self.views}
        self._active = {slurm_id(job.id): job for job in store.active()}
        self._names |= {job: stored.id for job, stored in self._active.items()}

    def limit_s(self, job: SlurmJob) -> float:
        """How long it may run."""
        stored = self.stored(job)
        return stored.spec.time_limit_s if stored is not None else job.time_limit_s or NO_LIMIT_S

    def name(self, job: SlurmJob) -> str:
        """The store's id."""
        return self._names.get(job.id, job.id)

    def stored(self, job: SlurmJob) -> JobRecord | None:
        """As the store has it."""
        return self._active.get(job.id) or self._store.job(self.name(job))


def lease_of(told: SlurmReading) -> SlurmReservation | None:
    """Our reservation, as Slurm has it."""
    return next((one for one in told.reservations if one.name == LEASE), None)


def shut(queue: SlurmQueue, job: SlurmJob, now: float, nodes: Collection[str] = ()) -> str:
    """Why Slurm would find no nodes for a job that is in the lease, as others are reserved before its limit is over.

    It does not wait then, as a job outside does: it takes the job's priority and never gives it back.

    Args:
        queue: With what Slurm has.
        job: It waits.
        now: Unix seconds.
        nodes: On which it is to start; empty: those that it names.
    """
    if not others(queue.told.reservations):
        return ""
    limit_s = queue.limit_s(job)
    end = now + limit_s + LATE_S
    for node in nodes or job.req_nodes:
        if one := in_the_way(queue.told.reservations, [node], now, end):
            whose = "" if nodes else ", which it names,"
            when = f"for another {format_duration(one.end_time - now)}"
            if one.start_time > now:
                when = f"in {format_duration(one.start_time - now)}, before its limit of {format_duration(limit_s)}"
            return f"{node}{whose} is reserved ({one.name}) {when}"
    taken = {
        node for one in others(queue.told.reservations) if one.start_time < end and now < one.end_time
        for node in one.nodes
    }  # fmt: skip
    there = {node for name in job.partitions if (p := queue.told.partitions.get(name)) for node in p.nodes}
    left = there.difference(job.exc_nodes, taken)
    if taken.isdisjoint(there) or len(left) >= job.nodes:
        return ""
    limit = format_duration(limit_s)
    return f"{len(left)} of its partition's nodes are not reserved before its limit of {limit} is over"


def why_left(job: SlurmJob) -> str:
    """Why Slurm must choose the nodes of a job, or "": policies decide when it starts, and where."""
    if "+" in job.id:
        return "it is heterogeneous: its parts start together"
    if 0 < len(job.req_nodes) < job.nodes:
        return f"it requires {len(job.req_nodes)} of its {count_of(job.nodes, 'node')}"
    return ""


def leased_nodes(
    inventory: Inventory, deciding: Set[str], told: SlurmReading, now: float, lasts_s: int
) -> tuple[str, ...]:
    """The nodes of these partitions that Slurm has, but those that another reservation has before the lease's end."""
    taken = {
        node
        for reservation in others(told.reservations)
        if reservation.start_time < now + lasts_s + PIN_S and now < reservation.end_time
        for node in reservation.nodes
    }
    nodes = (node.name for p in inventory.partitions if p.name in deciding for node in p.nodes)
    return tuple(name for name in nodes if name in told.nodes and name not in taken)
