"""Network topology: switches, the nodes below each, and uplink rates."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.model.readings import Wiring

NVLINK = 100
"""The closeness of two GPUs with one NVLink between them; without any it is less (see nodes/payload/nvml.py)."""


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """One switch; a rack is a switch with nodes.

    Attributes:
        nodes: Names of the nodes on it; those on switches below it are not named again.
        uplink_gbps: Total rate of its uplinks, one direction, in Gbit/s; None: never the bottleneck.
        parent: The switch above it; None: a top switch.
    """

    name: str
    nodes: tuple[str, ...] = ()
    uplink_gbps: float | None = None
    parent: str | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The switches of a cluster, parents before children. Without any, all nodes are equally close."""

    switches: tuple[Switch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.switches)

    def racks(self) -> dict[str, str]:
        """Return node -> its switch, for nodes below a switch."""
        return {node: switch.name for switch in self.switches for node in switch.nodes}

    def above(self, name: str) -> tuple[str, ...]:
        """Return the switch and its ancestors, upwards."""
        parents = {switch.name: switch.parent for switch in self.switches}
        path: list[str] = []
        at: str | None = name
        while at is not None and at in parents and at not in path:
            path.append(at)
            at = parents[at]
        return tuple(path)


def discover_topology(wirings: Mapping[str, Wiring]) -> Topology:
    """Derive racks from the nodes' neighbours; nodes without known neighbours are in none.

    Nodes that LLDP sees on one switch are in one rack, and where two switches serve the same nodes both are. Nodes
    without such a neighbour are in one rack where their GPUs are in one NVLink domain. A rack's uplink
    rate and parent are unknown.

    Args:
        wirings: Node -> its wiring.
    """
    racks: dict[str, tuple[set[str], list[str]]] = {}  # switch -> all that serve the same nodes, and these nodes
    for node, wiring in wirings.items():
        switches = _neighbours(wiring)
        joined = list({id(rack): rack for switch in switches if (rack := racks.get(switch))}.values())
        rack = joined[0] if joined else (set(), [])
        rack[0].update(switches, *(other[0] for other in joined[1:]))
        rack[1].extend(node for other in joined[1:] for node in other[1])
        rack[1].append(node)
        racks.update(dict.fromkeys(rack[0] if len(joined) > 1 else switches, rack))
    order = {node: place for place, node in enumerate(wirings)}
    each = {id(rack): rack for rack in racks.values()}.values()
    found = ((sorted(switches), sorted(nodes, key=lambda n: order[n])) for switches, nodes in each)
    return Topology(
        switches=tuple(
            Switch(name="+".join(switches), nodes=tuple(nodes))
            for switches, nodes in sorted(found, key=lambda rack: order[rack[1][0]])
        )
    )


def _neighbours(wiring: Wiring) -> set[str]:
    """Return the switches of its fastest ports with a known neighbour; else its NVLink domain."""
    known = [nic for nic in wiring.nics if nic.switch is not None]
    fastest = max((nic.rate_gbps or 0.0 for nic in known), default=0.0)
    return {nic.switch for nic in known if (nic.rate_gbps or 0.0) == fastest and nic.switch} or set(wiring.domains())


def islands(links: Mapping[int, Mapping[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of GPUs connected by NVLink, from their closeness (`gpusched.model.readings.Gpu.links`)."""
    found: list[set[int]] = []
    for gpu, near in links.items():
        one = {gpu, *(other for other, closeness in near.items() if closeness >= NVLINK)}
        found = [*(s for s in found if not s & one), one.union(*(s for s in found if s & one))]
    return tuple(sorted(tuple(sorted(island)) for island in found if len(island) > 1))
