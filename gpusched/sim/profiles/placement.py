"""Sia's measured step times (Jayaram Subramanya et al., SOSP 2023): siasosp23/artifacts; AWS's also in petuum/adaptdl.

``MODEL-placements-CLUSTER.csv``: local_bsz, step_time, sync_time, placement (its digits: the GPUs on each node);
``MODEL-scalability-CLUSTER.csv``: the same by num_nodes and num_replicas. A job of g GPUs at b samples each does
g b / step_time samples per second. Several placements of as many GPUs on as many nodes count with the one that is
spread evenly, as the replay spreads jobs, else with their mean.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpusched.errors import FileError
from gpusched.sim.profiles.measured import number_at, whole_table
from gpusched.sim.profiles.table import Profiles, Series, split_model, type_key, with_batch
from gpusched.traces.readers.columns import Table, stem

NAME = re.compile(r"(?P<model>.+)-(?P<kind>placements|scalability)-(?P<cluster>.+)\.csv")
CLUSTERS = {"aws": "T4", "dgx": "A100", "dgx-ext": "A100", "rtx": "RTX2080Ti", "quad": "RTX6000"}
"""GPU types of Sia's clusters, from its sia-simulator/simulator_config.py: AWS g4dn.12xlarge (of 4 T4), DGX-A100 with
few (dgx) and with more (dgx-ext) batch sizes, 8 RTX 2080Ti, 4 Quadro RTX 6000. Others have their own name."""
_RECORDED_ON = "A100"

_Samples = dict[tuple[str, str, int], dict[tuple[int, int], list[tuple[bool, float]]]]


def is_placement(name: str) -> bool:
    """Return whether a file is named as these are."""
    return NAME.fullmatch(name) is not None


def read(paths: Sequence[Path]) -> list[Profiles]:
    """Read these files together, as a model's usual batch size depends on all GPU types that it was measured on.

    Raises:
        FileError: A file holds something else.
    """
    if not paths:
        return []
    found: _Samples = defaultdict(lambda: defaultdict(list))
    for path in sorted(paths, key=lambda p: ("-ext" not in p.name, p.name)):  # dgx adds what dgx-ext lacks
        match = NAME.fullmatch(stem(path))
        assert match is not None
        kind = type_key(CLUSTERS.get(match["cluster"], match["cluster"]))
        new: _Samples = defaultdict(lambda: defaultdict(list))
        for row in rows_in(path, match["kind"]):
            at = row.gpus, row.nodes
            new[match["model"].lower(), kind, row.batch][at].append((row.even, row.gpus * row.batch / row.step_s))
        for key, points in new.items():
            for at, values in points.items():
                if at not in found[key] or "-scalability-" not in path.name:
                    found[key].setdefault(at, values)
    series = {
        (with_batch(model, batch), kind): Series({at: _mean_time(v) for at, v in points.items()}, "nodes", batch)
        for (model, kind, batch), points in found.items()
    }
    usual = _usual_batches(found)
    notes = tuple((f"{model} counts as {key}, per GPU", frozenset((model,))) for model, key in sorted(usual.items()))
    recorded_on = dict.fromkeys([*usual, *(name for name, _ in series)], _RECORDED_ON)
    sources = tuple((path.name, _models(path, list(recorded_on))) for path in paths)
    return [Profiles(series=series, usual=usual, recorded_on=recorded_on, sources=sources, notes=notes)]


def _models(path: Path, keys: list[str]) -> frozenset[str]:
    """Return the keys of the model that a file describes."""
    match = NAME.fullmatch(stem(path))
    model = match["model"].lower() if match else ""
    return frozenset(key for key in keys if split_model(key)[0] == model)


def _mean_time(values: list[tuple[bool, float]]) -> float:
    even = [value for is_even, value in values if is_even]
    chosen = even or [value for _, value in values]
    return sum(chosen) / len(chosen)


def _usual_batches(found: _Samples) -> dict[str, str]:
    """Return each model's largest batch size per GPU that was measured on one GPU of every type of that model."""
    usual = {}
    for model in dict.fromkeys(model for model, _, _ in found):
        kinds = {kind for name, kind, _ in found if name == model}
        on_one = [
            {b for name, k, b in found if (name, k) == (model, kind) and (1, 1) in found[name, k, b]} for kind in kinds
        ]
        common = set.intersection(*on_one)
        if common:
            usual[model] = with_batch(model, max(common))
    return usual


class _Row(NamedTuple):
    """Samples per GPU, GPUs in all and on the fullest node, nodes, whether they are evenly spread, seconds."""

    batch: int
    gpus: int
    most: int
    nodes: int
    even: bool
    step_s: float


def rows_in(path: Path, kind: str) -> Iterator[_Row]:
    """Yield the rows of a file; ``kind``: the one in its name."""
    columns = ("placement",) if kind == "placements" else ("num_nodes", "num_replicas")
    table = whole_table(path, f"a file of {kind}", ("local_bsz", "step_time", *columns))
    for row in range(len(table)):
        batch = _whole(path, table, row, "local_bsz")
        step_s = number_at(path, table, row, "step_time", "seconds", above_0=True)
        if kind == "placements":
            digits = [int(d) for d in str(_whole(path, table, row, "placement")) if d != "0"]
            gpus, most, nodes, even = sum(digits), max(digits), len(digits), len(set(digits)) == 1
        else:
            nodes, gpus = _whole(path, table, row, "num_nodes"), _whole(path, table, row, "num_replicas")
            most, even = -(-gpus // nodes), gpus % nodes == 0
        yield _Row(batch, gpus, most, nodes, even, step_s)


def _whole(path: Path, table: Table, row: int, column: str) -> int:
    text = table.columns[column][row]
    whole = text.removesuffix(".0")  # some files went through a table of floats
    if not whole.isdecimal() or int(whole) < 1:
        raise FileError(str(path), int(table.lines[row]), column, repr(text), "a whole number, at least 1")
    return int(whole)
