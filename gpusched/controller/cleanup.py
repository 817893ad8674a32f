"""Cleans up nodes: leftovers of ended attempts, and strays without a record. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import msgspec

from gpusched.cluster.base import NodeObservation, Operation, RankKey, forgetting_key
from gpusched.controller.escalating import TRIES_BEFORE_REMOVING, is_due, is_exhausted, stuck_event
from gpusched.controller.ranks import container_of, rank_key
from gpusched.model.events import Event
from gpusched.model.jobs import container_name, parse_container_name
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Node
from gpusched.queue.store import RankRecord

_ALIVE = ("running", "preparing", "ready")


class Cleanup(msgspec.Struct, kw_only=True):
    """The result: operations, events, settled ranks (their rows can be deleted) and changed ones."""

    operations: list[Operation] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    settled: list[RankRecord] = msgspec.field(default_factory=list)
    changed: list[RankRecord] = msgspec.field(default_factory=list)


def clean_up_leftovers(
    ranks: Iterable[RankRecord],
    observations: Mapping[str, NodeObservation],
    forgotten: Container[str],
    busy: frozenset[RankKey],
    now: float,
) -> Cleanup:
    """Return the next step for ranks of ended attempts: kill what still runs, collect the output, remove the rest.

    ``forgotten``: nodes: their leftovers are no longer waited for; ``busy``: ranks with an operation in progress.
    """
    result = Cleanup()
    for rank in ranks:
        if rank.node in forgotten:
            result.settled.append(rank)
            continue
        observation = observations.get(rank.node)
        if observation is not None and (reading := observation.complete_reading) is not None:
            _leftover(rank, reading, observation, rank_key(rank) in busy, result, now)
    return result


def _leftover(
    rank: RankRecord, reading: NodeReading, observation: NodeObservation, busy: bool, result: Cleanup, now: float
) -> None:
    container = container_of(rank, reading)
    if busy:
        if rank.gone and rank.finished_at is None and container is not None and container.phase in _ALIVE:
            # Its GPUs are in use, even while another operation is in progress. A rank that was seen to end
            # still looks alive while it is removed (podman's state is `removing`, or its folder is half gone).
            result.changed.append(msgspec.structs.replace(rank, gone=False))
        return
    if container is None:
        if rank.launched_at is None or observation.began > rank.launched_at:
            result.settled.append(rank)
        return
    if container.phase in _ALIVE:
        _kill_leftover(rank, container.phase, result, now)
        return
    if rank.stuck or not rank.gone:
        rank = msgspec.structs.replace(rank, gone=True, stuck=False, tries=0, tried_at=None)
        result.changed.append(rank)
    if not rank.collected and container.phase != "failed":  # a launch that failed has no output
        result.operations.append(Operation(verb="collect", node=rank.node, rank=rank))
    elif is_due(rank, now):
        result.operations.append(Operation(verb="remove", node=rank.node, rank=rank))


def _kill_leftover(rank: RankRecord, phase: str, result: Cleanup, now: float) -> None:
    """Kill a rank that should have ended; report one that survives once, and keep trying."""
    if rank.signalled != "FENCE":
        data = {"attempt": rank.attempt, "rank": rank.rank, "phase": phase}
        result.events.append(Event(time=now, kind="fenced", job_id=rank.job_id, node=rank.node, data=data))
    stuck = is_exhausted(rank, now)
    if stuck:
        result.events.append(stuck_event(rank, now))
    if rank.signalled != "FENCE" or stuck or rank.gone:
        rank = msgspec.structs.replace(rank, signalled="FENCE", gone=False, stuck=rank.stuck or stuck)
        result.changed.append(rank)
    if is_due(rank, now):
        if phase == "running" and rank.tries < TRIES_BEFORE_REMOVING:
            operation = Operation(verb="signal", node=rank.node, rank=rank, signal="KILL")
        else:  # a container that has not started can only be removed
            operation = Operation(verb="remove", node=rank.node, rank=rank)
        result.operations.append(operation)


def remove_strays(
    nodes: Iterable[Node],
    known: frozenset[RankKey],
    removed: Mapping[RankKey, float],
    observations: Mapping[str, NodeObservation],
    cluster_id: str,
    busy: frozenset[RankKey],
    now: float,
    reported: set[RankKey],
) -> Cleanup:
    """Remove containers that have our label but no rank record: from a forgotten launch, or made by hand.

    Args:
        nodes: Declared, or removed with ranks remaining on them.
        known: Keys of all rank records.
        removed: Key -> when we removed it: a node probed before may still report it.
        observations: Of this cycle.
        cluster_id: Ours; containers of other installations are not touched.
        busy: Ranks with an operation in progress.
        now: Unix seconds.
        reported: Strays already reported by an event; new ones are added, none is dropped.
    """
    result = Cleanup()
    for node in nodes:
        observation = observations.get(node.name)
        if observation is None or not isinstance(observation.result, NodeReading):
            continue
        for container in observation.result.containers or ():
            key = parse_container_name(container.name)
            if key is None or key in known or key in busy or container.cluster_id not in (None, cluster_id):
                continue
            # The node was probed before the removal had ended.
            if removed.get(key, 0.0) >= observation.began:
                continue
            stray = RankRecord(
                job_id=key[0], attempt=key[1], rank=key[2], node=node.name, runtime=node.runtime, collected=True
            )
            if key not in reported:
                reported.add(key)
                data = {"container": container.name}
                result.events.append(Event(time=now, kind="reaped", job_id=key[0], node=node.name, data=data))
            result.operations.append(Operation(verb="remove", node=node.name, rank=stray))
    return result


def forget_jobs(
    nodes: Iterable[Node],
    observations: Mapping[str, NodeObservation],
    has_ended: Callable[[str], bool],
    busy: frozenset[RankKey],
) -> list[Operation]:
    """Return operations that remove the folders of ended jobs, on every node that has one.

    Args:
        nodes: Declared nodes.
        observations: Of this cycle.
        has_ended: Whether the job of this id will not be started again by itself.
        busy: Ranks with an operation in progress.
    """
    operations = []
    for node in nodes:
        observation = observations.get(node.name)
        reading = observation.complete_reading if observation else None
        for job_id in reading.job_folders if reading else ():
            key = parse_container_name(container_name(*forgetting_key(job_id)))  # None: that is no id
            if key is not None and key not in busy and has_ended(job_id):
                rank = RankRecord(
                    job_id=key[0], attempt=key[1], rank=key[2], node=node.name, runtime=node.runtime, collected=True
                )
                operations.append(Operation(verb="forget", node=node.name, rank=rank))
    return operations
