"""What would help a waiting job: concrete steps, most useful first; plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from msgspec.structs import replace

from gpusched.model.jobs import JobSpec
from gpusched.model.limits import WEEK_S
from gpusched.model.plan import LIMITS, ReasonCode
from gpusched.model.slicetables import gpus_counted
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import count_of, format_duration, format_memory, gpus_of
from gpusched.sched.alone import Has, SingleJobView
from gpusched.sched.decide import JobAnswer
from gpusched.sched.slicenames import SEPARATOR, base_of
from gpusched.sched.tally import Amounts, barred, covers, need, over_more_nodes, total_of
from gpusched.sched.text import called, listed, listed_types

_MAX_STEPS = 5


def next_steps(alone: SingleJobView, job: PendingView, code: ReasonCode, answer: JobAnswer) -> list[str]:
    """Return what the user or the operator can do, given the main reason's code and the passes' answer."""
    steps: Iterable[str]
    match code:
        case ReasonCode.BAD_CONSTRAINTS:
            steps = [*_allow_several_racks(alone, job, "total"), *_request_less(alone, job, "total")]
            steps += [*_split(alone, job, "total"), *_allow_more_nodes(job)]
            steps += _other_partition(alone, job, "total")
        case ReasonCode.REQ_NODE_NOT_AVAIL:
            steps = [*_end_before_reservation(alone, job), *_restore_nodes(alone, job)]
            steps += [*_request_less(alone, job, "usable"), *_other_partition(alone, job)]
        case ReasonCode.RESOURCES:
            steps = [*_wait(alone, job, answer.queue), *_allow_several_racks(alone, job, "free")]
            steps += [*_request_less(alone, job, "free"), *_split(alone, job, "free")]
            steps += [*_other_partition(alone, job), *_restore_nodes(alone, job)]
        case ReasonCode.BACKFILL:
            steps = [*_shorter_limit(alone.snapshot.now, answer), *_other_partition(alone, job)]
        case ReasonCode.PRIORITY:
            steps = [*_head(alone, answer.queue), *_other_partition(alone, job)]
        case _:
            steps = _may_not_start(alone.snapshot, job, code)
    return list(dict.fromkeys(steps))[:_MAX_STEPS]


def refuted(step: str, starts_now: set[str]) -> bool:
    """Return whether a step claims that the job could start now in a way that was tried and failed.

    ``starts_now``: what does start it now: ``in V100``, ``with a time limit of 1:00:00``.
    """
    if step.startswith(_PARTITION) and step.endswith(" now"):
        return "in " + step.removeprefix(_PARTITION).partition(" ")[0] not in starts_now
    if step.startswith(_LIMIT):
        return "with a time limit of " + step.removeprefix(_LIMIT).partition(" ")[0] not in starts_now
    return False


_PARTITION, _LIMIT = "partition ", "a time limit of at most "


def _with(job: PendingView, **asked: Any) -> PendingView:
    """Return the job with another request."""
    return replace(job, spec=replace(job.spec, **asked))


def _end_before_reservation(alone: SingleJobView, job: PendingView) -> Iterator[str]:
    """Suggest the longest time limit with which the job would end before its nodes are reserved."""
    now = alone.snapshot.now
    nodes = (node for node in alone.snapshot.nodes if node.partition == job.spec.partition)
    begins = {r.begin for node in nodes for r in node.reservations if now < r.begin < now + job.limit_s}
    for begin in sorted(begins, reverse=True):
        wait = int(begin - now)
        if job.reserved is None and wait > 0 and alone.fits(_with(job, time_limit_s=wait)):
            yield f"{_LIMIT}{format_duration(wait)} would let it start now (-t {format_duration(wait)})"
            return


def _may_not_start(snapshot: Snapshot, job: PendingView, code: ReasonCode) -> Iterator[str]:
    """Suggest steps for a job that may not start regardless of free resources."""
    match code:
        case ReasonCode.JOB_HELD_ADMIN | ReasonCode.JOB_HELD_USER:
            action = "ask an administrator to release the hold" if job.held_by == "admin" else "release the hold"
            yield f"{action}: gpusched release {job.id}"
        case ReasonCode.PARTITION_UNKNOWN:
            names = listed(sorted(snapshot.policies), 8)
            yield f"cancel it (gpusched cancel {job.id}) and submit it to one of: {names}"
        case ReasonCode.DEPENDENCY_NEVER_SATISFIED:
            yield f"cancel it: gpusched cancel {job.id}"
        case ReasonCode.DEPENDENCY:
            for dependency in job.spec.dependencies:
                yield f"wait for job {dependency.job_id} ({dependency.kind.value})"
        case ReasonCode.BEGIN_TIME:
            yield f"wait {format_duration((job.eligible_time or snapshot.now) - snapshot.now)}"
        case ReasonCode.RESERVATION:
            if job.reserved is None or job.unreserved:
                yield "see gpusched reservations; cancel it and submit it again"
            elif job.reserved.begin > snapshot.now:
                yield f"wait {format_duration(job.reserved.begin - snapshot.now)}"
            else:
                yield "cancel it and submit it again with a shorter limit (-t)"
        case ReasonCode.ARRAY_TASK_LIMIT:
            yield "wait for a task of its array to end"
        case _ if job.bounds and code in LIMITS:
            yield from _within_limits(snapshot, job)
            yield "check your limits: gpusched quota"


def _within_limits(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    """Suggest a smaller request where the job exceeds a limit on its own."""
    spec, rules = job.spec, [snapshot.bounds[at].rule for at in job.bounds if job.spec.elastic is None]
    one = gpus_counted(1, spec.profile)
    gpus = min([spec.gpus, *(int(rule.limit / one + 1e-6) for rule in rules if rule.unit == "gpus")])
    times = [int(rule.limit / (gpus * one)) for rule in rules if rule.unit == "gpu_s" and gpus > 0]
    asked = f"--gpus {_counted(gpus, spec)}"
    words = [f"at most {gpus_of(gpus, spec.profile)} ({asked})"] if 0 < gpus < spec.gpus else []
    if times and 0 < (most := min(times)) < min(spec.time_limit_s, WEEK_S):  # a week is the most that counts
        words.append(f"a time limit of at most {format_duration(most)} (-t {format_duration(most)})")
    if words:
        yield f"cancel it and submit it with {' and '.join(words)}"


def _counted(gpus: int, spec: JobSpec) -> str:
    """Return so many GPUs, or slices, as an option's value."""
    return f"{spec.profile}:{gpus}" if spec.profile else str(gpus)


def _usable_amounts(alone: SingleJobView, job: PendingView, basis: Has) -> list[Amounts]:
    """Return the resources of the nodes that the job may use."""
    return [has for node, has in alone.nodes(basis) if not barred(job, node)]


def _request_less(alone: SingleJobView, job: PendingView, basis: Has) -> Iterator[str]:
    """Suggest a smaller request for the one resource that is short: what the ``spec.nodes`` best nodes have."""
    needs, nodes = need(job.spec), _usable_amounts(alone, job, basis)
    for i, option in enumerate(("--gpus-per-node", "--cpus-per-node", "--mem-per-node")):
        others = [j for j in range(3) if j != i]
        has = sorted((h[i] for h in nodes if all(h[j] >= needs[j] for j in others)), reverse=True)
        if len(has) < job.spec.nodes or not 0 < (most := has[job.spec.nodes - 1]) < needs[i]:
            continue
        amount = (gpus_of(most, job.spec.profile), count_of(most, "core"), f"{format_memory(most)} of memory")[i]
        asked = f" ({option} {_counted(most, job.spec)})" if i == 0 else ""
        yield f"request at most {amount} per node{asked}"


def _split(alone: SingleJobView, job: PendingView, basis: Has) -> Iterator[str]:
    nodes = _usable_amounts(alone, job, basis)
    for spec in over_more_nodes(job.spec, len(nodes)):
        if sum(covers(has, need(spec)) for has in nodes) >= spec.nodes:
            options = f"-N {spec.nodes} --gpus-per-node {_counted(spec.gpus_per_node, spec)}"
            yield f"spread it over {spec.nodes} nodes, if it supports that ({options})"
            return


def _allow_several_racks(alone: SingleJobView, job: PendingView, basis: Has) -> Iterator[str]:
    """Suggest several racks where the job requests one."""
    spread = _with(job, max_spread="any", placement_wait_s=0.0)
    if not alone.asks(job)[0].spread or not alone.fits(spread, basis):
        return
    option = "--max-spread any" if job.spec.max_spread == "rack" else "--placement-wait 0"
    yield f"allow several racks ({option})" + (" now" if basis == "free" else "")


def _allow_more_nodes(job: PendingView) -> Iterator[str]:
    if job.spec.nodelist or job.spec.exclude:
        yield "allow more nodes: its nodelist or exclude leaves too few"
    if job.spec.gpu_types:
        yield f"accept other GPU types besides {listed_types(job.spec.gpu_types)} (--gpu-type)"
    if job.excluded_nodes:
        yield f"see why earlier attempts failed on {listed(list(job.excluded_nodes))}"


def _other_partition(alone: SingleJobView, job: PendingView, basis: Has = "free") -> Iterator[str]:
    needs, own = need(job.spec), job.spec.partition
    fitting = Counter(n.partition for n, has in alone.nodes(basis) if n.partition != own and covers(has, needs))
    for partition, nodes in fitting.items():
        if nodes >= job.spec.nodes and SEPARATOR not in partition and not job.spec.profile:
            yield f"{_PARTITION}{partition} could run it" + (" now" if basis == "free" else "")


def _restore_nodes(alone: SingleJobView, job: PendingView) -> Iterator[str]:
    needs = need(job.spec)
    for node, usable in alone.nodes("usable"):
        if barred(job, node):
            continue
        if not node.available:
            if covers(total_of(node), needs):
                kind, colon, detail = node.unavailable_reason.partition(":")
                verb = "resume" if kind.upper().startswith("DRAIN") else "bring back"
                yield f"{verb} {base_of(node.name)} ({kind.lower() + colon + detail or 'not available'})"
        elif usable[0] < needs[0] <= len(node.gpus):
            for gpu, why in sorted(node.blocked.items()):
                action = "end the foreign process on" if why.startswith("BUSY") else "repair"
                yield f"{action} {called(gpu, node.name)} ({why})"


def _wait(alone: SingleJobView, job: PendingView, queue: list[PendingView]) -> Iterator[str]:
    """Suggest waiting, with the start time by time limits alone; jobs ahead may take the space first."""
    if by_limits := alone.earliest(job):
        first = not queue or queue[0].id == job.id
        unless = "" if first else " unless jobs ahead of it take the space"
        yield f"wait: at most {format_duration(by_limits[0] - alone.snapshot.now)}{unless} ({by_limits[1]})"


def _shorter_limit(now: float, answer: JobAnswer) -> Iterator[str]:
    """Suggest a limit with which the job delays no other; uncertain where jobs ahead of it start now."""
    if answer.head is None or (answer.head[0] in answer.queue and answer.head[0] is not answer.queue[0]):
        return
    if 1 <= (wait := answer.head[1] - now) < inf:
        limit = format_duration(int(wait))
        yield f"{_LIMIT}{limit} would let it start now (-t {limit})"


def _head(alone: SingleJobView, queue: list[PendingView]) -> Iterator[str]:
    if not queue:
        return
    by_limits, now = alone.earliest(queue[0]), alone.snapshot.now
    when = f"; it can start in {format_duration(by_limits[0] - now)} ({by_limits[1]})" if by_limits else ""
    yield f"wait for job {queue[0].id}, first in the queue{when}"
