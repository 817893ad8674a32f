"""The nightly replays: recent jobs under every policy, compared with the live policies."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpusched.accounting.report import parse_since
from gpusched.config.paths import write_atomic
from gpusched.config.policies import load_policy, names_in, policy_file, policy_folders
from gpusched.config.weights import ModelError
from gpusched.errors import FileError, GpuschedError, NoHistory, Warnings
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.model.resources import Inventory
from gpusched.nightly.proof import incumbent_of, scenario_for
from gpusched.nightly.scoring import Score, scores
from gpusched.promotion.live import live_policies
from gpusched.promotion.registry import REPORTS, ShadowComparison
from gpusched.queue.store import Reader
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.placed import takes_costs
from gpusched.sim.policies import ReplayPolicy, policy_of_spec
from gpusched.study.study import PlannedReplay, StudyOutcome, changes, costs_for, row_of, run_all
from gpusched.traces.slicing import slice_trace
from gpusched.traces.trace import Trace
from gpusched.views.replay import span

CARRIED = (
    "{} jobs running or pending at the start hold nodes for the rest of their run times, where the policy puts "
    "them, and are not counted"
)
_REPORT = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:-.+)?\.(?:json|html)")


class NightlyVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One partition's results.

    Attributes:
        live: Its policy in force. best: The policy with the least mean JCT.
        loss: Mean JCT under ``live`` over that under ``best``, less 1: 0.1 is 10 % worse.
        page: The page with plots, in the state folder.
        real_mean_wait_s: Real mean wait; replayed_mean_wait_s: that of the replay under ``live``.
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


class NightlyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all partitions.

    Attributes:
        file: The report's JSON file.
        judged: Shadows and candidates compared with the live policies.
        trained: With ``--auto-retrain``, the outcome for every agent; the outcome for shadows that learn online.
        predictions: Accuracy of the forecasts made in that time, by partition.
        failed: Policies whose replay raised an error, and the error; they are left out.
    """

    time: str
    since: str
    file: str
    partitions: tuple[NightlyVerdict, ...]
    judged: tuple[ShadowComparison, ...] = ()
    trained: tuple[str, ...] = ()
    predictions: tuple[Score, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def worst_loss(self) -> float:
        """The largest loss of a live policy against another."""
        return max((v.loss for v in self.partitions), default=0.0)

    @property
    def verdict(self) -> str:
        """The results in one line."""
        nights = "; ".join(v.line for v in self.partitions)
        return nights or "; ".join(self.failed) or f"no job submitted in {self.since} has run and ended"

    @property
    def more(self) -> list[str]:
        """One line for every policy that is not live, and for every training."""
        asked = ("", "; promotion requested")
        judged = [f"{j.partition}: {j.state}: {j.line}{asked[j.promoted]}{j.proposal}" for j in self.judged]
        failed = self.failed if self.partitions else ()
        return [*(f"{s.partition}: {s.line}" for s in self.predictions), *failed, *judged, *self.trained]

    def as_json(self) -> dict[str, Any]:
        """Return the report as written, and printed by ``--json``."""
        return {"verdict": self.verdict, "worst_loss": self.worst_loss, **msgspec.to_builtins(self)}


def nightly(
    inventory: Inventory,
    folder: Path,
    since: str = "1d",
    *,
    workers: int = 1,
    now: float | None = None,
    auto_retrain: bool = False,
    notify: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> NightlyReport:
    """Replay the store's jobs submitted since, partition by partition, and write the report.

    Args:
        inventory: In force: its nodes, and each partition's policy.
        folder: The state folder; reports go into ``reports`` below it.
        since: ``1d``, ``all``, or a time.
        workers: Processes.
        now: Unix seconds.
        auto_retrain: Also train the agents again.
        notify: Called with the current step, the number of partitions done, and their total.

    Raises:
        GpuschedError: There is no store.
    """
    from gpusched.nightly import candidates as night

    now = time.time() if now is None else now
    day = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
    reports = folder / REPORTS
    reports.mkdir(parents=True, exist_ok=True)
    reader = Reader.open(folder)
    if reader is None:
        raise GpuschedError(f"{folder}: no history yet", "start the controller")
    (trace, running), live = _history(inventory, reader, since, now), live_policies(inventory, reader)
    trained = tuple(night.retrain(inventory, reader, folder, live, now)) if auto_retrain else ()
    trained += tuple(night.update_shadows(inventory, reader, folder, now))
    night.remove_old(folder)
    predicted = scores(reader.predicted_starts(parse_since(since, now), now), now)
    verdicts, failed = [], list[str]()

    def left_out(run: PlannedReplay, why: str) -> None:
        failed.append(f"{run.scenario.trace.name}: {run.policy.name} failed: {why}")

    for number, partition in enumerate(inventory.partitions):
        notify(f"replaying {partition.name}", number, len(inventory.partitions))
        if trace is None or partition.name not in trace.groups:
            continue
        part = replace(slice_trace(trace, vc=partition.name), name=f"{partition.name} since {since}")
        carried = int((trace.group[:running] == trace.groups.index(partition.name)).sum())
        notes = [CARRIED.format(carried)] if carried else []
        notes += [f"forecasts: {s.line}" for s in predicted if s.partition == partition.name]
        scenario = scenario_for(part, inventory, partition, notes, reader)._replace(carried=carried)
        first = incumbent_of(live[partition.name], partition.name, scenario)
        (network, _), estimator = costs_for([first], scenario), HistoryEstimator()
        policies = [first, *_others(inventory, first.name, partition.name, network is not None)]
        runs = [
            PlannedReplay(scenario, p, ReplayOptions(restart_s=p.restart_s, estimator=estimator, network=network))
            for p in policies
        ]
        outcomes = list(run_all(runs, workers=workers, failed=left_out))
        if outcomes and outcomes[0].result.policy == first.name and outcomes[0].metrics.jobs:
            verdicts.append(_verdict(partition.name, outcomes, reports / f"{day}-{partition.name}.html"))
    file = reports / f"{day}.json"
    report = NightlyReport(
        time=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        since=since,
        file=str(file),
        partitions=tuple(verdicts),
        judged=night.judge_candidates(inventory, reader, folder, live, now),
        trained=trained,
        predictions=predicted,
        failed=tuple(failed),
    )
    reader.close()
    write_atomic(file, msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2) + b"\n", 0o644)
    _remove_old(reports, now - inventory.settings.keep_reports_s)
    return report


def _remove_old(reports: Path, before: float) -> None:
    """Remove reports of days that ended before (Unix seconds), and no other files."""
    last = datetime.fromtimestamp(before, UTC).strftime("%Y-%m-%d")
    for file in reports.iterdir():
        day = _REPORT.fullmatch(file.name)
        if day is not None and day[1] < last:
            file.unlink(missing_ok=True)


def _history(inventory: Inventory, reader: Reader, since: str, now: float) -> tuple[Trace | None, int]:
    """Return the jobs, or None if none has run and ended; and how many were there when the window begins."""
    from gpusched.traces.own import own_window

    try:
        return own_window(inventory, reader, name=f"since {since}", since=parse_since(since, now), until=now)
    except NoHistory:
        return None, 0


def _others(inventory: Inventory, live: str, partition: str, costs: bool) -> list[ReplayPolicy]:
    """Return all policies but the ``live`` one, a site's own before built-in ones; only agents that can decide.

    ``costs``: whether placement costs count: then only policies that can be replayed with them, else only those that
    can be replayed without.
    """
    folders = policy_folders(inventory.path)
    files = [policy_file(name, folders) for name in names_in(folders)]
    found = list[ReplayPolicy]()
    for file in filter(None, files):
        try:
            spec = load_policy(file, folders)
        except FileError as error:  # a draft, say, which must not cost the report
            Warnings.give(f"{error.line()}; it is left out")
            continue
        if spec.name != live:
            with contextlib.suppress(ModelError):
                found.append(policy_of_spec(spec, None, partition))
    return [policy for policy in found if (takes_costs(policy) if costs else not policy.places)]


def _verdict(partition: str, outcomes: list[StudyOutcome], page_file: Path) -> NightlyVerdict:
    from gpusched.study.html import page

    changed = changes(outcomes)
    title = f"{partition}: the night before {page_file.name[:10]}"
    write_atomic(page_file, page(outcomes, changed, title).encode(), 0o644)
    live = outcomes[0]
    best = min(outcomes, key=_mean_jct)
    loss = _mean_jct(live) / _mean_jct(best) - 1 if _mean_jct(best) > 0 else 0.0
    wait = live.result.trace.wait
    known = wait[np.isfinite(wait)]
    return NightlyVerdict(
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


def _mean_jct(outcome: StudyOutcome) -> float:
    mean = outcome.metrics.mean_jct_s
    return float("inf") if mean is None else mean


def _line(partition: str, live: StudyOutcome, best: StudyOutcome, loss: float) -> str:
    mean = f"mean JCT {span(live.metrics.mean_jct_s)} of {live.metrics.jobs} jobs under {live.result.policy} (live)"
    if loss < 5e-4:
        return f"{partition}: {mean}; no other policy is better"
    return f"{partition}: {mean}; {best.result.policy} has {span(best.metrics.mean_jct_s)}, live is {loss:.1%} worse"
