"""Sizing rules: each writes the wished size of every claim, within the capacity.

The functions at the end are the components of the group ``sizings``; those of other packages are such functions, too.

First every job gets its least allowed size; rules differ in which job gets the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, TOTAL, Claims, Question
from gpusched.sched.state import Floats, Ints

GREEDY_GAIN, DRF, OPTIMUS, PROPORTIONAL, SIA = range(5)
RULES = {"greedy-gain": GREEDY_GAIN, "drf": DRF, "optimus": OPTIMUS, "proportional": PROPORTIONAL, "sia": SIA}

SizeChooser = Callable[[Question], Sequence[int] | Ints]
"""One partition's resizable jobs -> a size for each: see `Question` for what is valid."""

_PATIENCE = 0.25  # GPUs go to jobs with little left first, by the power of it that DL2's setting showed to be best
_FAIRNESS = -0.5  # Sia's p


@jit
def wish(rule: int, claims: Claims) -> None:
    """Write the wishes of one rule into ``claims.jobs["wished"]``."""
    if rule == GREEDY_GAIN:
        _greedy_gain(claims)
    elif rule == OPTIMUS:
        _optimus(claims)
    elif rule == SIA:
        _sia(claims)
    else:
        _fill(claims, rule == PROPORTIONAL)


@jit
def _at_least(claims: Claims) -> int:
    """Give every claim its least allowed size; return the GPUs left."""
    left = claims.number[CAPACITY]
    for j in range(claims.number[COUNT]):
        claims.jobs[j]["wished"] = claims.sizes[j, _next(claims, j, 0)]
        left -= claims.jobs[j]["wished"]
    return int(left)


@jit
def _next(claims: Claims, j: int, gpus: int) -> int:
    """Return the index of a claim's least allowed size above so many GPUs; -1: there is none."""
    for k in range(claims.jobs[j]["count"]):
        if claims.allowed[j, k] and claims.sizes[j, k] > gpus:
            return k
    return -1


@jit
def index_of(claims: Claims, j: int, gpus: int) -> int:
    """Return the index of a claim's size."""
    k = 0
    while claims.sizes[j, k] < gpus:
        k += 1
    return k


@jit
def _fill(claims: Claims, by_base: bool) -> None:
    """Fill progressively, a step to the claim with least so far; a claim whose next step does not fit is done.

    ``drf`` (Ghodsi et al., NSDI 2011, between jobs): least dominant share. ``proportional``: fewest GPUs for those that
    it was tuned for.
    """
    left, count = _at_least(claims), claims.number[COUNT]
    full = np.zeros(count, np.uint8)
    while True:
        best, least = -1, np.inf
        for j in range(count):
            job = claims.jobs[j]
            has = job["wished"] / job["base"] if by_base else job["wished"] * job["share"]
            if not full[j] and has < least:
                best, least = j, has
        if best < 0:
            return
        k = _next(claims, best, claims.jobs[best]["wished"])
        if k < 0 or claims.sizes[best, k] - claims.jobs[best]["wished"] > left:
            full[best] = 1
            continue
        left -= claims.sizes[best, k] - claims.jobs[best]["wished"]
        claims.jobs[best]["wished"] = claims.sizes[best, k]


@jit
def _optimus(claims: Claims) -> None:
    """Apply Optimus (Peng et al., EuroSys 2018): the step that saves most time per dominant share taken."""
    left, count = _at_least(claims), claims.number[COUNT]
    while True:
        best, to, most = -1, -1, 0.0
        for j in range(count):
            k = _next(claims, j, claims.jobs[j]["wished"])
            if k >= 0 and claims.sizes[j, k] - claims.jobs[j]["wished"] <= left:
                saves = _saving(claims, j, k)
                if saves > most:
                    best, to, most = j, k, saves
        if best < 0:
            return
        left -= claims.sizes[best, to] - claims.jobs[best]["wished"]
        claims.jobs[best]["wished"] = claims.sizes[best, to]


@jit
def _saving(claims: Claims, j: int, k: int) -> float:
    """Return the seconds that a step to size ``k`` saves, per dominant share that it takes."""
    job = claims.jobs[j]
    at = index_of(claims, j, job["wished"])
    now = index_of(claims, j, job["held"]) if job["held"] > 0 else 0
    work = job["left_s"] * claims.pace[j, now]
    saved = work / claims.pace[j, at] - work / claims.pace[j, k]
    return float(saved / ((claims.sizes[j, k] - job["wished"]) * job["share"]))


@jit
def _greedy_gain(claims: Claims) -> None:
    """Give free GPUs to pending jobs by gain; then shrink running jobs for what is short, or grow them."""
    jobs, count = claims.jobs, claims.number[COUNT]
    free = claims.number[FREE]
    left = max(free, 0)
    for j in range(count):
        jobs[j]["wished"] = jobs[j]["held"] if jobs[j]["held"] > 0 else claims.sizes[j, 0]
        left -= jobs[j]["wished"] if jobs[j]["held"] == 0 else 0
    # A job's best step stays it, until it is taken or no longer fits: jobs may have a thousand sizes each.
    step, gain = np.full(count, -1), np.zeros(count)
    for j in range(count):
        if jobs[j]["held"] == 0:
            step[j], gain[j] = _best_step(claims, j, left, False)
    while True:
        j = _most_gain(claims, step, gain, left, 0.0, False)
        if j < 0:
            break
        left -= claims.sizes[j, step[j]] - jobs[j]["wished"]
        jobs[j]["wished"] = claims.sizes[j, step[j]]
        step[j], gain[j] = _best_step(claims, j, left, False)
    room = free
    for j in range(count):
        room -= jobs[j]["wished"] if jobs[j]["held"] == 0 else 0
    if room < 0:
        _shrink(claims, -room)
    else:
        _grow(claims, room)


@jit
def _relative(claims: Claims, j: int, gpus: int) -> float:
    """Return the pace relative to the largest size."""
    if gpus == 0:
        return 0.0
    return float(claims.pace[j, index_of(claims, j, gpus)] / claims.pace[j, claims.jobs[j]["count"] - 1])


@jit
def _best_step(claims: Claims, j: int, room: int, larger: bool) -> tuple[int, float]:
    """Return a job's step (-1: none) that gains most relative pace per share of all GPUs taken, and that gain.

    More for jobs with little left. ``larger``: of equal ones the larger.
    """
    job, pace, best, most = claims.jobs[j], claims.pace[j], -1, -np.inf
    has, fastest, patience = _relative(claims, j, job["wished"]), pace[job["count"] - 1], _patience(job["left_s"])
    for k in range(job["count"]):
        more = claims.sizes[j, k] - job["wished"]
        if claims.allowed[j, k] and 0 < more <= room:
            gain = (pace[k] / fastest - has) / (more / claims.number[TOTAL]) / patience
            if gain > most or (larger and gain == most):
                best, most = k, gain
    return best, most


@jit
def _patience(left_s: float) -> float:
    return float(max(left_s, 1.0) ** _PATIENCE)


@jit
def _most_gain(claims: Claims, step: Ints, gain: Floats, room: int, above: float, larger: bool) -> int:
    """Return the job whose step gains most, and more than ``above``; -1: none. Steps that no longer fit are renewed."""
    best, most = -1, above
    for j in range(step.size):
        if step[j] >= 0 and claims.sizes[j, step[j]] - claims.jobs[j]["wished"] > room:
            step[j], gain[j] = _best_step(claims, j, room, larger)
        if step[j] >= 0 and gain[j] > most:
            best, most = j, gain[j]
    return best


@jit
def _shrink(claims: Claims, short: int) -> None:
    """Free so many GPUs where they are missed least, in one step where one job has enough."""
    jobs = claims.jobs
    while short > 0:
        j, size, enough, least = -1, 0, False, np.inf
        for i in range(claims.number[COUNT]):
            has, fastest = _relative(claims, i, jobs[i]["wished"]), claims.pace[i, jobs[i]["count"] - 1]
            for k in range(jobs[i]["count"] if jobs[i]["held"] > 0 else 0):
                gives = jobs[i]["wished"] - claims.sizes[i, k]
                if gives <= 0 or not claims.allowed[i, k] or (enough and gives < short):
                    continue
                lost = (has - claims.pace[i, k] / fastest) / jobs[i]["left_s"] ** _PATIENCE
                if lost < least or (gives >= short and not enough):
                    j, size, enough, least = i, claims.sizes[i, k], gives >= short, lost
        if j < 0:
            return
        short -= jobs[j]["wished"] - size
        jobs[j]["wished"] = size


@jit
def _grow(claims: Claims, room: int) -> None:
    """Grow the jobs that gain most into so many GPUs, each once."""
    jobs, count = claims.jobs, claims.number[COUNT]
    step, gain = np.full(count, -1), np.zeros(count)
    for j in range(count):
        if jobs[j]["held"] > 0 and jobs[j]["wished"] == jobs[j]["held"]:
            step[j], gain[j] = _best_step(claims, j, room, True)
    while True:
        j = _most_gain(claims, step, gain, room, -np.inf, True)
        if j < 0:
            return
        room -= claims.sizes[j, step[j]] - jobs[j]["held"]
        jobs[j]["wished"], step[j] = claims.sizes[j, step[j]], -1


@jit
def _sia(claims: Claims) -> None:
    """Apply Sia (Jayaram Subramanya et al., SOSP 2023): best p-mean of restart factor times normalised goodput.

    For p = -0.5 that is the least sum of ``(restart factor * goodput) ** p``: one size a job, so many GPUs in all, a
    multiple-choice knapsack, exact by dynamic programming over GPUs. Goodput is the pace relative to that of its least
    size; changing the size of one that runs costs it the factor ``(age - restarts * cost) / (age + cost)``.
    """
    count, capacity = claims.number[COUNT], claims.number[CAPACITY]
    cost = np.full(capacity + 1, 0.0)  # of the jobs so far, with so many GPUs at most
    choice = np.zeros((count, capacity + 1), np.int32)
    for j in range(count):
        value: Floats = np.full(claims.jobs[j]["count"], np.inf)
        for k in range(value.size):
            if claims.allowed[j, k]:
                value[k] = _sia_term(claims, j, k)
        after = np.full(capacity + 1, np.inf)
        for gpus in range(capacity + 1):
            for k in range(value.size):
                if claims.sizes[j, k] <= gpus and cost[gpus - claims.sizes[j, k]] + value[k] < after[gpus]:
                    after[gpus] = cost[gpus - claims.sizes[j, k]] + value[k]
                    choice[j, gpus] = k
        cost = after
    _trace_back(claims, choice, capacity)


@jit
def _sia_term(claims: Claims, j: int, k: int) -> float:
    """Return a job's term of Sia's sum at a size; less is better."""
    job = claims.jobs[j]
    factor = 1.0
    if job["held"] > 0 and claims.sizes[j, k] != job["held"] and job["age_s"] + job["cost_s"] > 0.0:
        factor = max(job["age_s"] - job["restarts"] * job["cost_s"], 0.0) / (job["age_s"] + job["cost_s"])
    return float(max(factor * claims.pace[j, k] / claims.pace[j, 0], 1e-9) ** _FAIRNESS)


@jit
def _trace_back(claims: Claims, choice: Ints, gpus: int) -> None:
    for j in range(claims.number[COUNT] - 1, -1, -1):
        claims.jobs[j]["wished"] = claims.sizes[j, choice[j, gpus]]
        gpus -= claims.jobs[j]["wished"]


def _wishes(rule: int, question: Question) -> Ints:
    wish(rule, question.claims)
    wished: Ints = question.claims.jobs["wished"]
    return wished


def greedy_gain(question: Question) -> Ints:
    """Give GPUs to the jobs that gain most speed by them, with preference for jobs with little work left."""
    return _wishes(GREEDY_GAIN, question)


def drf(question: Question) -> Ints:
    """Give each the same dominant share, as far as sizes allow: Ghodsi et al., NSDI 2011."""
    return _wishes(DRF, question)


def optimus(question: Question) -> Ints:
    """Take the step that saves most time per share, again and again: Peng et al., EuroSys 2018."""
    return _wishes(OPTIMUS, question)


def proportional(question: Question) -> Ints:
    """Give GPUs in proportion to those that jobs were tuned for."""
    return _wishes(PROPORTIONAL, question)


def sia(question: Question) -> Ints:
    """Choose the best p-mean of goodput: Jayaram Subramanya et al., SOSP 2023."""
    return _wishes(SIA, question)
