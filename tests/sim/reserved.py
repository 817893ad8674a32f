"""Replays with reservations."""

from __future__ import annotations

import numpy as np

from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import Snapshot
from gpusched.sim.pool import Pool
from gpusched.sim.reserving import Booking
from gpusched.traces.trace import Trace
from tests.sched.worlds import NOW

POOL = Pool.uniform(4, 4)


def trace_of(snap: Snapshot, epoch: float | None = None) -> Trace:
    """The jobs of a snapshot, submitted one second after the other, which run until their time limit."""
    jobs, count = snap.pending, len(snap.pending)
    unknown, limit = np.full(count, -1, np.int64), np.array([j.spec.time_limit_s for j in jobs], np.float64)
    gpus, nodes = (np.array(c, np.int64) for c in zip(*((j.spec.gpus, j.spec.nodes) for j in jobs), strict=True))
    return Trace(
        name="t", epoch=epoch, ids=tuple(j.id for j in jobs), submit=np.zeros(count), duration=limit.copy(),
        limit=limit, gpus=gpus, gpu_milli=1000 * gpus, nodes=nodes, cores=unknown, memory_mib=unknown,
        user=np.zeros(count, np.int64), group=unknown, model=unknown, gpu_type=unknown, depends_on=unknown,
        status=unknown, wait=np.zeros(count),
    )  # fmt: skip


def bookings(ones: list[Reservation], snap: Snapshot, epoch: float = NOW) -> tuple[Booking, ...]:
    own = {one.name: frozenset(j.id for j in snap.pending if j.spec.reservation == one.name) for one in ones}
    return tuple(
        Booking(o.name, tuple(int(n[1:]) for n in o.nodes), o.begin - epoch, o.end - epoch, own[o.name]) for o in ones
    )
