"""The GIST agent's pass over a partition's queue: live and in replays the same.

It orders the waiting jobs by their scores, reserves servers for the first that does not fit, puts every other one on
its best servers, and asks whether it should wait all the same. Explicit priorities go before scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.nets import Reals, work_for
from gpusched.agents.gist.networks import (
    HOLD_INPUTS,
    JOB_INPUTS,
    SERVER_INPUTS,
    GistWeights,
    Head,
    PartitionObservation,
    observation_of,
    score,
    see_hold,
    see_job,
    see_server,
    see_times,
)
from gpusched.compiled import jit
from gpusched.sched.backfill import protect, reserve
from gpusched.sched.fit import fitting, request_of
from gpusched.sched.kernel.queue_pass import UNSOUND, queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.sorting import stable_order
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
    wanted: bool,
) -> tuple[Ints, int, float, bool]:  # fmt: skip
    """Decides for one partition's jobs, and does to ``state`` what any pass does to it (`kernel.queue_pass`).

    ``usable`` is the nodes as they are, empty; ``submit: float64[jobs]`` is on the clock of ``state.now``,
    ``priority: int64[jobs]``; ``queue: int64[waiting]`` is by (priority, submission, id), which is the order among
    equal scores. ``wanted``: an order and a head are wanted also where nothing fits: the reasons need them, a replay
    does not.

    Returns:
        The queue in its order; the first job that did not fit (-1: none), and when it does at the latest; whether all
        scores were numbers. If not, nothing of the rest is to be used.
    """
    if queue.size == 0:
        return queue, -1, np.inf, True
    resources, requests, jobs = state.resources, state.requests, state.jobs
    fits = fitting(state, queue)
    if not wanted and not fits.any():
        return queue, -1, np.inf, True
    obs = observation_of(resources, usable, state.releases, requests, jobs, queue)
    inputs = np.zeros((queue.size, _JOB), np.float32)
    see_queue(inputs, obs, usable, requests, jobs, queue, submit, state.now, fits)
    scores, sound = score_queue(inputs, agent)
    if not sound:
        return queue, -1, np.inf, False
    ordered = by_score(queue, scores, priority)
    head, shadow, sound = walk(state, usable, ordered, submit, agent, obs, fits)
    return ordered, head, shadow, sound


@jit
def see_queue(
    inputs: Reals, obs: PartitionObservation, usable: Resources, requests: Requests, jobs: QueueJobs, queue: Ints,
    submit: Floats,
    now: float, fits: Flags,
) -> None:  # fmt: skip
    """Fills ``inputs: float32[waiting, JOB_INPUTS]``; what is of a shape alone is looked at once for each."""
    first = np.full(jobs.feasibility.size, -1, np.int64)
    for i in range(queue.size):
        job = queue[i]
        shape = jobs.shape[job]
        age, limit = now - submit[job], jobs.limit[job]
        if first[shape] >= 0:
            inputs[i] = inputs[first[shape]]
            see_times(inputs[i], limit, age)
        else:
            first[shape] = i
            see_job(inputs[i], obs, usable, request_of(requests, shape), limit, age, fits[shape] != 0)


@jit
def score_queue(inputs: Reals, agent: GistWeights) -> tuple[Floats, bool]:
    """``float64[waiting]``, larger goes first; and whether all are numbers."""
    scores = np.empty(inputs.shape[0])
    output, work = np.zeros(1, np.float32), work_for(agent.job.net)
    sound = True
    for i in range(scores.size):
        scores[i] = score(agent.job, inputs[i], output, work)
        sound = sound and np.isfinite(scores[i])
    return scores, sound


@jit
def by_score(queue: Ints, scores: Floats, priority: Ints) -> Ints:
    """The queue by (priority, score), ties as they stand: ``int64[waiting]``."""
    ordered: Ints = queue[stable_order(-scores)]
    for i in range(1, queue.size):
        if priority[queue[i]] != priority[queue[0]]:
            ordered = ordered[stable_order(-priority[ordered])]
            break
    return ordered


@jit
def _seat(
    resources: Resources, usable: Resources, masks: Flags, request: PlacementRequest, limit: float, age: float,
    now: float,
    agent: GistWeights, obs: PartitionObservation, head: Head, late: bool, may_hold: bool, scratch: Scratch,
) -> tuple[int, bool]:  # fmt: skip
    """STARTED with ``scratch.chosen`` set, PRIORITY (does not fit), BACKFILL or POLICY (waits all the same).

    A job that would end after the head's shadow time goes where it is not in the head's way, if there is such a place.
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
    see_hold(inputs, obs, head, float(request.parts * request.gpus), limit, age, now, late, in_the_way, breaks)
    answer = score(agent.hold, inputs, output, work_for(agent.hold.net))
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
    """Puts the best servers among those that fit ``within`` into ``scratch.chosen[:parts]``; ties to the lower row.

    Returns:
        Whether there were enough, and whether all scores were numbers.
    """
    inputs, output = np.zeros(_SERVER, np.float32), np.zeros(1, np.float32)
    work, best = work_for(agent.server.net), np.empty(request.parts)
    count, sound = 0, True
    for node in range(request.lo, request.hi):
        if not node_fits(within, masks, request, node):
            continue
        reserved = waits and scratch.spare.gpus[node] < UNLIMITED
        see_server(inputs, obs, within, resources, usable, reserved, request, limit, now, node)
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
    """What the agent goes by in a pass.

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
def walk(
    state: ClusterState, usable: Resources, ordered: Ints, submit: Floats, agent: GistWeights,
    obs: PartitionObservation, fits: Flags
) -> tuple[int, float, bool]:  # fmt: skip
    """Starts what should start of ``ordered``; as `agent_pass`, without the queue.

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
    code, sound = _seat(
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
    """Its nodes are busy, and known to be so until its limit."""
    judge.busy[0] += request.parts
    for part in range(request.parts):
        node = state.scratch.chosen[part]
        judge.obs.drain[node] = max(judge.obs.drain[node], state.now + state.jobs.limit[job])


@jit
def _hold(state: ClusterState, job: int, code: int, judge: Judge) -> float:
    """For the first that does not fit, its nodes by best fit."""
    request, limit = request_of(state.requests, state.jobs.shape[job]), state.jobs.limit[job]
    shadow = reserve(
        state.resources, state.releases, state.jobs.masks, request, BEST_FIT, state.now, limit, state.scratch
    )
    protect(state.resources, request, shadow < np.inf, state.scratch)
    judge.head[0] = request.parts * request.gpus / judge.obs.gpus
    judge.head[1], judge.head[2] = state.now - judge.submit[job], shadow
    return shadow


@jit
def _lacks_room(code: int) -> bool:
    """Who waits because the agent says so is no head."""
    return code == PRIORITY


_pass = queue_pass(_place, _hold, _started, _lacks_room)
