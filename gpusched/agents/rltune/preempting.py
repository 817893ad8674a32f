"""Training with preemption: run times are counted, the ranking is chosen by replays.

No gradients are used: a ranking has eight weights, evaluated by replays. The objective is that of the other RLTune
agents, on the condition that mean JCT is no worse than that of the best known preempting policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.data import Bools, known_at
from gpusched.agents.common.request import UNTRAINED, TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.rltune.candidates import agent_of_model, first_of_later
from gpusched.agents.rltune.evaluation import evaluations, figures, mean_cost, windows
from gpusched.agents.rltune.preempt import PARTS
from gpusched.agents.rltune.settings import OBJECTIVES, RltuneSettings
from gpusched.agents.rltune.table import table_of
from gpusched.config.weights import PREEMPTS, TrainedModel
from gpusched.errors import UsageError
from gpusched.estimation.odds import CLASSES, LEVELS, HazardRates, class_of, level_at
from gpusched.model.policy import PolicySpec
from gpusched.model.units import count_of
from gpusched.sched.state import Floats, Ints
from gpusched.sim.policies import ReplayPolicy, policy_of_order
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.traces.trace import Trace

KNOWS = ("nothing", "estimate")
RIVALS = ("las", "drf-users")
_SHOWN = ("srtf", "fifo+skip", "fifo+none")
_SLACK = 0.005  # of the logarithm of mean JCT, above the best rival
_MARGIN = 0.002  # by which a change of weights must be better to be taken
_FINALS = 4
_PRIOR = 0.02  # of both costs together: what the usual index may be above the best
DEFAULT = "index, 0.5 of size, step 1, stay 1"
_WIDEST = 0.4  # of the logarithm: how far a weight is moved in a step of the search
_DEFAULTS = dict.fromkeys(PARTS, 0.0) | {"step": 1.0, "kind": 5.0, "burst": 2.0}
_FOURFOLD = tuple(60.0 * 4.0**k for k in range(8))
_FEW = (20.0, 60.0, 2.0)  # chosen on all of Philly's clusters, see the docs


@dataclass(frozen=True)
class Preemption:
    """The hyper-parameters.

    Attributes:
        preempt: Whether the agent may preempt running jobs.
        objective: See `RltuneSettings`.
        knows: nothing (no run time, not even of ended jobs: attained service alone), or estimate (of ended jobs).
        search: Number of random changes of weights tried after the default rankings.
        replay_jobs: Maximum of jobs in a replay used for a choice.
    """

    preempt: bool = True
    objective: str = "slowdown"
    knows: str = "estimate"
    search: int = 24
    replay_jobs: int = 4000


class RankingRule(NamedTuple):
    """A ranking: weights by the names of `PARTS`, and thresholds in GPU seconds."""

    name: str
    weights: dict[str, float]
    thresholds: tuple[float, ...] = (3600.0,)


class ReplaySet(NamedTuple):
    """Replays for the choice, and the objective. ``spec``: the policy file, with protection and restart cost."""

    evaluations: list[tuple[Trace, Pool]]
    prior: Floats
    settings: Preemption
    spec: PolicySpec

    def cost(self, rule: RankingRule) -> tuple[float, float]:
        """Return the mean cost and the mean log of the JCT of a ranking."""
        return self.of(policy_of(model_of(rule, self.prior, self.settings.knows), rule.name, self.spec))

    def of(self, policy: ReplayPolicy) -> tuple[float, float]:
        """Return the same of any policy."""
        played = []
        for trace, pool in self.evaluations:
            result = replay(trace, pool, policy, restart_s=self.spec.preempt.restart_s)
            played.append(figures(trace, result.end, pool.total_gpus))
        return mean_cost(played, self.settings.objective), mean_cost(played, "jct")


def read(given: dict[str, object]) -> Preemption:
    """Return the settings of a policy file.

    Raises:
        UsageError: There is no such hyper-parameter, or its value is invalid.
    """
    settings = settings_of(Preemption(), given)
    for name, known in (("objective", OBJECTIVES), ("knows", KNOWS)):
        if getattr(settings, name) not in known:
            given_value, expected = getattr(settings, name), ", ".join(known)
            raise UsageError(f"train: with preempt {name} is {given_value!r}, expected one of {expected}")
    for name, least in (("replay_jobs", 1), ("search", 0)):
        if not getattr(settings, name) >= least:
            raise UsageError(f"train: {name} is {getattr(settings, name):g}, expected at least {least}")
    return settings


def train_preempting(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train an agent that may preempt running jobs.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    settings = read(job.spec.settings)
    trace = job.scenario.trace
    if len(trace) < 10:
        raise UsageError(f"{trace.name}: {count_of(len(trace), 'job')}: too few to train on", "use more")
    early, later = _replay_sets(job, settings)
    rivals = {name: later.of(policy_of_order(name)) for name in RIVALS}
    found, words = choose(early, later, rivals, job.seed, report.of("ranks").step)
    cost, best = later.cost(found)[0], min(cost for cost, _ in rivals.values())
    words += (f"{np.expm1(cost - best):+.1%} of cost against the best of {', '.join(RIVALS)} on the training part",)
    for line in words:
        report.note(line)
    model = model_of(found, learned_odds(job)[1].prior, settings.knows)
    others = [policy_of_order(name) for name in (*RIVALS, *_SHOWN)]
    if settings.knows != "nothing":
        usual = next(rule for rule in rules(settings.knows) if rule.name == DEFAULT)
        begun = model_of(usual, NO_ODDS.prior, settings.knows)
        others.insert(0, policy_of(begun, UNTRAINED, job.spec))
    agent, bounds = policy_of(model, job.spec.name, job.spec), job.spec.preempt
    rows, gaps = table_of(agent, others, job, report, bounds.restart_s, yardsticks=("srtf",))
    often = f", {bounds.per_hour} times an hour at most" if bounds.per_hour else ""
    notes = (
        f"preemptive: running jobs are stopped after {bounds.min_run_s:g} s at the earliest{often}; their work is "
        f"kept; a restart costs {bounds.restart_s:g} s",
        *words,
    )
    return TrainerResult(
        arrays=model.arrays, about=model.about, score=-cost, hyper_parameters=asdict(settings), notes=(*notes, *gaps),
        rows=rows,
    )  # fmt: skip


def choose(
    early: ReplaySet,
    later: ReplaySet,
    rivals: dict[str, tuple[float, float]],
    seed: int,
    advance: Callable[[int, int], None],
) -> tuple[RankingRule, tuple[str, ...]]:
    """Return the ranking: searched on the earlier part; among the best there, the best on both parts that is sound.

    Sound: mean JCT no worse than the best rival's on the later part. Plain LAS is always a candidate, and chosen if no
    other is sound. The default index is chosen if it is nearly as good as the best, since a trace is little data.
    """
    usual = rules(early.settings.knows)
    total, scored = len(usual) + early.settings.search, []
    for rule in usual:
        scored.append((early.cost(rule)[0], rule))
        advance(len(scored), total)
    cost, best = min(scored, key=lambda pair: pair[0])
    rng = np.random.default_rng(seed)
    for k in range(early.settings.search):
        changed = _changed(best, k, rng)
        found = early.cost(changed)[0]
        if found < cost - _MARGIN:
            cost, best = found, changed
        advance(len(usual) + k + 1, total)
    default = [pair for pair in scored if pair[1].name == DEFAULT]
    finals = [scored[0], *default, (cost, best), *sorted(scored, key=lambda pair: pair[0])[:_FINALS]]
    most = min(jct for _, jct in rivals.values()) + _SLACK
    sound = {}
    for before, rule in {rule.name: (before, rule) for before, rule in finals}.values():
        after, jct = later.cost(rule)
        if jct <= most:
            sound[rule.name] = (before + after - (_PRIOR if rule.name == DEFAULT else 0.0), rule)
    rule = min(sound.values(), key=lambda pair: pair[0])[1] if sound else usual[0]
    weights = ", ".join(f"{name} {value:.4g}" for name, value in rule.weights.items())
    return rule, (f"ranks: {rule.name} ({weights})",)


def rules(knows: str) -> list[RankingRule]:
    """Return the default rankings, LAS first; by attained service only, and by the index if run times may be known."""
    found = [
        RankingRule("las", {"served": 1.0}),
        RankingRule("las, 1 and 10 GPU hours", {"served": 1.0}, (3600.0, 36000.0)),
        RankingRule("las, fourfold", {"served": 1.0}, _FOURFOLD),
    ]
    if knows == "nothing":
        return found
    for gpus in (0.0, 0.5, 1.0):
        for step, stay in ((1.0, 0.0), (2.0, 0.0), (1.0, 1.0)):
            weights = {"index": 1.0, "gpus": gpus, "step": step, "stay": stay}
            found.append(RankingRule(f"index, {gpus:g} of size, step {step:g}, stay {stay:g}", weights))
    return found


def _changed(rule: RankingRule, number: int, rng: np.random.Generator) -> RankingRule:
    """Change two of its weights, or its thresholds, at random."""
    weights = {**_DEFAULTS, **rule.weights}
    by_index = weights["index"] != 0.0
    names = ("gpus", "stay", "step", "kind", "burst", "slowdown") if by_index else ("gpus", "stay", "step")
    for name in rng.choice(names, 2, replace=False).tolist():
        factor = float(np.exp(rng.normal(0.0, _WIDEST)))
        added = abs(float(rng.normal(0.0, 0.3))) if weights[name] == 0.0 else 0.0
        weights[name] = weights[name] * factor + added
    factor = 1.0 if by_index else float(np.exp(rng.normal(0.0, _WIDEST)))
    return RankingRule(f"search {number + 1}", weights, tuple(t * factor for t in rule.thresholds))


def _replay_sets(job: TrainJob, settings: Preemption) -> tuple[ReplaySet, ReplaySet]:
    """Return replays of the earlier and of the later part; neither uses run times known only after the earlier part."""
    scenario, declared = job.scenario, job.declared is not None
    like = RltuneSettings(replay_jobs=settings.replay_jobs)
    early, last = windows(scenario, like)
    prior = learned_odds(job)[0].prior

    def ground(traces: Sequence[Trace]) -> ReplaySet:
        found = [(a.trace, a.pool) for trace in traces for a in evaluations(trace, scenario, like, declared)]
        return ReplaySet(found, prior, settings, job.spec)

    return ground(early), ground([last])


def model_of(rule: RankingRule, prior: Floats, knows: str) -> TrainedModel:
    """Return the weights of a ranking."""
    weights = {**_DEFAULTS, **rule.weights}
    known = prior if knows != "nothing" else np.zeros_like(prior)
    arrays = {
        "weights": np.array([weights[name] for name in PARTS]), "thresholds": np.array(rule.thresholds), "prior": known,
    }  # fmt: skip
    return TrainedModel("rltune", arrays, {"knows": knows, "backfill": "skip", **PREEMPTS}, "", f"<{rule.name}>")


def policy_of(model: TrainedModel, name: str, spec: PolicySpec | None = None) -> ReplayPolicy:
    """Return the policy as the engine runs it; without a file nothing is protected."""
    return replace(agent_of_model(name, model), source="rltune agent, preemptive", spec=spec)


def odds_of(gpus: Ints, ran_s: Floats, over: Bools | None = None) -> HazardRates:
    """Estimate the odds of run times by size class, with a prior where few jobs have ended.

    ``over``: whether each has ended (None: all have). A running job counts for the levels that it has passed.
    """
    ended, outran = np.zeros((CLASSES, LEVELS)), np.zeros((CLASSES, LEVELS))
    done = [True] * len(gpus) if over is None else over.tolist()
    for count, ran, is_over in zip(gpus.tolist(), ran_s.tolist(), done, strict=True):
        size, level = class_of(float(count)), level_at(float(ran))
        ended[size, level] += is_over
        outran[size, :level] += 1
    of_all = (ended.sum(0) + 1.0) / (ended.sum(0) + outran.sum(0) + 2.0)
    return HazardRates((_FEW[0] * of_all + ended) / (_FEW[0] + ended + outran), np.array(_FEW))


NO_ODDS = odds_of(np.zeros(0, np.int64), np.zeros(0))
"""The prior odds, without any data."""


def learned_odds(job: TrainJob) -> tuple[HazardRates, HazardRates]:
    """Return the odds for the choice and the final odds, each from the jobs ended by its cut.

    The first use data known at the start of the later part, by which the choice is made; the others all training data.
    """
    trace = job.scenario.trace
    early, over = known_at(trace, float(trace.submit[first_of_later(trace) - 1]))
    return odds_of(early.gpus, early.duration, over), odds_of(trace.gpus, trace.duration, job.ended)
