"""Build the frozen snapshot for a decision from the store. Pure; shared by the controller and ``why``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache

import msgspec

from gpusched.config.reservations import unusable_reason
from gpusched.config.validate import node_kinds, shape_on, usable_nodes, within_rules
from gpusched.model.arrays import task_of
from gpusched.model.gpustates import DRIVER_MEMORY_MIB, GpuStatus, foreign_processes, gpu_states
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Allocation, JobRecord
from gpusched.model.limits import leaf_of
from gpusched.model.policy import PolicySpec
from gpusched.model.progress import JobProgress, speeds_of, steps_left
from gpusched.model.readings import GpuState, NodeReading, NodeState
from gpusched.model.reservations import Reservation, by_node, named_nodes_unreserved_at, restart_conflict
from gpusched.model.resources import Inventory, Node, SharingSettings
from gpusched.model.slices import SliceProfile, gpu_of
from gpusched.model.slurm import slurm_block_reason
from gpusched.model.snapshot import (
    FinishedView,
    NodeView,
    PendingView,
    RunningView,
    SliceView,
    Snapshot,
    with_partners,
)
from gpusched.model.topology import Topology, discover_topology
from gpusched.queue.array_limit import ArrayTaskLimit
from gpusched.queue.dependencies import BY_TASK, Dependencies, Verdict
from gpusched.queue.metrics import GpuHolder
from gpusched.queue.quotas import QuotaLedger, QuotaUsage, recent_quota_usage
from gpusched.queue.store import NodeRecord, RankRecord, Reader

NOT_FOR_NEW_JOBS = frozenset({NodeState.DOWN, NodeState.DRAINED, NodeState.DRAINING, NodeState.UNKNOWN})


def snapshot_of_store(
    reader: Reader,
    inventory: Inventory,
    policies: Mapping[str, PolicySpec],
    now: float,
    *,
    active: list[JobRecord] | None = None,
    pending: list[JobRecord] | None = None,
    seed: int = 0,
    whole: bool = False,
) -> Snapshot:
    """Return the snapshot of a store's current state; pass jobs that the caller has already read."""
    snapshot = build_snapshot(
        inventory,
        policies,
        reader.node_records(),
        active=reader.active() if active is None else active,
        pending=reader.pending_rows() if pending is None else pending,
        ranks=reader.ranks(),
        lookup=reader.dependency_rows,
        completed_tasks=reader.completed_tasks,
        usage=recent_usage(reader, inventory, policies, now),
        used=recent_quota_usage(reader, inventory.quotas, now),
        array_limits=reader.array_limits(),
        estimates=reader.estimates(),
        progress=reader.progress_of_unended(),
        now=now,
        seed=seed,
        whole=whole,
        reservations=reader.reservations(now),
    )
    finished = recently_finished(reader, policies)
    beliefs = job_class_estimates(reader, policies, snapshot)
    if not finished and not beliefs:
        return snapshot
    return msgspec.structs.replace(snapshot, finished=finished, beliefs=beliefs)


def job_class_estimates(
    reader: Reader, policies: Mapping[str, PolicySpec], snapshot: Snapshot
) -> dict[str, JobClassEstimate]:
    """Return job class estimates; empty where no policy uses them and no jobs could share GPUs."""
    shares = any(node.sharing for node in snapshot.nodes) and any(job.spec.share for job in snapshot.pending)
    used = any(policy.uses_job_class_estimates or policy.uses_speeds_by_type for policy in policies.values())
    return reader.beliefs() if shares or used else {}


def recent_usage(
    reader: Reader, inventory: Inventory, policies: Mapping[str, PolicySpec], now: float
) -> dict[str, float]:
    """Return decayed GPU hours by user (and group); empty where no partition's policy uses them."""
    asked = [policy.fallback or policy for policy in policies.values()]  # the fallback may have to decide
    if not any(policy.order == "fairshare" for policy in asked):
        return {}
    return usage_by_leaf(reader, inventory, now)


_HALF_LIVES = 30  # after which 1e-9 of the usage is left: as good as never forgotten, as in replays


def usage_by_leaf(reader: Reader, inventory: Inventory, now: float) -> dict[str, float]:
    """Return decayed GPU hours by `leaf_of` user and group."""
    half_life = inventory.settings.fairshare_half_life_s
    groups = inventory.groups

    @cache
    def leaf(user: str, group: str) -> str:
        return leaf_of(user, groups.for_job(user, group))

    seconds = reader.gpu_seconds_by_user(now - _HALF_LIVES * half_life, half_life, now, leaf)
    return {user: s / 3600 for user, s in seconds.items()}


def build_snapshot(
    inventory: Inventory,
    policies: Mapping[str, PolicySpec],
    records: Mapping[str, NodeRecord],
    *,
    active: Iterable[JobRecord],
    pending: Iterable[JobRecord],
    ranks: Iterable[RankRecord],
    lookup: Callable[[str], list[JobRecord]],
    usage: dict[str, float],
    array_limits: Mapping[str, int],
    now: float,
    seed: int = 0,
    estimates: Mapping[str, float] = {},
    progress: Mapping[str, tuple[JobProgress, ...]] = {},
    used: Sequence[QuotaUsage] = (),
    completed_tasks: Callable[[str, Sequence[int]], dict[int, bool]] | None = None,
    whole: bool = False,
    reservations: Sequence[Reservation] = (),
) -> Snapshot:
    """Return the snapshot of the cluster.

    Of tasks of an array that share a row there are as many views as could start at once, and some more.

    Args:
        inventory: What is declared.
        policies: Partition name -> its policy.
        records: Node records by name (a node without one has never been read).
        active: Jobs that hold resources.
        pending: Jobs in the queue; rows that stand for several tasks as they are.
        ranks: What may still be on the nodes, ended attempts included; their GPUs are blocked until they are gone.
        lookup: All jobs with an id (an array's id gives all of its tasks), for dependencies.
        usage: Recent GPU hours by user (`leaf_of` user and group where there are groups).
        array_limits: Array id -> how many of its tasks may run at once.
        now: Unix seconds.
        seed: For policies that draw.
        estimates: Job -> how long it is expected to run, seconds.
        progress: Job -> its reported progress, by attempt.
        used: GPU seconds of the last seven days, for limits of them.
        completed_tasks: For dependencies between the tasks of two arrays; see `Reader.completed_tasks`.
        whole: All tasks of all arrays take part, as a forecast needs them (`ArrayTaskLimit.ahead`).
        reservations: Such as are not over.
    """
    active, pending = list(active), list(pending)
    ledger = QuotaLedger(inventory.quotas, active, used, now)
    declared = {node.name for node in inventory.nodes}
    held = held_gpus(active)
    ranks = list(ranks)
    lingering = uncleaned_gpus(active, ranks)
    running_tasks = Counter(job.array_id for job in active if job.array_id)
    dependencies = Dependencies(lookup, [*active, *pending], completed_tasks)
    base = [_at_base_size(job, inventory, policies) for job in pending]
    room = ArrayTaskLimit(inventory, policies, active, array_limits, running_tasks)
    named, here = {one.name: one for one in reservations}, by_node(reservations, now)
    nodes = tuple(
        _node_view(node, records.get(node.name), held.get(node.name, {}), lingering.get(node.name, {}), now)
        for node in inventory.nodes
    )
    if here:
        nodes = tuple(msgspec.structs.replace(node, reservations=here.get(node.name, ())) for node in nodes)
    return Snapshot(
        now=now,
        nodes=nodes,
        running=sharing_views(
            [
                _with_restart_conflict(view, here, now) if here else view
                for job in active
                if (view := _running_view(job, declared, progress, inventory, ledger)) is not None
            ],
            inventory,
            ranks,
        ),
        pending=tuple(
            _pending_view(
                job, verdict, behind, room, inventory, ledger, estimates, progress.get(job.id, ()), named, here, now
            )
            for row in base
            for job, verdict, behind in _considered_tasks(row, dependencies, room, None if whole else now)
        ),
        policies=dict(policies),
        usage=usage,
        seed=seed,
        topology=topology_of(inventory, records),
        bounds=ledger.bounds(),
        groups=inventory.groups,
    )


def topology_of(inventory: Inventory, records: Mapping[str, NodeRecord]) -> Topology:
    """Return the cluster's topology: as declared, else discovered from the nodes' neighbours."""
    if inventory.topology:
        return inventory.topology
    wired = ((node.name, record.wiring) for node in inventory.nodes if (record := records.get(node.name)) is not None)
    return discover_topology({name: wiring for name, wiring in wired if wiring is not None})


def held_gpus(active: Iterable[JobRecord | GpuHolder]) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return node -> GPU index -> ids of the jobs that hold it: one, or two that share it."""
    held: dict[str, dict[int, tuple[str, ...]]] = {}
    for job in active:
        for part in job.allocation.parts if job.allocation else ():
            on = held.setdefault(part.node, {})
            on.update((gpu, (*on.get(gpu, ()), job.id)) for gpu in part.gpus)
    return held


def used_gpus(active: Iterable[JobRecord], ranks: Iterable[RankRecord]) -> set[tuple[str, int]]:
    """Return (node, index) of the GPUs that jobs hold, whole or a slice of them, or that something may still use."""
    held = ((node, number) for node, on in held_gpus(active).items() for number in on)
    left = ((rank.node, number) for rank in ranks if not rank.gone for number in rank.gpus)
    return {(node, gpu_of(number)) for node, number in (*held, *left)}


def partners_of(active: Iterable[JobRecord]) -> dict[str, str]:
    """Return job -> the other job that shares its GPUs."""
    pairs = {jobs for on in held_gpus(active).values() for jobs in on.values() if len(jobs) > 1}
    return {job: other for a, b, *_ in pairs for job, other in ((a, b), (b, a))}


def uncleaned_gpus(active: Iterable[JobRecord], ranks: Iterable[RankRecord]) -> dict[str, dict[int, str]]:
    """Return node -> GPU index -> why it is still in use though no active job holds it."""
    current = {(job.id, job.attempt) for job in active}
    lingering: dict[str, dict[int, str]] = {}
    for rank in ranks:
        if ((rank.job_id, rank.attempt) not in current or rank.hot == "left") and not rank.gone:
            why = f"attempt {rank.attempt} of job {rank.job_id} may still be running there"
            if rank.stuck:
                trouble = f" ({rank.trouble})" if rank.trouble else ""
                why = f"attempt {rank.attempt} of job {rank.job_id} cannot be killed{trouble}; kill it there, or reboot"
            lingering.setdefault(rank.node, {}).update(dict.fromkeys(rank.gpus, why))
    return lingering


def _node_view(
    node: Node, record: NodeRecord | None, held: dict[int, tuple[str, ...]], lingering: dict[int, str], now: float
) -> NodeView:
    reading = record.reading if record else None
    blocked = {index: f"{GpuState.BUSY}: {why}" for index, why in lingering.items()}
    states = gpu_states(node, reading, held, record.health.conditions if record else ())
    slices = tuple(one for status in states for one in status.slices)
    blocked |= _being_cut(record, slices)
    for status in (*states, *slices):
        if status.state not in (GpuState.FREE, GpuState.ALLOCATED, GpuState.SLICED):
            blocked[status.index] = f"{status.state}: {status.reason}"
        elif status.state is GpuState.SLICED and not status.slices:
            blocked.setdefault(status.index, f"{status.state}: {status.reason}")
    state = record.state if record else NodeState.UNKNOWN
    return NodeView(
        name=node.name,
        partition=node.partition,
        gpus=node.indices(),
        cores=node.cores,
        memory_mib=node.memory_mib,
        gpu_type=node.gpu_type,
        blocked=blocked,
        available=state not in NOT_FOR_NEW_JOBS,
        unavailable_reason=_unavailable(state, record),
        links=record.links if record else {},
        sharing=node.sharing,
        shareable=_shareable(node.sharing, reading, blocked) if node.sharing is not None else {},
        slices=tuple(SliceView(one.index, one.profile) for one in slices),
        cutting={i: state.cut.slices for i, state in record.cuts.items() if state.under_way} if record else {},
        cuttable=_cuttable(node, record, now) if node.mig is not None and record is not None else {},
    )


def _cuttable(node: Node, record: NodeRecord, now: float) -> dict[int, tuple[SliceProfile, ...]]:
    """Return GPU index -> what it can be cut into on demand; without GPUs with a failed cut a short while ago.

    These stay as they are until it is tried again, so that no job waits for them, nor keeps them from others.
    """
    paused = {gpu for gpu, state in record.cuts.items() if state.retry_at is not None and now < state.retry_at}
    return {
        gpu.index: gpu.mig_profiles
        for gpu in (record.reading.gpus if record.reading is not None else ())
        if gpu.index in node.cut_on_demand() and gpu.index not in paused and gpu.mig_mode is not None
        if gpu.mig_profiles
    }


def _being_cut(record: NodeRecord | None, slices: Iterable[GpuStatus]) -> dict[int, str]:
    """Return why GPUs that are being cut, and their slices, cannot be had now, by number."""
    cutting = {index for index, state in record.cuts.items() if state.under_way} if record is not None else set()
    numbers = [*cutting, *(one.index for one in slices if gpu_of(one.index) in cutting)]
    return dict.fromkeys(numbers, f"{GpuState.BUSY}: it is being cut into slices, or made whole")


def _shareable(sharing: SharingSettings, reading: NodeReading | None, blocked: Container[int]) -> dict[int, int]:
    """Return GPU index -> MiB that two jobs may use on it together, for GPUs that may be shared."""
    return {
        gpu.index: max(0, gpu.memory_total_mib - DRIVER_MEMORY_MIB)
        for gpu in (reading.gpus if reading is not None else ())
        if gpu.memory_total_mib is not None
        and gpu.index not in blocked
        and not foreign_processes(gpu, sharing.mode == "mps")
    }


def _unavailable(state: NodeState, record: NodeRecord | None) -> str:
    if state not in NOT_FOR_NEW_JOBS:
        return ""
    if record is None:
        return "not probed yet: is the controller running?"
    return f"{state}: {record.reason.removeprefix(f'{record.name}: ')}" if record.reason else str(state)


def _running_view(
    job: JobRecord,
    declared: Container[str],
    progress: Mapping[str, tuple[JobProgress, ...]],
    inventory: Inventory,
    ledger: QuotaLedger,
) -> RunningView | None:
    """Return the view of a job's allocation on declared nodes; None: its nodes have left the inventory."""
    parts = tuple(part for part in (job.allocation.parts if job.allocation else ()) if part.node in declared)
    if not parts:
        return None
    start = job.start_time if job.start_time is not None else job.submit_time
    attempts = progress.get(job.id, ())
    return RunningView(
        id=job.id,
        user=job.user,
        allocation=Allocation(job.id, parts),
        start_time=start,
        expected_end=expected_end(job, start),
        own_end=attempts[-1].end() if attempts and attempts[-1].attempt == job.attempt else None,
        array_id=job.array_id,
        submit_time=job.submit_time,
        state=job.state,
        attempt=job.attempt,
        priority=job.priority,
        spec=within_rules(job.spec, inventory).with_present_size,
        preemptions=job.preemptions,
        resizes=job.resizes,
        speeds=speeds_of(attempts),
        left=steps_left(attempts),
        group=ledger.group(job.user, job.spec.group),
        bounds=ledger.of(job.user, job.spec),
    )


def _with_restart_conflict(view: RunningView, here: Mapping[str, tuple[Reservation, ...]], now: float) -> RunningView:
    """Add the reason why a job could not restart after preemption, if any."""
    ones = [here.get(part.node, ()) for part in view.allocation.parts]
    if not any(ones):
        return view
    own = view.spec.reservation if view.spec is not None else ""
    return msgspec.structs.replace(view, tied=restart_conflict(view.expected_end, ones, own, now))


def sharing_views(
    views: list[RunningView], inventory: Inventory, ranks: Iterable[RankRecord]
) -> tuple[RunningView, ...]:
    """Add shared GPUs and partners (`with_partners`); jobs share that were launched so."""
    if not any(view.spec is not None and view.spec.share for view in views):
        return tuple(views)
    modes = {node.name: node.sharing.mode for node in inventory.nodes if node.sharing is not None}
    ready = {(rank.job_id, rank.attempt, rank.node) for rank in ranks if rank.sharing == modes.get(rank.node, "off")}
    return with_partners(views, {v.id for v in views if (v.id, v.attempt, v.allocation.parts[0].node) in ready})


def recently_finished(reader: Reader, policies: Mapping[str, PolicySpec]) -> tuple[FinishedView, ...]:
    """Return the last ended jobs (see `Reader.ended_runs`); empty where no partition's policy learns from them."""
    if not any(policy.traits.remembers for policy in policies.values()):
        return ()
    return tuple(
        FinishedView(
            profile=job.spec.profile,
            user=job.user, partition=job.spec.partition, nodes=job.spec.nodes,
            gpus=job.spec.nodes * job.spec.gpus_per_node, cores=job.spec.nodes * job.spec.cores_per_node,
            memory_mib=job.spec.nodes * job.spec.memory_mib_per_node, submit_time=job.submit_time,
            end_time=job.end_time or 0.0, ran_s=job.ran_s, attempt=job.attempt,
            preemptions=job.preemptions,
        )
        for job in reader.ended_runs()
    )  # fmt: skip


def expected_end(job: JobRecord, start: float) -> float:
    """Return when an active job releases its resources at the latest, by its limit or ending (Unix seconds)."""
    if job.ending is not None:
        return job.ending.kill_at
    return start + job.limit_s


def _considered_tasks(
    row: JobRecord, dependencies: Dependencies, room: ArrayTaskLimit, now: float | None
) -> Iterator[tuple[JobRecord, Verdict, int]]:
    """Yield a job, or the considered tasks of a row, with its dependency verdict and number of tasks behind it.

    ``now``: of a decision; None: of a forecast.
    """
    if not row.tasks:
        yield row, dependencies.of(row), 0
        return
    by_task = any(d.kind in BY_TASK for d in row.spec.dependencies)
    if now is None and not by_task:
        ((_, verdict),) = dependencies.of_tasks(row, 1)
        yield from ((task_of(row, index), verdict, behind) for index, behind in room.ahead(row))
        return
    found = dependencies.of_tasks(row, None if now is None else room.for_tasks(row, now))
    for index, verdict in found:
        last = index == found[-1][0] and not verdict[0] and not by_task
        yield task_of(row, index), verdict, row.count - len(found) if last else 0


def _pending_view(
    job: JobRecord,
    verdict: Verdict,
    behind: int,
    room: ArrayTaskLimit,
    inventory: Inventory,
    ledger: QuotaLedger,
    estimates: Mapping[str, float],
    attempts: tuple[JobProgress, ...],
    reservations: Mapping[str, Reservation],
    here: Mapping[str, tuple[Reservation, ...]],
    now: float,
) -> PendingView:
    kind, message = verdict
    not_before, awaits = _not_before(job, here, now)
    reserved = reservations.get(job.spec.reservation) if job.spec.reservation else None
    return PendingView(
        id=job.id,
        user=job.user,
        spec=within_rules(job.spec, inventory),
        submit_time=job.submit_time,
        priority=job.priority,
        standing=job.slurm.standing if job.slurm is not None else 0,
        held_by=job.held_by,
        eligible_time=not_before,
        awaits=awaits,
        excluded_nodes=_effective_exclusions(job, inventory, reserved),
        dependency=kind,
        dependency_message=message,
        array_id=job.array_id,
        array_room=room.of_array(job),
        behind=behind,
        estimate_s=estimates.get(job.id, estimates.get(job.array_id or "")),
        preemptions=job.preemptions,
        resizes=job.resizes,
        resume_at=job.resizes.resume_at if job.resizes is not None else None,
        speeds=speeds_of(attempts),
        left=steps_left(attempts),
        barred=slurm_block_reason(job.slurm) if job.slurm is not None else "",
        group=ledger.group(job.user, job.spec.group),
        bounds=ledger.of(job.user, job.spec),
        reserved=reserved,
        unreserved=unusable_reason(job.limit_s, job.spec.reservation, job.user, reserved, inventory)
        if job.spec.reservation
        else "",
    )


def _not_before(job: JobRecord, here: Mapping[str, tuple[Reservation, ...]], now: float) -> tuple[float | None, str]:
    """Return the earliest start, and what is awaited where that is not the job's begin time.

    In Slurm, a job that names some nodes may get others as well, but cannot start without the named ones.
    """
    few = job.slurm.nodelist if job.slurm is not None and not job.spec.nodelist else ()
    late = named_nodes_unreserved_at(few, here, job.limit_s, now) if few and here else None
    if late is None:
        return job.eligible_time, ""
    return max(late[0], job.eligible_time or 0.0), late[1]


def _at_base_size(job: JobRecord, inventory: Inventory, policies: Mapping[str, PolicySpec]) -> JobRecord:
    """Return a resized job at its base size where the policy does not choose sizes."""
    elastic, partition, policy = (
        job.spec.elastic,
        inventory.partition(job.spec.partition),
        policies.get(job.spec.partition),
    )
    if (
        elastic is None
        or elastic.base_gpus == job.spec.gpus
        or partition is None
        or policy is None
        or policy.sizes != "base"
    ):
        return job
    kinds = node_kinds(usable_nodes(partition, job.spec))
    return msgspec.structs.replace(job, spec=shape_on(kinds, job.spec, elastic.base_gpus) or job.spec)


def _effective_exclusions(job: JobRecord, inventory: Inventory, reserved: Reservation | None) -> tuple[str, ...]:
    """Return nodes of failed attempts to avoid; none where too few other nodes would remain."""
    if not job.excluded_nodes or (partition := inventory.partition(job.spec.partition)) is None:
        return ()
    allowed = {n.name for n in usable_nodes(partition, job.spec)}
    if reserved is not None:
        allowed &= set(reserved.nodes)
    return job.excluded_nodes if len(allowed - set(job.excluded_nodes)) >= job.spec.nodes else ()
