"""Events of jobs and nodes: every state change is one, kept forever, in order."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. ``kind`` names it; ``data`` is plain JSON.

    Job kinds: submitted, held, released, priority, starting, sharing, launched, running, preempted, ending, ended,
    requeued, resizing, resized, rank_joined, rank_left (of a hot job), signalled, refused (a command on it, with the
    reason), work_failed, fenced, stuck (of an attempt, with the node).
    Node kinds: node_up, node_down, drained, resumed, gpu_lost, gpu_back, reaped, left_inventory, back_in_inventory,
    gpu_cutting (a GPU is being cut into slices or made whole), gpu_cut, gpu_cut_failed.
    Kinds about reservations: reserved, reservation_changed, reservation_cancelled.
    Others: refused_command, controller_started, controller_stopped, inventory_refused, inventory_reloaded,
    clock_stepped, plan_rejected, policy_changed, agent_disabled, agent_enabled, row_set_aside (it could
    not be read).
    """

    time: float
    kind: str
    job_id: str | None = None
    node: str | None = None
    user: str | None = None
    data: dict[str, Any] = {}
