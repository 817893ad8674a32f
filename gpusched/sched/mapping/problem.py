"""A mapping problem, its solution, the value of a solution, and the checks of its validity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from gpusched.sched.state import Floats, Ints

Flags = npt.NDArray[np.bool_]

Nodes = tuple[int, ...]
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The jobs at the head of the order, and the free resources of the nodes.

    A job goes to nodes of one GPU type (``kind``). One that needs more nodes than any type has may mix them, and counts
    with the worst of the kinds it may use.

    Attributes:
        resources: ``int64[nodes, 3]``: free GPUs, cores and MiB; -1 GPUs: not available.
        total: ``int64[nodes]``: GPUs of the empty node.
        kind: ``int64[nodes]``: GPU type.
        late_resources: As ``resources``, what ``late`` jobs may take of it (EASY: they outlast the head's wait).
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

    resources: Ints
    total: Ints
    kind: Ints
    late_resources: Ints
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

    def usable(self, job: int, nodes: Nodes | slice = slice(None)) -> Flags:
        """Return ``bool[nodes]``: which of these nodes (all) the job may use, full or not."""
        at = nodes if isinstance(nodes, slice) else list(nodes)
        may: Flags = (self.resources[at, 0] >= 0) & ~np.isnan(self.gain[job])[self.kind[at]]
        if self.mask[job] >= 0:
            may &= self.allowed[self.mask[job], at]
        return may

    def mixes(self, job: int) -> bool:
        """Return whether no single GPU type has enough nodes for the job, even when empty."""
        if self.parts[job] == 1 or np.isnan(self.gain[job]).all():
            return False
        large = self.usable(job) & (self.total >= self.need[job, 0])
        return bool(np.bincount(self.kind[large]).max(initial=0) < self.parts[job])

    def gain_on(self, job: int, nodes: Nodes) -> float:
        """Return the gain of a start there: of the GPU type, or of the worst allowed one if types are mixed."""
        kinds = set(self.kind[list(nodes)].tolist())
        return float(np.nanmin(self.gain[job])) if len(kinds) > 1 else float(self.gain[job, kinds.pop()])

    def left_over(self, free: int) -> float:
        """Return the expected GPUs, of so many free on a node, that a random job cannot use (Weng et al., ATC 2023)."""
        return free * float(self.unfit[free]) if free > 0 else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingSolution:
    """The nodes of each job.

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
        """Return the possible further gain, relative to the value (to 1, where that is smaller)."""
        return None if self.bound is None else max(0.0, self.bound - self.value) / max(1.0, abs(self.value))


def value_of(problem: Problem, nodes: tuple[Nodes, ...]) -> float:
    """Return a solution's value: gains and bonuses, minus the cost of opened nodes and unusable GPUs."""
    taken = np.zeros(len(problem.resources), np.int64)
    job, where = _pairs(nodes)
    np.add.at(taken, where, problem.need[job, 0])
    starts = [(job, where) for job, where in enumerate(nodes) if where]
    worth = sum(problem.gain_on(job, where) + float(problem.bonus[job]) for job, where in starts)
    for node in np.flatnonzero(taken).tolist():
        worth -= node_cost(problem, int(problem.resources[node, 0]), int(problem.total[node]), int(taken[node]))
    return worth


def part_of(problem: Problem, nodes: tuple[Nodes, ...], jobs: Ints) -> Problem:
    """Return the problem of some jobs, in order, on what the other jobs, started as in ``nodes``, leave.

    An answer to it makes, with those starts, an answer to the whole that is worth as much more than they are.
    """
    resources, late, cap = problem.resources.copy(), problem.late_resources.copy(), problem.cap.copy()
    job, node = _pairs(nodes)
    others = ~np.isin(job, jobs)
    job, node = job[others], node[others]
    np.subtract.at(resources, node, problem.need[job])
    np.subtract.at(late, node, problem.need[job] * problem.late[job, None])
    np.subtract.at(cap, problem.user[job], problem.need[job, 0])
    taken = (resources != problem.resources).any(1)
    late[taken] = np.minimum(late[taken], resources[taken])
    return replace(
        problem, resources=resources, late_resources=late, cap=np.maximum(cap, 0.0), parts=problem.parts[jobs],
        need=problem.need[jobs], mask=problem.mask[jobs], late=problem.late[jobs], must=problem.must[jobs],
        gain=problem.gain[jobs], bonus=problem.bonus[jobs], user=problem.user[jobs],
    )  # fmt: skip


def _pairs(nodes: tuple[Nodes, ...]) -> tuple[Ints, Ints]:
    """Return ``int64[parts]`` twice: the job and the node of every part."""
    job = np.repeat(np.arange(len(nodes)), [len(where) for where in nodes])
    return job, np.fromiter(chain.from_iterable(nodes), np.int64, len(job))


def node_cost(problem: Problem, free: int, total: int, taken: int) -> float:
    """Return the cost of taking that many of a node's free GPUs."""
    opened = problem.open_cost if free == total and taken > 0 else 0.0
    return opened + problem.frag_cost * (problem.left_over(free - taken) - problem.left_over(free))


def faults(problem: Problem, nodes: tuple[Nodes, ...]) -> list[str]:
    """Return the errors of a solution, in sentences; empty if it is valid. Recomputed independently."""
    found = []
    taken, late = np.zeros_like(problem.resources), np.zeros_like(problem.resources)
    held: dict[int, int] = {}
    for job, where in enumerate(nodes):
        if not where:
            continue
        if len(where) != problem.parts[job] or len(set(where)) != len(where):
            found.append(f"job {job} is on nodes {where}, and needs {problem.parts[job]} distinct ones")
        if not problem.usable(job, where).all():
            found.append(f"job {job} may not use all of {where}")
        if len(where) > 1 and len(set(problem.kind[list(where)].tolist())) > 1 and not problem.mixes(job):
            found.append(f"job {job} mixes GPU types")
        user = int(problem.user[job])
        held[user] = held.get(user, 0) + int(problem.parts[job] * problem.need[job, 0])
    job_of, node_of = _pairs(nodes)
    np.add.at(taken, node_of, problem.need[job_of])
    np.add.at(late, node_of, problem.need[job_of] * problem.late[job_of, None])
    for name, given, resources in (
        ("has", taken, problem.resources),
        ("may give to late jobs", late, problem.late_resources),
    ):
        over = np.flatnonzero((given > resources).any(1) & given.any(1))
        found += [f"node {n} gives more than it {name}" for n in over.tolist()]
    found += [f"user {u} gets {g} GPUs, over the cap" for u, g in held.items() if g > problem.cap[u] + TOLERANCE]
    return found
