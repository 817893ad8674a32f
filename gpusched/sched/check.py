"""The plan check: the one gate between any policy, learned ones included, and real nodes.

Plain Python, and on purpose without the arrays and passes of the staged policies: it counts for itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.plan import Action, Plan, Preempt, Reason, ReasonCode, Rejection, Resize, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.slices import gpu_label, gpu_of
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.units import count_of, format_duration, format_memory
from gpusched.sched.eligible import ineligible, may_resize, may_stop
from gpusched.sched.limits import Rooms
from gpusched.sched.reservations.rules import closed_text
from gpusched.sched.sharing.rules import Sharer, cannot_share, sharer_of_running, sharer_of_start
from gpusched.sched.sizing.shapes import rank_view, reservation_of
from gpusched.sched.text import gpus_called, listed_types
from gpusched.sched.topology.spread import split_requests

_NOT_CHOSEN = Reason(code=ReasonCode.POLICY, message="the policy did not choose it")


def check(plan: Plan, snapshot: Snapshot) -> tuple[Plan, tuple[Rejection, ...]]:
    """Return the valid part of ``plan``, and which actions were rejected and why.

    Actions are tried in order against the snapshot's nodes, each on what those before it left. A start must be of a
    pending job that may start, whole (one part per rank on distinct nodes, each exactly as asked), on available nodes
    of the job's partition that it may use, with declared GPUs that are neither held nor blocked, within cores and
    memory, and within the limits of its array, user, groups and class. GPUs may be one other job's where both asked to
    share (`sharing.rules`). What a preempted job holds is not free before it is gone, so not within the same plan.
    Preempted may be what runs, says that it may be, and is not protected by its partition's policy (`may_stop`).

    Returns:
        The plan with sound actions only, and a reason for every pending job that stays: REJECTED where its start was
        struck out, the policy's own where it gave one, else POLICY.
    """
    ledger = _Ledger(snapshot)
    kept: list[Action] = []
    rejections: list[Rejection] = []
    reasons = dict(plan.reasons)
    for action in plan.actions:
        why = ledger.refuse(action)
        if why is None:
            kept.append(action)
            continue
        rejections.append(Rejection(action, why))
        if action.job_id in ledger.pending:
            reasons[action.job_id] = Reason(code=ReasonCode.REJECTED, message=f"plan check failed: {why}")
    for job_id in ledger.pending:
        if job_id in ledger.settled:
            reasons.pop(job_id, None)
        elif job_id not in reasons:
            reasons[job_id] = _NOT_CHOSEN
    return Plan(actions=tuple(kept), reasons=reasons, waits=plan.waits), tuple(rejections)


class _Ledger:
    """The remaining resources while the actions of a plan are checked in turn."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.pending = {job.id: job for job in snapshot.pending}
        self.settled: set[str] = set()  # jobs that an accepted action has already dealt with
        self._snapshot = snapshot
        self._racks = snapshot.topology.racks()
        self._running = {job.id: job for job in snapshot.running}
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._cores = {node.name: node.cores for node in snapshot.nodes}
        self._memory = {node.name: node.memory_mib for node in snapshot.nodes}
        self._holder: dict[tuple[str, int], str] = {}
        self._rooms = Rooms(snapshot)
        self._sharers = {job.id: running for job in snapshot.running if (running := sharer_of_running(job)) is not None}
        for job in snapshot.running:
            self._hold(job.allocation.parts, job.id)

    def refuse(self, action: Action) -> str | None:
        """Return why ``action`` is invalid; if it is valid, apply it and return None."""
        if action.job_id in self.settled:
            return f"the plan already has an action for job {action.job_id}"
        if isinstance(action, Start):
            why = self._refuse_start(action)
        elif isinstance(action, Resize | Preempt):
            why = self._refuse_stop(action)
        else:
            known = action.job_id in self._running or action.job_id in self.pending
            why = None if known else f"job {action.job_id} is not pending or running"
        if why is None:
            self.settled.add(action.job_id)
        return why

    def _refuse_start(self, action: Start) -> str | None:
        job = self.pending.get(action.job_id)
        if job is None:
            return f"job {action.job_id} is not pending"
        reason = ineligible(job, self._snapshot.now, self._snapshot.policies)
        reason = reason or self._rooms.full(job, action.allocation.gpus)
        if reason is not None:
            return reason.message
        own = sharer_of_start(job.id, job.user, job.spec, action.allocation.parts)
        profile = job.spec.profile
        faults = (self._forbidden(job, part) or self._short(part, own, profile) for part in action.allocation.parts)
        why = self._misshapen(job, action.allocation) or next(filter(None, faults), None)
        if why is None:
            if own is not None:
                self._share(own)
            self._hold(action.allocation.parts, job.id)
            self._rooms.take(job, action.allocation.gpus)
        return why

    def _refuse_stop(self, action: Resize | Preempt) -> str | None:
        job = self._running.get(action.job_id)
        if job is None:
            return f"job {action.job_id} is not running"
        policy = self._policy_of(job)
        if policy is None:
            return f"no policy decides on job {action.job_id}"
        if isinstance(action, Preempt):
            return may_stop(job, policy.preempt, self._snapshot.now)
        if why := may_resize(job, policy.resize, self._snapshot.now):
            return why
        assert job.spec is not None
        assert job.spec.elastic is not None
        allowed = action.gpus in job.spec.elastic.sizes and action.gpus != job.spec.gpus
        if not allowed:
            return f"job {job.id} cannot go from {job.spec.gpus} to {action.gpus} GPUs"
        why = self._rooms.refuse_resize(job, action.gpus)
        return why or (self._refuse_joins(job, action) if job.spec.is_hot else None)

    def _refuse_joins(self, job: RunningView, action: Resize) -> str | None:
        """Return why ranks cannot join a hot job as planned; if they can, or none does, hold what they get."""
        spec, parts = job.spec, job.allocation.parts
        assert spec is not None
        if action.gpus % spec.gpus_per_node:
            return f"{count_of(action.gpus, 'GPU')} cannot be split into ranks of {spec.gpus_per_node}"
        if len(action.joins) != max(0, action.gpus // spec.gpus_per_node - len(parts)):
            return f"{count_of(len(action.joins), 'rank')} do not bring it to {count_of(action.gpus, 'GPU')}"
        one = rank_view(job, job.expected_end - self._snapshot.now, reservation_of(job, self._snapshot))
        nodes = {part.node for part in parts}
        for part in action.joins:
            rank = Allocation(job.id, (replace(part, rank=0),))
            if part.node in nodes:
                return f"it has a rank on node {part.node}"
            if why := self._misshapen(one, rank) or self._forbidden(one, part) or self._short(part, None, ""):
                return why
            nodes.add(part.node)
        self._hold(action.joins, job.id)
        return None

    def _policy_of(self, job: RunningView) -> PolicySpec | None:
        node = next((n for p in job.allocation.parts if (n := self._nodes.get(p.node)) is not None), None)
        return self._snapshot.policies.get(node.partition) if node is not None else None

    def _misshapen(self, job: PendingView, allocation: Allocation) -> str | None:
        if why := _not_a_gang(job.id, allocation):
            return why
        spec = job.spec
        if spec.elastic is not None:
            gpus, nodes = allocation.gpus, len(allocation.parts)
            if gpus not in (*spec.elastic.sizes, spec.gpus) or gpus % nodes:
                return f"it may not have {count_of(gpus, 'GPU')} on {count_of(nodes, 'node')}"
            part = allocation.parts[0]
            spec = spec.at_size(gpus, nodes, (part.cores, part.memory_mib))
        if spec.max_nodes is not None:
            ask = next((ask for ask in split_requests(spec) if ask.parts == len(allocation.parts)), None)
            if ask is None:
                return f"it may not be on {count_of(len(allocation.parts), 'node')}"
            names = ("nodes", "gpus_per_node", "cores_per_node", "memory_mib_per_node")
            spec = replace(spec, **dict(zip(names, (ask.parts, *ask.needs), strict=True)))
        if len(allocation.parts) != spec.nodes:
            return f"it requests {count_of(spec.nodes, 'node')}, the plan gives {len(allocation.parts)}"
        for part in allocation.parts:
            if len(part.gpus) != spec.gpus_per_node:
                asked = count_of(spec.gpus_per_node, "GPU")
                return f"it requests {asked} per node, the plan gives {len(part.gpus)} on {part.node}"
            if (part.cores, part.memory_mib) != (spec.cores_per_node, spec.memory_mib_per_node):
                asked = f"{count_of(spec.cores_per_node, 'core')} and {format_memory(spec.memory_mib_per_node)}"
                return f"it requests {asked} per node, the plan gives {part.cores} and {format_memory(part.memory_mib)}"
        racks = {self._racks.get(part.node, part.node) for part in allocation.parts}
        if spec.max_spread == "rack" and self._snapshot.topology and len(racks) > 1:
            return f"its nodes are in {count_of(len(racks), 'rack')}; it requests one"
        return None

    def _forbidden(self, job: PendingView, part: NodeAllocation) -> str | None:
        if why := self._no_node(part):
            return why
        node, spec = self._nodes[part.node], job.spec
        if node.partition != spec.partition:
            return f"node {node.name} is in partition {node.partition}, not {spec.partition}"
        if spec.nodelist and node.name not in spec.nodelist:
            return f"node {node.name} is not in its nodelist"
        if node.name in spec.exclude:
            return f"node {node.name} is excluded by the job"
        if spec.gpu_types and node.gpu_type not in spec.gpu_types:
            return f"node {node.name} has {gpus_called(node.gpu_type)}; it requests {listed_types(spec.gpu_types)}"
        if spec.exclusive and (len(node.gpus), node.cores, node.memory_mib) != (
            spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node,
        ):  # fmt: skip
            return f"node {node.name} differs in size from the whole nodes it requests"
        if node.name in job.excluded_nodes:
            return f"an earlier attempt failed on node {node.name}"
        if why := closed_text(job, node, self._snapshot.now):
            return f"node {node.name} {why}, and its limit is {format_duration(job.limit_s)}"
        return None

    def _no_node(self, part: NodeAllocation) -> str | None:
        node = self._nodes.get(part.node)
        if node is None:
            return f"there is no node {part.node}"
        if not node.available:
            return f"node {node.name} is not available ({node.unavailable_reason or 'no reason given'})"
        return None

    def _short(self, part: NodeAllocation, own: Sharer | None, profile: str) -> str | None:
        node = self._nodes[part.node]
        if why := self._gpu_taken(node, part.gpus, own, profile):
            return why
        if part.cores < 0 or part.memory_mib < 0:
            return f"negative cores or memory on {node.name}"
        if part.cores > self._cores[node.name]:
            return f"node {node.name} has {count_of(max(0, self._cores[node.name]), 'core')} free, not {part.cores}"
        if part.memory_mib > self._memory[node.name]:
            free, asked = format_memory(max(0, self._memory[node.name])), format_memory(part.memory_mib)
            return f"node {node.name} has {free} of memory free, not {asked}"
        return None

    def _gpu_taken(self, node: NodeView, gpus: tuple[int, ...], own: Sharer | None, profile: str) -> str | None:
        for gpu in gpus:
            if why := _not_as_asked(node, gpu, profile):
                return why
            if gpu in node.blocked:
                return f"GPU {gpu} of {node.name} cannot be used ({node.blocked[gpu]})"
            holder = self._holder.get((node.name, gpu))
            if holder is not None and (why := self._not_to_share(node, own, holder)) is not None:
                return f"GPU {gpu} of {node.name} is held by job {holder}{why}"
        return f"a GPU of {node.name} is allocated twice" if len(set(gpus)) != len(gpus) else None

    def _not_to_share(self, node: NodeView, own: Sharer | None, holder: str) -> str | None:
        """Return why the job cannot share GPUs with this holder."""
        if own is None:
            return ""
        other = self._sharers.get(holder)
        why = cannot_share(node, own, other) if other is not None else "which does not share its GPUs"
        return None if why is None else f": {why}"

    def _share(self, own: Sharer) -> None:
        """Record what a started job shares, and with which job."""
        other = self._sharers.get(self._holder.get((own.node, own.gpus[0]), ""))
        if other is not None:
            self._sharers[other.id] = other._replace(partner=own.id)
            own = own._replace(partner=other.id)
        self._sharers[own.id] = own

    def _hold(self, parts: Iterable[NodeAllocation], job_id: str) -> None:
        for part in parts:
            self._holder.update(dict.fromkeys(((part.node, g) for g in part.gpus), job_id))
            if part.node in self._cores:
                self._cores[part.node] -= part.cores
                self._memory[part.node] -= part.memory_mib


def _not_as_asked(node: NodeView, gpu: int, profile: str) -> str | None:
    """Return why a number of an allocation is no whole GPU, or no slice of the profile, of the node."""
    if profile:
        known = any(one.number == gpu and one.profile == profile for one in node.slices)
        return None if known else f"node {node.name} has no slice {gpu_label(gpu, profile)}"
    if gpu not in node.gpus:
        return f"node {node.name} has no GPU {gpu}"
    if any(gpu_of(one.number) == gpu for one in node.slices):
        return f"GPU {gpu} of {node.name} is cut into slices"
    return None


def _not_a_gang(job_id: str, allocation: Allocation) -> str | None:
    if allocation.job_id != job_id:
        return f"the allocation is of job {allocation.job_id}"
    if not allocation.parts:
        return "the allocation has no parts"
    if [part.rank for part in allocation.parts] != list(range(len(allocation.parts))):
        return "the ranks are not 0, 1, 2 .. in order"
    if len({part.node for part in allocation.parts}) != len(allocation.parts):
        return "two parts are on the same node"
    return None
