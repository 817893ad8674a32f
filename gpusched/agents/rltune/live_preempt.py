"""The RLTune agent that stops running jobs, live: the ranks and the sharing out of a replay, on a snapshot.

What has ended, runs and waits is counted anew at every decision. What a job ran before it was stopped counts as run:
only jobs that save their work may be stopped. What it ran before its node failed does not.

Nodes of a stopped job are free once it is gone, so whom it was stopped for starts some cycles later. Until then the
sharing out keeps them for it: what is being stopped counts as nobody's among all nodes, and not as free.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.history import history_of
from gpusched.agents.rltune.known import facts_of_snapshot
from gpusched.agents.rltune.preempt import PreemptionModel, ranks_of
from gpusched.compiled import jit
from gpusched.estimation.odds import History, note_passed
from gpusched.model.ids import id_key
from gpusched.model.jobs import JobState
from gpusched.model.plan import Preempt, Reason, ReasonCode
from gpusched.model.snapshot import FinishedView, PendingView, RunningView
from gpusched.sched.agent import Context
from gpusched.sched.arrays import NodeArrays, PendingArrays, waiting_of
from gpusched.sched.backfill import take
from gpusched.sched.eligible import may_stop
from gpusched.sched.fit import request_of, set_feasibility
from gpusched.sched.kernel.preempting import GIVEN, PreemptiveAllocation, preempting_pass, steady_rule
from gpusched.sched.kernel.queue_pass import KEPT
from gpusched.sched.place import node_fits
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.reclaim import Holders, hold, new_holders
from gpusched.sched.state import (
    BEST_FIT,
    PLACES,
    RESOURCES,
    SKIP,
    STARTED,
    ClusterState,
    Floats,
    Ints,
    PlacementRequest,
    Resources,
    copied,
    ints,
    new_outcome,
    new_releases,
    new_scratch,
)
from gpusched.sched.text import listed

LINGERS_S = 60.0  # a job that is being ended for so long after its kill may stay for ever: its nodes are not promised


class Field(NamedTuple):
    """One partition's jobs as the pass takes them: those that wait, then those that may be stopped.

    Attributes:
        jobs: As `PendingArrays` has them; ``waits`` of them wait.
        stoppable, leaving: What may be stopped; what is being ended and gives its nodes back.
        held: ``int64[parts]``: nodes of job j from ``first[j]`` on; -1: it waits.
    """

    waiting: PendingArrays
    waits: int
    stoppable: list[RunningView]
    leaving: list[RunningView]
    held: Ints
    first: Ints


def decide_queue(prepared: PreemptionModel, context: Context) -> tuple[list[int], QueueBlock]:
    """One partition's decision: by operators' priority first, then by rank. What is to be stopped: `Context.stops`."""
    world, policy = context.world, context.policy
    field = _field(context)
    order = _order(prepared, context, field)
    runs = (np.arange(len(order)) >= field.waits).astype(np.uint8)
    shapes, calendar = field.waiting.jobs.feasibility.size, field.waiting.calendar
    scratch = new_scratch(len(world.nodes), shapes, world.rack, calendar)
    jobs, requests, count, parts = field.waiting.jobs, field.waiting.requests, len(order), field.waiting.parts
    set_feasibility(world.total, world.usable, jobs.masks, requests, scratch, jobs.feasibility)
    holders, whole = _holders(world, field, order), _with_running(world, field)
    rule, at = steady_rule(PLACES.get(policy.place, BEST_FIT)), len(holders.first) - len(field.stoppable)
    shares = PreemptiveAllocation(
        whole, copied(world.resources), world.usable, runs, field.first, field.held, holders,
        ints([at, len(holders.first)]), rule, np.zeros(count, np.int64), np.zeros(parts, np.int64),
        np.full(count, -1, np.int64), np.zeros(2, np.int64), np.zeros(count, np.uint8),
    )  # fmt: skip
    outcome = new_outcome(count, 0)
    state = ClusterState(world.resources, new_releases(0), requests, jobs, scratch, outcome, context.snapshot.now)
    preempting_pass(state, order, SKIP, shares)
    start_what_fits(state, shares)
    own = context.waiting.queues[context.partition]
    _note_starts(context, own, order, field, outcome.code, shares)
    stops = _stops(field, order, outcome.code, shares)
    context.stops.extend(stops)
    _say_who_clears(context, field, outcome.code, shares, {stop.job_id for stop in stops})
    queue = [own[j] for j in order.tolist() if j < field.waits]
    head = next((j for j in queue if context.outcome.code[j] != STARTED), -1)
    return queue, QueueBlock(policy, head, float("inf"))


def had_s(view: PendingView | RunningView | FinishedView, restart_s: float, now: float) -> float:
    """Seconds that a job has run, restarts left out."""
    kept = view.preemptions.had_s(restart_s) if view.preemptions is not None else 0.0
    if isinstance(view, PendingView):
        return kept
    overhead = restart_s if view.attempt > 1 else 0.0
    if isinstance(view, FinishedView):
        return kept + max(0.0, view.ran_s - overhead)
    begun = view.state is not JobState.STARTING
    return kept + (max(0.0, now - view.start_time - overhead) if begun else 0.0)


def _field(context: Context) -> Field:
    """Waiting jobs of the partition, and those of its running ones that may be stopped or are being ended."""
    world, snapshot = context.world, context.snapshot
    lo, hi = world.span.get(context.partition, (0, 0))
    own = [context.waiting.views[j] for j in context.waiting.queues[context.partition]]
    stoppable: list[RunningView] = []
    leaving: list[RunningView] = []
    for job in snapshot.running:
        rows = [world.row.get(part.node, -1) for part in job.allocation.parts]
        if not rows or not all(lo <= row < hi for row in rows):
            continue
        if job.state is JobState.COMPLETING:
            if snapshot.now <= job.expected_end + LINGERS_S:
                leaving.append(job)
        elif may_stop(job, context.policy.preempt, snapshot.now) is None and _is_whole(world, job):
            stoppable.append(job)
    views = [*own, *map(_as_waiting, stoppable)]
    first = np.full(len(views), -1, np.int64)
    held: list[int] = []
    for k, job in enumerate(stoppable):
        first[len(own) + k] = len(held)
        held += [world.row[part.node] for part in job.allocation.parts]
    waiting, all_jobs = waiting_of(views, world, {}), context.waiting.jobs
    account = waiting.jobs.account  # what runs is counted already; what waits counts as for everybody else
    account[: len(own)], account[len(own) :, 0] = all_jobs.account[context.waiting.queues[context.partition]], -1
    jobs = waiting.jobs._replace(room=all_jobs.room, links=all_jobs.links)
    return Field(
        waiting._replace(jobs=jobs), len(own), stoppable, leaving, np.array([*held, -1], np.int64), first
    )  # fmt: skip


def _is_whole(world: NodeArrays, job: RunningView) -> bool:
    """Whether a job has what its request says, and would give all of it back: else it is left alone."""
    assert job.spec is not None
    asked = (job.spec.gpus_per_node, job.spec.cores_per_node, job.spec.memory_mib_per_node)
    return job.spec.nodes == len(job.allocation.parts) and all(
        (len(part.gpus), part.cores, part.memory_mib) == asked
        and not any(gpu in world.nodes[world.row[part.node]].blocked for gpu in part.gpus)
        for part in job.allocation.parts
    )


def _as_waiting(job: RunningView) -> PendingView:
    assert job.spec is not None
    submit = job.start_time if job.submit_time is None else job.submit_time
    return PendingView(
        id=job.id, user=job.user, spec=job.spec, submit_time=submit, priority=job.priority, preemptions=job.preemptions
    )


def _order(prepared: PreemptionModel, context: Context, field: Field) -> Ints:
    """The field's jobs from first to last, ``int64[jobs]``; of equals first who runs, then by (submit, id)."""
    snapshot, restart_s = context.snapshot, context.policy.preempt.restart_s
    facts = facts_of_snapshot(context, prepared.knows)
    views: list[PendingView | RunningView | FinishedView] = [
        *context.waiting.views, *snapshot.running, *snapshot.finished
    ]  # fmt: skip
    had = np.array([had_s(view, restart_s, snapshot.now) for view in views], np.float64)
    history = history_of(facts)
    ended = len(views) - len(snapshot.finished)
    _count(history, had, ended)
    place = {job.id: i for i, job in enumerate(snapshot.running, start=len(context.waiting.views))}
    rows = [*context.waiting.queues[context.partition], *(place[job.id] for job in field.stoppable)]
    jobs, runs = np.array(rows, np.int64), (np.arange(len(rows)) >= field.waits).astype(np.uint8)
    submitted = [(view.submit_time, id_key(view.id)) for view in field.waiting.views]
    by_submit = np.array(sorted(range(len(rows)), key=submitted.__getitem__), np.int64)
    ranks, tie, sorted_jobs = np.empty(len(rows)), np.empty(len(rows), np.int64), jobs[by_submit]
    ranks[by_submit] = ranks_of(history, prepared.ranking, facts, sorted_jobs, had[sorted_jobs], runs[by_submit])
    tie[by_submit] = np.arange(len(rows))
    return np.lexsort((tie, runs == 0, ranks, -field.waiting.keys.priority)).astype(np.int64)


@jit
def _count(history: History, had: Floats, ended: int) -> None:
    """Counts what all jobs ran; those from ``ended`` on have ended."""
    for job in range(had.size):
        note_passed(history, job, had[job], job >= ended)


def _with_running(world: NodeArrays, field: Field) -> Resources:
    """What is free, with what those have that may be stopped or are being ended: what can be shared out in all."""
    whole = copied(world.resources)
    for job in (*field.stoppable, *field.leaving):
        for part in job.allocation.parts:
            row = world.row[part.node]
            if world.usable.gpus[row] >= 0:
                blocked = world.nodes[row].blocked
                whole.gpus[row] += sum(gpu not in blocked for gpu in part.gpus)
            whole.cores[row] += part.cores
            whole.memory[row] += part.memory_mib
    return whole


def _holders(world: NodeArrays, field: Field, order: Ints) -> Holders:
    """Those that are being ended, node by node, since a GPU of theirs may be lost; then those that may be stopped."""
    parts = [(world.row[part.node], part) for job in field.leaving for part in job.allocation.parts]
    held = np.concatenate((field.held, np.array([row for row, _ in parts], np.int64)))
    holders = new_holders(len(parts) + len(field.stoppable), held, len(world.nodes))
    for k, (row, part) in enumerate(parts):
        gpus = sum(gpu not in world.nodes[row].blocked for gpu in part.gpus)
        hold(holders, k, len(field.held) + k, PlacementRequest(0, 0, 1, gpus, part.cores, part.memory_mib, -1, 0))
    at = len(parts)
    for j in order.tolist():
        if j >= field.waits:
            request = request_of(field.waiting.requests, field.waiting.jobs.shape[j])
            hold(holders, at, int(field.first[j]), request)
            at += 1
    return holders


@jit
def start_what_fits(state: ClusterState, shares: PreemptiveAllocation) -> None:
    """Of those that wait and are given nodes: who can start on what is free does."""
    free, masks = state.resources, state.jobs.masks
    for job in shares.order[: shares.used[0]]:
        request, first = request_of(state.requests, state.jobs.shape[job]), shares.offset[job]
        fits = shares.runs[job] == 0
        for part in range(request.parts):
            fits = fits and node_fits(free, masks, request, shares.nodes[first + part])
        if fits:
            state.outcome.code[job] = STARTED
            for part in range(request.parts):
                take(free, request, shares.nodes[first + part])


def _note_starts(
    context: Context, own: list[int], order: Ints, field: Field, code: Ints, shares: PreemptiveAllocation
) -> None:  # fmt: skip
    """Writes down for the plan who starts, and why others of the partition's queue ``own`` do not."""
    outcome, parts = context.outcome, field.waiting.requests.parts[field.waiting.jobs.shape]
    for j in order.tolist():
        if j >= field.waits:
            continue
        job, fate = own[j], int(code[j])
        outcome.code[job] = RESOURCES if fate == GIVEN else fate
        if fate != STARTED:
            continue
        at, first = int(outcome.total[1]), int(shares.offset[j])
        outcome.started[outcome.total[0]], outcome.offset[job] = job, at
        outcome.shape[job] = context.waiting.jobs.shape[job]  # the same request, as the others know it
        outcome.nodes[at : at + parts[j]] = shares.nodes[first : first + parts[j]]
        outcome.total[0] += 1
        outcome.total[1] += parts[j]


def _nodes_of(field: Field, shares: PreemptiveAllocation, j: int) -> set[int]:
    """The nodes that a job was given."""
    first, shape = int(shares.offset[j]), field.waiting.jobs.shape[j]
    return set(shares.nodes[first : first + int(field.waiting.requests.parts[shape])].tolist()) if first >= 0 else set()


def _stops(field: Field, order: Ints, code: Ints, shares: PreemptiveAllocation) -> list[Preempt]:
    """Who is stopped, and for whom: the first job that was given nodes of it. For nobody nobody is stopped."""
    gainers: dict[int, list[tuple[int, int]]] = {}  # node -> who is given it, first to last: (place, job)
    for place, j in enumerate(order.tolist()):
        if shares.cleared[j]:
            for node in _nodes_of(field, shares, j):
                gainers.setdefault(node, []).append((place, j))
    stops = []
    for k, job in enumerate(field.stoppable):
        j = field.waits + k
        if code[j] == KEPT:
            continue
        first, parts = int(field.first[j]), len(job.allocation.parts)
        has = field.held[first : first + parts].tolist()
        others = [next((g for g in gainers.get(node, ()) if g[1] != j), None) for node in has]
        if found := [g for g in others if g is not None]:
            stops.append(Preempt(job.id, field.waiting.views[min(found)[1]].id))
    return stops


def _say_who_clears(
    context: Context, field: Field, code: Ints, shares: PreemptiveAllocation, stopped: set[str]
) -> None:
    """Tells jobs that are given nodes which others still have to leave."""
    going = [*field.leaving, *(job for job in field.stoppable if job.id in stopped)]
    on: dict[int, list[str]] = {}
    for job in going:
        for part in job.allocation.parts:
            on.setdefault(context.world.row[part.node], []).append(job.id)
    for j in range(field.waits):
        if code[j] == GIVEN:
            nodes = sorted(_nodes_of(field, shares, j))
            before = list(dict.fromkeys(job for node in nodes for job in on.get(node, ())))
            jobs = "job" if len(before) == 1 else "jobs"
            message = f"given nodes, and waits for {jobs} {listed(before)} to leave them"
            context.own[field.waiting.views[j].id] = Reason(code=ReasonCode.RESOURCES, message=message)
