"""RLTune with preemption: the rank of a waiting or running job, by its attained service and the odds of its end.

Of a job's run time only its age is known. The history of its burst, kind and partition (`odds`) gives the probability
of an end within each further level, and these give Gittins' index (J. Gittins, J. Royal Statistical Society B 41(2),
1979): the maximal rate of completions over a further period of running.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.nets import check_shapes
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.estimation.odds import (
    CLASSES,
    LEVELS,
    SLACK_S,
    HazardRates,
    History,
    end_within,
    level_at,
    new_history,
    next_level_s,
    note_passed,
)
from gpusched.sched.state import Flags, Floats, Ints, Records

_PRIOR = 20.0  # as how many jobs the prior counts for a partition's odds

PARTS = ("index", "gpus", "served", "stay", "step", "kind", "burst", "slowdown")
INDEX, GPUS, SERVED, STAY, STEP, KIND, BURST, SLOWDOWN = range(len(PARTS))


class Ranking(NamedTuple):
    """The weights of ranks; the smallest rank goes first.

    Attributes:
        weights: ``float64[PARTS]``. A rank is the sum of index (times log2 of the seconds that a completion costs),
            gpus (times log2 of the job's GPUs) and served (times the thresholds that its GPU seconds have passed),
            minus stay if it runs; divided by step and rounded down, so that ranks seldom change. kind, burst: weight of
            the wider group in the odds, in jobs; slowdown: extra weight of the end of a short job.
        thresholds: ``float64[n]``, GPU seconds, ascending.
        odds: Prior odds of run times.
    """

    weights: Floats
    thresholds: Floats
    odds: HazardRates


class PreemptionModel(NamedTuple):
    """The weights, and the information on run times that they use."""

    ranking: Ranking
    knows: str

    def changes_after_s(self, gpus: float, had_s: float) -> float:
        """Return `changes_after_s` of this ranking."""
        return changes_after_s(self.ranking, gpus, had_s)


def prepare_ranks(model: TrainedModel) -> PreemptionModel:
    """Check the arrays of the weights and return them.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    thresholds_count = model.arrays["thresholds"].size if "thresholds" in model.arrays else 1
    shapes = {"weights": (len(PARTS),), "thresholds": (thresholds_count,), "prior": (CLASSES, LEVELS)}
    check_shapes(model.arrays, shapes)
    weights, thresholds, prior = (np.ascontiguousarray(model.arrays[name], np.float64) for name in shapes)
    if weights[STEP] <= 0:
        raise ValueError(f"step is {weights[STEP]:g}, expected more than 0")
    if model.knows == "nothing" and weights[INDEX] != 0:
        raise ValueError("it uses how long jobs ran, but declares that it knows nothing of it")
    few = np.array([_PRIOR, weights[KIND], weights[BURST]])
    if not np.all(few > 0):
        raise ValueError(f"kind and burst are {weights[KIND]:g} and {weights[BURST]:g}, expected more than 0")
    return PreemptionModel(Ranking(weights, np.sort(thresholds), HazardRates(prior, few)), model.knows)


def history_of(facts: Records) -> History:
    """Return empty counts for jobs with these facts, ``FACTS[jobs]``."""
    return new_history(facts["gpus"], facts["queue"], facts["kind"], facts["burst"])


@jit
def cost_log2_s(history: History, ranking: Ranking, job: int, had_s: float) -> float:
    """Return log2 of the seconds of running that a completion costs (-log2 of the index) after ``had_s`` of running."""
    level, weights = level_at(had_s), ranking.weights
    alive, gain, cost, best = 1.0, 0.0, 0.0, 1e-12
    first, last = 7.5 * 2.0**level if level > 0 else 0.0, 15.0 * 2.0**level
    for at in range(level, LEVELS):
        ends = end_within(history, ranking.odds, job, at)
        gain += alive * ends * ((first + 15.0) ** -weights[SLOWDOWN] if weights[SLOWDOWN] > 0.0 else 1.0)
        cost += alive * (1.0 - 0.5 * ends) * (last - first)
        alive *= 1.0 - ends
        first, last = last, 2.0 * last
        best = max(best, gain / cost)
    return float(-np.log2(best))


@jit
def rank_of(history: History, ranking: Ranking, facts: Records, job: int, had_s: float, runs: bool) -> float:
    """Return the job's present rank; smaller goes first."""
    weights, gpus = ranking.weights, facts[job]["gpus"]
    rank = weights[GPUS] * np.log2(max(gpus, 1.0)) - (weights[STAY] if runs else 0.0)
    if weights[INDEX] != 0.0:
        rank += weights[INDEX] * cost_log2_s(history, ranking, job, had_s)
    if weights[SERVED] != 0.0:
        rank += weights[SERVED] * np.sum(ranking.thresholds <= gpus * had_s + SLACK_S)
    return float(np.floor(rank / weights[STEP]))


@jit
def ranks_of(history: History, ranking: Ranking, facts: Records, jobs: Ints, had_s: Floats, runs: Flags) -> Floats:
    """Return every job's rank, ``float64[jobs]``, after recording the run times so far (``had_s``).

    ``jobs: int64[jobs]`` are rows of ``facts``; fastest in order of submission. ``runs``: whether a job runs.
    """
    ranks = np.empty(jobs.size)
    for i in range(jobs.size):
        note_passed(history, jobs[i], had_s[i], False)
    for i in range(jobs.size):
        if i > 0 and runs[i - 1] == runs[i] and _alike(facts, ranking, jobs[i - 1], had_s[i - 1], jobs[i], had_s[i]):
            ranks[i] = ranks[i - 1]
        else:
            ranks[i] = rank_of(history, ranking, facts, jobs[i], had_s[i], runs[i] != 0)
    return ranks


@jit
def _alike(facts: Records, ranking: Ranking, a: int, had_a: float, b: int, had_b: float) -> bool:
    """Return whether two jobs certainly have the same rank; long queues are mostly bursts."""
    return bool(
        facts[a]["burst"] == facts[b]["burst"] and ranking.weights[SERVED] == 0.0 and level_at(had_a) == level_at(had_b)
    )


@jit
def changes_after_s(ranking: Ranking, gpus: float, had_s: float) -> float:
    """Return the seconds of running after which a job's rank may change; infinite: never."""
    soonest = np.inf
    if ranking.weights[INDEX] != 0.0 and level_at(had_s) < LEVELS - 1:
        soonest = next_level_s(had_s + SLACK_S) - had_s
    if ranking.weights[SERVED] != 0.0 and gpus > 0:
        for threshold in ranking.thresholds:
            if threshold > gpus * had_s + SLACK_S:
                soonest = min(soonest, (threshold - gpus * had_s) / gpus)
                break
    return float(soonest)
