"""Jobs of a week of Philly or openb, with models drawn for them, on as many nodes as make the offered load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, PROPORTIONAL, SERVER, MaifsJobClasses, maifs
from gpusched.errors import UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.traces.generate import generate
from gpusched.traces.load import load
from gpusched.traces.trace import Trace
from gpusched.traces.workload import PHILLY_LIKE, load_workload

WEEK_S = 604_800.0
LONGEST_S = 86_400.0
"""Longer jobs are cut to a day: a hundredth of Philly's jobs, up to 53 days long, would be most of all GPU time."""
PER_GROUP = 4
"""Nodes of a group, that is of an agent, at most."""
_ASKED = (0, 1, 2, 3, 7)  # the shape that a job of 1, 2, 4, 8 or 16 GPUs asks for: on the fewest nodes


class ArrivingJobs(NamedTuple):
    """Jobs with GPUs: ``float64[jobs]`` submit and duration in seconds, ``int64[jobs]`` GPUs."""

    submit: Floats
    duration: Floats
    gpus: Ints


class MaifsJobs(NamedTuple):
    """A workload, jobs by arrival.

    Attributes:
        arrival: ``float64[jobs]``: seconds. kind: ``int64[jobs]``.
        steps: ``float64[jobs]``: to be done; told when it is submitted.
        asked: ``int64[jobs]``: the shape it asked for. least, most: GPUs, its bounds.
        noise: ``float64[jobs]``: what its measurements of its own speed are wrong by, a factor.
        node: ``float64[nodes, 3]``: GPUs, cores and GB. group: ``int64[groups + 1]``: first node of each, and the end.
    """

    arrival: Floats
    kind: Ints
    steps: Floats
    asked: Ints
    least: Ints
    most: Ints
    noise: Floats
    node: Floats
    group: Ints


def read_arrivals(folder: Path, trace: str) -> ArrivingJobs:
    """The jobs with GPUs of a trace; a part of a GPU counts as one, other numbers as the next lower of 1, 2, 4, 8, 16.

    Raises:
        FileError: The file is something else.
        UsageError: It is not there.
    """
    path = folder / maifs().traces[trace].file
    if not path.is_file():
        raise UsageError(f"{path}: there is no such trace", "name the folder of traces with --workloads")
    return _arrivals(load(path, None))


def drawn_arrivals() -> ArrivingJobs:
    """Return jobs like those of Philly, where the traces are not at hand."""
    return _arrivals(generate(replace(load_workload(PHILLY_LIKE), jobs=27_000, load=None, per_hour=32.0)))


def _arrivals(read: Trace) -> ArrivingJobs:
    some = read.gpus > 0
    gpus = np.minimum(2 ** np.floor(np.log2(np.maximum(read.gpus, 1))).astype(np.int64), 16)
    return ArrivingJobs(read.submit[some], np.minimum(read.duration[some], LONGEST_S), gpus[some])


def draw(
    arrivals: ArrivingJobs, trace: str, kinds: MaifsJobClasses, models: tuple[str, ...], week: int, load: float,
    seed: int,
    density: float = 1.0, days: float = 7.0,
) -> MaifsJobs:  # fmt: skip
    """A week's jobs, or those of some days of it, drawn with a seed.

    Args:
        arrivals: Of the trace.
        trace: Its name.
        kinds: What models are like.
        models: Which of them may come; all as often.
        week: Of the trace.
        load: Offered: GPU-seconds as asked for, by those that there are in the span.
        seed: Of all that is drawn.
        density: Which part of the jobs is kept.
        days: Of the week, from a moment that is drawn.

    Raises:
        UsageError: The week has no jobs.
    """
    rng, copies = np.random.default_rng((seed, week, round(load * 100))), maifs().traces[trace].copies
    mine = np.flatnonzero((arrivals.submit >= week * WEEK_S) & (arrivals.submit < (week + 1) * WEEK_S))
    if not len(mine):
        raise UsageError(f"{trace} has no jobs in week {week}")
    index = np.concatenate([mine] * copies)
    moved = np.repeat(np.where(np.arange(copies) > 0, rng.integers(0, 168, copies), 0), len(mine))
    start = rng.uniform(0, WEEK_S)
    at = (arrivals.submit[index] - week * WEEK_S + moved * 3600.0 - (start if days < 7 else 0.0)) % WEEK_S
    kept = (rng.uniform(size=len(index)) < density) & (at < days * 86_400.0)
    order = np.argsort(at[kept], kind="stable")
    index, at = index[kept][order], at[kept][order]
    gpus, duration = arrivals.gpus[index], arrivals.duration[index]
    asked = np.array(_ASKED)[np.log2(gpus).astype(np.int64)]
    per = len(CORES) * len(MEMORY_GB)
    usual = kinds.speed[:, asked * per + PROPORTIONAL]  # [kinds, jobs]
    may = (usual > 0) & np.isin(kinds.names, models)[:, None]
    kind = np.where(may, rng.uniform(size=may.shape), -1.0).argmax(0)
    steps = duration * usual[kind, np.arange(len(kind))]
    nodes = max(2, round(float((gpus * duration).sum()) / (SERVER[0] * days * 86_400.0 * load)))
    groups = -(-nodes // PER_GROUP)
    return MaifsJobs(
        arrival=at, kind=kind, steps=steps, asked=asked,
        least=np.maximum(gpus // 4, 1), most=np.minimum(gpus * 4, 16),
        noise=np.exp(rng.normal(0, 0.03, len(kind))),
        node=np.tile(np.array(SERVER, np.float64), (nodes, 1)), group=np.arange(groups + 1) * nodes // groups,
    )  # fmt: skip
