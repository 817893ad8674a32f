"""Placements by components: those that are compiled, too, choose the same nodes; any of them is sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.config.plugins import ComponentError
from gpusched.errors import Warnings
from gpusched.model.plan import Plan, Start
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import Snapshot
from gpusched.sched.agent import why_broken
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.order import Columns
from gpusched.sched.placement import FittingNodes, NodeChooser
from gpusched.sched.state import PlacementRequest, Resources, ints, new_scratch, seed_words
from tests.plugin.building import registered
from tests.sched.reserved import with_reservations
from tests.sched.worlds import NOW, node, pending, running, snapshot, snapshots, started, topology

OURS = {"first-fit": "first_fit", "best-fit": "best_fit", "spread": "spread"}


@pytest.fixture(autouse=True, scope="module")
def _others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    points = {f"acme-{name}": f"gpusched.sched.placement:{function}" for name, function in OURS.items()}
    with registered(tmp_path_factory.mktemp("acme"), {"placements": points}):
        yield


def placed(snap: Snapshot, place: str, backfill: str) -> Plan:
    policies = {name: replace(p, place=place, backfill=backfill) for name, p in snap.policies.items()}
    return decide(replace(snap, policies=policies))


@given(
    snapshots(), st.sampled_from(sorted(OURS)), st.sampled_from(["none", "skip", "easy"]),
    st.sampled_from([None, (600.0, 4000.0), (-10.0, 2000.0)]),
)  # fmt: skip
def test_a_component_places_as_the_compiled_pass(
    snap: Snapshot, place: str, backfill: str, reserved: tuple[float, float] | None
) -> None:
    """Also what is kept for the head: jobs behind it start on the same nodes or do not start."""
    if reserved is not None:
        begin, end = NOW + reserved[0], NOW + reserved[1]
        snap = with_reservations(snap, Reservation(name="m", nodes=("n0",), begin=begin, end=end, maintenance=True))
    assert placed(snap, f"acme-{place}", backfill) == placed(snap, place, backfill)


@given(snapshots(racked=True), st.sampled_from(sorted(OURS)), st.sampled_from(["none", "skip", "easy"]))
def test_with_racks_every_answer_is_sound(snap: Snapshot, place: str, backfill: str) -> None:
    plan = placed(snap, f"acme-{place}", backfill)
    assert check(plan, snap) == (plan, ())
    rack = snap.topology
    spreads = {job.id: job.spec.max_spread for job in snap.pending}
    for start in (a for a in plan.actions if isinstance(a, Start)):
        if spreads[start.job_id] == "rack" and len(start.allocation.parts) > 1:
            racks = {next((s.name for s in rack.switches if p.node in s.nodes), p.node) for p in start.allocation.parts}
            assert len(racks) == 1


def test_a_job_for_one_rack_gets_the_rack_that_has_enough_nodes_first() -> None:
    """By what is free n0 is best, and has nobody beside it; of the racks with two nodes n3's comes first."""
    nodes = [node("n0", 2), node("n1"), node("n2"), node("n3", 3), node("n4", 4)]
    job = pending("j", 1, nodes=2)
    job = replace(job, spec=replace(job.spec, max_spread="rack"))
    snap = replace(snapshot(nodes, [job]), topology=topology("r0", "r1", "r1", "r2", "r2"))
    assert [where for where, _ in started(placed(snap, "acme-best-fit", "none"))["j"]] == ["n3", "n4"]


def test_nodes_reserved_for_the_head_are_chosen_by_the_placement() -> None:
    """Spread keeps the node that will be emptier; best-fit the other, where the long job is in its way."""
    busy = [
        running("r0", {"n0": (0, 1, 2, 3, 4)}, NOW + 100),
        running("r1", {"n1": (0, 1, 2, 3, 4, 5, 6, 7)}, NOW + 100),
    ]
    nodes = [node("n0"), node("n1", 9)]
    jobs = [pending("head", 7, submit=0), pending("long", 2, submit=1, limit=9000)]
    for place, free in (("best-fit", False), ("spread", True)):
        plans = [placed(snapshot(nodes, jobs, busy), name, "easy") for name in (place, f"acme-{place}")]
        assert plans[0] == plans[1]
        assert ("long" in started(plans[1])) is free


def fails(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    raise ValueError("no such column")


def of_one(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    return (nodes.rack[:0],)


def of_more(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    return (np.arange(len(nodes.rack) + 1),)


def of_words(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    return (np.array(["a"] * len(nodes.rack)),)  # type: ignore[return-value]


def not_a_number(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    return nodes.rack, np.full(len(nodes.rack), np.nan)


def last_rack_first(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """As lists; of the nodes as they are when empty those with fewest GPUs, then the type whose name comes last."""
    types = sorted(set(nodes.gpu_type.tolist()), reverse=True)
    return [(-nodes.rack).tolist(), nodes.total.gpus.tolist(), [types.index(t) for t in nodes.gpu_type]]  # type: ignore


def fewest_first(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    return nodes.total.gpus, np.array([1, 2, 4, 0, 3, 5])[: len(nodes.rack)]


ERRORS = {
    "fails": "ValueError: no such column",
    "of-one": "it did not return one number for each node",
    "of-more": "it did not return one number for each node",
    "of-words": "it did not return one number for each node",
    "not-a-number": "it did not return one number for each node",
    "not-there": "no placement 'bad-not-there' is installed here",
    "absent": "AttributeError",
}


@pytest.fixture
def _bad(tmp_path: Path) -> Iterator[None]:
    names = ("fails", "of_one", "of_more", "of_words", "not_a_number", "absent", "last_rack_first", "fewest_first")
    points = {f"bad-{name.replace('_', '-')}": f"{__name__}:{name}" for name in names}
    with registered(tmp_path, {"placements": points, "orders": {"bad-number": f"{__name__}:NUMBER"}}):
        yield


NUMBER = 7


@pytest.mark.usefixtures("_bad")
@pytest.mark.parametrize("name", ERRORS)
def test_a_placement_that_does_not_work_is_best_fit_live_and_ends_a_replay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Warnings, "show", lines.append)
    monkeypatch.setattr(Warnings, "given", set())
    snap = snapshot([node("a"), node("b", 4), node("c", 3), node("d", 3)], [pending("j", 2)])
    assert started(placed(snap, f"bad-{name}", "easy"))["j"] == [("c", (0, 1))]
    (line,) = lines
    assert ERRORS[name] in line
    assert line.endswith("; best-fit is used")

    def replay() -> Resources:
        free, scratch = Resources(ints([8, 4, 3]), ints([9, 9, 9]), ints([9, 9, 9])), new_scratch(3, 1)
        types = np.array(["", "", ""])
        chooser = NodeChooser(f"bad-{name}", free, types, seed_words(1), replays=True)
        chooser.choose(free, np.zeros((0, 3), np.uint8), PlacementRequest(0, 3, 1, 2, 1, 1, -1), scratch)
        return free

    with pytest.raises(ComponentError, match=ERRORS[name]):
        replay()


@pytest.mark.usefixtures("_bad")
def test_a_placement_is_told_racks_types_and_what_nodes_have_when_empty() -> None:
    types = ["A", "A", "B", "A", "B", "A"]
    nodes = [node(f"n{i}", gpus, gpu_type=types[i]) for i, gpus in enumerate((8, 8, 8, 8, 8, 9))]
    busy = [running("r", {"n4": (0, 1), "n1": (0,), "n5": (0, 1, 2)}, NOW + 60)]
    racks = topology("r0", "r0", "r0", "r1", "r1", "r1")
    snap = replace(snapshot(nodes, [pending("j", 1, nodes=5)], busy), topology=racks)
    bound = pending("j", 1, nodes=2)
    bound = replace(bound, spec=replace(bound.spec, max_spread="rack"))
    found = started(placed(replace(snap, pending=(bound,)), "bad-fewest-first", "none"))["j"]
    assert [name for name, _ in found] == ["n0", "n1"], "of the rack that has enough nodes first, only its own"
    assert [name for name, _ in started(placed(snap, "bad-last-rack-first", "none"))["j"]] == [
        "n4", "n3", "n5", "n2", "n0",
    ]  # fmt: skip


@pytest.mark.usefixtures("_bad")
def test_what_is_broken_is_one_line() -> None:
    for name, why in ERRORS.items():
        found = why_broken("placements", f"bad-{name}")
        assert (found is None) == (name not in ("not-there", "absent"))
        assert found is None or why in found
    assert "it cannot be called" in (why_broken("orders", "bad-number") or "")
    assert why_broken("orders", "fifo") is None
    assert why_broken("agents", "gist") is None
    assert "no agent 'none'" in (why_broken("agents", "none") or "")
