"""The RLTune agent's compiled passes, live and in replays: the scores of waiting jobs, and their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.attention import NONE as NO_ATTENTION
from gpusched.agents.common.attention import apply_attention
from gpusched.agents.common.nets import Net, forward, new_buffers
from gpusched.agents.rltune.history import (
    FEATURES,
    BurstPlace,
    JobHistory,
    QueueObservation,
    Reals,
    RequestShape,
    features,
)
from gpusched.compiled import jit
from gpusched.sched.backfill import has_parts
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose
from gpusched.sched.sorting import by_priority, stable_order
from gpusched.sched.state import FIRST_FIT, ClusterState, Floats, Ints, PlacementRequest, Resources

_CLIP = np.float32(5.0)


class JobScorer(NamedTuple):
    """The scorer of jobs: ``linear . (features, 1) + strength * tanh(net(scaled features))``; larger goes first.

    The network's output is bounded, so that it can do little harm on a workload unlike its training data: at most by
    one, a factor of e in the estimated run time.

    Attributes:
        net: `FEATURES` inputs, one output.
        linear: ``float32[1, FEATURES + 1]``. strength: ``float32[1]``.
        mean, scale: ``float32[FEATURES]``: the network's input is ``(x - mean) * scale``; scale 0: x is not used.
        window: ``int64[1]``: jobs that the network scores at a decision.
        attention: See `apply_attention`; of size 0: the network scores each job separately.
    """

    net: Net
    linear: Reals
    mean: Reals
    scale: Reals
    strength: Reals
    window: Ints
    attention: Reals = NO_ATTENTION


class PreparedScorer(NamedTuple):
    """The weights, and the information and backfill that they were trained with."""

    scorer: JobScorer
    knows: str
    backfill: int


class ScoringState(NamedTuple):
    """The state of a decision: history, scorer, placement rule, and buffers.

    Attributes:
        expected: ``float64[jobs]``: estimated run times, seconds; empty: the agent knows none.
        ahead, alike: ``int64[jobs]``: waiting jobs of the same burst, earlier ones and all, per job of the queue.
        inputs: ``float32[window, FEATURES]``: the network's inputs for the window's jobs.
        priority: ``int64[jobs]``: operators' priorities, which go before scores; empty: all 0.
    """

    known: JobHistory
    scorer: JobScorer
    rule: int
    backfill: int
    expected: Floats
    ahead: Ints
    alike: Ints
    inputs: Reals
    priority: Ints


def new_scoring_state(
    prepared: PreparedScorer, known: JobHistory, rule: int, expected: Floats, priority: Ints = np.zeros(0, np.int64)
) -> ScoringState:
    """Return the state of decisions about the jobs of a history."""
    inputs = np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)
    ahead, alike = np.zeros((2, len(known.facts)), np.int64)
    own = expected if prepared.knows in ("estimate", "oracle") else expected[:0]
    return ScoringState(known, prepared.scorer, rule, prepared.backfill, own, ahead, alike, inputs, priority)


@jit
def window_of(by: ScoringState, queue: Ints) -> Ints:
    """Return the window, those that the network scores: the first of each burst, then the second of each, and so on.

    Args:
        by: Its ``ahead`` and ``alike`` are written.
        queue: ``int64[waiting]``, in order of submission.

    Returns:
        ``int64[waiting]``: positions in ``queue``, those of the window first, each part in order of the queue.
    """
    known, most = by.known, 0
    for i in range(queue.size):
        burst = known.facts[queue[i]]["burst"]
        by.ahead[i] = known.waiting[burst]
        known.waiting[burst] += 1
        most = max(most, by.ahead[i])
    for i in range(queue.size):
        by.alike[i] = known.waiting[known.facts[queue[i]]["burst"]]
    for i in range(queue.size):
        known.waiting[known.facts[queue[i]]["burst"]] = 0
    if queue.size <= by.scorer.window[0]:
        return np.arange(queue.size)
    starts = np.zeros(most + 2, np.int64)
    for i in range(queue.size):
        starts[by.ahead[i] + 1] += 1
    for level in range(most + 1):
        starts[level + 1] += starts[level]
    found = np.empty(queue.size, np.int64)
    for i in range(queue.size):
        found[starts[by.ahead[i]]] = i
        starts[by.ahead[i]] += 1
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
    """Return whether no GPU is free, and no job asks for CPU cores only, or may ask for a part of a GPU."""
    if obs.free > 0.0 or has_parts(state.resources.shared):
        return False
    gpus, shape = state.requests.gpus, state.jobs.shape
    for job in queue:
        if gpus[shape[job]] == 0:
            return False
    return True


@jit
def in_order(state: ClusterState, obs: QueueObservation, queue: Ints, by: ScoringState) -> tuple[Ints, bool]:
    """Return the jobs in order, ``int64[waiting]``, and whether all scores are finite."""
    scores = scores_of(state, obs, queue, window_of(by, queue), by)
    return by_priority(queue[stable_order(-scores)], by.priority), bool(np.all(np.isfinite(scores)))


@jit
def scores_of(state: ClusterState, obs: QueueObservation, queue: Ints, places: Ints, by: ScoringState) -> Floats:
    """Return each job's score, ``float64[waiting]``, and set the inputs of the window's jobs; see `window_of`."""
    jobs, scorer, shapes = state.jobs, by.scorer, state.jobs.feasibility.size
    fits, share = np.full(shapes, -1, np.int64), np.zeros(shapes)
    row, out, work = np.zeros(len(FEATURES)), np.zeros(1, np.float32), new_buffers(scorer.net)
    scores = np.empty(queue.size)
    nets = scorer.attention.size == 0 and scorer.strength[0] != 0.0
    for i in range(queue.size):
        place = places[i]
        job = queue[place]
        shape = jobs.shape[job]
        if fits[shape] < 0:
            request = request_of(state.requests, shape)
            fits[shape] = choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch)
            share[shape] = _allowed_free(state, request)
        burst = BurstPlace(by.ahead[place], by.alike[place])
        features(by.known, by.expected, obs, job, burst, RequestShape(share[shape], fits[shape] == 1), row)
        # In double precision: jobs with different estimates must not have equal scores.
        total = float(scorer.linear[0, row.size])
        for k in range(row.size):
            total += scorer.linear[0, k] * row[k]
        if i < by.inputs.shape[0]:
            for k in range(row.size):
                by.inputs[i, k] = min(max((np.float32(row[k]) - scorer.mean[k]) * scorer.scale[k], -_CLIP), _CLIP)
            if nets:
                forward(scorer.net, by.inputs[i], out, work)
                total += scorer.strength[0] * np.tanh(out[0])
        scores[place] = total
    if scorer.attention.size > 0:
        window = places[: by.inputs.shape[0]]
        answers = np.empty((window.size, 1), np.float32)
        apply_attention(scorer.net, scorer.attention, by.inputs[: window.size], answers)
        for i in range(window.size):
            scores[window[i]] += scorer.strength[0] * np.tanh(answers[i, 0])
    return scores


@jit
def _allowed_free(state: ClusterState, request: PlacementRequest) -> float:
    """Return the share of nodes with a free GPU among those that a request may use."""
    free = nodes = 0
    for node in range(request.lo, request.hi):
        if request.mask < 0 or state.jobs.masks[request.mask, node] != 0:
            nodes += 1
            free += state.resources.gpus[node] > 0
    return free / max(nodes, 1)
