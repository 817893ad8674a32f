"""Training of a partition's agent: the linear rule of a job's inputs, found by CMA-ES on recorded jobs made resizable.

Live there are no groups, so prices and the graph are not used, and only the rule is searched.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from gpusched.agents.common.evolve import Evolution
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.resizable import ResizableWorkload, SizeRange, WorkloadLog, drf_policy, run, workload_log
from gpusched.agents.common.vector import round_to_float32, to_arrays
from gpusched.agents.maifs.live import choose_sizes
from gpusched.agents.maifs.network import JOB, SHAPES, MaifsWeights, agent_of, untrained
from gpusched.errors import UsageError
from gpusched.sched.sizing.question import Claims, question_of
from gpusched.sched.state import Floats, Ints

_RULE = slice(0, 2 * JOB)  # of the numbers: ``job.skip``, which comes first
_STEP = 0.3


@dataclass(frozen=True)
class MaifsTrainSettings(SizeRange):
    """The ``train`` section of the policy file.

    Attributes:
        generations, population: Of the search. tries: Workloads per generation.
        choose_every: Generations between validations.
    """

    generations: int = 40
    population: int = 12
    tries: int = 6
    choose_every: int = 5


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one partition's agent; resume from a checkpoint.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    hyper = settings_of(MaifsTrainSettings(), job.spec.settings)
    if min(hyper.generations, hyper.population - 3, hyper.tries, hyper.choose_every) < 1:
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "a population of 4, all else at least 1")
    log, about = workload_log(job, hyper)
    start = untrained(job.seed)
    search = Evolution(start[_RULE].copy(), np.full(2 * JOB, _STEP), hyper.population, job.seed)
    choice = _drf_results(log, log.validation_workloads())
    begun = _cost(start, choice, log.restart)
    best, least = start[_RULE].copy(), begun
    if (saved := job.checkpoint.load()) is not None:
        arrays, state = saved
        search.restore(arrays)
        best, least = np.asarray(arrays["best"], np.float64), state["least"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while search.generation < hyper.generations:
            rng = np.random.default_rng((job.seed, search.generation))
            tries = _drf_results(log, [log.draw(rng) for _ in range(hyper.tries)])
            candidates = [_with_rule(start, rule) for rule in search.ask()]
            search.tell(np.array(list(pool.map(lambda c: _cost(c, tries, log.restart), candidates))))  # noqa: B023
            if search.generation % hyper.choose_every == 0 or search.generation == hyper.generations:
                now = _cost(_with_rule(start, search.mean), choice, log.restart)
                best, least = (search.mean.copy(), now) if now < least else (best, least)
            if job.checkpoint.due():
                job.checkpoint.save({**search.state(), "best": best}, {"least": least})
            report.step(search.generation, hyper.generations, -least)
    note = (
        f"mean JCT on {len(choice)} workloads drawn for the choice of weights, against DRF: {begun - 1:+.1%} at the "
        f"start, {least - 1:+.1%} at the end; how speed goes with GPUs was drawn there, for the log does not tell"
    )
    return TrainerResult(
        arrays=to_arrays(_with_rule(start, best), SHAPES), about=about, score=-least, hyper_parameters=asdict(hyper),
        notes=(note,), untrained=to_arrays(start, SHAPES),
    )  # fmt: skip


def _with_rule(start: Floats, rule: Floats) -> Floats:
    """Return all weights with only the rule set, as rounded in a weights file."""
    numbers = start.copy()
    numbers[_RULE] = rule
    return round_to_float32(numbers)


def _drf_results(log: WorkloadLog, workloads: list[ResizableWorkload]) -> list[tuple[ResizableWorkload, float]]:
    return [(one, _jct(one, run(one, drf_policy, log.restart))) for one in workloads]


def _jct(one: ResizableWorkload, end: Floats) -> float:
    return float((end - one.submit).mean())


def _cost(numbers: Floats, tries: list[tuple[ResizableWorkload, float]], restart: float) -> float:
    """Return the mean over workloads of mean JCT relative to DRF's."""
    agent: MaifsWeights = agent_of(numbers)

    def policy(claims: Claims, coming: int) -> Ints:
        return choose_sizes(agent, question_of(claims, "", 0.0, ()))

    return float(np.mean([_jct(one, run(one, policy, restart)) / drf for one, drf in tries]))
