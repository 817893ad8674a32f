"""A snapshot as the RLTune agent remembers it: jobs that wait, that run, and that have ended lately."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusched.agents.rltune.history import DAY_S, FACTS, Known, grouped, known_of, note_ended, note_start
from gpusched.sched.agent import Context
from gpusched.sched.state import Records, filled

KNOWS_LIMITS = ("limit", "estimate")
LEARNS = ("estimate", "oracle")


def known_of_snapshot(context: Context, knows: str) -> Known:
    """What is known at this decision: waiting jobs first (as in ``context.waiting``), then running, then ended ones."""
    snapshot = context.snapshot
    known = known_of(facts_of_snapshot(context, knows), knows in LEARNS)
    first = len(context.waiting.views)
    for i, job in enumerate(snapshot.running):
        note_start(known, first + i, job.start_time)
    if known.learns[0]:
        first += len(snapshot.running)
        for i in np.argsort([done.end_time for done in snapshot.finished], kind="stable"):
            note_ended(known, first + int(i), snapshot.finished[i].ran_s)
    return known


def facts_of_snapshot(context: Context, knows: str) -> Records:
    """What is known of these jobs, ``FACTS[jobs]`` in that order."""
    snapshot = context.snapshot
    rows: list[tuple[Any, ...]] = []  # submit, GPUs, cores, MiB, limit (0: none), user, partition, nodes
    for view in context.waiting.views:
        spec = view.spec
        asked = (spec.nodes * n for n in (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node))
        rows.append((view.submit_time, *asked, spec.time_limit_s, view.user, spec.partition, spec.nodes))
    partition = {node.name: node.partition for node in snapshot.nodes}
    for job in snapshot.running:
        parts = job.allocation.parts
        has = (sum(n) for n in zip(*((len(p.gpus), p.cores, p.memory_mib) for p in parts), strict=True))
        submit = job.start_time if job.submit_time is None else job.submit_time
        where = partition.get(parts[0].node, "")
        rows.append((submit, *has, job.expected_end - job.start_time, job.user, where, len(parts)))
    for done in snapshot.finished:
        had = (done.gpus, done.cores, done.memory_mib)
        rows.append((done.submit_time, *had, 0.0, done.user, done.partition, done.nodes))
    times, gpus, cores, memory, limits, users, partitions, nodes = map(np.array, zip(*rows, strict=True))
    user, queue = (np.unique(names, return_inverse=True)[1].reshape(-1) for names in (users, partitions))
    known = (limits > 0) & (knows in KNOWS_LIMITS)
    facts = filled(
        FACTS, len(rows), submit=times, gpus=gpus, cores=cores, memory=memory, user=user, queue=queue, started=np.nan,
        truth=np.nan, limit=np.where(known, np.log(np.where(known, limits, 1.0)), np.nan), clock=np.mod(times, DAY_S),
    )  # fmt: skip
    order = np.lexsort((np.arange(len(rows)), times))
    same = (column[order] for column in (queue, user, gpus, nodes, cores))
    facts["kind"][order], facts["burst"][order] = grouped(times[order], *same)
    return facts
