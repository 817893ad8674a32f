"""Pairs in replays: two jobs take the same GPUs where nothing else is free, by the live pass (`kernel.beside`).

As its own jobs do live, or, of equally many GPUs, where both get more done than by taking turns
(`sim.sharing.pairing_costs`).
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.sched.kernel.beside import MATE, pairings_of, pass_beside, wait_for_room
from gpusched.sched.sorting import ascending
from gpusched.sched.state import Floats, Ints, PassOutcome, Releases
from gpusched.sim.engine.log import log_event
from gpusched.sim.engine.pace import shared_gpu
from gpusched.sim.engine.queue import restart_cost, state_of
from gpusched.sim.engine.state import EventLog, Pace, Paired, Passes, Sim
from gpusched.sim.engine.step import start_job
from gpusched.sim.result import PAIRED


@jit
def note_unreached(pairs: Paired | None, outcome: PassOutcome, ordered: Ints, code: int) -> None:
    """Set the code of jobs that the pass to come may not reach, by which `pair_up` goes."""
    if pairs is not None:
        for job in ordered:
            outcome.code[job] = code


@inlined
@jit
def pair_up(
    pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, outcome: PassOutcome, ordered: Ints,
    restart_s: Floats | None,
) -> None:  # fmt: skip
    """Start jobs beside running ones that ``outcome``'s pass could not place; ``restart_s`` as in `start_granted`."""
    if pairs is None or outcome.total[0] >= ordered.size:
        return
    pace = sim.pace
    assert pace is not None
    queue, shares = wait_for_room(outcome, ordered), False
    for job in queue:
        shares |= pairs.row[job] >= 0
    if not shares:
        return
    # Mates: running jobs that agreed to share, hold whole GPUs, and share with none yet.
    running = ascending(sim.ends.item[: sim.ends.size[0]])
    mates, count = np.zeros(running.size, MATE), 0
    for other in running:
        run, shape = pace.runs[other], sim.shapes[sim.jobs[other]["shape"]]
        if run["mate"] < 0 and pairs.row[other] >= 0 and shape["gpus"] > 0:
            new = mates[count]
            new["owner"], new["column"], new["first"] = other, pairs.row[other], sim.jobs[other]["offset"]
            new["parts"], new["most"] = shape["parts"], shape["gpus"]
            new["least"] = shape["gpus"] if pairs.equal else 1
            count += 1
    if count == 0:
        return
    pairings = pairings_of(mates[:count], sim.held, pairs.lost, pace.kind, pairs.row)
    before = outcome.total[0]
    pass_beside(state_of(sim, passes, outcome), queue, pairings)
    # The newcomer takes no GPUs (0): it runs on its mate's.
    for at in range(before, outcome.total[0]):
        job, mate = outcome.started[at], mates[pairings.beside[at - before]]["owner"]
        sim.jobs[job]["shape"] = outcome.shape[job]
        put_beside(pace, sim, log, job, mate)
        start_job(sim, log, job, outcome.nodes, outcome.offset[job], 0, restart_cost(restart_s, job))


@jit
def put_beside(pace: Pace, sim: Sim, log: EventLog, job: int, mate: int) -> None:
    """Record that a job that starts shares the GPUs of one that runs."""
    pace.runs[job]["mate"] = mate
    pace.runs[mate]["mate"] = job
    log_event(sim, log, PAIRED, mate)


@jit
def split_with(pace: Pace | None, job: int, starts: bool) -> int:
    """Return the job that shares GPUs with one that starts, or has stopped; they count half for each. -1: none.

    Ends are handled after both have parted (`pace.release`), so that it is noted here.
    """
    if pace is None:
        return -1
    runs = pace.runs
    if starts:
        mate = runs[job]["mate"]
        if mate < 0 or runs[job]["split"] == mate:  # of two that start at once it is noted with the first
            return -1
        runs[job]["split"], runs[mate]["split"] = mate, job
        return int(mate)
    mate = runs[job]["split"]
    if mate >= 0:
        runs[job]["split"] = runs[mate]["split"] = -1
    return int(mate)


@inlined
@jit
def release_pairs_once(pairs: Paired | None, sim: Sim, releases: Releases) -> None:
    """Release the GPUs of a pair when its later job is expected to end, also after a pair has ended."""
    if pairs is None or pairs.parted[0] == 0:
        return
    pace = sim.pace
    assert pace is not None
    pairs.parted[0] = 0
    for at in range(releases.used[0]):
        slot = releases.order[at]
        job = releases.owner[slot]
        mate = pace.runs[job]["mate"]
        # Of a pair, the job that ends first frees only what its mate does not hold, too.
        if shared_gpu(sim.resources.shared, job) < 0:
            gpus = sim.shapes[sim.jobs[job]["shape"]]["gpus"]
            if mate >= 0 and _ends_before(sim, job, mate):
                gpus = max(0, gpus - sim.shapes[sim.jobs[mate]["shape"]]["gpus"])
            releases.gpus[slot] = gpus


@jit
def _ends_before(sim: Sim, job: int, mate: int) -> bool:
    """Return whether a job is expected to end before its mate."""
    end = sim.state[job]["start"] + sim.jobs[job]["expected"]
    other = sim.state[mate]["start"] + sim.jobs[mate]["expected"]
    return bool(end < other or (end == other and job < mate))
