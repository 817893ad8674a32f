"""The setting as arrays: nodes in groups, jobs with bounds on GPUs, their true speeds, and their progress."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.agents.maifs.joint import JointProblem
from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, SHAPES, MaifsJobClasses, needs, parts
from gpusched.agents.maifs.workloads import MaifsJobs
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import NOW, EngineRun, RoundProgress, Rounds

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
        choices: ``int64[kinds]``. pace: ``float64[kinds, points]``: steps/s at each of ``choice``.
    """

    speed: Floats
    uncertainty: Floats
    choice: Ints
    choices: Ints
    pace: Floats


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
        truth.copy(), np.zeros(kinds), np.zeros((kinds, points), np.int64), np.zeros(kinds, np.int64),
        np.zeros((kinds, points)),
    )  # fmt: skip
    for kind in range(kinds):
        choose(known, kind)
    return known


_UNLIMITED = 1e12


@jit
def problem_of(world: MaifsWorld, states: JobStates, known: SpeedEstimates, job: Ints) -> JointProblem:
    """Return the inputs of the joint step for these jobs, ``int64[n]``."""
    jobs, progress, n = world.jobs, states.progress, len(job)
    kind, point, pace, doubt = jobs.kind[job], states.point[job], np.zeros(n), np.zeros(n)
    for i in range(n):
        doubt[i] = known.uncertainty[kind[i]]
        if point[i] >= 0:
            pace[i] = known.speed[kind[i], point[i]]
    done = progress.done[job]
    return JointProblem(
        jobs.node, jobs.group, world.group_of, np.full(1, _UNLIMITED), world.need, world.spread, world.share,
        world.gpus, known.choice, known.choices, known.pace, kind, jobs.least[job], jobs.most[job],
        np.zeros(n, np.int64), point, pace, states.node[job], np.full(n, -1), np.zeros((0, 0), np.uint8),
        jobs.steps[job] - done, progress.time[NOW] - jobs.arrival[job], world.restart_s[kind], doubt,
        done / jobs.steps[job], progress.restarts[job],
    )  # fmt: skip


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
                    known.pace[kind, count] = speed[point]
                    count += 1
    known.choices[kind] = count
