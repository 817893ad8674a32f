"""Rules for servers and workers in a slot: DRF, Optimus, and the largest gain per share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.agent import PlayableWorkload, Player
from gpusched.agents.dl2.decide import STEP_FEATURES, zero_actor
from gpusched.agents.dl2.observed import fully_observed
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
    """Place one task on the least used node; return False if it does not fit there, whatever others have free."""
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
def drf(jobs: SlotJobs, slot_progress: SlotProgress, active: Ints) -> None:
    """Allocate by dominant resource fairness: a server and a worker at a time to the job with the smallest share.

    The first pair that does not fit ends the slot.
    """
    cluster, waiting = _new_cluster(jobs.nodes), _new_heap(len(active))
    most = jobs.rate.shape[1] - 1
    for job in active:
        push(waiting, 0.0, job)
    while waiting.size[0] > 0:
        job = pop(waiting)
        both = jobs.need[jobs.kind[job], 1, 1]
        if not _place(cluster, both[0], both[1]):
            return
        slot_progress.sizes[job] += 1
        if slot_progress.sizes[job, 0] < most:
            push(waiting, slot_progress.sizes[job, 0] * max(both[0], both[1]) / (SLOTS * jobs.nodes), job)


@jit
def _marginal(rate: Floats, size: Ints, left: float) -> tuple[float, int]:
    """Return the time saved by one more worker (1) or server (0), in slots, and which of them saves more."""
    now = rate[size[0], size[1]]
    best, chosen = 0.0, -1
    for kind in (1, 0):
        if size[kind] < rate.shape[0] - 1:
            then = rate[size[0] + 1 - kind, size[1] + kind]
            if then > 0.0:
                saved = np.inf if now <= 0.0 else left / now - left / then
                if saved > best:
                    best, chosen = saved, kind
    return best, chosen


@jit
def optimus(jobs: SlotJobs, slot_progress: SlotProgress, active: Ints) -> None:
    """Allocate by Optimus (Peng et al., EuroSys 2018): the task that saves the most time next, until none saves any.

    Jobs start with one of each, by arrival.
    """
    cluster, waiting = _new_cluster(jobs.nodes), _new_heap(len(active))
    chosen = np.full(len(active), -1)
    for i in range(len(active)):
        job = active[i]
        worker, server = jobs.need[jobs.kind[job], 0, 1], jobs.need[jobs.kind[job], 1, 0]
        if not (_place(cluster, worker[0], worker[1]) and _place(cluster, server[0], server[1])):
            break
        slot_progress.sizes[job] = 1
        _rank(jobs, slot_progress, job, i, chosen, waiting)
    while waiting.size[0] > 0:
        i = pop(waiting)
        job = active[i]
        task = jobs.need[jobs.kind[job], 1 - chosen[i], chosen[i]]
        if not _place(cluster, task[0], task[1]):
            return
        slot_progress.sizes[job, chosen[i]] += 1
        _rank(jobs, slot_progress, job, i, chosen, waiting)


@jit
def _rank(jobs: SlotJobs, slot_progress: SlotProgress, job: int, i: int, chosen: Ints, waiting: Heap) -> None:
    left = jobs.epochs[job] - slot_progress.progress.done[job]
    saved, chosen[i] = _marginal(jobs.rate[jobs.kind[job]], slot_progress.sizes[job], left)
    if chosen[i] >= 0:
        push(waiting, -saved, i)


RULES: dict[str, Policy] = {"drf": drf, "optimus": optimus}


def policy_of(rival: Dl2Rival, jobs: SlotJobs, rng: np.random.Generator) -> Policy:
    """Return a scenario's policy for a workload; not for stages of the agent's training."""
    if rival.score:
        return _by_score(rival.score, jobs)
    rule = RULES[rival.rule]
    mispredicted = jobs._replace(rate=jobs.rate * rng.uniform(1 - rival.wrong, 1 + rival.wrong, jobs.rate.shape))
    return lambda jobs, slot_progress, active: rule(mispredicted if rival.wrong else jobs, slot_progress, active)


def _by_score(score: Mapping[str, float], jobs: SlotJobs) -> Policy:
    """Return the agent with these weights and all speeds known.

    Sizes are checked against the slots of the whole cluster. Every task needs two CPU slots and at most four GPU slots,
    so all can be placed: those with GPUs first, two on a node.
    """
    actor, names = zero_actor(), tuple(str(kind) for kind in range(len(jobs.rate)))
    for name, weight in score.items():
        actor.linear[STEP_FEATURES.index(name)] = weight
    return Player(actor, fully_observed(names, jobs.rate), PlayableWorkload(jobs, names, np.ones(len(names))))
