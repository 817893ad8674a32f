"""The active policy of each partition: the one that inventory.yaml names, or one promoted over it since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.slurm import SlurmMode
from gpusched.queue.lastgood import policies_or_kept
from gpusched.queue.promotions import PolicyChange, PolicyReads

if TYPE_CHECKING:
    from gpusched.queue.store import Reader


def live_policies(inventory: Inventory, reader: Reader | None) -> dict[str, PolicySpec]:
    """Return partition -> active policy; ``reader``: the store, None where none exists yet.

    Raises:
        FileError: A policy that inventory.yaml names does not exist, or its file is wrong, and none is kept.
    """
    declared = policies_or_kept(inventory, reader)
    changes = reader.live_changes() if reader else {}
    return {p.name: active_policy(p, changes.get(p.name), declared[p.name]) for p in inventory.partitions}


def slice_fallbacks(inventory: Inventory, reader: Reader | None, jobs: Iterable[JobRecord]) -> dict[str, str]:
    """Return partition -> that its agent leaves MIG slices to its fallback, where one of the jobs waits for slices."""
    asked = {job.spec.partition for job in jobs if job.spec.profile and job.state is JobState.PENDING}
    policies = live_policies(inventory, reader) if asked else {}
    return {
        name: f"{name}: {policy.name} decides about whole GPUs only; {policy.for_slices.name} about MIG slices"
        for name, policy in policies.items()
        if name in asked and policy.for_slices.name != policy.name
    }


def overrides(partition: Partition, last: PolicyChange | None) -> bool:
    """Return whether the partition's last change still takes precedence over inventory.yaml.

    The last word counts: once inventory.yaml names another policy than it did at the promotion, the file decides.
    """
    return last is not None and last.override and last.declared == partition.policy


def active_policy(partition: Partition, last: PolicyChange | None, declared: PolicySpec) -> PolicySpec:
    """Return the partition's policy: its last change's, or the ``declared`` one."""
    return last.spec if last is not None and overrides(partition, last) else declared


def mode_of(partition: Partition, last: PolicyChange | None) -> SlurmMode:
    """Return gpusched's mode in a Slurm partition: its last change's, while that overrides inventory.yaml.

    A policy that inventory.yaml names has proved nothing, so it only observes.
    """
    mode = last.mode if last is not None and overrides(partition, last) else None
    return mode or SlurmMode.OBSERVE


def live_modes(inventory: Inventory, reader: PolicyReads | None) -> dict[str, SlurmMode]:
    """Return partition -> gpusched's mode there; empty unless the engine is Slurm."""
    if inventory.engine != "slurm":
        return {}
    changes = reader.live_changes() if reader else {}
    return {p.name: mode_of(p, changes.get(p.name)) for p in inventory.partitions}


def file_changes(
    inventory: Inventory, declared: Mapping[str, PolicySpec], changes: Mapping[str, PolicyChange], now: float
) -> list[PolicyChange]:
    """Return changes made in inventory.yaml and policy files since the last recorded changes.

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
    """Return the change that a rollback restores; None for file changes: their earlier content was not kept."""
    if last is None:
        return None
    return last.back_to if act == "files" else last.seq
