"""Maps each node's gres.conf positions (IDX) to NVML's GPU indices.

Slurm counts a node's GPUs by their positions in gres.conf, grouped by type in slurm.conf's order (observed with 22.05).
A line names device files, such as /dev/nvidia3, numbered by the driver; NVML counts by bus address. With
``AutoDetect=nvml`` Slurm uses NVML's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from gpusched.model.readings import Wiring
from gpusched.model.resources import Inventory
from gpusched.model.slurm import SlurmNode
from gpusched.queue.store import NodeRecord
from gpusched.slurm.hostlist import expand

_NUMBER = re.compile(r"([0-9]+)$")
_USUAL = (Path("/etc/slurm"), Path("/etc/slurm-llnl"), Path("/run/slurm/conf"))


def read_gres_conf(paths: Iterable[str]) -> str | None:
    """Return the text of gres.conf from beside a slurm.conf on this machine; None: not found, or not readable.

    Args:
        paths: Paths of slurm.conf, from SLURM_CONF and slurmctld.
    """
    folders = [Path(path).parent for path in paths if path.startswith("/")]
    for folder in dict.fromkeys((*folders, *_USUAL)):
        try:
            return (folder / "gres.conf").read_text(errors="replace")
        except OSError:
            continue
    return None


@lru_cache(1024)
def minors_of(gres_conf: str, node: str, types: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return device file numbers of a node's GPUs by position; (): NVML's order; None: not in gres.conf.

    Args:
        gres_conf: Its text.
        node: The node's name.
        types: Of its GPUs, in slurm.conf's order.
    """
    try:
        return _minors(gres_conf, node, types)
    except ValueError:  # an invalid list of files or nodes
        return None


def _minors(gres_conf: str, node: str, types: tuple[str, ...]) -> tuple[int, ...] | None:
    detect, files = False, list[tuple[str, int]]()
    for line in gres_conf.replace("\\\n", " ").splitlines():
        pairs = (word.partition("=") for word in line.partition("#")[0].split())
        keys = {key.casefold(): value for key, _, value in pairs}
        applies = "nodename" not in keys or node in expand(keys["nodename"])
        if applies and "autodetect" in keys:
            detect = keys["autodetect"].casefold() == "nvml"
        if not applies or keys.get("name", "").casefold() != "gpu" or "file" not in keys:
            continue
        for file in expand(keys["file"]):
            number = _NUMBER.search(file)
            if number is None:
                return None
            files.append((keys.get("type", ""), int(number[1])))
    if detect:
        return ()
    rank = {name: at for at, name in enumerate(types)}
    return tuple(minor for _, minor in sorted(files, key=lambda file: rank.get(file[0], len(rank)))) or None


def indices_by_position(minors: tuple[int, ...], wiring: Wiring | None) -> tuple[int, ...]:
    """Return NVML's indices by position; a device file of an unknown GPU counts as the GPU of that number."""
    index = {gpu.minor: gpu.index for gpu in (wiring.gpus if wiring is not None else ()) if gpu.minor is not None}
    return tuple(index.get(minor, minor) for minor in minors)


def devices_of(
    inventory: Inventory, gres_conf: str | None, nodes: Mapping[str, SlurmNode], records: Mapping[str, NodeRecord]
) -> dict[str, tuple[int, ...]]:
    """Return node -> NVML index of the GPU at each position.

    Nodes are left out if this is unknown, or if Slurm counts as NVML does, so that the position is the index.
    """
    found = {}
    for node in inventory.nodes:
        slurm_node, record = nodes.get(node.name), records.get(node.name)
        minors = minors_of(gres_conf or "", node.name, tuple(slurm_node.gpus) if slurm_node is not None else ())
        if minors:
            found[node.name] = indices_by_position(minors, record.wiring if record is not None else None)
    return found
