"""Fits of placements and pairs: they find what they were made from, say how sure they are, and hold on real tables."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import pair_fit
from benchmarks.measured_tables import read_pairs, read_steps
from benchmarks.pair_fit import InterferenceTable
from gpusched.sched.interference import pairs as by_pairs
from gpusched.sched.interference import placement as by_placement
from gpusched.sched.interference.pairs import ClassEffect
from gpusched.sched.interference.placement import Placements, StepTimes
from tests.traces.samples import real

TRUTH = np.array([[0.01, 0.02], [0.1, 0.2], [0.3, 0.4]])  # seconds: a and b of the bus, the NIC, the uplink
COMPUTE = {8.0: 0.2, 16.0: 0.35}


def placed(*rows: tuple[int, int, int, int]) -> Placements:
    return Placements(*np.array(rows, np.int64).T)


ALL = placed(
    (1, 1, 1, 1), (2, 2, 1, 1), (4, 4, 1, 1), (1, 2, 2, 1), (2, 4, 2, 1), (3, 5, 2, 1), (4, 8, 2, 1), (4, 12, 3, 1),
    (1, 2, 2, 2), (2, 4, 2, 2), (4, 8, 2, 2), (4, 16, 4, 2), (2, 8, 4, 3),
)  # fmt: skip


def steps(where: Placements, batch: float, noise: np.ndarray | float = 1.0) -> StepTimes:
    around = 2 * (where.gpus - 1) / where.gpus
    links = np.stack([a + b * around for a, b in TRUTH]) * np.stack(
        [where.max_per_server > 1, where.servers > 1, where.racks > 1]
    )
    return StepTimes(where, np.full(len(where.gpus), batch), (COMPUTE[batch] + links.max(axis=0)) * noise)


def joined(*parts: StepTimes) -> StepTimes:
    where = Placements(*(np.concatenate(c) for c in zip(*(p.placed for p in parts), strict=True)))
    return StepTimes(where, np.concatenate([p.batch for p in parts]), np.concatenate([p.step_s for p in parts]))


def test_a_placement_that_was_not_measured_is_predicted_by_the_links_it_crosses():
    fit = by_placement.fit(joined(steps(ALL, 8.0), steps(ALL, 16.0)))
    assert fit.compute_s == pytest.approx([0.2, 0.35], rel=1e-3)
    assert fit.links == pytest.approx(TRUTH, rel=0.02)
    new = placed((8, 64, 8, 1), (3, 3, 1, 1), (2, 6, 3, 2))
    assert fit.step_s(new, np.full(3, 16.0)) == pytest.approx(steps(new, 16.0).step_s, rel=1e-3)
    between = fit.step_s(new, np.full(3, 12.0))  # linear in the batch size
    assert between == pytest.approx((steps(new, 8.0).step_s + steps(new, 16.0).step_s) / 2, rel=1e-3)
    assert np.isnan(fit.step_s(new, np.full(3, 17.0))).all()


def test_a_link_that_nothing_crossed_is_not_guessed():
    inside = by_placement.fit(steps(ALL.only(np.flatnonzero(ALL.racks == 1)), 8.0))
    estimate = inside.step_s(placed((2, 4, 2, 1), (2, 4, 2, 2)), np.full(2, 8.0))
    assert estimate[0] > 0
    assert np.isnan(estimate[1])
    without_bus = by_placement.fit(steps(ALL, 8.0), bus=False)
    assert without_bus.step_s(placed((3, 3, 1, 1)), np.array([8.0])) == pytest.approx(without_bus.compute_s)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_any_few_measurements_in_any_unit_have_a_fit(unit: float):
    """And one that ends: with so few, columns of the least squares repeat and are empty."""
    rng = np.random.default_rng(0)
    both = joined(steps(ALL, 8.0), steps(ALL, 16.0))
    for _ in range(40):
        rows = rng.permutation(len(both.step_s))[: rng.integers(1, 9)]
        noisy = both.step_s[rows] * rng.lognormal(0, 0.3, len(rows)) * unit
        fit = by_placement.fit(StepTimes(both.placed.only(rows), both.batch[rows], noisy))
        estimate = fit._replace(measured={}).step_s(both.placed, both.batch)
        low, high = pair_fit.steps_between(fit, estimate)
        sure = np.isfinite(estimate)
        assert (estimate[sure] > 0).all()
        assert (low[sure] <= estimate[sure]).all()
        assert (estimate[sure] <= high[sure]).all()


def test_measurements_override_the_formula_and_impossible_speeds_are_noted():
    times = steps(ALL, 8.0)
    odd = times._replace(step_s=np.where(ALL.servers == 4, 9.0, times.step_s))
    fit = by_placement.fit(odd)
    assert fit.step_s(placed((4, 16, 4, 2)), np.array([8.0])) == 9.0
    like_it = placed((4, 15, 4, 2))  # the odd one in 13 does not move it
    assert fit.step_s(like_it, np.array([8.0])) == pytest.approx(steps(like_it, 8.0).step_s, rel=0.02)
    assert list(fit.below_least(np.array([0.19, 0.21]), np.array([8.0, 8.0]))) == [True, False]


def test_intervals_of_steps_hold_as_often_as_they_say():
    held = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        many = Placements(*(np.tile(c, 6) for c in ALL))
        fit = by_placement.fit(steps(many, 8.0, rng.lognormal(0, 0.1, len(many.gpus))))
        new = placed(*((m, 4 * m, 4, r) for m in range(1, 8) for r in (1, 2)))
        real_s = steps(new, 8.0, rng.lognormal(0, 0.1, len(new.gpus))).step_s
        low, high = pair_fit.steps_between(fit, fit.step_s(new, np.full(len(new.gpus), 8.0)))
        held += list((low <= real_s) & (real_s <= high))
    assert 0.73 < np.mean(held) < 0.95  # with so few placements, one left out is harder than one among all


def test_too_few_errors_bound_nothing():
    assert by_placement.quantiles(np.zeros(8), 0.8) == (-np.inf, np.inf)
    assert by_placement.quantiles(np.arange(9.0), 0.8) == (0.0, 8.0)


@pytest.mark.parametrize(("machine", "most"), [("aws", 0.093), ("rtx", 0.073), ("dgx", 0.062)])
def test_measured_placements_left_out_are_predicted(machine: str, most: float):
    errors = []
    for model in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"):
        one = read_steps(real(f"../profiles/placement/{model}-placements-{machine}.csv"))
        errors.append(np.abs(1 / (1 + by_placement.fit(one.times, bus=one.bus).errors) - 1))  # folds, for speed
    assert np.concatenate(errors).mean() < most


def imagined(seed: int, kinds: int = 12, noise: float = 0.05) -> tuple[InterferenceTable, np.ndarray]:
    """Pairs of all kinds, and the logarithms of their sensitivities and pressures, ``float64[kinds, 2]``."""
    rng = np.random.default_rng(seed)
    means = rng.normal(-0.9, 0.8, (kinds, 2))
    job, beside = (c.reshape(-1) for c in np.mgrid[:kinds, :kinds])
    ratio = pair_fit.left(means[job, 0] + means[beside, 1]) * np.exp(rng.normal(0, noise, kinds**2))
    names = tuple(f"k{i}" for i in range(kinds))
    return InterferenceTable(names, tuple(f"f{i}" for i in range(kinds)), job, beside, np.minimum(ratio, 1.0)), means


def test_sensitivity_and_pressure_are_found_and_the_interval_holds():
    table, means = imagined(1)
    out = np.flatnonzero((table.job + 3 * table.beside) % 4 == 0)
    fit = pair_fit.fit(table.only(np.setdiff1d(np.arange(len(table.ratio)), out)))
    estimate = fit.ratio(table.job[out], table.beside[out])
    real_ratio = pair_fit.left(means[table.job[out], 0] + means[table.beside[out], 1])
    assert np.abs(estimate - real_ratio).mean() < 0.02
    low, high = fit.interval(estimate)
    assert np.mean((low <= table.ratio[out]) & (table.ratio[out] <= high)) == pytest.approx(0.8, abs=0.1)
    assert 0.03 < fit.noise < 0.08


def test_a_measured_pair_goes_before_the_formula_and_one_odd_pair_does_not_spoil_it():
    table, means = imagined(2)
    odd = table.ratio.copy()
    odd[5] = 0.02  # k0 beside k5
    fit = pair_fit.fit(table._replace(ratio=odd))
    assert fit.ratio(table.job[5:6], table.beside[5:6]) == 0.02
    lone = fit._replace(measured=np.full_like(fit.measured, np.nan))
    estimate = lone.ratio(table.job[:12], table.beside[:12])
    others = [j for j in range(12) if j != 5]
    assert np.abs(estimate - pair_fit.left(means[0, 0] + means[:, 1]))[others].max() < 0.06
    assert estimate[5] > 0.02
    assert list(fit.below_least(np.array([0.019, 0.03]), np.array([0, 0]))) == [True, False]


def test_three_probes_say_what_a_new_kind_does():
    table, _ = imagined(3)
    fit = pair_fit.fit(table.only(np.flatnonzero((table.job > 0) & (table.beside > 0))))
    new = fit.prior
    for other in (3, 6, 9):
        mine, its = (float(np.log(table.ratio[row])) for row in (other, other * 12))
        new, _ = by_pairs.observed([new, fit.kinds[other]], [(0, 1)], [1.0], mine, fit.noise)
        _, new = by_pairs.observed([fit.kinds[other], new], [(0, 1)], [1.0], its, fit.noise)
    errors = [abs(by_pairs.expected(new, [fit.kinds[j]]).ratio - table.ratio[j]) for j in (1, 2, 4, 5, 7, 8, 10, 11)]
    assert np.mean(errors) < 0.06
    assert (np.diag(new.cov) < 0.3 * np.diag(fit.prior.cov)).all()


def test_one_absurd_measurement_moves_a_belief_little():
    known = ClassEffect(np.array([-1.0, -1.0]), np.eye(2) * 0.01)
    for log_ratio in (-700.0, 700.0):
        mine, its = by_pairs.observed([known, known], [(0, 1)], [1.0], log_ratio)
        assert np.abs(np.concatenate([mine.mean, its.mean]) + 1).max() < 0.4
    own = by_pairs.observed([known], [(0, 0)], [1.0], -0.3)  # beside one of its own kind
    assert own[0].mean[0] > -1 < own[0].mean[1]
    none = by_pairs.observed([known], [], [], -0.3)  # it was alone: that says nothing of either
    assert np.array_equal(none[0].mean, known.mean)


def test_bounds_widen_with_doubt_and_neighbours():
    sure, unsure = (ClassEffect(np.array([-1.0, -1.0]), np.eye(2) * v) for v in (0.001, 1.0))
    one, two, doubtful = (by_pairs.expected(*c) for c in ((sure, [sure]), (sure, [sure, sure]), (sure, [unsure])))
    assert two.ratio < one.ratio == doubtful.ratio
    assert doubtful.high - doubtful.low > one.high - one.low > 0
    assert by_pairs.expected(unsure, []) == (1.0, 1.0, 1.0)


def test_measured_pairs_left_out_are_predicted():
    table = read_pairs(real("../profiles/contention/deepshare_pairs.csv"))
    assert np.abs(pair_fit.fit(table).errors).mean() < 0.066
