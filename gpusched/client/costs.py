"""The expected slowdown of running jobs from their placement and neighbours, as learned from earlier jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpusched.client.context import Client
from gpusched.errors import GpuschedError
from gpusched.model.interference import Cost, JobClassEstimate, Link, PlaceCost, job_class_of
from gpusched.model.jobs import ACTIVE, JobRecord

_MAX_NAMED = 3
_MIN_NAMED = 0.01  # slowdown


def place_costs(client: Client, jobs: Sequence[JobRecord]) -> dict[str, PlaceCost]:
    """Return the placement cost of those jobs that hold resources and have measured classes, or measured neighbours.

    Without a valid inventory racks are unknown, and there are no costs.
    """
    reader = client.reader
    if reader is None or not any(job.state in ACTIVE for job in jobs) or not reader.believes_anything():
        return {}
    active = [job for job in reader.active() if job.allocation is not None]
    classes = {job_class_of(job.user, job.spec.name) for job in active}
    estimates = {name: estimate for name in classes if (estimate := reader.belief(name)) is not None}
    if not estimates:
        return {}  # before the inventory and the topology are loaded
    from gpusched.queue.snapshots import topology_of

    try:
        inventory = client.inventory
    except GpuschedError:
        return {}
    racks = topology_of(inventory, {} if inventory.topology else reader.node_records()).racks()
    ids = {job.id for job in jobs}
    by_place = _JobsByPlace(active, racks, estimates)
    costs = ((job.id, by_place.cost(job)) for job in active if job.id in ids)
    return {name: cost for name, cost in costs if cost is not None}


class _JobsByPlace:
    """Index the running jobs by the nodes and rack uplinks that they use."""

    def __init__(
        self, active: Iterable[JobRecord], racks: Mapping[str, str], estimates: Mapping[str, JobClassEstimate]
    ) -> None:
        self._racks, self._estimates = racks, estimates
        self._nodes = {job.id: {part.node for part in job.allocation.parts} for job in active if job.allocation}
        self._at: dict[str, list[JobRecord]] = {}
        for job in active:
            nodes = self._nodes[job.id]
            racks_crossed = {racks[node] for node in nodes if node in racks} if len(nodes) > 1 else set()
            for place in (*nodes, *(f"uplink of {rack}" for rack in racks_crossed)):
                self._at.setdefault(place, []).append(job)
        self._costs: dict[tuple[str, str, Link], Cost | None] = {}

    def cost(self, job: JobRecord) -> PlaceCost | None:
        """Return the cost of a job's placement; None if nothing was measured."""
        from gpusched.client.predict import spread_cost

        nodes = self._nodes[job.id]
        racks = len({self._racks.get(node, node) for node in nodes}) if self._racks else 1
        spread = spread_cost(self._estimates, job, racks) if racks > 1 else None
        neighbours = sorted(self._neighbours(job), key=lambda neighbour: (-neighbour[1].slower, neighbour[0]))
        if spread is None and not neighbours:
            return None
        lines = [f"beside {name} {cost.line('alone')}" for name, cost in neighbours if cost.slower >= _MIN_NAMED]
        named = lines[:_MAX_NAMED] + ([f"and {len(lines) - _MAX_NAMED} more"] if len(lines) > _MAX_NAMED else [])
        costs = (*([spread[1]] if spread else ()), *(cost for _, cost in neighbours))
        factor = (1 + spread[1].slower if spread else 1.0) * (1 + sum(cost.slower for _, cost in neighbours))
        return PlaceCost(slower=factor - 1, lines=(*([spread[0]] if spread else ()), *named), costs=costs)

    def _neighbours(self, job: JobRecord) -> list[tuple[str, Cost]]:
        """Return each measured neighbour's name and id, and how much it slows the job."""
        from gpusched.controller.learning import shared_link

        nodes = self._nodes[job.id]
        uplinks = (f"uplink of {self._racks[node]}" for node in nodes if node in self._racks and len(nodes) > 1)
        places = (*nodes, *uplinks)
        others = {other.id: other for place in places for other in self._at.get(place, ()) if other.id != job.id}
        found = []
        for other in others.values():
            link = shared_link(nodes, self._nodes[other.id], self._racks)
            if link is not None and (cost := self._pair(job, other, link)) is not None:
                found.append((f"{other.spec.name} ({other.id})", cost))
        return found

    def _pair(self, job: JobRecord, other: JobRecord, link: Link) -> Cost | None:
        from gpusched.sched.interference.beliefs import cost_of_neighbour

        first, second = (job_class_of(record.user, record.spec.name) for record in (job, other))
        if (first, second, link) not in self._costs:
            own, neighbour = (self._estimates.get(kind) or JobClassEstimate(kind=kind) for kind in (first, second))
            effects = (effect for estimate in (own, neighbour) for effect in estimate.links)
            is_measured = any(effect.link == link and effect.count for effect in effects)
            self._costs[first, second, link] = cost_of_neighbour(own, neighbour, link) if is_measured else None
        return self._costs[first, second, link]
