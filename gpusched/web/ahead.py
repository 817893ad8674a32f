"""When waiting jobs are expected to start: the present queue run forward, for all of them at once.

One run in which everything lasts as long as it is expected to makes the plan that the timeline draws, in which nothing
overlaps; runs with drawn run times give each job's range, as `forecast.start_times` has them for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusched.estimation.limit_use import LimitUse
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.forecast.start_times import draws_of, quantiles
from gpusched.model.resources import Inventory
from gpusched.promotion.live import live_policies
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Reader

_DRAWS = 8
_WORK = 10_000_000  # queue entries of one run: about a tenth of a second
_NEAR_S = 4 * 86400.0  # what starts later is not told


def forecast(reader: Reader, inventory: Inventory, now: float) -> dict[str, Any]:
    """Starts of waiting jobs and ends of running ones, in Unix seconds.

    ``jobs``: of each that starts within days its median, low and high start (None: later than can be predicted); of
    those in the plan also start and end there, and the nodes. ``ends``: by running job.

    Raises:
        GpuschedError: A policy's file is not in order.
    """
    snapshot = snapshot_of_store(reader, inventory, live_policies(inventory, reader), now)
    if not snapshot.pending:
        return {"now": round(now), "jobs": {}, "ends": {}}
    settings = inventory.settings
    ahead = QueueForecast(snapshot, half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s)
    draws = draws_of(ahead, LimitUse(reader.run_times()), _DRAWS)
    starts = np.array([ahead.run(times, seed=i, work=_WORK).start for i, times in enumerate(draws)])
    usual = RunTimeDraw(
        np.median([times.lasts for times in draws], axis=0), np.median([times.ends for times in draws], axis=0)
    )
    plan = ahead.run(usual, work=_WORK).start
    jobs = {}
    for i, view in enumerate(ahead.views):
        low, median, high = quantiles(starts[:, i])
        if median is None or median > now + _NEAR_S:
            continue
        row: list[Any] = [round(median), _whole(low), _whole(high)]
        if plan[i] < now + _NEAR_S:
            row += [round(plan[i]), round(plan[i] + usual.lasts[i]), ahead.nodes_of(i)]
        jobs[view.id] = row
    ends = {job.id: round(end) for job, end in zip(snapshot.running, usual.ends.tolist(), strict=True)}
    return {"now": round(now), "jobs": jobs, "ends": ends}


def _whole(time: float | None) -> int | None:
    return None if time is None else round(time)
