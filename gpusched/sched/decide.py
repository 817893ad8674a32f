"""The staged policies: order the queue, place what fits, say why the rest waits. Agents where a policy has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from gpusched.config.weights import TrainedModel
from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.plan import Action, Plan, Preempt, Reason, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.agent import Context, decide_by_agent
from gpusched.sched.arrays import NodeArrays, PendingArrays, node_arrays_of, releases_of, scratch_for, waiting_of
from gpusched.sched.eligible import ineligible
from gpusched.sched.fit import set_feasibility
from gpusched.sched.gpus import Links, picked
from gpusched.sched.reasons import QueueBlock, Verdicts, holds_back
from gpusched.sched.sharing.pairs import pairs_of
from gpusched.sched.sizing.joining import with_joins
from gpusched.sched.sizing.live import sizes_of
from gpusched.sched.slicenames import base_of
from gpusched.sched.slices.split import joined, split
from gpusched.sched.stages import place_queue
from gpusched.sched.state import BACKFILL, LIMIT, POLICY, STARTED, Ints, PassOutcome, ints, new_outcome, seed_words
from gpusched.sched.tally import usage_of
from gpusched.sched.text import would_delay
from gpusched.sched.topology.live import costs_of
from gpusched.sched.turns import agents_to_ask, in_turn, partition_snapshot

__all__ = ["JobAnswer", "ask", "decide", "starts"]


def decide(snapshot: Snapshot, models: Mapping[str, TrainedModel] = {}) -> Plan:
    """Return what to start now, each partition by its own policy, and a reason for every job that stays pending.

    Then jobs that still wait for free resources, and may share GPUs, are placed beside others (`sharing.pairs`).
    Partitions with agents decide after the others, one by one (`in_turn`).

    The same snapshot (and models: partition -> an agent's weights) always gives the same plan. Where an agent has no
    model, or it returns NaN, its policy's fallback decides, and the plan says so. A job's nodes are distinct
    nodes of its partition, in its ``nodelist`` if it has one (only these, all of them if it asks for as many), not in
    ``exclude`` nor ``excluded_nodes``.

    Only agents stop running jobs (`Preempt`), and only such as their policy's file lets them stop. Resizable jobs are
    stopped to go on at another size (`Resize`), and start at any of their sizes, where the policy chooses sizes; ranks
    of hot ones join beside what starts, or leave.

    Jobs that could not run even on the empty partition (BAD_CONSTRAINTS), that need nodes or GPUs which are down,
    drained, lost or busy with foreign work (REQ_NODE_NOT_AVAIL), that are held, dependent, not yet due or bounded by
    their array block no other job and reserve nothing: they may start late if those parts come back under load, but
    a broken node does not stop a partition.
    """
    snapshot = split(snapshot)
    if len(snapshot.policies) > 1 and (agents := agents_to_ask(snapshot)):
        return in_turn(
            snapshot, agents, decide, lambda name, left: decide(partition_snapshot(left, name, agents[name]), models)
        )
    world = node_arrays_of(snapshot)
    sized = sizes_of(snapshot, world, models)
    snapshot, resizes, troubles = sized.snapshot, sized.resizes, sized.troubles
    reasons: dict[str, Reason] = {}
    eligible: list[PendingView] = []
    now, policies = snapshot.now, snapshot.policies
    for job in snapshot.pending:
        why = ineligible(job, now, policies) or sized.waits.get(job.id)
        if why is None:
            eligible.append(job)
        else:
            reasons[job.id] = why
    if not eligible:
        return Plan(actions=with_joins(resizes, snapshot, world), reasons=reasons, troubles=troubles)
    waiting = waiting_of(eligible, world, usage_of(snapshot), snapshot)
    effects = _Effects(troubles, {}, [], {}, {}, [])
    outcome, blocks = _run(snapshot, world, waiting, models, effects)
    verdicts = Verdicts(snapshot, world, waiting, outcome.code.tolist())
    for queue, block in blocks.values():
        verdicts.add(queue, block, reasons)
    begun = starts(world, waiting, outcome)
    reasons |= effects.reasons
    chosen: list[Action] = [*effects.stops, *resizes, *begun]
    if (pairs := pairs_of(snapshot, waiting, outcome, chosen, _orders(blocks))) is not None:
        for start in pairs.starts:
            reasons.pop(start.job_id, None)
            effects.waits.pop(start.job_id, None)
        begun += pairs.starts
    # last, as what starts goes before what grows
    actions: tuple[Action, ...] = (*effects.stops, *begun, *with_joins(resizes, snapshot, world, begun))
    plan = Plan(
        actions=actions, reasons=reasons, troubles=effects.troubles, remarks=effects.remarks, waits=effects.waits
    )
    return joined(plan)


class JobAnswer(NamedTuple):
    """The answer of the staged policies for one job that may start.

    Attributes:
        reason: Why it does not start; None: it does.
        ordered: All jobs of its partition that may start, from first to last. queue: Those of them that could run and
            that no limit holds.
        head: The first of them that blocks, or the one that waits for the end of a reservation and would be delayed by
            this job, and when that can start at the latest, by limits (Unix seconds); None: there is none.
        better: Whether it could start, and waits for a better place.
        racks: On how many racks it could start, where it waits for a better place or for one rack.
        exceeded: The bounds that leave too little for it (index into `Snapshot.bounds`), each with its reason.
        sharing: With which jobs it may share GPUs, or why with none, in a sentence; "": it does not ask to.
    """

    reason: Reason | None
    ordered: list[PendingView]
    queue: list[PendingView]
    head: tuple[PendingView, float] | None
    better: bool
    racks: int | None
    exceeded: list[tuple[int, Reason]]
    sharing: str


def ask(snapshot: Snapshot, job_id: str, partition: str) -> JobAnswer:
    """Answer for one job by the passes alone: without agents, solvers, random draws or sizing."""
    policies = {name: replace(p, place=_UNASKED.get(p.place, p.place)) for name, p in snapshot.policies.items()}
    snapshot = split(replace(snapshot, policies=policies))
    world = node_arrays_of(snapshot)
    eligible = [job for job in snapshot.pending if ineligible(job, snapshot.now, policies) is None]
    waiting = waiting_of(eligible, world, usage_of(snapshot), snapshot)
    effects = _Effects({}, {}, [], {}, {}, [])
    outcome, blocks = _run(snapshot, world, waiting, None, effects)
    verdicts = Verdicts(snapshot, world, waiting, outcome.code.tolist())
    views, reasons = waiting.views, dict[str, Reason]()
    of = {views[queue[0]].spec.partition: (queue, block) for queue, block in blocks.values() if queue}
    queue, block = of.get(partition, ([], QueueBlock(PolicySpec(name=""), -1, float("inf"))))
    at = next((job for job in queue if views[job].id == job_id), -1)
    verdicts.add(queue, block, reasons, only=at)
    counted = [job for job in queue if outcome.code[job] == STARTED or holds_back(int(outcome.code[job]))]
    own = at >= 0 and job_id in effects.reasons
    heads = [(k.job, k.begin) for k in effects.kept if own and at in k.behind]
    heads += [(block.head, block.shadow)] if block.head >= 0 else []
    reason = (reasons | effects.reasons).get(job_id)
    better = own and outcome.code[at] == POLICY
    shares = at >= 0 and views[at].spec.share
    begun = starts(world, waiting, outcome) if shares else []
    pairs = pairs_of(snapshot, waiting, outcome, begun, _orders(blocks)) if shares else None
    waits = better or (reason is not None and at >= 0 and verdicts.waits_until(at, block.policy) is not None)
    return JobAnswer(
        reason=reason,
        ordered=[views[job] for job in queue],
        queue=[views[job] for job in counted],
        head=next(((views[job], when) for job, when in heads), None),
        better=better,
        racks=verdicts.racks_now(at) if waits else None,
        exceeded=verdicts.exceeded(at) if at >= 0 and outcome.code[at] == LIMIT else [],
        sharing=pairs.explain(views[at]) if pairs is not None else "",
    )


_UNASKED: Mapping[str, Literal["fastest", "first-fit"]] = {"milp": "fastest", "naive": "first-fit"}


class _ReservedNodes(NamedTuple):
    """A job for which nodes are kept (`keeping`) from ``begin`` on; ``behind``: jobs that only this delays."""

    job: int
    begin: float
    behind: list[int]


class _Effects(NamedTuple):
    """Results of partitions' decisions beside the arrays; see `Context`. ``kept``: the jobs with nodes kept."""

    troubles: dict[str, str]
    remarks: dict[str, str]
    stops: list[Preempt]
    reasons: dict[str, Reason]
    waits: dict[str, float]
    kept: list[_ReservedNodes]


def _run(
    snapshot: Snapshot,
    world: NodeArrays,
    waiting: PendingArrays,
    models: Mapping[str, TrainedModel] | None,
    effects: _Effects,
) -> tuple[PassOutcome, dict[str, tuple[list[int], QueueBlock]]]:
    """Run the compiled passes, one per partition with a queue; return each one's ordered queue and what blocked it.

    ``models``: None: no agent is asked.
    """
    outcome = new_outcome(len(waiting.views), waiting.parts)
    releases = releases_of(snapshot.running, world, waiting.parts)
    scratch = scratch_for(world, waiting, releases)
    set_feasibility(world.total, world.usable, waiting.requests, waiting.jobs, scratch)
    costs = costs_of(snapshot, world, waiting, scratch)
    rng = seed_words(snapshot.seed)
    blocks = dict[str, tuple[list[int], QueueBlock]]()
    for name, policy in snapshot.policies.items():
        if name not in waiting.queues:
            continue
        context = Context(
            name, policy, snapshot, world, waiting, releases, rng, scratch, outcome, effects.remarks, effects.stops,
            effects.reasons, effects.waits, costs,
        )  # fmt: skip
        if models is not None and policy.agent is not None and not policy.traits.sizes:
            blocks[name] = decide_by_agent(context, models.get(base_of(name)), _staged, effects.troubles)
        else:
            blocks[name] = _staged(context)
        _note_kept(snapshot, waiting, outcome, blocks[name][0], effects)
    return outcome, blocks


def _orders(blocks: Mapping[str, tuple[list[int], QueueBlock]]) -> dict[str, Ints]:
    return {name: ints(queue) for name, (queue, _) in blocks.items()}


def _note_kept(
    snapshot: Snapshot, waiting: PendingArrays, outcome: PassOutcome, queue: list[int], effects: _Effects
) -> None:
    """Record for which jobs a pass kept nodes, and why jobs that fit only there stay pending."""
    calendar, shape = waiting.calendar, waiting.jobs.shape
    job, begin = int(calendar.kept_for[0]), float(calendar.kept_times[0])
    if begin == np.inf or job not in queue:  # or of a partition without a pass
        return
    closed, behind = waiting.jobs.feasibility[shape] == BACKFILL, queue[queue.index(job) + 1 :]
    waits = [j for j in behind if closed[j] and outcome.code[j] == BACKFILL]
    effects.kept.append(_ReservedNodes(job, begin, waits))
    why = Reason(code=ReasonCode.BACKFILL, message=would_delay(waiting.views[job].id, begin - snapshot.now))
    for j in waits:
        effects.reasons.setdefault(waiting.views[j].id, why)


def _staged(context: Context) -> tuple[list[int], QueueBlock]:
    """Decide for one partition by the stages of its policy."""
    queue = context.waiting.ordered(context.partition, context.policy.order, context.policy.ties)
    return queue.tolist(), place_queue(context, queue)


def starts(world: NodeArrays, waiting: PendingArrays, outcome: PassOutcome) -> list[Start]:
    """Return the started jobs with the GPUs picked on each node, and remove these from ``world.free``."""
    matrices: dict[str, Links] = {}
    actions, requests = list[Start](), waiting.requests
    counts, gpus, cores, memory = (column.tolist() for column in requests[2:6])
    nodes, offset = outcome.nodes.tolist(), outcome.offset.tolist()
    started = outcome.started[: outcome.total[0]]
    for j, shape in zip(started.tolist(), outcome.shape[started].tolist(), strict=True):
        job, rows = waiting.views[j], nodes[offset[j] : offset[j] + counts[shape]]
        parts = tuple(
            NodeAllocation(
                rank=rank,
                node=world.nodes[row].name,
                gpus=picked(world.nodes[row], world.free[row], gpus[shape], matrices),
                cores=cores[shape],
                memory_mib=memory[shape],
            )
            for rank, row in enumerate(rows)
        )
        for row, part in zip(rows, parts, strict=True):
            world.free[row] = [gpu for gpu in world.free[row] if gpu not in part.gpus]
        actions.append(Start(job.id, Allocation(job.id, parts)))
    return actions
