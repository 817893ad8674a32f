"""The RLTune agent's history of a snapshot's jobs, and of a replay's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpusched.agents.rltune.history import DAY_S, FACTS, JobHistory, group_jobs, new_job_history, note_start
from gpusched.model.slicetables import GPU_PARTS, gpus_counted
from gpusched.sched.agent import Context
from gpusched.sched.state import WHOLE, Records, filled

if TYPE_CHECKING:
    from gpusched.sim.engine.build import SimWorld

Column = npt.NDArray[Any]
_KNOWS_LIMITS = ("limit", "estimate")


def known_of_snapshot(context: Context, knows: str) -> JobHistory:
    """Return the history at this decision: waiting jobs first (as in ``context.waiting``), then running, then ended."""
    known = new_job_history(facts_of_snapshot(context, knows))
    for i, job in enumerate(context.snapshot.running, len(context.waiting.views)):
        note_start(known, i, job.start_time)
    return known


def facts_of_world(world: SimWorld, knows: str) -> Records:
    """Return the facts of a replay's jobs before any run, ``FACTS[jobs]``."""
    from gpusched.sim.slicing import parts_by_job  # live decisions import nothing of replays

    trace, demand = world.trace, world.demand
    shape, runs = demand.shape, demand.shape >= 0
    owner = trace.user if (trace.user >= 0).any() else trace.group
    queue, *asked = np.zeros((4, len(trace)), np.int64)
    for column, of in zip((queue, *asked), (demand.queue, *demand.requests[3:6]), strict=True):
        column[runs] = of[shape[runs]]
    gpus, cores, memory = (demand.parts * of for of in asked)
    share = parts_by_job(trace) / GPU_PARTS
    own_gpus = gpus * demand.job_milli / WHOLE
    facts = _facts(knows, trace.submit, own_gpus, cores, memory, trace.limit, owner, queue, demand.parts, share)
    facts["clock"] = np.mod(trace.submit + (trace.epoch or 0.0), DAY_S)
    return facts


def facts_of_snapshot(context: Context, knows: str) -> Records:
    """Return the facts of these jobs, ``FACTS[jobs]`` in that order."""
    snapshot = context.snapshot
    # submit, GPUs, cores, MiB, limit (0: none), user, partition, nodes, share of a GPU
    rows: list[tuple[float | str, ...]] = []
    for view in context.waiting.views:
        spec = view.spec
        asked = (spec.nodes * n for n in (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node))
        of = (spec.time_limit_s, view.user, spec.partition, spec.nodes, _share(spec.profile))
        rows.append((view.submit_time, *asked, *of))
    partition = {node.name: node.partition for node in snapshot.nodes}
    for job in snapshot.running:
        parts = job.allocation.parts
        has = (sum(n) for n in zip(*((len(p.gpus), p.cores, p.memory_mib) for p in parts), strict=True))
        submit = job.start_time if job.submit_time is None else job.submit_time
        where, share = partition.get(parts[0].node, ""), _share(job.spec.profile if job.spec is not None else "")
        rows.append((submit, *has, job.expected_end - job.start_time, job.user, where, len(parts), share))
    for done in snapshot.finished:
        had = (done.gpus, done.cores, done.memory_mib)
        rows.append((done.submit_time, *had, 0.0, done.user, done.partition, done.nodes, _share(done.profile)))
    times, gpus, cores, memory, limits, users, partitions, nodes, shares = map(np.array, zip(*rows, strict=True))
    user, queue = (np.unique(names, return_inverse=True)[1].reshape(-1) for names in (users, partitions))
    return _facts(knows, times, gpus, cores, memory, limits, user, queue, nodes, shares)


def _share(profile: str) -> float:
    return gpus_counted(1, profile)


def _facts(
    knows: str, submit: Column, gpus: Column, cores: Column, memory: Column, limit: Column, user: Column,
    queue: Column, nodes: Column, share: Column,
) -> Records:  # fmt: skip
    """Return ``FACTS[jobs]`` of jobs not running; ``limit``: not finite or 0: none, ``user``: below 0: unknown."""
    limited = np.isfinite(limit) & (limit > 0) & (knows in _KNOWS_LIMITS)
    facts = filled(
        FACTS, len(submit), submit=submit, gpus=gpus * share, share=share, cores=cores, memory=memory,
        user=np.maximum(user, 0), queue=queue, started=np.nan,
        limit=np.where(limited, np.log(np.where(limited, limit, 1.0)), np.nan),
        clock=np.mod(submit, DAY_S),
    )  # fmt: skip
    order = np.argsort(submit, kind="stable")
    same = (column[order] for column in (queue, user, gpus, nodes, cores))
    facts["kind"][order], facts["burst"][order] = group_jobs(submit[order], *same)
    return facts
