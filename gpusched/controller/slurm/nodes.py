"""A node's record beside Slurm: Slurm's word says whether it takes jobs, its readings what its GPUs do. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.controller.nodestate import in_service, node_events, with_news
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
    """The news of a node; where it is not to be asked, or cannot be, its GPUs are there as Slurm has them.

    Args:
        node: As declared.
        observation: What it answered; None: nothing yet.
        record: As it was.
        failing_s: Seconds since it was first asked in vain.
        settings: Silence is borne for so long that the last reading is still one.
        now: Unix seconds.
    """
    last, result = record.reading, observation.result if observation is not None else None
    if isinstance(result, NodeReading) and result.source != "none" and (result.gpus or not node.gpus):
        return observation
    was_read = last is not None and last.source != "slurm" and failing_s < settings.down_after_s
    if node.transport != "none" and was_read and not isinstance(result, NodeReading):
        return None
    if result is None and last is not None and node.transport != "none":
        return None  # its answer is still to come
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
    """A reading in which the processes of Slurm's jobs are no strangers: they bear the name of their job.

    Args:
        reading: As the node gave it.
        held: GPU index -> jobs that hold it now.
        before: The same, as it was at the last reading.
        jobs: Those that are named in either.
    """

    def known(gpu: int, process: GpuProcess) -> GpuProcess | None:
        for names, holds in ((held.get(gpu, ()), True), (before.get(gpu, ()), False)):
            for name in names:
                job = jobs[name]
                if process.user in (None, job.user):
                    # What is left for a moment of a job that has gone keeps nobody from the GPU: Slurm has given it up.
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
    told: SlurmNode | None,
    reading: NodeObservation | None,
    held: Mapping[int, tuple[str, ...]],
    has_jobs: bool,
    is_reserved: bool,
    trouble: str,
    now: float,
) -> tuple[NodeRecord, list[Event]]:
    """The record after this cycle, and the events worth keeping.

    Args:
        record: As it was.
        node: As declared.
        told: What Slurm says of it; None: it has no such node.
        reading: Its news; None: there are none.
        held: GPU index -> ids of its jobs.
        has_jobs: Whether any job holds something of the node.
        is_reserved: A reservation of others has it now. By that alone jobs keep clear of it, also for maintenance, of
            which it is known when it is over.
        trouble: Why its GPUs cannot be read, or "".
        now: Unix seconds.
    """
    before = record
    if reading is not None and not isinstance(reading.result, ProbeFailure):
        record = with_news(record, reading.result)
    state, reason = _state(told, is_reserved, has_jobs) or in_service(record, node, held, has_jobs)
    if trouble:
        reason = f"{reason}; its GPUs are not probed: {trouble}" if reason else f"its GPUs are not probed: {trouble}"
    since = before.down_since if before.down_since is not None else now
    record = msgspec.structs.replace(
        record, state=state, reason=reason, declared=node, left=False,
        down_since=since if state is NodeState.DOWN else None, last_seen=record.last_seen or now,
    )  # fmt: skip
    return record, node_events(before, record, node, held, now)


def takes_jobs(told: SlurmNode | None) -> bool:
    """Whether Slurm starts anything on a node as it is."""
    return _state(told, False, False) is None


def _state(told: SlurmNode | None, is_reserved: bool, has_jobs: bool) -> tuple[NodeState, str] | None:
    """The state in which a node takes no jobs, and why; None: it takes some."""
    if told is None:
        return NodeState.DOWN, "Slurm has no such node"
    words = {word.upper() for word in told.states}
    why = f"Slurm: {'+'.join(told.states)}{f', {told.reason}' if told.reason else ''}"
    if words & _DOWN:
        return NodeState.DOWN, why
    if words & _UNKNOWN:
        return NodeState.UNKNOWN, why
    if words & _DRAIN or (words & _MAINTAINED and not is_reserved):
        return (NodeState.DRAINING if has_jobs else NodeState.DRAINED), why
    return None
