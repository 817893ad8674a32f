"""The nodes of a sizing question, live and in replays alike; compiled."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.sizing.question import COUNT, PART, Claims, Scene, SizingNodes
from gpusched.sched.state import Flags, Ints, Requests, Resources

_PART = PART


@jit
def sizing_nodes(
    scene: Scene, claims: Claims, resources: Resources, usable: Resources, requests: Requests, masks: Flags, rack: Ints,
    lo: int, hi: int,
) -> SizingNodes:  # fmt: skip
    """Return the nodes ``lo <= node < hi`` for these claims; ``rack``: of all nodes, empty where there are none."""
    n, most, nodes = claims.number[COUNT], claims.sizes.shape[1], hi - lo
    full, free = np.zeros((nodes, 3), np.int64), np.zeros((nodes, 3), np.int64)
    for node in range(nodes):
        if usable.gpus[lo + node] >= 0:
            full[node, 0], free[node, 0] = usable.gpus[lo + node], max(0, resources.gpus[lo + node])
            full[node, 1], free[node, 1] = max(0, usable.cores[lo + node]), max(0, resources.cores[lo + node])
            full[node, 2], free[node, 2] = max(0, usable.memory[lo + node]), max(0, resources.memory[lo + node])
    asks, widest = np.zeros((n, most, 4), np.int64), np.zeros((n, most, 2), np.int64)
    base, mask = np.zeros((n, 2)), np.full(n, -1)
    first, last, held = np.zeros(n, np.int64), np.zeros(n, np.int64), 0
    for i in range(n):
        row = scene.rows[claims.jobs[i]["row"]]
        held += row["last"] - row["first"]
    parts = np.empty(held, _PART)
    held = 0
    for i in range(n):
        row = scene.rows[claims.jobs[i]["row"]]
        base[i, 0], base[i, 1] = row["cores"], row["memory"]
        first[i] = held
        for at in range(row["first"], row["last"]):
            node = scene.parts[at]["node"] - lo
            if 0 <= node < nodes:
                parts[held] = scene.parts[at]
                parts[held]["node"] = node
                held += 1
        last[i] = held
        sizes = scene.menus.sizes[row["menu"]]
        for k in range(claims.jobs[i]["count"]):
            shape, of = claims.shape[i, k], 0
            while sizes[of] != claims.sizes[i, k]:
                of += 1
            if shape >= 0:
                asks[i, k, 0], asks[i, k, 1] = requests.parts[shape], requests.gpus[shape]
                asks[i, k, 2:] = scene.menus.least[row["menu"], of]
                widest[i, k] = scene.menus.widest[row["menu"], of]
                mask[i] = requests.mask[shape]
    return SizingNodes(
        rack[lo:hi].copy() if rack.size > 0 else rack, full, free, asks, widest, base, mask, masks[:, lo:hi].copy(),
        first, last, parts[:held],
    )  # fmt: skip
