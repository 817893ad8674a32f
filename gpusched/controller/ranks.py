"""One rank of a job, with what its node says of it; what a step is given, and what it answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpusched.cluster.base import NodeObservation, Operation, RankKey
from gpusched.controller.launchfaults import Failures, Fault
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.model.resources import Settings
from gpusched.queue.store import NodeRecord, RankRecord


class ReconcileInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may know besides the job.

    Attributes:
        observations: News of this cycle by node; a node without any is not known better than before.
        dead: Nodes that have been down for so long that their jobs are given up.
        busy: Ranks with an operation under way.
        launch_errors: Launches that the node or we refused, with the reason.
        earlier: Nodes' records before this cycle, with their last readings.
        failed_launches: Of each node, those of late (see `launchfaults`).
    """

    now: float
    settings: Settings
    observations: Mapping[str, NodeObservation]
    dead: frozenset[str]
    busy: frozenset[RankKey]
    launch_errors: Mapping[RankKey, str] = {}
    earlier: Mapping[str, NodeRecord] = {}
    failed_launches: Failures = {}


class ReconcileResult(msgspec.Struct, kw_only=True):
    """What follows for one job.

    Attributes:
        job: Its new self.
        events: Facts to record.
        ranks: Rank records that changed, by rank.
        operations: Things to do on nodes.
        to_launch: Ranks whose launch has not arrived and is to be sent (again).
        launch_failed: (node, error, what it says by itself) where it could not be launched, not plainly by its own
            fault.
        began: The job as it began to run, where it did in this step; it may have ended in the same one.
        ended_attempt: (when, outcome) when the attempt is over and had begun to run.
        worked_until: Of one that was stopped to be resized, up to when what it did counts; None: to its end.
    """

    job: JobRecord
    events: list[Event] = msgspec.field(default_factory=list)
    ranks: dict[int, RankRecord] = msgspec.field(default_factory=dict)
    operations: list[Operation] = msgspec.field(default_factory=list)
    to_launch: list[RankRecord] = msgspec.field(default_factory=list)
    launch_failed: tuple[str, str, Fault] | None = None
    began: JobRecord | None = None
    ended_attempt: tuple[float, JobState] | None = None
    worked_until: float | None = None


class RankStatus(msgspec.Struct, frozen=True):
    """One rank with what its node says of it.

    ``phase`` is a `ContainerReading` phase, ``absent`` (the node answered after the launch and has nothing),
    ``unlaunched``, ``gone`` (ended, or its node is given up) or ``unknown``.
    """

    rank: RankRecord
    phase: str
    container: ContainerReading | None = None
    rebooted: bool = False


def rank_key(rank: RankRecord) -> RankKey:
    """The key operations are known by."""
    return rank.job_id, rank.attempt, rank.rank


def container_of(rank: RankRecord, reading: NodeReading) -> ContainerReading | None:
    """What a reading says of a rank's container."""
    name = container_name(rank.job_id, rank.attempt, rank.rank)
    return next((c for c in reading.containers or () if c.name == name), None)


def rank_status(rank: RankRecord, step: ReconcileResult, world: ReconcileInput) -> RankStatus:
    """What is known of a rank; what is new of it goes to the step."""
    if rank.gone:
        return RankStatus(rank, "gone")
    if error := world.launch_errors.get(rank_key(rank)):
        name = container_name(rank.job_id, rank.attempt, rank.rank)
        return RankStatus(rank, "failed", ContainerReading(name=name, phase="failed", error=error))
    observation = world.observations.get(rank.node)
    reading = observation.whole if observation is not None else None
    if reading is None:
        if rank.node in world.dead:
            return RankStatus(update(step, rank, gone=True), "gone")
        return RankStatus(rank, "unknown")
    container = container_of(rank, reading)
    if container is None:
        return RankStatus(rank, _absence(rank, observation, world))
    rebooted = rank.boot_id is not None and reading.boot_id is not None and rank.boot_id != reading.boot_id
    changes: dict[str, Any] = {}
    if rank.boot_id is None:
        changes["boot_id"] = reading.boot_id
    if rank.launched_at is None:
        changes["launched_at"] = reading.time
    if container.phase == "exited" and rank.finished_at is None:
        finished = _finished(rank, container, reading, world)
        changes |= {"exit_code": container.exit_code, "oom_killed": container.oom_killed, "finished_at": finished}
    return RankStatus(update(step, rank, **changes) if changes else rank, container.phase, container, rebooted)


def _finished(rank: RankRecord, container: ContainerReading, reading: NodeReading, world: ReconcileInput) -> float:
    """When a rank ended: by its node's clock, but not before it was last seen to run, for that clock may be set."""
    if container.finished_at is None:
        return world.now
    record = world.earlier.get(rank.node)
    last = record.reading if record is not None else None
    before = container_of(rank, last) if last is not None else None
    ran_until = last.time if last is not None and before is not None and before.phase == "running" else 0.0
    return min(max(container.finished_at - (reading.clock_skew_s or 0.0), ran_until), world.now)


def _absence(rank: RankRecord, observation: NodeObservation | None, world: ReconcileInput) -> str:
    assert observation is not None
    if rank_key(rank) in world.busy:
        return "unknown"  # the launch is on its way
    if rank.launched_at is None:
        return "unlaunched"
    return "absent" if observation.began > rank.launched_at else "unknown"


def update(step: ReconcileResult, rank: RankRecord, **changes: Any) -> RankRecord:
    """The record, as the step knows it by now, with these changes, which the step then names."""
    changed = step.ranks[rank.rank] = msgspec.structs.replace(step.ranks.get(rank.rank, rank), **changes)
    return changed


def is_idle(s: RankStatus, world: ReconcileInput) -> bool:
    """Whether no operation is under way for it."""
    return rank_key(s.rank) not in world.busy


def operation_on(
    verb: Literal["start", "signal", "remove"], s: RankStatus, signal: str | None = None, note: str | None = None
) -> Operation:
    """Something to do with a rank on its node."""
    return Operation(verb=verb, node=s.rank.node, rank=s.rank, signal=signal, note=note)
