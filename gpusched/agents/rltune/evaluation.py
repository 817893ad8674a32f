"""Replays for the choice of rules and networks: windows of the training data, on nodes for their load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.data import known_at
from gpusched.agents.common.queue_replay import InvalidOutput
from gpusched.agents.rltune.candidates import agent_of, first_of_later
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import TrainedModel
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.model.interference import JobClassEstimate, name_pattern
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.slicetables import GPU_PARTS
from gpusched.sched.mapping.learned import speeds_by_name, speeds_by_type
from gpusched.sim.engine.build import ReplayOptions, SimWorld, world_of
from gpusched.sim.orders import Knows
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import Rates
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from gpusched.sim.slicing import parts_by_job
from gpusched.study.metrics import SLOWDOWN_THRESHOLD_S
from gpusched.study.study import Scenario
from gpusched.traces.slicing import nodes_for_load, offered_load, select, span_s
from gpusched.traces.trace import Trace

LOAD_FACTORS = (1.0, 1.2)
_MIN_JOBS = 30


class MeanFigures(NamedTuple):
    """Means over the jobs that ended; utilization: of the GPUs until the last end."""

    wait_s: float
    jct_s: float
    slowdown: float
    utilization: float

    def cost(self, objective: str) -> float:
        """Return the cost to minimize: a logarithm, so that replays of different scale weigh the same."""
        if objective == "slowdown":
            return float(0.5 * np.log(self.slowdown) + 0.5 * np.log(self.jct_s))
        if objective == "utilization":
            return float(-np.log(max(self.utilization, 1e-9)))
        return float(np.log(max(self.wait_s, 1.0) if objective == "wait" else self.jct_s))


def world_for(trace: Trace, pool: Pool, settings: RltuneSettings) -> SimWorld:
    """Return a replay's world for the agent, before any event."""
    model, knows = TrainedModel("rltune", {}, {}, "", ""), cast(Knows, settings.knows)
    backfill = "skip" if settings.backfill else "none"
    policy = ReplayPolicy(
        name="rltune", order="rltune", knows=knows, source="", backfill=backfill, placement="best-fit", model=model
    )  # fmt: skip
    return world_of(trace, pool, policy, ReplayOptions(estimator=HistoryEstimator()))


class TraceEvaluation:
    """A trace on its nodes; ``placed``, ``rates``: see `placement_of`."""

    def __init__(
        self, trace: Trace, pool: Pool, settings: RltuneSettings,
        placed: Callable[[ReplayPolicy], ReplayPolicy] = lambda policy: policy, rates: Rates | None = None,
    ) -> None:  # fmt: skip
        self.trace, self.pool = trace, pool
        self._settings, self._placed, self._rates = settings, placed, rates

    def play(self, prepared: PreparedScorer) -> MeanFigures:
        """Return the results of a replay; infinite if a score is NaN."""
        result = self.result(prepared)
        if result is None:
            return MeanFigures(np.inf, np.inf, np.inf, 0.0)
        return figures(self.trace, result.end, self.pool.total_gpus)

    def result(self, prepared: PreparedScorer) -> ReplayResult | None:
        """Return a replay; None if a score is NaN."""
        policy = self._placed(agent_of(prepared, "rltune", self._settings))
        try:
            return replay(self.trace, self.pool, policy, rates=self._rates, estimator=HistoryEstimator())
        except InvalidOutput:
            return None


def figures(trace: Trace, end: npt.NDArray[np.float64], gpus: int) -> MeanFigures:
    """Return the results of jobs that ended at ``end: float64[jobs]``, seconds."""
    ran = np.isfinite(end)
    jct, run = (end - trace.submit)[ran], trace.duration[ran]
    slowdown = np.maximum(jct / np.maximum(run, SLOWDOWN_THRESHOLD_S), 1.0)
    span = float(end[ran].max() - trace.submit[0]) if ran.any() else 1.0
    held = trace.gpus * (parts_by_job(trace) / GPU_PARTS)
    used = float((held * trace.duration)[ran].sum()) / max(span * gpus, 1.0)
    return MeanFigures(float((jct - run).mean()), float(jct.mean()), float(slowdown.mean()), used)


def mean_cost(figures: Sequence[MeanFigures], objective: str) -> float:
    """Return the mean cost over several replays."""
    return float(np.mean([f.cost(objective) for f in figures]))


def windows(scenario: Scenario, settings: RltuneSettings) -> tuple[list[Trace], Trace]:
    """Return two windows of the first part of the training data, to learn from, and its last part, to choose by.

    The first part is as known at the start of the last one, without run times that became known later.
    """
    trace, first = scenario.trace, first_of_later(scenario.trace)
    early, _ = known_at(trace, float(trace.submit[first - 1]))
    if len(early) < 2:  # all submitted at one instant
        early = select(trace, np.arange(first))
    jobs, most = len(early), settings.replay_jobs
    middle, overlap = max(int(jobs * 4 / 7), 1), int(jobs * 3 / 7)
    later = np.arange(max(first, len(trace) - most), len(trace))
    return [
        select(early, np.arange(max(0, middle - most), middle)),
        select(early, np.arange(max(overlap, jobs - most), jobs)),
    ], select(trace, later)


def evaluations(trace: Trace, scenario: Scenario, settings: RltuneSettings, declared: bool) -> list[TraceEvaluation]:
    """Return the window on nodes for the load and for a fifth more; on declared or unlike nodes as they are."""
    pool = scenario.pool
    mixed = len(pool.gpu_types) > 1 or len(set(pool.gpus.tolist())) > 1 or bool(pool.slices)
    if declared or span_s(trace) <= 0 or len(trace) < _MIN_JOBS or mixed:
        return [TraceEvaluation(trace, scenario.pool, settings)]
    per_node = int(scenario.pool.gpus[0])
    load = min(max(offered_load(scenario.trace, scenario.pool.total_gpus), 0.5), 1.5)
    counts = dict.fromkeys(nodes_for_load(trace, per_node, load * factor) for factor in LOAD_FACTORS)
    return [TraceEvaluation(trace, Pool.uniform(n, per_node), settings) for n in counts]


# The mapping in training's loop: replays whose jobs get nodes and GPU types by the policy's own mapping. A mapped
# replay is a hundred times slower than a compiled one: rules are first chosen among by best fit, and the best of them,
# networks and heuristics by short mapped replays. The sequences of PPO are placed by best fit.

MAPPED_JOBS = 300  # the last ones of a window


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingProfiles(Profiles):
    """Speeds as the mapping has them live: as jobs reported, else by the patterns of a policy's file.

    "" is a model's fastest type. ``learned``: name pattern -> the estimate, of all users who run such jobs.
    """

    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    learned: Mapping[str, JobClassEstimate] = field(default_factory=dict)

    def per_s(self, model: str, gpu_type: str, gpus: int, nodes: int | None = 1) -> float | None:
        """Return a model's speed on a GPU type; a speed of 0 is no figure."""
        typed = speeds_by_name(self.speeds, model, self.kinds)
        of = speeds_by_type(self.learned.get(name_pattern(model)), gpus, typed, self.kinds)
        return (dict(zip(self.kinds, of, strict=True)).get(gpu_type, max(of)) if of else None) or None


def is_mapped(spec: PolicySpec, pool: Pool) -> bool:
    """Return whether the policy's mapping has GPU types to choose from."""
    return spec.place in MAPPING_PLACES and len(pool.gpu_types) > 1


def mapped_policy(policy: ReplayPolicy, spec: PolicySpec) -> ReplayPolicy:
    """Return the policy placed by the mapping of ``spec``."""
    own = PolicySpec(name=policy.name, place=spec.place, mapping=spec.mapping) if policy.model is None else spec
    return replace(policy, placement=spec.place, spec=own)


def rates_of(spec: PolicySpec, scenario: Scenario) -> Rates:
    """Return the speeds at which jobs run in these replays: those by which the policy maps."""
    learned: dict[str, JobClassEstimate] = {}
    for job_class, one in scenario.learned.items():
        name = job_class.partition("/")[2]
        shapes = learned[name].shapes if name in learned else ()
        learned[name] = JobClassEstimate(kind=name, shapes=shapes + one.shapes)
    kinds = tuple(scenario.pool.gpu_types)
    return Rates(profiles=MappingProfiles(series={}, speeds=dict(spec.mapping.speeds), kinds=kinds, learned=learned))


def placement_of(spec: PolicySpec, scenario: Scenario) -> tuple[Callable[[ReplayPolicy], ReplayPolicy], Rates | None]:
    """Return what places the policies of a table, and the speeds at which its jobs run."""
    if not is_mapped(spec, scenario.pool):
        return lambda policy: policy, None
    return lambda policy: mapped_policy(policy, spec), rates_of(spec, scenario)


def mapped_evaluations(
    evaluations: Sequence[TraceEvaluation], settings: RltuneSettings, spec: PolicySpec, scenario: Scenario
) -> list[TraceEvaluation]:
    """Return the same evaluations with the mapping where it has GPU types to choose from, of their last jobs."""
    placing = placement_of(spec, scenario)
    return [
        one if not is_mapped(spec, one.pool) else TraceEvaluation(last, one.pool, settings, *placing)
        for one in evaluations
        for last in [select(one.trace, np.arange(len(one.trace))[-MAPPED_JOBS:])]
    ]
