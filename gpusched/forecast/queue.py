"""The present queue as arrays that can be run forward many times: once with limits, and with draws of run times.

The order, the placement and the backfill are the live policy's own (`sched.order`, `sched.kernel`), so what
is predicted is what the controller will do if the run times are as assumed and nobody submits anything more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from gpusched.forecast.initial import initial_state_of, may_start, staged, waiting_and_settling
from gpusched.forecast.run import ALLOWED, COUNTERS, JOBS, WORK, LateRoom, QueueArrays, fit_anew, run_forward
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.arrays import NodeArrays, node_arrays_of, racks_for_ask, releases_of, scratch_for, waiting_of
from gpusched.sched.fit import set_feasibility
from gpusched.sched.heaps import new_heap
from gpusched.sched.state import (
    OK,
    RESERVED,
    ClusterState,
    Flags,
    Floats,
    Outcome,
    Releases,
    Resources,
    new_outcome,
    new_resources,
    new_scratch,
    seed_words,
)
from gpusched.sched.topology.live import costs_of
from gpusched.sched.topology.queue import waits_now
from gpusched.sched.topology.spread import splits

ENOUGH_WORK = 40_000_000  # queue entries of one run: some tenths of a second


class RunTimes(NamedTuple):
    """One draw: ``lasts: float64[J]``, how long waiting jobs will run; ``ends: float64[R]``, when running ones end."""

    lasts: Floats
    ends: Floats


class RunResult(NamedTuple):
    """What one run says.

    Attributes:
        start: ``float64[J]``, Unix seconds, infinite: not within it.
        whole: Whether it came to its end. work: Queue entries looked at.
    """

    start: Floats
    whole: bool
    work: int


class QueueForecast:
    """A snapshot made ready to be run forward.

    Attributes:
        snapshot: As given.
        views: The jobs that may start at all, then the variants: job J of every array here.
        first_variant: Index of the first variant; variants take part only where they are asked for.
    """

    def __init__(
        self, snapshot: Snapshot, *, half_life_s: float, tick_s: float, variants: Sequence[PendingView] = ()
    ) -> None:
        self.snapshot = snapshot
        own = [job for job in snapshot.pending if may_start(job, snapshot)]
        self.views = [*own, *variants]
        self.first_variant = len(own)
        self.index = {job.id: i for i, job in enumerate(own)}
        self._one_after_the_other = np.array([1.0 + job.behind for job in self.views])
        self._world = node_arrays_of(snapshot)
        self.views, later = _who_wait(snapshot, self.views, self._world)
        self._waiting, settling = waiting_and_settling(self.views, self._world, snapshot)
        self._releases = releases_of(snapshot.running, self._world, self._waiting.parts)
        world, jobs = self._world, self._waiting.jobs
        self._calendar = self._waiting.calendar
        self._scratch = scratch_for(world, self._waiting, self._releases)
        set_feasibility(world.total, world.usable, jobs.masks, self._waiting.requests, self._scratch, jobs.feasibility)
        self._strict = self._block_all()
        jobs.feasibility[(jobs.feasibility == RESERVED) & (self._strict == 0)] = OK  # they may be the head
        self._masks, self._feasibility = jobs.masks.copy(), jobs.feasibility.copy()
        self._initial = initial_state_of(snapshot, self.views, self.first_variant, self._world, self._waiting, settling)
        eligible = self._initial.jobs["eligible"]
        for job, until in later.items():
            eligible[job] = max(eligible[job], until)
        self._clock = np.array([snapshot.now, half_life_s, tick_s, np.inf])
        self._entering = np.argsort(self._initial.jobs["rank"][: len(self.views)], kind="stable")
        self._buffers()

    def _buffers(self) -> None:
        """What a run changes, made once and filled anew for each."""
        jobs, initial, shapes = len(self.views), self._initial, self._waiting.jobs.feasibility.size
        self._resources = Resources(*(array.copy() for array in self._world.resources))
        self._freed = Releases(*(array.copy() for array in self._releases))  # type: ignore[arg-type]
        self._jobs = self._waiting.jobs._replace(
            room=self._waiting.jobs.room.copy(), shape=self._waiting.jobs.shape.copy(), links=initial.links
        )
        self._outcome: Outcome = new_outcome(jobs, self._waiting.parts)
        self._line = QueueArrays(
            jobs=initial.jobs.copy(),
            parts=initial.parts,
            child=initial.child,
            queues=initial.queues.copy(),
            users=initial.users.copy(),
            kinds=initial.kinds.copy(),
            entering=self._entering,
            open=np.zeros(len(initial.kinds), np.int64),
            place=np.zeros(len(initial.kinds)),
            late=LateRoom(
                room=new_resources(len(self._world.nodes)),
                fit=np.zeros((shapes, len(self._world.nodes)), np.uint8),
                fits=np.zeros(shapes, np.int64),
            ),
            fit=np.zeros((shapes, len(self._world.nodes)), np.uint8),
            fits=np.zeros(shapes, np.int64),
            clock=self._clock.copy(),
            counter=np.zeros(COUNTERS, np.int64),
            heap=new_heap(2 * len(initial.jobs) + 2 * jobs + len(initial.frees) + 2 + len(self._calendar.end)),
            hourly=initial.hourly,
            frees=initial.frees,
            tree=initial.tree,
            least=np.zeros((len(self._waiting.jobs.links), 3), np.int64),
            barren=np.zeros((len(initial.kinds), 3), np.int64),
            turns=np.full(len(self._calendar.base), -np.inf),
            strict=self._strict,
            usable=self._world.usable,
            rng=seed_words(0),
        )
        line, waiting = self._line, self._waiting
        for node in range(len(self._world.nodes)):
            fit_anew(line.fit, line.fits, self._resources, waiting.requests, waiting.jobs.masks, node)
        self._fit, self._fits = line.fit.copy(), line.fits.copy()

    def _block_all(self) -> Flags:
        """``uint8[shapes]``: of partitions in which all wait for the first that does not start."""
        requests, found = self._waiting.requests, np.zeros(len(self._waiting.requests.lo), np.uint8)
        for name, policy in self.snapshot.policies.items():
            if staged(policy).backfill == "none" and name in self._world.span:
                found |= requests.lo == self._world.span[name][0]
        return found

    @property
    def limits(self) -> Floats:
        """``float64[J]``: time limits, seconds."""
        return self._waiting.jobs.limit

    @property
    def by_limits(self) -> RunTimes:
        """Everybody uses the whole limit."""
        ends = np.array([job.expected_end for job in self.snapshot.running], dtype=np.float64)
        return RunTimes(self.limits.copy(), np.maximum(ends, self.snapshot.now))

    def run(
        self,
        times: RunTimes,
        *,
        target: int = -1,
        without: Sequence[int] = (),
        until: float = np.inf,
        seed: int = 0,
        work: int = ENOUGH_WORK,
    ) -> RunResult:
        """Runs forward until ``target`` has started (-1: until all has happened).

        Args:
            times: How long everything lasts.
            target: Index of the job that is asked for; a variant takes part only here.
            without: Jobs that take no part.
            until: Nothing later matters (Unix seconds).
            seed: For the naive placement's draws.
            work: Queue entries that may be looked at.
        """
        line = self._start_over(times, work)
        needs = line.jobs["needs"]
        needs[self.first_variant : len(self.views)] = -1
        needs[list(without)] = -1
        if target >= self.first_variant:
            needs[target] = self._initial.jobs["needs"][target]
        line.rng[:] = seed_words(seed)
        requests, now = self._waiting.requests, self.snapshot.now
        state = ClusterState(self._resources, self._freed, requests, self._jobs, self._scratch, self._outcome, now)
        whole = run_forward(line, state, target, until)
        start = line.jobs["start"][: len(self.views)].copy()
        start[np.isnan(start)] = np.inf
        return RunResult(start, bool(whole), int(line.counter[WORK]))

    def _start_over(self, times: RunTimes, work: int) -> QueueArrays:
        line, initial, jobs = self._line, self._initial, len(self.views)
        for held, fresh in zip(
            (*self._resources, *self._freed), (*self._world.resources, *self._releases), strict=True
        ):
            held[:] = fresh
        self._jobs.room[:], self._jobs.shape[:] = self._waiting.jobs.room, self._waiting.jobs.shape
        self._jobs.masks[:], self._jobs.feasibility[:] = self._masks, self._feasibility
        self._outcome.total[:] = 0
        line.jobs[:], line.queues[:], line.users[:] = initial.jobs, initial.queues, initial.users
        line.jobs["lasts"][:jobs], line.kinds[:] = times.lasts * self._one_after_the_other, initial.kinds
        line.fit[:], line.fits[:], line.clock[:] = self._fit, self._fits, self._clock
        line.counter[:], line.turns[:], line.barren[:] = 0, -np.inf, -1
        line.late.room.gpus[:], line.late.fit[:], line.late.fits[:] = -1, 0, 0  # as of nodes that take no jobs
        line.counter[JOBS], line.counter[ALLOWED] = jobs, work
        order = np.argsort(times.ends, kind="stable")  # a sorted array is a heap
        line.heap.key[: len(order)], line.heap.item[: len(order)] = times.ends[order], order + jobs  # each ENDS
        line.heap.size[0] = len(order)
        return line

    def nodes_of(self, job: int) -> tuple[str, ...]:
        """The nodes that the last run started the job on."""
        offset, parts = int(self._outcome.offset[job]), int(self._waiting.requests.parts[self._outcome.shape[job]])
        return tuple(self._world.nodes[row].name for row in self._outcome.nodes[offset : offset + parts].tolist())


def _who_wait(
    snapshot: Snapshot, views: list[PendingView], world: NodeArrays
) -> tuple[list[PendingView], dict[int, float]]:
    """The jobs, with those that wait for a better place as runs ahead can have them wait.

    Who would be on several racks now asks for one, as long as it waits; who has one, but neighbours there, does not
    start before its wait is over (Unix seconds, by job): nobody knows when they go.
    """
    if not snapshot.beliefs:
        return views, {}
    waiting = waiting_of(views, world, {}, snapshot)
    costs = costs_of(snapshot, world, waiting, new_scratch(len(world.nodes), 0, world.rack))
    if costs is None:
        return views, {}
    found, later = list(views), dict[int, float]()
    for job, until in waits_now(costs, world.resources, waiting.requests, waiting.jobs, snapshot.now).items():
        spec = views[job].spec
        rack = splits(spec)[0]._replace(one_rack=True)
        room = racks_for_ask(world.resources, world, waiting.jobs.masks, -1, spec.partition, rack)
        if world.racked and rack.parts > 1 and room is None:
            wait_s = until - float(costs.since[job])
            found[job] = replace(views[job], spec=replace(spec, placement_wait_s=wait_s))
        else:
            later[job] = until
    return found, later
