"""``topology:`` of inventory.yaml -> Topology, validated; and files with only such a mapping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gpusched.config import fields
from gpusched.config.yamlfile import Value, parse_file, suggestion
from gpusched.model.topology import Switch, Topology

_EXPECTED = "a mapping: name of switch -> nodes, uplink, parent"


def load_topology(path: Path | str) -> Topology:
    """Load the topology of a YAML file that is such a mapping, or has it under ``topology``.

    Raises:
        FileError: The first thing wrong with it.
    """
    root = parse_file(path, "a topology")
    inner = root.fields(_EXPECTED).get("topology")
    return read_topology(root if inner is None or _is_switch(inner) else inner)


def read_topology(
    value: Value | None,
    nodes: Collection[str] | None = None,
    noting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Topology:
    """Read a topology from a mapping; empty where there is no mapping.

    A parent without an entry of its own is a switch with nothing above it, unless it looks like a mistyped one.

    Args:
        value: The mapping.
        nodes: The nodes there are; None: not known.
        noting: Around what may be wrong; errors that it swallows leave their switch out.

    Raises:
        FileError: The first thing wrong with it.
    """
    entries = {} if value is None else value.fields(_EXPECTED)
    switches: dict[str, Switch] = {}
    first: dict[str, tuple[str, int]] = {}
    for name, entry in entries.items():
        with noting():
            switch = Switch(name=fields.check_name(name, entry), **fields.read(entry, fields.SWITCH, _EXPECTED))
            at = entry.fields(_EXPECTED).get("nodes", entry)
            for node in switch.nodes:
                if nodes is not None and node not in nodes:
                    known = f"the name of a node of this inventory{suggestion(node, nodes)}"
                    raise at.error(known, f'the node "{node}"')
                if node in first:
                    where = "{} in line {}".format(*first[node])
                    raise at.error("every node on one switch", f'the node "{node}" again (first on {where})')
                first[node] = name, at.line
            switches[name] = switch
    for switch in list(switches.values()):
        with noting():
            _check_parent(entries[switch.name].fields(_EXPECTED).get("parent"), switch.name, switches, entries)
    return sorted_topology(switches.values())


def sorted_topology(switches: Iterable[Switch]) -> Topology:
    """Return the topology of switches given in any order; missing parents are added."""
    known = {switch.name: switch for switch in switches}
    for switch in list(known.values()):
        if switch.parent is not None:
            known.setdefault(switch.parent, Switch(name=switch.parent))
    return Topology(switches=tuple(sorted(known.values(), key=lambda s: len(_above(s.name, known)))))


def _above(name: str, switches: dict[str, Switch]) -> list[str]:
    """Return the switch and its ancestors, upwards; stop at a cycle."""
    path = [name]
    while (switch := switches.get(path[-1])) is not None and switch.parent is not None:
        path.append(switch.parent)
        if switch.parent in path[:-1]:
            break
    return path


def _check_parent(value: Value | None, name: str, switches: dict[str, Switch], entries: Collection[str]) -> None:
    if value is None:
        return
    parent = switches[name].parent or ""
    if parent not in entries and (meant := suggestion(parent, entries)):
        raise value.error(f"a switch that is described here{meant}", f'the parent "{parent}"')
    path = _above(name, switches)
    if path[-1] == name and len(path) > 1:
        raise value.error("parents that lead to the top", f"a circle ({' -> '.join(path)})")


def _is_switch(value: Value) -> bool:
    """Return whether this mapping describes one switch, rather than several."""
    if value.is_text or not (found := value.fields(_EXPECTED)):
        return True
    return any(key in fields.SWITCH for key in found)
