"""The exact figures of the paper's setting, as the table of Narantuya et al.'s setting has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpusched.agents.gist import expectimax, naive
from gpusched.agents.gist.section6 import cases
from gpusched.agents.gist.setting import paper


@pytest.mark.parametrize(
    ("gap_h", "never_waits", "best_online", "optimum"),
    [(0, 0.741, 0.741, 0.741), (1, 0.7255, 0.7373, 0.738), (24, 0.6606, 0.6739, 0.686)],
)
def test_the_best_that_is_possible(gap_h, never_waits, best_online, optimum):
    setting = paper("A100", gap_h)
    assert expectimax.never_waits(setting) == pytest.approx(never_waits, abs=0.0005)
    assert expectimax.best_online(setting) == pytest.approx(best_online, abs=0.0005)
    assert expectimax.clairvoyant(setting) == pytest.approx(optimum, abs=0.0005)
    # from the first submission on nothing is gained by beginning later, and no online policy beats who knows all
    assert best_online - 0.0005 <= expectimax.clairvoyant(setting, "submission") <= optimum + 0.0005


@pytest.mark.parametrize(("gap_h", "utilization"), [(0, 0.622), (1, 0.635), (24, 0.584)])
def test_naive_is_near_the_papers_in_all_settings(gap_h, utilization):
    assert naive.exact(paper("A100", gap_h)).utilization == pytest.approx(utilization, abs=0.0025)


def test_naive_at_once():
    exact = naive.exact(paper("A100"))
    assert exact.utilization == pytest.approx(0.6221, abs=0.0001)
    assert exact.hours == pytest.approx(467.0, abs=0.5)
    one_pass = naive.exact(paper("V100"), one_pass=True)
    assert one_pass.utilization == pytest.approx(0.6143, abs=0.0001)  # as the replay's placement `naive`


def test_at_once_no_choice_of_server_matters_and_nothing_is_to_be_learned():
    """Starting whatever fits, largest first: the worst servers are as good as the best, and as knowing all jobs."""
    setting = paper("A100")
    worst = expectimax.never_waits_at_worst(setting)
    assert worst == pytest.approx(0.7409, abs=0.00005)
    assert worst == pytest.approx(expectimax.clairvoyant(setting), abs=1e-12)
    for gap_h in (1, 24):
        apart = paper("A100", gap_h)
        assert expectimax.never_waits_at_worst(apart) < expectimax.never_waits(apart) - 0.01


def test_the_lowest_naive_episode():
    assert naive.lowest(paper("A100")) == pytest.approx(0.2875)


def test_naive_played_is_the_exact_mean_within_its_error():
    setting = paper("A100")
    sequences = np.tile(setting.sequences(), (20, 1))
    played = naive.simulate(setting, sequences, seed=3)
    error = played.utilization.std() / np.sqrt(len(sequences))
    assert abs(played.utilization.mean() - naive.exact(setting).utilization) < 4 * error
    assert played.utilization.min() == pytest.approx(0.2875)


def test_fig_3():
    ends = {(case.name[:6], case.f_run_d): case.end_d for case in cases()}
    assert ends == {("case 1", 10): 31, ("case 2", 10): 27, ("larges", 10): 24} | {
        ("case 1", 21): 42, ("case 2", 21): 38, ("larges", 21): 35,
    }  # fmt: skip


def test_no_gpu_twice_in_fig_3():
    for case in cases():
        times = sorted({t for b in case.bars for t in (b.start_d, b.end_d)})
        for time, server in itertools.product(times, (1, 2)):
            assert sum(b.gpus for b in case.bars if b.server == server and b.start_d <= time < b.end_d) <= 8
