"""Thousands of small simulated clusters in parallel, each advanced to its next decision by one call.

Every cluster is a replay engine state (`gpusched.sim.engine.state.Sim`), one row of arrays shared by all clusters. It
advances by the engine's `advance` and `start_job`, so the schedule equals the replay's for the same actions. At every
instant the agent is prompted once for each waiting job, largest first: which server, or the queue. Observations, masks,
rewards and ends of episodes are written into preallocated arrays.

Meant for episodes of few jobs that fit one server each: finding the next job scans all jobs of the cluster. Nodes do
not fail and nothing is reserved, so `advance` covers all events.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.nets import Reals
from gpusched.compiled import jit
from gpusched.sched.heaps import Heap
from gpusched.sched.place import next_random, node_fits
from gpusched.sched.state import Flags, Floats, Ints, PlacementRequest, Resources, Words
from gpusched.sim.engine.state import ARRIVED, DONE, FUTURE, OVER, RUNNING, WAITING, EventLog, Sim, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, advance, start_job

MAX_REPROMPTS = 8  # prompts in an empty cluster before a job is started for the agent


class EpisodeRules(NamedTuple):
    """The rules of an episode, the same for all clusters.

    Attributes:
        waits: Whether the only reward is the episode's U at its end, and observations hold more than the servers' free
            resources; else the reward is the paper's.
        masked: Whether invalid actions are masked; else they are penalized, and the job waits.
        repeat: Whether a new episode follows one that ends.
        gap_s: Seconds between submissions.
        slots: Running jobs per server in an observation.
    """

    waits: bool
    masked: bool
    repeat: bool
    gap_s: float
    slots: int


class JobDistribution(NamedTuple):
    """The kinds of jobs to draw from, ``[kinds]``: index of the request, seconds, dominant share of the partition."""

    shape: Ints
    run_s: Floats
    share: Floats


class Batch(NamedTuple):
    """The clusters; first dimension: clusters.

    Attributes:
        sim: The engine's state, with a leading dimension where clusters differ (see `cluster_view`).
        log: Likewise.
        masks: Node masks; empty.
        capacity: Resources of the empty servers, ``[servers]`` each.
        kind: ``int64[clusters, jobs]``: of each job.
        prompted: ``int64[clusters, jobs]``: 1: the agent was prompted for the job at this instant.
        job: ``int64[clusters]``: the job to decide about; -1: the episode is over.
        reprompts: ``int64[clusters]``: further prompts in an empty cluster.
        rng: ``uint64[clusters, 1]``: the generator of each cluster.
        sequences: ``int64[n, jobs]``: fixed episodes, assigned round-robin to clusters; none: episodes are drawn.
        observation: ``float32[clusters, inputs]``. mask: ``uint8[clusters, actions]``: valid actions.
        reward: ``float32[clusters]``: of the last action. done: ``uint8[clusters]``: it ended the episode.
        utilization, hours: ``float64[clusters]``: U and length of the last episode that ended.
    """

    sim: Sim
    log: EventLog
    masks: Flags
    capacity: Resources
    kinds: JobDistribution
    kind: Ints
    prompted: Ints
    job: Ints
    reprompts: Ints
    rng: Words
    sequences: Ints
    observation: Reals
    mask: Flags
    reward: Reals
    done: Flags
    utilization: Floats
    hours: Floats


@jit
def cluster_view(sim: Sim, c: int) -> Sim:
    """Return views of the rows of cluster ``c``; scratch arrays, which keep nothing between passes, are shared."""
    return Sim(
        sim.jobs[c],
        sim.shapes,
        sim.changes,
        sim.state[c],
        sim.node[c],
        sim.clock[c],
        sim.counter[c],
        sim.held[c],
        sim.children,
        Resources(sim.resources.gpus[c], sim.resources.cores[c], sim.resources.memory[c], None),
        Heap(sim.ends.key[c], sim.ends.item[c], sim.ends.size[c]),
        sim.by_free,
        sim.ready,
        sim.ended,
        sim.dirty,
        sim.chosen,
        sim.pace,
        sim.ledger,
        sim.links,
        sim.pairs,
        sim.ranks,
    )


@jit
def _log(log: EventLog, c: int) -> EventLog:
    return EventLog(log.events[c], log.cuts, log.cut_nodes)


@jit
def begin(batch: Batch, rules: EpisodeRules) -> None:
    """Start an episode in every cluster and write the observations."""
    for c in range(batch.job.size):
        sim = cluster_view(batch.sim, c)
        _new_episode(batch, rules, c, sim)
        _observe(batch, rules, c, sim)


@jit
def step(batch: Batch, rules: EpisodeRules, actions: Ints) -> None:
    """Apply ``actions: int64[clusters]`` and advance every cluster to its next decision.

    An action is ``kind * servers + server``, or ``kinds * servers + kind`` for the queue, as numbered in the paper. The
    job's own kind is used whatever kind the action names.
    """
    for c in range(batch.job.size):
        if batch.job[c] < 0:
            continue
        sim, log = cluster_view(batch.sim, c), _log(batch.log, c)
        batch.done[c] = 0
        batch.reward[c] = _apply_action(batch, rules, c, sim, log, actions[c])
        batch.job[c] = _advance_to_decision(
            sim, log, batch.masks, batch.prompted[c], batch.reprompts[c : c + 1], rules.masked
        )
        if batch.job[c] < 0:
            _finish_episode(batch, c, sim)
            if rules.repeat:
                _new_episode(batch, rules, c, sim)
        _observe(batch, rules, c, sim)


@jit
def _new_episode(batch: Batch, rules: EpisodeRules, c: int, sim: Sim) -> None:
    """Reset the cluster, draw its jobs or take them from the list, and advance to the first decision."""
    kinds, kind, prompted, sequences = batch.kinds, batch.kind[c], batch.prompted[c], batch.sequences
    for j in range(kind.size):
        if sequences.shape[0] > 0:
            kind[j] = sequences[c % sequences.shape[0], j]
        else:
            kind[j] = next_random(batch.rng[c], kinds.run_s.size)
        prompted[j] = 1
        job, state = sim.jobs[j], sim.state[j]
        job["arrival"] = job["submit"] = j * rules.gap_s
        job["duration"] = job["expected"] = state["left"] = kinds.run_s[kind[j]]
        job["shape"] = kinds.shape[kind[j]]
        state["status"] = FUTURE
        state["first"] = state["start"] = state["end"] = np.nan
        state["restarts"] = 0
    sim.clock[0], sim.clock[1] = -np.inf, np.inf
    sim.counter[:] = 0
    sim.ends.size[0] = 0
    for n in range(sim.node.size):
        sim.node[n]["free"] = sim.resources.gpus[n] = batch.capacity.gpus[n]
        sim.resources.cores[n], sim.resources.memory[n] = batch.capacity.cores[n], batch.capacity.memory[n]
    batch.reprompts[c] = 0
    batch.job[c] = _advance_to_decision(
        sim, _log(batch.log, c), batch.masks, prompted, batch.reprompts[c : c + 1], rules.masked
    )


@jit
def _fits_somewhere(resources: Resources, masks: Flags, request: PlacementRequest) -> bool:
    for server in range(resources.gpus.size):
        if node_fits(resources, masks, request, server):
            return True
    return False


@jit
def _apply_action(batch: Batch, rules: EpisodeRules, c: int, sim: Sim, log: EventLog, action: int) -> float:
    """Start the prompted job or leave it waiting; return the paper's reward (Section 5.2)."""
    job, servers = batch.job[c], sim.node.size
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    batch.prompted[c, job] = 1
    runs = action < batch.kinds.run_s.size * servers
    if runs and node_fits(sim.resources, batch.masks, request, action % servers):
        sim.chosen[0] = action % servers
        start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        return 0.0 if rules.waits else utilization(sim, batch.kinds.share, batch.kind[c])
    could = runs or _fits_somewhere(sim.resources, batch.masks, request)
    return -1.0 if could and not rules.waits else 0.0


@jit
def utilization(sim: Sim, share: Floats, kind: Ints) -> float:
    """Return Eq. 4 at this instant; at the first submission, where it is 0 / 0, its limit: the running jobs' shares."""
    now, work, held = sim.clock[0], 0.0, 0.0
    for j in range(sim.jobs.size):
        state = sim.state[j]
        if state["status"] == RUNNING:
            held += share[kind[j]]
            work += share[kind[j]] * (now - state["start"])
        elif state["status"] == DONE:
            work += share[kind[j]] * (state["end"] - state["start"])
    span = now - sim.jobs[0]["submit"]
    return work / span if span > 0 else held


@jit
def _advance_to_decision(sim: Sim, log: EventLog, masks: Flags, prompted: Ints, reprompts: Ints, masked: bool) -> int:
    """Advance to the next job to prompt for, at this instant or later; -1: all jobs have ended."""
    while True:
        job = _next_job(sim, masks, prompted, masked)
        if job >= 0:
            return job
        if advance(sim, log) == OVER:
            waiting = np.flatnonzero(sim.state["status"] == WAITING)
            if waiting.size == 0:
                return -1
            reprompts[0] += 1
            if reprompts[0] > MAX_REPROMPTS:  # start the first job, so that an idle agent cannot stall
                request = shape_request(sim.shapes, sim.jobs[waiting[0]]["shape"])
                sim.chosen[0] = 0
                while not node_fits(sim.resources, masks, request, sim.chosen[0]):
                    sim.chosen[0] += 1
                start_job(sim, log, waiting[0], sim.chosen, 0, NOTHING_TAKEN, 0.0)
        prompted[:] = 0


@jit
def _next_job(sim: Sim, masks: Flags, prompted: Ints, masked: bool) -> int:
    """Return the largest waiting job not prompted for at this instant, the earliest of equals; else -1.

    With masks, a job that fits on no server has no valid start and is skipped.
    """
    found, most_gpus = -1, -1
    for j in range(prompted.size):
        if prompted[j] == 0 and sim.state[j]["status"] == WAITING:
            request = shape_request(sim.shapes, sim.jobs[j]["shape"])
            if masked and not _fits_somewhere(sim.resources, masks, request):
                prompted[j] = 1
            elif request.gpus > most_gpus:
                found, most_gpus = j, request.gpus
    return found


@jit
def _finish_episode(batch: Batch, c: int, sim: Sim) -> None:
    """Record U and length of the episode and add U to the last reward: an episode's U includes all its jobs."""
    batch.utilization[c] = utilization(sim, batch.kinds.share, batch.kind[c])
    batch.hours[c] = (sim.clock[0] - sim.jobs[0]["submit"]) / 3600.0
    batch.reward[c] += batch.utilization[c]
    batch.done[c] = 1


@jit
def _observe(batch: Batch, rules: EpisodeRules, c: int, sim: Sim) -> None:
    """Write the observation and the mask of valid actions."""
    seen, mask, job, resources, capacity = (
        batch.observation[c],
        batch.mask[c],
        batch.job[c],
        sim.resources,
        batch.capacity,
    )
    seen[:] = 0.0
    mask[:] = 0
    if job < 0:
        return
    servers, kind = sim.node.size, batch.kind[c, job]
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    can_start = False
    for n in range(servers):
        seen[3 * n] = resources.gpus[n] / max(capacity.gpus[n], 1)
        seen[3 * n + 1] = resources.cores[n] / max(capacity.cores[n], 1)
        seen[3 * n + 2] = resources.memory[n] / max(capacity.memory[n], 1)
        fits = node_fits(resources, batch.masks, request, n)
        can_start = can_start or fits
        mask[kind * servers + n] = 1 if fits or not rules.masked else 0
    if not (rules.masked and can_start and _last_chance(sim, batch.prompted[c], job)):
        mask[batch.kinds.run_s.size * servers + kind] = 1
    if rules.waits:
        _observe_more(
            sim, rules.slots, batch.kinds, batch.kind[c], batch.prompted[c], capacity.gpus, seen[3 * servers :]
        )
        seen[seen.size - batch.kinds.run_s.size + kind] = 1.0


@jit
def _last_chance(sim: Sim, prompted: Ints, job: int) -> bool:
    """Return whether no further event would occur if this job were left waiting."""
    if sim.ends.size[0] > 0 or sim.counter[ARRIVED] < sim.jobs.size:
        return False
    for j in range(prompted.size):
        if j != job and prompted[j] == 0 and sim.state[j]["status"] == WAITING:
            return False
    return True


@jit
def _observe_more(
    sim: Sim, slots: int, kinds: JobDistribution, kind: Ints, prompted: Ints, capacity: Ints, seen: Reals
) -> None:
    """Observe when GPUs become free, the waiting jobs and those to come; times in units of the longest run time."""
    kinds_count, jobs, now, unit = kinds.run_s.size, sim.jobs.size, sim.clock[0], kinds.run_s[kinds.run_s.size - 1]
    servers = sim.node.size
    at = 2 * slots * servers
    last, last_job = -np.inf, -1
    for _ in range(sim.ends.size[0]):  # by (end, job): equal futures give equal observations whatever the past
        next_end, job = np.inf, -1
        for i in range(sim.ends.size[0]):
            end, j = sim.ends.key[i], sim.ends.item[i]
            later = end > last or (end == last and j > last_job)
            if later and (end < next_end or (end == next_end and j < job)):
                next_end, job = end, j
        last, last_job = next_end, job
        server = sim.held[sim.jobs[job]["offset"]]
        place = 2 * slots * server
        while place < 2 * slots * (server + 1) and seen[place] > 0:
            place += 2
        if place < 2 * slots * (server + 1):
            seen[place] = sim.shapes[sim.jobs[job]["shape"]]["gpus"] / max(capacity[server], 1)
            seen[place + 1] = (next_end - now) / unit
    work = 0.0
    for j in range(jobs):
        status = sim.state[j]["status"]
        if status == WAITING:
            seen[at + (kinds_count if prompted[j] else 0) + kind[j]] += 1.0 / jobs
        if status != FUTURE:
            work += kinds.share[kind[j]] * kinds.run_s[kind[j]]
    at += 2 * kinds_count
    arrived = sim.counter[ARRIVED]
    seen[at] = arrived / jobs
    seen[at + 1] = (sim.jobs[arrived]["submit"] - now) / unit if arrived < jobs else 0.0
    seen[at + 2] = (now - sim.jobs[0]["submit"]) / (2.0 * unit)
    seen[at + 3] = work / unit


def inputs_of(servers: int, kinds: int, rules: EpisodeRules) -> int:
    """Return the length of an observation."""
    return 3 * servers + (2 * rules.slots * servers + 3 * kinds + 4 if rules.waits else 0)
