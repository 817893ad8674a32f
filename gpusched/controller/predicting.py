"""Predicting starts for the record, so that the nightly report can say how good forecasts are.

Between two cycles, never in one: of a queue frozen as it was, one run forward after the other within a small budget of
time, and when there are enough of them, one row for each job of which nothing was predicted before.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.estimation.limit_use import LimitUse
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.forecast.start_times import draws_of, quantiles
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.promotion.live import live_policies
from gpusched.queue.predictions import Prediction
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Store

BUDGET_S = 0.1  # of one pause between two cycles
PAUSE_S = 30.0  # between two batches at least; and
_REST = 20.0  # so many times as long as the last one took
_DRAWS = 10
_MOST_JOBS = 3000  # a longer queue is left alone until it is shorter: reading it alone would exceed the budget
_WORK = 2_000_000  # queue entries of one run: some hundredths of a second
_TRY_AGAIN_S = 600.0


def compile_for(snapshot: Snapshot) -> None:
    """Run it ahead a little, so that the passes that it needs are compiled and kept."""
    ahead = QueueForecast(snapshot, half_life_s=1.0, tick_s=1.0)
    ahead.run(ahead.by_limits, work=1)


class _ForecastBatch(NamedTuple):
    ahead: QueueForecast
    wanted: set[str]
    runs: list[RunTimeDraw]  # the limits first
    starts: list[npt.NDArray[np.float64]]


class StartPredictor:
    """Makes the predictions of one controller."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._compiler: subprocess.Popen[bytes] | None = None
        self._batch: _ForecastBatch | None = None
        self._spent = 0.0
        self._next = -np.inf
        self._fruitless: set[str] = set()
        self._forget_fruitless = 0.0

    def step(self, inventory: Inventory, now: float, budget_s: float = BUDGET_S) -> None:
        """Goes on with the batch, or begins one where jobs wait for the first time, for about ``budget_s``.

        A run that has begun is not broken off; it is short.
        """
        if self._compiler is not None and self._compiler.poll() is None:
            return
        begin = self._clock()
        if self._batch is None and begin >= self._next:
            self._batch = self._compiled(self._new_batch(inventory, now))
        batch = self._batch
        while batch is not None and len(batch.starts) < len(batch.runs) and self._clock() - begin < budget_s:
            fate = batch.ahead.run(batch.runs[len(batch.starts)], seed=len(batch.starts), work=_WORK)
            batch.starts.append(fate.start)
        self._spent += self._clock() - begin
        if batch is not None and len(batch.starts) == len(batch.runs):
            self._write(batch)
            self._batch, self._next = None, self._clock() + max(PAUSE_S, _REST * self._spent)
            self._spent = 0.0

    def _compiled(self, batch: _ForecastBatch | None) -> _ForecastBatch | None:
        """The batch, if its passes are there; else another process compiles them: the cluster does not wait for that.

        Where that was of no use, as nothing can be kept, they are compiled here.
        """
        if batch is None or batch.ahead.is_compiled:
            self._compiler = None
            return batch
        if self._compiler is not None:
            return batch
        null, code = subprocess.DEVNULL, f"import os, pickle, sys; os.nice(10); from {__name__} import compile_for; "
        code += "compile_for(pickle.load(sys.stdin.buffer))"
        with suppress(OSError), TemporaryFile() as given:  # no room for it now: another time
            pickle.dump(batch.ahead.snapshot, given)
            given.seek(0)
            self._compiler = subprocess.Popen([sys.executable, "-c", code], stdin=given, stdout=null, stderr=null)
        self._next = self._clock() + PAUSE_S
        return None

    def close(self) -> None:
        """Leave no process behind; what it had compiled by then is kept."""
        if self._compiler is not None:
            self._compiler.kill()
            self._compiler.wait()

    def _new_batch(self, inventory: Inventory, now: float) -> _ForecastBatch | None:
        if now >= self._forget_fruitless:
            self._fruitless, self._forget_fruitless = set(), now + _TRY_AGAIN_S
        waiting, new = self._store.unpredicted()
        wanted = set(new) - self._fruitless
        if not wanted or waiting > _MOST_JOBS:
            return None
        policies = live_policies(inventory, self._store)
        snapshot = snapshot_of_store(self._store, inventory, policies, now, whole=True)
        settings = inventory.settings
        ahead = QueueForecast(snapshot, half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s)
        habits = LimitUse(self._store.run_times())
        return _ForecastBatch(ahead, wanted, [ahead.by_limits, *draws_of(ahead, habits, _DRAWS)], [])

    def _write(self, batch: _ForecastBatch) -> None:
        found = []
        starts = np.array(batch.starts)
        arrays = {name.partition("_")[0] for name in batch.wanted if "_" in name}
        for i, view in enumerate(batch.ahead.views):
            if (view.id not in batch.wanted and view.array_id not in arrays) or view.behind:
                continue
            low, median, high = quantiles(starts[1:, i])
            by_limits = float(starts[0, i]) if np.isfinite(starts[0, i]) else None
            if low is not None and median is not None:
                made = batch.ahead.snapshot.now
                found.append(Prediction(view.id, view.spec.partition, made, median, low, high, by_limits))
        self._fruitless |= batch.wanted - {p.job_id for p in found}
        with self._store.transaction():
            self._store.put_predictions(found)
