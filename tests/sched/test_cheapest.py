"""The cheapest place by the model: racks that are left out, as none of their nodes can cost less, are none that do."""

from __future__ import annotations

import numpy as np
import pytest

from gpusched.model.topology import Switch, Topology
from gpusched.sched.fit import request_of
from gpusched.sched.state import Requests, Resources, ints
from gpusched.sched.topology.contention import (
    CHEAP,
    JobLayouts,
    cheapest,
    cost_of,
    left_over,
    new_search,
    pick,
    pick_across,
    set_keys,
)
from gpusched.sched.topology.load import enter, new_load, speed_of
from gpusched.sched.topology.slowdown import KIND, SlowdownModel, needs_of
from gpusched.sched.topology.tree import NetworkTree, links_of, new_use, tree_of

NO_MASKS = np.zeros((0, 0), np.uint8)


def three_tiers(rng: np.random.Generator) -> tuple[NetworkTree, int]:
    """Racks of odd sizes in pods below one switch; some nodes hang on a pod's switch, some on none."""
    nodes = int(rng.integers(6, 30))
    names = [f"n{i}" for i in range(nodes)]
    rack = rng.integers(-1, 8, nodes)
    switches = [Switch(name="spine"), *(Switch(name=f"p{i}", uplink_gbps=100.0, parent="spine") for i in range(2))]
    for r in range(8):
        own = tuple(n for n, at in zip(names, rack, strict=True) if at == r)
        above = f"p{r % 2}"
        switches.append(Switch(name=f"r{r}", nodes=own, uplink_gbps=float(rng.choice([25, 100, 400])), parent=above))
    return tree_of(Topology(switches=tuple(switches)), names), nodes


@pytest.mark.parametrize("seed", range(150))
def test_no_rack_has_a_cheaper_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, nodes = three_tiers(rng)
    figures = [(1.0, *(float(x) for x in rng.choice([0.0, 0.1, 0.4, 1.0], 4))) for _ in range(3)]
    model = SlowdownModel(np.array(figures).view(KIND).reshape(-1), np.zeros((0, 0)), False)
    jobs = int(rng.integers(0, 12))
    load = new_load(tree, rng.integers(0, 3, jobs), np.full(jobs, 2), np.ones(jobs), 400)
    use, needs, free = new_use(tree), np.zeros(len(tree.weight)), np.full(nodes, 8)
    for job in range(jobs):
        own = rng.choice(nodes, int(rng.integers(1, 4)), replace=False).astype(np.int64)
        count = links_of(tree, own, len(own), 2, use)
        alone = needs_of(tree, model, int(load.jobs[job]["kind"]), use, count, needs)
        load.jobs[job]["best"] = alone
        enter(load, job, use, needs, count, alone)
        free[own] -= 2
    for job in range(jobs):
        load.jobs[job]["speed"] = speed_of(model, load, job)
    free = np.maximum(free - rng.integers(0, 4, nodes), 0)
    resources = Resources(ints(free.tolist()), ints([99] * nodes), ints([99] * nodes))
    parts, gpus = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 2, 4]))
    column = [ints([x]) for x in (0, nodes, parts, gpus, 0, 0, -1, 0, -1)]
    requests = Requests(*column)
    kind = int(rng.integers(0, 3))
    search = new_search(tree)
    compute, bus_a, bus_b, net_a, net_b = figures[kind]
    bus = bus_a + bus_b * 2 * (gpus - 1) / gpus if gpus > 1 else 0.0
    net = net_a + net_b * 2 * (parts - 1) / parts if parts > 1 else 0.0
    best = compute + max(bus, net) if rng.random() < 0.5 else compute
    excess = (compute + max(bus, net)) / best - 1.0
    ways = JobLayouts(ints([0, 1]), ints([0]), np.array([excess]), ints([kind]), np.array([best]))
    cost, way = cheapest(tree, model, load, resources, NO_MASKS, requests, ways, 0, search)
    found = search.best[:parts].tolist() if way >= 0 else None

    request, least, expected, at = request_of(requests, 0), np.inf, None, np.inf
    if set_keys(tree, model, load, resources, NO_MASKS, request, kind, search) < parts:
        assert way == -1
        return

    def look() -> None:
        nonlocal least, expected, at
        own, harm = cost_of(tree, model, load, ways, 0, search.trial, parts, gpus, search)
        worth = own + harm + left_over(resources, request, search.trial)
        if worth < least:
            least, expected, at = worth, search.trial[:parts].tolist(), own + harm

    held = False
    for switch in range(-1, len(tree.parent)):
        if search.fits[switch] >= parts:
            held = True
            for tight in range(1 if parts == 1 and gpus == 1 else 0, 2):
                pick(tree, resources, request, search, switch, tight == 1)
                look()
    if parts > 1 and not (held and least <= CHEAP):
        for quiet in (False, True):
            pick_across(tree, load, resources, request, search, quiet)
            look()
    assert (found, cost) == (expected, pytest.approx(at))
