"""The virtual clock: advance to the next event, handle it, start and stop jobs.

At one instant ends come before node events, those before arrivals, and arrivals before decisions.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import give, take
from gpusched.sched.heaps import pop, push, remove
from gpusched.sched.sorting import ascending
from gpusched.sched.state import Ints
from gpusched.sim.engine.hot import lose_rank, loses_rank, most_ranks
from gpusched.sim.engine.ledger import charge_limits, expire_usage, next_expiry, note_charged, release_limits
from gpusched.sim.engine.log import log_event, log_run
from gpusched.sim.engine.nodeindex import move_node
from gpusched.sim.engine.pace import claim, ends_killed, extra_events, interrupt, release, schedule_end
from gpusched.sim.engine.state import (
    ARRIVED,
    CHANGED,
    CUT_PARTS,
    CUTS,
    DECIDE,
    DEPENDENT,
    DONE,
    ENDED,
    FUTURE,
    GROW,
    IN_SYSTEM,
    JOB_ELIGIBLE,
    JOB_SETTLES,
    LOGGED,
    MOVED,
    NEVER,
    NODE_BACK,
    NODE_GONE,
    NODE_RESERVED,
    OVER,
    PARTS,
    READY,
    RUNNING,
    RUNS,
    WAITING,
    EventLog,
    Sim,
    shape_request,
)
from gpusched.sim.result import END, KILLED, NODE_DOWN, NODE_DRAIN, NODE_FAIL, NODE_UP, START

NOTHING_TAKEN = -1


@jit
def advance(sim: Sim, log: EventLog) -> int:
    """Advance to the next instant, and handle its ends, node events and arrivals.

    Returns:
        OVER (nothing is left to happen), DECIDE, or GROW (``log`` must be enlarged first; nothing was done).
    """
    counter, jobs, ends = sim.counter, sim.jobs, sim.ends
    if _short_of_room(sim, log):
        return GROW
    # The next instant: the policy's wake-up, an arrival, end or node event, or usage that leaves the seven days.
    wake = sim.clock[1]
    now = wake
    if counter[ARRIVED] < jobs.size:
        now = min(now, jobs[counter[ARRIVED]]["arrival"])
    if ends.size[0] > 0:
        now = min(now, ends.key[0])
    # Node events alone do not prolong a replay in which no job is left.
    if counter[CHANGED] < sim.changes.size and (counter[ARRIVED] < jobs.size or counter[IN_SYSTEM] > 0):
        now = min(now, sim.changes[counter[CHANGED]]["time"])
    now = min(now, next_expiry(sim.ledger, sim.clock[0], counter[IN_SYSTEM] > counter[RUNS]))
    if now == np.inf:
        return OVER
    # The policy asked for this instant: all partitions decide.
    if wake <= now:
        sim.dirty[:] = 1
        sim.clock[1] = np.inf
    sim.clock[0] = now
    expire_usage(sim.ledger, now, sim.dirty)
    counter[READY] = counter[ENDED] = counter[MOVED] = 0
    while ends.size[0] > 0 and ends.key[0] == now:
        _finish(sim, log, pop(ends))
    if counter[CHANGED] < sim.changes.size and sim.changes[counter[CHANGED]]["time"] <= now:
        _change(sim, log)
    while counter[ARRIVED] < jobs.size and jobs[counter[ARRIVED]]["arrival"] <= now:
        _arrive(sim, counter[ARRIVED])
        counter[ARRIVED] += 1
    return DECIDE


@jit
def _short_of_room(sim: Sim, log: EventLog) -> bool:
    """Return whether this instant may not fit the log: a job starts, stops and ends at most once in one."""
    counter = sim.counter
    future = sim.jobs.size - counter[ARRIVED]
    most = 3 * counter[IN_SYSTEM] + 2 * future + sim.changes.size - counter[CHANGED]
    ranks = most_ranks(sim.ranks)
    lost = counter[PARTS] if ranks > 0 else 0
    most += extra_events(sim.pace, sim, future) + lost
    return bool(
        log.events.size - counter[LOGGED] < most
        or log.cuts.size - counter[CUTS] < counter[RUNS] + lost
        or log.cut_nodes.size - counter[CUT_PARTS] < counter[PARTS] * (1 + ranks)
    )


@jit
def _arrive(sim: Sim, job: int) -> None:
    if sim.state[job]["status"] == FUTURE:
        sim.counter[IN_SYSTEM] += 1
        _become_eligible(sim, job)


@jit
def _become_eligible(sim: Sim, job: int) -> None:
    if sim.state[job]["needs"] > 0:
        sim.state[job]["status"] = DEPENDENT
    else:
        make_ready(sim, job)


@jit
def _release_children(sim: Sim, begin: int, stop: int) -> None:
    """Count down the dependencies of these jobs."""
    for at in range(begin, stop):
        state = sim.state[sim.children[at]]
        state["needs"] -= 1
        if state["needs"] == 0 and state["status"] == DEPENDENT:
            make_ready(sim, sim.children[at])


@jit
def make_ready(sim: Sim, job: int) -> None:
    """Make the job wait for resources."""
    sim.state[job]["status"] = WAITING
    sim.ready[sim.counter[READY]] = job
    sim.counter[READY] += 1
    sim.dirty[sim.shapes[sim.jobs[job]["shape"]]["queue"]] = 1


@jit
def _finish(sim: Sim, log: EventLog, job: int) -> None:
    sim.state[job]["status"] = DONE
    sim.state[job]["end"] = sim.clock[0]
    log_event(sim, log, KILLED if ends_killed(sim.pace, sim, job) else END, job)
    end_job(sim, job)
    sim.counter[IN_SYSTEM] -= 1
    if sim.jobs[job]["child"] < sim.jobs[job]["child_begun"]:
        _release_children(sim, sim.jobs[job]["child"], sim.jobs[job]["child_begun"])


@jit
def end_job(sim: Sim, job: int) -> None:
    """Free all that a running job holds, as it ends or is stopped; it must be in the log already."""
    release_limits(sim.ledger, job, sim.state[job]["start"], sim.clock[0])
    shape, offset = sim.jobs[job]["shape"], sim.jobs[job]["offset"]
    request = release(sim.pace, sim, job, shape_request(sim.shapes, shape))
    for part in range(request.parts):
        node = sim.held[offset + part]
        sim.node[node]["free"] += request.gpus
        if sim.node[node]["up"]:
            if sim.by_free.counts.size:
                move_node(sim.by_free, node, sim.resources.gpus[node], sim.resources.gpus[node] + request.gpus)
            give(sim.resources, request, node)
        else:
            sim.resources.cores[node] += request.cores
            sim.resources.memory[node] += request.memory
    sim.counter[PARTS] -= request.parts
    sim.counter[RUNS] -= 1
    sim.ended[sim.counter[ENDED]] = job
    sim.counter[ENDED] += 1
    sim.dirty[sim.shapes[shape]["queue"]] = 1


@jit
def start_job(sim: Sim, log: EventLog, job: int, nodes: Ints, first: int, taken: int, restart_s: float) -> None:
    """Start ``job`` with its request on ``nodes[first:]``.

    ``taken``: whole GPUs of each node that a pass has already taken, with all else (`backfill.launch`); NOTHING_TAKEN:
    all is taken here. ``restart_s`` pass before work goes on, if the job has run before.
    """
    state, now, offset = sim.state[job], sim.clock[0], sim.jobs[job]["offset"]
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    if taken == NOTHING_TAKEN:
        request = claim(sim.pace, sim, job, request, nodes[first])
        charge_limits(sim.ledger, job)
        taken = request.gpus
        for node in nodes[first : first + request.parts]:
            if sim.by_free.counts.size:
                move_node(sim.by_free, node, sim.resources.gpus[node], sim.resources.gpus[node] - taken)
            take(sim.resources, request, node)
    else:
        note_charged(sim.ledger, job)
    for part in range(request.parts):
        node = nodes[first + part]
        sim.held[offset + part] = node
        sim.node[node]["free"] -= taken
    state["status"] = RUNNING
    # Only a first start can satisfy dependencies; a restart releases no more jobs.
    if np.isnan(state["first"]):
        state["first"] = now
        if sim.jobs[job]["child_begun"] < sim.jobs[job]["child_stop"]:
            _release_children(sim, sim.jobs[job]["child_begun"], sim.jobs[job]["child_stop"])
    state["start"], state["until"] = now, now + sim.jobs[job]["expected"]
    schedule_end(sim.pace, sim, job, now + (restart_s if state["restarts"] > 0 else 0.0))
    push(sim.ends, state["due"], job)
    sim.counter[PARTS] += request.parts
    sim.counter[RUNS] += 1
    log_event(sim, log, START, job)


@jit
def stop_job(sim: Sim, log: EventLog, job: int, kind: int, left: float) -> None:
    """Stop a running job before its end (PREEMPTED or NODE_FAIL); ``left`` seconds of its work remain."""
    log_run(sim, log, job)
    remove(sim.ends, job)
    log_event(sim, log, kind, job)
    interrupt(sim.pace, sim, job, kind)
    end_job(sim, job)
    sim.state[job]["left"] = left
    sim.state[job]["restarts"] += 1
    sim.state[job]["status"] = WAITING


@jit
def _change(sim: Sim, log: EventLog) -> None:
    """Apply the events that are due: nodes come, go or drain; jobs become eligible, or accept a looser request.

    The caller updates which jobs can run.
    """
    counter = sim.counter
    while counter[CHANGED] < sim.changes.size and sim.changes[counter[CHANGED]]["time"] <= sim.clock[0]:
        change = sim.changes[counter[CHANGED]]
        node, kind = change["subject"], change["kind"]
        counter[CHANGED] += 1
        if kind == JOB_SETTLES:
            continue
        if kind == JOB_ELIGIBLE:
            if sim.state[node]["status"] == FUTURE:
                _become_eligible(sim, node)
            continue
        counter[MOVED] += 1
        if kind == NODE_RESERVED:
            sim.dirty[sim.node[node]["queue"]] = 1
            continue
        log_event(sim, log, NODE_UP if kind == NODE_BACK else NODE_DOWN if kind == NODE_GONE else NODE_DRAIN, node)
        if kind == NODE_GONE:
            _fail_jobs(sim, log, node)
        before = sim.resources.gpus[node]
        sim.node[node]["up"] = kind == NODE_BACK
        sim.resources.gpus[node] = sim.node[node]["free"] if kind == NODE_BACK else -1
        if sim.by_free.counts.size:
            move_node(sim.by_free, node, before, sim.resources.gpus[node])
        sim.dirty[sim.node[node]["queue"]] = 1


@jit
def _fail_jobs(sim: Sim, log: EventLog, node: int) -> None:
    """Stop the jobs on a failed node, in order of their numbers; they wait again with all their work to do.

    A hot job goes on without the rank there, as live.
    """
    running = ascending(sim.ends.item[: sim.ends.size[0]])
    for job in running:
        offset = sim.jobs[job]["offset"]
        for part in range(sim.shapes[sim.jobs[job]["shape"]]["parts"]):
            if sim.held[offset + part] == node:
                if loses_rank(sim.ranks, sim, job, part):
                    lose_rank(sim.ranks, sim, log, job, part)
                    break
                stop_job(sim, log, job, NODE_FAIL, sim.jobs[job]["duration"])
                make_ready(sim, job)
                break


@jit
def mark_never(sim: Sim) -> int:
    """Mark jobs that can never run, and all that depend on them; return how many."""
    count = stacked = 0
    for job in range(sim.jobs.size):
        if sim.jobs[job]["shape"] >= 0 or sim.state[job]["status"] == NEVER:
            continue
        sim.state[job]["status"] = NEVER
        sim.ready[0] = job
        stacked = 1
        while stacked > 0:
            stacked -= 1
            count += 1
            of = sim.jobs[sim.ready[stacked]]
            for dependent in sim.children[of["child"] : of["child_stop"]]:
                if sim.state[dependent]["status"] != NEVER:
                    sim.state[dependent]["status"] = NEVER
                    sim.ready[stacked] = dependent
                    stacked += 1
    return count
