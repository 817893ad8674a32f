"""After the policies: jobs that wait and may share are put beside one that runs, where neither loses too much.

A job is started so only if

- it waits for want of room, and both have asked for it (`rules.cannot_share`),
- each of the two is predicted to be slower by no more than its node says: as measured of their kinds, else by the
  formula, else as jobs of public tables (`beliefs.cost_of_neighbour`),
- the first job of its partition's queue fits no later by it, by the limits of what runs.

Queues are gone through in their order; of several jobs to share with it is the one with which the slower of the two
loses least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from gpusched.model.interference import Cost, KindBelief, kind_of
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.plan import Plan, ReasonCode, Start
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot, held_once
from gpusched.model.units import count_of, format_memory
from gpusched.sched.alone import Alone, in_order
from gpusched.sched.decide import ask
from gpusched.sched.gpus import links_matrix, nearest_gpus
from gpusched.sched.interference.beliefs import cost_of_neighbour
from gpusched.sched.limits import Rooms
from gpusched.sched.sharing.rules import Sharer, cannot_share, sharer_of_running, sharer_of_start
from gpusched.sched.tally import need, shut

Believed = Callable[[str], KindBelief | None]
"""Kind -> what is believed of it; None: nothing."""

MOST_IN_VAIN, MOST_STARTED = 16, 16  # different jobs, and starts, of a decision: each costs a look at all nodes
MOST_PLACES = 4  # that are tried for a job
_WAITS_FOR_ROOM = frozenset({ReasonCode.RESOURCES, ReasonCode.PRIORITY, ReasonCode.BACKFILL})


Miss = tuple[int, float, Callable[[], str]]
"""A place where a job cannot be: how far from possible that is (steps, then by how much), and why."""


class Beside(NamedTuple):
    """A place beside another job.

    Attributes:
        own, others: How much slower the job and the other one are expected to be.
    """

    other: Sharer
    part: NodeAllocation
    own: Cost
    others: Cost

    @property
    def worst(self) -> float:
        """By which part the slower of the two is slower."""
        return max(self.own.slower, self.others.slower)

    @property
    def line(self) -> str:
        """As a person reads it."""
        gpus = f"{'GPU' if len(self.part.gpus) == 1 else 'GPUs'} {', '.join(map(str, self.part.gpus))}"
        own, others = (f"{100 * cost.slower:.0f} %" for cost in (self.own, self.others))
        measured = self.own.source == self.others.source == "measured"
        by = self.own.note or self.others.note or ("measured" if measured else "estimated")
        return f"{gpus} of {self.part.node} with job {self.other.id} (about {own} slower, that one {others}; {by})"


def with_shared(plan: Plan, snapshot: Snapshot, believed: Believed) -> Plan:
    """The plan with the starts of jobs that share, to be checked anew; the plan itself where there are none."""
    if not any(node.shareable for node in snapshot.nodes) or not any(job.spec.share for job in snapshot.pending):
        return plan
    room = _Room(plan, snapshot, believed)
    for partition in {node.partition: None for node in snapshot.nodes if node.shareable}:
        in_vain: set[tuple[object, ...]] = set()  # what is left only shrinks
        for job in in_order(snapshot, partition):
            reason = plan.reasons.get(job.id)
            if not job.spec.share or reason is None or reason.code not in _WAITS_FOR_ROOM or room.full(job):
                continue
            alike = _alike(job)
            if alike in in_vain or len(in_vain) == MOST_IN_VAIN or len(room.starts) == MOST_STARTED:
                continue
            found = next((one for one in room.places(job)[0][:MOST_PLACES] if room.delays(job, one) is None), None)
            if found is None:
                in_vain.add(alike)
                continue
            room.start(job, found)
    return replace(plan, actions=(*plan.actions, *room.starts)) if room.starts else plan


def sharing_now(snapshot: Snapshot, job_id: str, believed: Believed) -> str:
    """Whether a waiting job could share GPUs now, and with whom, or why not, in a sentence; "": it does not ask to."""
    job = next((job for job in snapshot.pending if job.id == job_id), None)
    own = [node for node in snapshot.nodes if job is not None and node.partition == job.spec.partition]
    if job is None or not job.spec.share or not any(node.sharing for node in own):
        return ""
    room = _Room(Plan(), snapshot, believed)
    places, misses = room.places(job)
    if not places:
        nearest = min(misses, key=lambda miss: miss[:2], default=None)
        why = nearest[2]() if nearest is not None else "no running job shares its GPUs"
        return f"it cannot share GPUs now: {why}"
    for found in places[:MOST_PLACES]:
        if room.delays(job, found) is None:
            return f"it may share {found.line}"
    return f"it does not share {places[0].line}: job {room.delays(job, places[0])}, ahead of it, would start later"


class _Room:
    """What is left, as jobs are started."""

    def __init__(self, plan: Plan, snapshot: Snapshot, believed: Believed) -> None:
        self.starts: list[Start] = []
        self._believed = believed
        self._kinds: dict[str, KindBelief] = {}
        self._costs: dict[tuple[str, str], Cost] = {}
        self._heads: dict[str, PendingView] = {}
        self._fits: dict[str, float] = {}  # job -> when it fits at the latest, as first asked
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._pending = {job.id: job for job in snapshot.pending}
        self._rooms = Rooms(snapshot)
        self._snapshot = snapshot
        leaving = {action.job_id for action in plan.actions if not isinstance(action, Start)}
        stays = (JobState.STARTING, JobState.RUNNING)
        running = (job for job in snapshot.running if job.state in stays and job.id not in leaving)
        self._sharers = {one.id: one for job in running if (one := sharer_of_running(job)) is not None}
        for action in plan.actions:
            if isinstance(action, Start):
                self._take(self._pending[action.job_id], action.allocation)
        self._alone = Alone(self._snapshot)

    def _take(self, job: PendingView, allocation: Allocation) -> None:
        """Note a start of this decision."""
        left = tuple(other for other in self._snapshot.pending if other.id != job.id)
        self._snapshot = replace(
            self._snapshot, pending=left, running=(*self._snapshot.running, self._view(job, allocation))
        )
        self._rooms.take(job, allocation.gpus)
        one = sharer_of_start(job.id, job.user, job.spec, allocation.parts)
        if one is not None and self._nodes[one.node].sharing is not None:
            self._sharers[job.id] = one

    def _view(self, job: PendingView, allocation: Allocation) -> RunningView:
        now = self._snapshot.now
        return RunningView(
            id=job.id, user=job.user, allocation=allocation, start_time=now, expected_end=now + job.spec.time_limit_s,
            array_id=job.array_id, state=JobState.STARTING, spec=job.spec,
        )  # fmt: skip

    def full(self, job: PendingView) -> bool:
        """Whether a limit leaves no room for it."""
        return self._rooms.full(job) is not None

    def places(self, job: PendingView) -> tuple[list[Beside], list[Miss]]:
        """Where it could share, first where the slower of the two loses least; and where it could not."""
        tried = [self._beside(job, other) for other in self._sharers.values()]
        found = [one for one in tried if isinstance(one, Beside)]
        found.sort(key=lambda one: (one.worst, one.other.id))
        return found, [one for one in tried if not isinstance(one, Beside)]

    def _beside(self, job: PendingView, other: Sharer) -> Beside | Miss:
        node, spec = self._nodes[other.node], job.spec
        why: str | None = shut(job, node, self._snapshot.now) or ("" if node.available else "takes no jobs now")
        if why:
            return 6, 0.0, lambda: f"node {node.name}: {why}"
        well = [gpu for gpu in other.gpus if gpu in node.shareable and gpu not in node.blocked]
        if spec.gpus_per_node > len(well):
            return (
                5,
                0.0,
                lambda: f"job {other.id} has {count_of(len(well), 'GPU')} to share; it requests {spec.gpus_per_node}",
            )
        _, cores, memory = self._alone.free(node.name)
        if cores < spec.cores_per_node or memory < spec.memory_mib_per_node:
            free = f"{count_of(max(0, cores), 'core')} and {format_memory(max(0, memory))} of memory"
            return 2, 0.0, lambda: f"node {node.name} of job {other.id} has {free} free"
        gpus = _chosen(node, well, spec.gpus_per_node)
        part = NodeAllocation(
            rank=0, node=node.name, gpus=gpus, cores=spec.cores_per_node, memory_mib=spec.memory_mib_per_node
        )
        own = sharer_of_start(job.id, job.user, spec, (part,))
        assert own is not None
        if refused := cannot_share(node, own, other):
            return 3, 0.0, lambda: refused
        assert node.sharing is not None
        mine, its = kind_of(job.user, spec.name), kind_of(other.user, other.name)
        found = Beside(other, part, self._cost(mine, its), self._cost(its, mine))
        if found.worst <= node.sharing.slowdown:
            return found
        bound = 100 * node.sharing.slowdown
        return 1, found.worst, lambda: f"{found.line}; {node.name} allows {bound:.0f} %"

    def _cost(self, kind: str, beside: str) -> Cost:
        if (kind, beside) not in self._costs:
            for one in (kind, beside):
                if one not in self._kinds:
                    self._kinds[one] = self._believed(one) or KindBelief(kind=one)
            self._costs[kind, beside] = cost_of_neighbour(self._kinds[kind], self._kinds[beside], "gpu")
        return self._costs[kind, beside]

    def delays(self, job: PendingView, found: Beside) -> str | None:
        """The first job of its queue, if that fits later by it, by the limits of what runs."""
        head = self._head(job)
        if head is None:
            return None
        if head.id not in self._fits:
            self._fits[head.id] = self._alone.when(head)
        return head.id if Alone(self._with(job, found)).when(head) > self._fits[head.id] else None

    def _head(self, job: PendingView) -> PendingView | None:
        """The first of its queue that waits for room; None: itself, or nobody."""
        partition = job.spec.partition
        head = self._heads.get(partition)
        if head is None or head.id in {start.job_id for start in self.starts}:
            found = ask(self._snapshot, job.id, partition).head
            if found is None:
                return None
            head = self._heads[partition] = found[0]
        return None if head.id == job.id else head

    def _with(self, job: PendingView, found: Beside) -> Snapshot:
        """The snapshot with the job there."""
        mine = self._view(job, Allocation(job.id, (found.part,)))
        running = list(self._snapshot.running)
        at = next(i for i, view in enumerate(running) if view.id == found.other.id)
        running[at], mine = held_once(running[at], mine)
        left = tuple(other for other in self._snapshot.pending if other.id != job.id)
        return replace(self._snapshot, pending=left, running=(*running, mine))

    def start(self, job: PendingView, found: Beside) -> None:
        """Start it there."""
        self._snapshot = self._with(job, found)
        self._alone = Alone(self._snapshot)
        self._rooms.take(job)
        self._sharers[found.other.id] = found.other._replace(partner=job.id)
        self.starts.append(Start(job.id, Allocation(job.id, (found.part,))))


def _alike(job: PendingView) -> tuple[object, ...]:
    """The same for jobs that can share in the same places, and cost the same there."""
    spec = job.spec
    asked = (*need(spec), spec.gpu_memory_mib, spec.time_limit_s)
    where = (spec.nodelist, spec.exclude, spec.gpu_types, job.excluded_nodes)
    return spec.partition, kind_of(job.user, spec.name), asked, where


def _chosen(node: NodeView, gpus: list[int], count: int) -> tuple[int, ...]:
    """So many of these GPUs, the nearest to each other."""
    if count >= len(gpus) or not node.links:
        return tuple(sorted(gpus))[:count]
    known = sorted(node.gpus)
    at = tuple(sorted(known.index(gpu) for gpu in gpus))
    return tuple(known[i] for i in nearest_gpus(links_matrix(known, node.links), at, count))
