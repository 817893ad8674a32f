"""Our setting under each policy: JCT and slowdown, one row a topology, load, seed and policy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.common.vector import named, read_vector
from gpusched.agents.topology.engine import placed_by, replayed
from gpusched.agents.topology.learn import QUICK_RECIPE, Recipe, learn
from gpusched.agents.topology.network import SHAPES, agent_of, untrained
from gpusched.agents.topology.workloads import LOADS, SETTINGS, Setting, draw, setting_of
from gpusched.config.weights import save_model
from gpusched.errors import GpuschedError, UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.tree import NIC_GBPS, Tree
from gpusched.sim.engine.placing import Network
from gpusched.sim.network import read_pairs
from gpusched.sim.replay import replay
from gpusched.sim.result import Result
from gpusched.traces.trace import Trace

SEEDS = range(5, 15)
"""Not those with which the patience of `contention` was chosen, 0 to 4."""
QUICK_JOBS = 300
IDEAL = "ideal"
DEFAULT_GPUS = 8


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn workload under one policy.

    ``mean_slowdown``: how many times longer jobs ran than alone where they are fastest, the mean over jobs.
    ``knows``: what the policy is told of slowdown.
    """

    topology: str
    load: float
    seed: int
    policy: str
    mean_jct_h: float
    p99_jct_h: float
    mean_slowdown: float
    combine: str
    mix: str
    jobs: int
    knows: str


class Column(NamedTuple):
    """A policy here: a placement of `gpusched.sim.placed`, what it knows, and of agents how many schedulers."""

    placement: str
    knows: str = "nothing"
    schedulers: int = 0
    trained: bool = True


_TOLD = "the true model"


POLICIES = {
    "random": Column("random"),
    "load-balancing": Column("load-balancing"),
    "tetris": Column("tetris"),
    "best-fit": Column("best-fit"),
    "rack": Column("rack"),
    "rack-wait": Column("rack-wait"),
    "contention": Column("contention", _TOLD),
    "untrained": Column("contention", _TOLD, 1, trained=False),
    "untrained-4": Column("contention", _TOLD, 4, trained=False),
    "agents": Column("contention", _TOLD, 1),
    "agents-2": Column("contention", _TOLD, 2),
    "agents-4": Column("contention", _TOLD, 4),
    IDEAL: Column("best-fit"),
}
"""Name -> what it does. The ideal: best fit, with links that take no time. ``agents-4``: four schedulers.
``untrained``: the rule that the agents' network has nothing to say to yet."""
weights_of = partial(read_vector, "topology", SHAPES)
"""What agents have learned, from a file; None: that which comes along."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to make.

    Attributes:
        topology: One of `SETTINGS`, or a file, also an inventory with its nodes' GPUs; none: all of those.
        gpus_per_node: Of the nodes of a file that does not say it; none: 8. nic: Of each of its nodes, as `100G`.
        table: A measured table of pairs: all jobs are of its kinds, combined both ways.
        policies: Names; none: all of `POLICIES`.
        seeds: What is drawn with; none: ten. loads: None: three.
        quick: A tenth of the jobs, one seed.
        jobs: Threads; 0: one per core.
        weights: The agents'; none: those that come along.
        out: Train them instead, with the first seed, and write this file. A fifth of the workloads is by ``table``.
    """

    topology: str | None = None
    gpus_per_node: int | None = None
    nic: str | None = None
    table: str | None = None
    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    loads: tuple[float, ...] = ()
    quick: bool = False
    jobs: int = 0
    weights: str | None = None
    out: str | None = None


def reproduce(options: Options, advance: Callable[[int, int], None]) -> list[Row]:
    """Every setting asked for, at every load and seed, under every policy.

    Raises:
        UsageError: A name is not what it should be.
        GpuschedError: A file is not what it should be.
    """
    if unknown := [name for name in options.policies if name not in POLICIES]:
        raise UsageError(f"no policy of this setting is named {unknown[0]!r}", f"known: {', '.join(POLICIES)}")
    if wrong := [load for load in options.loads if not 0.0 < load <= 10.0]:
        raise UsageError(f"--load {wrong[0]:g} is not a load", "expected a fraction of the capacity, such as 0.9")
    chosen = tuple(dict.fromkeys(options.policies)) or tuple(POLICIES)
    seeds = tuple(dict.fromkeys(options.seeds)) or tuple(SEEDS[:1] if options.quick else SEEDS)
    drawn = [
        (setting, load, seed)
        for setting in settings_of(options.topology, options.table, options.gpus_per_node, options.nic)
        for load in tuple(dict.fromkeys(options.loads)) or LOADS
        for seed in seeds
    ]
    numbers = _trained(options, advance) if options.out else weights_of(options.weights)

    def one(at: tuple[Setting, float, int]) -> list[Row]:
        return [played(*at, name, QUICK_JOBS if options.quick else 0, numbers) for name in chosen]

    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs or os.cpu_count()) as pool:  # compiled passes run side by side
        for done, found in enumerate(pool.map(one, drawn), 1):
            rows += found
            advance(done, len(drawn))
    return rows


def _trained(options: Options, advance: Callable[[int, int], None]) -> Floats:
    """Learns, and writes what came of it.

    Raises:
        GpuschedError: It could not be written there.
    """
    out = Path(options.out or "")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpuschedError(f"{out.parent}: weights cannot be written there: {error.strerror}") from None
    pairs = read_pairs(options.table) if options.table is not None else None
    recipe = QUICK_RECIPE if options.quick else Recipe()
    learned = learn(recipe, pairs, (options.seeds or (0,))[0], options.jobs, advance)
    begun, ended = learned.course[0][1], learned.course[-1][1]
    about = {"recipe": json.dumps(recipe._asdict()), "cost": f"{begun:+.4f} at the start, {ended:+.4f} at the end"}
    save_model(out, "topology", named(learned.numbers, SHAPES), about)
    return learned.numbers


def settings_of(
    topology: str | None, table: str | None, gpus_per_node: int | None = None, nic: str | None = None
) -> list[Setting]:
    """The settings that are asked for.

    Raises:
        UsageError: What nodes have is said where it is known.
        GpuschedError: A file is not what it should be.
    """
    of_file = topology is not None and topology not in SETTINGS
    if not of_file and (gpus_per_node, nic) != (None, None):
        option = "--nic" if gpus_per_node is None else "--gpus-per-node"
        raise UsageError(f"{option} needs a file of nodes", "--topology FILE")
    if topology is not None and of_file:
        found = [_of_file(Path(topology), gpus_per_node, nic)]
    elif topology is not None:
        found = [SETTINGS[topology]]
    elif table is not None:
        found = [SETTINGS["16x4"]]
    else:
        found = list(SETTINGS.values())
    if table is None:
        return found
    pairs = read_pairs(table)
    return [one._replace(pairs=pairs, combine=by, mix="table") for one in found for by in ("product", "sum")]


def _of_file(path: Path, gpus_per_node: int | None, nic: str | None) -> Setting:
    """The nodes of a file, which may be an inventory."""
    from gpusched.config.fields import parse_gbps
    from gpusched.config.inventory import load_inventory
    from gpusched.config.topology import load_topology
    from gpusched.config.yamlfile import parse_file

    topology, sizes = load_topology(path), None
    if "partitions" in parse_file(path, "a topology").fields("a mapping"):
        sizes = {node.name: node.gpus for node in load_inventory(path).nodes}
    if sizes is not None and gpus_per_node is not None:
        raise UsageError(f"{path}: an inventory says how many GPUs its nodes have", "omit --gpus-per-node")
    if gpus_per_node is not None and gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node must be at least 1, found {gpus_per_node}")
    try:
        nic_gbps = NIC_GBPS if nic is None else parse_gbps(nic)
    except ValueError:
        raise UsageError(f"--nic: found {nic!r}, expected a rate", "such as 100G, or 2x200G") from None
    return setting_of(path.stem, topology, gpus_per_node or DEFAULT_GPUS, nic_gbps, sizes)


def played(setting: Setting, load: float, seed: int, name: str, jobs: int = 0, numbers: Floats | None = None) -> Row:
    """One drawn workload under one policy; ``numbers``: the agents' weights.

    Raises:
        UsageError: Some of its jobs can never run there.
    """
    result = run_of(setting, draw(setting, load, seed, jobs), seed, name, numbers)
    trace = result.trace
    if len(result.infeasible):
        gpus = int(trace.gpus[result.infeasible].max())
        raise UsageError(f"{setting.name}: no job of {gpus} GPUs can run there", "a cluster of 16 GPUs at the least")
    jct = (result.end - trace.submit) / 3600.0
    return Row(
        topology=setting.name, load=load, seed=seed, policy=name, mean_jct_h=float(jct.mean()),
        p99_jct_h=float(np.percentile(jct, 99)),
        mean_slowdown=float(((result.end - result.start) / trace.duration).mean()),
        combine=setting.combine, mix=setting.mix, jobs=len(trace), knows=POLICIES[name].knows,
    )  # fmt: skip


def run_of(setting: Setting, drawn: tuple[Trace, Ints], seed: int, name: str, numbers: Floats | None = None) -> Result:
    """Drawn jobs, with their kinds, under one policy."""
    (trace, kind), column = drawn, POLICIES[name]
    network = Network(free(setting.tree) if name == IDEAL else setting.tree, setting.model, kind)
    if column.schedulers:
        of = untrained(0) if not column.trained else weights_of() if numbers is None else numbers
        return replayed(trace, setting.pool, network, agent_of(of), column.schedulers)
    return replay(trace, setting.pool, placed_by(column.placement, name), network=network, seed=seed)


def free(tree: Tree) -> Tree:
    """The same with links that take no time."""
    return tree._replace(weight=np.zeros_like(tree.weight))
