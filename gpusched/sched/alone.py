"""One job against a snapshot's nodes: whether it fits, and when it could start with an otherwise empty queue."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np
from msgspec.structs import replace

from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.arrays import NodeArrays, PendingArrays, node_arrays_of, releases_of, scratch_for, waiting_of
from gpusched.sched.eligible import ineligible
from gpusched.sched.fit import entry, request_of, set_feasibility
from gpusched.sched.kernel.by_rule import PlacementRule, pass_for
from gpusched.sched.state import (
    EASY,
    FIRST_FIT,
    OK,
    UNLIMITED,
    ClusterState,
    PlacementRequest,
    Releases,
    Resources,
    Scratch,
    copied,
    new_outcome,
    seed_words,
)
from gpusched.sched.tally import Amounts, usage_of

Has = Literal["total", "usable", "free"]


def in_order(snapshot: Snapshot, partition: str) -> list[PendingView]:
    """Return the partition's jobs that may start, first to last."""
    jobs = [j for j in snapshot.pending if j.spec.partition == partition]
    jobs = [j for j in jobs if ineligible(j, snapshot.now, snapshot.policies) is None]
    if not jobs:
        return []
    nowhere = node_arrays_of(replace(snapshot, nodes=(), running=()))
    waiting = waiting_of(jobs, nowhere, usage_of(snapshot))
    policy = snapshot.policies[partition]
    return [jobs[i] for i in waiting.ordered(partition, policy.order, policy.ties).tolist()]


class SingleJobView:
    """A snapshot's nodes and running jobs, for questions about one job at a time. Limits do not count."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @cached_property
    def world(self) -> NodeArrays:
        """Return the nodes; no question changes them."""
        return node_arrays_of(self.snapshot)

    def of(self, basis: Has) -> Resources:
        """Return the resources that are free now, that healthy nodes have when empty, or that are declared."""
        world = self.world
        return world.resources if basis == "free" else world.usable if basis == "usable" else world.total

    def nodes(self, basis: Has) -> Iterator[tuple[NodeView, Amounts]]:
        """Return each node, partition by partition, with its resources; -1 GPUs where it is not available."""
        columns = (column.tolist() for column in self.of(basis).columns)
        return zip(self.world.nodes, zip(*columns, strict=True), strict=True)

    @cached_property
    def _releases(self) -> Releases:
        return releases_of(self.snapshot.running, self.world, len(self.world.nodes))

    def _asked(self, job: PendingView) -> tuple[PendingArrays, Scratch]:
        known = job.spec.partition in self.snapshot.policies
        waiting = waiting_of([job], self.world, {}, self.snapshot if known else None)
        return waiting, scratch_for(self.world, waiting, self._releases)

    def asks(self, job: PendingView) -> list[PlacementRequest]:
        """Return what the job requests now, first choice first."""
        waiting, _ = self._asked(job)
        found, at = [], int(waiting.jobs.shape[0])
        while at >= 0:
            found.append(request_of(waiting.requests, at))
            at = entry(waiting.requests.looser, at, -1)
        return found

    def fits(self, job: PendingView, basis: Has = "free") -> bool:
        """Return whether the job fits on those resources now."""
        (waiting, scratch), on = self._asked(job), self.of(basis)
        jobs = waiting.jobs
        set_feasibility(on, on, waiting.requests, jobs, scratch)
        return bool(jobs.feasibility[jobs.shape[0]] == OK)

    def earliest(self, job: PendingView) -> tuple[float, str] | None:
        """Return when the job fits at the latest, by time limits, and the job that ends then; None: now or never.

        Returns:
            (Unix seconds, ``job X on dgx001 frees 4 GPUs``).
        """
        releases, used = self._releases, int(self._releases.used[0])
        starts, when = self._walked(job, used)
        if starts or when == np.inf:
            return None
        ends = np.maximum(releases.end[:used], self.snapshot.now)  # ascending
        last = int(np.searchsorted(ends, when))
        count = next(count for count in range(last, used + 1) if self._walked(job, count)[1] <= when)
        if count == last:  # no job ends then
            over = next((running.what for running in self.world.reserved.all if running.end == when), "a reservation")
            return when, f"{over} ends"
        _, node, gpus, _, _, owner = (column[count - 1] for column in releases[:6])
        owner_text, where = self.snapshot.running[-1 - int(owner)].id, self.world.nodes[int(node)].name
        return when, f"job {owner_text} on {where} frees {count_of(int(gpus), 'GPU')}"

    def _walked(self, job: PendingView, ends: int) -> tuple[bool, float]:
        """Return whether a pass over this job alone starts it, else when it can, after the first so many ends."""
        waiting, scratch = self._asked(job)
        jobs, resources = waiting.jobs, copied(self.world.resources)
        jobs.feasibility[:], jobs.room[:] = OK, UNLIMITED
        releases = self._releases._replace(used=np.full(2, ends))
        outcome, now = new_outcome(1, waiting.parts), float(self.snapshot.now)
        state = ClusterState(resources, releases, waiting.requests, jobs, scratch, outcome, now)
        head, when = pass_for(EASY)(state, np.zeros(1, np.int64), EASY, PlacementRule(FIRST_FIT, seed_words(0)))
        return head < 0, float(when)
