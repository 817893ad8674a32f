"""Expected start times of all pending jobs: the current queue, simulated forward.

One run with expected run times makes the plan that the timeline draws, without overlaps; runs with sampled run times
give each job's range, as `forecast.start_times` does for one job.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusched.compiled import compiled_if_long
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import draws_of, quantiles
from gpusched.model.resources import Inventory, Settings
from gpusched.model.snapshot import Snapshot
from gpusched.promotion.live import live_policies
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Reader

_DRAWS = 8
_MAX_ENTRIES = 10_000_000  # queue entries of one run: about a tenth of a second
_HORIZON_S = 4 * 86400.0  # later starts are left out


def forecast(reader: Reader, inventory: Inventory, now: float) -> dict[str, Any]:
    """Return starts of pending jobs and ends of running ones, in Unix seconds.

    ``jobs``: for each that starts within days its median, low and high start (None: later than can be predicted) and,
    if it is in the plan, its start, end and nodes there. ``ends``: by running job.

    Raises:
        GpuschedError: A policy's file is invalid.
    """
    with reader.one_moment():
        snapshot = snapshot_of_store(reader, inventory, live_policies(inventory, reader), now)
    if not snapshot.pending:
        return {"now": round(now), "jobs": {}, "ends": {}}
    settings, run_times = inventory.settings, RunTimeSampler(reader.ended_runs())
    return compiled_if_long(lambda: _simulated(snapshot, settings, run_times, now))


def _simulated(snapshot: Snapshot, settings: Settings, run_times: RunTimeSampler, now: float) -> dict[str, Any]:
    """Return `forecast`'s answer for a snapshot in which jobs wait."""
    queue_forecast = QueueForecast(snapshot, half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s)
    samples = draws_of(queue_forecast, run_times, _DRAWS)
    starts = np.array([queue_forecast.run(times, seed=i, work=_MAX_ENTRIES).start for i, times in enumerate(samples)])
    expected = RunTimeDraw(
        np.median([times.lasts for times in samples], axis=0), np.median([times.ends for times in samples], axis=0)
    )
    plan = queue_forecast.run(expected, work=_MAX_ENTRIES).start
    jobs = {}
    for i, pending in enumerate(queue_forecast.views):
        low, median, high = quantiles(starts[:, i])
        if median is None or median > now + _HORIZON_S:
            continue
        row: list[Any] = [round(median), _whole(low), _whole(high)]
        if plan[i] < now + _HORIZON_S:
            row += [round(plan[i]), round(plan[i] + expected.lasts[i]), queue_forecast.nodes_of(i)]
        jobs[pending.id] = row
    ends = {job.id: round(end) for job, end in zip(snapshot.running, expected.ends.tolist(), strict=True)}
    return {"now": round(now), "jobs": jobs, "ends": ends}


def _whole(time: float | None) -> int | None:
    return None if time is None else round(time)
