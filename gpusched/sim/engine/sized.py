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
from gpusched.sched.kernel.by_rule import Rule, pass_by_rule
from gpusched.sched.releases import drop_ended
from gpusched.sched.sizing.question import COUNT, Claims, Scene
from gpusched.sched.sizing.rules import wish
from gpusched.sched.sizing.settle import Rules, gather, settle, speed_at
from gpusched.sched.state import CONSERVATIVE, NONE, Floats, Ints, Outcome, Records
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.pace import work_left
from gpusched.sim.engine.queue import enter, leave_started, state_of
from gpusched.sim.engine.state import DECIDE, READY, Log, Passes, Sim, shape_request
from gpusched.sim.engine.step import begin, cut
from gpusched.sim.result import PREEMPTED

USUAL_LEFT_S = 3600.0  # of a job that has told nothing
LATEST = 8  # submissions by which is judged how long a size lasts
ASK, UNSOUND = -1, -2  # why a run stops, beside OVER and GROW
# positions in Sizer.at: rows of the scene in use, how many of these run; the partition that is next, stops so far at
# this round of all partitions, and whose wishes stand in the claims
ROWS, RUN, PARTITION, STOPS, ANSWER, AT = range(6)
NOBODYS, AGENTS, RULES = range(3)

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
        scene, claims, outcome: Room to work in; ``scene.menus`` and ``scene.told`` (paces at the sizes that jobs had)
            are of the whole replay.
        at: ``int64[AT]``: where the run stands: see above.
        asks: Whether an agent chooses.
        rule, place, backfill: Codes. min_run_s, gain: see `Resizing`.
        restart_s: ``float64[jobs]``: what a restart costs.
    """

    jobs: Records
    rows: Ints
    own: Floats
    stopped: Floats
    waiting: Ints
    size: Ints
    scene: Scene
    claims: Claims
    outcome: Outcome
    at: Ints
    asks: bool
    rule: int
    place: int
    backfill: int
    min_run_s: float
    gain: float
    restart_s: Floats


@jit
def run_sized(sim: Sim, log: Log, passes: Passes, of: Sizer) -> int:
    """To the end; every partition's sizes, and what starts, again where somebody was stopped.

    Returns:
        OVER; GROW: call it again with more room in ``log``; ASK: call it again with an agent's wishes in ``of.claims``,
        or with ``of.at[ANSWER]`` RULES where there are none; UNSOUND: its wishes were not, call it again.
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
        if at[ANSWER] == NOBODYS:
            _ask(sim, passes, of, at[PARTITION])
            at[ANSWER] = AGENTS if of.asks and of.claims.number[COUNT] > 0 else RULES
            if at[ANSWER] == AGENTS:
                return ASK
        if at[ANSWER] == RULES:
            wish(of.rule, of.claims)
        stops = _carry_out(sim, log, passes, of)
        if stops == UNSOUND:
            at[ANSWER] = RULES
            return UNSOUND
        at[STOPS] += stops
        at[PARTITION] += 1
        at[ANSWER] = NOBODYS


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
def _carry_out(sim: Sim, log: Log, passes: Passes, of: Sizer) -> int:
    """What of the wishes is done: starts first, then stops; how many stops there were, or UNSOUND."""
    scene = _scene_now(of)
    if not settle(scene, of.claims, sim.resources, passes.requests, passes.jobs.masks, passes.scratch):
        return UNSOUND
    if of.size[0] > 0:
        queue = _sized_queue(sim, passes, of, scene)
        of.outcome.total[:] = 0
        rule = Rule(of.place, passes.rng, of.backfill == CONSERVATIVE)
        pass_by_rule(state_of(sim, passes, of.outcome), queue, of.backfill, rule)
        _begin_started(sim, log, of)
    stops = 0
    for j in range(of.claims.number[COUNT]):
        claim = of.claims.jobs[j]
        if claim["held"] > 0 and claim["wished"] != claim["held"]:
            _stop(sim, log, passes, of, scene.rows[claim["row"]]["job"], claim["wished"])
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
    return Scene(whole.rows[: of.at[ROWS]], whole.parts, whole.unusable, whole.told, whole.menus)


@jit
def _fill(sim: Sim, passes: Passes, of: Sizer, partition: int, lo: int, hi: int) -> Rules:
    """The scene of now: resizable jobs that run, by number, and all that wait, what was stopped for a resize first."""
    now, count, parts = sim.clock[0], 0, 0
    soonest, times = np.inf, np.full(LATEST, np.inf)
    totals = _totals(passes, lo, hi)
    # the loops' own arrays: a compiled call pays for every array it is handed
    jobs, state, shapes, held, own_of = sim.jobs, sim.state, sim.shapes, sim.held, of.jobs
    rows, told, sizes, parts_of, stopped = (
        of.scene.rows,
        of.scene.told,
        of.scene.menus.sizes,
        of.scene.parts,
        of.stopped,
    )
    pace = sim.pace
    running = np.sort(sim.ends.item[: sim.ends.size[0]])
    for job in running:
        shape = shapes[jobs[job]["shape"]]
        if shape["queue"] != partition:
            continue
        own = own_of[job]
        ends = state[job]["due"] if own["tells"] else state[job]["start"] + own["limit"]
        soonest = min(soonest, ends)
        _among_latest(times, jobs[job]["submit"])
        if own["rigid"]:
            continue
        row, gpus, k = rows[count], shape["parts"] * shape["gpus"], 0
        while sizes[own["menu"], k] != gpus:
            k += 1
        if pace is not None and own["tells"]:
            told[job, k] = pace.runs[job]["rate"]
        _fill_both(row, own, job, now, jobs[job]["submit"], totals, of.restart_s[job])
        row["held"], row["left_s"] = gpus, max(1.0, ends - now)
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
    for resumed in (True, False):
        for i in range(of.size[0]):
            job = of.waiting[i]
            own = own_of[job]
            if shapes[jobs[job]["shape"]]["queue"] != partition or (own["resume"] > 0) != resumed:
                continue
            _among_latest(times, jobs[job]["submit"])
            _fill_both(rows[count], own, job, now, jobs[job]["submit"], totals, of.restart_s[job])
            rows[count]["resume"] = own["resume"]
            rows[count]["left_s"] = _left_waiting(told[job], sizes[own["menu"]], own, state[job]["left"])
            count += 1
    of.at[ROWS] = count
    known = np.sum(times < np.inf)
    horizon = (now - times[LATEST - known]) / known if known > 0 else USUAL_LEFT_S
    soon = soonest - now if soonest < np.inf else 0.0
    return Rules(soon, horizon, of.gain, of.backfill == NONE, lo, hi)


@jit
def _among_latest(times: Floats, submit: float) -> None:
    """Keeps the latest submissions, ascending behind those that are still infinite."""
    first = 0
    while first < times.size and times[first] == np.inf:
        first += 1
    if first == 0 and submit <= times[0]:
        return
    at = max(first - 1, 0)
    while at + 1 < times.size and times[at + 1] < submit:
        times[at] = times[at + 1]
        at += 1
    times[at] = submit


@jit
def _totals(passes: Passes, lo: int, hi: int) -> Floats:
    """GPUs, cores and MiB of the nodes that are available."""
    totals = np.zeros(3)
    for node in range(lo, hi):
        if passes.usable.gpus[node] >= 0:
            totals[0] += passes.usable.gpus[node]
            totals[1] += max(0, passes.usable.cores[node])
            totals[2] += max(0, passes.usable.memory[node])
    return totals


@jit
def _fill_both(row: Record, own: Record, job: int, now: float, submit: float, totals: Floats, restart_s: float) -> None:
    """What is the same of a row, whether the job runs or waits."""
    row["job"], row["menu"], row["rigid"], row["base"] = job, own["menu"], own["rigid"], own["base"]
    row["restarts"], row["cost_s"] = own["stops"], restart_s if own["stops"] > 0 else 0.0
    row["age_s"] = max(0.0, now - submit)
    row["held"] = row["may"] = row["resume"] = row["first"] = row["last"] = row["admitted"] = row["least"] = 0
    share = 1.0 / totals[0] if totals[0] > 0.0 else 0.0
    share = max(share, own["cores"] / totals[1]) if totals[1] > 0.0 else share
    row["share"] = max(share, own["memory"] / totals[2]) if totals[2] > 0.0 else share


@jit
def _left_waiting(told: Floats, sizes: Ints, own: Record, work: float) -> float:
    """Seconds that a job that waits has to go, by what it told; else by its limit, or the usual."""
    left = min(USUAL_LEFT_S, own["limit"])
    known = np.flatnonzero(~np.isnan(told))
    if known.size > 0 and not own["rigid"]:
        left = work / speed_at(sizes, told, known, sizes[0])
    return float(max(1.0, left))


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
    pace = sim.pace
    if pace is not None:
        pace.runs[job]["row"] = of.rows[own["kind"], k]
        pace.runs[job]["own"] = of.own[job, k]


@jit
def _begin_started(sim: Sim, log: Log, of: Sizer) -> None:
    """Starts in the engine's terms what the pass has decided."""
    for i in range(of.outcome.total[0]):
        job = of.outcome.started[i]
        request = shape_request(sim.shapes, sim.jobs[job]["shape"])
        for part in range(request.parts):
            sim.held[sim.jobs[job]["offset"] + part] = of.outcome.nodes[of.outcome.offset[job] + part]
        begin(sim, log, job, request, of.restart_s[job] if sim.state[job]["restarts"] > 0 else 0.0)
        of.jobs[job]["resume"] = 0
    if of.outcome.total[0] > 0:
        leave_started(sim, of.waiting, of.size)


@jit
def _stop(sim: Sim, log: Log, passes: Passes, of: Sizer, job: int, gpus: int) -> None:
    """Stops a job to go on with so many GPUs."""
    own = of.jobs[job]
    of.stopped[job, own["stops"] % of.stopped.shape[1]] = sim.clock[0]
    own["stops"] += 1
    own["resume"] = gpus
    drop_ended(passes.releases, sim.state[job]["start"] + sim.jobs[job]["expected"], job)
    cut(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, of.restart_s[job]))
    enter(sim, of.waiting, of.size, job)
