"""Replays in which placement matters: prepares the possible layouts of each job for `engine.placing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.topology import Topology
from gpusched.sched.fit import set_feasibility
from gpusched.sched.heaps import new_heap
from gpusched.sched.sizing.question import Menus
from gpusched.sched.state import (
    BACKFILLS,
    OK,
    RACK,
    RACK_ROOM,
    Ints,
    Records,
    Releases,
    Requests,
    filled,
    ints,
    new_outcome,
    new_plan,
    new_releases,
    no_calendar,
)
from gpusched.sched.topology.contention import JobLayouts, layouts_of, new_search
from gpusched.sched.topology.live import SlowdownTable
from gpusched.sched.topology.load import new_load
from gpusched.sched.topology.queue import Costs
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import NetworkTree, new_use, tree_of
from gpusched.sim.engine.build import SimWorld, most_parts_running
from gpusched.sim.engine.generic import new_queue
from gpusched.sim.engine.mapped import is_mapped
from gpusched.sim.engine.placing import (
    ALIGNED,
    BALANCED,
    CHEAPEST,
    CLASS,
    DRAWN,
    FEWEST,
    FIRST,
    ONE_RACK,
    QUEUE,
    RACK_WAIT,
    SPREAD_OUT,
    LearnedClasses,
    PlacementNetwork,
    PlacingState,
)
from gpusched.sim.engine.placing_walk import Walk
from gpusched.sim.engine.state import SHAPE, Links, SizeClasses
from gpusched.sim.engine.step import mark_never
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy
from gpusched.sim.pool import most_nodes, node_counts, over_nodes
from gpusched.traces.trace import Trace

RULES = {
    "random": DRAWN,
    "load-balancing": BALANCED,
    "tetris": ALIGNED,
    "first-fit": FIRST,
    "best-fit": FEWEST,
    "spread": SPREAD_OUT,
    "rack": ONE_RACK,
    "rack-wait": RACK_WAIT,
    "contention": CHEAPEST,
}
"""Placement -> how jobs are laid out, where that matters."""


_NOT_LIVE = ("random", "load-balancing", "tetris")  # sizes are for what is placed as live


def takes_costs(policy: ReplayPolicy) -> bool:
    """Return whether the policy can be replayed where placement costs something."""
    if policy.chooses_sizes and policy.placement in _NOT_LIVE:
        return False
    return policy.placement != "contention" or not (policy.preempts or policy.backfill == "conservative")


def lays_out(world: SimWorld) -> bool:
    """Return whether nodes are chosen for the possible layouts of jobs (`with_ways`), not for the jobs as they are.

    Without a network they are not. As live, policies that place by mapping or at random, agents, and policies that stop
    jobs look at no layouts.
    """
    policy, rule, network = world.policy, world.rule, world.options.network
    if network is None:
        return False
    if network.keeps_nodes:  # these are jobs' own requests
        return True
    if world.by_snapshot or (rule not in RULES and not policy.places):
        return False
    if policy.kind in ("preemptive", "agent"):
        return policy.places
    return rule != "random" or (policy.kind == "static" and policy.backfill != "conservative")  # drawn by the index


def walks(world: SimWorld) -> bool:
    """Return whether the queue is walked by costs: if requested, and if a class's first job may not be its oldest.

    A job that has waited for longer may take a place that those before it do not.
    """
    if world.options.network is None or not lays_out(world):
        return False
    if world.options.network.sure is not None and RULES.get(world.rule) == CHEAPEST:
        return True  # only the walk leaves out of a wait what is not sure
    if world.trace.spreads or world.shared != "no" or world.options.backfill_every_s > 0:
        return True  # nor does the index know jobs' own waits, parts of GPUs, nor which jobs are left waiting
    if world.sim.ledger is not None and len(world.sim.dirty) > 1:
        return True  # nor does it decide one partition after the other, which limits may cover
    if world.policy.kind != "static" or world.policy.backfill == "conservative":
        return True  # the index has each class in an order that stays
    if RULES.get(world.rule) == ALIGNED and world.trace.priority is not None:
        return True  # nor does it know priorities beside sizes
    in_turn = world.policy.order == "fifo" and world.trace.priority is None
    waits = RULES.get(world.rule) == CHEAPEST or (
        RULES.get(world.rule) == RACK_WAIT and world.policy.backfill == "skip"
    )
    alone = world.policy.backfill == "none" or (waits and not in_turn)
    # for the first that waits for the end of a reservation only the walk keeps a place
    return world.rule != "random" and (world.options.generic or bool(world.options.reservations) or alone)


def one_node_network(like: PlacementNetwork) -> PlacementNetwork:
    """Return a network for a pool of one node and one job, to compile ahead of a replay with one like this."""
    model, table = SlowdownModel(np.zeros(1, KIND), np.zeros((0, 0)), False), SlowdownTable({})
    if like.model.believed is not None:
        model = table.model_of_one()
    model.kinds["compute"] = 1.0
    learned = like.learned and LearnedClasses(table, ("",), np.zeros(1, np.int64))
    tree = tree_of(Topology(), ("n",))
    return PlacementNetwork(
        tree, model, np.zeros(1, np.int64), sure=like.sure and model, learned=learned, keeps_nodes=like.keeps_nodes
    )


def with_ways(world: SimWorld) -> tuple[SimWorld, PlacingState]:
    """Return the world with the requests of every possible layout, and the state of a run.

    Raises:
        UsageError: The policy's order, backfill or placement means nothing here.
    """
    network = world.options.network
    assert network is not None
    if world.sim.links is not None:
        return _with_own_requests(world, world.sim.links)
    most = most_nodes(world.trace, network.keeps_nodes)
    asked = np.stack((world.demand.shape, network.kind, most, one_rack_of(world.trace, network)), axis=-1)
    world, placing, _ = _with_classes(world, asked[:, None])
    return world, placing


def _with_own_requests(world: SimWorld, links: Links) -> tuple[SimWorld, PlacingState]:
    """Do so for the jobs as they are, on these links: of an agent that leaves nodes to its policy's placement."""
    network, shape = world.options.network, world.demand.shape
    assert network is not None
    kind, runs = network.kind.copy(), np.flatnonzero(shape >= 0)
    if (learned := network.learned) is not None:
        kind[runs] = _learned_rows(world, learned, learned.of[runs], shape[runs])
        world = _with_models(world)
    asked = np.stack((shape, kind, np.zeros_like(kind), np.zeros_like(kind)), axis=-1)
    world, placing, _ = _with_classes(world, asked[:, None])
    assert world.sim.links is not None
    for name in ("kind", "best"):
        world.sim.links.load.jobs[name] = links.load.jobs[name]
    return world, placing


def _learned_rows(world: SimWorld, learned: LearnedClasses, of: Ints, shape: Ints) -> Ints:
    """Return the kinds of jobs of learned classes with these requests, over as many nodes as they say."""
    found, index = np.unique(np.column_stack((of, shape)), axis=0, return_inverse=True)
    rows = [
        learned.table.row(learned.names[name], _gpus_of(world, one), (int(world.sim.shapes["parts"][one]),))
        for name, one in found.tolist()
    ]
    return ints(rows)[index.reshape(-1)]


def with_ways_at_sizes(
    world: SimWorld, menus: Menus, menu: Ints, request: Ints
) -> tuple[SimWorld, PlacingState | None]:  # fmt: skip
    """Do the same for jobs at each of their sizes; None: the policy looks at no layouts (`lays_out`).

    As live, a resizable job is over as many nodes as its request at a size says.

    Args:
        world: The world.
        menus: Sizes of the kinds of requests.
        menu: ``int64[jobs]``: their rows.
        request: ``int64[jobs]``: the requests that are resizable jobs' own; -1: none is.
    """
    network, sizes = world.options.network, menus.sizes[menu]
    assert network is not None
    resizable = (sizes >= 0).sum(axis=1) > 1
    # First the request that each job is submitted with, last the one that is its own at all sizes.
    submitted = world.demand.shape
    shape = np.column_stack((submitted, menus.shape[menu], np.where(resizable & (submitted >= 0), request, -1)))
    most = np.where(resizable, 0, most_nodes(world.trace, network.keeps_nodes))
    most = np.column_stack((*[most] * (1 + sizes.shape[1]), np.full(len(sizes), OWN)))
    one_rack = np.repeat(one_rack_of(world.trace, network)[:, None], shape.shape[1], axis=1)
    kind = np.repeat(network.kind[:, None], shape.shape[1], axis=1)
    if (learned := network.learned) is not None:
        at = np.nonzero(resizable[:, None] & (shape >= 0))
        kind[at] = _learned_rows(world, learned, learned.of[at[0]], shape[at])
        world = _with_models(world)
    asked = np.stack((shape, kind, most, one_rack), axis=-1)
    if not lays_out(world):
        return _with_links(world, asked, request), None
    world, placing, classes = _with_classes(world, asked)
    nowhere, size = np.nonzero((shape[:, 1:-1] >= 0) & (classes.at[:, 1:-1] < 0))
    menus.shape[menu[nowhere], size] = -1  # a job in one rack only may have no size that no rack has
    links = world.sim.links
    assert links is not None
    return world._replace(sim=world.sim._replace(links=_at_sizes(links, classes, request))), placing


def _at_sizes(links: Links, classes: _Classes, request: Ints) -> Links:
    """Return the links for jobs that change size; ``classes.at``: as submitted, at each size, and their own."""
    own = classes.at[:, -1].copy() if (request >= 0).any() else np.zeros(0, np.int64)
    ways, of = classes.ways, classes.at[:, 1:-1].copy()
    return links._replace(sizes=SizeClasses(of, ways.kind.copy(), classes.gpus.copy(), ways.best.copy(), own))


OWN = -1
"""In place of `most_nodes`: it keeps its number of nodes, and no job has an equal request, either; -1 - n: n nodes."""


def one_rack_of(trace: Trace, network: PlacementNetwork) -> Ints:
    """Return which jobs run in one rack only, ``int64[jobs]``; without switches none does."""
    some = trace.one_rack is not None and len(network.tree.parent)
    return np.asarray(trace.one_rack if some else np.zeros(len(trace)), np.int64)


def _early(world: SimWorld, asked: Ints) -> tuple[SimWorld, Ints]:
    """Return what jobs may request while they wait for one rack by themselves; ``asked``: see `_with_classes`.

    That is one request for each number of nodes of each request, ``int64[jobs, n, 4]``, and for one that is a job's own
    another of its own. Placements by racks have these anyway.
    """
    trace, network, rule = world.trace, world.options.network, RULES.get(world.rule)
    own, found = trace.placement_wait, list[list[tuple[int, ...]]]()
    if network is None or own is None or rule in (ONE_RACK, RACK_WAIT):
        return world, np.zeros((len(trace), 0, 4), np.int64)
    demand, learned = world.demand._replace(requests=world.passes.requests), network.learned
    known, racked = dict[tuple[int, int], list[int]](), int(len(network.tree.parent) > 0)
    owns = (asked[:, -1, 0] >= 0) & (asked[:, -1, 2] == OWN)
    for job, (wait, of_own, requests) in enumerate(zip(own.tolist(), owns.tolist(), asked.tolist(), strict=True)):
        rows: dict[tuple[int, ...], None] = {}
        for shape, kind, most, _ in requests[-1:] if of_own else requests:
            if wait <= 0 or shape < 0:
                continue
            if (shape, most) not in known:
                known[shape, most] = node_counts(world.pool, demand, shape, most)
            for count in known[shape, most]:
                of = kind
                if learned is not None:
                    of = learned.table.row(learned.names[learned.of[job]], _gpus_of(world, shape), (count,))
                rows[shape, of, OWN if of_own else OWN - count, racked] = None
        found.append([*rows])
    early = np.full((len(trace), max(map(len, found), default=0), 4), -1, np.int64)
    for job, own_rows in enumerate(found):
        early[job, : len(own_rows)] = own_rows or -1
    return (_with_models(world) if learned is not None else world), early


def _with_models(world: SimWorld) -> SimWorld:
    """Return the world with all rows of the learned table in its models."""
    network = world.options.network
    assert network is not None
    assert network.learned is not None
    model, sure = (network.learned.table.model(len(world.pool), unknown) for unknown in (True, False))
    return world._replace(options=replace(world.options, network=network._replace(model=model, sure=sure)))


def is_staged(world: SimWorld) -> bool:
    """Return whether an agent's jobs are placed by mapping or by what placement costs, as its policy says."""
    by_cost = world.options.network is not None and world.rule == "contention"
    return is_mapped(world) or (by_cost and not world.policy.places)


def staged(world: SimWorld) -> tuple[SimWorld, Walk | None]:
    """Return the world for `engine.mapped.StagedRun`, and the passes by cost; None: a mapping places the jobs."""
    if is_mapped(world):
        return world, None
    spec = world.policy.spec
    if spec is not None:
        world = world._replace(policy=replace(world.policy, placement_wait_s=float(spec.placement_wait_s)))
    return walked(*with_ways(world))


class _Classes(NamedTuple):
    """Jobs that differ in nothing that placement looks at are one class: the queue is decided class by class.

    Attributes:
        queue, gpus: ``int64[classes]``: the partition that they wait in, and the GPUs of each.
        at: ``int64[jobs, n]``: the class of each request; -1: none.
        ways: Of each class, in the rule's order.
        most: ``int64[jobs]``: nodes of a job's largest layout.
    """

    queue: Ints
    gpus: Ints
    at: Ints
    ways: JobLayouts
    most: Ints


def _classes_of(world: SimWorld, asked: Ints, rule: int) -> tuple[SimWorld, _Classes]:
    """Return the classes of requests as in `_with_classes`, and the world with every request that one may have."""
    network = world.options.network
    assert network is not None
    world = world._replace(passes=world.passes._replace(scratch=world.passes.scratch._replace(racks=racks_in(world))))
    runs = np.nonzero(asked[..., 0] >= 0)
    columns = np.column_stack((asked[runs], *(own[runs[0]] for own in _limits(world))))
    found, index = np.unique(columns, axis=0, return_inverse=True)
    distinct: Ints = found[:, :4].astype(np.int64)
    world, laid_out = _with_shapes(world, distinct, rule)
    # A job with too small a reservation has no layout, and never runs.
    nowhere = np.array([not found for found in laid_out], np.bool_)
    at = np.full(asked.shape[:2], -1, np.int64)
    at[runs] = np.where(nowhere, -1, np.arange(len(found)))[index.reshape(-1)]
    passes, kinds = world.passes, distinct[:, 1].astype(np.int64)
    masks, requests = passes.jobs.masks, passes.requests
    ways = layouts_of(network.tree, network.model, kinds, laid_out, passes.usable, masks, requests, passes.scratch)
    most = np.array(
        [max((int(world.sim.shapes["parts"][s]) for s in found), default=0) for found in laid_out], np.int64
    )
    gpus = ints([_gpus_of(world, shape) for shape in distinct[:, 0].tolist()])
    return world, _Classes(
        world.sim.shapes["queue"][distinct[:, 0]], gpus, at, ways, np.append(most, 0)[at].max(axis=1, initial=0)
    )


def _links_of(world: SimWorld, classes: _Classes, of: Ints) -> Links:
    """Return the links, empty, for jobs of these classes, ``of: int64[jobs]``; those of no class never run."""
    network, ways = world.options.network, classes.ways
    assert network is not None
    kind, gpus, best = (np.append(own, none)[of] for own, none in ((ways.kind, 0), (classes.gpus, 0), (ways.best, 1.0)))
    tree, found = network.tree, np.zeros(len(of), np.int64)
    load = new_load(tree, kind, gpus, best, _uses(world, tree))
    return Links(tree, network.model, load, new_use(tree), np.zeros(len(tree.weight)), found)


def with_links(world: SimWorld) -> SimWorld:
    """Return the world in which jobs slow each other down over links, for policies that look at no layouts.

    A job goes as fast as recorded on the best of its layouts, whatever policy it is replayed under.

    Raises:
        UsageError: The policy's placement means nothing here.
    """
    network = world.options.network
    assert network is not None
    asked = np.stack((world.demand.shape, network.kind, most_nodes(world.trace, network.keeps_nodes)), axis=-1)
    return _with_links(world, np.pad(asked, ((0, 0), (0, 1)))[:, None])


def _with_links(world: SimWorld, asked: Ints, request: Ints | None = None) -> SimWorld:
    """Return it with the links of jobs with these requests; ``request``: as `with_ways_at_sizes` has it, else None."""
    _check_costs(world)
    scratch = world.passes.scratch
    laid_out, classes = _classes_of(world, asked, FEWEST)
    links = _links_of(laid_out, classes, classes.at[:, 0])
    if request is not None:
        links = _at_sizes(links, classes, request)
    if request is not None or PLACEMENTS.get(world.rule) == RACK:
        scratch = scratch._replace(racks=racks_in(world))
    return world._replace(sim=world.sim._replace(links=links), passes=world.passes._replace(scratch=scratch))


def _check_costs(world: SimWorld) -> None:
    """Raise UsageError if the policy's order, backfill or placement means nothing where placement costs something."""
    network = world.options.network
    assert network is not None
    if not network.keeps_nodes and not takes_costs(replace(world.policy, placement=world.rule)):
        raise UsageError(
            f"{world.policy.name} (placement {world.rule}) cannot be replayed with placement costs",
            "contention goes with policies that stop no jobs and without conservative backfill, load-balancing, tetris "
            "and random with policies that choose no sizes",
        )


def _with_classes(world: SimWorld, asked: Ints) -> tuple[SimWorld, PlacingState, _Classes]:
    """Do so for ``int64[jobs, n, 4]``: request (-1: none), kind, `most_nodes` or OWN, and whether in one rack only.

    Also return their classes.

    A job's first request is the one that it has in the beginning; OWN may be its last.
    """
    count = asked.shape[1]
    world, early = _early(world, asked)
    asked = np.concatenate((asked, early), axis=1)
    network, rule = world.options.network, RULES.get(world.rule, FIRST)
    assert network is not None
    _check_costs(world)
    demand, trace, backfill = world.demand, world.trace, world.policy.backfill
    world, classes = _classes_of(world, asked, rule)
    of: Ints = classes.at[:, 0].copy()
    nowhere_in_one_rack = np.flatnonzero((of < 0) & (asked[:, 0, 0] >= 0) & (asked[:, 0, 3] != 0)).tolist()
    demand.infeasible.update(dict.fromkeys(nowhere_in_one_rack, "no rack has so many large enough nodes"))
    world.sim.jobs["shape"][of < 0] = -1
    world = world._replace(never=world.never + int(mark_never(world.sim)))
    # A job's nodes are written at its offset; its largest layout bounds how many they can be.
    most = classes.most
    world.sim.jobs["offset"] = np.cumsum(most) - most
    passes, links = world.passes, _links_of(world, classes, of)
    world = world._replace(
        sim=world.sim._replace(held=np.full(int(most.sum()), -1, np.int64), links=links),
        passes=passes._replace(
            jobs=passes.jobs._replace(shape=demand.shape.copy()), releases=_releases(world, most) or passes.releases
        ),
    )
    queues, many = len(world.sim.dirty), len(classes.gpus)
    own_wait_s = world.policy.placement_wait_s
    # a live policy uses its own wait, and blocks nothing for a job that has waited for long
    wait_s, hold_s = (network.wait_s, network.hold_s) if own_wait_s is None else (own_wait_s, np.inf)
    return world, PlacingState(
        rule=rule, wait_s=wait_s, most_wait_s=np.inf if own_wait_s is None else own_wait_s,
        patience_s=network.patience_s, hold_s=hold_s, ways=classes.ways, of=of,
        next=np.full(len(trace), -1, np.int64),
        classes=filled(
            CLASS, many, queue=classes.queue, gpus=classes.gpus, head=-1, tail=-1, looked=-1, rests=-1, rests_late=-1
        ),
        queues=filled(QUEUE, queues, held=len(trace), oldest=len(trace), first=-1, shadow=np.inf),
        wake=np.full(1, np.inf), at=np.zeros(2, np.int64), order=new_heap(many + 1),
        fits=np.zeros(len(classes.ways.shape) + 1, np.int64), search=new_search(network.tree),
        backfill=BACKFILLS[backfill], usable=passes.usable.gpus.copy(),
        early=classes.at[: len(trace) if trace.spreads else 0, count:].copy(),
    ), classes._replace(at=classes.at[:, :count])  # fmt: skip


def _limits(world: SimWorld) -> tuple[Ints, ...]:
    """Return ``int64[jobs]`` each: a job's limits, and the GPU seconds that it takes of them; if any."""
    ledger = world.sim.ledger
    if ledger is None:
        return ()
    account = ledger.account[: len(world.trace)]
    return account[:, 0], account[:, 2] * bool((ledger.row >= 0).any())


def racks_in(world: SimWorld) -> Records:
    """Return work space for the racks of nodes, ``RACK_ROOM[nodes]``."""
    assert world.options.network is not None
    tree = world.options.network.tree
    return filled(RACK_ROOM, len(tree.rack), number=_racks(tree))


def _racks(tree: NetworkTree) -> Ints:
    """``int64[nodes]``: as in `RACK_ROOM`. A node on no switch is a rack by itself; without switches all are in one."""
    nodes = len(tree.rack)
    alone = np.cumsum(tree.rack < 0) - 1 + int(tree.rack.max(initial=-1)) + 1
    _, rack = np.unique(np.where(tree.rack < 0, alone, tree.rack), return_inverse=True)
    return rack.reshape(-1).astype(np.int64) if len(tree.parent) else np.zeros(nodes, np.int64)


def _gpus_of(world: SimWorld, shape: int) -> int:
    """Return the GPUs of a request."""
    return int(world.sim.shapes["parts"][shape] * world.sim.shapes["gpus"][shape])


def _releases(world: SimWorld, most: Ints) -> Releases | None:
    """Allocate for all parts that can run at once; ``most: int64[jobs]``: of each. None: ends are not needed."""
    if world.policy.backfill != "easy":
        return None
    return new_releases(most_parts_running(world.demand, int(most.sum())) + 1)


def _uses(world: SimWorld, tree: NetworkTree) -> int:
    """Return the most uses of links at once: a bus, a NIC and all uplinks for every GPU, and each job on it."""
    depth, at = 0, tree.rack.copy()
    while (at >= 0).any():
        depth, at = depth + 1, np.where(at >= 0, np.append(tree.parent, -1)[at], -1)
    return int(world.pool.total_gpus * (2 + depth)) * (2 if world.shared == "pairs" else 1)


def _with_shapes(world: SimWorld, distinct: Ints, rule: int) -> tuple[SimWorld, list[list[int]]]:
    """Return the world with every request that a class may have, and those in the rule's order."""
    sim, pool = world.sim, world.pool
    rows = [{name: int(row[name]) for name in SHAPE.names or ()} for row in sim.shapes]
    known = {tuple(row.values()): i for i, row in reversed([*enumerate(rows)])}
    demand = world.demand._replace(requests=world.passes.requests)
    laid_out, base_of = list[list[int]](), list(range(len(rows)))
    for shape, _, most, one_rack in distinct.tolist():
        base, found = rows[shape], list[int]()
        counts = node_counts(pool, demand, shape, most) if most >= OWN else [-1 - most]
        for count in counts[::-1] if rule == BALANCED else counts:
            by_rack = rule in (ONE_RACK, RACK_WAIT)
            for spread in (1,) if one_rack and (count > 1 or most == OWN) else (1, 0) if by_rack else (0,):
                row = over_nodes(base, count, bool(spread))
                at = shape if row == base else -1 if most == OWN else known.get(tuple(row.values()), -1)
                if at < 0:
                    at = len(rows)
                    rows.append(row)
                    base_of.append(shape)
                if most != OWN:
                    known.setdefault(tuple(row.values()), at)
                found.append(at)
        laid_out.append(found)
    columns = {name: ints([row[name] for row in rows]) for name in SHAPE.names or ()}
    world = _with_requests(world, filled(SHAPE, len(rows), **columns), base_of)
    feasibility = world.passes.jobs.feasibility
    own = distinct[:, 2] == OWN  # these change: no rack may have the first size, and one another
    return world, [
        [shape for shape in found if is_own or feasibility[shape] == OK]
        for found, is_own in zip(laid_out, own.tolist(), strict=True)
    ]


def _with_requests(world: SimWorld, shapes: Records, of: Sequence[int], looser: Ints | None = None) -> SimWorld:
    """Return the world with these requests, ``SHAPE[shapes]``; ``of``: for which requests before they stand."""
    sim, passes, milli = world.sim, world.passes, world.passes.requests.milli
    columns = {name: shapes[name].copy() for name in SHAPE.names or ()}
    asked = {name: columns[name] for name in Requests._fields[:-2]}
    requests = Requests(**asked, looser=looser, milli=None if milli is None else milli[[*of]])
    feasibility, failed, failed_late = (np.zeros(len(shapes), np.int64) for _ in range(3))
    passes = passes._replace(
        requests=requests, jobs=passes.jobs._replace(feasibility=feasibility),
        scratch=passes.scratch._replace(failed=failed, failed_late=failed_late),
    )  # fmt: skip
    set_feasibility(passes.total, passes.usable, requests, passes.jobs, passes.scratch)
    return world._replace(sim=sim._replace(shapes=shapes), passes=passes)


def walked(world: SimWorld, of: PlacingState) -> tuple[SimWorld, Walk]:
    """Return the same for passes that walk the queue: the ways of each class as a chain of requests, as live."""
    ways, sim, links = of.ways, world.sim, world.sim.links
    looser, base, known = [-1] * len(sim.shapes), list(range(len(sim.shapes))), dict[tuple[int, int], int]()
    chain = ways.shape.copy()
    for first, last in pairwise(ways.first.tolist()):
        for way in range(last - 2, first - 1, -1):
            key = int(ways.shape[way]), int(chain[way + 1])
            if key not in known:
                known[key] = len(base)
                base.append(key[0])
                looser.append(key[1])
            chain[way] = known[key]
    world = _with_requests(world, sim.shapes[base], base, ints(looser))
    passes, jobs, held = world.passes, len(sim.jobs), len(sim.held)
    calendar = passes.scratch.calendar or no_calendar()
    conservative = world.policy.backfill == "conservative"
    plan = new_plan(len(world.pool), len(base), len(calendar.node) if conservative else 0, 3 * held * conservative)
    world = world._replace(
        passes=passes._replace(
            scratch=passes.scratch._replace(calendar=calendar, plan=plan), releases=new_releases(held + 1)
        )
    )
    network = world.options.network
    assert network is not None
    assert links is not None
    classes, laid_out, sure = len(of.classes), ways._replace(shape=chain), network.sure or network.model
    shapes = [ways.shape[a:b].tolist() for a, b in pairwise(ways.first.tolist())]
    passes, masks = world.passes, world.passes.jobs.masks
    sure_ways = layouts_of(links.tree, sure, ways.kind, shapes, passes.usable, masks, passes.requests, passes.scratch)
    own = np.full(jobs, -1) if world.trace.placement_wait is None else world.trace.placement_wait
    alone_s = np.where(own >= 0, own, of.wait_s if of.rule == RACK_WAIT else 0.0)
    wait_s = np.where(own >= 0, own, of.most_wait_s)
    costs = Costs(
        links.tree, links.model, sure, links.load, laid_out, sure_ways._replace(shape=chain), of.of,
        since=sim.jobs["submit"].copy(), wait_s=wait_s.copy(), patience_s=of.patience_s,
        last_pass=np.full((2, classes), -1), class_cost=np.zeros((2, classes, 2)), wait_cost=np.zeros((jobs, 2)),
        search=of.search,
    )  # fmt: skip
    if world.policy.by_agent:  # it looks at no other layouts
        alone_s = np.zeros(jobs)
    queue = new_queue(world)
    return world, Walk(
        of._replace(ways=laid_out), costs, ways.shape, alone_s, wait_s, of.of.copy(), ways.best.copy(), queue,
        queue.waiting, queue.size, new_outcome(jobs, held),
    )  # fmt: skip
