"""The setting as arrays: nodes in groups, jobs with bounds on GPUs, their true speeds, and their progress."""

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
"""A decision follows every arrival and end, at least one minute and at most five minutes after the last decision."""
GAIN = 1.02
"""Minimum speedup of a point over those with fewer cores or less memory, to be worth choosing."""


class MaifsWorld(NamedTuple):
    """The constants of a run.

    Attributes:
        jobs: The workload.
        need: ``float64[points, 3]``: GPUs, cores and GB on each node. spread: ``int64[points]``: number of nodes.
        share: ``float64[points, 3]``: of the whole job, as shares of the cluster. gpus: ``int64[points]``.
        truth: ``float64[kinds, points]``: steps/s. restart_s: ``float64[kinds]``.
        group_of: ``int64[nodes]``.
    """

    jobs: MaifsJobs
    need: Floats
    spread: Ints
    share: Floats
    gpus: Ints
    truth: Floats
    restart_s: Floats
    group_of: Ints


class JobStates(NamedTuple):
    """The states of the jobs, ``[jobs]``.

    Attributes:
        progress: Of each job; work in steps, time in seconds.
        point: Its allocation; -1: none. node: ``int64[jobs, 2]``, -1: none.
        since: Start of this allocation. served: GPU-seconds. reported: Whether it has reported its speed with it.
    """

    progress: RoundProgress
    point: Ints
    node: Ints
    since: Floats
    served: Floats
    reported: Bools


class SpeedEstimates(NamedTuple):
    """The speeds that a policy uses.

    Attributes:
        speed: ``float64[kinds, points]``: steps/s. uncertainty: ``float64[kinds]``: standard deviation of its log.
        choice: ``int64[kinds, points]``: the points worth choosing, the first ``choices[kind]``.
        choices: ``int64[kinds]``.
    """

    speed: Floats
    uncertainty: Floats
    choice: Ints
    choices: Ints


def world_of(jobs: MaifsJobs, kinds: MaifsJobClasses) -> MaifsWorld:
    """Return the arrays of a workload."""
    need = needs()
    spread: Ints = np.array([n for _, n in SHAPES])[parts()[0]]
    starts, ends = jobs.group[:-1], jobs.group[1:]
    return MaifsWorld(
        jobs=jobs, need=need, spread=spread, share=need * spread[:, None] / jobs.node.sum(0),
        gpus=np.round(need[:, 0] * spread).astype(np.int64), truth=kinds.speed, restart_s=kinds.restart_s,
        group_of=np.repeat(np.arange(len(starts)), ends - starts),
    )  # fmt: skip


def new_run(jobs: MaifsJobs) -> tuple[EngineRun, JobStates]:
    """Return a run before any event."""
    run, count = EngineRun(jobs.arrival, jobs.steps, ROUNDS), len(jobs.arrival)
    since, served = np.zeros((2, count))
    states = JobStates(
        run.progress, np.full(count, -1), np.full((count, 2), -1), since, served, np.zeros(count, np.bool_)
    )
    return run, states


def exact_estimates(truth: Floats) -> SpeedEstimates:
    """Return the estimates of a policy that knows every speed."""
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
    """Find the points of a kind that are faster than all of the same shape with fewer cores and less memory."""
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
