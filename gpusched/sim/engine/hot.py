"""Hot resizing in replays: ranks join and leave a job that goes on running, as `controller.hot` does live.

Like there, each change ends one run record and begins the next, and the job makes no step for as long as its program
needs to form its group again.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import give, take
from gpusched.sched.heaps import push, remove
from gpusched.sched.state import Ints
from gpusched.sim.engine.ledger import charge_limits, release_limits, set_gpus
from gpusched.sim.engine.log import log_event, log_run
from gpusched.sim.engine.pace import interrupt, release, schedule_end
from gpusched.sim.engine.state import ENDED, PARTS, EventLog, Ranks, Sim, shape_request
from gpusched.sim.result import RESIZED


@jit
def change_ranks(
    sim: Sim, log: EventLog, job: int, shape: int, row: int, speed: float, joins: Ints, limit_left_s: float,
    pause_s: float
) -> None:  # fmt: skip
    """Change a running job's number of ranks: further ones join on ``joins``, or the last ones leave.

    Its nodes must be available, and `NodeIndex` empty: jobs that change size have no indexed run.

    Args:
        sim: The replay.
        log: What happened in it.
        job: Which job.
        shape: Its request at the new size.
        row: Of its speeds; see `state.RUN`.
        speed: Its own, where it has no row.
        joins: ``int64[ranks that join]``: their nodes, on which they fit.
        limit_left_s: Seconds that it may still run by its time limit.
        pause_s: Seconds for which it makes no step.
    """
    pace, state, now, offset = sim.pace, sim.state[job], sim.clock[0], sim.jobs[job]["offset"]
    log_run(sim, log, job)
    log_event(sim, log, RESIZED, job)
    remove(sim.ends, job)
    interrupt(pace, sim, job, RESIZED)
    before = release(pace, sim, job, shape_request(sim.shapes, sim.jobs[job]["shape"]))
    release_limits(sim.ledger, job, state["start"], now)
    after = shape_request(sim.shapes, shape)
    for part in range(after.parts, before.parts):
        node = sim.held[offset + part]
        give(sim.resources, before, node)
        sim.node[node]["free"] += before.gpus
    for at in range(joins.size):
        sim.held[offset + before.parts + at] = joins[at]
        take(sim.resources, after, joins[at])
        sim.node[joins[at]]["free"] -= after.gpus
    sim.jobs[job]["shape"], state["start"] = shape, now
    sim.counter[PARTS] += after.parts - before.parts
    set_gpus(sim.ledger, job, after.parts * after.gpus, limit_left_s)
    charge_limits(sim.ledger, job)
    if pace is not None:
        pace.runs[job]["row"], pace.runs[job]["own"] = row, speed
    schedule_end(pace, sim, job, now + pause_s)
    push(sim.ends, state["due"], job)
    sim.dirty[sim.shapes[shape]["queue"]] = 1


@jit
def most_ranks(ranks: Ranks | None) -> int:
    """Return how many ranks a job can have that goes on without some of them; 0: none does."""
    return 0 if ranks is None else int(ranks.shape.shape[1])


@jit
def loses_rank(ranks: Ranks | None, sim: Sim, job: int, part: int) -> bool:
    """Return whether a job goes on without its rank ``part``: not without the first, nor below its least size."""
    if ranks is None:
        return False
    parts = sim.shapes[sim.jobs[job]["shape"]]["parts"]
    return bool(part > 0 and parts > ranks.fewest[job] > 0 and ranks.shape[job, parts - 2] >= 0)


@jit
def lose_rank(ranks: Ranks | None, sim: Sim, log: EventLog, job: int, part: int) -> None:
    """Go on without the rank ``part`` of a job; its work is kept, and its group is formed again."""
    if ranks is None:
        return
    parts, offset = sim.shapes[sim.jobs[job]["shape"]]["parts"], sim.jobs[job]["offset"]
    node, at = sim.held[offset + part], parts - 2
    for later in range(offset + part, offset + parts - 1):  # as the last one it leaves
        sim.held[later] = sim.held[later + 1]
    sim.held[offset + parts - 1] = node
    left_s = max(0.0, ranks.ends[job] - sim.clock[0])
    change_ranks(
        sim, log, job, ranks.shape[job, at], ranks.row[job, at], ranks.own[job, at], np.empty(0, np.int64), left_s,
        ranks.pause_s[job],
    )  # fmt: skip
    ranks.losses[job] += 1
    for i in range(sim.counter[ENDED]):  # noted once, so that what it gives back is noted anew
        if sim.ended[i] == job:
            return
    sim.ended[sim.counter[ENDED]] = job
    sim.counter[ENDED] += 1
