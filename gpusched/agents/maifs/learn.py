"""Training in our setting by CMA-ES on the agents' weights, with whole runs of drawn days."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evolve import Evolution, first_steps, mean_costs
from gpusched.agents.common.vector import round_to_float32
from gpusched.agents.maifs.engine import simulate, simulate_agent
from gpusched.agents.maifs.joint import GRAPH
from gpusched.agents.maifs.kinds import MaifsJobClasses, maifs
from gpusched.agents.maifs.network import POWERS, SHAPES, untrained, with_power
from gpusched.agents.maifs.rules import GREEDY
from gpusched.agents.maifs.workloads import draw
from gpusched.agents.maifs.world import MaifsWorld, exact_estimates, world_of
from gpusched.sched.state import Floats
from gpusched.traces.trace import Trace

_PARTS = (0.6, 1.0)
_NEVER = 3.0  # what it costs to move jobs about so that they need a quarter more decisions
_CHOOSE = 500_000  # seeds to choose checkpoints with; those to learn from count up from 1
FIRST_STEPS = {"job.skip": 0.3, "group.skip": 0.1, "bold": 0.2}


@dataclass(frozen=True, kw_only=True)
class MaifsSearchSettings:
    """Hyper-parameters.

    Attributes:
        generations, population: Of the search.
        tries: Workloads per generation, the same for all its candidates; weeks, loads and traces alternate.
        density, days: Of a workload, see `workloads.draw`.
        choose_every: Generations between validations. choose: Validation workloads of each trace and load.
    """

    generations: int = 24
    population: int = 16
    tries: int = 6
    density: float = 0.3
    days: float = 2.0
    choose_every: int = 4
    choose: int = 1


class MaifsTrainingCase(NamedTuple):
    """A workload with the results of greedy-true: mean JCT in seconds, and number of decisions."""

    world: MaifsWorld
    greedy_s: float
    decisions: int


Search = Callable[[Floats, Iterable[Sequence[MaifsTrainingCase]], MaifsSearchSettings, int, Executor], Iterator[Floats]]
"""From the initial weights and each generation's workloads to the weights after each; also: settings, seed, pool."""


class MaifsResult(NamedTuple):
    """The result of a training.

    Attributes:
        numbers: ``float64[numbers]``: the best weights on the validation workloads, rounded to float32.
        course: (generation, cost on the validation workloads): mean log of JCT relative to greedy-true's.
    """

    numbers: Floats
    course: tuple[tuple[int, float], ...]


def learn(
    arrivals: dict[str, Trace], kinds: MaifsJobClasses, settings: MaifsSearchSettings, seed: int, jobs: int,
    advance: Callable[[int, int], None], search: Search | None = None,
) -> MaifsResult:  # fmt: skip
    """Train from `network.untrained`, or a simple rule if that is better; absent models and test weeks are not used.

    ``search``: What improves the weights; `evolve` if not given.
    """
    start = untrained(seed)
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        n = settings.choose * len(arrivals) * len(maifs().loads)
        held_out = list(pool.map(lambda n: _try(arrivals, kinds, "choose", n, _CHOOSE + n, settings), range(n)))
        starts = [round_to_float32(start), *(round_to_float32(with_power(start, power)) for power in POWERS)]
        begun = mean_costs(pool, _cost, starts, held_out)
        best = begin = starts[int(begun.argmin())]
        course = [(0, float(begun[0])), (0, float(begun.min()))]
        generations = (
            list(pool.map(lambda n: _try(arrivals, kinds, "train", n, n, settings), _seeds(settings, seed, generation)))
            for generation in range(settings.generations)
        )
        found = (search or evolve)(begin, generations, settings, seed, pool)
        for generation, numbers in enumerate(found, 1):
            if generation % settings.choose_every == 0 or generation == settings.generations:
                now = round_to_float32(numbers)
                cost = float(mean_costs(pool, _cost, [now], held_out)[0])
                if cost < min(before for _, before in course):
                    best = now
                course.append((generation, cost))
            advance(generation, settings.generations)
        best = _pruned(pool, best, begin, arrivals, kinds, settings)
    return MaifsResult(best, tuple(course))


def evolve(
    begin: Floats, generations: Iterable[Sequence[MaifsTrainingCase]], settings: MaifsSearchSettings, seed: int,
    pool: Executor
) -> Iterator[Floats]:  # fmt: skip
    """Search by CMA-ES: yield the mean after each generation's workloads."""
    search = Evolution(begin, first_steps(SHAPES, FIRST_STEPS), settings.population, seed)
    for cases in generations:
        search.tell(mean_costs(pool, _cost, [round_to_float32(x) for x in search.ask()], cases))
        yield search.mean


def _seeds(settings: MaifsSearchSettings, seed: int, generation: int) -> range:
    first = 1 + (seed * settings.generations + generation) * settings.tries
    return range(first, first + settings.tries)


def _pruned(
    pool: Executor, best: Floats, begin: Floats, arrivals: dict[str, Trace], kinds: MaifsJobClasses,
    settings: MaifsSearchSettings
) -> Floats:  # fmt: skip
    """Return the best of the begin of the search, and full and partial steps from it.

    The choice is by the validation workloads with all jobs: on these larger clusters, weights trained on small ones may
    move jobs too often.
    """
    candidates = [begin, *(round_to_float32(begin + part * (best - begin)) for part in _PARTS)]
    n = settings.choose * len(arrivals) * len(maifs().loads)
    large = replace(settings, density=min(3 * settings.density, 1.0), days=settings.days / 2)
    tries = list(pool.map(lambda n: _try(arrivals, kinds, "choose", n, 2 * _CHOOSE + n, large), range(n)))
    return candidates[int(mean_costs(pool, _cost, candidates, tries).argmin())]


def _try(
    arrivals: dict[str, Trace], kinds: MaifsJobClasses, purpose: str, turn: int, seed: int,
    settings: MaifsSearchSettings
) -> MaifsTrainingCase:  # fmt: skip
    """Traces, loads and weeks in turn."""
    trace, loads = list(arrivals)[turn % len(arrivals)], maifs().loads
    turn, load = turn // len(arrivals) // len(loads), loads[turn // len(arrivals) % len(loads)]
    weeks: tuple[int, ...] = getattr(maifs().traces[trace], purpose)
    models = tuple(name for name in kinds.names if name not in maifs().absent)
    jobs = draw(
        arrivals[trace], trace, kinds, models, weeks[turn % len(weeks)], load, seed, settings.density, settings.days
    )  # fmt: skip
    world = world_of(jobs, kinds)
    played = simulate(world, exact_estimates(kinds.speed), GREEDY)
    return MaifsTrainingCase(world, float(played.jct.mean()), played.decisions)


def _cost(numbers: Floats, one: MaifsTrainingCase) -> float:
    """Return the log of the mean JCT by that of greedy-true."""
    # Agents learn acting at once: weights learned in auctions were 1.7 % worse in auctions on the validation weeks.
    jct = simulate_agent(one.world, numbers, GRAPH, most=one.decisions * 5 // 4).jct
    return float(np.log(jct.mean() / one.greedy_s)) if np.isfinite(jct).all() else _NEVER
