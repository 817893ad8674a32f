"""Learning by evolution: CMA-ES on the weights, each tried on whole replays of drawn clusters."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evolve import Evolution
from gpusched.agents.common.vector import rounded
from gpusched.agents.topology.engine import placed_by, replayed
from gpusched.agents.topology.network import SHAPES, agent_of, untrained
from gpusched.agents.topology.workloads import MIXES, Setting, draw, racks
from gpusched.model.topology import Topology
from gpusched.sched.state import Floats
from gpusched.sim.engine.placing import Network
from gpusched.sim.network import Pairs
from gpusched.sim.replay import replay
from gpusched.traces.trace import Trace

RULES = ("rack-wait", "contention")
_STEP = 0.03  # how far first steps go
_CHOICE = 1 << 20  # seeds by which weights are chosen; those to learn from are larger, those to judge by smaller
_LEARN = 1 << 21
_TAIL = 0.1  # what the 99th percentile counts for beside the mean


class Recipe(NamedTuple):
    """Hyper-parameters.

    Attributes:
        generations, population: Of the search. tries: Workloads a generation, the same for all of its candidates.
        jobs: Of a workload. choose: Workloads by which weights are chosen, every ``every`` generations.
    """

    generations: int = 80
    population: int = 14
    tries: int = 8
    jobs: int = 2000
    choose: int = 32
    every: int = 5


QUICK_RECIPE = Recipe(generations=2, population=6, tries=2, jobs=100, choose=2, every=1)


class Try(NamedTuple):
    """A workload, and how long its jobs take under the better of the rules: mean and 99th percentile, seconds."""

    setting: Setting
    trace: Trace
    network: Network
    parts: int
    mean_s: float
    tail_s: float


class Learned(NamedTuple):
    """What came of it: the start, what did best where weights are chosen, and (generation, cost there)."""

    start: Floats
    numbers: Floats
    course: tuple[tuple[int, float], ...]


def learn(recipe: Recipe, pairs: Pairs | None, seed: int, workers: int, tell: Callable[[int, int], None]) -> Learned:
    """From `network.untrained`; ``pairs``: a table of pairs, of which a quarter of the workloads are.

    What is learned is how places, waiting and other schedulers are valued (``skip`` and ``out``); the layers of the
    graph stay as they were drawn.
    """
    start = untrained(seed)
    heard = np.concatenate(
        [np.full(int(np.prod(shape)), name.endswith(("skip", "out"))) for name, shape in SHAPES.items()]
    )

    def whole(learned: Floats) -> Floats:
        numbers = start.copy()
        numbers[heard] = learned
        return rounded(numbers)

    search = Evolution(start[heard], np.full(int(heard.sum()), _STEP), recipe.population, seed)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        held_out = list(pool.map(lambda k: drawn(_CHOICE + k, pairs, recipe.jobs), range(recipe.choose)))
        best, course = rounded(start), [(0, _cost(pool, [rounded(start)], held_out)[0])]
        for generation in range(recipe.generations):
            first = _LEARN + (seed * recipe.generations + generation) * recipe.tries
            tries = list(pool.map(lambda k: drawn(k, pairs, recipe.jobs), range(first, first + recipe.tries)))
            search.tell(np.array(_cost(pool, [whole(learned) for learned in search.ask()], tries)))
            if (generation + 1) % recipe.every == 0 or generation + 1 == recipe.generations:
                now = whole(search.mean)
                cost = _cost(pool, [now], held_out)[0]
                if cost < min(found for _, found in course):
                    best = now
                course.append((generation + 1, cost))
            tell(generation + 1, recipe.generations)
    return Learned(rounded(start), best, tuple(course))


def drawn(seed: int, pairs: Pairs | None, jobs: int) -> Try:
    """A cluster, a mix of jobs, a load, and into how many parts the cluster is divided; all of them drawn."""
    rng = np.random.default_rng((7, seed))
    setting = _table(rng, pairs) if pairs is not None and rng.random() < 0.25 else _racks(rng)
    parts = int(rng.choice([1, 1, 2, 4]))
    load = float(rng.choice([0.7, 0.8, 0.9, 1.0, 1.1]))
    trace, kind = draw(setting, load, seed, jobs)
    network = Network(setting.tree, setting.model, kind)
    found = [
        _jct(trace, replay(trace, setting.pool, placed_by(name), network=network, seed=seed).end) for name in RULES
    ]
    return Try(setting, trace, network, parts, min(mean for mean, _ in found), min(tail for _, tail in found))


def _racks(rng: np.random.Generator) -> Setting:
    gpus = int(rng.choice([4, 8]))
    nodes = 64 // gpus
    count = int(rng.choice([1, 2, 4]))
    machine = str(rng.choice(["aws", "rtx", "dgx"], p=[0.45, 0.45, 0.1]))
    mix = str(rng.choice(list(MIXES)))
    if count == 1:
        return Setting("flat", Topology(), tuple(f"n{i:02}" for i in range(nodes)), gpus, machine, mix)
    topology, names = racks(count, nodes // count, float(rng.choice([1.0, 2.0, 4.0])))
    return Setting("racks", topology, names, gpus, machine, mix)


def _table(rng: np.random.Generator, pairs: Pairs) -> Setting:
    gpus = int(rng.choice([4, 8]))
    names = tuple(f"n{i:02}" for i in range(64 // gpus))
    return Setting(
        "table", Topology(), names, gpus, mix="table", pairs=pairs, combine=str(rng.choice(["product", "sum"]))
    )


def _jct(trace: Trace, end: Floats) -> tuple[float, float]:
    jct = end - trace.submit
    return float(jct.mean()), float(np.percentile(jct, 99))


def cost(numbers: Floats, one: Try) -> float:
    """The logarithm of the mean JCT by that of the better rule, and a little of the 99th percentile's."""
    result = replayed(one.trace, one.setting.pool, one.network, agent_of(numbers), one.parts)
    mean, tail = _jct(one.trace, result.end)
    return float(np.log(mean / one.mean_s) + _TAIL * np.log(tail / one.tail_s))


def _cost(pool: ThreadPoolExecutor, candidates: list[Floats], tries: list[Try]) -> list[float]:
    """The mean over workloads, of each candidate."""
    pairs = [(numbers, one) for numbers in candidates for one in tries]
    costs = np.array(list(pool.map(lambda pair: cost(*pair), pairs)))
    return [float(mean) for mean in costs.reshape(len(candidates), len(tries)).mean(1)]
