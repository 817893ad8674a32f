"""Thousands of small clusters side by side, each a replay of its own, all advanced to their next decision at once.

Every cluster is the replay engine's own state (`gpusched.sim.engine.state.Sim`), a row of arrays that hold all of them,
and goes on by the engine's own passes `advance` and `start_job`; so its schedule is the replay's for the same choices.
At every instant each waiting job is asked for once, largest first: which server, or the queue. Observations, masks,
rewards and ends are written into arrays made once.

For episodes of few jobs that fit one server each: finding the next job to ask for looks at all jobs of the cluster.
Nodes do not fail here, and no job reserves anything, so `advance` is all there is to do.
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

MAX_REPROMPTS = 8  # so often an empty cluster is asked again before a job is started for the agent


class EpisodeRules(NamedTuple):
    """How episodes go; the same for all clusters.

    Attributes:
        waits: Rewarded is U of the episode at its end, nothing before, and observations hold more than the servers'
            free resources; else the reward is the paper's.
        masked: Whether what is impossible cannot be chosen; else it is punished, and the job waits.
        again: Whether an episode that ends is followed by another.
        gap_s: From one submission to the next.
        slots: Running jobs of each server that an observation shows.
    """

    waits: bool
    masked: bool
    again: bool
    gap_s: float
    slots: int


class JobDistribution(NamedTuple):
    """What jobs are drawn from, ``[kinds]``: index of the request, seconds, dominant share of the partition."""

    shape: Ints
    run_s: Floats
    share: Floats


class Batch(NamedTuple):
    """The clusters; first dimension: clusters.

    Attributes:
        sim: As of one cluster, with a dimension more where clusters differ (see `one`).
        log: Likewise.
        masks: Of nodes; empty.
        whole: A server empty, ``[servers]`` each.
        kind: ``int64[clusters, jobs]``: of each job.
        asked: ``int64[clusters, jobs]``: 1: asked for at this instant.
        job: ``int64[clusters]``: the job that is asked for; -1: the episode is over.
        stubborn: ``int64[clusters]``: how often an empty cluster was asked again.
        rng: ``uint64[clusters, 1]``: every cluster's own.
        sequences: ``int64[n, jobs]``: episodes to play, cluster by cluster in turn; none: drawn.
        observation: ``float32[clusters, inputs]``. mask: ``uint8[clusters, actions]``: what may be chosen.
        reward: ``float32[clusters]``: of the last action. over: ``uint8[clusters]``: it ended the episode.
        utilization, hours: ``float64[clusters]``: U and length of the last episode that ended.
    """

    sim: Sim
    log: EventLog
    masks: Flags
    whole: Resources
    kinds: JobDistribution
    kind: Ints
    asked: Ints
    job: Ints
    stubborn: Ints
    rng: Words
    sequences: Ints
    observation: Reals
    mask: Flags
    reward: Reals
    over: Flags
    utilization: Floats
    hours: Floats


@jit
def one(sim: Sim, c: int) -> Sim:
    """Cluster ``c``: views of its rows. What only carries something from one pass to the next is shared by all."""
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
        Resources(sim.resources.gpus[c], sim.resources.cores[c], sim.resources.memory[c]),
        Heap(sim.ends.key[c], sim.ends.item[c], sim.ends.size[c]),
        sim.by_free,
        sim.ready,
        sim.ended,
        sim.dirty,
        sim.chosen,
        sim.pace,
        sim.ledger,
    )


@jit
def _log(log: EventLog, c: int) -> EventLog:
    return EventLog(log.events[c], log.cuts, log.cut_nodes)


@jit
def begin(batch: Batch, rules: EpisodeRules) -> None:
    """Begins an episode in every cluster and writes what there is to see."""
    for c in range(batch.job.size):
        sim = one(batch.sim, c)
        _new_episode(batch, rules, c, sim)
        _observe(batch, rules, c, sim)


@jit
def step(batch: Batch, rules: EpisodeRules, actions: Ints) -> None:
    """Does ``actions: int64[clusters]`` and goes to every cluster's next decision.

    An action is ``kind * servers + server``, or ``kinds * servers + kind`` for the queue, as the paper counts them. The
    kind is the job's own whatever the action says.
    """
    for c in range(batch.job.size):
        if batch.job[c] < 0:
            continue
        sim, log = one(batch.sim, c), _log(batch.log, c)
        batch.over[c] = 0
        batch.reward[c] = _act(batch, rules, c, sim, log, actions[c])
        batch.job[c] = _go_on(sim, log, batch.masks, batch.asked[c], batch.stubborn[c : c + 1], rules.masked)
        if batch.job[c] < 0:
            _end(batch, c, sim)
            if rules.again:
                _new_episode(batch, rules, c, sim)
        _observe(batch, rules, c, sim)


@jit
def _new_episode(batch: Batch, rules: EpisodeRules, c: int, sim: Sim) -> None:
    """The cluster empty, its jobs drawn or taken from the list; and on to the first decision."""
    kinds, kind, asked, sequences = batch.kinds, batch.kind[c], batch.asked[c], batch.sequences
    for j in range(kind.size):
        if sequences.shape[0] > 0:
            kind[j] = sequences[c % sequences.shape[0], j]
        else:
            kind[j] = next_random(batch.rng[c], kinds.run_s.size)
        asked[j] = 1
        job, state = sim.jobs[j], sim.state[j]
        job["submit"] = j * rules.gap_s
        job["duration"] = job["expected"] = state["left"] = kinds.run_s[kind[j]]
        job["shape"] = kinds.shape[kind[j]]
        state["status"] = FUTURE
        state["first"] = state["start"] = state["end"] = np.nan
        state["restarts"] = 0
    sim.clock[0], sim.clock[1] = -np.inf, np.inf
    sim.counter[:] = 0
    sim.ends.size[0] = 0
    for n in range(sim.node.size):
        sim.node[n]["free"] = sim.resources.gpus[n] = batch.whole.gpus[n]
        sim.resources.cores[n], sim.resources.memory[n] = batch.whole.cores[n], batch.whole.memory[n]
    batch.stubborn[c] = 0
    batch.job[c] = _go_on(sim, _log(batch.log, c), batch.masks, asked, batch.stubborn[c : c + 1], rules.masked)


@jit
def _fits_somewhere(resources: Resources, masks: Flags, request: PlacementRequest) -> bool:
    for server in range(resources.gpus.size):
        if node_fits(resources, masks, request, server):
            return True
    return False


@jit
def _act(batch: Batch, rules: EpisodeRules, c: int, sim: Sim, log: EventLog, action: int) -> float:
    """Starts the job that is asked for, or leaves it waiting; the paper's reward (Section 5.2)."""
    job, servers = batch.job[c], sim.node.size
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    batch.asked[c, job] = 1
    runs = action < batch.kinds.run_s.size * servers
    if runs and node_fits(sim.resources, batch.masks, request, action % servers):
        sim.chosen[0] = action % servers
        start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        return 0.0 if rules.waits else utilization(sim, batch.kinds.share, batch.kind[c])
    could = runs or _fits_somewhere(sim.resources, batch.masks, request)
    return -1.0 if could and not rules.waits else 0.0


@jit
def utilization(sim: Sim, share: Floats, kind: Ints) -> float:
    """Eq. 4 now. At the first submission, where it is 0 / 0, its limit: the shares of what runs."""
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
def _go_on(sim: Sim, log: EventLog, masks: Flags, asked: Ints, stubborn: Ints, masked: bool) -> int:
    """To the next job to ask for, at this instant or a later one; -1: all jobs have ended."""
    while True:
        job = _next_job(sim, masks, asked, masked)
        if job >= 0:
            return job
        if advance(sim, log) == OVER:
            waiting = _first_waiting(sim)
            if waiting < 0:
                return -1
            stubborn[0] += 1
            if stubborn[0] > MAX_REPROMPTS:  # an agent that leaves an empty cluster empty: one job is started for it
                request = shape_request(sim.shapes, sim.jobs[waiting]["shape"])
                sim.chosen[0] = 0
                while not node_fits(sim.resources, masks, request, sim.chosen[0]):
                    sim.chosen[0] += 1
                start_job(sim, log, waiting, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        asked[:] = 0


@jit
def _first_waiting(sim: Sim) -> int:
    for j in range(sim.jobs.size):
        if sim.state[j]["status"] == WAITING:
            return j
    return -1


@jit
def _next_job(sim: Sim, masks: Flags, asked: Ints, masked: bool) -> int:
    """The largest waiting job that was not asked for yet at this instant, the earliest of equals; or -1.

    With masks, a job that fits nowhere has nothing to choose and is passed over.
    """
    found, most = -1, -1
    for j in range(asked.size):
        if asked[j] == 0 and sim.state[j]["status"] == WAITING:
            request = shape_request(sim.shapes, sim.jobs[j]["shape"])
            if masked and not _fits_somewhere(sim.resources, masks, request):
                asked[j] = 1
            elif request.gpus > most:
                found, most = j, request.gpus
    return found


@jit
def _end(batch: Batch, c: int, sim: Sim) -> None:
    """U and length of the episode; f starts now, and the last action is rewarded with it."""
    batch.utilization[c] = utilization(sim, batch.kinds.share, batch.kind[c])
    batch.hours[c] = (sim.clock[0] - sim.jobs[0]["submit"]) / 3600.0
    batch.reward[c] += batch.utilization[c]
    batch.over[c] = 1


@jit
def _observe(batch: Batch, rules: EpisodeRules, c: int, sim: Sim) -> None:
    """What the agent sees, and what it may choose."""
    seen, mask, job, resources, whole = batch.observation[c], batch.mask[c], batch.job[c], sim.resources, batch.whole
    seen[:] = 0.0
    mask[:] = 0
    if job < 0:
        return
    servers, kind = sim.node.size, batch.kind[c, job]
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    can_start = False
    for n in range(servers):
        seen[3 * n] = resources.gpus[n] / max(whole.gpus[n], 1)
        seen[3 * n + 1] = resources.cores[n] / max(whole.cores[n], 1)
        seen[3 * n + 2] = resources.memory[n] / max(whole.memory[n], 1)
        fits = node_fits(resources, batch.masks, request, n)
        can_start = can_start or fits
        mask[kind * servers + n] = 1 if fits or not rules.masked else 0
    if not (rules.masked and can_start and _last_chance(sim, batch.asked[c], job)):
        mask[batch.kinds.run_s.size * servers + kind] = 1
    if rules.waits:
        _observe_more(sim, rules.slots, batch.kinds, batch.kind[c], batch.asked[c], whole.gpus, seen[3 * servers :])
        seen[seen.size - batch.kinds.run_s.size + kind] = 1.0


@jit
def _last_chance(sim: Sim, asked: Ints, job: int) -> bool:
    """Whether nothing would ever happen again if this job were left waiting."""
    if sim.ends.size[0] > 0 or sim.counter[ARRIVED] < sim.jobs.size:
        return False
    for j in range(asked.size):
        if j != job and asked[j] == 0 and sim.state[j]["status"] == WAITING:
            return False
    return True


@jit
def _observe_more(
    sim: Sim, slots: int, kinds: JobDistribution, kind: Ints, asked: Ints, whole: Ints, seen: Reals
) -> None:
    """When what will be free, who waits, what is to come; times in units of the longest run time."""
    many, jobs, now, unit = kinds.run_s.size, sim.jobs.size, sim.clock[0], kinds.run_s[kinds.run_s.size - 1]
    servers = sim.node.size
    at = 2 * slots * servers
    last, last_job = -np.inf, -1
    for _ in range(sim.ends.size[0]):  # by (end, job), so that equal futures look equal whatever the past
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
            seen[place] = sim.shapes[sim.jobs[job]["shape"]]["gpus"] / max(whole[server], 1)
            seen[place + 1] = (next_end - now) / unit
    work = 0.0
    for j in range(jobs):
        status = sim.state[j]["status"]
        if status == WAITING:
            seen[at + (many if asked[j] else 0) + kind[j]] += 1.0 / jobs
        if status != FUTURE:
            work += kinds.share[kind[j]] * kinds.run_s[kind[j]]
    at += 2 * many
    arrived = sim.counter[ARRIVED]
    seen[at] = arrived / jobs
    seen[at + 1] = (sim.jobs[arrived]["submit"] - now) / unit if arrived < jobs else 0.0
    seen[at + 2] = (now - sim.jobs[0]["submit"]) / (2.0 * unit)
    seen[at + 3] = work / unit


def inputs_of(servers: int, kinds: int, rules: EpisodeRules) -> int:
    """Numbers in one observation."""
    return 3 * servers + (2 * rules.slots * servers + 3 * kinds + 4 if rules.waits else 0)
