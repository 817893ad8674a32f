"""One job against a snapshot's nodes as the passes see it: whether it fits, and when, were it alone in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np
from msgspec.structs import replace

from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.arrays import NodeArrays, Waiting, node_arrays_of, releases_of, scratch_for, waiting_of
from gpusched.sched.backfill import reserve_any
from gpusched.sched.eligible import ineligible
from gpusched.sched.fit import entry, request_of
from gpusched.sched.place import choose
from gpusched.sched.state import FIRST_FIT, Releases, Request, Resources, Scratch
from gpusched.sched.tally import Amounts, usage_of

Has = Literal["total", "usable", "free"]


def in_order(snapshot: Snapshot, partition: str) -> list[PendingView]:
    """The partition's jobs that may start, first to last."""
    jobs = [j for j in snapshot.pending if j.spec.partition == partition]
    jobs = [j for j in jobs if ineligible(j, snapshot.now, snapshot.policies) is None]
    if not jobs:
        return []
    nowhere = node_arrays_of(replace(snapshot, nodes=(), running=()))
    waiting = waiting_of(jobs, nowhere, usage_of(snapshot))
    return [jobs[i] for i in waiting.ordered(partition, snapshot.policies[partition].order).tolist()]


class Alone:
    """A snapshot's nodes and what runs there, for questions about one job each. Limits do not count."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @cached_property
    def world(self) -> NodeArrays:
        """The nodes; no question changes them."""
        return node_arrays_of(self.snapshot)

    def of(self, what: Has) -> Resources:
        """What is free now; what the nodes that are well have, if empty; what is declared."""
        world = self.world
        return world.resources if what == "free" else world.usable if what == "usable" else world.total

    def nodes(self, what: Has) -> Iterator[tuple[NodeView, Amounts]]:
        """Each node, partition by partition, and what it has of that; -1 GPUs where it is not available."""
        return zip(self.world.nodes, zip(*(column.tolist() for column in self.of(what)), strict=True), strict=True)

    def free(self, node: str) -> Amounts:
        """What a node has free now; -1 GPUs where it is not available."""
        gpus, cores, memory = (int(column[self.world.row[node]]) for column in self.world.resources)
        return gpus, cores, memory

    @cached_property
    def _releases(self) -> Releases:
        return releases_of(self.snapshot.running, self.world, 0)

    def _asked(self, job: PendingView) -> tuple[Waiting, Scratch]:
        known = job.spec.partition in self.snapshot.policies
        waiting = waiting_of([job], self.world, {}, self.snapshot if known else None)
        return waiting, scratch_for(self.world, waiting, self._releases)

    def asks(self, job: PendingView) -> list[Request]:
        """What it asks for now, first to last."""
        waiting, _ = self._asked(job)
        return [request_of(waiting.requests, shape) for shape in _chain(waiting)]

    def fits(self, job: PendingView, what: Has = "free") -> bool:
        """Whether it fits now on that."""
        return self._fits(*self._asked(job), self.of(what))

    def when(self, job: PendingView) -> float:
        """When it fits at the latest, by the limits of what runs (Unix seconds); infinite: never."""
        return self._when(*self._asked(job), self._releases)

    def earliest(self, job: PendingView) -> tuple[float, str] | None:
        """The same, and thanks to whom; None: it fits now or never.

        Returns:
            (Unix seconds, ``job X on dgx001 frees 4 GPUs``).
        """
        waiting, scratch = self._asked(job)
        when = self._when(waiting, scratch, self._releases)
        if when == np.inf or self._fits(waiting, scratch, self.of("free")):
            return None
        ends = np.maximum(self._releases.end, self.snapshot.now)  # ascending
        for count in range(int(np.searchsorted(ends, when)), len(ends) + 1):
            first = self._releases._replace(used=np.full(2, count))
            if self._when(waiting, scratch, first) > when:
                continue
            if count == 0 or ends[count - 1] < when:  # nobody ends then
                over = next((one.what for one in self.world.reserved.all if one.end == when), "a reservation")
                return when, f"{over} ends"
            _, node, gpus, _, _, owner = (column[count - 1] for column in first[:6])
            who, where = self.snapshot.running[-1 - int(owner)].id, self.world.nodes[int(node)].name
            return when, f"job {who} on {where} frees {count_of(int(gpus), 'GPU')}"
        raise AssertionError("it fits once all have ended that do by then")

    def _fits(self, waiting: Waiting, scratch: Scratch, resources: Resources) -> bool:
        masks, asked = waiting.jobs.masks, (request_of(waiting.requests, shape) for shape in _chain(waiting))
        return any(choose(resources, masks, request, FIRST_FIT, scratch) for request in asked)

    def _when(self, waiting: Waiting, scratch: Scratch, releases: Releases) -> float:
        jobs, now = waiting.jobs, self.snapshot.now
        when, _ = reserve_any(
            self.world.resources, releases, jobs.masks, waiting.requests, jobs.shape[0], FIRST_FIT, now, jobs.limit[0],
            scratch,
        )  # fmt: skip
        return float(when)


def _chain(waiting: Waiting) -> Iterator[int]:
    """The requests of a job that is the only one."""
    at = int(waiting.jobs.shape[0])
    while at >= 0:
        yield at
        at = entry(waiting.requests.looser, at, -1)
