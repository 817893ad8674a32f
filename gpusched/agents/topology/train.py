"""Training of a partition's agent, on windows of its own jobs, slowed down as was learned of them.

Where nothing was learned (a trace, drawn jobs), kinds of jobs are those of public measurements, as in a replay with
``--topology``. Windows bound the queue, and so the time of a decision, however many jobs there are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.vector import to_arrays
from gpusched.agents.topology.gradient import GradientRecipe, alive, learn_by_gradient
from gpusched.agents.topology.learn import TopologyRecipe, TrainingCase, cost, new_search, search, within
from gpusched.agents.topology.network import SHAPES, start
from gpusched.errors import UsageError
from gpusched.sched.state import Floats
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.study.study import Scenario, placement_costs
from gpusched.traces.generate import generate
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

MIN_JOBS = 20
"""A window has no fewer jobs, if there are as many."""
_VALIDATION = 0.25  # the last part of the jobs: for the choice of weights
_DRAWN_FROM = 10_000  # seeds of drawn workloads; those of the final table are `data.FIRST_HELD_OUT` and above
_SEEDS_APART = 1 << 21  # workloads of each seed of a search: those of the final table lie between the first two
Draw = Callable[[int], list[TrainingCase]]
"""Draws the windows of a generation."""


@dataclass(frozen=True)
class TopologyTrainSettings:
    """The ``train`` section of the policy file.

    Attributes:
        generations, population: Of the search. tries: Windows per generation.
        window: Jobs of a window at most. watch: Windows for the choice of weights. every: Generations between them.
        gradient: Steps that train all layers by gradient (`gradient`) instead; 0: none. Whatever is better on the
            windows for the choice is kept: start, search or gradient.
    """

    generations: int = 16
    population: int = 8
    tries: int = 6
    window: int = 2000
    watch: int = 8
    every: int = 4
    gradient: int = 0


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one partition's agent; resume from a checkpoint.

    Raises:
        UsageError: A hyper-parameter is invalid, or what placement costs there is unknown.
    """
    hyper = settings_of(TopologyTrainSettings(), job.spec.settings)
    if min(hyper.generations, hyper.population - 3, hyper.tries, hyper.watch, hyper.every) < 1 or hyper.window < 2:
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "a population of 4, a window of 2, else at least 1")
    tries, held_out, note = _cases(job, hyper)
    recipe = TopologyRecipe(generations=hyper.generations, population=hyper.population, every=hyper.every)
    found = new_search(hyper.population, job.seed)
    costs = _digest(held_out)
    if (saved := job.checkpoint.load()) is not None and saved[1].get("costs") == costs:
        found.restore(saved[0])

    def save() -> None:
        if job.checkpoint.due():
            job.checkpoint.save(found.state(), {"costs": costs})

    result = search(found, recipe, tries, held_out, os.cpu_count() or 1, report.step, save)
    known = {"the start": result.course[0][1], "the search": result.course[-1][1]}
    numbers = {"the start": result.start, "the search": result.numbers}
    if hyper.gradient > 0:
        numbers["the gradient"] = _by_gradient(job, hyper, tries, report)
        known["the gradient"] = float(np.mean([cost(numbers["the gradient"], within(case)) for case in held_out]))
    best = min(known, key=lambda name: known[name])
    text = ", ".join(f"{name} {value - known['the start']:+.4f}" for name, value in known.items())
    notes = (note, f"log of mean JCT on {len(held_out)} windows for the choice, above the start: {text}; kept: {best}")
    return TrainerResult(
        arrays=to_arrays(numbers[best], SHAPES), about={"knows": _knows(job)}, score=-known[best],
        hyper_parameters=asdict(hyper), notes=notes, untrained=to_arrays(start(0), SHAPES),
    )  # fmt: skip


def _by_gradient(job: TrainJob, hyper: TopologyTrainSettings, tries: Draw, report: TrainingReport) -> Floats:
    """Return the weights after so many steps by gradient, on the windows of as many generations."""
    recipe = GradientRecipe(steps=hyper.gradient)

    def cases(step: int) -> list[TrainingCase]:
        return [
            one._replace(spec=msgspec.structs.replace(one.spec, schedulers=1)) for one in tries(step)[: recipe.batch]
        ]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return learn_by_gradient(
            alive(start(0)), recipe, cases, job.seed, pool, lambda step, numbers: report.step(step, recipe.steps)
        )


def _digest(cases: list[TrainingCase]) -> str:
    """Return a digest of what placement costs, which is learned anew as jobs end; no checkpoint's key has it."""
    parts = [part for one in cases for part in (one.network.kind, one.network.model.kinds, one.network.tree.weight)]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def _knows(job: TrainJob) -> str:
    """Return the policy's information on run times, which only its order and backfill use."""
    return "nothing" if job.spec.backfill in ("none", "skip") and job.spec.order == "fifo" else "limit"


def _cases(job: TrainJob, hyper: TopologyTrainSettings) -> tuple[Draw, list[TrainingCase], str]:
    """Return a function that draws a generation's windows, the windows for the choice of weights, and a note."""
    scenario = job.scenario
    if job.workload is not None:
        workload, (_, note) = job.workload, placement_costs(scenario)

        def drawn(seed: int) -> TrainingCase:
            trace = generate(workload, seed)
            costs = placement_costs(scenario._replace(trace=trace))[0]
            return _case(job, trace, costs, 0, min(hyper.window, len(trace)))

        def tries(generation: int) -> list[TrainingCase]:
            first = 2 * _DRAWN_FROM + _SEEDS_APART * job.seed + generation * hyper.tries
            return [drawn(seed) for seed in range(first, first + hyper.tries)]

        return tries, [drawn(_DRAWN_FROM + k) for k in range(hyper.watch)], note
    network, note = placement_costs(scenario)
    return *_windows(job, scenario, network, hyper), note


def _windows(
    job: TrainJob, scenario: Scenario, network: PlacementNetwork, hyper: TopologyTrainSettings
) -> tuple[Draw, list[TrainingCase]]:
    """Return the same of recorded jobs: windows at random before the last part, and evenly spaced ones in that."""
    count = len(scenario.trace)
    cut = count - int(count * _VALIDATION) if count > 2 * MIN_JOBS else count

    def window(lo: int, hi: int, at: float) -> TrainingCase:
        size = min(hyper.window, max(MIN_JOBS, (hi - lo) // 2), hi - lo)
        first = lo + round(at * (hi - lo - size))
        return _case(job, scenario.trace, network, first, first + size)

    def tries(generation: int) -> list[TrainingCase]:
        rng = np.random.default_rng((job.seed, generation))
        return [window(0, cut, at) for at in rng.random(hyper.tries)]

    begin = cut if cut < count else 0
    return tries, [window(begin, count, at) for at in np.linspace(0.0, 1.0, hyper.watch)]


def _case(job: TrainJob, trace: Trace, network: PlacementNetwork, first: int, last: int) -> TrainingCase:
    rows = np.arange(first, last, dtype=np.int64)
    part = select(trace, rows)
    return TrainingCase(part, job.scenario.pool, network._replace(kind=network.kind[rows]), job.spec)
