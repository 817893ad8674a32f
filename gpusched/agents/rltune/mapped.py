"""The mapping in training's loop: replays whose jobs get nodes and GPU types by the policy's own mapping.

A mapped replay is a hundred times slower than a compiled one: rules are first chosen among by best fit, and the best of
them, networks and heuristics by short mapped replays. The sequences of PPO are placed by best fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpusched.agents.rltune.evaluation import TraceEvaluation
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.model.interference import JobClassEstimate, name_pattern
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.sched.mapping.learned import speeds_by_type
from gpusched.sched.stages import speeds_by_name
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import Rates
from gpusched.study.study import Scenario
from gpusched.traces.slicing import select

JOBS = 300  # of a mapped replay: the last ones of a window


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
        for last in [select(one.trace, np.arange(len(one.trace))[-JOBS:])]
    ]
