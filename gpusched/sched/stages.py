"""The last two stages of a partition's decision, placing and backfill, for a queue in any order."""

from __future__ import annotations

from collections.abc import Mapping as Map

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import MAPPING_PLACES, Mapping
from gpusched.model.snapshot import Snapshot
from gpusched.sched.agent import Context
from gpusched.sched.arrays import NodeArrays, PendingArrays
from gpusched.sched.kernel.by_rule import PlacementRule, pass_for
from gpusched.sched.mapping.learned import TypeSpeeds
from gpusched.sched.mapping.queue import MappingFacts, Solver, map_queue, summary, unfit_of
from gpusched.sched.placement import NodeChooser, pass_by_component
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.state import BACKFILLS, PLACES, POLICY, Floats, Ints
from gpusched.sched.topology.queue import Costs, Priced, pass_by_cost
from gpusched.sched.topology.spread import better_place_text


def place_queue(context: Context, queue: Ints) -> QueueBlock:
    """Start jobs of ``queue: int64[waiting]``, first to last, by the policy's placement and backfill."""
    policy = context.policy
    if policy.place in MAPPING_PLACES:
        return _place_by_mapping(context, queue)
    if policy.place == "contention":
        if context.costs is not None:
            return place_by_cost(context, queue, context.costs)
        context.remarks[context.partition] = "no measured placement costs yet: placed as by rack"
    if policy.place not in PLACES:
        return _place_by_component(context, queue)
    rule, backfill = PlacementRule(PLACES[policy.place], context.rng), BACKFILLS[policy.backfill]
    head, shadow = pass_for(backfill)(context.state, queue, backfill, rule)
    return QueueBlock(policy, int(head), float(shadow))


def _place_by_component(context: Context, queue: Ints) -> QueueBlock:
    """Place by another package's component."""
    policy, world = context.policy, context.world
    gpu_type = np.array([node.gpu_type for node in world.nodes])
    chooser = NodeChooser(policy.place, world.usable, gpu_type, context.rng, replays=False)
    head, shadow = pass_by_component(context.state, queue, BACKFILLS[policy.backfill], chooser)
    return QueueBlock(policy, int(head), float(shadow))


def place_by_cost(context: Context, queue: Ints, costs: Costs) -> QueueBlock:
    """Place by cost, with the reason of each job that waits for a better place."""
    policy = context.policy
    head, shadow = pass_by_cost(context.state, queue, BACKFILLS[policy.backfill], Priced(costs, 0))
    waits = {job: costs.until(job, float(costs.wait_cost[job].sum())) for job in held_back(context, queue)}
    set_wait_reasons(context, costs, waits)
    return QueueBlock(policy, int(head), float(shadow))


def held_back(context: Context, queue: Ints) -> list[int]:
    """Return the jobs of the queue that could start and do not."""
    found: list[int] = queue[context.outcome.code[queue] == POLICY].tolist()
    return found


def set_wait_reasons(context: Context, costs: Costs, waits: Map[int, float]) -> None:
    """Set the reasons of jobs that wait for a better place: job -> deadline of the wait."""
    for job, until in waits.items():
        own, harm = costs.wait_cost[job].tolist()
        message = better_place_text(own, harm, until, context.snapshot.now)
        context.reasons[context.waiting.views[job].id] = Reason(code=ReasonCode.POLICY, message=message)
        context.waits[context.waiting.views[job].id] = until


def _place_by_mapping(context: Context, queue: Ints) -> QueueBlock:
    """Place by mapping; without HiGHS, greedily, with a remark in the plan."""
    policy = context.policy
    facts = _mapping_facts(context.snapshot, context.world, context.waiting, context.partition, policy.mapping)
    solver: Solver | None = None
    if policy.place == "milp":
        try:
            solver = deadline(policy.mapping.budget_s)
        except UsageError as error:
            context.remarks[context.partition] = f"{error.message}; placed greedily"
    head, shadow, reports = map_queue(context.state, queue, facts, policy.mapping, BACKFILLS[policy.backfill], solver)
    if solver is not None and (line := summary(reports)):
        context.remarks[context.partition] = line
    return QueueBlock(policy, int(head), float(shadow))


def deadline(budget_s: float) -> Solver:
    """Return a solver that improves greedy solutions until the budget, counted from now, is used up.

    Raises:
        UsageError: HiGHS is not installed.
    """
    from gpusched.sched.mapping.deadline import Deadline

    return Deadline(budget_s)


def _mapping_facts(
    snapshot: Snapshot, world: NodeArrays, waiting: PendingArrays, partition: str, mapping: Mapping
) -> MappingFacts:
    kinds = {name: i for i, name in enumerate(dict.fromkeys(node.gpu_type for node in world.nodes))}
    users = {name: i for i, name in enumerate(dict.fromkeys(view.user for view in waiting.views))}
    own = {node.name for node in world.nodes if node.partition == partition}
    own_jobs = waiting.queues[partition]
    held = np.zeros(len(users))
    for job in snapshot.running:
        if job.user in users:
            held[users[job.user]] += sum(len(part.gpus) for part in job.allocation.parts if part.node in own)
    speeds = TypeSpeeds(mapping.speeds, tuple(kinds), snapshot.beliefs)

    def speed(jobs: Ints) -> Floats:
        views = [waiting.views[job] for job in jobs.tolist()]
        return speeds.of((view.user, view.spec.name, view.spec.gpus) for view in views)

    return MappingFacts(
        usable=world.usable,
        kind=np.array([kinds[node.gpu_type] for node in world.nodes], np.int64),
        speed=speed,
        user=np.array([users[view.user] for view in waiting.views], np.int64),
        held=held,
        priority=waiting.keys.priority,
        unfit=unfit_of(waiting.requests.gpus[waiting.jobs.shape[own_jobs]], int(world.total.gpus.max(initial=0))),
    )
