"""Which GPUs to cut into slices on demand, which to make whole again, and which jobs they are kept for until then.

Decided anew from each snapshot, so that nothing is lost with the controller. Waiting jobs of both kinds are served in
one order, by priority and time of submission:

- A job for slices takes free ones; else GPUs on which nothing runs are cut for it, first such as are to be cut anyway.
- A job for whole GPUs takes free ones; else GPUs that are cut, and on which nothing runs, are made whole for it.
- The first job of a partition and of each kind that has to wait keeps the GPUs that come free soonest: slices that are
  free on them are closed, and so nothing can keep it waiting for ever.

A GPU is cut or made whole only when nothing runs on it, and all at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from gpusched.model.slices import Cut, gpu_of, is_slice, slice_index
from gpusched.model.slicetables import GPU_PARTS, parts_of
from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.sched.eligible import ineligible
from gpusched.sched.limits import Rooms
from gpusched.sched.slices.tree import Geometry, Table, arranged, filled, most_of
from gpusched.sched.tally import barred

CUT_S = 30.0
"""How long a cut takes, about; by it starts are forecast."""

FREE = float("-inf")
_Request = tuple[str, int, int, int]  # profile, GPUs, cores and MiB on each node

CONSIDERED = 1000  # waiting jobs, from the first


class Kept(NamedTuple):
    """A GPU or slice that is free and kept; ``until``: when others may have it at the soonest (Unix seconds)."""

    job: str
    until: float


class Arrangement(NamedTuple):
    """What to cut now, and what is kept: (node, number of a GPU or slice) -> for which job."""

    cuts: tuple[Cut, ...] = ()
    kept: dict[tuple[str, int], Kept] = {}  # noqa: RUF012 (never changed)


class GpuOnDemand:
    """One GPU of a node while jobs are served.

    Attributes:
        table: What it can be cut into; (): it is never cut.
        free: Numbers of its slices that are free and not taken by a job served before, by profile.
        until: When nothing runs on it any more, by limits (Unix seconds); `FREE`: nothing does; infinite: not known,
            as a foreign process is on it, or it is broken.
        wanted: Profiles of the slices that it is to be cut into.
        job: The job for which it is to be whole, or is kept; None: none.
    """

    def __init__(self, node: NodeView, index: int, until: float) -> None:
        self.node, self.index, self.until = node.name, index, until
        self.table: Table = node.cuttable.get(index, ())
        self.slices = [one for one in node.slices if gpu_of(one.number) == index]
        self.free: dict[str, list[int]] = {}
        self.is_whole = not self.slices and not node.blocked.get(index, "").startswith("SLICED")
        self.is_usable = self.table != () or self.is_whole
        self.wanted: list[str] = []
        self.cut_for: PendingView | None = None  # the first that wants slices
        self.job: PendingView | None = None
        self.taken_until = FREE  # by jobs served before

    @property
    def is_free(self) -> bool:
        """Return whether nothing is on it, and no job served before has it."""
        return self.comes == FREE and self.job is None

    @property
    def comes(self) -> float:
        """Return when it is free of what is on it, and of the jobs served before, by limits."""
        return max(self.until, self.taken_until)


def arrange(snapshot: Snapshot) -> Arrangement:
    """Return what to cut for the jobs that wait, and what to keep; nothing where no GPU is cut on demand."""
    if not any(node.cuttable for node in snapshot.nodes):
        return Arrangement()
    board = _Board(snapshot)
    rooms = Rooms(snapshot)
    for job in _in_order(snapshot):
        if ineligible(job, snapshot.now, snapshot.policies) is None and rooms.full(job) is None:
            board.serve(job)
            rooms.take(job)
    return Arrangement(tuple(board.cuts()), dict(board.kept()))


def cuts_of(snapshot: Snapshot) -> tuple[Cut, ...]:
    """Return what to cut, and what to make whole again, once the jobs of a decision have started."""
    return arrange(snapshot).cuts


def _in_order(snapshot: Snapshot) -> list[PendingView]:
    partitions = {node.partition for node in snapshot.nodes if node.cuttable}
    jobs = [job for job in snapshot.pending if job.spec.partition in partitions]
    return sorted(jobs, key=lambda job: (-job.priority, -job.standing, job.submit_time, job.id))[:CONSIDERED]


def busy_until(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    """Return (node, number of a GPU or slice) -> when the last job on it ends by its limit; foreign processes: never.

    A GPU is as busy as its slices. What an operation is under way on is blocked, and so never free.
    """
    found: dict[tuple[str, int], float] = {}

    def held(node: str, number: int, until: float) -> None:
        for key in {(node, number), (node, gpu_of(number))}:
            found[key] = max(until, found.get(key, until))

    for job in snapshot.running:
        for part in job.allocation.parts:
            for number in part.gpus:
                held(part.node, number, max(job.expected_end, snapshot.now))
    for node in snapshot.nodes:
        for number, why in node.blocked.items():
            broken = why.startswith("UNUSABLE") and is_slice(number)  # a cut that was broken off leaves such
            if not broken and not why.startswith("SLICED"):
                held(node.name, number, float("inf"))
    return found


class _Board:
    """The GPUs of all nodes while jobs are served in order."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._now = snapshot.now
        self._nodes = [node for node in snapshot.nodes if node.available]
        self._gpus: dict[str, list[GpuOnDemand]] = {}
        # Node -> cost of a request there (see `serve`), until something there changes: most nodes never do.
        self._costs: dict[str, dict[_Request, tuple[int, ...] | None]] = {node.name: {} for node in self._nodes}
        self._waits: set[tuple[str, bool]] = set()  # partitions, and whether a job for slices keeps GPUs there
        specs = [job.spec for job in snapshot.pending] + [job.spec for job in snapshot.running if job.spec is not None]
        self._asked = {spec.partition for spec in specs if spec.profile}
        self._end = busy_until(snapshot)
        for node in self._nodes:
            self._gpus[node.name] = [
                GpuOnDemand(node, index, self._end.get((node.name, index), FREE)) for index in node.gpus
            ]
            for gpu in self._gpus[node.name]:
                for one in gpu.slices:
                    if (node.name, one.number) not in self._end and one.number not in node.blocked:
                        gpu.free.setdefault(one.profile, []).append(one.number)
                # What is about to come counts as if it were there, or the same jobs would have one GPU after the other.
                for profile, start in node.cutting.get(gpu.index, ()):
                    gpu.free.setdefault(profile, []).append(slice_index(gpu.index, start))
                if node.cutting.get(gpu.index) == ():
                    gpu.is_whole, gpu.until = True, FREE

    def serve(self, job: PendingView) -> None:
        """Let a job take what is free, or have GPUs cut or made whole for it; else keep what comes free soonest."""
        spec, found = job.spec, list[tuple[tuple[int, ...], NodeView]]()
        request = spec.profile, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node
        for node in self._nodes:
            if node.partition != spec.partition:
                continue
            costs = self._costs[node.name]
            if request not in costs:
                costs[request] = self._slices_cost(node, job) if spec.profile else self._gpus_cost(node, job)
            if (cost := costs[request]) is not None and not barred(job, node):
                found.append((cost, node))
        if len(found) >= spec.nodes:
            for _, node in heapq.nsmallest(spec.nodes, found, key=itemgetter(0)):
                (self._take_slices if spec.profile else self._take_gpus)(node, job)
                self._costs[node.name].clear()
        elif (spec.partition, spec.profile != "") not in self._waits:
            self._waits.add((spec.partition, spec.profile != ""))
            (self._keep_for_slices if spec.profile else self._keep_whole)(job)

    # Jobs for slices

    def _slices_cost(self, node: NodeView, job: PendingView) -> tuple[int, ...] | None:
        """Return how much the node would lose by the job: whole GPUs, then any; None: it has not enough."""
        parts = self._parts(node, job.spec.profile, _slices_needed(node, job))
        if parts is None:
            return None
        new = [gpu for gpu, count in parts if count and not gpu.wanted]
        return sum(gpu.is_whole for gpu in new), len(new), self._whole_left(node)

    def _parts(self, node: NodeView, profile: str, count: int) -> list[tuple[GpuOnDemand, int]] | None:
        """Return which GPUs give slices: (GPU, how many it is to be cut into; 0: free ones are enough).

        Slices of GPUs on which nothing runs are used as they are, or, if that is not enough, cut anew.
        """
        gpus = [gpu for gpu in self._gpus[node.name] if gpu.job is None]
        fixed = [gpu for gpu in gpus if not gpu.wanted]
        in_use = [gpu for gpu in fixed if not (gpu.table and gpu.is_free)]
        return self._parts_of(gpus, fixed, profile, count) or self._parts_of(gpus, in_use, profile, count)

    def _parts_of(
        self, gpus: list[GpuOnDemand], kept: list[GpuOnDemand], profile: str, count: int
    ) -> list[tuple[GpuOnDemand, int]] | None:
        """Return the same, with the slices of the GPUs that are ``kept`` as they are."""
        parts: list[tuple[GpuOnDemand, int]] = []
        for gpu in kept:
            if has := min(count, len(gpu.free.get(profile, ()))):
                parts.append((gpu, 0))
                count -= has
        using = {gpu.index for gpu, _ in parts}
        able = [gpu for gpu in gpus if gpu.wanted or (gpu.table and gpu.is_free and gpu.index not in using)]
        for gpu in sorted(able, key=lambda gpu: (not gpu.wanted, gpu.is_whole, -gpu.index)):
            fits = 0
            while fits < count and arranged(gpu.table, (*gpu.wanted, *(profile,) * (fits + 1))) is not None:
                fits += 1
            if fits:
                parts.append((gpu, fits))
                count -= fits
        return None if count else parts

    def _take_slices(self, node: NodeView, job: PendingView) -> None:
        count, profile = _slices_needed(node, job), job.spec.profile
        for gpu, fits in self._parts(node, profile, count) or ():
            if fits:
                gpu.wanted += [profile] * fits
                gpu.cut_for = gpu.cut_for or job
                count -= fits
            else:
                gpu.taken_until = max(gpu.taken_until, self._now + job.limit_s)
                given = min(count, len(gpu.free[profile]))
                del gpu.free[profile][:given]
                count -= given

    def _keep_for_slices(self, job: PendingView) -> None:
        """Keep the GPUs that come free soonest and can be cut for the job; none if slices come free sooner."""
        spec, choices = job.spec, list[tuple[float, int, list[GpuOnDemand]]]()
        for place, node in enumerate(self._allowed(job)):
            count = _slices_needed(node, job)
            own = [gpu for gpu in self._gpus[node.name] if gpu.job is None and not gpu.wanted]
            usable = [one for gpu in own for one in gpu.slices if one.number not in node.blocked]
            ends = sorted(self._end.get((node.name, o.number), self._now) for o in usable if o.profile == spec.profile)
            comes = ends[count - 1] if len(ends) >= count else float("inf")
            able = sorted((gpu for gpu in own if gpu.table), key=lambda gpu: (gpu.comes, gpu.index))
            chosen: list[GpuOnDemand] = []
            while count > 0 and able:
                chosen.append(able.pop(0))
                count -= len(most_of(chosen[-1].table, spec.profile))
            at = chosen[-1].comes if count <= 0 else float("inf")
            if min(at, comes) < float("inf"):
                choices.append((min(at, comes), place, chosen if at < comes else []))
        self._keep(job, choices)

    # Jobs for whole GPUs

    def _gpus_cost(self, node: NodeView, job: PendingView) -> tuple[int, ...] | None:
        """Return how many GPUs would be made whole for the job, and how many are whole; None: there are not enough."""
        own = self._gpus_now(node, job)
        return None if own is None else (sum(not gpu.is_whole for gpu in own), self._whole_left(node))

    def _take_gpus(self, node: NodeView, job: PendingView) -> None:
        for gpu in self._gpus_now(node, job) or ():
            if gpu.is_whole:
                gpu.taken_until = self._now + job.limit_s
            else:
                gpu.job = job

    def _gpus_now(self, node: NodeView, job: PendingView) -> list[GpuOnDemand] | None:
        """Return GPUs that the job could have now, whole ones first; None: there are not enough."""
        able = [gpu for gpu in self._gpus[node.name] if gpu.is_usable and gpu.is_free and not gpu.wanted]
        able.sort(key=lambda gpu: (not gpu.is_whole, gpu.table != (), gpu.index))
        needs = _gpus_needed(node, job)
        return able[:needs] if len(able) >= needs else None

    def _keep_whole(self, job: PendingView) -> None:
        """Keep for the job, on as many nodes as it needs, the GPUs that come free soonest."""
        choices: list[tuple[float, int, list[GpuOnDemand]]] = []
        for place, node in enumerate(self._allowed(job)):
            able = [gpu for gpu in self._gpus[node.name] if gpu.is_usable and not gpu.wanted and gpu.job is None]
            able.sort(key=lambda gpu: (gpu.comes, not gpu.is_whole, gpu.index))
            needs = _gpus_needed(node, job)
            if 0 < needs <= len(able) and able[needs - 1].comes < float("inf"):
                choices.append((able[needs - 1].comes, place, able[:needs]))
        self._keep(job, choices)

    def _keep(self, job: PendingView, choices: list[tuple[float, int, list[GpuOnDemand]]]) -> None:
        """Keep GPUs on as many nodes as the job needs; with fewer ``choices`` (when, place, GPUs) it can never run."""
        if len(choices) < job.spec.nodes:
            return
        for _, _, chosen in sorted(choices, key=lambda choice: choice[:2])[: job.spec.nodes]:
            for gpu in chosen:
                gpu.job = job
                self._costs[gpu.node].clear()

    def _allowed(self, job: PendingView) -> list[NodeView]:
        return [node for node in self._nodes if node.partition == job.spec.partition and not barred(job, node)]

    def _whole_left(self, node: NodeView) -> int:
        """Return how many whole GPUs of the node are left: cuts and small jobs go where there are the fewest."""
        return sum(gpu.is_whole and gpu.is_free for gpu in self._gpus[node.name])

    # The result

    def cuts(self) -> Iterator[Cut]:
        """Yield what to change now."""
        for node in self._nodes:
            for gpu in self._gpus[node.name]:
                if not gpu.table or gpu.comes != FREE:
                    continue
                if gpu.wanted:
                    geometry = filled(gpu.table, tuple(gpu.wanted))
                    assert geometry is not None
                    if geometry != _geometry(gpu):
                        yield Cut(gpu.node, gpu.index, geometry)
                elif not gpu.is_whole and self._goes_back(node, gpu):
                    yield Cut(gpu.node, gpu.index)

    def _goes_back(self, node: NodeView, gpu: GpuOnDemand) -> bool:
        """Return whether a GPU that is cut, and idle, becomes whole: for a job, or since no job asks for slices."""
        if gpu.job is not None:
            return not gpu.job.spec.profile
        return gpu.is_free and (not gpu.slices or node.partition not in self._asked)

    def kept(self) -> Iterator[tuple[tuple[str, int], Kept]]:
        """Yield what is free but kept from other jobs: GPUs about to change, and those kept for a pending job."""
        for gpu in (gpu for gpus in self._gpus.values() for gpu in gpus):
            job = gpu.cut_for or gpu.job
            if job is None:
                continue
            keeps = Kept(job.id, max(gpu.comes, self._now) + CUT_S + job.limit_s)
            if job.spec.profile and gpu.is_whole and gpu.comes == FREE:  # what was taken before is not kept from it
                yield (gpu.node, gpu.index), keeps
            for number in (number for numbers in gpu.free.values() for number in numbers):
                yield (gpu.node, number), keeps


def _geometry(gpu: GpuOnDemand) -> Geometry:
    """Return how the GPU is cut; () also where one of its slices is of no use."""
    slices = sorted(gpu.slices, key=lambda one: one.number)
    usable = sum(map(len, gpu.free.values())) == len(slices)
    return tuple((one.profile, one.number % 1000) for one in slices) if usable else ()


def _slices_needed(node: NodeView, job: PendingView) -> int:
    """Return how many slices of the node the job takes, with the cores and memory that go with them."""
    return max(job.spec.gpus_per_node, -(-_by_amounts(node, job, GPU_PARTS) // parts_of(job.spec.profile)))


def _gpus_needed(node: NodeView, job: PendingView) -> int:
    """Return how many GPUs of the node the job takes, with the cores and memory that go with them."""
    return max(job.spec.gpus_per_node, _by_amounts(node, job, 1))


def _by_amounts(node: NodeView, job: PendingView, whole: int) -> int:
    """Return how many of ``whole`` parts of each GPU bring the cores and memory that a job asks for."""
    spec = job.spec
    shares = ((spec.cores_per_node, node.cores), (spec.memory_mib_per_node, node.memory_mib))
    return max(-(-asked * whole * len(node.gpus) // max(1, has)) for asked, has in shares)
