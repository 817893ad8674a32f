"""The request of a resizable job at another size; plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.jobs import JobSpec
from gpusched.model.snapshot import NodeView
from gpusched.sched.tally import at_size, excluded_by


def shape(spec: JobSpec, gpus: int, nodes: Iterable[NodeView]) -> JobSpec | None:
    """Return the request at another size, over the fewest of these nodes, empty; None: it does not fit."""
    rooms = [(len(node.gpus), node.cores, node.memory_mib) for node in nodes if not excluded_by(spec, node)]
    return over_fewest(spec, gpus, rooms)


def over_fewest(spec: JobSpec, gpus: int, rooms: Sequence[tuple[int, int, int]]) -> JobSpec | None:
    """Return the same for nodes with so many GPUs, cores and MiB."""
    counts = (count for count in range(1, len(rooms) + 1) if gpus % count == 0)
    return next((found for count in counts if (found := at_size(spec, gpus, count, rooms)) is not None), None)


def within_free(asked: JobSpec, free: Iterable[tuple[int, int, int]]) -> JobSpec:
    """Cap a request's ranges at what is free (GPUs, cores, MiB by node), but not below the least."""
    return at_size(asked, asked.gpus, asked.nodes, free) or asked.least
