"""Speeds learned by watching: what jobs tell at the allocations they had, shared by all jobs of a model.

The logarithm of a model's speed is a sum of normal variables, one for the model, one for its shape, one for its cores,
one for its memory and one for the last two together, with neighbours alike; so what was seen at one point says
something of all others (a Kalman filter without motion). What was never seen goes by the prior mean: GPUs to the power
0.8, a loss for each further node, and cores that matter up to three for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, SHAPES, parts
from gpusched.agents.maifs.world import Course, Known, World, choose
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import NOW

STEPS_S = 3.0
"""Of a model that nobody has seen, on one GPU."""
_GPU_POWER, _NODE_LOSS = 0.8, 0.1
_BASE, _SHAPE, _NODES, _CORE, _MEMORY, _BOTH = 2.0, 0.15, 0.15, 0.4, 0.15, 0.1  # standard deviations of logarithms
_NOISE = 0.05
_TERMS = 5
_OFTEN = 4  # told so often, the average is good enough


class Beliefs(NamedTuple):
    """Of every kind.

    Attributes:
        mean: ``float64[kinds, terms]``. spread: ``float64[kinds, terms, terms]``: covariance.
        term: ``int64[points, 5]``: which terms a point is the sum of.
        total: ``float64[kinds, points]``: of the logarithms told. times: ``int64[kinds, points]``.
        may: ``float64[kinds, points]``: 1 for what is possible; told when a job is submitted.
        known: What follows: what the agent goes by.
    """

    mean: Floats
    spread: Floats
    term: Ints
    total: Floats
    times: Ints
    may: Floats
    known: Known


def new_beliefs(truth: Floats, bold: float) -> Beliefs:
    """Nothing was seen.

    Args:
        truth: ``float64[kinds, points]``; only which points are possible at all is taken from it: what fits on a node,
            and a job's least memory and most GPUs, which are told when it is submitted.
        bold: Standard deviations that are added to what is believed.
    """
    mean, spread, term = prior()
    kinds, points = truth.shape
    known = Known(
        np.zeros_like(truth), np.zeros(kinds), np.zeros((kinds, points), np.int64), np.zeros(kinds, np.int64)
    )  # fmt: skip
    beliefs = Beliefs(
        np.tile(mean, (kinds, 1)), np.tile(spread, (kinds, 1, 1)), term, np.zeros_like(truth),
        np.zeros((kinds, points), np.int64), (truth > 0).astype(np.float64), known,
    )  # fmt: skip
    for kind in range(kinds):
        refresh(beliefs, kind, bold)
    return beliefs


def prior() -> tuple[Floats, Floats, Ints]:
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
    return mean, spread, term


def _walk(at: Floats, deviation: float) -> Floats:
    """Covariance of a random walk in both directions from 0."""
    alike = (at[:, None] * at[None, :]) > 0
    covariance: Floats = deviation**2 * np.where(alike, np.minimum.outer(np.abs(at), np.abs(at)), 0.0)
    return covariance + 1e-6 * np.eye(len(at))


@jit
def watch(world: World, course: Course, beliefs: Beliefs, job: Ints, bold: float) -> None:
    """Running jobs tell their speed, once for what they have, after they have run for a moment."""
    for j in job:
        point = course.point[j]
        if point >= 0 and not course.told[j] and course.progress.time[NOW] > course.since[j] + 1.0:
            course.told[j] = True
            kind = world.jobs.kind[j]
            told = np.log(world.truth[kind, point] * world.jobs.noise[j])
            if learn(beliefs, kind, point, told):
                refresh(beliefs, kind, bold)


@jit
def learn(beliefs: Beliefs, kind: int, point: int, told: float) -> bool:
    """A job of a kind told the logarithm of its speed at a point; whether what follows has changed."""
    beliefs.times[kind, point] += 1
    beliefs.total[kind, point] += told
    if beliefs.times[kind, point] > _OFTEN:
        return False
    mean, spread, term = beliefs.mean[kind], beliefs.spread[kind], beliefs.term[point]
    gain = np.zeros(len(mean))
    off, variance = told, _NOISE**2
    for t in range(_TERMS):
        off -= mean[term[t]]
        for d in range(len(mean)):
            gain[d] += spread[d, term[t]]
    for t in range(_TERMS):
        variance += gain[term[t]]
    for d in range(len(mean)):
        mean[d] += gain[d] * off / variance
    for d in range(len(mean)):
        for e in range(len(mean)):
            spread[d, e] -= gain[d] * gain[e] / variance
    return True


@jit
def refresh(beliefs: Beliefs, kind: int, bold: float) -> None:
    """What follows for a kind: speeds, and the points worth choosing."""
    known, mean, spread = beliefs.known, beliefs.mean[kind], beliefs.spread[kind]
    total, count = 0.0, 0
    for point in range(len(beliefs.term)):
        if beliefs.may[kind, point] == 0.0:
            continue
        term, value, variance = beliefs.term[point], 0.0, 0.0
        for t in range(_TERMS):
            value += mean[term[t]]
            for u in range(_TERMS):
                if t > 0 and u > 0:  # not of how fast the model is, but of how its speed depends on what it has
                    variance += spread[term[t], term[u]]
        deviation = np.sqrt(max(variance, 0.0))
        times = beliefs.times[kind, point]
        if times > 0:
            value, deviation = beliefs.total[kind, point] / times, 0.0
        total += deviation
        count += 1
        known.speed[kind, point] = np.exp(value + bold * deviation)
    known.unsure[kind] = total / max(count, 1)
    choose(known, kind)
