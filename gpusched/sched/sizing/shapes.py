"""What a resizable job asks for at another size; plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.jobs import JobSpec
from gpusched.model.snapshot import NodeView
from gpusched.sched.tally import at_size, excluded_by


def shape(spec: JobSpec, gpus: int, nodes: Iterable[NodeView]) -> JobSpec | None:
    """The request at another size, over the fewest of these nodes that can give it, empty; None: they cannot."""
    rooms = [(len(node.gpus), node.cores, node.memory_mib) for node in nodes if not excluded_by(spec, node)]
    return over_fewest(spec, gpus, rooms)


def over_fewest(spec: JobSpec, gpus: int, rooms: Sequence[tuple[int, int, int]]) -> JobSpec | None:
    """The same, where nodes have so many GPUs, cores and MiB."""
    counts = (count for count in range(1, len(rooms) + 1) if gpus % count == 0)
    return next((found for count in counts if (found := at_size(spec, gpus, count, rooms)) is not None), None)


def within_free(asked: JobSpec, free: Iterable[tuple[int, int, int]]) -> JobSpec:
    """A request with what of its ranges is free (GPUs, cores, MiB by node), or the least where that is not, either."""
    return at_size(asked, asked.gpus, asked.nodes, free) or asked.least
