"""`replay`: a trace on a pool under a policy, as fast as arrays allow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpusched.sim.cluster import Pool
from gpusched.sim.engine_build import Options, Outage, World, log_of, result_of, world_of
from gpusched.sim.engine_fast import run_merged, run_strict
from gpusched.sim.engine_generic import new_queue, run_generic
from gpusched.sim.engine_preempt import PREEMPTIVE_CODES, new_plan, run_preemptive
from gpusched.sim.engine_state import GROW, Log, grown
from gpusched.sim.engine_warm import kept_on_disk, one_job
from gpusched.sim.keys import ORDER_CODES, PLAIN
from gpusched.sim.policies import BACKFILLS, PLACEMENTS, ReplayPolicy, policy_by_name
from gpusched.sim.result import Result
from gpusched.sim.stepper import PolicyFunction, run_function
from gpusched.sim.trace import Trace
from gpusched.sim.waitlist import new_waitlist

__all__ = ["Options", "Outage", "replay"]


def replay(trace: Trace, pool: Pool, policy: ReplayPolicy | PolicyFunction | str, **options: Any) -> Result:
    """Replays ``trace`` on ``pool`` under ``policy``. Equal inputs and seed give the same events, byte for byte.

    At one instant ends come before node events, those before arrivals, and these before decisions. A partition is
    decided at the instants at which one of its jobs arrives or ends or one of its nodes changes.

    Args:
        trace: The jobs. Those that can never run are named in the result and kept out.
        pool: The nodes.
        policy: A policy, its name, or a function (see `stepper`).
        **options: See `Options`.

    Raises:
        UsageError: A placement, policy or node that does not exist; a function that starts what cannot start.
    """
    if callable(policy):
        return run_function(trace, pool, policy, Options(**options))
    policy = policy_by_name(policy) if isinstance(policy, str) else policy
    world = world_of(trace, pool, policy, Options(**options))
    log = log_of(world)
    _compile_for(world)
    begin = time.perf_counter()
    log = _run(world, log, _kind(world))
    return result_of(world, log, time.perf_counter() - begin)


_RUNS: dict[str, Callable[..., int]] = {
    "preemptive": run_preemptive,
    "generic": run_generic,
    "strict": run_strict,
    "merged": run_merged,
}
_warm: set[str] = set()


def _kind(world: World) -> str:
    """Which compiled run fits the policy."""
    if world.policy.kind == "preemptive":
        return "preemptive"
    if world.generic:
        return "generic"
    single = len(world.sim.dirty) == 1 and len(world.sim.changes) == 0
    return "strict" if world.policy.backfill == "none" and single else "merged"


def _compile_for(world: World) -> None:
    """Compiles (or loads) what the replay needs, so that its time does not count it; a word on stderr if it is slow.

    All of it takes half a minute of one core on first use, and is kept in the cache folder after that.
    """
    kind = _kind(world)
    if kind in _warm:
        return
    _warm.add(kind)
    function = _RUNS[kind]
    if hasattr(function, "signatures") and not kept_on_disk(function):
        print("gpusched: compiling the simulator, once after installation or upgrade ...", file=sys.stderr, flush=True)
    away = (Outage(0, 2.0, 3.0),) if kind == "merged" else ()
    options = Options(failures=away, placement=world.rule)
    tiny = world_of(one_job(), Pool.uniform(1, 1), world.policy, options)
    _run(tiny, log_of(tiny), kind)


def _run(world: World, log: Log, kind: str) -> Log:
    """Runs to the end, giving the log more room where it asks for it."""
    sim, runner = world.sim, _runner(world, kind)
    while runner(log) == GROW:
        log = grown(log, len(log.events), len(log.cuts) + len(sim.jobs), len(log.cut_nodes) + len(sim.held))
    return log


def _runner(world: World, kind: str) -> Callable[[Log], int]:
    """The compiled run that fits the policy."""
    sim, passes, demand, policy, options = world.sim, world.passes, world.demand, world.policy, world.options
    rule, backfill = PLACEMENTS[world.rule], BACKFILLS[policy.backfill]
    if kind == "preemptive":
        plan = new_plan(len(sim.jobs), len(sim.node), len(passes.releases.order), world.users)
        code, levels = PREEMPTIVE_CODES[policy.order], np.array(sorted(options.las_thresholds_gpu_s), np.float64)
        return lambda log: run_preemptive(sim, log, passes, plan, code, rule, options.restart_s, levels)
    if kind == "generic":
        capped = np.isfinite(world.trace.limit).astype(np.uint8)
        queue = new_queue(len(sim.jobs), len(sim.held), world.users, capped)
        order, estimates = ORDER_CODES.get(policy.order, PLAIN), policy.knows == "estimate"
        return lambda log: run_generic(sim, log, passes, queue, order, estimates, rule, backfill)
    waitlist = new_waitlist(demand.shape, sim.jobs["rank"], demand.queue, len(sim.dirty), kind == "strict")
    if kind == "strict":
        return lambda log: run_strict(sim, log, passes, waitlist, rule)
    return lambda log: run_merged(sim, log, passes, waitlist, rule, backfill)
