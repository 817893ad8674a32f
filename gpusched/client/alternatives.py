"""Other ways to ask for the same work, sized as ``submit`` sizes them: fewer GPUs, elsewhere, a shorter limit."""

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
from gpusched.sched.tally import covers, need, over_more_nodes
from gpusched.sched.topology.spread import knows_racks, splits

_SHORTER_S = (*(3600 * h for h in (72, 24, 12, 6, 3, 1)), 1800, 600)
_MOST_LIMITS = 4


def alternatives_of(
    inventory: Inventory, snapshot: Snapshot, job: PendingView, explanation: Explanation
) -> list[Alternative]:
    """What might start sooner than the job as it stands; whether it does is for `StartForecast` to say.

    A job that is held comes first as it would be if it were released.
    """
    found: list[Alternative] = []
    if job.held_by:
        found.append(Alternative("released", "released", f"gpusched release {job.id}", _as(job, job.spec)))
    elif job.dependency or (job.eligible_time or 0.0) > snapshot.now or job.spec.partition not in snapshot.policies:
        return []  # its start hangs on something else than its size
    for kind, options in (
        ("partition", _elsewhere(inventory, job.spec)),
        ("gpus", _fewer(inventory, job.spec)),
        ("limit", _shorter(snapshot, job, explanation)),
        ("nodes", _spread(job.spec)),
    ):
        for what, how, spec in options:
            try:
                validate_spec(spec, inventory)
            except UsageError:
                continue
            found.append(Alternative(what if kind == "partition" else kind, what, how, _as(job, spec)))
    return found


def spreads_of(snapshot: Snapshot, job: PendingView) -> list[SpreadView]:
    """The job bound to one server, to one rack, and to neither, where it may be on several nodes; the nearest first."""
    spec, policy = job.spec, snapshot.policies.get(job.spec.partition)
    several = spec.max_nodes is not None or (spec.nodes > 1 and bool(snapshot.topology))
    if not several or policy is None or not knows_racks(policy):
        return []
    at_once = msgspec.structs.replace(spec, placement_wait_s=0.0)
    found = [SpreadView("any", "--max-spread any --wait-for-placement 0", _as(job, _bound(at_once, "any")))]
    if snapshot.topology:
        found.insert(0, SpreadView("rack", "--max-spread rack", _as(job, _bound(at_once, "rack"))))
    if spec.max_nodes is not None:
        least = splits(spec)[0]
        whole = msgspec.structs.replace(
            at_once, max_nodes=None, nodes=1, gpus_per_node=least.gpus, cores_per_node=least.cores,
            memory_mib_per_node=least.memory_mib,
        )  # fmt: skip
        found.insert(0, SpreadView("server", "--max-spread server", _as(job, _bound(whole, "server"))))
    return found


def _bound(spec: JobSpec, spread: Spread) -> JobSpec:
    return msgspec.structs.replace(spec, max_spread=spread)


def _as(job: PendingView, spec: JobSpec) -> PendingView:
    same = spec.partition == job.spec.partition
    return msgspec.structs.replace(job, spec=spec, held_by="", excluded_nodes=job.excluded_nodes if same else ())


def _fewer(inventory: Inventory, spec: JobSpec) -> Iterator[tuple[str, str, JobSpec]]:
    """Half the GPUs, a quarter, ... with as many cores and as much memory per GPU."""
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


def _elsewhere(inventory: Inventory, spec: JobSpec) -> Iterator[tuple[str, str, JobSpec]]:
    """In other partitions: the same parts where nodes there are as large, else as many GPUs in their proportion."""
    for partition in inventory.partitions:
        if partition.name == spec.partition or spec.nodelist:
            continue
        types = tuple(t for t in spec.gpu_types if any(n.gpu_type == t for n in partition.nodes))
        if spec.gpu_types and not types:
            continue
        there = msgspec.structs.replace(spec, partition=partition.name, flavor=None, exclude=(), gpu_types=types)
        if not _holds(partition, spec):
            sized = _sized(inventory, there, ResourceRequest(partition=partition.name, gpus=spec.gpus or None))
            if sized is None or not spec.gpus:
                continue
            there = sized
        gpus = f" --gpus {spec.gpus}" if spec.gpus else ""
        yield f"in {partition.name}", f"-p {partition.name}{gpus}", there


def _holds(partition: Partition, spec: JobSpec) -> bool:
    return sum(covers((n.gpus, n.cores, n.memory_mib), need(spec)) for n in partition.nodes) >= spec.nodes


def _sized(inventory: Inventory, spec: JobSpec, asked: ResourceRequest) -> JobSpec | None:
    asked = msgspec.structs.replace(
        asked, time_limit_s=spec.time_limit_s, nodelist=spec.nodelist, exclude=spec.exclude, gpu_types=spec.gpu_types
    )
    try:
        return msgspec.structs.replace(spec, **msgspec.structs.asdict(size(asked, inventory)))
    except UsageError:
        return None


def _shorter(snapshot: Snapshot, job: PendingView, explanation: Explanation) -> Iterator[tuple[str, str, JobSpec]]:
    """Shorter limits, longest first; the wait of the queue's head among them, which is what backfill asks for."""
    limits = {s for s in _SHORTER_S if s < job.spec.time_limit_s}
    protects = snapshot.policies[job.spec.partition].backfill in ("easy", "conservative")
    protects = protects or explanation.reason.code is ReasonCode.BACKFILL
    if protects and explanation.head not in ("", job.id):
        wait = int(min(explanation.head_at - snapshot.now, job.spec.time_limit_s))
        if 0 < wait < job.spec.time_limit_s:
            limits = {wait, *(s for s in limits if s < wait)}
    begins = {one.begin for node in snapshot.nodes for one in node.reservations if node.partition == job.spec.partition}
    before = {int(begin - snapshot.now) for begin in begins} if job.reserved is None else set()
    limits |= {wait for wait in before if 0 < wait < job.spec.time_limit_s}
    for seconds in sorted(limits, reverse=True)[:_MOST_LIMITS]:
        text = format_duration(seconds)
        yield f"with a time limit of {text}", f"-t {text}", msgspec.structs.replace(job.spec, time_limit_s=seconds)


def _spread(spec: JobSpec) -> Iterator[tuple[str, str, JobSpec]]:
    """The same GPUs over more nodes."""
    for each in over_more_nodes(spec, spec.gpus):
        options = f"-N {each.nodes} --gpus-per-node {each.gpus_per_node}"
        yield f"over {each.nodes} nodes, if it supports that", options, each
