"""Derives a node's record (IDLE, MIXED, DRAINED, DOWN and so on) and events from probes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.controller.health import observe_health
from gpusched.model.events import Event
from gpusched.model.gpustates import gpu_states
from gpusched.model.readings import GpuState, NodeReading, NodeState, ProbeFailure
from gpusched.model.resources import Inventory, Node, Partition, Settings
from gpusched.model.slices import MigSlice
from gpusched.queue.store import DRAINED_BY_HEALTH, NodeRecord

# These do not clear up by themselves; an admin must act.
_DEFINITE_FAILURES = frozenset({"auth", "host-key-unknown", "host-key-changed"})
LEFT = "no longer in inventory.yaml"
FORGET_LEFT_S = 7 * 86400.0


def with_removed(inventory: Inventory, records: Mapping[str, NodeRecord], left: Iterable[str], now: float) -> Inventory:
    """Return the inventory plus the removed nodes on which ranks remain, as they were last declared.

    An edit that drops a node must not end its jobs. Such nodes are in a partition that no job can name, so no job
    starts there. One that does not respond for ``node_fail_after`` is given up like any other.

    ``left``: names of nodes that the inventory does not have and on which ranks may remain.
    """
    known = [records[name] for name in sorted(left) if name in records]
    nodes = tuple(r.declared for r in known if r.declared is not None and not is_dead(r, inventory.settings, now))
    if not nodes:
        return inventory
    partitions = (*inventory.partitions, Partition(name="", nodes=nodes, flavors=()))
    return msgspec.structs.replace(inventory, partitions=partitions)


def usable_slices(reading: NodeReading | None) -> dict[int, MigSlice]:
    """Return number -> slice that a job can be given, by the node's last reading."""
    return {one.number: one for gpu in (reading.gpus if reading else ()) for one in gpu.slices if one.usable}


def removed_record(record: NodeRecord, now: float) -> NodeRecord:
    """Return the record of a node that is neither declared nor observed, down since it was first missed."""
    since = record.down_since if record.down_since is not None else now
    return msgspec.structs.replace(record, left=False, down_since=since, state=NodeState.UNKNOWN, reason=LEFT)


def may_forget_leftovers(record: NodeRecord, now: float) -> bool:
    """Return whether to stop waiting for leftovers on an undeclared node."""
    return record.down_since is not None and now - record.down_since >= FORGET_LEFT_S


def update_record(
    record: NodeRecord,
    node: Node,
    observation: NodeObservation | None,
    held: Mapping[int, tuple[str, ...]],
    has_jobs: bool,
    settings: Settings,
    now: float,
    stuck: str = "",
    left: bool = False,
    unfit: str = "",
) -> tuple[NodeRecord, list[Event]]:
    """Return the record after this cycle's observation, and the events to record.

    Args:
        record: Before this cycle.
        node: As declared; if ``left``, as last declared.
        observation: Of this cycle; None: the node has neither answered nor failed yet.
        held: GPU index -> ids of its jobs.
        has_jobs: Whether any job holds resources of the node.
        settings: For how long silence makes a node DOWN.
        now: Unix seconds.
        stuck: One sentence about ranks that cannot be killed there, or "".
        left: Whether the node is no longer in inventory.yaml.
        unfit: Why it must take no new jobs, or "".
    """
    before = record
    if observation is not None:
        record = with_result(record, observation.result)
    record, health_events = with_health(record, node, observation, held, now)
    state, reason = _state(record, node, observation, held, has_jobs, settings, now, unfit)
    # A removed node that answers is drained; one that does not keeps its state, with a remark.
    if left and record.down_since is None:
        state, reason = (
            NodeState.DRAINING,
            f"{LEFT}; {'its jobs keep running' if has_jobs else 'it is being cleaned up'}",
        )
    elif left and LEFT not in reason:
        reason = f"{reason}; {LEFT}"
    if stuck and record.down_since is None:
        reason = f"{reason}; {stuck}" if reason else stuck
    record = msgspec.structs.replace(record, state=state, reason=reason, declared=node, left=left)
    return record, health_events + node_events(before, record, node, held, now)


def with_drain(record: NodeRecord, reason: str, by: str, now: float) -> tuple[NodeRecord, Event]:
    """Return the record of a node that the controller itself drains, and the event."""
    event = Event(time=now, kind="drained", node=record.name, user=by, data={"reason": reason})
    return msgspec.structs.replace(record, drain_reason=reason, drained_by=by), event


def with_health(
    record: NodeRecord,
    node: Node,
    observation: NodeObservation | None,
    held: Mapping[int, tuple[str, ...]],
    now: float,
) -> tuple[NodeRecord, list[Event]]:
    """Return the record with the conditions after a reading, drained where one of them asks for it, and the events."""
    reading = observation.complete_reading if observation is not None else None
    if reading is None or reading.source not in ("nvml", "nvidia-smi"):
        return record, []
    change = observe_health(record.health, node, reading, held, now, lambda: _places(record))
    record = msgspec.structs.replace(record, health=change.health)
    if change.drain and record.may_be_drained:
        record, event = with_drain(record, change.drain, DRAINED_BY_HEALTH, now)
        change.events.append(event)
    return record, change.events


def _places(record: NodeRecord) -> dict[str, int]:
    """Return PCI address (without the function) -> GPU index, as last wired."""
    wiring = record.wiring
    gpus = wiring.gpus if wiring is not None else ()
    return {gpu.pci_path[-1].rpartition(".")[0]: gpu.index for gpu in gpus if gpu.pci_path}


def with_result(record: NodeRecord, result: NodeReading | ProbeFailure) -> NodeRecord:
    """Return the record with a probe's result; the state is not updated."""
    if isinstance(result, ProbeFailure) or result.containers is None:
        since = record.down_since if record.down_since is not None else result.time
        reading = record.reading if isinstance(result, ProbeFailure) else result
        return msgspec.structs.replace(record, down_since=since, reading=reading)
    links = {gpu.index: gpu.links for gpu in result.gpus if gpu.links} or record.links
    wired = msgspec.Raw(msgspec.json.encode(result.wiring)) if result.wiring is not None else record.wired
    result = msgspec.structs.replace(result, wiring=None, kernel=None)  # stored in `wired` and `health`
    return msgspec.structs.replace(
        record, down_since=None, last_seen=result.time, reading=result, links=links, wired=wired
    )


def _state(
    record: NodeRecord,
    node: Node,
    observation: NodeObservation | None,
    held: Mapping[int, tuple[str, ...]],
    has_jobs: bool,
    settings: Settings,
    now: float,
    unfit: str,
) -> tuple[NodeState, str]:
    if record.down_since is not None:
        return _state_when_down(record, node, observation, settings, now)
    if record.last_seen is None:
        return NodeState.UNKNOWN, "not probed yet"
    drained = NodeState.DRAINING if has_jobs else NodeState.DRAINED
    if record.drain_reason is not None:
        return drained, f"{record.drain_reason} (by {record.drained_by})"
    if unfit:
        return drained, unfit
    return in_service(record, node, held, has_jobs)


def in_service(
    record: NodeRecord, node: Node, held: Mapping[int, tuple[str, ...]], has_jobs: bool
) -> tuple[NodeState, str]:
    """Return the state of a node that accepts jobs, and the faults of its GPUs."""
    statuses = gpu_states(node, record.reading, held, record.health.conditions)
    faults = [f"GPU {s.index} {s.state}: {s.reason}" for s in statuses if s.state in _FAULTS]
    reason = faults[0] if len(faults) == 1 else f"{len(faults)} GPUs: {faults[0]}, ..." if faults else ""
    if not has_jobs:
        return NodeState.IDLE, reason
    whole = [s for s in statuses if not s.slices]
    full = node.gpus > 0 and all(s.index in held for s in (*whole, *(one for s in statuses for one in s.slices)))
    return (NodeState.ALLOCATED if full else NodeState.MIXED), reason


_FAULTS = (GpuState.LOST, GpuState.BUSY, GpuState.UNUSABLE, GpuState.UNKNOWN)


def _state_when_down(
    record: NodeRecord, node: Node, observation: NodeObservation | None, settings: Settings, now: float
) -> tuple[NodeState, str]:
    assert record.down_since is not None
    if observation is None:
        return record.state, record.reason
    result, down_s = observation.result, now - record.down_since
    if isinstance(result, NodeReading):
        return NodeState.DOWN, f"{node.runtime} does not respond: {result.runtime_error}"
    reason = f"{result.reason}; {result.hint}" if result.hint else result.reason
    if result.kind in _DEFINITE_FAILURES or down_s >= settings.down_after_s or record.last_seen is None:
        return NodeState.DOWN, reason
    return NodeState.UNKNOWN, f"not responding for {down_s:.0f} s: {reason}"


def node_events(
    before: NodeRecord, after: NodeRecord, node: Node, held: Mapping[int, tuple[str, ...]], now: float
) -> list[Event]:
    """Return the events for the change from one record to the next."""
    events = []
    if (after.state is NodeState.DOWN) != (before.state is NodeState.DOWN):
        kind = "node_down" if after.state is NodeState.DOWN else "node_up"
        events.append(Event(time=now, kind=kind, node=node.name, data={"reason": after.reason}))
    if after.left != before.left:
        kind = "left_inventory" if after.left else "back_in_inventory"
        events.append(Event(time=now, kind=kind, node=node.name))
    if before.reading is not None and after.reading is not None and after.reading is not before.reading:
        before_by_index = {s.index: s for s in gpu_states(node, before.reading, held)}
        for status in gpu_states(node, after.reading, held):
            lost = status.state is GpuState.LOST
            if lost != (before_by_index[status.index].state is GpuState.LOST):
                data = {"gpu": status.index, "reason": status.reason}
                events.append(Event(time=now, kind="gpu_lost" if lost else "gpu_back", node=node.name, data=data))
    return events


def without_gap(records: dict[str, NodeRecord], gap_s: float, settings: Settings) -> dict[str, NodeRecord]:
    """Return the records with at most half of ``node_fail_after`` counted of a time in which no controller ran.

    Else the first failed probe after a long stop, say of a login node whose network is not up yet, would give up the
    jobs of every node that had missed a probe before the stop. ``gap_s``: seconds since the last cycle.
    """
    excess_s = gap_s - settings.node_fail_after_s / 2
    if excess_s <= 0:
        return records
    return {
        name: record if record.down_since is None else msgspec.structs.replace(
            record, down_since=record.down_since + excess_s
        )
        for name, record in records.items()
    }  # fmt: skip


def is_dead(record: NodeRecord | None, settings: Settings, now: float) -> bool:
    """Return whether a node has been down so long that its jobs are given up."""
    return (
        record is not None and record.down_since is not None and now - record.down_since >= settings.node_fail_after_s
    )
