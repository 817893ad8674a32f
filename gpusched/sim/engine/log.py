"""The event log of a replay."""

from __future__ import annotations

from gpusched.compiled import jit
from gpusched.sim.engine.state import CUT_PARTS, CUTS, LOGGED, EventLog, Sim


@jit
def log_event(sim: Sim, log: EventLog, kind: int, subject: int) -> None:
    """Append an event at the current time to the log."""
    event = log.events[sim.counter[LOGGED]]
    event["time"] = sim.clock[0]
    event["kind"] = kind
    event["subject"] = subject
    sim.counter[LOGGED] += 1


@jit
def log_run(sim: Sim, log: EventLog, job: int) -> None:
    """Append a running job's run until now to the interrupted ones."""
    counter, offset = sim.counter, sim.jobs[job]["offset"]
    for part in range(sim.shapes[sim.jobs[job]["shape"]]["parts"]):
        log.cut_nodes[counter[CUT_PARTS]] = sim.held[offset + part]
        counter[CUT_PARTS] += 1
    run = log.cuts[counter[CUTS]]
    run["job"] = job
    run["start"] = sim.state[job]["start"]
    run["end"] = sim.clock[0]
    run["stop"] = counter[CUT_PARTS]
    run["gpus"] = sim.shapes[sim.jobs[job]["shape"]]["gpus"]
    counter[CUTS] += 1
