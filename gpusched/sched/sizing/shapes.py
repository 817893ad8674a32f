"""The request of a resizable job at another size; plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil, inf

from msgspec.structs import replace

from gpusched.model.jobs import JobSpec
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.tally import Amounts, at_size, excluded_by, total_of


def rooms_of(spec: JobSpec, nodes: Iterable[NodeView]) -> Mapping[Amounts, int]:
    """Return what the nodes that a request allows have, empty: GPUs, cores and MiB -> how many nodes have them.

    A job may have a thousand sizes, and a cluster a thousand nodes, but those are of a few kinds.
    """
    return Counter(total_of(node) for node in nodes if not excluded_by(spec, node))


def over_fewest(spec: JobSpec, gpus: int, rooms: Mapping[Amounts, int]) -> JobSpec | None:
    """Return the request at another size, over the fewest of such nodes, empty; None: it does not fit."""
    assert spec.elastic is not None
    counts = spec.elastic.node_counts(gpus, sum(rooms.values()))
    return next((found for count in counts if (found := at_size(spec, gpus, count, rooms)) is not None), None)


def granted(asked: JobSpec, most: tuple[int, int], free: Iterable[tuple[int, int, int]]) -> JobSpec:
    """Cap a request's ranges at what an answer limits them to and what is free, but not below the least.

    ``most``: cores and MiB of the whole job; 0: no limit. ``free``: GPUs, cores and MiB by node.
    """
    if asked.least == asked:
        return asked
    cores, memory = (-(-amount // asked.nodes) or inf for amount in most)
    rooms = Counter((gpus, int(min(c, cores)), int(min(m, memory))) for gpus, c, m in free)
    return at_size(asked, asked.gpus, asked.nodes, rooms) or asked.least


def rank_view(job: RunningView, left_s: float, reserved: Reservation | None = None) -> PendingView:
    """Return one rank of a running hot job as what asks for a place, for the time that the job has left."""
    assert job.spec is not None
    spec = replace(job.spec, nodes=1, elastic=None, time_limit_s=max(1, ceil(left_s)))
    return PendingView(id=job.id, user=job.user, spec=spec, submit_time=0, reserved=reserved)


def reservation_of(job: RunningView, snapshot: Snapshot) -> Reservation | None:
    """Return the reservation that it runs in."""
    name = job.spec.reservation if job.spec is not None else ""
    here = (one for node in snapshot.nodes for one in node.reservations if one.name == name)
    return next(here, None) if name else None
