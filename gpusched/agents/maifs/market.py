"""The joint step's inputs from a sizing question: groups of nodes, the points that jobs may have, learned speeds.

Speeds are learned from the reports of the question's jobs, for all jobs of one name, as in the setting (`beliefs`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.beliefs import prior_of
from gpusched.agents.maifs.joint import PER_GROUP, JointProblem
from gpusched.compiled import jit
from gpusched.estimation.speeds import SpeedStore, believed, learn, new_speeds
from gpusched.sched.agent import Unusable
from gpusched.sched.sizing.question import CAPACITY, Claims, Question, SizingNodes
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import Floats, Ints

_CORES, _MEMORY = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0), (0.5, 1.0, 2.0)  # levels, relative to what a job was submitted with
_LEVELS = 3  # amounts between the least and the most that a job may have, of cores and of memory
_GAIN = 1.02  # minimum speedup by more cores or memory, to be worth bidding for
_MOST_BELIEFS = 1 << 25  # covariances of speeds: 256 MiB
_RESTART_S = 30.0  # cost of a restart of a job that was never stopped


class LearnedSpeeds(NamedTuple):
    """The speeds learned for each kind of job, and the grid of their points.

    Attributes:
        store: The beliefs. kind: ``int64[n]``: of each claim.
        sizes: ``int64[sizes]``: GPUs; a shape is ``2 * size + (nodes > 1)``.
        cores, memory: ``float64[levels]``: logarithms of the levels.
        bold: Standard deviations added (optimism).
    """

    store: SpeedStore
    kind: Ints
    sizes: Ints
    cores: Floats
    memory: Floats
    bold: float


def problem_of(question: Question, bold: float) -> JointProblem:
    """Return the inputs of the joint step.

    Raises:
        Unusable: Jobs have so many sizes that what is believed of their speeds would take all memory.
    """
    claims, nodes = question.claims, question.nodes
    assert nodes is not None
    # Of names without reports all is believed alike: one kind stands for them.
    own, numbers = [name or f" {j}" for j, name in enumerate(question.names)], dict[str, int]()
    known = {own[j] for j in np.flatnonzero(claims.reported.any(axis=1)).tolist()}
    kind = np.array([numbers.setdefault(name if name in known else "", len(numbers)) for name in own], np.int64)
    sizes = np.unique(claims.sizes[claims.sizes > 0])
    ranged = bool((nodes.asks[:, :, 2:] < nodes.widest).any())
    cores, memory = (_CORES, _MEMORY) if ranged else ((1.0,), (1.0,))
    prior = prior_of(tuple((gpus, n) for gpus in sizes.tolist() for n in (1, 2)), cores, memory)
    if len(numbers) * prior.cov.size > _MOST_BELIEFS:
        raise Unusable(f"jobs of {len(numbers)} names have {len(sizes)} sizes: too many to learn their speeds")
    speeds = LearnedSpeeds(
        new_speeds(prior, len(numbers)), kind, sizes, np.log(np.array(cores)), np.log(np.array(memory)), bold
    )
    return _problem(claims, nodes, speeds, _LEVELS if ranged else 1)


@jit
def _problem(claims: Claims, nodes: SizingNodes, speeds: LearnedSpeeds, levels: int) -> JointProblem:
    (n, most), count = claims.sizes.shape, len(nodes.free)
    _learn_reports(claims, nodes, speeds)
    order, group = _groups(nodes.rack, count)
    group_of, number, node = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros((count, 3))
    for g in range(len(group) - 1):
        group_of[group[g] : group[g + 1]] = g
    for at in range(count):
        number[order[at]] = at
        node[at] = nodes.free[order[at]]
    for part in nodes.parts:
        at = number[part["node"]]
        node[at, 0] += part["gpus"]
        node[at, 1] += part["cores"]
        node[at, 2] += part["memory"]
    width = 1
    for i in range(n):
        width = max(width, nodes.last[i] - nodes.first[i], nodes.asks[i, :, 0].max())
    points = most * levels * levels + 1  # of each claim; the last is what it has
    need, spread, gpus = np.zeros((n * points, 3)), np.ones(n * points, np.int64), np.zeros(n * points, np.int64)
    option, options, speed = np.zeros((n, points), np.int64), np.zeros(n, np.int64), np.zeros((n, points))
    low, high, floor, present = np.zeros((4, n), np.int64)
    pace, work, doubt = np.zeros((3, n))
    at_nodes = np.full((n, width), -1)
    for i in range(n):
        first, last, job = nodes.first[i], nodes.last[i], claims.jobs[i]
        present[i] = -1
        if last > first:
            present[i] = now = (i + 1) * points - 1
            for s in range(first, last):
                at_nodes[i, s - first] = number[nodes.parts[s]["node"]]
            part = nodes.parts[first]
            need[now, 0], need[now, 1], need[now, 2] = part["gpus"], part["cores"], part["memory"]
            spread[now], gpus[now] = last - first, job["held"]
        low[i], high[i] = claims.sizes[i, 0], claims.sizes[i, job["count"] - 1]
        pace[i], work[i], doubt[i], floor[i] = _add_options(
            claims, nodes, speeds, i, levels, need, spread, gpus, option[i], options[i : i + 1], speed[i]
        )
    cluster = np.zeros(3)
    for r in range(3):
        cluster[r] = max(1, nodes.usable[:, r].sum())
    may = np.zeros((nodes.may.shape[0], count), np.uint8)
    for at in range(count):
        may[:, at] = nodes.may[:, order[at]]
    age, cost = claims.jobs["age_s"].copy(), claims.jobs["cost_s"].copy()
    left = claims.jobs["left_s"].copy()
    for i in range(n):
        age[i] = max(age[i], 0.0)
        cost[i] = max(cost[i], 1.0) if cost[i] > 0.0 else _RESTART_S
        left[i] = max(left[i], 1.0)
    return JointProblem(
        node, group, group_of, np.full(1, float(claims.number[CAPACITY])), need, spread,
        need * spread.reshape(-1, 1) / cluster, gpus, option, options, speed, np.arange(n), low, high, floor, present,
        pace, at_nodes, nodes.mask, may, work, age, cost, doubt, age / (age + left), claims.jobs["restarts"].copy(),
    )  # fmt: skip


@jit
def _groups(rack: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the nodes group by group, and the first of each group: racks, or else neighbours."""
    if rack.size == 0:
        groups = -(-count // PER_GROUP)
        return np.arange(count), np.arange(groups + 1) * count // groups
    order = stable_order(rack.astype(np.float64))
    first = [0]
    for at in range(1, count):
        if rack[order[at]] != rack[order[at - 1]]:
            first.append(at)
    first.append(count)
    return order, np.array(first)


@jit
def _level(levels: Floats, ratio: float) -> int:
    """Return the level nearest to a ratio."""
    best, off = 0, np.inf
    for at in range(len(levels)):
        if abs(levels[at] - np.log(max(ratio, 1e-6))) < off:
            best, off = at, abs(levels[at] - np.log(max(ratio, 1e-6)))
    return best


@jit
def _point(
    nodes: SizingNodes, speeds: LearnedSpeeds, i: int, gpus: int, spread: int, cores: float, memory: float
) -> int:  # fmt: skip
    """Return the learner's point of a claim's GPUs, nodes, and cores and MiB on each."""
    core = _level(speeds.cores, cores * spread / gpus / nodes.base[i, 0]) if nodes.base[i, 0] > 0.0 else 0
    mem = _level(speeds.memory, memory * spread / gpus / nodes.base[i, 1]) if nodes.base[i, 1] > 0.0 else 0
    shape = 2 * np.searchsorted(speeds.sizes, gpus) + (1 if spread > 1 else 0)
    return int((shape * len(speeds.cores) + core) * len(speeds.memory) + mem)


@jit
def _reported_point(claims: Claims, nodes: SizingNodes, speeds: LearnedSpeeds, i: int, k: int) -> int:
    """Return the point of a claim at one of its sizes: with what it holds, or the most that it may have."""
    gpus = claims.sizes[i, k]
    if gpus == claims.jobs[i]["held"] and nodes.last[i] > nodes.first[i]:
        part = nodes.parts[nodes.first[i]]
        return _point(nodes, speeds, i, gpus, nodes.last[i] - nodes.first[i], part["cores"], part["memory"])
    spread = max(nodes.asks[i, k, 0], 1)
    return _point(nodes, speeds, i, gpus, spread, nodes.widest[i, k, 0], nodes.widest[i, k, 1])


@jit
def _learn_reports(claims: Claims, nodes: SizingNodes, speeds: LearnedSpeeds) -> None:
    for i in range(claims.sizes.shape[0]):
        for k in range(claims.jobs[i]["count"]):
            if claims.reported[i, k] and claims.pace[i, k] > 0.0:
                point = _reported_point(claims, nodes, speeds, i, k)
                learn(speeds.store, speeds.kind[i], point, np.log(claims.pace[i, k]), 0.0)


@jit
def _own_report(claims: Claims, i: int, gpus: int) -> int:
    """Return the index of the reported size nearest to a size; -1: the claim reported none."""
    best, off = -1, np.inf
    for k in range(claims.jobs[i]["count"]):
        if claims.reported[i, k] and claims.pace[i, k] > 0.0 and abs(np.log(claims.sizes[i, k] / gpus)) < off:
            best, off = k, abs(np.log(claims.sizes[i, k] / gpus))
    return best


@jit
def _speed(
    claims: Claims, nodes: SizingNodes, speeds: LearnedSpeeds, i: int, gpus: int, point: int
) -> tuple[float, float]:  # fmt: skip
    """Return a claim's expected speed at a point, from its nearest own report, and the deviation of its logarithm."""
    value, deviation = believed(speeds.store, speeds.kind[i], point)
    own = _own_report(claims, i, gpus)
    if own >= 0:
        at = _reported_point(claims, nodes, speeds, i, own)
        value += np.log(claims.pace[i, own]) - believed(speeds.store, speeds.kind[i], at)[0]
    return np.exp(value + speeds.bold * deviation), deviation


@jit
def _add_options(
    claims: Claims, nodes: SizingNodes, speeds: LearnedSpeeds, i: int, levels: int, need: Floats, spread: Ints,
    gpus: Ints, option: Ints, options: Ints, speed: Floats,
) -> tuple[float, float, float, int]:  # fmt: skip
    """Write a claim's points and options; return its present speed, steps left, doubt and least size."""
    job, points = claims.jobs[i], len(option)
    best, total, count, least = np.zeros((levels, levels)), 0.0, 0, 0
    pace = start = 0.0
    for k in range(job["count"]):
        size, on = claims.sizes[i, k], nodes.asks[i, k, 0]
        if size == job["held"] and nodes.last[i] > nodes.first[i]:
            at, pace = (i + 1) * points - 1, claims.pace[i, k]
            option[count], speed[count] = at, pace
            count += 1
            least = size if least == 0 else least
            continue
        if k == 0:
            start = _speed(claims, nodes, speeds, i, size, _reported_point(claims, nodes, speeds, i, 0))[0]
        if not claims.allowed[i, k]:
            continue
        least = size if least == 0 else least
        if on == 0:
            continue
        best[:] = 0.0
        for c in range(levels):
            for m in range(levels):
                cores = _between(nodes.asks[i, k, 2], nodes.widest[i, k, 0], c, levels)
                memory = _between(nodes.asks[i, k, 3], nodes.widest[i, k, 1], m, levels)
                found, deviation = _speed(
                    claims, nodes, speeds, i, size, _point(nodes, speeds, i, size, on, cores, memory)
                )
                below = max(best[c - 1, m] if c > 0 else 0.0, best[c, m - 1] if m > 0 else 0.0)
                best[c, m] = max(below, found)
                if found > _GAIN * below:
                    at = i * points + (k * levels + c) * levels + m
                    need[at, 0], need[at, 1], need[at, 2] = nodes.asks[i, k, 1], cores, memory
                    spread[at], gpus[at] = on, size
                    option[count], speed[count] = at, found
                    total += deviation
                    count += 1
    options[0] = count
    return pace, max(job["left_s"], 1.0) * (pace if pace > 0.0 else start), total / max(count, 1), least


@jit
def _between(least: int, most: int, level: int, levels: int) -> float:
    """Return the amount at a level; the last is the most."""
    return float(most if level == levels - 1 else least + (most - least) * level // (levels - 1))
