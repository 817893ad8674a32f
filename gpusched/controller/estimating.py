"""Run time estimates of pending jobs for policies with ``order: sjf-estimate``, the same as in replays.

They are renewed when jobs have started or ended, and every ten minutes, since the ages of running jobs are information,
too. They are stored, so that a decision, ``why`` and a forecast use the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gpusched.estimation.estimators import HistoryEstimator, followed
from gpusched.estimation.quantiles import expected_s
from gpusched.model.jobs import JobRecord
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Estimate
from gpusched.queue.store import Store
from gpusched.traces.readers.history import as_submitted

_STALE_S = 600.0
_PAUSE_S = 10.0  # between two renewals while no job is new: one reads the last ended jobs


class EstimateWriter:
    """Estimates pending jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made_at, self._changed = -np.inf, False
        self._known: tuple[str, ...] = ()

    def run(self, policies: Iterable[PolicySpec], now: float) -> None:
        """Estimate new jobs, and renew the estimates of others, if any of the policies uses estimates."""
        if not any(policy.uses_run_time_estimates for policy in policies):
            return
        active = self._store.active()
        known = (*(job.id for job in self._store.ended_runs(1)), *(job.id for job in active))
        self._changed = self._changed or known != self._known
        self._known = known
        wait_s = _PAUSE_S if self._changed else _STALE_S
        if not 0 <= now - self._made_at < wait_s or self._store.unestimated():
            found = estimate_jobs([*self._store.ended_runs(), *active], self._store.pending_rows(), now)
            with self._store.transaction():
                self._store.put_estimates(found)
            self._made_at, self._changed = now, False


def estimate_jobs(begun: Iterable[JobRecord], pending: Sequence[JobRecord], now: float) -> list[Estimate]:
    """Return each pending job's estimate, at most its limit; tasks that share a row have their array's id.

    Args:
        begun: Jobs that have ended, or that run.
        pending: Jobs that wait.
        now: Unix seconds.
    """
    waiting = {job.id: job for job in pending}
    past = {job.id: job for job in begun if job.id not in waiting}
    if not waiting:
        return []
    trace = as_submitted([*past.values(), *waiting.values()])
    _, known = followed(trace, now - (trace.epoch or 0.0))
    found = []
    for row, job_id in enumerate(trace.ids):
        if job_id in waiting:
            job = waiting[job_id]
            name = job.array_id if job.tasks and job.array_id is not None else job_id
            found.append(Estimate(name, expected_s(known, row), HistoryEstimator.name))
    return found
