"""Estimates per job class (here: kind) of speeds and mutual slowdowns, learned from ended attempts.

A kind's pace is its speed in samples or steps per second. It is estimated per shape (`JobShape`) as it would be alone:
the median of the latest attempts, so that odd values do no harm. What an attempt beside others lacks of that moves the
sensitivities and pressures (`pairs`) of all that shared a link. The losses of several neighbours add up.

All is kept in natural logarithms: of a pace; of what is left of a pace beside others (at most 0); of how much longer a
step takes (the negative of that). Variances and spreads (standard deviations) are those of logarithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.model.interference import (
    ColocationSamples,
    ContentionEstimate,
    ContentionSummary,
    Cost,
    JobClassEstimate,
    JobShape,
    Link,
    SpeedSample,
    SpeedSamples,
    SpeedSummary,
)
from gpusched.sched.interference import placement
from gpusched.sched.interference.pairs import HIGH, LOW, NOISE, USUAL, ClassEffect, expected, observed
from gpusched.sched.state import Floats

# Kept of a kind: paces of a shape, paces beside a neighbour, shapes, neighbours; the latest ones.
MAX_PACES, LATEST_BESIDE, MAX_SHAPES, MAX_NEIGHBOURS = 32, 16, 48, 64
MIN_DURATION_S = 30.0  # a pace over less time says nothing
_VALID_PACES = (1e-9, 1e15)  # per second; others are garbage
_MIN_SHARE = 0.05  # of the time beside others (summed over them): less counts as alone
_FULL_SHARE = 0.9  # of the time: more counts as all of it
_MAX_LOG_RATIO = log(20)  # a pace that differs by more is another program's by the same name, or garbage
_SPREAD = 0.1  # assumed spread of attempts until there are a few (`_FEW_ATTEMPTS`)
_MIN_SPREAD = 0.02
_FEW_ATTEMPTS = 4
_FORMULA_ERROR = 0.15  # the formula's relative error where it has none of its own: four in five tables are within
# The variance of a median is pi/2 times that of a mean; the standard deviation of normal values is 1.4826 times their
# median absolute deviation.
_MEDIAN_VARIANCE, _MAD_TO_SPREAD = 1.57, 1.4826
_ENOUGH = 3  # shapes of a kind, other kinds, or measurements beside a neighbour: with fewer, no answer rests on them
PRIORS: Mapping[Link, tuple[float, float]] = {
    "server": (-1.7, 0.7), "nic": (-0.95, 1.0), "uplink": (-0.95, 1.0), "gpu": (-0.25, 0.7)
}  # fmt: skip
"""Mean and variance of the logarithms of sensitivity and pressure: as fitted to HiEST's and DeepShare's tables. Uplinks
were never measured publicly: as NICs. GPUs: as Gavel's P100 and V100, where jobs lose more than in PAL's table."""


class SoloSpeed(NamedTuple):
    """A kind's pace at a shape without neighbours: logarithm, its variance, and the spread of single attempts."""

    log: float
    variance: float
    spread: float


def learn_attempt(
    known: Mapping[str, JobClassEstimate], seen: SpeedSample
) -> tuple[tuple[JobClassEstimate, ...], float | None]:
    """Update the estimates by one ended attempt.

    Args:
        known: The estimates of its kind and its neighbours' kinds; kinds without an entry are new.
        seen: Its measured pace, and its neighbours. One that is invalid (0, NaN, 1e300) or over too short a time
            changes nothing.

    Returns:
        The changed estimates, and the logarithm of the attempt's pace as if it had run alone; None: it is not used.
    """
    if not (_VALID_PACES[0] < seen.pace < _VALID_PACES[1] and MIN_DURATION_S <= seen.seconds < inf):
        return (), None
    beside = [n for n in seen.neighbours if isfinite(n.share) and n.share > 0]
    beside = [msgspec.structs.replace(n, share=min(n.share, 1.0)) for n in beside]
    kinds = {name: known.get(name, JobClassEstimate(kind=name)) for name in (seen.kind, *(n.kind for n in beside))}
    # (kind, link) -> place in the filter's state; one, even if a kind is beside another job of the same kind
    places: dict[tuple[str, Link], int] = {}
    for n in beside:
        places.setdefault((seen.kind, n.link), len(places))
        places.setdefault((n.kind, n.link), len(places))
    estimates = [_contention(kinds[name], link) for name, link in places]
    effects = [_class_effect(estimate) for estimate in estimates]
    # From the estimates as they were before this attempt: else its own surprise would be corrected away.
    loss, variance = _neighbour_loss(
        [(effects[places[seen.kind, n.link]], effects[places[n.kind, n.link]], n.share) for n in beside]
    )
    log_pace = log(seen.pace)
    paces = _at(kinds[seen.kind], seen.shape)
    alone = speed_alone(paces)
    shares = sum(n.share for n in beside)
    if alone is not None and shares > _MIN_SHARE and abs(log_pace - alone.log) < _MAX_LOG_RATIO:
        after = observed(
            effects,
            [(places[seen.kind, n.link], places[n.kind, n.link]) for n in beside],
            [n.share for n in beside], log_pace - alone.log, sqrt(NOISE**2 + alone.variance),
        )  # fmt: skip
        for (name, link), estimate, new in zip(places, estimates, after, strict=True):
            kinds[name] = _with_contention(kinds[name], estimate, new, link)
        if len(beside) == 1 and beside[0].share > _FULL_SHARE:
            kinds[seen.kind] = _with_beside(kinds[seen.kind], beside[0].link, beside[0].kind, log_pace - alone.log)
    # A pace corrected for neighbours is as good as the correction: the less that is known, the less it weighs.
    weight = _MIN_SPREAD / (_MIN_SPREAD + variance) if shares > _MIN_SHARE else 1.0
    kinds[seen.kind] = _with_pace(kinds[seen.kind], seen.shape, paces, log_pace, loss, weight)
    changed = tuple(belief for name, belief in kinds.items() if belief != known.get(name))
    return changed, log_pace + loss


def _with_pace(
    belief: JobClassEstimate, shape: JobShape, paces: SpeedSamples | None, log_pace: float, loss: float, weight: float
) -> JobClassEstimate:
    """Add a pace to those of its shape (``paces``; None: the first), corrected by the neighbours' ``loss``."""
    new = SpeedSamples(
        shape=shape, logs=(*(paces.logs if paces else ()), (log_pace + loss, weight))[-MAX_PACES:],
        count=(paces.count if paces else 0) + 1, best=max(paces.best if paces else -inf, log_pace),
    )  # fmt: skip
    others = tuple(p for p in belief.shapes if p.shape != shape)
    return msgspec.structs.replace(belief, shapes=(*others, new)[-MAX_SHAPES:])


def speed_alone(paces: SpeedSamples | None) -> SoloSpeed | None:
    """Estimate a kind's pace alone from its attempts at one shape: the weighted median; None: there are none."""
    if paces is None or not paces.logs:
        return None
    ordered = sorted(paces.logs)
    total = sum(weight for _, weight in ordered)
    middle = _weighted_median(ordered, total)
    spread = _SPREAD
    if len(ordered) >= _FEW_ATTEMPTS:
        spread = max(_MAD_TO_SPREAD * median(abs(value - middle) for value, _ in ordered), _MIN_SPREAD)
    return SoloSpeed(middle, _MEDIAN_VARIANCE * spread**2 / total, spread)


def _weighted_median(ordered: Sequence[tuple[float, float]], total: float) -> float:
    """Return the median of (value, weight), ascending by value; ``total``: the sum of the weights."""
    passed = 0.0
    for index, (value, weight) in enumerate(ordered):
        passed += weight
        if passed >= total / 2:
            between = passed == total / 2 and index + 1 < len(ordered)
            return (value + ordered[index + 1][0]) / 2 if between else value
    return ordered[-1][0]  # by rounding


def cost_of_spread(all_kinds: Iterable[JobClassEstimate], kind: str, wide: JobShape, tight: JobShape) -> Cost | None:
    """Return how much longer a step takes at the ``wide`` shape than at the ``tight``; None: unknown.

    Both have as many GPUs. As measured of this kind at both shapes; else by the formula, where the kind has crossed the
    same links at other sizes; else as other kinds were slowed from as many nodes and racks to as many.
    """
    kinds = {belief.kind: belief for belief in all_kinds}
    own = kinds.get(kind, JobClassEstimate(kind=kind))
    paces_wide, paces_tight = _at(own, wide), _at(own, tight)
    measured = _log_slowdown(paces_wide, paces_tight)
    if measured is not None and paces_wide is not None and paces_tight is not None:
        return _cost(*measured, paces_wide.count + paces_tight.count, "measured")
    by_formula = _by_formula(own, wide, tight)
    if by_formula is not None:
        return by_formula
    of_kinds = [_mean_log_slowdown(belief, wide, tight) for belief in kinds.values() if belief.kind != kind]
    others = [(found, count) for found, count in of_kinds if found is not None]
    if len(others) < _ENOUGH:
        return None
    means = [mean for mean, _ in others]
    variance = stdev(means) ** 2 * (1 + 1 / len(means))  # of one more kind, not of the mean
    return _cost(fmean(means), variance, sum(count for _, count in others), "others")


def cost_of_neighbour(own: JobClassEstimate, other: JobClassEstimate, link: Link) -> Cost:
    """Return how much longer a step takes beside one other job: as measured, weighed against the formula."""
    own_estimate, other_estimate = _contention(own, link), _contention(other, link)
    predicted = expected(_class_effect(own_estimate), [_class_effect(other_estimate)])
    mean, variance = -log(predicted.ratio), (log(predicted.ratio / predicted.low) / USUAL) ** 2
    known = next((b for b in own.beside if (b.link, b.kind) == (link, other.kind)), None)
    if known is not None and known.logs:
        # The mean of both, each weighed by its precision (1 / variance).
        measured = _MEDIAN_VARIANCE * _SPREAD**2 / len(known.logs)
        mean = (mean / variance - median(known.logs) / measured) / (1 / variance + 1 / measured)
        variance = 1 / (1 / variance + 1 / measured)
    source, count = "formula", own_estimate.count
    if known is not None and known.count >= _ENOUGH:
        source, count = "measured", known.count
    cost = _cost(max(mean, 0.0), variance, count, source)
    cost = msgspec.structs.replace(cost, low=max(cost.low, 0.0))  # a neighbour speeds up no job
    if not own_estimate.count and not other_estimate.count and source == "formula":
        return msgspec.structs.replace(cost, note="neither was measured: assumed as in public measurements")
    most = max((-value for b in own.beside for value in b.logs), default=None)
    if source == "formula" and most is not None and mean > most:
        cost = msgspec.structs.replace(cost, note=f"more than its highest measured slowdown, {_slower(most):.0%}")
    return cost


def slowdowns(own: Sequence[JobClassEstimate], others: Sequence[JobClassEstimate], link: Link) -> Floats:
    """Return ``slower`` of `cost_of_neighbour` of ``own`` beside each of the others, ``float64[own, others]``."""
    sensitivity = np.array([_contention(one, link).sensitivity for one in own])
    pressure = np.array([_contention(one, link).pressure for one in others])
    found: Floats = np.exp(np.clip(sensitivity[:, None] + pressure, LOW, HIGH))
    column = {one.kind: at for at, one in enumerate(others)}
    for row, one in enumerate(own):
        for known in one.beside:
            if known.link == link and known.kind in column:
                at = column[known.kind]
                found[row, at] = cost_of_neighbour(one, others[at], link).slower
    return found


def describe_belief(belief: JobClassEstimate) -> tuple[tuple[SpeedSummary, ...], tuple[ContentionSummary, ...]]:
    """Return a kind's paces, the most measured first, and its sensitivities and pressures."""
    paces = []
    for speed in sorted(belief.shapes, key=lambda speed: -speed.count):
        if (alone := speed_alone(speed)) is not None:
            low, middle, high = _bounds(alone.log, alone.spread**2)
            paces.append(SpeedSummary(shape=speed.shape, pace=middle, low=low, high=high, measurements=speed.count))
    links = (ContentionSummary(link=s.link, sensitivity=_bounds(s.sensitivity, s.cov[0]), pressure=_bounds(s.pressure,
    s.cov[1]),
                      measurements=s.count) for s in belief.links)  # fmt: skip
    return tuple(paces), tuple(links)


def _bounds(mean: float, variance: float) -> tuple[float, float, float]:
    """Return low, middle and high of what has this logarithm: bounds that hold four times in five."""
    by = USUAL * sqrt(variance)
    return exp(mean - by), exp(mean), exp(mean + by)


def _slower(log_slowdown: float) -> float:
    """Return by which part a step is longer: 0.18: it takes 1.18 times as long."""
    return exp(log_slowdown) - 1


def _cost(mean: float, variance: float, count: int, source: str) -> Cost:
    """Return the cost from the logarithm of how much longer a step takes, and its variance."""
    by = USUAL * sqrt(variance)
    return Cost(
        slower=_slower(mean), low=_slower(mean - by), high=_slower(mean + by), measurements=count,
        source=source,  # type: ignore[arg-type]
    )  # fmt: skip


def _log_slowdown(wide: SpeedSamples | None, tight: SpeedSamples | None) -> tuple[float, float] | None:
    """Return the logarithm of how much longer a step takes at ``wide``, and its variance; None: unknown."""
    speed_wide, speed_tight = speed_alone(wide), speed_alone(tight)
    if speed_wide is None or speed_tight is None:
        return None
    return speed_tight.log - speed_wide.log, speed_tight.variance + speed_wide.variance


def _mean_log_slowdown(belief: JobClassEstimate, wide: JobShape, tight: JobShape) -> tuple[float | None, int]:
    """Return a kind's mean logarithm of how much longer a step takes on as many nodes and racks, and its measurements.

    Over all pairs of shapes that spread as ``wide`` and ``tight`` do, and otherwise are alike, at any number of GPUs;
    None: there is none.
    """
    found, count = [], 0
    for paces in belief.shapes:
        if (paces.shape.nodes, paces.shape.racks) != (wide.nodes, wide.racks):
            continue
        for other in belief.shapes:
            alike = (other.shape.gpus, other.shape.gpu_type, other.shape.unit) == (
                paces.shape.gpus, paces.shape.gpu_type, paces.shape.unit)  # fmt: skip
            if alike and (other.shape.nodes, other.shape.racks) == (tight.nodes, tight.racks):
                slowdown = _log_slowdown(paces, other)
                if slowdown is not None:
                    found.append(slowdown[0])
                    count += paces.count + other.count
    return (fmean(found) if found else None), count


def _by_formula(own: JobClassEstimate, wide: JobShape, tight: JobShape) -> Cost | None:
    """Predict by the step-time formula (`placement`), fitted to this kind's paces on this GPU type; None: it cannot.

    The batch per GPU is taken as constant, so that one fits all shapes: it is called 1.
    """
    rows = [p for p in own.shapes if (p.shape.gpu_type, p.shape.unit) == (wide.gpu_type, wide.unit)]
    if len(rows) < _ENOUGH:
        return None
    # Seconds per step; where samples are counted, a step has one for each GPU.
    steps = np.array([exp(-_pace(p)) * (p.shape.gpus if p.shape.unit == "samples" else 1) for p in rows])
    fit = placement.fit(placement.StepTimes(_placed([p.shape for p in rows]), np.ones(len(rows)), steps))
    predicted = fit.step_s(_placed([wide, tight]), np.ones(2))
    if not np.isfinite(predicted).all() or not (predicted > 0).all():
        return None
    low, high = placement.quantiles(fit.errors, 0.8)
    # Half the width of an interval that holds four times in five is `USUAL` standard deviations.
    own_spread = (log(1 + high) - log(max(1 + low, 1e-3))) / 2 / USUAL if isfinite(high) else 0.0
    spread = max(_FORMULA_ERROR / USUAL, own_spread)
    cost = _cost(log(predicted[0] / predicted[1]), spread**2, sum(p.count for p in rows), "formula")
    if fit.below_least(predicted, np.ones(2)).any():
        cost = msgspec.structs.replace(cost, note="extrapolated: steps shorter than any measured")
    return cost


def _pace(paces: SpeedSamples) -> float:
    """Return the logarithm of the pace alone."""
    alone = speed_alone(paces)
    assert alone is not None
    return alone.log


def _placed(shapes: Sequence[JobShape]) -> placement.Placements:
    columns = ([getattr(s, name) for s in shapes] for name in ("max_gpus_per_node", "gpus", "nodes", "racks"))
    return placement.Placements(*(np.array(column, np.int64) for column in columns))


def _at(belief: JobClassEstimate, shape: JobShape) -> SpeedSamples | None:
    return next((paces for paces in belief.shapes if paces.shape == shape), None)


def _contention(belief: JobClassEstimate, link: Link) -> ContentionEstimate:
    """Return a kind's estimate over one link; of a kind never measured there, that of public tables."""
    mean, variance = PRIORS[link]
    new = ContentionEstimate(link=link, sensitivity=mean, pressure=mean, cov=(variance, variance, 0.0))
    return next((estimate for estimate in belief.links if estimate.link == link), new)


def _class_effect(estimate: ContentionEstimate) -> ClassEffect:
    var_sensitivity, var_pressure, covariance = estimate.cov
    return ClassEffect(
        np.array([estimate.sensitivity, estimate.pressure]),
        np.array([[var_sensitivity, covariance], [covariance, var_pressure]]),
    )


def _with_contention(
    belief: JobClassEstimate, before: ContentionEstimate, after: ClassEffect, link: Link
) -> JobClassEstimate:
    (var_sensitivity, covariance), (_, var_pressure) = after.cov.tolist()
    estimate = ContentionEstimate(
        link=link, sensitivity=float(after.mean[0]), pressure=float(after.mean[1]),
        cov=(var_sensitivity, var_pressure, covariance), count=before.count + 1,
    )  # fmt: skip
    others = tuple(s for s in belief.links if s.link != link)
    return msgspec.structs.replace(belief, links=(*others, estimate))


def _with_beside(belief: JobClassEstimate, link: Link, kind: str, log_ratio: float) -> JobClassEstimate:
    old = next((b for b in belief.beside if (b.link, b.kind) == (link, kind)), None)
    new = ColocationSamples(
        link=link, kind=kind, logs=(*(old.logs if old else ()), min(log_ratio, 0.0))[-LATEST_BESIDE:],
        count=(old.count if old else 0) + 1,
    )  # fmt: skip
    others = tuple(b for b in belief.beside if b is not old)
    return msgspec.structs.replace(belief, beside=(*others, new)[-MAX_NEIGHBOURS:])


def _neighbour_loss(beside: Sequence[tuple[ClassEffect, ClassEffect, float]]) -> tuple[float, float]:
    """Return the logarithm of how much longer neighbours made a step, and its variance.

    ``beside``: Of each neighbour, on the link shared: the job's own effect, the neighbour's, and the share of the time.
    """
    products = [
        # no neighbour takes more than e^3, about 20 steps' time
        share * exp(min(float(own_effect.mean[0] + other_effect.mean[1]), 3.0))
        for own_effect, other_effect, share in beside
    ]
    total = 1 + sum(products)
    variance = sum(
        (product / total) ** 2 * float(own_effect.cov[0, 0] + other_effect.cov[1, 1])
        for product, (own_effect, other_effect, _) in zip(products, beside, strict=True)
    )
    return log(total), variance
