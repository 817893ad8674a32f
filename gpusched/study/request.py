"""The request of ``gpusched replay`` and its execution: traces read, nodes chosen, runs carried out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpusched.config.inventory import load_inventory
from gpusched.config.paths import state_folder
from gpusched.config.policies import WEIGHTS, names_in
from gpusched.config.topology import load_topology
from gpusched.config.weights import DEFAULT, ModelError, weights_file
from gpusched.errors import UsageError
from gpusched.estimation.estimators import ESTIMATORS, Estimator, HistoryEstimator
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.topology import Topology
from gpusched.model.units import parse_memory_mib
from gpusched.queue.lastgood import inventory_or_kept, inventory_path
from gpusched.queue.store import Reader
from gpusched.sim.engine.build import ReplayOptions, ResizableJobs
from gpusched.sim.orders import folders_in_force, meaning_notes
from gpusched.sim.outages import read_node_list, read_outages, read_reservations
from gpusched.sim.policies import ReplayPolicy, look_up, policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model, read_power
from gpusched.sim.profiles import read_restarts
from gpusched.sim.rates import Rates, draw_models, read_rates
from gpusched.sim.sharing import share_for
from gpusched.study.options import ReplayRequest
from gpusched.study.own import own_history, own_inventory, seen_slices, with_run_conditions
from gpusched.study.study import (
    DEFAULT_GPUS_PER_NODE,
    PlannedReplay,
    Scenario,
    StudyOutcome,
    costs_for,
    run_all,
    scenario_of,
    workers_for,
)
from gpusched.traces.load import load
from gpusched.traces.slicing import slice_trace
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.model.snapshot import NodeView

MAX_AMOUNT = 1 << 40
Named = dict[str, ReplayPolicy | PolicySpec]
Seeds = tuple[int, ...]


def resolve(request: ReplayRequest) -> list[PlannedReplay]:
    """Return every run requested, with files read, names looked up and contradictions reported.

    Raises:
        UsageError: Something requested does not exist, or options contradict each other.
        GpuschedError: A trace cannot be read.
    """
    for option, is_given in (("--format", request.format is not None), ("--strict", request.strict)):
        if is_given and not request.traces:
            raise UsageError(f"{option} is for traces, and none is named", "name one, or omit it")
    folders = folders_in_force(request.inventory)
    named = _policies(request.policies, folders)
    notes = (*request.about, *_meanings(request, named, names_in(folders[:-1])))
    topology = load_topology(request.topology) if isinstance(request.topology, str) else request.topology
    common = ReplayOptions(
        placement=request.placement,
        limits=request.limits,
        estimator=_estimator(request.estimates, named),
        rates=_rates(request.profiles, request.reference_gpu_type),
        restart_costs=read_restarts(request.restart_costs) if request.restart_costs is not None else {},
    )
    runs: list[PlannedReplay] = []
    for scenario, seeds in _scenarios(request, topology, common.rates):
        scenario = scenario._replace(notes=(*scenario.notes, *notes), published=request.published)
        bound = {text: _bound(text, found, scenario, request.vc) for text, found in named.items()}
        if topology is not None:
            scenario = scenario._replace(topology=topology, learned={})
        placed = [replace(p, placement=request.placement or p.placement) for p in bound.values()]
        network, note = costs_for(placed, scenario, always=topology is not None)
        scenario = scenario._replace(notes=(*scenario.notes, *note))
        per_trace = replace(
            common,
            failures=read_outages(Path(request.outages), scenario.pool) if request.outages is not None else (),
            share=share_for(request.share, scenario.trace),
            network=network,
        )
        elastic = elastic_of(scenario.trace, request.resizable, request.cpus, request.mem)
        for policy in bound.values():
            options = replace(
                per_trace,
                restart_s=policy.restart_s if request.restart_s is None else request.restart_s,
                elastic=elastic if policy.chooses_sizes else None,
                backfill_every_s=request.backfill_every_s if _backfills(policy, per_trace) else 0.0,
            )
            runs += [PlannedReplay(scenario, policy, replace(options, seed=seed)) for seed in seeds]
    if request.backfill_every_s and not any(run.options.backfill_every_s for run in runs):
        raise UsageError(
            "--backfill-every has no effect: no policy has easy or conservative backfill", "say -P fifo+conservative"
        )
    return runs


def outcomes(request: ReplayRequest, advance: Callable[[float, int], None] | None = None) -> list[StudyOutcome]:
    """Return all outcomes, trace by trace, policy by policy, seed by seed.

    ``advance`` is called with (runs done, runs in all) before the first, after each, and meanwhile with part of one.

    Raises:
        UsageError, GpuschedError: As `resolve`.
    """
    runs = resolve(request)
    done = 0

    def step(_: PlannedReplay | None = None) -> None:
        nonlocal done
        if advance is not None:
            advance(done, len(runs))
        done += 1

    def part(share: float) -> None:
        if advance is not None:
            advance(done - 1 + share, len(runs))

    step()
    workers, watch = workers_for(runs, request.workers), part if advance is not None else None
    with _connected(request.backend) as backend:
        return list(run_all(runs, workers=workers, backend=backend, done=step, progress=watch))


_DRF = "drf gives GPUs to jobs that can be resized (--resizable), of which there are none; between users: drf-users"
_OF_SPEED = "speeds in proportion to the GPUs, but where they are measured (--profiles)"


def _meanings(request: ReplayRequest, named: Named, own: Collection[str]) -> tuple[str, ...]:
    """Return notes on names that mean something else elsewhere; ``own``: names of the site's own policies."""
    notes = meaning_notes(set(named) - set(own))
    if "drf" in named and "drf" not in own and request.resizable is None and not request.is_own:
        notes = (*notes, _DRF)
    if request.resizable is not None:
        notes = (*notes, f"--resizable {request.resizable}, for policies that choose sizes: {_OF_SPEED}")
    return notes


def _backfills(policy: ReplayPolicy, options: ReplayOptions) -> bool:
    """Return whether it is an order with an adjustable backfill interval."""
    by_pass = policy.kind in ("static", "arriving", "changing") and not policy.chooses_sizes
    mapped = (options.placement or policy.placement) in MAPPING_PLACES
    return by_pass and not mapped and policy.backfill in ("easy", "conservative")


def elastic_of(
    trace: Trace, resizable: str | None, cpus: str | None = None, mem: str | None = None
) -> ResizableJobs | None:
    """Return the sizes of jobs with GPUs: in a range such as ``1-8``, or their own; None: all keep theirs.

    Raises:
        UsageError: It is no range.
    """
    cores = _span("--cpus", cpus, int, "of CPU cores such as 2-12")
    memory = _span("--mem", mem, parse_memory_mib, "of memory such as 16G-64G")
    gpus = _span("--resizable", resizable, int, "of GPUs such as 1-8")
    if gpus is None:
        if cores or memory:
            raise UsageError("--cpus and --mem are ranges of jobs that are resized", "add --resizable 1-8")
        return None
    least, most = np.minimum(gpus[0], trace.gpus), np.maximum(gpus[1], trace.gpus)
    has = trace.gpus > 0
    return ResizableJobs(
        least=np.where(has, least, 0), most=np.where(has, most, 0), linear=True, cores=cores, memory_mib=memory
    )


def _span(option: str, text: str | None, parse: Callable[[str], int], expected: str) -> tuple[int, int] | None:
    if text is None:
        return None
    least, dash, most = text.partition("-")
    try:
        found = parse(least), parse(most)
    except ValueError:
        found = 0, 0
    if not dash or not 1 <= found[0] <= found[1] <= MAX_AMOUNT:
        raise UsageError(f"{option}: found {text[:40]!r}, expected a range {expected}")
    return found


def _policies(names: Sequence[str], folders: tuple[Path, ...]) -> Named:
    """Return each name or file with its policy (an agent: its specification), without repeats; files in ``folders``.

    Raises:
        UsageError: None at all, or one that does not exist.
        ModelError: An agent that was never trained.
    """
    if not names:
        raise UsageError("no policy given", "for example --policy fifo --policy easy")
    found = {name: _registered(name) if "@" in name else look_up(name, folders) for name in names}
    for name, policy in found.items():
        if isinstance(policy, PolicySpec) and not any(Path(policy.folder).glob(f"*{WEIGHTS}")):
            problem = f"{name} is not trained yet: {policy.folder} holds no weights"
            raise ModelError(problem, f"train it: gpusched train {name}")
    return found


def _registered(text: str) -> ReplayPolicy | PolicySpec:
    """Return the policy of a version, ``NAME@VERSION``, as in ``gpusched policy show``."""
    from gpusched.promotion.registry import find_policy  # here and below: replays without these start faster

    spec = find_policy(text, inventory_path(state_folder()), state_folder()).spec
    return spec if spec.agent is not None else policy_of_spec(spec, text)


def _bound(text: str, found: ReplayPolicy | PolicySpec, scenario: Scenario, vc: str | None) -> ReplayPolicy:
    """Return the policy for this scenario; an agent uses the weights of the replayed jobs' partition.

    Raises:
        UsageError: Jobs of several partitions are, and each has weights of its own.
        ModelError: Its weights cannot be used.
    """
    if isinstance(found, ReplayPolicy):
        return found
    groups = {scenario.trace.groups[g] for g in np.unique(scenario.trace.group) if g >= 0}
    partitions = sorted(groups & set(scenario.pool.partitions)) or [vc or DEFAULT]
    files = {weights_file(Path(found.folder), partition) for partition in partitions}
    if len(files) > 1:
        raise UsageError(
            f"{text} has weights of its own for each of {', '.join(partitions)}", "replay one of them: --vc PARTITION"
        )
    return policy_of_spec(found, text, partitions[0])


def _scenarios(request: ReplayRequest, topology: Topology | None, rates: Rates | None) -> list[tuple[Scenario, Seeds]]:
    """Return every trace on its nodes, with its seeds."""
    seeds = tuple(dict.fromkeys(request.seeds)) or (0,)
    inventory = load_inventory(request.inventory) if request.inventory is not None else None
    limits_of = inventory or (own_inventory() if request.is_own or request.quotas else None)
    if request.quotas and (limits_of is None or not limits_of.quotas):
        raise UsageError(
            f"--quotas: {request.inventory or 'the inventory'} has no limits of users, groups or classes",
            "name one that has: --inventory FILE",
        )
    reader, stretched = Reader.open(state_folder()) if request.is_own else None, request.load is not None
    shares = request.share == "auto"
    with nullcontext() if reader is None else closing(reader):
        traces = _traces(request, seeds, limits_of, reader)
        on_nodes = _nodes(request, inventory, limits_of, topology, seen_slices(reader, inventory or limits_of))
        found = []
        for trace, of in traces:
            scenario = on_nodes(trace)
            if request.reservations is not None:
                scenario = scenario._replace(reserved=read_reservations(Path(request.reservations), scenario.pool))
            reserved = request.reservations is None and not stretched
            scenario = with_run_conditions(
                scenario, limits_of, reader, reserved=reserved, shares=shares, quotas=request.quotas
            )  # fmt: skip
            found += _with_models(request, rates, scenario, of)
        return found


def _traces(
    request: ReplayRequest, seeds: Seeds, inventory: Inventory | None, reader: Reader | None
) -> list[tuple[Trace, Seeds]]:  # fmt: skip
    """Return the traces: named, drawn (one per seed), or this cluster's own jobs, from its inventory and store."""
    if request.workload is not None:
        if request.traces:
            raise UsageError("a scenario's workload is drawn; it cannot be combined with traces", "use one of them")
        from gpusched.traces.generate import generate

        cut = partial(slice_trace, vc=request.vc, since=request.since, until=request.until)
        drawn = [replace(generate(request.workload, seed), name=request.workload.name) for seed in seeds]
        return [(cut(trace), (seed,)) for trace, seed in zip(drawn, seeds, strict=True)]
    if request.is_own:
        return [(own_history(inventory, reader, request.since, request.until, request.vc), seeds)]
    return [
        (load(t, request.format, vc=request.vc, since=request.since, until=request.until, strict=request.strict), seeds)
        for t in request.traces
    ]


def _nodes(
    request: ReplayRequest, inventory: Inventory | None, in_force: Inventory | None, topology: Topology | None,
    seen: Mapping[str, NodeView],
) -> Callable[[Trace], Scenario]:  # fmt: skip
    """Return a function that puts a trace on its nodes; own jobs default to the inventory in force, as ``seen``."""
    size, gpu_type, listed = request.gpus_per_node, request.gpu_type, request.node_list
    if inventory is None and request.is_own and listed is None and request.nodes is None and size is None:
        inventory = in_force or inventory_or_kept(None, state_folder())
    if isinstance(listed, str):
        listed = read_node_list(Path(listed))
    elif topology is not None and listed is None and inventory is None and request.nodes is None:
        spec = NodeSpec(size or DEFAULT_GPUS_PER_NODE, gpu_type=gpu_type or "")
        size, gpu_type, listed = None, None, Pool.of([spec._replace(name=name) for name in topology.racks()])
    types, nodes = read_power(Path(request.power)) if request.power else ({}, {})
    return partial(
        scenario_of, nodes=request.nodes, gpus_per_node=size, inventory=inventory, load=request.load, gpu_type=gpu_type,
        listed=listed, seen=seen, power=partial(power_model, inventory=inventory, types=types, nodes=nodes),
    )  # fmt: skip


def _with_models(
    request: ReplayRequest, rates: Rates | None, scenario: Scenario, seeds: Seeds
) -> list[tuple[Scenario, Seeds]]:  # fmt: skip
    """Return the scenario; if its trace has no models, one for each seed with drawn models."""
    trace = scenario.trace
    if rates is None or request.resizable is None or (trace.model >= 0).any():
        return [(scenario, seeds)]
    found: list[tuple[Scenario, Seeds]] = []
    for seed in seeds:
        drawn = draw_models(rates, trace, scenario.pool.gpu_types, seed)
        used = len(np.unique(drawn.model[drawn.model >= 0]))
        note = f"the trace has no models: each job got one of {used} measured ones at random (seed {seed})"
        found.append((scenario._replace(trace=drawn, notes=(*scenario.notes, note)), (seed,)))
    return found


def _estimator(name: str | None, named: Named) -> Estimator:
    if name is None:
        return HistoryEstimator()
    if not any(policy.uses_run_time_estimates for policy in named.values() if isinstance(policy, ReplayPolicy)):
        raise UsageError("--estimates has no effect: no policy uses estimates", "use --policy sjf-estimate")
    if name not in ESTIMATORS:
        raise UsageError(f"--estimates {name!r} is none of {', '.join(ESTIMATORS)}", "omit it: history is the default")
    return ESTIMATORS[name]()


def _rates(profiles: Sequence[str], reference_gpu_type: str | None) -> Rates | None:
    if profiles:
        return read_rates(profiles, reference_gpu_type)
    if reference_gpu_type is not None:
        raise UsageError("--reference-gpu-type needs --profiles", "add --profiles FILE_OR_FOLDER")
    return None


@contextmanager
def _connected(backend: str | None) -> Iterator[str | None]:
    """Connect a cluster and yield joblib's backend: ``dask://HOST:PORT``, ``dask``, ``ray://HOST:PORT``, ``ray``.

    Raises:
        UsageError: Neither, or its package is not installed.
    """
    if backend is None:
        yield None
        return
    kind, _, address = backend.partition("://")
    if kind not in ("dask", "ray"):
        raise UsageError(f"--backend {backend!r} is neither dask nor ray", "for example dask://scheduler:8786")
    try:
        if kind == "dask":
            from distributed import Client
        else:
            import ray
            from ray.util.joblib import register_ray
    except ImportError:
        raise UsageError(f"--backend {kind} needs its package", f"pip install 'gpusched-cluster[{kind}]'") from None
    if kind == "dask":
        with Client(f"tcp://{address}" if address else None, set_as_default=True):
            yield "dask"
    else:
        ray.init(address=f"ray://{address}" if address else None)
        register_ray()
        yield "ray"
        ray.shutdown()
