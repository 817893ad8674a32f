"""The GIST agent's pass over a partition's queue: live and in replays the same.

It orders the waiting jobs by their scores, reserves servers for the first that does not fit, puts every other one on
its best servers, and asks whether it should wait all the same. Explicit priorities go before scores.
"""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.nets import Reals, work_for
from gpusched.agents.gist.networks import (
    HOLD_INPUTS,
    JOB_INPUTS,
    SERVER_INPUTS,
    Agent,
    Head,
    Observation,
    observation_of,
    score,
    see_hold,
    see_job,
    see_server,
    see_times,
)
from gpusched.compiled import jit
from gpusched.sched.backfill import launch, protect, reserve
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose, node_fits
from gpusched.sched.state import (
    BACKFILL,
    BEST_FIT,
    FIRST_FIT,
    LIMIT,
    OK,
    PLENTY,
    POLICY,
    PRIORITY,
    RESOURCES,
    STARTED,
    Flags,
    Floats,
    Ints,
    Jobs,
    Outcome,
    Releases,
    Request,
    Requests,
    Resources,
    Scratch,
)

_JOB, _SERVER, _HOLD = len(JOB_INPUTS), len(SERVER_INPUTS), len(HOLD_INPUTS)


@jit
def agent_pass(
    resources: Resources, usable: Resources, releases: Releases, requests: Requests, jobs: Jobs, queue: Ints,
    submit: Floats, priority: Ints, now: float, agent: Agent, wanted: bool, scratch: Scratch, outcome: Outcome,
) -> tuple[Ints, int, float, bool]:  # fmt: skip
    """Decides for one partition's jobs, and does to its arrays what `sched.backfill.schedule` does to them.

    The arrays are those of `schedule`; ``usable`` is the nodes as they are, empty; ``submit: float64[jobs]`` is on the
    clock of ``now``, ``priority: int64[jobs]``; ``queue: int64[waiting]`` is by (priority, submission, id), which is
    the order among equal scores. ``wanted``: an order and a head are wanted also where nothing fits: the reasons need
    them, a replay does not.

    Returns:
        The queue in its order; the first job that did not fit (-1: none), and when it does at the latest; whether all
        scores were numbers. If not, nothing of the rest is to be used.
    """
    if queue.size == 0:
        return queue, -1, np.inf, True
    fits = fitting(resources, requests, jobs, queue, scratch)
    if not wanted and not fits.any():
        return queue, -1, np.inf, True
    obs = observation_of(resources, usable, releases, requests, jobs, queue)
    inputs = np.zeros((queue.size, _JOB), np.float32)
    see_queue(inputs, obs, usable, requests, jobs, queue, submit, now, fits)
    scores, sound = score_queue(inputs, agent)
    if not sound:
        return queue, -1, np.inf, False
    ordered = by_score(queue, scores, priority)
    head, shadow, sound = walk(
        resources, usable, releases, requests, jobs, ordered, submit, now, agent, obs, fits, scratch, outcome
    )
    return ordered, head, shadow, sound


@jit
def fitting(resources: Resources, requests: Requests, jobs: Jobs, queue: Ints, scratch: Scratch) -> Flags:
    """``uint8[shapes]``: which of the queue's shapes could start now."""
    fits = np.zeros(jobs.feasibility.size, np.uint8)
    seen = np.zeros(jobs.feasibility.size, np.uint8)
    for job in queue:
        shape = jobs.shape[job]
        if seen[shape] == 0:
            seen[shape] = 1
            if jobs.feasibility[shape] == OK:
                fits[shape] = choose(resources, jobs.masks, request_of(requests, shape), FIRST_FIT, scratch)
    return fits


@jit
def see_queue(
    inputs: Reals, obs: Observation, usable: Resources, requests: Requests, jobs: Jobs, queue: Ints, submit: Floats,
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
def score_queue(inputs: Reals, agent: Agent) -> tuple[Floats, bool]:
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
    ordered = queue[np.argsort(-scores, kind="mergesort")]
    for i in range(1, queue.size):
        if priority[queue[i]] != priority[queue[0]]:
            return ordered[np.argsort(-priority[ordered], kind="mergesort")]
    return ordered


@jit
def walk(
    resources: Resources, usable: Resources, releases: Releases, requests: Requests, jobs: Jobs, ordered: Ints,
    submit: Floats, now: float, agent: Agent, obs: Observation, fits: Flags, scratch: Scratch, outcome: Outcome,
) -> tuple[int, float, bool]:  # fmt: skip
    """Starts what should start of ``ordered``; as `agent_pass`, without the queue.

    With nothing running in the partition the first job that fits starts whatever the agent says, so that it never
    waits for ever.
    """
    first, head, sound, busy = -1, Head(0.0, 0.0, np.inf), True, obs.busy
    for job in ordered:
        shape = jobs.shape[job]
        if jobs.feasibility[shape] != OK:
            outcome.code[job] = jobs.feasibility[shape]
            continue
        if exceeds(jobs.links, jobs.room, jobs.account, job):
            outcome.code[job] = LIMIT
            continue
        request, limit, age = request_of(requests, shape), jobs.limit[job], now - submit[job]
        late = now + limit > head.shadow
        code = PRIORITY
        if fits[shape]:
            code, sound = _seat(
                resources, usable, jobs.masks, request, limit, age, now, agent, obs, head, late, busy > 0, scratch
            )
            if not sound:
                break
            fits[shape] = code != PRIORITY
        if code == STARTED:
            launch(resources, releases, jobs, request, job, now, late, first >= 0, scratch, outcome)
            busy += request.parts
            for part in range(request.parts):
                node = scratch.chosen[part]
                obs.drain[node] = max(obs.drain[node], now + limit)
        elif code == PRIORITY and first < 0:
            first, code = job, RESOURCES
            shadow = reserve(resources, releases, jobs.masks, request, BEST_FIT, now, limit, scratch)
            protect(resources, request, shadow < np.inf, scratch)
            head = Head(request.parts * request.gpus / obs.gpus, age, shadow)
        outcome.code[job] = code
    return first, head.shadow, sound


@jit
def _seat(
    resources: Resources, usable: Resources, masks: Flags, request: Request, limit: float, age: float, now: float,
    agent: Agent, obs: Observation, head: Head, late: bool, may_hold: bool, scratch: Scratch,
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
    within: Resources, resources: Resources, usable: Resources, masks: Flags, request: Request, limit: float,
    now: float, agent: Agent, obs: Observation, waits: bool, scratch: Scratch,
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
        reserved = waits and scratch.spare.gpus[node] < PLENTY
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
