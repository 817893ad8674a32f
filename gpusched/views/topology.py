"""The topology: a tree of switches, and what each node contains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from gpusched.model.readings import Nic
from gpusched.model.reports import TopologyReport, WiredNode
from gpusched.model.topology import Switch
from gpusched.model.units import format_gbps
from gpusched.views import common

_KINDS = {"infiniband": "InfiniBand", "roce": "RoCE", "rdma": "RDMA", "ethernet": "Ethernet"}
_SOURCES = {
    "declared": "declared in inventory.yaml",
    "discovered": "discovered from LLDP and NVLink; topology: in inventory.yaml overrides it",
    "none": "no switches known; declare them with topology: in inventory.yaml",
}


def topology_screen(report: TopologyReport, *, detail: bool = False) -> RenderableType:
    """Return one tree for each top-level switch, then the nodes that no switch lists.

    ``detail``: in each node its GPUs and NICs, by NUMA node and by the part of PCIe that they share.
    """
    nodes_by_switch: dict[str | None, list[WiredNode]] = {}
    for node in report.nodes:
        nodes_by_switch.setdefault(node.switch, []).append(node)
    known = {switch.name for switch in report.switches}
    trees: dict[str, Tree] = {}
    parts: list[RenderableType] = [Text(_SOURCES[report.source], "dim")]
    for switch in report.switches:
        parent = trees.get(switch.parent or "")
        label = _switch_line(switch, nodes_by_switch.get(switch.name, ()))
        trees[switch.name] = Tree(label, guide_style="dim") if parent is None else parent.add(label)
        if parent is None:
            parts.append(trees[switch.name])
    for switch in report.switches:
        _add_nodes(trees[switch.name], nodes_by_switch.get(switch.name, ()), detail)
    if unconnected := [node for name, nodes in nodes_by_switch.items() if name not in known for node in nodes]:
        tree = Tree(Text("on no switch" if report.switches else "nodes", "yellow" if report.switches else "bold"))
        tree.guide_style = "dim"
        _add_nodes(tree, unconnected, detail)
        parts.append(tree)
    return Group(*parts)


def _switch_line(switch: Switch, nodes: Sequence[WiredNode]) -> Text:
    line = Text(common.clean(switch.name), "bold")
    if switch.uplink_gbps is not None:
        line.append(f"  uplink {format_gbps(switch.uplink_gbps)}", "not bold")
        downlinks = [node.fabric_gbps for node in nodes if node.fabric_gbps is not None]
        if nodes and len(downlinks) == len(nodes) and (ratio := sum(downlinks) / switch.uplink_gbps) > 1:
            line.append(f" ({ratio:.2g}:1)", "not bold yellow")
    return line


def _add_nodes(tree: Tree, nodes: Iterable[WiredNode], detail: bool) -> None:
    """Add nodes, equal ones on one line."""
    equal: dict[tuple[str, str], list[WiredNode]] = {}
    for node in nodes:
        equal.setdefault((_summary(node), node.name if detail else ""), []).append(node)
    for (words, _), members in equal.items():
        line = Text(common.compress_names(node.name for node in members), "cyan")
        line.append(f" ×{len(members)}" if len(members) > 1 else "", "dim")
        line.append(f"  {words}", "default")
        branch = tree.add(line)
        for label in _parts(members[0]) if detail else ():
            branch.add(Text(common.clean(label)))


def _parts(node: WiredNode) -> Iterator[str]:
    """Yield the devices on each part of PCIe: below one switch, or one root."""
    parts: dict[tuple[int | None, str], tuple[list[int], list[str]]] = {}
    for gpu in node.gpus:
        parts.setdefault(_pci_location(gpu.numa, gpu.pci_path), ([], []))[0].append(gpu.index)
    for nic in node.nics:
        rate = "down" if nic.up is False else "" if nic.rate_gbps is None else format_gbps(nic.rate_gbps)
        port = f" {nic.switch_port}" if nic.switch_port else ""
        words = (nic.name, rate, _KINDS[nic.kind], f"to {nic.switch}{port}" if nic.switch else "")
        parts.setdefault(_pci_location(nic.numa, nic.pci_path), ([], []))[1].append(" ".join(filter(None, words)))
    for (numa, where), (gpus, nics) in sorted(parts.items(), key=lambda part: (part[0][0] is None, part[0])):
        found = [f"GPU {common.ranges(gpus)}", *nics] if gpus else nics
        yield f"{'NUMA ?' if numa is None else f'NUMA {numa}'}, {where or 'not on PCI'}: {', '.join(found)}"


def _pci_location(numa: int | None, path: Sequence[str]) -> tuple[int | None, str]:
    """Return the NUMA node, and the bridge above a device and its port."""
    return numa, path[max(0, len(path) - 3)] if path else ""


def _summary(node: WiredNode) -> str:
    words = [node.partition, f"{node.gpus_total} GPU{'s' * (node.gpus_total != 1)}"]
    if not node.read:
        return ", ".join([*words, "wiring not read yet"])
    if node.islands:
        words.append("NVLink " + " ".join(common.ranges(island) for island in node.islands))
    words += [f"NVLink domain {domain}" for domain in node.domains]
    words += _nics(node.nics) or ["no NICs"]
    return common.clean(", ".join(words))


def _nics(nics: Sequence[Nic]) -> list[str]:
    counts = Counter((_KINDS[nic.kind], nic.rate_gbps, nic.switch) for nic in nics if nic.up)
    found = [
        f"{n} × {'' if rate is None else f'{format_gbps(rate)} '}{kind}{f' to {to}' if to else ''}"
        for (kind, rate, to), n in counts.items()
    ]
    down = sum(nic.up is False for nic in nics)
    return [*found, f"{down} down"] if down else found
