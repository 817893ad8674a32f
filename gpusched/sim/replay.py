"""`replay`: a trace on a pool under a policy, as fast as arrays allow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gpusched.compiled import kept_on_disk
from gpusched.model.limits import Limits, Quotas
from gpusched.sched.state import BACKFILLS, filled
from gpusched.sim.agent import agent_runner
from gpusched.sim.engine.build import Elastic, Options, Outage, World, forecast_for, log_of, result_of, world_of
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.placing import Placing, run_placed
from gpusched.sim.engine.placing_easy import run_placed_easy, with_backfill
from gpusched.sim.engine.placing_walk import Walk, run_walk
from gpusched.sim.engine.preempt import PREEMPTIVE_CODES, Preemptive, filling_of, new_plan, run_preemptive
from gpusched.sim.engine.sized import Sizer, run_sized
from gpusched.sim.engine.state import ARRIVED, GROW, IN_SYSTEM, Log, grown
from gpusched.sim.engine.static import LAST, Fixed, run_merged, run_strict
from gpusched.sim.engine.waitlist import new_waitlist
from gpusched.sim.placed import is_placed, one_node, walked, walks, with_ways
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy, policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles
from gpusched.sim.quotas import QuotaSet
from gpusched.sim.rates import Rates
from gpusched.sim.resizing import elastic_of
from gpusched.sim.result import Result
from gpusched.sim.sized import is_sized, sized_run, with_sizes
from gpusched.sim.stepper import PolicyFunction, run_function
from gpusched.traces.trace import Trace

__all__ = ["Options", "Outage", "replay"]


def replay(trace: Trace, pool: Pool, policy: ReplayPolicy | PolicyFunction | str, **options: Any) -> Result:
    """Replays ``trace`` on ``pool`` under ``policy``. Equal inputs and seed give the same events, byte for byte.

    At one instant ends come before node events, those before arrivals, and these before decisions. A partition is
    decided at the instants at which one of its jobs arrives or ends or one of its nodes changes.

    Jobs that can never run are named in the result and kept out. The policy may be a function (see `stepper`).
    ``options``: see `Options`.

    Raises:
        UsageError: A placement, policy or node that does not exist; a function that starts what cannot start.
    """
    if callable(policy):
        return run_function(trace, pool, policy, Options(**options))
    settings = Options(**options)
    resizable = settings.elastic is not None or elastic_of(trace) is not None
    policy = policy_by_name(policy, resizable) if isinstance(policy, str) else policy
    if policy.chooses_sizes and settings.elastic is None:
        settings = replace(settings, elastic=elastic_of(trace))
    world = world_of(trace, pool, policy, settings)
    _compile_for(world)
    world, sizer = _made_ready(world)
    log = log_of(world)
    begin = time.perf_counter()
    with _watched(world):
        log, notes = _run(world, log, _kind(world), sizer)
    result = result_of(world, log, time.perf_counter() - begin)
    return replace(result, notes=(*result.notes, *notes)) if notes else result


def _made_ready(world: World) -> tuple[World, Sizer | Placing | Walk | None]:
    """The world with all that its jobs may have, and what the run keeps."""
    if is_placed(world):
        world, placing = with_ways(world)
        return walked(world, placing) if _kind(world) == "placed walk" else (world, placing)
    return with_sizes(world) if is_sized(world) else (world, None)


WATCH_S = 0.25


@contextmanager
def _watched(world: World) -> Iterator[None]:
    """Looks on from another thread, which compiled code lets run: it costs the replay nothing."""
    tell = world.options.progress
    if tell is None:
        yield
        return
    stop, counter, jobs = threading.Event(), world.sim.counter, max(1, len(world.trace) - world.never)

    def look() -> None:
        told = 0.0  # the two counters are not read at one moment, and no progress goes back
        while not stop.wait(WATCH_S):
            share = min(1.0, max(0, int(counter[ARRIVED] - counter[IN_SYSTEM]) - world.never) / jobs)
            told = max(told, share)
            tell(told)

    thread = threading.Thread(target=look, name="progress of a replay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_RUNS: dict[str, Callable[..., int]] = {
    "preemptive": run_preemptive,
    "generic": run_generic,
    "strict": run_strict,
    "merged": run_merged,
    "sized": run_sized,
    "placed": run_placed,
    "placed+easy": run_placed_easy,
    "placed walk": run_walk,
}
_warm: set[str] = set()


def _kind(world: World) -> str:
    """Which compiled run fits the policy."""
    if is_placed(world):
        if walks(world):
            return "placed walk"
        return "placed+easy" if world.policy.backfill == "easy" else "placed"
    if is_sized(world):
        return "sized"
    if world.policy.kind == "agent":
        return "agent"
    if is_mapped(world):
        return "mapped"
    if world.policy.kind == "preemptive":
        return "preemptive"
    if world.generic:
        return "generic"
    single = len(world.sim.dirty) == 1 and len(world.sim.changes) == 0
    plain = world.policy.backfill == "none" and world.sim.pace is None  # with speeds one run less is compiled
    return "strict" if plain and single else "merged"


def _compile_for(world: World) -> None:
    """Compiles (or loads) what the replay needs, so that its time does not count it; a word on stderr if it is slow.

    All of it takes half a minute of one core on first use, and is kept in the cache folder after that.
    """
    kind = _kind(world)
    known = f"{kind} {world.policy.order} {world.policy.preempts}" if kind == "agent" else kind
    known += " agent" if kind == "sized" and world.policy.model is not None else ""
    known += " mapped" if kind == "agent" and is_mapped(world) else ""
    known += "" if world.sim.pace is None else " paced"
    known += "" if forecast_for(world) is None else " forecast"
    known += "" if world.sim.ledger is None else " limits"
    if known in _warm:
        return
    _warm.add(known)
    function = _RUNS.get(kind)
    versions = 1 if world.sim.pace is None or kind == "sized" or is_placed(world) else 2
    if function is not None and hasattr(function, "signatures") and not kept_on_disk(function, versions):
        print("gpusched: compiling the simulator (once after installation or upgrade) ...", file=sys.stderr, flush=True)
    away = (Outage(0, 2.0, 3.0),) if kind == "merged" else ()
    options = Options(failures=away, placement=world.rule, predictor=world.options.predictor)
    if kind == "sized":
        options = replace(options, elastic=Elastic(least=np.ones(1, np.int64), most=np.ones(1, np.int64), linear=True))
    elif is_placed(world):
        options = replace(options, network=one_node(), generic=kind == "placed walk")
    elif world.sim.pace is not None:
        options = replace(options, share=world.options.share, rates=Rates(profiles=Profiles(series={})))
    job = one_job()
    if world.sim.ledger is not None:
        job = replace(job, user=np.zeros(1, np.int64), users=("ann",))
        options = replace(options, quotas=QuotaSet(Quotas(each=Limits(jobs=1))))
    tiny = world_of(job, Pool.uniform(1, 1), world.policy, options)
    tiny, sizer = _made_ready(tiny)
    _run(tiny, log_of(tiny), kind, sizer)


def one_job() -> Trace:
    """A trace of one job with one GPU for one second: what compiling ahead of a replay needs."""
    unknown, zero, one = np.full(1, -1, np.int64), np.zeros(1), np.ones(1)
    return Trace(
        name="one job", epoch=None, ids=("1",), submit=zero, duration=one, limit=one, gpus=-unknown,
        gpu_milli=-1000 * unknown, nodes=0 * unknown, cores=unknown, memory_mib=unknown, user=unknown, group=unknown,
        model=unknown, gpu_type=unknown, depends_on=unknown, status=unknown, wait=zero,
    )  # fmt: skip


def _run(world: World, log: Log, kind: str, keeps: Sizer | Placing | Walk | None = None) -> tuple[Log, tuple[str, ...]]:
    """Runs to the end, giving the log more room where it asks for it; with the run's own notes."""
    runner = sized_run(world, keeps) if isinstance(keeps, Sizer) else _runner(world, kind, keeps)
    while runner(log) == GROW:
        log = grown(log, world.sim)
    return log, getattr(runner, "notes", ())


def _runner(world: World, kind: str, keeps: Placing | Walk | None = None) -> Callable[[Log], int]:
    """The compiled run that fits the policy."""
    sim, passes, demand, policy, options = world.sim, world.passes, world.demand, world.policy, world.options
    if isinstance(keeps, Walk):
        return lambda log: run_walk(sim, log, passes, keeps)
    if keeps is not None and kind == "placed+easy":
        easy = with_backfill(keeps)
        return lambda log: run_placed_easy(sim, log, passes, easy)
    if keeps is not None:
        return lambda log: run_placed(sim, log, passes, keeps)
    if kind == "mapped":
        return MappedRun(world)
    if kind == "agent":
        return agent_runner(world)
    if kind == "preemptive":
        levels = np.array(sorted(options.las_thresholds_gpu_s), np.float64)
        code = PREEMPTIVE_CODES[policy.order]
        plan = new_plan(world, filling=filling_of(world))
        preemptive = Preemptive(plan, code, world.restart_s, levels)
        return lambda log: run_preemptive(sim, log, passes, preemptive)
    if kind == "generic":
        queue = new_queue(world)
        return lambda log: run_generic(sim, log, passes, queue)
    waitlist = new_waitlist(demand.shape, sim.jobs["rank"], demand.queue, len(sim.dirty), kind == "strict")
    last, run = filled(LAST, 1, head=-1), _RUNS[kind]
    fixed = Fixed(waitlist, last, PLACEMENTS[world.rule], BACKFILLS[policy.backfill])
    return lambda log: run(sim, log, passes, fixed)
