"""Charges the time between two readings to the jobs that held the GPUs, cycle by cycle; makes the records of runs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.accounting.usage import Counters, charged_after, holdings, usage_between
from gpusched.cluster.base import NodeObservation
from gpusched.model.idle import IdleRules
from gpusched.model.jobs import ENDED, Allocation, JobRecord
from gpusched.model.readings import ProbeFailure
from gpusched.model.resources import Inventory, Partition
from gpusched.queue.store import NodeRecord, RunRecord, Store, UsageRow

REMEMBER_ENDED_S = 600.0  # the reading that covers a job's last seconds may be this late


class UsageWriter:
    """Writes usage rows, and the energy of ended jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counters = Counters()
        self._ended: list[JobRecord] = store.recently_ended(200)

    def charge(
        self,
        inventory: Inventory,
        before: Mapping[str, NodeRecord],
        observations: Mapping[str, NodeObservation],
        active: list[JobRecord],
        after: list[JobRecord],
        now: float,
    ) -> None:
        """Charge one cycle's usage, inside its transaction.

        ``before``: the nodes' records before this cycle; ``observations``: of this cycle. ``active``: the jobs that
        held resources before it; ``after``: the same jobs, in the same order, as they are now.
        """
        holders = self._holders(active, after, now)
        touched = {job.id for job in after if job.state in ENDED}
        rows: list[UsageRow] = []
        on_node: dict[str, list[JobRecord]] = {}  # each node goes through its own jobs only
        for job in holders:
            for name in {part.node for part in (job.allocation.parts if job.allocation else ())}:
                on_node.setdefault(name, []).append(job)
        for name, observation in observations.items():
            node, record = inventory.node(name), before.get(name)
            if node is None or isinstance(observation.result, ProbeFailure) or record is None:
                continue
            earlier = self._counters.bridged(name, record.reading, observation.result)
            rules = partition.idle if (partition := inventory.partition(node.partition)) else IdleRules()
            rows += usage_between(node, earlier, observation.result, holdings(name, on_node.get(name, ()), now, rules))
        self._store.add_usage(rows)
        ending = [new for old, new in zip(active, after, strict=True) if old.state not in ENDED]
        self._store.move_usage([row for job in ending for row in self._charged_after_end(job, before)])
        self._refresh_energy(touched | {row.job_id for row in rows if row.job_id})

    def _holders(self, active: list[JobRecord], after: list[JobRecord], now: float) -> list[JobRecord]:
        holders = []
        for old, new in zip(active, after, strict=True):
            if new.state in ENDED:
                self._ended.append(new)
            elif new.allocation is None:  # back in the queue
                self._ended.append(msgspec.structs.replace(old, end_time=now))
            else:
                holders.append(new)
                self._ended += _given_up(old, new, now)
        horizon = now - REMEMBER_ENDED_S
        self._ended = [job for job in self._ended if job.end_time is not None and job.end_time > horizon]
        return [*holders, *self._ended]

    def _charged_after_end(self, job: JobRecord, before: Mapping[str, NodeRecord]) -> list[UsageRow]:
        """Return what an ended job was charged after its end: only now did the engine say when that was."""
        if job.state not in ENDED or job.end_time is None or job.start_time is None or job.allocation is None:
            return []
        read = {name: record.reading.time for name, record in before.items() if record.reading is not None}
        late = {part.node: read.get(part.node, 0.0) for part in job.allocation.parts}
        # Slurm's ends are whole seconds, rounded down: what was measured within that second was the job's.
        end = job.end_time if job.slurm is None else job.end_time + 1.0
        if max(late.values(), default=0.0) <= end:
            return []
        found = []
        for row in reversed(self._store.usage_of_job(job.id)):
            if over := charged_after(row, job.start_time, end, late.get(row.node, 0.0)):
                found.append(over)
            late[row.node] = min(late.get(row.node, 0.0), row.bucket)
        return found

    def _refresh_energy(self, job_ids: set[str]) -> None:
        # What is remembered stays as it was: the job may have come back since, and hold something else or nothing.
        jobs = [self._store.job(job_id) for job_id in sorted(job_ids & {ended.id for ended in self._ended})]
        self._store.put_jobs(
            msgspec.structs.replace(job, energy_j=self._store.job_energy(job.id))
            for job in jobs if job is not None and job.state in ENDED
        )  # fmt: skip


def _given_up(old: JobRecord, new: JobRecord, now: float) -> list[JobRecord]:
    """Return a job with what it held until now, where it goes on without some of its ranks; else nothing."""
    if old.allocation is None or new.allocation is None or old.allocation is new.allocation:
        return []
    kept = {part.rank for part in new.allocation.parts}
    parts = tuple(part for part in old.allocation.parts if part.rank not in kept)
    return [msgspec.structs.replace(old, allocation=Allocation(old.id, parts), end_time=now)] if parts else []


def run_of(job: JobRecord, inventory: Inventory, since: float | None = None) -> RunRecord:
    """Return the run record of a job's current attempt, which has started, or of its part ``since`` a hot resize."""
    assert job.allocation is not None
    assert job.start_time is not None
    partition = inventory.partition(job.spec.partition)
    # What Slurm gave is what counts; of a job that it had purged, say, it names no GPUs any more.
    named = job.slurm is not None and bool(job.slurm.gpus)
    return RunRecord(
        job_id=job.id,
        attempt=job.attempt,
        user=job.user,
        partition=job.spec.partition,
        flavor=job.spec.flavor,
        share=share_of(job, partition) if partition else 0.0,
        gpus=job.allocation.gpus if named else job.spec.gpus_counted,
        start_time=job.start_time if since is None else since,
        end_time=None,
        outcome=None,
        nodes={p.node: len(p.gpus) for p in job.allocation.parts},
        shareable={p.node: p.gpus for p in job.allocation.parts} if job.spec.share else {},
        group=job.spec.group,
        qos=job.spec.qos,
    )


def share_of(job: JobRecord, partition: Partition) -> float:
    """Return λ of the paper's Eq. 4: the job's part of its partition, by its dominant resource.

    For the paper's flavors, whose GPUs, cores and memory are in proportion, this is Table 2's rate.
    """
    spec, nodes = job.spec, partition.nodes
    pairs = [
        (spec.gpus_counted / spec.nodes, sum(n.gpus for n in nodes)),
        (spec.cores_per_node, sum(n.cores for n in nodes)),
        (spec.memory_mib_per_node, sum(n.memory_mib for n in nodes)),
    ]
    return max((spec.nodes * part / total for part, total in pairs if total), default=0.0)
