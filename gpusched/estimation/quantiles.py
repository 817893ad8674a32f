"""Run times as distributions, compiled: from the ended and running jobs of a job's groups, the narrowest first.

A job belongs to groups (`groups`): its burst, its user's command, its user, its partition, all jobs. Each group counts
ended jobs by level of run time, the latest ones most, and its running jobs by age: they show that jobs last at least so
long, so the group's distribution is the estimator of Kaplan and Meier (J. American Statistical Association 53, 1958).
Beyond the longest, the wider group's distribution goes on.

From the widest group to the narrowest, each group's distribution is mixed into the result. How much it weighs is
learned from each ended job, by how probable the group made its run time (a step of expectation maximisation), for each
kind of group and amount of evidence. So a site without repeating names loses nothing by having the column.

Last, the quantiles are calibrated while jobs end (adaptive conformal inference: Gibbs, Candes, NeurIPS 2021): where
fewer run times than stated lie below a quantile, a higher level of the distribution takes its place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints
from gpusched.estimation.groups import NAMED

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MIDDLE = QUANTILES.index(0.5)
BINS = 64  # of run times: from 10 s to ten months
_FIRST_S, _PER_OCTAVE = 10.0, 3.0
_BUCKETS = 14  # of evidence: no ended job, 1, 2, 3 to 4, 5 to 8, to 20, more; then the same, all of about one length
_BY_EVIDENCE = 3  # classes of calibration: something of the burst is known, of the user, neither
_SPREAD = 0.25  # of an ended job's weight goes to each neighbouring bin
_ALIKE = 0.8  # of a group's jobs within three bins: they are of about one length
_STEP = 0.002  # of the calibration, per ended job
_MEMORY = 0.999  # of the learned weights, per ended job
_SURE = 1e-4
_SHORTEST_S = 10.0  # shorter run times count as this much in means of logarithms

Counts = npt.NDArray[np.float32]


class RunTimes(NamedTuple):
    """Ended and running jobs by group, and what was learned of the groups' worth.

    Attributes:
        ends: ``float32[groups, BINS]``: ended jobs by run time, decayed. runs: Running ones by their age.
        group: ``int64[jobs, kinds]``: a job's groups, the narrowest first; -1: none.
        keeps: ``float64[kinds]``: what is kept of a group's counts when one more of its jobs has ended.
        opened: ``float64[groups]``: ended jobs. began: ``float64[jobs, kinds]``: `opened` when a job started: all that
            started then weigh the same, whether they have ended or not; else long ones would count for more.
        changes: ``int64[groups]``: how often a group's counts have changed.
        at: ``int64[jobs]``: the bin in which a running job is counted; -1: it is not.
        limit: ``float64[jobs]``: a run time is at most that, seconds; infinite: none.
        learned: ``float64[kinds, buckets, 2]``: how often a group explained an end, of how many.
        level: ``float64[classes, QUANTILES]``: the level of the distribution that is each quantile.
        stated: ``float64[jobs, QUANTILES]``: seconds, as stated when a job was submitted; NaN: nothing was.
        evidence: ``int64[jobs]``: the class then.
        mass, part: ``float64[BINS]``: work space.
    """

    ends: Counts
    runs: Counts
    group: Ints
    keeps: Floats
    opened: Floats
    began: Floats
    changes: Ints
    at: Ints
    limit: Floats
    learned: Floats
    level: Floats
    stated: Floats
    evidence: Ints
    mass: Floats
    part: Floats


def new_run_times(group: Ints, keeps: Floats, limit: Floats) -> RunTimes:
    """Return the store before any job."""
    groups, (jobs, kinds) = int(group.max(initial=-1)) + 1, group.shape
    typical = np.array([0.0, 1.0, 2.0, 3.5, 6.5, 14.0, 40.0] * 2)
    few = np.where(np.arange(_BUCKETS) < _BUCKETS // 2, 2.0, 0.5)
    learned = np.empty((kinds, _BUCKETS, 2))
    learned[:, :, 0], learned[:, :, 1] = 4.0 * (typical + 0.3) / (typical + 0.3 + few), 4.0
    return RunTimes(
        ends=np.zeros((groups, BINS), np.float32), runs=np.zeros((groups, BINS), np.float32), group=group, keeps=keeps,
        opened=np.zeros(groups), began=np.zeros((jobs, kinds)),
        changes=np.zeros(groups, np.int64), at=np.full(jobs, -1, np.int64), limit=limit, learned=learned,
        level=np.tile(np.array(QUANTILES), (_BY_EVIDENCE, 1)), stated=np.full((jobs, len(QUANTILES)), np.nan),
        evidence=np.zeros(jobs, np.int64), mass=np.zeros(BINS), part=np.zeros(BINS),
    )  # fmt: skip


@jit
def place_of(seconds: float) -> float:
    """Return where a run time lies on the axis of bins: bin i holds i to i + 1."""
    if seconds < _FIRST_S:
        return float(max(seconds, 0.0) / _FIRST_S)
    return float(min(math.log2(seconds / _FIRST_S) * _PER_OCTAVE + 1.0, BINS - _SURE))


@jit
def seconds_at(place: float) -> float:
    """Return the run time at a place; the first bin's are spread evenly."""
    return float(_FIRST_S * place if place < 1.0 else _FIRST_S * math.exp2((place - 1.0) / _PER_OCTAVE))


@jit
def note_age(known: RunTimes, job: int, had_s: float) -> None:
    """Count a running job at its present age."""
    bin_ = int(place_of(had_s))
    if bin_ == known.at[job]:
        return
    if known.at[job] < 0:
        for kind in range(known.keeps.size):
            if known.group[job, kind] >= 0:
                group = known.group[job, kind]
                known.ends[group] *= np.float32(known.keeps[kind])
                known.runs[group] *= np.float32(known.keeps[kind])
                known.opened[group] += 1.0
                known.began[job, kind] = known.opened[group]
    for kind in range(known.keeps.size):
        group = known.group[job, kind]
        if group >= 0:
            weight = _weight(known, job, kind)
            if known.at[job] >= 0:
                _take(known.runs[group], known.at[job], weight)
            known.runs[group, bin_] += weight
            known.changes[group] += 1
    known.at[job] = bin_


@jit
def _weight(known: RunTimes, job: int, kind: int) -> float:
    since = known.opened[known.group[job, kind]] - known.began[job, kind]
    return float(known.keeps[kind] ** since)


@jit
def _take(counts: Counts, place: int, weight: float) -> None:
    counts[place] = max(counts[place] - weight, 0.0)


@jit
def note_stop(known: RunTimes, job: int) -> None:
    """Count a job as running no longer."""
    if known.at[job] >= 0:
        for kind in range(known.keeps.size):
            group = known.group[job, kind]
            if group >= 0:
                _take(known.runs[group], known.at[job], _weight(known, job, kind))
    known.at[job] = -1


@jit
def note_end(known: RunTimes, job: int, seconds: float) -> None:
    """Learn from a job that has ended after so many seconds."""
    note_stop(known, job)
    bin_ = int(place_of(seconds))
    _mix(known, job, bin_)
    for kind in range(known.keeps.size):
        group = known.group[job, kind]
        if group >= 0:
            weight, ends = _weight(known, job, kind), known.ends[group]
            ends[bin_] += weight * (1.0 - 2.0 * _SPREAD)
            ends[max(bin_ - 1, 0)] += weight * _SPREAD
            ends[min(bin_ + 1, BINS - 1)] += weight * _SPREAD
            known.changes[group] += 1
    if not np.isnan(known.stated[job, 0]):
        level = known.level[known.evidence[job]]
        for q in range(level.size):
            below = 1.0 if seconds <= known.stated[job, q] else 0.0
            level[q] = min(max(level[q] + _STEP * (QUANTILES[q] - below), _SURE), 1.0 - _SURE)


@jit
def _bucket(ended: float, alike: bool) -> int:
    bucket = 0
    for limit in (0.5, 1.5, 2.5, 4.5, 8.5, 20.0):
        if ended > limit:
            bucket += 1
    return bucket + _BUCKETS // 2 if alike else bucket


@jit
def _mix(known: RunTimes, job: int, ended_in: int) -> int:
    """Fill in ``mass``: how probable each bin is for a job that has not started; return the class of evidence.

    ``ended_in``: the bin that its run time turned out to lie in, to learn each group's weight from; -1: none yet.
    """
    mass = known.mass
    mass[:] = 1.0 / BINS
    evidence = _BY_EVIDENCE - 1
    for kind in range(known.keeps.size - 1, -1, -1):
        group = known.group[job, kind]
        if group < 0:
            continue
        bucket = _kaplan_meier(known, group, known.at[job], _weight(known, job, kind))
        if bucket < 0:
            continue
        part, learned = known.part, known.learned[kind, bucket]
        weight = learned[0] / learned[1]
        if ended_in >= 0:
            of_group, of_wider = weight * part[ended_in], (1.0 - weight) * mass[ended_in]
            learned *= _MEMORY
            learned[0] += of_group / max(of_group + of_wider, 1e-12)
            learned[1] += 1.0
        for i in range(BINS):
            mass[i] += weight * (part[i] - mass[i])
        if bucket % (_BUCKETS // 2) > 0:
            evidence = min(evidence, 0 if kind == 0 else 1 if kind < NAMED else 2)
    return evidence


@jit
def _kaplan_meier(known: RunTimes, group: int, own: int, weight: float) -> int:
    """Fill in ``part`` with a group's distribution, continued by ``mass``; return the bucket of evidence, -1: none.

    ``own``: the bin in which the job itself is counted as running, with this weight, which says nothing of it; -1: in
    none.
    """
    ends, runs, part, mass = known.ends[group], known.runs[group], known.part, known.mass
    ended, alike, last, at_risk = 0.0, 0.0, -1, 0.0
    for i in range(BINS):
        running = runs[i] - (weight if i == own else 0.0)
        if ends[i] > 1e-3 or running > 1e-2:
            last = i
        ended += ends[i]
        at_risk += ends[i] + running
        if i >= 2:
            alike = max(alike, ends[i] + ends[i - 1] + ends[i - 2])
    if last < 0:
        return -1
    alive = 1.0
    for i in range(last + 1):
        hazard = min(ends[i] / at_risk, 1.0) if at_risk > 1e-3 else 0.0
        part[i] = alive * hazard
        alive *= 1.0 - hazard
        at_risk -= ends[i] + runs[i] - (weight if i == own else 0.0)
    part[last + 1 :] = 0.0
    beyond = 0.0
    for i in range(last, BINS):
        beyond += mass[i]
    for i in range(last, BINS):
        part[i] += alive * (mass[i] / beyond if beyond > 1e-12 else 1.0 / (BINS - last))
    return _bucket(ended, alike > _ALIKE * ended)


@jit
def fill_mass(known: RunTimes, job: int, had_s: float) -> int:
    """Fill in ``mass`` for a job that has run for so long (0: it waits); return the class of evidence."""
    evidence = _mix(known, job, -1)
    mass = known.mass
    if np.isfinite(known.limit[job]):
        last = int(place_of(known.limit[job]))
        for i in range(last + 1, BINS):
            mass[last] += mass[i]
            mass[i] = 0.0
    if had_s > 0.0:
        place = place_of(had_s)
        first = int(place)
        mass[:first] = 0.0
        mass[first] *= first + 1.0 - place
        total = 0.0
        for share in mass:  # numpy's own sum rounds otherwise than the compiled one
            total += share
        if total > 1e-12:
            mass /= total
        else:
            mass[first] = 1.0
    return evidence


@jit
def quantile(known: RunTimes, job: int, level: float, had_s: float) -> float:
    """Return the run time in all, in seconds, at a level of the distribution that `fill_mass` filled in."""
    below = 0.0
    for i in range(BINS):
        if below + known.mass[i] >= level or i == BINS - 1:
            first = max(float(i), place_of(had_s)) if had_s > 0.0 else float(i)
            inside = min(max((level - below) / max(known.mass[i], 1e-12), 0.0), 1.0)
            last = max(min(i + 1.0, place_of(known.limit[job])), first)
            return float(min(seconds_at(first + inside * (last - first)), known.limit[job]))
        below += known.mass[i]
    return 0.0


@jit
def fill_quantiles(known: RunTimes, job: int, had_s: float, found: Floats) -> int:
    """Fill in the calibrated `QUANTILES` of a job's run time, ``found: float64[QUANTILES]``; return the evidence."""
    evidence = fill_mass(known, job, had_s)
    highest = 0.0
    for q in range(found.size):
        highest = max(highest, known.level[evidence, q])
        found[q] = quantile(known, job, highest, had_s)
    return evidence


@jit
def mean_s(known: RunTimes, job: int, had_s: float) -> float:
    """Return the mean run time in all of the distribution that `fill_mass` filled in."""
    total = 0.0
    for i in range(BINS):
        first = seconds_at(float(i))
        last = min(seconds_at(i + 1.0), max(known.limit[job], first))
        total += known.mass[i] * (0.5 * (max(first, had_s) + max(last, had_s)))
    return float(min(total, known.limit[job]))


@jit
def state(known: RunTimes, job: int) -> None:
    """Remember the quantiles of a job at its submission, to calibrate by when it ends."""
    known.evidence[job] = fill_quantiles(known, job, 0.0, known.stated[job])


@jit
def expected_s(known: RunTimes, job: int) -> float:
    """Return what a waiting job is ordered by: the mean of the logarithm of its run time, as seconds.

    Of median, mean and Gittins' index it saved most of the wait on Philly.
    """
    fill_mass(known, job, 0.0)
    total = 0.0
    for i in range(BINS):
        total += known.mass[i] * math.log(max(seconds_at(i + 0.5), _SHORTEST_S))
    return float(min(math.exp(total), known.limit[job]))


@jit
def crps(known: RunTimes, job: int, seconds: float) -> float:
    """Return the continuous ranked probability score, of logarithms, of the distribution that `fill_mass` filled in.

    Of an estimate without a distribution it is the error of its logarithm.
    """
    place, below, total, parts = place_of(min(seconds, known.limit[job])), 0.0, 0.0, 8
    for i in range(BINS):
        for part in range(parts):
            at = (part + 0.5) / parts
            error = below + at * known.mass[i] - (1.0 if i + at >= place else 0.0)
            total += error * error / parts
        below += known.mass[i]
    return float(total * math.log(2.0) / _PER_OCTAVE)


SAID = len(QUANTILES) + 2


@jit
def _note_ages(known: RunTimes, running: Ints, start: Floats, now: float, due: Floats) -> None:
    """Count running jobs at their ages; ``due: float64[jobs]``: up to that age there is nothing to change."""
    for job in running:
        if now - start[job] >= due[job]:
            note_age(known, job, now - start[job])
            due[job] = seconds_at(known.at[job] + 1.0) * (1.0 - 1e-9)


@jit
def follow(
    known: RunTimes, submit: Floats, start: Floats, seconds: Floats, by_start: Ints, by_end: Ints, until: float,
    said: Floats,
) -> None:  # fmt: skip
    """Live through the jobs of a trace up to a time; say of each at its submission what is known of it.

    ``submit: float64[jobs]`` ascends; ``start``, ``seconds: float64[jobs]``; ``by_start``, ``by_end: int64[jobs]``: the
    jobs in order of starts and ends. ``said: float64[jobs, SAID]``: quantiles, `expected_s`, and `crps`.
    """
    running, due, begun, ended = np.empty(submit.size, np.int64), np.zeros(submit.size), 0, 0
    size = 0
    for job in range(submit.size + 1):
        now = until if job == submit.size else min(submit[job], until)
        while True:
            at = start[by_start[begun]] if begun < by_start.size else np.inf
            end = start[by_end[ended]] + seconds[by_end[ended]] if ended < by_end.size else np.inf
            # A job that starts at this very instant has not when the others are asked about.
            if min(at, end) == np.inf or (end > now and (at > now or (at == now and job < submit.size))):
                break
            if at < end:
                running[size] = by_start[begun]
                note_age(known, running[size], 0.0)
                size, begun = size + 1, begun + 1
            else:
                _note_ages(known, running[:size], start, end, due)
                note_end(known, by_end[ended], seconds[by_end[ended]])
                for i in range(size):
                    if running[i] == by_end[ended]:
                        running[i] = running[size - 1]
                        break
                size, ended = size - 1, ended + 1
        _note_ages(known, running[:size], start, now, due)
        if job < submit.size and submit[job] <= until:
            state(known, job)
            said[job, : len(QUANTILES)] = known.stated[job]
            said[job, len(QUANTILES)] = expected_s(known, job)
            said[job, len(QUANTILES) + 1] = crps(known, job, seconds[job])
