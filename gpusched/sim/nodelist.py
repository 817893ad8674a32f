"""A pool from a list of nodes: Alibaba's ``openb_node_list_*.csv`` (alibaba/clusterdata, cluster-trace-gpu-v2023)."""

from __future__ import annotations

from pathlib import Path

from gpusched.errors import FileError, GpuschedError
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles.measured import whole_table

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
