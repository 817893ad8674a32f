"""The RLTune agent's history of jobs, and the features of each job: one implementation, live and simulated.

Jobs of one user (of one virtual cluster if users are unknown) with the same request are one *kind*; those of a kind
submitted soon after each other are one *burst* (`groups.bursts_of`). How long a job is expected to run comes from the
estimator of all policies (`gpusched.estimation`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.estimation.groups import bursts_of
from gpusched.sched.state import Floats, Ints, Records

Reals = npt.NDArray[np.float32]

DAY_S = 86400.0
_LEAST_S = 1e-3  # of an estimate, for its logarithm

_I8, _F8 = np.int64, np.float64
# submit: seconds, on the clock of now. clock: seconds of the day (UTC) then. limit: log of seconds, NaN: none.
# started: of the present run; NaN: not running. had: seconds of earlier runs. gpus: MIG slices by their share of a GPU;
# share: of each of them (1: whole GPUs).
FACTS = np.dtype(
    [(n, _F8) for n in ("submit", "gpus", "cores", "memory", "limit", "started", "had", "clock", "share")]
    + [(n, _I8) for n in ("user", "kind", "burst", "queue")]
)
# of a burst or user: running jobs, the sum of their starts (minus seconds of earlier runs), and GPUs they hold.
RUNNING = np.dtype([(n, _F8) for n in ("runs", "starts", "held")])

FEATURES = (
    "gpus", "cores", "memory", "limit", "limited", "waited", "hour_sin", "hour_cos", "user_share",
    "burst_waiting", "burst_runs", "burst_age", "burst_ahead", "queued", "free", "idle_nodes", "allowed_free", "fits",
    "estimate",
)  # fmt: skip
(
    GPUS, CORES, MEMORY, LIMIT, LIMITED, WAITED, HOUR_SIN, HOUR_COS, USER_SHARE,
    BURST_WAITING, BURST_RUNS, BURST_AGE, BURST_AHEAD, QUEUED, FREE, IDLE_NODES, ALLOWED_FREE, FITS,
    ESTIMATE,
) = range(len(FEATURES))  # fmt: skip


class JobHistory(NamedTuple):
    """What is known of jobs, and which of them run.

    Attributes:
        facts: ``FACTS[jobs]``. bursts, users: ``RUNNING[...]``.
        waiting: ``int64[bursts]``: waiting jobs of a burst counted so far in this decision.
    """

    facts: Records
    bursts: Records
    users: Records
    waiting: Ints


class QueueObservation(NamedTuple):
    """The state common to a decision's jobs; shares are of all GPUs or nodes of the partition."""

    now: float
    free: float
    idle_nodes: float
    queued: float
    gpus: float


class BurstPlace(NamedTuple):
    """A waiting job's place in its burst: waiting jobs of the burst before it, and in all."""

    ahead: int
    waiting: int


class RequestShape(NamedTuple):
    """The state common to jobs of one request."""

    allowed_free: float
    fits: bool


def group_jobs(submit: Floats, *same: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Group jobs in order of submission into kinds and bursts: ``int64[jobs]`` each, numbered from 0.

    ``same``: columns that are equal within a kind, ``[jobs]`` each.
    """
    if not len(submit):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    kind = np.unique(np.column_stack(same), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return kind, bursts_of(submit, kind)


def new_job_history(facts: Records) -> JobHistory:
    """Return a history before any run."""
    bursts, users = (np.zeros(int(facts[name].max(initial=-1)) + 1, RUNNING) for name in ("burst", "user"))
    return JobHistory(facts, bursts, users, np.zeros(len(bursts), np.int64))


@jit
def note_start(known: JobHistory, job: int, now: float) -> None:
    """Record that a job starts."""
    of = known.facts[job]
    of["started"] = now
    _count(known.bursts[of["burst"]], of, 1.0)
    _count(known.users[of["user"]], of, 1.0)


@jit
def note_stop(known: JobHistory, job: int, now: float) -> None:
    """Record that a job stops."""
    of = known.facts[job]
    _count(known.bursts[of["burst"]], of, -1.0)
    _count(known.users[of["user"]], of, -1.0)
    of["had"] += now - of["started"]
    of["started"] = np.nan


@jit
def _count(running: Any, of: Any, sign: float) -> None:
    running["runs"] += sign
    running["starts"] += sign * (of["started"] - of["had"])
    running["held"] += sign * of["gpus"]


@jit
def features(
    known: JobHistory, expected: Floats, obs: QueueObservation, job: int, burst: BurstPlace, shape: RequestShape,
    out: Floats,
) -> None:  # fmt: skip
    """Write the features of one job, ``float64[FEATURES]``, not yet scaled; ``expected``: see `ScoringState`."""
    of = known.facts[job]
    siblings, gpus = known.bursts[of["burst"]], max(of["gpus"], 1.0)
    out[GPUS] = np.log2(of["gpus"] + 1.0)
    out[CORES] = np.log2(max(of["cores"], 0.0) / gpus + 1.0)
    out[MEMORY] = np.log2(max(of["memory"], 0.0) / gpus / 1024.0 + 1.0)
    out[LIMITED] = 0.0 if np.isnan(of["limit"]) else 1.0
    out[LIMIT] = 0.0 if np.isnan(of["limit"]) else of["limit"]
    out[WAITED] = np.log(max(obs.now - of["submit"], 0.0) + 1.0)
    angle = 2.0 * np.pi * of["clock"] / DAY_S
    out[HOUR_SIN], out[HOUR_COS] = np.sin(angle), np.cos(angle)
    out[USER_SHARE] = known.users[of["user"]]["held"] / (obs.gpus * of["share"])
    out[BURST_WAITING] = np.log(burst.waiting)
    out[BURST_RUNS] = np.log(siblings["runs"] + 1.0)
    age = 0.0
    if siblings["runs"] > 0:
        age = np.log(max(obs.now - siblings["starts"] / siblings["runs"], 0.0) + 1.0)
    out[BURST_AGE] = age
    out[BURST_AHEAD] = np.log(burst.ahead + 1.0)
    out[QUEUED] = np.log(obs.queued + 1.0)
    out[FREE] = obs.free
    out[IDLE_NODES] = obs.idle_nodes
    out[ALLOWED_FREE] = shape.allowed_free
    out[FITS] = 1.0 if shape.fits else 0.0
    out[ESTIMATE] = np.log(max(expected[job], _LEAST_S)) if expected.size > 0 else 0.0
