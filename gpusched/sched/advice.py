"""What would help a waiting job: concrete steps, most useful first; plain Python."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.model.plan import ReasonCode
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import format_duration, format_memory
from gpusched.sched.tally import NodeCount, barred, covers, earliest, need
from gpusched.sched.text import count_of, listed, listed_types

_MOST_STEPS = 5


def next_steps(
    snapshot: Snapshot, job: PendingView, code: ReasonCode, counts: dict[str, NodeCount], queue: list[PendingView]
) -> list[str]:
    """What the user or the operator can do, given the dominant reason's code."""
    own = [c for c in counts.values() if not barred(job, c.node)]
    steps: list[str] = []
    if code in _ALONE:
        steps = list(_ALONE[code](snapshot, job))
    elif code == ReasonCode.BAD_CONSTRAINTS:
        steps = [
            *_fewer(job, own, "total"),
            *_split(job, own, "total"),
            *_unbar(job),
            *_elsewhere(job, counts, "total"),
        ]
    elif code == ReasonCode.REQ_NODE_NOT_AVAIL:
        steps = [*_bring_back(job, own), *_fewer(job, own, "usable"), *_elsewhere(job, counts, "free")]
    elif code == ReasonCode.RESOURCES:
        steps = [*_wait(snapshot, job, counts, queue), *_fewer(job, own, "free"), *_split(job, own, "free")]
        steps += [*_elsewhere(job, counts, "free"), *_bring_back(job, own)]
    elif code == ReasonCode.BACKFILL:
        steps = [*_shorter(snapshot, queue, counts), *_elsewhere(job, counts, "free")]
    elif code == ReasonCode.PRIORITY:
        steps = [*_head(snapshot, queue, counts), *_elsewhere(job, counts, "free")]
    return list(dict.fromkeys(steps))[:_MOST_STEPS]


def refuted(step: str, starts_now: set[str]) -> bool:
    """Whether a step says that the job could start now in a way in which it does not, having been run ahead.

    Args:
        step: One of `next_steps`.
        starts_now: What does start it now: ``in V100``, ``with a time limit of 1:00:00``.
    """
    if step.startswith(_PARTITION) and step.endswith(" now"):
        return "in " + step.removeprefix(_PARTITION).partition(" ")[0] not in starts_now
    if step.startswith(_LIMIT):
        return "with a time limit of " + step.removeprefix(_LIMIT).partition(" ")[0] not in starts_now
    return False


_PARTITION, _LIMIT = "partition ", "a time limit of at most "


def _would_fit(partition: str, when: str) -> str:
    return f"{_PARTITION}{partition} would fit it {when}".rstrip()


def _would_start(limit: str) -> str:
    return f"{_LIMIT}{limit} would let it start now (-t {limit})"


def _held(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    who = "ask an administrator to release the hold" if job.held_by == "admin" else "release the hold"
    yield f"{who}: gpusched release {job.id}"


def _other_partition(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    names = listed(sorted(snapshot.policies), 8)
    yield f"cancel it (gpusched cancel {job.id}) and submit it to one of: {names}"


def _cancel(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    yield f"cancel it: gpusched cancel {job.id}"


def _dependencies(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    for dependency in job.spec.dependencies:
        yield f"wait for job {dependency.job_id} ({dependency.kind.value})"


def _begin(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    yield f"wait {format_duration((job.eligible_time or snapshot.now) - snapshot.now)}"


def _array(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    yield "wait for a task of its array to end"


_ALONE = {
    ReasonCode.JOB_HELD_ADMIN: _held,
    ReasonCode.JOB_HELD_USER: _held,
    ReasonCode.PARTITION_UNKNOWN: _other_partition,
    ReasonCode.DEPENDENCY_NEVER_SATISFIED: _cancel,
    ReasonCode.DEPENDENCY: _dependencies,
    ReasonCode.BEGIN_TIME: _begin,
    ReasonCode.ARRAY_TASK_LIMIT: _array,
}


def _has(count: NodeCount, what: str) -> tuple[int, int, int]:
    return count.total if what == "total" else count.usable if what == "usable" else count.free


def _fewer(job: PendingView, nodes: list[NodeCount], what: str) -> Iterator[str]:
    """The one dimension that is in the way, at what the ``spec.nodes`` best nodes have of it."""
    needs = need(job.spec)
    for i, option in enumerate(("--gpus-per-node", "--cpus-per-node", "--mem-per-node")):
        others = [j for j in range(3) if j != i]
        has = sorted((h[i] for c in nodes if all((h := _has(c, what))[j] >= needs[j] for j in others)), reverse=True)
        if len(has) < job.spec.nodes or not 0 < (most := has[job.spec.nodes - 1]) < needs[i]:
            continue
        amount = (count_of(most, "GPU"), count_of(most, "core"), f"{format_memory(most)} of memory")[i]
        asked = f" ({option} {most})" if i == 0 else ""
        yield f"ask for at most {amount} per node{asked}"


def _split(job: PendingView, nodes: list[NodeCount], what: str) -> Iterator[str]:
    """The same GPUs as more and smaller parts."""
    gpus, cores, memory = (job.spec.nodes * n for n in need(job.spec))
    for parts in range(job.spec.nodes + 1, min(gpus, len(nodes)) + 1):
        part = (gpus // parts, -(-cores // parts), -(-memory // parts))
        if gpus % parts == 0 and sum(1 for c in nodes if covers(_has(c, what), part)) >= parts:
            yield f"spread it over {parts} nodes, if it can run so (-N {parts} --gpus-per-node {part[0]})"
            return


def _unbar(job: PendingView) -> Iterator[str]:
    if job.spec.nodelist or job.spec.exclude:
        yield "allow it more nodes: its nodelist or exclude leaves too few"
    if job.spec.gpu_types:
        yield f"accept other GPU types besides {listed_types(job.spec.gpu_types)} (--gpu-type)"
    if job.excluded_nodes:
        yield f"see why earlier attempts failed on {listed(list(job.excluded_nodes))}"


def _elsewhere(job: PendingView, counts: dict[str, NodeCount], what: str) -> Iterator[str]:
    needs = need(job.spec)
    fitting: dict[str, int] = {}
    for count in counts.values():
        if count.node.partition != job.spec.partition and covers(_has(count, what), needs):
            fitting[count.node.partition] = fitting.get(count.node.partition, 0) + 1
    for partition, nodes in fitting.items():
        if nodes >= job.spec.nodes:
            yield _would_fit(partition, "now" if what == "free" else "")


def _bring_back(job: PendingView, nodes: list[NodeCount]) -> Iterator[str]:
    needs = need(job.spec)
    for count in nodes:
        node = count.node
        if not node.available:
            if covers(count.total, needs):
                why = node.unavailable_reason
                drained = why.upper().startswith("DRAIN")
                yield f"{'resume' if drained else 'bring back'} {node.name} ({_lowered(why) or 'not available'})"
        elif count.usable[0] < needs[0] <= count.total[0]:
            for gpu, why in sorted(node.blocked.items()):
                what = "end the foreign process on" if why.startswith("BUSY") else "repair"
                yield f"{what} GPU {gpu} of {node.name} ({why})"


def _lowered(reason: str) -> str:
    kind, colon, detail = reason.partition(":")
    return kind.lower() + colon + detail


def _wait(
    snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount], queue: list[PendingView]
) -> Iterator[str]:
    """By the limits alone; where others are before it, they may take the room first."""
    if by_limits := earliest(snapshot, job, counts):
        first = not queue or queue[0].id == job.id
        when = "no later than" if first else "unless jobs before it take the room, no later than"
        yield f"wait: {when} {format_duration(by_limits[0] - snapshot.now)} from now, {by_limits[1]}"


def _shorter(snapshot: Snapshot, queue: list[PendingView], counts: dict[str, NodeCount]) -> Iterator[str]:
    by_limits = earliest(snapshot, queue[0], counts) if queue else None
    if by_limits and (wait := int(by_limits[0] - snapshot.now)) > 0:
        yield _would_start(format_duration(wait))


def _head(snapshot: Snapshot, queue: list[PendingView], counts: dict[str, NodeCount]) -> Iterator[str]:
    if not queue:
        return
    by_limits = earliest(snapshot, queue[0], counts)
    when = f", which can start in {format_duration(by_limits[0] - snapshot.now)}: {by_limits[1]}" if by_limits else ""
    yield f"wait for the first of the queue, job {queue[0].id}{when}"
