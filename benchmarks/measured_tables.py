"""Public tables as the models of placement and contention are fitted to them and judged by them.

`read_steps` has Sia's steps by placement, see `gpusched.sim.profiles.placement`.

`read_pairs` knows by their columns: DeepShare's pairs of jobs that share a network (gajagajago/deepshare, Apache-2.0;
model, gpus, nodes, beside_model, beside_gpus, beside_nodes, ratio), PAL's jobs on the same GPUs (hal-uw/blox-pal, MIT;
model1, speed1, pipeline_strategy, model2, speed2..., speeds by that of the fastest plan alone) and HiEST's inside one
server (HiEST/gpu-topo-aware, Apache-2.0; seconds alone and beside). `pairs_of` has Gavel's, which share a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.pair_fit import InterferenceTable
from gpusched.errors import FileError, GpuschedError
from gpusched.sched.interference.placement import Placements, StepTimes
from gpusched.sim.profiles.measured import number_at, whole_table
from gpusched.sim.profiles.placement import NAME, rows_in
from gpusched.sim.profiles.table import Profiles, split_model, type_key
from gpusched.traces.readers.columns import open_text, stem

_DEEPSHARE = ("model", "gpus", "nodes", "beside_model", "beside_gpus", "beside_nodes", "ratio")
_PAL = (
    "model1", "gpu_num1", "batch_size1", "speed1", "pipeline_strategy", "model2", "gpu_num2", "batch_size2", "speed2",
)  # fmt: skip
_HIEST = ("model", "batch", "gpus", "placement", "beside_model", "beside_batch", "beside_gpus", "seconds")
_ALONE = ("", "Empty")
_WITHOUT_BUS = ("dgx",)  # NVSwitch: GPUs of one server do not share one
_FILE = "a file of measured contention"

_Row = tuple[tuple[str, str], tuple[str, str], float]
"""Columns: a job and its model, the same of its neighbour, and the part of its speed that remains."""


def read_pairs(path: Path | str) -> InterferenceTable:
    """Return the pairs of one file. Speeds of 0 (the job did not run) are excluded; a ratio above 1 counts as 1.

    Raises:
        FileError: It holds something else.
        GpuschedError: It cannot be read.
    """
    path = Path(path)
    try:
        head = _header(path)
        found = next((how for columns, how in _READERS.items() if set(columns) <= set(head)), None)
        if found is None:
            raise FileError(str(path), 1, "", "other columns", " or ".join(", ".join(columns) for columns in _READERS))
        pairs = _assembled(found(path))
        if not pairs.kinds:
            raise FileError(str(path), None, "", "no pair", "at least one pair with speeds above 0")
        return pairs
    except OSError as error:
        raise GpuschedError(f"{error.filename}: {error.strerror or error}") from None


def pairs_of(profiles: Profiles, gpu_type: str, gpus: int = 1) -> InterferenceTable:
    """Return the pairs of a table measured on this number of GPUs of a type, each job on all of them."""
    return _assembled(
        ((job, split_model(job)[0]), (other, split_model(other)[0]), ratio)
        for (job, kind, on, other), ratio in profiles.beside.items()
        if kind == type_key(gpu_type) and on == gpus
    )


def _assembled(rows: Iterable[_Row]) -> InterferenceTable:
    kept = [(job, other, min(ratio, 1.0)) for job, other, ratio in rows if ratio > 0]
    kinds = sorted({kind for job, other, _ in kept for kind in (job, other)})
    number = {kind: place for place, kind in enumerate(kinds)}
    return InterferenceTable(
        kinds=tuple(name for name, _ in kinds),
        families=tuple(family for _, family in kinds),
        job=np.array([number[job] for job, _, _ in kept], np.int64),
        beside=np.array([number[other] for _, other, _ in kept], np.int64),
        ratio=np.array([ratio for _, _, ratio in kept], np.float64),
    )


def _deepshare(path: Path) -> Iterable[_Row]:
    table = whole_table(path, _FILE, _DEEPSHARE)
    for row in range(len(table)):
        model, gpus, nodes, other, its_gpus, its_nodes = (table.columns[name][row] for name in _DEEPSHARE[:-1])
        ratio = number_at(path, table, row, "ratio", above_0=True)
        yield (f"{model} {gpus} on {nodes}", model), (f"{other} {its_gpus} on {its_nodes}", other), ratio


def _pal(path: Path) -> Iterable[_Row]:
    table = whole_table(path, _FILE, _PAL)
    alone: dict[str, float] = {}
    rows = []
    for row in range(len(table)):
        model, gpus, batch, _, plan, other, its_gpus, its_batch, _ = (table.columns[name][row] for name in _PAL)
        mine = number_at(path, table, row, "speed1")
        job = f"{model} {gpus}x{batch}" + (f" {plan}" if plan != "NA" else "")
        if other in _ALONE:
            alone[job] = mine
        else:
            its = number_at(path, table, row, "speed2")
            rows.append(((job, model), (f"{other} {its_gpus}x{its_batch}", other), mine, its))
    for one, two, mine, its in rows:  # what has no row alone is measured by its speed alone already
        if alone.get(one[0], 1.0) > 0:
            yield one, two, mine / alone.get(one[0], 1.0)
        if one != two:
            yield two, one, its


def _hiest(path: Path) -> Iterable[_Row]:
    table = whole_table(path, _FILE, _HIEST)
    alone: dict[tuple[str, ...], float] = {}
    rows = []
    for row in range(len(table)):
        *job, other, its_batch, its_gpus, _ = (table.columns[name][row] for name in _HIEST)
        seconds = number_at(path, table, row, "seconds", above_0=True)
        if other in _ALONE:
            alone[tuple(job)] = seconds
        else:
            rows.append((tuple(job), (other, its_batch, its_gpus), seconds))
    for own, (other, its_batch, its_gpus), seconds in rows:
        if own in alone:
            model, batch, gpus, _ = own
            beside = f"{other} {its_gpus}x{its_batch}", other
            yield (f"{model} {gpus}x{batch}", model), beside, alone[own] / seconds


_READERS = {_DEEPSHARE: _deepshare, _PAL: _pal, _HIEST: _hiest}


def _header(path: Path) -> list[str]:
    with open_text(path) as text:
        return [name.strip() for name in text.readline().split(",")]


class MeasuredSteps(NamedTuple):
    """Steps of a model on a machine as they were measured; ``bus``: whether GPUs of a server share one."""

    model: str
    machine: str
    times: StepTimes
    bus: bool


def read_steps(path: Path) -> MeasuredSteps:
    """Return the steps of one file. Sia's servers share one switch, so they are in one rack.

    Raises:
        FileError: It holds something else.
    """
    match = NAME.fullmatch(stem(path))
    if match is None:
        raise FileError(
            str(path), None, "", "another name", "MODEL-placements-CLUSTER.csv or MODEL-scalability-CLUSTER.csv"
        )
    rows = list(rows_in(path, match["kind"]))
    most, gpus, nodes = (np.array(c, np.int64) for c in zip(*((r.most, r.gpus, r.nodes) for r in rows), strict=True))
    placed = Placements(most, gpus, nodes, np.ones_like(nodes))
    times = StepTimes(placed, np.array([float(r.batch) for r in rows]), np.array([r.step_s for r in rows]))
    return MeasuredSteps(match["model"].lower(), match["cluster"], times, not match["cluster"].startswith(_WITHOUT_BUS))
