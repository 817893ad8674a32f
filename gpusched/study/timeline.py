"""A result as runs and parts of runs, and step functions over time from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled.arrays import Floats, Ints
from gpusched.sim.result import END, KILLED, NODE_FAIL, PAIRED, PREEMPTED, RESIZED, ReplayResult


class Runs(NamedTuple):
    """Whole runs, interrupted ones included; arrays ``[runs]``. ``first_node``: row of the pool; times in seconds.

    ``size`` is the run's GPUs by those of the job's last run: 1 unless the job was resized.
    """

    job: Ints
    first_node: Ints
    start: Floats
    end: Floats
    size: Floats


class Parts(NamedTuple):
    """A run on one of its nodes; arrays ``[parts]``.

    ``gpus`` may be parts of GPUs. Where two jobs are on the same GPUs, a row for each takes half of them off again, so
    that sums count every GPU once; its ``gpus`` is negative.
    """

    job: Ints
    node: Ints
    gpus: Ints | Floats
    start: Floats
    end: Floats


def runs_of(result: ReplayResult) -> Runs:
    """Return every run of every job that ran: last runs in the trace's order, then interrupted ones."""
    done = np.flatnonzero(result.ran)
    cut = result.cut
    return Runs(
        np.concatenate([done, cut.job]),
        np.concatenate([result.part_nodes[result.part_offsets[done]], cut.part_nodes[cut.part_offsets[:-1]]]),
        np.concatenate([result.last_start[done], cut.start]),
        np.concatenate([result.end[done], cut.end]),
        np.concatenate([np.ones(len(done)), _sizes(result)]),
    )


def _sizes(result: ReplayResult) -> Floats:
    """Return the GPUs of interrupted runs relative to those of the job's last run, ``float64[cut runs]``."""
    cut = result.cut
    if cut.part_gpus is None:
        return np.ones(len(cut.job))
    last = (result.part_gpus * np.diff(result.part_offsets))[cut.job]
    return cut.part_gpus * np.diff(cut.part_offsets) / np.maximum(last, 1)


def parts_of(result: ReplayResult) -> Parts:
    """Return every part of every run, interrupted ones included."""
    jobs = len(result.trace)
    job = np.repeat(np.arange(jobs), np.diff(result.part_offsets))
    kept = result.ran[job]
    job, node = job[kept], result.part_nodes[kept]
    cut = result.cut
    run = np.repeat(np.arange(len(cut.job)), np.diff(cut.part_offsets))
    job_all = np.concatenate([job, cut.job[run]])
    gpus: Ints | Floats = result.part_gpus[job_all]
    if cut.part_gpus is not None:
        gpus[len(job) :] = cut.part_gpus[run]
    if result.share is not None:
        gpus = gpus * result.share[job_all]
    parts = Parts(
        job_all,
        np.concatenate([node, cut.part_nodes]),
        gpus,
        np.concatenate([result.last_start[job], cut.start[run]]),
        np.concatenate([result.end[job], cut.end[run]]),
    )
    return parts if result.shared != "pairs" else _counted_once(result, parts)


class PairedRun(NamedTuple):
    """Two jobs on the same GPUs: the newcomer and the one before it, from and until when (seconds)."""

    job: int
    mate: int
    start: float
    end: float


def paired_runs(result: ReplayResult) -> list[PairedRun]:
    """Return every time that two jobs shared GPUs, in order of its end, without those that never ended."""
    found: list[PairedRun] = []
    since: dict[int, tuple[int, int, float]] = {}
    events, joined = result.events, -1
    stops = (END, KILLED, PREEMPTED, NODE_FAIL, RESIZED)
    of = np.flatnonzero(np.isin(events.kind, (PAIRED, *stops)))
    for i in of.tolist():
        kind, subject, time = int(events.kind[i]), int(events.subject[i]), float(events.time[i])
        if kind == PAIRED:
            joined = int(events.subject[i + 1])  # its START is the next event
            since[joined] = since[subject] = (joined, subject, time)
        elif subject in since:
            job, mate, start = since.pop(subject)
            since.pop(mate if subject == job else job)
            found.append(PairedRun(job, mate, start, time))
    return found


def _counted_once(result: ReplayResult, parts: Parts) -> Parts:
    """Add rows that correct for GPUs shared by two jobs."""
    first: dict[tuple[int, float], list[int]] = {}
    for row, key in enumerate(zip(parts.job.tolist(), parts.start.tolist(), strict=True)):
        first.setdefault(key, []).append(row)
    rows = [
        (r, job, t) for t in paired_runs(result) for r in first.get((t.job, t.start), []) for job in (t.job, t.mate)
    ]
    if not rows:
        return parts
    at = np.array([r for r, _, _ in rows])
    return Parts(
        np.concatenate([parts.job, np.array([job for _, job, _ in rows])]),
        np.concatenate([parts.node, parts.node[at]]),
        np.concatenate([parts.gpus, -0.5 * parts.gpus[at]]),
        np.concatenate([parts.start, parts.start[at]]),
        np.concatenate([parts.end, np.array([t.end for _, _, t in rows])]),
    )


def run_seconds(result: ReplayResult) -> Floats:
    """Return the seconds each job ran, work lost in interrupted runs included, ``float64[jobs]``; NaN: never ended."""
    seconds = result.end - result.last_start
    if len(result.cut.job):
        lost = np.bincount(result.cut.job, result.cut.end - result.cut.start, len(result.trace))
        seconds = seconds + lost
    return seconds


def binned_mean(start: Floats, end: Floats, weight: Floats | Ints, edges: Floats) -> Floats:
    """Return the mean over each bin of the sum of ``weight`` over open intervals [start, end): ``float64[bins]``.

    Exact: the integral of the step function, differenced at the bins' edges. ``start`` and ``end`` in seconds:
    ``float64[intervals]``; ``weight``: ``[intervals]``; ``edges``: ``float64[bins + 1]``, ascending.
    """
    at = np.concatenate([start, end])
    step = np.concatenate([weight, -np.asarray(weight)]).astype(np.float64)
    order = np.argsort(at, kind="stable")
    at, level = at[order], np.cumsum(step[order])
    if not len(at):
        return np.zeros(len(edges) - 1)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at))])
    place = np.searchsorted(at, edges, side="right") - 1
    inside = np.clip(place, 0, None)
    until = np.where(place >= 0, area[inside] + level[inside] * (edges - at[inside]), 0.0)
    widths = np.maximum(np.diff(edges), 1e-12)
    means: Floats = np.diff(until) / widths
    return np.where(np.abs(means) < 1e-9, 0.0, means)
