"""Random mapping problems, and the best answer by trying everything."""

from __future__ import annotations

import itertools

import numpy as np

from gpusched.sched.mapping.greedy import first_answer, greedy
from gpusched.sched.mapping.problem import MappingSolution, Nodes, Problem, faults, value_of


def instance(rng: np.random.Generator, nodes: int, jobs: int, kinds: int = 3, largest: int = 4) -> Problem:
    """Nodes partly busy or broken; masks, caps, gangs, reservations; gains that may be nothing or negative."""
    total = rng.choice([2, largest], nodes)
    free = rng.integers(0, total + 1)
    resources = np.column_stack((free, free * 4 + rng.integers(-2, 6, nodes), free * 10 + rng.integers(0, 20, nodes)))
    resources[rng.random(nodes) < 0.1, 0] = -1
    reserved = bool(rng.integers(2))
    sizes = [g for g in (1, 2, 4, 8) if g <= largest]
    gpus, parts = rng.choice(sizes, jobs) * (rng.random(jobs) > 0.05), rng.choice([1, 1, 1, 2, 3], jobs)
    speed = rng.uniform(0.1, 1.0, (4, kinds))[rng.integers(0, 4, jobs)]
    gain = (speed - 0.2) * np.maximum(gpus * parts, 0.1)[:, None]
    gain[rng.random((jobs, kinds)) < 0.1] = np.nan
    return Problem(
        resources=resources,
        total=total,
        kind=rng.integers(0, kinds, nodes),
        late_resources=resources // 2 if reserved else resources,
        parts=parts,
        need=np.column_stack((gpus, gpus * rng.choice([2, 4], jobs), gpus * 10 + 1)),
        allowed=rng.random((2, nodes)) < 0.7,
        mask=rng.choice([-1, -1, 0, 1], jobs),
        late=(rng.random(jobs) < 0.5) & reserved,
        must=np.zeros(jobs, np.bool_),
        gain=gain,
        bonus=np.sort(rng.uniform(0, 0.3, jobs))[::-1].copy(),
        user=rng.integers(0, 3, jobs),
        cap=rng.choice([np.inf, 6.0, 2.0], 3),
        unfit=np.linspace(1, 0, largest + 1),
        open_cost=0.05,
        frag_cost=0.02,
    )


def greedily(problem: Problem) -> MappingSolution:
    """The answer that the optimiser begins with."""
    return first_answer(problem, greedy(problem))


def best_of_all(problem: Problem) -> float:
    """The value of the best sound answer."""
    choices: list[list[Nodes]] = []
    for job in range(len(problem)):
        rows = np.flatnonzero(problem.usable(job) & (problem.resources >= problem.need[job]).all(1)).tolist()
        ways = list(itertools.combinations(rows, int(problem.parts[job])))
        choices.append([(), *ways])
    return max(value_of(problem, nodes) for nodes in itertools.product(*choices) if not faults(problem, nodes))


def busy_cluster(rng: np.random.Generator, nodes: int = 150, jobs: int = 256) -> Problem:
    """150 servers of 8 GPUs of three types, a part of them in use, and a long queue of flavors and models."""
    free = np.where(rng.random(nodes) < 0.6, rng.integers(0, 8, nodes), 8)
    resources = np.column_stack((free, free * 10, free * 64_000))
    gpus = rng.choice([1, 2, 4, 8], jobs, p=[0.5, 0.15, 0.15, 0.2])
    parts = np.where((gpus == 8) & (rng.random(jobs) < 0.4), 2, 1)
    speed = np.column_stack((np.ones(26), rng.uniform(0.4, 1.3, 26), rng.uniform(0.1, 0.5, 26)))
    speed /= speed.max(1, keepdims=True)
    return Problem(
        resources=resources, total=np.full(nodes, 8), kind=np.arange(nodes) % 3, late_resources=resources, parts=parts,
        need=np.column_stack((gpus, gpus * rng.choice([4, 8], jobs), gpus * 16_000)),
        allowed=np.zeros((0, nodes), np.bool_), mask=np.full(jobs, -1), late=np.zeros(jobs, np.bool_),
        must=np.zeros(jobs, np.bool_), gain=(speed[rng.integers(0, 26, jobs)] - 0.3) * (gpus * parts)[:, None],
        bonus=np.linspace(0.05, 0.0, jobs), user=rng.integers(0, 20, jobs), cap=np.full(20, np.inf),
        unfit=np.array([1, 0.5, 0.35, 0.35, 0.2, 0.2, 0.2, 0.2, 0]), open_cost=0.02, frag_cost=0.02,
    )  # fmt: skip
