"""The limits of users, groups and classes under which this cluster's own jobs ran, for their replays."""

from __future__ import annotations

from gpusched.model.resources import Inventory
from gpusched.queue.store import Reader
from gpusched.sim.quotas import QuotaSet, Use
from gpusched.study.study import Scenario

APPLIED = "the replay applies the inventory's limits of users, groups and classes"
ALONE = "; jobs of other partitions do not count for them"
WITHOUT = (
    "the record was made under limits of users, groups or classes; this replay applies none, so recorded and replayed "
    "waits are not comparable"
)


def limited(inventory: Inventory | None) -> bool:
    """Whether the jobs of this inventory run under limits of its own; those of Slurm run under Slurm's."""
    return inventory is not None and bool(inventory.quotas) and inventory.engine != "slurm"


def with_quotas(scenario: Scenario, inventory: Inventory, reader: Reader | None = None) -> Scenario:
    """Return the scenario under the inventory's limits.

    ``reader``: of the store whose jobs these are: what it says was used in the week before counts for GPU hours.
    """
    quotas, epoch, used = inventory.quotas, scenario.trace.epoch, list[Use]()
    if reader is not None and epoch is not None and quotas.by_hours:
        used = [
            Use(user, group, qos, gpus, start - epoch, min(end - epoch, 0.0))
            for user, group, qos, gpus, start, end in reader.runs_of_week(epoch)
        ]
    alone = len(inventory.partitions) > 1 and len(scenario.pool.partitions) == 1
    note = APPLIED + (ALONE if alone else "")
    return scenario._replace(quotas=QuotaSet(quotas, tuple(used)), notes=(*scenario.notes, note))


def with_own_quotas(scenario: Scenario, inventory: Inventory, reader: Reader | None) -> Scenario:
    """Return the scenario, of jobs of this inventory's store, under the limits under which they ran."""
    return with_quotas(scenario, inventory, reader) if reader is not None and limited(inventory) else scenario
