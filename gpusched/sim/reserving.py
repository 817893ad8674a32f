"""Reservations of nodes in replays: requests with node masks that change over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.model.reservations import Reservation
from gpusched.sched.reservations.calendar import grouped, reserved_masks, reserved_of
from gpusched.sched.state import Calendar, Floats, Ints, Requests, Resources
from gpusched.sim.pool import Demand, Pool
from gpusched.traces.trace import Trace


class Booking(NamedTuple):
    """Rows of nodes reserved from ``start`` to ``end``, seconds on the trace's clock, for jobs with these ids."""

    name: str
    nodes: tuple[int, ...]
    start: float
    end: float
    jobs: frozenset[str] = frozenset()


def bookings_of(
    reservations: Iterable[Reservation], jobs: Mapping[str, Iterable[str]], trace: Trace, pool: Pool
) -> tuple[Booking, ...]:
    """Return the bookings that concern a trace of the same cluster; ``jobs``: reservation name -> ids of its jobs."""
    if trace.epoch is None or not len(trace):
        return ()
    rows = {name: row for row, name in enumerate(pool.names)}
    last, found = float(trace.submit[-1]), list[Booking]()
    submitted = dict(zip(trace.ids, (trace.submit + trace.epoch).tolist(), strict=True))
    for one in reservations:
        nodes = tuple(rows[node] for node in one.nodes if node in rows)
        own = frozenset(job for job in jobs.get(one.name, ()) if submitted.get(job, one.end) < one.end)
        if nodes and one.end > trace.epoch and one.begin - trace.epoch <= last:
            found.append(Booking(one.name, nodes, one.begin - trace.epoch, one.end - trace.epoch, own))
    return tuple(found)


def with_reservations(
    demand: Demand, trace: Trace, pool: Pool, limit: Floats, bookings: Sequence[Booking], usable: Resources
) -> tuple[Demand, Calendar]:
    """Return the demand with a request for each relation of its jobs to reservations, before the first event.

    Args:
        demand: Of the trace.
        trace: The trace; bookings name its ids.
        pool: Its nodes.
        limit: ``float64[jobs]``: how long each may run.
        bookings: No two of a node at one time.
        usable: See `Calendar`.
    """
    ones = {i: Reservation(name=f"{i:06}", nodes=(), begin=b.start, end=b.end) for i, b in enumerate(bookings)}
    by_node = [[ones[i] for i, b in enumerate(bookings) if node in b.nodes] for node in range(len(pool))]
    reserved = reserved_of(by_node, -np.inf)
    place, own = {job: i for i, job in enumerate(trace.ids)}, np.full(len(trace), -1, np.int64)
    for i, booking in enumerate(bookings):
        own[[place[job] for job in booking.jobs if job in place]] = reserved.number.get(ones[i].name, -1)
    asks = np.flatnonzero(demand.shape >= 0)
    mask = demand.requests.mask[demand.shape[asks]] if len(demand.requests.lo) else np.zeros(0, np.int64)
    keys = np.column_stack((mask, own[asks], grouped(limit[asks])))
    rows, row = np.unique(keys, axis=0, return_inverse=True)
    shapes, shape = np.unique(np.column_stack((demand.shape[asks], row.reshape(-1))), axis=0, return_inverse=True)
    allowed = np.concatenate((demand.masks, np.ones((1, len(pool)), np.uint8)))  # -1, the last: any node
    base, own, limits = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2].astype(np.float64)
    masks, calendar = reserved_masks(reserved, allowed, base, own, limits, usable)
    # until the first decision turns them, rows say where jobs may run at all: their layouts are made by that
    masks[: len(base)], calendar.turns[:] = masks[calendar.base], -np.inf
    before, new_shape = shapes[:, 0].astype(np.int64), np.full(len(trace), -1, np.int64)
    new_shape[asks] = shape.reshape(-1)
    requests = Requests(*(None if c is None else c[before] for c in demand.requests))  # type: ignore[arg-type]
    requests = requests._replace(mask=shapes[:, 1].astype(np.int64))
    return demand._replace(
        shape=new_shape, requests=requests, masks=masks, queue=demand.queue[before], milli=demand.milli[before],
        gpus_only=False,
    ), calendar  # fmt: skip


def times_of(bookings: Iterable[Booking]) -> list[tuple[float, int]]:
    """Return when reservations begin or end, with the node."""
    return [(time, node) for b in bookings for node in b.nodes for time in (b.start, b.end) if np.isfinite(time)]


def limits_of(trace: Trace, duration: Ints | Floats) -> Floats:
    """Return time limits, ``float64[jobs]``; for a job without one its run time."""
    known = np.isfinite(trace.limit) & (trace.limit > 0)
    return np.where(known, trace.limit, duration).astype(np.float64)
