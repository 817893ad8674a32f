"""Step times by placement: T = C + max over links of S, S = a + b 2(K-1)/K; fitted for one model on one machine.

C is what a step takes without any exchange, by batch size per GPU. A link is crossed or it is not: a server's bus (more
than one GPU there; NVSwitch is none), its NIC (more than one server), the rack's uplink (more than one rack). The form
is that of a ring all-reduce (Thakur et al., 2005), which is as slow as the slowest of its links.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.sched.state import Floats, Ints

Bools = npt.NDArray[np.bool_]

BUS = 0  # of links: a server's bus, its NIC, the rack's uplink
FOLDS = 8  # of the placements, for the interval
_ROUNDS = 30
_DOUBT = 0.01  # how much it counts that a link takes as long as a step, beside a relative error of 1
_NEAR = 0.01  # relative errors below count alike: the fit is of least absolute relative error


class Placements(NamedTuple):
    """Placements: ``int64[n]`` each.

    Attributes:
        max_per_server: GPUs on the server that gives most. gpus, servers, racks: In all.
    """

    max_per_server: Ints
    gpus: Ints
    servers: Ints
    racks: Ints

    def only(self, rows: Ints) -> Placements:
        """Return the placements of these rows."""
        return Placements(*(column[rows] for column in self))


class StepTimes(NamedTuple):
    """Measured steps of one model on one machine: ``batch: float64[n]`` per GPU, ``step_s: float64[n]``."""

    placed: Placements
    batch: Floats
    step_s: Floats


class PlacementFit(NamedTuple):
    """A fitted step-time model.

    Attributes:
        batches: ``float64[batches]``, ascending. compute_s: ``float64[batches]``: C of each.
        links: ``float64[3, 2]``: a and b of bus, NIC and uplink, seconds; NaN: no measurement crossed it.
        least_s: ``float64[batches]``: the shortest step measured.
        measured: (batch, GPUs on the fullest server, GPUs, servers, racks) -> mean seconds.
        errors: ``float64[n]``, ascending: relative errors (measured / predicted - 1) of placements left out in turn.
    """

    batches: Floats
    compute_s: Floats
    links: Floats
    least_s: Floats
    measured: dict[tuple[float, ...], float]
    errors: Floats

    def step_s(self, placed: Placements, batch: Floats) -> Floats:
        """Return ``float64[n]``: seconds of a step, as measured, else by the formula.

        NaN where the batch size lies beyond those measured, or over a link that no measurement crossed.
        """
        alone = np.interp(batch, self.batches, self.compute_s, np.nan, np.nan)
        links, crossed = _links(placed)
        times = np.where(crossed, np.einsum("lnk,lk->ln", links, self.links), 0.0)
        sums = alone + times.max(axis=0)
        found = np.where(sums > 0, sums, np.nan).tolist()  # 0: nothing says what a step takes without any exchange
        keys = zip(batch.tolist(), *(column.tolist() for column in placed), strict=True)
        return np.array([self.measured.get(key, other) for key, other in zip(keys, found, strict=True)], np.float64)

    def below_least(self, step_s: Floats, batch: Floats) -> Bools:
        """Return ``bool[n]``: whether the prediction is faster than anything measured with this batch size."""
        return np.asarray(step_s < np.interp(batch, self.batches, self.least_s))


def fit(times: StepTimes, *, bus: bool = True) -> PlacementFit:
    """Minimise absolute relative error, all terms >= 0; ``bus``: GPUs of a server share one (no NVSwitch).

    The errors are those of fits without one part in `FOLDS` of the placements, of which every measurement is left out.
    """
    batches, of = np.unique(times.batch, return_inverse=True)
    placements, where = np.unique(np.column_stack(times.placed), axis=0, return_inverse=True)
    parts = min(FOLDS, len(placements)) if len(placements) > 1 else 0
    fold = where.reshape(-1) % max(parts, 1)
    least = np.full(len(batches), np.inf)
    np.minimum.at(least, of, times.step_s)

    def fitted(rows: Ints, measured: dict[tuple[float, ...], float]) -> PlacementFit:
        return PlacementFit(batches, *_solve(times, rows, of, len(batches), bus), least, measured, np.zeros(0))

    errors = [np.zeros(0)]
    for part in range(parts):
        out = np.flatnonzero(fold == part)
        predicted = fitted(np.flatnonzero(fold != part), {}).step_s(times.placed.only(out), times.batch[out])
        errors.append(times.step_s[out] / np.where(predicted > 0, predicted, np.nan) - 1)
    off = np.concatenate(errors)
    values: dict[tuple[float, ...], list[float]] = {}
    for row, step_s in zip(np.column_stack([times.batch, *times.placed]).tolist(), times.step_s.tolist(), strict=True):
        values.setdefault(tuple(row), []).append(step_s)
    measured = {key: sum(found) / len(found) for key, found in values.items()}
    return fitted(np.arange(len(of)), measured)._replace(errors=np.sort(off[np.isfinite(off)]))


def quantiles(errors: Floats, cover: float) -> tuple[float, float]:
    """Return the bounds that cover that part of the errors, and the next ones: widened for few errors.

    As split conformal prediction has it (Vovk et al., 2005): the bounds are order statistics of n + 1. Ascending
    ``errors``; too few for any bound: infinite.
    """
    n, beyond = len(errors), (1 - cover) / 2
    low = int(np.floor(beyond * (n + 1) + 1e-9))
    high = n + 1 - low
    if low < 1:
        return -np.inf, np.inf
    return float(errors[low - 1]), float(errors[high - 1])


def _links(placed: Placements) -> tuple[Floats, Bools]:
    """Return each link's factors of a and b, ``float64[3, n, 2]``, and which placements cross it, ``bool[3, n]``."""
    crossed: Bools = np.stack([placed.max_per_server > 1, placed.servers > 1, placed.racks > 1])
    around = 2.0 * (placed.gpus - 1) / np.maximum(placed.gpus, 1)
    counts = np.stack([np.ones_like(around), around], axis=-1)
    return crossed[:, :, None] * counts, crossed


def _solve(times: StepTimes, rows: Ints, of: Ints, batches: int, bus: bool) -> tuple[Floats, Floats]:
    """Return C of each batch size (NaN: no rows) and a, b of each link, by rows of ``times``.

    Which link is slowest and what each takes are found in turns; at first the outermost is.
    """
    unit = times.step_s[rows].mean()  # so that seconds and microseconds are rounded alike
    step_s, of = times.step_s[rows] / unit, of[rows]
    links, crossed = _links(times.placed.only(rows))
    if not bus:
        crossed[BUS] = False
        links[BUS] = 0.0
    slowest = 2 - np.argmax(crossed[::-1], axis=0)  # of one that crosses none, all are 0
    alone = np.zeros((len(rows), batches))
    alone[np.arange(len(rows)), of] = 1.0
    doubt = np.eye(batches + 6)[batches:] * _DOUBT  # indistinguishable time counts as computing
    weights, best, known = np.ones(len(rows)), np.inf, np.zeros(0)
    for _ in range(_ROUNDS):
        of_slowest = links * (np.arange(3)[:, None] == slowest)[:, :, None]
        table = np.column_stack([alone, *of_slowest])
        scale = np.sqrt(weights) / step_s
        solution = nonnegative(np.vstack([table * scale[:, None], doubt]), np.append(step_s * scale, np.zeros(6)))
        each = np.einsum("lnk,lk->ln", links, solution[batches:].reshape(3, 2))
        off = np.abs(solution[of] + each.max(axis=0) - step_s) / step_s
        weights = 1 / np.maximum(off, _NEAR)
        again = np.argmax(np.where(crossed, each, -1.0), axis=0)
        if off.mean() < best - 1e-6:
            best, known = float(off.mean()), solution
        elif np.array_equal(again, slowest):
            break
        slowest = again
    compute, found = known[:batches] * unit, known[batches:].reshape(3, 2) * unit
    compute = np.where(alone.any(axis=0), compute, np.nan)
    found[~np.any(crossed, axis=1)] = np.nan
    if not bus:
        found[BUS] = 0.0
    return compute, found


def nonnegative(table: Floats, wanted: Floats) -> Floats:
    """Return ``x: float64[columns]`` >= 0 that minimises least squares |table x - wanted|; by active sets.

    Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    gram, right = table.T @ table, table.T @ wanted
    gram[np.diag_indices_from(gram)] += 1e-12 * max(float(np.trace(gram)), 1e-300)  # columns may repeat, or be empty
    x, free = np.zeros(len(right)), np.zeros(len(right), np.bool_)
    for _ in range(3 * len(right)):
        slope = np.where(free, -np.inf, right - gram @ x)
        if slope.max(initial=-np.inf) <= 1e-10 * max(float(np.abs(right).max(initial=0.0)), 1e-300):
            break
        free[np.argmax(slope)] = True
        while True:
            wish = np.zeros(len(x))
            wish[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            if (wish[free] > 0).all():
                break
            down = free & (wish <= 0)
            ratios = np.full(len(x), np.inf)
            ratios[down] = x[down] / np.maximum(x[down] - wish[down], 1e-300)
            step = ratios.min()
            free &= ratios > step  # at least one less, whatever is rounded: it ends
            x = np.where(free, np.maximum(x + step * (wish - x), 0.0), 0.0)
        x = wish
    return x
