"""What the place of a running job costs it, by what was learned of jobs like it and of those beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpusched.client.context import Client
from gpusched.errors import GpuschedError
from gpusched.model.interference import Cost, JobClassEstimate, Link, PlaceCost, job_class_of
from gpusched.model.jobs import ACTIVE, JobRecord

_MOST_NAMED = 3
_WORTH_NAMING = 0.01


def place_costs(client: Client, wanted: Sequence[JobRecord]) -> dict[str, PlaceCost]:
    """Of those of the jobs that hold resources and of whose kind, or neighbours' kinds, anything was learned.

    Beside an inventory that is not in order nothing is known of racks, and the costs are left out.
    """
    reader = client.reader
    if reader is None or not any(job.state in ACTIVE for job in wanted) or not reader.believes_anything():
        return {}
    active = [job for job in reader.active() if job.allocation is not None]
    kinds = {job_class_of(job.user, job.spec.name) for job in active}
    known = {kind: belief for kind in kinds if (belief := reader.belief(kind)) is not None}
    if not known:
        return {}  # nothing is loaded for that
    from gpusched.queue.snapshots import topology_of

    try:
        inventory = client.inventory
    except GpuschedError:
        return {}
    racks = topology_of(inventory, {} if inventory.topology else reader.node_records()).racks()
    ids = {job.id for job in wanted}
    scene = _RunningJobs(active, racks, known)
    found = ((job.id, scene.cost(job)) for job in active if job.id in ids)
    return {name: cost for name, cost in found if cost is not None}


class _RunningJobs:
    """All that runs, by where it is."""

    def __init__(
        self, active: Iterable[JobRecord], racks: Mapping[str, str], known: Mapping[str, JobClassEstimate]
    ) -> None:
        self._racks, self._known = racks, known
        self._nodes = {job.id: {part.node for part in job.allocation.parts} for job in active if job.allocation}
        self._at: dict[str, list[JobRecord]] = {}
        for job in active:
            nodes = self._nodes[job.id]
            crossed = {racks[node] for node in nodes if node in racks} if len(nodes) > 1 else set()
            for place in (*nodes, *(f"way up of {rack}" for rack in crossed)):
                self._at.setdefault(place, []).append(job)
        self._costs: dict[tuple[str, str, Link], Cost | None] = {}

    def cost(self, job: JobRecord) -> PlaceCost | None:
        """None: nothing says."""
        from gpusched.client.predict import spread_cost

        nodes = self._nodes[job.id]
        racks = len({self._racks.get(node, node) for node in nodes}) if self._racks else 1
        spread = spread_cost(self._known, job, racks) if racks > 1 else None
        beside = sorted(self._beside(job), key=lambda one: (-one[1].slower, one[0]))
        if spread is None and not beside:
            return None
        lines = [f"beside {name} {cost.line('alone')}" for name, cost in beside if cost.slower >= _WORTH_NAMING]
        named = lines[:_MOST_NAMED] + ([f"and {len(lines) - _MOST_NAMED} more"] if len(lines) > _MOST_NAMED else [])
        costs = (*([spread[1]] if spread else ()), *(cost for _, cost in beside))
        longer = (1 + spread[1].slower if spread else 1.0) * (1 + sum(cost.slower for _, cost in beside))
        return PlaceCost(slower=longer - 1, lines=(*([spread[0]] if spread else ()), *named), costs=costs)

    def _beside(self, job: JobRecord) -> list[tuple[str, Cost]]:
        """Its neighbours: name and id, and what each takes, where anything was measured of one of both."""
        from gpusched.controller.learning import shared_link

        mine = self._nodes[job.id]
        places = (*mine, *(f"way up of {self._racks[node]}" for node in mine if node in self._racks and len(mine) > 1))
        others = {other.id: other for place in places for other in self._at.get(place, ()) if other.id != job.id}
        found = []
        for other in others.values():
            link = shared_link(mine, self._nodes[other.id], self._racks)
            if link is not None and (cost := self._pair(job, other, link)) is not None:
                found.append((f"{other.spec.name} ({other.id})", cost))
        return found

    def _pair(self, job: JobRecord, other: JobRecord, link: Link) -> Cost | None:
        from gpusched.sched.interference.beliefs import cost_of_neighbour

        mine, its = (job_class_of(one.user, one.spec.name) for one in (job, other))
        if (mine, its, link) not in self._costs:
            own, belief = (self._known.get(kind) or JobClassEstimate(kind=kind) for kind in (mine, its))
            told = any(sway.link == link and sway.count for one in (own, belief) for sway in one.links)
            self._costs[mine, its, link] = cost_of_neighbour(own, belief, link) if told else None
        return self._costs[mine, its, link]
