"""A rank of a job with its node's report; the input and result of a reconcile step. Pure."""

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
from gpusched.model.units import format_duration
from gpusched.queue.store import NodeRecord, RankRecord


class ReconcileInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a step, besides the job.

    Attributes:
        observations: Of this cycle, by node; nothing new is known of a node without one.
        dead: Nodes that have been down so long that their jobs are given up.
        busy: Ranks with an operation in progress.
        launch_errors: Reasons of launches that the node or we rejected.
        earlier: Node records before this cycle, with their last readings.
        failed_launches: Recent ones of each node (see `launchfaults`).
        checks: Node -> checks that must pass there before a job starts.
        failed_gpus: Node -> GPU index -> the condition because of which jobs on it end.
    """

    now: float
    settings: Settings
    observations: Mapping[str, NodeObservation]
    dead: frozenset[str]
    busy: frozenset[RankKey]
    launch_errors: Mapping[RankKey, str] = {}
    earlier: Mapping[str, NodeRecord] = {}
    failed_launches: Failures = {}
    checks: Mapping[str, tuple[str, ...]] = {}
    failed_gpus: Mapping[str, Mapping[int, str]] = {}


class ReconcileResult(msgspec.Struct, kw_only=True):
    """The result of a step for one job.

    Attributes:
        job: With its changes.
        events: To record.
        ranks: Changed rank records, by rank.
        operations: To perform on nodes.
        to_launch: Ranks whose launch has not arrived, to be launched (again).
        launch_failed: (node, error, suggested cause) of a failed launch that is not clearly the job's fault.
        began: The job as it started to run, if it did so in this step; it may have ended in the same step.
        ended_attempt: (time, outcome) of an attempt that ended after it had started to run.
        worked_until: The time up to which an attempt stopped for a resize counts; None: to its end.
        span_from: When a hot job's allocation changed, where a new part of its run begins; None: it did not.
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
    span_from: float | None = None


class RankStatus(msgspec.Struct, frozen=True):
    """A rank with its node's report.

    ``phase`` is a `ContainerReading` phase, ``absent`` (not on the node, which answered after the launch),
    ``unlaunched``, ``gone`` (ended, or its node is given up) or ``unknown``.
    """

    rank: RankRecord
    phase: str
    container: ContainerReading | None = None
    rebooted: bool = False


def rank_key(rank: RankRecord) -> RankKey:
    """Return the key of the rank's operations."""
    return rank.job_id, rank.attempt, rank.rank


def container_of(rank: RankRecord, reading: NodeReading) -> ContainerReading | None:
    """Return the rank's container in a reading."""
    name = container_name(rank.job_id, rank.attempt, rank.rank)
    return next((c for c in reading.containers or () if c.name == name), None)


def rank_status(rank: RankRecord, step: ReconcileResult, inputs: ReconcileInput) -> RankStatus:
    """Return a rank's status; its changes are added to ``step``."""
    if rank.gone:
        return RankStatus(rank, "gone")
    # A rejected launch has no container to read: its error stands in for one.
    if error := inputs.launch_errors.get(rank_key(rank)):
        name = container_name(rank.job_id, rank.attempt, rank.rank)
        return RankStatus(rank, "failed", ContainerReading(name=name, phase="failed", error=error))
    observation = inputs.observations.get(rank.node)
    reading = observation.complete_reading if observation is not None else None
    if reading is None:
        if rank.node in inputs.dead:
            return RankStatus(update(step, rank, gone=True), "gone")
        return RankStatus(rank, "unknown")
    container = container_of(rank, reading)
    if container is None:
        return RankStatus(rank, _absence(rank, observation, inputs))
    rebooted = rank.boot_id is not None and reading.boot_id is not None and rank.boot_id != reading.boot_id
    changes: dict[str, Any] = {}
    if rank.boot_id is None:
        changes["boot_id"] = reading.boot_id
    if rank.launched_at is None:
        changes["launched_at"] = reading.time
    if container.phase == "exited" and rank.finished_at is None:
        finished = _finished_at(rank, container, reading, inputs)
        changes |= {"exit_code": container.exit_code, "oom_killed": container.oom_killed, "finished_at": finished}
    return RankStatus(update(step, rank, **changes) if changes else rank, container.phase, container, rebooted)


def _finished_at(rank: RankRecord, container: ContainerReading, reading: NodeReading, inputs: ReconcileInput) -> float:
    """Return when a rank ended, by its node's clock, which may be set; at least when it was last seen running."""
    if container.finished_at is None:
        return inputs.now
    record = inputs.earlier.get(rank.node)
    last = record.reading if record is not None else None
    before = container_of(rank, last) if last is not None else None
    ran_until = last.time if last is not None and before is not None and before.phase == "running" else 0.0
    return min(max(container.finished_at - (reading.clock_skew_s or 0.0), ran_until), inputs.now)


def _absence(rank: RankRecord, observation: NodeObservation | None, inputs: ReconcileInput) -> str:
    assert observation is not None
    if rank_key(rank) in inputs.busy:
        return "unknown"  # the launch is on its way
    if rank.launched_at is None:
        return "unlaunched"
    return "absent" if observation.began > rank.launched_at else "unknown"


def launch_timeout(s: RankStatus, inputs: ReconcileInput) -> str:
    """Return why a launch in progress is given up; "": it is waited for.

    Its remains are removed before the job may start elsewhere.
    """
    limit_s, since = inputs.settings.launch_timeout_s, s.rank.launched_at
    if s.phase != "preparing" or since is None or inputs.now < since + limit_s:
        return ""
    return f"its container was not ready within {format_duration(limit_s)} (settings.launch_timeout)"


def update(step: ReconcileResult, rank: RankRecord, **changes: Any) -> RankRecord:
    """Change a rank's record in ``step``, and return it."""
    changed = step.ranks[rank.rank] = msgspec.structs.replace(step.ranks.get(rank.rank, rank), **changes)
    return changed


def is_idle(s: RankStatus, inputs: ReconcileInput) -> bool:
    """Return whether the rank has no operation in progress."""
    return rank_key(s.rank) not in inputs.busy


def operation_on(
    verb: Literal["start", "signal", "remove"],
    s: RankStatus,
    signal: str | None = None,
    note: str | None = None,
    for_idle: bool = False,
    for_warning: bool = False,
) -> Operation:
    """Return an operation on a rank."""
    return Operation(
        verb=verb, node=s.rank.node, rank=s.rank, signal=signal, note=note, for_idle=for_idle, for_warning=for_warning
    )
