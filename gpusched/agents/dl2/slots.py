"""DL2's public setting: in every slot all jobs are given new numbers of servers and workers, from an empty cluster.

Nothing but these numbers matters for a job's speed: neither placement nor neighbours, and resizing costs nothing. A job
ends within its last slot, at the fraction that it needs, and holds what it has to the end of that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.workloads import SLOTS, Workload
from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.sched.state import Floats, Ints

_PATIENCE = 20  # slots in which nothing is trained


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
        before: ``int64[jobs, 2]``: in the last one.
        speed: ``float64[jobs]``: what it told of its speed in the last slot, in epochs a slot; NaN: it did not run.
    """

    done: Floats
    end: Floats
    sizes: Ints
    before: Ints
    speed: Floats


class Played(NamedTuple):
    """Figures of one run, in slots. jct: ``float64[jobs]``, from the beginning of the slot of arrival."""

    jct: Floats
    makespan: float


Policy = Callable[[Jobs, Course, Ints], None]
"""Writes ``course.sizes`` for the jobs that are there (``int64[...]``, by arrival); those of all others are 0."""


def kinds_in(workload: Workload) -> list[tuple[str, float]]:
    """Its kinds of jobs, by model and steps of an epoch, in the order in which they arrive."""
    ordered = sorted(workload.jobs, key=lambda job: job.arrival_slot)
    return list(dict.fromkeys((job.model, job.steps_per_epoch) for job in ordered))


def jobs_of(workload: Workload, speeds: Mapping[str, Floats]) -> Jobs:
    """The arrays of a workload; ``speeds``: as `sim.profiles.dl2.read_speeds` gives them for ``workload.max_tasks``.

    Raises:
        UsageError: A model was not measured.
    """
    ordered = sorted(workload.jobs, key=lambda job: job.arrival_slot)
    kinds = kinds_in(workload)
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


class Change(NamedTuple):
    """From a slot on, a kind of job goes at another speed."""

    slot: int
    kind: int
    factor: float


def play(jobs: Jobs, policy: Policy, restart: float = 0.0, changes: Sequence[Change] = ()) -> Played:
    """All slots until the last job has ended.

    Args:
        jobs: The workload.
        policy: Who gets how much.
        restart: What a job loses that goes on with another size than it had, in slots. The public setting has none.
        changes: Of speed, on the way. The public setting has none.

    Raises:
        UsageError: The policy leaves jobs that never end.
    """
    course, slot, idle = begin(jobs), int(jobs.arrival[0]), 0
    if changes:
        jobs = jobs._replace(rate=jobs.rate.copy())
    while np.isnan(course.end).any():
        for change in changes:
            if change.slot == slot:
                jobs.rate[change.kind] *= change.factor
        there = here(jobs, course, slot)
        policy(jobs, course, there)
        idle = 0 if advance(jobs, course, there, slot, restart) or jobs.arrival[-1] > slot else idle + 1
        if idle > _PATIENCE:
            raise UsageError(f"{len(there)} jobs are left that nothing runs on {jobs.nodes} nodes")
        slot += 1
    return Played(course.end - jobs.arrival, float(course.end.max()))


def begin(jobs: Jobs) -> Course:
    """Before the first slot."""
    count = len(jobs.kind)
    sizes, before = np.zeros((count, 2), np.int64), np.zeros((count, 2), np.int64)
    return Course(np.zeros(count), np.full(count, np.nan), sizes, before, np.full(count, np.nan))


def here(jobs: Jobs, course: Course, slot: int) -> Ints:
    """The jobs of this slot, by arrival; sizes become those of the last slot, and are nothing now."""
    course.before[:] = course.sizes
    course.sizes[:] = 0
    return np.flatnonzero(np.isnan(course.end) & (jobs.arrival <= slot))


@jit
def advance(jobs: Jobs, course: Course, there: Ints, slot: int, restart: float) -> bool:
    """One slot of training; whether anything was trained. ``restart``: slots lost by going on with another size."""
    any_trained = False
    for job in there:
        size, before = course.sizes[job], course.before[job]
        rate = jobs.rate[jobs.kind[job], size[0], size[1]]
        course.speed[job] = rate if size[0] > 0 and size[1] > 0 else np.nan
        if rate <= 0.0:
            continue
        any_trained = True
        left = jobs.epochs[job] - course.done[job]
        stopped = course.done[job] > 0.0 and (size[0] != before[0] or size[1] != before[1])
        lost = restart if stopped else 0.0
        course.done[job] += rate * (1.0 - lost)
        if course.done[job] >= jobs.epochs[job]:
            course.end[job] = slot + lost + left / rate
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
