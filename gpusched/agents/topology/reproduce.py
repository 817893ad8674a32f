"""Our setting under each policy: JCT and slowdown, one row per topology, load, seed and policy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.common.origin import origin_of, paper_command
from gpusched.agents.common.vector import read_vector, to_arrays
from gpusched.agents.topology.learn import QUICK_RECIPE, TopologyRecipe, learn
from gpusched.agents.topology.network import SHAPES, start, weights_from
from gpusched.agents.topology.replay import agents_spec, placed_by, replayed
from gpusched.agents.topology.workloads import TopologySetting, draw, load_scenario, settings
from gpusched.config.weights import make_writable, save_model
from gpusched.errors import GpuschedError, UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.tree import NIC_GBPS
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.network import closest_machine, read_pairs
from gpusched.sim.pool import NodeSpec, Pool, demand_of
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from gpusched.study.options import PaperOptions
from gpusched.study.paper import Advance, PaperFigures, play_all
from gpusched.traces.trace import Trace

DEFAULT_GPUS = 8


class TopologyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn workload under one policy.

    ``mean_slowdown``: how many times longer jobs ran than alone where they are fastest, the mean over jobs.
    ``knows``: the policy's information on slowdown.
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


weights_of = partial(read_vector, "topology", SHAPES)
"""Load the agents' weights from a file; None: the shipped ones."""


def reproduce(options: PaperOptions, advance: Advance) -> PaperFigures:
    """Run every requested setting, at every load and seed, under every policy.

    Raises:
        UsageError: A name or a load is invalid.
        GpuschedError: A file is invalid.
    """
    chosen = load_scenario().chosen(options.policies)
    if wrong := [load for load in options.loads if not 0.0 < load <= 10.0]:
        raise UsageError(f"--load {wrong[0]:g} is not a load", "expected a fraction of the capacity, such as 0.9")
    drawn = [
        (setting, load, seed)
        for setting in settings_of(options.topology, options.table, options.gpus_per_node, options.nic)
        for load in tuple(dict.fromkeys(options.loads)) or load_scenario().loads
        for seed in load_scenario().drawn_with(options)
    ]
    numbers = _trained(options, advance) if options.out else weights_of(options.weights)
    jobs = load_scenario().quick_jobs if options.quick else 0

    def rows(at: tuple[TopologySetting, float, int]) -> list[TopologyRow]:
        return [row_of(*at, name, jobs, numbers) for name in chosen]

    return PaperFigures(load_scenario(), play_all(drawn, rows, options, advance))


def _trained(options: PaperOptions, advance: Advance) -> Floats:
    """Train the agents and write their weights to ``options.out``.

    Raises:
        GpuschedError: The file cannot be written, or the result is worse than the start.
    """
    out = Path(options.out or "")
    make_writable(out.parent)
    pairs = read_pairs(options.table) if options.table is not None else None
    recipe = QUICK_RECIPE if options.quick else TopologyRecipe()
    seed = (options.seeds or (0,))[0]
    learned = learn(recipe, pairs, seed, options.jobs, advance)
    begun, ended = learned.course[0][1], learned.course[-1][1]
    if ended > begun and not options.quick:
        line = f"the trained agents cost {ended:+.4f}, untrained ones {begun:+.4f} (log of mean JCT, other workloads)"
        raise GpuschedError(line, "nothing was saved; try another --seed")
    about = {"recipe": json.dumps(recipe._asdict()), "cost": f"{begun:+.4f} at the start, {ended:+.4f} at the end"}
    tables = [Path(options.table)] if options.table is not None else []
    origin = origin_of(paper_command("topology", options), seed, tables)
    save_model(out, "topology", to_arrays(learned.numbers, SHAPES), about | origin)
    return learned.numbers


def settings_of(
    topology: str | None, table: str | None, gpus_per_node: int | None = None, nic: str | None = None
) -> list[TopologySetting]:
    """Return the requested settings.

    Raises:
        UsageError: ``gpus_per_node`` or ``nic`` is given without a file of nodes.
        GpuschedError: A file is invalid.
    """
    of_file = topology is not None and topology not in settings()
    if not of_file and (gpus_per_node, nic) != (None, None):
        option = "--nic" if gpus_per_node is None else "--gpus-per-node"
        raise UsageError(f"{option} needs a file of nodes", "--topology FILE")
    if topology is not None and of_file:
        found = [_of_file(Path(topology), gpus_per_node, nic)]
    elif topology is not None:
        found = [settings()[topology]]
    elif table is not None:
        found = [settings()["16x4"]]
    else:
        found = list(settings().values())
    if table is None:
        return found
    pairs = read_pairs(table)
    return [factory._replace(pairs=pairs, combine=by, mix="table") for factory in found for by in ("product", "sum")]


def _of_file(path: Path, gpus_per_node: int | None, nic: str | None) -> TopologySetting:
    """Read the nodes with GPUs of a topology file or inventory, those on no switch included.

    Jobs are of the kinds measured on the most similar machine.

    Raises:
        UsageError: It names no nodes, or an option contradicts it.
    """
    from gpusched.config.fields import parse_gbps
    from gpusched.config.inventory import load_inventory
    from gpusched.config.topology import load_topology
    from gpusched.config.yamlfile import parse_file

    topology = load_topology(path)
    gpus = dict.fromkeys(topology.racks(), gpus_per_node or DEFAULT_GPUS)
    if "partitions" in parse_file(path, "a topology").fields("a mapping"):
        if gpus_per_node is not None:
            raise UsageError(f"{path}: an inventory says how many GPUs its nodes have", "omit --gpus-per-node")
        gpus |= {node.name: node.gpus for node in load_inventory(path).nodes}
    if gpus_per_node is not None and gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node must be at least 1, found {gpus_per_node}")
    try:
        nic_gbps = NIC_GBPS if nic is None else parse_gbps(nic)
    except ValueError:
        raise UsageError(f"--nic: found {nic!r}, expected a rate", "such as 100G, or 2x200G") from None
    nodes = [NodeSpec(count, name=name) for name, count in gpus.items() if count > 0]
    if not topology.racks() or not nodes:
        raise UsageError(f"{path.stem}: no switch has nodes", "name some: r1: {nodes: gpu-[01-04], uplink: 100G}")
    pool = Pool.of(nodes)
    return TopologySetting(path.stem, topology, pool, closest_machine(pool), nic_gbps=nic_gbps)


def row_of(
    setting: TopologySetting, load: float, seed: int, name: str, jobs: int = 0, numbers: Floats | None = None
) -> TopologyRow:
    """Run one drawn workload under one policy; ``numbers``: the agents' weights.

    Raises:
        UsageError: Some of its jobs can never run there.
    """
    drawn = draw(setting, load, seed, jobs)
    never = demand_of(drawn[0], setting.pool).shape < 0
    if never.any():  # before anything is compiled
        gpus = int(drawn[0].gpus[never].max())
        raise UsageError(f"{setting.name}: no job of {gpus} GPUs can run there", "a cluster of 16 GPUs at the least")
    result = run_of(setting, drawn, seed, name, numbers)
    trace = result.trace
    jct = (result.end - trace.submit) / 3600.0
    return TopologyRow(
        topology=setting.name, load=load, seed=seed, policy=name, mean_jct_h=float(jct.mean()),
        p99_jct_h=float(np.percentile(jct, 99)),
        mean_slowdown=float(((result.end - result.start) / trace.duration).mean()),
        combine=setting.combine, mix=setting.mix, jobs=len(trace), knows=load_scenario().policies[name].knows,
    )  # fmt: skip


def run_of(
    setting: TopologySetting, drawn: tuple[Trace, Ints], seed: int, name: str, numbers: Floats | None = None
) -> ReplayResult:
    """Run drawn jobs, with their kinds, under one policy."""
    (trace, kind), rival, tree = drawn, load_scenario().policies[name], setting.tree
    if rival.free:
        tree = tree._replace(weight=np.zeros_like(tree.weight))
    network = PlacementNetwork(tree, setting.model, kind)
    if rival.schedulers:
        of = start(0) if not rival.trained else weights_of() if numbers is None else numbers
        return replayed(trace, setting.pool, network, weights_from(of), agents_spec(rival.schedulers))
    return replay(trace, setting.pool, placed_by(rival.placement, name), network=network, seed=seed)
