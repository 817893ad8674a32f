"""Whole ranks that join and leave: where they are placed, and what the plan's check lets pass."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.model.jobs import NodeAllocation
from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.snapshot import RunningView
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from tests.sched.sizes import runs, waits, world
from tests.sched.worlds import NOW, pending, running

FOUR = (0, 1, 2, 3)
EIGHT = tuple(range(8))


def hot(name: str, where: dict[str, tuple[int, ...]], *sizes: int, **more: Any) -> RunningView:
    view = runs(name, where, *sizes, **more)
    assert view.spec is not None
    assert view.spec.elastic is not None
    elastic = msgspec.structs.replace(view.spec.elastic, rank_gpus=view.spec.gpus_per_node)
    return msgspec.structs.replace(view, spec=msgspec.structs.replace(view.spec, elastic=elastic))


def resizes(plan: Plan) -> list[tuple[str, int, list[str]]]:
    found = [action for action in plan.actions if isinstance(action, Resize)]
    return [(action.job_id, action.gpus, [part.node for part in action.joins]) for action in found]


def test_ranks_join_on_other_nodes_and_pass_the_check() -> None:
    busy = [hot("a", {"n0": FOUR}, 4, 8, 16)]
    snapshot = world([], busy, nodes=3)
    plan = decide(snapshot)
    assert resizes(plan) == [("a", 8, ["n1"])], "the free half of its own node is no use to it"
    kept, rejections = check(plan, snapshot)
    assert (kept.actions, rejections) == (plan.actions, ())


def test_it_does_not_grow_where_only_its_own_node_has_room() -> None:
    busy = [hot("a", {"n0": FOUR}, 4, 8), running("b", {"n1": EIGHT[:6]}, NOW + 7200)]
    assert resizes(decide(world([], busy))) == []


def test_starts_of_the_same_plan_get_their_place_first() -> None:
    busy = [hot("a", {"n0": EIGHT}, 8, 16)]
    snapshot = world([pending("w", 8)], busy)
    plan = decide(snapshot)
    assert [action.job_id for action in plan.actions if isinstance(action, Start)] == ["w"]
    assert resizes(plan) == []


def test_a_hot_job_shrinks_only_for_jobs_that_fit_on_its_last_ranks() -> None:
    busy = [hot("a", {"n0": EIGHT, "n1": EIGHT}, 8, 16)]
    snapshot = world([pending("w", 8)], busy)
    assert resizes(decide(snapshot)) == [("a", 8, [])]
    pinned = pending("w", 8)
    pinned = msgspec.structs.replace(pinned, spec=msgspec.structs.replace(pinned.spec, nodelist=("n0",)))
    assert resizes(decide(world([pinned], busy))) == [], "rank 0 stays on n0"


def test_a_pending_hot_job_starts_with_as_many_ranks_as_fit() -> None:
    asked = waits("w", 4, 8)
    assert asked.spec.elastic is not None
    spec = msgspec.structs.replace(asked.spec, elastic=msgspec.structs.replace(asked.spec.elastic, rank_gpus=4))
    snapshot = world([msgspec.structs.replace(asked, spec=spec)], [running("b", {"n1": EIGHT}, NOW + 7200)])
    (start,) = (action for action in decide(snapshot).actions if isinstance(action, Start))
    assert [part.gpus for part in start.allocation.parts] == [FOUR], "eight free GPUs on one node are one rank's"


def test_the_check_refuses_ranks_that_cannot_join() -> None:
    busy = [hot("a", {"n0": FOUR}, 4, 8), running("b", {"n1": (0,)}, NOW + 7200)]
    snapshot = world([], busy, nodes=3)

    def refused(gpus: int, *joins: tuple[str, tuple[int, ...]], cores: int = 4, memory_mib: int = 4096) -> str:
        parts = tuple(
            NodeAllocation(rank=1 + at, node=node, gpus=given, cores=cores, memory_mib=memory_mib)
            for at, (node, given) in enumerate(joins)
        )
        kept, rejections = check(Plan(actions=(Resize("a", gpus, joins=parts),)), snapshot)
        assert len(kept.actions) + len(rejections) == 1
        return rejections[0].why if rejections else ""

    assert refused(8, ("n2", FOUR)) == ""
    assert refused(8, ("n0", (4, 5, 6, 7))) == "it has a rank on node n0"
    assert refused(8, ("n1", FOUR)) == "GPU 0 of n1 is held by job b"
    assert refused(8, ("n2", (0, 1))) == "it requests 4 GPUs per node, the plan gives 2 on n2"
    assert refused(8) == "0 ranks do not bring it to 8 GPUs"
    assert refused(8, ("n1", FOUR), ("n2", FOUR)) == "2 ranks do not bring it to 8 GPUs"
