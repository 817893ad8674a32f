"""The RLTune agent with preemption, live: a replay's ranks and allocation, applied to a snapshot.

Ended, running and waiting jobs are counted anew at every decision. The time a job ran before a preemption counts, since
only jobs that save their work may be preempted; time before a node failure does not.

Nodes of a preempted job are free only after it has ended, so the job they are for starts some cycles later. Until then
the allocation keeps them for it: jobs being preempted count as allocatable, but not as free.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.known import facts_of_snapshot
from gpusched.agents.rltune.preempt import PreemptionModel, history_of, ranks_of
from gpusched.compiled import jit
from gpusched.estimation.odds import History, note_passed
from gpusched.model.ids import id_key
from gpusched.model.jobs import JobState
from gpusched.model.plan import Preempt, Reason, ReasonCode
from gpusched.model.snapshot import FinishedView, PendingView, RunningView
from gpusched.sched.agent import Context
from gpusched.sched.arrays import NodeArrays, PendingArrays, releases_of, waiting_of
from gpusched.sched.eligible import may_stop
from gpusched.sched.fit import request_of, set_feasibility
from gpusched.sched.kernel.preempting import GIVEN, PreemptiveAllocation, plan_starts, steady_rule
from gpusched.sched.kernel.queue_pass import KEPT
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.reclaim import Holders, hold, new_holders
from gpusched.sched.state import (
    BACKFILL,
    BEST_FIT,
    PLACES,
    POLICY,
    STARTED,
    ClusterState,
    Floats,
    Ints,
    PlacementRequest,
    Resources,
    copied,
    ints,
    new_outcome,
    new_scratch,
)
from gpusched.sched.text import listed, would_delay

LINGERS_S = 60.0  # a job still ending so long after its kill may never end: its nodes are not promised


class PartitionJobs(NamedTuple):
    """One partition's jobs for the pass: the waiting ones, then the preemptible ones.

    Attributes:
        waiting: The jobs as arrays; the first ``waits`` are waiting.
        stoppable, leaving: Preemptible running jobs; jobs that are ending and release their nodes.
        held: ``int64[parts]``: nodes of job j from ``first[j]`` on; -1: it waits.
    """

    waiting: PendingArrays
    waits: int
    stoppable: list[RunningView]
    leaving: list[RunningView]
    held: Ints
    first: Ints


def decide_queue(prepared: PreemptionModel, context: Context) -> tuple[list[int], QueueBlock]:
    """Decide about one partition: by operators' priority, then by rank. Preemptions go to `Context.stops`."""
    world, policy = context.world, context.policy
    field = _partition_jobs(context)
    order = _order(prepared, context, field)
    runs = (np.arange(len(order)) >= field.waits).astype(np.uint8)
    shapes, calendar = field.waiting.jobs.feasibility.size, field.waiting.calendar
    scratch = new_scratch(len(world.nodes), shapes, world.rack, calendar)
    jobs, requests, count, parts = field.waiting.jobs, field.waiting.requests, len(order), field.waiting.parts
    set_feasibility(world.total, world.usable, requests, jobs, scratch)
    holders, allocatable = _holders(world, field, order), _with_running(world, field)
    rule, at = steady_rule(PLACES.get(policy.place, BEST_FIT)), len(holders.first) - len(field.stoppable)
    shares = PreemptiveAllocation(
        copied(world.resources), world.usable, runs, field.first, field.held, _ends(field), holders,
        ints([at, len(holders.first)]), rule, np.zeros(count, np.int64), np.zeros(parts, np.int64),
        np.full(count, -1, np.int64), np.zeros(2, np.int64), np.zeros(count, np.uint8),
    )  # fmt: skip
    outcome = new_outcome(count, 0)
    gone = {job.id for job in (*field.stoppable, *field.leaving)}
    releases = releases_of([job for job in context.snapshot.running if job.id not in gone], world, parts)
    state = ClusterState(allocatable, releases, requests, jobs, scratch, outcome, context.snapshot.now)
    plan_starts(state, order, world.resources, shares)
    own = context.waiting.queues[context.partition]
    _note_starts(context, own, order, field, outcome.code, shares)
    stops = _stops(field, order, outcome.code, shares)
    context.stops.extend(stops)
    _report_kept_nodes(context, field, outcome.code)
    _report_awaited_jobs(context, field, outcome.code, shares, {stop.job_id for stop in stops})
    queue = [own[j] for j in order.tolist() if j < field.waits]
    head = next((j for j in queue if context.outcome.code[j] != STARTED), -1)
    return queue, QueueBlock(policy, head, float("inf"))


def attained_s(view: PendingView | RunningView | FinishedView, restart_s: float, now: float) -> float:
    """Return the seconds that a job has run, without restarts."""
    kept = view.preemptions.had_s(restart_s) if view.preemptions is not None else 0.0
    if isinstance(view, PendingView):
        return kept
    overhead = restart_s if view.attempt > 1 else 0.0
    if isinstance(view, FinishedView):
        return kept + max(0.0, view.ran_s - overhead)
    begun = view.state is not JobState.STARTING
    return kept + (max(0.0, now - view.start_time - overhead) if begun else 0.0)


def _partition_jobs(context: Context) -> PartitionJobs:
    """Collect the partition's waiting jobs, and its running ones that are preemptible or ending."""
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
    account = waiting.jobs.account  # running jobs are already counted; waiting jobs count as usual
    account[: len(own)], account[len(own) :, 0] = all_jobs.account[context.waiting.queues[context.partition]], -1
    jobs = waiting.jobs._replace(room=all_jobs.room, links=all_jobs.links)
    return PartitionJobs(
        waiting._replace(jobs=jobs), len(own), stoppable, leaving, np.array([*held, -1], np.int64), first
    )  # fmt: skip


def _ends(field: PartitionJobs) -> Floats:
    """Return when running jobs end by their limits, ``float64[jobs]``."""
    return np.array([0.0] * field.waits + [job.expected_end for job in field.stoppable], np.float64)


def _is_whole(world: NodeArrays, job: RunningView) -> bool:
    """Return whether a job holds exactly its request and would release all of it; other jobs are not preempted."""
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


def _order(prepared: PreemptionModel, context: Context, field: PartitionJobs) -> Ints:
    """Return the jobs in order, ``int64[jobs]``; of equals running ones first, then by (submit, id)."""
    snapshot, restart_s = context.snapshot, context.policy.preempt.restart_s
    facts = facts_of_snapshot(context, prepared.knows)
    views: list[PendingView | RunningView | FinishedView] = [
        *context.waiting.views, *snapshot.running, *snapshot.finished
    ]  # fmt: skip
    had = np.array([attained_s(view, restart_s, snapshot.now) for view in views], np.float64)
    history = history_of(facts)
    ended = len(views) - len(snapshot.finished)
    _count_run_times(history, had, ended)
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
def _count_run_times(history: History, had: Floats, ended: int) -> None:
    """Count the run times of all jobs; those from ``ended`` on have ended."""
    for job in range(had.size):
        note_passed(history, job, had[job], job >= ended)


def _with_running(world: NodeArrays, field: PartitionJobs) -> Resources:
    """Return the free resources plus those of preemptible and ending jobs: all that can be allocated."""
    allocatable = copied(world.resources)
    for job in (*field.stoppable, *field.leaving):
        for part in job.allocation.parts:
            row = world.row[part.node]
            if world.usable.gpus[row] >= 0:
                blocked = world.nodes[row].blocked
                allocatable.gpus[row] += sum(gpu not in blocked for gpu in part.gpus)
            allocatable.cores[row] += part.cores
            allocatable.memory[row] += part.memory_mib
    return allocatable


def _holders(world: NodeArrays, field: PartitionJobs, order: Ints) -> Holders:
    """Return the holders: ending jobs per node, since a GPU of theirs may be lost, then preemptible jobs."""
    parts = [(world.row[part.node], part) for job in field.leaving for part in job.allocation.parts]
    held = np.concatenate((field.held, np.array([row for row, _ in parts], np.int64)))
    holders = new_holders(len(parts) + len(field.stoppable), held, len(world.nodes))
    for k, (row, part) in enumerate(parts):
        gpus = sum(gpu not in world.nodes[row].blocked for gpu in part.gpus)
        hold(holders, k, len(field.held) + k, PlacementRequest(0, 0, 1, gpus, part.cores, part.memory_mib, -1, 0), -1)
    at = len(parts)
    for j in order.tolist():
        if j >= field.waits:
            request = request_of(field.waiting.requests, field.waiting.jobs.shape[j])
            hold(holders, at, int(field.first[j]), request, j)
            at += 1
    return holders


def _note_starts(
    context: Context, own: list[int], order: Ints, field: PartitionJobs, code: Ints, shares: PreemptiveAllocation
) -> None:  # fmt: skip
    """Record in the plan which jobs start, and why others of the partition's queue ``own`` do not."""
    outcome, parts = context.outcome, field.waiting.requests.parts[field.waiting.jobs.shape]
    for j in order.tolist():
        if j >= field.waits:
            continue
        job, result = own[j], int(code[j])
        outcome.code[job] = POLICY if result == GIVEN else result  # it is put beside none: others leave for it
        if result != STARTED:
            continue
        at, first = int(outcome.total[1]), int(shares.offset[j])
        outcome.started[outcome.total[0]], outcome.offset[job] = job, at
        outcome.shape[job] = context.waiting.jobs.shape[job]  # the shape of the same request in the whole queue
        outcome.nodes[at : at + parts[j]] = shares.nodes[first : first + parts[j]]
        outcome.total[0] += 1
        outcome.total[1] += parts[j]


def _nodes_of(field: PartitionJobs, shares: PreemptiveAllocation, j: int) -> set[int]:
    """Return the nodes allocated to a job."""
    first, shape = int(shares.offset[j]), field.waiting.jobs.shape[j]
    return set(shares.nodes[first : first + int(field.waiting.requests.parts[shape])].tolist()) if first >= 0 else set()


def _stops(field: PartitionJobs, order: Ints, code: Ints, shares: PreemptiveAllocation) -> list[Preempt]:
    """Return the preemptions, each with the first job that gets its nodes; without one there is no preemption."""
    gainers: dict[int, list[tuple[int, int]]] = {}  # node -> jobs that get it, in order: (place, job)
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


def _report_kept_nodes(context: Context, field: PartitionJobs, code: Ints) -> None:
    """Report to jobs that fit only on kept nodes (`keeping`) the job they are kept for."""
    calendar, now = field.waiting.calendar, context.snapshot.now
    for j in np.flatnonzero(code[: field.waits] == BACKFILL).tolist():
        message = would_delay(field.waiting.views[calendar.kept_for[0]].id, float(calendar.kept_times[0]) - now)
        context.reasons[field.waiting.views[j].id] = Reason(code=ReasonCode.BACKFILL, message=message)


def _report_awaited_jobs(
    context: Context, field: PartitionJobs, code: Ints, shares: PreemptiveAllocation, stopped: set[str]
) -> None:
    """Report to jobs with allocated nodes the jobs that still have to leave them."""
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
            context.reasons[field.waiting.views[j].id] = Reason(code=ReasonCode.RESOURCES, message=message)
