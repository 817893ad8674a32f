"""Training on public traces: one agent of many clusters, judged on each of them by one that has not seen it.

What is learned is the rule; of agents that preempt also odds of run times, where they help on clusters that they were
not counted on. A network would learn one cluster's habits, and none is trained here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evaluate import rows_of
from gpusched.agents.common.request import UNTRAINED, ResultRow, TrainerResult
from gpusched.agents.rltune import candidates, choosing, preempting, settings, table
from gpusched.agents.rltune.evaluation import figures
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.estimation.odds import HazardRates
from gpusched.model.policy import PolicySpec
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.policies import ReplayPolicy, policy_of_order
from gpusched.sim.replay import replay
from gpusched.study.compare import compare
from gpusched.study.study import PlannedReplay, Scenario, StudyOutcome, run_all
from gpusched.traces.slicing import select

AGENT = "trained on the other clusters"
CHOICE_JOBS = 2000  # of a replay for the choice of a rule: the last ones of the cluster
_MARGIN = 0.002  # of the cost: by which counted odds must be better than the prior
_SLACK = 0.005  # of the log of mean JCT: allowed excess over the best known policy
_WINDOWS = 2  # of a cluster's last jobs, by which rules that order a queue are compared
_FIGURES = {"mean_jct_s": "JCT s", "mean_wait_s": "wait s", "mean_bounded_slowdown": "slowdown"}

Costs = dict[str, list[tuple[float, float]]]
"""Rule -> its cost and the log of its mean JCT, by replay."""


class PublicCluster(NamedTuple):
    """A cluster to learn from: its name, the loads, and its jobs on the nodes for each of them."""

    name: str
    loads: tuple[float, ...]
    scenarios: tuple[Scenario, ...]


class Candidate(NamedTuple):
    """A rule that could decide. ``known``: it is a published policy, which the choice must match."""

    name: str
    known: bool
    policy: Callable[[HazardRates], ReplayPolicy]


class Transfer(NamedTuple):
    """The agent of all clusters; and of each cluster and load the outcomes of one that was trained on the others.

    ``outcomes``: the agent's, its untrained start's (if it has one), and every heuristic's, by cluster and load.
    """

    result: TrainerResult
    outcomes: dict[tuple[str, float], list[StudyOutcome]]


class _Kind(ABC):
    """What differs between agents that order a queue and agents that preempt."""

    default: str
    objective: str
    hyper_parameters: dict[str, object]
    restart_s = 0.0
    windows = 1
    counts_odds = False

    @abstractmethod
    def candidates(self) -> list[Candidate]:
        """Return the rules to choose from."""

    @abstractmethod
    def rivals(self, scenario: Scenario) -> list[ReplayPolicy]:
        """Return the policies to compare with."""

    @abstractmethod
    def about(self, rule: str) -> dict[str, str]:
        """Return what the weights say of themselves."""

    @abstractmethod
    def choice(self, found: Sequence[Candidate], costs: Costs) -> Candidate:
        """Return the rule to use by these costs."""

    def costs(self, policy: ReplayPolicy, cluster: PublicCluster) -> list[tuple[float, float]]:
        """Return a policy's cost and log of mean JCT at each of a cluster's loads, on windows of its last jobs."""
        found = []
        for scenario in cluster.scenarios:
            trace = scenario.trace
            for last in range(len(trace), max(0, len(trace) - self.windows * CHOICE_JOBS), -CHOICE_JOBS):
                part = select(trace, np.arange(max(0, last - CHOICE_JOBS), last))
                if last == len(trace) or len(part) == CHOICE_JOBS:
                    result = replay(part, scenario.pool, policy, restart_s=self.restart_s, estimator=HistoryEstimator())
                    seen = figures(part, result.end, scenario.pool.total_gpus)
                    found.append((seen.cost(self.objective), seen.cost("jct")))
        return found


class _Orders(_Kind):
    """Agents that order the queue."""

    windows = _WINDOWS

    def __init__(self, spec: PolicySpec) -> None:
        self._settings = settings.read(spec.settings)
        self.objective, self.hyper_parameters = self._settings.objective, asdict(self._settings)
        self.default = candidates.rules(self._settings)[0].name if choosing.untrained(self._settings) else ""

    def candidates(self) -> list[Candidate]:
        """Return the rules that use no more information than the policy's file says.

        Random changes of their weights were no better on the cluster left out.
        """
        own, known = self._settings, {rule.name for rule in candidates.heuristics(self._settings)}

        def policy(rule: candidates.CandidateRule) -> Callable[[HazardRates], ReplayPolicy]:
            return lambda odds: candidates.agent_of(candidates.without_net(rule, own), AGENT, own)

        return [Candidate(rule.name, rule.name in known, policy(rule)) for rule in candidates.rules(own)]

    def choice(self, found: Sequence[Candidate], costs: Costs) -> Candidate:
        """Return the usual rule, unless another is certainly better."""
        name = choosing.preferred(costs, found[0].name)
        return next(one for one in found if one.name == name)

    def rivals(self, scenario: Scenario) -> list[ReplayPolicy]:
        """Return the heuristics with the same information."""
        return table.heuristics(scenario.trace, self._settings.knows)

    def about(self, rule: str) -> dict[str, str]:
        """Return what the weights say of themselves."""
        own = self._settings
        return {"knows": own.knows, "backfill": "skip" if own.backfill else "none", "base": rule,
                "objective": own.objective}  # fmt: skip


class _Ranks(_Kind):
    """Agents that preempt."""

    default, counts_odds = preempting.DEFAULT, True

    def __init__(self, spec: PolicySpec) -> None:
        self._settings, self._spec = preempting.read(spec.settings), spec
        self.restart_s = spec.preempt.restart_s
        self.objective, self.hyper_parameters = self._settings.objective, asdict(self._settings) | {"search": 0}

    def candidates(self) -> list[Candidate]:
        """Return the usual rankings; random changes of them were no better on the cluster left out."""
        own, spec = self._settings, self._spec

        def policy(rule: preempting.RankingRule) -> Callable[[HazardRates], ReplayPolicy]:
            return lambda odds: preempting.policy_of(preempting.model_of(rule, odds.prior, own.knows), AGENT, spec)

        return [Candidate(rule.name, rule.name == "las", policy(rule)) for rule in preempting.rules(own.knows)]

    def choice(self, found: Sequence[Candidate], costs: Costs) -> Candidate:
        """Return the rule with the least mean cost that is sound, as in the training of one cluster.

        Sound: its mean JCT is no worse than the best known policy's. The default rule is preferred unless another is
        clearly better.
        """
        cost, jct = ({name: float(np.mean(of, axis=0)[k]) for name, of in costs.items()} for k in (0, 1))
        most = min(jct[one.name] for one in found if one.known) + _SLACK
        sound = [one for one in found if jct[one.name] <= most] or [one for one in found if one.known]
        best = min(sound, key=lambda one: cost[one.name])
        prior = cost[best.name] + preempting._PRIOR
        return next((one for one in sound if one.name == self.default and cost[one.name] <= prior), best)

    def rivals(self, scenario: Scenario) -> list[ReplayPolicy]:
        """Return LAS and the heuristics that stop no job."""
        return [policy_of_order("las"), *table.heuristics(scenario.trace, self._settings.knows)]

    def about(self, rule: str) -> dict[str, str]:
        """Return what the weights say of themselves."""
        return {"base": rule, "objective": self.objective}


def train_public(
    clusters: Sequence[PublicCluster], spec: PolicySpec, advance: Callable[[float, int], None]
) -> Transfer:
    """Train an agent on all clusters, and for each cluster one on the others, to judge what such weights are worth.

    The result depends on no random draw.

    Raises:
        UsageError: There are too few clusters, or the policy needs what public traces lack.
    """
    if len(clusters) < 3:
        raise UsageError("weights for other clusters need at least three to learn from", "name more: --vc")
    if spec.settings.get("knows") == "limit":
        raise UsageError(f"{spec.name} knows time limits only, and these jobs have none", "name another policy")
    kind: _Kind = _Ranks(spec) if spec.settings.get("preempt", False) is not False else _Orders(spec)
    found, total = kind.candidates(), 2 * len(clusters) + 1
    costs: dict[str, Costs] = {}
    for done, cluster in enumerate(clusters, 1):
        costs[cluster.name] = {one.name: kind.costs(one.policy(preempting.NO_ODDS), cluster) for one in found}
        advance(done, total)
    outcomes: dict[tuple[str, float], list[StudyOutcome]] = {}
    for done, cluster in enumerate(clusters, len(clusters) + 1):
        chosen, odds = _learned(kind, found, costs, [one for one in clusters if one is not cluster])
        for scenario, load in zip(cluster.scenarios, cluster.loads, strict=True):
            outcomes[cluster.name, load] = _judged(kind, found, chosen.policy(odds), scenario)
        advance(done, total)
    chosen, odds = _learned(kind, found, costs, clusters)
    model = chosen.policy(odds).model
    assert model is not None
    advance(total, total)
    words = "counted on the clusters" if odds is not preempting.NO_ODDS else "the prior: those counted were no better"
    notes = (f"rule: {chosen.name}", *((f"odds of run times: {words}",) if kind.counts_odds else ()))
    return Transfer(_result(kind, notes, chosen.name, model, outcomes), outcomes)


def _learned(
    kind: _Kind, found: Sequence[Candidate], costs: dict[str, Costs], clusters: Sequence[PublicCluster]
) -> tuple[Candidate, HazardRates]:
    """Return the rule and the odds learned on these clusters.

    Counted odds replace the prior only if they are better on clusters that they were not counted on.
    """
    chosen = kind.choice(found, {of.name: [c for one in clusters for c in costs[one.name][of.name]] for of in found})
    gains = []
    for cluster in clusters if kind.counts_odds else ():
        counted = _odds([one for one in clusters if one is not cluster])
        with_counted, without = kind.costs(chosen.policy(counted), cluster), costs[cluster.name][chosen.name]
        gains.append(np.mean(without, axis=0) - np.mean(with_counted, axis=0))
    gain, jct_gain = np.mean(gains, axis=0) if gains else (0.0, 0.0)
    return chosen, _odds(clusters) if _counts(gain, jct_gain) else preempting.NO_ODDS


def _counts(gain: float, jct_gain: float) -> bool:
    """Return whether counted odds are better than the prior by so much of cost and of the log of mean JCT."""
    return gain > _MARGIN and jct_gain >= 0.0


def _odds(clusters: Sequence[PublicCluster]) -> HazardRates:
    """Count the odds of run times over all jobs of these clusters."""
    traces = [cluster.scenarios[0].trace for cluster in clusters]
    columns = (np.concatenate([getattr(trace, name) for trace in traces]) for name in ("gpus", "duration"))
    return preempting.odds_of(*columns)


def _judged(kind: _Kind, found: Sequence[Candidate], agent: ReplayPolicy, scenario: Scenario) -> list[StudyOutcome]:
    """Replay the agent, its untrained start and the heuristics on a cluster of which the agent has seen nothing."""
    start = [one.policy(preempting.NO_ODDS) for one in found if one.name == kind.default]
    options = ReplayOptions(restart_s=kind.restart_s, estimator=HistoryEstimator())  # as live
    policies = [agent, *(replace(policy, name=UNTRAINED) for policy in start), *kind.rivals(scenario)]
    return list(run_all([PlannedReplay(scenario, policy, options) for policy in policies]))


def _result(
    kind: _Kind,
    words: Sequence[str],
    rule: str,
    model: TrainedModel,
    outcomes: dict[tuple[str, float], list[StudyOutcome]],
) -> TrainerResult:
    """Return the weights with the table over all clusters at the first load, and notes on loads and clusters."""
    loads = list(dict.fromkeys(load for _, load in outcomes))
    rows = {load: _rows([own for (_, at), own in outcomes.items() if at == load]) for load in loads}
    notes = [*words, f"each figure is of an agent that was trained on the other clusters; the table is at {loads[0]:g}"]
    notes += [_mean_changes(load, rows[load]) for load in loads]
    notes += [_line(name, load, own) for (name, load), own in outcomes.items()]
    score = -float(np.mean([np.log(own[0].metrics.mean_jct_s or np.inf) for own in outcomes.values()]))
    return TrainerResult(
        arrays=model.arrays, about={**model.about, **kind.about(rule)}, score=score,
        hyper_parameters=kind.hyper_parameters, notes=tuple(notes), rows=rows[loads[0]],
    )  # fmt: skip


def _rows(outcomes: Sequence[list[StudyOutcome]]) -> tuple[ResultRow, ...]:
    """Return the table over clusters, ``outcomes`` by cluster and policy; its intervals are over clusters."""
    by_policy = list(zip(*outcomes, strict=True))
    named = [(of[0].result.policy, of[0].result.knows) for of in by_policy]
    return rows_of(named, [list(of) for of in by_policy])


def _mean_changes(load: float, rows: Sequence[ResultRow]) -> str:
    """Return the mean change of JCT against the untrained start and each heuristic, with intervals over clusters."""
    changes = [
        f"{row.policy} {row.change:+.1%} ({row.change_low:+.1%} to {row.change_high:+.1%})"
        for row in rows
        if row.change is not None and row.change_low is not None and row.change_high is not None
    ]
    return f"at {load:g}, mean change of JCT against: {', '.join(changes)}"


def _line(name: str, load: float, outcomes: Sequence[StudyOutcome]) -> str:
    """Return one cluster's figures, beside its best heuristic's and its untrained start's."""
    agent, *others = outcomes
    best = min((o for o in others if o.result.policy != UNTRAINED), key=lambda o: o.metrics.mean_jct_s or np.inf)
    text = f"{name} at {load:g}: {_figures(agent)}"
    for other in (best, *(o for o in others if o.result.policy == UNTRAINED)):
        jct = next((change for change in compare(other.result, agent.result) if change.figure == "jct_s"), None)
        sure = "" if jct is None or jct.low is None else f" (change of JCT {jct.low:+.0%} to {jct.high:+.0%})"
        text += f"; {other.result.policy} {_figures(other)}{sure}"
    return text


def _figures(outcome: StudyOutcome) -> str:
    return ", ".join(f"{words} {getattr(outcome.metrics, name) or 0.0:.4g}" for name, words in _FIGURES.items())
