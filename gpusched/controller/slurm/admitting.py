"""The nodes of the lease, and the jobs that may be placed in it."""

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

PIN_S = 30.0
"""A start is withdrawn if the job has not started within this time."""


class SlurmQueue:
    """Slurm's pending jobs, with their records in the store.

    ``jobs``: Slurm's id -> any job. ``waiting``: those that are pending. ``views``: the store's id -> the job as it was
    decided on.
    """

    def __init__(self, reading: SlurmReading, decision: SlurmDecision | None, store: Store) -> None:
        self.reading, self._store = reading, store
        self.jobs = {job.id: job for job in reading.jobs}
        self.waiting = {job.id: job for job in reading.jobs if job.state in ("PENDING", "RESV_DEL_HOLD")}
        self.views = {view.id: view for view in decision.snapshot.pending} if decision is not None else {}
        self._store_ids = {slurm_id(store_id): store_id for store_id in self.views}
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
    """Return why Slurm would find no nodes for a job in the lease, as they are reserved before its limit ends; or "".

    Outside the lease such a job just waits. Inside it Slurm sets its priority to 0, and never restores it.

    Args:
        queue: Jobs and reservations.
        job: A pending job.
        now: Unix seconds.
        nodes: The nodes to start on; empty: those that it requires.
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
    # No particular nodes: enough of its partitions' nodes must be free of reservations until its limit ends.
    taken = {
        node for r in other_reservations(queue.reading.reservations) if r.start_time < end and now < r.end_time
        for node in r.nodes
    }  # fmt: skip
    candidates = {node for name in job.partitions if (p := queue.reading.partitions.get(name)) for node in p.nodes}
    free = candidates.difference(job.exc_nodes, taken)
    if taken.isdisjoint(candidates) or len(free) >= job.nodes:
        return ""
    limit = format_duration(limit_s)
    return f"{len(free)} of its partition's nodes are not reserved before its limit of {limit} is over"


def why_slurm_places(job: SlurmJob) -> str:
    """Return why Slurm must choose the job's nodes; "": policies decide when and where it starts."""
    if "+" in job.id:
        return "it is heterogeneous: its parts start together"
    if 0 < len(job.req_nodes) < job.nodes:
        return f"it requires {len(job.req_nodes)} of its {count_of(job.nodes, 'node')}"
    return ""


def leased_nodes(
    inventory: Inventory, deciding: Set[str], reading: SlurmReading, now: float, duration_s: int
) -> tuple[str, ...]:
    """Return these partitions' nodes known to Slurm, except those reserved by others before the lease's end."""
    taken = {
        node
        for reservation in other_reservations(reading.reservations)
        if reservation.start_time < now + duration_s + PIN_S and now < reservation.end_time
        for node in reservation.nodes
    }
    nodes = (node.name for p in inventory.partitions if p.name in deciding for node in p.nodes)
    return tuple(name for name in nodes if name in reading.nodes and name not in taken)
