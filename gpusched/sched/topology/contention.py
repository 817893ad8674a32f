"""The placement with the least modelled cost: the job's own slowdown and that of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.fit import request_of, unreserved
from gpusched.sched.place import choose, node_fits
from gpusched.sched.state import RACK, Flags, Floats, Ints, PlacementRequest, Requests, Resources, Scratch, ints
from gpusched.sched.topology.load import FULL_STEP, MIN_SPEED, Load, new_visit, part_of, speed_of
from gpusched.sched.topology.slowdown import (
    BUS,
    NARROWEST,
    NIC,
    SlowdownModel,
    beside,
    learned,
    link_kind,
    lost_beside,
    needs_of,
    sure_only,
)
from gpusched.sched.topology.tree import LinkUse, NetworkTree, links_of, new_use

LEFT_OVER = 0.1
"""What breaking up an empty node counts for, against slowdown: of two that cost the same, the tighter."""
CHEAP = 0.02
"""A placement that costs no more is not searched further for."""


class JobLayouts(NamedTuple):
    """The possible layouts of jobs, by class (request and kind), the fewest nodes first.

    Attributes:
        first: ``int64[classes + 1]``: a class's ways are ``first[c] <= i < first[c + 1]``.
        shape: ``int64[ways]``: index into `Requests`.
        excess: ``float64[ways]``: how much longer a step takes so, alone in one rack, than where it is shortest on the
            nodes that are well; 0.5: half as long again.
        kind: ``int64[classes]``. best: ``float64[classes]``: seconds of a step where it is shortest.
    """

    first: Ints
    shape: Ints
    excess: Floats
    kind: Ints
    best: Floats


class PlacementSearch(NamedTuple):
    """Work space for a search.

    Attributes:
        use, needs: Links of a candidate. key: ``float64[nodes]``. fits: ``int64[switches]``: nodes that fit, by rack.
        trial: ``int64[nodes]``: a candidate; keys: ``float64[nodes]``: its nodes' keys. best: the one to be taken;
            cost: ``float64[1]``: what it costs. tight: ``float64[1]``: 0: breaking up nodes counts for nothing, else 1.
    """

    use: LinkUse
    needs: Floats
    key: Floats
    fits: Ints
    trial: Ints
    keys: Floats
    best: Ints
    cost: Floats
    tight: Floats


def new_search(tree: NetworkTree) -> PlacementSearch:
    """Allocate work space for a tree."""
    nodes = len(tree.rack)
    return PlacementSearch(
        new_use(tree), np.zeros(len(tree.weight)), np.zeros(nodes), np.zeros(len(tree.parent) + 1, np.int64),
        np.zeros(nodes, np.int64), np.zeros(nodes), np.zeros(nodes, np.int64), np.zeros(1), np.ones(1),
    )  # fmt: skip


@jit
def cheapest(
    tree: NetworkTree, model: SlowdownModel, load: Load, resources: Resources, masks: Flags, requests: Requests,
    ways: JobLayouts,
    of: int, search: PlacementSearch,
) -> tuple[float, int]:  # fmt: skip
    """Return the least cost for a job of class ``of`` now, and its way; nodes in ``search.best``.

    The cost is the part by which its steps are longer than where they are shortest, and those of its neighbours than
    before, weighed by their GPUs against its own. -1: none fits.

    Candidates: for every way the quietest and the tightest nodes of each rack, and of all racks, those with the most
    nodes that fit first, or those with the least busy uplinks.
    """
    best, chosen = np.inf, -1
    for way in range(ways.first[of], ways.first[of + 1]):
        if ways.excess[way] >= best:
            continue
        request = request_of(requests, ways.shape[way])
        fitting = set_keys(tree, model, load, resources, masks, request, ways.kind[of], search)
        if fitting < request.parts:
            continue
        cost = _in_one_way(tree, model, load, ways, of, way, resources, request, search, best)
        if cost < best:
            best, chosen = cost, way
        if best <= CHEAP:
            break
    return search.cost[0], chosen


@jit
def set_keys(
    tree: NetworkTree, model: SlowdownModel, load: Load, resources: Resources, masks: Flags,
    request: PlacementRequest, kind: int,
    search: PlacementSearch,
) -> int:  # fmt: skip
    """Set how busy each node is for the request, infinite: no fit; count those that fit, in all and by rack."""
    count, nodes = 0, tree.rack.size
    search.fits[:] = 0
    search.key[:] = np.inf
    for node in range(request.lo, request.hi):
        if not node_fits(resources, masks, request, node):
            continue
        count += 1
        search.fits[tree.rack[node]] += 1
        loud = 0.0
        if sure_only(model.believed):
            loud = _lost_at(tree, model, load, request, kind, node)
        elif request.gpus > 1:
            loud += load.pressure[node] / FULL_STEP
        if request.parts > 1 and not sure_only(model.believed):
            loud += load.pressure[nodes + node] / FULL_STEP
            if model.ratio.size > 0:
                loud += _lost_on(model, load, nodes + node, kind)
        search.key[node] = loud
    return count


@jit
def _lost_at(
    tree: NetworkTree, model: SlowdownModel, load: Load, request: PlacementRequest, kind: int, node: int
) -> float:
    """Return what a job of ``kind`` and those on a node would lose to each other, as measured."""
    lost, gpus = 0.0, max(1, request.parts * request.gpus)
    for link in (BUS, NIC):
        if (link == BUS and request.gpus < 2) or (link == NIC and request.parts < 2):
            continue
        at = load.on[link * tree.rack.size + node]
        while at >= 0:
            other = load.jobs[load.uses[at]["job"]]
            at = load.uses[at]["next"]
            more = lost_beside(model.believed, link, other["kind"], kind)
            lost += lost_beside(model.believed, link, kind, other["kind"])
            lost += other["gpus"] * more / gpus
    return lost


@jit
def _lost_on(model: SlowdownModel, load: Load, link: int, kind: int) -> float:
    """Return what a job of ``kind`` and those on a link would lose to each other."""
    lost, at = 0.0, load.on[link]
    while at >= 0:
        other = load.jobs[load.uses[at]["job"]]["kind"]
        lost += 2.0 - model.ratio[kind, other] - model.ratio[other, kind]
        at = load.uses[at]["next"]
    return lost


@jit
def _in_one_way(
    tree: NetworkTree, model: SlowdownModel, load: Load, ways: JobLayouts, of: int, way: int, resources: Resources,
    request: PlacementRequest,
    search: PlacementSearch, least: float,
) -> float:  # fmt: skip
    """Return the least cost of one way's candidates if below ``least``, its nodes in ``search.best``."""
    parts = request.parts
    one_rack = False
    for switch in range(-1, tree.parent.size):  # -1: nodes on no switch, each a rack of its own but for the key
        if search.fits[switch] < parts or (switch < 0 and parts > 1 and request.spread != 0):
            continue
        one_rack = True
        if switch >= 0 and _is_no_less(tree, model, resources, request, search, switch, ways.excess[way], least):
            continue
        for tight in range(1 if parts == 1 and request.gpus == 1 else 0, 2):
            pick(tree, resources, request, search, switch, tight == 1)
            least = _evaluate(tree, model, load, ways, of, resources, request, search, least)
    if parts == 1 or tree.parent.size == 0 or request.spread != 0 or (one_rack and least <= CHEAP):
        return least
    for quiet in range(2):
        pick_across(tree, load, resources, request, search, quiet == 1)
        least = _evaluate(tree, model, load, ways, of, resources, request, search, least)
    return least


@jit
def _is_no_less(
    tree: NetworkTree, model: SlowdownModel, resources: Resources, request: PlacementRequest, search: PlacementSearch,
    switch: int, alone: float,
    least: float,
) -> bool:  # fmt: skip
    """Return whether no nodes of a rack can cost less than ``least``, even without neighbours.

    By a table, or by what was learned, neighbours may be worth something, so there it is not known.
    """
    if model.ratio.size > 0 or learned(model.believed):
        return False
    left = 1 << 40
    for i in range(tree.begin[switch], tree.begin[switch + 1]):
        node = tree.nodes[i]
        if search.key[node] < np.inf:
            left = min(left, resources.gpus[node] - request.gpus)
    return bool(alone + search.tight[0] * LEFT_OVER * left / max(1, request.gpus) - 1e-9 >= least)


@jit
def pick(
    tree: NetworkTree,
    resources: Resources,
    request: PlacementRequest,
    search: PlacementSearch,
    switch: int,
    tight: bool,
) -> None:
    """Pick a rack's nodes with the least left over, or the least busy, into ``search.trial``."""
    count, broken = 0, search.tight[0] * LEFT_OVER
    begin = tree.begin[switch] if switch >= 0 else 0
    for i in range(begin, tree.begin[switch + 1]):
        node = tree.nodes[i]
        if search.key[node] < np.inf:
            left = resources.gpus[node] - request.gpus
            count = _keep(search, count, request.parts, node, left if tight else search.key[node] + broken * left)


@jit
def pick_across(
    tree: NetworkTree, load: Load, resources: Resources, request: PlacementRequest, search: PlacementSearch, quiet: bool
) -> None:
    """Pick nodes of the racks with the most nodes that fit, or the least busy uplinks, into ``search.trial``."""
    count, far = 0, 2.0 * tree.rack.size
    for node in range(request.lo, request.hi):
        if search.key[node] == np.inf:
            continue
        rack = tree.rack[node]
        key = float(tree.rack.size - search.fits[rack])
        if quiet and rack >= 0:
            key += far * load.pressure[2 * tree.rack.size + rack] / FULL_STEP
        left = resources.gpus[node] - request.gpus
        count = _keep(search, count, request.parts, node, key * 1e6 + rack * 1e3 + search.key[node] + LEFT_OVER * left)


@jit
def _keep(search: PlacementSearch, count: int, parts: int, node: int, key: float) -> int:
    """Insert a node, keeping the ``parts`` smallest keys, ties by row; return the count."""
    if count == parts and key >= search.keys[count - 1]:
        return count
    count = min(count + 1, parts)
    at = count - 1
    while at > 0 and search.keys[at - 1] > key:
        search.keys[at], search.trial[at] = search.keys[at - 1], search.trial[at - 1]
        at -= 1
    search.keys[at], search.trial[at] = key, node
    return count


@jit
def _evaluate(
    tree: NetworkTree, model: SlowdownModel, load: Load, ways: JobLayouts, of: int, resources: Resources,
    request: PlacementRequest, search: PlacementSearch,
    least: float,
) -> float:  # fmt: skip
    """Keep ``search.trial`` if its cost, with what it leaves over, is below ``least``; return the lower."""
    own, harm = cost_of(tree, model, load, ways, of, search.trial, request.parts, request.gpus, search)
    worth = own + harm + search.tight[0] * left_over(resources, request, search.trial)
    if worth < least:
        search.cost[0] = own + harm
        search.best[: request.parts] = search.trial[: request.parts]
        return float(worth)
    return least


@jit
def left_over(resources: Resources, request: PlacementRequest, nodes: Ints) -> float:
    """Return the penalty for fragmenting nodes."""
    left = 0
    for i in range(request.parts):
        left += resources.gpus[nodes[i]] - request.gpus
    return LEFT_OVER * left / max(1, request.parts * request.gpus)


@jit
def cost_of(
    tree: NetworkTree, model: SlowdownModel, load: Load, ways: JobLayouts, of: int, nodes: Ints, parts: int, gpus: int,
    search: PlacementSearch
) -> tuple[float, float]:  # fmt: skip
    """Return a placement's cost to the job and to its neighbours, see `cheapest`.

    Neighbours' steps grow from what they are now: what their own places cost them is not this placement's doing.
    """
    use, needs, kind = search.use, search.needs, ways.kind[of]
    count = links_of(tree, nodes, parts, gpus, use)
    alone = needs_of(tree, model, kind, use, count, needs)
    if learned(model.believed):
        lost, harm = _lost_beside_all(tree, model, load, kind, use, count)
        return float(alone / ways.best[of] * (1.0 + lost) - 1.0), float(harm / max(1, parts * gpus))
    by_table, own, harm, look = model.ratio.size > 0, 1.0, 0.0, new_visit(load)
    if not by_table:
        worst = 0.0
        for i in range(count):
            worst = max(worst, needs[i] * (1.0 + load.pressure[use.link[i]] / FULL_STEP))
            load.more[use.link[i]] = part_of(needs[i], alone)
        own = ways.best[of] / (model.kinds[kind]["compute"] + worst)
    for i in range(count):
        at = load.on[use.link[i]]
        while at >= 0:
            job = load.uses[at]["job"]
            at, other = load.uses[at]["next"], load.jobs[job]
            if other["seen"] == look:
                continue
            other["seen"] = look
            if by_table:
                own = beside(model, own, kind, other["kind"])
                then = max(beside(model, other["speed"], other["kind"], kind), MIN_SPEED)
            else:
                then = speed_of(model, load, job)
            harm += other["gpus"] * (1.0 / then - 1.0 / other["speed"])
    for i in range(count):
        load.more[use.link[i]] = 0
    return float(1.0 / max(own, MIN_SPEED) - 1.0), float(harm / max(1, parts * gpus))


@jit
def _lost_beside_all(
    tree: NetworkTree, model: SlowdownModel, load: Load, kind: int, use: LinkUse, count: int
) -> tuple[float, float]:
    """Return the learned loss to all neighbours, over the narrowest shared link, and their own."""
    visit, lost, harm = new_visit(load), 0.0, 0.0
    for link in NARROWEST:
        for i in range(count):
            if link_kind(tree.rack.size, use.link[i]) != link:
                continue
            at = load.on[use.link[i]]
            while at >= 0:
                other = load.jobs[load.uses[at]["job"]]
                at = load.uses[at]["next"]
                if other["seen"] != visit:
                    other["seen"] = visit
                    lost += lost_beside(model.believed, link, kind, other["kind"])
                    more = lost_beside(model.believed, link, other["kind"], kind)
                    harm += other["gpus"] * more
    return lost, harm


def layouts_of(
    tree: NetworkTree, model: SlowdownModel, kinds: Ints, laid_out: Sequence[Sequence[int]],
    usable: Resources, masks: Flags, requests: Requests, scratch: Scratch,
) -> JobLayouts:  # fmt: skip
    """Return the ways of classes of these kinds (not copied), with the requests ``laid_out``; see `set_excess`."""
    first = np.cumsum([0, *(len(found) for found in laid_out)]).astype(np.int64)
    shapes = ints([shape for found in laid_out for shape in found])
    ways = JobLayouts(first, shapes, np.zeros(len(shapes)), kinds, np.ones(len(kinds)))
    set_excess(tree, model, ways, usable, masks, requests, scratch, new_search(tree))
    return ways


@jit
def set_excess(
    tree: NetworkTree, model: SlowdownModel, ways: JobLayouts, usable: Resources, masks: Flags, requests: Requests,
    scratch: Scratch,
    search: PlacementSearch,
) -> None:  # fmt: skip
    """Set each way's excess over the shortest step on ``usable``, the nodes that are well; infinite: it fits on none.

    Reservations of others close nodes only for a time, like the jobs that run there: what is best ignores both.
    """
    for c in range(ways.best.size):
        set_excess_of(c, tree, model, ways, usable, masks, requests, scratch, search)


@jit
def set_excess_of(
    c: int, tree: NetworkTree, model: SlowdownModel, ways: JobLayouts, usable: Resources, masks: Flags,
    requests: Requests, scratch: Scratch, search: PlacementSearch,
) -> None:  # fmt: skip
    """Do so for one class."""
    least = np.inf
    for way in range(ways.first[c], ways.first[c + 1]):
        request = unreserved(scratch.calendar, request_of(requests, ways.shape[way]))
        alone = alone_on(tree, model, usable, masks, request, ways.kind[c], scratch, search.use, search.needs)
        ways.excess[way] = alone if alone > 0.0 else np.inf
        least = min(least, ways.excess[way])
    if least < np.inf:
        ways.best[c] = least
    for way in range(ways.first[c], ways.first[c + 1]):
        ways.excess[way] = ways.excess[way] / ways.best[c] - 1.0


@jit
def alone_on(
    tree: NetworkTree, model: SlowdownModel, resources: Resources, masks: Flags, request: PlacementRequest, kind: int,
    scratch: Scratch,
    use: LinkUse, needs: Floats,
) -> float:  # fmt: skip
    """Return seconds of a step alone on these resources, in as few racks as can be; -1: it fits nowhere."""
    if not choose(resources, masks, request, RACK, scratch):
        return -1.0
    count = links_of(tree, scratch.chosen, request.parts, request.gpus, use)
    return needs_of(tree, model, kind, use, count, needs)
