"""A mapping problem, an answer to it, what an answer is worth, and whether it is sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

Nodes = tuple[int, ...]
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Jobs at the head of the order, and what nodes have free.

    A job goes to nodes of one GPU type (``kind``). One that needs more nodes than any type has may mix them, and counts
    with the worst of the kinds it may use.

    Attributes:
        rooms: ``int64[nodes, 3]``: free GPUs, cores and MiB; -1 GPUs: not available.
        total: ``int64[nodes]``: GPUs of the empty node.
        kind: ``int64[nodes]``: GPU type.
        late_rooms: As ``rooms``, what jobs that are ``late`` may take of it (EASY: they outlast the head's wait).
        parts: ``int64[jobs]``: distinct nodes that a job needs, in the queue's order.
        need: ``int64[jobs, 3]``: GPUs, cores and MiB on each.
        allowed: ``bool[masks, nodes]``. mask: ``int64[jobs]``: row of it, or -1: all nodes.
        late: ``bool[jobs]``.
        must: ``bool[jobs]``: the greedy answer's start of it must stay a start.
        gain: ``float64[jobs, kinds]``: what it is worth to start the job there; NaN: it may not.
        bonus: ``float64[jobs]``: what it is worth to start it at all, by its place in the order; never rising.
        user: ``int64[jobs]``. cap: ``float64[users]``: GPUs that a user's jobs may still get.
        unfit: ``float64[GPUs + 1]``: the chance that a job needs more GPUs on one node than that many.
        open_cost: Of taking a node that is empty. frag_cost: Of a free GPU that a job drawn by ``unfit`` cannot use.
    """

    rooms: Ints
    total: Ints
    kind: Ints
    late_rooms: Ints
    parts: Ints
    need: Ints
    allowed: Flags
    mask: Ints
    late: Flags
    must: Flags
    gain: Floats
    bonus: Floats
    user: Ints
    cap: Floats
    unfit: Floats
    open_cost: float = 0.0
    frag_cost: float = 0.0

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def kinds(self) -> int:
        """How many GPU types there are."""
        return int(self.gain.shape[1])

    def usable(self, job: int) -> Flags:
        """``bool[nodes]``: which nodes the job may use, full or not."""
        may: Flags = (self.rooms[:, 0] >= 0) & ~np.isnan(self.gain[job])[self.kind]
        if self.mask[job] >= 0:
            may &= self.allowed[self.mask[job]]
        return may

    def mixes(self, job: int) -> bool:
        """Whether no single GPU type has nodes enough for it, were they empty."""
        if self.parts[job] == 1 or np.isnan(self.gain[job]).all():
            return False
        large = self.usable(job) & (self.total >= self.need[job, 0])
        return bool(np.bincount(self.kind[large], minlength=self.kinds).max(initial=0) < self.parts[job])

    def gain_on(self, job: int, nodes: Nodes) -> float:
        """What the start there is worth: of the kind, or of the worst that it may use where it mixes them."""
        kinds = set(self.kind[list(nodes)].tolist())
        return float(np.nanmin(self.gain[job])) if len(kinds) > 1 else float(self.gain[job, kinds.pop()])

    def left_over(self, free: int) -> float:
        """GPUs of a node with that many free that a job drawn at random cannot use (Weng et al., ATC 2023)."""
        return free * float(self.unfit[free]) if free > 0 else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Where each job goes.

    Attributes:
        nodes: One entry per job; empty: it waits.
        value: What it is worth.
        bound: No answer is worth more; None: not known.
        solver: ``greedy`` or ``milp``. note: Why not ``milp``, or why it ended early; "" where it is proven best.
    """

    nodes: tuple[Nodes, ...]
    value: float
    bound: float | None = None
    solver: str = "greedy"
    note: str = ""

    @property
    def gap(self) -> float | None:
        """How much more there might be, in parts of the value (of 1, where that is smaller)."""
        return None if self.bound is None else max(0.0, self.bound - self.value) / max(1.0, abs(self.value))


def value_of(problem: Problem, nodes: tuple[Nodes, ...]) -> float:
    """What an answer is worth: gains and bonuses, less what opening nodes and leaving useless GPUs cost."""
    taken = np.zeros(len(problem.rooms), np.int64)
    worth = 0.0
    for job, where in enumerate(nodes):
        if where:
            worth += problem.gain_on(job, where) + float(problem.bonus[job])
            taken[list(where)] += problem.need[job, 0]
    for node in np.flatnonzero(taken).tolist():
        worth -= node_cost(problem, int(problem.rooms[node, 0]), int(problem.total[node]), int(taken[node]))
    return worth


def node_cost(problem: Problem, free: int, total: int, taken: int) -> float:
    """What it costs to take that many of a node's free GPUs."""
    opened = problem.open_cost if free == total and taken > 0 else 0.0
    return opened + problem.frag_cost * (problem.left_over(free - taken) - problem.left_over(free))


def faults(problem: Problem, nodes: tuple[Nodes, ...]) -> list[str]:
    """What is wrong with an answer, in sentences; nothing where it is sound. Counts for itself."""
    found = []
    taken, late = np.zeros_like(problem.rooms), np.zeros_like(problem.rooms)
    held: dict[int, int] = {}
    for job, where in enumerate(nodes):
        if not where:
            continue
        rows = list(where)
        if len(where) != problem.parts[job] or len(set(where)) != len(where):
            found.append(f"job {job} is on nodes {where}, and needs {problem.parts[job]} distinct ones")
        if not problem.usable(job)[rows].all():
            found.append(f"job {job} may not use all of {where}")
        if len(set(problem.kind[rows].tolist())) > 1 and not problem.mixes(job):
            found.append(f"job {job} mixes GPU types")
        taken[rows] += problem.need[job]
        late[rows] += problem.need[job] * problem.late[job]
        user = int(problem.user[job])
        held[user] = held.get(user, 0) + int(problem.parts[job] * problem.need[job, 0])
    for what, given, rooms in (("has", taken, problem.rooms), ("may to late jobs", late, problem.late_rooms)):
        over = np.flatnonzero((given > rooms).any(1) & given.any(1))
        found += [f"node {n} gives more than it {what}" for n in over.tolist()]
    found += [f"user {u} gets {g} GPUs, over the cap" for u, g in held.items() if g > problem.cap[u] + TOLERANCE]
    return found
