"""Nightly verdicts on policies that are not live, and training of candidates."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpusched.config.weights import ModelError, load_model
from gpusched.errors import GpuschedError
from gpusched.model.commands import Promote
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.units import iso_utc
from gpusched.nightly.proof import ProofVerdict, first_held_out, history_of, judge, scenario_for
from gpusched.promotion.registry import (
    CANDIDATES,
    RegisteredPolicy,
    ShadowComparison,
    find_policy,
    known_policies,
    training_of,
)
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Reader
from gpusched.study.compare import DAY_S, MIN_DAYS

_log = logging.getLogger(__name__)
KEPT_NIGHTS = 14  # of candidates: enough for five days to be held out from one, and then some


def retrain(
    inventory: Inventory, reader: Reader, folder: Path, live: Mapping[str, PolicySpec], now: float
) -> list[str]:
    """Train the live and shadow agents again, without the last day; leave candidates in the state folder.

    No part is held out: the days that follow judge them (`judge_candidates`).

    ``folder``: the state folder; ``live``: partition -> the active policy.

    Returns:
        For every partition with an agent, in one line what became of it.
    """
    from gpusched.agents.common.request import TrainingReport, TrainRequest
    from gpusched.agents.training.train import not_saved, train

    day = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
    until = math.floor((now - DAY_S) / DAY_S) * DAY_S
    since = until - inventory.settings.retrain_days * DAY_S
    shadows = {s.partition: s.spec for s in reader.shadows().values() if s.until is None}
    online = [shadow.name for shadow in shadows.values() if shadow.traits.online]  # they are updated instead
    lines = []
    for partition, spec in _agents(inventory, live, shadows):
        if spec.name in online and spec == shadows.get(partition.name):
            continue
        source = _source(inventory, folder, spec)
        out = folder / CANDIDATES / day / partition.name / spec.name
        request = TrainRequest(
            policy=str(source), partition=partition.name, inventory=str(inventory.path), out=str(out), hold_out=0.0,
            since=iso_utc(since), until=iso_utc(until), judged_later=True,
        )  # fmt: skip
        kept = out.exists()  # trained before on this day
        try:
            problem = not_saved(train(request, TrainingReport()))
        except Exception as error:  # other people's workloads and components: it must not cost the report
            problem = _as_ours(error)
        if problem is None:
            lines.append(f"{partition.name}: {spec.name} retrained, in {out}")
            continue
        if not kept:
            shutil.rmtree(out, ignore_errors=True)
        lines.append(f"{partition.name}: {spec.name} not trained: {problem.line()}")
    return lines or ([] if online else ["no live or shadow agent, so nothing to train"])


def remove_old(folder: Path) -> None:
    """Remove the candidates of earlier nights."""
    for old in sorted((folder / CANDIDATES).glob("????-??-??"))[:-KEPT_NIGHTS]:
        shutil.rmtree(old, ignore_errors=True)


def update_shadows(inventory: Inventory, reader: Reader, folder: Path, now: float) -> list[str]:
    """Update the shadows that learn online; leave the new versions as candidates. Arguments as of `retrain`.

    The last `MIN_DAYS` whole days are not learned from, so that they can judge. Weights go on from those of the last
    update of the same shadow; the shadow itself stays as it was frozen.

    Returns:
        For every such shadow, in one line what became of it.
    """
    from gpusched.agents.common.request import TrainRequest
    from gpusched.agents.training.online import update_online

    until = (math.floor(now / DAY_S) - MIN_DAYS) * DAY_S
    since = until - inventory.settings.retrain_days * DAY_S
    day, lines = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d"), []
    for shadow in reader.shadows().values():
        partition, spec = inventory.partition(shadow.partition), shadow.spec
        if shadow.until is not None or partition is None or not spec.traits.online:
            continue
        start, known_until = _last_update(folder, partition.name, spec)
        request = TrainRequest(
            policy=spec.folder, partition=partition.name, inventory=str(inventory.path), hold_out=0.0,
            out=str(folder / CANDIDATES / day / partition.name / spec.name), since=iso_utc(since), until=iso_utc(until),
        )  # fmt: skip
        try:
            card = update_online(request, spec, start, known_until, until)
            lines.append(f"{partition.name}: {spec.name} learned {card.notes[0]}; in {request.out}")
        except Exception as error:
            lines.append(f"{partition.name}: {spec.name} learned nothing online: {_as_ours(error).line()}")
    return lines


def _as_ours(error: Exception) -> GpuschedError:
    """Return the error as one of ours; log any other, since it is a defect."""
    if isinstance(error, GpuschedError):
        return error
    _log.error("a training or a proof failed", exc_info=error)
    return GpuschedError(f"{type(error).__name__}: {error}"[:500])


def _last_update(folder: Path, partition: str, shadow: PolicySpec) -> tuple[Path, float]:
    """Return the folder of the latest weights learned online from a shadow, else its own, and until when they know."""
    from gpusched.agents.training.online import ONLINE_OF, ONLINE_UNTIL

    for found in sorted((folder / CANDIDATES).glob(f"????-??-??/{partition}/{shadow.name}"), reverse=True):
        try:
            about = load_model(found, partition, shadow.agent or "").about
        except ModelError:
            continue
        if about.get(ONLINE_OF) == shadow.version:
            return found, float(about[ONLINE_UNTIL])
    card = training_of(shadow, partition)
    return Path(shadow.folder), card.last if card is not None and card.last is not None else -math.inf


def _agents(
    inventory: Inventory, live: Mapping[str, PolicySpec], shadows: Mapping[str, PolicySpec]
) -> Iterator[tuple[Partition, PolicySpec]]:
    """Yield the agents to train: the live one, and the shadow if it is another."""
    for partition in inventory.partitions:
        specs = {s.name: s for s in (live[partition.name], shadows.get(partition.name)) if s is not None and s.agent}
        for spec in specs.values():
            yield partition, spec


def _source(inventory: Inventory, folder: Path, spec: PolicySpec) -> Path:
    """Return the policy's own file, which may have new hyper-parameters; else the copy in use."""
    try:
        return find_policy(spec.name, inventory.path, folder).path
    except GpuschedError:
        return Path(spec.folder)


def judge_candidates(
    inventory: Inventory, reader: Reader, folder: Path, live: Mapping[str, PolicySpec], now: float
) -> tuple[ShadowComparison, ...]:
    """Compare shadows and candidates with the live policy on days outside their training data.

    With ``auto_promote`` it asks the controller to promote the best that passed. Arguments as of `retrain`.
    """
    found = []
    for shadow in reader.shadows().values():
        partition = inventory.partition(shadow.partition)
        if shadow.until is None and partition is not None:
            known = RegisteredPolicy(shadow.spec, Path(shadow.spec.folder), "frozen")
            found.append(_judge(inventory, reader, partition, live[partition.name], known, "shadow", now))
    candidates = [k for k in known_policies(inventory.path, folder) if k.origin == "candidate"]
    for partition in inventory.partitions:
        incumbent = live[partition.name]
        own = [k for k in candidates if k.path.parent.name == partition.name and k.spec.version != incumbent.version]
        rows = [_judge(inventory, reader, partition, incumbent, k, "candidate", now) for k in own]
        found += _promoted(inventory, partition, folder, own, rows)
    return tuple(found)


def _judge(
    inventory: Inventory,
    reader: Reader,
    partition: Partition,
    live: PolicySpec,
    known: RegisteredPolicy,
    state: str,
    now: float,
) -> ShadowComparison:
    spec = known.spec
    card = training_of(spec, partition.name)
    verdict: ProofVerdict | None = None
    try:
        begin = max(first_held_out(card.last if card else None), now - inventory.settings.retrain_days * DAY_S)
        trace = history_of(inventory, reader, partition.name, begin, now)
        verdict = judge(scenario_for(trace, inventory, partition, reader=reader), partition.name, live, spec)
        line = verdict.line
    except Exception as error:
        line = f"{spec.name}: {_as_ours(error).message}"
    return ShadowComparison(
        partition=partition.name, state=state, name=spec.name, version=spec.version, path=str(known.path), line=line,
        passed=verdict is not None and verdict.passed, verdict=msgspec.to_builtins(verdict) if verdict else None,
    )  # fmt: skip


def _promoted(
    inventory: Inventory,
    partition: Partition,
    folder: Path,
    candidates: list[RegisteredPolicy],
    rows: list[ShadowComparison],
) -> list[ShadowComparison]:
    """Return the rows; propose the best that passed or, with ``auto_promote``, request its promotion."""
    wanted = inventory.settings.auto_promote if partition.auto_promote is None else partition.auto_promote
    passed = [i for i, row in enumerate(rows) if row.passed and row.verdict is not None and row.verdict["gain"] > 0]
    if not passed:
        return rows
    best = max(passed, key=lambda i: (rows[i].verdict or {})["gain"])
    if not wanted:
        return [msgspec.structs.replace(row, proposed=i == best) for i, row in enumerate(rows)]
    command = Promote(
        time=time.time(), partition=partition.name, path=str(candidates[best].path.absolute()),
        version=rows[best].version, reason=f"auto_promote: {rows[best].line}", evidence=rows[best].verdict,
    )  # fmt: skip
    Inbox(folder).deliver(command)
    return [msgspec.structs.replace(row, promoted=i == best) for i, row in enumerate(rows)]
