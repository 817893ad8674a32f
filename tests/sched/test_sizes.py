"""Who gets how many GPUs: sizes of resizable jobs that wait, and resizes of those that run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.jobs import Elastic, JobSpec, JobState, Resizes
from gpusched.model.plan import Resize, Start
from gpusched.model.policy import PolicySpec, Resizing
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.sizes import shape, sizes_of, speed_at
from tests.sched.worlds import NOW, node, pending, running

QUICK = Resizing(min_run_s=0.0, per_hour=100, gain=0.05)
POLICY = PolicySpec(name="quick", place="best-fit", backfill="easy", sizes="greedy-gain", resize=QUICK)
PERFECT = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def spec(*sizes: int, base: int | None = None, **more: Any) -> JobSpec:
    base = base or sizes[0]
    elastic = Elastic(sizes=sizes, base_gpus=base, base_cores=base, base_memory_mib=1024 * base, cooldown_s=0)
    return JobSpec(
        name="e", partition="p", gpus_per_node=base, cores_per_node=base, memory_mib_per_node=1024 * base,
        time_limit_s=36000, elastic=elastic, **more,
    )  # fmt: skip


def waits(name: str, *sizes: int, speeds: dict[int, float] | None = None, **more: Any) -> PendingView:
    return msgspec.structs.replace(pending(name, 1, **more), spec=spec(*sizes), speeds=speeds or {})


def runs(name: str, where: dict[str, tuple[int, ...]], *sizes: int, **more: Any) -> RunningView:
    gpus = sum(len(found) for found in where.values())
    own = spec(*sizes, base=gpus).at_size(gpus, len(where))
    view = running(name, where, NOW + 7200, cores=own.cores_per_node)
    more = {"start_time": NOW - 3600, "submit_time": NOW - 3600, "speeds": PERFECT, **more}
    return msgspec.structs.replace(view, spec=own, **more)


def world(jobs: list[PendingView], busy: list[RunningView], nodes: int = 2, **rules: Any) -> Snapshot:
    policy = msgspec.structs.replace(POLICY, **rules)
    machines = tuple(node(f"n{i}") for i in range(nodes))
    return Snapshot(now=NOW, nodes=machines, running=tuple(busy), pending=tuple(jobs), policies={"p": policy})


def started(snapshot: Snapshot) -> dict[str, int]:
    plan, rejections = check(decide(snapshot), snapshot)
    assert rejections == ()
    return {
        a.job_id: sum(len(p.gpus) for p in a.allocation.parts) for a in plan.actions if isinstance(a, Start)
    }  # fmt: skip


def resized(snapshot: Snapshot) -> dict[str, int]:
    plan, rejections = check(decide(snapshot), snapshot)
    assert rejections == ()
    return {a.job_id: a.gpus for a in plan.actions if isinstance(a, Resize)}


def test_one_that_is_alone_starts_with_all_that_it_may_have() -> None:
    assert started(world([waits("a", 1, 2, 4, 8)], [])) == {"a": 8}
    assert started(world([waits("a", 1, 2, 4, 8, 16)], [])) == {"a": 16}
    assert started(world([waits("a", 1, 2, 4, 8, 32)], [])) == {"a": 8}, "32 fit nowhere"


def test_it_starts_on_what_is_free() -> None:
    rigid = running("r", {"n0": (0, 1, 2, 3, 4, 5, 6, 7), "n1": (0, 1, 2)}, NOW + 60)
    assert started(world([waits("a", 1, 2, 4, 8)], [rigid])) == {"a": 4}


def test_two_share_and_who_gains_more_gets_more() -> None:
    flat = {1: 1.0, 2: 1.05, 4: 1.06, 8: 1.07}
    assert started(world([waits("a", 1, 2, 4, 8), waits("b", 1, 2, 4, 8)], [], nodes=1)) == {"a": 4, "b": 4}
    jobs = [waits("a", 1, 2, 4, 8, speeds=flat), waits("b", 1, 2, 4, speeds=PERFECT)]
    found = started(world(jobs, [], nodes=1))
    assert found["b"] == 4
    assert found["a"] in (2, 4)


def test_it_grows_into_what_is_free_and_says_how_much_faster_it_gets() -> None:
    snapshot = world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8)])
    assert resized(snapshot) == {"a": 8}
    (found,) = sizes_of(snapshot).resizes
    assert found.why == "grows from 2 to 8 GPUs that are free: 4.00 times as fast as it told"


def test_it_shrinks_for_one_that_waits_by_no_more_than_that_needs() -> None:
    busy = [runs("a", {"n0": tuple(range(8))}, 1, 2, 4, 8), running("r", {"n1": tuple(range(8))}, NOW + 60)]
    assert resized(world([pending("j", 4)], busy)) == {"a": 4}
    assert resized(world([pending("j", 6)], busy)) == {"a": 2}
    assert resized(world([pending("j", 8)], busy)) == {}, "it keeps its least size, so nothing would come of it"
    (found,) = sizes_of(world([pending("j", 4)], busy)).resizes
    assert found.why == "shrinks from 8 to 4 GPUs for j"


def test_it_does_not_shrink_for_a_resizable_one_where_somebody_ends_soon() -> None:
    costs = Resizes(count=1, costs_s=30.0, measured=1)
    whole = {"n0": tuple(range(8))}
    for ends_in, expected in ((299.0, {}), (301.0, {"a": 4})):
        busy = [runs("a", whole, 1, 2, 4, 8, resizes=costs, own_end=NOW + ends_in)]
        assert resized(world([waits("b", 4, 8)], busy, nodes=1)) == expected
    assert resized(world([pending("r", 4)], [runs("a", whole, 4, 8, own_end=NOW + 9.0)], nodes=1)) == {"a": 4}, "rigid"


def test_it_does_not_grow_for_a_moment() -> None:
    costs = Resizes(count=1, costs_s=60.0, measured=1)
    for gap, expected in ((30.0, {}), (90.0, {"a": 4})):
        late = [runs(f"r{n}", {"n1": (n,)}, 1, start_time=NOW - 1, submit_time=NOW - gap * (7 - n)) for n in range(7)]
        grows = runs("a", {"n0": (0, 1)}, 2, 4, resizes=costs, submit_time=NOW - gap * 8)
        assert resized(world([], [grows, *late])) == expected, gap
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 2, 4, resizes=costs, own_end=NOW + 50.0)])) == {}, "nearly done"


def test_nobody_is_stopped_for_what_then_still_has_no_place() -> None:
    ends = [running(f"r{n}", {f"n{n}": (7,)}, NOW + 9000) for n in range(2)]
    busy = [*ends, runs("a", {"n1": tuple(range(7))}, 6, 7)]
    assert resized(world([pending("j", 8)], busy)) == {}, "eight GPUs in all, but on no node"
    assert resized(world([pending("j", 4, nodes=2)], [*ends, runs("a", {"n1": tuple(range(7))}, 3, 7)])) == {"a": 3}


def test_who_gains_least_shrinks_first() -> None:
    flat = {1: 1.0, 2: 1.9, 4: 1.95}
    busy = [runs("a", {"n0": (0, 1, 2, 3)}, 1, 2, 4), runs("b", {"n0": (4, 5, 6, 7)}, 1, 2, 4, speeds=flat)]
    assert resized(world([pending("j", 2)], busy, nodes=1)) == {"b": 2}


def test_a_job_that_cannot_use_more_does_not_grow() -> None:
    flat = {1: 1.0, 2: 1.9, 4: 1.95, 8: 1.97}
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, speeds=flat)])) == {}


def test_what_a_stop_costs_is_weighed() -> None:
    costly = Resizes(count=3, costs_s=5400.0, measured=3)  # half an hour each, of an hour and a half that it is old
    snapshot = world([], [runs("a", {"n0": (0, 1, 2, 3)}, 4, 5, resizes=costly, speeds={4: 4.0, 5: 5.0})])
    assert resized(snapshot) == {}
    cheap = Resizes(count=3, costs_s=9.0, measured=3)
    snapshot = world([], [runs("a", {"n0": (0, 1, 2, 3)}, 4, 5, resizes=cheap, speeds={4: 4.0, 5: 5.0})])
    assert resized(snapshot) == {"a": 5}


@pytest.mark.parametrize(
    "braked",
    [
        {"start_time": NOW - 59.0},
        {"state": JobState.COMPLETING},
        {"resizes": Resizes(frozen="it did not save its work")},
        {"resizes": Resizes(times=(NOW - 3000.0, NOW - 10.0))},
    ],
)
def test_brakes_hold(braked: dict[str, Any]) -> None:
    rules = msgspec.structs.replace(QUICK, min_run_s=60.0, per_hour=2)
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, **braked)], resize=rules)) == {}
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8)], resize=rules)) == {"a": 8}


def test_a_size_at_which_it_did_not_come_up_is_not_tried_again() -> None:
    bad = Resizes(unusable=(8,))
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, resizes=bad)])) == {"a": 4}


def test_one_that_was_stopped_to_be_resized_goes_before_all_others() -> None:
    stopped = msgspec.structs.replace(waits("z", 1, 2, 4, 8, submit=900.0), resume_at=4)
    jobs = [pending("a", 8, priority=1000), pending("b", 8), stopped]
    assert started(world(jobs, [], nodes=1)) == {"z": 4}
    assert started(world([stopped], [], nodes=2)) == {"z": 4}, "it was stopped for 4, whatever is free now"
    rigid = running("r", {"n0": (0, 1, 2, 3, 4)}, NOW + 60)
    assert started(world([stopped], [rigid], nodes=1)) == {"z": 2}, "others took the room"


def test_other_partitions_and_policies_are_left_alone() -> None:
    base = world([waits("a", 1, 2, 4)], [runs("b", {"n0": (0,)}, 1, 2)], sizes="base")
    assert sizes_of(base) == (base, ())
    assert started(base) == {"a": 1}


def test_shapes_are_whole_and_equal() -> None:
    machines = [node("a"), node("b"), node("c", gpus=4)]
    found = {g: shape(spec(1, 2, 3), g, machines) for g in (1, 8, 12, 16, 17, 24)}
    assert {g: s and (s.nodes, s.gpus_per_node, s.cores_per_node) for g, s in found.items()} == {
        1: (1, 1, 1), 8: (1, 8, 8), 12: (2, 6, 6), 16: (2, 8, 8), 17: None, 24: None
    }  # fmt: skip


def test_speeds_between_and_beyond_what_is_known() -> None:
    assert speed_at({}, 4) == pytest.approx(4**0.8, abs=1e-12)
    assert speed_at({2: 3.0}, 4) == pytest.approx(3 * 2**0.8, abs=1e-12)
    known = {2: 2.0, 8: 4.0}  # the square root
    assert [speed_at(known, g) for g in (2, 4, 8, 32)] == pytest.approx([2, 2 * 2**0.5, 4, 8], abs=1e-12)
    assert speed_at(known, 1) == pytest.approx(2 / 2**0.5, abs=1e-12)
    assert speed_at({2: 5.0, 8: 4.0}, 32) == 4.0, "one that gets slower is taken not to gain"
    assert speed_at({1: 1.0, 2: 3.0}, 4) == 6.0, "nor does anything gain more than the GPUs"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_is_given_twice_and_the_same_is_decided_again(data: st.DataObject) -> None:
    menu = st.sampled_from([(1, 2, 4, 8), (2, 4), (1, 8, 16), (4,), (3, 6)])
    busy: list[RunningView] = []
    free = {f"n{i}": list(range(8)) for i in range(3)}
    for number in range(data.draw(st.integers(0, 5))):
        sizes = data.draw(menu)
        gpus, where = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sorted(free)))
        if gpus <= len(free[where]):
            taken = tuple(free[where][:gpus])
            del free[where][:gpus]
            times = tuple(NOW - s for s in data.draw(st.lists(st.integers(1, 3000), max_size=2)))
            known = {g: data.draw(st.floats(0.1, 50)) for g in data.draw(st.sets(st.sampled_from(sizes)))}
            busy.append(runs(f"r{number}", {where: taken}, *sizes, speeds=known, resizes=Resizes(times=times)))
    jobs = [
        waits(f"w{n}", *data.draw(menu)) if data.draw(st.booleans()) else pending(f"w{n}", data.draw(st.integers(1, 8)))
        for n in range(data.draw(st.integers(0, 6)))
    ]
    snapshot = world(jobs, busy, nodes=3)
    plan = decide(snapshot)
    assert decide(snapshot) == plan
    kept, rejections = check(plan, snapshot)
    assert rejections == ()
    held = sum(len(p.gpus) for r in busy for p in r.allocation.parts)
    begun = sum(len(p.gpus) for a in kept.actions if isinstance(a, Start) for p in a.allocation.parts)
    assert held + begun <= 24
    before = {r.id: r.spec.gpus for r in busy if r.spec is not None}
    grown = sum(max(0, a.gpus - before[a.job_id]) for a in kept.actions if isinstance(a, Resize))
    assert held + begun + grown <= 24, "nobody grows into what another only lets go of"
    for action in kept.actions:
        if isinstance(action, Resize):
            sizes = next(r.spec.elastic.sizes for r in busy if r.id == action.job_id and r.spec and r.spec.elastic)
            assert action.gpus in sizes
