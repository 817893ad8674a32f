"""Speeds learned from running jobs: reports at the allocations they had, shared by all jobs of a model.

A point's terms (`estimation.speeds`) are the model, its shape, its cores, its memory and the last two together, with
neighbours correlated. Points without reports follow the prior mean: GPUs to the power 0.8, a loss for a second node,
and cores that matter up to three per GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, SHAPES
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates, choose, exact_estimates
from gpusched.compiled import jit
from gpusched.estimation.speeds import SpeedPrior, SpeedStore, believed, learn, new_speeds
from gpusched.sched.state import Floats, Ints
from gpusched.sim.rounds import NOW

STEPS_S = 3.0
"""Prior speed of a model on one GPU."""
_GPU_POWER, _NODE_LOSS = 0.8, 0.1
_BASE, _SHAPE, _NODES, _CORE, _MEMORY, _BOTH = 2.0, 0.15, 0.15, 0.4, 0.15, 0.1  # standard deviations of logarithms


class Beliefs(NamedTuple):
    """The learned speeds of every kind.

    Attributes:
        speeds: The reports.
        possible: ``float64[kinds, points]``: 1 for points that a job of the kind may have, by its submission.
        known: The resulting estimates, which the agent uses.
    """

    speeds: SpeedStore
    possible: Floats
    known: SpeedEstimates


def new_beliefs(truth: Floats, bold: float) -> Beliefs:
    """Return beliefs without reports.

    Args:
        truth: True speeds, ``float64[kinds, points]``. Only where they are 0 is used: a submission shows which points
            are impossible (too large for a node, too little memory, too many GPUs).
        bold: Optimism: how many standard deviations are added to the estimates.
    """
    beliefs = Beliefs(
        new_speeds(prior(), len(truth)), (truth > 0).astype(np.float64), exact_estimates(np.zeros_like(truth))
    )
    for kind in range(len(truth)):
        refresh(beliefs, kind, bold)
    return beliefs


def prior() -> SpeedPrior:
    """Return the prior of the setting's points."""
    cores, memory = tuple(c / 3.0 for c in CORES), tuple(m / 62.5 for m in MEMORY_GB)
    return prior_of(SHAPES, cores, memory, float(np.log(STEPS_S)))


@lru_cache(maxsize=16)  # sizes are those of the jobs there are
def prior_of(
    shapes: tuple[tuple[int, int], ...], cores: tuple[float, ...], memory: tuple[float, ...], level: float = 0.0
) -> SpeedPrior:
    """Return mean and covariance of the terms, and the terms of every point (a shape, cores and memory; see `kinds`).

    Args:
        shapes: (GPUs, nodes) of each shape.
        cores: The choices of cores per GPU, relative to a proportional share.
        memory: The same for memory.
        level: Mean logarithm of the speed on one GPU.
    """
    gpus, nodes = (np.array(column, np.float64) for column in zip(*shapes, strict=True))
    core_logs, memory_logs, both = np.log(np.array(cores)), np.log(np.array(memory)), len(cores) * len(memory)
    mean = np.concatenate(
        (
            [level], _GPU_POWER * np.log(gpus) - _NODE_LOSS * (nodes > 1),
            np.where(core_logs < 0, 0.5 * core_logs, 0.15 * core_logs), np.zeros(len(memory) + both),
        )
    )  # fmt: skip
    # Covariance, one block per group of terms: groups are independent. Each walk begins at one GPU or at the
    # proportional share, so that the further away a choice is, the less is known of it. 1e-6 keeps blocks invertible.
    blocks = (
        np.array([[_BASE**2]]),
        _SHAPE**2 * np.minimum.outer(np.log2(gpus), np.log2(gpus))
        + _NODES**2 * np.outer(nodes > 1, nodes > 1) + 1e-6 * np.eye(len(shapes)),
        _walk(core_logs, _CORE), _walk(memory_logs, _MEMORY), _BOTH**2 * np.eye(both),
    )  # fmt: skip
    spread, at = np.zeros((len(mean), len(mean))), 0
    for block in blocks:
        spread[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    # Number the points as `kinds` does: by shape, then cores, then memory.
    shape, rest = np.divmod(np.arange(len(shapes) * both), both)
    core, mem = np.divmod(rest, len(memory))
    starts = np.cumsum([0] + [len(block) for block in blocks])
    terms = (0 * shape, starts[1] + shape, starts[2] + core, starts[3] + mem, starts[4] + rest)
    return SpeedPrior(mean, spread, np.stack(terms, 1))


def _walk(at: Floats, deviation: float) -> Floats:
    """Return the covariance of a random walk in both directions from 0."""
    same_side = (at[:, None] * at[None, :]) > 0
    covariance: Floats = deviation**2 * np.where(same_side, np.minimum.outer(np.abs(at), np.abs(at)), 0.0)
    return covariance + 1e-6 * np.eye(len(at))


@jit
def record_speeds(world: MaifsWorld, states: JobStates, beliefs: Beliefs, job: Ints, bold: float) -> None:
    """Record the speed of running jobs, once per allocation, from one second after its start."""
    for j in job:
        point = states.point[j]
        if point >= 0 and not states.reported[j] and states.progress.time[NOW] > states.since[j] + 1.0:
            states.reported[j] = True
            kind = world.jobs.kind[j]
            log_speed = np.log(world.truth[kind, point] * world.jobs.noise[j])
            if learn(beliefs.speeds, kind, point, log_speed, 0.0):
                refresh(beliefs, kind, bold)


@jit
def refresh(beliefs: Beliefs, kind: int, bold: float) -> None:
    """Update the estimates of a kind: speeds, and the points worth choosing."""
    known, total, count = beliefs.known, 0.0, 0
    for point in range(beliefs.possible.shape[1]):
        if beliefs.possible[kind, point] > 0.0:
            value, deviation = believed(beliefs.speeds, kind, point)
            total += deviation
            count += 1
            known.speed[kind, point] = np.exp(value + bold * deviation)
    known.uncertainty[kind] = total / max(count, 1)
    choose(known, kind)
