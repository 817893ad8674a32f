"""A partition's queue placed by mapping: nodes and GPU types for the jobs at the head of the order, all at once.

In place of `backfill.schedule`, on the same arrays and with the same rules of who may go. The order stays as it is:
what blocks is placed before what is blocked, and the head's reservation under EASY binds the jobs behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.mapping.greedy import greedy
from gpusched.mapping.problem import Answer, Problem
from gpusched.model.policy import Mapping
from gpusched.sched.backfill import launch, protect, reserve
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose
from gpusched.sched.state import (
    ARRAY_LIMIT,
    BACKFILL,
    BEST_FIT,
    EASY,
    FIRST_FIT,
    MAPPING,
    OK,
    PRIORITY,
    RESOURCES,
    SKIP,
    STARTED,
    Floats,
    Ints,
    Jobs,
    Outcome,
    Releases,
    Requests,
    Rooms,
    Scratch,
)

Bools = npt.NDArray[np.bool_]
Solver = Callable[[Problem, Answer], Answer]
_NOBODY = (np.zeros(0, np.int64), np.zeros(0, np.int64))
CORES_ONLY = 0.1  # what a job without GPUs counts for, in GPUs


class Board(NamedTuple):
    """What the passes of `backfill.schedule` take, and the nodes' GPU types.

    Attributes:
        usable: The nodes as they are, empty of jobs. kind: ``int64[nodes]``: GPU type.
    """

    rooms: Rooms
    releases: Releases
    requests: Requests
    jobs: Jobs
    scratch: Scratch
    outcome: Outcome
    now: float
    usable: Rooms
    kind: Ints


class Wishes(NamedTuple):
    """What is known of the jobs besides.

    Attributes:
        speed: Jobs -> ``float64[jobs, kinds]``: how fast each goes on each GPU type, in any unit of its own.
        user: ``int64[jobs]``. held: ``float64[users]``: GPUs that a user's jobs hold in the partition.
        priority: ``int64[jobs]``: explicit priorities. unfit: See `Problem`.
    """

    speed: Callable[[Ints], Floats]
    user: Ints
    held: Floats
    priority: Ints
    unfit: Floats


class Keep(NamedTuple):
    """Nodes that an agent holds for a job that does not fit: those behind it in the order do not get them now.

    Attributes:
        job: Whose. rows: Says which, ``int64[...]``; asked when those ahead of it are placed.
    """

    job: int
    rows: Callable[[], Ints]


class Report(NamedTuple):
    """One mapping: how many jobs were looked at and started, its value and the greedy answer's, and how sure it is."""

    jobs: int
    started: int
    value: float
    greedy: float
    gap: float
    solver: str
    note: str


class Mapped(NamedTuple):
    """What stopped the queue (see `backfill.schedule`), and the mappings that were made."""

    head: int
    shadow: float
    reports: list[Report]


def map_queue(
    board: Board,
    queue: Ints,
    wishes: Wishes,
    mapping: Mapping,
    backfill: int,
    solver: Solver | None,
    keep: Keep | None = None,
) -> Mapped:
    """Decides for one partition's jobs, ``queue: int64[waiting]`` in order of precedence; see `backfill.schedule`.

    With NONE, and for those before the head with EASY, the jobs that start are those that the greedy mapping starts in
    this order, on any GPU type they may have. With SKIP, and behind the head with EASY, the mapping chooses among the
    window; of those the greedy one starts, the ones with more priority than others stay.

    Args:
        board: Changed in place, as by `backfill.schedule`.
        queue: The jobs.
        wishes: What is known of them.
        mapping: The policy's settings.
        backfill: NONE, SKIP or EASY.
        solver: Betters the greedy answer; None: that is the answer.
        keep: With SKIP: nodes held for a job. Those ahead of it are mapped first, then the others on what is left.
    """
    window, others = _window(board, queue, mapping.window)
    if not len(window):
        _say_why(board, others, -1, np.inf, backfill)
        return Mapped(-1, np.inf, [])
    task = _Task(board, wishes, mapping, solver, window)
    head, shadow, held = -1, np.inf, _NOBODY
    if backfill == SKIP:
        held = task.choose_around(window, keep)
    else:
        rest = window[task.start_prefix(window) :]
        if len(rest):
            head = int(rest[0])
            request = request_of(board.requests, board.jobs.shape[head])
            shadow = float(
                reserve(board.rooms, board.releases, board.jobs.masks, request, BEST_FIT, board.now, board.scratch)
            )
        if len(rest) > 1 and backfill == EASY:
            protect(board.rooms, request, shadow < np.inf, board.scratch)
            task.choose_among(rest[1:], board.now + board.jobs.limit[rest[1:]] > shadow)
    _say_why(board, [*window.tolist(), *others], head, shadow, backfill)
    board.rooms.gpus[held[0]] = held[1]
    return Mapped(head, shadow, task.reports)


def _window(board: Board, queue: Ints, most: int) -> tuple[Ints, list[int]]:
    """The jobs that are looked at, first to last, and tasks that are not only because of others of their array."""
    jobs, code = board.jobs, board.outcome.code
    room = jobs.array_room.copy()
    found: list[int] = []
    others: list[int] = []
    for job in queue.tolist():
        array, standing = jobs.array[job], jobs.standing[jobs.shape[job]]
        code[job] = standing if standing != OK else PRIORITY
        if standing != OK:
            continue
        if array >= 0 and room[array] <= 0:
            others.append(job)
        elif len(found) < most:
            found.append(job)
            if array >= 0:
                room[array] -= 1
    return np.array(found, np.int64), others


class _Task:
    """One partition's mappings."""

    def __init__(self, board: Board, wishes: Wishes, mapping: Mapping, solver: Solver | None, window: Ints) -> None:
        self._board, self._wishes, self._mapping, self._solver = board, wishes, mapping, solver
        shape = board.jobs.shape[window[0]]
        self._lo, self._hi = int(board.requests.lo[shape]), int(board.requests.hi[shape])
        self._held = wishes.held.copy()
        users = np.unique(wishes.user[window])
        gpus = float(np.maximum(board.usable.gpus[self._lo : self._hi], 0).sum())
        self._most = gpus * mapping.user_share if len(users) > 1 and mapping.user_share < 1 else np.inf
        self._place = {int(job): i for i, job in enumerate(window)}
        self.reports: list[Report] = []

    def start_prefix(self, jobs: Ints) -> int:
        """Starts jobs in their order until one does not fit; how many."""
        everyone = greedy(self._problem(jobs, None, 0.0), head_blocks=True)
        count = next((i for i, nodes in enumerate(everyone.nodes) if not nodes), len(jobs))
        if count:
            problem = self._problem(jobs[:count], None, 0.0, must=np.ones(count, np.bool_))
            self._carry_out(jobs[:count], problem, greedy(problem), None)
        return count

    def choose_among(self, jobs: Ints, late: Bools | None) -> None:
        """Starts of these jobs what is worth most; ``late``: which of them outlast the head's wait."""
        problem = self._problem(jobs, late, self._mapping.floor)
        first = greedy(problem)
        priority = self._wishes.priority[jobs]
        above = priority > priority.min(initial=0)
        if above.any():
            problem.must[:] = above & np.array([bool(nodes) for nodes in first.nodes])
        self._carry_out(jobs, problem, first, late)

    def choose_around(self, jobs: Ints, keep: Keep | None) -> tuple[Ints, Ints]:
        """Likewise, with nodes kept from some; returns these nodes, which are shut then, and what GPUs they had."""
        if keep is None or keep.job not in jobs:
            self.choose_among(jobs, None)
            return _NOBODY
        first = jobs.tolist().index(keep.job)
        if first:
            self.choose_among(jobs[:first], None)
        rows, gpus = keep.rows(), self._board.rooms.gpus
        had = gpus[rows].copy()
        gpus[rows] = -1
        self.choose_among(jobs[first:], None)
        return rows, had

    def _problem(
        self,
        jobs: Ints,
        late: Bools | None,
        floor: float,
        must: Bools | None = None,
    ) -> Problem:
        board, mapping, rows = self._board, self._mapping, slice(self._lo, self._hi)
        shape = board.jobs.shape[jobs]
        requests = board.requests
        rooms = _table(board.rooms, rows)
        place = np.array([self._place[int(job)] for job in jobs])
        users, user = np.unique(self._wishes.user[jobs], return_inverse=True)
        return Problem(
            rooms=rooms,
            total=np.maximum(board.usable.gpus[rows], 0),
            kind=board.kind[rows],
            late_rooms=rooms if late is None else _table(board.scratch.late, rows),
            parts=requests.parts[shape],
            need=np.column_stack((requests.gpus[shape], requests.cores[shape], requests.memory[shape])),
            allowed=board.jobs.masks[:, rows] != 0,
            mask=requests.mask[shape],
            late=np.zeros(len(jobs), np.bool_) if late is None else late,
            must=np.zeros(len(jobs), np.bool_) if must is None else must,
            gain=self._gains(jobs, shape, floor),
            bonus=mapping.order_weight * (1.0 - place / len(self._place)),
            user=user.reshape(-1),
            cap=np.maximum(0.0, self._most - self._held[users]),
            unfit=self._wishes.unfit,
            open_cost=mapping.open_cost,
            frag_cost=mapping.fragment_cost,
        )

    def _gains(self, jobs: Ints, shape: Ints, floor: float) -> Floats:
        """GPUs x (speed in parts of the job's best - floor); NaN where the job cannot run.

        The best is of the types that have nodes enough for it, were they empty. A job that must mix types has one gain.
        """
        board, requests = self._board, self._board.requests
        speed = self._wishes.speed(jobs)
        speed = np.where(speed > 0, speed, np.nan)
        kinds = speed.shape[1]
        for one in np.unique(shape):
            request = request_of(requests, one)
            rows = slice(request.lo, request.hi)
            large = (board.usable.gpus[rows] >= request.gpus) & (board.usable.gpus[rows] >= 0)
            if request.mask >= 0:
                large &= board.jobs.masks[request.mask, rows] != 0
            enough = np.bincount(board.kind[rows][large], minlength=kinds) >= request.parts
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

    def _carry_out(
        self,
        jobs: Ints,
        problem: Problem,
        first: Answer,
        late: Bools | None,
    ) -> None:
        """The best answer there is, started."""
        answer = first if self._solver is None else self._solver(problem, first)
        board, scratch = self._board, self._board.scratch
        for i, nodes in enumerate(answer.nodes):
            if not nodes:
                continue
            job = int(jobs[i])
            request = request_of(board.requests, board.jobs.shape[job])
            scratch.chosen[: len(nodes)] = np.array(nodes) + self._lo
            outlasts = late is not None and bool(late[i])
            launch(
                board.rooms, board.releases, board.jobs, request, job, board.now, outlasts, late is not None, scratch,
                board.outcome,
            )  # fmt: skip
            board.outcome.code[job] = STARTED
            self._held[self._wishes.user[job]] += request.parts * request.gpus
        started = sum(bool(nodes) for nodes in answer.nodes)
        gap = answer.gap if answer.gap is not None else np.inf
        self.reports.append(Report(len(jobs), started, answer.value, first.value, gap, answer.solver, answer.note))


def _table(rooms: Rooms, rows: slice) -> Ints:
    return np.column_stack([column[rows] for column in rooms])


def _say_why(board: Board, jobs: list[int], head: int, shadow: float, backfill: int) -> None:
    """The codes of those of the jobs that stay."""
    code, shape = board.outcome.code, board.jobs.shape
    fits: dict[int, bool] = {}
    for job in jobs:
        array = board.jobs.array[job]
        if code[job] == STARTED:
            continue
        if array >= 0 and board.jobs.array_room[array] <= 0:
            code[job] = ARRAY_LIMIT
            continue
        one = int(shape[job])
        if one not in fits:
            request = request_of(board.requests, one)
            fits[one] = bool(choose(board.rooms, board.jobs.masks, request, FIRST_FIT, board.scratch))
        if job == head:
            code[job] = MAPPING if fits[one] else RESOURCES  # a gang may fit on two GPU types together
        elif backfill == EASY and fits[one] and board.now + board.jobs.limit[job] > shadow:
            code[job] = BACKFILL
        elif fits[one] and backfill != 0:
            code[job] = MAPPING
        else:
            code[job] = RESOURCES if backfill == SKIP else PRIORITY


def unfit_of(sizes: Ints, most: int) -> Floats:
    """``float64[most + 1]``: the chance that a job drawn from these needs more GPUs on one node than that."""
    if not len(sizes):
        return np.zeros(most + 1)
    levels = np.arange(most + 1)
    return 1.0 - np.searchsorted(np.sort(sizes), levels, side="right") / len(sizes)


def summary(reports: list[Report]) -> str:
    """The mappings of one decision in a line; "" where there were none."""
    if not reports:
        return ""
    jobs, started = sum(r.jobs for r in reports), sum(r.started for r in reports)
    gap = max(r.gap for r in reports)
    gain = sum(r.value - r.greedy for r in reports)
    known = f"at most {gap:.2%} below the best" if gap < 1 else "how near the best is not known"
    notes = "; ".join(dict.fromkeys(r.note for r in reports if r.note))
    return f"{started} of {jobs} jobs mapped, worth {gain:.3g} GPUs more than greedily, {known}" + (
        f" ({notes})" if notes else ""
    )
