"""The known policies and which ones are live: ``gpusched policy list``, one policy's page, the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gpusched.client.context import Client
from gpusched.config.plugins import OURS, POLICY_GROUPS, components, origin_of
from gpusched.config.policies import others_of
from gpusched.config.validate import known_partition
from gpusched.config.weightfiles import DEFAULT, kept_anyway
from gpusched.config.weights import ModelError, load_model
from gpusched.errors import Warnings
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Partition
from gpusched.model.slurm import SlurmMode
from gpusched.model.units import count_of, iso_utc
from gpusched.promotion.live import live_modes, live_policies, mode_of, overrides
from gpusched.promotion.registry import (
    find_policy,
    known_policies,
    last_verdicts,
    trained_for,
    training_of,
    unreadable_policies,
)
from gpusched.queue.promotions import PolicyChange, Shadow
from gpusched.views.policy import ChangeRow, PolicyPage, PolicyRow


def rows(client: Client) -> list[PolicyRow]:
    """Return the live policies by partition, then shadows, candidates and retired policies."""
    inventory, reader = client.inventory, client.reader
    changes = reader.policy_changes() if reader else []
    live = live_policies(inventory, reader)
    shadows = [s for s in (reader.shadows() if reader else {}).values() if s.until is None]
    found = [_live_row(client, p, live[p.name], _last_change(changes, p.name)) for p in inventory.partitions]
    found += [_shadow_row(client, s) for s in shadows]
    listed = {(row.partition, row.name, row.version) for row in found}
    found += [r for r in _candidates(client, live) if (r.partition, r.name, r.version) not in listed]
    listed |= {(row.partition, row.name, row.version) for row in found}
    return found + _retired(changes, listed)


def _last_change(changes: list[PolicyChange], partition: str) -> PolicyChange | None:
    return next((c for c in reversed(changes) if c.partition == partition), None)


def _live_row(client: Client, partition: Partition, spec: PolicySpec, last_change: PolicyChange | None) -> PolicyRow:
    out = client.reader.fallbacks().get(partition.name) if client.reader else None
    promoted = last_change if overrides(partition, last_change) else None
    note = f"overrides {partition.policy} of inventory.yaml" if promoted else "named by inventory.yaml"
    if last_change is not None and last_change.override and promoted is None:
        note = f"inventory.yaml was edited after the promotion of {last_change.spec.name} and overrides it"
    return _row(
        spec, partition.name, "live", note=note, since=None if last_change is None else iso_utc(last_change.time),
        by=promoted.user if promoted else None, verdict=verdict_line(promoted), fallback=out and out.line,
        mode=mode_of(partition, last_change) if client.inventory.engine == "slurm" else msgspec.UNSET,
    )  # fmt: skip


def verdict_line(change: PolicyChange | None) -> str | None:
    """Return the evidence or reason of a promotion."""
    if change is None or change.act != "promote":
        return None
    return f"forced: {change.reason}" if change.forced else str((change.evidence or {}).get("line", change.reason))


def _shadow_row(client: Client, shadow: Shadow) -> PolicyRow:
    verdict = last_verdicts(client.state).get((shadow.partition, shadow.spec.name, shadow.spec.version))
    decisions = shadow.decisions + shadow.late + shadow.unusable
    note = f"same as the live policy in {shadow.same} of {count_of(decisions, 'decision')}"
    return _row(
        shadow.spec, shadow.partition, "shadow", note=note, since=iso_utc(shadow.since), by=shadow.by, verdict=verdict,
        fallback=shadow.trouble or None,
    )  # fmt: skip


def _candidates(client: Client, live: dict[str, PolicySpec]) -> list[PolicyRow]:
    verdicts = last_verdicts(client.state)
    found = []
    for known in known_policies(client.inventory.path, client.state):
        spec = known.spec
        if known.origin == "frozen" or (spec.agent is None and any(is_same_policy(spec, s) for s in live.values())):
            continue
        trained = trained_for(spec) if spec.agent is not None else []
        note = "untrained: gpusched train" if spec.agent is not None and not trained else known.origin
        for name in trained or [DEFAULT]:
            partition = None if name == DEFAULT else name
            verdict = verdicts.get((name, spec.name, spec.version))
            found.append(_row(spec, partition, "candidate", note=note, path=str(known.path), verdict=verdict))
    return found


def is_same_policy(first: PolicySpec, second: PolicySpec) -> bool:
    """Return whether both are the same version of the same policy."""
    return (first.name, first.version) == (second.name, second.version)


def _retired(changes: list[PolicyChange], listed: set[tuple[str | None, str, str]]) -> list[PolicyRow]:
    """Return policies that were promoted once and are no longer live, latest first."""
    found: dict[tuple[str | None, str, str], PolicyRow] = {}
    for change in reversed(changes):
        key = (change.partition, change.spec.name, change.spec.version)
        if change.override and key not in listed and key not in found:
            row = _row(change.spec, change.partition, "retired", since=iso_utc(change.time), by=change.user)
            found[key] = msgspec.structs.replace(row, verdict=verdict_line(change))
    return list(found.values())


def _row(spec: PolicySpec, partition: str | None, state: str, *, path: str | None = None, **more: Any) -> PolicyRow:
    card, others = training_of(spec, partition or DEFAULT), others_of(spec)
    kept = kept_anyway(spec.folder, partition or DEFAULT) if spec.agent is not None else ""
    more["fallback"] = more.get("fallback") or "; ".join(_broken(others)) or None
    if card is not None and card.public:
        note = f"trained on public traces ({card.trace}), not on this cluster's jobs"
        more["note"] = "; ".join(filter(None, (more.get("note"), note)))
    return PolicyRow(
        name=spec.name, version=spec.version, partition=partition, state=state, agent=spec.agent,  # type: ignore[arg-type]
        trained_at=card.trained_at if card else None, trace=card.trace if card else None,
        trace_sha256=card.trace_sha256 if card else None, path=path or spec.folder or None,
        kept_anyway=kept or None, origin=origin_of(others), **more,
    )  # fmt: skip


def problems(client: Client) -> list[str]:
    """Return a line for each policy file, and each other package's component for policies, that does not work."""
    found = [one for group in POLICY_GROUPS for one in components(group).values() if one.distribution != OURS]
    unreadable = unreadable_policies(client.inventory.path)
    # A file of which the last good copy is in use was named when the inventory was read.
    unread = [line for line in unreadable if not any(said.startswith(line) for said in Warnings.given)]
    return unread + _broken([(one.group, one.name) for one in found])


def _broken(named: list[tuple[str, str]]) -> list[str]:
    """Return a line for each of these components (group and name) that does not work."""
    if not named:
        return []
    from gpusched.sched.agent import why_broken

    return [why for group, name in named if (why := why_broken(group, name))]


def page(client: Client, text: str) -> PolicyPage:
    """Return one policy: its file, its training cards, and where it is live or a shadow.

    Raises:
        UsageError: No such policy.
    """
    inventory, reader = client.inventory, client.reader
    known = find_policy(text, inventory.path, client.state)
    spec = known.spec
    live = live_policies(inventory, reader)
    shadows = [s for s in (reader.shadows() if reader else {}).values() if s.spec.name == spec.name]
    cards = {p: t.card for p in trained_for(spec) if (t := training_of(spec, p))} if spec.agent else {}
    verdicts = last_verdicts(client.state)
    others = [f"{p} ({s.version})" for p, s in live.items() if s.name == spec.name and not is_same_policy(s, spec)]
    return PolicyPage(
        spec=spec, path=str(known.path), origin=known.origin,
        live=tuple(p for p, s in live.items() if is_same_policy(s, spec)),
        other_versions=tuple(others),
        weights=_weights(spec), cards=cards, shadows=tuple(shadows),
        differences=tuple(d for s in shadows for d in (reader.differences(s.partition, 5) if reader else ())),
        verdicts={s.partition: verdicts.get((s.partition, s.spec.name, s.spec.version)) for s in shadows},
        modes={p: mode for p, mode in live_modes(inventory, reader).items() if is_same_policy(live[p], spec)},
    )  # fmt: skip


def _weights(spec: PolicySpec) -> dict[str, str]:
    """Return partition -> what decides in its weights, in words, or why they cannot be used."""
    if spec.agent is None or not (partitions := trained_for(spec)):
        return {}
    from gpusched.agents.describe import describe_weights
    from gpusched.sched.agent import prepared_weights

    found = {}
    for name in partitions:
        try:
            model = load_model(Path(spec.folder), name, spec.agent)
            prepared_weights(model)
            found[name] = describe_weights(model)
        except ModelError as error:
            found[name] = f"the fallback: {error.line()}"
        except ValueError as error:  # of another shape
            found[name] = f"the fallback: {error}"
    return found


def history(client: Client, partition: str | None, limit: int) -> list[ChangeRow]:
    """Return the changes of live policies, oldest first."""
    if partition is not None:
        known_partition(client.inventory, partition)
    found = client.reader.policy_changes(partition, limit) if client.reader else []
    return [
        ChangeRow(
            time=iso_utc(c.time) or "", partition=c.partition, act=c.act, user=c.user or None, reason=c.reason,
            name=c.spec.name, version=c.spec.version, from_name=c.from_name or None,
            from_version=c.from_version or None, forced=c.forced, verdict=verdict_line(c),
            mode=(c.mode or SlurmMode.OBSERVE) if client.inventory.engine == "slurm" else msgspec.UNSET,
        )
        for c in found
    ]  # fmt: skip
