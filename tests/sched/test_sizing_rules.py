"""The rules that choose sizes, against brute force on small cases."""

from __future__ import annotations

from itertools import product
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.sched.sizing.rules import RULES, wish
from tests.sched.sizing import One, cases, claims_of, power


def wished(rule: str, ones: list[One], capacity: int) -> list[int]:
    claims = claims_of(ones, capacity)
    wish(RULES[rule], claims)
    found: list[int] = claims.jobs["wished"][: len(ones)].tolist()
    return found


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from(sorted(RULES)))
def test_no_rule_wishes_what_is_not_allowed_or_more_than_there_is(case: tuple[list[One], int], rule: str) -> None:
    ones, capacity = case
    found = wished(rule, ones, capacity)
    assert all(gpus in one.may for gpus, one in zip(found, ones, strict=True))
    assert sum(found) <= capacity


def next_of(one: One, gpus: int) -> int | None:
    return min((g for g in one.may if g > gpus), default=None)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_drf_raises_the_smallest_share(case: tuple[list[One], int]) -> None:
    ones, capacity = case
    found = wished("drf", ones, capacity)
    left = capacity - sum(found)
    shares = [gpus * one.share for gpus, one in zip(found, ones, strict=True)]
    for gpus, one in zip(found, ones, strict=True):
        more = next_of(one, gpus)
        assert more is None or more - gpus > left, "what is left is enough for nobody's next step"
        below = [g for g in one.may if g < gpus]
        for other, (has, two) in enumerate(zip(found, ones, strict=True)):
            step = next_of(two, has)
            # It was raised while another had less: only one that could not be raised any more may be behind.
            behind = below and below[-1] * one.share > shares[other] + 1e-9
            assert not behind or step is None or step - has > left


def test_drf_gives_equal_shares_and_heavy_jobs_fewer_gpus() -> None:
    ones = [One(power(1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(3)]
    assert wished("drf", ones, 12) == [4, 4, 4]
    heavy = ones[0]._replace(share=2.0)  # as it takes twice the memory for each GPU
    assert wished("drf", [heavy, *ones[1:]], 10) == [2, 4, 4]


def test_proportional_is_in_proportion_to_the_base() -> None:
    sizes = power(*range(1, 33))
    ones = [One(sizes, base=1), One(sizes, base=2), One(sizes, base=5)]
    assert wished("proportional", ones, 8) == [1, 2, 5]
    assert wished("proportional", ones, 24) == [3, 6, 15]
    assert wished("proportional", [one._replace(paces=power(1, 2, 4, 8)) for one in ones], 12) == [2, 2, 8]


def steps(ones: list[One], capacity: int) -> list[int]:
    """Optimus by its definition, in plain Python."""
    has = [one.may[0] for one in ones]
    while True:
        rated = []
        for j, one in enumerate(ones):
            more = next_of(one, has[j])
            if more is not None and sum(has) + more - has[j] <= capacity:
                work = one.left_s * one.paces[one.held or min(one.paces)]
                saved = work / one.paces[has[j]] - work / one.paces[more]
                rated.append((saved / ((more - has[j]) * one.share), -j, more))
        best = max(rated, default=None)
        if best is None or best[0] <= 0:
            return has
        has[-best[1]] = best[2]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_optimus_takes_the_step_that_saves_most(case: tuple[list[One], int]) -> None:
    assert wished("optimus", *case) == steps(*case)


def test_optimus_prefers_jobs_with_much_work_left_that_scale() -> None:
    even = [One(power(1, 2, 4), left_s=100.0), One(power(1, 2, 4), left_s=1000.0)]
    assert wished("optimus", even, 5) == [1, 4]
    flat = even[1]._replace(paces={1: 1.0, 2: 1.01, 4: 1.02})
    assert wished("optimus", [even[0], flat], 5) == [4, 1]


def misery(ones: list[One], sizes: tuple[int, ...]) -> float:
    """Sia's sum, as its paper has it for p = -0.5."""
    total = 0.0
    for one, gpus in zip(ones, sizes, strict=True):
        moved = one.held and gpus != one.held
        spent = (one.age_s - one.restarts * one.cost_s) / (one.age_s + one.cost_s) if moved else 1.0
        total += max(max(spent, 0.0) * one.paces[gpus] / one.paces[min(one.paces)], 1e-9) ** -0.5
    return total


@settings(max_examples=300, deadline=None)
@given(cases())
def test_sia_s_choice_is_the_best_of_all(case: tuple[list[One], int]) -> None:
    ones, capacity = case
    ones = [one._replace(age_s=one.age_s + 1.0) for one in ones]
    best = min(misery(ones, sizes) for sizes in product(*(one.may for one in ones)) if sum(sizes) <= capacity)
    assert misery(ones, tuple(wished("sia", ones, capacity))) == pytest.approx(best, rel=1e-9)


def test_sia_weighs_what_a_restart_costs() -> None:
    def grows(**more: Any) -> list[int]:
        return wished("sia", [One({2: 2.0, 4: 3.0}, held=2, **more)], 4)

    assert grows(age_s=1000.0, cost_s=10.0, restarts=1) == [4]
    assert grows(age_s=1000.0, cost_s=300.0, restarts=1) == [2], "1.5 times as fast, of which 700 / 1300 are left"


def test_many_jobs_of_many_sizes_take_no_time_by_their_product() -> None:
    """Some ``--gpus 1-1000 --resizable`` on idle GPUs kept every decision waiting for minutes."""
    ones = [One(power(*range(1, 401), by=0.8)) for _ in range(6)]
    wished("greedy-gain", ones[:1], 1)  # compiled
    before = process_time()
    assert wished("greedy-gain", ones, 1200) == [200] * 6
    assert process_time() - before < 0.3
