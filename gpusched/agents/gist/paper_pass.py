"""The pass of the paper's own network over a partition's queue, the same live and in replays.

One network per partition, with an output per (flavor, server) and one per flavor for the queue; it sees the free part
of each server. As in training (`agents.common.batch`) each waiting job of a flavor is considered once, largest first.
Jobs of no flavor, and those of several nodes such as f, come after them, each on the best fit. One that has waited
longer than the agent's patience goes first and has a reservation, so that the others do not delay it for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.nets import Net, Reals, forward, net_of, new_buffers
from gpusched.agents.gist.decide import by_score, does_not_fit, reserve_for
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.backfill import attempt_any
from gpusched.sched.fit import fitting, request_of
from gpusched.sched.kernel.queue_pass import UNSOUND, queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.slicenames import profile_of
from gpusched.sched.state import (
    BACKFILL,
    BEST_FIT,
    EASY,
    POLICY,
    PRIORITY,
    SKIP,
    STARTED,
    ClusterState,
    Floats,
    Ints,
    PlacementRequest,
    Requests,
    Resources,
    Words,
    resources_of,
    seed_words,
)

DECIDES = ("masked", "paper")
"""The variants that may decide. `wait` may not: its inputs include how many jobs of the episode are still to come."""
_OVERDUE = 1e12  # a score larger than any number of GPUs


class PaperWeights(NamedTuple):
    """The network of one partition, and what it is for.

    Attributes:
        net: Inputs: free GPUs, cores and memory of each server, as shares. Outputs: see the module.
        servers: Resources of the empty servers in order, ``int64[servers]`` each.
        flavors: What a job of each flavor may request at most, ``int64[flavors]`` each; of GPUs exactly that many.
        masked: Whether invalid actions are masked; else the job waits.
        patience_s: See the module.
        rng: Of best fit, which draws nothing.
    """

    net: Net
    servers: Resources
    flavors: Resources
    masked: bool
    patience_s: float
    rng: Words


def paper_weights_of(model: TrainedModel, patience_s: float) -> PaperWeights:
    """Return the weights of a file of one of `DECIDES`.

    Raises:
        ValueError: It is of another variant, an older version wrote it, or the network has another shape.
    """
    variant = model.about.get("variant", "")
    if variant not in DECIDES:
        raise ValueError(
            f"these are weights of the {variant} variant, which must know how many jobs are still to come: "
            f"train {' or '.join(DECIDES)}, or scale"
        )
    found = [model.arrays.get(name) for name in ("servers", "flavors")]
    servers, flavors = (resources_of(np.asarray(a, np.int64).T.copy()) if _is_table(a) else None for a in found)
    if servers is None or flavors is None:
        raise ValueError("these weights do not say which servers and flavors they are for; train them again")
    count = servers.gpus.size
    net = net_of(model.arrays, "q", 3 * count, flavors.gpus.size * (count + 1))
    return PaperWeights(net, servers, flavors, variant == "masked", patience_s, seed_words(0))


def _is_table(array: np.ndarray | None) -> bool:
    return array is not None and array.ndim == 2 and array.shape[0] > 0 and array.shape[1] == 3


def check_whole(weights: PaperWeights, queue: str) -> None:
    """Check that a queue's jobs do not ask for MIG slices, of which the network knows nothing.

    Raises:
        ValueError: They do.
    """
    if profile := profile_of(queue):
        variant = "masked" if weights.masked else "paper"
        raise ValueError(
            f"these are weights of the {variant} variant, which decides about whole GPUs only, and jobs ask for MIG "
            f"slices of {profile}: train scale, or leave these jobs out"
        )


def check_size(weights: PaperWeights, total: Resources, lo: int, hi: int) -> None:
    """Check that rows ``lo <= row < hi`` of the nodes as declared are the servers that the weights are for.

    Raises:
        ValueError: They are not.
    """
    both = zip(weights.servers.columns, total.columns, strict=True)
    if all(np.array_equal(mine, column[lo:hi]) for mine, column in both):
        return
    raise ValueError(
        f"its weights are for {_servers_text(weights.servers, 0, weights.servers.gpus.size)}, and this partition has "
        f"{_servers_text(total, lo, hi)}"
    )


def _servers_text(of: Resources, lo: int, hi: int) -> str:
    """Return text such as ``2 servers (8 GPUs, 256 cores, 1048576 MiB)``."""
    rows = zip(*(column[lo:hi].tolist() for column in of.columns), strict=True)
    kinds = {f"{g} GPUs, {c} cores, {m} MiB": None for g, c, m in rows}
    return f"{hi - lo} server{'s' * (hi - lo != 1)} ({'; '.join(kinds)})"


class PaperJudge(NamedTuple):
    """The inputs of a pass.

    Attributes:
        agent: The weights. lo: The partition's first row.
        flavor: ``int64[shapes]``; -1: none. submit: ``float64[jobs]``, the clock of the pass.
        busy: ``int64[1]``: parts of jobs that run in the partition.
        inputs, outputs, work: Buffers of the network.
    """

    agent: PaperWeights
    lo: int
    flavor: Ints
    submit: Floats
    busy: Ints
    inputs: Reals
    outputs: Reals
    work: Reals


@jit
def paper_pass(
    state: ClusterState, queue: Ints, submit: Floats, priority: Ints, agent: PaperWeights, need_order: bool
) -> tuple[Ints, int, float, bool]:  # fmt: skip
    """Decide about one partition's jobs and update ``state``; arguments and result as of `decide.agent_pass`."""
    if queue.size == 0 or (not need_order and not fitting(state, queue).any()):
        return queue, -1, np.inf, True
    requests, jobs = state.requests, state.jobs
    lo, hi = requests.lo[jobs.shape[queue[0]]], requests.hi[jobs.shape[queue[0]]]
    flavor = flavors_of(requests, agent.flavors)
    if hi - lo != agent.servers.gpus.size:  # callers refuse that (`check_size`), but while they compile this pass
        flavor[:] = -1
    ordered, overdue = _largest_first(state, queue, submit, priority, flavor, agent.patience_s)
    sizes = agent.net.sizes
    judge = PaperJudge(
        agent, lo, flavor, submit, np.full(1, _running(state, lo, hi)), np.zeros(sizes[0], np.float32),
        np.zeros(sizes[sizes.size - 1], np.float32), new_buffers(agent.net),
    )  # fmt: skip
    head, shadow = _pass(state, ordered, EASY if overdue else SKIP, judge)
    return ordered, head, shadow, not np.isnan(shadow)


@jit
def flavors_of(requests: Requests, flavors: Resources) -> Ints:
    """Return each request's flavor, ``int64[shapes]``: as many GPUs, no more cores and memory; -1: none."""
    found = np.full(requests.gpus.size, -1, np.int64)
    for shape in range(found.size):
        for k in range(flavors.gpus.size):
            if (
                requests.parts[shape] == 1
                and requests.gpus[shape] == flavors.gpus[k]
                and requests.cores[shape] <= flavors.cores[k]
                and requests.memory[shape] <= flavors.memory[k]
            ):
                found[shape] = k
                break
    return found


@jit
def _largest_first(
    state: ClusterState, queue: Ints, submit: Floats, priority: Ints, flavor: Ints, patience_s: float
) -> tuple[Ints, bool]:
    """Return the queue by (priority, overdue, has a flavor, GPUs), ties in its order; and whether one is overdue."""
    scores, any_overdue = np.empty(queue.size), False
    for i in range(queue.size):
        shape = state.jobs.shape[queue[i]]
        scores[i] = state.requests.gpus[shape] if flavor[shape] >= 0 else -1.0
        if state.now - submit[queue[i]] > patience_s:
            scores[i], any_overdue = _OVERDUE, True
    return by_score(queue, scores, priority), any_overdue


@jit
def _running(state: ClusterState, lo: int, hi: int) -> int:
    """Return how many parts of jobs run in the partition."""
    releases, count = state.releases, 0
    for at in range(releases.used[0]):
        if lo <= releases.node[releases.order[at]] < hi:
            count += 1
    return count


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, judge: PaperJudge) -> tuple[int, int]:
    shape = state.jobs.shape[job]
    if judge.flavor[shape] < 0:
        return attempt_any(state, shape, BEST_FIT, late, judge.agent.rng)
    overdue = state.now - judge.submit[job] > judge.agent.patience_s
    request = request_of(state.requests, shape)
    return _choose_server(state, request, judge.flavor[shape], late, overdue, judge), shape


@jit
def _choose_server(
    state: ClusterState, request: PlacementRequest, flavor: int, late: bool, overdue: bool, judge: PaperJudge
) -> int:
    """Return STARTED with ``scratch.chosen`` set, PRIORITY (does not fit), BACKFILL, POLICY (waits), or UNSOUND."""
    agent, lo, outputs, masks = judge.agent, judge.lo, judge.outputs, state.jobs.masks
    within = state.scratch.late if late else state.resources
    servers, flavors = agent.servers.gpus.size, agent.flavors.gpus.size
    best = best_fitting = -1
    could = False
    observe_servers(state.resources, agent, lo, judge.inputs)
    forward(agent.net, judge.inputs, outputs, judge.work)
    for n in range(servers):
        q = outputs[flavor * servers + n]
        if not np.isfinite(q):
            return UNSOUND
        fits = node_fits(within, masks, request, lo + n)
        could = could or node_fits(state.resources, masks, request, lo + n)
        if fits and (best_fitting < 0 or q > outputs[flavor * servers + best_fitting]):
            best_fitting = n
        if (fits or not agent.masked) and (best < 0 or q > outputs[flavor * servers + best]):
            best = n
    if best_fitting < 0:
        return BACKFILL if could else PRIORITY
    waits = best != best_fitting or outputs[flavors * servers + flavor] > outputs[flavor * servers + best]
    # in an empty partition nothing would ever change the agent's answer; an overdue job waits for no answer
    if waits and judge.busy[0] > 0 and not overdue:
        return POLICY
    state.scratch.chosen[0] = lo + best_fitting
    return STARTED


@jit
def observe_servers(resources: Resources, agent: PaperWeights, lo: int, inputs: Reals) -> None:
    """Write the free part of each server; one that is down (-1 GPUs) looks full."""
    for n in range(agent.servers.gpus.size):
        up = resources.gpus[lo + n] >= 0
        inputs[3 * n] = resources.gpus[lo + n] / max(agent.servers.gpus[n], 1) if up else 0.0
        inputs[3 * n + 1] = resources.cores[lo + n] / max(agent.servers.cores[n], 1) if up else 0.0
        inputs[3 * n + 2] = resources.memory[lo + n] / max(agent.servers.memory[n], 1) if up else 0.0


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, judge: PaperJudge) -> None:
    judge.busy[0] += request.parts


@jit
def _hold(state: ClusterState, job: int, code: int, judge: PaperJudge) -> float:
    return reserve_for(state, job)


_pass = queue_pass(_place, _hold, _started, does_not_fit)
