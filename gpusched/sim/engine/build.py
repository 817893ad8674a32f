"""A replay's initial world, and its result at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gpusched.config.plugins import components
from gpusched.errors import UsageError
from gpusched.estimation.estimators import Estimator, LastTwo
from gpusched.estimation.last_two import time_limits
from gpusched.model.interference import JobClassEstimate
from gpusched.model.limits import Groups, Quotas
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.slicetables import GPU_PARTS, parts_of
from gpusched.model.topology import Topology
from gpusched.model.units import count_of
from gpusched.sched.arrays import racks_of
from gpusched.sched.eligible import no_racks
from gpusched.sched.fit import set_feasibility
from gpusched.sched.slicenames import base_of, profile_of
from gpusched.sched.state import (
    RACK,
    WHOLE,
    Floats,
    Ints,
    QueueJobs,
    Records,
    Resources,
    Scratch,
    copied,
    filled,
    ints,
    new_releases,
    new_scratch,
    new_shared_gpus,
    seed_words,
    with_shared,
)
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.spread import supports_racks
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.ledger import SimLedger
from gpusched.sim.engine.nodeindex import new_index
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.engine.quotas import QuotaSet, ledger_of
from gpusched.sim.engine.state import (
    CHANGE,
    CUT_PARTS,
    CUTS,
    DECISIONS,
    JOB,
    LOGGED,
    NEVER,
    NODE,
    NODE_BACK,
    NODE_DRAINED,
    NODE_GONE,
    NODE_RESERVED,
    RUN,
    UNMEASURED,
    WAITING,
    EventLog,
    Pace,
    Paired,
    Passes,
    Sim,
    new_log,
    new_sim,
    shapes_of,
)
from gpusched.sim.engine.step import mark_never
from gpusched.sim.knowledge import Knowledge, knowledge_of, static_ranks
from gpusched.sim.policies import HALF_LIFE_S, PLACEMENTS, ReplayPolicy
from gpusched.sim.pool import Demand, Pool, demand_of, with_more_nodes
from gpusched.sim.rates import Rates, Speeds, no_speeds, reported_speeds, restart_seconds, speeds_of
from gpusched.sim.reserving import Booking, limits_of, times_of, with_reservations
from gpusched.sim.result import CutRuns, Events, ReplayResult
from gpusched.sim.sharing import Share, SharingBeliefs, fractional, pairing_costs, sharing_of
from gpusched.sim.slicing import Unsplit, joined, split_replay
from gpusched.traces.trace import Trace


class Outage(NamedTuple):
    """A node's outage from ``start`` until ``end`` (seconds on the trace's clock; infinite: permanent).

    With ``drain`` its jobs may finish; else they are cut, wait again, and have all their work to do once more.
    """

    node: int
    start: float
    end: float
    drain: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ResizableJobs:
    """Which jobs may change size.

    Attributes:
        least, most: ``int64[jobs]``: GPUs between which a job may be; its own number where it is rigid.
        linear: Whether a job without figures for a size goes as at the nearest that has some, or in proportion to its
            GPUs (`gpusched.sim.rates.resized_on`); else it cannot have that size.
        cores, memory_mib: Between which amounts in all its cores and MiB go with its GPUs; None: in proportion.
            For jobs in `Trace.progress` that applies instead.
        sizes: What each job may have, ascending; None: its own number, and powers of two.
        rank_gpus: ``int64[jobs]``: GPUs of each rank of hot jobs, one on a node, which join and leave while the job
            runs; 0: a resize stops it; None: of every job.
    """

    least: Ints
    most: Ints
    linear: bool = False
    cores: tuple[int, int] | None = None
    memory_mib: tuple[int, int] | None = None
    sizes: Sequence[tuple[int, ...]] | None = None
    rank_gpus: Ints | None = None


def is_hot(elastic: ResizableJobs, jobs: int) -> npt.NDArray[np.bool_]:
    """Return which jobs are resized without a stop, ``bool[jobs]``."""
    return np.zeros(jobs, np.bool_) if elastic.rank_gpus is None else elastic.rank_gpus > 0


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of a replay.

    Attributes:
        seed: For placements that draw.
        placement: Key of `PLACEMENTS`, or a component's name; None: the policy's own, else best fit.
        limits: Whether a time limit kills its job.
        failures: When nodes fail or are drained.
        reservations: When nodes are reserved, and for which jobs.
        quotas: The limits of users, groups and classes; None: none.
        generic: Only the passes of the live controller, without indices: slower, the same result.
        backfill_every_s: Jobs start out of order only at times so many seconds apart, once something has happened, as
            in Slurm (``bf_interval``); 0: at any decision. Of orders with EASY or conservative backfill.
        restart_s: Seconds that a preempted job's restart holds its nodes before its work goes on (at any restart of a
            preemptive policy).
        restart_costs: The same by model, where that is known (`gpusched.sim.profiles.read_restarts`).
        las_thresholds_gpu_s: Attained service that parts the queues of LAS, ascending (default: two queues, one GPU
            hour; Tiresias leaves the thresholds to the operator).
        half_life_s: Half-life of users' usage, in seconds (``settings.fairshare_half_life``).
        groups: The tree that ``fairshare`` uses; empty: by users' usage alone.
        usage: GPU hours of users (`leaf_of` user and group) before the first submission, decayed until then.
        rates: Speeds of jobs by measured profiles; None: every job runs its recorded duration.
        estimator: Estimates run times for policies that use estimates; None: the mean of the user's last two.
        share: Whether jobs share GPUs: "no"; "fractions" (jobs of one GPU by the thousandths they ask for); "pairs"
            (besides, two jobs of equal GPUs share them where that was measured to do more than taking turns).
        believed: Jobs that agreed to share GPUs with one other, as the live controller allows; None: none did.
        elastic: Which jobs a `Stepper` may resize; None: none.
        network: What placement and neighbours cost jobs; None: nothing. Jobs are laid out as `engine.placing` says, by
            the placement; those that name a number of nodes keep it.
        learned: Estimates by job class of the site that ran the jobs: on which GPU types their classes are faster.
        topology: The nodes' switches: the racks of policies that place by them, where ``network`` is None.
        progress: Called some times a second, on its own thread, with the part of the jobs that has ended.
    """

    seed: int = 0
    placement: str | None = None
    limits: bool = False
    failures: Sequence[Outage] = ()
    reservations: Sequence[Booking] = ()
    quotas: QuotaSet | None = None
    generic: bool = False
    backfill_every_s: float = 0.0
    restart_s: float = 0.0
    restart_costs: Mapping[str, float] = field(default_factory=dict)
    las_thresholds_gpu_s: Sequence[float] = (3600.0,)
    half_life_s: float = HALF_LIFE_S
    groups: Groups = field(default_factory=Groups)
    usage: Mapping[str, float] = field(default_factory=dict)
    rates: Rates | None = None
    estimator: Estimator | None = None
    share: Share = "no"
    believed: SharingBeliefs | None = None
    elastic: ResizableJobs | None = None
    network: PlacementNetwork | None = None
    learned: Mapping[str, JobClassEstimate] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    progress: Callable[[float], None] | None = None


class SimWorld(NamedTuple):
    """The state of one replay.

    Attributes:
        rule: The placement's name. never: How many jobs can never run. generic: Whether the fast runs cannot be used.
        restart_s: ``float64[jobs]``: what a restart costs. shared: How GPUs are shared.
        unsplit: The trace and pool as given, where they have MIG slices: ``trace`` and ``pool`` are split (`slicing`);
            and where decisions are from snapshots.
    """

    trace: Trace
    pool: Pool
    policy: ReplayPolicy
    options: ReplayOptions
    rule: str
    knowledge: Knowledge
    demand: Demand
    sim: Sim
    passes: Passes
    never: int
    generic: bool
    restart_s: Floats
    shared: Share = "no"
    unsplit: Unsplit | None = None

    @property
    def by_snapshot(self) -> bool:
        """Return whether each decision is the live one, from a snapshot (`sim.snapshots`)."""
        return needs_snapshots(self.unsplit, self.options, self.policy)

    @property
    def users(self) -> int:
        """Return the number of users."""
        return int(self.sim.jobs["user"].max(initial=-1)) + 1


_NO_TOPOLOGY = "contention: without --topology placement costs are unknown, so jobs are placed as by rack (best fit)"
_NOT_LEARNED = "contention: no placement costs have been learned yet, so jobs are placed as by rack"


def world_of(trace: Trace, pool: Pool, policy: ReplayPolicy, options: ReplayOptions) -> SimWorld:
    """Return the world before the first event.

    Raises:
        UsageError: A placement or node that does not exist.
    """
    trace, pool, options, unsplit = split_replay(trace, pool, options)
    if unsplit is None and policy.sizes_in_order:
        unsplit = Unsplit(trace, pool, np.arange(len(pool)))
    rule = (policy.placement or "best-fit") if options.placement is None else options.placement
    if rule not in PLACEMENTS and rule not in components("placements"):
        known = dict.fromkeys((*PLACEMENTS, *components("placements")))
        raise UsageError(f"no placement named {rule!r}; one of {', '.join(known)}")
    believed, elastic = options.believed, options.elastic
    resizable = np.zeros(len(trace), np.bool_) if elastic is None else elastic.least < elastic.most
    if believed is not None:  # as live, jobs that may change size share nothing
        believed = believed._replace(row=np.where(resizable, -1, believed.row))
    by_snapshot = needs_snapshots(unsplit, options, policy)
    if by_snapshot:  # jobs share as they agreed to only
        options = replace(options, share="no", believed=believed)
    share, notes = sharing_of(options.share, trace, policy, rule, believed, options.network is not None)
    blind = (_NO_TOPOLOGY,) if rule == "contention" and options.network is None else ()
    rack: Ints | None = None
    rates = options.rates
    by_cores = options.elastic is not None and rates is not None and bool(rates.profiles.sensitivity)
    demand = demand_of(trace, pool, shares=share != "no", in_proportion=by_cores)
    if by_snapshot and trace.max_nodes is not None:
        demand = with_more_nodes(demand, trace, pool)
    if share != "no" and fractional(trace):
        gpus = demand.resources._replace(shared=new_shared_gpus(pool.gpus, demand.job_milli))
        demand = demand._replace(requests=demand.requests._replace(milli=demand.milli), resources=gpus)
    by_rule, by_rack = policy.kind not in ("agent", "preemptive"), PLACEMENTS.get(rule) == RACK
    if trace.one_rack is not None and (why := _without_racks(policy, rule)):
        demand = _excluding(demand, dict.fromkeys(np.flatnonzero(trace.one_rack).tolist(), why))
    spreads = trace.spreads and rule not in MAPPING_PLACES
    if (options.topology or spreads) and options.network is None and not by_snapshot:
        hosts = [base_of(name) for name in pool.names]  # of slices, too: what costs nothing is known of them
        if by_rule and ((by_rack and options.topology) or spreads):
            options = replace(options, network=_racks_only(options.topology, trace, hosts))
            why = _NOT_LEARNED if options.topology else _NO_TOPOLOGY
            blind, rule = (why,) if blind else (), "rack" if blind else _SAME.get(rule, rule)
        elif (policy.kind == "agent" and by_rack) or policy.chooses_sizes:
            rack = racks_of(hosts, options.topology)
    ledger: SimLedger | None = None
    if options.quotas is not None or trace.array_limit is not None:
        demand, ledger = _apply_limits(demand, trace, options.quotas or QuotaSet(Quotas()), options.elastic)
    restart_s, of_restarts = restart_seconds(trace, options.restart_costs, options.restart_s)
    if options.elastic is not None and trace.progress is not None:  # as measured of each job
        unknown = np.isnan(trace.progress.cost_s) | is_hot(options.elastic, len(trace))  # of these it is no restart's
        restart_s = np.where(unknown, restart_s, trace.progress.cost_s)
    speeds = speeds_of(rates, trace, pool, demand) if rates else no_speeds(len(trace), len(pool.gpu_types))
    if rates is None and options.elastic is None and share == "no":
        speeds = reported_speeds(options.learned, trace, pool, demand)
    # Policies that know run times know those on the slowest GPUs that the job may get.
    by_type = rates is not None or bool((speeds.row >= 0).any())
    timed = replace(trace, duration=trace.duration / speeds.slowest) if by_type else trace
    knowledge = knowledge_of(timed, policy)
    knowledge = knowledge._replace(notes=(*knowledge.notes, *notes, *speeds.notes, *of_restarts, *blind))
    sized = policy.chooses_sizes and options.elastic is not None
    ahead = share == "pairs" or bool(options.reservations) or (sized and by_snapshot)
    if ahead and policy.knows == "nothing":  # what is looked ahead to is limits
        knowledge = knowledge._replace(expected=time_limits(trace))
    # The indexed runs (`static`) decide only for orders that never change, on whole GPUs, without limits.
    changing = policy.kind in ("arriving", "changing", "agent") or policy.backfill == "conservative"
    generic = options.generic or changing or sized or rule in ("naive", *MAPPING_PLACES) or share != "no"
    generic = generic or rule not in PLACEMENTS
    generic = generic or options.network is not None or options.backfill_every_s > 0 or ledger is not None
    generic = generic or bool(options.reservations)
    if generic:
        demand = demand._replace(gpus_only=False)
    calendar = None
    if options.reservations:
        limit, usable = limits_of(trace, timed.duration), copied(demand.resources)
        demand, calendar = with_reservations(demand, trace, pool, limit, options.reservations, usable)
    parts = int(demand.parts.sum())
    slots = most_parts_running(demand, parts) if share == "no" else parts
    children = _children(trace)
    jobs = _jobs(timed, policy, knowledge, demand, options.limits, children)
    planned = slots + 2 * parts if policy.backfill == "conservative" else 0  # one version is compiled for all rules
    scratch = new_scratch(len(pool), len(demand.queue), rack, calendar, planned)
    shapes = shapes_of(demand.requests, demand.queue, _weights(unsplit, pool, demand, share))
    sim = new_sim(
        jobs, shapes, _nodes(pool, demand), demand.resources, parts=demand.parts,
        needs=(trace.depends_on >= 0).astype(np.int64), children=children, partitions=len(pool.partitions),
        changes=_changes(options.failures, options.reservations, len(pool)), runs=min(len(trace), slots),
        half_life_s=options.half_life_s, scratch=scratch, by_free=new_index(demand.resources, demand.gpus_only),
        ledger=ledger,
    )  # fmt: skip
    if by_type or share != "no" or options.elastic is not None or options.network is not None:
        sim = _with_pace(sim, trace, pool, demand, speeds, options.limits, share, resizable)
    if believed is not None and share == "pairs" and sim.pace is not None:
        sim = _with_believed(sim, sim.pace, believed)
    if sim.resources.shared is not None:
        scratch = with_shared(scratch, sim.resources)
    reserved = None if calendar is None else calendar.usable
    passes = _passes(demand, knowledge, scratch, slots, options.seed, ledger, reserved)
    never = int(mark_never(sim))
    return SimWorld(
        trace, pool, policy, options, rule, knowledge, demand, sim, passes, never, generic, restart_s, share, unsplit
    )


_SAME = {"consolidate": "best-fit", "worst-fit": "spread"}


def _without_racks(policy: ReplayPolicy, rule: str) -> str:
    """Return why jobs that run in one rack only never run under the policy, as live; "": they do."""
    spec = policy.spec or PolicySpec(name=policy.name, agent=None if policy.model is None else policy.model.agent)
    spec = msgspec.structs.replace(spec, place=rule)
    return "" if supports_racks(spec) else no_racks(policy.name)


def _racks_only(topology: Topology, trace: Trace, names: Sequence[str]) -> PlacementNetwork:
    """Return the switches of nodes, by name, where no place costs anything."""
    tree, kinds = tree_of(topology, names), np.zeros(1, KIND)
    kinds["compute"] = 1.0
    model = SlowdownModel(kinds, np.zeros((0, 0)), False)
    tree = tree._replace(weight=np.zeros(len(tree.weight)))
    return PlacementNetwork(tree, model, np.zeros(len(trace), np.int64), hold_s=np.inf, keeps_nodes=True)


def needs_snapshots(unsplit: Unsplit | None, options: ReplayOptions, policy: ReplayPolicy) -> bool:
    """Return whether a replay is decided from snapshots.

    GPUs are cut on demand, an agent cannot decide about slices, or a policy that chooses sizes has its own order.
    """
    if unsplit is None or (policy.places and options.network is None):  # which is refused
        return False
    by_other = policy.by_agent and policy.spec is not None and not (policy.spec.traits.slices or policy.places)
    return bool(unsplit.pool.cuttable) or by_other or policy.sizes_in_order


def _weights(unsplit: Unsplit | None, pool: Pool, demand: Demand, share: Share) -> Ints | int:
    """Return `SHAPE.weight` of the requests."""
    parts = 1 if unsplit is None else ints([parts_of(profile_of(pool.partitions[q])) for q in demand.queue])
    return parts if share == "no" else 2 * parts * demand.milli


def usage_scale(world: SimWorld) -> int:
    """Return into how many parts a GPU is counted for users' usage; each of two jobs on one has half of it."""
    parts = 1 if world.unsplit is None else GPU_PARTS
    return parts if world.shared == "no" else 2 * WHOLE * parts


def _apply_limits(
    demand: Demand, trace: Trace, quotas: QuotaSet, elastic: ResizableJobs | None
) -> tuple[Demand, SimLedger | None]:  # fmt: skip
    """Return the limits, and the demand without jobs that alone exceed a limit."""
    least = trace.gpus if elastic is None else np.minimum(elastic.least, trace.gpus)
    ledger, never = ledger_of(trace, limits_of(trace, trace.duration), least, quotas)
    return _excluding(demand, never) if never else demand, ledger


def _excluding(demand: Demand, never: dict[int, str]) -> Demand:
    """Return the demand without these jobs, which can never run; their reasons by row."""
    shape, parts = demand.shape.copy(), demand.parts.copy()
    shape[list(never)], parts[list(never)] = -1, 0
    return demand._replace(shape=shape, parts=parts, infeasible={**never, **demand.infeasible})


def _with_pace(
    sim: Sim, trace: Trace, pool: Pool, demand: Demand, speeds: Speeds, limits: bool, share: Share,
    resizable: npt.NDArray[np.bool_],
) -> Sim:  # fmt: skip
    """Set speeds and shared GPUs; work is in recorded seconds, and time limits apply to the time that jobs run."""
    limit = time_limits(trace) if limits else np.full(len(trace), np.inf)
    sim.jobs["duration"], sim.jobs["overlong"] = trace.duration, 0
    sim.state["left"] = trace.duration
    whole = np.where(resizable | ((trace.gpus == 1) & (trace.gpu_milli < WHOLE)), -1, speeds.row)
    pairs = Paired(pairing_costs(speeds.table), whole, True, np.zeros(1, np.int64)) if share == "pairs" else None
    pace = Pace(
        runs=filled(
            RUN, len(trace), rate=1.0, own=1.0, share=1.0, limit=limit, row=speeds.row, next=-1, mate=-1, split=-1,
        ),
        speed=speeds.table,
        kind=pool.gpu_type,
        on=np.full(0 if sim.resources.shared is None else pool.total_gpus, -1),
    )
    return sim._replace(pace=pace, pairs=pairs)


def _with_believed(sim: Sim, pace: Pace, believed: SharingBeliefs) -> Sim:
    """Set which jobs may share GPUs, with the installation's estimates of slowdowns in place of measured ones."""
    kinds, kind = np.unique(np.column_stack((pace.kind, believed.kind)), axis=0, return_inverse=True)
    rows, row = np.unique(np.column_stack((pace.runs["row"], believed.row)), axis=0, return_inverse=True)
    (of_type, place), (own, party) = kinds.T, rows.T
    # the last row, which -1 means, is that of jobs without figures, or that share nothing
    alone = np.pad(pace.speed[:, :, 0], ((0, 0), (0, 1)), constant_values=1.0)[of_type][:, own]
    both = np.pad(believed.speed[:, :, 1:], ((0, 0), (0, 1), (0, 1)), constant_values=1.0)
    beside = both[place][:, party][:, :, party]
    pace.runs["row"] = np.where((own < 0) & (party < 0), -1, np.arange(len(rows)))[row.reshape(-1)]
    # by rows, as all tables of speeds: for another order in memory the whole replay would be compiled once more
    speed = np.ascontiguousarray(np.concatenate((alone[:, :, None], alone[:, :, None] * beside), axis=2))
    pairs = Paired(believed.lost[place], believed.row, False, np.zeros(1, np.int64))
    return sim._replace(pace=pace._replace(kind=kind.reshape(-1), speed=speed), pairs=pairs)


def estimator_for(world: SimWorld) -> Estimator:
    """Return the estimator of run times, where the policy uses estimates."""
    return world.options.estimator if world.options.estimator and world.policy.uses_run_time_estimates else LastTwo()


def log_of(world: SimWorld) -> EventLog:
    """Return a log large enough for every run that is not interrupted."""
    widest = int(world.demand.parts.max(initial=0)) + 64
    return new_log(3 * len(world.trace) + len(world.sim.changes) + 64, widest, widest)


def _jobs(
    trace: Trace, policy: ReplayPolicy, knowledge: Knowledge, demand: Demand, limits: bool, children: Ints
) -> Records:  # fmt: skip
    """Return the jobs, ``JOB[jobs]``; ``children``: as from `_children`."""
    overlong = (trace.duration > trace.limit) & limits
    after, places = trace.depends_on[children], np.arange(len(trace))
    child, stop = (np.searchsorted(after, places, side=side) for side in ("left", "right"))
    return filled(
        JOB,
        len(trace),
        arrival=trace.arrivals,
        submit=trace.submit,
        duration=np.where(overlong, trace.limit, trace.duration),
        expected=knowledge.expected,
        overlong=overlong,
        shape=demand.shape,
        rank=static_ranks(policy.order, trace, knowledge.expected, trace.duration),
        user=trace.user,
        child=child,
        child_begun=stop,
        child_stop=stop,
    )


def _nodes(pool: Pool, demand: Demand) -> Records:
    gpus = demand.resources.gpus
    return filled(NODE, len(pool), free=gpus, total=gpus, up=1, queue=pool.partition)


def _children(trace: Trace) -> Ints:
    """Return the dependent jobs, ordered by the job that they wait for (`state.JOB`)."""
    order: Ints = np.argsort(trace.depends_on, kind="stable")
    return order[np.searchsorted(trace.depends_on[order], 0) :]


def _changes(failures: Sequence[Outage], bookings: Sequence[Booking], nodes: int) -> Records:
    """Return node events, ``CHANGE[n]``, in order of (time, returning before leaving nodes, node)."""
    rows = [(time, NODE_RESERVED, node) for time, node in times_of(bookings)]
    of_node: dict[int, list[Outage]] = defaultdict(list)
    for outage in failures:
        if not 0 <= outage.node < nodes:
            raise UsageError(f"a failure names node {outage.node}; the pool has {nodes}")
        rows.append((outage.start, NODE_DRAINED if outage.drain else NODE_GONE, outage.node))
        of_node[outage.node].append(outage)
    for outage in failures:  # of outages that overlap the last to end brings the node back
        if outage.end < np.inf and not any(other.start < outage.end < other.end for other in of_node[outage.node]):
            rows.append((outage.end, NODE_BACK, outage.node))
    return np.array(sorted(rows), dtype=CHANGE)


def _passes(
    demand: Demand, knowledge: Knowledge, scratch: Scratch, slots: int, seed: int, ledger: SimLedger | None,
    reserved: Resources | None,
) -> Passes:  # fmt: skip
    """Return the inputs of the live passes; ``reserved``: what reservations leave of the nodes."""
    feasibility, limit = np.zeros(len(demand.queue), np.int64), np.array(knowledge.expected, np.float64)
    account, room, links = (None,) * 3 if ledger is None else (ledger.account, ledger.room, ledger.links)
    passes = Passes(
        requests=demand.requests,
        jobs=QueueJobs(demand.shape, limit, account, room, feasibility, demand.masks, links),  # type: ignore[arg-type]
        releases=new_releases(slots + 1),
        scratch=scratch,
        rng=seed_words(seed),
        total=demand.resources,
        usable=copied(demand.resources) if reserved is None else reserved,
    )
    set_feasibility(passes.total, passes.usable, passes.requests, passes.jobs, scratch)
    return passes


def most_parts_running(demand: Demand, parts: int) -> int:
    """Return how many of the parts of jobs can run at once: one on each GPU, and all those of jobs without GPUs."""
    runs = np.flatnonzero(demand.shape >= 0)
    gpuless = runs[demand.requests.gpus[demand.shape[runs]] == 0] if len(runs) else runs
    return int(min(parts, demand.resources.gpus.sum() + demand.parts[gpuless].sum()))


def result_of(world: SimWorld, log: EventLog, seconds: float) -> ReplayResult:
    """Return the result of a replay that took ``seconds`` of wall time."""
    trace, demand, sim = world.trace, world.demand, world.sim
    logged, cuts, cut_parts = (int(sim.counter[i]) for i in (LOGGED, CUTS, CUT_PARTS))
    state = sim.state
    infeasible = np.flatnonzero(state["status"] == NEVER)
    why = tuple(demand.infeasible.get(j, "waits for a job that can never run") for j in infeasible.tolist())
    parts, part_gpus, part_nodes = _held(world)
    milli = demand.job_milli
    notes = list(world.knowledge.notes)
    if world.options.estimator is not None and world.policy.uses_run_time_estimates:
        notes.append(f"estimates by {world.options.estimator.name}")
    stuck = int((state["status"] == WAITING).sum())
    beside = int(sim.counter[UNMEASURED])
    if beside:
        notes.append(f"{count_of(beside, 'time')} a job shared a GPU with one whose slowdown was not measured")
    if stuck:
        notes.append(f"{count_of(stuck, 'job')} still pending at the end")
    result = ReplayResult(
        policy=world.policy.name,
        knows=world.knowledge.knows,
        source=world.policy.source,
        placement=world.rule,
        seed=world.options.seed,
        trace=trace,
        pool=world.pool,
        # Copies: views would keep the whole world of the replay alive as long as its result.
        start=state["first"].copy(),
        last_start=state["start"].copy(),
        end=state["end"].copy(),
        part_offsets=np.concatenate(([0], np.cumsum(parts))).astype(np.int64),
        part_nodes=part_nodes,
        part_gpus=part_gpus,
        share=milli / 1000 if world.shared != "no" else None,
        shared=world.shared,
        killed=(sim.jobs["overlong"] != 0) & np.isfinite(state["end"]),
        restarts=state["restarts"].copy(),
        infeasible=infeasible,
        infeasible_why=why,
        cut=CutRuns(
            job=log.cuts["job"][:cuts].copy(),
            start=log.cuts["start"][:cuts].copy(),
            end=log.cuts["end"][:cuts].copy(),
            part_offsets=np.concatenate(([0], log.cuts["stop"][:cuts])),
            part_nodes=log.cut_nodes[:cut_parts].copy(),
            part_gpus=log.cuts["gpus"][:cuts].copy() if world.options.elastic is not None else None,
        ),
        events=Events(
            time=log.events["time"][:logged].copy(),
            kind=log.events["kind"][:logged].astype(np.uint8),
            subject=log.events["subject"][:logged].astype(np.int64),
        ),
        decisions=int(sim.counter[DECISIONS]),
        sim_seconds=seconds,
        jobs_per_s=(len(trace) - world.never) / seconds if seconds > 0 else 0.0,
        notes=tuple(notes),
    )
    return joined(result, world.unsplit)


def _held(world: SimWorld) -> tuple[Ints, Ints, Ints]:
    """Return the nodes of each job's last run: how many, GPUs on each, and node numbers, job by job."""
    sim, demand = world.sim, world.demand
    changed = world.options.elastic is not None or world.options.network is not None or world.by_snapshot
    shape = np.where(demand.shape >= 0, sim.jobs["shape"], -1) if changed else demand.shape
    runs = shape >= 0
    parts, part_gpus = np.zeros(len(shape), np.int64), np.zeros(len(shape), np.int64)
    parts[runs], part_gpus[runs] = sim.shapes["parts"][shape[runs]], sim.shapes["gpus"][shape[runs]]
    if not changed:
        return parts, part_gpus, sim.held
    within = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    return parts, part_gpus, sim.held[np.repeat(sim.jobs["offset"], parts) + within]
