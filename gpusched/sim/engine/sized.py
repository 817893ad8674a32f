"""Replays of policies that give resizable jobs their GPUs: the passes of `gpusched.sched.sizing`, as live.

At every decision a `Scene` of each partition is filled from the engine's arrays, and sizes are chosen; then the live
pass goes through one queue after the other, and jobs that are to change size are stopped; then once more, as they
resume at once. Ranks of hot jobs join and leave instead (`engine.hot`). A job reports its speed at the sizes that it
had, and when it will end; a change costs ``cost_s``, known from the first one on. Stopping takes no time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.model.jobs import HOUR_S
from gpusched.sched.backfill import take
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.releases import add, drop_ended
from gpusched.sched.sizing.question import COUNT, Claims, Scene
from gpusched.sched.sizing.rules import wish
from gpusched.sched.sizing.settle import SizingRules, gather, joining, settle, trial_copy
from gpusched.sched.sorting import ascending
from gpusched.sched.state import NONE, PRIORITY, Flags, Floats, Ints, PassOutcome, Records, Resources
from gpusched.sim.engine.hot import change_ranks
from gpusched.sim.engine.ledger import SimLedger, charge_at, exceeds_at, reset_plan, set_gpus
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.pace import work_left
from gpusched.sim.engine.placing_walk import Walk, begin_round, place, request_now, set_layouts, set_wake
from gpusched.sim.engine.queue import enter, remove_running, start_granted, state_of
from gpusched.sim.engine.share import note_unreached, pair_up, release_pairs_once
from gpusched.sim.engine.state import DECIDE, READY, EventLog, Paired, Passes, Ranks, Sim, shape_request
from gpusched.sim.engine.step import stop_job
from gpusched.sim.result import PREEMPTED

ASK, UNSOUND, GRANT, MAP = -1, -2, -3, -4  # why a run stops, beside OVER and GROW
# positions in Sizer.at: the partition that is next, how far the decision is, stops at this one, parts in the scenes
PARTITION, STAGE, STOPS, PARTS, AT = range(5)
NEW, SIZED, SETTLED, QUEUES, PLACED, APPLIED = range(6)
ROWS, RUN, QUEUED, USED = range(4)  # positions in SizingSpace.used

Record = Any  # one entry of a record array
_I8, _F8 = np.int64, np.float64
# menu: row of `Menus`, the last of which is empty; kind: row of `Sizer.rows`. rigid: one size. size, base: GPUs that it
# had last, or was submitted with; always the latter. cores, memory: that it has for each of these. limit: seconds.
# resume: stopped to resume with so many GPUs. stops: how often it was resized. reports: it reports progress.
# cooldown_s: it is not resized before it has run so long. cost_s: of a change. rank_gpus, rank_shape: of hot jobs, as
# in `question.ROW`. begun: when it started last; a change of ranks is no start. changed: when it started or was resized
# last; a loss of ranks is neither.
OF_JOB = np.dtype(
    [(name, _I8) for name in ("menu", "kind", "rigid", "size", "base", "resume", "stops", "reports")]
    + [(name, _I8) for name in ("rank_gpus", "rank_shape")]
    + [(name, _F8) for name in ("cores", "memory", "limit", "cooldown_s", "cost_s", "begun", "changed")]
)


class SizingSpace(NamedTuple):
    """Work space of one partition, or those of all, one after the other (`space_of`).

    Attributes:
        scene, claims: ``scene.menus`` and ``scene.reported`` (speeds at the sizes that jobs had) are kept for the whole
            replay.
        queue: ``int64[jobs]``: the jobs in order.
        used: ``int64[USED]``: rows of the scene in use; how many of these run; the queue's length.
    """

    scene: Scene
    claims: Claims
    queue: Ints
    used: Ints


@jit
def space_of(of: SizingSpace, first: Ints, partition: int) -> SizingSpace:
    """Return one partition's part of all; see `Sizer.first`."""
    scene, claims, lo, hi = of.scene, of.claims, first[partition], first[partition + 1]
    return SizingSpace(
        Scene(scene.rows[lo:hi], scene.parts, scene.unusable, scene.reported, scene.menus),
        Claims(
            claims.jobs[lo:hi], claims.sizes[lo:hi], claims.shape[lo:hi], claims.allowed[lo:hi], claims.pace[lo:hi],
            claims.reported[lo:hi], claims.number[partition],
        ),
        of.queue[lo:hi], of.used[partition],
    )  # fmt: skip


class Sizer(NamedTuple):
    """State of a replay that resizes jobs.

    Attributes:
        jobs: ``OF_JOB[jobs]``. rows: ``int64[kinds, most]``: speeds at each size, row of `Pace.speed`.
        own: ``float64[jobs, most]``: speeds at each size of jobs without such a row.
        between: ``uint8[menus, most]``: sizes that a job only comes to by losing ranks.
        stopped: ``float64[jobs, per_hour]``: last stops.
        waiting, size: As in `generic.SimQueue`.
        space: Work space of all partitions. first: ``int64[partitions + 1]``: where that of each begins.
        at: ``int64[AT]``: the state of the run, see above.
        outcome: Which jobs start.
        asks: Whether an agent or another package's component chooses. in_turn: Whether an agent does: then, as live, a
            partition's jobs start and grow before the next one's sizes are chosen. maps: Whether a mapping places jobs.
        request: ``int64[jobs]``: row of the request that is a job's own, with the cores and MiB that it is granted
            when it starts; empty: these go with the GPUs.
        rule, place, backfill: Codes. min_run_s, gain: see `Resizing`.
        restart_s: ``float64[jobs]``: what a restart costs.
        ledger: What is left of limits while sizes are planned.
        walk: Its passes by placement costs; of its queue only the layouts count. None: places cost nothing.
    """

    jobs: Records
    rows: Ints
    own: Floats
    between: Flags
    stopped: Floats
    waiting: Ints
    size: Ints
    space: SizingSpace
    first: Ints
    outcome: PassOutcome
    at: Ints
    asks: bool
    in_turn: bool
    maps: bool
    request: Ints
    rule: int
    place: int
    backfill: int
    min_run_s: float
    gain: float
    restart_s: Floats
    ledger: SimLedger | None
    walk: Walk | None


@jit
def run_sized(sim: Sim, log: EventLog, passes: Passes, sizer: Sizer) -> int:
    """Replay to the end: choose every partition's sizes, then start jobs; repeat after each stop.

    Returns:
        OVER; GROW: call it again with a larger ``log``. Others are of the partition ``at[PARTITION]`` and its part of
        ``space``: ASK: call it again with sizes in ``claims``; UNSOUND: they are not allowed, call it again with
        others; GRANT: call it again with the requests of the jobs that are to start (``sizer.request``); MAP: call it
        again with the starts of ``queue`` in ``sizer.outcome``.
    """
    at = sizer.at
    while True:
        if at[PARTITION] == sim.dirty.size:
            if at[STAGE] == APPLIED and at[STOPS] == 0:
                set_wake(sizer.walk, sim)
                code = next_decision(sim, log, passes)
                if code != DECIDE:
                    return code
                _arrive(sim, sizer)
            if at[STAGE] == APPLIED:
                begin_round(sizer.walk, sim, passes)
                at[STAGE], at[PARTITION], at[PARTS] = NEW, 0, 0
            elif at[STAGE] == NEW and not sizer.in_turn:  # limits may cover partitions: sizes first, then all starts
                at[STAGE], at[PARTITION] = QUEUES, 0
            else:
                if not sizer.in_turn:
                    _complete(sim, log, passes, sizer, 0, sim.dirty.size)
                at[STOPS] = _resize(sim, log, passes, sizer)
                at[STAGE] = APPLIED
            continue
        own = space_of(sizer.space, sizer.first, at[PARTITION])
        if at[STAGE] == NEW:
            ask(sim, passes, sizer, own, at[PARTITION])
            at[STAGE] = SIZED
            if sizer.asks and own.claims.number[COUNT] > 0:
                return ASK
            wish(sizer.rule, own.claims)
        if at[STAGE] == SIZED:
            if not settle(
                _scene_now(own), own.claims, sim.resources, passes.requests, passes.jobs.masks, passes.scratch
            ):
                return UNSOUND
            at[STAGE] = SETTLED
            if sizer.request.size > 0 and sizer.size[0] > 0:
                return GRANT
        if at[STAGE] == QUEUES or (at[STAGE] == SETTLED and sizer.in_turn):
            at[STAGE] = PLACED
            if not place_queue(sim, passes, sizer, own):
                return MAP
        if at[STAGE] == PLACED and sizer.size[0] > 0:
            start_granted(sim, log, sizer.outcome, sizer.restart_s)
            _note_starts(sim, sizer)
        if sizer.in_turn:
            _complete(sim, log, passes, sizer, at[PARTITION], at[PARTITION] + 1)
        at[STAGE] = NEW if at[STAGE] == SETTLED or sizer.in_turn else QUEUES
        at[PARTITION] += 1


@jit
def _arrive(sim: Sim, sizer: Sizer) -> None:
    """Add the jobs that became ready at this instant."""
    for i in range(sim.counter[READY]):
        _enter(sim, sizer, sim.ready[i])
    sim.dirty[:] = 0


@jit
def _enter(sim: Sim, sizer: Sizer, job: int) -> None:
    """Add a job to the waiting ones."""
    shape = sim.shapes[sim.jobs[job]["shape"]]
    sizer.jobs[job]["size"] = shape["parts"] * shape["gpus"]
    enter(sim, sizer.waiting, sizer.size, job)


@jit
def ask(sim: Sim, passes: Passes, sizer: Sizer, own: SizingSpace, partition: int) -> None:
    """Fill one partition's scene, and the request to the agent in its claims."""
    lo, hi = _node_range(sim, partition)
    rules = _fill_scene(sim, passes, sizer, own, partition, lo, hi)
    gather(_scene_now(own), rules, sim.resources, passes.usable, passes.jobs.feasibility, own.claims)


@jit
def _complete(sim: Sim, log: EventLog, passes: Passes, sizer: Sizer, first: int, last: int) -> None:
    """After the starts in these partitions, start jobs beside others; then keep the growth that limits and nodes allow.

    Limits are charged for it until `_resize`.
    """
    _pair_up(sim.pairs, sim, log, passes, sizer, first, last)
    free = trial_copy(passes.scratch, sim.resources)  # no rank joins on what is released at this decision
    for partition in range(first, last):
        own = space_of(sizer.space, sizer.first, partition)
        scene = _scene_now(own)
        for j in range(own.claims.number[COUNT]):
            claim = own.claims.jobs[j]
            job, left_s = _change_of(sim, sizer, scene, claim)
            if job < 0:
                continue
            if exceeds_at(sim.ledger, job, claim["wished"], claim["held"], left_s) or not _join(
                sim, passes, sizer, scene, own.claims, j, free
            ):
                claim["wished"] = claim["held"]
                continue
            charge_at(sim.ledger, job, claim["wished"], claim["held"], left_s, 1)


@jit
def _change_of(sim: Sim, sizer: Sizer, scene: Scene, claim: Record) -> tuple[int, float]:
    """Return a running job that is to change size, and what is left of its limit; -1: it is none."""
    if claim["held"] == 0 or claim["wished"] == claim["held"]:
        return -1, 0.0
    job = scene.rows[claim["row"]]["job"]
    return job, left_of_limit(sim, sizer, job)


@jit
def _resize(sim: Sim, log: EventLog, passes: Passes, sizer: Sizer) -> int:
    """Stop the jobs that change size, and change the ranks of hot ones; return the number of both."""
    stops = 0
    for partition in range(sim.dirty.size):
        own = space_of(sizer.space, sizer.first, partition)
        scene = _scene_now(own)
        for j in range(own.claims.number[COUNT]):
            claim = own.claims.jobs[j]
            job, left_s = _change_of(sim, sizer, scene, claim)
            if job < 0:
                continue
            charge_at(sim.ledger, job, claim["wished"], claim["held"], left_s, -1)  # what it takes is charged below
            if sizer.jobs[job]["rank_gpus"] == 0:
                _stop(sim, log, passes, sizer, job, claim["wished"])
            else:
                _change_ranks(sim, log, passes, sizer, job, claim["wished"])
            stops += 1
    return stops


@jit
def _note_starts(sim: Sim, sizer: Sizer) -> None:
    """Record the jobs that the outcome has started."""
    for i in range(sizer.outcome.total[0]):
        own = sizer.jobs[sizer.outcome.started[i]]
        own["resume"], own["begun"], own["changed"] = 0, sim.clock[0], sim.clock[0]
        note_limit(sim.ranks, sizer.outcome.started[i], sim.clock[0] + own["limit"])
    remove_running(sim, sizer.waiting, sizer.size)


@inlined
@jit
def _pair_up(
    pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, sizer: Sizer, first: int, last: int
) -> None:  # fmt: skip
    """Start jobs that the passes left waiting beside others, before any is stopped."""
    if pairs is None:
        return
    for partition in range(first, last):
        own = space_of(sizer.space, sizer.first, partition)
        sizer.outcome.total[:] = 0
        pair_up(pairs, sim, log, passes, sizer.outcome, own.queue[: own.used[QUEUED]], sizer.restart_s)
        _note_starts(sim, sizer)


@jit
def place_queue(sim: Sim, passes: Passes, sizer: Sizer, own: SizingSpace) -> bool:
    """Decide which jobs of a partition's queue start where; False: that is for a mapping."""
    sizer.outcome.total[:] = own.used[QUEUED] = 0
    if sizer.size[0] > 0:
        own.used[QUEUED] = _set_queue(sim, passes, sizer, own)
        queue = own.queue[: own.used[QUEUED]]
        release_pairs_once(sim.pairs, sim, passes.releases)
        note_unreached(sim.pairs, sizer.outcome, queue, PRIORITY)
        if sizer.maps and queue.size > 0:
            return False
        _place(sizer.walk, sim, passes, sizer, queue)
    return True


@jit
def _place(walk: Walk | None, sim: Sim, passes: Passes, sizer: Sizer, queue: Ints) -> None:
    """Decide in ``sizer.outcome`` which of these jobs start where, each at the size that it has been given."""
    if walk is None:
        pass_by_rule(
            state_of(sim, passes, sizer.outcome), queue, sizer.backfill, PlacementRule(sizer.place, passes.rng)
        )
        return
    for job in queue:
        passes.jobs.shape[job] = request_now(sim, passes, walk, job)
    place(sim, passes, walk, queue, sizer.backfill)


@jit
def _node_range(sim: Sim, partition: int) -> tuple[int, int]:
    """Return the range of the partition's nodes."""
    lo, hi = sim.node.size, 0
    for node in range(sim.node.size):
        if sim.node[node]["queue"] == partition:
            lo, hi = min(lo, node), node + 1
    return lo, hi


@jit
def _scene_now(own: SizingSpace) -> Scene:
    """Return the scene with the rows in use only."""
    whole = own.scene
    return Scene(whole.rows[: own.used[ROWS]], whole.parts, whole.unusable, whole.reported, whole.menus)


@jit
def _fill_scene(
    sim: Sim, passes: Passes, sizer: Sizer, space: SizingSpace, partition: int, lo: int, hi: int
) -> SizingRules:  # fmt: skip
    """Fill the scene: running resizable jobs by number, then all waiting jobs, those stopped to resize first."""
    now, count, parts = sim.clock[0], 0, sizer.at[PARTS]
    soonest, of_partition = np.inf, 0
    # the loops' own arrays: a compiled call pays for every array argument
    jobs, state, shapes, held, own_of = sim.jobs, sim.state, sim.shapes, sim.held, sizer.jobs
    rows, reported, sizes, parts_of, stopped = (
        space.scene.rows,
        space.scene.reported,
        space.scene.menus.sizes,
        space.scene.parts,
        sizer.stopped,
    )
    pace = sim.pace
    running = ascending(sim.ends.item[: sim.ends.size[0]])
    submits = np.empty(running.size + sizer.size[0])
    for job in running:
        shape = shapes[jobs[job]["shape"]]
        if shape["queue"] != partition:
            continue
        own = own_of[job]
        ends = state[job]["due"] if own["reports"] else own["begun"] + own["limit"]
        soonest = min(soonest, ends)
        submits[of_partition] = jobs[job]["submit"]
        of_partition += 1
        # Rigid jobs get no row, but their ends and submissions count in the rules.
        if own["rigid"]:
            continue
        row, gpus, k = rows[count], shape["parts"] * shape["gpus"], 0
        while sizes[own["menu"], k] != gpus:
            k += 1
        for other in range(sizer.between.shape[1]):
            if sizer.between[own["menu"], other]:
                reported[job, other] = np.nan  # it has such a size only while it has it
        if pace is not None and own["reports"]:
            reported[job, k] = pace.runs[job]["rate"]
        _fill_common(row, own, job, jobs[job]["submit"])
        if _losses(sim.ranks, job) > 0:
            row["cost_s"] = own["cost_s"]
        _set_unusable(sim.ledger, sim, sizer, job, gpus)
        row["held"], row["left_s"] = gpus, ends - now
        begun, oldest = state[job]["start"], stopped[job, own["stops"] % stopped.shape[1]]
        row["may"] = now > begun and now >= own["changed"] + max(sizer.min_run_s, own["cooldown_s"])
        if own["rank_gpus"] > 0:
            row["may"] &= now >= begun + row["cost_s"]  # its group is formed
        row["may"] &= not now < oldest + HOUR_S
        row["first"], row["last"] = parts, parts + shape["parts"]
        for at in range(shape["parts"]):
            part = parts_of[parts]
            part["node"] = held[jobs[job]["offset"] + at]
            part["gpus"], part["cores"], part["memory"] = shape["gpus"], shape["cores"], shape["memory"]
            parts += 1
        count += 1
    space.used[RUN], sizer.at[PARTS] = count, parts
    # Waiting jobs count for limits at their first sizes, resumed jobs first; those beyond a limit get none here.
    reset_plan(sizer.ledger, sim.ledger)
    for resumed in (True, False):
        for i in range(sizer.size[0]):
            job = sizer.waiting[i]
            own = own_of[job]
            if shapes[jobs[job]["shape"]]["queue"] != partition or (own["resume"] > 0) != resumed:
                continue
            submits[of_partition] = jobs[job]["submit"]
            of_partition += 1
            _fill_common(rows[count], own, job, jobs[job]["submit"])
            if exceeds_at(sizer.ledger, job, sizes[own["menu"], 0], 0, 0.0):
                rows[count]["menu"] = sizes.shape[0] - 1
            else:
                charge_at(sizer.ledger, job, sizes[own["menu"], 0], 0, 0.0, 1)
                _set_unusable(sim.ledger, sim, sizer, job, 0)
            rows[count]["resume"], rows[count]["left_s"] = own["resume"], own["limit"]
            rows[count]["work"] = state[job]["left"]
            count += 1
    space.used[ROWS] = count
    return SizingRules(now, soonest, submits[:of_partition], sizer.gain, sizer.backfill == NONE, lo, hi)


@jit
def note_limit(ranks: Ranks | None, job: int, end: float) -> None:
    """Note when a job's time limit ends."""
    if ranks is not None:
        ranks.ends[job] = end


@jit
def _losses(ranks: Ranks | None, job: int) -> int:
    return 0 if ranks is None else int(ranks.losses[job])


@jit
def left_of_limit(sim: Sim, sizer: Sizer, job: int) -> float:
    """Return the seconds that a running job may still hold its GPUs by its time limit."""
    return float(max(0.0, sizer.jobs[job]["begun"] + sizer.jobs[job]["limit"] - sim.clock[0]))


@jit
def _set_unusable(ledger: SimLedger | None, sim: Sim, sizer: Sizer, job: int, held: int) -> None:
    """Mark the sizes for which limits leave too little."""
    if ledger is None:
        return
    scene = sizer.space.scene
    sizes, unusable = scene.menus.sizes[sizer.jobs[job]["menu"]], scene.unusable[job]
    left_s = left_of_limit(sim, sizer, job) if held > 0 else 0.0
    for k in range(sizes.size):
        unusable[k] = sizer.between[sizer.jobs[job]["menu"], k] or (
            sizes[k] >= 0 and exceeds_at(ledger, job, sizes[k], held, left_s)
        )


@jit
def _fill_common(row: Record, own: Record, job: int, submit: float) -> None:
    """Fill the fields of a row that running and waiting jobs share."""
    row["job"], row["menu"], row["rigid"], row["base"] = job, own["menu"], own["rigid"], own["base"]
    row["cores"], row["memory"], row["submit"] = own["cores"], own["memory"], submit
    row["restarts"], row["cost_s"] = own["stops"], own["cost_s"] if own["stops"] > 0 else 0.0
    row["rank_gpus"], row["rank_shape"] = own["rank_gpus"], own["rank_shape"]
    row["held"] = row["may"] = row["resume"] = row["first"] = row["last"] = row["admitted"] = row["least"] = 0


@jit
def _set_queue(sim: Sim, passes: Passes, sizer: Sizer, own: SizingSpace) -> int:
    """Set the queue in order, resizable jobs at their chosen sizes, without those that get none; return its length."""
    count, claim = 0, own.used[RUN]
    for i in range(own.used[RUN], own.used[ROWS]):
        row = own.scene.rows[i]
        gpus = row["least"]
        if row["admitted"] and not row["rigid"]:
            gpus = own.claims.jobs[claim]["wished"]
            claim += 1
        if row["least"] == 0 or row["rigid"] or gpus > 0:
            own.queue[count] = row["job"]
            count += 1
        if not row["rigid"] and (gpus > 0 or row["least"] == 0):
            set_size(sim, passes, sizer, row["job"], gpus if gpus > 0 else sizer.jobs[row["job"]]["size"])
    return count


@jit
def set_size(sim: Sim, passes: Passes, sizer: Sizer, job: int, gpus: int) -> None:
    """Set the job's request and speed for so many GPUs."""
    own, k = sizer.jobs[job], index_of_size(sizer, job, gpus)
    shape = sizer.space.scene.menus.shape[own["menu"], k]
    if sizer.request.size > 0:
        shape = sizer.request[job]
    sim.jobs[job]["shape"] = shape
    passes.jobs.shape[job] = shape
    set_gpus(sim.ledger, job, gpus, np.inf)
    set_layouts(sizer.walk, sim, passes, job, gpus, shape)
    pace = sim.pace
    if pace is not None:
        pace.runs[job]["row"] = sizer.rows[own["kind"], k]
        pace.runs[job]["own"] = sizer.own[job, k]


@jit
def index_of_size(sizer: Sizer, job: int, gpus: int) -> int:
    """Return the column of a size in the job's menu."""
    k = 0
    while sizer.space.scene.menus.sizes[sizer.jobs[job]["menu"], k] != gpus:
        k += 1
    return k


@jit
def _join(
    sim: Sim, passes: Passes, sizer: Sizer, scene: Scene, claims: Claims, j: int, free: Resources
) -> bool:  # fmt: skip
    """Take ``free`` nodes for the ranks that are to join a job, behind its own; return whether there are enough."""
    claim = claims.jobs[j]
    row = scene.rows[claim["row"]]
    if row["rank_gpus"] == 0 or claim["wished"] < claim["held"]:
        return True
    joins = joining(scene, claims, j, passes.requests, passes.jobs.masks, free, passes.scratch)
    begin = sim.jobs[row["job"]]["offset"] + claim["held"] // row["rank_gpus"]
    for at in range(joins.size):
        take(free, request_of(passes.requests, row["rank_shape"]), joins[at])
        sim.held[begin + at] = joins[at]
    return bool(joins.size > 0)


@jit
def _change_ranks(sim: Sim, log: EventLog, passes: Passes, sizer: Sizer, job: int, gpus: int) -> None:
    """Let ranks of a hot job join on the nodes behind its own (`_join`), or leave."""
    own, k, until = sizer.jobs[job], index_of_size(sizer, job, gpus), sim.state[job]["until"]
    drop_ended(passes.releases, until, job)
    shape, offset = sizer.space.scene.menus.shape[own["menu"], k], sim.jobs[job]["offset"]
    passes.jobs.shape[job] = shape
    request, parts = shape_request(sim.shapes, shape), sim.shapes[sim.jobs[job]["shape"]]["parts"]
    joins = sim.held[offset + parts : offset + max(parts, request.parts)].copy()
    left_s = left_of_limit(sim, sizer, job)
    change_ranks(
        sim, log, job, shape, sizer.rows[own["kind"], k], sizer.own[job, k], joins, left_s, own["cost_s"]
    )  # fmt: skip
    for part in range(request.parts):
        add(passes.releases, until, sim.held[offset + part], request, job)
    _note_change(sim, sizer, job)


@jit
def _note_change(sim: Sim, sizer: Sizer, job: int) -> None:
    """Count one more resize of a job."""
    own = sizer.jobs[job]
    sizer.stopped[job, own["stops"] % sizer.stopped.shape[1]] = own["changed"] = sim.clock[0]
    own["stops"] += 1


@jit
def _stop(sim: Sim, log: EventLog, passes: Passes, sizer: Sizer, job: int, gpus: int) -> None:
    """Stop a job, which will resume with so many GPUs."""
    _note_change(sim, sizer, job)
    sizer.jobs[job]["resume"] = gpus
    drop_ended(passes.releases, sim.state[job]["until"], job)
    stop_job(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, sizer.restart_s[job]))
    _enter(sim, sizer, job)
