"""The current queue as arrays that can be simulated many times: with time limits, and with drawn run times.

The order, the placement and the backfill are the live policy's own (`sched.order`, `sched.kernel`), so what
is predicted is what the controller will do if the run times are as assumed and nothing more is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import is_cached
from gpusched.forecast.component import component_of, forecast_by_components, uses_components
from gpusched.forecast.initial import InitialState, initial_state_of, may_start, simulated_policy
from gpusched.forecast.run import (
    ALLOWED,
    COUNTERS,
    EXHAUSTED,
    TARGET,
    UNTIL,
    WORK,
    LateRoom,
    QueueArrays,
    run_forward,
    update_fit,
)
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.arrays import node_arrays_of
from gpusched.sched.slicenames import base_of
from gpusched.sched.slices.split import split, split_job
from gpusched.sched.state import Floats, new_outcome, new_resources, seed_words
from gpusched.sim.engine.state import FUTURE, IN_SYSTEM, NEVER, new_log

ENOUGH_WORK = 40_000_000  # queue entries of one run: some tenths of a second


class RunTimeDraw(NamedTuple):
    """One draw: ``lasts: float64[J]``, run times of waiting jobs; ``ends: float64[R]``, end times of running ones."""

    lasts: Floats
    ends: Floats


class RunResult(NamedTuple):
    """The result of one run.

    Attributes:
        start: ``float64[J]``, Unix seconds, infinite: not within it.
        whole: Whether it came to its end. work: Queue entries looked at.
    """

    start: Floats
    whole: bool
    work: int


class QueueForecast:
    """A snapshot prepared to be simulated forward.

    Attributes:
        snapshot: As given.
        views: The jobs that may start at all, then the variants: job J of every array here.
        first_variant: Index of the first variant; variants take part only as a run's target.
        by_components: Whether another package's placement is asked, which takes a hundred times as long.

    ``components``: ask other packages' placements, where the queue is short; else these are best fit.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        half_life_s: float,
        tick_s: float,
        variants: Sequence[PendingView] = (),
        components: bool = False,
    ) -> None:
        self.snapshot = snapshot = split(snapshot)
        variants = [split_job(view) for view in variants]
        own = [job for job in snapshot.pending if may_start(job, snapshot)]
        self.views = [*own, *variants]
        self.first_variant = len(own)
        self.index = {job.id: i for i, job in enumerate(own)}
        self._one_after_the_other = np.array([1.0 + job.behind for job in self.views])
        self._world = world = node_arrays_of(snapshot)
        initial = initial_state_of(snapshot, self.views, self.first_variant, world, half_life_s)
        self._waiting, self._sim, self._passes, self._owner = initial[:4]
        names = {i: name for i, of in enumerate(snapshot.policies) if (name := component_of(snapshot, of)) is not None}
        self.by_components = bool(components and names and uses_components(snapshot))
        self._run = forecast_by_components(names, world, initial) if self.by_components else run_forward
        self._queue = self._new_arrays(initial, tick_s)
        size = len(self._sim.jobs)
        self._log = new_log(6 * size + len(self._sim.changes) + 64, size, len(self._sim.held))
        self._fresh = [(array, array.copy()) for array in _arrays((self._sim, self._passes, self._queue))]

    def _new_arrays(self, initial: InitialState, tick_s: float) -> QueueArrays:
        requests, masks = self._passes.requests, self._passes.jobs.masks
        kinds, nodes, shapes = len(initial.kinds), len(self._world.nodes), len(requests.lo)
        late = LateRoom(new_resources(nodes), np.zeros((shapes, nodes), np.uint8), np.zeros(shapes, np.int64))
        late.room.gpus[:] = -1  # as of nodes that take no jobs
        arrays = QueueArrays(
            jobs=initial.jobs,
            queues=initial.queues,
            users=initial.users,
            kinds=initial.kinds,
            open=np.zeros(kinds, np.int64),
            place=np.zeros(kinds),
            late=late,
            fit=late.fit.copy(),
            fits=late.fits.copy(),
            clock=np.array([tick_s, np.inf, np.inf]),
            counter=np.zeros(COUNTERS, np.int64),
            tree=initial.tree,
            least=np.zeros((len(self._waiting.jobs.links), 3), np.int64),
            barren=np.full((kinds, 3), -1, np.int64),
            turns=np.full(len(self._waiting.calendar.base), -np.inf),
            outcome=new_outcome(len(self.views), self._waiting.parts),
            placing=initial.placing,
            plan=self._passes.scratch.plan if self._plans() else None,
        )
        for node in range(nodes):
            update_fit(arrays.fit, arrays.fits, self._sim.resources, requests, masks, node)
        return arrays

    def _plans(self) -> bool:
        """Return whether any partition backfills conservatively."""
        return any(simulated_policy(policy).backfill == "conservative" for policy in self.snapshot.policies.values())

    @property
    def is_compiled(self) -> bool:
        """Whether a run can begin at once, with the passes for this snapshot already compiled."""
        return is_cached(run_forward, self._sim, self._log, self._passes, self._queue)

    @property
    def limits(self) -> Floats:
        """``float64[J]``: time limits, seconds."""
        return self._waiting.jobs.limit

    @property
    def by_limits(self) -> RunTimeDraw:
        """The draw in which every job runs to its time limit."""
        ends = np.array([job.expected_end for job in self.snapshot.running], dtype=np.float64)
        return RunTimeDraw(self.limits.copy(), np.maximum(ends, self.snapshot.now))

    def run(
        self,
        times: RunTimeDraw,
        *,
        target: int = -1,
        without: Sequence[int] = (),
        until: float = np.inf,
        seed: int = 0,
        work: int = ENOUGH_WORK,
    ) -> RunResult:
        """Simulate until ``target`` has started (-1: until nothing more happens).

        Args:
            times: How long everything lasts.
            target: Index of the job of interest; a variant takes part only as the target.
            without: Jobs that take no part.
            until: Nothing later matters (Unix seconds).
            seed: For the naive placement's draws.
            work: Queue entries that may be examined.
        """
        sim, arrays, status = self._sim, self._queue, self._sim.state["status"]
        self._start_over(times)
        status[self.first_variant : len(self.views)] = NEVER
        status[list(without)] = NEVER
        if target >= self.first_variant:
            status[target] = FUTURE
        sim.counter[IN_SYSTEM] = np.count_nonzero(status != NEVER)
        sim.clock[1] = self.snapshot.now
        arrays.counter[TARGET], arrays.counter[ALLOWED], arrays.clock[UNTIL] = target, work, until
        self._passes.rng[:] = seed_words(seed)
        code = self._run(sim, self._log, self._passes, arrays)
        start = sim.state["first"][: len(self.views)].copy()
        start[np.isnan(start)] = np.inf
        return RunResult(start, code != EXHAUSTED, int(arrays.counter[WORK]))

    def _start_over(self, times: RunTimeDraw) -> None:
        for array, fresh in self._fresh:
            array[:] = fresh
        sim, jobs, due = self._sim, len(self.views), times.ends[self._owner]
        sim.state["left"][:jobs], sim.state["due"][jobs:] = times.lasts * self._one_after_the_other, due
        if sim.pace is not None:
            rates: Floats = sim.pace.runs["rate"][jobs:]
            sim.state["left"][jobs:] = (due - self.snapshot.now) * rates
        order = np.argsort(due, kind="stable")  # a sorted array is a heap
        sim.ends.key[: len(due)], sim.ends.item[: len(due)], sim.ends.size[0] = due[order], order + jobs, len(due)

    def nodes_of(self, job: int) -> tuple[str, ...]:
        """Return the nodes on which the last run started the job."""
        of = self._sim.jobs[job]
        rows = self._sim.held[of["offset"] : of["offset"] + self._sim.shapes[of["shape"]]["parts"]]
        return tuple(base_of(self._world.nodes[row].name) for row in rows.tolist())


def _arrays(of: object) -> Iterator[npt.NDArray[Any]]:
    """Yield all arrays in named tuples, as bytes: copying records field by field takes longer."""
    if isinstance(of, np.ndarray) and of.size:
        yield of.reshape(-1).view(np.uint8)
    for part in of if isinstance(of, tuple) else ():
        yield from _arrays(part)
