"""A replay's world before anything has happened, and its result when all has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.sched.fit import stand
from gpusched.sched.state import Jobs, Rooms, Scratch, new_releases, new_scratch, seed_words
from gpusched.sim.cluster import Demand, Pool, demand_of
from gpusched.sim.engine_state import (
    CHANGE,
    COUNTERS,
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
    SHAPE,
    STATE,
    WAITING,
    Log,
    Passes,
    Records,
    Sim,
    filled,
    new_log,
)
from gpusched.sim.engine_step import mark_never
from gpusched.sim.heaps import new_heap
from gpusched.sim.knowledge import Knowledge, knowledge_of, static_ranks
from gpusched.sim.nodeindex import new_index
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy
from gpusched.sim.result import CutRuns, Events, Result
from gpusched.sim.trace import Trace


class Outage(NamedTuple):
    """A node is away from ``start`` until ``end`` (seconds on the trace's clock; infinite: for good).

    With ``drain`` its jobs may finish; else they are cut, wait again, and have all their work to do once more.
    """

    node: int
    start: float
    end: float
    drain: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to replay.

    Attributes:
        seed: For placements that draw.
        placement: Key of `PLACEMENTS`; None: the policy's own, else best fit.
        limits: Whether a time limit kills its job.
        failures: When nodes fail or are drained.
        generic: Only the passes of the live controller, without indices: slower, the same result.
        restart_s: Seconds that a preempted job's restart holds its nodes before its work goes on (at any restart of a
            preemptive policy).
        las_thresholds_gpu_s: Attained service that parts the queues of LAS, ascending (default: two queues, one GPU
            hour; Tiresias leaves the thresholds to the operator).
    """

    seed: int = 0
    placement: str | None = None
    limits: bool = False
    failures: Sequence[Outage] = ()
    generic: bool = False
    restart_s: float = 0.0
    las_thresholds_gpu_s: Sequence[float] = (3600.0,)


class World(NamedTuple):
    """One replay.

    Attributes:
        rule: The placement's name. never: How many jobs can never run. indexed: Whether the fast runs may be used.
    """

    trace: Trace
    pool: Pool
    policy: ReplayPolicy
    options: Options
    rule: str
    knowledge: Knowledge
    demand: Demand
    sim: Sim
    passes: Passes
    never: int
    generic: bool

    @property
    def users(self) -> int:
        """How many users there are."""
        return int(self.sim.jobs["user"].max(initial=-1)) + 1


def world_of(trace: Trace, pool: Pool, policy: ReplayPolicy, options: Options) -> World:
    """The world before anything has happened.

    Raises:
        UsageError: A placement or node that does not exist.
    """
    rule = options.placement or policy.placement or "best-fit"
    if rule not in PLACEMENTS:
        raise UsageError(f"no placement is called {rule!r}; one of {', '.join(PLACEMENTS)}")
    knowledge, demand = knowledge_of(trace, policy), demand_of(trace, pool)
    changing = policy.kind in ("arriving", "changing") or policy.backfill == "conservative"
    generic = options.generic or changing or rule == "naive"
    if generic:
        demand = demand._replace(gpus_only=False)
    slots = _slots(demand)
    jobs = _jobs(trace, policy, knowledge, demand, options.limits)
    scratch = new_scratch(len(pool), len(demand.queue))
    sim = _sim(jobs, pool, demand, _changes(options.failures, len(pool)), scratch, slots)
    passes = _passes(demand, knowledge, scratch, slots, options.seed)
    never = int(mark_never(sim))
    return World(trace, pool, policy, options, rule, knowledge, demand, sim, passes, never, generic)


def log_of(world: World) -> Log:
    """A log with room for every run that is not cut."""
    widest = int(world.demand.parts.max(initial=0)) + 64
    return new_log(3 * len(world.trace) + len(world.sim.changes) + 64, widest, widest)


def _jobs(trace: Trace, policy: ReplayPolicy, knowledge: Knowledge, demand: Demand, limits: bool) -> Records:
    """The jobs, ``JOB[jobs]``."""
    overlong = (trace.duration > trace.limit) & limits
    child, sibling = np.full(len(trace), -1, np.int64), np.full(len(trace), -1, np.int64)
    for job in np.flatnonzero(trace.depends_on >= 0)[::-1].tolist():
        sibling[job] = child[trace.depends_on[job]]
        child[trace.depends_on[job]] = job
    return filled(
        JOB,
        len(trace),
        submit=trace.submit,
        duration=np.where(overlong, trace.limit, trace.duration),
        believed=knowledge.believed,
        overlong=overlong,
        shape=demand.shape,
        rank=static_ranks(policy.order, trace, knowledge.believed, trace.duration),
        user=trace.user,
        depends_on=trace.depends_on,
        child=child,
        sibling=sibling,
        offset=np.cumsum(demand.parts) - demand.parts,
    )


def _changes(failures: Sequence[Outage], nodes: int) -> Records:
    """Node events, ``CHANGE[n]``, in order of (time, back before gone, node)."""
    rows = []
    for outage in failures:
        if not 0 <= outage.node < nodes:
            raise UsageError(f"a failure names node {outage.node}; the pool has {nodes}")
        rows.append((outage.start, NODE_DRAINED if outage.drain else NODE_GONE, outage.node))
        if outage.end < np.inf:
            rows.append((outage.end, NODE_BACK, outage.node))
    return np.array(sorted(rows), dtype=CHANGE)


def _sim(jobs: Records, pool: Pool, demand: Demand, changes: Records, scratch: Scratch, slots: int) -> Sim:
    nodes, gpus, runs = len(pool), demand.rooms.gpus, min(len(jobs), slots)
    return Sim(
        jobs=jobs,
        shapes=filled(SHAPE, len(demand.queue), **demand.requests._asdict(), queue=demand.queue),
        changes=changes,
        state=filled(STATE, len(jobs), first=np.nan, start=np.nan, end=np.nan, left=jobs["duration"]),
        node=filled(NODE, nodes, free=gpus, total=gpus, up=1, queue=pool.partition),
        clock=np.array([-np.inf, np.inf]),
        counter=np.zeros(COUNTERS, np.int64),
        held=np.full(int(demand.parts.sum()), -1, np.int64),
        rooms=_copied(demand.rooms),
        ends=new_heap(runs + 1),
        by_free=new_index(demand.rooms, demand.gpus_only),
        ready=np.zeros(len(jobs) + 1, np.int64),
        ended=np.zeros(2 * runs + 2, np.int64),
        dirty=np.zeros(len(pool.partitions), np.int64),
        chosen=scratch.chosen,
    )


def _passes(demand: Demand, knowledge: Knowledge, scratch: Scratch, slots: int, seed: int) -> Passes:
    """What the live passes take."""
    standing = np.zeros(len(demand.queue), np.int64)
    none = np.full(len(demand.shape), -1, np.int64)
    passes = Passes(
        requests=demand.requests,
        jobs=Jobs(
            demand.shape, np.array(knowledge.believed, np.float64), none, np.zeros(0, np.int64), standing, demand.masks
        ),
        releases=new_releases(slots + 1),
        scratch=scratch,
        rng=seed_words(seed),
        total=demand.rooms,
        usable=_copied(demand.rooms),
    )
    stand(passes.total, passes.usable, demand.masks, demand.requests, scratch, standing)
    return passes


def _copied(rooms: Rooms) -> Rooms:
    return Rooms(*(column.copy() for column in rooms))


def _slots(demand: Demand) -> int:
    """The most parts that can run at once: one per GPU, and all those of jobs without GPUs."""
    runs = np.flatnonzero(demand.shape >= 0)
    gpuless = runs[demand.requests.gpus[demand.shape[runs]] == 0] if len(runs) else runs
    return int(min(demand.parts.sum(), demand.rooms.gpus.sum() + demand.parts[gpuless].sum()))


def result_of(world: World, log: Log, seconds: float) -> Result:
    """What was done, in ``seconds`` of wall time."""
    trace, demand, sim = world.trace, world.demand, world.sim
    logged, cuts, cut_parts = (int(sim.counter[i]) for i in (LOGGED, CUTS, CUT_PARTS))
    state = sim.state
    infeasible = np.flatnonzero(state["status"] == NEVER)
    why = tuple(demand.infeasible.get(j, "waits for a job that can never run") for j in infeasible.tolist())
    part_gpus = np.zeros(len(trace), np.int64)
    runs = demand.shape >= 0
    part_gpus[runs] = demand.requests.gpus[demand.shape[runs]]
    notes = list(world.knowledge.notes)
    stuck = int((state["status"] == WAITING).sum())
    if stuck:
        notes.append(f"{stuck} jobs still waited when nothing was left to happen")
    return Result(
        policy=world.policy.name,
        knows=world.knowledge.knows,
        source=world.policy.source,
        placement=world.rule,
        seed=world.options.seed,
        trace=trace,
        pool=world.pool,
        start=state["first"].copy(),
        last_start=state["start"].copy(),
        end=state["end"].copy(),
        part_offsets=np.concatenate(([0], np.cumsum(demand.parts))).astype(np.int64),
        part_nodes=sim.held,
        part_gpus=part_gpus,
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
