"""What a replay's running jobs take of limits, and what has been used of those of GPU hours; as `queue.quotas` live.

A pass that starts a job charges `QueueJobs.room` (`sched.bounds`); here it comes back: at once when the job ends or is
stopped, GPU seconds that it used when they leave the seven days, hour by hour of the calendar. What runs outside the
trace takes and gives back when it did.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.limits import WEEK_S
from gpusched.sched import bounds
from gpusched.sched.state import (
    CONSERVATIVE,
    LIMIT,
    RESERVED,
    RESOURCES,
    SKIP,
    Floats,
    Ints,
    QueueJobs,
    Records,
    filled,
)
from gpusched.traces.trace import Trace

HOUR_S = 3600.0
HOURS = WEEK_S // 3600 + 1  # that the seven days before a time within an hour touch
# A run outside the trace begins, or is over and began then; ``row``: as if they came after the trace's jobs.
OTHER = np.dtype(
    [("time", np.float64), ("over", np.int64), ("row", np.int64), ("begin", np.float64), ("gpus", np.int64)]
)


class SimLedger(NamedTuple):
    """The limits of a replay.

    Attributes:
        account, room, links: The same arrays as in `QueueJobs`; after the jobs come the runs outside the trace.
        row: ``int64[bounds]``: row of ``used`` of a bound of GPU seconds, else -1.
        used: ``int64[rows, HOURS]``: GPU seconds of runs that are over, by hour of the calendar (modulo HOURS).
        hour: ``int64[1]``: the hour of now; ``used`` has nothing older than seven days before it began.
        kept: ``int64[3]``: sum of ``used``; whether limits have changed at this instant though no job ended; whether
            passes have charged any since then.
        epoch: ``float64[1]``: Unix seconds of time 0.
        limit: ``float64[jobs]``: time limits, at most seven days; seconds.
        scale: Into how many parts a GPU is counted here (`sched.accounts.gpu_scale`); sizes of jobs are in GPUs.
        others: ``OTHER[changes]``: what runs outside the trace, by time; ``passed[0]`` of them have been.
    """

    account: Ints
    room: Ints
    links: Records
    row: Ints
    used: Ints
    hour: Ints
    kept: Ints
    epoch: Floats
    limit: Floats
    scale: int = 1
    others: Records = np.zeros(0, OTHER)
    passed: Ints = np.zeros(1, np.int64)


def other_changes(trace: Trace, rows: Ints, scale: int) -> Records:
    """Return when these runs of `Trace.others` begin and end, ``OTHER[changes]`` by time, ends first.

    ``scale``: into how many parts a GPU is counted.
    """
    others = trace.others
    begin, over = others.begin[rows], np.repeat((1, 0), len(rows))
    changes = filled(
        OTHER, 2 * len(rows), time=np.append(others.end[rows], begin), over=over, row=len(trace) + np.tile(rows, 2),
        begin=np.tile(begin, 2), gpus=np.tile(np.round(scale * others.gpus[rows]), 2),
    )  # fmt: skip
    return changes[np.lexsort((-over, changes["time"]))]


def plan_copy(ledger: SimLedger | None) -> SimLedger | None:
    """Return a copy with its own ``room`` and accounts, for policies that plan before starts (`reset_plan`)."""
    if ledger is None:
        return None
    return ledger._replace(room=ledger.room.copy(), account=ledger.account.copy())


@jit
def reset_plan(plan: SimLedger | None, ledger: SimLedger | None) -> None:
    """Reset the plan's ``room`` to what is left now."""
    if plan is not None and ledger is not None:
        plan.room[:] = ledger.room


@jit
def bind_waiting(plan: SimLedger | None, ledger: SimLedger | None, job: int, waits: bool) -> None:
    """Apply limits to the job in the plan if it waits; running jobs are counted already."""
    if plan is not None and ledger is not None:
        plan.account[job, 0] = ledger.account[job, 0] if waits else -1


@jit
def jobs_planned(plan: SimLedger | None, jobs: QueueJobs) -> QueueJobs:
    """Return the jobs with the plan's accounts and ``room``."""
    if plan is None:
        return jobs
    return QueueJobs(jobs.shape, jobs.limit, plan.account, plan.room, jobs.feasibility, jobs.masks, jobs.links)


@jit
def exceeds_limit(ledger: SimLedger | None, job: int) -> bool:
    """Return whether a limit leaves too little for the job; for jobs that are started without `sched.kernel`."""
    if ledger is None:
        return False
    return bounds.exceeds(ledger.links, ledger.room, ledger.account, job)


@jit
def charge_limits(ledger: SimLedger | None, job: int) -> None:
    """Charge limits for a job that is started without `sched.kernel`."""
    if ledger is not None:
        bounds.charge(ledger.links, ledger.room, ledger.account, job)


@jit
def note_charged(ledger: SimLedger | None, job: int) -> None:
    """Have all partitions decide again at this instant: a job that held up others may now exceed a limit.

    Live the next cycle decides, some seconds later.
    """
    if ledger is not None and ledger.account[job, 0] >= 0:
        ledger.kept[2] = 1


@jit
def drop_idle_repeat(ledger: SimLedger | None, waiting: Ints, code: Ints, backfill: int) -> None:
    """Have none decide again if no job that holds up others by rule (`kernel.by_rule`) exceeds a limit now."""
    if ledger is None or ledger.kept[2] == 0:
        return
    ledger.kept[2] = 0
    if backfill == SKIP:  # no job holds up others
        return
    for job in waiting:
        holds_up = backfill == CONSERVATIVE or code[job] == RESOURCES or code[job] == RESERVED
        if holds_up and code[job] != LIMIT and exceeds_limit(ledger, job):
            ledger.kept[2] = 1
            return


@jit
def release_limits(ledger: SimLedger | None, job: int, begun: float, now: float) -> None:
    """Release what a job that ran from ``begun`` until ``now`` took of limits, except GPU seconds used."""
    if ledger is None:
        return
    account, room, links = ledger.account, ledger.room, ledger.links
    at = account[job, 0]
    while at >= 0:
        link = links[at]
        bound, unit = link["bound"], link["unit"]
        room[bound] += 1 if unit == 0 else account[job, unit]
        if ledger.row[bound] >= 0:
            room[bound] -= record_usage(ledger, ledger.row[bound], account[job, 1], begun, now)
        at = link["next"]


@jit
def record_usage(ledger: SimLedger, row: int, gpus: int, begin: float, end: float) -> int:
    """Record GPUs used from ``begin`` to ``end``; return their GPU seconds within the seven days."""
    epoch, first = ledger.epoch[0], ledger.hour[0] - HOURS + 1
    at = max(begin + epoch, first * HOUR_S)
    total, hour = 0, int(at // HOUR_S)
    seconds = 0.0  # rounded in all, not hour by hour
    while at < end + epoch:
        until = min((hour + 1) * HOUR_S, end + epoch)
        seconds += until - at
        more = int(np.round(gpus * seconds)) - total
        ledger.used[row, hour % HOURS] += more
        total += more
        at = until
        hour += 1
    ledger.kept[0] += total
    return total


@jit
def next_expiry(ledger: SimLedger | None, now: float, waits: bool) -> float:
    """Return when limits may change for waiting jobs though none of them ends; infinite: never."""
    if ledger is None or not waits:
        return np.inf
    if ledger.kept[2] != 0:
        return now
    over = (ledger.hour[0] + 1) * HOUR_S - ledger.epoch[0] if ledger.kept[0] > 0 else np.inf
    return float(min(over, ledger.others[ledger.passed[0]]["time"]) if ledger.passed[0] < ledger.others.size else over)


@jit
def expire_usage(ledger: SimLedger | None, now: float, dirty: Ints) -> None:
    """Advance the seven days, and what runs outside the trace, to now; all partitions decide, as limits cover them."""
    if ledger is None:
        return
    dirty[:] = 1
    hour, gone = int((now + ledger.epoch[0]) // HOUR_S), 0
    for new in range(max(ledger.hour[0], hour - HOURS) + 1, hour + 1):  # it takes the place of the hour HOURS before it
        for bound in range(ledger.row.size):
            row = ledger.row[bound]
            if row >= 0 and ledger.used[row, new % HOURS] > 0:
                gone += ledger.used[row, new % HOURS]
                ledger.room[bound] += ledger.used[row, new % HOURS]
                ledger.used[row, new % HOURS] = 0
    ledger.hour[0], ledger.kept[1] = max(hour, ledger.hour[0]), int(gone > 0 or ledger.kept[2] > 0)
    ledger.kept[0] -= gone
    ledger.kept[2] = 0
    while ledger.passed[0] < ledger.others.size and ledger.others[ledger.passed[0]]["time"] <= now:
        change = ledger.others[ledger.passed[0]]
        ledger.passed[0] += 1
        if change["over"] != 0:
            ledger.kept[1] = 1
            release_limits(ledger, change["row"], change["begin"], change["time"])
        else:
            charge_limits(ledger, change["row"])


@jit
def usage_expired(ledger: SimLedger | None) -> bool:
    """Return whether limits have changed at this instant, though no job may have ended."""
    return ledger is not None and ledger.kept[1] > 0


@jit
def set_gpus(ledger: SimLedger | None, job: int, gpus: int, left_s: float) -> None:
    """Set what a job would take with so many GPUs for ``left_s``, but no longer than its time limit."""
    if ledger is not None:
        parts = gpus * ledger.scale
        ledger.account[job, 1], ledger.account[job, 2] = parts, int(parts * min(left_s, ledger.limit[job]))


@jit
def exceeds_at(ledger: SimLedger | None, job: int, gpus: int, held: int, left_s: float) -> bool:
    """Return whether a limit leaves too little for so many GPUs, ``held`` of which it keeps for ``left_s`` more."""
    if ledger is None or 0 < held >= gpus:
        return False
    at = ledger.account[job, 0]
    while at >= 0:
        link = ledger.links[at]
        if _cost_at(ledger, link["unit"], job, gpus, held, left_s) > max(ledger.room[link["bound"]], 0):
            return True
        at = link["next"]
    return False


@jit
def charge_at(ledger: SimLedger | None, job: int, gpus: int, held: int, left_s: float, sign: int) -> None:
    """Charge limits for what `exceeds_at` checks (``sign`` 1), or release it (-1)."""
    if ledger is None or 0 < held >= gpus:
        return
    at = ledger.account[job, 0]
    while at >= 0:
        link = ledger.links[at]
        ledger.room[link["bound"]] -= sign * _cost_at(ledger, link["unit"], job, gpus, held, left_s)
        at = link["next"]


@jit
def _cost_at(ledger: SimLedger, unit: int, job: int, gpus: int, held: int, left_s: float) -> int:
    """Return what a waiting job takes (``held`` 0), or how much more a running one, counted as a job already, takes."""
    if unit == 0:
        return 0 if held > 0 else 1
    seconds = min(left_s, ledger.limit[job]) if held > 0 else ledger.limit[job]
    parts = (gpus - held) * ledger.scale
    return parts if unit == 1 else int(parts * seconds)
