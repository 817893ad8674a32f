"""RLTune with preemption: the rank of a job that waits or runs, by what it has had and how long such jobs go on.

Nothing is known of a job's run time but that it has not ended yet. What is remembered of a burst, a kind and a
partition is how many of their jobs came to the end of a level of run time (levels are as in
`rltune_book.level_of`), and how many ended in it: running jobs count for the levels they have passed. From these
follows how likely an end is within each further level, and from that Gittins' index (J. Gittins, J. Royal Statistical
Society B 41(2), 1979): the most completions per second that a further spell of running can bring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.models import Model
from gpusched.sched.agents.rltune_book import Records, level_of, next_level_s
from gpusched.sched.state import Floats, Ints

LEVELS = 20
CLASSES = 5  # of sizes: 1, 2, 3 to 4, 5 to 8 GPUs, and more
SLACK_S = 1e-3
_PRIOR = 20.0
Counts = npt.NDArray[np.float64]

PARTS = ("index", "gpus", "served", "stay", "step", "kind", "burst", "slowdown")
INDEX, GPUS, SERVED, STAY, STEP, KIND, BURST, SLOWDOWN = range(len(PARTS))


class Ranking(NamedTuple):
    """How jobs are ranked, the smallest first.

    Attributes:
        weights: ``float64[PARTS]``. A rank is the sum of index (times log2 of the seconds that a completion costs),
            gpus (times log2 of the job's GPUs) and served (times the thresholds that its GPU seconds have passed),
            less stay if it runs; divided by step and rounded down, so that ranks seldom change. kind, burst: how many
            jobs the wider group counts for in these; slowdown: how much more the end of a short job counts.
        thresholds: ``float64[n]``, GPU seconds, ascending.
        prior: ``float64[CLASSES, LEVELS]``: how likely an end is within a level, before anything has been seen.
    """

    weights: Floats
    thresholds: Floats
    prior: Counts


class History(NamedTuple):
    """What has been seen: ``float64[groups, LEVELS, 2]``: jobs that ended in a level, and that outran it.

    ``passed``: ``int64[jobs]``: the level up to which a job has been counted. A group of ``queues`` is a partition and
    a class of sizes.
    """

    queues: Counts
    kinds: Counts
    bursts: Counts
    passed: Ints


class Preempting(NamedTuple):
    """The weights, and what they may know."""

    ranking: Ranking
    knows: str


def prepare(model: Model) -> Preempting:
    """The arrays of the weights, checked.

    Raises:
        ValueError: An array is missing or of another shape.
    """
    wanted: dict[str, tuple[int, ...]] = {"weights": (len(PARTS),), "thresholds": (1,), "prior": (CLASSES, LEVELS)}
    for name, shape in wanted.items():
        found = model.arrays[name].shape if name in model.arrays else ()
        if found != shape and not (name == "thresholds" and len(found) == 1):
            raise ValueError(f"{name} is {found or 'missing'}, expected {shape}")
    weights, thresholds, prior = (np.ascontiguousarray(model.arrays[name], np.float64) for name in wanted)
    if weights[STEP] <= 0:
        raise ValueError(f"step is {weights[STEP]:g}, expected more than 0")
    knows = model.about.get("knows", "estimate")
    if knows == "nothing" and weights[INDEX] != 0:
        raise ValueError("it goes by what jobs ran, and says that it knows nothing of it")
    return Preempting(Ranking(weights, np.sort(thresholds), prior), knows)


def new_history(facts: Records, queues: int) -> History:
    """Nothing has been seen of ``facts: rltune_book.FACTS[jobs]`` yet."""

    def counts(groups: int) -> Counts:
        return np.zeros((groups, LEVELS, 2))

    kinds, bursts = (int(facts[name].max(initial=-1)) + 1 for name in ("kind", "burst"))
    return History(counts(queues * CLASSES), counts(kinds), counts(bursts), np.zeros(len(facts), np.int64))


@jit
def class_of(gpus: float) -> int:
    """Which class of sizes."""
    return int(min(np.ceil(np.log2(max(gpus, 1.0))), CLASSES - 1.0))


@jit
def reached(had_s: float) -> int:
    """The level that a job is in which has run for so long."""
    return int(min(level_of(had_s + SLACK_S), LEVELS - 1.0))


@jit
def note_passed(history: History, facts: Records, job: int, had_s: float, over: bool) -> None:
    """The job has run for so long by now; ``over``: it has ended."""
    of, level = facts[job], reached(had_s)
    queue = of["queue"] * CLASSES + class_of(of["gpus"])
    for counts, at in ((history.queues, queue), (history.kinds, of["kind"]), (history.bursts, of["burst"])):
        for below in range(history.passed[job], level):
            counts[at, below, 1] += 1
        if over:
            counts[at, level, 0] += 1
    history.passed[job] = max(level, history.passed[job])


@jit
def cost_log2_s(history: History, ranking: Ranking, facts: Records, job: int, had_s: float) -> float:
    """log2 of the seconds of running that a completion costs (-log2 of the index) after ``had_s`` of running."""
    of, level, weights = facts[job], reached(had_s), ranking.weights
    size = class_of(of["gpus"])
    queue, kind, burst = (
        history.queues[of["queue"] * CLASSES + size], history.kinds[of["kind"]], history.bursts[of["burst"]]
    )  # fmt: skip
    alive, gain, cost, best = 1.0, 0.0, 0.0, 1e-12
    first, last = 7.5 * 2.0**level if level > 0 else 0.0, 15.0 * 2.0**level
    for at in range(level, LEVELS):
        ends = ranking.prior[size, at]
        ends = (_PRIOR * ends + queue[at, 0]) / (_PRIOR + queue[at, 0] + queue[at, 1])
        ends = (weights[KIND] * ends + kind[at, 0]) / (weights[KIND] + kind[at, 0] + kind[at, 1])
        ends = (weights[BURST] * ends + burst[at, 0]) / (weights[BURST] + burst[at, 0] + burst[at, 1])
        gain += alive * ends * ((first + 15.0) ** -weights[SLOWDOWN] if weights[SLOWDOWN] > 0.0 else 1.0)
        cost += alive * (1.0 - 0.5 * ends) * (last - first)
        alive *= 1.0 - ends
        first, last = last, 2.0 * last
        best = max(best, gain / cost)
    return float(-np.log2(best))


@jit
def rank_of(history: History, ranking: Ranking, facts: Records, job: int, had_s: float, runs: bool) -> float:
    """The job's rank now; smaller goes first."""
    weights, gpus = ranking.weights, facts[job]["gpus"]
    rank = weights[GPUS] * np.log2(max(gpus, 1.0)) - (weights[STAY] if runs else 0.0)
    if weights[INDEX] != 0.0:
        rank += weights[INDEX] * cost_log2_s(history, ranking, facts, job, had_s)
    if weights[SERVED] != 0.0:
        rank += weights[SERVED] * np.sum(ranking.thresholds <= gpus * had_s + SLACK_S)
    return float(np.floor(rank / weights[STEP]))


@jit
def changes_after_s(ranking: Ranking, gpus: float, had_s: float) -> float:
    """Seconds of running after which a running job's rank may be another; infinite: none."""
    soonest = np.inf
    if ranking.weights[INDEX] != 0.0 and reached(had_s) < LEVELS - 1:
        soonest = next_level_s(had_s + SLACK_S) - had_s
    if ranking.weights[SERVED] != 0.0 and gpus > 0:
        for threshold in ranking.thresholds:
            if threshold > gpus * had_s + SLACK_S:
                soonest = min(soonest, (threshold - gpus * had_s) / gpus)
                break
    return float(soonest)
