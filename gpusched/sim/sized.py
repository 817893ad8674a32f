"""Replays of policies that choose sizes: every size of every job is prepared, then the live passes decide.

By a rule all is compiled (`gpusched.sim.engine.sized`). An agent that chooses sizes is asked in Python, at each
decision; where it cannot choose, its fallback's rule does. So is another package's component; where it cannot choose,
the replay ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from gpusched.compiled import bound, in_python
from gpusched.errors import UsageError
from gpusched.estimation.last_two import time_limits
from gpusched.model.jobs import JobSpec
from gpusched.sched.agent import prepared_weights
from gpusched.sched.sizing.live import INSTEAD, ask_agent, ask_component, component_error, decide_sizes
from gpusched.sched.sizing.nodes import sizing_nodes
from gpusched.sched.sizing.question import (
    COUNT,
    NUMBERS,
    PART,
    ROW,
    Amounts,
    Menus,
    Question,
    Scene,
    menus_of,
    new_claims,
    question_of,
)
from gpusched.sched.sizing.rules import RULES
from gpusched.sched.state import BACKFILLS, Flags, Floats, Ints, filled, new_outcome, new_plan, new_releases
from gpusched.sim.engine.build import ResizableJobs, SimWorld, most_parts_running
from gpusched.sim.engine.ledger import plan_copy
from gpusched.sim.engine.mapped import QueueMapper, is_mapped
from gpusched.sim.engine.placing_walk import Walk
from gpusched.sim.engine.queue import state_of
from gpusched.sim.engine.sized import (
    APPLIED,
    ASK,
    AT,
    GRANT,
    MAP,
    OF_JOB,
    PARTITION,
    QUEUED,
    STAGE,
    UNSOUND,
    USED,
    Sizer,
    SizingSpace,
    run_sized,
    space_of,
)
from gpusched.sim.engine.state import EventLog
from gpusched.sim.granting import Grants, asks_for
from gpusched.sim.orders import Knows
from gpusched.sim.placed import walked, with_ways_at_sizes
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy
from gpusched.sim.resizing import (
    ResizedShapes,
    TargetSize,
    counts_of_ranks,
    own_speed,
    pauses,
    rank_gpus,
    with_lost_ranks,
    with_own_requests,
)

KNOWS: Knows = "oracle"  # running jobs by their progress, waiting ones by earlier reports, else limits


def with_sizes(world: SimWorld) -> tuple[SimWorld, Sizer]:
    """Return the world with the requests and speeds of every size that jobs may get, and the run's state."""
    spec, elastic = world.policy.spec, world.options.elastic
    assert spec is not None
    assert elastic is not None
    world, menus, menu, ranks, between = _with_menus(world, elastic)
    world, rows, kind, notes = _with_rows(world, menus, menu)
    request = np.zeros(0, np.int64)
    if elastic.cores is not None or elastic.memory_mib is not None:
        world, request = with_own_requests(world)
    jobs, most = len(world.trace), menus.sizes.shape[1]
    walk: Walk | None = None
    if world.options.network is not None:
        world, walk = _with_costs(world, menus, menu, request)
    if walk is None:
        world = _with_room(world, menus, menu)
    world = world._replace(
        knowledge=world.knowledge._replace(knows=KNOWS, notes=(*world.knowledge.notes, *notes)),
        policy=replace(world.policy, knows=KNOWS),
    )
    scene = Scene(
        rows=np.zeros(jobs, ROW),
        parts=np.zeros(most_parts_running(world.demand, len(world.sim.held)) + 1, PART),
        unusable=between[menu],
        reported=np.full((jobs, most), np.nan),
        menus=menus,
    )
    partitions = len(world.sim.dirty)
    at, number = np.zeros(AT, np.int64), np.zeros((partitions, NUMBERS), np.int64)
    at[PARTITION], at[STAGE] = partitions, APPLIED
    queue = world.sim.shapes["queue"][world.demand.shape[world.demand.shape >= 0]]
    space = SizingSpace(
        scene, new_claims(jobs, most)._replace(number=number), np.zeros(jobs, np.int64),
        np.zeros((partitions, USED), np.int64),
    )  # fmt: skip
    sizer = Sizer(
        jobs=_jobs(world, menus, menu, kind, ranks),
        rows=rows,
        own=_own_speeds(world, menus, menu),
        between=between,
        stopped=np.full((jobs, spec.resize.per_hour), -np.inf),
        waiting=np.zeros(jobs + 1, np.int64),
        size=np.zeros(1, np.int64),
        space=space,
        first=np.cumsum([0, *np.bincount(queue, minlength=partitions)]),
        outcome=new_outcome(jobs, len(world.sim.held)) if walk is None else walk.outcome,
        at=at,
        asks=world.policy.model is not None or spec.sizes not in RULES,
        in_turn=world.policy.model is not None,
        maps=is_mapped(world),
        request=request,
        rule=RULES.get(spec.sizes, RULES[INSTEAD]),
        place=PLACEMENTS[world.rule],
        backfill=BACKFILLS[world.policy.backfill],
        min_run_s=spec.resize.min_run_s,
        gain=spec.resize.gain,
        restart_s=world.restart_s,
        ledger=plan_copy(world.sim.ledger),
        walk=walk,
    )
    return world, sizer


def _with_room(world: SimWorld, menus: Menus, menu: Ints) -> SimWorld:
    """Return the world with space for each job's nodes at its widest size."""
    parts = np.append(world.sim.shapes["parts"], 0)[menus.shape].max(axis=1)[menu]
    parts = np.maximum(parts, world.demand.parts)
    world.sim.jobs["offset"] = np.cumsum(parts) - parts
    most = int(parts.sum())
    slots = most_parts_running(world.demand, most) if world.sim.pairs is None else most
    passes, shapes = world.passes, len(world.sim.shapes)
    failed, failed_late = (np.zeros(shapes, np.int64) for _ in range(2))
    calendar = passes.scratch.calendar
    entries = 0 if calendar is None else len(calendar.node)
    plan = passes.scratch.plan and new_plan(len(world.pool), shapes, entries, slots + 2 * most)
    passes = passes._replace(
        jobs=passes.jobs._replace(shape=world.demand.shape.copy()),  # it changes; the demand does not
        scratch=passes.scratch._replace(failed=failed, failed_late=failed_late, plan=plan),
        releases=new_releases(slots + 1),
    )
    sim = world.sim._replace(held=np.full(most, -1, np.int64))
    return world._replace(sim=sim, passes=passes)


def _with_costs(world: SimWorld, menus: Menus, menu: Ints, request: Ints) -> tuple[SimWorld, Walk | None]:
    """Return the world with the possible layouts of each job at each of its sizes, and the state of passes by cost.

    None: the policy looks at no layouts, and links only slow its jobs down.

    Raises:
        UsageError: The policy cannot be replayed with placement costs.
    """
    spec = world.policy.spec
    assert spec is not None
    policy = world.policy
    if policy.placement_wait_s is None:  # of another placement than its own
        world = world._replace(policy=replace(policy, placement_wait_s=spec.placement_wait_s))
    own = request if request.size else np.full(len(menu), -1)
    world, placing = with_ways_at_sizes(world, menus, menu, own)
    return (world, None) if placing is None else walked(world, placing)


def _jobs(
    world: SimWorld, menus: Menus, menu: Ints, kind: Ints, ranks: Ints
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Return the jobs' records, ``OF_JOB[jobs]``; ``ranks``: `OF_JOB`'s ``rank_shape`` of each menu."""
    shapes, demand = world.sim.shapes, world.demand
    of = shapes[np.maximum(demand.shape, 0)] if len(shapes) else np.zeros(len(menu), shapes.dtype)
    parts: Ints = of["parts"]
    gpus: Ints = parts * of["gpus"]
    hot = ranks[menu] >= 0
    at_least_one, progress = np.maximum(gpus, 1), world.trace.progress
    return filled(
        OF_JOB,
        len(menu),
        menu=menu,
        kind=kind,
        rigid=(menus.sizes[menu] >= 0).sum(axis=1) == 1,
        base=gpus,
        cores=parts * of["cores"] / at_least_one,
        memory=parts * of["memory"] / at_least_one,
        limit=time_limits(world.trace),
        reports=True if progress is None else np.isfinite(progress.steps),
        cooldown_s=0.0 if progress is None else progress.cooldown_s,
        rank_gpus=np.where(hot, of["gpus"], 0),
        rank_shape=ranks[menu],
        cost_s=np.where(hot, pauses(world.trace), world.restart_s),
    )


def _own_speeds(world: SimWorld, menus: Menus, menu: Ints) -> Floats:
    """Return each job's speed at each of its sizes by its own report, ``float64[jobs, most]``."""
    speeds = np.ones((len(menu), menus.sizes.shape[1]))
    if world.trace.progress is not None:
        for job, sizes in enumerate(menus.sizes[menu].tolist()):
            speeds[job] = [own_speed(world.trace, job, gpus) if gpus > 0 else 1.0 for gpus in sizes]
    return speeds


def _sizes_of(own: int, least: int, most: int) -> tuple[int, ...]:
    """Return the job's own size, and the powers of two that it may have."""
    if own < 1:
        return (own,)
    return tuple(sorted({own, *(1 << k for k in range(most.bit_length()) if least <= 1 << k <= most)}))


def _with_menus(world: SimWorld, elastic: ResizableJobs) -> tuple[SimWorld, Menus, Ints, Ints, Flags]:
    """Return the world with all sizes, the menus, each job's menu, and each menu's request of one rank (-1: not hot).

    Then the sizes to which only lost ranks lead, see `Sizer`.

    For jobs that never run, without requests.
    """
    trace = world.trace
    measured = () if elastic.linear else (trace.model, trace.gpu_type)  # else one without figures has all the same
    given = elastic.sizes or [()] * len(trace)
    known = {sizes: n for n, sizes in enumerate(dict.fromkeys(given))}
    listed = [known[sizes] for sizes in given]
    of_rank = np.zeros(len(trace), np.int64) if elastic.rank_gpus is None else elastic.rank_gpus
    more = *measured, *(() if trace.one_rack is None else (trace.one_rack,))  # of these not all sizes have a place
    columns = np.column_stack((world.demand.shape, trace.gpus, elastic.least, elastic.most, listed, of_rank, *more))
    distinct, first, index = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    menus: list[dict[int, int]] = []
    asked: dict[tuple[int, int], JobSpec] = {}
    has_ranges = elastic.cores is not None or elastic.memory_mib is not None
    made, ranks, lost = ResizedShapes(), np.full(len(distinct), -1, np.int64), list[set[int]]()
    for (shape, own, least, most, *_), job in zip(distinct.tolist(), first.tolist(), strict=True):
        sizes = given[job] or _sizes_of(own, least, most) if shape >= 0 else (own,)
        found, rank, ranged = {}, rank_gpus(world, job), has_ranges and len(sizes) > 1
        counts = counts_of_ranks(least, most, rank) if rank and world.options.failures else ()  # as `with_lost_ranks`
        lost.append({rank * count for count in counts} - {*sizes})
        for gpus in sorted({*sizes, *lost[-1]}):
            if shape < 0 or (gpus == own and not ranged):
                found[gpus] = shape
                continue
            try:
                size = TargetSize(gpus, nodes=gpus // rank if rank else None)
                if ranged:
                    asked[len(menus), gpus] = asks_for(world, job, gpus)
                    size = _target(asked[len(menus), gpus].least)
                world, found[gpus] = made.shape(world, job, size)
            except UsageError:  # no equal parts of it fit the nodes
                continue
        if ranged and len(found) == 1:
            found = {own: shape}  # it is rigid
        if rank > 0:
            world, ranks[len(menus)] = made.shape_of_rank(world, job)
        menus.append(found)
    each = zip(*(world.sim.shapes[name].tolist() for name in ("cores", "memory")), strict=True)
    amounts: list[Amounts] = [(amount, amount) for amount in each]
    given_at = [{gpus: amounts[at] for gpus, at in sizes.items() if at >= 0} for sizes in menus]
    for (row, gpus), spec in asked.items():
        if gpus in given_at[row]:
            given_at[row][gpus] = (given_at[row][gpus][0], (spec.cores_per_node, spec.memory_mib_per_node))
    of = menus_of([*menus, {}], [*given_at, {}])
    between = [[gpus in few for gpus in row] for few, row in zip([*lost, ()], of.sizes.tolist(), strict=True)]
    world = with_lost_ranks(world, made)
    return world, of, index.reshape(-1), ranks, np.array(between, np.uint8).reshape(of.sizes.shape)


def _target(spec: JobSpec) -> TargetSize:
    return TargetSize(spec.gpus, *spec.amounts, spec.nodes)


def _with_rows(world: SimWorld, menus: Menus, menu: Ints) -> tuple[SimWorld, Ints, Ints, tuple[str, ...]]:
    """Return the world with the speeds of every kind of jobs at every size, each job's kind, and notes.

    Sizes of unknown speed are left out.
    """
    trace, pace = world.trace, world.sim.pace
    assert pace is not None
    rows: Ints = pace.runs["row"]
    columns = np.column_stack((trace.model, trace.gpu_type, trace.gpus, menu, rows))
    distinct, first, index = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    rows, made = np.full((len(distinct), menus.sizes.shape[1]), -1, np.int64), ResizedShapes()
    for i, job in enumerate(first.tolist()):
        for k, shape in enumerate(menus.shape[menu[job]].tolist()):
            if shape < 0:
                continue
            try:
                world, rows[i, k] = made.row(world, job, shape)
            except UsageError:
                menus.shape[menu[job], k] = -1
    index = index.reshape(-1)
    used: Counter[int] = Counter()
    for i, count in enumerate(np.bincount(index, minlength=len(distinct)).tolist()):
        for row in rows[i][menus.sizes[menu[first[i]]] != world.trace.gpus[first[i]]].tolist():
            used[row] += count if row >= 0 else 0
    return world, rows, index, made.notes(+used, "at other sizes")


def notes_of(policy: ReplayPolicy, troubles: Counter[str]) -> list[str]:
    """Return a note on each reason why the policy's rule chose sizes in place of its agent."""
    rule = "" if policy.spec is None else policy.spec.sizes
    return [f"{count} times {rule} chose sizes: {why}" for why, count in troubles.items()]


class SizedRun:
    """A replay whose sizes a rule, an agent or another package's component chooses; called as the compiled runs are.

    Attributes:
        notes: For the result: how often it could not choose, and why; how good the mappings were.

    Raises:
        UsageError: An agent's weights are of another shape, or its jobs cannot be mapped.
    """

    def __init__(self, world: SimWorld, sizer: Sizer) -> None:
        self._world, self._sizer, self._grant = world, sizer, Grants(world, sizer)
        partitions = range(len(world.pool.partitions))
        self._spaces = [in_python(space_of)(sizer.space, sizer.first, partition) for partition in partitions]
        state = state_of(world.sim, world.passes, sizer.outcome)
        self._map = QueueMapper(world, state, sized=True) if sizer.maps else None
        assert world.policy.spec is not None
        self._rule, model = world.policy.spec.sizes, world.policy.model
        try:
            weights = None if model is None else prepared_weights(model)
        except ValueError as error:
            assert model is not None
            raise UsageError(f"{model.path}: {error}", "train it again") from None
        self._choose: Callable[[Question], Ints] = partial(ask_component, self._rule)
        if model is not None:
            self._choose = partial(ask_agent, model.agent, weights)
        self._partitions = [name or "p" for name in world.pool.partitions]
        names = map(world.trace.model_name, world.trace.model.tolist())
        self._names = list(names) if sizer.asks else []  # of each job
        self._troubles: Counter[str] = Counter()
        racks, network = world.passes.scratch.racks, world.options.network
        switches = network is None or network.tree.parent.size > 0
        rack = racks["number"].copy() if racks is not None and switches else np.zeros(0, np.int64)
        self._find_nodes = [
            partial(
                sizing_nodes, own.scene, own.claims, world.sim.resources, world.passes.usable, world.passes.requests,
                world.passes.jobs.masks, rack, *world.pool.span(partition),
            )
            for partition, own in enumerate(self._spaces)
        ]  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """One note for each reason, and one on the mappings."""
        return (*notes_of(self._world.policy, self._troubles), *(() if self._map is None else self._map.notes))

    def __call__(self, log: EventLog) -> int:
        """Run to the end, or until the log must grow.

        Raises:
            ComponentError: Another package's component did not choose.
        """
        sizer = self._sizer
        run = bound(run_sized, self._world.sim, log, self._world.passes, sizer)
        code = run()

        def settled() -> bool:
            """Return whether the sizes are allowed; the run has then advanced to the next question."""
            nonlocal code
            code = run()
            return code != UNSOUND

        while code in (ASK, GRANT, MAP):
            partition = int(sizer.at[PARTITION])
            own = self._spaces[partition]
            if code == ASK:
                asked = partial(self._ask, own, partition)
                if why := decide_sizes(own.claims, sizer.rule, asked, settled):
                    if self._rule not in RULES:
                        raise component_error(self._rule, why)
                    self._troubles[why] += 1
                continue
            if code == GRANT:
                self._grant(own)
            elif self._map is not None:
                self._map(partition, own.queue[: own.used[QUEUED]])
            code = run()
        assert code != UNSOUND, f"{self._world.policy.name} chose sizes that are not allowed"
        return code

    def _ask(self, own: SizingSpace, partition: int) -> Ints:
        """Return the sizes that are chosen now in a partition; see `ask_agent`, `ask_component`."""
        claims = own.claims
        rows = claims.jobs["row"][: claims.number[COUNT]]
        names = tuple(map(self._names.__getitem__, own.scene.rows["job"][rows].tolist()))
        find_nodes, now = self._find_nodes[partition], float(self._world.sim.clock[0])
        return self._choose(question_of(claims, self._partitions[partition], now, names, find_nodes))
