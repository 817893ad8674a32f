"""When a pending job is expected to start: the stored queue, simulated forward under the live policies."""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from gpusched.client.context import Client
from gpusched.compiled import compiled_if_long, is_on_disk
from gpusched.model.forecast import ExpectedStart, Sooner, SpreadStart
from gpusched.model.jobs import JobRecord
from gpusched.model.snapshot import Snapshot
from gpusched.sched.advice import refuted
from gpusched.sched.explain import Explanation


class JobForecast(NamedTuple):
    """The forecast, the start times for nearer or wider placements, and what would start the job sooner.

    ``next_steps``: those of the explanation that the forecast confirms.
    """

    expected: ExpectedStart
    spreads: tuple[SpreadStart, ...]
    sooner: tuple[Sooner, ...]
    next_steps: tuple[str, ...]


def forecast_job(client: Client, snapshot: Snapshot, job: JobRecord, explanation: Explanation) -> JobForecast:
    """Simulate the queue forward and return the forecast for a pending job.

    The first call for a long queue after an installation or upgrade compiles for several seconds.
    """
    from gpusched.client.alternatives import alternatives_of, spreads_of
    from gpusched.forecast.assumptions import assumptions, why_never
    from gpusched.forecast.run_times import RunTimeSampler
    from gpusched.forecast.start_times import StartForecast

    pending = next(j for j in snapshot.pending if j.id == explanation.job_id)
    run_times = RunTimeSampler(client.reader.ended_runs() if client.reader else [])
    alternatives = alternatives_of(client.inventory, snapshot, pending, explanation)
    settings = client.inventory.settings
    spread_views = spreads_of(snapshot, pending)

    def simulated() -> tuple[ExpectedStart, tuple[SpreadStart, ...], tuple[Sooner, ...]]:
        forecast = StartForecast(
            snapshot, pending, run_times, alternatives, spread_views,
            half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s,
        )  # fmt: skip
        return forecast.expected(), forecast.by_spread(), forecast.sooner()

    expected, spreads, sooner = compiled_if_long(simulated, _announce_compilation)
    if expected.median is None and expected.by_limits is None:
        expected = msgspec.structs.replace(expected, never=why_never(snapshot, pending, explanation.reason))
    else:
        expected = msgspec.structs.replace(expected, assumptions=assumptions(snapshot, pending, run_times.count))
    spreads = _with_costs(client, snapshot, job, spreads)
    now = {s.what for s in sooner if s.now}  # a step may claim a start at once only where the run ahead has one
    steps = tuple(step for step in explanation.next_steps if not refuted(step, now))
    return JobForecast(expected, spreads, sooner, steps)


def _with_costs(
    client: Client, snapshot: Snapshot, job: JobRecord, spreads: tuple[SpreadStart, ...]
) -> tuple[SpreadStart, ...]:
    """Add the number of racks of each placement and its estimated slowdown."""
    if not spreads:
        return ()
    from gpusched.client.predict import cost_at

    estimates, rack_of, priced = client.reader.beliefs() if client.reader else {}, snapshot.topology.racks(), []
    for start in spreads:
        racks = len({rack_of.get(node, f" {node}") for node in start.nodes}) if rack_of else 0
        can_be_closer = racks > 1 or job.spec.max_nodes is not None  # on one node or in one rack, where it may be
        message, cost = (can_be_closer and cost_at(estimates, job, len(start.nodes), racks)) or ("", None)
        priced.append(msgspec.structs.replace(start, racks=racks, cost=cost, message=message))
    return tuple(priced)


def _announce_compilation() -> None:
    """Warn on a terminal before the forecast is compiled."""
    from gpusched.forecast.run import run_forward

    if sys.stderr.isatty() and hasattr(run_forward, "signatures") and not is_on_disk(run_forward):
        print("gpusched: compiling the forecast (once after installation or upgrade) ...", file=sys.stderr, flush=True)
