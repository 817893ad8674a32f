"""Compare policies, and request a change of the live policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpusched.client.context import Client, check_admin
from gpusched.client.control import check_reason
from gpusched.client.policies import is_same_policy
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.validate import known_partition
from gpusched.config.weights import DEFAULT
from gpusched.errors import GpuschedError, NoHistory, UsageError
from gpusched.model.commands import Promote, Rollback, ShadowOff, ShadowOn
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Partition
from gpusched.model.slurm import SlurmMode
from gpusched.model.units import local_time_zone
from gpusched.promotion.live import live_policies, mode_of, overrides
from gpusched.promotion.registry import RegisteredPolicy, find_policy, trained_for, training_of

if TYPE_CHECKING:
    from gpusched.nightly.proof import ProofVerdict

_LEASE_ENDS = (
    "until the controller runs: the lease expires within a minute; to end it now: "
    "scontrol update ReservationName=gpusched EndTime=now+1"
)


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """A requested change: the policy ("" for a rollback), the partitions and the evidence.

    ``mode``: the mode requested for partitions of Slurm. ``hint``: what else to do if no controller runs.
    """

    what: str
    policy: str = ""
    version: str = ""
    partitions: tuple[str, ...]
    verdicts: tuple[ProofVerdict, ...] = ()
    mode: SlurmMode | msgspec.UnsetType = msgspec.UNSET
    hint: str | msgspec.UnsetType = msgspec.UNSET


def _find(client: Client, text: str) -> RegisteredPolicy:
    return find_policy(text, client.inventory.path, client.state)


# -- what it is worth


def compare(
    client: Client,
    first: str,
    second: str,
    *,
    since: str | None,
    trace: str | None,
    partition: str | None,
    advance: Callable[[float, int], None] | None = None,
) -> list[ProofVerdict]:
    """Replay the second policy against the first, partition by partition.

    The jobs are the cluster's history ``since``, or a trace's. ``partition`` selects its jobs; with a trace, its nodes.
    ``advance`` is called with (replays done, replays in total), for each partition separately.

    Raises:
        UsageError: There is no such policy or partition, or both a trace and ``since``.
        GpuschedError: There is no history, or the weights cannot be used.
    """
    from gpusched.nightly.proof import judge, scenario_for

    base, other = _find(client, first).spec, _find(client, second).spec
    inventory = client.inventory
    chosen = [known_partition(inventory, partition)] if partition is not None else list(inventory.partitions)
    if trace is not None:
        if since is not None:
            raise UsageError("--since and --trace cannot be combined", "use one of them")
        from gpusched.traces.load import load

        jobs = load(trace)
        if partition is None:
            from gpusched.sim.power import power_model
            from gpusched.study.study import scenario_of

            return [judge(scenario_of(jobs, power=power_model), DEFAULT, base, other, advance)]
        return [judge(scenario_for(jobs, inventory, chosen[0]), partition, base, other, advance)]
    found, no_history = [], ""
    for part in chosen:
        try:
            begin = _parse_begin(since)
            found.append(_compare_on_history(client, part, base, other, begin, advance))
        except NoHistory as error:  # skip partitions without jobs, unless only this one was requested
            if partition is not None:
                raise
            no_history = error.message
    if not found:
        raise GpuschedError(no_history, "name a trace: --trace FILE")
    return found


def _parse_begin(since: str | None) -> float:
    from gpusched.accounting.report import parse_since

    return parse_since(since, time.time())


def _compare_on_history(
    client: Client,
    partition: Partition,
    base: PolicySpec,
    other: PolicySpec,
    begin: float,
    advance: Callable[[float, int], None] | None = None,
) -> ProofVerdict:
    from gpusched.nightly.proof import history_of, judge, scenario_for

    if client.reader is None:
        raise GpuschedError(f"{client.state}: there is no history yet", "start the controller, or use --force REASON")
    trace = history_of(client.inventory, client.reader, partition.name, begin, time.time())
    return judge(
        scenario_for(trace, client.inventory, partition, reader=client.reader), partition.name, base, other, advance
    )


def proof(
    client: Client, partition: Partition, incumbent: PolicySpec, candidate: PolicySpec, since: str | None
) -> ProofVerdict:
    """Compare the candidate with the incumbent on days that it was not trained on.

    Raises:
        GpuschedError: There is no such day, or its weights cannot be used.
    """
    from gpusched.nightly.proof import first_held_out

    if candidate.traits.places and not (client.reader is not None and client.reader.beliefs()):
        raise GpuschedError(
            f"{candidate.name}: no placement costs have been learned yet, so its fallback would decide",
            "wait until jobs report progress, or use --force REASON",
        )
    card = training_of(candidate, partition.name)
    if candidate.agent is not None and card is None:
        raise GpuschedError(
            f"{candidate.name} has no training card for {partition.name}, so its training days are unknown",
            "train it with gpusched train, or use --force REASON",
        )
    begin = max(_parse_begin(since), first_held_out(card.last if card else None))
    if begin > time.time():
        last = local_time_zone(card.last if card else None)
        raise GpuschedError(
            f"{candidate.name} was trained on {partition.name}'s jobs until {last}: no held-out day yet",
            "wait a few days, train with an earlier --until, or use --force REASON",
        )
    return _compare_on_history(client, partition, incumbent, candidate, begin)


# -- asking for a change


def promote(
    client: Client,
    text: str,
    partition: str | None,
    force: str | None,
    since: str | None,
    mode: SlurmMode | None = None,
) -> PolicyResult:
    """Request that a policy goes live, with proof or a reason; under Slurm in a mode.

    Proof is required for another policy, and for a mode that lets it do more. While Slurm decides, the incumbent is
    `easy`, which stands for Slurm's own scheduling.

    Raises:
        UsageError: There is no such policy or partition, or a mode was given and the engine is not Slurm.
        GpuschedError: The proof failed, the policy is already live, or the user is not an admin.
    """
    check_admin(client)
    if mode is not None and client.inventory.engine != "slurm":
        raise UsageError("--mode needs engine: slurm in inventory.yaml", "omit it")
    if force is not None:
        check_reason("--force", force)
        if since is not None:
            raise UsageError("--since and --force cannot be combined", "with --force nothing is proved")
    known = _find(client, text)
    chosen = _partitions(client, known.spec, partition)
    live = live_policies(client.inventory, client.reader)
    changes = client.reader.live_changes() if client.reader else {}
    already_live = {
        p.name for p in chosen if overrides(p, changes.get(p.name)) and is_same_policy(live[p.name], known.spec)
    }  # there only the mode can change
    modes_before = {p.name: mode_of(p, changes.get(p.name)) for p in chosen}
    pending = [p for p in chosen if p.name not in already_live or mode not in (None, modes_before[p.name])]
    if not pending:
        raise GpuschedError(f"{known.spec.name} ({known.spec.version}) is already live in {chosen[0].name}")
    verdicts: dict[str, ProofVerdict] = {}
    for part in pending if force is None else ():
        if part.name in already_live and mode is not None and not _is_extended(mode, modes_before[part.name]):
            continue
        incumbent = live[part.name]
        if client.inventory.engine == "slurm" and modes_before[part.name] is SlurmMode.OBSERVE:
            incumbent = load_policy(BUILT_IN / "easy.yaml")
        verdicts[part.name] = proof(client, part, incumbent, known.spec, since)
    if failed := [v for v in verdicts.values() if not v.passed]:
        lines = "; ".join(f"{v.partition}: {v.line}" for v in failed)
        raise GpuschedError(f"not promoted: {lines}", "wait for more days of data, or use --force REASON")
    for part in pending:
        verdict = verdicts.get(part.name)
        reason = verdict.line if verdict else f"{mode} instead of {modes_before[part.name]}"
        command = Promote(
            time=time.time(), partition=part.name, path=str(known.path.absolute()), version=known.spec.version,
            reason=force if force is not None else reason, forced=force is not None,
            evidence=msgspec.to_builtins(verdict) if verdict else None, mode=mode,
        )  # fmt: skip
        client.deliverable_inbox().deliver(command)
    return PolicyResult(
        what="promote", policy=known.spec.name, version=known.spec.version, partitions=tuple(p.name for p in pending),
        verdicts=tuple(verdicts.values()), mode=mode or msgspec.UNSET,
    )  # fmt: skip


def _is_extended(mode: SlurmMode, current: SlurmMode) -> bool:
    order = list(SlurmMode)
    return order.index(mode) > order.index(current)


def rollback(client: Client, partition: str | None, reason: str | None) -> PolicyResult:
    """Request a return to the previous policy.

    Raises:
        UsageError: There is no such partition, or several to choose from.
        GpuschedError: There is no earlier policy, or the user is not an admin.
    """
    check_admin(client)
    changes = client.reader.live_changes() if client.reader else {}
    if partition is not None:
        chosen = known_partition(client.inventory, partition).name
    else:
        promoted = [p.name for p in client.inventory.partitions if overrides(p, changes.get(p.name))]
        if len(promoted) > 1:
            raise UsageError(f"policies were promoted in {', '.join(promoted)}", "choose one with --partition P")
        if not promoted:
            raise GpuschedError(
                "no policy was promoted, so there is nothing to roll back", "see gpusched policy history"
            )
        chosen = promoted[0]
    if reason is not None:
        check_reason("REASON", reason)
    last = changes.get(chosen)
    if last is None or last.back_to is None:
        raise GpuschedError(f"{chosen}: there is no earlier policy", "the live one is set in inventory.yaml")
    command = Rollback(time=time.time(), partition=chosen, reason=reason or f"back from {last.spec.name}")
    client.deliverable_inbox().deliver(command)
    decides = client.inventory.engine == "slurm" and last.mode is SlurmMode.DECIDE
    return PolicyResult(what="rollback", partitions=(chosen,), hint=_LEASE_ENDS if decides else msgspec.UNSET)


def shadow(client: Client, text: str | None, partition: str | None, off: bool) -> PolicyResult:
    """Request that a policy runs as a shadow beside the live one, or no longer.

    Raises:
        UsageError: There is no such policy or partition.
        GpuschedError: There is no shadow to stop, or the user is not an admin.
    """
    check_admin(client)
    if off:
        return _shadow_off(client, text, partition)
    if text is None:
        raise UsageError("no policy given", "name one, or use --off")
    known = _find(client, text)
    chosen = _partitions(client, known.spec, partition)
    for part in chosen:
        path = str(known.path.absolute())
        command = ShadowOn(time=time.time(), partition=part.name, path=path, version=known.spec.version)
        client.deliverable_inbox().deliver(command)
    names = tuple(p.name for p in chosen)
    return PolicyResult(what="shadow", policy=known.spec.name, version=known.spec.version, partitions=names)


def _shadow_off(client: Client, text: str | None, partition: str | None) -> PolicyResult:
    shadows = client.reader.shadows() if client.reader else {}
    found = [
        s.partition
        for s in shadows.values()
        if s.until is None and partition in (None, s.partition) and text in (None, s.spec.name)
    ]
    if not found:
        raise GpuschedError(f"no shadow policy{f' in {partition}' if partition else ''}")
    for name in found:
        client.deliverable_inbox().deliver(ShadowOff(time=time.time(), partition=name))
    return PolicyResult(what="shadow off", policy=text or "", partitions=tuple(found))


def _partitions(client: Client, spec: PolicySpec, partition: str | None) -> list[Partition]:
    """Return the named partition, or all partitions that the policy can decide for.

    Raises:
        UsageError: There is no such partition, or the policy has no weights for any.
    """
    from gpusched.config.weights import load_model

    inventory = client.inventory
    if partition is not None:
        chosen = [known_partition(inventory, partition)]
    else:
        names = set(trained_for(spec))
        chosen = [p for p in inventory.partitions if spec.agent is None or p.name in names or DEFAULT in names]
    if not chosen:
        raise GpuschedError(f"{spec.name} has no weights for any partition", "train it: gpusched train")
    for part in chosen if spec.agent is not None else ():
        load_model(Path(spec.folder), part.name, spec.agent or "")
    return chosen
