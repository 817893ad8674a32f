"""How fast kinds of jobs are at their sizes, as far as jobs told while they ran at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints

_OTHER_LEVEL = 0.25  # a speed further from what was known (as a logarithm) means that the whole kind changed
_NOTHING = 1e-9  # told of a size at which it does not get on
_WEIGHT = 0.5  # of what was told last


class Kinds(NamedTuple):
    """Kinds of jobs as the agent sees them; a size is (servers, workers), or an index of sizes where there is one axis.

    Attributes:
        relative: ``float64[kinds, servers + 1, workers + 1]``: speed in parts of the best that is expected; 0: none.
        best: ``float64[kinds]``: that best, in work a slot.
        need: ``int64[kinds, servers + 1, workers + 1, 2]``: CPU and GPU slots.
        front: ``int64[kinds, points, 2]``: sizes of which no smaller one is faster, by dominant need.
        points: ``int64[kinds]``: how many of these there are.
    """

    relative: Floats
    best: Floats
    need: Ints
    front: Ints
    points: Ints


class Observed:
    """Speeds by kind of job and size, as told.

    Args:
        shape: Sizes: (servers + 1, workers + 1).
        names: Kinds that something is known of.
        speeds: ``float64[kinds, *shape]``: as told last, averaged; 0: that size was never had.
    """

    def __init__(self, shape: tuple[int, int], names: Sequence[str] = (), speeds: Floats | None = None) -> None:
        self.shape = shape
        self.names = list(names)
        self.speeds: Floats = np.zeros((len(self.names), *shape)) if speeds is None else speeds.copy()
        self._prior: Floats | None = None
        self._filled: dict[int, Floats] = {}

    def copy(self) -> Observed:
        """Another one that begins with the same."""
        return Observed(self.shape, self.names, self.speeds)

    def join(self, other: Observed) -> None:
        """What another one of the same kinds saw, and this one did not."""
        new = (self.speeds == 0.0) & (other.speeds > 0.0)
        self.speeds[new] = other.speeds[new]
        self._prior = None
        self._filled = {}

    def row(self, name: str) -> int:
        """Of a kind; one that is new has an empty one."""
        if name not in self.names:
            self.names.append(name)
            self.speeds = np.concatenate((self.speeds, np.zeros((1, *self.shape))))
        return self.names.index(name)

    def told(self, row: int, size: tuple[int, int], speed: float) -> bool:
        """A job of this kind was that fast; whether that changes anything."""
        table = self.speeds[row]
        known = table[size]
        speed = max(speed, _NOTHING)
        if known == speed:
            return False
        self._filled.pop(row, None)
        if min(known, speed) <= _NOTHING:
            table[size] = speed
            return True
        factor = speed / known
        if abs(np.log(factor)) > _OTHER_LEVEL:
            table *= factor
        else:
            table[size] += _WEIGHT * (speed - known)
        return bool(abs(factor - 1.0) > 1e-9)

    def expected(self, row: int) -> Floats:
        """Speed of a kind at every size: as told, and between that by the likeness to what other kinds show."""
        if row not in self._filled:
            self._filled[row] = np.zeros(self.shape)
            _fill(self.speeds[row], self.prior(), self._filled[row])
        return self._filled[row]

    def prior(self) -> Floats:
        """How speed goes with size where nothing is known of a kind: the kinds' geometric mean; 1 without any."""
        if self._prior is None:
            complete = [t / t.max() for t in self.speeds if (t > 0).sum() > 0.9 * t[1:, 1:].size]
            self._prior = np.ones(self.shape)
            if complete:
                self._prior = np.exp(np.mean([np.log(np.maximum(t, 0.05)) for t in complete], axis=0))
            self._prior[0] = 0.0
            self._prior[:, 0] = 0.0
        return self._prior


@jit
def _fill(table: Floats, prior: Floats, filled: Floats) -> None:
    """``filled``: told speeds, and elsewhere the prior, scaled as the told ones near by differ from it."""
    rows, columns = table.shape
    for a in range(rows):
        for b in range(columns):
            if prior[a, b] <= 0.0:
                continue
            if table[a, b] > 0.0:
                filled[a, b] = table[a, b]
                continue
            weights, total = 0.0, 0.0
            for c in range(rows):
                for d in range(columns):
                    if table[c, d] > 0.0 and prior[c, d] > 0.0:
                        x, y = np.log2((a + 1) / (c + 1)), np.log2((b + 1) / (d + 1))
                        weight = 1.0 / (x * x + y * y) ** 2
                        weights += weight
                        total += weight * np.log(table[c, d] / prior[c, d])
            filled[a, b] = prior[a, b] * (np.exp(total / weights) if weights > 0.0 else 1.0)


@jit
def kinds_of(speeds: Floats, need: Ints) -> Kinds:
    """From expected speeds ``float64[kinds, ...sizes]`` (work a slot) and needs ``int64[kinds, ...sizes, 2]``."""
    kinds, rows, columns = speeds.shape
    best, dominant = np.full(kinds, 1e-300), np.zeros((kinds, rows, columns), np.int64)
    relative = np.zeros((kinds, rows, columns))
    for k in range(kinds):
        for a in range(rows):
            for b in range(columns):
                best[k] = max(best[k], speeds[k, a, b])
                dominant[k, a, b] = max(need[k, a, b, 0], need[k, a, b, 1])
        relative[k] = speeds[k] / best[k]
    front, points = np.zeros((kinds, rows * columns, 2), np.int64), np.zeros(kinds, np.int64)
    _frontier(speeds, dominant, front, points)
    return Kinds(relative, best, need, front, points)


@jit
def _frontier(speeds: Floats, dominant: Ints, front: Ints, points: Ints) -> None:
    columns = speeds.shape[2]
    for k in range(len(speeds)):
        order = np.argsort(dominant[k].ravel(), kind="mergesort")
        fastest, i = 0.0, 0
        while i < order.size:
            j, best, which = i, fastest, -1
            while j < order.size and dominant[k].ravel()[order[j]] == dominant[k].ravel()[order[i]]:
                speed = speeds[k, order[j] // columns, order[j] % columns]
                if speed > best:
                    best, which = speed, order[j]
                j += 1
            if which >= 0:
                front[k, points[k], 0], front[k, points[k], 1] = which // columns, which % columns
                points[k] += 1
                fastest = best
            i = j
