"""The setting as arrays: nodes in groups, jobs with bounds, their true speeds, and how far each has come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, SHAPES, MaifsJobClasses, needs, parts
from gpusched.agents.maifs.workloads import MaifsJobs
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import EngineRun, RoundProgress, Rounds

Bools = npt.NDArray[np.bool_]
ROUNDS = Rounds(60.0, 300.0)
"""A decision follows each arrival and end, a minute after the last one at the earliest; without these five after it."""
GAIN = 1.02
"""A point that is not this much faster than one with fewer cores or less memory is none to choose."""


class MaifsWorld(NamedTuple):
    """What does not change in a run.

    Attributes:
        jobs: The workload.
        need: ``float64[points, 3]``: GPUs, cores and GB on each node. spread: ``int64[points]``: nodes.
        whole: ``float64[points, 3]``: of the whole job, as shares of the cluster. gpus: ``int64[points]``.
        truth: ``float64[kinds, points]``: steps/s. restart_s: ``float64[kinds]``.
        group_of: ``int64[nodes]``.
    """

    jobs: MaifsJobs
    need: Floats
    spread: Ints
    whole: Floats
    gpus: Ints
    truth: Floats
    restart_s: Floats
    group_of: Ints


class JobStates(NamedTuple):
    """What became of the jobs so far, ``[jobs]``.

    Attributes:
        progress: How far each has come; work is steps, time seconds.
        point: What it has; -1: nothing. node: ``int64[jobs, 2]``, -1: none.
        since: When it began with what it has. served: GPU-seconds. told: Whether it has told its speed with that.
    """

    progress: RoundProgress
    point: Ints
    node: Ints
    since: Floats
    served: Floats
    told: Bools


class SpeedEstimates(NamedTuple):
    """What a policy goes by.

    Attributes:
        speed: ``float64[kinds, points]``: steps/s. unsure: ``float64[kinds]``: of it, as a standard deviation of logs.
        choice: ``int64[kinds, points]``: the points worth choosing, ``choices[kind]`` of them.
        choices: ``int64[kinds]``.
    """

    speed: Floats
    unsure: Floats
    choice: Ints
    choices: Ints


def world_of(jobs: MaifsJobs, kinds: MaifsJobClasses) -> MaifsWorld:
    """The arrays of a workload."""
    need = needs()
    spread: Ints = np.array([n for _, n in SHAPES])[parts()[0]]
    starts, ends = jobs.group[:-1], jobs.group[1:]
    return MaifsWorld(
        jobs=jobs, need=need, spread=spread, whole=need * spread[:, None] / jobs.node.sum(0),
        gpus=np.round(need[:, 0] * spread).astype(np.int64), truth=kinds.speed, restart_s=kinds.restart_s,
        group_of=np.repeat(np.arange(len(starts)), ends - starts),
    )  # fmt: skip


def new_run(jobs: MaifsJobs) -> tuple[EngineRun, JobStates]:
    """Nothing has happened."""
    run, count = EngineRun(jobs.arrival, jobs.steps, ROUNDS), len(jobs.arrival)
    since, served = np.zeros((2, count))
    course = JobStates(
        run.progress, np.full(count, -1), np.full((count, 2), -1), since, served, np.zeros(count, np.bool_)
    )
    return run, course


def told(truth: Floats) -> SpeedEstimates:
    """What a policy goes by that is told every speed."""
    kinds, points = truth.shape
    known = SpeedEstimates(
        truth.copy(), np.zeros(kinds), np.zeros((kinds, points), np.int64), np.zeros(kinds, np.int64)
    )
    for kind in range(kinds):
        choose(known, kind)
    return known


_CORES, _MEMORY, _SHAPES = len(CORES), len(MEMORY_GB), len(SHAPES)


@jit
def choose(known: SpeedEstimates, kind: int) -> None:
    """Finds the points of a kind that are faster than all those of the same shape with fewer cores and less memory."""
    speed, count = known.speed[kind], 0
    best = np.zeros((_CORES, _MEMORY))
    for shape in range(_SHAPES):
        for cores in range(_CORES):
            for memory in range(_MEMORY):
                point = (shape * _CORES + cores) * _MEMORY + memory
                below = 0.0
                if cores > 0:
                    below = best[cores - 1, memory]
                if memory > 0:
                    below = max(below, best[cores, memory - 1])
                best[cores, memory] = max(below, speed[point])
                if speed[point] > GAIN * below:
                    known.choice[kind, count] = point
                    count += 1
    known.choices[kind] = count
