"""Live GPU sharing: the arrays of `kernel.beside`, its starts, and the explanation for users.

A waiting job may be put beside one that runs, or starts in the same decision, where

- it waits for free resources, and both jobs allow sharing (`rules.cannot_share`),
- each of the two is predicted to be slower by no more than its node says: as measured of their kinds, else by the
  formula, else as jobs of public tables (`beliefs.cost_of_neighbour`).

Of several it gets the one with which the slower of the two loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from gpusched.model.interference import Cost, JobClassEstimate, job_class_of
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.plan import Action, Start
from gpusched.model.resources import SharingSettings
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.arrays import PendingArrays, node_arrays_of, releases_of, scratch_for
from gpusched.sched.gpus import picked
from gpusched.sched.interference.beliefs import cost_of_neighbour, slowdowns
from gpusched.sched.kernel.beside import MATE, MAX_KINDS, Pairings, pairings_of, pass_beside, wait_for_room
from gpusched.sched.sharing.rules import Sharer, cannot_share, sharer_of_running, sharer_of_start
from gpusched.sched.state import ClusterState, Floats, Ints, PassOutcome, filled, ints, new_outcome
from gpusched.sched.tally import closed_reason, covers, need, shortfall_of

Party = tuple[str, str, int]
"""What matters of a job that shares: its user, its kind, and the MiB that it takes of each GPU."""
Place = tuple[SharingSettings | None, int]
"""What matters of a node: how it shares, and the MiB of its GPUs."""
Miss = tuple[int, float, Callable[[], str]]
"""A place where a job cannot be: how far from possible that is (steps, then by how much), and why."""


class Losses:
    """Expected slowdowns of jobs that share GPUs, by what was learned about their kinds."""

    def __init__(self, beliefs: Mapping[str, JobClassEstimate]) -> None:
        self._beliefs = beliefs
        self._known: dict[tuple[str, str], Cost] = {}

    def of(self, kind: str, beside: str) -> Cost:
        """Return the loss of a job of one kind beside one of another."""
        if (kind, beside) not in self._known:
            own, other = self._estimates((kind, beside))
            self._known[kind, beside] = cost_of_neighbour(own, other, "gpu")
        return self._known[kind, beside]

    def slower(self, rows: Sequence[Party], columns: Sequence[Party]) -> Floats:
        """Return by which fraction jobs (rows) are slowed down by others (columns), ``float64[rows, columns]``."""
        own, other = ({kind: at for at, kind in enumerate({kind: 0 for _, kind, _ in of})} for of in (rows, columns))
        found = slowdowns(self._estimates(own), self._estimates(other), "gpu")
        return found[np.ix_([own[kind] for _, kind, _ in rows], [other[kind] for _, kind, _ in columns])]

    def _estimates(self, kinds: Iterable[str]) -> list[JobClassEstimate]:
        return [self._beliefs.get(kind) or JobClassEstimate(kind=kind) for kind in kinds]


def place_of(node: NodeView) -> Place:
    """Return the relevant properties of a node, with the least memory of its GPUs."""
    return node.sharing, min(node.shareable.values(), default=0)


def cost_table(rows: Sequence[Party], columns: Sequence[Party], places: Sequence[Place], losses: Losses) -> Floats:
    """Build `Pairings.cost`: the pair's loss on such nodes, jobs (rows) by running jobs; infinite: not allowed.

    ``float64[places, rows, columns]``. At most the bound of the node, within its GPUs' memory, and under MPS of one
    user.
    """
    table = np.full((len(places), len(rows), len(columns)), np.inf)
    if not table.size:
        return table
    worst = np.maximum(losses.slower(rows, columns), losses.slower(columns, rows).T)
    number = {user: at for at, (user, _, _) in enumerate((*rows, *columns))}
    (own, need_mib), (other, has_mib) = (
        (ints([number[user] for user, _, _ in of]), ints([mib for _, _, mib in of])) for of in (rows, columns)
    )
    users, needs = own[:, None] == other, need_mib[:, None] + has_mib
    for at, (sharing, memory_mib) in enumerate(places):
        if sharing is not None:
            fits = (worst <= sharing.slowdown) & (needs <= memory_mib) & (users | (sharing.mode != "mps"))
            table[at][fits] = worst[fits]
    return table


class SharedPlace(NamedTuple):
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
        """Return the fraction by which the slower of the two is slowed down."""
        return max(self.own.slower, self.others.slower)

    @property
    def line(self) -> str:
        """Format the place for a person."""
        gpus = f"{'GPU' if len(self.part.gpus) == 1 else 'GPUs'} {', '.join(map(str, self.part.gpus))}"
        own, others = (f"{100 * cost.slower:.0f} %" for cost in (self.own, self.others))
        measured = self.own.source == self.others.source == "measured"
        by = self.own.note or self.others.note or ("measured" if measured else "estimated")
        return f"{gpus} of {self.part.node} with job {self.other.id} (about {own} slower, that one {others}; {by})"


def pairs_of(
    snapshot: Snapshot, waiting: PendingArrays, outcome: PassOutcome, actions: Sequence[Action],
    queues: Mapping[str, Ints],
) -> SharingPass | None:  # fmt: skip
    """Return the pairs made after these actions of the policies; None if nothing is shared.

    ``queues``: each partition's waiting jobs, in the order of its policy or agent.
    """
    if not any(node.sharing for node in snapshot.nodes) or not any(job.spec.share for job in waiting.views):
        return None
    return SharingPass(snapshot, waiting, outcome, actions, queues)


class SharingPass:
    """The sharing pass after the policies; ``outcome`` has the jobs that they left waiting, and why.

    Attributes:
        starts: The jobs that are put beside others, in order.
    """

    def __init__(
        self, snapshot: Snapshot, waiting: PendingArrays, outcome: PassOutcome, actions: Sequence[Action],
        queues: Mapping[str, Ints],
    ) -> None:  # fmt: skip
        self._now, self._waiting = float(snapshot.now), waiting
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._losses = Losses(snapshot.beliefs)
        self._queues = {name: wait_for_room(outcome, queue) for name, queue in queues.items()}
        jobs = {job.id: job for job in waiting.views}
        begun = {a.job_id: jobs[a.job_id].started(a.allocation, self._now) for a in actions if isinstance(a, Start)}
        running = (*snapshot.running, *begun.values())
        world = node_arrays_of(replace(snapshot, running=running))
        self._row, releases = world.row, releases_of(running, world, waiting.parts)
        new, scratch = new_outcome(len(waiting.views), waiting.parts), scratch_for(world, waiting, releases)
        new.code[:] = outcome.code
        self._state = ClusterState(world.resources, releases, waiting.requests, waiting.jobs, scratch, new, self._now)
        gone = {action.job_id for action in actions} - begun.keys()
        gone |= {job.id for job in running if job.state not in (JobState.STARTING, JobState.RUNNING)}
        found = [(self._sharer(job, job.id in begun), -1 - at) for at, job in enumerate(running) if job.id not in gone]
        known = sorted(((one, owner) for one, owner in found if one is not None), key=lambda pair: pair[0].id)
        self._sharers, self._partners = [one for one, _ in known], dict[str, Sharer]()
        self._owners = [owner for _, owner in known]
        self.starts = self._run(world.nodes) if known else []

    def _sharer(self, job: RunningView, begins: bool) -> Sharer | None:
        """Return a running job to share with, if its node is in this snapshot and shares GPUs."""
        sharer = sharer_of_running(job)
        if begins and job.spec is not None:
            sharer = sharer_of_start(job.id, job.user, job.spec, job.allocation.parts)
        node = self._nodes.get(sharer.node) if sharer is not None else None
        return sharer if node is not None and node.sharing is not None else None

    def _arrays(self, queue: Ints, places: Sequence[Place], kind: Ints, mates: Sequence[int]) -> Pairings:
        """Build the arrays for a queue's pass; ``mates``: the sharers of its partition."""
        rows, columns = dict[Party, int](), dict[Party, int]()
        row, sharers = np.full(len(self._waiting.views), -1), [self._sharers[at] for at in mates]
        for at, sharer in parties_of((at, self._waiting.views[at]) for at in queue.tolist()).items():
            row[at] = rows.setdefault(sharer, len(rows))
        row[row >= MAX_KINDS] = -1  # as the pass does
        parties = [party(sharer.user, sharer.name, sharer.memory_mib) for sharer in sharers]
        found = filled(
            MATE, len(sharers), owner=[self._owners[at] for at in mates], parts=1, first=np.arange(len(mates)), least=1,
            column=[columns.setdefault(sharer, len(columns)) for sharer in parties],
            most=[len(self._well(s)) for s in sharers], taken=[s.partner != "" for s in sharers],
        )  # fmt: skip
        table = cost_table(list(rows)[:MAX_KINDS], list(columns), places, self._losses)
        return pairings_of(found, ints([self._row[sharer.node] for sharer in sharers]), table, kind, row)

    def _well(self, sharer: Sharer) -> list[int]:
        """Return its GPUs that another job may use."""
        node = self._nodes[sharer.node]
        return [gpu for gpu in sharer.gpus if gpu in node.shareable and gpu not in node.blocked]

    def _run(self, nodes: list[NodeView]) -> list[Start]:
        places, outcome, found = dict[Place, int](), self._state.outcome, []
        kind = ints([places.setdefault(place_of(node), len(places)) for node in nodes])
        for name, queue in self._queues.items():
            mates = [at for at, one in enumerate(self._sharers) if self._nodes[one.node].partition == name]
            if not mates:
                continue
            pairings, begin = self._arrays(queue, list(places), kind, mates), outcome.total[0]
            pass_beside(self._state, queue, pairings)
            started = outcome.started[begin : outcome.total[0]].tolist()
            for at, mate in zip(started, pairings.beside.tolist(), strict=False):
                job, of = self._waiting.views[at], mates[mate]
                self._partners[job.id] = other = self._sharers[of]
                self._sharers[of] = other._replace(partner=job.id)
                found.append(Start(job.id, Allocation(job.id, (self._part(job, other),))))
        return found

    def _part(self, job: PendingView, other: Sharer) -> NodeAllocation:
        """Return the part of a job beside another one."""
        spec, node = job.spec, self._nodes[other.node]
        gpus = picked(node, self._well(other), spec.gpus_per_node, {})
        return NodeAllocation(
            rank=0, node=node.name, gpus=gpus, cores=spec.cores_per_node, memory_mib=spec.memory_mib_per_node
        )

    def explain(self, job: PendingView) -> str:
        """Explain which job a pending job may share with, or why none; "": that is not why it waits."""
        if job.id in self._partners:
            return f"it may share {self._pair(job, self._partners[job.id]).line}"
        own = {node.name for node in self._nodes.values() if node.partition == job.spec.partition and node.sharing}
        if not own or not job.spec.share:
            return ""
        tried = [self._beside(job, other) for other in self._sharers if other.node in own]
        places = [sharer for sharer in tried if isinstance(sharer, SharedPlace)]
        if places:
            queue = [self._waiting.views[at].id for at in self._queues[job.spec.partition]]
            head = next((other for other in queue if other not in self._partners), job.id)
            best, late = min(places, key=lambda sharer: (sharer.worst, sharer.other.id)), ""
            if head != job.id:
                late = f": job {head}, ahead of it, would start later"
            return f"it {'does not' if late else 'may'} share {best.line}{late}" if job.id in queue else ""
        misses = [sharer for sharer in tried if not isinstance(sharer, SharedPlace)]
        nearest = min(misses, key=lambda miss: miss[:2], default=None)
        why = nearest[2]() if nearest is not None else "no running job shares its GPUs"
        return f"it cannot share GPUs now: {why}"

    def _pair(self, job: PendingView, other: Sharer) -> SharedPlace:
        own_loss, other_loss = job_class_of(job.user, job.spec.name), job_class_of(other.user, other.name)
        return SharedPlace(
            other, self._part(job, other), self._losses.of(own_loss, other_loss), self._losses.of(other_loss, own_loss)
        )

    def _beside(self, job: PendingView, other: Sharer) -> SharedPlace | Miss:
        """Return the place beside another job, or what is missing."""
        node, spec, found = self._nodes[other.node], job.spec, self._pair(job, other)
        why: str | None = closed_reason(job, node, self._now) or ("" if node.available else "takes no jobs now")
        if why:
            return 6, 0.0, lambda: f"node {node.name}: {why}"
        well = len(self._well(other))
        if spec.gpus_per_node > well:
            has = count_of(well, "GPU")
            return 5, 0.0, lambda: f"job {other.id} has {has} to share; it requests {spec.gpus_per_node}"
        _, cores, memory = (int(column[self._row[node.name]]) for column in self._state.resources.columns)
        if not covers(free := (spec.gpus_per_node, cores, memory), need(spec)):  # the GPUs are the other one's
            return 2, 0.0, lambda: f"node {node.name} of job {other.id}: {shortfall_of(node, free, need(spec))[1]}"
        own = sharer_of_start(job.id, job.user, spec, (found.part,))
        assert own is not None
        if refused := cannot_share(node, own, other):
            return 3, 0.0, lambda: refused
        assert node.sharing is not None
        if found.worst <= node.sharing.slowdown:
            return found
        bound = 100 * node.sharing.slowdown
        return 1, found.worst, lambda: f"{found.line}; {node.name} allows {bound:.0f} %"


@lru_cache(maxsize=1 << 16)
def party(user: str, name: str, memory_mib: int | None) -> Party:
    """Return the relevant properties of such a job."""
    return user, job_class_of(user, name), memory_mib or 0


def parties_of(jobs: Iterable[tuple[int, PendingView]]) -> dict[int, Party]:
    """Return the relevant properties of those of the numbered jobs that may share."""
    return {
        at: party(job.user, job.spec.name, job.spec.gpu_memory_mib)
        for at, job in jobs
        if job.spec.share and job.spec.nodes == 1
    }
