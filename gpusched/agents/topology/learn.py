"""Training by evolution: CMA-ES on the weights, each candidate evaluated on whole replays.

`learn` draws clusters (``gpusched reproduce``); `train` gives the jobs of a partition.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evolve import Evolution, mean_costs
from gpusched.agents.common.vector import round_to_float32, to_vector
from gpusched.agents.topology.network import IDLE, SHAPES, start, weights_from
from gpusched.agents.topology.replay import UNBOUNDED, agents_spec, replayed_within
from gpusched.agents.topology.workloads import TopologySetting, draw, racked_topology
from gpusched.config.weights import Arrays
from gpusched.model.policy import PolicySpec
from gpusched.sched.state import Floats
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.network import ColocationTable
from gpusched.sim.pool import Pool
from gpusched.sim.result import ReplayResult
from gpusched.traces.trace import Trace

_STEPS = {
    "place.skip": 0.03, "place.out": 0.015, "wait.skip": 0.08, "wait.out": 0.04, "hand.skip": 0.02, "hand.out": 0.01,
}  # fmt: skip
"""What is learned, and how far first steps go; the layers of the graph stay as they were drawn."""
_IDLE_STEP = 0.5  # of the one number that does not start at 0
_NEAR = 1e-3
"""Penalty on the squared distance from the start: for most weights the workloads carry less information than this."""
_VALIDATION_SEEDS = 1 << 20  # seeds of workloads for validation; those for evaluation are smaller
_TRAINING_SEEDS = 1 << 21
_TAIL_WEIGHT = 0.3  # what the 99th percentile counts for beside the mean
_TABLE_WEIGHT = 0.3  # what a workload by the table counts for: differences are ten times as large there
_MOST_MORE = 0.2
"""A replay ends where jobs have spent more than under the start until then, by so much of what they spend there in all:
by then it is among the worst, its queue is long, and each decision walks all of that."""
_ENDED = 10.0  # what such a replay costs besides: more than any that came to its end
_LOADS = (0.7, 0.9, 1.1, 0.9)
_FAMILIES = 5
_LONG = 40


class TopologyRecipe(NamedTuple):
    """Hyper-parameters.

    Attributes:
        generations, population: Of the search. tries: Workloads a generation, the same for all of its candidates.
        jobs: Of a workload; long_jobs: of every fortieth, for long queues; table_jobs: of one by a table of pairs.
        watch: Other workloads, for validation every ``every`` generations.
    """

    generations: int = 40
    population: int = 12
    tries: int = 20
    jobs: int = 6000
    long_jobs: int = 20_000
    table_jobs: int = 700
    watch: int = 60
    every: int = 4


QUICK_RECIPE = TopologyRecipe(2, population=6, tries=2, jobs=100, long_jobs=100, table_jobs=100, watch=2, every=1)


class TrainingCase(NamedTuple):
    """A workload on its nodes, the policy that runs it (order, backfill, schedulers), and its weight in the mean.

    Where its jobs have spent more than ``most_s`` seconds when so many have arrived, a replay ends; see `within`.
    """

    trace: Trace
    pool: Pool
    network: PlacementNetwork
    spec: PolicySpec
    weight: float = 1.0
    most_s: Floats = UNBOUNDED


class TopologyResult(NamedTuple):
    """The result: the start, the best mean of the search, and (generation, held-out cost).

    The last cost is that of the result.
    """

    start: Floats
    numbers: Floats
    course: tuple[tuple[int, float], ...]


def learn(
    recipe: TopologyRecipe, pairs: ColocationTable | None, seed: int, workers: int, on_step: Callable[[int, int], None]
) -> TopologyResult:
    """Train on drawn clusters; ``pairs``: a table of pairs, used by a fifth of the workloads."""
    held_out = [draw_case(_VALIDATION_SEEDS + k, pairs, recipe) for k in range(recipe.watch)]

    def tries(generation: int) -> list[TrainingCase]:
        first = _TRAINING_SEEDS + (seed * 100_000 + generation) * recipe.tries
        return [draw_case(k, pairs, recipe) for k in range(first, first + recipe.tries)]

    return search(new_search(recipe.population, seed), recipe, tries, held_out, workers, on_step)


def new_search(population: int, seed: int) -> Evolution:
    """Return the search at `network.start`."""
    steps: Arrays = {name: np.full(shape, _STEPS.get(name, 0.0)) for name, shape in SHAPES.items()}
    steps["wait.skip"][IDLE] = _IDLE_STEP
    return Evolution(start(0), to_vector(steps, SHAPES), population, seed)


def search(
    found: Evolution, recipe: TopologyRecipe, tries: Callable[[int], list[TrainingCase]],
    held_out: Sequence[TrainingCase], workers: int, on_step: Callable[[int, int], None],
    save: Callable[[], None] = lambda: None,
) -> TopologyResult:  # fmt: skip
    """Search on; ``tries``: the workloads of a generation, ``save``: called after each."""
    means = list[Floats]()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        watched = list(pool.map(within, held_out))

        def judged(numbers: Floats) -> float:
            return float(mean_costs(pool, cost, [numbers], watched)[0])

        course = [(0, judged(round_to_float32(start(0))))]
        while found.generation < recipe.generations:
            cases, asked = list(pool.map(within, tries(found.generation))), found.ask()
            far = [_NEAR * found.distance(numbers) for numbers in asked]
            found.tell(mean_costs(pool, cost, [round_to_float32(numbers) for numbers in asked], cases) + far)
            save()
            if found.generation % recipe.every == 0 or found.generation == recipe.generations:
                means.append(round_to_float32(found.mean))
                course.append((found.generation, judged(means[-1])))
            on_step(found.generation, recipe.generations)
        # Workloads are few beside how much they differ: the mean of where the search was is better than any of it.
        best = round_to_float32(np.mean(means[1:] or means or [round_to_float32(found.mean)], axis=0))
        course.append((recipe.generations, judged(best)))
    return TopologyResult(round_to_float32(start(0)), best, tuple(course))


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
    jobs = recipe.long_jobs if number % _LONG == 0 else recipe.jobs
    trace, kind = draw(setting, load, number, jobs if setting.pairs is None else recipe.table_jobs)
    parts = int(rng.choice([1, 1, 4]))
    weight = 1.0 if setting.pairs is None else _TABLE_WEIGHT
    network = PlacementNetwork(setting.tree, setting.model, kind)
    return TrainingCase(trace, setting.pool, network, agents_spec(parts), weight)


def within(case: TrainingCase) -> TrainingCase:
    """Return the case with a bound on its replays, by what jobs spend under the start."""
    _, spent = _replayed(round_to_float32(start(0)), case)
    return case._replace(most_s=spent + _MOST_MORE * spent[-1])


def cost(numbers: Floats, case: TrainingCase) -> float:
    """Return the logarithm of the mean JCT, plus a little of the 99th percentile's; more where a replay ended early."""
    result, spent = _replayed(numbers, case)
    if np.any(spent > case.most_s):
        return (float(np.log(case.most_s[-1] / len(case.trace))) + _ENDED) * case.weight
    jct = (result.end - case.trace.submit)[np.isfinite(result.end)]  # of those that can run there
    return float(np.log(jct.mean()) + _TAIL_WEIGHT * np.log(np.percentile(jct, 99))) * case.weight


def _replayed(numbers: Floats, case: TrainingCase) -> tuple[ReplayResult, Floats]:
    return replayed_within(case.trace, case.pool, case.network, weights_from(numbers), case.spec, case.most_s)
