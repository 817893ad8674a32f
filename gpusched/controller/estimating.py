"""Run times of waiting jobs for policies with ``order: sjf-estimate``: what the installation's predictor says.

Each job is asked about once, as of its submission, by what had ended before; the answer is kept in the store. So a
decision, ``why`` and a forecast go by the same figure, and a predictor that is trained anew changes no job that waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.estimation.predictor import USUAL_NAME, Predictor
from gpusched.model.jobs import Job
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Estimate
from gpusched.queue.store import Store
from gpusched.traces.readers.history import as_submitted


class Estimator:
    """Asks the predictor about jobs that are new in the queue.

    Where there is none in the state folder, or it cannot be used, jobs go by their limits, and that is said once.
    """

    def __init__(self, store: Store, state: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._store, self._file, self._say = store, state / USUAL_NAME, say
        self._stamp: tuple[int, int, int] | None = None
        self._predictor: Predictor | None = None
        self._said = ""

    def run(self, policies: Iterable[PolicySpec]) -> None:
        """Estimate what is new, where any of the policies asks for it."""
        if not any(policy.by_estimate for policy in policies):
            return
        new = self._store.unestimated()
        if not new or (predictor := self._read()) is None:
            return
        found = estimated(predictor, self._store.ended_runs(), new)
        with self._store.transaction():
            self._store.put_estimates(found)

    def _read(self) -> Predictor | None:
        """The predictor, read again when its file changes."""
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
        if trouble and trouble != self._said:
            self._say(f"order sjf-estimate uses time limits: {trouble}")
        self._said = trouble or ("" if self._predictor is not None else self._said)
        return self._predictor


def estimated(predictor: Predictor, ended: Iterable[Job], new: Iterable[Job]) -> list[Estimate]:
    """The median of each new job, at most its limit, by those that had ended when it was submitted."""
    waiting = {job.id: job for job in new}
    past = {job.id: job for job in ended if job.id not in waiting}
    trace = as_submitted([*past.values(), *waiting.values()])
    median = predictor.of(trace)[:, predictor.quantiles.index(0.5)]
    return [
        Estimate(job_id, min(seconds, float(waiting[job_id].spec.time_limit_s)), predictor.digest)
        for job_id, seconds in zip(trace.ids, median.tolist(), strict=True)
        if job_id in waiting
    ]
