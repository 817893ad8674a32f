"""Limit how many tasks of an array one decision considers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpusched.model.indices import expand_spans
from gpusched.model.jobs import JobRecord, JobSpec
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.slicetables import GPU_PARTS, parts_of

SPARE_TASKS = 20  # as many as Slurm plans ahead of one array (bf_max_job_array_resv)
MAX_SIMULATED_PARTS = 1000  # parts of an array that a forecast simulates, but at least as many as can run at once


class ArrayTaskLimit:
    """Free resources by partition, computed from declarations and allocations: never less than a job could get.

    Args:
        inventory: What is declared.
        policies: By partition. Where one may stop jobs for others, or resize them, what these hold counts as free.
        active: Jobs that hold resources.
        array_limits: Array -> how many of its tasks may run at once. running_tasks: how many do.
    """

    def __init__(
        self,
        inventory: Inventory,
        policies: Mapping[str, PolicySpec],
        active: Iterable[JobRecord],
        array_limits: Mapping[str, int],
        running_tasks: Mapping[str, int],
    ) -> None:
        self._limits, self._running = array_limits, running_tasks
        self._total = {
            p.name: [
                sum(n.gpus for n in p.nodes) * GPU_PARTS,
                sum(n.cores for n in p.nodes),
                sum(n.memory_mib for n in p.nodes),
            ]
            for p in inventory.partitions
        }
        self._free = {name: list(amounts) for name, amounts in self._total.items()}
        of_node = {node.name: node.partition for node in inventory.nodes}
        for job in active:
            for part in job.allocation.parts if job.allocation else ():
                policy = policies.get(name := of_node.get(part.node, ""))
                if policy is not None and not _may_reclaim(policy):
                    gpu_parts = len(part.gpus) * parts_of(job.spec.profile)
                    for i, amount in enumerate((gpu_parts, part.cores, part.memory_mib)):
                        self._free[name][i] -= amount

    def of_array(self, job: JobRecord) -> int | None:
        """Return how many more tasks of its array may run; None: no limit."""
        limit = self._limits.get(job.array_id) if job.array_id else None
        return None if limit is None else max(0, limit - self._running.get(job.array_id or "", 0))

    def for_tasks(self, row: JobRecord, now: float) -> int:
        """Return how many tasks of a row to consider, at least 1: those that could start now, and some to plan ahead.

        The tasks behind them wait for the same as the last of them, which did not start either.
        """
        if row.held_by or (row.eligible_time is not None and row.eligible_time > now):
            return 1
        limit = _max_concurrent(row.spec, self._free) + SPARE_TASKS
        room = self.of_array(row)
        return limit if room is None else min(limit, room + 1)

    def ahead(self, row: JobRecord) -> list[tuple[int, int]]:
        """Return (index, further tasks it stands for) of the tasks that a forecast simulates, ascending.

        In a long array, one simulated task stands for several consecutive ones; the last tasks are simulated
        individually: their ends decide when the next job starts.
        """
        limit = self._limits.get(row.array_id or "", row.count)
        concurrent = max(1, min(_max_concurrent(row.spec, self._total), limit, row.count))
        tail, parts = 2 * concurrent, concurrent * max(1, MAX_SIMULATED_PARTS // concurrent)
        per_part = (row.count - tail) // parts
        if per_part < 2:
            return [(index, 0) for index in expand_spans(row.tasks)]
        indices = list(expand_spans(row.tasks))
        individual = indices[parts * per_part :]
        return [(indices[i * per_part], per_part - 1) for i in range(parts)] + [(index, 0) for index in individual]


def _max_concurrent(spec: JobSpec, amounts: Mapping[str, Sequence[int]]) -> int:
    """Return how many such jobs its partition's parts of GPUs, cores and MiB suffice for, regardless of nodes."""
    has = amounts.get(spec.partition, (0, 0, 0))
    if spec.elastic is not None:
        needs = (spec.elastic.sizes[0] * GPU_PARTS, 1, 1)
    elif spec.share:  # two jobs may share a GPU
        needs = (0, *spec.amounts)
    else:
        needs = (spec.gpus * parts_of(spec.profile), *spec.amounts)
    return min((max(0, amount) // need for amount, need in zip(has, needs, strict=True) if need), default=0)


def _may_reclaim(policy: PolicySpec) -> bool:
    """Return whether the policy may free resources that jobs hold."""
    both = (policy, *([policy.fallback] if policy.fallback is not None else []))
    return policy.agent is not None or any(spec.sizes != "base" for spec in both)
