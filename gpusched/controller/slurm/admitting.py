"""Which nodes the lease gets, and which pending jobs can start in it.

The lease is our reservation in Slurm (`model.slurm.LEASE`); `applying` puts jobs into it by these answers. Pure, but
for reading the store.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.controller.slurm.requests import NO_LIMIT_S
from gpusched.controller.slurm.reserved import START_DELAY_S, first_conflict, other_reservations
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import JobRecord
from gpusched.model.resources import Inventory
from gpusched.model.slurm import LEASE, SlurmJob, SlurmReservation
from gpusched.model.units import count_of, format_duration
from gpusched.queue.store import Store

PIN_TIMEOUT_S = 30.0
"""A job pinned to nodes (asked to start there) that has not started after this time is withdrawn from the lease."""

# Held because its reservation was deleted: still in the queue, although no longer PENDING.
_WAITING_STATES = ("PENDING", "RESV_DEL_HOLD")


class SlurmQueue:
    """Slurm's pending jobs, with their records in the store.

    A job has two ids: Slurm's (``1234``), and the store's, with a suffix where Slurm reuses a number (``1234~2``).

    Attributes:
        jobs: Slurm's id -> job, in any state.
        waiting: Slurm's id -> job, of those in the queue.
        considered: The store's id -> the job as the policies saw it; empty without a decision.
    """

    def __init__(self, reading: SlurmReading, decision: SlurmDecision | None, store: Store) -> None:
        self.reading, self._store = reading, store
        self.jobs = {job.id: job for job in reading.jobs}
        self.waiting = {job.id: job for job in reading.jobs if job.state in _WAITING_STATES}
        self.considered = {view.id: view for view in decision.snapshot.pending} if decision is not None else {}
        self._store_ids = {slurm_id(store_id): store_id for store_id in self.considered}
        # Active jobs come last and win: where an id was reused, they are the ones that Slurm means now.
        self._active = {slurm_id(job.id): job for job in store.active()}
        self._store_ids |= {job: stored.id for job, stored in self._active.items()}

    def limit_s(self, job: SlurmJob) -> float:
        """Return the job's time limit in seconds."""
        stored = self.stored(job)
        return stored.spec.time_limit_s if stored is not None else job.time_limit_s or NO_LIMIT_S

    def store_id(self, job: SlurmJob) -> str:
        """Return the store's id of a job."""
        return self._store_ids.get(job.id, job.id)

    def stored(self, job: SlurmJob) -> JobRecord | None:
        """Return the job's record in the store."""
        return self._active.get(job.id) or self._store.job(self.store_id(job))


def lease_of(reading: SlurmReading) -> SlurmReservation | None:
    """Return our reservation as Slurm has it."""
    return next((r for r in reading.reservations if r.name == LEASE), None)


def reservation_conflict(queue: SlurmQueue, job: SlurmJob, now: float, nodes: Collection[str] = ()) -> str:
    """Return why other reservations leave a job no nodes in the lease until its limit ends; "": they do not.

    Outside the lease such a job just waits. Inside it Slurm sets its priority to 0, and never restores it.

    Args:
        queue: Jobs and reservations.
        job: A pending job.
        now: Unix seconds.
        nodes: The nodes to start on; empty: those that it requires, or else any of its partitions.
    """
    if not other_reservations(queue.reading.reservations):
        return ""
    limit_s = queue.limit_s(job)
    end = now + limit_s + START_DELAY_S
    for node in nodes or job.req_nodes:
        if r := first_conflict(queue.reading.reservations, [node], now, end):
            suffix = "" if nodes else ", which it names,"
            when = f"for another {format_duration(r.end_time - now)}"
            if r.start_time > now:
                when = f"in {format_duration(r.start_time - now)}, before its limit of {format_duration(limit_s)}"
            return f"{node}{suffix} is reserved ({r.name}) {when}"
    # Its named nodes, if any, are free. Slurm chooses the others among its partitions' nodes: are there enough?
    candidates = {node for name in job.partitions if (p := queue.reading.partitions.get(name)) for node in p.nodes}
    reserved = _reserved_nodes(queue.reading, now, end)
    free = candidates.difference(job.exc_nodes, reserved)
    if reserved.isdisjoint(candidates) or len(free) >= job.nodes:
        return ""
    limit = format_duration(limit_s)
    return f"{len(free)} of its partition's nodes are not reserved before its limit of {limit} is over"


def _reserved_nodes(reading: SlurmReading, begin: float, end: float) -> set[str]:
    """Return the nodes that others have reserved for some part of this time (Unix seconds)."""
    return {
        node
        for reservation in other_reservations(reading.reservations)
        if reservation.start_time < end and begin < reservation.end_time
        for node in reservation.nodes
    }


def why_slurm_places(job: SlurmJob) -> str:
    """Return why Slurm must choose the job's nodes; "": policies decide when and where it starts."""
    if "+" in job.id:  # 1234+0: a component of a heterogeneous job
        return "it is heterogeneous: its parts start together"
    if 0 < len(job.req_nodes) < job.nodes:
        return f"it requires {len(job.req_nodes)} of its {count_of(job.nodes, 'node')}"
    return ""


def leased_nodes(
    inventory: Inventory, deciding: Set[str], reading: SlurmReading, now: float, duration_s: int
) -> tuple[str, ...]:
    """Return the nodes of the lease, in the inventory's order.

    They are the nodes that Slurm knows in the partitions ``deciding`` (mode decide), without those that another
    reservation takes before the lease would end, or a pinned job be withdrawn after it.

    Args:
        inventory: Partitions and their nodes.
        deciding: Names of the partitions.
        reading: Slurm's nodes and reservations.
        now: Unix seconds.
        duration_s: From a renewal to the lease's end.
    """
    reserved = _reserved_nodes(reading, now, now + duration_s + PIN_TIMEOUT_S)
    nodes = (node.name for p in inventory.partitions if p.name in deciding for node in p.nodes)
    return tuple(name for name in nodes if name in reading.nodes and name not in reserved)
