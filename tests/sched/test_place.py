"""Nodes that are drawn: which may be, how often each is, and where too few are there; and nodes that are kept."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest

from gpusched.sched.backfill import enter, returned
from gpusched.sched.fit import gpus_asked
from gpusched.sched.place import choose, draw, draw_fitting, gives_gpus, max_in_rack, next_random, sort_key, with_room
from gpusched.sched.reclaim import finds, keeps
from gpusched.sched.state import (
    BEST_FIT,
    FIRST_FIT,
    RACK,
    SPREAD,
    PlacementRequest,
    Resources,
    Scratch,
    SharedGpus,
    ints,
    new_resources,
    new_scratch,
    seed_words,
)

GPUS = (8, 1, 4, -1, 4, 0, 4, 8)  # free on each node; -1: not available
ROOMS = Resources(np.array(GPUS), np.array([9, 9, 9, 9, 1, 9, 9, 9]), np.array([7, 7, 7, 7, 7, 7, 7, 7]))
MASKS = np.array([[1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]], np.uint8)


def request(parts: int, gpus: int, mask: int = -1, lo: int = 0, hi: int = len(GPUS)) -> PlacementRequest:
    return PlacementRequest(lo, hi, parts, gpus, 2, 3, mask)


def drawn(how: object, asked: PlacementRequest, times: int) -> Counter[tuple[tuple[int, ...], bool]]:
    words, scratch = seed_words(1), new_scratch(len(GPUS), 1)
    return Counter(_once(how, asked, words, scratch) for _ in range(times))


def _once(how: object, asked: PlacementRequest, words: np.ndarray, scratch: Scratch) -> tuple[tuple[int, ...], bool]:
    before = words.copy()
    fits = bool(how(ROOMS, MASKS, asked, words, scratch))  # type: ignore[operator]
    if (words == before).all():
        return (), fits
    return tuple(scratch.chosen[: asked.parts].tolist()), fits


def test_random_numbers_are_xorshift64_of_marsaglia() -> None:
    words, word, mask = seed_words(7), int(seed_words(7)[0]), (1 << 64) - 1
    for below in (2, 3, 10, 1000, (1 << 32) - 1) * 20:
        word ^= word << 13 & mask
        word ^= word >> 7
        word ^= word << 17 & mask
        assert next_random(words, below) == (word >> 32) * below >> 32


def test_random_fit_draws_from_those_that_fit_each_as_often() -> None:
    """Node 4 has too few cores, node 1 and 5 too few GPUs, node 3 is not there."""
    found = drawn(draw_fitting, request(2, 4), 2400)
    assert found.keys() == {(pair, True) for pair in permutations((0, 2, 6, 7), 2)}
    assert all(140 < count < 260 for count in found.values())  # 200 +- 4.4 sigma
    assert {nodes[0] for nodes, _ in drawn(draw_fitting, request(1, 4, mask=0), 200)} == {0, 2, 7}
    assert {nodes[0] for nodes, _ in drawn(draw_fitting, request(1, 4, lo=1, hi=7), 200)} == {2, 6}
    assert drawn(draw_fitting, request(4, 4, mask=0), 1) == {((), False): 1}, "nothing is drawn where too few fit"
    assert drawn(draw_fitting, request(1, 4, mask=1), 1) == {((), False): 1}
    assert all(fits for _, fits in drawn(draw_fitting, request(4, 4), 20))


def test_the_naive_draw_takes_full_ones_too_and_is_out_of_luck_then() -> None:
    there, well = (0, 1, 2, 4, 5, 6, 7), {0, 2, 6, 7}
    found = drawn(draw, request(2, 4), 4200)
    assert found.keys() == {(pair, well >= set(pair)) for pair in permutations(there, 2)}
    assert all(55 < count < 150 for count in found.values())  # 100 +- 4.5 sigma
    assert {nodes[0] for nodes, _ in drawn(draw, request(1, 4, mask=0), 200)} == {0, 1, 2, 4, 5, 7}
    assert {nodes[0] for nodes, _ in drawn(draw, request(1, 4, lo=1, hi=5), 200)} == {1, 2, 4}
    assert drawn(draw, request(8, 0), 1) == {((), False): 1}
    assert drawn(draw, request(1, 0, mask=1), 1) == {((), False): 1}
    assert {len(set(nodes)) for nodes, _ in drawn(draw, request(7, 0), 20)} == {7}


@pytest.mark.parametrize(
    ("left", "usable", "stays"),
    [
        ((4, 2, 3), 8, True), ((3, 9, 9), 8, False), ((9, 1, 9), 8, False), ((9, 9, 2), 8, False),
        ((0, 0, 0), -1, True), ((9, 1, 9), 0, False), ((9, 9, 2), 1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_a_running_job_keeps_nodes_that_are_left_to_it_or_not_there_any_more(
    left: tuple[int, int, int], usable: int, stays: bool, first: bool
) -> None:
    """On two nodes, of which one has all of it left."""
    one, other = (0, 1) if first else (1, 0)
    whole, there = new_resources(2), new_resources(2)
    for of, column in enumerate(whole.columns):
        column[one], column[other] = left[of], 9
    there.gpus[one], there.gpus[other] = usable, 8
    held = np.array([7, 0, 1])
    assert keeps(whole, there, request(2, 4), held, 1, 0) == stays
    taken = (4, 2, 3) if stays else (0, 0, 0)
    assert tuple(int(column[one]) for column in whole.columns) == tuple(a - b for a, b in zip(left, taken, strict=True))
    assert tuple(int(column[other]) for column in whole.columns) == tuple(9 - b for b in taken)


def test_nodes_are_compared_by_gpus_then_cores_then_memory_up_to_the_most_a_node_may_have() -> None:
    falling = [(2047, 0, 0), (2046, 2**20 - 1, 2**32 - 1), (1, 1, 0), (1, 0, 2**32 - 1), (1, 0, 0), (0, 0, 0)]
    keys = [sort_key(SPREAD, *map(np.int64, free), request(1, 0)) for free in falling]
    assert all(more < less for more, less in pairwise(keys)), "the most free first"


@pytest.mark.parametrize(
    ("rule", "milli", "node"),
    [
        (FIRST_FIT, 300, 1),
        (BEST_FIT, 300, 3),
        (BEST_FIT, 350, 2),
        (BEST_FIT, 800, 2),  # no shared one has it: a whole one, where fewest GPUs are left
        (SPREAD, 300, 4),  # the most free GPUs
    ],
)
def test_a_part_goes_to_the_gpu_where_least_is_left_or_by_the_rule(rule: int, milli: int, node: int) -> None:
    """Nodes with GPUs of so many thousandths left; the first is not available."""
    left = ints([300, 350, 1000, 1000, 400, 1000, 300, 200, 1000, 1000, 1000])
    shared = SharedGpus(left, ints([0, 2, 4, 6, 8, 11]), ints([]), ints([]))
    free = Resources(ints([-1, 2, 1, 0, 3]), ints([9] * 5), ints([9] * 5), shared)
    asked = PlacementRequest(0, 5, 1, 1, 2, 3, -1, milli=milli)
    scratch = new_scratch(5, 1)
    assert choose(free, MASKS, asked, rule, scratch)
    assert scratch.chosen[0] == node


def test_a_part_fits_on_a_free_gpu_or_beside_others_and_nowhere_on_a_node_that_is_not_available() -> None:
    shared = SharedGpus(ints([1000, 300, 299, 300, 500]), ints([0, 2, 3, 5]), ints([]), ints([]))
    asked = request(1, 1)._replace(milli=300)
    assert [with_room(shared, 300, node) for node in range(3)] == [1, -1, 3], "the first of those with least left"
    assert with_room(shared, 1000, 0) == -1, "a whole GPU is counted with the node's"
    assert (with_room(None, 300, 0), with_room(shared, None, 0)) == (-1, -1)
    assert [gives_gpus(shared, free, asked, 0) for free in (-1, 0, 1)] == [False, True, True]
    assert [gives_gpus(shared, free, asked, 1) for free in (-1, 0, 1)] == [False, False, True]
    first = shared._replace(room=ints([300, 1000, 299, 300, 500]))
    assert [gives_gpus(first, free, asked, 0) for free in (-1, 0, 1)] == [False, True, True]
    scratch, whole = new_scratch(3, 1), request(2, 1, hi=3)._replace(milli=1000)
    assert choose(Resources(ints([0, 1, 1]), ints([9] * 3), ints([9] * 3), shared), MASKS, whole, FIRST_FIT, scratch)
    assert scratch.chosen[:2].tolist() == [1, 2], "of whole GPUs a job may have several, on several nodes"
    assert [gives_gpus(None, free, asked, 0) for free in (-1, 0, 1, 2)] == [False, False, True, True]
    assert [gpus_asked(milli, gpus) for milli, gpus in ((None, 3), (1000, 4), (300, 1), (1, 1))] == [3, 4, 0.3, 0.001]


@pytest.mark.parametrize("seed", range(4))
def test_a_rack_has_so_many_nodes_that_fit_and_gpus_free(seed: int) -> None:
    """Only those of the partition count, whatever the figures were before."""
    rng = np.random.default_rng(seed)
    gpus, rack = rng.integers(-1, 5, 12), rng.integers(0, 3, 12)
    lo, hi = (0, 12) if seed == 0 else (2, 9)
    free, asked = Resources(gpus, ints([9] * 12), ints([9] * 12)), request(1, 2, lo=lo, hi=hi)
    racks = new_scratch(12, 1, rack).racks
    racks["fits"], racks["free"] = 7, 70
    there = [np.flatnonzero((rack == own) & (np.arange(12) >= lo) & (np.arange(12) < hi)) for own in range(3)]
    fits = [int((gpus[nodes] >= 2).sum()) for nodes in there]
    assert max_in_rack(racks, free, MASKS, asked) == max(fits)
    assert racks["fits"][:3].tolist() == [count if len(nodes) else 7 for count, nodes in zip(fits, there, strict=True)]
    left = [int(gpus[nodes][gpus[nodes] > 0].sum()) if len(nodes) else 70 for nodes in there]
    assert racks["free"][:3].tolist() == left
    assert max_in_rack(None, free, MASKS, asked) == 0


@pytest.mark.parametrize("rule", [FIRST_FIT, BEST_FIT, SPREAD, RACK])
@pytest.mark.parametrize("seed", range(12))
def test_the_node_of_a_part_is_the_first_by_plain_tuples(rule: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    room, milli = rng.choice([200, 300, 500, 1000], 16), int(rng.choice([200, 300, 400]))
    shared = SharedGpus(ints(room), ints(range(0, 18, 2)), ints([]), ints([]))
    gpus, cores, memory = rng.integers(-1, 3, 8), rng.integers(1, 4, 8), rng.integers(2, 5, 8)
    rack, mask = rng.integers(0, 3, 8), rng.integers(0, 4, (1, 8)).clip(0, 1).astype(np.uint8)
    scratch, free = new_scratch(8, 1, rack), Resources(gpus, cores, memory, shared)

    def key(node: int) -> tuple[int, ...]:
        has = (int(gpus[node]), int(cores[node]), int(memory[node]))
        beside = [int(left) for left in room[2 * node : 2 * node + 2] if milli <= left < 1000]
        in_rack = int(gpus[(rack == rack[node]) & (gpus > 0)].sum())
        of_gpu = min(beside, default=1000) - milli
        if rule == FIRST_FIT:
            return (node,)
        if rule == SPREAD:
            return (*(-amount for amount in has), node)
        return (of_gpu, *((has[0], in_rack) if rule == RACK else ()), *has, node)

    def fits(node: int) -> bool:
        beside = any(milli <= left < 1000 for left in room[2 * node : 2 * node + 2])
        return (gpus[node] > 0 or (gpus[node] == 0 and beside)) and cores[node] >= 2 and memory[node] >= 3

    there = [node for node in range(8) if fits(node) and mask[0, node]]
    asked = request(1, 1, mask=0)._replace(milli=milli)
    assert choose(free, mask, asked, rule, scratch) == bool(there)
    assert scratch.chosen[0] == min(there, key=key, default=-1)


def test_a_part_takes_a_gpu_if_it_is_the_first_there_and_gives_it_back_with_the_last() -> None:
    """On a node with two GPUs; the last job has its part already."""
    shared = SharedGpus(ints([1000] * 3), ints([0, 2, 3]), ints([600, 300, 950, 1000, 50]), ints([-1] * 4 + [0]))
    assert [enter(shared, request(1, gpus), job, 0).gpus for job, gpus in enumerate((1, 1, 1, 4, 1))] == [1, 0, 1, 4, 0]
    assert (shared.on.tolist(), shared.room.tolist()) == ([0, 0, 1, -1, 0], [50, 50, 1000])
    back = [returned(shared, shared, job, gpus) for job, gpus in ((4, 1), (1, 1), (0, 1), (3, 4))]
    assert (back, shared.room.tolist()) == ([0, 0, 1, 4], [1000, 50, 1000])
    assert (returned(None, shared, 4, 4), returned(shared, None, 4, 4)) == (4, 4), "no parts here"


@pytest.mark.parametrize(
    ("left", "free", "stays"), [(1000, 1, True), (1000, 0, False), (600, 0, True), (599, 2, False)]
)
def test_a_running_job_keeps_its_part_of_a_gpu_if_that_is_left_of_it(left: int, free: int, stays: bool) -> None:
    shared = SharedGpus(ints([left, 1000]), ints([0, 2]), ints([600]), ints([0]))
    whole = Resources(ints([free]), ints([9]), ints([9]), shared)
    assert keeps(whole, whole, request(1, 1), np.array([0]), 0, 0) == stays
    assert shared.room[0] == left - 600 * stays


def test_a_part_goes_beside_others_even_those_that_may_be_stopped_and_else_where_no_job_runs() -> None:
    """The first GPU has 400 thousandths until its job is stopped, then all. ``whole``: as if it were; ``idle``: now."""
    milli, on = ints([600, 500, 350, 800, 1000]), ints([0, -1, -1, -1, -1])

    def node(gpus: int, *left: int, cores: int = 99) -> Resources:
        shared = SharedGpus(ints(left), ints([0, len(left)]), milli, on)
        return Resources(ints([gpus]), ints([cores]), ints([99]), shared)

    def found(job: int, whole: Resources, idle: Resources) -> tuple[list[int], ...]:
        asked, scratch = request(1, 1, hi=1)._replace(milli=milli[job]), new_scratch(1, 1)
        assert finds(whole, idle, whole, MASKS, asked, BEST_FIT, scratch, None, np.zeros(2, np.int64), job)
        rooms = [of.shared.room.tolist() for of in (whole, idle) if of.shared is not None]
        return [int(on[job]), int(whole.gpus[0]), int(idle.gpus[0])], *rooms

    both = node(2, 1000, 700, 1000), node(1, 400, 700, 1000)
    assert found(1, *both) == ([1, 2, 1], [1000, 200, 1000], [400, 200, 1000])
    assert found(2, *both) == ([0, 1, 1], [650, 200, 1000], [50, 200, 1000])
    assert found(3, *both) == ([2, 0, 0], [650, 200, 200], [50, 200, 200])
    both = node(3, 1000, 1000, 1000), node(2, 400, 1000, 1000, cores=0)
    assert found(3, *both) == ([1, 2, 1], [1000, 200, 1000], [400, 200, 1000]), "cores are what it is stopped for"
    assert found(4, *both) == ([-1, 1, 0], [1000, 200, 1000], [400, 200, 1000]), "a GPU of its own"
    both = node(2, 1000, 1000), node(1, 1000, 400, cores=0)
    assert found(3, *both) == ([0, 1, 0], [200, 1000], [200, 400])
