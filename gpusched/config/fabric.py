"""Import of network topologies: Slurm's topology.conf and topology.yaml, ibnetdiscover.

Formats: topology.conf(5) and topology.yaml(5) of Slurm 25.05, and "TOPOLOGY FILE FORMAT" of ibnetdiscover(8).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations, takewhile
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from gpusched.config.fields import is_name, parse_gbps, split_hosts
from gpusched.config.openers import open_input
from gpusched.config.topology import read_topology, sorted_topology
from gpusched.config.yamlfile import MAX_BYTES, Value, parse_text
from gpusched.errors import FileError, UnreadableFile
from gpusched.model.topology import Switch, Topology

_LEAST_GBPS = 10.0  # a bare LinkSpeed has no unit; below this it is a weight, not a rate
_SLURM = ("switchname", "nodes", "switches", "linkspeed", "blockname", "blocksizes")
_LANE_GBPS = {"SDR": 2.5, "DDR": 5, "QDR": 10, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_IB_SWITCH = re.compile(r'Switch\s+[0-9]+\s+"S-([0-9a-f]+)"\s*#\s*"([^"]*)"')
_PORT = r"\[([0-9]+)\](?:\[ext [^\]]*\])?(?:\([0-9a-f]*\))?"
_IB_LINK = re.compile(_PORT + r'\s+"([SHR])-([0-9a-f]+)"' + _PORT + r'\s*#\s*"([^"]*)"(.*)')
_IB_RATE = re.compile(r"\b([0-9]{1,2})x(" + "|".join(sorted(_LANE_GBPS, reverse=True)) + r")\b")


class _ParsedNetwork(NamedTuple):
    """A network as read from a file, in which a switch may have several uplinks.

    Attributes:
        nodes: Switch -> the nodes on it, in order; a node may be on several.
        ups: Switch -> the switches above it.
        gbps: Switch -> all its ways up together; those that are not known are not there.
        beside: Pairs of switches with links between them of which neither is above, and how fast these are.
    """

    nodes: dict[str, list[str]]
    ups: dict[str, list[str]]
    gbps: dict[str, float]
    beside: dict[tuple[str, str], float]


def import_topology(path: Path | str, called: Callable[[str], str | None] | None = None) -> Topology:
    """Read the topology of a file in any of these formats, or in inventory.yaml's own.

    Args:
        path: The file.
        called: What a node of the file is called here; None: it is no node of ours. Without it all are, by their names.

    Raises:
        FileError: It cannot be read, or is in none of these formats; without ``called``: no switch in it has nodes.
    """
    expected = "what ibnetdiscover prints, or Slurm's topology.conf or topology.yaml"
    try:
        with open_input(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableFile(str(path), error.strerror or str(error), expected) from None
    if len(data) > MAX_BYTES:
        raise FileError(str(path), None, "", f"more than {MAX_BYTES >> 20} MiB", expected)
    text = data.decode("utf-8", "replace")
    read = read_ibnetdiscover if _IB_SWITCH.search(text) else read_slurm_topology
    topology = read(text, called or str, str(path))
    if not topology and called is None:
        raise FileError(str(path), None, "", "no switch with nodes", expected)
    return topology


def read_slurm_topology(text: str, called: Callable[[str], str | None] = str, path: str = "topology.conf") -> Topology:
    """Read Slurm's topology.conf or topology.yaml; of several topologies the default, else the first.

    A switch under several becomes one under all of these together. Blocks are racks. A LinkSpeed without a unit is
    taken for Gbit/s from 10 on, else as not known: Slurm gives it no meaning.

    Args:
        text: The file's content.
        called: What a node of the file is called here; None: it is no node of ours.
        path: What errors call the file.

    Raises:
        FileError: It is neither, or wrong.
    """
    if re.search(r"^\s*(?:switch|block)name\s*=", text, re.IGNORECASE | re.MULTILINE):
        return _merged(_slurm_conf(text, path), called)
    try:
        root = parse_text(text, path)
    except FileError as error:
        if path.endswith((".yaml", ".yml")):
            raise
        expected = "SwitchName=... lines, or YAML"
        raise FileError(path, error.line_number, "", "neither a topology.conf nor a topology.yaml", expected) from None
    if root.is_list:
        return _merged(_slurm_yaml(root), called)
    declared = read_topology(root)
    drawn = _ParsedNetwork({}, {}, {}, {})
    for switch in declared.switches:
        drawn.nodes[switch.name] = list(switch.nodes)
        drawn.ups[switch.name] = [switch.parent] if switch.parent else []
        if switch.uplink_gbps is not None:
            drawn.gbps[switch.name] = switch.uplink_gbps
    return _merged(drawn, called)


def read_ibnetdiscover(text: str, called: Callable[[str], str | None] = str, path: str = "ibnetdiscover") -> Topology:
    """Read the output of ibnetdiscover.

    Switches with nodes are racks; those that serve the same nodes (rails) are one rack, and switches of the next level
    that serve the same racks are one switch (the spines of a fat tree). Rates are those of the links, added up.

    Args:
        text: The output.
        called: What a node is called here, by the first word of its description; None: it is no node of ours.
        path: What errors would call the file; whatever is not understood is passed over.
    """
    names: dict[str, str] = {}
    nodes: dict[str, list[str]] = {}
    links: dict[frozenset[tuple[str, str]], float | None] = {}
    at = None
    for line in text.splitlines():
        if found := _IB_SWITCH.match(line):
            at = found[1]
            names[at] = _ib_name(found[2], at, names.values())
        elif line.startswith(("Ca", "Rt")):
            at = None
        elif at is not None and (found := _IB_LINK.match(line)):
            port, kind, peer, peer_port, description, rest = found.groups()
            words = description.split()
            if kind == "S":
                rate = _IB_RATE.search(rest)
                speed = int(rate[1]) * float(_LANE_GBPS[rate[2]]) if rate else None
                links[frozenset(((at, port), (peer, peer_port)))] = speed
            elif kind == "H" and words and "Technologies" not in words and is_name(words[0]) and called(words[0]):
                nodes.setdefault(at, []).append(words[0])
    for ends in links:
        for switch, _ in ends:
            names.setdefault(switch, f"S-{switch}")  # the end of the output is missing
    level = _levels(nodes, links)
    drawn = _ParsedNetwork({names[s]: nodes.get(s, []) for s in names if s in level}, {}, {}, {})
    slow: set[str] = set()
    for ends, speed in links.items():
        pair = sorted({switch for switch, _ in ends}, key=lambda s: (level.get(s, -1), s))
        if len(pair) < 2 or pair[0] not in level:
            continue
        low, high = (names[switch] for switch in pair)
        if level[pair[0]] == level[pair[1]]:
            drawn.beside[low, high] = drawn.beside.get((low, high), 0.0) + (speed or 0.0)
            continue
        if high not in drawn.ups.setdefault(low, []):
            drawn.ups[low].append(high)
        drawn.gbps[low] = drawn.gbps.get(low, 0.0) + (speed or 0.0)
        slow |= {low} if speed is None else set()
    for name in slow:
        del drawn.gbps[name]
    return _merged(drawn, called)


# Slurm


def _slurm_conf(text: str, path: str) -> _ParsedNetwork:
    drawn = _ParsedNetwork({}, {}, {}, {})
    number, began, whole = 0, 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        began = began if whole else number
        whole += line.removesuffix("\\") + " "
        if line.endswith("\\"):
            continue
        fields: dict[str, str] = {}
        for key, value in re.findall(r"([^\s=]+)\s*=\s*(\"[^\"]*\"|\S*)", whole):
            if key.lower() not in _SLURM:
                raise FileError(
                    path, began, key, "an unknown key", "one of SwitchName, Nodes, Switches, LinkSpeed, ..."
                )
            fields[key.lower()] = value.strip('"')
        if whole.strip() and not fields:
            raise FileError(path, began, "", f'"{whole.strip()}"', "KEY=VALUE")
        if name := fields.get("switchname") or fields.get("blockname"):
            _add(drawn, path, began, name, fields.get("nodes"), fields.get("switches"), fields.get("linkspeed"))
        whole = ""
    return drawn


def _slurm_yaml(root: Value) -> _ParsedNetwork:
    drawn = _ParsedNetwork({}, {}, {}, {})
    found = [entry.fields("a topology") for entry in root.items("a list of topologies")]
    found = [fields for fields in found if "tree" in fields or "block" in fields]
    default = [fields for fields in found if "cluster_default" in fields and fields["cluster_default"].flag()]
    chosen = next(iter(default or found), None)
    if chosen is None:
        raise root.error("a topology with tree or block")
    kind = ("tree", "switches", "switch") if "tree" in chosen else ("block", "blocks", "block")
    entries = chosen[kind[0]].fields(f"a mapping with {kind[1]}")
    if kind[1] not in entries:
        raise chosen[kind[0]].missing(kind[1], "a list")
    for entry in entries[kind[1]].items("a list"):
        fields = entry.fields(f"a mapping with {kind[2]} and nodes")
        texts = {key: value.text("text") for key, value in fields.items() if value.is_text}
        if kind[2] not in texts:
            raise entry.missing(kind[2], "a name")
        speed = texts.get("link_speed") or texts.get("linkspeed")
        _add(drawn, entry.file, entry.line, texts[kind[2]], texts.get("nodes"), texts.get("children"), speed)
    return drawn


def _add(
    drawn: _ParsedNetwork, path: str, line: int, name: str, nodes: str | None, children: str | None, speed: str | None
) -> None:
    """Add one line of Slurm's: a switch (or a block) with its nodes or children."""
    if name in drawn.nodes:
        raise FileError(path, line, "", f'"{name}" again', "every switch once")
    for kind, text in (("nodes", nodes), ("switches", children)):
        try:
            names = split_hosts(text) if text else []
        except ValueError as error:
            raise FileError(path, line, kind, f'"{text}"', str(error)) from None
        if kind == "nodes":
            if odd := [node for node in names if not is_name(node)]:
                raise FileError(path, line, kind, f'"{odd[0]}"', "names of nodes, or ranges such as gpu-[01-04]")
            drawn.nodes[name] = names
        for child in names if kind == "switches" else ():
            drawn.ups.setdefault(child, []).append(name)
    try:
        gbps = parse_gbps(speed if re.search(r"[A-Za-z]", speed) else f"{speed}G") if speed else 0.0
    except ValueError:
        gbps = 0.0
    if gbps >= _LEAST_GBPS:
        drawn.gbps[name] = gbps


# InfiniBand


def _ib_name(description: str, guid: str, taken: Collection[str]) -> str:
    """Name a switch: the management's (``MF0;leaf1:MQM8700/U1``), its description's first word, or its GUID."""
    words = description.split()
    managed = re.match(r"MF0;([^:;]+):[^/]*/?(\S*)", description)
    name = managed[1] if managed else words[0] if words and "Technologies" not in words else ""
    part = f"{name}-{managed[2].replace('/', '-')}" if managed and managed[2] else ""  # of a chassis: director-L01-U1
    return next((choice for choice in (name, part) if choice and choice not in taken), f"S-{guid}")


def _levels(nodes: Collection[str], links: Iterable[frozenset[tuple[str, str]]]) -> dict[str, int]:
    """Return switch -> its distance from the nodes; 0 for leaf switches."""
    near: dict[str, set[str]] = {}
    for ends in links:
        switches = {switch for switch, _ in ends}
        for switch in switches:
            near.setdefault(switch, set()).update(switches - {switch})
    level = dict.fromkeys(nodes, 0)
    front = list(nodes)
    while front:
        beyond = [other for switch in front for other in sorted(near.get(switch, ())) if other not in level]
        level.update((switch, level[front[0]] + 1) for switch in beyond)
        front = list(dict.fromkeys(beyond))
    return level


# Both


def _merged(drawn: _ParsedNetwork, called: Callable[[str], str | None]) -> Topology:
    """Merge switches with the same nodes or children; drop those without nodes of the inventory."""
    switches = list(dict.fromkeys([*drawn.nodes, *drawn.ups, *(up for ups in drawn.ups.values() for up in ups)]))
    unit = {switch: [switch] for switch in switches}
    nodes = {s: list(dict.fromkeys(n for each in drawn.nodes.get(s, ()) if (n := called(each)))) for s in switches}

    def join(names: Iterable[str]) -> bool:
        parts = list({id(unit[name]): unit[name] for name in names}.values())
        for part in parts[1:]:
            parts[0].extend(part)
            unit.update(dict.fromkeys(part, parts[0]))
        return len(parts) > 1

    on: dict[str, list[str]] = {}
    for switch in switches:
        for node in nodes[switch]:
            on.setdefault(node, []).append(switch)
    both = Counter(pair for sharing in on.values() for pair in combinations(sharing, 2))
    for pair, count in both.items():
        if 2 * count >= min(len(nodes[switch]) for switch in pair):  # a storage server on two leaves makes no rails
            join(pair)
    while any([join(up for s in members for up in drawn.ups.get(s, ())) for members in _each(unit)]):
        pass
    names = _names(_each(unit))
    found: dict[str, Switch] = {}
    for members in _each(unit):
        rising = [s for s in members if drawn.ups.get(s)]
        speeds = [gbps for s in rising if (gbps := drawn.gbps.get(s)) is not None]
        above = [names[unit[up][0]] for s in rising for up in drawn.ups[s] if unit[up] is not members]
        found[names[members[0]]] = Switch(
            name=names[members[0]],
            nodes=tuple(dict.fromkeys(node for s in members for node in nodes[s] if unit[on[node][0]] is members)),
            uplink_gbps=sum(speeds) if above and len(speeds) == len(rising) else None,
            parent=above[0] if above else None,
        )
    _bridge(found, _between(drawn, unit, names))
    return sorted_topology(_pruned(found))


def _pruned(found: dict[str, Switch]) -> list[Switch]:
    """Drop switches without nodes below, and top switches with a single child.

    They are remains of nodes outside the inventory: a leaf with only such nodes appears above the spines.
    """
    below: dict[str, set[str]] = {}
    for each in found.values():
        at = each if each.nodes else None
        while at is not None and at.parent in found and at.name not in below.setdefault(at.parent, set()):
            below[at.parent].add(at.name)
            at = found[at.parent]
    kept = {name: switch for name, switch in found.items() if switch.nodes or name in below}
    tops = [switch for switch in kept.values() if switch.parent is None]
    while tops:
        top = tops.pop()
        if not top.nodes and len(below[top.name]) == 1:
            (only,) = below[top.name]
            del kept[top.name]
            kept[only] = replace(kept[only], parent=None)
            tops.append(kept[only])
    return list(kept.values())


def _between(
    drawn: _ParsedNetwork, unit: Mapping[str, list[str]], names: Mapping[str, str]
) -> dict[tuple[str, str], float]:
    """Return `_ParsedNetwork.beside` by units."""
    found: dict[tuple[str, str], float] = {}
    for ends, gbps in drawn.beside.items():
        a, b = (names[unit[end][0]] for end in ends)
        found[a, b] = found.get((a, b), 0.0) + gbps
    return found


def _each(unit: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the distinct units."""
    return list({id(members): members for members in unit.values()}.values())


def _names(units: Iterable[list[str]]) -> dict[str, str]:
    """Return first switch of each unit -> unit name: its switches' common prefix, where that is free."""
    names: dict[str, str] = {}
    for members in units:
        first = re.sub(r"[^A-Za-z0-9._-]|^[^A-Za-z0-9]", "-", members[0])[:63].lstrip("-._") or "switch"
        ends = zip(min(members), max(members), strict=False)  # what these two begin with, all do
        common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], ends)).rstrip("0123456789-_.")
        choices = (common if len(members) > 1 else first, first, *(f"{first[:58]}-{i}" for i in range(2, 9999)))
        names[members[0]] = next(c for c in choices if is_name(c) and c not in names.values())
    return names


def _bridge(found: dict[str, Switch], beside: Mapping[tuple[str, str], float]) -> None:
    """Add a root above top switches that are linked to each other; the links' rates become their uplinks'."""
    up: dict[str, float] = {}
    for (a, b), gbps in beside.items():
        if a != b and found[a].parent is None and found[b].parent is None:
            up[a], up[b] = up.get(a, 0.0) + gbps, up.get(b, 0.0) + gbps
    top = "fabric" if "fabric" not in found else "all-fabric"
    for name, gbps in up.items():
        found[name] = replace(found[name], parent=top, uplink_gbps=gbps or None)
    if up:
        found[top] = Switch(name=top)
