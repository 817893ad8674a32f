"""The GIST agent's pass over a partition's queue, the same live and in replays.

It orders the waiting jobs by their scores, reserves servers for the first job that does not fit, and places each other
job on its best servers unless the "hold" network keeps it waiting. Explicit priorities go before scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.nets import Reals, new_buffers
from gpusched.agents.gist.networks import (
    HOLD_INPUTS,
    JOB_INPUTS,
    SERVER_INPUTS,
    GistWeights,
    Head,
    PartitionObservation,
    hold_inputs,
    job_inputs,
    observation_of,
    score,
    server_inputs,
    time_inputs,
)
from gpusched.compiled import jit
from gpusched.sched.backfill import keep_request
from gpusched.sched.fit import fitting, request_of
from gpusched.sched.kernel.queue_pass import UNSOUND, queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.sorting import by_priority, stable_order
from gpusched.sched.state import (
    BACKFILL,
    BEST_FIT,
    EASY,
    POLICY,
    PRIORITY,
    STARTED,
    UNLIMITED,
    ClusterState,
    Flags,
    Floats,
    Ints,
    PlacementRequest,
    QueueJobs,
    Requests,
    Resources,
    Scratch,
)

_JOB, _SERVER, _HOLD = len(JOB_INPUTS), len(SERVER_INPUTS), len(HOLD_INPUTS)


@jit
def agent_pass(
    state: ClusterState, usable: Resources, queue: Ints, submit: Floats, priority: Ints, agent: GistWeights,
    need_order: bool,
) -> tuple[Ints, int, float, bool]:  # fmt: skip
    """Decide about one partition's jobs and update ``state`` as any pass does (`kernel.queue_pass`).

    ``usable`` is the nodes' capacity when empty; ``submit: float64[jobs]`` is on the clock of ``state.now``,
    ``priority: int64[jobs]``, empty: all 0; ``queue: int64[waiting]`` is by (priority, submission, id), the order among
    equal scores. ``need_order``: return an order and a head even if nothing fits: live reasons need them, a replay does
    not.

    Returns:
        The queue in order; the first job that did not fit (-1: none) and its latest start; whether all scores are
        finite. If not, the other values are invalid.
    """
    if queue.size == 0:
        return queue, -1, np.inf, True
    resources, requests, jobs = state.resources, state.requests, state.jobs
    fits = fitting(state, queue)
    if not need_order and not fits.any():
        return queue, -1, np.inf, True
    obs = observation_of(resources, usable, state.releases, requests, jobs, queue)
    inputs = np.zeros((queue.size, _JOB), np.float32)
    queue_inputs(inputs, obs, usable, requests, jobs, queue, submit, state.now, fits)
    scores, sound = score_queue(inputs, agent)
    if not sound:
        return queue, -1, np.inf, False
    ordered = by_score(queue, scores, priority)
    head, shadow, sound = run_queue(state, usable, ordered, submit, agent, obs, fits)
    return ordered, head, shadow, sound


@jit
def queue_inputs(
    inputs: Reals, obs: PartitionObservation, usable: Resources, requests: Requests, jobs: QueueJobs, queue: Ints,
    submit: Floats,
    now: float, fits: Flags,
) -> None:  # fmt: skip
    """Write ``inputs: float32[waiting, JOB_INPUTS]``; what depends on a shape alone is computed once per shape."""
    first = np.full(jobs.feasibility.size, -1, np.int64)
    for i in range(queue.size):
        job = queue[i]
        shape = jobs.shape[job]
        age, limit = now - submit[job], jobs.limit[job]
        if first[shape] >= 0:
            inputs[i] = inputs[first[shape]]
            time_inputs(inputs[i], limit, age)
        else:
            first[shape] = i
            job_inputs(inputs[i], obs, usable, request_of(requests, shape), limit, age, fits[shape] != 0)


@jit
def score_queue(inputs: Reals, agent: GistWeights) -> tuple[Floats, bool]:
    """Return the scores, ``float64[waiting]``, larger first, and whether all are finite."""
    scores = np.empty(inputs.shape[0])
    output, work = np.zeros(1, np.float32), new_buffers(agent.job.net)
    sound = True
    for i in range(scores.size):
        scores[i] = score(agent.job, inputs[i], output, work)
        sound = sound and np.isfinite(scores[i])
    return scores, sound


@jit
def by_score(queue: Ints, scores: Floats, priority: Ints) -> Ints:
    """Return the queue by (priority, score), ties in queue order: ``int64[waiting]``."""
    return by_priority(queue[stable_order(-scores)], priority)


@jit
def _choose_servers(
    resources: Resources, usable: Resources, masks: Flags, request: PlacementRequest, limit: float, age: float,
    now: float,
    agent: GistWeights, obs: PartitionObservation, head: Head, late: bool, may_hold: bool, scratch: Scratch,
) -> tuple[int, bool]:  # fmt: skip
    """Return STARTED with ``scratch.chosen`` set, PRIORITY (does not fit), BACKFILL or POLICY (kept waiting).

    A job that would end after the head's shadow time is placed clear of the head's reservation, if possible.
    """
    waits = head.shadow < np.inf
    found, sound = False, True
    if late:
        found, sound = best_servers(
            scratch.late, resources, usable, masks, request, limit, now, agent, obs, waits, scratch
        )
    if not found and sound:
        found, sound = best_servers(
            resources, resources, usable, masks, request, limit, now, agent, obs, waits, scratch
        )
    if not found or not sound:
        return PRIORITY, sound
    in_the_way = breaks = False
    for part in range(request.parts):
        node = scratch.chosen[part]
        in_the_way = in_the_way or (waits and not node_fits(scratch.late, masks, request, node))
        breaks = breaks or (resources.gpus[node] == usable.gpus[node] and request.gpus < resources.gpus[node])
    inputs, output = np.zeros(_HOLD, np.float32), np.zeros(1, np.float32)
    hold_inputs(inputs, obs, head, float(request.parts * request.gpus), limit, age, now, late, in_the_way, breaks)
    answer = score(agent.hold, inputs, output, new_buffers(agent.hold.net))
    hinders = late and in_the_way
    holds = hinders if age > agent.patience_s else answer > 0
    if holds and may_hold:
        return (BACKFILL if hinders else POLICY), True
    return STARTED, bool(np.isfinite(answer))


@jit
def best_servers(
    within: Resources, resources: Resources, usable: Resources, masks: Flags, request: PlacementRequest, limit: float,
    now: float, agent: GistWeights, obs: PartitionObservation, waits: bool, scratch: Scratch,
) -> tuple[bool, bool]:  # fmt: skip
    """Write the best servers among those that fit ``within`` to ``scratch.chosen[:parts]``; ties to lower rows.

    Returns:
        Whether there were enough, and whether all scores were numbers.
    """
    inputs, output = np.zeros(_SERVER, np.float32), np.zeros(1, np.float32)
    work, best = new_buffers(agent.server.net), np.empty(request.parts)
    count, sound = 0, True
    for node in range(request.lo, request.hi):
        if not node_fits(within, masks, request, node):
            continue
        reserved = waits and scratch.spare.gpus[node] < UNLIMITED
        server_inputs(inputs, obs, within, resources, usable, reserved, request, limit, now, node)
        value = score(agent.server, inputs, output, work)
        sound = sound and bool(np.isfinite(value))
        if count < request.parts:
            count += 1
        elif not value > best[count - 1]:
            continue
        at = count - 1
        while at > 0 and best[at - 1] < value:
            best[at] = best[at - 1]
            scratch.chosen[at] = scratch.chosen[at - 1]
            at -= 1
        best[at] = value
        scratch.chosen[at] = node
    return count == request.parts, sound


class Judge(NamedTuple):
    """The agent's inputs in a pass.

    Attributes:
        usable: The nodes as they are, empty of jobs. submit: ``float64[jobs]``, the clock of the pass.
        agent: Its networks. obs: What they see.
        fits: ``uint8[shapes]``: which could start at the beginning, or so far.
        head: ``float64[3]``: of the first that does not fit: its part of the GPUs, its age, its shadow.
        busy: ``int64[1]``: parts of jobs that run in the partition.
    """

    usable: Resources
    submit: Floats
    agent: GistWeights
    obs: PartitionObservation
    fits: Flags
    head: Floats
    busy: Ints


@jit
def run_queue(
    state: ClusterState, usable: Resources, ordered: Ints, submit: Floats, agent: GistWeights,
    obs: PartitionObservation, fits: Flags
) -> tuple[int, float, bool]:  # fmt: skip
    """Start jobs of ``ordered``; return as `agent_pass`, without the queue.

    With nothing running in the partition the first job that fits starts whatever the agent says, so that it never
    waits for ever.
    """
    head, busy = np.array([0.0, 0.0, np.inf]), np.full(1, obs.busy)
    first, shadow = _pass(state, ordered, EASY, Judge(usable, submit, agent, obs, fits, head, busy))
    return first, shadow, not np.isnan(shadow)


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, judge: Judge) -> tuple[int, int]:
    shape, head = state.jobs.shape[job], judge.head
    if not judge.fits[shape]:
        return PRIORITY, shape
    code, sound = _choose_servers(
        state.resources, judge.usable, state.jobs.masks, request_of(state.requests, shape), state.jobs.limit[job],
        state.now - judge.submit[job], state.now, judge.agent, judge.obs, Head(head[0], head[1], head[2]), late,
        judge.busy[0] > 0, state.scratch,
    )  # fmt: skip
    if not sound:
        return UNSOUND, shape
    judge.fits[shape] = code != PRIORITY
    return code, shape


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, judge: Judge) -> None:
    """Record that its nodes are busy until its limit."""
    judge.busy[0] += request.parts
    for part in range(request.parts):
        node = state.scratch.chosen[part]
        judge.obs.drain[node] = max(judge.obs.drain[node], state.now + state.jobs.limit[job])


@jit
def reserve_for(state: ClusterState, job: int) -> float:
    """Reserve nodes by best fit for the first job that does not fit; return when they are free."""
    request, limit = request_of(state.requests, state.jobs.shape[job]), state.jobs.limit[job]
    return keep_request(
        state.resources, state.releases, state.jobs.masks, request, BEST_FIT, state.now, limit, state.scratch
    )


@jit
def _hold(state: ClusterState, job: int, code: int, judge: Judge) -> float:
    request, shadow = request_of(state.requests, state.jobs.shape[job]), reserve_for(state, job)
    judge.head[0] = request.parts * request.gpus / judge.obs.gpus
    judge.head[1], judge.head[2] = state.now - judge.submit[job], shadow
    return shadow


@jit
def does_not_fit(code: int) -> bool:
    """Return whether the job does not fit: a job kept waiting by the agent is not the head."""
    return code == PRIORITY


_pass = queue_pass(_place, _hold, _started, does_not_fit)
