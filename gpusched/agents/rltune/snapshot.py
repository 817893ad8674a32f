"""A snapshot as the RLTune agent remembers it: jobs that wait, that run, and that have ended lately."""

from __future__ import annotations

import numpy as np

from gpusched.agents.rltune.history import DAY_S, FACTS, Known, grouped, known_of, note_ended, note_start
from gpusched.agents.rltune.odds import Records
from gpusched.sched.agent import Context

KNOWS_LIMITS = ("limit", "estimate")
LEARNS = ("estimate", "oracle")

_Row = tuple[float, float, float, float, float, str, str, int, float]


def known_of_snapshot(context: Context, knows: str) -> Known:
    """What is known at this decision: waiting jobs first (as in ``context.waiting``), then running, then ended ones."""
    snapshot = context.snapshot
    facts, queues = facts_of_snapshot(context, knows)
    known = known_of(facts, queues, knows in LEARNS)
    first = len(context.waiting.views)
    for i, job in enumerate(snapshot.running):
        note_start(known, first + i, job.start_time)
    if known.learns[0]:
        first += len(snapshot.running)
        for i in np.argsort([done.end_time for done in snapshot.finished], kind="stable"):
            note_ended(known, first + int(i), snapshot.finished[i].ran_s)
    return known


def facts_of_snapshot(context: Context, knows: str) -> tuple[Records, int]:
    """What is known of these jobs, ``FACTS[jobs]`` in that order, and how many partitions they are of."""
    snapshot, waiting = context.snapshot, context.waiting
    rows: list[_Row] = []
    for view in waiting.views:
        spec = view.spec
        gpus, cores, memory = (
            spec.nodes * n for n in (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node)
        )
        rows.append(
            (view.submit_time, gpus, cores, memory, spec.time_limit_s, view.user, spec.partition, spec.nodes, 0.0)
        )
    partition = {node.name: node.partition for node in snapshot.nodes}
    for job in snapshot.running:
        parts = job.allocation.parts
        gpus, cores, memory = (sum(n) for n in zip(*((len(p.gpus), p.cores, p.memory_mib) for p in parts), strict=True))
        submit = job.start_time if job.submit_time is None else job.submit_time
        where = partition.get(parts[0].node, "")
        rows.append(
            (
                submit,
                gpus,
                cores,
                memory,
                job.expected_end - job.start_time,
                job.user,
                where,
                len(parts),
                job.start_time,
            )
        )
    for done in snapshot.finished:
        rows.append(
            (done.submit_time, done.gpus, done.cores, done.memory_mib, 0.0, done.user, done.partition, done.nodes, 0.0)
        )
    return _facts(rows, knows)


def _facts(rows: list[_Row], knows: str) -> tuple[Records, int]:
    """The jobs' facts, and how many partitions they are of."""
    submit, gpus, cores, memory, limit, users, partitions, nodes, _ = zip(*rows, strict=True)
    user, queue = (
        np.unique(np.array(names, dtype=np.str_), return_inverse=True)[1].reshape(-1) for names in (users, partitions)
    )
    facts = np.zeros(len(rows), FACTS)
    limits = np.array(limit, np.float64)
    known = (limits > 0) & (knows in KNOWS_LIMITS)
    columns = {"submit": submit, "gpus": gpus, "cores": cores, "memory": memory, "user": user, "queue": queue,
               "limit": np.where(known, np.log(np.where(known, limits, 1.0)), np.nan), "started": np.nan,
               "truth": np.nan}  # fmt: skip
    for name, column in columns.items():
        facts[name] = column
    facts["clock"] = np.mod(facts["submit"], DAY_S)
    order = np.lexsort((np.arange(len(rows)), facts["submit"]))
    same = (facts["queue"], facts["user"], facts["gpus"], np.array(nodes), facts["cores"])
    kind, burst = grouped(facts["submit"][order], *(column[order] for column in same))
    facts["kind"][order], facts["burst"][order] = kind, burst
    return facts, int(queue.max()) + 1
