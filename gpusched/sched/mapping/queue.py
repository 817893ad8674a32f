"""A partition's queue placed by mapping: nodes and GPU types for the jobs at the head of the order, all at once.

The walk is that of `kernel.queue_pass`, run by Python since it calls a solver: `_Mapper` chooses the jobs to try and
their nodes. The order stays as it is: what blocks is placed before what is blocked, and the head's reservation under
EASY binds the jobs behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.model.policy import Mapping
from gpusched.sched.backfill import protect
from gpusched.sched.bounds import charge
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.queue_pass import Pass, hold_nothing, queue_pass
from gpusched.sched.mapping.greedy import first_answer, greedy
from gpusched.sched.mapping.head import reserve_head, starts_now
from gpusched.sched.mapping.problem import MappingSolution, Nodes, Problem
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BACKFILL,
    EASY,
    FIRST_FIT,
    LIMIT,
    MAPPING,
    PRIORITY,
    RESOURCES,
    SKIP,
    STARTED,
    ClusterState,
    Floats,
    Ints,
    PlacementRequest,
    Resources,
)

Bools = npt.NDArray[np.bool_]
Solver = Callable[[Problem, MappingSolution, float], MappingSolution]  # the last: of the time left, what it may take
CORES_ONLY = 0.1  # what a job without GPUs counts for, in GPUs


class MappingReport(NamedTuple):
    """One mapping: jobs considered and started, its value and the greedy one's, and its optimality gap."""

    jobs: int
    started: int
    value: float
    greedy: float
    gap: float
    solver: str
    note: str


def summary(reports: list[MappingReport]) -> str:
    """Summarise the mappings of one decision in a line; "" if there were none."""
    if not reports:
        return ""
    jobs, started = sum(r.jobs for r in reports), sum(r.started for r in reports)
    gap = max(r.gap for r in reports)
    gain = sum(r.value - r.greedy for r in reports)
    known = f"at most {gap:.2%} below the best" if gap < 1 else "gap to the best unknown"
    notes = "; ".join(dict.fromkeys(r.note for r in reports if r.note))
    return f"{started} of {jobs} jobs mapped, worth {gain:.3g} GPUs more than greedily, {known}" + (
        f" ({notes})" if notes else ""
    )


class MappingFacts(NamedTuple):
    """Further properties of nodes and jobs.

    Attributes:
        usable: The nodes as they are, empty of jobs. kind: ``int64[nodes]``: GPU type.
        speed: Jobs -> ``float64[jobs, kinds]``: how fast each goes on each GPU type, in any unit of its own.
        user: ``int64[jobs]``. held: ``float64[users]``: GPUs that a user's jobs hold in the partition.
        priority: ``int64[jobs]``: explicit priorities. unfit: See `Problem`.
        lasts: Jobs -> ``float64[jobs, kinds]``: how long each holds the nodes it gets, by their GPU type, seconds.
            None: its limit at most, wherever it runs (it is ended then), in proportion to its speed as known.
    """

    usable: Resources
    kind: Ints
    speed: Callable[[Ints], Floats]
    user: Ints
    held: Floats
    priority: Ints
    unfit: Floats
    lasts: Callable[[Ints], Floats] | None = None


def map_queue(
    state: ClusterState,
    queue: Ints,
    facts: MappingFacts,
    mapping: Mapping,
    backfill: int,
    solver: Solver | None,
) -> tuple[int, float, list[MappingReport]]:
    """Decide for one partition's jobs, ``queue: int64[waiting]`` in order of precedence; see `kernel.queue_pass`.

    With NONE, and for those before the head with EASY, the jobs that start are those that the greedy mapping starts in
    this order; with NONE on any GPU type they may have, with EASY not on one where they would end later than if they
    waited for a faster one (`head`). With SKIP, and behind the head with EASY, the mapping chooses among the
    window; of those the greedy one starts, the ones with more priority than others stay.

    ``solver`` betters the greedy answer; None: that is the answer.

    Returns:
        What the pass says (the head, and its shadow time), and the mappings that were made.
    """
    window = _window_of(state, queue, mapping.window, backfill)
    if not len(window):
        return -1, np.inf, []
    others = queue[state.outcome.code[queue] == LIMIT]
    mapper = _Mapper(state, facts, mapping, solver, window)
    mapper.asked = mapper.most_valuable(others) if backfill == SKIP else mapper.by_turns(others, backfill == EASY)
    head, shadow = _mapping_pass(state, queue, backfill, mapper)
    return head, shadow, mapper.reports


@jit
def _enter(state: ClusterState, job: int, late: bool, first: bool, window: Ints) -> tuple[int, int]:
    """Append the job to ``window: int64[1 + most]`` (count, then jobs) until it is full."""
    jobs = state.jobs
    if window[0] < window.size - 1:
        window[0] += 1
        window[window[0]] = job
        charge(jobs.links, jobs.room, jobs.account, job)
    return PRIORITY, jobs.shape[job]


_window_pass = queue_pass(_enter, hold_nothing)


def _window_of(state: ClusterState, queue: Ints, most: int, backfill: int) -> Ints:
    """Return the first jobs whose bounds allow them together; codes say why others are left out."""
    if state.jobs.links is not None:
        state = state._replace(jobs=state.jobs._replace(room=state.jobs.room.copy()))
    window = np.zeros(1 + min(most, len(queue)), np.int64)
    _window_pass(state, queue, SKIP if backfill == SKIP else EASY, window)  # SKIP reserves nothing
    code = state.outcome.code
    code[queue[code[queue] == RESOURCES]] = PRIORITY
    return window[1 : 1 + window[0]]


class _Mapper:
    """One partition's mappings, as the walk asks for them.

    Attributes:
        asked: The jobs that the walk tries, first to last. nodes: Job -> its nodes, by the mappings made so far.
    """

    def __init__(
        self, state: ClusterState, facts: MappingFacts, mapping: Mapping, solver: Solver | None, window: Ints
    ) -> None:
        self._state, self._facts, self._mapping, self._solver, self._window = state, facts, mapping, solver, window
        self._place = {job: i for i, job in enumerate(window.tolist())}
        single = request_of(state.requests, state.jobs.shape[window[0]])
        self._rows = slice(int(single.lo), int(single.hi))
        gpus = float(np.maximum(facts.usable.gpus[self._rows], 0).sum())
        several = len(np.unique(facts.user[window])) > 1
        self._most = gpus * mapping.user_share if several and mapping.user_share < 1 else np.inf
        self._held, self._shadow = facts.held.copy(), np.inf
        self.asked: Iterator[int] = iter(())
        self.nodes: dict[int, Ints] = {}
        self.reports: list[MappingReport] = []

    def by_turns(self, others: Ints, waits: bool) -> Iterator[int]:
        """Start jobs in order until one does not fit, or ``waits`` for a faster type: the head.

        Behind it, with ``waits`` (EASY), what of the rest is worth most and does not delay it.
        """
        yield from self._first(self._window, waits)
        rest = self._window[len(self.nodes) :]
        yield from rest[:1].tolist()
        if waits and len(rest) > 1:
            yield from self._best(rest[1:], self._outlasting(rest[1:], int(rest[0])))
        yield from self._staying([*rest[1:].tolist(), *others.tolist()])

    def most_valuable(self, others: Ints) -> Iterator[int]:
        """Start the most valuable jobs in any order."""
        yield from self._best(self._window, None)
        yield from self._staying([*self._window.tolist(), *others.tolist()])

    def _staying(self, jobs: list[int]) -> Iterator[int]:
        return (job for job in jobs if job not in self.nodes)

    def _first(self, jobs: Ints, waits: bool) -> list[int]:
        """Return how many of the first jobs start in order, on the best nodes for all of them together."""
        problem, takes = self._problem(jobs, None, 0.0), None
        if waits:
            runs_s, holds_s, types = self._runs_s(jobs, problem), self._holds_s(jobs), self._facts.kind
            takes = starts_now(self._state, types, jobs, problem, runs_s, holds_s, self._rows.start)
        nodes = greedy(problem, head_blocks=True, takes=takes)
        count = next((i for i, where in enumerate(nodes) if not where), len(jobs))
        first = jobs[:count]
        if count and self._solver is not None:
            problem = self._problem(first, None, 0.0, must=np.ones(count, np.bool_))
            if waits:
                self._keep_to_floor(problem, nodes)
        return self._solved(first, problem, nodes[:count], count / len(jobs))

    def _keep_to_floor(self, problem: Problem, nodes: tuple[Nodes, ...]) -> None:
        """Keep jobs that have a type above the floor from being mapped below it."""
        speed = problem.gain / _gpus_of(problem)[:, None]
        for job in range(len(problem)):
            if not problem.mixes(job):
                least = min(self._mapping.floor, speed[job, problem.kind[nodes[job][0]]])
                problem.gain[job, speed[job] < least] = np.nan

    def reserve(self, head: int) -> float:
        """Return the shadow time of the first job that does not start; ``scratch`` holds what is left beside it."""
        state, head_only = self._state, np.array([head])
        runs_s = self._runs_s(head_only, self._problem(head_only, None, 0.0))[0]
        shadow = self._shadow = reserve_head(state, self._facts.kind, head, runs_s)
        protect(state.resources, request_of(state.requests, state.jobs.shape[head]), shadow < np.inf, state.scratch)
        return shadow

    def _outlasting(self, jobs: Ints, head: int) -> Bools:
        """Return which jobs would hold the head's reserved nodes after its shadow time."""
        state = self._state
        reserved = state.scratch.chosen[: state.requests.parts[state.jobs.shape[head]]]
        if self._shadow == np.inf:
            return np.zeros(len(jobs), np.bool_)
        late: Bools = state.now + self._holds_s(jobs)[:, self._facts.kind[reserved]].max(1) > self._shadow
        return late

    def _holds_s(self, jobs: Ints) -> Floats:
        """Return ``float64[jobs, kinds]``: how long a job keeps its nodes at most, by their type."""
        if self._facts.lasts is not None:
            return self._facts.lasts(jobs)
        limit: Floats = self._state.jobs.limit[jobs]
        return np.repeat(limit[:, None], int(self._facts.kind.max(initial=0)) + 1, axis=1)

    def _runs_s(self, jobs: Ints, problem: Problem) -> Floats:
        """Return ``float64[jobs, kinds]``: a job's expected run time; infinite where it cannot run."""
        speed = problem.gain / _gpus_of(problem)[:, None]  # of a problem without a floor
        runs = self._holds_s(jobs) / (speed if self._facts.lasts is None else 1.0)
        return np.where(np.isnan(speed), np.inf, runs)

    def _best(self, jobs: Ints, late: Bools | None) -> list[int]:
        """Return the most valuable of these jobs to start; ``late``: which outlast the head's wait."""
        problem = self._problem(jobs, late, self._mapping.floor)
        nodes = greedy(problem)
        priority = self._facts.priority[jobs]
        above = priority > priority.min(initial=0)
        if above.any():
            problem.must[:] = above & np.array(list(map(bool, nodes)))
        return self._solved(jobs, problem, nodes, 1.0)

    def _solved(self, jobs: Ints, problem: Problem, nodes: tuple[Nodes, ...], share: float) -> list[int]:
        """Return which jobs start: the greedy choice, or a solver's best solution."""
        if self._solver is not None and len(jobs):
            first = first_answer(problem, nodes)
            answer = self._solver(problem, first, share)
            nodes, gap = answer.nodes, np.inf if answer.gap is None else answer.gap
            starts = sum(map(bool, nodes))
            report = MappingReport(len(jobs), starts, answer.value, first.value, gap, answer.solver, answer.note)
            self.reports.append(report)
        found = {int(jobs[i]): np.array(where) + self._rows.start for i, where in enumerate(nodes) if where}
        self.nodes |= found
        return list(found)

    def place(self, job: int) -> Ints | None:
        """Return where a mapping starts the job, and set ``limit`` to its duration there; None: nowhere."""
        nodes, lasts = self.nodes.get(job), self._facts.lasts
        if nodes is not None and lasts is not None:
            self._state.jobs.limit[job] = lasts(np.array([job]))[0, self._facts.kind[nodes]].max()
        return nodes

    def started(self, job: int, request: PlacementRequest) -> None:
        """Add the job's GPUs to those its user holds."""
        self._held[self._facts.user[job]] += request.parts * request.gpus

    def _problem(self, jobs: Ints, late: Bools | None, floor: float, must: Bools | None = None) -> Problem:
        state, facts, mapping, rows = self._state, self._facts, self._mapping, self._rows
        shape, requests = state.jobs.shape[jobs], state.requests
        resources = _table(state.resources, rows)
        place = np.array([self._place[int(job)] for job in jobs])
        users, user = np.unique(facts.user[jobs], return_inverse=True)
        return Problem(
            resources=resources,
            total=np.maximum(facts.usable.gpus[rows], 0),
            kind=facts.kind[rows],
            late_resources=resources if late is None else _table(state.scratch.late, rows),
            parts=requests.parts[shape],
            need=np.column_stack((requests.gpus[shape], requests.cores[shape], requests.memory[shape])),
            allowed=state.jobs.masks[:, rows] != 0,
            mask=requests.mask[shape],
            late=np.zeros(len(jobs), np.bool_) if late is None else late,
            must=np.zeros(len(jobs), np.bool_) if must is None else must,
            gain=self._gains(jobs, shape, floor),
            bonus=mapping.order_weight * (1.0 - place / len(self._place)),
            user=user.reshape(-1),
            cap=np.maximum(0.0, self._most - self._held[users]),
            unfit=facts.unfit,
            open_cost=mapping.open_cost,
            frag_cost=mapping.fragment_cost,
        )

    def _gains(self, jobs: Ints, shape: Ints, floor: float) -> Floats:
        """Return GPUs x (speed relative to the job's best - floor); NaN where the job cannot run.

        The best is of the types that have nodes enough for it, were they empty. A job that must mix types has one gain.
        """
        state, facts, requests = self._state, self._facts, self._state.requests
        speed = self._facts.speed(jobs)
        speed = np.where(speed > 0, speed, np.nan)
        kinds = speed.shape[1]
        for single in np.unique(shape):
            request = request_of(requests, single)
            rows = slice(request.lo, request.hi)
            large = facts.usable.gpus[rows] >= request.gpus  # of a node that is away -1
            if request.mask >= 0:
                large &= state.jobs.masks[request.mask, rows] != 0
            enough = np.bincount(facts.kind[rows][large], minlength=kinds) >= request.parts
            group = shape == single
            if enough.any():
                speed[np.ix_(group, ~enough)] = np.nan
            else:
                speed[group] = 1.0
        best = np.where(np.isnan(speed), 0.0, speed).max(1, initial=0.0)
        speed[best == 0] = 1.0  # nothing was measured anywhere
        best[best == 0] = 1.0
        gpus = np.maximum(requests.parts[shape] * requests.gpus[shape], CORES_ONLY)
        gains: Floats = gpus[:, None] * (speed / best[:, None] - floor)
        return gains


def _place(state: ClusterState, job: int, late: bool, first: bool, mapper: _Mapper) -> tuple[int, int]:
    scratch, shape, nodes = state.scratch, int(state.jobs.shape[job]), mapper.place(job)
    if nodes is not None:
        scratch.chosen[: len(nodes)] = nodes
        return STARTED, shape
    if choose(state.resources, state.jobs.masks, request_of(state.requests, shape), FIRST_FIT, scratch):
        return BACKFILL if late else MAPPING, shape  # a gang may fit on two GPU types together
    scratch.failed[shape] = scratch.stamp[0]
    return PRIORITY, shape


_mapping_pass: Pass[_Mapper] = queue_pass(
    _place,
    lambda state, job, code, mapper: mapper.reserve(job),
    lambda state, job, request, mapper: mapper.started(job, request),
    following=lambda state, queue, at, head, mapper: next(mapper.asked, -1),
    renews=False,
    compiled=False,
)


def _table(resources: Resources, rows: slice) -> Ints:
    return np.column_stack([column[rows] for column in resources.columns])


def _gpus_of(problem: Problem) -> Floats:
    """Return ``float64[jobs]``: the weight of each job, in GPUs."""
    gpus: Floats = np.maximum(problem.parts * problem.need[:, 0], CORES_ONLY)
    return gpus


def unfit_of(sizes: Ints, most: int) -> Floats:
    """Return ``float64[most + 1]``: the chance that a job drawn from these needs more GPUs on one node."""
    if not len(sizes):
        return np.zeros(most + 1)
    levels = np.arange(most + 1)
    return 1.0 - np.searchsorted(np.sort(sizes), levels, side="right") / len(sizes)
