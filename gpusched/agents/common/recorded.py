"""Past decisions on the sizes of resizable jobs, rebuilt from a history: what was known, and what was chosen.

The history says when each attempt of a job began, on how many GPUs, and until when it worked. From that the running and
starting jobs of every decision follow; `gpusched.sched.sizing.settle.gather` makes claims of them, as it does live.
Not in a history, and left out here: jobs that waited and were not started, jobs that have not ended, failed nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.model.jobs import HOUR_S
from gpusched.model.policy import Resizing
from gpusched.sched.sizing.question import COUNT, PART, ROW, Claims, Scene, menus_of, new_claims
from gpusched.sched.sizing.settle import SizingRules, gather, speed_at
from gpusched.sched.state import OK, RESOURCES, Floats, Ints, Records, resources_of
from gpusched.traces.trace import ProgressRecords, Trace

Flags = npt.NDArray[np.bool_]

_TOGETHER_S = 2.0  # changes so close to each other are of one decision: containers need some time to start
_LONG_S = 1e9  # no job ends soon, so that running ones may be shrunk: see `settle.gather`


class RecordedDecision(NamedTuple):
    """A decision as it was made.

    Attributes:
        at: Seconds of the trace.
        claims: What was known, cut to its jobs.
        chosen: ``int64[jobs]``: the GPUs that each got.
        pace: ``float64[jobs, most]``: as ``claims.pace``, by all that the jobs reported before and after it.
        policy: Of the jobs that started or changed, index into ``Trace.policies``; -1: not known.
    """

    at: float
    claims: Claims
    chosen: Ints
    pace: Floats
    policy: int


def recorded_decisions(trace: Trace, gpus: int, resize: Resizing, most: int = 4000) -> list[RecordedDecision]:
    """Return the decisions by which resizable jobs started or changed size, by time; at most ``most``, evenly spread.

    Args:
        trace: A history.
        gpus: Of the partition.
        resize: Limits on resizes. What was chosen against them counts as allowed.
        most: Decisions.
    """
    if trace.progress is None or not len(trace.progress.run_job):
        return []
    record = _Record.of(trace, trace.progress, gpus, resize)
    groups = record.groups()
    if len(groups) > most:
        groups = [groups[i] for i in np.linspace(0, len(groups) - 1, most).astype(np.int64).tolist()]
    found = (record.decision(first, last) for first, last in groups)
    return [one for one in found if one is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Record:
    """The attempts of a history, by job and begin: ``[attempts]`` each.

    Attributes:
        job: Row of the trace. held: GPUs. begin, end: When it worked, seconds of the trace.
        to: GPUs of the next attempt, where it was stopped for that; else 0. resumes: When that begins.
        resumed: It follows such a stop. restarts: How many of them were before.
        pace: Steps/s. after: Steps of later attempts.
        rigid: ``bool[jobs]``. last: ``float64[jobs]``: end of each job.
    """

    trace: Trace
    progress: ProgressRecords
    gpus: int
    resize: Resizing
    job: Ints
    held: Ints
    begin: Floats
    end: Floats
    to: Ints
    resumes: Floats
    resumed: Flags
    restarts: Ints
    pace: Floats
    after: Floats
    rigid: Flags
    last: Floats

    @classmethod
    def of(cls, trace: Trace, progress: ProgressRecords, gpus: int, resize: Resizing) -> _Record:
        order = np.lexsort((progress.run_after_s, progress.run_job))
        job, held = progress.run_job[order], progress.run_gpus[order]
        begin = trace.submit[job] + progress.run_after_s[order]
        end = begin + progress.run_s[order]
        # Of a job that was never resized, another size after a restart was no decision on a running job.
        follows = (job[1:] == job[:-1]) & (held[1:] != held[:-1]) & np.isfinite(progress.cost_s[job[1:]])
        to, resumes = np.zeros(len(job), np.int64), np.full(len(job), np.inf)
        to[:-1], resumes[:-1] = np.where(follows, held[1:], 0), np.where(follows, begin[1:], np.inf)
        resumed = np.append(False, follows) if len(job) else np.zeros(0, np.bool_)
        rigid = np.bincount(progress.size_job, minlength=len(trace)) < 2
        pace = np.array([_speed(progress, j, g) for j, g in zip(job.tolist(), held.tolist(), strict=True)])
        steps, after, restarts = pace * (end - begin), np.zeros(len(job)), np.zeros(len(job), np.int64)
        for a in range(len(job) - 2, -1, -1):
            after[a] = after[a + 1] + steps[a + 1] if job[a + 1] == job[a] else 0.0
        for a in range(1, len(job)):
            restarts[a] = restarts[a - 1] + resumed[a] if job[a - 1] == job[a] else 0
        last = np.full(len(trace), -np.inf)
        np.maximum.at(last, job, end)
        return cls(
            trace=trace, progress=progress, gpus=gpus, resize=resize, job=job, held=held, begin=begin, end=end, to=to,
            resumes=resumes, resumed=resumed, restarts=restarts, pace=pace, after=after, rigid=rigid, last=last,
        )  # fmt: skip

    def groups(self) -> list[tuple[float, float]]:
        """Return the first and the last instant of each decision."""
        ours = ~self.rigid[self.job]
        times = np.sort(np.concatenate((self.begin[ours], self.end[ours & (self.to > 0)])))
        breaks = np.flatnonzero(np.diff(times) > _TOGETHER_S)
        first, last = np.append(0, breaks + 1), np.append(breaks, len(times) - 1)
        return list(zip(times[first].tolist(), times[last].tolist(), strict=True)) if len(times) else []

    def decision(self, first: float, last: float) -> RecordedDecision | None:
        """Return the decision made between two instants; None: the record contradicts itself, or left no choice."""
        ours = ~self.rigid[self.job]
        # A job that was stopped now still had its GPUs when that was decided.
        runs = ours & (self.begin < first) & np.where(self.to > 0, self.end >= first, self.end > last)
        stops = runs & (self.to > 0) & (self.end <= last)
        starts = ours & (self.begin >= first) & (self.begin <= last) & ~np.isin(self.job, self.job[stops])
        horizon, shrinks = last, bool((self.to[stops] < self.held[stops]).any())
        if shrinks:  # for those that start once the others have saved their work
            horizon = float(self.resumes[stops].max()) + _TOGETHER_S
        awaited = (self.begin > last) & (self.begin <= horizon) & (self.trace.submit[self.job] <= last)
        awaited &= ~np.isin(self.job, self.job[runs | starts]) & ~self.resumed
        others = ~ours & (self.begin <= last) & (self.end > last)
        others |= (self.to > 0) & (self.end < first) & (self.resumes > last)  # not yet running again
        rows = [*np.flatnonzero(runs), *np.flatnonzero(starts), *np.flatnonzero(awaited & ours)]
        rigid_gpus = int(self.held[others].sum() + self.held[awaited & ~ours].sum())
        if not rows or len({int(self.job[a]) for a in rows}) < len(rows):
            return None
        chosen = np.where(stops, self.to, self.held)[rows]
        present = (self.trace.submit <= last) & (self.last > last)
        claims = self._claims(np.array(rows), int(runs.sum()), chosen, last, rigid_gpus, shrinks, present)
        return None if claims is None else self._with_answer(claims, np.array(rows), stops[rows], chosen, last)

    def _claims(
        self, rows: Ints, running: int, chosen: Ints, now: float, rigid_gpus: int, shrinks: bool, present: Flags
    ) -> Claims | None:
        """Return what was known, by the step that is common to all replays and to live decisions."""
        scene, feasibility = self._scene(rows, running, now, chosen)
        held = int(self.held[rows[:running]].sum())
        total = max(self.gpus, int(chosen.sum()))  # nodes may have come and gone
        free = max(total - rigid_gpus - held, int(chosen.sum()) - held)
        ends = now + scene.rows["left_s"][:running]
        soonest = now + _LONG_S if shrinks else float(ends.min(initial=np.inf))
        rules = SizingRules(now, soonest, self.trace.submit[present], self.resize.gain, False, 0, 1)
        usable = resources_of(np.array([amount], np.int64) for amount in (total, 0, 0))
        claims = new_claims(len(rows) + 1, scene.menus.sizes.shape[1])
        gather(scene, rules, usable._replace(gpus=np.array([free])), usable, feasibility, claims)
        if claims.number[COUNT] < len(rows):
            return None
        return Claims._make(a if a is claims.number else a[: len(rows)] for a in claims)

    def _scene(self, rows: Ints, running: int, now: float, chosen: Ints) -> tuple[Scene, Ints]:
        """Return the jobs as a scene on one node that has all GPUs, and the feasibility of its two requests."""
        progress, trace, of = self.progress, self.trace, self.job[rows]
        requests = [{g: int(g > self.gpus) for g in progress.sizes(j)} for j in of.tolist()]
        menus = menus_of(requests, [{}] * len(requests))
        scene = np.zeros(len(rows), ROW)
        scene["job"] = scene["menu"] = np.arange(len(rows))
        scene["base"], scene["submit"] = trace.gpus[of], trace.submit[of]
        scene["restarts"] = self.restarts[rows]
        scene["cost_s"] = np.where(scene["restarts"] > 0, np.nan_to_num(progress.cost_s[of]), 0.0)
        scene["held"][:running] = self.held[rows[:running]]
        parts = np.zeros(running, PART)
        parts["gpus"] = scene["held"][:running]
        scene["first"][:running], scene["last"][:running] = np.arange(running), np.arange(running) + 1
        scene["resume"] = np.where(self.resumed[rows], self.held[rows], 0)
        scene["resume"][:running] = 0
        reported = np.full(menus.sizes.shape, np.nan)
        for i, a in enumerate(rows.tolist()):
            runs = i < running
            self._fill(scene[i], a, now, runs, runs and int(self.held[a]) != int(chosen[i]))
            had = (self.job == self.job[a]) & (self.begin < now if runs else self.begin < self.begin[a])
            speeds = {g: v for g, v in progress.speeds(int(self.job[a])).items() if g in self.held[had]}
            for k, gpus in enumerate(menus.sizes[i].tolist()):
                reported[i, k] = speeds.get(gpus, np.nan)
        unusable = np.zeros(menus.sizes.shape, np.uint8)
        return Scene(scene, parts, unusable, reported, menus), np.array([OK, RESOURCES])

    def _fill(self, row: Records, a: int, now: float, runs: bool, changed: bool) -> None:
        """Fill what is left of a job, and whether it may be resized now."""
        progress, job = self.progress, int(self.job[a])
        has_progress = bool(np.isfinite(progress.steps[job]))
        before = np.minimum(self.end, now) - self.begin
        used = float(before[(self.job == job) & (self.begin < now)].sum())
        limit = self.trace.limit[job] if self.trace.limit[job] > 0 else np.inf  # or unknown
        row["work"] = np.nan
        row["left_s"] = max(limit - used, 1.0)
        if runs:
            left = max(self.end[a] - now, 0.0) * self.pace[a] + self.after[a]
            row["left_s"] = left / self.pace[a] if has_progress else row["left_s"]
            stopped = self.end[(self.job == job) & (self.to > 0) & (self.end < now)]
            rested = now >= self.begin[a] + max(self.resize.min_run_s, progress.cooldown_s[job])
            row["may"] = changed or (rested and int((stopped > now - HOUR_S).sum()) < self.resize.per_hour)
        elif has_progress and self.resumed[a]:
            row["work"] = (self.end[a] - self.begin[a]) * self.pace[a] + self.after[a]

    def _with_answer(
        self, claims: Claims, rows: Ints, stops: Flags, chosen: Ints, now: float
    ) -> RecordedDecision | None:
        """Return the decision, its answer allowed; None: there was no choice, or a size that no job may have."""
        pace, choices = np.zeros(claims.pace.shape), 0
        for j, a in enumerate(rows.tolist()):
            count = int(claims.jobs[j]["count"])
            at = np.flatnonzero(claims.sizes[j, :count] == chosen[j])
            if not len(at):
                return None
            claims.allowed[j, at[0]] = 1
            choices += int(claims.allowed[j, :count].sum()) - 1
            job = int(self.job[a])
            pace[j, :count] = [_speed(self.progress, job, g) for g in claims.sizes[j, :count].tolist()]
        if choices == 0:
            return None
        policy = -1
        if self.trace.policy is not None:
            changed = self.job[rows[stops]] if stops.any() else self.job[rows]
            policy = int(np.bincount(self.trace.policy[changed] + 1).argmax()) - 1
        return RecordedDecision(now, claims, chosen, pace, policy)


def _speed(progress: ProgressRecords, job: int, gpus: int) -> float:
    """Return a job's speed at a size by all that it reported; see `settle.speed_at`."""
    speeds = progress.speeds(job)
    sizes = np.array(sorted(speeds), np.int64)
    known = np.array([speeds[size] for size in sizes.tolist()], np.float64)
    return speed_at(sizes, known, np.arange(len(sizes)), gpus)


def by_policy(decisions: list[RecordedDecision], trace: Trace) -> Iterator[tuple[str, int]]:
    """Yield the policies that made the decisions, with their numbers, most first."""
    counts = np.bincount([one.policy + 1 for one in decisions], minlength=len(trace.policies) + 1)
    for row in np.argsort(-counts, kind="stable").tolist():
        if counts[row]:
            yield (trace.policies[row - 1] if row else "an unknown policy"), int(counts[row])
