"""Node power: watts idle and busy by node and GPU type, and joules from allocated GPUs over time.

A node draws ``idle + (busy - idle) * held GPUs / its GPUs``: the linear model of Fan, Weber, Barroso, "Power
provisioning for a warehouse-sized computer" (ISCA 2007). It knows what was held, not how hard it worked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gpusched.config.yamlfile import Value
    from gpusched.model.resources import Inventory
    from gpusched.sched.state import Floats
    from gpusched.sim.pool import Pool

J_PER_KWH = 3.6e6
_POWER = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?:(kW)|W)?")

RATED_W_PER_GPU = {"A100": 6500 / 8, "V100": 3500 / 8}
"""Whole servers' rated power by GPU: 6.5 kW for 8 A100, 3.5 kW for 8 V100 (Narantuya et al., CMC 2022, section 5)."""

OTHER_W_PER_GPU = 3500 / 8
"""GPUs of any other or unknown type count as V100."""

IDLE_SHARE = 0.5
"""An idle server draws about half its peak (Barroso, Hölzle: The case for energy-proportional computing, IEEE Computer
40(12), 2007). The paper has rated figures only; give measured ones where there are some."""


class Draw(NamedTuple):
    """W of a whole node: idle, and with all GPUs allocated."""

    idle_w: float
    busy_w: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PowerModel:
    """``idle_w``, ``busy_w``: ``float64[nodes]``, W of each node; ``note``: where the figures are from."""

    idle_w: Floats
    busy_w: Floats
    note: str

    def energy_j(self, pool: Pool, held_gpu_s: Floats, span_s: float) -> float:
        """Return the joules of all nodes over ``span_s`` seconds, idle or not.

        ``held_gpu_s``: ``float64[nodes]``: GPU seconds held on each.
        """
        share_s = held_gpu_s / np.maximum(pool.gpus, 1)
        return float(self.idle_w.sum() * span_s + ((self.busy_w - self.idle_w) * share_s).sum())


def power_model(
    pool: Pool,
    *,
    inventory: Inventory | None = None,
    types: Mapping[str, Draw] | None = None,
    nodes: Mapping[str, Draw] | None = None,
) -> PowerModel:
    """Return the power model of a pool's nodes.

    A node's own figures come first, then those of its GPU type (each for a whole node), then its rated power in the
    inventory, then the paper's rated power by GPU; where only rated power is known, idle is `IDLE_SHARE` of it.
    """
    rated = {n.name: n.rated_power_w for n in inventory.nodes if n.rated_power_w} if inventory else {}
    draws, assumed = [], False
    for row, name in enumerate(pool.names):
        gpu_type = pool.gpu_types[pool.gpu_type[row]]
        known = (nodes or {}).get(name) or (types or {}).get(gpu_type)
        if known is None:
            assumed = True
            per_gpu = (w for kind, w in RATED_W_PER_GPU.items() if kind in gpu_type.upper())
            watts = rated.get(name) or next(per_gpu, OTHER_W_PER_GPU) * int(pool.gpus[row])
            known = Draw(IDLE_SHARE * watts, watts)
        draws.append(known)
    columns = np.array(draws, np.float64).reshape(-1, 2)
    note = "energy: given watts of nodes" if not assumed else _assumption(bool(rated))
    return PowerModel(idle_w=columns[:, 0].copy(), busy_w=columns[:, 1].copy(), note=note)


def read_power(path: Path) -> tuple[dict[str, Draw], dict[str, Draw]]:
    """Read a file of figures: ``types: {A100: {idle: 1.6kW, busy: 6.5kW}}``, ``nodes: {dgx1: {...}}``, per whole node.

    Returns:
        By GPU type, by node name.

    Raises:
        FileError: The first thing wrong with it.
    """
    from gpusched.config.yamlfile import parse_file

    root = parse_file(path, "power figures").fields("a mapping with types, nodes", ("types", "nodes"))
    types, nodes = (
        {name: _draw(value) for name, value in root[key].fields("names, each with idle and busy").items()}
        if key in root
        else {}
        for key in ("types", "nodes")
    )
    return types, nodes


def _draw(value: Value) -> Draw:
    keys = value.fields("a mapping with idle, busy", ("idle", "busy"))
    for key in ("idle", "busy"):
        if key not in keys:
            raise value.error(f"a mapping with {key}")
    watts = Draw(*(keys[key].converted(_watts, "a power, such as 6.5kW or 6500 (W)") for key in ("idle", "busy")))
    if not 0 <= watts.idle_w <= watts.busy_w:
        raise value.error("idle no larger than busy")
    return watts


def _watts(text: str) -> float:
    match = _POWER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * (1000.0 if match[2] else 1.0)


def _assumption(inventory: bool) -> str:
    rated = "6.5 kW for 8 A100, 3.5 kW for 8 others: CMC 2022"
    where = f"the inventory's, else {rated}" if inventory else rated
    return f"energy is assumed, not measured: busy nodes draw rated power ({where}), idle ones half of it"
