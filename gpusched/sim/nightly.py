"""Every night: what was submitted lately, replayed under every policy there is, against the policies in force."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpusched.errors import GpuschedError
from gpusched.model.resources import Inventory, Partition
from gpusched.policies import load_policies, load_policy, policy_folders
from gpusched.sim.cluster import Pool
from gpusched.sim.policies import ReplayPolicy, of_spec
from gpusched.sim.power import power_model
from gpusched.sim.slicing import slice_trace
from gpusched.sim.study import FROM_EMPTY, Outcome, Run, carry_out, changes, row_of, stage_of
from gpusched.sim.trace import Trace
from gpusched.views.replay import span

FOLDER = "reports"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One partition's night.

    Attributes:
        partition: Its name. live: Its policy in force. best: The policy with the least mean JCT.
        loss: Mean JCT under ``live`` over that under ``best``, less 1: 0.1 is 10 % worse.
        line: The same in one line.
        page: The page with plots, in the state folder.
        real_mean_wait_s: What jobs really waited; replayed_mean_wait_s: under ``live``, replayed.
        runs: The rows of ``gpusched replay --json``, ``live`` first.
    """

    partition: str
    live: str
    best: str
    loss: float
    line: str
    page: str
    real_mean_wait_s: float | None
    replayed_mean_wait_s: float | None
    runs: list[dict[str, Any]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All partitions' nights; ``file``: where it lies as JSON."""

    time: str
    since: str
    file: str
    partitions: tuple[Verdict, ...]

    @property
    def worst_loss(self) -> float:
        """The largest loss of a live policy to another one."""
        return max((v.loss for v in self.partitions), default=0.0)

    @property
    def verdict(self) -> str:
        """One line."""
        return (
            "; ".join(v.line for v in self.partitions) or f"no job has run and ended of those submitted in {self.since}"
        )

    def as_json(self) -> dict[str, Any]:
        """The report with its verdict."""
        return {"verdict": self.verdict, "worst_loss": self.worst_loss, **msgspec.to_builtins(self)}


def nightly(
    inventory: Inventory, folder: Path, since: str = "1d", *, workers: int = 1, now: float | None = None
) -> Report:
    """Replays the store's jobs submitted since, partition by partition, and writes the report.

    Args:
        inventory: In force: its nodes, and each partition's policy.
        folder: The state folder; reports go into ``reports`` below it.
        since: ``1d``, ``all``, or a time.
        workers: Processes.
        now: Unix seconds.

    Raises:
        GpuschedError: There is no store.
    """
    now = time.time() if now is None else now
    day = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
    reports = folder / FOLDER
    reports.mkdir(parents=True, exist_ok=True)
    trace, live = _history(folder, since, now), load_policies(inventory)
    verdicts = []
    for partition in inventory.partitions:
        if trace is None or partition.name not in trace.groups:
            continue
        part = replace(slice_trace(trace, vc=partition.name), name=f"{partition.name} since {since}")
        policies = _policies(inventory, of_spec(live[partition.name]))
        outcomes = _replays(inventory, partition, part, policies, workers)
        if outcomes[0].metrics.jobs:
            verdicts.append(_verdict(partition.name, outcomes, reports / f"{day}-{partition.name}.html"))
    file = reports / f"{day}.json"
    report = Report(
        time=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        since=since,
        file=str(file),
        partitions=tuple(verdicts),
    )
    _write(file, msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2).decode() + "\n")
    return report


def _history(folder: Path, since: str, now: float) -> Trace | None:
    """The jobs, or None where none has run and ended."""
    from gpusched.queue.store import Reader
    from gpusched.report import parse_since
    from gpusched.sim.traces.history import trace_of

    begin = parse_since(since, now)
    reader = Reader.open(folder)
    if reader is None:
        raise GpuschedError(f"{folder}: there is no history yet", "start the controller")
    try:
        return trace_of(reader, name=f"since {since}", since=begin, until=now)
    except GpuschedError:
        return None
    finally:
        reader.close()


def _policies(inventory: Inventory, live: ReplayPolicy) -> list[ReplayPolicy]:
    """The live one, then every other file, a site's own before those that come along."""
    files: dict[str, Path] = {}
    for folder in policy_folders(inventory.path):
        for file in sorted(folder.glob("*.yaml")):
            files.setdefault(file.stem, file)
    return [live, *(of_spec(load_policy(file)) for name, file in sorted(files.items()) if name != live.name)]


def _replays(
    inventory: Inventory, partition: Partition, trace: Trace, policies: list[ReplayPolicy], workers: int
) -> list[Outcome]:
    only = msgspec.structs.replace(inventory, partitions=(partition,))
    stage = stage_of(trace, inventory=only, power=lambda pool: _power(pool, inventory))
    stage = stage._replace(notes=(*stage.notes, FROM_EMPTY))
    return list(carry_out([Run(stage, policy, None, 0) for policy in policies], workers=workers))


def _power(pool: Pool, inventory: Inventory) -> Any:
    return power_model(pool, inventory=inventory)


def _verdict(partition: str, outcomes: list[Outcome], page_file: Path) -> Verdict:
    from gpusched.sim.html import page

    changed = changes(outcomes)
    title = f"{partition}: the night before {page_file.name[:10]}"
    _write(page_file, page(outcomes, changed, title))
    live = outcomes[0]
    best = min(outcomes, key=_mean_jct)
    loss = _mean_jct(live) / _mean_jct(best) - 1 if _mean_jct(best) > 0 else 0.0
    wait = live.result.trace.wait
    known = wait[np.isfinite(wait)]
    return Verdict(
        partition=partition,
        live=live.result.policy,
        best=best.result.policy,
        loss=loss,
        line=_line(partition, live, best, loss),
        page=str(page_file),
        real_mean_wait_s=float(known.mean()) if len(known) else None,
        replayed_mean_wait_s=live.metrics.mean_wait_s,
        runs=[row_of(o, c) for o, c in zip(outcomes, changed, strict=True)],
    )


def _mean_jct(outcome: Outcome) -> float:
    mean = outcome.metrics.mean_jct_s
    return float("inf") if mean is None else mean


def _line(partition: str, live: Outcome, best: Outcome, loss: float) -> str:
    mean = f"mean JCT {span(live.metrics.mean_jct_s)} of {live.metrics.jobs} jobs under {live.result.policy} (live)"
    if loss < 5e-4:
        return f"{partition}: {mean}; no other policy does better"
    return f"{partition}: {mean}; {best.result.policy} has {span(best.metrics.mean_jct_s)}, live is {loss:.1%} worse"


def _write(file: Path, text: str) -> None:
    """Whole or not at all, so that nobody reads half a report."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as out:
        out.write(text)
    os.chmod(out.name, 0o644)
    os.replace(out.name, file)
