"""What would help a waiting job: concrete steps, most useful first; plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from gpusched.model.plan import LIMITS, ReasonCode
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import count_of, format_duration, format_memory
from gpusched.sched.tally import Has, NodeCount, asks_of, barred, covers, earliest, fits, need
from gpusched.sched.text import listed, listed_types

_MOST_STEPS = 5


def next_steps(
    snapshot: Snapshot, job: PendingView, code: ReasonCode, counts: dict[str, NodeCount], queue: list[PendingView]
) -> list[str]:
    """What the user or the operator can do, given the dominant reason's code."""
    own = [c for c in counts.values() if not barred(job, c.node)]
    steps: Iterable[str]
    match code:
        case ReasonCode.BAD_CONSTRAINTS:
            steps = [*_anywhere(snapshot, job, own, "total"), *_fewer(job, own, "total")]
            steps += [*_split(job, own, "total"), *_unbar(job)]
            steps += _elsewhere(job, counts, "total")
        case ReasonCode.REQ_NODE_NOT_AVAIL:
            steps = [*_before(snapshot, job, own), *_bring_back(job, own), *_fewer(job, own, "usable")]
            steps += _elsewhere(job, counts)
        case ReasonCode.RESOURCES:
            steps = [*_wait(snapshot, job, counts, queue), *_anywhere(snapshot, job, own, "free")]
            steps += [
                *_fewer(job, own, "free"),
                *_split(job, own, "free"),
                *_elsewhere(job, counts),
                *_bring_back(job, own),
            ]
        case ReasonCode.BACKFILL:
            steps = [*_shorter(snapshot, queue, counts), *_elsewhere(job, counts)]
        case ReasonCode.PRIORITY:
            steps = [*_head(snapshot, queue, counts), *_elsewhere(job, counts)]
        case _:
            steps = _may_not_start(snapshot, job, code)
    return list(dict.fromkeys(steps))[:_MOST_STEPS]


def refuted(step: str, starts_now: set[str]) -> bool:
    """Whether a step says that the job could start now in a way in which it does not, having been run ahead.

    ``starts_now``: what does start it now: ``in V100``, ``with a time limit of 1:00:00``.
    """
    if step.startswith(_PARTITION) and step.endswith(" now"):
        return "in " + step.removeprefix(_PARTITION).partition(" ")[0] not in starts_now
    if step.startswith(_LIMIT):
        return "with a time limit of " + step.removeprefix(_LIMIT).partition(" ")[0] not in starts_now
    return False


_PARTITION, _LIMIT = "partition ", "a time limit of at most "


def _before(snapshot: Snapshot, job: PendingView, nodes: list[NodeCount]) -> Iterator[str]:
    """The longest limit with which it would be done before its nodes are reserved."""
    now = snapshot.now
    begins = {one.begin for c in nodes for one in c.node.reservations if now < one.begin < now + job.limit_s}
    for begin in sorted(begins, reverse=True):
        free = [c for c in nodes if not any(one.meets(now, begin) for one in c.node.reservations)]
        if job.reserved is None and (wait := int(begin - now)) > 0 and fits(job, free, lambda c: c.free):
            yield f"{_LIMIT}{format_duration(wait)} would let it start now (-t {format_duration(wait)})"
            return


def _may_not_start(snapshot: Snapshot, job: PendingView, code: ReasonCode) -> Iterator[str]:
    """For jobs that may not start whatever is free."""
    match code:
        case ReasonCode.JOB_HELD_ADMIN | ReasonCode.JOB_HELD_USER:
            who = "ask an administrator to release the hold" if job.held_by == "admin" else "release the hold"
            yield f"{who}: gpusched release {job.id}"
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
    """What a job may ask for that exceeds a limit whoever ends."""
    rules = [snapshot.bounds[at].rule for at in job.bounds if job.spec.elastic is None]
    gpus = min([job.spec.gpus, *(rule.most for rule in rules if rule.unit == "gpus")])
    times = [rule.most // gpus for rule in rules if rule.unit == "gpu_s" and gpus > 0]
    words = [f"at most {count_of(gpus, 'GPU')} (--gpus {gpus})"] if 0 < gpus < job.spec.gpus else []
    if times and 0 < (most := min(times)) < job.spec.time_limit_s:
        words.append(f"a time limit of at most {format_duration(most)} (-t {format_duration(most)})")
    if words:
        yield f"cancel it and submit it with {' and '.join(words)}"


def _fewer(job: PendingView, nodes: list[NodeCount], what: Has) -> Iterator[str]:
    """The one dimension that is in the way, at what the ``spec.nodes`` best nodes have of it."""
    needs = need(job.spec)
    for i, option in enumerate(("--gpus-per-node", "--cpus-per-node", "--mem-per-node")):
        others = [j for j in range(3) if j != i]
        has = sorted((h[i] for c in nodes if all((h := c.has(what))[j] >= needs[j] for j in others)), reverse=True)
        if len(has) < job.spec.nodes or not 0 < (most := has[job.spec.nodes - 1]) < needs[i]:
            continue
        amount = (count_of(most, "GPU"), count_of(most, "core"), f"{format_memory(most)} of memory")[i]
        asked = f" ({option} {most})" if i == 0 else ""
        yield f"ask for at most {amount} per node{asked}"


def _split(job: PendingView, nodes: list[NodeCount], what: Has) -> Iterator[str]:
    """The same GPUs as more and smaller parts."""
    gpus, cores, memory = (job.spec.nodes * n for n in need(job.spec))
    for parts in range(job.spec.nodes + 1, min(gpus, len(nodes)) + 1):
        part = (gpus // parts, -(-cores // parts), -(-memory // parts))
        if gpus % parts == 0 and sum(1 for c in nodes if covers(c.has(what), part)) >= parts:
            yield f"spread it over {parts} nodes, if it supports that (-N {parts} --gpus-per-node {part[0]})"
            return


def _anywhere(snapshot: Snapshot, job: PendingView, nodes: list[NodeCount], what: Has) -> Iterator[str]:
    """Where it asks for one rack, and several would do."""
    if not asks_of(snapshot, job, nodes)[0].one_rack or not fits(job, nodes, lambda count: count.has(what)):
        return
    option = "--max-spread any" if job.spec.max_spread == "rack" else "--wait-for-placement 0"
    yield f"allow several racks ({option})" + (" now" if what == "free" else "")


def _unbar(job: PendingView) -> Iterator[str]:
    if job.spec.nodelist or job.spec.exclude:
        yield "allow more nodes: its nodelist or exclude leaves too few"
    if job.spec.gpu_types:
        yield f"accept other GPU types besides {listed_types(job.spec.gpu_types)} (--gpu-type)"
    if job.excluded_nodes:
        yield f"see why earlier attempts failed on {listed(list(job.excluded_nodes))}"


def _elsewhere(job: PendingView, counts: dict[str, NodeCount], what: Has = "free") -> Iterator[str]:
    needs = need(job.spec)
    others = (c for c in counts.values() if c.node.partition != job.spec.partition)
    fitting = Counter(c.node.partition for c in others if covers(c.has(what), needs))
    for partition, nodes in fitting.items():
        if nodes >= job.spec.nodes:
            yield f"{_PARTITION}{partition} could run it" + (" now" if what == "free" else "")


def _bring_back(job: PendingView, nodes: list[NodeCount]) -> Iterator[str]:
    needs = need(job.spec)
    for count in nodes:
        node = count.node
        if not node.available:
            if covers(count.total, needs):
                kind, colon, detail = node.unavailable_reason.partition(":")
                verb = "resume" if kind.upper().startswith("DRAIN") else "bring back"
                yield f"{verb} {node.name} ({kind.lower() + colon + detail or 'not available'})"
        elif count.usable[0] < needs[0] <= count.total[0]:
            for gpu, why in sorted(node.blocked.items()):
                what = "end the foreign process on" if why.startswith("BUSY") else "repair"
                yield f"{what} GPU {gpu} of {node.name} ({why})"


def _wait(
    snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount], queue: list[PendingView]
) -> Iterator[str]:
    """By the limits alone; where others are before it, they may take the room first."""
    if by_limits := earliest(snapshot, job, counts):
        first = not queue or queue[0].id == job.id
        unless = "" if first else " unless jobs ahead of it take the room"
        yield f"wait: at most {format_duration(by_limits[0] - snapshot.now)}{unless} ({by_limits[1]})"


def _shorter(snapshot: Snapshot, queue: list[PendingView], counts: dict[str, NodeCount]) -> Iterator[str]:
    by_limits = earliest(snapshot, queue[0], counts) if queue else None
    if by_limits and (wait := int(by_limits[0] - snapshot.now)) > 0:
        limit = format_duration(wait)
        yield f"{_LIMIT}{limit} would let it start now (-t {limit})"


def _head(snapshot: Snapshot, queue: list[PendingView], counts: dict[str, NodeCount]) -> Iterator[str]:
    if not queue:
        return
    by_limits = earliest(snapshot, queue[0], counts)
    when = f"; it can start in {format_duration(by_limits[0] - snapshot.now)} ({by_limits[1]})" if by_limits else ""
    yield f"wait for job {queue[0].id}, first in the queue{when}"
