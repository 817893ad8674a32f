"""Step time of a job by its placement and the neighbours on its links.

T = C + max over links l of S_l x (1 + sum over neighbours j of d_jl), S_l = w_l (a + b x 2 (K - 1) / K): C seconds of
computing, S_l of sending over link l, K what meets there (of a ring all-reduce each sends 2 (K - 1) / K of the volume),
w_l how much narrower it is than where a and b were measured; d_jl the part of its own step that a neighbour occupies l,
alone. Fitted on the placement tables (see docs/concepts/topology.md). Or a table of what two jobs leave each other that
share a node. Or what is believed of the cluster's own jobs: there a step is (C + max S_l) x (1 + sum over neighbours of
sensitivity x pressure over the one link that is shared, as measured of the pair where it was), see
docs/concepts/interference.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import Flags, Floats, Ints, Records
from gpusched.sched.topology.tree import LinkUse, NetworkTree

# seconds of a step: computing; sending between the GPUs of a node, and between nodes
KIND = np.dtype([(name, np.float64) for name in ("compute", "bus_a", "bus_b", "net_a", "net_b")])

BUS, NIC, UPLINK = range(3)  # kinds of links
NARROWEST = (NIC, BUS, UPLINK)  # of several links that two jobs share the first counts


class LearnedSlowdowns(NamedTuple):
    """Slowdowns learned from the cluster's own jobs.

    Attributes:
        nodes: Of the tree. unknown: Whether what neither job of a pair was measured for counts as in public tables;
            else it costs nothing.
        up: ``float64[kinds]``: seconds of sending over a way up of weight 1. name: ``int64[kinds]``: jobs of one
            name at several sizes are kinds of their own, and affect each other alike.
        contention: ``float64[names, 3, 2]``: sensitivity and pressure over `BUS`, `NIC`, `UPLINK`. measured:
            ``uint8[names, 3]``: whether any attempt says so.
        first: ``int64[names + 1]``: the pairs that were measured of a name: ``first[n] <= i < first[n + 1]``. other,
            link: ``int64[pairs]``. lost: ``float64[pairs]``: how much longer its step is beside one of the other, by
            its step.
    """

    nodes: int
    unknown: bool
    up: Floats
    name: Ints
    contention: Floats
    measured: Flags
    first: Ints
    other: Ints
    link: Ints
    lost: Floats


class SlowdownModel(NamedTuple):
    """Properties of the kinds of jobs.

    Attributes:
        kinds: ``KIND[kinds]``.
        ratio: ``float64[kinds, kinds]``: the part of its speed that is left of one over several nodes beside another
            that shares a node with it; empty: by the formula.
        by_sum: Whether what several take adds up; else what each leaves is multiplied.
        believed: Of neighbours, and ways up, learned; None: by the formula, or the table.
    """

    kinds: Records
    ratio: Floats
    by_sum: bool
    believed: LearnedSlowdowns | None = None


@jit
def needs_of(tree: NetworkTree, model: SlowdownModel, kind: int, use: LinkUse, count: int, needs: Floats) -> float:
    """Set ``needs`` to seconds S_l on each link in ``use``; return the seconds of a step alone."""
    if model.ratio.size > 0:
        needs[:count] = 0.0
        return 1.0
    of, nodes, worst = model.kinds[kind], tree.rack.size, 0.0
    for i in range(count):
        link, meet = use.link[i], use.meet[i]
        a, b = (of["bus_a"], of["bus_b"]) if link < nodes else (of["net_a"], of["net_b"])
        needs[i] = tree.weight[link] * (a + b * 2.0 * (meet - 1) / meet)
        if link >= 2 * nodes:
            needs[i] = _uplink_s(model.believed, kind, tree.weight[link], needs[i])
        worst = max(worst, needs[i])
    return float(of["compute"] + worst)


@jit
def beside(model: SlowdownModel, left: float, kind: int, other: int) -> float:
    """Reduce ``left``, the remaining speed of a job of ``kind``, by one more neighbour, by the table."""
    ratio = model.ratio[kind, other]
    return float(left - (1.0 - ratio) if model.by_sum else left * ratio)


@jit
def _uplink_s(believed: LearnedSlowdowns | None, kind: int, weight: float, formula: float) -> float:
    """Return seconds over an uplink."""
    return formula if believed is None else float(weight * believed.up[kind])


@jit
def learned(believed: LearnedSlowdowns | None) -> bool:
    """Return whether neighbours' effects are the learned ones."""
    return believed is not None


@jit
def sure_only(believed: LearnedSlowdowns | None) -> bool:
    """Return whether only measured effects count."""
    if believed is None:
        return False
    return not believed.unknown


@jit
def set_pressure(
    believed: LearnedSlowdowns | None, kind: int, use: LinkUse, count: int, needs: Floats, alone: float
) -> float:
    """Set ``needs`` to what a job presses on its links, as learned of its kind; return the step that they are of."""
    if believed is None:
        return alone
    for i in range(count):
        needs[i] = believed.contention[believed.name[kind], link_kind(believed.nodes, use.link[i]), 1]
    return 1.0


@jit
def link_kind(nodes: int, link: int) -> int:
    """Return `BUS`, `NIC` or `UPLINK`."""
    return min(link // nodes, UPLINK)


@jit
def learned_link(believed: LearnedSlowdowns | None, link: int) -> int:
    """Return `link_kind` of a link of the learned model's nodes."""
    return 0 if believed is None else link_kind(believed.nodes, link)


@jit
def lost_beside(believed: LearnedSlowdowns | None, link: int, kind: int, other: int) -> float:
    """Return how much longer a step of one kind is beside another job on such a link, relative to its step."""
    if believed is None:
        return 0.0
    own_name, other_name = believed.name[kind], believed.name[other]
    if not believed.unknown and believed.measured[own_name, link] == 0 and believed.measured[other_name, link] == 0:
        return 0.0
    for i in range(believed.first[own_name], believed.first[own_name + 1]):
        if believed.other[i] == other_name and believed.link[i] == link:
            return float(believed.lost[i])
    return float(believed.contention[own_name, link, 0] * believed.contention[other_name, link, 1])
