"""Beliefs about the speed of kinds of jobs, learned from ended attempts.

A pace is compared with the same kind's at the same shape alone (a weighted median of the latest, so that odd figures do
no harm); what is missing moves the sensitivities and pressures of those that shared a link (`pairs.observed`). The
losses of several neighbours add up.
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
from gpusched.sched.interference.pairs import NOISE, USUAL, ClassEffect, expected, observed

MAX_PACES, LATEST_BESIDE, MAX_SHAPES, MAX_NEIGHBOURS = 32, 16, 48, 64  # that are kept of a kind
MIN_DURATION_S = 30.0  # a pace over less time says nothing
_PACES = (1e-9, 1e15)  # per second; others are no paces
_MIN_SHARE = 0.05  # so much of the time beside others counts as none
_FULL_SHARE = 0.9  # so much counts as all of it
_MAX_LOG_RATIO = log(20)  # a pace so much lower, or higher, is another thing's by the same name, or garbage
_SPREAD = 0.1  # of paces of equal jobs, in logarithms, until there are a few
_MIN_SPREAD = 0.02
_FEW_ATTEMPTS = 4
_FORMULA_ERROR = (
    0.15  # how far the formula is off where it cannot say itself; on measured tables four in five are within
)
PRIORS: Mapping[Link, tuple[float, float]] = {
    "server": (-1.7, 0.7), "nic": (-0.95, 1.0), "uplink": (-0.95, 1.0), "gpu": (-0.25, 0.7)
}  # fmt: skip
"""Mean and variance of the logarithms of sensitivity and pressure: as fitted to HiEST's and DeepShare's tables. Uplinks
were never measured publicly: as NICs. GPUs: as Gavel's P100 and V100, where jobs lose more than in PAL's table."""


class SoloSpeed(NamedTuple):
    """A kind's pace at a shape without neighbours: logarithm, its variance, the spread of single attempts."""

    log: float
    variance: float
    spread: float


def learned(
    known: Mapping[str, JobClassEstimate], seen: SpeedSample
) -> tuple[tuple[JobClassEstimate, ...], float | None]:
    """Return the kinds changed by one more attempt, and the logarithm of its pace as if it had run alone.

    Args:
        known: What is believed so far of its kind and its neighbours'; those without an entry are new.
        seen: What it told. A pace that can be none (0, NaN, 1e300), or over too short a time, changes nothing: None.
    """
    if not (_PACES[0] < seen.pace < _PACES[1] and MIN_DURATION_S <= seen.seconds < inf):
        return (), None
    beside = [n for n in seen.neighbours if isfinite(n.share) and n.share > 0]
    beside = [msgspec.structs.replace(n, share=min(n.share, 1.0)) for n in beside]
    kinds = {name: known.get(name, JobClassEstimate(kind=name)) for name in (seen.kind, *(n.kind for n in beside))}
    # the filter's state has one entry per (kind, link), even if a kind is beside another of the same kind
    places: dict[tuple[str, Link], int] = {}
    for n in beside:
        places.setdefault((seen.kind, n.link), len(places))
        places.setdefault((n.kind, n.link), len(places))
    estimates = [_contention(kinds[name], link) for name, link in places]
    effects = [_class_effect(estimate) for estimate in estimates]
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
    # a pace corrected for neighbours is as good as the correction: it weighs less the less that is known
    weight = _MIN_SPREAD / (_MIN_SPREAD + variance) if shares > _MIN_SHARE else 1.0
    new_paces = SpeedSamples(
        shape=seen.shape, logs=(*(paces.logs if paces else ()), (log_pace + loss, weight))[-MAX_PACES:],
        count=(paces.count if paces else 0) + 1, best=max(paces.best if paces else -inf, log_pace),
    )  # fmt: skip
    own = kinds[seen.kind]
    others = tuple(p for p in own.shapes if p.shape != seen.shape)
    kinds[seen.kind] = msgspec.structs.replace(own, shapes=(*others, new_paces)[-MAX_SHAPES:])
    changed = tuple(belief for name, belief in kinds.items() if belief != known.get(name))
    return changed, log_pace + loss


def speed_alone(paces: SpeedSamples | None) -> SoloSpeed | None:
    """Estimate a kind's pace alone from its attempts; None: there is no estimate."""
    if paces is None or not paces.logs:
        return None
    ordered = sorted(paces.logs)
    total = sum(weight for _, weight in ordered)
    passed, middle = 0.0, ordered[-1][0]
    for index, (value, weight) in enumerate(ordered):
        passed += weight
        if passed >= total / 2:
            even = passed == total / 2 and index + 1 < len(ordered)
            middle = (value + ordered[index + 1][0]) / 2 if even else value
            break
    spread = 1.4826 * median(abs(value - middle) for value, _ in ordered) if len(ordered) >= _FEW_ATTEMPTS else _SPREAD
    spread = max(spread, _MIN_SPREAD)
    return SoloSpeed(middle, 1.57 * spread**2 / total, spread)  # of a median: pi/2 times that of a mean


def cost_of_spread(all_kinds: Iterable[JobClassEstimate], kind: str, wide: JobShape, tight: JobShape) -> Cost | None:
    """Return how much longer a step takes at one shape than at another with as many GPUs; None: unknown.

    As measured of this kind at both shapes; else by the formula, where the kind has crossed the same links at other
    sizes; else as other kinds were slowed from as many nodes and racks to as many.
    """
    kinds = {belief.kind: belief for belief in all_kinds}
    own = kinds.get(kind, JobClassEstimate(kind=kind))
    cost_tight, cost_wide = _at(own, wide), _at(own, tight)
    if (found := _between(cost_tight, cost_wide)) is not None and cost_tight is not None and cost_wide is not None:
        mean, variance = found
        return _cost(mean, variance, cost_tight.count + cost_wide.count, "measured")
    by_formula = _by_formula(own, wide, tight)
    if by_formula is not None:
        return by_formula
    crossings = [_crossing(belief, wide, tight) for belief in kinds.values() if belief.kind != kind]
    others = [(found, count) for found, count in crossings if found is not None]
    if len(others) < 3:
        return None
    means = [mean for mean, _ in others]
    return _cost(fmean(means), stdev(means) ** 2 * (1 + 1 / len(means)), sum(count for _, count in others), "others")


def cost_of_neighbour(own: JobClassEstimate, other: JobClassEstimate, link: Link) -> Cost:
    """Return how much longer a step takes beside one other job: measured, weighed against the formula."""
    own_effect, other_effect = _contention(own, link), _contention(other, link)
    predicted = expected(_class_effect(own_effect), [_class_effect(other_effect)])
    mean, variance = -log(predicted.ratio), (log(predicted.ratio / predicted.low) / USUAL) ** 2
    known = next((b for b in own.beside if (b.link, b.kind) == (link, other.kind)), None)
    if known is not None and known.logs:
        spread = 1.57 * _SPREAD**2 / len(known.logs)
        mean = (mean / variance - median(known.logs) / spread) / (1 / variance + 1 / spread)
        variance = 1 / (1 / variance + 1 / spread)
    source = "measured" if known is not None and known.count >= 3 else "formula"
    cost = _cost(max(mean, 0.0), variance, known.count if known and source == "measured" else own_effect.count, source)
    cost = msgspec.structs.replace(cost, low=max(cost.low, 0.0))  # a neighbour speeds up no job
    if not own_effect.count and not other_effect.count and source == "formula":
        return msgspec.structs.replace(cost, note="neither was measured: assumed as in public measurements")
    most = max((-value for b in own.beside for value in b.logs), default=None)
    if source == "formula" and most is not None and mean > most:
        cost = msgspec.structs.replace(cost, note=f"more than its highest measured slowdown, {expm1(most):.0%}")
    return cost


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
    by = USUAL * sqrt(variance)
    return exp(mean - by), exp(mean), exp(mean + by)


def expm1(value: float) -> float:
    """Return how much longer a step is, from a logarithm."""
    return exp(value) - 1


def _cost(mean: float, variance: float, count: int, source: str) -> Cost:
    by = USUAL * sqrt(variance)
    return Cost(
        slower=expm1(mean), low=expm1(mean - by), high=expm1(mean + by), measurements=count,
        source=source,  # type: ignore[arg-type]
    )  # fmt: skip


def _between(wide: SpeedSamples | None, tight: SpeedSamples | None) -> tuple[float, float] | None:
    """Return the log ratio of step times between two shapes, and its variance."""
    speed_tight, speed_wide = speed_alone(wide), speed_alone(tight)
    return (
        None
        if speed_tight is None or speed_wide is None
        else (speed_wide.log - speed_tight.log, speed_wide.variance + speed_tight.variance)
    )


def _crossing(belief: JobClassEstimate, wide: JobShape, tight: JobShape) -> tuple[float | None, int]:
    """Return how much longer steps are over as many nodes and racks, at any size measured at both."""
    found, count = [], 0
    for paces in belief.shapes:
        if (paces.shape.nodes, paces.shape.racks) != (wide.nodes, wide.racks):
            continue
        for other in belief.shapes:
            alike = (other.shape.gpus, other.shape.gpu_type, other.shape.unit) == (
                paces.shape.gpus, paces.shape.gpu_type, paces.shape.unit)  # fmt: skip
            if alike and (other.shape.nodes, other.shape.racks) == (tight.nodes, tight.racks):
                between = _between(paces, other)
                if between is not None:
                    found.append(between[0])
                    count += paces.count + other.count
    return (fmean(found) if found else None), count


def _by_formula(own: JobClassEstimate, wide: JobShape, tight: JobShape) -> Cost | None:
    """Predict from the links that this kind has crossed on this GPU type, with a batch that scales with GPUs."""
    rows = [p for p in own.shapes if (p.shape.gpu_type, p.shape.unit) == (wide.gpu_type, wide.unit)]
    if len(rows) < 3:
        return None
    steps = np.array([exp(-_pace(p)) * (p.shape.gpus if p.shape.unit == "samples" else 1) for p in rows])
    fit = placement.fit(placement.StepTimes(_placed([p.shape for p in rows]), np.ones(len(rows)), steps))
    predicted = fit.step_s(_placed([wide, tight]), np.ones(2))
    if not np.isfinite(predicted).all() or not (predicted > 0).all():
        return None
    low, high = placement.quantiles(fit.errors, 0.8)
    spread = max(
        _FORMULA_ERROR / USUAL, (log(1 + high) - log(max(1 + low, 1e-3))) / 2 / USUAL if isfinite(high) else 0.0
    )
    cost = _cost(log(predicted[0] / predicted[1]), spread**2, sum(p.count for p in rows), "formula")
    if fit.below_least(predicted, np.ones(2)).any():
        cost = msgspec.structs.replace(cost, note="extrapolated: steps shorter than any measured")
    return cost


def _pace(paces: SpeedSamples) -> float:
    alone = speed_alone(paces)
    assert alone is not None
    return alone.log


def _placed(shapes: Sequence[JobShape]) -> placement.Placements:
    columns = ([getattr(s, name) for s in shapes] for name in ("max_gpus_per_node", "gpus", "nodes", "racks"))
    return placement.Placements(*(np.array(column, np.int64) for column in columns))


def _at(belief: JobClassEstimate, shape: JobShape) -> SpeedSamples | None:
    return next((paces for paces in belief.shapes if paces.shape == shape), None)


def _contention(belief: JobClassEstimate, link: Link) -> ContentionEstimate:
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
    """Return the logarithm of how much longer neighbours made a step, and its variance."""
    products = [
        share * exp(min(float(own_effect.mean[0] + other_effect.mean[1]), 3.0))
        for own_effect, other_effect, share in beside
    ]
    total = 1 + sum(products)
    variance = sum(
        (product / total) ** 2 * float(own_effect.cov[0, 0] + other_effect.cov[1, 1])
        for product, (own_effect, other_effect, _) in zip(products, beside, strict=True)
    )
    return log(total), variance
