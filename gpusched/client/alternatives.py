"""Other requests for the same work, sized as ``submit`` sizes them: fewer GPUs, another partition, a shorter limit."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpusched.client.sizing import ResourceRequest, size
from gpusched.config.validate import validate_spec
from gpusched.errors import UsageError
from gpusched.forecast.start_times import Alternative, SpreadView
from gpusched.model.forecast import Spread
from gpusched.model.jobs import JobSpec
from gpusched.model.plan import ReasonCode
from gpusched.model.resources import Inventory, Partition
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import format_duration, format_memory
from gpusched.sched.explain import Explanation
from gpusched.sched.slicenames import base_of
from gpusched.sched.tally import covers, need, over_more_nodes
from gpusched.sched.topology.spread import split_requests, supports_racks

_SHORTER_S = (*(3600 * h for h in (72, 24, 12, 6, 3, 1)), 1800, 600)
_MAX_LIMITS = 4
_Option = tuple[str, str, JobSpec]
"""What it is, the options of ``submit`` that request it, the spec."""


def alternatives_of(
    inventory: Inventory, snapshot: Snapshot, job: PendingView, explanation: Explanation
) -> list[Alternative]:
    """Return requests that might start sooner than the job as it stands; `StartForecast` shows whether they do.

    For a held job, the first alternative is to release it.
    """
    found: list[Alternative] = []
    if job.held_by:
        found.append(Alternative("released", "released", f"gpusched release {job.id}", _with_spec(job, job.spec)))
    elif job.dependency or (job.eligible_time or 0.0) > snapshot.now or job.spec.partition not in snapshot.policies:
        return []  # its start depends on something other than its size
    kinds = [("limit", _shorter_limits(snapshot, job, explanation))]
    if not job.spec.profile:  # which slices other nodes have is not looked at
        kinds.insert(0, ("gpus", _fewer_gpus(inventory, job.spec)))
        kinds = [("partition", _other_partitions(inventory, job.spec)), *kinds, ("nodes", _more_nodes(job.spec))]
    for kind, candidates in kinds:
        for label, how, spec in candidates:
            try:
                validate_spec(msgspec.structs.replace(spec, partition=base_of(spec.partition)), inventory)
            except UsageError:
                continue
            found.append(Alternative(label if kind == "partition" else kind, label, how, _with_spec(job, spec)))
    return found


def spreads_of(snapshot: Snapshot, job: PendingView) -> list[SpreadView]:
    """Return the job bound to one server, to one rack, and unbound, nearest first; none for a job on a single node."""
    spec, policy = job.spec, snapshot.policies.get(job.spec.partition)
    is_distributed = spec.max_nodes is not None or (spec.nodes > 1 and bool(snapshot.topology))
    if not is_distributed or policy is None or not supports_racks(policy):
        return []
    without_wait = msgspec.structs.replace(spec, placement_wait_s=0.0)
    found = [SpreadView("any", "--max-spread any --placement-wait 0", _with_spread(job, without_wait, "any"))]
    if snapshot.topology:
        found.insert(0, SpreadView("rack", "--max-spread rack", _with_spread(job, without_wait, "rack")))
    if spec.max_nodes is not None:
        fewest = split_requests(spec)[0]
        on_one_server = msgspec.structs.replace(
            without_wait, max_nodes=None, nodes=1, gpus_per_node=fewest.gpus, cores_per_node=fewest.cores,
            memory_mib_per_node=fewest.memory_mib,
        )  # fmt: skip
        found.insert(0, SpreadView("server", "--max-spread server", _with_spread(job, on_one_server, "server")))
    return found


def _with_spread(job: PendingView, spec: JobSpec, spread: Spread) -> PendingView:
    return _with_spec(job, msgspec.structs.replace(spec, max_spread=spread))


def _with_spec(job: PendingView, spec: JobSpec) -> PendingView:
    same = spec.partition == job.spec.partition
    return msgspec.structs.replace(job, spec=spec, held_by="", excluded_nodes=job.excluded_nodes if same else ())


def _fewer_gpus(inventory: Inventory, spec: JobSpec) -> Iterator[_Option]:
    """Yield half the GPUs, a quarter, ... with the same cores and memory per GPU."""
    gpus = spec.gpus // 2
    while gpus >= 1:
        cores = max(1, spec.nodes * spec.cores_per_node * gpus // spec.gpus)
        memory = max(1, spec.nodes * spec.memory_mib_per_node * gpus // spec.gpus)
        smaller = _sized(
            inventory, spec, ResourceRequest(gpus=gpus, cores=cores, memory_mib=memory, partition=spec.partition)
        )
        if smaller is not None:
            unit = "GPU" if gpus == 1 else "GPUs"
            yield f"with {gpus} {unit}", f"--gpus {gpus} --cpus {cores} --mem {format_memory(memory)}", smaller
        gpus //= 2


def _other_partitions(inventory: Inventory, spec: JobSpec) -> Iterator[_Option]:
    """Yield other partitions: the same shape if their nodes are large enough, else as many GPUs in their ratios."""
    for partition in inventory.partitions:
        if partition.name == spec.partition or spec.nodelist:
            continue
        types = tuple(t for t in spec.gpu_types if any(n.gpu_type == t for n in partition.nodes))
        if spec.gpu_types and not types:
            continue
        moved = msgspec.structs.replace(spec, partition=partition.name, flavor=None, exclude=(), gpu_types=types)
        if not _can_hold(partition, spec):
            sized = _sized(inventory, moved, ResourceRequest(partition=partition.name, gpus=spec.gpus or None))
            if sized is None or not spec.gpus:
                continue
            moved = sized
        gpus = f" --gpus {spec.gpus}" if spec.gpus else ""
        yield f"in {partition.name}", f"-p {partition.name}{gpus}", moved


def _can_hold(partition: Partition, spec: JobSpec) -> bool:
    return sum(covers((n.gpus, n.cores, n.memory_mib), need(spec)) for n in partition.nodes) >= spec.nodes


def _sized(inventory: Inventory, spec: JobSpec, request: ResourceRequest) -> JobSpec | None:
    request = msgspec.structs.replace(
        request, time_limit_s=spec.time_limit_s, nodelist=spec.nodelist, exclude=spec.exclude, gpu_types=spec.gpu_types
    )
    try:
        return msgspec.structs.replace(spec, **msgspec.structs.asdict(size(request, inventory)))
    except UsageError:
        return None


def _shorter_limits(snapshot: Snapshot, job: PendingView, explanation: Explanation) -> Iterator[_Option]:
    """Yield shorter time limits, longest first, including one that fits before the reservation of the queue's head."""
    limits = {s for s in _SHORTER_S if s < job.spec.time_limit_s}
    protects_head = snapshot.policies[job.spec.partition].backfill in ("easy", "conservative")
    protects_head = protects_head or explanation.reason.code is ReasonCode.BACKFILL
    if protects_head and explanation.head not in ("", job.id):
        wait = int(min(explanation.head_at - snapshot.now, job.spec.time_limit_s))
        if 0 < wait < job.spec.time_limit_s:
            limits = {wait, *(s for s in limits if s < wait)}
    nodes = [node for node in snapshot.nodes if node.partition == job.spec.partition and job.reserved is None]
    until_reserved = {int(reservation.begin - snapshot.now) for node in nodes for reservation in node.reservations}
    limits |= {wait for wait in until_reserved if 0 < wait < job.spec.time_limit_s}
    for seconds in sorted(limits, reverse=True)[:_MAX_LIMITS]:
        text = format_duration(seconds)
        yield f"with a time limit of {text}", f"-t {text}", msgspec.structs.replace(job.spec, time_limit_s=seconds)


def _more_nodes(spec: JobSpec) -> Iterator[_Option]:
    """Yield the same GPUs spread over more nodes."""
    for each in over_more_nodes(spec, spec.gpus):
        options = f"-N {each.nodes} --gpus-per-node {each.gpus_per_node}"
        yield f"over {each.nodes} nodes, if it supports that", options, each
