"""The joint step: nodes, GPUs, cores and GB of all jobs, chosen anew from an empty cluster.

Every agent (a group of nodes) bids for jobs and for more resources of its jobs, by the gain relative to its price. Two
agents that bid for the same job are joined by an edge of the coordination graph; messages along the edges (max-plus:
Kok and Vlassis, JMLR 7, 2006) decide which agent takes which job. This repeats until no bid has a gain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.world import Bools, JobStates, MaifsWorld, SpeedEstimates
from gpusched.compiled import jit
from gpusched.sched.heaps import Heap, new_heap, pop, push
from gpusched.sched.state import Floats, Ints

ALONE, UNCOORDINATED, GRAPH = 0, 1, 2
MODES = {"alone": ALONE, "uncoordinated": UNCOORDINATED, "graph": GRAPH}
"""Coordination: one chooser for all groups, the best bid first; each agent its best bid; agents joined by the graph."""
BIDS = 3
"""Bids that an agent considers at once."""
ROUNDS = 4
"""Of messages."""
PATIENCE = 0.5
"""A bid below this fraction of the best one waits, so that jobs with little gain do not take from others."""
_EPS = 1e-6
_new_heap = jit(new_heap)


class JointDecision(NamedTuple):
    """The decision about the ``n`` active jobs.

    Attributes:
        job: ``int64[n]``: number of each, by arrival.
        point: ``int64[n]``: its allocation; -1: none. node: ``int64[n, 2]``. group: ``int64[n]``.
        worth: ``float64[n]``: relative speed with it, minus the cost of a restart.
        weight: ``float64[n, groups]``: of its relative speed in each group.
        keep: ``float64[n]``: fraction of its speed left by a restart, 0 to 1.
        best: ``float64[n]``: steps/s at its best point.
        price: ``float64[groups, 3]``: of all GPUs, cores and GB.
        free, held: ``float64[nodes, 3]``: not allocated yet; of that, held by jobs not decided yet.
    """

    job: Ints
    point: Ints
    node: Ints
    group: Ints
    worth: Floats
    weight: Floats
    keep: Floats
    best: Floats
    price: Floats
    free: Floats
    held: Floats


@jit
def new_plan(world: MaifsWorld, states: JobStates, known: SpeedEstimates, job: Ints) -> JointDecision:
    """Return an empty decision; all weights and prices are 1."""
    n, groups = len(job), len(world.jobs.group) - 1
    best = np.zeros(n)
    for i in range(n):
        kind = world.jobs.kind[job[i]]
        for c in range(known.choices[kind]):
            point = known.choice[kind, c]
            if world.jobs.least[job[i]] <= world.gpus[point] <= world.jobs.most[job[i]]:
                best[i] = max(best[i], known.speed[kind, point])
    held = np.zeros_like(world.jobs.node)
    for i in range(n):
        _hold(world, states, held, job[i], 1.0)
    return JointDecision(
        job, np.full(n, -1), np.full((n, 2), -1), np.full(n, -1), np.zeros(n), np.ones((n, groups)), np.ones(n), best,
        np.ones((groups, 3)), world.jobs.node.copy(), held,
    )  # fmt: skip


@jit
def _hold(world: MaifsWorld, states: JobStates, held: Floats, job: int, sign: float) -> None:
    point = states.point[job]
    if point >= 0:
        for s in range(world.spread[point]):
            held[states.node[job, s]] += sign * world.need[point]


@jit
def _rank(world: MaifsWorld, states: JobStates, plan: JointDecision, i: int, node: int, point: int) -> float:
    """Return a node's rank for a job: smaller is better; infinite: it does not fit."""
    have = plan.point[i]
    mine = have >= 0 and (plan.node[i, 0] == node or plan.node[i, 1] == node)
    was = states.node[plan.job[i], 0] == node or states.node[plan.job[i], 1] == node
    rank, taken = 0.0, False
    for r in range(3):
        left = plan.free[node, r] - world.need[point, r]
        if mine:
            left += world.need[have, r]
        if left < -_EPS:
            return np.inf
        taken |= left < plan.held[node, r] - _EPS
        rank += left / world.jobs.node[node, r]
    if mine or was:
        return rank - 100.0
    return rank + 50.0 if taken else rank


@jit
def find(world: MaifsWorld, states: JobStates, plan: JointDecision, i: int, group: int, point: int) -> tuple[int, int]:
    """Return the nodes of a group that suit a point best; -1: none fit."""
    first, second = -1, -1
    low, next_low = np.inf, np.inf
    for node in range(world.jobs.group[group], world.jobs.group[group + 1]):
        rank = _rank(world, states, plan, i, node, point)
        if rank < low:
            second, next_low = first, low
            first, low = node, rank
        elif rank < next_low:
            second, next_low = node, rank
    if world.spread[point] == 1:
        return first, -1
    return (first, second) if second >= 0 else (-1, -1)


@jit
def may_stay(world: MaifsWorld, states: JobStates, plan: JointDecision, i: int) -> bool:
    """Return whether a job's present allocation is still free for it."""
    point = states.point[plan.job[i]]
    if point < 0:
        return False
    for s in range(world.spread[point]):
        node = states.node[plan.job[i], s]
        for r in range(3):
            if plan.free[node, r] < world.need[point, r] - _EPS:
                return False
    return True


@jit
def put(world: MaifsWorld, states: JobStates, plan: JointDecision, i: int, point: int, first: int, second: int) -> None:
    """Set a job's allocation, replacing an earlier one."""
    have = plan.point[i]
    if have >= 0:
        for s in range(world.spread[have]):
            plan.free[plan.node[i, s]] += world.need[have]
    else:
        _hold(world, states, plan.held, plan.job[i], -1.0)
    plan.point[i] = point
    plan.node[i, 0], plan.node[i, 1] = first, second
    plan.group[i] = world.group_of[first]
    for s in range(world.spread[point]):
        plan.free[plan.node[i, s]] -= world.need[point]


class Bid(NamedTuple):
    """An agent's next step for a job; score 0: none. worth: The job's relative speed after it."""

    score: float
    point: int
    first: int
    second: int
    worth: float


@jit
def bid(
    world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision, i: int, group: int, dominant: bool
) -> Bid:
    """Return the step with the largest weighted gain for its price; ``dominant``: by dominant share."""
    job = plan.job[i]
    if plan.weight[i, group] <= 0.0:
        return Bid(0.0, -1, -1, -1, 0.0)
    kind, have = world.jobs.kind[job], plan.point[i]
    speed, price, now = known.speed[kind], plan.price[group], states.point[job]
    score, at, first, second, worth = 0.0, -1, -1, -1, 0.0
    if have < 0 and now >= 0 and world.group_of[states.node[job, 0]] == group and may_stay(world, states, plan, i):
        worth = speed[now] / plan.best[i]
        score = worth / plan.keep[i] / _cost(world, price, now, -1, dominant)
        at, first, second = now, states.node[job, 0], states.node[job, 1]
    keep = plan.keep[i] if now >= 0 else 1.0
    low, high = world.jobs.least[job], world.jobs.most[job]
    for c in range(known.choices[kind]):
        point = known.choice[kind, c]
        if not low <= world.gpus[point] <= high:
            continue
        value = (1.0 if point == now else keep) * speed[point] / plan.best[i]
        gain = value - plan.worth[i]
        if gain <= 0.0:
            continue
        cost = _cost(world, price, point, have, dominant)
        if gain / cost > score:
            a, b = find(world, states, plan, i, group, point)
            if a >= 0 and point == now and not same_nodes(states.node[job], a, b):
                value *= keep
                gain = value - plan.worth[i]
            if a >= 0 and gain / cost > score:
                score, at, first, second, worth = gain / cost, point, a, b, value
    return Bid(score * plan.weight[i, group], at, first, second, worth)


@jit
def same_nodes(node: Ints, first: int, second: int) -> bool:
    """Return whether a job's nodes are these, in any order."""
    return bool((node[0] == first and node[1] == second) or (node[0] == second and node[1] == first))


@jit
def _cost(world: MaifsWorld, price: Floats, point: int, have: int, dominant: bool) -> float:
    """Return the price of a point beyond another."""
    cost, top, before = 0.0, 0.0, 0.0
    for r in range(3):
        more = price[r] * world.share[point, r]
        top = max(top, more)
        if have >= 0:
            less = price[r] * world.share[have, r]
            before = max(before, less)
            more -= less
        cost += more
    return max(top - before if dominant else cost, 1e-5)


@jit
def fill(
    world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision, mode: int, dominant: bool
) -> None:
    """Decide about all jobs."""
    if mode == ALONE:
        _choose_jointly(world, states, known, plan, dominant)
    else:
        _choose_by_agents(world, states, known, plan, mode, dominant)


@jit
def _choose_jointly(
    world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision, dominant: bool
) -> None:
    groups, n = len(world.jobs.group) - 1, len(plan.job)
    heap = _new_heap(n * groups)
    for i in range(n):
        for group in range(groups):
            score = bid(world, states, known, plan, i, group, dominant).score
            if score > 0.0:
                push(heap, -score, i * groups + group)
    while heap.size[0] > 0:
        item = pop(heap)
        i, group = item // groups, item % groups
        if plan.group[i] >= 0 and plan.group[i] != group:
            continue
        best = bid(world, states, known, plan, i, group, dominant)
        if best.score <= 0.0:
            continue
        if heap.size[0] > 0 and -best.score > heap.key[0]:
            push(heap, -best.score, item)  # stale: other jobs have taken resources since it was pushed
            continue
        put(world, states, plan, i, best.point, best.first, best.second)
        plan.worth[i] = best.worth
        score = bid(world, states, known, plan, i, group, dominant).score
        if score > 0.0:
            push(heap, -score, item)


@jit
def _choose_by_agents(
    world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision, mode: int, dominant: bool
) -> None:
    groups, n = len(world.jobs.group) - 1, len(plan.job)
    # One heap of bids for each group, best first. Bids fall as GPUs go, and a popped one is computed anew: if it is not
    # the best any more it goes back, so that most bids are never computed again.
    keys, items, sizes = np.zeros((groups, n)), np.zeros((groups, n), np.int64), np.zeros(groups, np.int64)
    for group in range(groups):
        heap = Heap(keys[group], items[group], sizes[group : group + 1])
        for i in range(n):
            first = bid(world, states, known, plan, i, group, dominant).score
            if first > 0.0:
                push(heap, -first, i)
    score, bidder_job = np.zeros((groups, BIDS + 1)), np.full((groups, BIDS + 1), -1)
    chosen = np.zeros(groups, np.int64)
    while True:
        any_bid = False
        for group in range(groups):
            heap = Heap(keys[group], items[group], sizes[group : group + 1])
            bidder_job[group] = -1
            score[group] = 0.0
            found = 0
            while heap.size[0] > 0 and found < BIDS:
                i = pop(heap)
                if plan.group[i] >= 0 and plan.group[i] != group:
                    continue  # another group has won it since
                now = bid(world, states, known, plan, i, group, dominant).score
                if now <= 0.0:
                    continue  # nothing that is left here would speed it up
                if heap.size[0] > 0 and -now > heap.key[0]:
                    push(heap, -now, i)
                    continue
                score[group, found], bidder_job[group, found] = now, i
                found += 1
            any_bid |= found > 0
        if not any_bid:
            return
        chosen[:] = 0
        if mode == GRAPH:
            agree(score, bidder_job, chosen)
        if not _commit(world, states, known, plan, dominant, score, bidder_job, chosen):
            chosen[:] = 0  # messages need not converge on graphs with cycles: no agent bid, so each makes its best bid
            _commit(world, states, known, plan, dominant, score, bidder_job, chosen)
        # What was popped goes back with its new bid, the winners' too: they may grow further.
        for group in range(groups):
            heap = Heap(keys[group], items[group], sizes[group : group + 1])
            for b in range(BIDS):
                i = bidder_job[group, b]
                if i >= 0:
                    now = score[group, b]
                    if plan.group[i] == group:
                        now = bid(world, states, known, plan, i, group, dominant).score
                    if now > 0.0:
                        push(heap, -now, i)


@jit
def _commit(
    world: MaifsWorld,
    states: JobStates,
    known: SpeedEstimates,
    plan: JointDecision,
    dominant: bool,
    score: Floats,
    bidder_job: Ints,
    chosen: Ints,
) -> bool:
    """Apply every agent's chosen bid, the best first; return whether any was applied."""
    groups = len(chosen)
    best_first = np.zeros(groups)
    for group in range(groups):
        best_first[group] = -score[group, chosen[group]]
    done, order = False, np.argsort(best_first)
    for at in range(groups):
        group = int(order[at])
        if best_first[group] > PATIENCE * best_first.min():
            break
        i = bidder_job[group, chosen[group]]
        if i >= 0 and (plan.group[i] < 0 or plan.group[i] == group):
            best = bid(world, states, known, plan, i, group, dominant)
            if best.score > 0.0:
                put(world, states, plan, i, best.point, best.first, best.second)
                plan.worth[i] = best.worth
                done = True
    return done


@jit
def agree(score: Floats, bidder_job: Ints, chosen: Ints) -> None:
    """Run max-plus over the graph whose edges join agents that bid for the same job.

    Args:
        score: ``float64[agents, bids]``: gain of each bid; the last is no bid, with gain 0.
        bidder_job: ``int64[agents, bids]``: the job; -1: no bid.
        chosen: ``int64[agents]``: written: the bid of each agent.

    A job taken by two agents counts only with the larger gain.
    """
    agents, bids = score.shape
    edge = np.zeros((agents, agents), np.bool_)
    for k in range(agents):
        for other in range(k):
            for a in range(bids):
                for b in range(bids):
                    if bidder_job[k, a] >= 0 and bidder_job[k, a] == bidder_job[other, b]:
                        edge[k, other] = edge[other, k] = True
    message, told = np.zeros((agents, agents, bids)), np.zeros((agents, bids))
    for _ in range(ROUNDS):
        for k in range(agents):
            _hear(score, edge, message, told, k)
            for other in range(agents):
                if not edge[k, other]:
                    continue
                mean = 0.0
                for b in range(bids):
                    top = -np.inf
                    for a in range(bids):
                        value = told[k, a] - message[other, k, a]
                        if bidder_job[k, a] >= 0 and bidder_job[k, a] == bidder_job[other, b]:
                            value -= min(score[k, a], score[other, b])
                        top = max(top, value)
                    message[k, other, b] = top
                    mean += top / bids
                for b in range(bids):
                    message[k, other, b] -= mean
    for k in range(agents):
        _hear(score, edge, message, told, k)
        chosen[k] = np.argmax(told[k])


@jit
def _hear(score: Floats, edge: Bools, message: Floats, told: Floats, k: int) -> None:
    for a in range(score.shape[1]):
        told[k, a] = score[k, a]
        for other in range(score.shape[0]):
            if edge[other, k]:
                told[k, a] += message[other, k, a]
