"""The optimiser within a live decision: no decision waits for HiGHS beyond its budget.

HiGHS checks its clock, and an interrupt, between its steps, and one step can take half a second (separating cuts
at the root). So it searches on a thread of its own (it runs without Python's lock), and what it has found by the
deadline is the answer. It ends by its own time limit soon after.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from gpusched.sched.mapping.milp import OUT_OF_TIME, MilpSearch, SearchLimits, highs
from gpusched.sched.mapping.problem import MappingSolution, Problem

STILL_BUSY = "the optimiser was still busy with earlier requests"
_HANDOVER_S = 0.02  # of the budget, at most a tenth: for checking what was found so far and starting its jobs
_READ_S = 0.01  # of a call's time, at most a tenth: from HiGHS's end to the answer, where it ends in time
_BUILD_FRACTION = 0.5  # what making the program may take of the time there is
_RATE_SMOOTHING = 0.3  # how much the last measurement of it counts
_MAX_ABANDONED = 2  # abandoned searches that still run


class Deadline:
    """`milp.solve` within one decision: all its calls, and the work between them, share one budget.

    Args:
        budget_s: From now on.
        clock: Seconds.

    Raises:
        UsageError: HiGHS is not installed.
    """

    work_per_s: ClassVar[float] = 100_000.0  # how fast programs are made here (`SearchLimits`), by what was measured
    _left: ClassVar[list[threading.Thread]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()  # of `_left`: several partitions' decisions run side by side
    _settled: ClassVar[bool] = False

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        highs()
        if not Deadline._settled:
            # what is loaded by now stays; a full collection of garbage that looks at it all takes 50 ms
            gc.freeze()
            Deadline._settled = True
        self._clock = clock
        self._end = clock() + budget_s - min(_HANDOVER_S, 0.1 * budget_s)

    def __call__(self, problem: Problem, start: MappingSolution, share: float = 1.0) -> MappingSolution:
        """Return a solution worth at least ``start``, or ``start`` itself if no time is left; see `solve`.

        ``share``: of the time that is left, what it may take.
        """
        now = self._clock()
        left = share * (self._end - now)
        if left <= 0:
            return replace(start, note=OUT_OF_TIME)
        if not self._room(left):
            return replace(start, note=STILL_BUSY)
        work = Deadline.work_per_s * _BUILD_FRACTION * left
        end_s = now + left - min(_READ_S, 0.1 * left)
        search = MilpSearch(problem, start, SearchLimits(end_s, None, work, self._clock), listen=True)
        errors: list[BaseException] = []
        # no daemon: at the program's end HiGHS must not be cut off amid its work
        thread = threading.Thread(target=_run, args=(search, errors), name="gpusched-milp")
        thread.start()
        thread.join(now + left - self._clock())
        if thread.is_alive():
            with Deadline._lock:
                Deadline._left.append(thread)
        elif errors:
            raise errors[0]
        if search.work_per_s is not None:
            Deadline.work_per_s += _RATE_SMOOTHING * (search.work_per_s - Deadline.work_per_s)
        return search.best()

    def _room(self, left_s: float) -> bool:
        """Wait until one more search may run; return whether it may."""
        with Deadline._lock:
            Deadline._left = left = [thread for thread in Deadline._left if thread.is_alive()]
        if len(left) < _MAX_ABANDONED:
            return True
        first = left[0]
        first.join(left_s)
        return not first.is_alive()


def _run(search: MilpSearch, errors: list[BaseException]) -> None:
    try:
        search.run()
    except BaseException as error:
        errors.append(error)
