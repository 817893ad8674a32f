"""The policy in charge of each partition: the one inventory.yaml names, or one that was promoted over it since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.slurm import SlurmMode
from gpusched.queue.lastgood import policies_or_kept
from gpusched.queue.promotions import PolicyChange, PolicyReads

if TYPE_CHECKING:
    from gpusched.queue.store import Reader


def live_policies(inventory: Inventory, reader: Reader | None) -> dict[str, PolicySpec]:
    """Partition -> the policy in charge; ``reader``: the store, None where there is none yet.

    Raises:
        FileError: A policy that inventory.yaml names does not exist, or its file is wrong, and none is kept.
    """
    declared = policies_or_kept(inventory, reader)
    changes = reader.live_changes() if reader else {}
    return {p.name: in_charge(p, changes.get(p.name), declared[p.name]) for p in inventory.partitions}


def overrides(partition: Partition, last: PolicyChange | None) -> bool:
    """Whether the partition's last change still goes before inventory.yaml.

    The last word counts: once inventory.yaml names another policy than it did at the promotion, the file decides.
    """
    return last is not None and last.override and last.declared == partition.policy


def in_charge(partition: Partition, last: PolicyChange | None, declared: PolicySpec) -> PolicySpec:
    """The partition's policy: its last change's, or the ``declared`` one."""
    return last.spec if last is not None and overrides(partition, last) else declared


def mode_of(partition: Partition, last: PolicyChange | None) -> SlurmMode:
    """What gpusched does for a partition of Slurm: by its last change, as long as that goes before inventory.yaml.

    A policy that inventory.yaml names has proved nothing, so it only observes.
    """
    mode = last.mode if last is not None and overrides(partition, last) else None
    return mode or SlurmMode.OBSERVE


def live_modes(inventory: Inventory, reader: PolicyReads | None) -> dict[str, SlurmMode]:
    """Partition -> what gpusched does there; empty where the engine is not Slurm."""
    if inventory.engine != "slurm":
        return {}
    changes = reader.live_changes() if reader else {}
    return {p.name: mode_of(p, changes.get(p.name)) for p in inventory.partitions}


def file_changes(
    inventory: Inventory, declared: Mapping[str, PolicySpec], changes: Mapping[str, PolicyChange], now: float
) -> list[PolicyChange]:
    """What inventory.yaml and the policies' files have changed since the last changes that are known.

    ``declared``: partition -> the policy that inventory.yaml names. ``changes``: partition -> its last known change.
    """
    found = []
    for partition in inventory.partitions:
        last, spec = changes.get(partition.name), declared[partition.name]
        if overrides(partition, last):
            continue
        if last is None or last.declared != partition.policy or last.override:
            act, reason = "inventory", f"inventory.yaml names {partition.policy}"
        elif (last.spec.name, last.spec.version) != (spec.name, spec.version):
            act, reason = "files", f"the files of {spec.name} changed"
        else:
            continue
        found.append(
            PolicyChange(
                time=now, partition=partition.name, user="", act=act, reason=reason, spec=spec,  # type: ignore[arg-type]
                from_name=last.spec.name if last else "", from_version=last.spec.version if last else "",
                declared=partition.policy, back_to=_before(last, act),
            )
        )  # fmt: skip
    return found


def _before(last: PolicyChange | None, act: str) -> int | None:
    """What a rollback of a change of files restores: nobody kept an earlier state of the same files."""
    if last is None:
        return None
    return last.back_to if act == "files" else last.seq
