"""What the RLTune agent remembers of jobs, and the numbers it sees of each: one implementation, live and simulated.

Jobs of one user (of one virtual cluster where users are unknown) that ask for the same are of one *kind*; those of a
kind submitted within `BURST_GAP_S` of each other are of one *burst*. Jobs of a burst run for similar times (on Philly
the logarithms of consecutive ones correlate by 0.4 to 0.98), so what has ended of a burst, or still runs, tells most
about those of it that wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.estimation.odds import SHORTEST_S, HazardRates, History, expected, level_of, new_history, note_passed
from gpusched.sched.state import Flags, Floats, Ints, Records

Reals = npt.NDArray[np.float32]

BURST_GAP_S = 600.0
DAY_S = 86400.0
_MEMORY = 1.0 / 16  # of a kind's past: what the newest run counts in its mean at least
_UNKNOWN_LOG_S = 8.0  # log of 50 minutes: before anything has ended

_I8, _F8 = np.int64, np.float64
# submit: seconds, the clock of now. clock: seconds of the day (UTC) then. limit: log of seconds, NaN: none. started:
# of the present run; NaN: not running. had: seconds it ran before that. truth:
# log of the real run time, for the oracle alone, else NaN.
FACTS = np.dtype(
    [(n, _F8) for n in ("submit", "gpus", "cores", "memory", "limit", "started", "had", "truth", "clock")]
    + [(n, _I8) for n in ("user", "kind", "burst", "queue")]
)
# of a burst, kind or queue: ended runs, mean and mean square of the logarithm of their run times; jobs that run, the
# sum of their starts (less what they had before); GPUs they hold.
PAST = np.dtype([(n, _F8) for n in ("ended", "mean", "square", "runs", "starts", "held")])

FEATURES = (
    "gpus", "cores", "memory", "limit", "limited", "waited", "hour_sin", "hour_cos", "user_share",
    "kind_ended", "kind_mean", "kind_spread", "queue_mean", "burst_ended", "burst_mean", "burst_spread",
    "burst_runs", "burst_age", "burst_ahead", "queued", "free", "idle_nodes", "allowed_free", "fits",
    "attained", "running", "estimate", "truth", "drain", "work", "worth",
)  # fmt: skip
(
    GPUS, CORES, MEMORY, LIMIT, LIMITED, WAITED, HOUR_SIN, HOUR_COS, USER_SHARE,
    KIND_ENDED, KIND_MEAN, KIND_SPREAD, QUEUE_MEAN, BURST_ENDED, BURST_MEAN, BURST_SPREAD,
    BURST_RUNS, BURST_AGE, BURST_AHEAD, QUEUED, FREE, IDLE_NODES, ALLOWED_FREE, FITS,
    ATTAINED, RUNNING, ESTIMATE, TRUTH, DRAIN, WORK, WORTH,
) = range(len(FEATURES))  # fmt: skip


class JobHistory(NamedTuple):
    """What is remembered.

    Attributes:
        facts: ``FACTS[jobs]``. bursts, kinds, queues, users: ``PAST[...]``.
        ahead: ``int64[bursts + 1]``: how many of a burst's waiting jobs have been counted in this decision.
        learns: ``uint8[1]``: whether run times are remembered, of jobs that ended or run.
        history: What the odds of run times are counted in.
    """

    facts: Records
    bursts: Records
    kinds: Records
    queues: Records
    users: Records
    ahead: Ints
    learns: Flags
    history: History


class QueueObservation(NamedTuple):
    """What a decision's jobs have in common; shares are of all GPUs or nodes of the partition."""

    now: float
    free: float
    idle_nodes: float
    queued: float
    gpus: float


class RequestShape(NamedTuple):
    """What jobs of one request have in common; ``drain_s``: seconds until it is expected to fit."""

    allowed_free: float
    fits: bool
    drain_s: float


def grouped(submit: Floats, *same: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Kinds and bursts of jobs in order of submission: ``int64[jobs]`` each, numbered from 0.

    ``same``: columns that are equal within a kind, ``[jobs]`` each.
    """
    if not len(submit):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    kind = np.unique(np.column_stack(same), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    order = np.lexsort((np.arange(len(submit)), kind))
    new = np.ones(len(submit), np.bool_)
    new[1:] = (kind[order][1:] != kind[order][:-1]) | (np.diff(submit[order]) > BURST_GAP_S)
    burst = np.empty(len(submit), np.int64)
    burst[order] = np.cumsum(new) - 1
    return kind, burst


def known_of(facts: Records, learns: bool) -> JobHistory:
    """What is known before anything has run; ``learns``: whether it may remember how long ended jobs ran."""

    def past(name: str) -> Records:
        return np.zeros(int(facts[name].max(initial=-1)) + 2, PAST)

    bursts = past("burst")
    return JobHistory(facts, bursts, past("kind"), past("queue"), past("user"), np.zeros(len(bursts), np.int64),
                np.array([learns], np.uint8), history_of(facts))  # fmt: skip


def history_of(facts: Records) -> History:
    """Nothing has been seen of these jobs yet."""
    return new_history(facts["gpus"], facts["queue"], facts["kind"], facts["burst"])


@jit
def note_start(known: JobHistory, job: int, now: float) -> None:
    """The job runs from now on."""
    of = known.facts[job]
    of["started"] = now
    for past, at in _pasts(known, job):
        past[at]["runs"] += 1
        past[at]["starts"] += now - of["had"]
        past[at]["held"] += of["gpus"]


@jit
def note_stop(known: JobHistory, job: int, now: float, over: bool) -> None:
    """The job runs no longer; ``over``: it has ended, so that its run time is known, else it was preempted."""
    of = known.facts[job]
    ran = of["had"] + now - of["started"]
    for past, at in _pasts(known, job):
        past[at]["runs"] -= 1
        past[at]["starts"] -= of["started"] - of["had"]
        past[at]["held"] -= of["gpus"]
    of["started"] = np.nan
    of["had"] = ran
    if over and known.learns[0]:
        note_ended(known, job, ran)


@jit
def note_running(known: JobHistory, job: int, now: float) -> None:
    """The job has run until now: what it has outlived is remembered."""
    of = known.facts[job]
    if known.learns[0] and not np.isnan(of["started"]):
        note_passed(known.history, job, of["had"] + now - of["started"], False)


@jit
def note_ended(known: JobHistory, job: int, ran_s: float) -> None:
    """The job has ended after ``ran_s`` seconds; the newest counts most, by a sixteenth at least."""
    note_passed(known.history, job, ran_s, True)
    log_s = np.log(max(ran_s, SHORTEST_S))
    for past, at in _pasts(known, job):
        past[at]["ended"] += 1
        newest = max(1.0 / past[at]["ended"], _MEMORY)
        past[at]["mean"] += newest * (log_s - past[at]["mean"])
        past[at]["square"] += newest * (log_s * log_s - past[at]["square"])


@jit
def _pasts(known: JobHistory, job: int) -> tuple[tuple[Records, int], ...]:
    of = known.facts[job]
    return (
        (known.bursts, of["burst"]), (known.kinds, of["kind"]), (known.queues, of["queue"]), (known.users, of["user"])
    )  # fmt: skip


@jit
def _spread(past: Records, at: int) -> float:
    return float(np.sqrt(max(0.0, past[at]["square"] - past[at]["mean"] ** 2)))


@jit
def estimate_log_s(known: JobHistory, job: int) -> float:
    """The logarithm of the run time to expect, from queue, kind and burst, each weighing what it has seen; capped.

    Where there is a limit it is the cap, and what is expected without history.
    """
    of = known.facts[job]
    queue, kind, burst = known.queues[of["queue"]], known.kinds[of["kind"]], known.bursts[of["burst"]]
    found = _UNKNOWN_LOG_S if np.isnan(of["limit"]) else of["limit"]
    found = (3.0 * found + queue["ended"] * queue["mean"]) / (3.0 + queue["ended"])
    found = (3.0 * found + kind["ended"] * kind["mean"]) / (3.0 + kind["ended"])
    found = (1.0 * found + 2.0 * burst["ended"] * burst["mean"]) / (1.0 + 2.0 * burst["ended"])
    return float(found if np.isnan(of["limit"]) else min(found, of["limit"]))


@jit
def left_s(known: JobHistory, job: int, now: float) -> float:
    """Seconds that a running job will go on: what is expected of it, or, once it has outrun that, as long again."""
    of = known.facts[job]
    had = of["had"] + (0.0 if np.isnan(of["started"]) else now - of["started"])
    expected = np.exp(estimate_log_s(known, job)) - had
    return float(expected if expected > 0.0 else max(had, 1.0))


@jit
def features(
    known: JobHistory, odds: HazardRates, obs: QueueObservation, job: int, ahead: int, shape: RequestShape, out: Reals
) -> None:
    """What the network sees of one job, ``float32[FEATURES]``, not yet scaled."""
    of = known.facts[job]
    burst, kind, queue = known.bursts[of["burst"]], known.kinds[of["kind"]], known.queues[of["queue"]]
    gpus = max(of["gpus"], 1.0)
    runs = not np.isnan(of["started"])
    out[GPUS] = np.log2(of["gpus"] + 1.0)
    out[CORES] = np.log2(max(of["cores"], 0.0) / gpus + 1.0)
    out[MEMORY] = np.log2(max(of["memory"], 0.0) / gpus / 1024.0 + 1.0)
    out[LIMITED] = 0.0 if np.isnan(of["limit"]) else 1.0
    out[LIMIT] = 0.0 if np.isnan(of["limit"]) else of["limit"]
    out[WAITED] = np.log(max(obs.now - of["submit"], 0.0) + 1.0)
    angle = 2.0 * np.pi * of["clock"] / DAY_S
    out[HOUR_SIN], out[HOUR_COS] = np.sin(angle), np.cos(angle)
    out[USER_SHARE] = known.users[of["user"]]["held"] / obs.gpus
    out[KIND_ENDED] = np.log(kind["ended"] + 1.0)
    out[KIND_MEAN] = kind["mean"] if kind["ended"] > 0 else _UNKNOWN_LOG_S
    out[KIND_SPREAD] = _spread(known.kinds, of["kind"])
    out[QUEUE_MEAN] = queue["mean"] if queue["ended"] > 0 else _UNKNOWN_LOG_S
    out[BURST_ENDED] = np.log(burst["ended"] + 1.0)
    out[BURST_MEAN] = burst["mean"] if burst["ended"] > 0 else out[KIND_MEAN]
    out[BURST_SPREAD] = _spread(known.bursts, of["burst"])
    out[BURST_RUNS] = np.log(burst["runs"] + 1.0)
    age = 0.0
    if burst["runs"] > 0:
        age = np.log(max(obs.now - burst["starts"] / burst["runs"], 0.0) + 1.0)
    out[BURST_AGE] = age
    out[BURST_AHEAD] = np.log(ahead + 1.0)
    out[QUEUED] = np.log(obs.queued + 1.0)
    out[FREE] = obs.free
    out[IDLE_NODES] = obs.idle_nodes
    out[ALLOWED_FREE] = shape.allowed_free
    out[FITS] = 1.0 if shape.fits else 0.0
    out[DRAIN] = np.log(max(shape.drain_s, 0.0) + 1.0)
    had = of["had"] + (obs.now - of["started"] if runs else 0.0)
    out[ATTAINED] = level_of(had)
    out[RUNNING] = 1.0 if runs else 0.0
    found = estimate_log_s(known, job)
    out[ESTIMATE] = max(found, age) if burst["ended"] == 0 else found
    out[WORK], out[WORTH] = expected(known.history, odds, job, of["limit"])
    out[TRUTH] = 0.0 if np.isnan(of["truth"]) else of["truth"]
