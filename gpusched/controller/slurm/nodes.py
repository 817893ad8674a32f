"""A node's record beside Slurm: Slurm decides whether it accepts jobs, its readings show its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.controller.nodestate import in_service, node_events, with_health, with_result
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord, container_name
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState, ProbeFailure
from gpusched.model.resources import Node, Settings
from gpusched.model.slurm import SlurmNode
from gpusched.queue.store import NodeRecord

_DOWN = {"DOWN", "ERROR"}
_UNKNOWN = {"UNKNOWN", "FUTURE", "INVAL", "INVALID_REG", "NOT_RESPONDING", "NO_RESPOND"}
_MAINTAINED = {"MAINT", "MAINTENANCE"}
_DRAIN = {"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "REBOOT_ISSUED", "REBOOT_REQUESTED", "REBOOT"}


def reading_beside_slurm(
    node: Node,
    observation: NodeObservation | None,
    record: NodeRecord,
    failing_s: float,
    settings: Settings,
    now: float,
) -> NodeObservation | None:
    """Return a node's observation; if it cannot be probed, one with the GPUs that Slurm has for it.

    Args:
        node: As declared.
        observation: Its answer; None: none yet.
        record: Before this cycle.
        failing_s: Seconds since its probes fail.
        settings: How long the last reading stays valid without an answer.
        now: Unix seconds.
    """
    last, result = record.reading, observation.result if observation is not None else None
    if isinstance(result, NodeReading) and result.source != "none" and (result.gpus or not node.gpus):
        return observation
    # No readable GPUs in this answer: a recent reading stays valid, otherwise Slurm's GPU count must do.
    was_read = last is not None and last.source != "slurm" and failing_s < settings.down_after_s
    if node.transport != "none" and was_read and not isinstance(result, NodeReading):
        return None
    if result is None and last is not None and node.transport != "none":
        return None  # wait for its answer
    reading = result if isinstance(result, NodeReading) else NodeReading(node=node.name, time=now)
    boot = reading.boot_id or (last.boot_id if last is not None else None)
    gpus = tuple(Gpu(index=index) for index in node.indices())
    reading = msgspec.structs.replace(
        reading, source="slurm", gpus=gpus, containers=reading.containers or (), boot_id=boot
    )
    return NodeObservation(began=now if observation is None else observation.began, result=reading)


def with_known_processes(
    reading: NodeReading,
    held: Mapping[int, tuple[str, ...]],
    before: Mapping[int, tuple[str, ...]],
    jobs: Mapping[str, JobRecord],
) -> NodeReading:
    """Return a reading in which processes of Slurm's jobs are attributed to them, so that they are not foreign.

    Args:
        reading: As the node gave it.
        held: GPU index -> jobs that hold it now.
        before: The same, at the last reading.
        jobs: The jobs named in either.
    """

    def known(gpu: int, process: GpuProcess) -> GpuProcess | None:
        for names, holds in ((held.get(gpu, ()), True), (before.get(gpu, ()), False)):
            for name in names:
                job = jobs[name]
                if process.user in (None, job.user):
                    # Processes of a job that has just ended do not block the GPU, which Slurm has released.
                    return msgspec.structs.replace(process, container=_name_of(job)) if holds else None
        return process

    gpus = []
    for gpu in reading.gpus:
        found = tuple(p for p in (known(gpu.index, process) for process in gpu.processes) if p is not None)
        gpus.append(msgspec.structs.replace(gpu, processes=found) if found != gpu.processes else gpu)
    return msgspec.structs.replace(reading, gpus=tuple(gpus))


def _name_of(job: JobRecord) -> str:
    return container_name(job.id, job.attempt, 0)


def record_beside_slurm(
    record: NodeRecord,
    node: Node,
    slurm_node: SlurmNode | None,
    reading: NodeObservation | None,
    held: Mapping[int, tuple[str, ...]],
    has_jobs: bool,
    is_reserved: bool,
    trouble: str,
    now: float,
) -> tuple[NodeRecord, list[Event]]:
    """Return the record after this cycle, and the events to record.

    Args:
        record: Before this cycle.
        node: As declared.
        slurm_node: Slurm's node; None: it has none of that name.
        reading: Of this cycle, or None.
        held: GPU index -> ids of its jobs.
        has_jobs: Whether any job holds resources of the node.
        is_reserved: Whether a reservation of others includes it now. Jobs then avoid it for that reason alone, also
            during maintenance: its end is known.
        trouble: Why its GPUs cannot be read, or "".
        now: Unix seconds.
    """
    before = record
    if reading is not None and not isinstance(reading.result, ProbeFailure):
        record = with_result(record, reading.result)
    drained = record.drain_reason, record.drained_by  # Slurm drains its nodes itself
    record, health_events = with_health(record, node, reading, held, now)
    record = msgspec.structs.replace(record, drain_reason=drained[0], drained_by=drained[1])
    health_events = [event for event in health_events if event.kind != "drained"]
    state, reason = _state(slurm_node, is_reserved, has_jobs) or in_service(record, node, held, has_jobs)
    if trouble:
        reason = f"{reason}; its GPUs are not probed: {trouble}" if reason else f"its GPUs are not probed: {trouble}"
    since = before.down_since if before.down_since is not None else now
    record = msgspec.structs.replace(
        record, state=state, reason=reason, declared=node, left=False,
        down_since=since if state is NodeState.DOWN else None, last_seen=record.last_seen or now,
    )  # fmt: skip
    return record, health_events + node_events(before, record, node, held, now)


def takes_jobs(slurm_node: SlurmNode | None) -> bool:
    """Return whether Slurm starts jobs on a node in its present state."""
    return _state(slurm_node, False, False) is None


def _state(slurm_node: SlurmNode | None, is_reserved: bool, has_jobs: bool) -> tuple[NodeState, str] | None:
    """Return the state of a node that accepts no jobs, and why; None: it accepts some."""
    if slurm_node is None:
        return NodeState.DOWN, "Slurm has no such node"
    states = {word.upper() for word in slurm_node.states}
    why = f"Slurm: {'+'.join(slurm_node.states)}{f', {slurm_node.reason}' if slurm_node.reason else ''}"
    if states & _DOWN:
        return NodeState.DOWN, why
    if states & _UNKNOWN:
        return NodeState.UNKNOWN, why
    if states & _DRAIN or (states & _MAINTAINED and not is_reserved):
        return (NodeState.DRAINING if has_jobs else NodeState.DRAINED), why
    return None
