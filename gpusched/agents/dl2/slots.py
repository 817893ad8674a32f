"""DL2's public setting: in every slot all jobs get new numbers of servers and workers, from an empty cluster.

A job's speed depends on these numbers only, not on placement or neighbours, and resizing is free. A job ends within its
last slot, at the fraction that it needs, and keeps its resources to the end of that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.dl2.workloads import SLOTS, Dl2Job, Dl2Workload
from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import BEFORE, NOW, SLOT_BY_SLOT, EngineRun, RoundProgress, RoundsResult, set_rate

_MAX_IDLE_SLOTS = 20  # consecutive slots without any training


class SlotJobs(NamedTuple):
    """A workload as arrays, jobs by arrival and then number.

    Attributes:
        nodes: Of `SLOTS` CPU slots and as many GPU slots each.
        kind: ``int64[jobs]``: row of ``rate`` and ``need``.
        rate: ``float64[kinds, max_tasks + 1, max_tasks + 1]``: epochs per slot with ``[servers, workers]``.
        need: ``int64[kinds, max_tasks + 1, max_tasks + 1, 2]``: CPU and GPU slots of these.
        arrival: ``int64[jobs]``: slot. epochs: ``float64[jobs]``.
    """

    nodes: int
    kind: Ints
    rate: Floats
    need: Ints
    arrival: Ints
    epochs: Floats


class SlotProgress(NamedTuple):
    """The progress of the jobs.

    Attributes:
        progress: Of each job; the unit of work is epochs.
        sizes: ``int64[jobs, 2]``: servers and workers in this slot.
        before: ``int64[jobs, 2]``: in the last slot.
        speed: ``float64[jobs]``: reported speed in the last slot, in epochs per slot; NaN: it did not run.
    """

    progress: RoundProgress
    sizes: Ints
    before: Ints
    speed: Floats


Policy = Callable[[SlotJobs, SlotProgress, Ints], None]
"""(jobs, slot_progress, active): writes ``slot_progress.sizes`` for the active jobs (``int64[...]``, by arrival); the
sizes of all others are 0."""


def kinds_in(workload: Dl2Workload) -> list[Dl2Job]:
    """Return a workload's kinds of jobs by first arrival; jobs of a kind differ in arrival and epochs only."""
    return list(dict.fromkeys(_kind(job) for job in _by_arrival(workload)))


def _by_arrival(workload: Dl2Workload) -> list[Dl2Job]:
    return sorted(workload.jobs, key=lambda job: job.arrival_slot)


def _kind(job: Dl2Job) -> Dl2Job:
    return msgspec.structs.replace(job, arrival_slot=0, epochs=1.0)


def jobs_of(workload: Dl2Workload, speeds: Mapping[str, Floats]) -> SlotJobs:
    """Return the arrays of a workload; ``speeds``: of `sim.profiles.dl2.read_speeds` for ``workload.max_tasks``.

    Raises:
        UsageError: A model has no measured speeds.
    """
    ordered, kinds, tasks = _by_arrival(workload), kinds_in(workload), np.arange(workload.max_tasks + 1)[:, None]
    if unknown := {kind.model for kind in kinds} - set(speeds):
        raise UsageError(f"no measured speed of {', '.join(sorted(unknown))}", "see --speeds")
    number = {kind: row for row, kind in enumerate(kinds)}
    return SlotJobs(
        nodes=workload.nodes,
        kind=np.array([number[_kind(job)] for job in ordered], np.int64),
        rate=np.array([speeds[kind.model] * (workload.slot_s / kind.steps_per_epoch) for kind in kinds]),
        need=np.array([(tasks * kind.server)[:, None] + tasks * kind.worker for kind in kinds], np.int64),
        arrival=np.array([job.arrival_slot for job in ordered], np.int64),
        epochs=np.array([job.epochs for job in ordered], np.float64),
    )


class SpeedChange(NamedTuple):
    """A change of speed of a kind of jobs, from a slot on."""

    slot: int
    kind: int
    factor: float


def simulate(jobs: SlotJobs, policy: Policy, restart: float = 0.0, changes: Sequence[SpeedChange] = ()) -> RoundsResult:
    """Simulate all slots until the last job has ended.

    Args:
        jobs: The workload.
        policy: Chooses the sizes of jobs.
        restart: Cost of a resize, in slots. The public setting has none.
        changes: Changes of speed. The public setting has none.

    Raises:
        UsageError: The policy leaves jobs pending for ever.
    """
    run, count, idle = EngineRun(jobs.arrival, jobs.epochs, SLOT_BY_SLOT), len(jobs.kind), 0
    sizes, before = np.zeros((2, count, 2), np.int64)
    slot_progress = SlotProgress(run.progress, sizes, before, np.full(count, np.nan))
    if changes:
        jobs = jobs._replace(rate=jobs.rate.copy())
    while run.next_round():
        active, (slot, last) = run.active, run.progress.time[[NOW, BEFORE]]
        for change in changes:
            if last < change.slot <= slot:
                jobs.rate[change.kind] *= change.factor
        before[:] = sizes
        sizes[:] = 0
        policy(jobs, slot_progress, active)
        idle = 0 if _resize(jobs, slot_progress, active, restart) or jobs.arrival[-1] > slot else idle + 1
        if idle > _MAX_IDLE_SLOTS:
            raise UsageError(f"{len(active)} jobs are left that nothing runs on {jobs.nodes} nodes")
    return run.result


@jit
def _resize(jobs: SlotJobs, slot_progress: SlotProgress, active: Ints, restart: float) -> bool:
    """Apply the sizes of a slot; return whether any job is trained."""
    any_trained = False
    for job in active:
        size, before = slot_progress.sizes[job], slot_progress.before[job]
        rate = jobs.rate[jobs.kind[job], size[0], size[1]]
        resized = size[0] != before[0] or size[1] != before[1]
        if resized or rate != slot_progress.progress.rate[job]:
            set_rate(slot_progress.progress, job, rate, restart if resized else 0.0)
        slot_progress.speed[job] = rate if size[0] > 0 and size[1] > 0 else np.nan
        any_trained |= rate > 0.0
    return any_trained


def fastest_alone(jobs: SlotJobs) -> Floats:
    """Return a lower bound on every job's JCT, ``float64[jobs]`` in slots: alone from its arrival, at its best size."""
    fits = (jobs.need <= SLOTS * jobs.nodes).all(-1)
    best = np.where(fits, jobs.rate, 0.0).max((1, 2))[jobs.kind]
    alone: Floats = np.divide(jobs.epochs, best, out=np.full(len(best), np.inf), where=best > 0)
    return alone
