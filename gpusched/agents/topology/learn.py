"""Training by evolution: CMA-ES on the weights, each candidate evaluated on whole replays of random clusters."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evolve import Evolution, mean_costs
from gpusched.agents.common.vector import round_to_float32, split_vector, to_vector
from gpusched.agents.topology.network import SHAPES, untrained, weights_from
from gpusched.agents.topology.places import IDLE
from gpusched.agents.topology.replay import replayed
from gpusched.agents.topology.workloads import TopologySetting, draw, racked_topology
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.network import ColocationTable
from gpusched.traces.trace import Trace

_STEPS = {
    "place.skip": 0.03, "place.out": 0.015, "wait.skip": 0.08, "wait.out": 0.04, "hand.skip": 0.02, "hand.out": 0.01,
}  # fmt: skip
"""What is learned, and how far first steps go; the layers of the graph stay as they were drawn."""
_INITIAL = {("wait.skip", IDLE): (-1.0, 0.5)}
"""Where the search begins, and its first step there: less patient than the rule where GPUs are idle beside a queue."""
_NEAR = 1e-3
"""What it costs to be one step from the beginning, squared: workloads tell less than this of most weights."""
_VALIDATION_SEEDS = 1 << 20  # seeds of workloads to see what comes of it; those to judge by are smaller
_TRAINING_SEEDS = 1 << 21
_TAIL_WEIGHT = 0.3  # what the 99th percentile counts for beside the mean
_TABLE_WEIGHT = 0.3  # what a workload by the table counts for: differences are ten times as large there
_LOADS = (0.7, 0.9, 1.1, 0.9)
_FAMILIES = 5


class TopologyRecipe(NamedTuple):
    """Hyper-parameters.

    Attributes:
        generations, population: Of the search. tries: Workloads a generation, the same for all of its candidates.
        jobs: Of a workload; table_jobs: of one by a table of pairs.
        watch: Other workloads, on which it is seen what comes of it, every ``every`` generations.
    """

    generations: int = 40
    population: int = 12
    tries: int = 20
    jobs: int = 6000
    table_jobs: int = 700
    watch: int = 60
    every: int = 8


QUICK_RECIPE = TopologyRecipe(generations=2, population=6, tries=2, jobs=100, table_jobs=100, watch=2, every=1)


class TrainingCase(NamedTuple):
    """A workload, the number of schedulers, and its weight in the mean."""

    setting: TopologySetting
    trace: Trace
    network: PlacementNetwork
    parts: int
    weight: float


class TopologyResult(NamedTuple):
    """The result: the start, the final mean of the search, and (generation, held-out cost).

    The last cost is that of the mean.
    """

    start: Floats
    numbers: Floats
    course: tuple[tuple[int, float], ...]


def learn(
    recipe: TopologyRecipe, pairs: ColocationTable | None, seed: int, workers: int, tell: Callable[[int, int], None]
) -> TopologyResult:
    """Train from `network.untrained`; ``pairs``: a table of pairs, used by a fifth of the workloads."""
    start = untrained(0)
    learned = np.concatenate([np.full(int(np.prod(shape)), name in _STEPS) for name, shape in SHAPES.items()])
    begin, steps = (numbers[learned] for numbers in _search_start(start))

    def whole(numbers: Floats) -> Floats:
        found = start.copy()
        found[learned] = numbers
        return round_to_float32(found)

    search = Evolution(begin, steps, recipe.population, seed)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        held_out = [draw_case(_VALIDATION_SEEDS + k, pairs, recipe) for k in range(recipe.watch)]
        course, means = [(0, float(mean_costs(pool, cost, [round_to_float32(start)], held_out)[0]))], []
        for generation in range(1, recipe.generations + 1):
            first = _TRAINING_SEEDS + (seed * 100_000 + generation - 1) * recipe.tries
            tries = [draw_case(k, pairs, recipe) for k in range(first, first + recipe.tries)]
            asked = search.ask()
            far = [_NEAR * float(np.square((numbers - begin) / steps).sum()) for numbers in asked]
            search.tell(mean_costs(pool, cost, [whole(numbers) for numbers in asked], tries) + far)
            if generation % recipe.every == 0 or generation == recipe.generations:
                means.append(whole(search.mean))
                course.append((generation, float(mean_costs(pool, cost, [means[-1]], held_out)[0])))
            tell(generation, recipe.generations)
        # Workloads are few beside how much they differ: the mean of where the search was is better than any of it.
        best = round_to_float32(np.mean(means[1:] or means, axis=0))
        course.append((recipe.generations, float(mean_costs(pool, cost, [best], held_out)[0])))
    return TopologyResult(round_to_float32(start), best, tuple(course))


def _search_start(start: Floats) -> tuple[Floats, Floats]:
    """Return where the search begins, and its first steps."""
    begin: Arrays = dict(zip(SHAPES, split_vector(start.copy(), SHAPES), strict=True))
    steps: Arrays = {name: np.full(shape, _STEPS.get(name, 0.0)) for name, shape in SHAPES.items()}
    for (name, i), (value, step) in _INITIAL.items():
        begin[name][i], steps[name][i] = value, step
    return to_vector(begin, SHAPES), to_vector(steps, SHAPES)


def draw_case(number: int, pairs: ColocationTable | None, recipe: TopologyRecipe) -> TrainingCase:
    """Draw a cluster, a job mix, a load and a number of schedulers; kinds of clusters and loads alternate."""
    rng = np.random.default_rng((9, number))
    family, load = number % _FAMILIES, _LOADS[number // _FAMILIES % len(_LOADS)]
    machine, mix = str(rng.choice(["aws", "rtx"])), str(rng.choice(["philly-like", "philly-like", "large"]))
    if family == 4 and pairs is not None:
        combine = str(rng.choice(["product", "sum"]))
        setting = TopologySetting("table", *racked_topology(16, 4), mix="table", pairs=pairs, combine=combine)
    elif family == 1:
        setting = TopologySetting("racks", *racked_topology(4, 4, 4, 4.0), machine, mix)
    elif family == 2:
        setting = TopologySetting("racks", *racked_topology(4, 8, 2, 2.0), machine, mix)
    elif family == 3:
        count, gpus = int(rng.choice([2, 4])), int(rng.choice([4, 8]))
        over = float(rng.choice([1.0, 2.0, 4.0]))
        setting = TopologySetting("racks", *racked_topology(64 // gpus // count, gpus, count, over), machine, mix)
    else:
        setting = TopologySetting("flat", *racked_topology(16, 4), machine, mix)
    trace, kind = draw(setting, load, number, recipe.jobs if setting.pairs is None else recipe.table_jobs)
    parts = int(rng.choice([1, 1, 4]))
    weight = 1.0 if setting.pairs is None else _TABLE_WEIGHT
    return TrainingCase(setting, trace, PlacementNetwork(setting.tree, setting.model, kind), parts, weight)


def cost(numbers: Floats, case: TrainingCase) -> float:
    """Return the logarithm of the mean JCT, plus a little of the 99th percentile's."""
    jct = (
        replayed(case.trace, case.setting.pool, case.network, weights_from(numbers), case.parts).end - case.trace.submit
    )
    return float(np.log(jct.mean()) + _TAIL_WEIGHT * np.log(np.percentile(jct, 99))) * case.weight
