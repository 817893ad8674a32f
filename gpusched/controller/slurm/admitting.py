"""Which nodes the lease gets, and which pending jobs can start in it.

The lease is our reservation in Slurm (`model.slurm.LEASE`); `applying` puts jobs into it by these answers. Pure, but
for reading the store.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.controller.slurm.requests import NO_LIMIT_S
from gpusched.controller.slurm.reserved import START_DELAY_S, other_reservations
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
        self._components: dict[str, list[SlurmJob]] = {}
        for job in self.waiting.values():
            self._components.setdefault(_leader_of(job), []).append(job)
        self._others = sorted(other_reservations(reading.reservations), key=lambda r: r.start_time)
        self._reserving: dict[str, list[SlurmReservation]] = {}
        for reservation in self._others:
            for node in reservation.nodes:
                self._reserving.setdefault(node, []).append(reservation)
        self._unreserved: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[set[str], bool]] = {}

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

    def components(self, job: SlurmJob) -> list[SlurmJob]:
        """Return the waiting components of a heterogeneous job; of any other, the job itself."""
        return self._components[_leader_of(job)]

    def reserving(self, node: str, begin: float, end: float) -> SlurmReservation | None:
        """Return the first of the other reservations that has the node for some part of this time (Unix seconds)."""
        return next((r for r in self._reserving.get(node, ()) if r.start_time < end and begin < r.end_time), None)

    def unreserved(self, partitions: tuple[str, ...], begin: float, end: float) -> tuple[set[str], bool]:
        """Return the partitions' nodes without those that others have reserved, and whether they have any."""
        others = [r for r in self._others if r.start_time < end and begin < r.end_time]
        key = partitions, tuple(r.name for r in others)
        if key not in self._unreserved:
            nodes = {node for name in partitions if (p := self.reading.partitions.get(name)) for node in p.nodes}
            free = nodes.difference(*(r.nodes for r in others))
            self._unreserved[key] = free, len(free) < len(nodes)
        return self._unreserved[key]


def _leader_of(job: SlurmJob) -> str:
    """Return the id that the components of a heterogeneous job, ``1234+0`` and so on, have in common."""
    return job.id.partition("+")[0]


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
    limit_s = queue.limit_s(job)
    end = now + limit_s + START_DELAY_S
    for node in nodes or job.req_nodes:
        if r := queue.reserving(node, now, end):
            suffix = "" if nodes else ", which it names,"
            when = f"for another {format_duration(r.end_time - now)}"
            if r.start_time > now:
                when = f"in {format_duration(r.start_time - now)}, before its limit of {format_duration(limit_s)}"
            return f"{node}{suffix} is reserved ({r.name}) {when}"
    # Its named nodes, if any, are free. Slurm chooses the others among its partitions' nodes: are there enough?
    unreserved, reserves = queue.unreserved(job.partitions, now, end)
    free = len(unreserved) - len(unreserved.intersection(job.exc_nodes))
    if not reserves or free >= job.nodes:
        return ""
    limit = format_duration(limit_s)
    return f"{free} of its partition's nodes are not reserved before its limit of {limit} is over"


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
