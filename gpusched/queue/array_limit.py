"""How many tasks of an array a decision has to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpusched.model.indices import each
from gpusched.model.jobs import JobRecord, JobSpec
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory

SPARE = 20  # as many as Slurm plans ahead of one array (bf_max_job_array_resv)
MOST_AHEAD = 1000  # parts of an array that are run forward, but at least as many as can run at once


class ArrayTaskLimit:
    """What is free by what is declared and held: never less than a job could have.

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
            p.name: [sum(n.gpus for n in p.nodes), sum(n.cores for n in p.nodes), sum(n.memory_mib for n in p.nodes)]
            for p in inventory.partitions
        }
        self._free = {name: list(amounts) for name, amounts in self._total.items()}
        of_node = {node.name: node.partition for node in inventory.nodes}
        for job in active:
            for part in job.allocation.parts if job.allocation else ():
                policy = policies.get(name := of_node.get(part.node, ""))
                if policy is not None and not _takes_back(policy):
                    for i, amount in enumerate((len(part.gpus), part.cores, part.memory_mib)):
                        self._free[name][i] -= amount

    def of_array(self, job: JobRecord) -> int | None:
        """How many more tasks of its array may run; None: there is no bound."""
        limit = self._limits.get(job.array_id) if job.array_id else None
        return None if limit is None else max(0, limit - self._running.get(job.array_id or "", 0))

    def for_tasks(self, row: JobRecord, now: float) -> int:
        """How many tasks of a row to look at: as many as could start at once, and some to plan ahead with; at least 1.

        Who behind them waits for the same as the last of them, which did not start either.
        """
        if row.held_by or (row.eligible_time is not None and row.eligible_time > now):
            return 1
        most = _at_once(row.spec, self._free) + SPARE
        room = self.of_array(row)
        return most if room is None else max(1, min(most, room + 1))

    def ahead(self, row: JobRecord) -> list[tuple[int, int]]:
        """The tasks of a row to run forward, and how many that come next each stands for besides itself.

        Of a long array so many tasks one after the other as one that lasts as long as they; the last ones, whose ends
        decide on when the next job begins, by themselves. Index and number, ascending.
        """
        limit = self._limits.get(row.array_id or "", row.count)
        places = max(1, min(_at_once(row.spec, self._total), limit, row.count))
        tail, parts = 2 * places, places * max(1, MOST_AHEAD // places)
        together = (row.count - tail) // parts
        if together < 2:
            return [(index, 0) for index in each(row.tasks)]
        indices = list(each(row.tasks))
        apart = indices[parts * together :]
        return [(indices[i * together], together - 1) for i in range(parts)] + [(index, 0) for index in apart]


def _at_once(spec: JobSpec, amounts: Mapping[str, Sequence[int]]) -> int:
    """How many such jobs its partition's GPUs, cores and MiB are enough for, wherever these are."""
    has = amounts.get(spec.partition, (0, 0, 0))
    if spec.elastic is not None:
        needs = (spec.elastic.sizes[0], 1, 1)
    elif spec.share:  # two may have the same GPU
        needs = (0, *spec.amounts)
    else:
        needs = (spec.gpus, *spec.amounts)
    return min((max(0, one) // need for one, need in zip(has, needs, strict=True) if need), default=0)


def _takes_back(policy: PolicySpec) -> bool:
    """Whether it may free what jobs hold."""
    both = (policy, *([policy.fallback] if policy.fallback is not None else []))
    return policy.agent is not None or any(one.sizes != "base" for one in both)
