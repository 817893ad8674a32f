"""Nodes from files: a CSV of failures and drains, ``node,start,end,drain``; reservations; and a pool of listed nodes.

The list is as Alibaba's ``openb_node_list_*.csv`` (alibaba/clusterdata, cluster-trace-gpu-v2023).
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from gpusched.errors import FileError, GpuschedError
from gpusched.model.suggest import did_you_mean
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles.measured import whole_table
from gpusched.sim.replay import Outage
from gpusched.sim.reserving import Booking
from gpusched.traces.readers.columns import open_text

_COLUMNS = ("node", "start", "end", "drain")


def read_outages(path: Path, pool: Pool) -> tuple[Outage, ...]:
    """Read the outages of a CSV with the header ``node,start,end,drain``.

    The node's name; seconds on the trace's clock, no end: for good; ``drain`` yes lets its jobs finish, no or nothing
    cuts them. The last two columns may be missing.

    Raises:
        FileError: The first thing wrong with it.
        GpuschedError: It cannot be read.
    """
    rows = {name: row for row, name in enumerate(pool.names)}
    found = []
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file, restval="")
            header = reader.fieldnames or []
            if list(header) != list(_COLUMNS[: len(header)]) or len(header) < 2:
                raise FileError(str(path), 1, "", ",".join(header) or "nothing", ",".join(_COLUMNS))
            for row in reader:
                found.append(_outage(str(path), reader.line_num, row, rows))
    except (OSError, csv.Error) as error:
        raise GpuschedError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return tuple(found)


def read_reservations(path: Path, pool: Pool) -> tuple[Booking, ...]:
    """Read the reservations of a CSV with the header ``node,start,end``: seconds on the trace's clock; for no job.

    Raises:
        FileError: The first thing wrong with it.
        GpuschedError: It cannot be read.
    """
    found: list[Booking] = []
    for outage in read_outages(path, pool):
        if not math.isfinite(outage.end):
            raise FileError(str(path), len(found) + 2, "end", "nothing", "when the reservation ends")
        if any(outage.node in b.nodes and outage.start < b.end and b.start < outage.end for b in found):
            raise FileError(str(path), len(found) + 2, "start", f"{outage.start:g}", "no other reservation of it then")
        found.append(Booking(f"{len(found)}", (outage.node,), outage.start, outage.end))
    return tuple(found)


def _outage(path: str, line: int, row: dict[str, str], rows: dict[str, int]) -> Outage:
    node = row["node"] or ""
    if node not in rows:
        raise FileError(path, line, "node", repr(node), f"the name of a node{did_you_mean(node, rows)}")
    start = _seconds(path, line, "start", row["start"])
    end = _seconds(path, line, "end", row["end"]) if row.get("end") else math.inf
    if end <= start:
        raise FileError(path, line, "end", row["end"], "a time after the start")
    drain = (row.get("drain") or "no").lower()
    if drain not in ("yes", "no"):
        raise FileError(path, line, "drain", repr(drain), "yes or no")
    return Outage(rows[node], start, end, drain == "yes")


def _seconds(path: str, line: int, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FileError(path, line, key, repr(text), "seconds on the trace's clock")
    return value


COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")


def read_node_list(path: Path) -> Pool:
    """Read the nodes of a CSV with the columns ``sn,cpu_milli,memory_mib,gpu,model`` (gzip or not), in one partition.

    Raises:
        FileError: The first thing wrong with it.
        GpuschedError: It cannot be read.
    """
    try:
        table = whole_table(path, "a node list", COLUMNS)
    except OSError as error:
        raise GpuschedError(f"{path}: {error.strerror or error}") from None
    if not len(table):
        raise FileError(str(path), None, "", "no node", ",".join(COLUMNS))
    names, nodes = set(), []
    for row, name in enumerate(table.columns["sn"]):
        line = int(table.lines[row])
        if not name or name in names:
            raise FileError(str(path), line, "sn", repr(name), "a name, each once")
        names.add(name)
        figures = {}
        for column, expected_text in (("cpu_milli", "thousandths of a core"), ("memory_mib", "MiB"), ("gpu", "GPUs")):
            text = table.columns[column][row]
            if not text.isdecimal() or len(text) > 12:
                raise FileError(str(path), line, column, repr(text), f"a whole number of {expected_text}")
            figures[column] = int(text)
        if figures["gpu"] == 0 and figures["cpu_milli"] < 1000:
            raise FileError(str(path), line, "gpu", "0", "a node with GPUs or cores")
        gpu_type, cores = table.columns["model"][row], figures["cpu_milli"] // 1000
        nodes.append(NodeSpec(figures["gpu"], cores, figures["memory_mib"], gpu_type, "", name))
    return Pool.of(nodes)
