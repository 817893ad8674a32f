"""Agents of several partitions: each is asked with what those before it leave of limits, arrays and links."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Plan, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.decide import decide
from gpusched.sched.turns import agents_to_ask, in_turn, partition_snapshot
from tests.sched.contention import beliefs
from tests.sched.limited import with_bounds
from tests.sched.rltune_decisions import RLTUNE, WILD
from tests.sched.worlds import NOW, node, pending, running, snapshot, started, topology

AGENT = replace(RLTUNE, place="contention")
MODELS = dict.fromkeys("pqrs", WILD[0])


def asked(snap: Snapshot) -> tuple[Plan, dict[str, Snapshot]]:
    """The plan, and the snapshot by which each partition's agent decided."""
    agents, seen = agents_to_ask(snap), dict[str, Snapshot]()

    def decided(name: str, left: Snapshot) -> Plan:
        seen[name] = left
        return decide(partition_snapshot(left, name, agents[name]), MODELS)

    return in_turn(snap, agents, decide, decided), seen


def two_partitions(*jobs: object, **more: object) -> Snapshot:
    """Partitions s, without an agent, p and q, each with a node in each of four racks."""
    nodes = [node(f"n{i}", partition="spq"[i // 4]) for i in range(12)]
    policies = {"s": PolicySpec(name="s"), "p": AGENT, "q": AGENT}
    return snapshot(nodes, list(jobs), topology=topology(*"abcd" * 3), policies=policies, **more)  # type: ignore[arg-type]


def test_starts_elsewhere_press_on_links_if_they_have_several_gpus() -> None:
    jobs = [pending("1", 4, 2, partition="s"), pending("2", 1, partition="p"), pending("3", 8, 2, partition="p")]
    snap = two_partitions(*jobs, pending("4", 8, 2, partition="q"), beliefs=beliefs(1.0, 1.0, 1.3, 1.0))
    plan, seen = asked(snap)
    assert started(plan).keys() == {"1", "2", "3", "4"}
    assert [[job.id for job in seen[name].running] for name in "pq"] == [["1"], ["1", "3"]]
    assert [part.node for job in seen["q"].running for part in job.allocation.parts] == [
        name for job in ("1", "3") for name, _ in started(plan)[job]
    ]
    assert plan == decide(snap, MODELS)
    blind = replace(snap, beliefs={})
    assert all(left is blind for left in asked(blind)[1].values())


@pytest.mark.parametrize("most", [2, 3])
def test_starts_elsewhere_take_of_limits(most: int) -> None:
    jobs = [pending(f"{name}{i}", 1, partition=name) for name in "spq" for i in range(2)]
    snap = with_bounds(two_partitions(*jobs), Quotas(each=Limits(jobs=most)), ())
    plan, seen = asked(snap)
    assert list(started(plan)) == ["s0", "s1", "p0"][:most]
    assert [[bound.used for bound in seen[name].bounds] for name in "pq"] == [[2], [most]]


def test_starts_elsewhere_take_of_an_array() -> None:
    jobs = [pending(f"{name}{i}", 1, partition=name, array_id="a", array_room=3) for name in "spq" for i in range(2)]
    plan, seen = asked(two_partitions(*jobs, pending("b", 1, partition="q", array_id="b", array_room=1)))
    assert list(started(plan)) == ["s0", "s1", "p0", "b"]
    assert [job.array_room for job in seen["q"].pending if job.spec.partition == "q"] == [0, 0, 1]
    assert all(isinstance(action, Start) for action in plan.actions)


def test_agents_are_asked_where_jobs_wait_and_where_running_ones_may_be_resized() -> None:
    busy = [
        replace(running(name, {f"n{4 * at}": (0,)}, NOW + 60), spec=pending(name, 1, partition=name).spec)
        for at, name in enumerate("spq")
    ]
    sizes = replace(AGENT, agent="dl2")
    for waits, kind, expected in (("", AGENT, ""), ("", sizes, "q"), ("p", AGENT, "p"), ("ps", sizes, "pq")):
        snap = two_partitions(*(pending(f"w{name}", 1, partition=name) for name in waits), busy=busy)
        snap = replace(snap, policies=snap.policies | {"q": kind})
        assert "".join(agents_to_ask(snap)) == expected
