"""Fair Tree beside the plain recursion that Slurm's documentation describes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.limits import Group, Groups, leaf_of
from gpusched.model.policy import PolicySpec
from gpusched.sched.alone import in_order
from gpusched.sched.decide import decide
from gpusched.sched.fairtree import USER, places, rank_users, tree_of
from gpusched.sched.tally import usage_of
from tests.sched.worlds import node, pending, snapshot, started
from tests.strategies import among

Leaf = tuple[str, str]


def by_hand(groups: Groups, leaves: list[Leaf], usage: dict[Leaf, float]) -> list[list[Leaf]]:
    """Leaves in order, equal ones together: siblings by U / S, those below one before all below the next."""

    def under(name: str) -> list[Leaf]:
        return [leaf for leaf in leaves if name in groups.above(leaf[1])]

    def members(name: str) -> list[tuple[str | Leaf, float]]:
        found: list[tuple[str | Leaf, float]] = [(g.name, g.shares) for g in groups.groups if g.parent == name]
        group = groups.get(name)
        shares = group.members if group is not None else {}
        return found + [(leaf, shares.get(leaf[0], 1)) for leaf in leaves if leaf[1] == name]

    def used(who: str | Leaf) -> float:
        return usage[who] if isinstance(who, tuple) else sum(usage[leaf] for leaf in under(who))

    def siblings_shares(name: str) -> float:
        group = groups.get(name)
        gone = sum(s for u, s in group.members.items() if (u, name) not in leaves) if group is not None else 0
        return gone + sum(share for _, share in members(name))

    def ordered(levels: list[str]) -> list[list[Leaf]]:
        rated: list[tuple[float, str | Leaf]] = []
        for name in levels:
            whole = sum(used(who) for who, _ in members(name))
            for who, share in members(name):
                part = used(who) / whole if whole else 0.0
                rated.append((round(part / (share / siblings_shares(name)), 9), who))
        found: list[list[Leaf]] = []
        for rate in sorted({rate for rate, _ in rated}):
            tied = [who for at, who in rated if at == rate]
            own = [who for who in tied if isinstance(who, tuple)]
            found += [own] if own else []
            below = [who for who in tied if isinstance(who, str)]
            found += ordered(below) if below else []
        return found

    return ordered([""])


@st.composite
def trees(draw: st.DrawFn) -> tuple[Groups, list[Leaf], list[float]]:
    count = draw(st.integers(0, 5))
    groups = [
        Group(
            name=f"g{i}",
            parent=draw(among("", *(f"g{k}" for k in range(i)))),
            shares=draw(st.integers(1, 3)),
            members={user: draw(st.integers(1, 3)) for user in draw(st.lists(st.sampled_from("abc"), unique=True))},
        )
        for i in range(count)
    ]
    places_of = [*(f"g{i}" for i in range(count)), ""]
    leaves = draw(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(places_of)), unique=True, min_size=1))
    usage = [draw(among(0.0, 0.0, 1.0, 2.0, 4.0, 7.0)) for _ in leaves]
    return Groups(groups=tuple(groups)), leaves, usage


@settings(max_examples=60, deadline=None)
@given(trees())
def test_it_is_what_the_recursion_says(drawn: tuple[Groups, list[Leaf], list[float]]) -> None:
    groups, leaves, usage = drawn
    found = places(tree_of(groups, leaves), np.array(usage)).tolist()
    order: dict[int, set[Leaf]] = {}
    for leaf, place in zip(leaves, found, strict=True):
        order.setdefault(place, set()).add(leaf)
    expected = by_hand(groups, leaves, dict(zip(leaves, usage, strict=True)))
    assert [order[place] for place in sorted(order)] == [set(one) for one in expected]


@settings(max_examples=60, deadline=None)
@given(trees())
def test_usage_that_has_decayed_to_almost_nothing_counts_alike(drawn: tuple[Groups, list[Leaf], list[float]]) -> None:
    groups, leaves, usage = drawn
    tree = tree_of(groups, leaves)
    assert places(tree, np.array(usage)).tolist() == places(tree, np.array(usage) * 2.0**-1070).tolist()


def test_equal_users_stay_equal_in_spite_of_rounding() -> None:
    groups = Groups(
        groups=(
            Group(name="g0", shares=2, members={"a": 1, "b": 3}), Group(name="g1", shares=2),
            Group(name="g2", parent="g0"), Group(name="g3", parent="g0"),
        )
    )  # fmt: skip
    leaves = [("a", "g0"), ("b", "g0"), ("b", "g1"), ("a", "g3"), ("c", "g1"), ("a", "g1"), ("a", "g2"), ("a", ""),
              ("b", "g2"), ("d", "g1")]  # fmt: skip
    found = places(tree_of(groups, leaves), np.array([0.0, 2.0, 2.0, 4.0, 0.0, 7.0, 4.0, 0.0, 0.0, 1.0])).tolist()
    assert found[leaves.index(("b", "g0"))] == found[leaves.index(("d", "g1"))], "both used 0.4 of their part"


def test_no_user_of_a_group_that_used_more_goes_before_one_of_a_group_that_used_less() -> None:
    groups = Groups(
        groups=(
            Group(name="large", shares=3, members={"ann": 1, "bob": 1}),
            Group(name="small", shares=1, members={"cy": 1}),
        )
    )
    usage = {leaf_of("ann", "large"): 40.0, leaf_of("bob", "large"): 10.0, leaf_of("cy", "small"): 18.0}
    jobs = [
        pending(user, 1, user=user, group=group)
        for user, group in (("cy", "small"), ("ann", "large"), ("bob", "large"))
    ]
    snap = snapshot([node("n", gpus=1)], jobs, order="fairshare", usage=usage, groups=groups)
    assert [job.id for job in in_order(snap, "p")] == ["bob", "ann", "cy"], "50 for 3 shares is less than 18 for one"
    assert list(started(decide(snap))) == ["bob"]
    less = replace(snap, usage=usage | {leaf_of("cy", "small"): 16.0})
    assert [job.id for job in in_order(less, "p")] == ["cy", "bob", "ann"]
    assert usage_of(less)[leaf_of("cy", "small")] == 0


def test_below_groups_that_are_equal_each_counts_by_its_part_there() -> None:
    """Both have used 4; a of one has used all of that, a of the other half of its part there."""
    one, other = Group(name="one", members={"a": 1}), Group(name="other", members={"a": 1, "b": 1})
    groups, leaves = Groups(groups=(one, other)), [("a", "one"), ("a", "other"), ("b", "other")]
    assert places(tree_of(groups, leaves), np.array([4.0, 1.0, 3.0])).tolist() == [1, 0, 2]


def test_a_gpu_that_is_held_counts_as_much_as_an_hour_of_one() -> None:
    """Columns: GPU seconds at a time, that time, GPUs held since; half of them have decayed an hour later."""
    users = np.array([(3600, 7200, 0, 9), (0, 7200, 1, 9), (7200, 3600, 0, 9), (3599, 7200, 0, 9)], USER)
    rank_users(tree_of(Groups(), [(name, "") for name in "abcd"]), users, 7200.0, 3600.0)
    assert users["place"].tolist() == [1, 1, 1, 0]
    assert users["used"].tolist() == [3600, 0, 3600, 3599]
    assert users["since"].tolist() == [7200] * 4


def test_other_orders_do_not_ask_for_it() -> None:
    groups = Groups(groups=(Group(name="g", members={"ann": 1}),))
    snap = snapshot([node("n")], [pending("a", 1)], usage={"ann": 3.0}, groups=groups)
    assert usage_of(snap) == {"ann": 3.0}
    fallback = PolicySpec(name="f", order="fairshare")
    assert usage_of(replace(snap, policies={"p": PolicySpec(name="a", agent="gist", fallback=fallback)})) != {
        "ann": 3.0
    }
