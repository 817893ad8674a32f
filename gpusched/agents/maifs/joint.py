"""The joint step: nodes, GPUs, cores and GB of all jobs, chosen anew from an empty cluster.

Every agent (a group of nodes) bids for jobs and for more resources of its jobs, by the gain relative to its price. In
an auction the best bid of all is applied; else agents act at once: two that bid for the same job are joined by an edge
of the coordination graph, and messages along the edges (max-plus: Kok and Vlassis, JMLR 7, 2006) decide which of them
takes it. This repeats until no bid has a gain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.heaps import Heap, new_heap, pop, push
from gpusched.sched.state import Flags, Floats, Ints

ALONE, UNCOORDINATED, GRAPH, AUCTION = 0, 1, 2, 3
MODES = {"alone": ALONE, "uncoordinated": UNCOORDINATED, "graph": GRAPH, "auction": AUCTION}
"""Coordination: one chooser for all groups, the best bid first; each agent its best bid; agents joined by the graph; an
auction, the best bid of all agents first."""
PER_GROUP = 4
"""Maximum of nodes in a group, that is, per agent, where nothing else groups them."""
BIDS = 3
"""Bids that an agent considers at once."""
ROUNDS = 4
"""Of messages."""
PATIENCE = 0.5
"""A bid below this fraction of the best one waits, so that jobs with little gain do not take from others."""
_EPS = 1e-6
_new_heap = jit(new_heap)


class JointProblem(NamedTuple):
    """The inputs of the joint step for ``n`` jobs: filled from the setting (`world.problem_of`) or live (`market`).

    Attributes:
        node: ``float64[nodes, 3]``: GPUs, cores and memory to allocate, node by node.
        group: ``int64[groups + 1]``: first node of each group, and the end. group_of: ``int64[nodes]``.
        capacity: ``float64[1]``: GPUs that all jobs together may have.
        need: ``float64[points, 3]``: GPUs, cores and memory on each node. spread: ``int64[points]``: number of nodes.
        share: ``float64[points, 3]``: of the whole job, as shares of the cluster. gpus: ``int64[points]``.
        option: ``int64[kinds, most]``: the points worth choosing, the first ``options[kind]``.
        speed: ``float64[kinds, most]``: steps/s at each option.
        kind, low, high: ``int64[n]``: row of ``option``; bounds on GPUs.
        floor: ``int64[n]``: GPUs kept for a job until it is decided.
        point: ``int64[n]``: present allocation; -1: none. pace: ``float64[n]``: steps/s with it.
        at: ``int64[n, width]``: its nodes; -1 beyond the last.
        mask: ``int64[n]``: row of ``may`` (``uint8[masks, nodes]``: 1: allowed); -1: any node.
        work, age_s, cost_s, doubt, done: ``float64[n]``: steps left; seconds since submission; of a restart; standard
            deviation of the logarithm of its speed; fraction done. restarts: ``int64[n]``.
    """

    node: Floats
    group: Ints
    group_of: Ints
    capacity: Floats
    need: Floats
    spread: Ints
    share: Floats
    gpus: Ints
    option: Ints
    options: Ints
    speed: Floats
    kind: Ints
    low: Ints
    high: Ints
    floor: Ints
    point: Ints
    pace: Floats
    at: Ints
    mask: Ints
    may: Flags
    work: Floats
    age_s: Floats
    cost_s: Floats
    doubt: Floats
    done: Floats
    restarts: Ints


class JointDecision(NamedTuple):
    """The decision about the ``n`` jobs.

    Attributes:
        job: ``int64[n]``: the caller's number of each, by arrival.
        point: ``int64[n]``: its allocation; -1: none. node: ``int64[n, width]``. group: ``int64[n]``.
        worth: ``float64[n]``: relative speed with it, minus the cost of a restart.
        weight: ``float64[n, groups]``: of its relative speed in each group.
        keep: ``float64[n]``: fraction of its speed left by a restart, 0 to 1.
        best: ``float64[n]``: steps/s at its best point.
        price: ``float64[groups, 3]``: of all GPUs, cores and memory.
        free, held: ``float64[nodes, 3]``: not allocated yet; of that, held by jobs not decided yet.
        left: ``float64[1]``: GPUs that may still be given, beyond those kept for jobs not decided yet.
        pick: ``int64[width]``: the nodes of the latest `Bid`. spot, rank: ``[width]``: of the latest `find`.
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
    left: Floats
    pick: Ints
    spot: Ints
    rank: Floats


@jit
def new_plan(problem: JointProblem, job: Ints) -> JointDecision:
    """Return an empty decision about these jobs; all weights and prices are 1."""
    (n, width), groups = problem.at.shape, len(problem.group) - 1
    best = np.zeros(n)
    for i in range(n):
        kind = problem.kind[i]
        for c in range(problem.options[kind]):
            if problem.low[i] <= problem.gpus[problem.option[kind, c]] <= problem.high[i]:
                best[i] = max(best[i], problem.speed[kind, c])
    held, left = np.zeros_like(problem.node), problem.capacity.copy()
    for i in range(n):
        _hold(problem, held, i, 1.0)
        left[0] -= problem.floor[i]
    return JointDecision(
        job, np.full(n, -1), np.full((n, width), -1), np.full(n, -1), np.zeros(n), np.ones((n, groups)), np.ones(n),
        best, np.ones((groups, 3)), problem.node.copy(), held, left, np.full(width, -1), np.full(width, -1),
        np.zeros(width),
    )  # fmt: skip


@jit
def _hold(problem: JointProblem, held: Floats, i: int, sign: float) -> None:
    point = problem.point[i]
    if point >= 0:
        for s in range(problem.spread[point]):
            held[problem.at[i, s]] += sign * problem.need[point]


@jit
def _is_in(nodes: Ints, node: int) -> bool:
    for other in nodes:
        if other == node:
            return True
    return False


@jit
def _rank(problem: JointProblem, plan: JointDecision, i: int, node: int, point: int) -> float:
    """Return a node's rank for a job: smaller is better; infinite: it does not fit."""
    if problem.mask[i] >= 0 and not problem.may[problem.mask[i], node]:
        return np.inf
    have = plan.point[i]
    mine = have >= 0 and _is_in(plan.node[i], node)
    rank, taken = 0.0, False
    for r in range(3):
        left = plan.free[node, r] - problem.need[point, r]
        if mine:
            left += problem.need[have, r]
        if left < -_EPS:
            return np.inf
        taken |= left < plan.held[node, r] - _EPS
        rank += left / max(problem.node[node, r], _EPS)
    if mine or _is_in(problem.at[i], node):
        return rank - 100.0
    return rank + 50.0 if taken else rank


@jit
def find(problem: JointProblem, plan: JointDecision, i: int, group: int, point: int) -> bool:
    """Find the nodes of a group that suit a point best, into ``plan.spot``; return whether it fits."""
    count, wanted = 0, problem.spread[point]
    for node in range(problem.group[group], problem.group[group + 1]):
        rank = _rank(problem, plan, i, node, point)
        if rank == np.inf or (count == wanted and rank >= plan.rank[wanted - 1]):
            continue
        count = min(count + 1, wanted)
        at = count - 1
        while at > 0 and plan.rank[at - 1] > rank:
            plan.rank[at], plan.spot[at] = plan.rank[at - 1], plan.spot[at - 1]
            at -= 1
        plan.rank[at], plan.spot[at] = rank, node
    return bool(count == wanted)


@jit
def may_stay(problem: JointProblem, plan: JointDecision, i: int) -> bool:
    """Return whether a job's present allocation is still free for it."""
    point = problem.point[i]
    if point < 0:
        return False
    for s in range(problem.spread[point]):
        for r in range(3):
            if plan.free[problem.at[i, s], r] < problem.need[point, r] - _EPS:
                return False
    return True


@jit
def put(problem: JointProblem, plan: JointDecision, i: int, point: int, nodes: Ints) -> None:
    """Set a job's allocation, replacing an earlier one; ``nodes``: the first ``spread`` of these."""
    have = plan.point[i]
    if have >= 0:
        for s in range(problem.spread[have]):
            plan.free[plan.node[i, s]] += problem.need[have]
        plan.left[0] += problem.gpus[have]
    else:
        _hold(problem, plan.held, i, -1.0)
        plan.left[0] += problem.floor[i]
    plan.point[i] = point
    plan.group[i] = problem.group_of[nodes[0]]
    plan.node[i] = -1
    for s in range(problem.spread[point]):
        plan.node[i, s] = nodes[s]
        plan.free[nodes[s]] -= problem.need[point]
    plan.left[0] -= problem.gpus[point]


class Bid(NamedTuple):
    """An agent's next step for a job; score 0: none. worth: The job's relative speed after it."""

    score: float
    point: int
    worth: float


@jit
def bid(problem: JointProblem, plan: JointDecision, i: int, group: int) -> Bid:
    """Return the step with the largest weighted gain for its price, its nodes in ``plan.pick``."""
    if plan.weight[i, group] <= 0.0:
        return Bid(0.0, -1, 0.0)
    kind, have, price, now = problem.kind[i], plan.point[i], plan.price[group], problem.point[i]
    score, at, worth, left = 0.0, -1, 0.0, plan.left[0] + (problem.gpus[have] if have >= 0 else problem.floor[i])
    stays = have < 0 and now >= 0 and problem.gpus[now] <= left
    if stays and problem.group_of[problem.at[i, 0]] == group and may_stay(problem, plan, i):
        worth = problem.pace[i] / plan.best[i]
        score = worth / plan.keep[i] / _cost(problem, price, now, -1)
        at = now
        plan.pick[:] = problem.at[i]
    keep = plan.keep[i] if now >= 0 else 1.0
    for c in range(problem.options[kind]):
        point = problem.option[kind, c]
        if not problem.low[i] <= problem.gpus[point] <= problem.high[i] or problem.gpus[point] > left:
            continue
        value = (1.0 if point == now else keep) * problem.speed[kind, c] / plan.best[i]
        gain = value - plan.worth[i]
        if gain <= 0.0:
            continue
        cost = _cost(problem, price, point, have)
        if gain / cost > score and find(problem, plan, i, group, point):
            if point == now and not same_nodes(problem.at[i], plan.spot[: problem.spread[point]]):
                value *= keep
                gain = value - plan.worth[i]
            if gain / cost > score:
                score, at, worth = gain / cost, point, value
                plan.pick[:] = plan.spot
    return Bid(score * plan.weight[i, group], at, worth)


@jit
def same_nodes(nodes: Ints, others: Ints) -> bool:
    """Return whether two lists of nodes, -1 in places without one, are of the same nodes, in any order."""
    for node in nodes:
        if node >= 0 and not _is_in(others, node):
            return False
    for node in others:
        if node >= 0 and not _is_in(nodes, node):
            return False
    return True


@jit
def _cost(problem: JointProblem, price: Floats, point: int, have: int) -> float:
    """Return the price of a point beyond another: of its dominant share, the largest of GPUs, cores and memory."""
    top, before = 0.0, 0.0
    for r in range(3):
        top = max(top, price[r] * problem.share[point, r])
        if have >= 0:
            before = max(before, price[r] * problem.share[have, r])
    return max(top - before, 1e-5)


@jit
def fill(problem: JointProblem, plan: JointDecision, mode: int) -> None:
    """Decide about all jobs."""
    if mode == ALONE or mode == AUCTION:
        _choose_jointly(problem, plan, mode)
    else:
        _choose_by_agents(problem, plan, mode)


@jit
def _choose_jointly(problem: JointProblem, plan: JointDecision, mode: int) -> None:
    """Apply the best bid of all, until none has a gain.

    In an auction only its own group bids for a running job that can stay; the others bid at last, if it could not.
    """
    groups, n = len(problem.group) - 1, len(plan.job)
    heap, score = _new_heap(n * groups), np.zeros(groups)
    while True:
        first = _first_alike(problem, plan)
        for i in range(n):
            if plan.group[i] >= 0:
                continue
            _bids_for(problem, plan, i, mode == AUCTION, first, score)
            for group in range(groups):
                if score[group] > 0.0:
                    push(heap, -score[group], i * groups + group)
        if heap.size[0] == 0:
            return
        _apply_best_first(problem, plan, heap)
        if mode == ALONE:
            return  # all groups have bid for all jobs


@jit
def _apply_best_first(problem: JointProblem, plan: JointDecision, heap: Heap) -> None:
    groups = len(problem.group) - 1
    while heap.size[0] > 0:
        item = pop(heap)
        i, group = item // groups, item % groups
        if plan.group[i] >= 0 and plan.group[i] != group:
            continue
        best = bid(problem, plan, i, group)
        if best.score <= 0.0:
            continue
        if heap.size[0] > 0 and -best.score > heap.key[0]:
            push(heap, -best.score, item)  # stale: other jobs have taken resources since it was pushed
            continue
        put(problem, plan, i, best.point, plan.pick)
        plan.worth[i] = best.worth
        score = bid(problem, plan, i, group).score
        if score > 0.0:
            push(heap, -score, item)


@jit
def _choose_by_agents(problem: JointProblem, plan: JointDecision, mode: int) -> None:
    groups, n = len(problem.group) - 1, len(plan.job)
    most = problem.gpus.max() if n > 0 else 0
    # One heap of bids for each group, best first. Bids fall as GPUs go, and a popped one is computed anew where its
    # group has changed since: if it is not the best any more it goes back, so that most are never computed again.
    keys, items, sizes = np.zeros((groups, n)), np.zeros((groups, n), np.int64), np.zeros(groups, np.int64)
    version, since = np.zeros(groups, np.int64), np.zeros((groups, n), np.int64)
    _bid_for_all(problem, plan, keys, items, sizes, version, since)
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
                now = -heap.key[0]
                i = pop(heap)
                if plan.group[i] >= 0 and plan.group[i] != group:
                    continue  # another group has won it since
                if since[group, i] != version[group]:
                    now, since[group, i] = bid(problem, plan, i, group).score, version[group]
                if now <= 0.0:
                    continue  # nothing that is left here would speed it up
                if heap.size[0] > 0 and -now > heap.key[0]:
                    push(heap, -now, i)
                    continue
                score[group, found], bidder_job[group, found] = now, i
                found += 1
            any_bid |= found > 0
        if not any_bid:
            # Others may have taken the place of a running job since: now every agent may bid for it.
            if not _bid_for_all(problem, plan, keys, items, sizes, version, since):
                return
            continue
        chosen[:] = 0
        if mode == GRAPH:
            agree(score, bidder_job, chosen)
        left = plan.left[0]
        if not _commit(problem, plan, score, bidder_job, chosen, version):
            chosen[:] = 0  # messages need not converge on graphs with cycles: no agent bid, so each makes its best bid
            _commit(problem, plan, score, bidder_job, chosen, version)
        if min(left, plan.left[0]) < most:
            version += 1  # of all groups: GPUs left for all jobs limit the bids
        # What was popped goes back with its new bid, the winners' too: they may grow further.
        for group in range(groups):
            heap = Heap(keys[group], items[group], sizes[group : group + 1])
            for b in range(BIDS):
                i = bidder_job[group, b]
                if i >= 0:
                    now = score[group, b]
                    if plan.group[i] == group:
                        now, since[group, i] = bid(problem, plan, i, group).score, version[group]
                    if now > 0.0:
                        push(heap, -now, i)


@jit
def _bid_for_all(
    problem: JointProblem, plan: JointDecision, keys: Floats, items: Ints, sizes: Ints, version: Ints, since: Ints
) -> bool:  # fmt: skip
    """Fill the heaps with all agents' bids for jobs not decided yet; return whether there are any.

    Only its own group bids for a running job that can stay: else two agents that act at once move jobs to and fro.
    """
    found, first, score = False, _first_alike(problem, plan), np.zeros(len(version))
    for i in range(len(plan.job)):
        if plan.group[i] >= 0:
            continue
        _bids_for(problem, plan, i, True, first, score)
        for group in range(len(version)):
            if score[group] > 0.0:
                push(Heap(keys[group], items[group], sizes[group : group + 1]), -score[group], i)
                since[group, i] = version[group]
                found = True
    return found


@jit
def _first_alike(problem: JointProblem, plan: JointDecision) -> Ints:
    """Return for each group the first one with the same nodes, as much of them free and held, and the same prices."""
    first = np.arange(len(problem.group) - 1)
    for group in range(len(first)):
        for other in range(group):
            if first[other] == other and _are_alike(problem, plan, group, other):
                first[group] = other
                break
    return first


@jit
def _are_alike(problem: JointProblem, plan: JointDecision, group: int, other: int) -> bool:
    start, count = problem.group[group], problem.group[group + 1] - problem.group[group]
    at = problem.group[other]
    if problem.group[other + 1] - at != count:
        return False
    for r in range(3):
        if plan.price[group, r] != plan.price[other, r]:
            return False
        for k in range(count):
            node, its = start + k, at + k
            if problem.node[node, r] != problem.node[its, r] or plan.free[node, r] != plan.free[its, r]:
                return False
            if plan.held[node, r] != plan.held[its, r]:
                return False
    return True


@jit
def _bids_for(problem: JointProblem, plan: JointDecision, i: int, stay: bool, first: Ints, score: Floats) -> None:
    """Write every group's bid for a job; ``stay``: only its own bids for a running one that can stay."""
    alike = problem.point[i] < 0 and problem.mask[i] < 0  # nothing else tells groups apart for this job
    own = problem.group_of[problem.at[i, 0]] if stay and may_stay(problem, plan, i) else -1
    for group in range(len(first)):
        like = first[group]
        if own >= 0 and own != group:
            score[group] = 0.0
        elif alike and like != group and plan.weight[i, like] == plan.weight[i, group]:
            score[group] = score[like]
        else:
            score[group] = bid(problem, plan, i, group).score


@jit
def _commit(
    problem: JointProblem, plan: JointDecision, score: Floats, bidder_job: Ints, chosen: Ints, version: Ints
) -> bool:  # fmt: skip
    """Apply every agent's chosen bid, the best first; return whether any was applied. Count changes of groups."""
    groups = len(chosen)
    best_first = np.zeros(groups)
    for group in range(groups):
        best_first[group] = -score[group, chosen[group]]
    done, order, most = False, np.argsort(best_first), score.max()
    for at in range(groups):
        group = int(order[at])
        if best_first[group] > -PATIENCE * most:
            break  # also where no agent chose the best bid: nothing may pass it
        i = bidder_job[group, chosen[group]]
        if i >= 0 and (plan.group[i] < 0 or plan.group[i] == group):
            best = bid(problem, plan, i, group)
            if best.score > 0.0:
                version[group] += 1
                for node in problem.at[i]:
                    if node >= 0:
                        version[problem.group_of[node]] += 1  # these nodes are not held for it any more
                put(problem, plan, i, best.point, plan.pick)
                plan.worth[i] = best.worth
                done = True
    return done


@jit
def agree(score: Floats, bidder_job: Ints, chosen: Ints) -> None:
    """Run max-plus over the graph in which an edge joins agents that bid for the same job.

    Args:
        score: ``float64[agents, bids]``: gain of each bid; the last is no bid, with gain 0.
        bidder_job: ``int64[agents, bids]``: the job; -1: no bid.
        chosen: ``int64[agents]``: written: the bid of each agent.

    A job taken by two agents counts only with the larger gain.
    """
    chosen[:] = 0
    if _all_tied(score):
        return  # no message prefers any bid
    bidders = np.flatnonzero(bidder_job[:, 0] >= 0)
    agents, score, bidder_job = len(bidders), score[bidders], bidder_job[bidders]
    edge, gain, job = np.zeros((agents, agents)), score.T.copy(), bidder_job.T.copy()
    for k in range(agents):
        for other in range(k):
            if _share_job(bidder_job, k, other):
                edge[k, other] = edge[other, k] = 1.0
    message, total = np.zeros((agents, BIDS + 1, agents)), np.zeros(BIDS + 1)
    received, work = np.zeros((BIDS + 1, agents)), np.zeros((4, agents))
    taken = np.zeros(agents, np.int64)
    for turn in range(ROUNDS + 1):
        for k in range(agents):
            for a in range(BIDS + 1):
                known = score[k, a]
                for other in range(agents):
                    received[a, other] = message[other, a, k]
                    known += received[a, other]
                total[a] = known
            if turn < ROUNDS:
                _send(gain, job, received, total, k, edge[k], message[k], work, taken)
            else:
                chosen[bidders[k]] = np.argmax(total)


@jit
def _all_tied(score: Floats) -> bool:
    """Return whether every agent's first two bids are equal, and its best."""
    for k in range(len(score)):
        if not (score[k, 0] == score[k, 1] == score[k].max()):
            return False
    return True


@jit
def _share_job(bidder_job: Ints, k: int, other: int) -> bool:
    for a in range(BIDS):
        for b in range(BIDS):
            if bidder_job[k, a] >= 0 and bidder_job[k, a] == bidder_job[other, b]:
                return True
    return False


@jit
def _send(
    gain: Floats, job: Ints, received: Floats, total: Floats, k: int, edge: Floats, message: Floats, work: Floats,
    taken: Ints,
) -> None:  # fmt: skip
    """Write agent k's messages: the best that it can do for each bid of each neighbor.

    Inner loops are over agents, so that they are vectorized. ``work``, ``taken``: work space.
    """
    best, second, mine, mean = work[0], work[1], work[2], work[3]
    best[:], second[:], mean[:] = -np.inf, -np.inf, 0.0
    for a in range(BIDS + 1):
        known, own, of = total[a], gain[a, k], job[a, k] if job[a, k] >= 0 else -2
        for other in range(len(edge)):
            # All that agent k knows, less what the receiver sent itself.
            value, before = known - received[a, other], best[other]
            better = value > before
            less = before if better else value
            second[other] = less if less > second[other] else second[other]
            mine[other] = own if better else mine[other]
            taken[other] = of if better else taken[other]
            best[other] = value if better else before
    for b in range(BIDS + 1):
        for other in range(len(edge)):
            shared = best[other] - (mine[other] if mine[other] < gain[b, other] else gain[b, other])
            shared = shared if shared > second[other] else second[other]
            top = shared if taken[other] == job[b, other] else best[other]
            message[b, other] = top
            mean[other] += top / (BIDS + 1)
    for b in range(BIDS + 1):
        for other in range(len(edge)):
            # Less the mean: else messages grow without bound around cycles.
            message[b, other] = (message[b, other] - mean[other]) * edge[other]
