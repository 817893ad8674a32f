"""Agents of several partitions decide in turn: each within what those before it leave of limits and links; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from gpusched.model.jobs import Allocation
from gpusched.model.plan import Action, Plan, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.limits import with_limits_after
from gpusched.sched.slicenames import inner_name


def agents_to_ask(snapshot: Snapshot) -> dict[str, PolicySpec]:
    """Return partition -> policy where an agent decides and there is something to decide."""
    waiting = {job.spec.partition for job in snapshot.pending}
    running = {job.spec.partition for job in snapshot.running if job.spec is not None}
    agents = {name: policy for name, policy in snapshot.policies.items() if policy.agent is not None}
    return {n: policy for n, policy in agents.items() if n in waiting or (policy.traits.sizes and n in running)}


def in_turn(
    snapshot: Snapshot,
    agents: Mapping[str, PolicySpec],
    staged: Callable[[Snapshot], Plan],
    decided: Callable[[str, Snapshot], Plan],
) -> Plan:
    """Return the plan of all partitions: those without an agent first, by ``staged``, then the agents' one by one.

    ``decided`` decides for a partition by a snapshot with what the partitions before leave of limits and arrays, and
    with their starts on the links; the given one itself if none of this matters to its jobs.
    """
    plan = staged(_without_partitions(snapshot, agents))
    for name, policy in agents.items():
        left = with_limits_after(plan.actions, snapshot, name)
        if snapshot.beliefs and policy.uses_job_class_estimates:
            left = _with_starts(plan.actions, left)
        plan = _merged(plan, decided(name, left))
    return plan


def partition_snapshot(snapshot: Snapshot, partition: str, spec: PolicySpec) -> Snapshot:
    """Return the snapshot to decide about one partition's jobs by ``spec``.

    Other partitions' nodes stay: jobs there press on links that all share, and what agents see is of the whole cluster.
    """
    return replace(
        snapshot,
        pending=tuple(j for j in snapshot.pending if j.spec.partition == partition),
        policies={partition: spec},
    )


def _with_starts(actions: Iterable[Action], snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with what these actions start as running jobs; such as have one GPU press on no link."""
    pending = {job.id: job for job in snapshot.pending}
    begun = []
    for start in (action for action in actions if isinstance(action, Start) and action.allocation.gpus > 1):
        job = pending[start.job_id]
        named = (replace(p, node=inner_name(p.node, job.spec.profile)) for p in start.allocation.parts)  # as split
        begun.append(job.started(Allocation(job.id, tuple(named)), snapshot.now))
    return replace(snapshot, running=(*snapshot.running, *begun)) if begun else snapshot


def _merged(plan: Plan, part: Plan) -> Plan:
    return Plan(
        actions=plan.actions + part.actions,
        reasons=plan.reasons | part.reasons,
        troubles=plan.troubles | part.troubles,
        remarks=plan.remarks | part.remarks,
        waits=plan.waits | part.waits,
    )


def _without_partitions(snapshot: Snapshot, partitions: Mapping[str, PolicySpec]) -> Snapshot:
    """Return the snapshot without these partitions; jobs of unknown partitions remain."""
    return replace(
        snapshot,
        pending=tuple(j for j in snapshot.pending if j.spec.partition not in partitions),
        policies={name: spec for name, spec in snapshot.policies.items() if name not in partitions},
    )
