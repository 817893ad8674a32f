"""What a user asks of ``gpusched replay``, brought to outcomes: traces read, nodes chosen, runs done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gpusched.config.policies import WEIGHTS, names_in
from gpusched.config.weights import DEFAULT, ModelError, weights_file
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.policy import MAPPED, PolicySpec
from gpusched.model.units import parse_memory_mib
from gpusched.sim.nodelist import read_node_list
from gpusched.sim.orders import folders_in_force, meaning_notes
from gpusched.sim.policies import ReplayPolicy, look_up, of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model, read_power
from gpusched.sim.sharing import share_for
from gpusched.study.study import (
    DEFAULT_GPUS_PER_NODE,
    FROM_EMPTY,
    Outcome,
    Run,
    Scenario,
    carry_out,
    scenario_of,
    workers_for,
)

MAX_AMOUNT = 1 << 40

if TYPE_CHECKING:
    from gpusched.forecast.predictor import Predictor
    from gpusched.model.resources import Inventory
    from gpusched.model.topology import Topology
    from gpusched.queue.store import Reader
    from gpusched.sim.engine.build import Elastic
    from gpusched.sim.engine.placing import Network
    from gpusched.sim.rates import Rates
    from gpusched.sim.replay import Outage
    from gpusched.traces.trace import Trace


Named = dict[str, ReplayPolicy | PolicySpec]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched replay``, as given."""

    traces: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    format: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    inventory: str | None = None
    load: float | None = None
    vc: str | None = None
    placement: str | None = None
    since: str | None = None
    until: str | None = None
    limits: bool = False
    restart_s: float = 0.0
    outages: str | None = None
    reservations: str | None = None
    seeds: tuple[int, ...] = (0,)
    workers: int = 0
    backend: str | None = None
    power: str | None = None
    strict: bool = False
    estimates: str | None = None
    profiles: tuple[str, ...] = ()
    recorded_on: str | None = None
    gpu_type: str | None = None
    node_list: str | None = None
    share: str = "auto"
    resizable: str | None = None
    cpus: str | None = None
    mem: str | None = None
    restart_costs: str | None = None
    backfill_every_s: float = 0.0
    topology: str | None = None
    quotas: bool | None = None


def outcomes(request: Request, advance: Callable[[float, int], None] | None = None) -> list[Outcome]:
    """Everything asked for, trace by trace, policy by policy, seed by seed.

    ``advance`` is called with (runs done, runs in all) before the first, after each, and meanwhile with part of one.

    Raises:
        UsageError: Something asked for does not exist or contradicts something else.
        GpuschedError: A trace cannot be read.
    """
    folders = folders_in_force(request.inventory)
    named = _policies(request.policies, folders, request.resizable is not None or not request.traces)
    meanings = meaning_notes(set(named) - set(names_in(folders[:-1])))
    if (drf := named.get("drf")) is not None and isinstance(drf, ReplayPolicy) and not drf.chooses_sizes:
        meanings = (*meanings, _DRF)
    predictor = _predictor(request, named)
    rates = _rates(request)
    costs = _restart_costs(request)
    if request.resizable is not None:
        meanings = (*meanings, f"--resizable {request.resizable}, for policies that choose sizes: {_OF_SPEED}")
    seeds = tuple(dict.fromkeys(request.seeds))
    topology = _topology(request)
    found = [_scenario(request, trace, topology) for trace in _traces(request)]
    scenarios = [drawn for one in found for drawn in _with_models(request, rates, one, seeds)]
    scenarios = [(one._replace(notes=(*one.notes, *meanings)), of) for one, of in scenarios]
    networks = [_network(topology, one) for one, _ in scenarios]
    scenarios = [
        (one._replace(notes=(*one.notes, *notes)), of)
        for (one, of), (_, *notes) in zip(scenarios, networks, strict=True)
    ]
    runs = [
        Run(
            scenario,
            policy,
            request.placement,
            seed,
            request.limits,
            request.restart_s or policy.restart_s,
            failures,
            predictor,
            rates,
            share_for(request.share, scenario.trace),
            elastic_of(scenario.trace, request.resizable, request.cpus, request.mem) if policy.chooses_sizes else None,
            costs,
            network,
            request.backfill_every_s if _backfills(request, policy) else 0.0,
        )
        for (scenario, of), (network, *_), failures in zip(
            scenarios, networks, [_failures(request, s) for s, _ in scenarios], strict=True
        )
        for policy in [_bound(text, found, scenario, request.vc) for text, found in named.items()]
        for seed in of
    ]
    if request.backfill_every_s and not any(run.backfill_every_s for run in runs):
        raise UsageError(
            "--backfill-every has no effect: no policy has easy or conservative backfill", "say -P fifo+conservative"
        )
    done = 0

    def step(_: Run | None = None) -> None:
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
        return list(carry_out(runs, workers=workers, backend=backend, done=step, progress=watch))


_DRF = (
    "drf shares between users here, and stops jobs; the policy drf gives GPUs to jobs that can be resized (--resizable)"
)
_OF_SPEED = "speeds in proportion to the GPUs, but where they are measured (--profiles)"


def _backfills(request: Request, policy: ReplayPolicy) -> bool:
    """Whether it is an order whose backfill can be told when to look."""
    by_pass = policy.kind in ("static", "arriving", "changing") and not policy.chooses_sizes
    placed = request.topology is not None or (request.placement or policy.placement) in MAPPED
    return by_pass and not placed and policy.backfill in ("easy", "conservative")


def _with_models(
    request: Request, rates: Rates | None, scenario: Scenario, seeds: tuple[int, ...]
) -> list[tuple[Scenario, tuple[int, ...]]]:
    """The scenario, and the seeds that it is replayed with; where its trace names no models, each seed draws some."""
    trace = scenario.trace
    if rates is None or request.resizable is None or (trace.model >= 0).any():
        return [(scenario, seeds)]
    from gpusched.sim.rates import draw_models

    found: list[tuple[Scenario, tuple[int, ...]]] = []
    for seed in seeds:
        drawn = draw_models(rates, trace, scenario.pool.gpu_types, seed)
        used = len(np.unique(drawn.model[drawn.model >= 0]))
        note = f"the trace has no models: each job got one of {used} measured ones at random (seed {seed})"
        found.append((scenario._replace(trace=drawn, notes=(*scenario.notes, note)), (seed,)))
    return found


def _restart_costs(request: Request) -> Mapping[str, float]:
    if request.restart_costs is None:
        return {}
    from gpusched.sim.profiles import read_restarts

    return read_restarts(request.restart_costs)


def elastic_of(trace: Trace, resizable: str | None, cpus: str | None = None, mem: str | None = None) -> Elastic | None:
    """That jobs with GPUs may have so many, ``1-8``, or their own number; None: all keep theirs.

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
    from gpusched.sim.engine.build import Elastic

    least, most = np.minimum(gpus[0], trace.gpus), np.maximum(gpus[1], trace.gpus)
    has = trace.gpus > 0
    return Elastic(
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


def _policies(names: Sequence[str], folders: tuple[Path, ...], sizes: bool) -> Named:
    """Each name or file with its policy, of an agent its file's, named alone once; files are looked for in ``folders``.

    ``sizes``: jobs can be resized.

    Raises:
        UsageError: None at all, or one that does not exist.
        ModelError: An agent that was never trained.
    """
    if not names:
        raise UsageError("no policy given", "for example --policy fifo --policy easy")
    found = {name: _registered(name) if "@" in name else look_up(name, folders, sizes) for name in names}
    for name, policy in found.items():
        if isinstance(policy, PolicySpec) and not any(Path(policy.folder).glob(f"*{WEIGHTS}")):
            problem = f"{name} is not trained yet: {policy.folder} holds no weights"
            raise ModelError(problem, f"train it: gpusched train {name}")
    return found


def _registered(text: str) -> ReplayPolicy | PolicySpec:
    """The policy of a version, ``NAME@VERSION``, as in ``gpusched policy show``."""
    from gpusched.config.paths import state_folder
    from gpusched.promotion.registry import find_policy
    from gpusched.queue.lastgood import inventory_path

    spec = find_policy(text, inventory_path(state_folder()), state_folder()).spec
    return spec if spec.agent is not None else of_spec(spec, text)


def _bound(text: str, found: ReplayPolicy | PolicySpec, scenario: Scenario, vc: str | None) -> ReplayPolicy:
    """The policy for this scenario: an agent decides with the weights of the partition whose jobs are replayed.

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
    return of_spec(found, text, partitions[0])


def _traces(request: Request) -> list[Trace]:
    if not request.traces:
        return [history(request.since or "30d", request.until, vc=request.vc, inventory=request.inventory)]
    from gpusched.traces.load import load

    return [
        load(t, request.format, vc=request.vc, since=request.since, until=request.until, strict=request.strict)
        for t in request.traces
    ]


def history(since: str, until: str | None = None, *, vc: str | None = None, inventory: str | None = None) -> Trace:
    """This cluster's own jobs, submitted in [since, until): ``30d``, ``all``, or a time.

    ``inventory``: its file, where it is not the one in force.

    Raises:
        NoHistory: There is no store yet, or no such job in it.
        GpuschedError: The store cannot be read.
        UsageError: A time cannot be read.
    """
    from gpusched.accounting.report import parse_since
    from gpusched.config.paths import state_folder
    from gpusched.errors import NoHistory
    from gpusched.model.units import parse_time
    from gpusched.queue.store import Reader
    from gpusched.traces.own import own_jobs
    from gpusched.traces.slicing import slice_trace

    now, folder, own = time.time(), state_folder(), own_inventory(inventory)
    reader = Reader.open(folder)
    if reader is None and (own is None or own.engine != "slurm"):
        raise NoHistory(f"{folder}: no history yet", "name a trace, or start the controller")
    try:
        end = None if until is None else parse_time(until, now)
        trace = own_jobs(own, reader, name=f"history of {folder}", since=parse_since(since, now), until=end)
    except ValueError:
        raise UsageError(f"--until {until!r} is not a time", "for example 2026-11-20T18:00") from None
    finally:
        if reader is not None:
            reader.close()
    trace = replace(trace, notes=(*trace.notes, FROM_EMPTY))
    return trace if vc is None else slice_trace(trace, vc=vc)


def own_inventory(named: str | None) -> Inventory | None:
    """The inventory that says who runs the jobs; None where there is none to be read: the controller."""
    from gpusched.config.paths import state_folder
    from gpusched.queue.lastgood import inventory_or_kept

    try:
        return inventory_or_kept(Path(named) if named else None, state_folder())
    except GpuschedError:
        return None


def _topology(request: Request) -> Topology | None:
    from gpusched.config.topology import load_topology

    return load_topology(request.topology) if request.topology is not None else None


def _network(topology: Topology | None, scenario: Scenario) -> tuple[Network | None, *tuple[str, ...]]:
    """What placement costs there, with a note; None: nothing."""
    if topology is None:
        return (None,)
    from gpusched.sim.network import network_for

    return network_for(topology, scenario.trace, scenario.pool)


def _nodes_of(request: Request, topology: Topology) -> Pool:
    """A topology's nodes, all alike."""
    size = request.gpus_per_node or DEFAULT_GPUS_PER_NODE
    return Pool.of([NodeSpec(size, gpu_type=request.gpu_type or "", name=name) for name in topology.racks()])


def _scenario(request: Request, trace: Trace, topology: Topology | None = None) -> Scenario:
    inventory = _inventory(request)
    if topology is not None and inventory is None and request.nodes is None and request.node_list is None:
        listed: Pool | None = _nodes_of(request, topology)
        request = msgspec.structs.replace(request, gpus_per_node=None, gpu_type=None)
    else:
        listed = read_node_list(Path(request.node_list)) if request.node_list else None
    types, nodes = read_power(Path(request.power)) if request.power else ({}, {})
    scenario = scenario_of(
        trace,
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        inventory=inventory,
        load=request.load,
        gpu_type=request.gpu_type,
        listed=listed,
        power=lambda pool: power_model(pool, inventory=inventory, types=types, nodes=nodes),
    )
    from gpusched.config.paths import state_folder
    from gpusched.queue.store import Reader

    reader = Reader.open(state_folder()) if not request.traces else None
    try:
        return _limited(request, _reserved(request, scenario, reader), reader)
    finally:
        if reader is not None:
            reader.close()


def _reserved(request: Request, scenario: Scenario, reader: Reader | None) -> Scenario:
    """With what was reserved while the own history happened, or what the file says."""
    if request.reservations is not None:
        from gpusched.sim.outages import read_reservations

        return scenario._replace(reserved=read_reservations(Path(request.reservations), scenario.pool))
    if request.load is not None:
        return scenario
    from gpusched.study.reserved import with_own_reservations

    return with_own_reservations(scenario, reader)


def _limited(request: Request, scenario: Scenario, reader: Reader | None) -> Scenario:
    """Under the limits of the inventory: where they are asked for, and where the own history was made under them.

    Raises:
        UsageError: They are asked for, and there are none.
    """
    if request.quotas is None and request.traces:
        return scenario
    from gpusched.study.quotas import WITHOUT, limited, with_quotas

    inventory = own_inventory(request.inventory)
    if request.quotas and (inventory is None or not inventory.quotas):
        raise UsageError(
            f"--quotas: {request.inventory or 'the inventory'} has no limits of users, groups or classes",
            "name one that has: --inventory FILE",
        )
    if inventory is None or not (request.quotas or limited(inventory)):
        return scenario
    if request.quotas is False:
        return scenario if request.traces else scenario._replace(notes=(*scenario.notes, WITHOUT))
    return with_quotas(scenario, inventory, reader)


def _predictor(request: Request, named: Named) -> Predictor | None:
    if request.estimates is None:
        return None
    if not any(policy.by_estimate for policy in named.values() if isinstance(policy, ReplayPolicy)):
        raise UsageError("--estimates has no effect: no policy uses estimates", "use --policy sjf-estimate")
    from gpusched.forecast.predictor import Predictor

    return Predictor.load(request.estimates)


def _rates(request: Request) -> Rates | None:
    from gpusched.sim.rates import read_rates

    if not request.profiles:
        if request.recorded_on is not None:
            raise UsageError("--recorded-on needs --profiles", "add --profiles FILE_OR_FOLDER")
        return None
    return read_rates(request.profiles, request.recorded_on)


def _failures(request: Request, scenario: Scenario) -> tuple[Outage, ...]:
    if request.outages is None:
        return ()
    from gpusched.sim.outages import read_outages

    return read_outages(Path(request.outages), scenario.pool)


def _inventory(request: Request) -> Inventory | None:
    """The inventory named; for the own history the one in force, unless other nodes are asked for."""
    from gpusched.config.inventory import load_inventory
    from gpusched.config.paths import state_folder
    from gpusched.queue.lastgood import inventory_or_kept

    if request.inventory is not None:
        return load_inventory(request.inventory)
    if request.traces or request.node_list or request.nodes is not None or request.gpus_per_node is not None:
        return None
    return inventory_or_kept(None, state_folder())


@contextmanager
def _connected(backend: str | None) -> Iterator[str | None]:
    """What joblib calls a cluster's backend, connected: ``dask://HOST:PORT``, ``dask``, ``ray://HOST:PORT``, ``ray``.

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

            with Client(f"tcp://{address}" if address else None, set_as_default=True):
                yield "dask"
        else:
            import ray
            from ray.util.joblib import register_ray

            ray.init(address=f"ray://{address}" if address else None)
            register_ray()
            yield "ray"
            ray.shutdown()
    except ImportError:
        raise UsageError(f"--backend {kind} needs its package", f"pip install 'gpusched-cluster[{kind}]'") from None
