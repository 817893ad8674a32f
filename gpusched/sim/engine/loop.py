"""The main loop of every compiled replay: advance to the next instant, then decide. The decision is compiled in.

run = looped(decide)
code = run(sim, log, passes, state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from gpusched.compiled import in_python, jit, specialized
from gpusched.sched.fit import set_feasibility
from gpusched.sched.releases import add, drop_ended
from gpusched.sched.reservations.calendar import next_turn, turn_due
from gpusched.sim.engine.state import (
    DECIDE,
    DECISIONS,
    ENDED,
    IN_SYSTEM,
    MOVED,
    RUNNING,
    RUNS,
    EventLog,
    Passes,
    Sim,
    shape_request,
)
from gpusched.sim.engine.step import advance

State = TypeVar("State")
Decide = Callable[[Sim, EventLog, Passes, State], int]


def looped(decide: Decide[State], compiled: bool = True) -> Decide[State]:
    """Return the replay that calls ``decide`` at every instant at which something happened.

    It starts and stops jobs (`step.start_job`, `step.stop_job`), gets its own ``state`` each time, and returns DECIDE
    to continue or any other number to end the run with. ``compiled``: see `queue_pass.queue_pass`.

    Returns:
        What replays to the end: OVER, GROW (call it again with a larger ``log``), or what ``decide`` ended it with.
    """
    return specialized(_run, decide, _decide=decide) if compiled else in_python(_run, _decide=decide)


@jit
def next_decision(sim: Sim, log: EventLog, passes: Passes) -> int:
    """Advance to the next decision (see `advance` for the codes), and update the passes' arrays.

    What ended gives nothing back any more, and what nodes changed decides what can run. While jobs wait this is an
    instant, too: when nodes come to be others', or theirs, though nothing else happens.
    """
    if sim.counter[IN_SYSTEM] > sim.counter[RUNS]:
        sim.clock[1] = min(sim.clock[1], next_turn(passes.scratch.calendar, sim.clock[0]))
    code = advance(sim, log)
    if code != DECIDE:
        return code
    sim.counter[DECISIONS] += 1
    for i in range(sim.counter[ENDED] if passes.releases.used[0] > 0 else 0):  # few ways to decide note any
        job = sim.ended[i]
        drop_ended(passes.releases, sim.state[job]["until"], job)
        if sim.state[job]["status"] == RUNNING:  # it has lost a rank
            note_running(sim, passes, job)
    turned = turn_due(passes.scratch.calendar, passes.jobs.masks, sim.clock[0])
    if turned or sim.counter[MOVED] > 0:
        for node in range(sim.node.size):
            passes.usable.gpus[node] = sim.node[node]["total"] if sim.node[node]["up"] else -1
        set_feasibility(passes.total, passes.usable, passes.requests, passes.jobs, passes.scratch)
    return code


@jit
def note_running(sim: Sim, passes: Passes, job: int) -> None:
    """Note when a running job gives back what it holds."""
    request = shape_request(sim.shapes, sim.jobs[job]["shape"])
    for part in range(request.parts):
        add(passes.releases, sim.state[job]["until"], sim.held[sim.jobs[job]["offset"] + part], request, job)


_decide: Decide[Any] = cast(Any, None)  # is filled in


def _run(sim: Sim, log: EventLog, passes: Passes, state: Any) -> int:
    """Run the replay; compiled by `looped` once for each `_decide`."""
    while True:
        code = next_decision(sim, log, passes)
        if code == DECIDE:
            code = _decide(sim, log, passes, state)
        if code != DECIDE:
            return code
