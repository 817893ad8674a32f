"""Job speeds: by the GPU type of their nodes, and by the jobs that share their GPUs and links; and shared GPUs.

A job's work is its recorded duration; it is done at its rate, 1 being the speed under which that was recorded. A job
over several nodes goes as fast as the slowest of them lets it. With several others on its GPU the worst pair counts,
since only pairs are measured.

Functions that every replay calls take `Sim.pace` apart: where it is None, numba compiles only what is left without it,
and replays at recorded speeds cost nothing more.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import enter, returned
from gpusched.sched.fit import with_gpus
from gpusched.sched.heaps import push, remove
from gpusched.sched.state import PlacementRequest, SharedGpus
from gpusched.sched.topology.load import Load, enter_links, leave, neighbours, rate_of, speed_of
from gpusched.sim.engine.state import IN_SYSTEM, RUNNING, UNMEASURED, Links, Pace, Paired, Sim, SizeClasses
from gpusched.sim.result import NODE_FAIL

# What every replay calls


@jit
def schedule_end(pace: Pace | None, sim: Sim, job: int, since: float) -> None:
    """Set when a starting job will end; its work starts at ``since``."""
    if pace is None:
        sim.state[job]["due"] = since + sim.state[job]["left"]
        return
    beside = join_links(sim.links, sim, job)
    _set_rate(pace, sim, job, since)
    _update_rates_on_links(sim.links, pace, sim, beside)
    run = pace.runs[job]
    if run["mate"] >= 0:
        _update_rate(pace, sim, run["mate"])
    gpu = shared_gpu(sim.resources.shared, job)
    if gpu >= 0:
        _update_rates_on_gpu(pace, sim, gpu, job)


@jit
def ends_killed(pace: Pace | None, sim: Sim, job: int) -> bool:
    """Update a job that ends; return whether its time limit killed it."""
    if pace is None:
        return bool(sim.jobs[job]["overlong"])
    _account(pace, sim, job)
    sim.jobs[job]["overlong"] = pace.runs[job]["late"]
    return bool(pace.runs[job]["late"])


@jit
def interrupt(pace: Pace | None, sim: Sim, job: int, kind: int) -> None:
    """Update a running job that is stopped; after a node failure its time starts again."""
    if pace is None:
        return
    _account(pace, sim, job)
    if kind == NODE_FAIL:
        pace.runs[job]["had"] = 0.0


@jit
def claim(pace: Pace | None, sim: Sim, job: int, request: PlacementRequest, node: int) -> PlacementRequest:
    """Return the request with the whole GPUs that a starting job takes on each node; ``node``: its first."""
    if pace is None:
        return request
    if pace.runs[job]["mate"] >= 0:
        return with_gpus(request, 0)
    request = enter(sim.resources.shared, request, job, node)
    enter_gpu(pace, sim.resources.shared, job, request.gpus)
    return request


@jit
def release(pace: Pace | None, sim: Sim, job: int, request: PlacementRequest) -> PlacementRequest:
    """Return the request with the whole GPUs that a stopped job frees."""
    if pace is None:
        return request
    _update_rates_on_links(sim.links, pace, sim, leave_links(sim.links, job))
    if pace.runs[job]["mate"] >= 0:
        return _leave_mate(pace, sim, job, request)
    gpu = shared_gpu(sim.resources.shared, job)
    if gpu >= 0:
        return _leave_gpu(pace, sim, job, gpu, request)
    return request


@jit
def work_left(pace: Pace | None, sim: Sim, job: int, restart_s: float) -> float:
    """Return a job's remaining work, in seconds at the recorded speed."""
    state = sim.state[job]
    if state["status"] != RUNNING:
        return float(state["left"])
    if pace is None:
        overhead = restart_s if state["restarts"] > 0 else 0.0
        return float(state["left"] - max(0.0, sim.clock[0] - state["start"] - overhead))
    run = pace.runs[job]
    return float(max(0.0, state["left"] - max(0.0, sim.clock[0] - run["since"]) * run["rate"]))


@jit
def elapsed_run_s(pace: Pace | None, sim: Sim, job: int, restart_s: float) -> float:
    """Return the seconds that a job has run, restarts excluded."""
    if pace is None:
        return float(sim.jobs[job]["duration"] - work_left(pace, sim, job, restart_s))
    run = pace.runs[job]
    if sim.state[job]["status"] != RUNNING:
        return float(run["had"])
    return float(run["had"] + max(0.0, sim.clock[0] - run["since"]))


@jit
def total_run_s(pace: Pace | None, sim: Sim, job: int) -> float:
    """Return the seconds that an ended job ran."""
    return float(sim.jobs[job]["duration"] if pace is None else pace.runs[job]["had"])


@jit
def extra_events(pace: Pace | None, sim: Sim, future: int) -> int:
    """Return how many extra events one instant may need: each job that comes to share GPUs logs one more."""
    if pace is None:
        return 0
    return int(sim.counter[IN_SYSTEM] + future)


# Rates


@jit
def _speed(pace: Pace, sim: Sim, job: int) -> float:
    """Return a running job's current rate."""
    row, shared = pace.runs[job]["row"], speed_on_links(sim.links, job)
    if row < 0:
        return float(pace.runs[job]["own"] * shared)
    offset, rate = sim.jobs[job]["offset"], np.inf
    for part in range(sim.shapes[sim.jobs[job]["shape"]]["parts"]):
        rate = min(rate, _speed_beside(pace, sim, job, row, pace.kind[sim.held[offset + part]]))
    return float(rate * pace.runs[job]["share"] * shared)


@jit
def _speed_beside(pace: Pace, sim: Sim, job: int, row: int, kind: int) -> float:
    """Return a job's rate on one GPU type, beside the jobs that share its GPUs now."""
    run, slowest = pace.runs[job], np.inf
    if run["mate"] >= 0:
        slowest = pace.speed[kind, row, 1 + pace.runs[run["mate"]]["row"]]
    gpu = shared_gpu(sim.resources.shared, job)
    if gpu >= 0:
        other = pace.on[gpu]
        while other >= 0:
            beside = pace.runs[other]["row"]
            if other != job and beside >= 0 and not np.isnan(pace.speed[kind, row, 1 + beside]):
                slowest = min(slowest, pace.speed[kind, row, 1 + beside])
            other = pace.runs[other]["next"]
    return float(slowest if slowest < np.inf else pace.speed[kind, row, 0])


@jit
def _set_rate(pace: Pace, sim: Sim, job: int, since: float) -> None:
    """Set the rate from ``since`` on, and when the job will complete or be killed at that rate."""
    state, run = sim.state[job], pace.runs[job]
    run["since"] = since
    run["rate"] = _speed(pace, sim, job)
    done, killed = since + state["left"] / run["rate"], since + (run["limit"] - run["had"])
    run["late"] = killed < done
    state["due"] = min(done, killed)


@jit
def _account(pace: Pace, sim: Sim, job: int) -> None:
    """Update a running job's remaining work and run time to now."""
    run = pace.runs[job]
    ran = max(0.0, sim.clock[0] - run["since"])
    sim.state[job]["left"] = max(0.0, sim.state[job]["left"] - ran * run["rate"])
    run["had"] += ran
    run["since"] = max(run["since"], sim.clock[0])


@jit
def _update_rate(pace: Pace, sim: Sim, job: int) -> None:
    """Update a running job's rate if it changed; a job that ends at this instant has no work left.

    One that a pass has put on its links starts after others of the pass.
    """
    state = sim.state[job]
    if state["status"] != RUNNING or state["due"] <= sim.clock[0] or _speed(pace, sim, job) == pace.runs[job]["rate"]:
        return
    _account(pace, sim, job)
    remove(sim.ends, job)
    _set_rate(pace, sim, job, pace.runs[job]["since"])
    push(sim.ends, sim.state[job]["due"], job)


@jit
def _update_rates_on_links(links: Links | None, pace: Pace, sim: Sim, count: int) -> None:
    """Update the rates of the first ``count`` jobs of ``links.found``."""
    if links is None:
        return
    for i in range(count):
        other = links.found[i]
        links.load.jobs[other]["speed"] = speed_of(links.model, links.load, other)
        _update_rate(pace, sim, other)


# Shared GPUs


@jit
def shared_gpu(shared: SharedGpus | None, job: int) -> int:
    """Return the GPU of which a running job has a part; -1: none."""
    return -1 if shared is None else int(shared.on[job])


@jit
def enter_gpu(pace: Pace | None, shared: SharedGpus | None, job: int, gpus: int) -> int:
    """Put a starting job beside those on the GPU of which it was given a part; return how many it takes of its node."""
    gpu = shared_gpu(shared, job)
    if pace is None:
        return gpus
    if gpu < 0:
        return gpus
    before = pace.on[gpu]
    pace.runs[job]["next"] = before
    pace.on[gpu] = job
    return 1 if before < 0 else 0


@jit
def _leave_gpu(pace: Pace, sim: Sim, job: int, gpu: int, request: PlacementRequest) -> PlacementRequest:
    if pace.on[gpu] == job:
        pace.on[gpu] = pace.runs[job]["next"]
    else:
        before = pace.on[gpu]
        while pace.runs[before]["next"] != job:
            before = pace.runs[before]["next"]
        pace.runs[before]["next"] = pace.runs[job]["next"]
    freed = returned(sim.resources.shared, sim.resources.shared, job, request.gpus)
    part_from_gpu(sim.resources.shared, job)
    pace.runs[job]["next"] = -1
    _update_rates_on_gpu(pace, sim, gpu, -1)
    return with_gpus(request, freed)


@jit
def part_from_gpu(shared: SharedGpus | None, job: int) -> None:
    """Record that a job has no part of a GPU any more."""
    if shared is not None:
        shared.on[job] = -1


@jit
def mate_of(pace: Pace | None, job: int) -> int:
    """Return the job that shares all its GPUs with a running one; -1: none."""
    return -1 if pace is None else int(pace.runs[job]["mate"])


@jit
def _leave_mate(pace: Pace, sim: Sim, job: int, request: PlacementRequest) -> PlacementRequest:
    """Separate a job from the one that shares its GPUs and keeps them."""
    mate = pace.runs[job]["mate"]
    pace.runs[job]["mate"] = -1
    pace.runs[mate]["mate"] = -1
    _mark_pair_ended(sim.pairs)
    _update_rate(pace, sim, mate)
    return with_gpus(request, max(0, request.gpus - sim.shapes[sim.jobs[mate]["shape"]]["gpus"]))


@jit
def _mark_pair_ended(pairs: Paired | None) -> None:
    if pairs is not None:
        pairs.parted[0] = 1


@jit
def _update_rates_on_gpu(pace: Pace, sim: Sim, gpu: int, newcomer: int) -> None:
    """Update the rates of jobs on a shared GPU, except ``newcomer`` (-1: none), which has just joined."""
    other = pace.on[gpu]
    while other >= 0:
        if other != newcomer:
            _update_rate(pace, sim, other)
            if newcomer >= 0 and not _is_measured(pace, sim, newcomer, other):
                sim.counter[UNMEASURED] += 1
        other = pace.runs[other]["next"]


@jit
def _is_measured(pace: Pace, sim: Sim, job: int, other: int) -> bool:
    """Return whether the slowdown of these two jobs beside each other is known on their GPU type."""
    one, two = pace.runs[job]["row"], pace.runs[other]["row"]
    if one < 0 or two < 0:
        return False
    kind = pace.kind[sim.held[sim.jobs[job]["offset"]]]
    return not (np.isnan(pace.speed[kind, one, 1 + two]) or np.isnan(pace.speed[kind, two, 1 + one]))


# Which running jobs share network links; nothing where `Sim.links` is None


@jit
def join_links(links: Links | None, sim: Sim, job: int) -> int:
    """Enter a job that starts on ``sim.held``; return how many others, in ``links.found``, may change speed.

    A pass by cost has entered its links already.
    """
    if links is None:
        return 0
    load, shape, offset = links.load, sim.shapes[sim.jobs[job]["shape"]], sim.jobs[job]["offset"]
    nodes = sim.held[offset : offset + shape["parts"]]
    if load.jobs[job]["alone"] == 0.0:
        set_class(links.sizes, load, job, shape["parts"] * shape["gpus"])
        enter_links(links.tree, links.model, load, job, nodes, shape["parts"], shape["gpus"], links.use, links.needs)
    load.jobs[job]["speed"] = speed_of(links.model, load, job)
    return neighbours(load, job, links.found)


@jit
def set_class(sizes: SizeClasses | None, load: Load, job: int, gpus: int) -> int:
    """Set what a job that is not on its links is at a size, and return its class; -1: no job changes size."""
    if sizes is None:
        return -1
    k = 0
    while sizes.of[job, k] < 0 or sizes.gpus[sizes.of[job, k]] != gpus:
        k += 1
    of, own = sizes.of[job, k], load.jobs[job]
    own["kind"], own["gpus"], own["best"] = sizes.kind[of], gpus, sizes.best[of]
    return int(of)


@jit
def leave_links(links: Links | None, job: int) -> int:
    """Remove a job that stops; return how many others, in ``links.found``, may change speed."""
    if links is None:
        return 0
    count = neighbours(links.load, job, links.found)
    leave(links.load, job)
    return count


@jit
def speed_on_links(links: Links | None, job: int) -> float:
    """Return a running job's speed on its nodes and links; 1: alone on its fastest layout."""
    if links is None:
        return 1.0
    return rate_of(links.model, links.load, job)
