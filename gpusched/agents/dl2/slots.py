"""DL2's public setting: in every slot all jobs are given new numbers of servers and workers, from an empty cluster.

Nothing but these numbers matters for a job's speed: neither placement nor neighbours, and resizing costs nothing. A job
ends within its last slot, at the fraction that it needs, and holds what it has to the end of that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.workloads import SLOTS, Workload
from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.sched.state import Floats, Ints


class Jobs(NamedTuple):
    """A workload as arrays, jobs by arrival and then number.

    Attributes:
        nodes: Of `SLOTS` CPU slots and as many GPU slots each.
        kind: ``int64[jobs]``: row of ``rate``.
        rate: ``float64[kinds, most + 1, most + 1]``: epochs a slot with ``[servers, workers]``.
        arrival: ``int64[jobs]``: slot. epochs: ``float64[jobs]``.
        worker, server: ``int64[jobs, 2]``: CPU and GPU slots of a task.
    """

    nodes: int
    kind: Ints
    rate: Floats
    arrival: Ints
    epochs: Floats
    worker: Ints
    server: Ints


class Course(NamedTuple):
    """What became of the jobs so far.

    Attributes:
        done: ``float64[jobs]``: epochs.
        end: ``float64[jobs]``: slot and fraction; NaN before.
        sizes: ``int64[jobs, 2]``: servers and workers in this slot.
    """

    done: Floats
    end: Floats
    sizes: Ints


class Played(NamedTuple):
    """Figures of one run, in slots. jct: ``float64[jobs]``, from the beginning of the slot of arrival."""

    jct: Floats
    makespan: float


Policy = Callable[[Jobs, Course, Ints], None]
"""Writes ``course.sizes`` for the jobs that are there (``int64[...]``, by arrival); those of all others are 0."""


def jobs_of(workload: Workload, speeds: Mapping[str, Floats]) -> Jobs:
    """The arrays of a workload; ``speeds``: as `speeds.read_speeds` gives them for ``workload.max_tasks``.

    Raises:
        UsageError: A model was not measured.
    """
    ordered = sorted(workload.jobs, key=lambda job: job.arrival_slot)
    kinds = list(dict.fromkeys((job.model, job.steps_per_epoch) for job in ordered))
    if unknown := {model for model, _ in kinds} - set(speeds):
        raise UsageError(f"nothing measured says how fast {', '.join(sorted(unknown))} is", "see --speeds")
    number = {kind: row for row, kind in enumerate(kinds)}
    return Jobs(
        nodes=workload.nodes,
        kind=np.array([number[job.model, job.steps_per_epoch] for job in ordered], np.int64),
        rate=np.array([speeds[model] * (workload.slot_s / steps) for model, steps in kinds]),
        arrival=np.array([job.arrival_slot for job in ordered], np.int64),
        epochs=np.array([job.epochs for job in ordered], np.float64),
        worker=np.array([job.worker for job in ordered], np.int64),
        server=np.array([job.server for job in ordered], np.int64),
    )


def play(jobs: Jobs, policy: Policy) -> Played:
    """All slots until the last job has ended.

    Raises:
        UsageError: The policy leaves jobs that never end.
    """
    count, slot = len(jobs.kind), int(jobs.arrival[0])
    course = Course(np.zeros(count), np.full(count, np.nan), np.zeros((count, 2), np.int64))
    while np.isnan(course.end).any():
        there = np.flatnonzero(np.isnan(course.end) & (jobs.arrival <= slot))
        course.sizes[:] = 0
        policy(jobs, course, there)
        if not advance(jobs, course, there, slot) and jobs.arrival[-1] <= slot:
            raise UsageError(f"{len(there)} jobs are left that nothing runs on {jobs.nodes} nodes")
        slot += 1
    return Played(course.end - jobs.arrival, float(course.end.max()))


@jit
def advance(jobs: Jobs, course: Course, there: Ints, slot: int) -> bool:
    """One slot of training; whether anything was trained."""
    any_trained = False
    for job in there:
        rate = jobs.rate[jobs.kind[job], course.sizes[job, 0], course.sizes[job, 1]]
        if rate <= 0.0:
            continue
        any_trained = True
        left = jobs.epochs[job] - course.done[job]
        course.done[job] += rate
        if course.done[job] >= jobs.epochs[job]:
            course.end[job] = slot + left / rate
    return any_trained


def fastest_alone(jobs: Jobs) -> Floats:
    """A bound on every job's JCT, ``float64[jobs]`` in slots: alone from its arrival on, at its best size."""
    most = jobs.rate.shape[1]
    servers, workers = np.divmod(np.arange(most * most), most)
    need = (
        servers[None, :, None] * jobs.server[:, None, :] + workers[None, :, None] * jobs.worker[:, None, :]
    )  # [jobs, sizes, CPU and GPU]
    fits = (need <= SLOTS * jobs.nodes).all(2)
    best = np.where(fits, jobs.rate[jobs.kind].reshape(len(jobs.kind), -1), 0.0).max(1)
    alone: Floats = np.divide(jobs.epochs, best, out=np.full(len(best), np.inf), where=best > 0)
    return alone
