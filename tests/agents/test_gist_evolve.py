"""The search: it finds the bottom of known functions, and goes on after a kill as if nothing had been."""

from __future__ import annotations

import numpy as np
import pytest

from gpusched.agents.common.evolve import Evolution


def rosenbrock(x: np.ndarray) -> np.ndarray:
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


def search(seed: int = 0) -> Evolution:
    return Evolution(np.zeros(4), np.full(4, 0.5), 12, seed)


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_bottom_of_a_bent_valley(seed: int) -> None:
    found = search(seed)
    for _ in range(400):
        found.tell(rosenbrock(found.ask()))
    assert np.allclose(found.mean, 1.0, atol=1e-3)


def test_only_the_order_of_costs_counts() -> None:
    one, other = search(), search()
    for _ in range(30):
        one.tell(rosenbrock(one.ask()))
        other.tell(np.exp(rosenbrock(other.ask()) / 1e4))
    assert one.mean.tobytes() == other.mean.tobytes()


def test_it_goes_on_from_its_state_bit_for_bit() -> None:
    whole, first = search(), search()
    for _ in range(20):
        whole.tell(rosenbrock(whole.ask()))
    for _ in range(8):
        first.tell(rosenbrock(first.ask()))
    kept = {name: array.copy() for name, array in first.state().items()}
    second = search()
    second.restore(kept)
    assert second.generation == 8
    for _ in range(12):
        second.tell(rosenbrock(second.ask()))
    assert second.mean.tobytes() == whole.mean.tobytes()
    assert second.ask().tobytes() == whole.ask().tobytes()


def test_candidates_come_in_mirrored_pairs_until_costs_are_given() -> None:
    found = search()
    one = found.ask()
    assert one.tobytes() == found.ask().tobytes()
    assert np.allclose(one[:6] + one[6:], 2 * found.mean)


def test_numbers_without_a_step_stay_and_the_others_are_searched_as_if_alone() -> None:
    found = Evolution(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.0, 0.25]), 6, 0)
    alone = Evolution(np.array([1.0, 3.0]), np.array([0.5, 0.25]), 6, 0)
    for _ in range(5):
        asked = found.ask()
        assert (asked[:, 1] == 2.0).all()
        assert asked[:, [0, 2]].tobytes() == alone.ask().tobytes()
        assert found.distance(asked[0]) == alone.distance(asked[0, [0, 2]])
        for one in (found, alone):
            one.tell(asked[:, 0] ** 2 + asked[:, 2])
    assert found.mean[[0, 2]].tobytes() == alone.mean.tobytes()
    assert found.distance(np.array([2.0, 7.0, 3.0])) == 4.0
