"""How many GPUs resizable jobs get: from a snapshot to the sizes of those that wait and the resizes of those that run.

Plain Python, and pure. `sizes_of` looks at the GPUs of a partition as one; whether a size fits on nodes is looked at
where jobs that run would be stopped for it (`_fit`), for the others by the passes that place.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from math import log
from typing import NamedTuple

import msgspec

from gpusched.model.jobs import JobSpec, Resizes
from gpusched.model.plan import Resize
from gpusched.model.policy import PolicySpec, Resizing
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.eligible import ineligible, may_resize
from gpusched.sched.tally import counts_of, covers, excluded_by, need

_SCALING = 0.8  # of a job that told its pace at one size only: twice the GPUs, 2 ** 0.8 times the pace
_USUAL_LEFT_S = 3600.0  # of a job that does not tell
_SOON = 10.0  # somebody ends soon: within so many times what a stop costs
_PATIENCE = 0.25  # GPUs go to jobs with little left first, by the power of it that DL2's setting showed to be best


class Sized(NamedTuple):
    """The snapshot with the jobs that wait at the sizes they would start with, and resizes of such that run."""

    snapshot: Snapshot
    resizes: tuple[Resize, ...]


class _Here(NamedTuple):
    """One partition: its name, policy, nodes, what runs there, and the sizes that equal requests may have."""

    name: str
    policy: PolicySpec
    nodes: list[NodeView]
    running: list[RunningView]
    possible: dict[tuple[object, ...], frozenset[int]]


class _One(NamedTuple):
    """A resizable job: what it may have, has (0: it waits), and how fast it goes."""

    id: str
    sizes: tuple[int, ...]
    gpus: int
    speeds: dict[int, float]
    left_s: float
    cost_s: float  # of one more stop
    held_back: float  # part of its speed that stopping costs it

    def speed(self, gpus: int) -> float:
        """Relative to its largest size."""
        return speed_at(self.speeds, gpus) / speed_at(self.speeds, self.sizes[-1]) if gpus else 0.0


def sizes_of(snapshot: Snapshot) -> Sized:
    """Sizes for all partitions whose policy chooses them; the same snapshot always gives the same answer."""
    sizes: dict[str, int] = {}
    resizes: list[Resize] = []
    for name, policy in snapshot.policies.items():
        if policy.sizes != "base":
            waiting, running = _of_partition(snapshot, name, policy)
            sizes |= waiting
            resizes += running
    if not sizes:
        return Sized(snapshot, tuple(resizes))
    pending = tuple(_at_size(snapshot, job, sizes[job.id]) if job.id in sizes else job for job in snapshot.pending)
    return Sized(msgspec.structs.replace(snapshot, pending=pending), tuple(resizes))


def shape(spec: JobSpec, gpus: int, nodes: Iterable[NodeView]) -> JobSpec | None:
    """The request at another size, over the fewest of these nodes that can give it, empty; None: they cannot."""
    usable = [node for node in nodes if not excluded_by(spec, node)]
    for count in range(1, len(usable) + 1):
        if gpus % count == 0:
            found = spec.at_size(gpus, count)
            if sum(covers((len(n.gpus), n.cores, n.memory_mib), need(found)) for n in usable) >= count:
                return found
    return None


def speed_at(speeds: dict[int, float], gpus: int) -> float:
    """Steps a second with so many GPUs, as a power of the size between and beyond those at which it is known."""
    known = sorted(speeds)
    if not known:
        return float(gpus**_SCALING)
    if gpus in speeds:
        return speeds[gpus]
    if len(known) == 1:
        return float(speeds[known[0]] * (gpus / known[0]) ** _SCALING)
    above = next((i for i, size in enumerate(known) if size > gpus), len(known) - 1)
    low, high = known[max(0, above - 1)], known[max(1, above)]
    slope = log(speeds[high] / speeds[low]) / log(high / low)
    if low < gpus < high:
        return float(speeds[low] * (gpus / low) ** slope)
    nearest = low if gpus < low else high
    return float(speeds[nearest] * (gpus / nearest) ** min(1.0, max(0.0, slope)))


def _of_partition(snapshot: Snapshot, name: str, policy: PolicySpec) -> tuple[dict[str, int], list[Resize]]:
    nodes = [node for node in snapshot.nodes if node.partition == name]
    names = {node.name for node in nodes}
    running = [job for job in snapshot.running if any(part.node in names for part in job.allocation.parts)]
    here = _Here(name, policy, nodes, running, {})
    movable = [job for job in running if may_resize(job, policy.resize, snapshot.now) is None]
    ones = [_running_one(job, snapshot.now) for job in movable]
    total = sum(len(set(n.gpus) - set(n.blocked)) for n in nodes if n.available)
    free = total - sum(job.allocation.gpus for job in running)
    spare = sum(one.gpus - one.sizes[0] for one in ones)
    rigid, sized = _admitted(snapshot, here, free, spare, _waits_long(running, ones, snapshot.now))
    needed = sum(job.spec.gpus for job in rigid)
    sizes = _greedy([_waiting_one(job, options) for job, options in sized], max(free - needed, 0), total)
    short = needed + sum(sizes.values()) - free
    if short > 0:
        after = _shrunk(ones, short)
    else:
        after = _grown(ones, -short, policy.resize, total, _horizon(snapshot, name))
    changed = {
        job.id: shape(job.spec, after[job.id], nodes)
        for job in movable
        if job.spec and after[job.id] != job.allocation.gpus
    }
    if short > 0:  # nobody is stopped for what then still has no place
        specs = [
            *changed.values(),
            *(shape(job.spec, sizes[job.id], nodes) for job, _ in sized),
            *(j.spec for j in rigid),
        ]
        if not _fit(here, changed, specs):
            return sizes, []
    others = [job.id for job in (*rigid, *(job for job, _ in sized))]
    return sizes, [
        Resize(one.id, after[one.id], _why(one, after[one.id], others))
        for one in ones
        if one.id in changed and (short > 0 or _fit(here, (one.id,), [changed[one.id]]))
    ]


def _waits_long(running: Sequence[RunningView], ones: Sequence[_One], now: float) -> bool:
    """Whether nobody will end soon, in comparison with what it costs to stop somebody."""
    soon = min((job.own_end if job.own_end is not None else job.expected_end for job in running), default=now) - now
    return soon > _SOON * max((one.cost_s for one in ones), default=0.0)


def _horizon(snapshot: Snapshot, name: str) -> float:
    """Seconds for which a larger size can be expected to last: between submissions of late."""
    times = [job.submit_time for job in snapshot.running if job.submit_time is not None]
    times += [job.submit_time for job in snapshot.pending if job.spec.partition == name]
    latest = sorted(times)[-8:]
    return (snapshot.now - latest[0]) / len(latest) if latest else _USUAL_LEFT_S


def _admitted(
    snapshot: Snapshot, here: _Here, free: int, spare: int, patient: bool
) -> tuple[list[PendingView], list[tuple[PendingView, tuple[int, ...]]]]:
    """Who of those that wait is to start, in order: rigid ones, and resizable ones with the sizes that they may have.

    Args:
        snapshot: What is decided on.
        here: The partition.
        free: GPUs free now.
        spare: GPUs that those that run would give, at their least sizes.
        patient: Resizable jobs may have those, too; else they wait for somebody's end.
    """
    rigid: list[PendingView] = []
    sized: list[tuple[PendingView, tuple[int, ...]]] = []
    taken = 0
    queue = [j for j in snapshot.pending if j.spec.partition == here.name]
    queue = [j for j in queue if ineligible(j, snapshot.now, snapshot.policies) is None]
    for job in sorted(queue, key=lambda j: (j.resume_at is None, -j.priority, j.submit_time, j.id)):
        options = _options(job, here) if job.spec.elastic is not None else ()
        least = options[0] if options else job.spec.gpus
        if taken + least > free + (spare if patient or not options or job.resume_at is not None else 0):
            if here.policy.backfill == "none":
                break
            continue
        taken += least
        if options:
            sized.append((job, options))
        else:
            rigid.append(job)
    return rigid, sized


def _greedy(ones: Sequence[_One], capacity: int, total: int) -> dict[str, int]:
    """Everyone's least size, then again and again the step that gains most for what it takes."""
    given = {one.id: one.sizes[0] for one in ones}
    left = capacity - sum(given.values())
    while True:
        best: tuple[float, str, int] | None = None
        for one in ones:
            for gpus in one.sizes:
                more = gpus - given[one.id]
                if 0 < more <= left:
                    rate = _gain(one, given[one.id], gpus, total)
                    if best is None or rate > best[0]:
                        best = rate, one.id, gpus
        if best is None or best[0] <= 0:
            return given
        left -= best[2] - given[best[1]]
        given[best[1]] = best[2]


def _gain(one: _One, before: int, gpus: int, total: int) -> float:
    """Relative speed gained, for the share of all GPUs that it takes; more for jobs with little left."""
    gained = one.speed(gpus) - one.speed(before)
    return float(gained / ((gpus - before) / total) / max(one.left_s, 1.0) ** _PATIENCE)


def _shrunk(ones: Sequence[_One], short: int) -> dict[str, int]:
    """Sizes after so many GPUs are given to others: first by whom a GPU gains least, one size after the other."""
    after = {one.id: one.gpus for one in ones}
    while short > 0:
        steps = [(one, g) for one in ones for g in one.sizes if g < after[one.id]]
        if not steps:
            break
        enough = [(one, g) for one, g in steps if after[one.id] - g >= short]
        one, gpus = min(
            enough or steps,
            key=lambda s: ((s[0].speed(after[s[0].id]) - s[0].speed(s[1])) / s[0].left_s ** _PATIENCE, s[0].id),
        )
        short -= after[one.id] - gpus
        after[one.id] = gpus
    return after


def _grown(ones: Sequence[_One], room: int, rules: Resizing, total: int, horizon_s: float) -> dict[str, int]:
    """Sizes after those that gain most have grown into ``room`` GPUs, where that pays before the next one comes."""
    after = {one.id: one.gpus for one in ones}
    steps = [(one, g) for one in ones for g in one.sizes if g > one.gpus and _pays(one, g, rules, horizon_s)]
    for one, gpus in sorted(steps, key=lambda s: (-_gain(s[0], s[0].gpus, s[1], total), s[0].id, -s[1])):
        if after[one.id] == one.gpus and gpus - one.gpus <= room:
            after[one.id] = gpus
            room -= gpus - one.gpus
    return after


def _pays(one: _One, gpus: int, rules: Resizing, horizon_s: float) -> bool:
    before, then = one.speed(one.gpus), one.speed(gpus)
    lasts = min(one.left_s, horizon_s)
    return then * (1.0 - one.held_back) >= before * (1.0 + rules.gain) and (then - before) * lasts > before * one.cost_s


def _fit(here: _Here, without: Container[str], specs: Iterable[JobSpec | None]) -> bool:
    """Whether the nodes, without these jobs, have room for such requests, one after the other, each best fit."""
    running = tuple(job for job in here.running if job.id not in without)
    counts = counts_of(Snapshot(now=0.0, nodes=tuple(here.nodes), running=running, pending=(), policies={}))
    room = {name: count.free for name, count in counts.items()}
    for spec in specs:
        if spec is None:
            return False
        needs = need(spec)
        places = [n.name for n in here.nodes if not excluded_by(spec, n) and covers(room[n.name], needs)]
        if len(places) < spec.nodes:
            return False
        for name in sorted(places, key=lambda name: (room[name], name))[: spec.nodes]:
            gpus, cores, memory = (h - n for h, n in zip(room[name], needs, strict=True))
            room[name] = gpus, cores, memory
    return True


def _allowed(spec: JobSpec | None, resizes: Resizes | None) -> tuple[int, ...]:
    """Sizes that a job may have, but for those at which it did not come up; its only one where it is rigid."""
    assert spec is not None
    if spec.elastic is None:
        return (spec.gpus,)
    unusable = resizes.unusable if resizes is not None else ()
    return tuple(g for g in spec.elastic.sizes if g not in unusable) or (spec.gpus,)


def _options(job: PendingView, here: _Here) -> tuple[int, ...]:
    """Sizes at which it may start here; one that goes on at another size does not take more than that."""
    possible = _possible(job.spec, here)
    sizes = tuple(g for g in _allowed(job.spec, job.resizes) if g in possible)
    return tuple(g for g in sizes if job.resume_at is None or g <= job.resume_at) or sizes


def _possible(spec: JobSpec, here: _Here) -> frozenset[int]:
    """Sizes that some of the nodes can give, empty; looked at once for all that ask for the same."""
    assert spec.elastic is not None
    key = spec.elastic, spec.nodelist, spec.exclude, spec.gpu_types
    if key not in here.possible:
        here.possible[key] = frozenset(g for g in spec.elastic.sizes if shape(spec, g, here.nodes) is not None)
    return here.possible[key]


def _running_one(job: RunningView, now: float) -> _One:
    cost = (job.resizes.cost_s if job.resizes is not None else None) or 0.0
    count = job.resizes.count if job.resizes is not None else 0
    age = max(0.0, now - (job.submit_time if job.submit_time is not None else job.start_time))
    # Sia: what a job gets of its speed where it goes on stopping as often as it did so far.
    part = max(0.0, age - count * cost) / (age + cost) if age + cost > 0 else 1.0
    left = job.own_end - now if job.own_end is not None else job.expected_end - now
    return _One(
        job.id, _allowed(job.spec, job.resizes), job.allocation.gpus, job.speeds, max(left, 1.0), cost, 1.0 - part
    )


def _waiting_one(job: PendingView, sizes: tuple[int, ...]) -> _One:
    pace = speed_at(job.speeds, sizes[0]) if job.speeds else None
    left = job.left / pace if job.left is not None and pace else min(_USUAL_LEFT_S, job.expected_s)
    return _One(job.id, sizes, 0, job.speeds, max(left, 1.0), 0.0, 0.0)


def _at_size(snapshot: Snapshot, job: PendingView, gpus: int) -> PendingView:
    found = shape(job.spec, gpus, snapshot.nodes)
    assert found is not None
    # What was stopped to be resized goes on before anybody takes its place.
    first = 1 << 31 if job.resume_at is not None else 0
    return msgspec.structs.replace(job, spec=found, priority=job.priority + first)


def _why(one: _One, gpus: int, others: Sequence[str]) -> str:
    if gpus < one.gpus:
        whom = f" for {', '.join(others[:3])}{' and others' if len(others) > 3 else ''}" if others else ""
        return f"shrinks from {one.gpus} to {gpus} GPUs{whom}"
    faster = one.speed(gpus) / one.speed(one.gpus)
    known = "as it told" if {gpus, one.gpus} <= one.speeds.keys() else "by what is expected of it"
    return f"grows from {one.gpus} to {gpus} GPUs that are free: {faster:.2f} times as fast {known}"
