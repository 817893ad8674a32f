"""The RLTune agent's compiled passes, live and in replays: the window of scored jobs, their scores, and the starts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.attention import NONE as NO_ATTENTION
from gpusched.agents.common.attention import apply_attention
from gpusched.agents.common.nets import Net, forward, new_buffers
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
from gpusched.sched.sorting import by_priority, stable_order
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

MAX_HELD = 1  # jobs with held nodes at a time; with more, whole clusters idled because of wrong estimates
_CLIP = np.float32(5.0)
_SAFETY = 2.0  # a job without a limit is assumed to end within this multiple of its expected run time


class JobScorer(NamedTuple):
    """The scorer of jobs: ``linear . (features, 1) + strength * tanh(net(scaled features))``.

    The network's output is bounded, so that it can do little harm on a workload unlike its training data: at most by
    one, a factor of e in the estimated run time.

    Two scores: how early it goes (larger first), and whether nodes are held for it while it does not fit (above 0).

    Attributes:
        net: `FEATURES` inputs, two outputs.
        linear: ``float32[2, FEATURES + 1]``. strength: ``float32[2]``.
        mean, scale: ``float32[FEATURES]``: the network's input is ``(x - mean) * scale``; scale 0: x is not used.
        window: ``int64[1]``: jobs scored at a decision.
        odds: Prior odds of run times.
        attention: See `apply_attention`; of size 0: the network scores each job separately.
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
    """The weights, and the information and backfill that they were trained with."""

    scorer: JobScorer
    knows: str
    backfill: int


class ScoringState(NamedTuple):
    """The state of a decision: history, scorer, placement rule, and buffers.

    Attributes:
        ahead: ``int64[jobs + 1]``: earlier waiting jobs of the same burst, per job of the queue.
        inputs: ``float32[window, FEATURES]``: the network's inputs for the window's jobs.
        hold: ``uint8[jobs]``: whether nodes are held for the job.
        priority: ``int64[jobs]``: operators' priorities, which go before scores; empty: all 0.
    """

    known: JobHistory
    scorer: JobScorer
    rule: int
    backfill: int
    ahead: Ints
    inputs: Reals
    hold: Flags
    priority: Ints


def new_scoring_state(
    prepared: PreparedScorer, known: JobHistory, rule: int, priority: Ints = np.zeros(0, np.int64)
) -> ScoringState:
    """Return the state of decisions about the jobs of a history."""
    jobs, inputs = len(known.facts), np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)
    ahead, hold = np.zeros(jobs + 1, np.int64), np.zeros(jobs, np.uint8)
    return ScoringState(known, prepared.scorer, rule, prepared.backfill, ahead, inputs, hold, priority)


@jit
def score(scorer: JobScorer, row: Reals, scaled: Reals, out: Reals, work: Reals) -> None:
    """Write one job's two scores to ``out: float32[2]`` and the network's inputs to ``scaled: float32[FEATURES]``.

    With attention the network's part is left out here; `_attend` adds it for the whole window.
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
    """Return the jobs to score, at most ``size``: the first of each burst, then the second of each, and so on.

    Args:
        known: The history.
        queue: ``int64[waiting]``, in order of submission.
        size: Of the window.
        ahead: ``int64[>= waiting]``: written: earlier waiting jobs of the same burst.

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
    """Return the state common to the jobs of a partition's queue."""
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
def none_fits(state: ClusterState, obs: QueueObservation, queue: Ints) -> bool:
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
def score_window(state: ClusterState, obs: QueueObservation, queue: Ints, by: ScoringState) -> tuple[Ints, Reals]:
    """Score the jobs of the window, and set for whom of the queue nodes are held.

    Returns:
        ``int64[waiting]``: places in the queue, the window's first; ``float32[window, 2]``: its scores.
    """
    hold, places = by.hold, window_of(by.known, queue, by.scorer.window[0], by.ahead)
    window = places[: by.scorer.window[0]]
    scores = scores_of(by.known, by.scorer, obs, state, queue, window, by.ahead, by.inputs)
    for job in queue:
        hold[job] = 0
    for i in range(window.size):
        hold[queue[window[i]]] = scores[i, 1] > 0.0
    return places, scores


@jit
def in_order(state: ClusterState, obs: QueueObservation, queue: Ints, by: ScoringState) -> tuple[Ints, bool]:
    """Return the jobs in order, ``int64[waiting]``, and whether all scores are finite.

    Of equal priority, jobs beyond the window come after it, in the window's order.
    """
    places, scores = score_window(state, obs, queue, by)
    places[: scores.shape[0]] = places[stable_order(-scores[:, 0])]
    return by_priority(queue[places], by.priority), bool(np.all(np.isfinite(scores)))


@jit
def scores_of(
    known: JobHistory,
    scorer: JobScorer,
    obs: QueueObservation,
    state: ClusterState,
    queue: Ints,
    window: Ints,
    ahead: Ints,
    inputs: Reals,
) -> Reals:
    """Return the two scores of each of ``queue[window]``, ``float32[window, 2]``; see `ScoringState` for buffers."""
    jobs, releases, shapes = state.jobs, state.releases, state.jobs.feasibility.size
    fits, share, drain = np.full(shapes, -1, np.int64), np.zeros(shapes), np.zeros(shapes)
    slots, due = np.zeros(0, np.int64), np.zeros(0)
    row, work = np.zeros(inputs.shape[1], np.float32), new_buffers(scorer.net)
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
        score(scorer, row, inputs[i], scores[i], work)
    if scorer.attention.size > 0:
        _attend(scorer, inputs[: window.size], scores)
    return scores


@jit
def _attend(scorer: JobScorer, inputs: Reals, scores: Reals) -> None:
    """Add the network's part of a window's scores, with attention between its jobs."""
    answers = np.empty(scores.shape, np.float32)
    apply_attention(scorer.net, scorer.attention, inputs, answers)
    for i in range(scores.shape[0]):
        for o in range(scores.shape[1]):
            scores[i, o] += scorer.strength[o] * np.tanh(answers[i, o])


@jit
def _allowed_free(state: ClusterState, request: PlacementRequest) -> float:
    """Return the share of nodes with a free GPU among those that a request may use."""
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
    """Return the slots of ``releases`` by expected end, and the expected ends, ``float64[slots]``."""
    # hoisted: in the loop numba would count references each time
    releases, jobs, now = state.releases, state.jobs, state.now
    used = releases.used[0]
    due = np.empty(releases.end.size)
    ends = np.empty(used)
    for i in range(used):
        slot = releases.order[i]
        due[slot] = ends[i] = now + left_s(known, _owner(releases, jobs, slot), now)
    return releases.order[:used][stable_order(ends)], due


@jit
def await_room(state: ClusterState, resources: Resources, slots: Ints, due: Floats, request: PlacementRequest) -> float:
    """Return when ``request`` is expected to fit, in seconds, with its nodes in ``scratch.chosen``; infinite: never.

    A node of ``resources`` with less than 0 GPUs is unavailable, whatever is released there.
    """
    of, used = state.releases, np.full(2, slots.size)
    back = Releases(due, of.node, of.gpus, of.cores, of.memory, of.owner, slots, used)
    return earliest(None, resources, back, state.jobs.masks, request, FIRST_FIT, state.now, 0.0, state.scratch)


class HoldInputs(NamedTuple):
    """The arguments of a pass.

    Attributes:
        wanted: ``uint8[jobs]``: whether to hold nodes for the job. rule: Placement rule.
        most: Maximum of jobs with held nodes. held: ``int64[1]``: their present number.
        until: ``float64[1]``: when the held nodes are expected to be free, seconds.
    """

    known: JobHistory
    odds: HazardRates
    wanted: Flags
    rule: int
    most: int
    until: Floats
    held: Ints


@jit
def arrange(state: ClusterState, queue: Ints, by: ScoringState) -> int:
    """Run one pass over a partition's jobs in order: start those that fit; hold nodes for some that do not.

    The held nodes are those on which the job is expected to fit first; later jobs may use them only if they are
    expected to end by then. Holds last for one pass. With backfill NONE the first job that does not fit blocks all
    later ones, and no nodes are held.

    Returns:
        The first job that could not start, or -1.
    """
    for column, of in zip(state.scratch.late, state.resources):  # noqa: B905 - numba's zip takes no strict
        column[:] = of
    most = MAX_HELD if by.backfill != NONE and by.hold[queue].any() else 0
    until, held = np.full(1, np.inf), np.zeros(1, np.int64)
    holding = HoldInputs(by.known, by.scorer.odds, by.hold, by.rule, most, until, held)
    return _pass(state, queue, by.backfill, holding)[0]


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: HoldInputs) -> tuple[int, int]:
    """Place a job on nodes that are not held (``scratch.late``), or on held ones if it ends in time."""
    shape, scratch, masks = state.jobs.shape[job], state.scratch, state.jobs.masks
    request, stamp = request_of(state.requests, shape), scratch.stamp[0]
    if scratch.failed_late[shape] != stamp and choose(scratch.late, masks, request, of.rule, scratch):
        return STARTED, shape
    scratch.failed_late[shape] = stamp
    full = of.held[0] == 0
    if not full and conservative_run_s(of.known, of.odds, job) <= of.until[0] - state.now:
        if choose(state.resources, masks, request, of.rule, scratch):
            return STARTED, shape
        full = True
    if full and of.held[0] == of.most:  # below the maximum, nodes may still be held for a job of this shape
        scratch.failed[shape] = stamp
    return PRIORITY, shape


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, of: HoldInputs) -> None:
    """Subtract a started job from the resources of jobs that must not use held nodes."""
    for part in range(request.parts):
        take(state.scratch.late, request, state.scratch.chosen[part])


@jit
def _hold(state: ClusterState, job: int, code: int, of: HoldInputs) -> float:
    """Hold nodes for a job that does not start, if it qualifies; return until when, in seconds."""
    if of.wanted[job] and of.held[0] < of.most:
        of.held[0] += 1
        of.until[0], nodes = nodes_for(state, state.scratch.late, of.known, job)
        for node in nodes:
            state.scratch.late.gpus[node] = -1
    return float(of.until[0])


@jit
def nodes_for(state: ClusterState, resources: Resources, known: JobHistory, job: int) -> tuple[float, Ints]:
    """Return when the job is expected to fit, in seconds, and its nodes, ``int64[parts]``; empty: never."""
    request = request_of(state.requests, state.jobs.shape[job])
    slots, due = due_slots(known, state)
    until = await_room(state, resources, slots, due, request)
    return until, state.scratch.chosen[: request.parts if until < np.inf else 0].copy()


@jit
def first_held(state: ClusterState, order: Ints, hold: Flags) -> int:
    """Return the first job in order that qualifies for a hold and does not fit; -1: none.

    A job that does not fit only because of earlier ones waits for the next decision.
    """
    jobs = state.jobs
    for job in order:
        shape = jobs.shape[job]
        if hold[job] and jobs.feasibility[shape] == OK and not exceeds(jobs.links, jobs.room, jobs.account, job):
            request = request_of(state.requests, shape)
            if not choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch):
                return int(job)
    return -1


def keep_of(state: ClusterState, order: Ints, by: ScoringState) -> NodeHold | None:
    """Return the job for which a mapping holds nodes."""
    job = int(first_held(state, order, by.hold)) if by.backfill != NONE else -1
    return None if job < 0 else NodeHold(job, lambda: nodes_for(state, state.resources, by.known, job)[1])


@jit
def conservative_run_s(known: JobHistory, odds: HazardRates, job: int) -> float:
    """Return seconds within which a job is expected to end: its limit, else a multiple of its expected run time."""
    limit = known.facts[job]["limit"]
    if not np.isnan(limit):
        return float(np.exp(limit))
    return float(_SAFETY * np.exp(expected(known.history, odds, job, limit)[0]))


_pass = queue_pass(_place, _hold, _started, hold_behind=True)
