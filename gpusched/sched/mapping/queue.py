"""A partition's queue placed by mapping: nodes and GPU types for the jobs at the head of the order, all at once.

In place of `kernel.queue_pass`, on the same arrays and with the same rules of who may go. The order stays as it is:
what blocks is placed before what is blocked, and the head's reservation under EASY binds the jobs behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.model.policy import Mapping
from gpusched.sched.backfill import launch, protect
from gpusched.sched.bounds import charge, exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.mapping.greedy import best_imaginable, greedy
from gpusched.sched.mapping.head import Prefix, reserve_head
from gpusched.sched.mapping.problem import Answer, Nodes, Problem, value_of
from gpusched.sched.mapping.summary import Report, say_why
from gpusched.sched.state import EASY, OK, PRIORITY, SKIP, STARTED, Floats, Ints, PassArrays, Resources

Bools = npt.NDArray[np.bool_]
Solver = Callable[[Problem, Answer, float], Answer]  # the last: of the time left, what it may take
_NOBODY = (np.zeros(0, np.int64), np.zeros(0, np.int64))
CORES_ONLY = 0.1  # what a job without GPUs counts for, in GPUs


class JobFacts(NamedTuple):
    """What is known of the jobs besides.

    Attributes:
        speed: Jobs -> ``float64[jobs, kinds]``: how fast each goes on each GPU type, in any unit of its own.
        user: ``int64[jobs]``. held: ``float64[users]``: GPUs that a user's jobs hold in the partition.
        priority: ``int64[jobs]``: explicit priorities. unfit: See `Problem`.
        lasts: Jobs -> ``float64[jobs, kinds]``: how long each holds the nodes it gets, by their GPU type, seconds.
            None: its limit at most, wherever it runs (it is ended then), in proportion to its speed for all one knows.
    """

    speed: Callable[[Ints], Floats]
    user: Ints
    held: Floats
    priority: Ints
    unfit: Floats
    lasts: Callable[[Ints], Floats] | None = None


class Keep(NamedTuple):
    """Nodes that an agent holds for a job that does not fit: those behind it in the order do not get them now.

    Attributes:
        job: Whose. rows: Says which, ``int64[...]``; asked when those ahead of it are placed.
    """

    job: int
    rows: Callable[[], Ints]


class Mapped(NamedTuple):
    """What stopped the queue (see `kernel.queue_pass`), and the mappings that were made."""

    head: int
    shadow: float
    reports: list[Report]


def map_queue(
    arrays: PassArrays,
    queue: Ints,
    facts: JobFacts,
    mapping: Mapping,
    backfill: int,
    solver: Solver | None,
    keep: Keep | None = None,
) -> Mapped:
    """Decides for one partition's jobs, ``queue: int64[waiting]`` in order of precedence; see `kernel.queue_pass`.

    With NONE, and for those before the head with EASY, the jobs that start are those that the greedy mapping starts in
    this order; with NONE on any GPU type they may have, with EASY not on one where they would end later than if they
    waited for a faster one (`head`). With SKIP, and behind the head with EASY, the mapping chooses among the
    window; of those the greedy one starts, the ones with more priority than others stay.

    ``arrays`` are changed in place, as by any pass. ``solver`` betters the greedy answer; None: that is the
    answer. ``keep``: with SKIP, nodes held for a job: those ahead of it are mapped first, then the others on what is
    left.
    """
    window, others = _window(arrays, queue, mapping.window)
    if not len(window):
        say_why(arrays, others, -1, window, backfill)
        return Mapped(-1, np.inf, [])
    task = _Task(arrays, facts, mapping, solver, window)
    head, shadow, held = -1, np.inf, _NOBODY
    late = np.zeros(0, np.int64)
    if backfill == SKIP:
        held = task.choose_around(window, keep)
    else:
        rest = window[task.start_prefix(window, waits=backfill == EASY) :]
        if len(rest):
            head = int(rest[0])
            shadow = task.reserve(head)
        if backfill == EASY and head >= 0:
            behind = np.array([*rest[1:], *others], np.int64)
            outlasting = task.outlasting(behind, head, shadow)
            late = behind[outlasting]
            if len(rest) > 1:
                task.choose_among(rest[1:], outlasting[: len(rest) - 1])
    say_why(arrays, [*window.tolist(), *others], head, late, backfill)
    arrays.resources.gpus[held[0]] = held[1]
    return Mapped(head, shadow, task.reports)


def _window(arrays: PassArrays, queue: Ints, most: int) -> tuple[Ints, list[int]]:
    """The jobs that are looked at, first to last, and those that are not only because of a bound."""
    jobs, code = arrays.jobs, arrays.outcome.code
    room = jobs.room.copy() if jobs.links is not None else jobs.room
    found: list[int] = []
    others: list[int] = []
    for job in queue.tolist():
        feasibility = jobs.feasibility[jobs.shape[job]]
        code[job] = feasibility if feasibility != OK else PRIORITY
        if feasibility != OK:
            continue
        if exceeds(jobs.links, room, jobs.account, job):
            others.append(job)
        elif len(found) < most:
            found.append(job)
            charge(jobs.links, room, jobs.account, job)
    return np.array(found, np.int64), others


class _Task:
    """One partition's mappings."""

    def __init__(
        self, arrays: PassArrays, facts: JobFacts, mapping: Mapping, solver: Solver | None, window: Ints
    ) -> None:
        self._arrays, self._facts, self._mapping, self._solver = arrays, facts, mapping, solver
        shape = arrays.jobs.shape[window[0]]
        self._lo, self._hi = int(arrays.requests.lo[shape]), int(arrays.requests.hi[shape])
        self._held = facts.held.copy()
        users = np.unique(facts.user[window])
        gpus = float(np.maximum(arrays.usable.gpus[self._lo : self._hi], 0).sum())
        self._most = gpus * mapping.user_share if len(users) > 1 and mapping.user_share < 1 else np.inf
        self._place = {int(job): i for i, job in enumerate(window)}
        self.reports: list[Report] = []

    def start_prefix(self, jobs: Ints, *, waits: bool) -> int:
        """Starts jobs in their order until one does not fit, or ``waits`` for a faster type; how many."""
        problem = self._problem(jobs, None, 0.0)
        takes = None
        if waits:
            takes = Prefix(self._arrays, jobs, problem, self._runs_s(jobs, problem), self._holds_s(jobs), self._lo)
        nodes = greedy(problem, head_blocks=True, takes=takes).nodes
        count = next((i for i, where in enumerate(nodes) if not where), len(jobs))
        if count:
            problem = self._problem(jobs[:count], None, 0.0, must=np.ones(count, np.bool_))
            if waits:
                self._keep_to_floor(problem, nodes)
            value, bound = value_of(problem, nodes[:count]), best_imaginable(problem)
            first = Answer(nodes=nodes[:count], value=value, bound=bound, note="not optimised")
            self._carry_out(jobs[:count], problem, first, None, count / len(jobs))
        return count

    def _keep_to_floor(self, problem: Problem, nodes: tuple[Nodes, ...]) -> None:
        """Whoever has a type above the floor is not brought below it for others' sake."""
        speed = problem.gain / _gpus_of(problem)[:, None]
        for job in range(len(problem)):
            if not problem.mixes(job):
                least = min(self._mapping.floor, speed[job, problem.kind[nodes[job][0]]])
                problem.gain[job, speed[job] < least] = np.nan

    def reserve(self, head: int) -> float:
        """The shadow time of the first job that does not start; what is left beside it then is in ``scratch``."""
        arrays, one = self._arrays, np.array([head])
        shadow = reserve_head(arrays, head, self._runs_s(one, self._problem(one, None, 0.0))[0])
        protect(arrays.resources, request_of(arrays.requests, arrays.jobs.shape[head]), shadow < np.inf, arrays.scratch)
        return shadow

    def outlasting(self, jobs: Ints, head: int, shadow: float) -> Bools:
        """Which of the jobs would hold the nodes reserved for the head after its shadow time."""
        arrays = self._arrays
        reserved = arrays.scratch.chosen[: arrays.requests.parts[arrays.jobs.shape[head]]]
        if shadow == np.inf:
            return np.zeros(len(jobs), np.bool_)
        late: Bools = arrays.now + self._holds_s(jobs)[:, arrays.kind[reserved]].max(1) > shadow
        return late

    def _holds_s(self, jobs: Ints) -> Floats:
        """``float64[jobs, kinds]``: how long a job keeps its nodes at the most, by their type."""
        if self._facts.lasts is not None:
            return self._facts.lasts(jobs)
        limit: Floats = self._arrays.jobs.limit[jobs]
        return np.repeat(limit[:, None], int(self._arrays.kind.max(initial=0)) + 1, axis=1)

    def _runs_s(self, jobs: Ints, problem: Problem) -> Floats:
        """``float64[jobs, kinds]``: how long a job runs by what is expected of it; infinite where it cannot."""
        speed = problem.gain / _gpus_of(problem)[:, None]  # of a problem without a floor
        lasts = self._facts.lasts
        runs = self._arrays.jobs.limit[jobs][:, None] / speed if lasts is None else lasts(jobs)
        return np.where(np.isnan(speed), np.inf, runs)

    def choose_among(self, jobs: Ints, late: Bools | None, share: float = 1.0) -> None:
        """Starts of these jobs what is worth most.

        ``late``: which outlast the head's wait; ``share``: of the optimiser's time that is left.
        """
        problem = self._problem(jobs, late, self._mapping.floor)
        first = greedy(problem)
        priority = self._facts.priority[jobs]
        above = priority > priority.min(initial=0)
        if above.any():
            problem.must[:] = above & np.array([bool(nodes) for nodes in first.nodes])
        self._carry_out(jobs, problem, first, late, share)

    def choose_around(self, jobs: Ints, keep: Keep | None) -> tuple[Ints, Ints]:
        """Likewise, with nodes kept from some; returns these nodes, which are shut then, and what GPUs they had."""
        if keep is None or keep.job not in jobs:
            self.choose_among(jobs, None)
            return _NOBODY
        first = jobs.tolist().index(keep.job)
        if first:
            self.choose_among(jobs[:first], None, first / len(jobs))
        rows, gpus = keep.rows(), self._arrays.resources.gpus
        had = gpus[rows].copy()
        gpus[rows] = -1
        self.choose_among(jobs[first:], None)
        return rows, had

    def _problem(self, jobs: Ints, late: Bools | None, floor: float, must: Bools | None = None) -> Problem:
        arrays, mapping, rows = self._arrays, self._mapping, slice(self._lo, self._hi)
        shape, requests = arrays.jobs.shape[jobs], arrays.requests
        resources = _table(arrays.resources, rows)
        place = np.array([self._place[int(job)] for job in jobs])
        users, user = np.unique(self._facts.user[jobs], return_inverse=True)
        return Problem(
            resources=resources,
            total=np.maximum(arrays.usable.gpus[rows], 0),
            kind=arrays.kind[rows],
            late_resources=resources if late is None else _table(arrays.scratch.late, rows),
            parts=requests.parts[shape],
            need=np.column_stack((requests.gpus[shape], requests.cores[shape], requests.memory[shape])),
            allowed=arrays.jobs.masks[:, rows] != 0,
            mask=requests.mask[shape],
            late=np.zeros(len(jobs), np.bool_) if late is None else late,
            must=np.zeros(len(jobs), np.bool_) if must is None else must,
            gain=self._gains(jobs, shape, floor),
            bonus=mapping.order_weight * (1.0 - place / len(self._place)),
            user=user.reshape(-1),
            cap=np.maximum(0.0, self._most - self._held[users]),
            unfit=self._facts.unfit,
            open_cost=mapping.open_cost,
            frag_cost=mapping.fragment_cost,
        )

    def _gains(self, jobs: Ints, shape: Ints, floor: float) -> Floats:
        """GPUs x (speed in parts of the job's best - floor); NaN where the job cannot run.

        The best is of the types that have nodes enough for it, were they empty. A job that must mix types has one gain.
        """
        arrays, requests = self._arrays, self._arrays.requests
        speed = self._facts.speed(jobs)
        speed = np.where(speed > 0, speed, np.nan)
        kinds = speed.shape[1]
        for one in np.unique(shape):
            request = request_of(requests, one)
            rows = slice(request.lo, request.hi)
            large = (arrays.usable.gpus[rows] >= request.gpus) & (arrays.usable.gpus[rows] >= 0)
            if request.mask >= 0:
                large &= arrays.jobs.masks[request.mask, rows] != 0
            enough = np.bincount(arrays.kind[rows][large], minlength=kinds) >= request.parts
            like = shape == one
            if enough.any():
                speed[np.ix_(like, ~enough)] = np.nan
            else:
                speed[like] = 1.0
        best = np.where(np.isnan(speed), 0.0, speed).max(1, initial=0.0)
        speed[best == 0] = 1.0  # nothing was measured anywhere
        best[best == 0] = 1.0
        gpus = np.maximum(requests.parts[shape] * requests.gpus[shape], CORES_ONLY)
        gains: Floats = gpus[:, None] * (speed / best[:, None] - floor)
        return gains

    def _carry_out(self, jobs: Ints, problem: Problem, first: Answer, late: Bools | None, share: float) -> None:
        """The best answer there is, started."""
        answer = first if self._solver is None else self._solver(problem, first, share)
        arrays, scratch = self._arrays, self._arrays.scratch
        for i, nodes in enumerate(answer.nodes):
            if not nodes:
                continue
            job = int(jobs[i])
            request = request_of(arrays.requests, arrays.jobs.shape[job])
            scratch.chosen[: len(nodes)] = np.array(nodes) + self._lo
            outlasts = late is not None and bool(late[i])
            first_slot = arrays.releases.used[0]
            launch(
                arrays.resources, arrays.releases, arrays.jobs, request, job, arrays.now, outlasts, late is not None,
                scratch, arrays.outcome,
            )  # fmt: skip
            if self._facts.lasts is not None:
                slots = arrays.releases.order[first_slot : arrays.releases.used[0]]
                held = self._facts.lasts(jobs[i : i + 1])[0, problem.kind[list(nodes)]]
                arrays.releases.end[slots] = arrays.now + held.max()
            arrays.outcome.code[job] = STARTED
            self._held[self._facts.user[job]] += request.parts * request.gpus
        started = sum(bool(nodes) for nodes in answer.nodes)
        gap = answer.gap if answer.gap is not None else np.inf
        self.reports.append(Report(len(jobs), started, answer.value, first.value, gap, answer.solver, answer.note))


def _table(resources: Resources, rows: slice) -> Ints:
    return np.column_stack([column[rows] for column in resources])


def _gpus_of(problem: Problem) -> Floats:
    """``float64[jobs]``: what each counts for."""
    gpus: Floats = np.maximum(problem.parts * problem.need[:, 0], CORES_ONLY)
    return gpus


def unfit_of(sizes: Ints, most: int) -> Floats:
    """``float64[most + 1]``: the chance that a job drawn from these needs more GPUs on one node than that."""
    if not len(sizes):
        return np.zeros(most + 1)
    levels = np.arange(most + 1)
    return 1.0 - np.searchsorted(np.sort(sizes), levels, side="right") / len(sizes)
