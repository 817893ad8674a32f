"""A shadow is asked what it would do, and what is counted of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.controller.deciding import timeout_message
from gpusched.controller.shadowing import MAX_RECORDED, Shadowing
from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.plan import Plan, Preempt, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.queue.promotions import Shadow, ShadowDifference
from gpusched.queue.store import RunRecord, Store
from gpusched.sched.decide import decide
from tests.controller.imagined import inventory
from tests.sched.worlds import NOW, node, pending, running, snapshot

SKIPS = PolicySpec(name="skips", backfill="skip")


class ShadowWorld:
    """A store with a shadow policy in partition p."""

    def __init__(self, state: Path) -> None:
        self.store = Store.create_or_open(state)
        self.shadowing = Shadowing(self.store)
        self.put(SKIPS)

    def put(self, spec: PolicySpec, **more: Any) -> None:
        self.store.put_shadow(Shadow(**{"partition": "p", "spec": spec, "since": 0.0, "by": "ann"} | more))

    def ask(self, snap: Snapshot, *actions: Any) -> Shadow:
        self.shadowing.ask(inventory(), snap, Plan(actions=actions))
        return self.found()

    def found(self, partition: str = "p") -> Shadow:
        return self.store.shadows()[partition]

    def differences(self) -> list[ShadowDifference]:
        return self.store.differences("p")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ShadowWorld]:
    world = ShadowWorld(tmp_path)
    yield world
    world.store.close()


def start(job: str, *nodes: str, gpus: tuple[int, ...] = (0,)) -> Start:
    parts = [NodeAllocation(rank=i, node=n, gpus=gpus, cores=1, memory_mib=1) for i, n in enumerate(nodes)]
    return Start(job, Allocation(job, tuple(parts)))


def counts(shadow: Shadow) -> tuple[int, ...]:
    return shadow.decisions, shadow.same, shadow.live_starts, shadow.shadow_starts, shadow.late, shadow.unusable


BUSY = [running("r", {"a": tuple(range(6))}, NOW + 50)]
BLOCKED = snapshot([node("a")], [pending("large", 8), pending("small", 2, submit=1.0)], BUSY)


def test_it_is_held_against_what_was_done(world: ShadowWorld) -> None:
    assert counts(world.ask(BLOCKED)) == (1, 0, 0, 1, 0, 0)
    assert world.differences() == [ShadowDifference(partition="p", time=NOW, live={}, shadow={"small": ("a",)})]
    assert counts(world.ask(BLOCKED, *decide(replaced(BLOCKED)).actions)) == (2, 1, 1, 2, 0, 0)
    assert len(world.differences()) == 1, "of what is alike nothing is kept"
    assert counts(world.ask(BLOCKED, start("small", "b"))) == (3, 1, 2, 3, 0, 0)
    assert world.differences()[-1].live == {"small": ("b",)}
    assert world.differences()[-1].shadow == {"small": ("a",)}


def replaced(snap: Snapshot) -> Snapshot:
    return msgspec.structs.replace(snap, policies={"p": SKIPS})


def test_which_rank_is_where_makes_no_difference(world: ShadowWorld) -> None:
    gang = snapshot([node("a"), node("b")], [pending("j", 8, nodes=2)])
    assert counts(world.ask(gang, start("j", "b", "a"))) == (1, 1, 1, 1, 0, 0)


def test_preempted_jobs_count_but_not_as_starts(world: ShadowWorld) -> None:
    found = world.ask(BLOCKED, Preempt("r", "large"), start("small", "a"))
    assert counts(found) == (1, 0, 1, 1, 0, 0)
    assert world.differences()[0].live == {"r": ()}
    assert world.differences()[0].shadow == {}


def test_other_partitions_are_none_of_its_business(world: ShadowWorld) -> None:
    others = [pending("x", 1, partition="q"), pending("y", 1, partition="q")]
    busy = [*BUSY, running("s", {"q": (0,)}, NOW + 50)]
    snap = snapshot([node("a"), node("q", partition="q")], [*BLOCKED.pending, *others], busy)
    found = world.ask(snap, start("small", "a"), start("x", "q"), Preempt("s", "x"))
    assert counts(found) == (1, 1, 1, 1, 0, 0)
    quiet = msgspec.structs.replace(snap, pending=tuple(others))
    assert counts(world.ask(quiet)) == (1, 1, 1, 1, 0, 0), "it is not asked where nobody waits"


def test_a_disabled_shadow_is_not_evaluated(world: ShadowWorld) -> None:
    world.put(SKIPS, until=5.0, partition="p")
    assert counts(world.ask(BLOCKED)) == (0,) * 6
    world.put(SKIPS, partition="q")
    snap = snapshot([node("a"), node("q", partition="q")], [*BLOCKED.pending, pending("x", 1, partition="q")], BUSY)
    world.ask(snap)
    assert (counts(world.found()), counts(world.found("q"))) == ((0,) * 6, (1, 0, 0, 1, 0, 0))


def test_of_a_large_difference_the_first_fifty_are_named(world: ShadowWorld) -> None:
    jobs = [pending(f"j{i:02d}", 0, submit=float(i), cores_per_node=1) for i in range(60)]
    assert world.ask(snapshot([node("a")], jobs)).shadow_starts == 60
    assert list(world.differences()[0].shadow) == [f"j{i:02d}" for i in range(50)]
    assert MAX_RECORDED == 50


def test_an_agent_that_cannot_answer_is_counted_apart(world: ShadowWorld, tmp_path: Path) -> None:
    agent = PolicySpec(name="gist", agent="gist", folder=str(tmp_path / "gone"), budget_s=0.25)
    world.put(agent, decisions=7)
    found = world.ask(BLOCKED)
    assert (counts(found), bool(found.trouble)) == ((7, 0, 0, 0, 0, 1), True)

    class Thinks:
        is_running = True

    world.put(msgspec.structs.replace(SKIPS, budget_s=0.25), trouble="old")
    world.shadowing._decisions["p"] = Thinks()  # type: ignore[assignment]
    found = world.ask(BLOCKED)
    assert (counts(found), found.trouble) == ((0, 0, 0, 0, 1, 0), "no answer within its time budget of 250 ms")
    del world.shadowing._decisions["p"]
    assert world.ask(BLOCKED).trouble == "", "it answers again"


def test_budgets_in_words() -> None:
    assert timeout_message(0.5) == "no answer within its time budget of 500 ms"
    assert timeout_message(1.0) == "no answer within its time budget of 1 s"
    assert timeout_message(2.5) == "no answer within its time budget of 2.5 s"


def test_it_sees_recent_use_though_no_live_policy_asks_for_it(world: ShadowWorld) -> None:
    run = RunRecord(
        job_id="old", attempt=1, user="alice", partition="p", flavor=None, share=1, gpus=8, start_time=NOW - 900,
        end_time=None, outcome=None, nodes={},
    )  # fmt: skip
    world.store.open_run(run)
    world.put(PolicySpec(name="fair", order="fairshare"))
    jobs = [pending("j", 2, user="alice"), pending("i", 2, submit=1.0, user="bob")]
    busy = [running("r", {"a": tuple(range(6))}, NOW + 50, user="carol")]
    world.ask(snapshot([node("a")], jobs, busy))
    assert world.differences()[0].shadow == {"i": ("a",)}
    world.ask(msgspec.structs.replace(snapshot([node("a")], jobs, busy), usage={"bob": 100.0}))
    assert world.differences()[1].shadow == {"j": ("a",)}, "what is known is not asked for again"
