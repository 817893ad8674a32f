"""Placement costs for a snapshot's jobs, by what was learned of their kinds: live arrays for `contention`.

`costs_of` makes them. ``Costs.tree``, ``model``, ``load`` (with all that runs on its links) and ``ways`` are those of a
replay, so `contention.cheapest` and what is built on it can be called with them. No seconds here: a
step takes 1 where a job of the kind is fastest among the places that it asks for.

What is known goes in this order: as measured of the kind, by the formula, as other kinds, as jobs of public tables
(`interference.beliefs`). The last of these counts where a place is chosen, but no job waits for it: ``sure`` leaves it
out. Jobs with one GPU on a node share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.interference import Cost, JobClassEstimate, JobShape, Link, job_class_of
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.fit import entry
from gpusched.sched.interference.beliefs import PRIORS, cost_of_neighbour, cost_of_spread
from gpusched.sched.state import Ints, Requests, Scratch, ints
from gpusched.sched.topology.contention import PlacementSearch, layouts_of, new_search
from gpusched.sched.topology.load import Load, enter_links, new_load
from gpusched.sched.topology.queue import PATIENCE_S, Costs
from gpusched.sched.topology.slowdown import KIND, LearnedSlowdowns, SlowdownModel
from gpusched.sched.topology.tree import NetworkTree, tree_of

if TYPE_CHECKING:
    from gpusched.sched.arrays import NodeArrays, PendingArrays

_LINKS: tuple[Link, ...] = ("server", "nic", "uplink")  # as `slowdown.BUS`, `NIC`, `UPLINK`
_MAX_EXCHANGE = 0.9  # of a step that is exchange


def costs_of(snapshot: Snapshot, world: NodeArrays, waiting: PendingArrays, scratch: Scratch) -> Costs | None:
    """Build placement costs; None: no policy uses them, or nothing was ever learned.

    Args:
        snapshot: With what is believed (``beliefs``).
        world: Its nodes as arrays.
        waiting: Its jobs as arrays.
        scratch: Their work space.
    """
    asking = {name for name, policy in snapshot.policies.items() if policy.uses_job_class_estimates}
    asked = [j for name in asking for j in waiting.queues.get(name, ())]
    if not snapshot.beliefs or not asked:
        return None
    asked.sort()
    table = SlowdownTable(snapshot.beliefs)
    jobs = len(waiting.views)
    kind_of_running = [_running_kind(table, job)
                       for job in snapshot.running]  # fmt: skip
    counts = _node_counts(waiting.requests)
    shapes = waiting.jobs.shape[asked].tolist()
    kinds = [_waiting_kind(table, waiting.views[j], counts[s]) for j, s in zip(asked, shapes, strict=True)]
    classes = {of: i for i, of in enumerate(sorted(set(zip(shapes, kinds, strict=True))))}
    of = np.full(jobs, -1, np.int64)
    of[asked] = [classes[key] for key in zip(shapes, kinds, strict=True)]
    tree = learned_tree(snapshot.topology, [node.name for node in world.nodes], table)
    model, sure = (table.model(len(world.nodes), unknown) for unknown in (True, False))
    search, laid_out = new_search(tree), [_chain(waiting.requests, shape) for shape, _ in classes]
    of_class, masks = ints([kind for _, kind in classes]), waiting.jobs.masks
    ways, sure_ways = (
        layouts_of(tree, of, of_class, laid_out, world.usable, masks, waiting.requests, scratch) for of in (model, sure)
    )
    parts = [[(world.row[p.node], len(p.gpus)) for p in job.allocation.parts if p.node in world.row]
             for job in snapshot.running]  # fmt: skip
    load = new_load(
        tree, ints([*([0] * jobs), *kind_of_running]), ints([*([0] * jobs), *(sum(g for _, g in p) for p in parts)]),
        np.ones(jobs + len(parts)), (sum(map(len, parts)) + waiting.parts) * (2 + _depth(tree)),
    )  # fmt: skip
    load.jobs["kind"][asked], load.jobs["gpus"][asked] = kinds, waiting.keys.gpus[asked]
    first = np.cumsum([0, *map(len, parts)])
    nodes, gpus = (ints([part[i] for part in chain.from_iterable(parts)]) for i in (0, 1))
    _enter_running(tree, model, load, jobs, first, nodes, gpus, search)
    return Costs(
        tree, model, sure, load, ways, sure_ways, of,
        since=np.array([max(v.submit_time, v.eligible_time or 0.0) for v in waiting.views], np.float64),
        wait_s=np.array([_wait_s(v, snapshot) for v in waiting.views], np.float64),
        patience_s=PATIENCE_S, last_pass=np.full((2, len(classes)), -1), class_cost=np.zeros((2, len(classes), 2)),
        wait_cost=np.zeros((jobs, 2)), search=search,
    )  # fmt: skip


def _wait_s(job: PendingView, snapshot: Snapshot) -> float:
    """Return how long the job waits for a better place at most."""
    policy = snapshot.policies.get(job.spec.partition)
    if job.spec.placement_wait_s is not None:
        return job.spec.placement_wait_s
    return policy.placement_wait_s if policy is not None else 0.0


def _node_counts(requests: Requests) -> list[tuple[int, ...]]:
    """Return over how many nodes each request, or its looser ones, may be, the fewest first."""
    found: list[tuple[int, ...]] = []
    for shape, parts in enumerate(requests.parts.tolist()):  # looser ones have lower indices
        looser = entry(requests.looser, shape, -1)
        found.append(tuple(sorted({parts, *(found[looser] if looser >= 0 else ())})))
    return found


def _waiting_kind(table: SlowdownTable, job: PendingView, counts: tuple[int, ...]) -> int:
    return table.row(job_class_of(job.user, job.spec.name), job.spec.gpus, counts)


def _running_kind(table: SlowdownTable, job: RunningView) -> int:
    kind = job_class_of(job.user, job.spec.name) if job.spec is not None else ""
    return table.row(kind, job.allocation.gpus, (len(job.allocation.parts),))


def learned_tree(topology: Topology, names: Sequence[str], table: SlowdownTable) -> NetworkTree:
    """Build the nodes' topology; uplinks of undeclared width count as usual ones if anything was learned of uplinks.

    The usual one weighs 1: kinds' figures of ways up are of that.
    """
    tree = tree_of(topology, names)
    ups = tree.weight[2 * len(names) :]
    declared = ups[ups > 0]
    usual = float(np.median(declared)) if len(declared) else 1.0
    table.usual_width = usual
    ups[:] = np.where(ups > 0, ups / usual, 1.0 if table.of_racks else 0.0)
    return tree


def _depth(tree: NetworkTree) -> int:
    """Return the depth of the switch hierarchy."""
    depth, at = 0, np.arange(len(tree.parent))
    while len(at):
        depth, at = depth + 1, tree.parent[at]
        at = at[at >= 0]
        if depth > len(tree.parent):
            break
    return depth


class SlowdownTable:
    """Learned properties of job classes as rows of a `SlowdownModel`, created as jobs need them."""

    def __init__(self, beliefs: Mapping[str, JobClassEstimate]) -> None:
        self.beliefs, self._kept = beliefs, _kept_for(beliefs)
        self._rows: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self.usual_width = 1.0

    @property
    def of_racks(self) -> bool:
        """Return whether anything was learned of uplinks."""
        return any(
            any(p.shape.racks > 1 for p in b.shapes) or any(s.link == "uplink" for s in b.links)
            for b in self.beliefs.values()
        )

    def row(self, kind: str, gpus: int, counts: tuple[int, ...]) -> int:
        """Return the row of a kind of job at a size, over so many nodes."""
        key = (kind if kind in self.beliefs else "", gpus, counts)
        return self._rows.setdefault(key, len(self._rows))

    def model_of_one(self) -> SlowdownModel:
        """Return the model of one job on one node."""
        self.row("", 1, (1,))
        return self.model(1, True)

    def model(self, nodes: int, unknown: bool) -> SlowdownModel:
        """Return all rows so far as a model."""
        rows = [self._figures(key) for key in self._rows]
        names = {name: i for i, name in enumerate(dict.fromkeys(kind for kind, _, _ in self._rows))}
        known = [self.beliefs.get(name) or JobClassEstimate(kind=name) for name in names]
        kinds = np.zeros(len(rows), KIND)
        for field in ("compute", "bus_a", "net_a", "net_b"):
            kinds[field] = [getattr(row, field) for row in rows]
        up = np.array([row.up if row.up is not None else row.net_a + row.net_b for row in rows], np.float64)
        known_up = np.array([row.up is not None for row in rows], np.bool_)
        if not unknown:
            up[~known_up] = 0.0
            guessed = np.array([not row.measured for row in rows], np.bool_)
            kinds[guessed] = (1.0, 0.0, 0.0, 0.0, 0.0)  # as long over any number of nodes
        else:
            up[~known_up] *= self.usual_width
        pairs = [self._pairs(belief, names) for belief in known]
        contention = np.array([[_contention(belief, link) for link in _LINKS] for belief in known], np.float64)
        measured = {(i, s.link) for i, belief in enumerate(known) for s in belief.links if s.count}
        believed = LearnedSlowdowns(
            nodes=nodes, unknown=unknown, up=up, name=ints([names[kind] for kind, _, _ in self._rows]),
            contention=contention.reshape(len(known), 3, 2),
            measured=np.array([[(i, link) in measured for link in _LINKS] for i in range(len(known))], np.uint8),
            first=np.cumsum([0, *map(len, pairs)]), other=ints([p[0] for p in chain.from_iterable(pairs)]),
            link=ints([p[1] for p in chain.from_iterable(pairs)]),
            lost=np.array([p[2] for p in chain.from_iterable(pairs)], np.float64),
        )  # fmt: skip
        return SlowdownModel(kinds, np.zeros((0, 0)), False, believed)

    def _pairs(self, own: JobClassEstimate, names: Mapping[str, int]) -> list[tuple[int, int, float]]:
        """Return the measurements beside the known kinds, by number: (name, link, part of a step)."""
        found = []
        for beside in own.beside:
            if beside.kind in names and beside.kind in self.beliefs:
                lost = self._kept.lost_beside(own, self.beliefs[beside.kind], beside.link)
                found.append((names[beside.kind], _LINKS.index(beside.link), lost))
        return found

    def _figures(self, key: tuple[str, int, tuple[int, ...]]) -> _Figures:
        if key not in self._kept.rows:
            self._kept.rows[key] = _figures(self._kept, *key)
        return self._kept.rows[key]


class _Figures(NamedTuple):
    """A kind's step at a size, relative to 1 over the fewest nodes.

    ``up``: None where nothing says. ``measured``: whether anything says of more nodes. ``alone``: nothing but the
    kind's own belief went into it.
    """

    compute: float
    bus_a: float
    net_a: float
    net_b: float
    up: float | None
    measured: bool
    alone: bool = True


def _figures(kept: _BeliefCache, kind: str, gpus: int, counts: tuple[int, ...]) -> _Figures:
    own = kept.beliefs.get(kind) or JobClassEstimate(kind=kind)
    usual = max(own.shapes, key=lambda paces: paces.count).shape if own.shapes else None
    alone = True

    def longer(wide: tuple[int, int], tight: tuple[int, int]) -> float | None:
        """Return the factor by which a step is longer over (nodes, racks) than over others."""
        nonlocal alone
        gpu_type, unit = (usual.gpu_type, usual.unit) if usual else ("", "")
        shapes = (
            JobShape(
                gpu_type=gpu_type, unit=unit, gpus=gpus, max_gpus_per_node=gpus // nodes, nodes=nodes, racks=racks
            )
            for nodes, racks in (wide, tight)
        )  # fmt: skip
        cost = kept.of_others(wide, tight) if usual is None else cost_of_spread(kept.beliefs.values(), kind, *shapes)
        alone = alone and cost is not None and cost.source != "others"
        return None if cost is None else max(1.0 + cost.slower, 1.0)

    bus, nic, _ = (min(_contention(own, link)[0], _MAX_EXCHANGE) for link in _LINKS)
    several = [n for n in counts if n > 1]
    if not several:
        bus = bus if gpus > 1 else 0.0
        return _Figures(1.0 - bus, bus, 0.0, 0.0, None, True)
    fewest, measured = counts[0], True
    compute = 1.0 - (nic if fewest > 1 else bus)
    steps = []
    for nodes in several:
        found = 1.0 if nodes == fewest else longer((nodes, 1), (fewest, 1))
        measured = measured and found is not None
        steps.append(found if found is not None else max(1.0, compute / (1.0 - nic)))
    a, b = _through([2.0 * (n - 1) / n for n in several], [max(step - compute, 0.0) for step in steps])
    racks = longer((several[0], 2), (several[0], 1))
    return _Figures(
        compute, min(bus, 1.0 - compute) if gpus > fewest else 0.0, a, b,
        None if racks is None else steps[0] * racks - compute, measured, alone,
    )  # fmt: skip


def _through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return a and b, neither negative, of a line a + b x through the first and last points; one: all is a."""
    if len(x) < 2 or y[-1] <= y[0]:
        return y[0], 0.0
    b = (y[-1] - y[0]) / (x[-1] - x[0])
    return (y[0] - b * x[0], b) if y[0] >= b * x[0] else (0.0, y[-1] / x[-1])


def _contention(belief: JobClassEstimate, link: Link) -> tuple[float, float]:
    """Return sensitivity and pressure; those of jobs in public tables if nothing was learned."""
    found = next((s for s in belief.links if s.link == link), None)
    sensitivity, pressure = (PRIORS[link][0],) * 2 if found is None else (found.sensitivity, found.pressure)
    return exp(min(sensitivity, 3.0)), exp(min(pressure, 3.0))


class _BeliefCache:
    """Values derived from beliefs, which change when attempts end, while decisions run every cycle."""

    def __init__(self, beliefs: Mapping[str, JobClassEstimate], before: _BeliefCache | None) -> None:
        """Recompute only what other beliefs went into."""
        self.beliefs = beliefs
        self.rows: dict[tuple[str, int, tuple[int, ...]], _Figures] = {}
        self._lost: dict[tuple[str, str, Link], float] = {}
        self._others: dict[tuple[tuple[int, int], tuple[int, int]], Cost | None] = {}
        if before is not None:
            same = {kind for kind, belief in beliefs.items() if before.beliefs.get(kind) is belief}
            # Of copies: an agent, a shadow or a forecast may still be filling the former cache in its own thread.
            self.rows = {key: row for key, row in before.rows.copy().items() if key[0] in same and row.alone}
            self._lost = {key: lost for key, lost in before._lost.copy().items() if same.issuperset(key[:2])}

    def lost_beside(self, own: JobClassEstimate, other: JobClassEstimate, link: Link) -> float:
        """Return how much longer a step is beside a job of a measured pair."""
        key = (own.kind, other.kind, link)
        if key not in self._lost:
            self._lost[key] = cost_of_neighbour(own, other, link).slower
        return self._lost[key]

    def of_others(self, wide: tuple[int, int], tight: tuple[int, int]) -> Cost | None:
        """Return the cost of (nodes, racks) against others, for a kind with no known pace."""
        if (wide, tight) not in self._others:
            shapes = (
                JobShape(gpu_type="", unit="", gpus=0, max_gpus_per_node=0, nodes=n, racks=r) for n, r in (wide, tight)
            )
            self._others[wide, tight] = cost_of_spread(self.beliefs.values(), "", *shapes)
        return self._others[wide, tight]


_last: list[_BeliefCache] = []


def _kept_for(beliefs: Mapping[str, JobClassEstimate]) -> _BeliefCache:
    """Return the cache for these beliefs, reusing entries that still hold."""
    before = _last[0] if _last else None
    if before is None or before.beliefs is not beliefs:
        before = _BeliefCache(beliefs, before)
        _last[:] = [before]
    return before


def _chain(requests: Requests, shape: int) -> list[int]:
    """Return a request and its looser ones."""
    looser = entry(requests.looser, shape, -1)
    return [shape, *(_chain(requests, looser) if looser >= 0 else ())]


@jit
def _enter_running(
    tree: NetworkTree,
    model: SlowdownModel,
    load: Load,
    slot: int,
    first: Ints,
    nodes: Ints,
    gpus: Ints,
    search: PlacementSearch,
) -> None:
    """Enter running jobs on their links, from ``slot`` on; job i is on ``nodes[first[i] : first[i + 1]]``."""
    for i in range(first.size - 1):
        parts, most = first[i + 1] - first[i], 0
        for at in range(first[i], first[i + 1]):
            search.trial[at - first[i]] = nodes[at]
            most = max(most, gpus[at])
        enter_links(tree, model, load, slot + i, search.trial, parts, most, search.use, search.needs)
