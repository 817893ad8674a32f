"""Workloads of a week of Philly or openb, with drawn models, on as many nodes as give the offered load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.joint import PER_GROUP
from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, PROPORTIONAL, SERVER, MaifsJobClasses, maifs
from gpusched.errors import UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.traces.generate import generate
from gpusched.traces.load import load
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace
from gpusched.traces.workload import PHILLY_LIKE, load_workload

WEEK_S = 604_800.0
LONGEST_S = 86_400.0
"""Longer jobs are cut to a day: else 1 % of Philly's jobs, up to 53 days long, would be most of the GPU time."""
_ASKED = (0, 1, 2, 3, 7)  # the shape requested by a job of 1, 2, 4, 8 or 16 GPUs: on the fewest nodes


class MaifsJobs(NamedTuple):
    """A workload, jobs by arrival.

    Attributes:
        arrival: ``float64[jobs]``: seconds. kind: ``int64[jobs]``.
        steps: ``float64[jobs]``: total; known from its submission.
        requested: ``int64[jobs]``: the requested shape. least, most: its bounds in GPUs.
        noise: ``float64[jobs]``: factor of error of its measured speed.
        node: ``float64[nodes, 3]``: GPUs, cores and GB. group: ``int64[groups + 1]``: first node of each, and the end.
    """

    arrival: Floats
    kind: Ints
    steps: Floats
    requested: Ints
    least: Ints
    most: Ints
    noise: Floats
    node: Floats
    group: Ints


def read_arrivals(folder: Path, trace: str) -> Trace:
    """Return a trace's jobs with GPUs; a fraction of a GPU counts as one, others are rounded down to 1, 2, 4, 8 or 16.

    Raises:
        FileError: The file is invalid.
        UsageError: The file does not exist.
    """
    path = folder / maifs().traces[trace].file
    if not path.is_file():
        raise UsageError(f"{path}: there is no such trace", "name the folder of traces with --workloads")
    return _arrivals(load(path, None))


def drawn_arrivals() -> Trace:
    """Return jobs like those of Philly, for use without the traces."""
    return _arrivals(generate(replace(load_workload(PHILLY_LIKE), jobs=27_000, load=None, per_hour=32.0)))


def _arrivals(read: Trace) -> Trace:
    some = select(read, read.gpus > 0)
    gpus = np.minimum(2 ** np.floor(np.log2(some.gpus)).astype(np.int64), 16)
    return replace(some, duration=np.minimum(some.duration, LONGEST_S), gpus=gpus)


def draw(
    arrivals: Trace, trace: str, kinds: MaifsJobClasses, models: tuple[str, ...], week: int, load: float, seed: int,
    density: float = 1.0, days: float = 7.0,
) -> MaifsJobs:  # fmt: skip
    """Draw a week's jobs, or those of some days of it.

    Args:
        arrivals: The trace from `read_arrivals`.
        trace: Its name.
        kinds: The kinds of models.
        models: The models that may occur, equally often.
        week: Of the trace.
        load: Offered load: GPU-seconds requested over GPU-seconds available in the period.
        seed: Of all random draws.
        density: Fraction of the jobs kept.
        days: Of the week, from a random start.

    Raises:
        UsageError: The week has no jobs, or none was drawn.
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
    if not kept.any():
        raise UsageError(f"{trace}: no job was drawn in {days:g} days of week {week} (seed {seed})", "use another seed")
    order = np.argsort(at[kept], kind="stable")
    index, at = index[kept][order], at[kept][order]
    gpus, duration = arrivals.gpus[index], arrivals.duration[index]
    requested = np.array(_ASKED)[np.log2(gpus).astype(np.int64)]
    per = len(CORES) * len(MEMORY_GB)
    usual = kinds.speed[:, requested * per + PROPORTIONAL]  # [kinds, jobs]
    may = (usual > 0) & np.isin(kinds.names, models)[:, None]
    kind = np.where(may, rng.uniform(size=may.shape), -1.0).argmax(0)
    steps = duration * usual[kind, np.arange(len(kind))]
    nodes = max(2, round(float((gpus * duration).sum()) / (SERVER[0] * days * 86_400.0 * load)))
    groups = -(-nodes // PER_GROUP)
    return MaifsJobs(
        arrival=at, kind=kind, steps=steps, requested=requested,
        least=np.maximum(gpus // 4, 1), most=np.minimum(gpus * 4, 16),
        noise=np.exp(rng.normal(0, 0.03, len(kind))),
        node=np.tile(np.array(SERVER, np.float64), (nodes, 1)), group=np.arange(groups + 1) * nodes // groups,
    )  # fmt: skip
