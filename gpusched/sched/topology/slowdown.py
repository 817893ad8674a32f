"""How long a step of a job takes where it is, beside whoever shares its links.

T = C + max over links l of S_l x (1 + sum over neighbours j of d_jl), S_l = w_l (a + b x 2 (K - 1) / K): C seconds of
computing, S_l of sending over link l, K what meets there (of a ring all-reduce each sends 2 (K - 1) / K of the volume),
w_l how much narrower it is than where a and b were measured; d_jl the part of its own step that a neighbour occupies l,
alone. Fitted on the placement tables (see docs/concepts/topology.md). Or a table of what two jobs leave each other that
share a node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import Floats, Records
from gpusched.sched.topology.tree import Tree, Use

# seconds of a step: computing; sending between the GPUs of a node, and between nodes
KIND = np.dtype([(name, np.float64) for name in ("compute", "bus_a", "bus_b", "net_a", "net_b")])


class Model(NamedTuple):
    """What is known of kinds of jobs.

    Attributes:
        kinds: ``KIND[kinds]``.
        ratio: ``float64[kinds, kinds]``: the part of its speed that is left of one over several nodes beside another
            that shares a node with it; empty: by the formula.
        by_sum: Whether what several take adds up; else what each leaves is multiplied.
    """

    kinds: Records
    ratio: Floats
    by_sum: bool


@jit
def needs_of(tree: Tree, model: Model, kind: int, use: Use, count: int, needs: Floats) -> float:
    """Seconds S_l on each of the links in ``use``, into ``needs``; the seconds of a step alone."""
    if model.ratio.size > 0:
        needs[:count] = 0.0
        return 1.0
    of, nodes, worst = model.kinds[kind], tree.rack.size, 0.0
    for i in range(count):
        link, meet = use.link[i], use.meet[i]
        a, b = (of["bus_a"], of["bus_b"]) if link < nodes else (of["net_a"], of["net_b"])
        needs[i] = tree.weight[link] * (a + b * 2.0 * (meet - 1) / meet)
        worst = max(worst, needs[i])
    return float(of["compute"] + worst)


@jit
def beside(model: Model, left: float, kind: int, other: int) -> float:
    """What is ``left`` of the speed of one of ``kind`` with one neighbour more, by the table."""
    ratio = model.ratio[kind, other]
    return float(left - (1.0 - ratio) if model.by_sum else left * ratio)
