"""Speeds learned by watching: what jobs tell at the allocations they had, shared by all jobs of a model.

A point's terms (`estimation.speeds`) are the model, its shape, its cores, its memory and the last two together, with
neighbours alike. What was never seen goes by the prior mean: GPUs to the power 0.8, a loss for each further node, and
cores that matter up to three for a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, SHAPES, parts
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates, choose, told
from gpusched.compiled import jit
from gpusched.estimation.speeds import SpeedPrior, SpeedStore, believed, learn, new_speeds
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import NOW

STEPS_S = 3.0
"""Of a model that nobody has seen, on one GPU."""
_GPU_POWER, _NODE_LOSS = 0.8, 0.1
_BASE, _SHAPE, _NODES, _CORE, _MEMORY, _BOTH = 2.0, 0.15, 0.15, 0.4, 0.15, 0.1  # standard deviations of logarithms


class Beliefs(NamedTuple):
    """Of every kind.

    Attributes:
        speeds: As told.
        may: ``float64[kinds, points]``: 1 for what is possible; told when a job is submitted.
        known: What follows: what the agent goes by.
    """

    speeds: SpeedStore
    may: Floats
    known: SpeedEstimates


def new_beliefs(truth: Floats, bold: float) -> Beliefs:
    """Nothing was seen.

    Args:
        truth: ``float64[kinds, points]``; only which points are possible at all is taken from it: what fits on a node,
            and a job's least memory and most GPUs, which are told when it is submitted.
        bold: Standard deviations that are added to what is believed.
    """
    beliefs = Beliefs(new_speeds(prior(), len(truth)), (truth > 0).astype(np.float64), told(np.zeros_like(truth)))
    for kind in range(len(truth)):
        refresh(beliefs, kind, bold)
    return beliefs


@cache
def prior() -> SpeedPrior:
    """Mean and covariance of the terms, and which of them every point is the sum of."""
    gpus, nodes = (np.array(column, np.float64) for column in zip(*SHAPES, strict=True))
    cores, memory = np.log(np.array(CORES) / 3.0), np.log(np.array(MEMORY_GB) / 62.5)
    both = len(CORES) * len(MEMORY_GB)
    mean = np.concatenate(
        (
            [np.log(STEPS_S)], _GPU_POWER * np.log(gpus) - _NODE_LOSS * (nodes > 1),
            np.where(cores < 0, 0.5 * cores, 0.15 * cores), np.zeros(len(MEMORY_GB) + both),
        )
    )  # fmt: skip
    blocks = (
        np.array([[_BASE**2]]),
        _SHAPE**2 * np.minimum.outer(np.log2(gpus), np.log2(gpus))
        + _NODES**2 * np.outer(nodes > 1, nodes > 1) + 1e-6 * np.eye(len(SHAPES)),
        _walk(cores, _CORE), _walk(memory, _MEMORY), _BOTH**2 * np.eye(both),
    )  # fmt: skip
    spread, at = np.zeros((len(mean), len(mean))), 0
    for block in blocks:
        spread[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    shape, core, mem = parts()
    starts = np.cumsum([0] + [len(block) for block in blocks])
    term = np.stack(
        (0 * shape, starts[1] + shape, starts[2] + core, starts[3] + mem, starts[4] + core * len(MEMORY_GB) + mem), 1
    )
    return SpeedPrior(mean, spread, term)


def _walk(at: Floats, deviation: float) -> Floats:
    """Covariance of a random walk in both directions from 0."""
    alike = (at[:, None] * at[None, :]) > 0
    covariance: Floats = deviation**2 * np.where(alike, np.minimum.outer(np.abs(at), np.abs(at)), 0.0)
    return covariance + 1e-6 * np.eye(len(at))


@jit
def watch(world: MaifsWorld, course: JobStates, beliefs: Beliefs, job: Ints, bold: float) -> None:
    """Running jobs tell their speed, once for what they have, after they have run for a moment."""
    for j in job:
        point = course.point[j]
        if point >= 0 and not course.told[j] and course.progress.time[NOW] > course.since[j] + 1.0:
            course.told[j] = True
            kind = world.jobs.kind[j]
            told = np.log(world.truth[kind, point] * world.jobs.noise[j])
            if learn(beliefs.speeds, kind, point, told, 0.0):
                refresh(beliefs, kind, bold)


@jit
def refresh(beliefs: Beliefs, kind: int, bold: float) -> None:
    """What follows for a kind: speeds, and the points worth choosing."""
    known, total, count = beliefs.known, 0.0, 0
    for point in range(beliefs.may.shape[1]):
        if beliefs.may[kind, point] > 0.0:
            value, deviation = believed(beliefs.speeds, kind, point)
            total += deviation
            count += 1
            known.speed[kind, point] = np.exp(value + bold * deviation)
    known.unsure[kind] = total / max(count, 1)
    choose(known, kind)
