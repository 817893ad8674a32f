"""`replay`: run a trace on a pool under a policy, as fast as arrays allow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpusched.compiled import compiled_if_long, is_interpreted, is_on_disk, may_compile
from gpusched.errors import UsageError
from gpusched.model.limits import Limits, Quotas
from gpusched.model.policy import AGENTS
from gpusched.sched.agent import ComponentErrors, agent_parts, prepared_weights
from gpusched.sched.state import BACKFILLS, WHOLE, filled
from gpusched.sim.engine.build import (
    Outage,
    ReplayOptions,
    ResizableJobs,
    SimWorld,
    estimator_for,
    log_of,
    result_of,
    world_of,
)
from gpusched.sim.engine.generic import chooser_for, component_run, is_by_component, new_queue, run_generic
from gpusched.sim.engine.mapped import StagedRun, is_mapped
from gpusched.sim.engine.placing_index import run_placed
from gpusched.sim.engine.placing_walk import run_walk, walk_by_component
from gpusched.sim.engine.preempt import PREEMPTIVE_CODES, Preemptive, new_filling, new_plan, run_preemptive
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.engine.sized import run_sized
from gpusched.sim.engine.state import ARRIVED, GROW, IN_SYSTEM, EventLog, Passes, Sim, grown
from gpusched.sim.engine.static import LAST, Fixed, run_merged, run_strict
from gpusched.sim.engine.waitlist import new_waitlist
from gpusched.sim.placed import is_staged, lays_out, one_node_network, walked, walks, with_links, with_ways
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy, policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import Rates
from gpusched.sim.resizing import elastic_of
from gpusched.sim.result import ReplayResult
from gpusched.sim.sized import SizedRun, with_sizes
from gpusched.sim.stepper import PolicyFunction, run_function
from gpusched.traces.trace import Trace

__all__ = ["Outage", "ReplayOptions", "replay"]


def replay(trace: Trace, pool: Pool, policy: ReplayPolicy | PolicyFunction | str, **options: Any) -> ReplayResult:
    """Replay ``trace`` on ``pool`` under ``policy``. Equal inputs and seed give the same events, byte for byte.

    At one instant ends come before node events, those before arrivals, and these before decisions. A partition is
    decided at the instants at which one of its jobs arrives or ends or one of its nodes changes. Under orders that
    change while jobs wait all partitions are, by what users had used before that instant, as live; under limits, too,
    and at the same instant again while what starts may let others start within them, as live in the next cycle.

    Jobs that can never run are named in the result and kept out. The policy may be a function (see `stepper`).
    ``options``: see `ReplayOptions`.

    Raises:
        UsageError: A placement, policy or node that does not exist; a function that starts what cannot start.
    """
    if callable(policy):
        return run_function(trace, pool, policy, ReplayOptions(**options))
    settings = ReplayOptions(**options)
    policy = policy_by_name(policy) if isinstance(policy, str) else policy
    if policy.chooses_sizes and settings.elastic is None:
        settings = replace(settings, elastic=elastic_of(trace))
    if len(trace) > _SHORT_TRACE or policy.model is not None:  # as Python, numpy's tanh rounds otherwise
        return _replay(trace, pool, policy, settings)
    return compiled_if_long(lambda: _replay(trace, pool, policy, settings))


def _replay(trace: Trace, pool: Pool, policy: ReplayPolicy, settings: ReplayOptions) -> ReplayResult:
    world = _linked(world_of(trace, pool, policy, settings))
    kind = next(kind for kind in KINDS if kind.applies(world))
    _compile_for(world, kind)
    world, run = kind.ready(world)
    log = log_of(world)
    begin = time.perf_counter()
    with _watched(world):
        log = to_the_end(world, log, run)
    result = result_of(world, log, time.perf_counter() - begin)
    notes = getattr(run, "notes", ())
    return replace(result, notes=(*result.notes, *notes)) if notes else result


def _linked(world: SimWorld) -> SimWorld:
    """Return the world with the links that slow jobs down, where its run does not prepare these with their layouts."""
    by_itself = world.options.network is None or lays_out(world) or _is_sized(world)
    return world if by_itself else with_links(world)


def to_the_end(world: SimWorld, log: EventLog, run: Runner) -> EventLog:
    """Run to the end, enlarging the log when needed."""
    while run(log) == GROW:
        log = grown(log, world.sim)
    return log


WATCH_S = 0.25


@contextmanager
def _watched(world: SimWorld) -> Iterator[None]:
    """Report progress from another thread, which compiled code lets run: it costs the replay nothing."""
    report = world.options.progress
    if report is None:
        yield
        return
    stop, counter, jobs = threading.Event(), world.sim.counter, max(1, len(world.trace) - world.never)

    def watch() -> None:
        reported = 0.0  # the two counters are not read at one moment, and no progress goes back
        while not stop.wait(WATCH_S):
            share = min(1.0, max(0, int(counter[ARRIVED] - counter[IN_SYSTEM]) - world.never) / jobs)
            reported = max(reported, share)
            report(reported)

    thread = threading.Thread(target=watch, name="progress of a replay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_SHORT_TRACE = 500
"""Jobs up to which a trace is first replayed as Python where its replay is not compiled."""
_warm: set[tuple[object, ...]] = set()


def _compile_for(world: SimWorld, kind: RunKind) -> None:
    """Compile (or load) what the replay needs before its time is taken, with a message on stderr if it is slow.

    All of it takes half a minute of one core on first use, and is kept in the cache folder after that.

    Raises:
        NotCached: It may not be compiled here.
    """
    if world.by_snapshot or is_interpreted():  # by the live passes; as Python
        return
    sim, options, model = world.sim, world.options, world.policy.model
    agent = None if model is None else (model.agent, model.preempts)
    learned = options.network is not None and options.network.model.believed is not None
    estimates = world.policy.uses_run_time_estimates, type(estimator_for(world))
    parts = sim.resources.shared is not None
    without = sim.pace is None, sim.ledger is None, world.passes.scratch.racks is None
    known = kind, agent, is_mapped(world), without, world.shared, parts, estimates, learned
    if known in _warm:
        return
    loop, versions = kind.compiled, 1 if sim.pace is None else kind.versions
    if may_compile() and loop is not None and hasattr(loop, "signatures") and not is_on_disk(loop, versions):
        print("gpusched: compiling the simulator (once after installation or upgrade) ...", file=sys.stderr, flush=True)
    one, rated = np.ones(1, np.int64), sim.pace is not None and bool((sim.pace.runs["row"] >= 0).any())
    alike = ReplayOptions(
        placement=world.rule,
        estimator=options.estimator,
        share=world.shared,
        rates=Rates(profiles=Profiles(series={})) if options.rates is not None or rated else None,
        elastic=None if options.elastic is None else ResizableJobs(least=one, most=one, linear=True),
        network=None if options.network is None else one_node_network(options.network),
        topology=options.topology,
        quotas=None if sim.ledger is None else QuotaSet(Quotas(each=Limits(jobs=1))),
    )
    tiny = _linked(world_of(one_job(500 if parts else WHOLE), Pool.uniform(1, 1), world.policy, alike))
    tiny, run = kind.ready(tiny)
    to_the_end(tiny, log_of(tiny), run)
    _warm.add(known)


def one_job(milli: int = WHOLE) -> Trace:
    """Return a trace of one job with one GPU, or a part of it, for one second, to compile with ahead of a replay."""
    unknown, zero, one = np.full(1, -1, np.int64), np.zeros(1), np.ones(1)
    return Trace(
        name="one job", epoch=None, ids=("1",), submit=zero, duration=one, limit=one, gpus=-unknown,
        gpu_milli=-milli * unknown, nodes=0 * unknown, cores=unknown, memory_mib=unknown, user=0 * unknown,
        users=("ann",), group=unknown, model=unknown, gpu_type=unknown, depends_on=unknown, status=unknown, wait=zero,
    )  # fmt: skip


# The kinds of runs, `KINDS`: the first that applies to a world prepares it and runs it to the end

State = TypeVar("State")
Loop = Callable[[Sim, EventLog, Passes, State], int]
Runner = Callable[[EventLog], int]
"""Replays to the end: OVER, or GROW (call it again with a larger log). It may have ``notes`` for the result."""


class RunKind(NamedTuple):
    """A way to run a replay.

    Attributes:
        applies: Whether a world is run so, where no kind before it applies.
        ready: The world with all that its jobs may have, and what runs it.
        compiled: The loop, where all of it is compiled; ``versions`` of it, with speeds of jobs and without.
    """

    name: str
    applies: Callable[[SimWorld], bool]
    ready: Callable[[SimWorld], tuple[SimWorld, Runner]]
    compiled: Callable[..., int] | None = None
    versions: int = 2


def _by(run: Loop[State], world: SimWorld, state: State) -> tuple[SimWorld, Runner]:
    sim, passes = world.sim, world.passes
    return world, lambda log: run(sim, log, passes, state)


def _is_sized(world: SimWorld) -> bool:
    """Return whether the policy chooses the sizes of some jobs."""
    return world.policy.chooses_sizes and world.options.elastic is not None


def _sized(world: SimWorld) -> tuple[SimWorld, Runner]:
    world, sizer = with_sizes(world)
    return world, SizedRun(world, sizer)


def _by_snapshot(world: SimWorld) -> tuple[SimWorld, Runner]:
    from gpusched.sim.snapshots import SnapshotRun  # other replays start faster without

    if _is_sized(world):
        world, sizer = with_sizes(world)
        return world, SnapshotRun(world, sizer)
    return world, SnapshotRun(world)


def _by_agent(world: SimWorld) -> tuple[SimWorld, Runner]:
    """Run by the agent's own passes, as live, called at the engine's decisions (`gpusched.agents.base.Replay`)."""
    model = world.policy.model
    assert model is not None
    agent, replay = model.agent, agent_parts(model.agent).replay
    assert replay is not None
    # one that chooses nodes itself does so whatever its own file says, as live
    asked = is_mapped(world) or (is_staged(world) and world.rule != world.policy.placement)
    if asked and not replay().maps(model):
        problem = f"{world.policy.name} cannot be combined with --placement {world.rule}"
        raise UsageError(problem, "use another placement")
    try:
        own = prepared_weights(model)
        with ComponentErrors(agent):
            world, run = replay().runner(world, own)
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "train it again") from None
    return world, run if agent in AGENTS else _naming(agent, run)


def _naming(agent: str, run: Runner) -> Runner:
    """Return the run of another package's agent: what it raises is one line with its name."""

    def to_end(log: EventLog) -> int:
        with ComponentErrors(agent):
            return run(log)

    return to_end


def _by_component(world: SimWorld) -> tuple[SimWorld, Runner]:
    chooser, network = chooser_for(world), world.options.network
    if network is None or not network.keeps_nodes:
        return world, component_run(world, chooser)
    world, walk = walked(*with_ways(world))
    return world, walk_by_component(world, walk, chooser)


def _preemptive(world: SimWorld) -> tuple[SimWorld, Runner]:
    levels = np.array(sorted(world.options.las_thresholds_gpu_s), np.float64)
    code, restart_s = PREEMPTIVE_CODES[world.policy.order], world.restart_s
    return _by(run_preemptive, world, Preemptive(new_plan(world, filling=new_filling(world)), code, restart_s, levels))


def _fixed(world: SimWorld, strict: bool) -> Fixed:
    demand, sim = world.demand, world.sim
    waitlist = new_waitlist(demand.shape, sim.jobs["rank"], demand.queue, len(sim.dirty), strict)
    return Fixed(waitlist, filled(LAST, 1, head=-1), PLACEMENTS[world.rule], BACKFILLS[world.policy.backfill])


def _is_strict(world: SimWorld) -> bool:
    """Return whether there is one queue, its head blocks, and nodes never change; excludes speeds to compile less."""
    sim = world.sim
    return world.policy.backfill == "none" and sim.pace is None and len(sim.dirty) == 1 and len(sim.changes) == 0


KINDS = (
    RunKind("by snapshot", lambda w: w.by_snapshot, _by_snapshot),
    RunKind("placed by a component", is_by_component, _by_component),
    RunKind("placing agent", lambda w: w.policy.places, _by_agent),
    RunKind("sized by cost", lambda w: _is_sized(w) and w.options.network is not None, _sized, run_sized, 1),
    RunKind("placed walk", walks, lambda w: _by(run_walk, *walked(*with_ways(w))), run_walk, 1),
    RunKind("placed", lays_out, lambda w: _by(run_placed, *with_ways(w)), run_placed, 1),
    RunKind("sized", _is_sized, _sized, run_sized, 1),
    RunKind("agent", lambda w: w.policy.by_agent, _by_agent),
    RunKind("mapped", is_mapped, lambda w: (w, StagedRun(w))),
    RunKind("preemptive", lambda w: w.policy.kind == "preemptive", _preemptive, run_preemptive),
    RunKind("generic", lambda w: w.generic, lambda w: _by(run_generic, w, new_queue(w)), run_generic),
    RunKind("strict", _is_strict, lambda w: _by(run_strict, w, _fixed(w, True)), run_strict),
    RunKind("merged", lambda w: True, lambda w: _by(run_merged, w, _fixed(w, False)), run_merged),
)
"""The first that applies is taken. Where none walks the queue, the order never changes, and indexes decide."""
