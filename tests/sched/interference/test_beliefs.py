"""Learning from ended attempts, in an imagined world whose truth is known; and slow GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, log, nan

import msgspec
import numpy as np
import pytest

from gpusched.model.interference import (
    ColocationSamples,
    JobClassEstimate,
    JobShape,
    Neighbour,
    SpeedSample,
    job_class_of,
)
from gpusched.sched.interference.beliefs import cost_of_neighbour, cost_of_spread, learn_attempt, speed_alone
from gpusched.sched.interference.gpus import MIN_JOBS, slow_gpus
from tests.sched.interference.pairs import paces_on, shape

NOISE = 0.05
KINDS = tuple(f"u/k{i}" for i in range(5))
TIGHT, WIDE = ((1, 1), (2, 1)), (2, 2)
SLOWER = {(1, 1): 1.0, (2, 1): 1.1, (2, 2): 1.3}  # a step over so many nodes and racks


class World:
    """Kinds with a true base pace, sensitivity and pressure on NICs."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = self.rng.uniform(10, 1000, len(KINDS))
        self.sensitivity = np.exp(self.rng.normal(-0.9, 0.7, len(KINDS)))
        self.pressure = np.exp(self.rng.normal(-0.9, 0.7, len(KINDS)))

    def ratio(self, job: int, *others: int) -> float:
        return 1 / (1 + self.sensitivity[job] * sum(self.pressure[o] for o in others))

    def attempts(self, count: int) -> Iterator[SpeedSample]:
        for _ in range(count):
            job, number = int(self.rng.integers(len(KINDS))), int(self.rng.integers(3))
            others = self.rng.integers(len(KINDS), size=number)
            shares = self.rng.choice([0.4, 1.0], size=number)
            at = [*TIGHT, WIDE][self.rng.integers(3)]
            loss = 1 + self.sensitivity[job] * sum(self.pressure[o] * s for o, s in zip(others, shares, strict=True))
            pace = self.base[job] / SLOWER[at] / loss * self.rng.lognormal(0, NOISE)
            beside = tuple(Neighbour(KINDS[o], "nic", float(s)) for o, s in zip(others, shares, strict=True))
            yield SpeedSample(kind=KINDS[job], shape=shape(*at), pace=float(pace), seconds=600.0, neighbours=beside)


def after(attempts: Iterator[SpeedSample] | list[SpeedSample]) -> dict[str, JobClassEstimate]:
    known: dict[str, JobClassEstimate] = {}
    for seen in attempts:
        known |= {belief.kind: belief for belief in learn_attempt(known, seen)[0]}
    return known


def off(world: World, known: dict[str, JobClassEstimate]) -> float:
    """Mean absolute error of what is left of the speed, over all pairs."""
    pairs = [(i, j) for i in range(len(KINDS)) for j in range(len(KINDS))]
    estimates = [1 / (1 + cost_of_neighbour(known[KINDS[i]], known[KINDS[j]], "nic").slower) for i, j in pairs]
    return float(np.mean([abs(t - world.ratio(*pair)) for t, pair in zip(estimates, pairs, strict=True)]))


@pytest.mark.parametrize("seed", range(3))
def test_beliefs_come_to_the_truth(seed: int):
    world = World(seed)
    first, known = after(world.attempts(10)), after(world.attempts(600))
    missing = {kind: JobClassEstimate(kind=kind) for kind in KINDS}
    assert off(world, known) < 0.03 < off(world, missing | first)
    for job, kind in enumerate(KINDS):
        for paces in known[kind].shapes:
            true = log(world.base[job] / SLOWER[paces.shape.nodes, paces.shape.racks])
            assert speed_alone(paces).log == pytest.approx(true, abs=0.06)
        cost = cost_of_spread(known.values(), kind, shape(*WIDE), shape(2, 1))
        assert cost.slower == pytest.approx(1.3 / 1.1 - 1, abs=0.06)
        assert cost.low < 1.3 / 1.1 - 1 + 0.04
        assert cost.high > 1.3 / 1.1 - 1 - 0.04
        assert (cost.source, cost.measurements > 40) == ("measured", True)


def test_intervals_hold_as_often_as_they_say():
    held = []
    for seed in range(6):
        world = World(seed)
        known = after(world.attempts(60))
        for i, one in enumerate(KINDS):
            for j, other in enumerate(KINDS):
                cost = cost_of_neighbour(known[one], known[other], "nic")
                held.append(cost.low <= 1 / world.ratio(i, j) - 1 <= cost.high)
    assert 0.7 < np.mean(held) < 0.97


GARBAGE = (0.0, -5.0, nan, inf, -inf, 1e300, 5e-324, 1e-8, 1e14)


def test_garbage_does_no_harm():
    """Also what could be a pace: one attempt in ten reports a millionth or a million times its own."""
    world, clean = World(1), World(1)
    rng, dirty = np.random.default_rng(9), []
    for seen in world.attempts(500):
        if rng.random() < 0.1:
            pace = seen.pace * 1e6 if rng.random() < 0.5 else seen.pace * 1e-6
            dirty.append(msgspec.structs.replace(seen, pace=pace))
        dirty.append(msgspec.structs.replace(seen, pace=GARBAGE[rng.integers(len(GARBAGE))]))
        dirty.append(seen)
    assert off(world, after(dirty)) < off(clean, after(clean.attempts(500))) + 0.03
    known = after(dirty)
    assert msgspec.json.decode(msgspec.json.encode(tuple(known.values())), type=tuple[JobClassEstimate, ...])


@pytest.mark.parametrize("pace", [0.0, -1.0, nan, inf, -inf, 1e300, 5e-324])
def test_an_impossible_pace_changes_nothing(pace: float):
    seen = SpeedSample(kind="u/a", shape=shape(), pace=pace, seconds=600.0)
    assert learn_attempt({}, seen) == ((), None)
    for seconds in (0.0, 29.0, nan, inf, -1.0):
        assert learn_attempt({}, msgspec.structs.replace(seen, pace=10.0, seconds=seconds)) == ((), None)


def test_odd_shares_count_as_none_or_all():
    whole = SpeedSample(kind="u/a", shape=shape(), pace=10.0, seconds=600.0, neighbours=(Neighbour("u/b", "nic", 1.0),))
    alone = msgspec.structs.replace(whole, neighbours=())
    for share, like in ((nan, alone), (-3.0, alone), (0.0, alone), (7.0, whole)):
        odd = msgspec.structs.replace(whole, neighbours=(Neighbour("u/b", "nic", share),))
        known = after([alone, alone])
        assert learn_attempt(known, odd) == learn_attempt(known, like)


def test_kept_measurements_are_bounded():
    seen = [
        SpeedSample(kind="u/a", shape=shape(gpus=2 * g), pace=10.0, seconds=600.0, neighbours=(
            (Neighbour(f"u/{g}", "nic", 1.0),) if again else ()))
        for g in range(1, 90) for again in (0, 1)
    ]  # fmt: skip
    belief = after(seen + seen[-1:] * 50)["u/a"]
    assert (len(belief.shapes), len(belief.beside)) == (48, 64)
    assert max(len(p.logs) for p in belief.shapes) == 32
    assert belief.shapes[-1].count == 52


def measured(kind: str, at: JobShape, pace: float, count: int = 3) -> list[SpeedSample]:
    return [SpeedSample(kind=kind, shape=at, pace=pace * f, seconds=600.0) for f in (0.99, 1.0, 1.01)[:count]]


def test_between_measured_shapes_it_goes_by_the_formula():
    def pace(nodes: int, racks: int, gpus: int) -> float:
        around = 2 * (gpus - 1) / gpus
        return gpus / (0.1 + (0.2 * around if racks > 1 else 0.05 * around if nodes > 1 else 0.01 * around))

    sizes = ((1, 1, 4), (1, 1, 8), (2, 1, 8), (2, 1, 16), (4, 1, 16), (2, 2, 8), (4, 2, 16))
    seen = [m for n, r, g in sizes for m in measured("u/a", shape(n, r, g), pace(n, r, g))]
    known = after(seen).values()
    cost = cost_of_spread(known, "u/a", shape(4, 2, 32), shape(4, 1, 32))
    true = pace(4, 1, 32) / pace(4, 2, 32) - 1
    assert cost.source == "formula"
    assert cost.slower == pytest.approx(true, abs=0.05)
    assert cost.low < true < cost.high
    assert cost.note == ""
    small = cost_of_spread(known, "u/a", shape(2, 1, 2), shape(1, 1, 2))
    assert small.note == "extrapolated: steps shorter than any measured"
    assert cost_of_spread(known, "u/a", shape(4, 2, 32, gpu_type="V100"), shape(4, 1, 32, gpu_type="V100")) is None


def test_of_a_kind_that_never_crossed_other_kinds_say_something():
    seen = [m for k in range(4) for at, by in ((shape(2, 2), 1.2 + 0.02 * k), (shape(2, 1), 1.0))
            for m in measured(f"u/k{k}", at, 100 / by)]  # fmt: skip
    known = after(seen).values()
    cost = cost_of_spread(known, "u/new", shape(2, 2), shape(2, 1))
    assert (cost.source, cost.measurements) == ("others", 24)
    assert cost.slower == pytest.approx(0.23, abs=0.01)
    assert cost.low < 0.2 < 0.26 < cost.high
    assert cost_of_spread([k for k in known if k.kind < "u/k2"], "u/new", shape(2, 2), shape(2, 1)) is None


def test_a_measured_pair_goes_before_the_formula_and_the_worst_is_noted():
    beside = (Neighbour("u/b", "nic", 1.0),)
    slowed = [SpeedSample(kind="u/a", shape=shape(), pace=50.0, seconds=600.0, neighbours=beside)] * 6
    known = after([*measured("u/a", shape(), 100.0), *slowed])
    cost = cost_of_neighbour(known["u/a"], known["u/b"], "nic")
    assert (cost.source, cost.measurements) == ("measured", 6)
    assert cost.slower == pytest.approx(1.0, abs=0.12)
    assert cost_of_neighbour(known["u/a"], JobClassEstimate(kind="u/x"), "nic").source == "formula"
    mild = SpeedSample(kind="u/c", shape=shape(), pace=98.0, seconds=600.0, neighbours=beside)
    known |= after([*measured("u/c", shape(), 100.0), mild])
    worse = cost_of_neighbour(known["u/c"], known["u/b"], "nic")
    assert "more than its highest measured slowdown, 2%" in worse.note


def test_measurements_of_a_pair_outweigh_the_formula():
    pair = ColocationSamples(link="nic", kind="u/b", logs=(-1.0,) * 10, count=10)
    cost = cost_of_neighbour(JobClassEstimate(kind="u/a", beside=(pair,)), JobClassEstimate(kind="u/b"), "nic")
    assert cost.slower == pytest.approx(1.718, abs=0.15)
    fresh = cost_of_neighbour(JobClassEstimate(kind="u/a"), JobClassEstimate(kind="u/b"), "nic")
    assert fresh.low >= 0
    assert fresh.note == "neither was measured: assumed as in public measurements"


def test_jobs_of_one_user_by_the_same_pattern_are_one_kind():
    assert job_class_of("ann", "train-17") == job_class_of("ann", "train-8") == "ann/train-#"
    assert job_class_of("bob", "train-17") != job_class_of("ann", "train-17")


def test_equal_gpus_are_not_called_slow():
    """At most as often as it says: in one cluster of a hundred."""
    assert sum(bool(slow_gpus(paces_on(seed, {}))) for seed in range(100)) <= 3
    assert slow_gpus([]) == ()


def test_kinds_that_are_two_things_by_one_name_blame_no_gpu():
    alarms = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        paces = paces_on(seed, {}, noise=0.03)
        alarms += bool(
            slow_gpus([msgspec.structs.replace(p, log_pace=p.log_pace - (rng.random() < 0.3)) for p in paces])
        )
    assert alarms <= 2


def test_slow_gpus_are_found_and_those_beside_them_are_not_blamed():
    slow = {("n3", 5): 0.25, ("n6", 0): 0.2}
    hits, wrong, held = 0, 0, []
    for seed in range(10):
        found = {(gpu.node, gpu.index): gpu for gpu in slow_gpus(paces_on(seed, slow, jobs=900))}
        hits += len(found.keys() & slow.keys())
        wrong += len(found.keys() - slow.keys())
        held += [found[gpu].low <= by <= found[gpu].high for gpu, by in slow.items() if gpu in found]
    assert hits >= 17
    assert wrong <= 1
    assert np.mean(held) > 0.8


def test_gpus_that_were_always_used_together_are_reported_together():
    slow = {("n7", i): 0.12 for i in range(8)}
    whole = [p for p in paces_on(1, slow, jobs=1500, noise=0.03) if len(p.gpus) == 8]
    found = slow_gpus(whole)
    assert {(gpu.node, gpu.index) for gpu in found} == set(slow)
    assert len(found[0].among) == 7
    assert "others that its jobs also used (7)" in found[0].line


def test_few_jobs_and_small_differences_call_no_gpu_slow():
    assert slow_gpus(paces_on(1, {("n1", 1): 1.0}, jobs=12)) == ()
    assert slow_gpus(paces_on(1, {("n1", 1): 0.03}, jobs=2000, noise=0.01)) == ()
    others = [p for p in paces_on(1, {}, jobs=900, noise=0.01) if p.shape.gpus == 1 and p.gpus[0][0] == "n0"]
    for jobs, found in ((MIN_JOBS - 1, 0), (MIN_JOBS + 1, 1)):
        mine = [msgspec.structs.replace(p, gpus=(("new", 0),), log_pace=p.log_pace - 1) for p in others[:jobs]]
        assert len(slow_gpus(others + mine)) == found
