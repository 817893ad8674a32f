"""Carries out admins' commands on policies: promote, roll back, shadow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpusched.config.policies import load_policies, load_policy, policy_folders
from gpusched.config.validate import known_partition
from gpusched.config.weights import load_model
from gpusched.errors import GpuschedError
from gpusched.model.commands import Promote, Rollback, ShadowOff, ShadowOn
from gpusched.model.events import Event
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.slurm import SlurmMode
from gpusched.promotion.freeze import freeze
from gpusched.promotion.live import active_policy, file_changes, mode_of, overrides
from gpusched.queue.promotions import PolicyChange, Shadow
from gpusched.queue.store import Store
from gpusched.sched.agent import prepared_weights


class LivePolicies(NamedTuple):
    """The active policy of each partition, and the required digest of its weights ("": any)."""

    policies: dict[str, PolicySpec]
    digests: dict[str, str]


def load_active_policies(
    store: Store, inventory: Inventory, declared: Mapping[str, PolicySpec], now: float
) -> LivePolicies:
    """Return the active policies; record changes that inventory.yaml and the policies' files have made.

    ``declared``: partition -> the policy that inventory.yaml names.
    """
    changes = store.live_changes()
    if file_change_list := file_changes(inventory, declared, changes, now):
        with store.transaction():
            for change in file_change_list:
                record_change(store, change)
        changes = store.live_changes()
    policies = {p.name: active_policy(p, changes[p.name], declared[p.name]) for p in inventory.partitions}
    digests = {p.name: changes[p.name].digest for p in inventory.partitions if overrides(p, changes[p.name])}
    return LivePolicies(policies, digests)


class PolicyCommandHandler:
    """Carries out commands on policies, inside the caller's transaction.

    Every method raises `GpuschedError` if a command cannot be carried out; then nothing has changed.
    """

    def __init__(self, store: Store, state: Path, inventory: Inventory) -> None:
        self._store, self._state, self._inventory = store, state, inventory

    def promote(self, command: Promote, user: str, now: float) -> None:
        """Freeze the policy and make it the active one."""
        partition = known_partition(self._inventory, command.partition)
        spec, digest = self._frozen(command, partition)
        last = self._last(partition, now)
        mode = self._mode(command.mode, partition, last)
        if (
            overrides(partition, last)
            and (last.spec.name, last.spec.version) == (spec.name, spec.version)
            and mode == last.mode
        ):
            raise GpuschedError(f"{spec.name} ({spec.version}) is already live in {partition.name}")
        record_change(
            self._store,
            PolicyChange(
                time=now, partition=partition.name, user=user, act="promote", reason=command.reason, spec=spec,
                from_name=last.spec.name, from_version=last.spec.version, override=True, declared=partition.policy,
                digest=digest, back_to=last.seq, forced=command.forced, evidence=command.evidence, mode=mode,
            ),
        )  # fmt: skip
        shadow = self._store.shadows().get(partition.name)
        if shadow is not None and shadow.until is None and shadow.spec.version == spec.version:
            self._put_shadow(msgspec.structs.replace(shadow, until=now), "shadow_ended", user, now)

    def rollback(self, command: Rollback, user: str, now: float) -> None:
        """Restore the previous policy, skipping those whose weights can no longer be used."""
        partition = known_partition(self._inventory, command.partition)
        last = self._last(partition, now)
        target, digest = self._rollback_target(partition, last)
        files = self._declared()
        declared = files is not None and not target.override and target.spec.name == partition.policy
        spec = files[partition.name] if files is not None and declared else target.spec
        record_change(
            self._store,
            PolicyChange(
                time=now, partition=partition.name, user=user, act="rollback", reason=command.reason, spec=spec,
                from_name=last.spec.name, from_version=last.spec.version, override=not declared,
                declared=partition.policy,
                digest="" if declared else digest, back_to=target.back_to, mode=None if declared else target.mode,
            ),
        )  # fmt: skip

    def shadow_on(self, command: ShadowOn, user: str, now: float) -> None:
        """Freeze the policy and run it as a shadow from now on."""
        partition = known_partition(self._inventory, command.partition)
        spec, digest = self._frozen(command, partition)
        self._store.forget_differences(partition.name)
        shadow = Shadow(partition=partition.name, spec=spec, digest=digest, since=now, by=user)
        self._put_shadow(shadow, "shadow_began", user, now)

    def shadow_off(self, command: ShadowOff, user: str, now: float) -> None:
        """Stop the shadow; its record remains."""
        shadow = self._store.shadows().get(command.partition)
        if shadow is None or shadow.until is not None:
            raise GpuschedError(f"no shadow policy in {command.partition}")
        self._put_shadow(msgspec.structs.replace(shadow, until=now), "shadow_ended", user, now)

    def _put_shadow(self, shadow: Shadow, kind: str, user: str, now: float) -> None:
        self._store.put_shadow(shadow)
        data = {"partition": shadow.partition, "policy": shadow.spec.name, "version": shadow.spec.version}
        self._store.append([Event(time=now, kind=kind, user=user, data=data)])

    def _frozen(self, command: Promote | ShadowOn, partition: Partition) -> tuple[PolicySpec, str]:
        """Return the policy, copied into the state folder, and the digest of its weights for the partition."""
        path, folders = Path(command.path), policy_folders(self._inventory.path)
        try:
            spec = load_policy(path, folders)
        except OSError as error:  # such as another user's
            raise GpuschedError(f"{path} cannot be read: {error.strerror}") from None
        if spec.version != command.version:
            raise GpuschedError(f"{path} is {spec.version} now, but was {command.version}: it has changed")
        digest = usable_digest(spec, partition.name)
        return freeze(path, spec, self._state, folders), digest

    def _mode(self, asked: SlurmMode | None, partition: Partition, last: PolicyChange) -> SlurmMode | None:
        """Return the Slurm mode of the partition; by default it does not change."""
        if self._inventory.engine == "slurm":
            return asked or mode_of(partition, last)
        if asked is not None:
            raise GpuschedError(f"{partition.name} is not a partition of Slurm, so it has no mode")
        return None

    def _last(self, partition: Partition, now: float) -> PolicyChange:
        """Return the partition's last change, after recording changes made in files."""
        changes = self._store.live_changes()
        declared = self._declared()
        if declared is not None:
            for change in file_changes(self._inventory, declared, changes, now):
                record_change(self._store, change)
            changes = self._store.live_changes()
        if partition.name not in changes:
            load_policies(self._inventory)  # raises the reason
        return changes[partition.name]

    def _declared(self) -> dict[str, PolicySpec] | None:
        """Return the policies of inventory.yaml; None if their files are missing, which must not prevent a rollback."""
        try:
            return load_policies(self._inventory)
        except GpuschedError:
            return None

    def _rollback_target(self, partition: Partition, last: PolicyChange) -> tuple[PolicyChange, str]:
        """Return the latest earlier change whose policy can decide, and the digest of its weights."""
        back = last.back_to
        while back is not None and (target := self._store.policy_change(back)) is not None:
            try:
                usable_digest(target.spec, partition.name)
                return target, target.digest
            except GpuschedError:
                back = target.back_to
        raise GpuschedError(f"{partition.name}: there is no earlier policy", "the live one is set in inventory.yaml")


def record_change(store: Store, change: PolicyChange) -> None:
    """Store a policy change, and record its event."""
    store.add_policy_change(change)
    if not change.from_name:
        return  # the first record is not a change
    data = {
        "partition": change.partition, "act": change.act, "reason": change.reason, "from": change.from_name,
        "from_version": change.from_version, "to": change.spec.name, "to_version": change.spec.version,
        "forced": change.forced,
    }  # fmt: skip
    if change.mode is not None:
        data["mode"] = change.mode
    store.append([Event(time=change.time, kind="policy_changed", user=change.user or None, data=data)])


def usable_digest(spec: PolicySpec, partition: str) -> str:
    """Return the digest of an agent's weights for a partition; "" for a staged policy.

    Raises:
        GpuschedError: There are no weights, or they cannot be used.
    """
    if spec.agent is None:
        return ""
    model = load_model(Path(spec.folder), partition, spec.agent)
    try:
        prepared_weights(model)
    except ValueError as error:
        raise GpuschedError(f"{model.path}: {error}", "train it again") from None
    return model.digest
