"""Measured communication of kinds of jobs over links, and a measured table of jobs that share nodes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.errors import FileError, UnreadableFile, UsageError
from gpusched.model.interference import JobClassEstimate, job_class_of
from gpusched.model.topology import Topology
from gpusched.sched.slicenames import base_of
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.live import SlowdownTable, learned_tree
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.placing import LearnedClasses, PlacementNetwork
from gpusched.sim.pool import Pool, demand_of, most_nodes, node_counts
from gpusched.sim.profiles.measured import rows_of
from gpusched.sim.slicing import split_nodes
from gpusched.traces.readers.columns import open_text
from gpusched.traces.trace import Trace


class MachineType(NamedTuple):
    """A kind of node on which kinds of jobs were measured.

    Attributes:
        gpus: It has. nvswitch: Whether they share no bus.
        kinds: Name -> seconds of a step: computing; a and b within a node; a and b between nodes (`slowdown.KIND`).
    """

    gpus: int
    nvswitch: bool
    kinds: dict[str, tuple[float, ...]]

    def model(self) -> SlowdownModel:
        """Return the slowdown formula with these kinds."""
        kinds = np.array(list(self.kinds.values()), np.float64).view(KIND).reshape(-1)
        return SlowdownModel(kinds, np.zeros((0, 0)), False)


@cache
def machines() -> dict[str, MachineType]:
    """Return the measured times of models by machine."""
    found: dict[str, MachineType] = {}
    for row in rows_of("sia_links"):
        of = found.setdefault(row["machine"], MachineType(int(row["gpus"]), row["nvswitch"] == "yes", {}))
        of.kinds[row["model"]] = tuple(float(row[name]) for name in KIND.names or ())
    return found


def closest_machine(pool: Pool) -> str:
    """Return the machine whose measurements stand for the pool: AWS if no node has more GPUs than its own, else RTX."""
    return "aws" if pool.gpus.max() <= machines()["aws"].gpus else "rtx"


def network_for(topology: Topology, trace: Trace, pool: Pool) -> tuple[PlacementNetwork, str]:
    """Return what placement costs a trace's jobs, and a note on the measurements used.

    Kinds are those of `closest_machine`: a job whose model's name begins with a kind's name is of that kind, others
    are drawn.

    Raises:
        UsageError: The topology names none of the pool's nodes.
    """
    known = set(topology.racks())
    found = sum(name in known for name in pool.names)
    if not found:
        raise UsageError("the topology names none of the nodes", f"some of {', '.join(pool.names[:3])}")
    machine = closest_machine(pool)
    kinds = list(machines()[machine].kinds)
    of_model = [next((i for i, k in enumerate(kinds) if name.lower().startswith(k)), -1) for name in trace.models]
    drawn = np.random.default_rng(0).integers(0, len(kinds), len(trace))
    named = np.array([*of_model, -1], np.int64)[trace.model]
    kind = np.where(named >= 0, named, drawn)
    note = (
        f"what links cost by {machine} figures of {', '.join(kinds)}: {int((named >= 0).sum())} jobs by their model, "
        f"the others' drawn; {found} of {len(pool)} nodes are in the topology"
    )
    return PlacementNetwork(tree_of(topology, _hosts(trace, pool)), machines()[machine].model(), kind), note


def _hosts(trace: Trace, pool: Pool) -> list[str]:
    """Return the node of each row of a replay, by name: those of MIG slices hang where their node does, as live."""
    return [base_of(name) for name in split_nodes(trace, pool)[1].names]


def learned_network(
    topology: Topology, trace: Trace, pool: Pool, known: Mapping[str, JobClassEstimate]
) -> tuple[PlacementNetwork, str]:
    """Return what placement costs a site's own jobs by what was learned of them, as live, and a note.

    ``known``: estimates by job class, some. A job's class is of its user and name; nodes without a switch share only
    their own links.
    """
    names = _hosts(trace, pool)
    trace, pool, _ = split_nodes(trace, pool)
    table, demand = SlowdownTable(known), demand_of(trace, pool)
    columns = np.column_stack((trace.user, trace.model, trace.gpus, most_nodes(trace, False), demand.shape))
    distinct, index = np.unique(columns, axis=0, return_inverse=True)
    rows, measured = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.bool_)
    classes, of = dict[str, int](), np.zeros(len(distinct), np.int64)
    for i, (user, model, gpus, most, shape) in enumerate(distinct.tolist()):
        name = job_class_of(trace.user_name(user), trace.model_name(model))
        counts = tuple(node_counts(pool, demand, shape, most)) if shape >= 0 else ()
        rows[i], measured[i] = table.row(name, gpus, counts or (1,)), name in known
        of[i] = classes.setdefault(name, len(classes))
    tree = learned_tree(topology, names, table)
    model, sure = (table.model(len(pool), unknown) for unknown in (True, False))
    index = index.reshape(-1)
    count, learned = int(measured[index].sum()), LearnedClasses(table, tuple(classes), of[index])
    note = f"what placement costs as learned of {len(known)} job classes: {count} of {len(trace)} jobs are of these"
    return PlacementNetwork(tree, model, rows[index], hold_s=np.inf, sure=sure, learned=learned), note


class ColocationTable(NamedTuple):
    """A measured table: the fraction of its speed that a job keeps beside another on the same nodes.

    Attributes:
        names: Of the kinds. gpus, nodes: ``int64[kinds]``: what a job of the kind has.
        ratio: ``float64[kinds, kinds]``: of the row's, beside the column's.
    """

    names: tuple[str, ...]
    gpus: Ints
    nodes: Ints
    ratio: Floats

    def model(self, by_sum: bool) -> SlowdownModel:
        """Return a model that combines neighbours by sum, or by product."""
        kinds = np.zeros(len(self.names), KIND)
        kinds["compute"] = 1.0
        return SlowdownModel(kinds, self.ratio, by_sum)


_COLUMNS = ("model", "gpus", "nodes", "beside_model", "beside_gpus", "beside_nodes", "ratio")


def read_pairs(path: str | Path) -> ColocationTable:
    """Read a CSV ``model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio`` (deepshare_pairs.csv) with all pairs.

    Raises:
        FileError: It cannot be read, or is something else, or a pair is missing.
    """
    found: dict[tuple[tuple[str, int, int], tuple[str, int, int]], float] = {}
    try:
        with open_text(Path(path)) as file:
            rows = csv.DictReader(file)
            for row in rows:
                job, beside = ((row[p + "model"], int(row[p + "gpus"]), int(row[p + "nodes"])) for p in ("", "beside_"))
                found[job, beside] = ratio = float(row["ratio"])
                if not (0.0 < ratio <= 2.0 and all(1 <= n <= g and g % n == 0 for _, g, n in (job, beside))):
                    raise ValueError(row["ratio"])
    except OSError as error:
        raise UnreadableFile(str(path), error.strerror or str(error), "a table of pairs") from None
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
    return ColocationTable(names, gpus, nodes, ratio_of)
