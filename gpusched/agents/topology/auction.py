"""Partition of nodes and jobs among several schedulers: what is fixed while jobs and nodes are, and the current state.

`new_auction` builds what is fixed: parts, requests and ways on each, the graph, space for offers. `open_auction` sets
what depends on the moment. Live, both are called at each decision; in replays, the first is called once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np

from gpusched.agents.topology.network import Graph, TopologyWeights, new_graph, pass_messages
from gpusched.agents.topology.places import MAX_DAYS_WAITED
from gpusched.agents.topology.tape import DecisionTape, hear
from gpusched.compiled import jit
from gpusched.sched.fit import request_of
from gpusched.sched.place import node_fits
from gpusched.sched.state import OK, Flags, Floats, Ints, QueueJobs, Requests, Resources
from gpusched.sched.topology.contention import JobLayouts
from gpusched.sched.topology.load import Load, speed_of
from gpusched.sched.topology.queue import Costs
from gpusched.sched.topology.slowdown import SlowdownModel, learned
from gpusched.sched.topology.tree import NetworkTree

DAY_S = 86_400.0
"""Unit of waits in the network's input, as in training."""
NOT_ASKED = -2


class Offers(NamedTuple):
    """Each scheduler's offer to each job, ``[schedulers, jobs]``.

    Attributes:
        rank: Among places. value: Against waiting, by what is sure. waits: What waiting is worth to it.
        own, harm: What the place costs the job and its neighbours, as far as is sure.
        way: Of `Auction.ways`; -1: it has no place; UNASKED: it is to look when it is the job's turn.
        nodes: ``int64[schedulers, parts]``: a job's are ``nodes[:, offset[job]:]``. offset: ``int64[jobs]``.
        sound: ``uint8[schedulers]``: 0: some value was no number.
    """

    rank: Floats
    value: Floats
    waits: Floats
    own: Floats
    harm: Floats
    way: Ints
    nodes: Ints
    offset: Ints
    sound: Flags


class Auction(NamedTuple):
    """A decision of several schedulers.

    Attributes:
        agent: The weights, of all.
        offers: See there.
        home: ``int64[jobs]``: the scheduler that a job is of; first: where it would be first, by its id.
        whole: ``uint8[jobs]``: it is too large for a part: the first's, on all nodes.
        asks: ``uint8[jobs]``: other schedulers make offers for it, too, once its own has none that is good.
        requests: Of the snapshot, once for each scheduler, on its nodes, and once on all: shape s is
            ``number * shapes + s``. masks: ``uint8[masks, nodes]``: theirs. own: ``uint8[times, nodes]``: their nodes.
        ways, sure_ways: Likewise: class c is ``number * classes + c``.
        shapes, classes: ``int64``: how many there are once.
        graph: For settling. racks: ``int64[nodes]``.
        begun: ``int64[schedulers, jobs]``: the jobs that each would start.
        found: ``int64[schedulers, Load.jobs]``: work space for neighbours, running ones too.
        again: ``int64[1]``: how many offers were made again. tape: What training records; None: it is none.
    """

    agent: TopologyWeights
    offers: Offers
    home: Ints
    first: Ints
    whole: Flags
    asks: Flags
    requests: Requests
    masks: Flags
    own: Flags
    ways: JobLayouts
    sure_ways: JobLayouts
    shapes: int
    classes: int
    graph: Graph
    racks: Ints
    begun: Ints
    found: Ints
    again: Ints
    tape: DecisionTape | None = None


class Workspace(NamedTuple):
    """Scratch state of one scheduler while it proposes placements; all its own except ``costs``.

    Attributes:
        full: ``uint8[shapes]``: shapes that do not fit there; initially none.
        used: ``int64[1]``: how many jobs it would start, of ``Auction.begun``.
    """

    graph: Graph
    costs: Costs
    resources: Resources
    room: Ints
    full: Flags
    used: Ints


class Site(NamedTuple):
    """A partition's nodes ``lo <= row < hi`` among all, their racks and GPUs: ``int64[nodes]``."""

    lo: int
    hi: int
    racks: Ints
    total: Ints


def new_auction(
    agent: TopologyWeights, count: int, site: Site, costs: Costs, jobs: QueueJobs, requests: Requests,
    ids: Iterable[str]
) -> Auction:  # fmt: skip
    """Build the fixed part, without offers; ``ids``: of all jobs."""
    part = parts_of(site, costs.tree, count)
    most = np.where(costs.of >= 0, np.append(_most_parts(costs, requests.parts), 0)[costs.of], 0)
    shape = (count, len(costs.of))
    offers = Offers(
        rank=np.full(shape, -np.inf), value=np.full(shape, -np.inf), waits=np.zeros(shape), own=np.zeros(shape),
        harm=np.zeros(shape), way=np.full(shape, -1), nodes=np.zeros((count, int(most.sum())), np.int64),
        offset=np.cumsum(most) - most, sound=np.ones(count, np.uint8),
    )  # fmt: skip
    first = np.array([crc32(name.encode()) % count for name in ids], np.int64)
    bound, own = _bounded(requests, len(jobs.masks), part, site, count)
    return Auction(
        agent=agent, offers=offers, home=first.copy(), first=first, whole=np.zeros(shape[1], np.uint8),
        asks=np.ones(shape[1], np.uint8), requests=bound,
        masks=np.zeros(((count + 1) * (len(jobs.masks) + 1), len(part)), np.uint8), own=own,
        ways=_ways_of_all(costs.ways, len(requests.lo), count + 1),
        sure_ways=_ways_of_all(costs.sure_ways, len(requests.lo), count + 1),
        shapes=len(requests.lo), classes=len(costs.ways.best), graph=_graph_of(site, costs.tree, part, count),
        racks=site.racks, begun=np.zeros(shape, np.int64), found=np.zeros((count, len(costs.load.jobs)), np.int64),
        again=np.zeros(1, np.int64),
    )  # fmt: skip


@jit
def open_auction(
    auction: Auction, costs: Costs, jobs: QueueJobs, queue: Ints, resources: Resources, usable: Resources, now: float
) -> None:  # fmt: skip
    """Set what depends on the moment; no offer has been made yet."""
    offers, count = auction.offers, auction.offers.rank.shape[0]
    for job in queue:
        offers.way[:, job] = NOT_ASKED if count == 1 else -1
        auction.asks[job] = 1
    _set_best(auction.ways, costs.ways)
    _set_best(auction.sure_ways, costs.sure_ways)
    rows = jobs.masks.shape[0] + 1
    for at in range(auction.masks.shape[0]):
        auction.masks[at] = auction.own[at // rows]
        if at % rows < rows - 1:
            auction.masks[at] = auction.own[at // rows] * jobs.masks[at % rows]
    _set_homes(auction, costs, usable, queue)
    _set_waiting(auction, costs, jobs, queue, now)
    if learned(costs.model.believed):  # else the engine keeps the jobs' speeds
        _set_speeds(costs.model, costs.load)
    pass_messages(auction.agent, costs.tree, costs.load, resources, auction.graph)
    hear(auction.tape, costs.load, resources, auction.graph)


@jit
def _set_best(every: JobLayouts, ways: JobLayouts) -> None:
    """Set what is best now, once for each scheduler; see `_ways_of_all`."""
    for at in range(every.excess.size):
        every.excess[at] = ways.excess[at % ways.excess.size]
    for c in range(every.best.size):
        every.best[c] = ways.best[c % ways.best.size]


@jit
def workspace_of(auction: Auction, costs: Costs, jobs: QueueJobs, resources: Resources) -> Workspace:
    """Return a scheduler's workspace; ``costs`` are its own, unless schedulers offer in turn."""
    of = auction.graph
    graph = Graph(
        of.server, of.rack, of.whole, of.of, of.part, of.node_part, of.total, of.up, of.free, of.most, of.has,
        of.capacity, of.waiting.copy(), of.idle.copy(), of.large, of.blocked, of.place.copy(), of.best.copy(),
        of.wait.copy(), of.hand.copy(),
    )  # fmt: skip
    own = Resources(resources.gpus.copy(), resources.cores.copy(), resources.memory.copy(), None)
    full, used = np.zeros(jobs.feasibility.size, np.uint8), np.zeros(1, np.int64)
    return Workspace(graph, costs, own, _own(jobs.room), full, used)


@jit
def _own(room: Ints) -> Ints:
    return room if room is None else room.copy()


def _bounded(requests: Requests, masks: int, part: Ints, site: Site, count: int) -> tuple[Requests, Flags]:
    """Return `Auction.requests` and which scheduler's nodes they are on."""
    lo, hi = site.lo, site.hi
    own = np.stack([part == number for number in range(count)] + [np.ones(len(part), np.bool_)]).astype(np.uint8)
    rows = [*(np.flatnonzero(part == number) for number in range(count)), np.arange(lo, hi)]
    begin = np.maximum(requests.lo, np.array([own.min(initial=hi) for own in rows])[:, None])
    end = np.maximum(begin, np.minimum(requests.hi, np.array([own.max(initial=lo - 1) + 1 for own in rows])[:, None]))
    mask = np.arange(count + 1)[:, None] * (masks + 1) + np.where(requests.mask < 0, masks, requests.mask)
    repeated = [None if column is None else np.tile(column, count + 1) for column in requests]
    bound = Requests(*repeated)._replace(lo=begin.ravel(), hi=end.ravel(), mask=mask.ravel())  # type: ignore[arg-type]
    return bound, own


def _ways_of_all(ways: JobLayouts, shapes: int, times: int) -> JobLayouts:
    """Return `Auction.ways`."""
    number, count = np.arange(times)[:, None], len(ways.shape)
    first = np.append((number * count + ways.first[:-1]).ravel(), times * count)
    return JobLayouts(
        first, (number * shapes + ways.shape).ravel(), np.tile(ways.excess, times), np.tile(ways.kind, times),
        np.tile(ways.best, times),
    )  # fmt: skip


def _most_parts(costs: Costs, parts: Ints) -> Ints:
    """Return ``int64[classes]``: the most nodes of any of its ways."""
    first, most = costs.ways.first, np.zeros(len(costs.ways.first) - 1, np.int64)
    for c in range(len(most)):
        most[c] = parts[costs.ways.shape[first[c] : first[c + 1]]].max(initial=0)
    return most


def _graph_of(site: Site, tree: NetworkTree, part: Ints, count: int) -> Graph:
    """Build the graph; racks are split at partitions, other partitions' nodes are a separate part."""
    inside = np.zeros(len(part), np.int64)
    inside[site.lo : site.hi] = 1
    _, racks = np.unique(2 * site.racks + inside, return_inverse=True)
    return new_graph(tree, racks.reshape(-1).astype(np.int64), site.total, part, count + 1)


def parts_of(site: Site, tree: NetworkTree, count: int) -> Ints:
    """Return the scheduler of each node, ``int64[nodes]``; ``count`` for rows outside the partition.

    Whole racks, one after the other as switches above them are, where there are enough, else nodes in that order; with
    as many GPUs each as that allows.
    """
    part = np.full(len(site.total), count, np.int64)
    rows = np.arange(site.lo, site.hi)
    above = np.append(tree.parent, -1)[tree.rack[rows]]
    order = rows[np.lexsort((rows, site.racks[rows], above, tree.rack[rows] < 0))]
    racks = site.racks[order]
    unit = np.cumsum(np.append(True, racks[1:] != racks[:-1])) - 1 if len(order) else racks
    if not len(order) or unit[-1] + 1 < count:
        unit = np.arange(len(order))
    part[order] = _shared_out(np.bincount(unit, weights=site.total[order]), count)[unit]
    return part


def _shared_out(sizes: np.ndarray, count: int) -> Ints:
    """Divide neighbouring units into ``count`` shares as equal as can be; none is empty if there are enough."""
    share, now, before, total = np.zeros(len(sizes), np.int64), 0, 0.0, float(sizes.sum())
    begun = False
    for i, size in enumerate(sizes.tolist()):
        full = before + size / 2 > (now + 1) * total / count or len(sizes) - i <= count - 1 - now
        if begun and now < count - 1 and full:
            now += 1
        share[i], before, begun = now, before + size, True
    return share


@jit
def _set_speeds(model: SlowdownModel, load: Load) -> None:
    """Set the speed of each running job, for the network."""
    for job in range(load.jobs.size):
        load.jobs[job]["speed"] = speed_of(model, load, job)


@jit
def _set_waiting(auction: Auction, costs: Costs, jobs: QueueJobs, queue: Ints, now: float) -> None:
    """Set which jobs wait in each part, and which waits most."""
    graph = auction.graph
    graph.waiting[:] = 0.0
    graph.blocked[:] = 0.0
    graph.large[:] = 0
    for job in queue:
        if jobs.feasibility[jobs.shape[job]] != OK:
            continue
        part, gpus = auction.home[job], costs.load.jobs[job]["gpus"]
        has = max(graph.capacity[part], 1.0)
        graph.waiting[part] += gpus / has
        blocked = np.sqrt(max(0.0, min((now - costs.since[job]) / DAY_S, MAX_DAYS_WAITED))) * gpus / has
        if blocked > graph.blocked[part]:
            graph.blocked[part], graph.large[part] = blocked, gpus


@jit
def _set_homes(auction: Auction, costs: Costs, usable: Resources, queue: Ints) -> None:
    """Assign jobs to schedulers with empty nodes on which they fit; large ones and the rest to the first, on all."""
    count, total = auction.offers.rank.shape[0], 0.0
    if count == 1:
        return
    for part in range(count):
        total += auction.graph.capacity[part]
    fits = np.full((count, auction.classes), -1)
    in_rack = np.zeros(auction.racks.size, np.int64)
    for job in queue:
        c, at, large = costs.of[job], 0, 2 * count * costs.load.jobs[job]["gpus"] >= total
        while at < count and not large:
            number = (auction.first[job] + at) % count
            if fits[number, c] < 0:
                fits[number, c] = 1 if _ever_fits(auction, usable, number * auction.classes + c, in_rack) else 0
            if fits[number, c] == 1:
                break
            at += 1
        unassigned = large or at == count
        auction.whole[job] = 1 if unassigned else 0
        auction.home[job] = 0 if unassigned else (auction.first[job] + at) % count


@jit
def _ever_fits(auction: Auction, usable: Resources, c: int, in_rack: Ints) -> bool:
    for way in range(auction.ways.first[c], auction.ways.first[c + 1]):
        request, found = request_of(auction.requests, auction.ways.shape[way]), 0
        in_rack[:] = 0
        for node in range(request.lo, request.hi):
            if node_fits(usable, auction.masks, request, node):
                found += 1
                in_rack[auction.racks[node]] += 1
                if in_rack[auction.racks[node]] >= request.parts or (request.spread == 0 and found >= request.parts):
                    return True
    return False
