"""Replays of policies that give resizable jobs their GPUs: the passes of `gpusched.sched.sizing`, as live.

At every decision a `Scene` is filled from the engine's arrays, sizes are chosen, the queue is gone through by the live
pass, and who is to have another size is stopped; then once more, as they are to go on at once. A job tells its pace at
the sizes that it had, and when it will end; a restart costs ``restart_s``, of which one knows from the first stop on.
Stopping takes no time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.jobs import HOUR_S
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.releases import drop_ended
from gpusched.sched.sizing.question import COUNT, Claims, Scene
from gpusched.sched.sizing.rules import wish
from gpusched.sched.sizing.settle import SizingRules, gather, settle
from gpusched.sched.sorting import ascending
from gpusched.sched.state import NONE, Floats, Ints, PassOutcome, Records
from gpusched.sim.engine.ledger import SimLedger, charge_at, exceeds_at, plan_anew, set_gpus
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.pace import work_left
from gpusched.sim.engine.queue import begin_started, enter, leave_started, state_of
from gpusched.sim.engine.state import DECIDE, READY, EventLog, Passes, Sim
from gpusched.sim.engine.step import cut
from gpusched.sim.result import PREEMPTED

ASK, UNSOUND = -1, -2  # why a run stops, beside OVER and GROW
# positions in Sizer.at: rows of the scene in use, how many of these run; the partition that is next, stops so far at
# this round of all partitions, and whether an agent has been asked about it
ROWS, RUN, PARTITION, STOPS, ASKED, AT = range(6)

Record = Any  # one entry of a record array
_I8, _F8 = np.int64, np.float64
# menu: row of `Menus`; kind: row of `Sizer.rows`. rigid: one size. base: GPUs that it was submitted with; cores,
# memory: that it has for each. limit: seconds. resume: stopped to go on with so many GPUs. stops: how often. tells: its
# progress. cooldown_s: it is not resized before it has run so long.
OF_JOB = np.dtype(
    [(name, _I8) for name in ("menu", "kind", "rigid", "base", "resume", "stops", "tells")]
    + [(name, _F8) for name in ("cores", "memory", "limit", "cooldown_s")]
)


class Sizer(NamedTuple):
    """What a replay that resizes keeps.

    Attributes:
        jobs: ``OF_JOB[jobs]``. rows: ``int64[kinds, most]``: speeds at each size, row of `Pace.speed`.
        own: ``float64[jobs, most]``: speeds at each size of jobs without such a row.
        stopped: ``float64[jobs, per_hour]``: last stops.
        waiting, size: As of `generic.Queue`.
        scene, claims, outcome: Room to work in; ``scene.menus`` and ``scene.reported`` (paces at the sizes that jobs
            had) are of the whole replay.
        at: ``int64[AT]``: where the run stands: see above.
        asks: Whether an agent chooses.
        rule, place, backfill: Codes. min_run_s, gain: see `Resizing`.
        restart_s: ``float64[jobs]``: what a restart costs.
        ledger: What is left of limits, while sizes are looked at and stops are planned.
    """

    jobs: Records
    rows: Ints
    own: Floats
    stopped: Floats
    waiting: Ints
    size: Ints
    scene: Scene
    claims: Claims
    outcome: PassOutcome
    at: Ints
    asks: bool
    rule: int
    place: int
    backfill: int
    min_run_s: float
    gain: float
    restart_s: Floats
    ledger: SimLedger | None


@jit
def run_sized(sim: Sim, log: EventLog, passes: Passes, of: Sizer) -> int:
    """To the end; every partition's sizes, and what starts, again where somebody was stopped.

    Returns:
        OVER; GROW: call it again with more room in ``log``; ASK: call it again with sizes in ``of.claims``; UNSOUND:
        they are not allowed, call it again with others.
    """
    at = of.at
    while True:
        if at[PARTITION] == sim.dirty.size:
            if at[STOPS] == 0:
                code = next_decision(sim, log, passes)
                if code != DECIDE:
                    return code
                _arrive(sim, of)
            at[PARTITION] = at[STOPS] = 0
        if at[ASKED] == 0:
            _ask(sim, passes, of, at[PARTITION])
            if of.asks and of.claims.number[COUNT] > 0:
                at[ASKED] = 1
                return ASK
            wish(of.rule, of.claims)
        stops = _carry_out(sim, log, passes, of)
        if stops == UNSOUND:
            return UNSOUND
        at[STOPS] += stops
        at[PARTITION] += 1
        at[ASKED] = 0


@jit
def _arrive(sim: Sim, of: Sizer) -> None:
    """What came to wait at this instant."""
    for i in range(sim.counter[READY]):
        enter(sim, of.waiting, of.size, sim.ready[i])
    sim.dirty[:] = 0


@jit
def _ask(sim: Sim, passes: Passes, of: Sizer, partition: int) -> None:
    """One partition's scene, and the question in ``of.claims``."""
    lo, hi = _span(sim, partition)
    rules = _fill(sim, passes, of, partition, lo, hi)
    gather(_scene_now(of), rules, sim.resources, passes.usable, passes.jobs.feasibility, of.claims)


@jit
def _carry_out(sim: Sim, log: EventLog, passes: Passes, of: Sizer) -> int:
    """What of the wishes is done: starts first, then stops; how many stops there were, or UNSOUND."""
    scene = _scene_now(of)
    if not settle(scene, of.claims, sim.resources, passes.requests, passes.jobs.masks, passes.scratch):
        return UNSOUND
    if of.size[0] > 0:
        queue = _sized_queue(sim, passes, of, scene)
        of.outcome.total[:] = 0
        pass_by_rule(state_of(sim, passes, of.outcome), queue, of.backfill, PlacementRule(of.place, passes.rng))
        begin_started(sim, log, of.outcome, of.restart_s)
        for i in range(of.outcome.total[0]):
            of.jobs[of.outcome.started[i]]["resume"] = 0
        leave_started(sim, of.waiting, of.size)
    stops = 0
    plan_anew(of.ledger, sim.ledger)
    for j in range(of.claims.number[COUNT]):
        claim = of.claims.jobs[j]
        if claim["held"] > 0 and claim["wished"] != claim["held"]:
            job = scene.rows[claim["row"]]["job"]
            left_s = _left_of_limit(sim, of, job)
            if exceeds_at(of.ledger, job, claim["wished"], claim["held"], left_s):
                continue
            charge_at(of.ledger, job, claim["wished"], claim["held"], left_s)
            _stop(sim, log, passes, of, job, claim["wished"])
            stops += 1
    return stops


@jit
def _span(sim: Sim, partition: int) -> tuple[int, int]:
    """The partition's nodes."""
    lo, hi = sim.node.size, 0
    for node in range(sim.node.size):
        if sim.node[node]["queue"] == partition:
            lo, hi = min(lo, node), node + 1
    return lo, hi


@jit
def _scene_now(of: Sizer) -> Scene:
    """The rows that are in use."""
    whole = of.scene
    return Scene(whole.rows[: of.at[ROWS]], whole.parts, whole.unusable, whole.reported, whole.menus)


@jit
def _fill(sim: Sim, passes: Passes, of: Sizer, partition: int, lo: int, hi: int) -> SizingRules:
    """The scene of now: resizable jobs that run, by number, and all that wait, what was stopped for a resize first."""
    now, count, parts = sim.clock[0], 0, 0
    soonest, of_partition = np.inf, 0
    # the loops' own arrays: a compiled call pays for every array it is handed
    jobs, state, shapes, held, own_of = sim.jobs, sim.state, sim.shapes, sim.held, of.jobs
    rows, told, sizes, parts_of, stopped = (
        of.scene.rows,
        of.scene.reported,
        of.scene.menus.sizes,
        of.scene.parts,
        of.stopped,
    )
    pace = sim.pace
    running = ascending(sim.ends.item[: sim.ends.size[0]])
    submits = np.empty(running.size + of.size[0])
    for job in running:
        shape = shapes[jobs[job]["shape"]]
        if shape["queue"] != partition:
            continue
        own = own_of[job]
        ends = state[job]["due"] if own["tells"] else state[job]["start"] + own["limit"]
        soonest = min(soonest, ends)
        submits[of_partition] = jobs[job]["submit"]
        of_partition += 1
        if own["rigid"]:
            continue
        row, gpus, k = rows[count], shape["parts"] * shape["gpus"], 0
        while sizes[own["menu"], k] != gpus:
            k += 1
        if pace is not None and own["tells"]:
            told[job, k] = pace.runs[job]["rate"]
        _fill_both(row, own, job, jobs[job]["submit"], of.restart_s[job])
        _set_unusable(sim.ledger, sim, of, job, gpus)
        row["held"], row["left_s"] = gpus, ends - now
        begun, oldest = state[job]["start"], stopped[job, own["stops"] % stopped.shape[1]]
        row["may"] = now > begun and now >= begun + max(of.min_run_s, own["cooldown_s"]) and not now < oldest + HOUR_S
        row["first"], row["last"] = parts, parts + shape["parts"]
        for at in range(shape["parts"]):
            part = parts_of[parts]
            part["node"] = held[jobs[job]["offset"] + at]
            part["gpus"], part["cores"], part["memory"] = shape["gpus"], shape["cores"], shape["memory"]
            parts += 1
        count += 1
    of.at[RUN] = count
    plan_anew(of.ledger, sim.ledger)
    for resumed in (True, False):
        for i in range(of.size[0]):
            job = of.waiting[i]
            own = own_of[job]
            if shapes[jobs[job]["shape"]]["queue"] != partition or (own["resume"] > 0) != resumed:
                continue
            submits[of_partition] = jobs[job]["submit"]
            of_partition += 1
            if exceeds_at(of.ledger, job, sizes[own["menu"], 0], 0, 0.0):
                continue
            charge_at(of.ledger, job, sizes[own["menu"], 0], 0, 0.0)
            _set_unusable(sim.ledger, sim, of, job, 0)
            _fill_both(rows[count], own, job, jobs[job]["submit"], of.restart_s[job])
            rows[count]["resume"], rows[count]["left_s"] = own["resume"], own["limit"]
            rows[count]["work"] = state[job]["left"]
            count += 1
    of.at[ROWS] = count
    return SizingRules(now, soonest, submits[:of_partition], of.gain, of.backfill == NONE, lo, hi)


@jit
def _left_of_limit(sim: Sim, of: Sizer, job: int) -> float:
    """Return for how long a running job may hold its GPUs yet, by its limit; seconds."""
    return float(max(0.0, sim.state[job]["start"] + of.jobs[job]["limit"] - sim.clock[0]))


@jit
def _set_unusable(ledger: SimLedger | None, sim: Sim, of: Sizer, job: int, held: int) -> None:
    """Mark the sizes for which limits leave too little."""
    if ledger is None:
        return
    sizes, unusable = of.scene.menus.sizes[of.jobs[job]["menu"]], of.scene.unusable[job]
    left_s = _left_of_limit(sim, of, job) if held > 0 else 0.0
    for k in range(sizes.size):
        unusable[k] = sizes[k] >= 0 and exceeds_at(ledger, job, sizes[k], held, left_s)


@jit
def _fill_both(row: Record, own: Record, job: int, submit: float, restart_s: float) -> None:
    """What is the same of a row, whether the job runs or waits."""
    row["job"], row["menu"], row["rigid"], row["base"] = job, own["menu"], own["rigid"], own["base"]
    row["cores"], row["memory"], row["submit"] = own["cores"], own["memory"], submit
    row["restarts"], row["cost_s"] = own["stops"], restart_s if own["stops"] > 0 else 0.0
    row["held"] = row["may"] = row["resume"] = row["first"] = row["last"] = row["admitted"] = row["least"] = 0


@jit
def _sized_queue(sim: Sim, passes: Passes, of: Sizer, scene: Scene) -> Ints:
    """The queue in order, resizable jobs at the sizes that they would start with; without those that get none."""
    queue, count, claim = np.empty(scene.rows.size, np.int64), 0, of.at[RUN]
    for i in range(of.at[RUN], scene.rows.size):
        row = scene.rows[i]
        gpus = row["least"]
        if row["admitted"] and not row["rigid"]:
            gpus = of.claims.jobs[claim]["wished"]
            claim += 1
        if row["least"] == 0 or row["rigid"] or gpus > 0:
            queue[count] = row["job"]
            count += 1
        if gpus > 0 and not row["rigid"]:
            _set_size(sim, passes, of, row["job"], gpus)
    return queue[:count]


@jit
def _set_size(sim: Sim, passes: Passes, of: Sizer, job: int, gpus: int) -> None:
    """The job's request and speed with so many GPUs."""
    own, k = of.jobs[job], 0
    while of.scene.menus.sizes[own["menu"], k] != gpus:
        k += 1
    shape = of.scene.menus.shape[own["menu"], k]
    sim.jobs[job]["shape"] = shape
    passes.jobs.shape[job] = shape
    set_gpus(sim.ledger, job, gpus)
    pace = sim.pace
    if pace is not None:
        pace.runs[job]["row"] = of.rows[own["kind"], k]
        pace.runs[job]["own"] = of.own[job, k]


@jit
def _stop(sim: Sim, log: EventLog, passes: Passes, of: Sizer, job: int, gpus: int) -> None:
    """Stops a job to go on with so many GPUs."""
    own = of.jobs[job]
    of.stopped[job, own["stops"] % of.stopped.shape[1]] = sim.clock[0]
    own["stops"] += 1
    own["resume"] = gpus
    drop_ended(passes.releases, sim.state[job]["until"], job)
    cut(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, of.restart_s[job]))
    enter(sim, of.waiting, of.size, job)
