"""From a probe's answer to a node's state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.nodestate import (
    is_dead,
    may_forget_leftovers,
    removed_record,
    update_record,
    with_health,
    with_removed,
)
from gpusched.model.health import HealthAction
from gpusched.model.readings import (
    Gpu,
    GpuWiring,
    KernelLog,
    Nic,
    NodeReading,
    NodeState,
    ProbeFailure,
    Wiring,
    XidMessage,
)
from gpusched.model.resources import Settings
from gpusched.queue.store import DRAINED_BY_HEALTH, SUSPENDED_BY, NodeRecord
from tests.controller.imagined import GPUS, inventory

NOW = 1_800_000_000.0
NODE = inventory().nodes[0]
SETTINGS = Settings(down_after_s=30, node_fail_after_s=60)


def reading(**changes: Any) -> NodeReading:
    gpus = tuple(Gpu(index=i, uuid=f"u{i}", name="x") for i in range(GPUS))
    return NodeReading(**{"node": "n0", "time": NOW, "source": "nvml", "gpus": gpus, "containers": ()} | changes)


def failure(kind: str = "timeout", at: float = NOW) -> ProbeFailure:
    return ProbeFailure(node="n0", time=at, kind=kind, reason="no answer", hint="look at it")  # type: ignore[arg-type]


def update(
    record: NodeRecord, result: NodeReading | ProbeFailure | None, now: float = NOW, has_jobs: bool = False,
    held: dict[int, tuple[str, ...]] | None = None,
) -> tuple[NodeRecord, list[str]]:  # fmt: skip
    observation = NodeObservation(began=now - 1, result=result) if result is not None else None
    changed, events = update_record(record, NODE, observation, held or {}, has_jobs, SETTINGS, now)
    return changed, [e.kind for e in events]


SEEN = NodeRecord(name="n0", state=NodeState.IDLE, last_seen=NOW - 5, reading=reading(time=NOW - 5))


def test_a_node_is_unknown_until_it_has_been_read() -> None:
    record, events = update(NodeRecord(name="n0"), None)
    assert (record.state, record.reason, events) == (NodeState.UNKNOWN, "not probed yet", [])
    record, _ = update(record, reading())
    assert record.state == NodeState.IDLE


def test_silence_is_unknown_then_down_then_up_by_itself() -> None:
    record, events = update(SEEN, failure())
    assert (record.state, events) == (NodeState.UNKNOWN, [])
    assert "no answer; look at it" in record.reason
    record, events = update(record, failure(at=NOW + 20), NOW + 20)
    assert record.state == NodeState.UNKNOWN
    record, events = update(record, failure(at=NOW + 31), NOW + 31)
    assert (record.state, record.reason, events) == (NodeState.DOWN, "no answer; look at it", ["node_down"])
    record, events = update(record, None, NOW + 35)
    assert (record.state, events) == (NodeState.DOWN, [])
    record, events = update(record, reading(time=NOW + 40), NOW + 40)
    assert (record.state, record.reason, record.down_since, events) == (NodeState.IDLE, "", None, ["node_up"])


@pytest.mark.parametrize("kind", ["auth", "host-key-unknown", "host-key-changed"])
def test_a_permanent_error_makes_a_node_down_at_once(kind: str) -> None:
    record, events = update(SEEN, failure(kind))
    assert (record.state, events) == (NodeState.DOWN, ["node_down"])


def test_a_runtime_that_does_not_answer_takes_the_node_down_but_its_figures_count() -> None:
    hung = reading(containers=None, runtime_error="podman: timed out after 10 s")
    record, events = update(SEEN, hung)
    assert (record.state, events) == (NodeState.DOWN, ["node_down"])
    assert record.reason == "podman does not respond: podman: timed out after 10 s"
    assert record.reading == hung


def test_states_of_a_node_in_use() -> None:
    some, whole = {0: ("j",)}, {i: ("j",) for i in range(GPUS)}
    assert update(SEEN, reading(), has_jobs=True, held=some)[0].state == NodeState.MIXED
    assert update(SEEN, reading(), has_jobs=True, held=whole)[0].state == NodeState.ALLOCATED
    drained = msgspec.structs.replace(SEEN, drain_reason="fan", drained_by="root")
    record, _ = update(drained, reading(), has_jobs=True)
    assert (record.state, record.reason) == (NodeState.DRAINING, "fan (by root)")
    assert update(drained, reading())[0].state == NodeState.DRAINED


def test_one_lost_gpu_is_an_event_once_and_the_node_stays() -> None:
    gpus = list(reading().gpus)
    gpus[2] = Gpu(index=2, error="GPU is lost")
    record, events = update(SEEN, reading(gpus=tuple(gpus)))
    assert (record.state, events) == (NodeState.IDLE, ["gpu_lost"])
    assert "GPU 2 LOST" in record.reason
    record, events = update(record, reading(time=NOW + 1, gpus=tuple(gpus)), NOW + 1)
    assert events == ["condition"]
    record, events = update(record, reading(time=NOW + 2), NOW + 2)
    assert events == ["gpu_back"]
    assert "GPU 2 UNUSABLE: GPU is lost" in record.reason  # it may go again at once
    record, events = update(record, reading(time=NOW + 11), NOW + 11)
    assert (record.reason, events) == ("", ["condition_over"])


@pytest.mark.parametrize(("by", "then"), [(SUSPENDED_BY, DRAINED_BY_HEALTH), ("root", "root")])
def test_a_fault_drains_a_node_that_is_suspended_meanwhile(by: str, then: str) -> None:
    node = msgspec.structs.replace(NODE, health={"ecc": HealthAction.DRAIN})
    gpus = (*reading().gpus[:3], Gpu(index=3, uuid="u3", name="x", ecc_errors=2))
    seen = NodeObservation(began=NOW - 1, result=reading(gpus=gpus))
    record, _ = with_health(msgspec.structs.replace(SEEN, drain_reason="x", drained_by=by), node, seen, {}, NOW)
    assert record.drained_by == then


@pytest.mark.parametrize("well", [{"ecc_errors": 2}, {"mig_mode": True}, {"memory_used_mib": 9000}])
def test_a_gpu_that_may_not_be_used_is_not_lost(well: dict[str, Any]) -> None:
    gpus = (*reading().gpus[:3], msgspec.structs.replace(reading().gpus[3], **well))
    record, events = update(SEEN, reading(gpus=gpus))
    assert events == (["condition"] if "ecc_errors" in well else [])
    assert "GPU 3" in record.reason


def test_dead_is_down_for_long_enough() -> None:
    record, _ = update(SEEN, failure())
    assert not is_dead(record, SETTINGS, NOW + 59)
    assert is_dead(record, SETTINGS, NOW + 60)
    assert not is_dead(record, SETTINGS, NOW - 1), "the clock was set back"
    assert not is_dead(SEEN, SETTINGS, NOW + 1000)
    assert not is_dead(None, SETTINGS, NOW)


def test_stuck_ranks_are_in_the_reason_of_the_node() -> None:
    observation = NodeObservation(began=NOW - 1, result=reading())
    record, _ = update_record(SEEN, NODE, observation, {}, False, SETTINGS, NOW, "GPU 1 not allocated: x")
    assert (record.state, record.reason) == (NodeState.IDLE, "GPU 1 not allocated: x")


def test_the_borders_of_silence_are_where_the_settings_say() -> None:
    silent = msgspec.structs.replace(SEEN, down_since=NOW)
    assert update(silent, failure(at=NOW + 29), NOW + 29)[0].reason == "not responding for 29 s: no answer; look at it"
    assert update(silent, failure(at=NOW + 30), NOW + 30)[0].state == NodeState.DOWN
    never = update(NodeRecord(name="n0"), failure())[0]
    assert (never.state, never.down_since) == (NodeState.DOWN, NOW), "never read: nothing to wait for"
    bare = msgspec.structs.replace(failure(), hint="")
    assert update(never, bare, NOW + 9)[0].reason == "no answer"
    assert update(never, bare, NOW + 9)[0].down_since == NOW, "silent since it was first missed"


def test_an_undeclared_node_is_forgotten_after_a_week() -> None:
    gone = removed_record(SEEN, NOW)
    assert (gone.state, gone.down_since, gone.left) == (NodeState.UNKNOWN, NOW, False)
    assert removed_record(gone, NOW + 9).down_since == NOW
    assert not may_forget_leftovers(gone, NOW + 604799)
    assert may_forget_leftovers(gone, NOW + 604800)
    assert not may_forget_leftovers(gone, NOW - 1), "the clock was set back"
    assert not may_forget_leftovers(SEEN, NOW + 1e9)


def test_faults_are_counted_and_all_held_gpus_make_a_node_full() -> None:
    gpus = list(reading().gpus)
    for i in (1, 3):
        gpus[i] = Gpu(index=i, error="GPU is lost")
    record, events = update(SEEN, reading(gpus=tuple(gpus)))
    assert events == ["gpu_lost", "gpu_lost"]
    assert record.reason.startswith("2 GPUs: GPU 1 LOST: ")
    assert record.reason.endswith(", ...")
    almost = {i: ("j",) for i in range(GPUS - 1)}
    assert update(SEEN, reading(), has_jobs=True, held=almost)[0].state == NodeState.MIXED
    cpu = msgspec.structs.replace(NODE, gpus=0)
    observation = NodeObservation(began=NOW - 1, result=reading(gpus=()))
    assert update_record(SEEN, cpu, observation, {}, True, SETTINGS, NOW)[0].state == NodeState.MIXED


def test_links_are_kept_where_a_reading_has_none() -> None:
    gpus = (Gpu(index=0, links={1: 5}), Gpu(index=1, links={}))
    seen, _ = update(SEEN, reading(gpus=gpus))
    assert seen.links == {0: {1: 5}}
    assert (seen.last_seen, update(seen, reading())[0].links) == (NOW, {0: {1: 5}})


def test_wiring_is_kept_where_a_reading_has_none() -> None:
    wiring = Wiring(nics=(Nic(name="mlx5_0", kind="infiniband"),))
    seen, _ = update(SEEN, reading(wiring=wiring))
    assert seen.wiring == update(seen, reading())[0].wiring == wiring
    assert seen.reading is not None
    assert seen.reading.wiring is None  # it is stored once
    assert update(seen, reading(wiring=Wiring()))[0].wiring == Wiring()


@pytest.mark.parametrize("is_wired", [True, False])
def test_a_message_about_a_gpu_that_is_not_listed_any_more_is_placed_by_its_wiring(is_wired: bool) -> None:
    wiring = Wiring(
        gpus=(
            GpuWiring(index=0),
            GpuWiring(index=1, pci_path=("pci0000:16", "0000:16:02.0", "0000:3b:00.1")),
            GpuWiring(index=2, pci_path=("0000:5e:00.0",)),
        )
    )
    seen, _ = update(SEEN, reading(wiring=wiring if is_wired else None))
    messages = tuple(XidMessage(at_us=9_000_000, number=79, bus=f"0000:{bus}:00") for bus in ("3b", "5e", "16"))
    record, _ = update(seen, reading(kernel=KernelLog(source="kernel", now_us=10_000_000, messages=messages)))
    assert sorted(c.index for c in record.health.conditions if c.index is not None) == ([1, 2] if is_wired else [])


def test_nodes_that_left_stand_apart_while_something_is_on_them() -> None:
    declared = msgspec.structs.replace(inventory(1), settings=SETTINGS)
    gone = [msgspec.structs.replace(NODE, name=name) for name in ("g1", "g0", "dead")]
    records = {n.name: NodeRecord(name=n.name, declared=n) for n in gone} | {"never": NodeRecord(name="never")}
    records["dead"] = msgspec.structs.replace(records["dead"], down_since=NOW - 60)
    whole = with_removed(declared, records, {"g1", "dead", "g0", "never", "nobody"}, NOW)
    assert [(p.name, [n.name for n in p.nodes], p.flavors) for p in whole.partitions[1:]] == [("", ["g0", "g1"], ())]
    assert whole.partitions[:1] == declared.partitions
    assert with_removed(declared, records, {"dead", "never"}, NOW) == declared
    assert with_removed(declared, records, {"dead"}, NOW - 1) != declared, "it is not given up yet"
    assert with_removed(declared, records, (), NOW) == declared


def test_state_and_reason_of_a_node_that_left_the_inventory() -> None:
    def said(
        record: NodeRecord, result: NodeReading | ProbeFailure, has_jobs: bool, stuck: str = ""
    ) -> tuple[str, str]:
        observation = NodeObservation(began=NOW - 1, result=result)
        found, _ = update_record(record, NODE, observation, {}, has_jobs, SETTINGS, NOW, stuck, left=True)
        again, _ = update_record(found, NODE, None, {}, has_jobs, SETTINGS, NOW, stuck, left=True)
        assert again.reason == found.reason
        return found.state, found.reason

    left = "no longer in inventory.yaml"
    assert said(SEEN, reading(), True) == ("DRAINING", f"{left}; its jobs keep running")
    assert said(SEEN, reading(), False) == ("DRAINING", f"{left}; it is being cleaned up")
    assert said(SEEN, reading(), False, "x is stuck") == ("DRAINING", f"{left}; it is being cleaned up; x is stuck")
    silent = msgspec.structs.replace(SEEN, down_since=NOW - 50)
    assert said(silent, failure(), True, "x is stuck") == ("DOWN", f"no answer; look at it; {left}")


def test_leaving_and_coming_back_are_events() -> None:
    observation = NodeObservation(began=NOW - 1, result=reading())
    left, events = update_record(SEEN, NODE, observation, {}, False, SETTINGS, NOW, left=True)
    assert (left.left, [e.kind for e in events]) == (True, ["left_inventory"])
    _, events = update_record(left, NODE, observation, {}, False, SETTINGS, NOW, left=True)
    assert events == []
    _, events = update_record(left, NODE, observation, {}, False, SETTINGS, NOW)
    assert [e.kind for e in events] == ["back_in_inventory"]
