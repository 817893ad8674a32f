"""Run times of waiting jobs for policies with ``order: sjf-estimate``, estimated as in replays.

Each job is asked about once, as of its submission, by what had ended before; the answer is kept in the store. So a
decision, ``why`` and a forecast go by the same figure, and a predictor that is trained anew changes no job that waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.estimation.predictor import USUAL_NAME, Estimator, LastTwo, Predictor
from gpusched.model.jobs import JobRecord
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Estimate
from gpusched.queue.store import Store
from gpusched.traces.readers.history import as_submitted


class Estimates:
    """Asks about jobs that are new in the queue: the predictor of the state folder.

    Where there is none, or it cannot be used, the mean of the user's last two run times counts, and that is said once.
    """

    def __init__(self, store: Store, state: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._store, self._file, self._say = store, state / USUAL_NAME, say
        self._stamp: tuple[int, int, int] | None = None
        self._predictor: Predictor | None = None
        self._said = ""

    def run(self, policies: Iterable[PolicySpec]) -> None:
        """Estimate what is new, where any of the policies asks for it."""
        if not any(policy.uses_run_time_estimates for policy in policies):
            return
        new = self._store.unestimated()
        if not new:
            return
        found = estimated(self._read() or LastTwo(), self._store.ended_runs(), new)
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
            self._say(f"order sjf-estimate uses users' last two run times: {trouble}")
        self._said = trouble or ("" if self._predictor is not None else self._said)
        return self._predictor


def estimated(estimator: Estimator, ended: Iterable[JobRecord], new: Iterable[JobRecord]) -> list[Estimate]:
    """What is expected of each new job, at most its limit, by those that had ended when it was submitted."""
    waiting = {job.id: job for job in new}
    past = {job.id: job for job in ended if job.id not in waiting}
    trace = as_submitted([*past.values(), *waiting.values()])
    return [
        Estimate(job_id, seconds, estimator.digest)
        for job_id, seconds in zip(trace.ids, estimator.medians(trace).tolist(), strict=True)
        if job_id in waiting
    ]
