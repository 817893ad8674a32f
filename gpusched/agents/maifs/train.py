"""Training of a partition's agents by CMA-ES, on replays of recorded jobs made resizable.

The replays are those of ``gpusched replay --resizable``: the live passes, placement and brakes. Speeds that the log
does not have are drawn: in proportion to GPUs in half of the workloads, as in the final table, else a power of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.common.evolve import Evolution, first_steps, mean_costs
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.vector import round_to_float32, to_arrays
from gpusched.agents.maifs.joint import MODES
from gpusched.agents.maifs.network import POWERS, SHAPES, untrained, with_power
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.units import count_of
from gpusched.sched.sizing.rules import RULES
from gpusched.sched.state import Floats
from gpusched.sim.engine.build import ResizableJobs
from gpusched.sim.policies import ReplayPolicy, policy_by_name
from gpusched.sim.replay import replay
from gpusched.sim.resizing import elastic_of
from gpusched.traces.slicing import offered_load, scale_arrivals, select
from gpusched.traces.trace import ProgressRecords, Trace

_JOBS, _MIN_JOBS = (150, 300), 40  # of a workload; fewer in all are refused
_VALIDATION_JOBS = (800, 801)  # queues grow: what is good for some hundred jobs from empty nodes may be bad for a month
_LOADS, _VARIED, _POWERS = (0.5, 1.1), (0.8, 1.25), (0.3, 1.0)  # the log's own load within the first, varied by that
_VALIDATION_SEED = 1 << 20
_FIRST_STEPS = {"job.skip": 0.5, "group.skip": 0.1, "bold": 0.2}
_BASE_RULE = "drf"
_PATH = "<in training>"


@dataclass(frozen=True)
class MaifsTrainSettings:
    """The ``train`` section of the policy file.

    Attributes:
        least, most: Smallest and largest number of GPUs of a job; sizes are its own, and the powers of two between.
        restart_s: Cost of a resize.
        choose: Coordination of the agents: graph, exact, uncoordinated or alone (one chooser for all groups).
        attends: Whether the agents attend to each other.
        generations, population: Of the search. tries: Workloads per generation.
        choose_every: Generations between validations. validations: Workloads of each.
    """

    least: int = 1
    most: int = 8
    restart_s: float = 30.0
    choose: str = "graph"
    attends: bool = True
    generations: int = 16
    population: int = 8
    tries: int = 4
    choose_every: int = 4
    validations: int = 8


class DrawnWorkload(NamedTuple):
    """Jobs to replay, and their possible sizes; ``reference_s``: mean JCT by the base rule."""

    trace: Trace
    sizes: ResizableJobs
    reference_s: float = 1.0


class _Training:
    """The log of one partition, and replays of draws from it under candidate weights."""

    def __init__(self, job: TrainJob, hyper: MaifsTrainSettings) -> None:
        trace = job.scenario.trace
        fits = (trace.gpus > 0) & (trace.gpus <= hyper.most) & (trace.duration > 0)
        self.log, self.pool, self.hyper = select(trace, fits), job.scenario.pool, hyper
        self._load = float(np.clip(offered_load(self.log, self.pool.total_gpus), *_LOADS)) if len(self.log) else 1.0
        if len(self.log) < _MIN_JOBS:
            raise UsageError(
                f"{trace.name}: {count_of(len(self.log), 'job')} of at most {count_of(hyper.most, 'GPU')}: too few to"
                " train on"
            )
        self.about = {
            "knows": "oracle", "sizes": f"{hyper.least}-{hyper.most}", "restart_s": f"{hyper.restart_s:g}",
            "coordination": hyper.choose, "attends": "yes" if hyper.attends else "no",
        }  # fmt: skip
        self._agent = _agent_policy(job.spec)

    def draw(self, seed: int | tuple[int, ...], linear: bool, jobs: tuple[int, int] = _JOBS) -> DrawnWorkload:
        """Draw consecutive jobs, at about the log's load, with the base rule's result; ``linear``: their speeds."""
        rng = np.random.default_rng(seed)
        count = min(int(rng.integers(*jobs)), len(self.log))
        first = int(rng.integers(0, len(self.log) - count + 1))
        part = select(self.log, np.arange(first, first + count))
        if part.submit[-1] <= part.submit[0]:
            part = replace(part, submit=part.submit[0] + np.arange(count) * max(float(part.duration.mean()), 1.0))
        part = replace(part, submit=part.submit - part.submit[0])
        part = scale_arrivals(part, self.pool.total_gpus, self._load * rng.uniform(*_VARIED))
        drawn = DrawnWorkload(*with_speeds(part, self.hyper, linear, rng))
        return drawn._replace(reference_s=self.mean_jct_s(policy_by_name(_BASE_RULE), drawn))

    def mean_jct_s(self, policy: ReplayPolicy, drawn: DrawnWorkload) -> float:
        """Return the mean JCT of a workload under a policy."""
        played = replay(
            drawn.trace, self.pool, policy, elastic=drawn.sizes, restart_s=self.hyper.restart_s, limits=False
        )
        return float(np.nanmean(played.end - drawn.trace.submit))

    def cost(self, numbers: Floats, drawn: DrawnWorkload) -> float:
        """Return the logarithm of mean JCT relative to the base rule's."""
        model = TrainedModel("maifs", to_arrays(numbers, SHAPES), self.about, "", _PATH)
        return float(np.log(self.mean_jct_s(replace(self._agent, model=model), drawn) / drawn.reference_s))

    def rule_cost(self, rule: str, drawn: DrawnWorkload) -> float:
        """Return the same of a rule."""
        return float(np.log(self.mean_jct_s(policy_by_name(rule), drawn) / drawn.reference_s))


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one partition's agents; resume from a checkpoint. Kept is what is best on the validation workloads.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    hyper = settings_of(MaifsTrainSettings(), job.spec.settings)
    _check(hyper)
    training, start = _Training(job, hyper), round_to_float32(untrained(job.seed))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        held_out = _Validation(training, pool, hyper.validations)
        begun = held_out.costs(start)
        choice = _search(job, training, held_out, WeightChoice(start, begun, begun), report)
        rules = {rule: held_out.rule_cost(rule) for rule in RULES}
    return TrainerResult(
        arrays=to_arrays(choice.numbers, SHAPES), about=training.about, score=-float(choice.costs.mean()),
        hyper_parameters=asdict(hyper), notes=(_note(hyper.validations, begun, choice.costs, rules),),
        untrained=to_arrays(start, SHAPES),
    )  # fmt: skip


class WeightChoice(NamedTuple):
    """The weights chosen so far, their costs by kind of workload, and those of the untrained start."""

    numbers: Floats
    costs: Floats
    begun: Floats

    def better(self, numbers: Floats, costs: Floats) -> WeightChoice:
        """Return the better of this and other weights: on average, and not worse than the start with either speeds."""
        wins = costs.mean() < self.costs.mean() and bool((costs <= self.begun).all())
        return WeightChoice(numbers, costs, self.begun) if wins else self


class _Validation:
    """The workloads that weights are chosen on, with seeds that training does not use."""

    def __init__(self, training: _Training, pool: ThreadPoolExecutor, workloads: int) -> None:
        self._training, self.pool = training, pool
        self._drawn = list(pool.map(self._draw, range(workloads)))

    def _draw(self, n: int) -> DrawnWorkload:
        return self._training.draw(_VALIDATION_SEED + n, n % 2 == 0, _VALIDATION_JOBS)

    def costs(self, numbers: Floats) -> Floats:
        """Return mean costs with speeds in proportion to GPUs and with others, ``float64[2]``."""
        costs = list(self.pool.map(lambda drawn: self._training.cost(numbers, drawn), self._drawn))
        return np.array([np.mean(costs[half::2]) for half in (0, 1)])

    def rule_cost(self, rule: str) -> float:
        """Return a rule's mean cost."""
        return float(np.mean([self._training.rule_cost(rule, drawn) for drawn in self._drawn]))


def _search(
    job: TrainJob, training: _Training, held_out: _Validation, choice: WeightChoice, report: TrainingReport
) -> WeightChoice:
    """Return the best on the validation workloads of the start, some simple rules, and the course of CMA-ES."""
    hyper, start, begun = training.hyper, choice.numbers, choice.begun
    for power in POWERS:
        simple = with_power(start, power)
        choice = choice.better(simple, held_out.costs(simple))
    search = Evolution(choice.numbers, first_steps(SHAPES, _FIRST_STEPS), hyper.population, job.seed)
    if (saved := job.checkpoint.load()) is not None:
        arrays, state = saved
        search.restore(arrays)
        choice = WeightChoice(np.asarray(arrays["best"], np.float64), np.array(state["costs"]), begun)
    while search.generation < hyper.generations:
        seeds = [(job.seed, search.generation, n) for n in range(hyper.tries)]
        tries = list(held_out.pool.map(lambda seed: training.draw(seed, seed[-1] % 2 == 0), seeds))
        search.tell(mean_costs(held_out.pool, training.cost, [round_to_float32(x) for x in search.ask()], tries))
        if search.generation % hyper.choose_every == 0 or search.generation == hyper.generations:
            now = round_to_float32(search.mean)
            choice = choice.better(now, held_out.costs(now))
        if job.checkpoint.due():
            job.checkpoint.save({**search.state(), "best": choice.numbers}, {"costs": choice.costs.tolist()})
        report.step(search.generation, hyper.generations, -float(choice.costs.mean()))
    return choice


def _check(hyper: MaifsTrainSettings) -> None:
    if min(hyper.generations, hyper.population - 3, hyper.tries, hyper.choose_every, hyper.validations - 1) < 1:
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "population 4, validations 2, all else at least 1")
    if not (1 <= hyper.least <= hyper.most and hyper.restart_s >= 0):
        raise UsageError(f"train: {hyper} is not a range", "1 <= least <= most, no time below 0")
    if hyper.choose not in MODES:
        raise UsageError(f"train: choose is {hyper.choose!r}, expected one of {', '.join(MODES)}")


def _note(workloads: int, begun: Floats, costs: Floats, rules: dict[str, float]) -> str:
    rule = min(rules, key=rules.__getitem__)
    return (
        f"mean JCT on {workloads} workloads drawn for the choice of weights, against DRF: {np.expm1(begun.mean()):+.1%}"
        f" at the start, {np.expm1(costs.mean()):+.1%} at the end, {np.expm1(rules[rule]):+.1%} by the best rule,"
        f" {rule}; where the log does not record how speed scales with GPUs, that was drawn"
    )


def _agent_policy(spec: PolicySpec) -> ReplayPolicy:
    """Return the policy of the agents, without weights."""
    base = policy_by_name(_BASE_RULE)
    spec = msgspec.structs.replace(spec, settings={})
    return replace(base, name=spec.name, order=spec.order, placement=spec.place, spec=spec)


def with_speeds(
    trace: Trace, hyper: MaifsTrainSettings, linear: bool, rng: np.random.Generator
) -> tuple[Trace, ResizableJobs]:
    """Return jobs with their possible sizes and the speeds there: their own, or drawn where none was reported."""
    if (reported := elastic_of(trace)) is not None:
        return trace, reported
    powers = np.array([1 << k for k in range(hyper.most.bit_length()) if hyper.least <= 1 << k <= hyper.most])
    jobs = len(trace)
    power = np.where(linear | (rng.random(jobs) < 0.25), 1.0, rng.uniform(*_POWERS, jobs))
    useful = np.maximum(trace.gpus, hyper.most if linear else rng.choice(powers, jobs))  # more GPUs do not help
    sizes = [np.union1d(powers, gpus) for gpus in trace.gpus]
    of = np.repeat(np.arange(jobs), [len(own) for own in sizes])
    gpus = np.concatenate(sizes)
    none, never = np.zeros(0, np.int64), np.zeros(0)
    progress = ProgressRecords(
        steps=np.ones(jobs), cost_s=np.full(jobs, np.nan), cooldown_s=np.zeros(jobs), size_job=of, size_gpus=gpus,
        steps_per_s=np.minimum(gpus, useful[of]) ** power[of], run_job=none, run_gpus=none, run_after_s=never,
        run_s=never,
    )  # fmt: skip
    drawn = replace(trace, progress=progress)
    found = elastic_of(drawn)
    assert found is not None
    return drawn, found
