"""Draws of run times of a snapshot's jobs, by the estimator of run times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gpusched.estimation.draws import fill_drawn
from gpusched.estimation.estimators import followed
from gpusched.estimation.groups import KINDS
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.state import Floats, Ints
from gpusched.traces.readers.history import as_submitted

_LEAST_S = 1.0
# The run times of jobs that are alike are unknown together: if the first of them runs long, so will the rest. With
# independent draws their sum, which a start depends on, would be known too well (benchmarks/forecasts.py).
SHARED = 0.75
_ALIKE = list(KINDS).index("user, name, GPUs")  # the narrowest of these groups and wider ones that a job is in


class RunTimeSampler:
    """Draws run times from their distributions (`estimation.quantiles`), known from jobs that have ended.

    Attributes:
        count: How many have ended. Without any, jobs are taken to run until their limits.

    ``shared``: how often a job has the draw of all jobs like it.
    """

    def __init__(self, past: Sequence[JobRecord], shared: float = SHARED) -> None:
        self._past, self._shared, self.count = past, shared, len(past)

    def draw(self, rng: np.random.Generator, snapshot: Snapshot, views: Sequence[PendingView], count: int) -> Floats:
        """Draw how long the views, then the running jobs, run from now on, seconds, ``float64[count, jobs]``.

        At most their limits allow. Attempts that a time limit covers together count together.
        """
        running = snapshot.running
        most = np.array([*(view.limit_s for view in views), *(job.expected_end - snapshot.now for job in running)])
        if not self._past:
            return np.tile(np.maximum(most, _LEAST_S), (count, 1))
        records = [*_of_views(views), *_of_running(snapshot)]
        trace = as_submitted([*self._past, *records])
        _, known = followed(trace, snapshot.now - (trace.epoch or 0.0))
        place = {job_id: row for row, job_id in enumerate(trace.ids)}
        rows = np.array([place[job.id] for job in records], np.int64)
        before = [0.0 if of is None else of.had_s for of in (job.resizes for jobs in (views, running) for job in jobs)]
        ages = [0.0] * len(views) + [max(snapshot.now - job.start_time, 0.0) for job in running]
        had_s, found = np.array(before) + np.array(ages), np.empty((count, len(rows)))
        fill_drawn(known, rows, had_s, _levels(rng, known.group[rows], count, self._shared), found)
        left: Floats = np.maximum(np.minimum(found - had_s, most), _LEAST_S)
        return left


def _levels(rng: np.random.Generator, groups: Ints, count: int, part: float) -> Floats:
    """Draw a level of each job's distribution, ``float64[count, jobs]``, of a part of them that of all jobs alike."""
    alike = groups[:, _ALIKE:]
    of = alike[np.arange(len(groups)), (alike >= 0).argmax(1)]
    levels, shared = rng.random((count, len(groups))), rng.random((count, int(groups.max(initial=0)) + 1))
    return np.where(rng.random(levels.shape) < part, shared[:, of], levels)


def _of_views(views: Sequence[PendingView]) -> Iterator[JobRecord]:
    """Yield the views as the store has them, but each with an id of its own: a variant has that of its job."""
    for i, view in enumerate(views):
        yield JobRecord(
            id=f"w{i}", user=view.user, uid=0, spec=view.spec, state=JobState.PENDING, submit_time=view.submit_time
        )


def _of_running(snapshot: Snapshot) -> Iterator[JobRecord]:
    partition = {node.name: node.partition for node in snapshot.nodes}
    for i, view in enumerate(snapshot.running):
        start = min(view.start_time, snapshot.now)
        yield JobRecord(
            id=f"r{i}", user=view.user, uid=0, spec=view.spec or _spec_of(view, partition), state=JobState.RUNNING,
            submit_time=start if view.submit_time is None else min(view.submit_time, start), start_time=start,
        )  # fmt: skip


def _spec_of(view: RunningView, partition: dict[str, str]) -> JobSpec:
    """Return the request of a job of which only the allocation is known."""
    first = view.allocation.parts[0]
    return JobSpec(
        name="", partition=partition.get(first.node, ""), nodes=len(view.allocation.parts),
        gpus_per_node=len(first.gpus), cores_per_node=first.cores, memory_mib_per_node=first.memory_mib,
        time_limit_s=max(int(view.expected_end - view.start_time), 1),
    )  # fmt: skip
