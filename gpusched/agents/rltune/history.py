"""The RLTune agent's history of jobs, and the features of each job: one implementation, live and simulated.

Jobs of one user (of one virtual cluster if users are unknown) with the same request are one *kind*; those of a kind
submitted soon after each other are one *burst* (`groups.bursts_of`). Jobs of a burst have similar run times (on Philly
the logarithms of consecutive ones correlate by 0.4 to 0.98), so a burst's ended and running jobs are the best
predictors for its waiting ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.estimation.groups import bursts_of
from gpusched.estimation.odds import SHORTEST_S, HazardRates, History, expected, level_of, new_history, note_passed
from gpusched.sched.state import Flags, Floats, Ints, Records

Reals = npt.NDArray[np.float32]

DAY_S = 86400.0
_MEMORY = 1.0 / 16  # minimum weight of the newest run in the mean
_UNKNOWN_LOG_S = 8.0  # log of 50 minutes: before any job has ended

_I8, _F8 = np.int64, np.float64
# submit: seconds, on the clock of now. clock: seconds of the day (UTC) then. limit: log of seconds, NaN: none.
# started: of the present run; NaN: not running. had: seconds of earlier runs. truth: log of the real run time, for the
# oracle only, else NaN. gpus: MIG slices by their share of a GPU; share: of each of them (1: whole GPUs).
FACTS = np.dtype(
    [(n, _F8) for n in ("submit", "gpus", "cores", "memory", "limit", "started", "had", "truth", "clock", "share")]
    + [(n, _I8) for n in ("user", "kind", "burst", "queue")]
)
# of a burst, kind or queue: ended runs, mean and mean square of the log of their run times; running jobs, the sum of
# their starts (minus seconds of earlier runs); GPUs they hold.
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
    """The history of jobs.

    Attributes:
        facts: ``FACTS[jobs]``. bursts, kinds, queues, users: ``PAST[...]``.
        ahead: ``int64[bursts + 1]``: waiting jobs of a burst counted so far in this decision.
        learns: ``uint8[1]``: whether run times of ended and running jobs are recorded.
        history: Counts for the odds of run times.
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
    """The state common to a decision's jobs; shares are of all GPUs or nodes of the partition."""

    now: float
    free: float
    idle_nodes: float
    queued: float
    gpus: float


class RequestShape(NamedTuple):
    """The state common to jobs of one request; ``drain_s``: seconds until it is expected to fit."""

    allowed_free: float
    fits: bool
    drain_s: float


def group_jobs(submit: Floats, *same: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Group jobs in order of submission into kinds and bursts: ``int64[jobs]`` each, numbered from 0.

    ``same``: columns that are equal within a kind, ``[jobs]`` each.
    """
    if not len(submit):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    kind = np.unique(np.column_stack(same), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return kind, bursts_of(submit, kind)


def new_job_history(facts: Records, learns: bool) -> JobHistory:
    """Return a history before any run; ``learns``: whether run times of ended jobs may be recorded."""

    def past(name: str) -> Records:
        return np.zeros(int(facts[name].max(initial=-1)) + 2, PAST)

    bursts = past("burst")
    return JobHistory(facts, bursts, past("kind"), past("queue"), past("user"), np.zeros(len(bursts), np.int64),
                np.array([learns], np.uint8), history_of(facts))  # fmt: skip


def history_of(facts: Records) -> History:
    """Return empty counts for these jobs."""
    return new_history(facts["gpus"], facts["queue"], facts["kind"], facts["burst"])


@jit
def note_start(known: JobHistory, job: int, now: float) -> None:
    """Record that a job starts."""
    of = known.facts[job]
    of["started"] = now
    for past, at in _pasts(known, job):
        past[at]["runs"] += 1
        past[at]["starts"] += now - of["had"]
        past[at]["held"] += of["gpus"]


@jit
def note_stop(known: JobHistory, job: int, now: float, over: bool) -> None:
    """Record that a job stops; ``over``: it has ended, so its run time is known, else it was preempted."""
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
    """Record how long a running job has run so far."""
    of = known.facts[job]
    if known.learns[0] and not np.isnan(of["started"]):
        note_passed(known.history, job, of["had"] + now - of["started"], False)


@jit
def note_ended(known: JobHistory, job: int, ran_s: float) -> None:
    """Record that a job has ended after ``ran_s`` seconds; the newest run has the largest weight."""
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
    """Return the log of the expected run time, from queue, kind and burst weighted by their ended jobs; capped.

    A limit is the cap, and the expectation without history.
    """
    of = known.facts[job]
    queue, kind, burst = known.queues[of["queue"]], known.kinds[of["kind"]], known.bursts[of["burst"]]
    estimate = _UNKNOWN_LOG_S if np.isnan(of["limit"]) else of["limit"]
    estimate = (3.0 * estimate + queue["ended"] * queue["mean"]) / (3.0 + queue["ended"])
    estimate = (3.0 * estimate + kind["ended"] * kind["mean"]) / (3.0 + kind["ended"])
    estimate = (1.0 * estimate + 2.0 * burst["ended"] * burst["mean"]) / (1.0 + 2.0 * burst["ended"])
    return float(estimate if np.isnan(of["limit"]) else min(estimate, of["limit"]))


@jit
def left_s(known: JobHistory, job: int, now: float) -> float:
    """Return the expected seconds left of a running job; once it has exceeded its estimate, as long again as so far."""
    of = known.facts[job]
    had = of["had"] + (0.0 if np.isnan(of["started"]) else now - of["started"])
    expected = np.exp(estimate_log_s(known, job)) - had
    return float(expected if expected > 0.0 else max(had, 1.0))


@jit
def features(
    known: JobHistory, odds: HazardRates, obs: QueueObservation, job: int, ahead: int, shape: RequestShape, out: Reals
) -> None:
    """Write the features of one job, ``float32[FEATURES]``, not yet scaled."""
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
    out[USER_SHARE] = known.users[of["user"]]["held"] / (obs.gpus * of["share"])
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
    estimate = estimate_log_s(known, job)
    out[ESTIMATE] = max(estimate, age) if burst["ended"] == 0 else estimate
    out[WORK], out[WORTH] = expected(known.history, odds, job, of["limit"])
    out[TRUTH] = 0.0 if np.isnan(of["truth"]) else of["truth"]
