"""Maps each node's gres.conf positions (IDX) to NVML's GPU indices.

A GPU has three numbers. Its position: Slurm counts the lines and files of gres.conf, one type after the other in
slurm.conf's order (observed with 22.05). Its minor: that of its device file (3 of /dev/nvidia3), given by the driver.
Its NVML index, by bus address, which the rest of gpusched uses. With ``AutoDetect=nvml`` the position is the index.
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

_MINOR = re.compile(r"([0-9]+)$")
_USUAL_FOLDERS = (Path("/etc/slurm"), Path("/etc/slurm-llnl"), Path("/run/slurm/conf"))


def read_gres_conf(paths: Iterable[str]) -> str | None:
    """Return the text of gres.conf from beside a slurm.conf on this machine; None: not found, or not readable.

    Args:
        paths: Paths of slurm.conf, from SLURM_CONF and slurmctld.
    """
    folders = [Path(path).parent for path in paths if path.startswith("/")]
    for folder in dict.fromkeys((*folders, *_USUAL_FOLDERS)):
        try:
            return (folder / "gres.conf").read_text(errors="replace")
        except OSError:
            continue
    return None


@lru_cache(1024)
def minors_of(gres_conf: str, node: str, types: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the minors of a node's GPUs by position; (): positions are NVML's indices; None: unknown.

    It is unknown where gres.conf has no GPUs of the node, or cannot be parsed. Cached: the file rarely changes.

    Args:
        gres_conf: Its text.
        node: The node's name.
        types: Types of the node's GPUs, in slurm.conf's order.
    """
    try:
        return _parse_minors(gres_conf, node, types)
    except ValueError:  # an invalid list of files or nodes
        return None


def _parse_minors(gres_conf: str, node: str, types: tuple[str, ...]) -> tuple[int, ...] | None:
    by_nvml, files = False, list[tuple[str, int]]()  # (type, minor), in the order of the file
    for line in gres_conf.replace("\\\n", " ").splitlines():
        pairs = (word.partition("=") for word in line.partition("#")[0].split())
        keys = {key.casefold(): value for key, _, value in pairs}
        # A line without NodeName is for all nodes. A later AutoDetect overrides an earlier one.
        applies = "nodename" not in keys or node in expand(keys["nodename"])
        if applies and "autodetect" in keys:
            by_nvml = keys["autodetect"].casefold() == "nvml"
        if not applies or keys.get("name", "").casefold() != "gpu" or "file" not in keys:
            continue
        for file in expand(keys["file"]):
            number = _MINOR.search(file)
            if number is None:  # not a numbered device file: this order cannot be known
                return None
            files.append((keys.get("type", ""), int(number[1])))
    if by_nvml:
        return ()
    # A stable sort: within a type, and among unknown types at the end, the order of the file remains.
    rank = {name: at for at, name in enumerate(types)}
    return tuple(minor for _, minor in sorted(files, key=lambda file: rank.get(file[0], len(rank)))) or None


def indices_by_position(minors: tuple[int, ...], wiring: Wiring | None) -> tuple[int, ...]:
    """Return NVML's indices by position, as the node's probe found them; of a minor not found, the minor itself."""
    index = {gpu.minor: gpu.index for gpu in (wiring.gpus if wiring is not None else ()) if gpu.minor is not None}
    return tuple(index.get(minor, minor) for minor in minors)


def devices_of(
    inventory: Inventory, gres_conf: str | None, nodes: Mapping[str, SlurmNode], records: Mapping[str, NodeRecord]
) -> dict[str, tuple[int, ...]]:
    """Return node -> NVML index of the GPU at each position.

    Nodes are left out if this is unknown, or if Slurm counts as NVML does: the position is taken as the index.
    """
    found = {}
    for node in inventory.nodes:
        slurm_node, record = nodes.get(node.name), records.get(node.name)
        types = tuple(slurm_node.gpus) if slurm_node is not None else ()
        minors = minors_of(gres_conf or "", node.name, types)
        if minors:
            found[node.name] = indices_by_position(minors, record.wiring if record is not None else None)
    return found
