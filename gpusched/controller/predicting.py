"""Predictions of start times, recorded so that the nightly report can state how good forecasts are.

It runs between two cycles. Of a frozen queue, forecast runs are made one by one within a small time budget. When there
are enough, one row is written for each job without a prediction.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.controller.compiling import compiler_of, end
from gpusched.estimation.draws import draws_are_compiled, warm_up_draws
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import draws_of, quantiles
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.promotion.live import live_policies
from gpusched.queue.predictions import Prediction
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Store
from gpusched.sched.slicenames import base_of

BUDGET_S = 0.1  # per pause between two cycles
PAUSE_S = 30.0  # minimum between two batches; and
_PAUSE_FACTOR = 20.0  # times the duration of the last batch
_DRAWS = 10
_MAX_JOBS = 3000  # no predictions for a longer queue: reading it alone would exceed the budget
_WORK = 2_000_000  # queue entries per run: some hundredths of a second
_RETRY_S = 600.0


def compile_for(snapshot: Snapshot) -> None:
    """Run a short forecast, with drawn run times, so that the passes it needs are compiled and cached."""
    forecast = QueueForecast(snapshot, half_life_s=1.0, tick_s=1.0)
    forecast.run(forecast.by_limits, work=1)
    warm_up_draws()


class _ForecastBatch(NamedTuple):
    forecast: QueueForecast
    job_ids: set[str]
    runs: list[RunTimeDraw]  # the limits first
    starts: list[npt.NDArray[np.float64]]


class StartPredictor:
    """Makes the start predictions of one controller."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._compiler: subprocess.Popen[bytes] | None = None
        self._batch: _ForecastBatch | None = None
        self._spent = 0.0
        self._next_batch = -np.inf
        self._unpredictable: set[str] = set()
        self._retry_at = 0.0

    def step(self, inventory: Inventory, now: float, budget_s: float = BUDGET_S) -> None:
        """Continue the batch for about ``budget_s``, or begin one if jobs are newly pending.

        A forecast run that has begun is finished; it is short.
        """
        if self._compiler is not None and self._compiler.poll() is None:
            return
        started = self._clock()
        if self._batch is None and started >= self._next_batch:
            self._batch = self._compiled(self._new_batch(inventory, now))
            if self._batch is not None:
                run_times = RunTimeSampler(self._store.ended_runs())
                self._batch.runs.extend(draws_of(self._batch.forecast, run_times, _DRAWS))
        batch = self._batch
        if batch is None:
            return
        while len(batch.starts) < len(batch.runs) and self._clock() - started < budget_s:
            result = batch.forecast.run(batch.runs[len(batch.starts)], seed=len(batch.starts), work=_WORK)
            batch.starts.append(result.start)
        self._spent += self._clock() - started
        if len(batch.starts) == len(batch.runs):
            self._write(batch)
            self._batch, self._next_batch = None, self._clock() + max(PAUSE_S, _PAUSE_FACTOR * self._spent)
            self._spent = 0.0

    def _compiled(self, batch: _ForecastBatch | None) -> _ForecastBatch | None:
        """Return the batch if its passes are compiled; otherwise compile them in another process, delaying no cycle.

        If that did not help, since nothing can be cached, they are compiled here.
        """
        if batch is None or (batch.forecast.is_compiled and draws_are_compiled()):
            self._compiler = None
            return batch
        if self._compiler is not None:
            return batch
        self._compiler = compiler_of(compile_for, batch.forecast.snapshot)
        self._next_batch = self._clock() + PAUSE_S
        return None

    def close(self) -> None:
        """Stop the compiling process; what it has compiled is kept."""
        end(self._compiler)

    def _new_batch(self, inventory: Inventory, now: float) -> _ForecastBatch | None:
        if now >= self._retry_at:
            self._unpredictable, self._retry_at = set(), now + _RETRY_S
        waiting, new = self._store.unpredicted()
        job_ids = set(new) - self._unpredictable
        if not job_ids or waiting > _MAX_JOBS:
            return None
        policies = live_policies(inventory, self._store)
        snapshot = snapshot_of_store(self._store, inventory, policies, now, whole=True)
        settings = inventory.settings
        forecast = QueueForecast(snapshot, half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s)
        return _ForecastBatch(forecast, job_ids, [forecast.by_limits], [])

    def _write(self, batch: _ForecastBatch) -> None:
        found = []
        starts = np.array(batch.starts)
        arrays = {name.partition("_")[0] for name in batch.job_ids if "_" in name}
        for i, view in enumerate(batch.forecast.views):
            if (view.id not in batch.job_ids and view.array_id not in arrays) or view.behind:
                continue
            low, median, high = quantiles(starts[1:, i])
            by_limits = float(starts[0, i]) if np.isfinite(starts[0, i]) else None
            if low is not None and median is not None:
                made_at = batch.forecast.snapshot.now
                found.append(Prediction(view.id, base_of(view.spec.partition), made_at, median, low, high, by_limits))
        self._unpredictable |= batch.job_ids - {p.job_id for p in found}
        with self._store.transaction():
            self._store.put_predictions(found)
