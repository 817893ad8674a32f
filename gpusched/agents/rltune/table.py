"""The final table: the agent against every heuristic with the same information and powers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpusched.agents.common.evaluate import rows_of
from gpusched.agents.common.request import UNTRAINED, ResultRow, TrainingReport, TrainJob
from gpusched.agents.rltune.candidates import agent_of
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.policies import ReplayPolicy, policy_of_order
from gpusched.sim.rates import Rates
from gpusched.study.compare import compare
from gpusched.study.study import PlannedReplay, StudyOutcome, run_all
from gpusched.traces.trace import Trace

_ALWAYS = ("fifo+none", "fifo+skip", "smallest", "smallest-skip", "multifactor", "multifactor-skip")
_BY_LIMIT = ("sjf+none", "sjf+skip", "wfp3", "wfp3-skip", "f1", "f1-skip", "fifo+easy", "smallest+easy")
_BY_ESTIMATE = ("sjf-estimate", "sjf-estimate-skip")


def heuristics(trace: Trace, knows: str) -> list[ReplayPolicy]:
    """Return the heuristics with no more information than the agent. Those by limits need a trace with limits."""
    names = list(_ALWAYS)
    if knows != "nothing" and (np.isfinite(trace.limit) & (trace.limit > 0)).any():
        names += _BY_LIMIT
    if knows in ("estimate", "oracle"):
        names += _BY_ESTIMATE
    return [policy_of_order(name) for name in names]


def table(
    prepared: PreparedScorer, job: TrainJob, settings: RltuneSettings, report: TrainingReport,
    placed: Callable[[ReplayPolicy], ReplayPolicy] = lambda policy: policy, rates: Rates | None = None,
) -> tuple[tuple[ResultRow, ...] | None, tuple[str, ...]]:  # fmt: skip
    """Return rows by mean JCT over the held-out parts, and slowdowns in the first as sentences.

    ``placed``: gives each policy its placement. ``rates``: at which jobs run; None: as recorded.
    """
    if not job.held_out:
        return None, ()
    others, untrained_agent = heuristics(job.held_out[0].trace, settings.knows), untrained(settings)
    if untrained_agent is not None:
        others.insert(0, agent_of(untrained_agent, UNTRAINED, settings))
    agent = placed(agent_of(prepared, job.spec.name, settings))
    return table_of(agent, [placed(other) for other in others], job, report, rates=rates)


def table_of(
    agent: ReplayPolicy, others: Sequence[ReplayPolicy], job: TrainJob, report: TrainingReport, restart_s: float = 0.0,
    yardsticks: Sequence[str] = (), rates: Rates | None = None,
) -> tuple[tuple[ResultRow, ...] | None, tuple[str, ...]]:  # fmt: skip
    """Return the table of these policies; ``yardsticks``: names of those with more information or powers.

    ``rates``: at which jobs run; None: as recorded.
    """
    if not job.held_out:
        return None, ()
    policies, parts = [agent, *others], len(job.held_out)
    options = ReplayOptions(restart_s=restart_s, rates=rates, estimator=HistoryEstimator())  # as live
    runs = [PlannedReplay(part, policy, options) for policy in policies for part in job.held_out]
    table_report, outcomes = report.of("table"), []
    for outcome in run_all(runs):
        outcomes.append(outcome)
        table_report.step(len(outcomes), len(runs))
    by_policy = [outcomes[k : k + parts] for k in range(0, len(outcomes), parts)]
    rows = rows_of([(p.name, p.knows) for p in policies], by_policy)
    return rows, _slowdowns([own[0] for own in by_policy], yardsticks)


def _slowdowns(outcomes: Sequence[StudyOutcome], yardsticks: Sequence[str]) -> tuple[str, ...]:
    """Return the agent's mean bounded slowdown against each heuristic's, and the share of the JCT gap it closes."""
    agent = outcomes[0]
    lines = []
    for other in outcomes[1:]:
        changes = {change.figure: change for change in compare(other.result, agent.result)}
        change = changes.get("bounded_slowdown")
        if change is not None and change.relative is not None:
            sure = "" if change.low is None else f" ({change.low:+.0%} to {change.high:+.0%})"
            line = f"{other.result.policy} {change.base:.4g}, the agent {change.relative:+.0%}{sure}"
            lines.append((change.base, line))
    shown = "; ".join(line for _, line in sorted(lines))
    found = [f"mean bounded slowdown {agent.metrics.mean_bounded_slowdown:.4g}: {shown}"]
    best = min(o.metrics.mean_jct_s or np.inf for o in outcomes[1:] if o.result.policy not in (*yardsticks, UNTRAINED))
    mine, bound = agent.metrics.mean_jct_s, agent.bounds.mean_jct_s
    if mine and bound and bound < best < np.inf:
        share = f"{(best - mine) / (best - bound):+.0%}"
        found.append(f"of the gap between the best heuristic's mean JCT and the lower bound {share} is closed")
    return tuple(found)
