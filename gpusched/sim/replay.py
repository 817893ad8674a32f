"""`replay`: run a trace on a pool under a policy, as fast as arrays allow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gpusched.compiled import is_on_disk
from gpusched.model.limits import Limits, Quotas
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
from gpusched.sim.engine.mapped import is_mapped
from gpusched.sim.engine.state import ARRIVED, GROW, IN_SYSTEM, EventLog, grown
from gpusched.sim.placed import one_node_network
from gpusched.sim.policies import ReplayPolicy, policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles
from gpusched.sim.quotas import QuotaSet
from gpusched.sim.rates import Rates
from gpusched.sim.resizing import elastic_of
from gpusched.sim.result import ReplayResult
from gpusched.sim.runs import KINDS, RunKind, Runner
from gpusched.sim.stepper import PolicyFunction, run_function
from gpusched.traces.trace import Trace

__all__ = ["Outage", "ReplayOptions", "replay"]


def replay(trace: Trace, pool: Pool, policy: ReplayPolicy | PolicyFunction | str, **options: Any) -> ReplayResult:
    """Replay ``trace`` on ``pool`` under ``policy``. Equal inputs and seed give the same events, byte for byte.

    At one instant ends come before node events, those before arrivals, and these before decisions. A partition is
    decided at the instants at which one of its jobs arrives or ends or one of its nodes changes.

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
    world = world_of(trace, pool, policy, settings)
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


_warm: set[tuple[object, ...]] = set()


def _compile_for(world: SimWorld, kind: RunKind) -> None:
    """Compile (or load) what the replay needs before its time is taken, with a message on stderr if it is slow.

    All of it takes half a minute of one core on first use, and is kept in the cache folder after that.
    """
    if world.by_snapshot:  # by the live passes
        return
    sim, options, model = world.sim, world.options, world.policy.model
    agent = None if model is None else (model.agent, model.preempts)
    estimator = type(estimator_for(world))
    learned = options.network is not None and options.network.model.believed is not None
    known = kind, agent, is_mapped(world), sim.pace is None, world.shared, estimator, sim.ledger is None, learned
    if known in _warm:
        return
    _warm.add(known)
    loop, versions = kind.compiled, 1 if sim.pace is None else kind.versions
    if loop is not None and hasattr(loop, "signatures") and not is_on_disk(loop, versions):
        print("gpusched: compiling the simulator (once after installation or upgrade) ...", file=sys.stderr, flush=True)
    one = np.ones(1, np.int64)
    alike = ReplayOptions(
        placement=world.rule,
        estimator=options.estimator,
        share=world.shared,
        rates=None if options.rates is None else Rates(profiles=Profiles(series={})),
        elastic=None if options.elastic is None else ResizableJobs(least=one, most=one, linear=True),
        network=None if options.network is None else one_node_network(options.network),
        quotas=None if sim.ledger is None else QuotaSet(Quotas(each=Limits(jobs=1))),
    )
    tiny, run = kind.ready(world_of(one_job(), Pool.uniform(1, 1), world.policy, alike))
    to_the_end(tiny, log_of(tiny), run)


def one_job() -> Trace:
    """Return a trace of one job with one GPU for one second, to compile with ahead of a replay."""
    unknown, zero, one = np.full(1, -1, np.int64), np.zeros(1), np.ones(1)
    return Trace(
        name="one job", epoch=None, ids=("1",), submit=zero, duration=one, limit=one, gpus=-unknown,
        gpu_milli=-1000 * unknown, nodes=0 * unknown, cores=unknown, memory_mib=unknown, user=0 * unknown,
        users=("ann",), group=unknown, model=unknown, gpu_type=unknown, depends_on=unknown, status=unknown, wait=zero,
    )  # fmt: skip
