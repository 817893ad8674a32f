"""CMA-ES: search over a few hundred parameters by evaluating candidates, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from gpusched.agents.common.vector import Shapes
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats

Candidate = TypeVar("Candidate")
Sample = TypeVar("Sample")


class Evolution:
    """(mu/mu_w, lambda)-CMA-ES, after Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv:1604.00772), Section 5.

    `ask` returns a population, `tell` takes its costs (smaller is better; only their order counts). `state` returns all
    state as arrays and `restore` takes it, so that a search continues after a kill bit for bit.

    Args:
        start: ``float64[numbers]``: the initial mean.
        steps: ``float64[numbers]``: the initial standard deviation of each, in its units; 0: it stays as it is.
        population: Candidates per generation.
        seed: Of the random draws.
    """

    def __init__(self, start: Floats, steps: Floats, population: int, seed: int) -> None:
        self._start, self._searched = start.astype(np.float64), steps > 0.0
        n, parents = int(self._searched.sum()), population // 2
        weights = np.log(population / 2 + 0.5) - np.log(np.arange(1, parents + 1))
        self._weights = weights / weights.sum()
        self._mu = 1.0 / float((self._weights**2).sum())
        mu = self._mu
        self._path_rate = (mu + 2) / (n + mu + 5)
        self._damping = 1 + 2 * max(0.0, np.sqrt((mu - 1) / (n + 1)) - 1) + self._path_rate
        self._shape_path_rate = (4 + mu / n) / (n + 4 + 2 * mu / n)
        self._one_rate = 2 / ((n + 1.3) ** 2 + mu)
        self._rank_rate = min(1 - self._one_rate, 2 * (mu - 2 + 1 / mu) / ((n + 2) ** 2 + mu))
        self._length = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))
        self._scale, self._population, self._seed = steps[self._searched], population, seed
        self._mean, self._sigma = np.zeros(n), np.ones(1)
        self._covariance, self._path, self._shape_path = np.eye(n), np.zeros(n), np.zeros(n)
        self._generation = np.zeros(1, np.int64)

    @property
    def mean(self) -> Floats:
        """The current mean, in the caller's units."""
        mean: Floats = self._in_units(self._mean[None])[0]
        return mean

    def _in_units(self, searched: Floats) -> Floats:
        """Return all numbers of points in the search's coordinates, one a row."""
        found = np.repeat(self._start[None], len(searched), axis=0)
        found[:, self._searched] += self._scale * searched
        return found

    def distance(self, numbers: Floats) -> float:
        """Return the squared distance from the start, in first steps."""
        return float(np.square((numbers - self._start)[self._searched] / self._scale).sum())

    @property
    def generation(self) -> int:
        """The number of generations evaluated."""
        return int(self._generation[0])

    @property
    def step(self) -> float:
        """The step size, 1 at first."""
        return float(self._sigma[0])

    def ask(self) -> Floats:
        """Return this generation's candidates, ``float64[population, numbers]``; the same until `tell`."""
        return self._in_units(self._mean + self._sigma[0] * self._draws()[1])

    def _draws(self) -> tuple[Floats, Floats]:
        """Return this generation's draws, before and after scaling by the root of the covariance."""
        values, vectors = np.linalg.eigh(self._covariance)
        roots = np.sqrt(np.maximum(values, 1e-20))
        rng = np.random.default_rng((self._seed, self.generation))
        half = rng.standard_normal((self._population // 2, len(self._mean)))
        normal = np.concatenate((half, -half))  # in mirrored pairs, which sum to 0
        return (normal @ vectors.T), (normal * roots) @ vectors.T

    def tell(self, costs: Floats) -> None:
        """Update the search with the costs of the candidates from `ask`, ``float64[population]``."""
        plain, steps = self._draws()
        best = np.argsort(costs, kind="stable")[: len(self._weights)]
        step, isotropic_step = self._weights @ steps[best], self._weights @ plain[best]
        self._generation += 1
        self._mean = self._mean + self._sigma[0] * step
        rate, n = self._path_rate, len(self._mean)
        self._path = (1 - rate) * self._path + np.sqrt(rate * (2 - rate) * self._mu) * isotropic_step
        expected = np.sqrt(1 - (1 - rate) ** (2 * self.generation))
        steady = float(np.linalg.norm(self._path)) / expected < (1.4 + 2 / (n + 1)) * self._length
        rate = self._shape_path_rate
        self._shape_path = (1 - rate) * self._shape_path
        if steady:
            self._shape_path = self._shape_path + np.sqrt(rate * (2 - rate) * self._mu) * step
        correction = 0.0 if steady else self._one_rate * rate * (2 - rate)
        spread = (steps[best].T * self._weights) @ steps[best]
        self._covariance = (
            (1 - self._one_rate - self._rank_rate + correction) * self._covariance
            + self._one_rate * np.outer(self._shape_path, self._shape_path)
            + self._rank_rate * spread
        )
        self._covariance = (self._covariance + self._covariance.T) / 2
        log_growth = (float(np.linalg.norm(self._path)) / self._length - 1) * self._path_rate / self._damping
        self._sigma = self._sigma * np.exp(min(log_growth, 1.0))

    def state(self) -> Arrays:
        """Return all mutable state, for a checkpoint."""
        return {
            "search.mean": self._mean, "search.sigma": self._sigma, "search.covariance": self._covariance,
            "search.path": self._path, "search.shape_path": self._shape_path, "search.generation": self._generation,
        }  # fmt: skip

    def restore(self, state: Arrays) -> None:
        """Restore the state returned by `state`."""
        for name in self.state():
            setattr(self, name.replace("search.", "_"), np.array(state[name]))


def first_steps(shapes: Shapes, of: Mapping[str, float]) -> Floats:
    """Return the ``steps`` of a search over named arrays: of each one's numbers; 0 for those that stay."""
    return np.concatenate([np.full(int(np.prod(shape)), of.get(name, 0.0)) for name, shape in shapes.items()])


def mean_costs(
    pool: Executor, cost: Callable[[Candidate, Sample], float], candidates: Sequence[Candidate],
    samples: Sequence[Sample],
) -> Floats:  # fmt: skip
    """Return each candidate's mean cost over the samples, ``float64[candidates]``, evaluated in parallel."""
    costs = pool.map(lambda pair: cost(*pair), [(candidate, sample) for candidate in candidates for sample in samples])
    means: Floats = np.array(list(costs)).reshape(len(candidates), len(samples)).mean(1)
    return means
