"""The RLTune agent's compiled passes: which jobs are scored, their scores, and who starts. Live and simulated alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.attention import NONE as NO_ATTENTION
from gpusched.agents.common.attention import attended
from gpusched.agents.common.nets import Net, forward, work_for
from gpusched.agents.rltune.history import (
    FEATURES,
    JobHistory,
    QueueObservation,
    Reals,
    RequestShape,
    features,
    left_s,
    note_running,
)
from gpusched.compiled import inlined, jit
from gpusched.estimation.odds import HazardRates, expected
from gpusched.sched.backfill import earliest, take
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.queue_pass import queue_pass
from gpusched.sched.mapping.queue import NodeHold
from gpusched.sched.place import choose
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import (
    FIRST_FIT,
    NONE,
    OK,
    PRIORITY,
    STARTED,
    ClusterState,
    Flags,
    Floats,
    Ints,
    PlacementRequest,
    QueueJobs,
    Releases,
    Resources,
)

MOST_HELD = 1  # jobs for which nodes are held at once; with more, whole clusters stood idle for wrong estimates
_CLIP = np.float32(5.0)
_SURELY = 2.0  # times its expected run time a job without a limit is expected to be over


class JobScorer(NamedTuple):
    """What scores a job: ``linear . (features, 1) + strength * tanh(net(scaled features))``.

    The network is bounded so that on a workload unlike the one it learned from it cannot do much harm: by one, a
    factor of e in the estimated run time.

    Two scores: how early it goes (larger first), and whether nodes are held for it while it does not fit (above 0).

    Attributes:
        net: `FEATURES` inputs, two outputs.
        linear: ``float32[2, FEATURES + 1]``. strength: ``float32[2]``.
        mean, scale: ``float32[FEATURES]``: the network sees ``(x - mean) * scale``; scale 0: it does not see x.
        window: ``int64[1]``: jobs scored at a decision.
        odds: Of run times, before much has been seen.
        attention: See `attended`; of size 0: the network sees each job alone.
    """

    net: Net
    linear: Reals
    mean: Reals
    scale: Reals
    strength: Reals
    window: Ints
    odds: HazardRates
    attention: Reals = NO_ATTENTION


class PreparedScorer(NamedTuple):
    """The weights, and what they were trained for."""

    scorer: JobScorer
    knows: str
    backfill: int


class Scored(NamedTuple):
    """Who decides: what it knows, what scores jobs, how they are placed; and room to work in.

    Attributes:
        ahead: ``int64[jobs + 1]``: how many of its burst wait before each of the queue.
        seen: ``float32[window, FEATURES]``: what the network saw of the window's jobs.
        hold: ``uint8[jobs]``: for which of the queue nodes are held.
    """

    known: JobHistory
    scorer: JobScorer
    rule: int
    backfill: int
    ahead: Ints
    seen: Reals
    hold: Flags


def scored_by(prepared: PreparedScorer, known: JobHistory, rule: int) -> Scored:
    """Return who decides about the jobs that are known."""
    jobs, seen = len(known.facts), np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)
    ahead, hold = np.zeros(jobs + 1, np.int64), np.zeros(jobs, np.uint8)
    return Scored(known, prepared.scorer, rule, prepared.backfill, ahead, seen, hold)


@jit
def score(scorer: JobScorer, row: Reals, scaled: Reals, out: Reals, work: Reals) -> None:
    """One job's two scores into ``out: float32[2]``; ``scaled: float32[FEATURES]`` gets what the network saw.

    With attention without the network, whose part `_attend` adds for the whole window.
    """
    for i in range(row.size):
        scaled[i] = min(max((row[i] - scorer.mean[i]) * scorer.scale[i], -_CLIP), _CLIP)
    nets = scorer.attention.size == 0 and (scorer.strength[0] != 0.0 or scorer.strength[1] != 0.0)
    if nets:
        forward(scorer.net, scaled, out, work)
    for o in range(2):
        total = scorer.linear[o, row.size]
        for i in range(row.size):
            total += scorer.linear[o, i] * row[i]
        out[o] = total + scorer.strength[o] * np.tanh(out[o]) if nets else total


@jit
def window_of(known: JobHistory, queue: Ints, size: int, ahead: Ints) -> Ints:
    """Which jobs are scored, at most ``size``: the first of each burst, then the second of each, and so on.

    Args:
        known: What is remembered.
        queue: ``int64[waiting]``, in order of submission.
        size: Of the window.
        ahead: ``int64[>= waiting]``: gets how many of its burst wait before each job.

    Returns:
        ``int64[waiting]``: positions in ``queue``, those of the window first, each part in order of the queue.
    """
    most = 0
    for i in range(queue.size):
        burst = known.facts[queue[i]]["burst"]
        ahead[i] = known.ahead[burst]
        known.ahead[burst] += 1
        most = max(most, ahead[i])
    for i in range(queue.size):
        known.ahead[known.facts[queue[i]]["burst"]] = 0
    if queue.size <= size:
        return np.arange(queue.size)
    starts = np.zeros(most + 2, np.int64)
    for i in range(queue.size):
        starts[ahead[i] + 1] += 1
    for level in range(most + 1):
        starts[level + 1] += starts[level]
    found = np.empty(queue.size, np.int64)
    for i in range(queue.size):
        found[starts[ahead[i]]] = i
        starts[ahead[i]] += 1
    return found


@jit
def observation_of(state: ClusterState, total: Resources, queue: Ints) -> QueueObservation:
    """What the jobs of a partition's queue have in common."""
    shape, resources = state.jobs.shape[queue[0]], state.resources
    lo, hi = state.requests.lo[shape], state.requests.hi[shape]
    free = idle = gpus = 0
    for node in range(lo, hi):
        gpus += max(total.gpus[node], 0)
        if resources.gpus[node] > 0:
            free += resources.gpus[node]
            idle += resources.gpus[node] == total.gpus[node]
    return QueueObservation(
        state.now, free / max(gpus, 1), idle / max(hi - lo, 1), float(queue.size), float(max(gpus, 1))
    )  # fmt: skip


@jit
def nobody_fits(state: ClusterState, obs: QueueObservation, queue: Ints) -> bool:
    """Whether no GPU is free and no job asks for CPU cores only."""
    if obs.free > 0.0:
        return False
    gpus, shape = state.requests.gpus, state.jobs.shape
    for job in queue:
        if gpus[shape[job]] == 0:
            return False
    return True


@inlined
@jit
def look(state: ClusterState, obs: QueueObservation, queue: Ints, by: Scored) -> tuple[Ints, Reals]:
    """Score the jobs of the window, and set for whom of the queue nodes are held.

    Returns:
        ``int64[waiting]``: places in the queue, the window's first; ``float32[window, 2]``: its scores.
    """
    hold, places = by.hold, window_of(by.known, queue, by.scorer.window[0], by.ahead)
    window = places[: by.scorer.window[0]]
    scores = scores_of(by.known, by.scorer, obs, state, queue, window, by.ahead, by.seen)
    for job in queue:
        hold[job] = 0
    for i in range(window.size):
        hold[queue[window[i]]] = scores[i, 1] > 0.0
    return places, scores


@jit
def in_order(state: ClusterState, obs: QueueObservation, queue: Ints, by: Scored) -> tuple[Ints, bool]:
    """The jobs from first to last, ``int64[waiting]``; whether all scores are numbers.

    Jobs beyond the window come after it, in the window's order.
    """
    places, scores = look(state, obs, queue, by)
    places[: scores.shape[0]] = places[stable_order(-scores[:, 0])]
    return queue[places], bool(np.all(np.isfinite(scores)))


@jit
def scores_of(
    known: JobHistory,
    scorer: JobScorer,
    obs: QueueObservation,
    state: ClusterState,
    queue: Ints,
    window: Ints,
    ahead: Ints,
    seen: Reals,
) -> Reals:
    """The two scores of each of ``queue[window]``, ``float32[window, 2]``; see `Scored` for ``ahead`` and ``seen``."""
    jobs, releases, shapes = state.jobs, state.releases, state.jobs.feasibility.size
    fits, share, drain = np.full(shapes, -1, np.int64), np.zeros(shapes), np.zeros(shapes)
    slots, due = np.zeros(0, np.int64), np.zeros(0)
    row, work = np.zeros(seen.shape[1], np.float32), work_for(scorer.net)
    scores = np.empty((window.size, 2), np.float32)
    for i in range(releases.used[0]):
        note_running(known, _owner(releases, jobs, releases.order[i]), obs.now)
    for i in range(window.size):
        job = queue[window[i]]
        shape = jobs.shape[job]
        if fits[shape] < 0:
            request = request_of(state.requests, shape)
            fits[shape] = choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch)
            share[shape] = _allowed_free(state, request)
            if not fits[shape]:
                if due.size == 0:
                    slots, due = due_slots(known, state)
                drain[shape] = await_room(state, state.resources, slots, due, request) - obs.now
        of = RequestShape(share[shape], fits[shape] == 1, min(drain[shape], 1e9))
        features(known, scorer.odds, obs, job, ahead[window[i]], of, row)
        score(scorer, row, seen[i], scores[i], work)
    if scorer.attention.size > 0:
        _attend(scorer, seen[: window.size], scores)
    return scores


@jit
def _attend(scorer: JobScorer, seen: Reals, scores: Reals) -> None:
    """The network's part of a window's scores, where it sees the jobs together."""
    answers = np.empty(scores.shape, np.float32)
    attended(scorer.net, scorer.attention, seen, answers)
    for i in range(scores.shape[0]):
        for o in range(scores.shape[1]):
            scores[i, o] += scorer.strength[o] * np.tanh(answers[i, o])


@jit
def _allowed_free(state: ClusterState, request: PlacementRequest) -> float:
    """The share of nodes with a free GPU among those that a request may use."""
    free = nodes = 0
    for node in range(request.lo, request.hi):
        if request.mask < 0 or state.jobs.masks[request.mask, node] != 0:
            nodes += 1
            free += state.resources.gpus[node] > 0
    return free / max(nodes, 1)


@jit
def _owner(releases: Releases, jobs: QueueJobs, slot: int) -> int:
    """Return the job of a slot as `JobHistory` counts; owners below 0 are running jobs, after all pending ones."""
    owner = releases.owner[slot]
    return int(owner if owner >= 0 else jobs.shape.size - 1 - owner)


@jit
def due_slots(known: JobHistory, state: ClusterState) -> tuple[Ints, Floats]:
    """The slots of ``releases`` in the order in which they are expected back, and when, ``float64[slots]`` of all."""
    releases, jobs, now = state.releases, state.jobs, state.now  # in the loop their arrays would be counted each time
    used = releases.used[0]
    due = np.empty(releases.end.size)
    ends = np.empty(used)
    for i in range(used):
        slot = releases.order[i]
        due[slot] = ends[i] = now + left_s(known, _owner(releases, jobs, slot), now)
    return releases.order[:used][stable_order(ends)], due


@jit
def await_room(state: ClusterState, resources: Resources, slots: Ints, due: Floats, request: PlacementRequest) -> float:
    """When ``request`` is expected to fit, in seconds; ``scratch.chosen``: on which nodes. Infinite: not in sight.

    A node of ``resources`` with less than 0 GPUs is nobody's, whatever comes back there.
    """
    of, used = state.releases, np.full(2, slots.size)
    back = Releases(due, of.node, of.gpus, of.cores, of.memory, of.owner, slots, used)
    return earliest(None, resources, back, state.jobs.masks, request, FIRST_FIT, state.now, 0.0, state.scratch)


class HoldInputs(NamedTuple):
    """What a pass goes by.

    Attributes:
        wanted: ``uint8[jobs]``: for whom nodes are held. rule: How jobs are placed.
        most: For so many jobs nodes are held at once. held: ``int64[1]``: for how many they are.
        until: ``float64[1]``: when those nodes are expected to be free, seconds.
    """

    known: JobHistory
    odds: HazardRates
    wanted: Flags
    rule: int
    most: int
    until: Floats
    held: Ints


@jit
def arrange(state: ClusterState, queue: Ints, by: Scored) -> int:
    """One pass over a partition's jobs in their order: who fits starts; for some who do not, nodes are held.

    Held are the nodes on which the job is expected to fit first; jobs behind it get them now only where they are
    expected to be gone by then. Nothing of that is remembered until the next pass. With backfill NONE the first job
    that does not fit blocks all behind it, and none are held.

    Returns:
        The first job that could not start, or -1.
    """
    for column, of in zip(state.scratch.late, state.resources):  # noqa: B905 - numba's zip takes no strict
        column[:] = of
    most = MOST_HELD if by.backfill != NONE and by.hold[queue].any() else 0
    until, held = np.full(1, np.inf), np.zeros(1, np.int64)
    holding = HoldInputs(by.known, by.scorer.odds, by.hold, by.rule, most, until, held)
    return _pass(state, queue, by.backfill, holding)[0]


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: HoldInputs) -> tuple[int, int]:
    """Where nothing is held, which ``scratch.late`` has; else where something is, if it is gone in time."""
    shape, scratch, masks = state.jobs.shape[job], state.scratch, state.jobs.masks
    request, stamp = request_of(state.requests, shape), scratch.stamp[0]
    if scratch.failed_late[shape] != stamp and choose(scratch.late, masks, request, of.rule, scratch):
        return STARTED, shape
    scratch.failed_late[shape] = stamp
    full = of.held[0] == 0
    if not full and gone_by_s(of.known, of.odds, job) <= of.until[0] - state.now:
        if choose(state.resources, masks, request, of.rule, scratch):
            return STARTED, shape
        full = True
    if full and of.held[0] == of.most:  # with fewer held, nodes may yet be held for one of the shape
        scratch.failed[shape] = stamp
    return PRIORITY, shape


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, of: HoldInputs) -> None:
    """Its nodes have less for those who must not use what is held."""
    for part in range(request.parts):
        take(state.scratch.late, request, state.scratch.chosen[part])


@jit
def _hold(state: ClusterState, job: int, code: int, of: HoldInputs) -> float:
    """Keeps nodes from those behind a job that does not start, if it is one of those; until when, in seconds."""
    if of.wanted[job] and of.held[0] < of.most:
        of.held[0] += 1
        of.until[0], nodes = nodes_for(state, state.scratch.late, of.known, job)
        for node in nodes:
            state.scratch.late.gpus[node] = -1
    return float(of.until[0])


@jit
def nodes_for(state: ClusterState, resources: Resources, known: JobHistory, job: int) -> tuple[float, Ints]:
    """When the job is expected to fit, in seconds, and on which nodes, ``int64[parts]``; none: not in sight."""
    request = request_of(state.requests, state.jobs.shape[job])
    slots, due = due_slots(known, state)
    until = await_room(state, resources, slots, due, request)
    return until, state.scratch.chosen[: request.parts if until < np.inf else 0].copy()


@jit
def first_held(state: ClusterState, order: Ints, hold: Flags) -> int:
    """The first of the order for whom nodes are to be held and that does not fit as things stand; -1: none.

    One that does not fit only because of those ahead of it has to wait for the next decision.
    """
    jobs = state.jobs
    for job in order:
        shape = jobs.shape[job]
        if hold[job] and jobs.feasibility[shape] == OK and not exceeds(jobs.links, jobs.room, jobs.account, job):
            request = request_of(state.requests, shape)
            if not choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch):
                return int(job)
    return -1


def keep_of(state: ClusterState, order: Ints, by: Scored) -> NodeHold | None:
    """For whom a mapping holds nodes."""
    job = int(first_held(state, order, by.hold)) if by.backfill != NONE else -1
    return None if job < 0 else NodeHold(job, lambda: nodes_for(state, state.resources, by.known, job)[1])


@jit
def gone_by_s(known: JobHistory, odds: HazardRates, job: int) -> float:
    """Seconds within which a job is expected to be over: its limit, else some times its expected run time."""
    limit = known.facts[job]["limit"]
    if not np.isnan(limit):
        return float(np.exp(limit))
    return float(_SURELY * np.exp(expected(known.history, odds, job, limit)[0]))


_pass = queue_pass(_place, _hold, _started, hold_behind=True)
