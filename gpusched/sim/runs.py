"""A result as runs and parts of runs, and step functions over time made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.sim.result import Result

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Whole runs, cut ones included; arrays ``[runs]``. ``first_node`` is a row of the pool; times in seconds."""

    job: Ints
    first_node: Ints
    start: Floats
    end: Floats


class Parts(NamedTuple):
    """A run on one of its nodes; arrays ``[parts]``."""

    job: Ints
    node: Ints
    gpus: Ints
    start: Floats
    end: Floats


def runs_of(result: Result) -> Runs:
    """Every run of every job that ran: the last runs in the trace's order, then the cut ones."""
    done = np.flatnonzero(result.ran)
    cut = result.cut
    return Runs(
        np.concatenate([done, cut.job]),
        np.concatenate([result.part_nodes[result.part_offsets[done]], cut.part_nodes[cut.part_offsets[:-1]]]),
        np.concatenate([result.last_start[done], cut.start]),
        np.concatenate([result.end[done], cut.end]),
    )


def parts_of(result: Result) -> Parts:
    """Every part of every run, cut ones included."""
    jobs = len(result.trace)
    job = np.repeat(np.arange(jobs), np.diff(result.part_offsets))
    kept = result.ran[job]
    job, node = job[kept], result.part_nodes[kept]
    cut = result.cut
    run = np.repeat(np.arange(len(cut.job)), np.diff(cut.part_offsets))
    job_all = np.concatenate([job, cut.job[run]])
    return Parts(
        job_all,
        np.concatenate([node, cut.part_nodes]),
        result.part_gpus[job_all],
        np.concatenate([result.last_start[job], cut.start[run]]),
        np.concatenate([result.end[job], cut.end[run]]),
    )


def run_seconds(result: Result) -> Floats:
    """``float64[jobs]``: seconds each job ran, work lost in cut runs included; NaN where it never ended."""
    seconds = result.end - result.last_start
    if len(result.cut.job):
        lost = np.bincount(result.cut.job, result.cut.end - result.cut.start, len(result.trace))
        seconds = seconds + lost
    return seconds


def binned_mean(start: Floats, end: Floats, weight: Floats | Ints, edges: Floats) -> Floats:
    """The mean over each bin of the sum of ``weight`` over intervals [start, end) that are open: ``float64[bins]``.

    Exact: the integral of the step function, differenced at the bins' edges.

    Args:
        start: ``float64[intervals]``, seconds.
        end: Likewise.
        weight: ``[intervals]``.
        edges: ``float64[bins + 1]``, ascending.
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
