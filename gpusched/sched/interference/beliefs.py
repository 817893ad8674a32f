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
    Cost,
    JobClassEstimate,
    JobShape,
    Link,
    Paces,
    PaceSample,
    PaceTold,
    SwayTold,
)
from gpusched.sched.interference import placement
from gpusched.sched.interference.pairs import NOISE, USUAL, ClassEffect, expected, observed

LATEST, LATEST_BESIDE, MOST_SHAPES, MOST_BESIDE = 32, 16, 48, 64  # that are kept of a kind
LEAST_S = 30.0  # a pace over less time says nothing
_PACES = (1e-9, 1e15)  # per second; others are no paces
_ALONE = 0.05  # so much of the time beside others counts as none
_WHOLE = 0.9  # so much counts as all of it
_MOST = log(20)  # a pace so much lower, or higher, is another thing's by the same name, or garbage
_SPREAD = 0.1  # of paces of equal jobs, in logarithms, until there are a few
_LEAST_SPREAD = 0.02
_FEW = 4
_OF_FORMULA = 0.15  # how far the formula is off where it cannot say itself; on measured tables four in five are within
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
    known: Mapping[str, JobClassEstimate], seen: PaceSample
) -> tuple[tuple[JobClassEstimate, ...], float | None]:
    """Return the kinds changed by one more attempt, and the logarithm of its pace as if it had run alone.

    Args:
        known: What is believed so far of its kind and its neighbours'; those without an entry are new.
        seen: What it told. A pace that can be none (0, NaN, 1e300), or over too short a time, changes nothing: None.
    """
    if not (_PACES[0] < seen.pace < _PACES[1] and LEAST_S <= seen.seconds < inf):
        return (), None
    beside = [n for n in seen.neighbours if isfinite(n.share) and n.share > 0]
    beside = [msgspec.structs.replace(n, share=min(n.share, 1.0)) for n in beside]
    kinds = {name: known.get(name, JobClassEstimate(kind=name)) for name in (seen.kind, *(n.kind for n in beside))}
    places: dict[tuple[str, Link], int] = {}
    for n in beside:
        places.setdefault((seen.kind, n.link), len(places))
        places.setdefault((n.kind, n.link), len(places))
    sways = [_sway(kinds[name], link) for name, link in places]
    lost, variance = _lost([(_known(sways[places[seen.kind, n.link]]), _known(sways[places[n.kind, n.link]]), n.share)
                            for n in beside])  # fmt: skip
    told = log(seen.pace)
    paces = _at(kinds[seen.kind], seen.shape)
    alone = alone_at(paces)
    shares = sum(n.share for n in beside)
    if alone is not None and shares > _ALONE and abs(told - alone.log) < _MOST:
        after = observed(
            [_known(sway) for sway in sways],
            [(places[seen.kind, n.link], places[n.kind, n.link]) for n in beside],
            [n.share for n in beside], told - alone.log, sqrt(NOISE**2 + alone.variance),
        )  # fmt: skip
        for (name, link), sway, new in zip(places, sways, after, strict=True):
            kinds[name] = _with_sway(kinds[name], sway, new, link)
        if len(beside) == 1 and beside[0].share > _WHOLE:
            kinds[seen.kind] = _with_beside(kinds[seen.kind], beside[0].link, beside[0].kind, told - alone.log)
    weight = _LEAST_SPREAD / (_LEAST_SPREAD + variance) if shares > _ALONE else 1.0
    new_paces = Paces(
        shape=seen.shape, logs=(*(paces.logs if paces else ()), (told + lost, weight))[-LATEST:],
        count=(paces.count if paces else 0) + 1, best=max(paces.best if paces else -inf, told),
    )  # fmt: skip
    own = kinds[seen.kind]
    others = tuple(p for p in own.shapes if p.shape != seen.shape)
    kinds[seen.kind] = msgspec.structs.replace(own, shapes=(*others, new_paces)[-MOST_SHAPES:])
    changed = tuple(belief for name, belief in kinds.items() if belief != known.get(name))
    return changed, told + lost


def alone_at(paces: Paces | None) -> SoloSpeed | None:
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
    spread = 1.4826 * median(abs(value - middle) for value, _ in ordered) if len(ordered) >= _FEW else _SPREAD
    spread = max(spread, _LEAST_SPREAD)
    return SoloSpeed(middle, 1.57 * spread**2 / total, spread)  # of a median: pi/2 times that of a mean


def cost_of_spread(all_kinds: Iterable[JobClassEstimate], kind: str, wide: JobShape, tight: JobShape) -> Cost | None:
    """Return how much longer a step takes at one shape than at another with as many GPUs; None: unknown.

    As measured of this kind at both shapes; else by the formula, where the kind has crossed the same links at other
    sizes; else as other kinds were slowed from as many nodes and racks to as many.
    """
    kinds = {belief.kind: belief for belief in all_kinds}
    own = kinds.get(kind, JobClassEstimate(kind=kind))
    there, here = _at(own, wide), _at(own, tight)
    if (found := _between(there, here)) is not None and there is not None and here is not None:
        mean, variance = found
        return _cost(mean, variance, there.count + here.count, "measured")
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
    mine, its = _sway(own, link), _sway(other, link)
    told = expected(_known(mine), [_known(its)])
    mean, variance = -log(told.ratio), (log(told.ratio / told.low) / USUAL) ** 2
    known = next((b for b in own.beside if (b.link, b.kind) == (link, other.kind)), None)
    if known is not None and known.logs:
        spread = 1.57 * _SPREAD**2 / len(known.logs)
        mean = (mean / variance - median(known.logs) / spread) / (1 / variance + 1 / spread)
        variance = 1 / (1 / variance + 1 / spread)
    source = "measured" if known is not None and known.count >= 3 else "formula"
    cost = _cost(max(mean, 0.0), variance, known.count if known and source == "measured" else mine.count, source)
    cost = msgspec.structs.replace(cost, low=max(cost.low, 0.0))  # a neighbour makes nobody faster
    if not mine.count and not its.count and source == "formula":
        return msgspec.structs.replace(cost, note="neither was measured: assumed as in public measurements")
    most = max((-value for b in own.beside for value in b.logs), default=None)
    if source == "formula" and most is not None and mean > most:
        cost = msgspec.structs.replace(cost, note=f"more than its highest measured slowdown, {expm1(most):.0%}")
    return cost


def told_of(belief: JobClassEstimate) -> tuple[tuple[PaceTold, ...], tuple[SwayTold, ...]]:
    """Return a kind's paces, the most measured first, and its sensitivities and pressures."""
    paces = []
    for one in sorted(belief.shapes, key=lambda one: -one.count):
        if (alone := alone_at(one)) is not None:
            low, middle, high = _bounds(alone.log, alone.spread**2)
            paces.append(PaceTold(shape=one.shape, pace=middle, low=low, high=high, measurements=one.count))
    links = (SwayTold(link=s.link, sensitivity=_bounds(s.sensitivity, s.cov[0]), pressure=_bounds(s.pressure, s.cov[1]),
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


def _between(wide: Paces | None, tight: Paces | None) -> tuple[float, float] | None:
    """Return the log ratio of step times between two shapes, and its variance."""
    there, here = alone_at(wide), alone_at(tight)
    return None if there is None or here is None else (here.log - there.log, here.variance + there.variance)


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
    told = fit.step_s(_placed([wide, tight]), np.ones(2))
    if not np.isfinite(told).all() or not (told > 0).all():
        return None
    low, high = placement.quantiles(fit.errors, 0.8)
    spread = max(_OF_FORMULA / USUAL, (log(1 + high) - log(max(1 + low, 1e-3))) / 2 / USUAL if isfinite(high) else 0.0)
    cost = _cost(log(told[0] / told[1]), spread**2, sum(p.count for p in rows), "formula")
    if fit.below_least(told, np.ones(2)).any():
        cost = msgspec.structs.replace(cost, note="extrapolated: steps shorter than any measured")
    return cost


def _pace(paces: Paces) -> float:
    alone = alone_at(paces)
    assert alone is not None
    return alone.log


def _placed(shapes: Sequence[JobShape]) -> placement.Placed:
    columns = ([getattr(s, name) for s in shapes] for name in ("most", "gpus", "nodes", "racks"))
    return placement.Placed(*(np.array(column, np.int64) for column in columns))


def _at(belief: JobClassEstimate, shape: JobShape) -> Paces | None:
    return next((paces for paces in belief.shapes if paces.shape == shape), None)


def _sway(belief: JobClassEstimate, link: Link) -> ContentionEstimate:
    mean, variance = PRIORS[link]
    new = ContentionEstimate(link=link, sensitivity=mean, pressure=mean, cov=(variance, variance, 0.0))
    return next((sway for sway in belief.links if sway.link == link), new)


def _known(sway: ContentionEstimate) -> ClassEffect:
    mine, its, both = sway.cov
    return ClassEffect(np.array([sway.sensitivity, sway.pressure]), np.array([[mine, both], [both, its]]))


def _with_sway(
    belief: JobClassEstimate, before: ContentionEstimate, after: ClassEffect, link: Link
) -> JobClassEstimate:
    (mine, both), (_, its) = after.cov.tolist()
    sway = ContentionEstimate(
        link=link, sensitivity=float(after.mean[0]), pressure=float(after.mean[1]), cov=(mine, its, both),
        count=before.count + 1,
    )  # fmt: skip
    others = tuple(s for s in belief.links if s.link != link)
    return msgspec.structs.replace(belief, links=(*others, sway))


def _with_beside(belief: JobClassEstimate, link: Link, kind: str, log_ratio: float) -> JobClassEstimate:
    old = next((b for b in belief.beside if (b.link, b.kind) == (link, kind)), None)
    new = ColocationSamples(
        link=link, kind=kind, logs=(*(old.logs if old else ()), min(log_ratio, 0.0))[-LATEST_BESIDE:],
        count=(old.count if old else 0) + 1,
    )  # fmt: skip
    others = tuple(b for b in belief.beside if b is not old)
    return msgspec.structs.replace(belief, beside=(*others, new)[-MOST_BESIDE:])


def _lost(beside: Sequence[tuple[ClassEffect, ClassEffect, float]]) -> tuple[float, float]:
    """Return the logarithm of how much longer neighbours made a step, and its variance."""
    products = [share * exp(min(float(mine.mean[0] + its.mean[1]), 3.0)) for mine, its, share in beside]
    total = 1 + sum(products)
    variance = sum(
        (product / total) ** 2 * float(mine.cov[0, 0] + its.cov[1, 1])
        for product, (mine, its, _) in zip(products, beside, strict=True)
    )
    return log(total), variance
