"""The network topology as arrays: racks, the switches above them, and the width of each link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.topology import Topology
from gpusched.sched.state import Floats, Ints

NIC_GBPS = 100.0
"""Of a node's NICs together where kinds of jobs were measured, and where nothing says how fast they are."""


class NetworkTree(NamedTuple):
    """Nodes, switches and links.

    Link ``node`` is a node's bus, ``nodes + node`` its NIC, ``2 * nodes + switch`` a switch's way up.

    Attributes:
        rack: ``int64[nodes]``: the switch that a node hangs on; -1: on none.
        parent: ``int64[switches]``: the switch above; -1: none.
        weight: ``float64[links]``: how much longer the same takes there than where it was measured; 0: no time at all.
        nodes: ``int64[nodes]``: by the switch that they hang on, those on none first; switch s's are
            ``begin[s] <= i < begin[s + 1]``.
    """

    rack: Ints
    parent: Ints
    weight: Floats
    nodes: Ints
    begin: Ints


class LinkUse(NamedTuple):
    """Work space for the links of a placement, of one thread; a tree may be that of many.

    Attributes:
        link, meet: ``int64[links]``: the links and, on each, how many parts meet there.
        below, children: ``int64[switches + 1]``: work space of `links_of`, zeros between calls.
    """

    link: Ints
    meet: Ints
    below: Ints
    children: Ints


def tree_of(
    topology: Topology, names: Sequence[str], *, nvswitch: bool = False, nic_gbps: float = NIC_GBPS
) -> NetworkTree:
    """Build the arrays of a topology.

    Args:
        topology: Declared or found; nodes that it does not name hang on no switch.
        names: Of the nodes, by row.
        nvswitch: Whether GPUs of a node reach each other without sharing anything.
        nic_gbps: Of every node.
    """
    number = {switch.name: i for i, switch in enumerate(topology.switches)}
    racks, nodes = topology.racks(), len(names)
    weight = np.zeros(2 * nodes + len(number))
    weight[:nodes] = 0.0 if nvswitch else 1.0
    weight[nodes : 2 * nodes] = NIC_GBPS / nic_gbps
    for i, switch in enumerate(topology.switches):
        weight[2 * nodes + i] = NIC_GBPS / switch.uplink_gbps if switch.uplink_gbps else 0.0
    rack = np.array([number[racks[name]] if name in racks else -1 for name in names], np.int64)
    by_rack = np.argsort(rack, kind="stable").astype(np.int64)
    return NetworkTree(
        rack=rack,
        parent=np.array([number.get(switch.parent or "", -1) for switch in topology.switches], np.int64),
        weight=weight,
        nodes=by_rack,
        begin=np.searchsorted(rack[by_rack], np.arange(len(number) + 1)).astype(np.int64),
    )


def new_use(tree: NetworkTree) -> LinkUse:
    """Allocate for the links of a job on every node."""
    links, switches = len(tree.weight), len(tree.parent) + 1
    return LinkUse(*(np.zeros(count, np.int64) for count in (links, links, switches, switches)))


@jit
def links_of(tree: NetworkTree, nodes: Ints, parts: int, gpus: int, use: LinkUse) -> int:
    """Set ``use`` to the links of a job over ``nodes[:parts]`` with ``gpus`` on each; return how many.

    What meets on a bus are the GPUs there, on a NIC the nodes, on a way up those switches (and nodes) directly below
    the next that have parts. Links that take no time are left out. A job without GPUs uses none.
    """
    count, size, switches = 0, tree.rack.size, tree.parent.size
    if gpus < 1:
        return 0
    for i in range(parts):
        node = nodes[i]
        if gpus > 1 and tree.weight[node] > 0.0:
            use.link[count], use.meet[count] = node, gpus
            count += 1
        if parts > 1 and tree.weight[size + node] > 0.0:
            use.link[count], use.meet[count] = size + node, parts
            count += 1
    if parts < 2 or switches == 0:
        return count
    below, children = use.below, use.children
    # parts below each switch, and how many children with parts each has: a switch counts at its parent once, by the
    # first part that comes up through it
    for i in range(parts):
        at = tree.rack[nodes[i]]
        children[at] += 1  # -1, the last: above all switches
        new = True
        while at >= 0:
            above = tree.parent[at]
            if new and below[at] == 0:
                children[above] += 1
            else:
                new = False
            below[at] += 1
            at = above
    for i in range(parts):
        at = tree.rack[nodes[i]]
        # an uplink is crossed only if some, not all parts are below it; zeroing `below` makes each switch count once
        while at >= 0:
            above = tree.parent[at]
            if 0 < below[at] < parts and tree.weight[2 * size + at] > 0.0:
                use.link[count], use.meet[count] = 2 * size + at, children[above]
                count += 1
            below[at] = 0
            at = above
    for i in range(parts):
        at = tree.rack[nodes[i]]
        children[at] = 0
        while at >= 0:
            at = tree.parent[at]
            children[at] = 0
    return count
