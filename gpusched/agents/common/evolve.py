"""CMA-ES: search over a few hundred parameters by evaluating candidates, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats

Candidate = TypeVar("Candidate")
Sample = TypeVar("Sample")


class Evolution:
    """(mu/mu_w, lambda)-CMA-ES, after Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv:1604.00772), Section 5.

    `ask` returns a population, `tell` takes its costs (smaller is better; only their order counts). `state` returns all
    state as arrays and `restore` takes it, so that a search continues after a kill bit for bit.

    Args:
        mean: ``float64[n]``: the initial mean.
        scale: ``float64[n]``: the initial standard deviation of each coordinate, in its units.
        population: Candidates per generation.
        seed: Of the random draws.
    """

    def __init__(self, mean: Floats, scale: Floats, population: int, seed: int) -> None:
        n, parents = len(mean), population // 2
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
        self._scale, self._population, self._seed = scale, population, seed
        self._origin = mean.astype(np.float64)
        self._mean, self._sigma = np.zeros(n), np.ones(1)
        self._covariance, self._path, self._shape_path = np.eye(n), np.zeros(n), np.zeros(n)
        self._generation = np.zeros(1, np.int64)

    @property
    def mean(self) -> Floats:
        """The current mean, in the caller's units."""
        mean: Floats = self._origin + self._scale * self._mean
        return mean

    @property
    def scale(self) -> Floats:
        """The initial standard deviation of each coordinate."""
        return self._scale

    @property
    def generation(self) -> int:
        """The number of generations evaluated."""
        return int(self._generation[0])

    @property
    def step(self) -> float:
        """The step size, 1 at first."""
        return float(self._sigma[0])

    def ask(self) -> Floats:
        """Return this generation's candidates, ``float64[population, n]``; the same until `tell`."""
        candidates: Floats = self._origin + self._scale * (self._mean + self._sigma[0] * self._draws()[1])
        return candidates

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


def mean_costs(
    pool: Executor, cost: Callable[[Candidate, Sample], float], candidates: Sequence[Candidate],
    samples: Sequence[Sample],
) -> Floats:  # fmt: skip
    """Return each candidate's mean cost over the samples, ``float64[candidates]``, evaluated in parallel."""
    costs = pool.map(lambda pair: cost(*pair), [(candidate, sample) for candidate in candidates for sample in samples])
    means: Floats = np.array(list(costs)).reshape(len(candidates), len(samples)).mean(1)
    return means
