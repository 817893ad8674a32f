"""What is on the nodes and should not be: leftovers of ended attempts, and strays nobody knows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import msgspec

from gpusched.cluster.base import NodeObservation, Operation, RankKey
from gpusched.controller.escalating import TRIES_BEFORE_REMOVING, gives_up, is_due, stuck_event
from gpusched.controller.ranks import container_of, rank_key
from gpusched.model.events import Event
from gpusched.model.jobs import container_name, parse_container_name
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Node
from gpusched.queue.store import RankRecord

_ALIVE = ("running", "preparing", "ready")


class Tidy(msgspec.Struct, kw_only=True):
    """What follows: things to do, facts, ranks that are settled (their row can go) or changed."""

    operations: list[Operation] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    settled: list[RankRecord] = msgspec.field(default_factory=list)
    changed: list[RankRecord] = msgspec.field(default_factory=list)


def tidy_leftovers(
    ranks: Iterable[RankRecord],
    observations: Mapping[str, NodeObservation],
    forgotten: Container[str],
    busy: frozenset[RankKey],
    now: float,
) -> Tidy:
    """The next step for ranks whose attempt is over: fence what still runs, bring the output home, remove the rest.

    ``forgotten``: nodes whose leftovers nobody waits for any longer; ``busy``: ranks with an operation under way.
    """
    tidy = Tidy()
    for rank in ranks:
        if rank.node in forgotten:
            tidy.settled.append(rank)
            continue
        observation = observations.get(rank.node)
        if observation is not None and (reading := observation.whole) is not None:
            _leftover(rank, reading, observation, rank_key(rank) in busy, tidy, now)
    return tidy


def _leftover(
    rank: RankRecord, reading: NodeReading, observation: NodeObservation, busy: bool, tidy: Tidy, now: float
) -> None:
    container = container_of(rank, reading)
    if busy:
        if rank.gone and rank.finished_at is None and container is not None and container.phase in _ALIVE:
            # Its GPUs are not free, whether or not we can do something about it already. One that was seen to end
            # looks alive while it is being removed (podman's state is then `removing`, or its folder is half gone).
            tidy.changed.append(msgspec.structs.replace(rank, gone=False))
        return
    if container is None:
        if rank.launched_at is None or observation.began > rank.launched_at:
            tidy.settled.append(rank)
        return
    if container.phase in _ALIVE:
        _fence(rank, container.phase, tidy, now)
        return
    if rank.stuck or not rank.gone:
        rank = msgspec.structs.replace(rank, gone=True, stuck=False, tries=0, tried_at=None)
        tidy.changed.append(rank)
    if not rank.collected and container.phase != "failed":  # what was never started has no output
        tidy.operations.append(Operation(verb="collect", node=rank.node, rank=rank))
    elif is_due(rank, now):
        tidy.operations.append(Operation(verb="remove", node=rank.node, rank=rank))


def _fence(rank: RankRecord, phase: str, tidy: Tidy, now: float) -> None:
    """End what should have ended; one that resists is told of once, and tried again from time to time."""
    if rank.signalled != "FENCE":
        data = {"attempt": rank.attempt, "rank": rank.rank, "phase": phase}
        tidy.events.append(Event(time=now, kind="fenced", job_id=rank.job_id, node=rank.node, data=data))
    stuck = gives_up(rank, now)
    if stuck:
        tidy.events.append(stuck_event(rank, now))
    if rank.signalled != "FENCE" or stuck or rank.gone:
        rank = msgspec.structs.replace(rank, signalled="FENCE", gone=False, stuck=rank.stuck or stuck)
        tidy.changed.append(rank)
    if is_due(rank, now):
        if phase == "running" and rank.tries < TRIES_BEFORE_REMOVING:
            operation = Operation(verb="signal", node=rank.node, rank=rank, signal="KILL")
        else:  # what has not begun can only be removed: a kill does not end it
            operation = Operation(verb="remove", node=rank.node, rank=rank)
        tidy.operations.append(operation)


def reap_strays(
    nodes: Iterable[Node],
    known: frozenset[RankKey],
    removed: Mapping[RankKey, float],
    observations: Mapping[str, NodeObservation],
    cluster_id: str,
    busy: frozenset[RankKey],
    now: float,
    told: set[RankKey],
) -> Tidy:
    """Containers that carry our label and that no rank record stands for: made by a launch we forgot, or by hand.

    Args:
        nodes: Declared, or left with something of ours on them.
        known: Keys of all rank records.
        removed: Key -> when we removed it: a node asked before that may still speak of it.
        observations: News of this cycle.
        cluster_id: Ours; another installation's containers are not touched.
        busy: Ranks with an operation under way.
        now: Unix seconds.
        told: Strays that an event has told of; new ones are added, those not seen any more are not forgotten.
    """
    tidy = Tidy()
    for node in nodes:
        observation = observations.get(node.name)
        if observation is None or not isinstance(observation.result, NodeReading):
            continue
        for container in observation.result.containers or ():
            key = parse_container_name(container.name)
            if key is None or key in known or key in busy or container.cluster_id not in (None, cluster_id):
                continue
            if removed.get(key, 0.0) >= observation.began:
                continue
            stray = RankRecord(
                job_id=key[0], attempt=key[1], rank=key[2], node=node.name, runtime=node.runtime, collected=True
            )
            if key not in told:
                told.add(key)
                data = {"container": container.name}
                tidy.events.append(Event(time=now, kind="reaped", job_id=key[0], node=node.name, data=data))
            tidy.operations.append(Operation(verb="remove", node=node.name, rank=stray))
    return tidy


def forget_jobs(
    nodes: Iterable[Node],
    observations: Mapping[str, NodeObservation],
    is_over: Callable[[str], bool],
    busy: frozenset[RankKey],
) -> list[Operation]:
    """Remove the own folders of jobs that have ended, on every node that has one.

    Args:
        nodes: Declared nodes.
        observations: News of this cycle.
        is_over: Whether the job of this id will not be started again by itself.
        busy: Ranks with an operation under way.
    """
    operations = []
    for node in nodes:
        observation = observations.get(node.name)
        reading = observation.whole if observation else None
        for job_id in reading.job_folders if reading else ():
            key = parse_container_name(container_name(job_id, 0, 0))
            if key is not None and key not in busy and is_over(job_id):
                rank = RankRecord(
                    job_id=job_id, attempt=0, rank=0, node=node.name, runtime=node.runtime, collected=True
                )
                operations.append(Operation(verb="forget", node=node.name, rank=rank))
    return operations
