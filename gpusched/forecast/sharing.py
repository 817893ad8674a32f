"""Which jobs of a snapshot may share GPUs in a forecast, and which do: `engine.pace`, by the live table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.arrays import NodeArrays
from gpusched.sched.sharing.pairs import Party, parties_of, party
from gpusched.sched.sharing.rules import Sharer, sharer_of_running
from gpusched.sched.state import Ints, Records, filled
from gpusched.sim.engine.state import RUN, Pace, Paired
from gpusched.sim.sharing import sharing_beliefs


def sharers_of(snapshot: Snapshot, views: Sequence[PendingView]) -> dict[str, Sharer] | None:
    """Return the running jobs that share their GPUs, by id; None: none shares, nor may."""
    names = {node.name for node in snapshot.nodes if node.sharing}
    if not names or not (any(v.spec.share for v in views) or any(job.partner for job in snapshot.running)):
        return None
    found = {job.id: sharer_of_running(job) for job in snapshot.running}
    return {name: one for name, one in found.items() if one is not None and one.node in names}


def pace_of(
    snapshot: Snapshot, views: Sequence[PendingView], world: NodeArrays, sharers: Mapping[str, Sharer], jobs: Records,
    running: Ints,
) -> tuple[Pace, Paired]:  # fmt: skip
    """Return job speeds beside others, and which jobs may share.

    ``running``: each running job's index in ``jobs``, after the views. Limits bind the time that jobs run, as live.
    """
    parties: list[Party | None] = [None] * len(jobs)
    for at, one in parties_of(enumerate(views)).items():
        parties[at] = one
    places = {job.id: at for at, job in zip(running.tolist(), snapshot.running, strict=True) if job.id in sharers}
    for name, at in places.items():
        parties[at] = party(sharers[name].user, sharers[name].name, sharers[name].memory_mib)
    row, kind, lost, speed, *_ = sharing_beliefs(parties, world.nodes, snapshot.beliefs)
    runs = filled(RUN, len(jobs), rate=1.0, own=1.0, share=1.0, row=row, next=-1, mate=-1, split=-1)
    runs["limit"], runs["since"] = jobs["expected"], snapshot.now
    runs["limit"][: len(views)] *= np.array([1.0 + view.behind for view in views])
    for name, at in places.items():
        mate = places.get(sharers[name].partner, -1)
        if mate >= 0:
            runs[at]["mate"], runs[at]["split"], place = mate, mate, kind[world.row[sharers[name].node]]
            runs[at]["rate"] = speed[place, row[at], 1 + row[mate]]
    return Pace(runs, speed, kind, np.zeros(0, np.int64)), Paired(lost, row, False, np.zeros(1, np.int64))
