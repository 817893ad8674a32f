"""Split a snapshot: slices of one profile become nodes and a partition of their own; join the plan's names again.

Node ``dgx1`` of partition ``train`` with a GPU that is cut into 1g.10gb becomes ``dgx1``, its whole GPUs, and
``dgx1/1g.10gb``, whose GPUs are the slices' numbers, in ``train/1g.10gb`` with the policy of ``train``. A job that asks
for the profile is in that partition's queue. No name of a node or partition has a slash.

Both functions change nothing of what was split or joined before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.plan import Action, Plan, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import FinishedView, NodeView, PendingView, RunningView, Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.slicenames import SEPARATOR, base_of, inner_name, queue_of
from gpusched.sched.slices.rows import holds, rows_of


def split(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with whole GPUs and slices apart; itself, where it has no slices and no job asks for any.

    GPUs that are cut on demand are among the whole ones, too: held until nothing runs on their slices any more. And
    slices that they could be cut into are among the slices: held until then.
    """
    pending, running = snapshot.pending, snapshot.running
    asked = {job.spec.profile for job in pending if job.spec.profile and _asks(job.spec)}
    if not asked and not any(n.slices or n.cuttable for n in snapshot.nodes):
        if not any(_asks(job.spec) for job in running):
            return snapshot
    own = [rows_of(node, asked) for node in snapshot.nodes]
    nodes = [row for rows in own for row in rows]
    held = (*map(_running, running), *holds(snapshot, asked))
    lent = tuple(one for rows in own if len(rows) > 1 for one in _overruns(rows, held))
    views = [split_job(job) for job in pending]
    names = {node.partition for node in nodes} | {view.spec.partition for view in views}
    return replace(
        snapshot,
        nodes=tuple(nodes),
        pending=tuple(views),
        running=held + lent,
        policies=_policies(snapshot.policies, names),
        topology=_topology(snapshot.topology, nodes),
        finished=tuple(map(_finished, snapshot.finished)),
    )


def joined(plan: Plan) -> Plan:
    """Return the plan with the nodes' own names."""
    return replace(plan, actions=tuple(map(_joined, plan.actions)))


def _asks(spec: JobSpec | None) -> bool:
    return spec is not None and spec.profile != "" and SEPARATOR not in spec.partition


def _overruns(rows: Sequence[NodeView], running: Sequence[RunningView]) -> Iterator[RunningView]:
    """Yield what jobs hold of one row of a node beyond its part, as jobs on the node's other rows.

    A job that had more cores than its GPUs' part when other GPUs were cut keeps them; slices get them when it ends.
    """
    here = {row.name: row for row in rows}
    parts = [(job, part) for job in running for part in job.allocation.parts if part.node in here]
    parts.sort(key=lambda pair: pair[0].expected_end)
    room = {row.name: [row.cores, row.memory_mib] for row in rows}
    for _, part in parts:
        room[part.node][0] -= part.cores
        room[part.node][1] -= part.memory_mib
    for job, part in parts:
        beyond = [max(0, min(-has, held)) for has, held in zip(room[part.node], _amounts(part), strict=True)]
        room[part.node] = [has + more for has, more in zip(room[part.node], beyond, strict=True)]
        for name, has in room.items():
            given = [min(max(0, own), more) for own, more in zip(has, beyond, strict=True)]
            if name == part.node or not any(given):
                continue
            room[name] = [own - more for own, more in zip(has, given, strict=True)]
            beyond = [own - more for own, more in zip(beyond, given, strict=True)]
            held = NodeAllocation(rank=0, node=name, gpus=(), cores=given[0], memory_mib=given[1])
            yield RunningView(
                id=f"{job.id}{SEPARATOR}{name}", user=job.user, allocation=Allocation(job.id, (held,)),
                start_time=job.start_time, expected_end=job.expected_end, group=job.group,
            )  # fmt: skip


def _amounts(part: NodeAllocation) -> tuple[int, int]:
    return part.cores, part.memory_mib


def split_job(job: PendingView) -> PendingView:
    """Return a waiting job as it is in a split snapshot."""
    if not _asks(job.spec):
        return job
    excluded = tuple(inner_name(name, job.spec.profile) for name in job.excluded_nodes)
    return replace(job, spec=_spec(job.spec), excluded_nodes=excluded)


def _running(job: RunningView) -> RunningView:
    if job.spec is None or not _asks(job.spec):
        return job
    parts = tuple(replace(part, node=inner_name(part.node, job.spec.profile)) for part in job.allocation.parts)
    return replace(job, spec=_spec(job.spec), allocation=Allocation(job.allocation.job_id, parts))


def _finished(job: FinishedView) -> FinishedView:
    return replace(job, partition=inner_name(job.partition, job.profile)) if job.profile else job


def _spec(spec: JobSpec) -> JobSpec:
    return replace(
        spec,
        partition=queue_of(spec),
        nodelist=tuple(inner_name(name, spec.profile) for name in spec.nodelist),
        exclude=tuple(inner_name(name, spec.profile) for name in spec.exclude),
    )


def _policies(policies: Mapping[str, PolicySpec], names: Iterable[str]) -> dict[str, PolicySpec]:
    """Return the policies with those of slices (`PolicySpec.for_slices`)."""
    found = dict(policies)
    for name in sorted(names):
        policy = policies.get(base_of(name))
        if policy is not None and name not in found:
            found[name] = policy.for_slices
    return found


def _topology(topology: Topology, nodes: Iterable[NodeView]) -> Topology:
    """Return the topology with the slices' nodes beside their node."""
    inner: dict[str, list[str]] = {}
    for node in nodes:
        inner.setdefault(base_of(node.name), []).append(node.name)
    switches = tuple(
        replace(switch, nodes=tuple(name for node in switch.nodes for name in inner.get(node, [node])))
        for switch in topology.switches
    )
    return replace(topology, switches=switches)


def _joined(action: Action) -> Action:
    if isinstance(action, Start):
        parts = action.allocation.parts
        if any(SEPARATOR in part.node for part in parts):
            return Start(action.job_id, Allocation(action.job_id, _based(parts)))
    return action


def _based(parts: Iterable[NodeAllocation]) -> tuple[NodeAllocation, ...]:
    return tuple(replace(part, node=base_of(part.node)) for part in parts)
