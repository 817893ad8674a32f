"""Who gets how many servers and workers in a slot, by rule: DRF, Optimus, and the largest gain per share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.agent import PlayableWorkload, Player
from gpusched.agents.dl2.decide import STEP, nobody
from gpusched.agents.dl2.observed import all_told
from gpusched.agents.dl2.slots import Policy, SlotJobs, SlotProgress
from gpusched.agents.dl2.workloads import SLOTS, Dl2Rival
from gpusched.compiled import jit
from gpusched.sched.heaps import Heap, new_heap, pop, push
from gpusched.sched.state import Floats, Ints


class SlotCluster(NamedTuple):
    """Slots in use, ``int64[nodes, 2]`` (CPU, GPU); nodes by their sum, then number."""

    used: Ints
    least: Heap


_new_heap = jit(new_heap)


@jit
def _new_cluster(nodes: int) -> SlotCluster:
    least = Heap(np.zeros(nodes), np.arange(nodes), np.full(1, nodes))
    return SlotCluster(np.zeros((nodes, 2), np.int64), least)


@jit
def _place(cluster: SlotCluster, cpus: int, gpus: int) -> bool:
    """One task on the node with the least in use; False if that one has no room, whatever others have."""
    node = cluster.least.item[0]
    used = cluster.used[node]
    if used[0] + cpus > SLOTS or used[1] + gpus > SLOTS:
        return False
    used[0] += cpus
    used[1] += gpus
    pop(cluster.least)
    push(cluster.least, used[0] + used[1], node)
    return True


@jit
def drf(jobs: SlotJobs, course: SlotProgress, there: Ints) -> None:
    """Dominant resource fairness: a server and a worker, as one, to the job with the smallest dominant share.

    The first that does not fit ends the slot.
    """
    cluster, waiting = _new_cluster(jobs.nodes), _new_heap(len(there))
    most = jobs.rate.shape[1] - 1
    for job in there:
        push(waiting, 0.0, job)
    while waiting.size[0] > 0:
        job = pop(waiting)
        both = jobs.need[jobs.kind[job], 1, 1]
        if not _place(cluster, both[0], both[1]):
            return
        course.sizes[job] += 1
        if course.sizes[job, 0] < most:
            push(waiting, course.sizes[job, 0] * max(both[0], both[1]) / (SLOTS * jobs.nodes), job)


@jit
def _marginal(rate: Floats, size: Ints, left: float) -> tuple[float, int]:
    """What one more worker (1) or server (0) saves of the time left, in slots, and which of them saves more."""
    now = rate[size[0], size[1]]
    best, which = 0.0, -1
    for kind in (1, 0):
        if size[kind] < rate.shape[0] - 1:
            then = rate[size[0] + 1 - kind, size[1] + kind]
            if then > 0.0:
                saved = np.inf if now <= 0.0 else left / now - left / then
                if saved > best:
                    best, which = saved, kind
    return best, which


@jit
def optimus(jobs: SlotJobs, course: SlotProgress, there: Ints) -> None:
    """Optimus (Peng et al., EuroSys 2018): the task that saves the most time next, until none saves any.

    Jobs begin with one of each, by arrival.
    """
    cluster, waiting = _new_cluster(jobs.nodes), _new_heap(len(there))
    which = np.full(len(there), -1)
    for i in range(len(there)):
        job = there[i]
        worker, server = jobs.need[jobs.kind[job], 0, 1], jobs.need[jobs.kind[job], 1, 0]
        if not (_place(cluster, worker[0], worker[1]) and _place(cluster, server[0], server[1])):
            break
        course.sizes[job] = 1
        _rank(jobs, course, job, i, which, waiting)
    while waiting.size[0] > 0:
        i = pop(waiting)
        job = there[i]
        task = jobs.need[jobs.kind[job], 1 - which[i], which[i]]
        if not _place(cluster, task[0], task[1]):
            return
        course.sizes[job, which[i]] += 1
        _rank(jobs, course, job, i, which, waiting)


@jit
def _rank(jobs: SlotJobs, course: SlotProgress, job: int, i: int, which: Ints, waiting: Heap) -> None:
    left = jobs.epochs[job] - course.progress.done[job]
    saved, which[i] = _marginal(jobs.rate[jobs.kind[job]], course.sizes[job], left)
    if which[i] >= 0:
        push(waiting, -saved, i)


RULES: dict[str, Policy] = {"drf": drf, "optimus": optimus}


def policy_of(rival: Dl2Rival, jobs: SlotJobs, rng: np.random.Generator) -> Policy:
    """The policy of the scenario for a workload; one that is no stage of the agent's training."""
    if rival.score:
        return _by_score(rival.score, jobs)
    rule = RULES[rival.rule]
    judged = jobs._replace(rate=jobs.rate * rng.uniform(1 - rival.wrong, 1 + rival.wrong, jobs.rate.shape))
    return lambda jobs, course, there: rule(judged if rival.wrong else jobs, course, there)


def _by_score(score: Mapping[str, float], jobs: SlotJobs) -> Policy:
    """The agent with these weights, where every speed is known.

    Sizes are counted against all slots of the cluster. Every task needs two CPU slots and at most four GPU slots, so
    they can be placed: those with GPUs first, two on a node.
    """
    actor, names = nobody(), tuple(str(kind) for kind in range(len(jobs.rate)))
    for name, weight in score.items():
        actor.linear[STEP.index(name)] = weight
    return Player(actor, all_told(names, jobs.rate), PlayableWorkload(jobs, names, np.ones(len(names))))
