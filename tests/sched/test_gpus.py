"""Which GPUs of a node: against an enumeration written plainly here."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpusched.sched.decide import decide
from gpusched.sched.gpus import links_matrix, nearest_gpus
from tests.sched.worlds import node, pending, snapshot, started

LINKS = st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=6, max_size=6)


@given(LINKS, st.sets(st.integers(0, 5), min_size=2), st.integers(1, 5))
def test_the_nearest_by_all_four_rules(rows: list[list[int]], free: set[int], count: int) -> None:
    """Most closeness, then the best worst GPU, then the closest rest, then the lowest; the farther way counts."""
    links = {a: {b: rows[a][b] for b in range(6) if b != a} for a in range(6)}

    def near(a: int, b: int) -> int:
        return min(rows[a][b], rows[b][a])

    def inside(gpus: tuple[int, ...]) -> int:
        return sum(near(a, b) for a, b in combinations(gpus, 2))

    def rank(chosen: tuple[int, ...]) -> tuple[object, ...]:
        worst = min(sum(near(a, b) for b in chosen if b != a) for a in chosen)
        rest = tuple(sorted(free - set(chosen)))
        return -inside(chosen), -worst, -inside(rest), chosen

    found = nearest_gpus(links_matrix(range(6), links), tuple(sorted(free)), count)
    if count >= len(free):
        assert found == tuple(sorted(free))
    else:
        assert found == min(combinations(sorted(free), count), key=rank)


def test_where_two_directions_differ_the_farther_counts_and_what_is_not_known_is_far() -> None:
    assert links_matrix((0, 1, 2), {0: {1: 5, 2: 4}, 1: {0: 3, 2: 9}, 2: {0: 4}}) == ((0, 3, 4), (3, 0, 0), (4, 0, 0))


def test_of_choices_as_near_the_one_that_leaves_the_rest_near() -> None:
    """0-1 and 2-3 are islands, 4 and 5 are alone: one GPU is taken from those that nobody will miss."""
    matrix = links_matrix(range(6), {0: {1: 5}, 1: {0: 5}, 2: {3: 5}, 3: {2: 5}})
    assert nearest_gpus(matrix, (0, 1, 2, 3, 4, 5), 1) == (4,)
    assert nearest_gpus(matrix, (0, 1, 2, 3), 1) == (0,)


def test_a_nodes_gpus_in_any_order_are_handed_out_by_their_links_lowest_first() -> None:
    from gpusched.model.snapshot import NodeView

    links = {a: {b: 5 if a // 2 == b // 2 else 1 for b in range(4) if b != a} for a in range(4)}
    mixed = NodeView(name="n", partition="p", gpus=(3, 0, 2, 1), cores=9, memory_mib=1 << 20, links=links)
    plan = decide(snapshot([mixed], [pending("j", 2), pending("k", 1, submit=1.0)]))
    assert started(plan) == {"j": [("n", (0, 1))], "k": [("n", (2,))]}
    plain = NodeView(name="n", partition="p", gpus=(3, 0, 2, 1), cores=9, memory_mib=1 << 20)
    assert started(decide(snapshot([plain], [pending("j", 2)]))) == {"j": [("n", (0, 1))]}
    assert started(decide(snapshot([node("n")], [pending("j", 3)]))) == {"j": [("n", (0, 1, 2))]}
