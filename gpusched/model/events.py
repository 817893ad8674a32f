"""Events of jobs and nodes: every state change is one, kept forever, in order."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_meta = msgspec.Meta


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. ``kind`` names it; ``data`` is plain JSON.

    Job kinds: submitted, held, released, priority, starting, sharing, launched, running, preempted, ending, ended,
    requeued, recovered (after the store was lost), resizing, resized, rank_joined, rank_left (of a
    hot job), signalled, idle_warned, idle_acted, idle_ended (of its GPUs), refused (a command on
    it, with the reason), work_failed, fenced, stuck (of an attempt, with the node).
    Node kinds: node_up, node_down, drained, resumed, gpu_lost, gpu_back, condition, condition_over (of the node or a
    GPU), check_failed, check_hung, check_slow, check_passed, reaped, left_inventory, back_in_inventory,
    gpu_cutting (into slices, or whole again), gpu_cut, gpu_cut_failed.
    Kinds about reservations: reserved, reservation_changed, reservation_cancelled.
    Others: refused_command, controller_started, controller_took_over, controller_stopped, inventory_refused,
    inventory_reloaded, clock_stepped, backup_failed (the first of several), backup_succeeded (the first after it),
    store_recovered, plan_rejected, policy_changed, agent_disabled, agent_enabled, row_set_aside (it could not be
    read).
    """

    time: float
    kind: str
    job_id: str | None = None
    node: str | None = None
    user: str | None = None
    data: dict[str, Any] = {}


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event for a log pipeline, as one line of JSON."""

    seq: Annotated[int, _meta(description="Number of the event, ascending; a number seen before is a repetition.")]
    time: Annotated[str, _meta(description="UTC, ISO 8601 with milliseconds.")]
    unix_s: Annotated[float, _meta(description="The same in Unix seconds.")]
    cluster: Annotated[str, _meta(description="Id of the installation.")]
    kind: Annotated[str, _meta(description="What happened; see the list of kinds.")]
    job: Annotated[str | None, _meta(description="Job id, of several tasks of an array the array's; null: of no job.")]
    name: Annotated[str | None, _meta(description="Name of the job.")]
    user: Annotated[str | None, _meta(description="User of the job, or who acted.")]
    partition: Annotated[str | None, _meta(description="Partition of the job.")]
    node: Annotated[str | None, _meta(description="Node that it is about.")]
    data: Annotated[dict[str, Any], _meta(description="More, by kind: from, to, reason, attempt, exit_code, nodes ...")]
