"""What kinds of jobs send over links, as measured; and a measured table of pairs that share nodes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.errors import FileError, UsageError
from gpusched.model.topology import Topology
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.slowdown import KIND, Model
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.placing import Network
from gpusched.sim.pool import Pool
from gpusched.traces.trace import Trace


class Machine(NamedTuple):
    """A kind of node on which kinds of jobs were measured.

    Attributes:
        gpus: It has. nvswitch: Whether they share no bus.
        kinds: Name -> seconds of a step: computing; a and b within a node; a and b between nodes (`slowdown.KIND`).
    """

    gpus: int
    nvswitch: bool
    kinds: dict[str, tuple[float, float, float, float, float]]

    def model(self) -> Model:
        """The formula with these kinds."""
        kinds = np.array(list(self.kinds.values()), np.float64).view(KIND).reshape(-1)
        return Model(kinds, np.zeros((0, 0)), False)


# Least squares over the placements of github.com/siasosp23/artifacts at the largest batch each
# that was measured at 40 of them. Where only
# one and two nodes were measured a and b are not told apart: all is a, as it comes out where up to 16 nodes were.
MACHINES = {
    "aws": Machine(4, False, {
        "bert": (0.922, 0.0, 0.0175, 0.795, 0.0), "cifar10": (0.702, 0.114, 0.0, 0.0474, 0.0574),
        "deepspeech2": (2.541, 0.0689, 0.0, 0.0, 0.240), "imagenet": (0.924, 0.0, 0.0485, 0.0118, 0.0624),
        "ncf": (0.0099, 0.0, 0.0031, 0.0187, 0.0), "yolov3": (0.573, 0.0, 0.0939, 0.752, 0.0),
    }),
    "rtx": Machine(8, False, {
        "bert": (0.447, 0.0, 0.168, 0.437, 0.0), "cifar10": (0.169, 0.0, 0.0058, 0.0139, 0.0),
        "deepspeech2": (0.662, 0.0, 0.159, 0.296, 0.0), "imagenet": (0.463, 0.0, 0.0184, 0.0422, 0.0),
        "ncf": (0.0203, 0.0, 0.0065, 0.0110, 0.0), "yolov3": (0.591, 0.0, 0.0603, 0.211, 0.0),
    }),
    "dgx": Machine(8, True, {
        "bert": (0.173, 0.0, 0.0, 0.006, 0.0), "cifar10": (0.071, 0.0, 0.0, 0.004, 0.0),
        "deepspeech2": (1.000, 0.0, 0.0, 0.020, 0.0), "imagenet": (0.321, 0.0, 0.0, 0.003, 0.0),
        "ncf": (0.015, 0.0, 0.0, 0.0, 0.0), "yolov3": (0.495, 0.0, 0.0, 0.001, 0.0),
    }),
}  # fmt: skip
"""Machine -> what six models were measured to take there; of a DGX computing is with all eight GPUs of a node."""


def most_alike(pool: Pool) -> str:
    """The machine whose figures are taken for nodes: AWS where none has more GPUs than those have, else RTX."""
    return "aws" if pool.gpus.max() <= MACHINES["aws"].gpus else "rtx"


def network_for(topology: Topology, trace: Trace, pool: Pool) -> tuple[Network, str]:
    """What placement costs the jobs of a trace, and a note on what was taken for what.

    Kinds are those of the machine `most_alike`: a job whose model's name begins as one of them is of that kind, the
    others' are drawn.

    Raises:
        UsageError: The topology names none of the pool's nodes.
    """
    known = set(topology.racks())
    found = sum(name in known for name in pool.names)
    if not found:
        raise UsageError("the topology names none of the nodes", f"some of {', '.join(pool.names[:3])}")
    machine = most_alike(pool)
    kinds = list(MACHINES[machine].kinds)
    of_model = [next((i for i, k in enumerate(kinds) if name.lower().startswith(k)), -1) for name in trace.models]
    drawn = np.random.default_rng(0).integers(0, len(kinds), len(trace))
    named = np.array([*of_model, -1], np.int64)[trace.model]
    kind = np.where(named >= 0, named, drawn)
    note = (
        f"what links cost by {machine} figures of {', '.join(kinds)}: {int((named >= 0).sum())} jobs by their model, "
        f"the others' drawn; {found} of {len(pool)} nodes are in the topology"
    )
    return Network(tree_of(topology, pool.names), MACHINES[machine].model(), kind), note


class Pairs(NamedTuple):
    """A measured table: what is left of a job's speed beside another that shares a node with it.

    Attributes:
        names: Of the kinds. gpus, nodes: ``int64[kinds]``: what a job of the kind has.
        ratio: ``float64[kinds, kinds]``: of the row's, beside the column's.
    """

    names: tuple[str, ...]
    gpus: Ints
    nodes: Ints
    ratio: Floats

    def model(self, by_sum: bool) -> Model:
        """Combined by sum, or by product."""
        kinds = np.zeros(len(self.names), KIND)
        kinds["compute"] = 1.0
        return Model(kinds, self.ratio, by_sum)


_COLUMNS = ("model", "gpus", "nodes", "beside_model", "beside_gpus", "beside_nodes", "ratio")


def read_pairs(path: str | Path) -> Pairs:
    """A CSV ``model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio``, as deepshare_pairs.csv; every pair once.

    Raises:
        FileError: It cannot be read, or is something else, or a pair is missing.
    """
    found: dict[tuple[tuple[str, int, int], tuple[str, int, int]], float] = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            for row in rows:
                job, beside = ((row[p + "model"], int(row[p + "gpus"]), int(row[p + "nodes"])) for p in ("", "beside_"))
                found[job, beside] = ratio = float(row["ratio"])
                if not (0.0 < ratio <= 2.0 and all(1 <= n <= g and g % n == 0 for _, g, n in (job, beside))):
                    raise ValueError(row["ratio"])
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(str(path), None, "", str(error), "a table of pairs") from None
    except (KeyError, TypeError, ValueError) as error:
        line = rows.line_num
        raise FileError(str(path), line, "", f"no pair ({error})", f"columns {','.join(_COLUMNS)}") from None
    kinds = sorted({job for pair in found for job in pair})
    missing = next(
        (f"{a} beside {b}" for a in kinds for b in kinds if (a, b) not in found), "" if kinds else "any pair"
    )
    if missing:
        raise FileError(str(path), None, "", f"no {missing}", "every kind beside every kind")
    names = tuple(f"{name}/{gpus}/{nodes}" for name, gpus, nodes in kinds)
    ratio_of = np.array([[found[a, b] for b in kinds] for a in kinds])
    gpus, nodes = (np.array([kind[i] for kind in kinds], np.int64) for i in (1, 2))
    return Pairs(names, gpus, nodes, ratio_of)
