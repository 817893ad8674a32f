"""Run time estimates of pending jobs for policies with ``order: sjf-estimate``, the same as in replays.

Each job is estimated once, from the jobs that had ended when it was submitted, and the estimate is stored. So a
decision, ``why`` and a forecast use the same value, and a retrained predictor changes no pending job.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.estimation.predictor import USUAL_NAME, Estimator, LastTwo, Predictor
from gpusched.model.jobs import JobRecord
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Estimate
from gpusched.queue.store import Store
from gpusched.traces.readers.history import as_submitted

_log = logging.getLogger(__name__)


class EstimateWriter:
    """Estimates new pending jobs with the predictor in the state folder.

    Without a usable predictor, the mean of the user's last two run times is used, which is logged once.
    """

    def __init__(self, store: Store, state: Path) -> None:
        self._store, self._file = store, state / USUAL_NAME
        self._stamp: tuple[int, int, int] | None = None
        self._predictor: Predictor | None = None
        self._last_trouble = ""

    def run(self, policies: Iterable[PolicySpec]) -> None:
        """Estimate new jobs, if any of the policies uses estimates."""
        if not any(policy.uses_run_time_estimates for policy in policies):
            return
        new = self._store.unestimated()
        if not new:
            return
        found = estimate_jobs(self._read() or LastTwo(), self._store.ended_runs(), new)
        with self._store.transaction():
            self._store.put_estimates(found)

    def _read(self) -> Predictor | None:
        """Return the predictor, reloaded when its file changes."""
        trouble = ""
        try:
            status = os.stat(self._file)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._predictor, self._stamp = None, stamp
                self._predictor = Predictor.load(self._file)
        except GpuschedError as error:
            trouble = error.line()
        except OSError as error:
            self._predictor = self._stamp = None
            trouble = f"{self._file}: {error.strerror}; train it: gpusched predict --train"
        if trouble and trouble != self._last_trouble:
            _log.warning("order sjf-estimate uses users' last two run times: %s", trouble)
        self._last_trouble = trouble or ("" if self._predictor is not None else self._last_trouble)
        return self._predictor


def estimate_jobs(estimator: Estimator, ended: Iterable[JobRecord], new: Iterable[JobRecord]) -> list[Estimate]:
    """Return each new job's estimate, at most its limit, from the jobs that had ended when it was submitted."""
    pending = {job.id: job for job in new}
    past = {job.id: job for job in ended if job.id not in pending}
    trace = as_submitted([*past.values(), *pending.values()])
    return [
        Estimate(job_id, seconds, estimator.digest)
        for job_id, seconds in zip(trace.ids, estimator.medians(trace).tolist(), strict=True)
        if job_id in pending
    ]
