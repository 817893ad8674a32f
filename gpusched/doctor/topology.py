"""Compare the declared network with what nodes report of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpusched.doctor.findings import Finding
from gpusched.model.readings import Wiring
from gpusched.model.resources import Inventory
from gpusched.model.topology import discover_topology
from gpusched.model.units import count_of, format_gbps
from gpusched.views.common import compress_names

_HINT = "fix topology: in the inventory, or the cables; 'gpusched nodes --topology' shows both"


def judge_topology(inventory: Inventory, wirings: Mapping[str, Wiring]) -> list[Finding]:
    """Contradictions between declared racks and the nodes' wiring (node -> as read), and odd NICs within partitions."""
    racks = inventory.topology.racks()
    found = [*_unnamed(inventory, racks), *_neighbours(racks, wirings), *_domains(racks, wirings)]
    found += [*_uplinks(inventory, wirings), *_rates(inventory, wirings)]
    findings = [Finding(inventory.path, "topology", "warn", message, hint) for message, hint in found]
    if inventory.topology and not findings:
        confirmed, count = sum(node in wirings for node in racks), count_of(len(racks), "node")
        message = f"{count_of(len(set(racks.values())), 'rack')}; confirmed by {confirmed} of {count}"
        return [Finding(inventory.path, "topology", "ok", message)]
    return findings


def _unnamed(inventory: Inventory, racks: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    left = [node.name for node in inventory.nodes if node.name not in racks]
    if inventory.topology and left:
        yield (
            f"not on any switch: {compress_names(left)}",
            "add them to their switch: until then they count as distant from all nodes",
        )


def _neighbours(racks: Mapping[str, str], wirings: Mapping[str, Wiring]) -> Iterator[tuple[str, str]]:
    """Nodes that LLDP sees elsewhere than most of their rack, and racks that it sees on the same switch."""
    own = {node: msgspec.structs.replace(wiring, gpus=()) for node, wiring in wirings.items() if node in racks}
    seen = discover_topology(own).racks()
    usual: dict[str, str] = {}
    for rack in dict.fromkeys(racks[node] for node in seen):
        members = [node for node in seen if racks[node] == rack]
        usual[rack] = Counter(seen[node] for node in members).most_common(1)[0][0]
        for switch in dict.fromkeys(seen[node] for node in members if seen[node] != usual[rack]):
            names = compress_names(node for node in members if seen[node] == switch)
            yield f"LLDP sees {names} on {switch}, but most nodes of {rack} on {usual[rack]}", _HINT
    for switch, together in _groups((switch, rack) for rack, switch in usual.items()).items():
        if len(together) > 1:
            yield f"{', '.join(together)} are declared as different racks, but LLDP sees all of them on {switch}", _HINT


def _domains(racks: Mapping[str, str], wirings: Mapping[str, Wiring]) -> Iterator[tuple[str, str]]:
    members = _groups((domain, node) for node, w in wirings.items() if node in racks for domain in w.domains())
    for domain, nodes in members.items():
        across = list(dict.fromkeys(racks[node] for node in nodes))
        if len(across) > 1:
            yield f"the NVLink domain {domain} of {compress_names(nodes)} spans {', '.join(across)}", _HINT


def _uplinks(inventory: Inventory, wirings: Mapping[str, Wiring]) -> Iterator[tuple[str, str]]:
    for switch in inventory.topology.switches:
        nics = [(nic.rate_gbps or 0.0, node) for node in switch.nodes if node in wirings
                for nic in wirings[node].fabric_nics()]  # fmt: skip
        fastest, node = max(nics, default=(0.0, ""))
        if switch.uplink_gbps is not None and switch.uplink_gbps < fastest:
            up, one = format_gbps(switch.uplink_gbps), format_gbps(fastest)
            hint = "uplink: is the total of all uplinks of the switch, in bits, such as 8x400G"
            yield f"the uplink of {switch.name}, {up}, is slower than one NIC of {node} ({one})", hint


def _rates(inventory: Inventory, wirings: Mapping[str, Wiring]) -> Iterator[tuple[str, str]]:
    """NICs that are not like those of most nodes of the partition."""
    for partition in inventory.partitions:
        has = {node.name: _fabric(wirings[node.name]) for node in partition.nodes if node.name in wirings}
        usual = Counter(has.values()).most_common(1)[0][0] if has else ""
        for words, names in _groups((words, node) for node, words in has.items() if words != usual).items():
            what = f"{compress_names(names)} has {words or 'no NIC with a link'}"
            others = f"most of {partition.name} have {usual or 'none'}"
            yield f"{what}, {others}", "is a link slow or down? check ethtool or ibstat on the node"


def _fabric(wiring: Wiring) -> str:
    counts = Counter(nic.rate_gbps or 0.0 for nic in wiring.fabric_nics())
    return " and ".join(f"{n} x {format_gbps(rate)}" for rate, n in sorted(counts.items(), reverse=True))


def _groups(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
