"""The topology agents in the live controller: several schedulers, each with a part of a partition's nodes.

They decide side by side against the same snapshot; what they offer is settled in the queue's order (`bids`). One alone
has all nodes, and makes every offer at its job's turn.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

import numpy as np

from gpusched.agents.common.vector import to_vector
from gpusched.agents.topology.bids import (
    UNASKED,
    AuctionState,
    Offers,
    SchedulerWorkspace,
    offer,
    set_homes,
    set_speeds,
    set_waiting,
    settle,
)
from gpusched.agents.topology.network import SHAPES, Graph, TopologyWeights, agent_of, new_graph, pass_messages
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NO_NUMBER, Context, Unusable
from gpusched.sched.arrays import NodeArrays, PendingArrays
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.stages import held_back, say_who_waits
from gpusched.sched.state import BACKFILLS, Flags, Ints, Requests, copied
from gpusched.sched.topology.contention import Ways, new_search
from gpusched.sched.topology.load import Load
from gpusched.sched.topology.queue import Costs, Priced
from gpusched.sched.topology.tree import NetworkTree

NOTHING_LEARNED = "no measured placement costs yet"
_WORTH_TELLING = 0.005


def prepare(model: TrainedModel) -> TopologyWeights:
    """The weights. ValueError: they are of another shape."""
    return agent_of(to_vector(model.arrays, SHAPES))


def decide_queue(prepared: TopologyWeights, context: Context) -> tuple[list[int], QueueBlock]:
    """One partition's decision; see `gpusched.sched.agent`.

    Raises:
        Unusable: Nothing was ever learned of places; a value is no number.
    """
    if context.costs is None:
        raise Unusable(NOTHING_LEARNED)
    queue = context.waiting.ordered(context.partition, context.policy.order)
    costs = own_room(context.costs)
    deal = new_deal(prepared, context, costs, queue)
    if (count := context.policy.schedulers) > 1:
        desks = [desk_of(deal, context, costs) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:  # compiled passes run side by side
            for others in (False, True):
                told = pool.map(lambda n, of=others: offers_of(deal, n, of, desks[n], context, queue), range(count))
                list(told)
    return queue.tolist(), settled(deal, context, costs, queue)


def desk_of(deal: AuctionState, context: Context, costs: Costs) -> SchedulerWorkspace:
    """Arrays of a scheduler's own."""
    waiting, graph = context.waiting, deal.graph
    return SchedulerWorkspace(
        graph._replace(
            idle=graph.idle.copy(), waiting=graph.waiting.copy(), place=graph.place.copy(), wait=graph.wait.copy(),
            hand=graph.hand.copy(),
        ),
        own_room(costs),
        copied(context.world.resources), waiting.jobs.room.copy(),
        np.zeros(len(waiting.jobs.feasibility), np.uint8),
    )  # fmt: skip


def offers_of(
    deal: AuctionState, number: int, others: bool, desk: SchedulerWorkspace, context: Context, queue: Ints
) -> None:
    """What one scheduler offers the jobs that are its, or, after all have done that, those of ``others`` that ask."""
    offer(deal, number, others, context.waiting.jobs, queue, context.snapshot.now, desk)


def settled(deal: AuctionState, context: Context, costs: Costs, queue: Ints) -> QueueBlock:
    """Starts what is to start.

    Raises:
        Unusable: A value is no number.
    """
    policy = context.policy
    head, shadow = settle(context.state, queue, BACKFILLS[policy.backfill], Priced(costs, deal))
    if not deal.offers.sound.all():
        raise Unusable(NO_NUMBER)
    waits = [job for job in held_back(context, queue) if costs.told[job].max() >= _WORTH_TELLING]
    say_who_waits(context, costs, {job: float(costs.since[job] + costs.wait_s[job]) for job in waits})
    return QueueBlock(policy, int(head), float(shadow))


def own_room(costs: Costs) -> Costs:
    """The same with copies of all that a scheduler changes."""
    tree = costs.tree._replace(below=costs.tree.below.copy(), meet=costs.tree.meet.copy())
    load = Load(*(array.copy() for array in costs.load))
    return costs._replace(tree=tree, load=load, told=costs.told.copy(), search=new_search(tree))


def new_deal(agent: TopologyWeights, context: Context, costs: Costs, queue: Ints) -> AuctionState:
    """Nodes and jobs dealt out, and what the graph says of them now; nobody has made an offer yet."""
    world, waiting, count = context.world, context.waiting, context.policy.schedulers
    lo, hi = world.span.get(context.partition, (0, 0))
    part = parts_of(world, costs.tree, lo, hi, count)
    jobs, requests = len(waiting.views), waiting.requests
    parts = np.where(costs.of >= 0, _most_parts(costs, requests.parts)[costs.of], 0)
    shape = (count, jobs)
    offers = Offers(
        rank=np.full(shape, -np.inf), value=np.full(shape, -np.inf), waits=np.zeros(shape), own=np.zeros(shape),
        harm=np.zeros(shape), way=np.full(shape, -1), nodes=np.zeros((count, int(parts.sum())), np.int64),
        offset=np.cumsum(parts) - parts, sound=np.ones(count, np.uint8),
    )  # fmt: skip
    home = np.array([crc32(view.id.encode()) % count for view in waiting.views], np.int64)
    graph = _graph_of(world, costs.tree, part, lo, hi, count)
    bound, masks = _bounded(waiting, part, lo, hi, count)
    deal = AuctionState(
        agent=agent, offers=offers, home=home, whole=np.zeros(jobs, np.uint8), asks=np.ones(jobs, np.uint8),
        requests=bound, masks=masks, ways=_ways_of_all(costs.ways, len(requests.lo), count + 1),
        sure_ways=_ways_of_all(costs.sure_ways, len(requests.lo), count + 1),
        shapes=len(requests.lo), classes=len(costs.ways.best), graph=graph,
        again=np.zeros(1, np.int64),
    )  # fmt: skip
    large = 2 * count * waiting.keys.gpus >= graph.capacity[:count].sum() if count > 1 else np.zeros(jobs, np.bool_)
    set_homes(deal, world.usable, world.rack, costs.of, queue, large.astype(np.uint8))
    set_waiting(graph, deal.home, waiting.jobs, queue, waiting.keys.gpus, costs.since, context.snapshot.now)
    if count == 1:
        offers.way[:] = UNASKED
    set_speeds(costs.model, costs.load, len(part))
    pass_messages(agent, costs.tree, costs.load, world.resources, graph)
    return deal


def _bounded(waiting: PendingArrays, part: Ints, lo: int, hi: int, count: int) -> tuple[Requests, Flags]:
    """`AuctionState.requests` and its masks."""
    requests = waiting.requests
    own = np.stack([part == number for number in range(count)] + [np.ones(len(part), np.bool_)]).astype(np.uint8)
    base = np.concatenate([waiting.jobs.masks, np.ones((1, len(part)), np.uint8)])
    rows = [*(np.flatnonzero(part == number) for number in range(count)), np.arange(lo, hi)]
    begin = np.maximum(requests.lo, np.array([own.min(initial=hi) for own in rows])[:, None])
    end = np.maximum(begin, np.minimum(requests.hi, np.array([own.max(initial=lo - 1) + 1 for own in rows])[:, None]))
    mask = np.arange(count + 1)[:, None] * len(base) + np.where(requests.mask < 0, len(base) - 1, requests.mask)
    repeated = [None if column is None else np.tile(column, count + 1) for column in requests]
    bound = Requests(*repeated)._replace(lo=begin.ravel(), hi=end.ravel(), mask=mask.ravel())  # type: ignore[arg-type]
    return bound, (own[:, None, :] * base[None, :, :]).reshape(-1, len(part))


def _ways_of_all(ways: Ways, shapes: int, times: int) -> Ways:
    """`AuctionState.ways`."""
    number, count = np.arange(times)[:, None], len(ways.shape)
    first = np.append((number * count + ways.first[:-1]).ravel(), times * count)
    return Ways(
        first, (number * shapes + ways.shape).ravel(), np.tile(ways.excess, times), np.tile(ways.kind, times),
        np.tile(ways.best, times),
    )  # fmt: skip


def _most_parts(costs: Costs, parts: Ints) -> Ints:
    """``int64[classes]``: the most nodes of any of its ways."""
    first, most = costs.ways.first, np.zeros(len(costs.ways.first) - 1, np.int64)
    for c in range(len(most)):
        most[c] = parts[costs.ways.shape[first[c] : first[c + 1]]].max(initial=0)
    return most


def _graph_of(world: NodeArrays, tree: NetworkTree, part: Ints, lo: int, hi: int, count: int) -> Graph:
    """The graph, with racks cut where partitions meet; nodes of other partitions are in a part of their own."""
    inside = np.zeros(len(part), np.int64)
    inside[lo:hi] = 1
    _, racks = np.unique(2 * world.rack + inside, return_inverse=True)
    return new_graph(tree, racks.reshape(-1).astype(np.int64), world.total.gpus, part, count + 1)


def parts_of(world: NodeArrays, tree: NetworkTree, lo: int, hi: int, count: int) -> Ints:
    """The scheduler that has each node, ``int64[nodes]``; ``count`` for rows that are not ``lo <= row < hi``.

    Whole racks, one after the other as switches above them are, where there are enough, else nodes in that order; with
    as many GPUs each as that allows.
    """
    part = np.full(len(world.nodes), count, np.int64)
    rows = np.arange(lo, hi)
    above = np.append(tree.parent, -1)[tree.rack[rows]]
    order = rows[np.lexsort((rows, world.rack[rows], above, tree.rack[rows] < 0))]
    racks = world.rack[order]
    unit = np.cumsum(np.append(True, racks[1:] != racks[:-1])) - 1 if len(order) else racks
    if not len(order) or unit[-1] + 1 < count:
        unit = np.arange(len(order))
    part[order] = _shared_out(np.bincount(unit, weights=world.total.gpus[order]), count)[unit]
    return part


def _shared_out(sizes: np.ndarray, count: int) -> Ints:
    """Neighbouring units to ``count`` shares as equal as can be; none is left out where there are enough."""
    share, now, had, total = np.zeros(len(sizes), np.int64), 0, 0.0, float(sizes.sum())
    begun = False
    for i, size in enumerate(sizes.tolist()):
        full = had + size / 2 > (now + 1) * total / count or len(sizes) - i <= count - 1 - now
        if begun and now < count - 1 and full:
            now += 1
        share[i], had, begun = now, had + size, True
    return share
