"""Policies x traces x seeds: nodes, runs in one process or many, and each run as one flat row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from gpusched.config.validate import MAX_COUNT
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.limits import Groups
from gpusched.model.topology import Topology
from gpusched.model.units import count_of
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.policies import HALF_LIFE_S, ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.power import PowerModel
from gpusched.sim.result import END, KILLED, NODE_FAIL, PAIRED, PREEMPTED, RESIZED, START, CutRuns, Events, ReplayResult
from gpusched.sim.slicing import asks_for_slices, on_demand
from gpusched.study.bounds import Bounds, bounds_of
from gpusched.study.compare import MeanDifference, compare
from gpusched.study.metrics import Metrics, metrics_of
from gpusched.traces.slicing import nodes_for_load, offered_load, scale_arrivals, select, span_s
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.model.interference import JobClassEstimate
    from gpusched.model.resources import Inventory
    from gpusched.model.snapshot import NodeView
    from gpusched.sim.engine.placing import PlacementNetwork
    from gpusched.sim.engine.quotas import QuotaSet
    from gpusched.sim.reserving import Booking
    from gpusched.sim.sharing import SharingBeliefs

DEFAULT_LOAD = 0.9
DEFAULT_GPUS_PER_NODE = 8
FROM_EMPTY = "each replay starts with empty nodes: jobs submitted before are excluded"
_OF_JOBS = (START, END, KILLED, PREEMPTED, NODE_FAIL, PAIRED, RESIZED)
PARALLEL_FROM = 400_000  # jobs replayed in all; below it processes take longer to start than they save


class Scenario(NamedTuple):
    """A trace on its nodes; ``notes``: choices made, in sentences.

    The first ``carried`` jobs of the trace are those that the replay begins with: in figures they only hold GPUs.
    ``half_life_s``, ``groups``: of users' usage, by which ``fairshare`` goes; ``usage``: before the first submission
    (GPU hours by `leaf_of` user and group). ``reserved``: when nodes are reserved. ``quotas``: the limits of users,
    groups and classes that apply. ``believed``: which jobs share GPUs, and what that costs. ``published``: by policy,
    figures of `Metrics`. ``topology``: switches of these nodes. ``learned``: estimates by job class, where they are of
    the site that ran the jobs.
    """

    trace: Trace
    pool: Pool
    power: PowerModel
    notes: tuple[str, ...] = ()
    carried: int = 0
    half_life_s: float = HALF_LIFE_S
    groups: Groups = Groups()
    usage: Mapping[str, float] = {}
    reserved: tuple[Booking, ...] = ()
    quotas: QuotaSet | None = None
    believed: SharingBeliefs | None = None
    published: Mapping[str, Mapping[str, float]] = {}
    topology: Topology = Topology()
    learned: Mapping[str, JobClassEstimate] = {}


def placement_costs(scenario: Scenario) -> tuple[PlacementNetwork, str]:
    """Return what placement costs the scenario's jobs, and a note: as learned of them, else as public measurements say.

    Raises:
        UsageError: Nothing was learned, and no switch is known to have any of the nodes.
    """
    from gpusched.sim.network import learned_network, network_for  # most replays start faster without

    if scenario.learned:
        return learned_network(scenario.topology, scenario.trace, scenario.pool, scenario.learned)
    if not scenario.topology:
        raise UsageError(
            "what placement costs is unknown: nothing was learned of it, and no switches are known",
            "topology in inventory.yaml, or replay --topology FILE",
        )
    return network_for(scenario.topology, scenario.trace, scenario.pool)


def costs_for(
    policies: Sequence[ReplayPolicy], scenario: Scenario, always: bool = False
) -> tuple[PlacementNetwork | None, tuple[str, ...]]:
    """Return `placement_costs`, and notes, if any of the policies decides by them, or ``always``; None: they are 0.

    As live, an agent cannot decide without, a rule where nothing was learned can. Policies that cannot be replayed with
    them are compared without.
    """
    if not (always or any(policy.places for policy in policies)):
        if not scenario.learned or not any(policy.by_costs for policy in policies):
            return None, ()
        from gpusched.sim.placed import takes_costs  # most replays start faster without

        if not all(map(takes_costs, policies)):
            return None, ()
    network, note = placement_costs(scenario)
    return network, (note,)


class StudyOutcome(NamedTuple):
    """One replay with its metrics."""

    result: ReplayResult
    metrics: Metrics
    bounds: Bounds
    scenario: Scenario

    @property
    def gap_to_bound(self) -> float | None:
        """Return by how much the mean JCT is above its bound, relative to that; None: one of them is unknown."""
        own, bound = self.metrics.mean_jct_s, self.bounds.mean_jct_s
        if own is None or not bound:
            return None
        gap = own / bound - 1
        return 0.0 if -1e-9 < gap < 0 else gap  # rounded, an optimum may be below


class PlannedReplay(NamedTuple):
    """One replay to be run, with all names resolved. What the scenario gives need not be an option."""

    scenario: Scenario
    policy: ReplayPolicy
    options: ReplayOptions = ReplayOptions()


_Replayed = tuple[ReplayResult, Metrics]
_Replay = Callable[[PlannedReplay, Callable[[float], None] | None], _Replayed | str]


def scenario_of(
    trace: Trace,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    inventory: Inventory | None = None,
    load: float | None = None,
    gpu_type: str | None = None,
    listed: Pool | None = None,
    seen: Mapping[str, NodeView] = {},
    power: Callable[[Pool], PowerModel],
) -> Scenario:
    """Return the trace on the nodes on which it is replayed.

    ``load`` alone chooses how many like nodes; with nodes or an inventory it stretches the times between submissions
    instead. Without any of them the load is `DEFAULT_LOAD`. ``listed``: the nodes of a node list; ``gpu_type``: of like
    nodes; ``seen``: the inventory's nodes as seen last, for their MIG slices.

    Raises:
        UsageError: They contradict each other, or cannot be.
    """
    if inventory is not None and (nodes is not None or gpus_per_node is not None):
        raise UsageError("--inventory cannot be combined with --nodes or --gpus-per-node", "use one of them")
    if listed is not None and not (inventory is None and nodes is None and gpus_per_node is None):
        raise UsageError("--node-list already gives the nodes", "omit --inventory, --nodes and --gpus-per-node")
    if gpu_type is not None and not (listed is None and inventory is None):
        raise UsageError("--gpu-type is for identical nodes", "inventories and node lists name every node's type")
    size = gpus_per_node if gpus_per_node is not None else DEFAULT_GPUS_PER_NODE
    if size < 1:
        raise UsageError(f"--gpus-per-node {size}: a node needs a GPU")
    if max(size, nodes or 0) > MAX_COUNT:
        raise UsageError(f"--nodes and --gpus-per-node are at most {MAX_COUNT}")
    notes = []
    if inventory is None and nodes is None and listed is None:
        wanted = DEFAULT_LOAD if load is None else load
        if (nodes := nodes_for_load(trace, size, wanted)) > MAX_COUNT:
            raise UsageError(f"a load of {wanted:g} needs more than {MAX_COUNT} nodes", "for example 0.9")
        found = offered_load(trace, nodes * size)
        notes.append(
            f"{_nodes(nodes)} with {count_of(size, 'GPU')} each, chosen for an offered load of {wanted:g}: {found:.3g}"
        )
        pool = Pool.uniform(nodes, size, gpu_type=gpu_type or "")
    else:
        named = Pool.of_inventory(inventory, seen) if inventory is not None else listed
        pool = named if named is not None else Pool.uniform(nodes or 0, size, gpu_type=gpu_type or "")
        if load is not None:
            trace = scale_arrivals(trace, pool.total_gpus, load)
        elif span_s(trace) > 0:
            found = offered_load(trace, pool.total_gpus) if pool.total_gpus else 0.0
            notes.append(f"{_nodes(len(pool))} with {count_of(pool.total_gpus, 'GPU')}: an offered load of {found:.3g}")
    if inventory is None and asks_for_slices(trace) and not (pool.slices or pool.cuttable):
        pool = on_demand(pool, trace.profiles)
        notes += ["GPUs are cut into MIG slices on demand (the node list may say otherwise)"] if pool.cuttable else []
    if trace.rejected:
        line, why = trace.rejected[0]
        notes.append(f"{count_of(len(trace.rejected), 'row')} of the trace rejected; line {line}: {why}")
    model = power(pool)
    half_life_s = HALF_LIFE_S if inventory is None else float(inventory.settings.fairshare_half_life_s)
    groups = Groups() if inventory is None else inventory.groups
    return Scenario(trace, pool, model, (*notes, *trace.notes, model.note), half_life_s=half_life_s, groups=groups)


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


def workers_for(runs: Sequence[PlannedReplay], asked: int) -> int:
    """Return the number of processes: as requested, or (0) as many as are worth starting."""
    if asked > 0:
        return min(asked, len(runs))
    import os

    cpus = len(os.sched_getaffinity(0))
    jobs = sum(len(run.scenario.trace) for run in runs)
    return min(cpus, len(runs)) if jobs >= PARALLEL_FROM else 1


def run_all(
    runs: Sequence[PlannedReplay],
    *,
    workers: int = 1,
    backend: str | None = None,
    done: Callable[[PlannedReplay], None] | None = None,
    progress: Callable[[float], None] | None = None,
    failed: Callable[[PlannedReplay, str], None] | None = None,
) -> Iterator[StudyOutcome]:
    """Yield every run's outcome in order.

    ``backend``: joblib's name of a cluster's backend (``dask``, ``ray``), which the caller has connected. ``done`` is
    called after each run, ``progress`` while one runs in this process, with the part that is done. ``failed`` is called
    with a run that raises an error, and the error in one line: the run is left out. Without it the error is raised.
    """
    bounds: dict[tuple[int, bytes], Bounds] = {}
    here = workers <= 1 and backend is None
    one: _Replay = _replayed if failed is None else _replayed_or_error
    results = (one(run, progress) for run in runs) if here else _run_in_parallel(runs, workers, backend, one)
    for run, found in zip(runs, results, strict=True):
        if isinstance(found, str):
            assert failed is not None
            failed(run, found)
            continue
        result, metrics = found
        counted = _trace_without(run.scenario.trace, run.scenario.carried)
        whole = replace(result, trace=counted, pool=run.scenario.pool)
        key = id(run.scenario), result.ran.tobytes()  # of the jobs that the figures are of
        if key not in bounds:
            bounds[key] = _bounds([other for other in runs if other.scenario is run.scenario], whole)
        yield StudyOutcome(whole, metrics, bounds[key], run.scenario)
        if done is not None:
            done(run)


def _resizes(run: PlannedReplay) -> bool:
    from gpusched.sim.resizing import elastic_of

    return run.options.elastic is not None or (run.policy.chooses_sizes and elastic_of(run.scenario.trace) is not None)


def _replayed(run: PlannedReplay, progress: Callable[[float], None] | None = None) -> _Replayed:
    from gpusched.sim.replay import replay

    scenario = run.scenario
    options = replace(
        run.options, reservations=scenario.reserved, quotas=scenario.quotas, half_life_s=scenario.half_life_s,
        groups=scenario.groups, usage=scenario.usage, believed=scenario.believed, topology=scenario.topology,
        learned=scenario.learned, progress=progress,
    )  # fmt: skip
    result = replay(scenario.trace, scenario.pool, run.policy, **vars(options))
    counted = result_without(result, scenario.carried)
    return counted, metrics_of(counted, scenario.power, result)


def _replayed_or_error(run: PlannedReplay, progress: Callable[[float], None] | None = None) -> _Replayed | str:
    try:
        return _replayed(run, progress)
    except Exception as error:  # components of other packages may raise anything, which need not be picklable
        text = error.line() if isinstance(error, GpuschedError) else f"{type(error).__name__}: {error}"
        return " ".join(text.split())[:500]


def _trace_without(trace: Trace, first: int) -> Trace:
    return select(trace, np.arange(first, len(trace), dtype=np.int64)) if first else trace


def result_without(result: ReplayResult, first: int) -> ReplayResult:
    """Return the result without the ``first`` jobs of its trace, those present when the replay begins."""
    if not first:
        return result
    offset = int(result.part_offsets[first])
    infeasible = result.infeasible >= first
    kept = np.isin(result.events.kind, _OF_JOBS, invert=True) | (result.events.subject >= first)
    newcomer = np.append(result.events.subject[1:], first)  # of a PAIRED event: its START is the next one
    kept &= (result.events.kind != PAIRED) | (newcomer >= first)
    subject = result.events.subject - np.where(np.isin(result.events.kind, _OF_JOBS), first, 0)
    per_job = {
        name: getattr(result, name)[first:]
        for name in ("start", "last_start", "end", "part_gpus", "killed", "restarts")
    }
    per_job["share"] = None if result.share is None else result.share[first:]
    return replace(
        result,
        trace=_trace_without(result.trace, first),
        part_offsets=result.part_offsets[first:] - offset,
        part_nodes=result.part_nodes[offset:],
        infeasible=result.infeasible[infeasible] - first,
        infeasible_why=tuple(w for w, own in zip(result.infeasible_why, infeasible, strict=True) if own),
        cut=_cuts_without(result.cut, first),
        events=Events(time=result.events.time[kept], kind=result.events.kind[kept], subject=subject[kept]),
        **per_job,
    )


def _cuts_without(cut: CutRuns, first: int) -> CutRuns:
    own, parts = cut.job >= first, np.diff(cut.part_offsets)
    return CutRuns(
        job=cut.job[own] - first,
        start=cut.start[own],
        end=cut.end[own],
        part_offsets=np.concatenate(([0], np.cumsum(parts[own]))).astype(np.int64),
        part_nodes=cut.part_nodes[np.repeat(own, parts)],
        part_gpus=None if cut.part_gpus is None else cut.part_gpus[own],
    )


def _without_trace(run: PlannedReplay, one: _Replay) -> _Replayed | str:
    """Replay without sending the trace back."""
    found = one(run, None)
    if isinstance(found, str):
        return found
    result, metrics = found
    return replace(result, trace=select(result.trace, np.zeros(0, np.int64))), metrics


def _run_in_parallel(
    runs: Sequence[PlannedReplay], workers: int, backend: str | None, one: _Replay
) -> Iterator[_Replayed | str]:
    import joblib

    with joblib.parallel_config(backend=backend or "loky", n_jobs=-1 if backend else workers):
        # Only loky can hand results out as they come.
        many = joblib.Parallel(**({} if backend else {"return_as": "generator"}))
        yield from many(joblib.delayed(_without_trace)(run, one) for run in runs)


def _bounds(runs: Sequence[PlannedReplay], result: ReplayResult) -> Bounds:
    """Return `bounds.bounds_of` the jobs that ended, where each runs as fast as on its best GPUs.

    ``runs``: all of the result's scenario.
    """
    from gpusched.sim.rates import fastest

    scenario, rates, pool = runs[0].scenario, runs[0].options.rates, runs[0].scenario.pool
    if scenario.believed is not None or any(run.options.share != "no" or _resizes(run) for run in runs):
        return Bounds()
    trace = result.trace if result.ran.all() else select(result.trace, result.ran)
    if rates is not None and trace.profile is not None:
        return Bounds()  # of slices no speeds are measured
    if rates is not None or trace.ran_on is not None:
        trace = replace(trace, duration=trace.duration / fastest(rates, trace, pool, scenario.learned))
    return bounds_of(trace, pool, limits=any(run.options.limits for run in runs))


def changes(outcomes: Sequence[StudyOutcome]) -> list[tuple[MeanDifference, ...]]:
    """Compare each outcome with the first of the same trace and seed; nothing for the first itself."""
    found = []
    for outcome in outcomes:
        base = next(o for o in outcomes if o.scenario is outcome.scenario and o.result.seed == outcome.result.seed)
        found.append(() if base is outcome else compare(base.result, outcome.result))
    return found


def row_of(outcome: StudyOutcome, change: tuple[MeanDifference, ...] = ()) -> dict[str, Any]:
    """Return one run as a flat row for ``--json``: stable keys, units in their names, None for unknown."""
    result, metrics, bounds = outcome.result, outcome.metrics, outcome.bounds
    figures: dict[str, Any] = msgspec.to_builtins(metrics)
    named = {key: figures.pop(key) for key in ("users", "groups")}
    return {
        "policy": result.policy,
        "knows": result.knows,
        "placement": result.placement,
        "share": result.shared,
        "trace": result.trace.name,
        "seed": result.seed,
        "nodes": len(result.pool),
        "gpus": result.pool.total_gpus,
        **figures,
        "lower_bound_mean_jct_s": bounds.mean_jct_s,
        "lower_bound_makespan_s": bounds.makespan_s,
        "gap_to_bound": outcome.gap_to_bound,
        "sim_seconds": result.sim_seconds,
        "jobs_per_s": result.jobs_per_s,
        "decisions": result.decisions,
        "source": result.source,
        "notes": [*result.notes, *_infeasible(result), *outcome.scenario.notes],
        "published": dict(outcome.scenario.published.get(result.policy, {})),
        "change": [msgspec.to_builtins(c) for c in change],
        **named,
    }


def _infeasible(result: ReplayResult) -> list[str]:
    if not len(result.infeasible):
        return []
    job, why = result.trace.ids[int(result.infeasible[0])], result.infeasible_why[0]
    return [f"{count_of(len(result.infeasible), 'job')} excluded that can never run on these nodes; job {job}: {why}"]
