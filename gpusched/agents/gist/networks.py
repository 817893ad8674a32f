"""The GIST agent's inputs and networks: one small network per question, shared by all jobs and all servers.

Sizes are shares of the partition, so that one set of weights serves two servers or two hundred. Every network has a
linear part, ``base``, which can express known heuristics with a few weights: training starts from one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gpusched.agents.common.nets import Net, Reals, arrays_of, forward, net_of
from gpusched.compiled import jit
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats, Ints, PlacementRequest, QueueJobs, Releases, Requests, Resources

JOB_INPUTS = (
    "log_age", "log_limit", "log_gpus", "log_nodes", "share", "share_of_node", "cores_and_memory", "fits_now",
    "free", "waiting", "demand",
)  # fmt: skip
SERVER_INPUTS = (
    "gpus_left", "cores_left", "memory_left", "empty", "filled", "drains_in", "outlasts", "outlasted", "reserved",
    "row", "share_of_node",
)  # fmt: skip
HOLD_INPUTS = (
    "one", "late_in_the_way", "late", "in_the_way", "head", "over_shadow", "log_limit", "log_age", "share",
    "head_share", "head_log_age", "shadow_in", "free", "waiting", "breaks_empty",
)  # fmt: skip
QUESTIONS = {"job": JOB_INPUTS, "server": SERVER_INPUTS, "hold": HOLD_INPUTS}
PATIENCE_S = 7 * 86400.0
_HOUR, _FEW, _LOGS, _FAR = 3600.0, 1e-3, 4.0, 8.0


class QuestionScorer(NamedTuple):
    """The weights of one question: ``base: float32[inputs]`` and a network with one output; a score is their sum."""

    base: Reals
    net: Net


class GistWeights(NamedTuple):
    """The scorers of the three questions, and how long the agent may keep a job waiting.

    Attributes:
        job: Scores the waiting jobs; larger goes first.
        server: Scores the servers for a job; larger is better.
        hold: Above 0: the job waits although it fits.
        patience_s: A job that has waited longer is held only if EASY would hold it.
    """

    job: QuestionScorer
    server: QuestionScorer
    hold: QuestionScorer
    patience_s: float


def agent_of(arrays: Arrays, patience_s: float = PATIENCE_S) -> GistWeights:
    """Return the agent of a weights file: ``QUESTION.base [inputs]`` and the layers ``QUESTION.0.weight`` and so on.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    scorers = {}
    for name, inputs in QUESTIONS.items():
        base = arrays.get(f"{name}.base")
        if base is None or base.shape != (len(inputs),):
            found = "is missing" if base is None else f"has shape {base.shape}"
            raise ValueError(f"{name}.base {found}, and {len(inputs)} inputs are known here")
        scorers[name] = QuestionScorer(np.ascontiguousarray(base, np.float32), net_of(arrays, name, len(inputs), 1))
    return GistWeights(**scorers, patience_s=patience_s)


def heuristic(
    width: int = 8,
    seed: int = 0,
    hold: Mapping[str, float] | None = None,
    server: Mapping[str, float] | None = None,
    **job: float,
) -> Arrays:
    """Return weights with which the agent is a heuristic: the linear parts are given, the networks output 0.

    Args:
        width: Of the networks' hidden layer: its first matrix is random, the last one is 0. 0: no hidden layer.
        seed: Of the random draws.
        hold: Weights of `HOLD_INPUTS`. Default: EASY. {"one": -0.5}: no job that fits waits.
        server: Weights of `SERVER_INPUTS`. Default: best fit.
        **job: Weights of `JOB_INPUTS`. Default: WFP3, (age / limit)^3 GPUs (Tang et al., IEEE Cluster 2009), as its
            logarithm: 3 log age - 3 log limit + log gpus.
    """
    linear: dict[str, Mapping[str, float]] = {
        "job": job or {"log_age": 3.0, "log_limit": -3.0, "log_gpus": 1.0},
        "server": server or {"gpus_left": -1.0, "cores_left": -1e-2, "memory_left": -1e-4},
        "hold": hold or {"one": -0.5, "late_in_the_way": 1.0},
    }
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, inputs in QUESTIONS.items():
        arrays[f"{name}.base"] = np.array([linear[name].get(i, 0.0) for i in inputs], np.float32)
        first = rng.normal(0.0, len(inputs) ** -0.5, (width, len(inputs))).astype(np.float32)
        last = np.zeros((1, width or len(inputs)), np.float32)
        layers = [(first, np.zeros(width, np.float32))] if width else []
        arrays |= arrays_of([*layers, (last, np.zeros(1, np.float32))], name)
    return arrays


_BEST_SERVERS = {
    "gpus_left": -1.0, "cores_left": -1e-2, "memory_left": -1e-4, "empty": -0.12, "filled": 0.15, "drains_in": 0.36,
    "outlasts": 0.15, "outlasted": -0.03,
}  # fmt: skip
_SEARCH_RESULT = {"log_limit": -3.62, "log_gpus": 2.41, "share": -0.85, "share_of_node": 2.57, "server": _BEST_SERVERS}
_SKIP = {"one": -0.5}
STARTS: dict[str, dict[str, Any]] = {
    "wfp3, easy": {"log_age": 3.0, "log_limit": -3.0, "log_gpus": 1.0},
    "shortest limit, easy": {"log_limit": -1.0},
    "shortest limit, skip": {"log_limit": -1.0, "hold": _SKIP},
    "least work, easy": {"log_limit": -1.0, "log_gpus": -1.0},
    "least work, skip": {"log_limit": -1.0, "log_gpus": -1.0, "hold": _SKIP},
    "first come, easy": {"log_age": 1.0},
    "found, small": {"log_age": 3.6, "fits_now": 2.91, **_SEARCH_RESULT},
    "found, large": {"log_age": 2.2, "fits_now": 4.0, **_SEARCH_RESULT},
}
"""Starting points of the search: arguments of `heuristic`. The last two are results of earlier searches, for eight
servers and for 32 (docs/concepts/gist-at-scale.md)."""


def start(name: str, width: int, seed: int = 0) -> Arrays:
    """Return the untrained weights of one of `STARTS`; networks of ``width`` output 0 (``seed``: of random weights)."""
    return heuristic(width, seed, **STARTS[name])


@jit
def score(scorer: QuestionScorer, inputs: Reals, outputs: Reals, work: Reals) -> float:
    """Return one score: ``inputs: float32[inputs]``; ``outputs: float32[1]`` and ``work`` are buffers."""
    forward(scorer.net, inputs, outputs, work)
    total = outputs[0]
    for i in range(scorer.base.size):
        total += scorer.base[i] * inputs[i]
    return float(total)


class PartitionObservation(NamedTuple):
    """A partition at one instant.

    Attributes:
        lo, hi: Its rows. gpus: Its usable GPUs.
        free: Share of these that is free. waiting: Feasible waiting jobs. demand: GPUs they request, over ``gpus``.
        busy: Running parts. drain: ``float64[nodes]``: when the last of a node's jobs ends by its limit (0: no job).
    """

    lo: int
    hi: int
    gpus: float
    free: float
    waiting: int
    demand: float
    busy: int
    drain: Floats


@jit
def observation_of(
    resources: Resources, usable: Resources, releases: Releases, requests: Requests, jobs: QueueJobs, queue: Ints
) -> PartitionObservation:
    """Return the observation of the partition with waiting jobs ``queue: int64[waiting]``, at least one."""
    lo, hi = requests.lo[jobs.shape[queue[0]]], requests.hi[jobs.shape[queue[0]]]
    gpus = free = busy = waiting = demand = 0
    for node in range(lo, hi):
        gpus += max(usable.gpus[node], 0)
        free += max(resources.gpus[node], 0)
    drain = np.zeros(resources.gpus.size)
    for at in range(releases.used[0]):
        slot = releases.order[at]
        node = releases.node[slot]
        if lo <= node < hi:
            busy += 1
            drain[node] = max(drain[node], releases.end[slot])
    for job in queue:
        shape = jobs.shape[job]
        if jobs.feasibility[shape] == 0:
            waiting += 1
            demand += requests.parts[shape] * requests.gpus[shape]
    total_gpus = max(float(gpus), 1.0)
    return PartitionObservation(lo, hi, total_gpus, free / total_gpus, waiting, demand / total_gpus, busy, drain)


@jit
def logarithm(seconds: float) -> float:
    """Convert seconds to the networks' scale: 0 is an hour, 1 about 55 hours."""
    return float(np.log(max(seconds, 1.0) / _HOUR) / _LOGS)


@jit
def job_inputs(
    inputs: Reals,
    obs: PartitionObservation,
    usable: Resources,
    request: PlacementRequest,
    limit: float,
    age: float,
    fits: bool,
) -> None:
    """Write ``inputs`` (`JOB_INPUTS`)."""
    gpus = float(request.parts * request.gpus)
    most_gpus, most_cores, most_memory = 1, 1, 1
    for node in range(obs.lo, obs.hi):
        if usable.gpus[node] >= request.gpus:
            most_gpus = max(most_gpus, usable.gpus[node])
            most_cores = max(most_cores, usable.cores[node])
            most_memory = max(most_memory, usable.memory[node])
    node_share = request.gpus / most_gpus
    other_share = max(request.cores / most_cores, request.memory / most_memory)
    time_inputs(inputs, limit, age)
    inputs[2] = np.log(max(gpus, 0.5)) / _LOGS
    inputs[3] = np.log(float(request.parts)) / _LOGS
    inputs[4] = gpus / obs.gpus
    inputs[5] = node_share
    inputs[6] = max(other_share - node_share, 0.0)
    inputs[7] = 1.0 if fits else 0.0
    inputs[8] = obs.free
    inputs[9] = np.log1p(float(obs.waiting)) / _FAR
    inputs[10] = np.log1p(obs.demand) / _LOGS


@jit
def time_inputs(inputs: Reals, limit: float, age: float) -> None:
    """Write the inputs that differ between jobs of one shape."""
    inputs[0] = logarithm(age)
    inputs[1] = logarithm(limit)


@jit
def server_inputs(
    inputs: Reals, obs: PartitionObservation, within: Resources, resources: Resources, usable: Resources,
    reserved: bool,
    request: PlacementRequest, limit: float, now: float, node: int,
) -> None:  # fmt: skip
    """Write ``inputs`` (`SERVER_INPUTS`): the node as it would be with one part of the job.

    ``within``: the part of ``resources`` available to the job; less if the head of the queue has a reservation.
    """
    left = within.gpus[node] - request.gpus
    drains = obs.drain[node] - now if obs.drain[node] > 0 else 0.0
    log_ratio = logarithm(limit) - logarithm(drains)
    inputs[0] = left / 8.0
    inputs[1] = (within.cores[node] - request.cores) / max(usable.cores[node], 1)
    inputs[2] = (within.memory[node] - request.memory) / max(usable.memory[node], 1)
    inputs[3] = 1.0 if resources.gpus[node] == usable.gpus[node] else 0.0
    inputs[4] = 1.0 if left == 0 else 0.0
    inputs[5] = logarithm(drains)
    inputs[6] = max(log_ratio, 0.0)
    inputs[7] = max(-log_ratio, 0.0)
    inputs[8] = 1.0 if reserved else 0.0
    inputs[9] = (node - obs.lo) / max(obs.hi - obs.lo - 1, 1)
    inputs[10] = request.gpus / max(usable.gpus[node], 1)


class Head(NamedTuple):
    """The first job that does not fit, and its reservation: share of the partition's GPUs, age, start time."""

    share: float
    age: float
    shadow: float


@jit
def hold_inputs(
    inputs: Reals, obs: PartitionObservation, head: Head, gpus: float, limit: float, age: float, now: float, late: bool,
    in_the_way: bool, breaks: bool,
) -> None:  # fmt: skip
    """Write ``inputs`` (`HOLD_INPUTS`): the job, its effect on the head, and the partition."""
    waits = head.shadow < np.inf
    until = max(head.shadow - now, 1.0) if waits else 1.0
    inputs[0] = 1.0
    inputs[1] = 1.0 if late and in_the_way else 0.0
    inputs[2] = 1.0 if late else 0.0
    inputs[3] = 1.0 if in_the_way else 0.0
    inputs[4] = 1.0 if waits else 0.0
    inputs[5] = min(max(np.log(max(limit, 1.0) / until) / _LOGS, -2.0), 2.0) if waits else 0.0
    inputs[6] = logarithm(limit)
    inputs[7] = logarithm(age)
    inputs[8] = gpus / obs.gpus
    inputs[9] = head.share
    inputs[10] = logarithm(head.age) if waits else 0.0
    inputs[11] = logarithm(until) if waits else 0.0
    inputs[12] = obs.free
    inputs[13] = np.log1p(float(obs.waiting)) / _FAR
    inputs[14] = 1.0 if breaks else 0.0
