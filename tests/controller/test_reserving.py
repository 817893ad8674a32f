"""Reservations in the controller: permissions, refusals, and the jobs in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpusched.model.commands import CancelReservation, ChangeReservation, Reserve
from gpusched.model.jobs import JobState
from gpusched.model.limits import Group, Groups, Quotas
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import MAX_RESERVATIONS, Reservation
from gpusched.model.snapshot import Snapshot
from gpusched.queue.snapshots import snapshot_of_store
from tests.controller.applying import ADMIN, ALICE, BOB, ME, NOW, InboxWorld

H = 3600.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    world = InboxWorld(tmp_path)
    yield world
    world.store.close()


def wanted(name: str = "r", begin: float = H, end: float = 3 * H, **more: Any) -> Reservation:
    fields = {"nodes": ("n0",), "users": (str(ALICE),), **more}
    return Reservation(name=name, begin=NOW + begin, end=NOW + end, **fields)


def reserve(world: InboxWorld, one: Reservation, uid: int = ADMIN) -> str:
    return world.say(Reserve(time=NOW, reservation=one), uid)


def snapshot(world: InboxWorld, now: float = NOW + 10) -> Snapshot:
    policies = {p.name: PolicySpec(name="fifo") for p in world.inventory.partitions}
    return snapshot_of_store(world.store, world.inventory, policies, now)


def test_only_admins_reserve_change_and_cancel(world: InboxWorld) -> None:
    assert "is not an admin; only admins may reserve" in reserve(world, wanted(), ALICE)
    assert reserve(world, wanted()) == ""
    assert "not an admin" in world.say(ChangeReservation(time=NOW, name="r", end=NOW + 9 * H), ALICE)
    assert "not an admin" in world.say(CancelReservation(time=NOW, name="r"), ALICE)
    (one,) = world.store.reservations(NOW)
    assert (one.by, one.end) == (str(ADMIN), NOW + 3 * H), "who made it is not what the command says"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": ("n9",)}, "no node 'n9'"), ({"nodes": ()}, "needs nodes"), ({"nodes": ("n0", "n0")}, "each once"),
        ({"name": "a b"}, "one word"), ({"name": ""}, "one word"), ({"name": "x" * 65}, "one word"),
        ({"end": H}, "is not after"), ({"begin": -3 * H, "end": -H}, "is in the past"),
        ({"begin": 1e12, "end": 2e12}, "within ten years"), ({"end": 1e10}, "at most ten years"),
        ({"users": ()}, "needs users or groups"), ({"users": ("",)}, "a login name"), ({"groups": ("g",)}, "no group"),
        ({"users": ("u",) * 1001}, "at most 1000"), ({"reason": "a\nb"}, "one line"),
        ({"reason": "x" * 5000}, "5000"), ({"nodes": ("n0", "n1"), "begin": 0.0}, "already reserved (reservation old"),
        ({"name": "old"}, "there already"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(world: InboxWorld, changes: dict[str, Any], said: str) -> None:
    """Whatever the client let through: commands come from hostile users, too."""
    assert reserve(world, wanted("old", 0, 2 * H, nodes=("n1",))) == ""
    more = {"name": "r", "begin": H, "end": 3 * H} | changes
    why = reserve(world, wanted(**more))
    assert said in why or said in why.replace("reservation old already", "there already"), why
    assert "\n" not in why
    assert [one.name for one in world.store.reservations(NOW)] == ["old"]


def test_there_are_only_so_many(world: InboxWorld) -> None:
    with world.store.transaction():
        for i in range(MAX_RESERVATIONS):
            world.store.put_reservation(wanted(f"r{i}", 10 * i * H, (10 * i + 1) * H), NOW)
    assert "the maximum is" in reserve(world, wanted("more", -5, 500, nodes=("n1",)))


def test_a_change_is_checked_as_a_whole_and_the_past_stays(world: InboxWorld) -> None:
    assert reserve(world, wanted("a", 0, 2 * H)) == reserve(world, wanted("b", 2 * H, 4 * H)) == ""
    assert "already reserved (reservation b" in world.say(ChangeReservation(time=NOW, name="a", end=NOW + 3 * H), ADMIN)
    assert "has begun" in world.say(ChangeReservation(time=NOW, name="a", begin=NOW + H), ADMIN)
    assert world.say(ChangeReservation(time=NOW, name="a", end=NOW + H, reason="shorter"), ADMIN) == ""
    assert world.say(CancelReservation(time=NOW, name="a"), ADMIN) == ""
    assert world.say(CancelReservation(time=NOW, name="b"), ADMIN) == ""
    assert "no current reservation b" in world.say(CancelReservation(time=NOW, name="b"), ADMIN)
    assert world.store.reservations(world.now) == ()
    (past,) = world.store.reservations(0.0)
    assert (past.name, past.end) == ("a", world.now - 2)
    assert reserve(world, wanted("a", H, 2 * H)) == "", "a name may come again"
    kinds = [e.kind for e in world.store.events() if "reserv" in e.kind]
    assert kinds == ["reserved", "reserved", "reservation_changed", *["reservation_cancelled"] * 2, "reserved"]


def test_a_job_is_let_in_by_user_or_group_and_no_other_is(world: InboxWorld) -> None:
    groups = Groups(groups=(Group(name="lab"), Group(name="sub", parent="lab", members={str(BOB): 1})))
    world.inventory = msgspec.structs.replace(world.inventory, quotas=Quotas(groups=groups))
    assert reserve(world, wanted("mine", H, 1.5 * H)) == ""
    assert reserve(world, wanted("labs", nodes=("n1",), users=(), groups=("lab",))) == ""
    world.submit(ALICE, reservation="mine")
    world.submit(BOB, reservation="labs")
    for uid, name, said in (
        (BOB, "mine", "not for"), (ALICE, "labs", "is for lab, not for"), (ME, "none", "no current reservation none"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=said):
            world.submit(uid, reservation=name)
    with pytest.raises(AssertionError, match="less than its time limit of 1 h"):
        world.submit(ALICE, reservation="mine", time_limit_s=int(H))


def test_jobs_know_what_they_are_in_and_running_ones_what_ties_them(world: InboxWorld) -> None:
    """The snapshot that decisions are made from."""
    assert reserve(world, wanted("r", H, 3 * H)) == ""
    inside, runs, late = world.submit(ALICE, reservation="r"), world.submit(), world.submit(time_limit_s=int(H))
    world.put(runs, JobState.RUNNING)
    world.put(late, JobState.RUNNING)
    snap = snapshot(world)
    assert [len(node.reservations) for node in snap.nodes if node.name in ("n0", "n1")] == [1, 0]
    (view,) = snap.pending
    assert view.id == inside
    assert (view.reserved and view.reserved.name, view.unreserved) == ("r", "")
    tied = {view.id: view.tied for view in snap.running}
    assert tied[runs] == ""
    assert "its node is reserved (reservation r)" in tied[late]
    assert world.say(CancelReservation(time=NOW, name="r"), ADMIN) == ""
    (view,) = snapshot(world).pending
    assert "no current reservation r" in view.unreserved


def test_a_retry_may_go_to_the_only_node_of_its_reservation_again(world: InboxWorld) -> None:
    """Nodes where it failed are avoided only while enough others are left, and of others it has none."""
    assert reserve(world, wanted("r", -1, 3 * H)) == ""
    inside, outside = world.submit(ALICE, reservation="r"), world.submit()
    for job in (inside, outside):
        world.store.put_jobs([replace(world.job(job), excluded_nodes=("n0",))])
    assert {v.id: v.excluded_nodes for v in snapshot(world).pending} == {inside: (), outside: ("n0",)}
