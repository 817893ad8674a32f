"""``gpusched nodes --topology``: declared or discovered, as a tree and as JSON."""

from __future__ import annotations

import io
import time

import msgspec
import pytest
from rich.console import Console

from gpusched.config.inventory import load_inventory
from gpusched.model.readings import GpuWiring, Nic, NodeState, Wiring
from gpusched.model.reports import TopologyReport, WiredNode
from gpusched.model.topology import Switch, Topology, discover_topology, islands
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import NodeRecord
from gpusched.views.topology import topology_screen
from tests.cli.nodes.conftest import Cluster


def wired(*switches: str, rate: float = 400.0, domain: str | None = None) -> Wiring:
    nics = [Nic(name=f"mlx5_{i}", kind="roce", up=True, rate_gbps=rate, switch=s) for i, s in enumerate(switches)]
    slow = Nic(name="eth0", kind="ethernet", up=True, rate_gbps=1.0, switch="management")
    down = Nic(name="eth1", kind="ethernet", up=False)
    return Wiring(gpus=(GpuWiring(index=0, numa=1, domain=domain),), nics=(*nics, slow, down))


@pytest.fixture
def read(cluster: Cluster) -> Cluster:
    near = {0: {1: 1200, 2: 1200}, 1: {0: 1200}, 2: {0: 1200}, 3: {4: 150, 5: 50}, 4: {}, 5: {}}
    cluster.store.put_nodes(
        NodeRecord(
            name=name,
            state=NodeState.IDLE,
            last_seen=time.time(),
            links=links,
            wired=msgspec.Raw(msgspec.json.encode(wiring)),
        )
        for name, links, wiring in (("dgx1", near, wired("leaf1", "leaf1")), ("dgx2", near, wired("leaf1", "leaf1")))
    )
    return cluster


DECLARED = "topology:\n  r1: {nodes: 'dgx[1-2]', uplink: 800G, parent: spine}\n  r2: {nodes: [here], parent: spine}\n"
TREE = """\
declared in inventory.yaml
spine
├── r1  uplink 800G (2:1)
│   └── dgx[1-2] ×2  A100, 8 GPUs, NVLink 0-2 3-4, 2 × 400G RoCE to leaf1, 1 × 1G Ethernet to management, 1 down
└── r2
    └── here  local, 2 GPUs, wiring not read yet
on no switch
└── gone  local, 2 GPUs, wiring not read yet
"""


def test_the_tree(read: Cluster) -> None:
    read.inventory.write_text(read.inventory.read_text() + DECLARED)
    assert read.run("nodes", "--topology").stdout == TREE
    shown = read.run("nodes", "--topology", "here").stdout.splitlines()
    assert shown[1:] == ["spine", "└── r2", "    └── here  local, 2 GPUs, wiring not read yet"]


def test_json(read: Cluster) -> None:
    report = read.json("nodes", "--topology")
    assert report["source"] == "discovered"
    assert report["switches"] == [{"name": "leaf1", "nodes": ["dgx1", "dgx2"], "uplink_gbps": None, "parent": None}]
    dgx1, *_, gone = report["nodes"]
    assert (dgx1["switch"], dgx1["islands"], dgx1["fabric_gbps"]) == ("leaf1", [[0, 1, 2], [3, 4]], 800.0)
    assert dgx1["gpus"] == [{"index": 0, "pci_path": [], "numa": 1, "domain": None, "minor": None}]
    assert [nic["name"] for nic in dgx1["nics"]] == ["mlx5_0", "mlx5_1", "eth0", "eth1"]
    assert (gone["switch"], gone["read"], gone["fabric_gbps"]) == (None, False, None)
    assert "LLDP" in read.run("nodes", "--topology").stdout


def test_inside_of_a_node() -> None:
    plx = ("pci0000:16", "0000:16:02.0", "0000:17:00.0")
    gpus = [GpuWiring(index=i, numa=0, pci_path=(*plx, f"0000:18:0{i}.0", f"0000:2{i}:00.0")) for i in (0, 1)]
    gpus.append(GpuWiring(index=2, numa=1, pci_path=("pci0000:80", "0000:80:01.0", "0000:81:00.0")))
    near = (*plx, "0000:18:05.0", "0000:30:00.0")
    nics = (
        Nic(name="mlx5_0", kind="roce", up=True, rate_gbps=400.0, pci_path=near, numa=0,
            switch="leaf1", switch_port="swp7"),
        Nic(name="eth0", kind="ethernet", up=False, pci_path=("pci0000:00", "0000:00:1f.6")),
        Nic(name="eth1", kind="ethernet", up=True),
    )  # fmt: skip
    node = WiredNode(name="n", partition="p", gpus_total=3, read=True, gpus=tuple(gpus), nics=nics)
    report = TopologyReport(source="none", switches=(), nodes=(node, msgspec.structs.replace(node, name="m")))
    console = Console(file=io.StringIO(), width=200)
    console.print(topology_screen(report, detail=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.strip() for line in lines[3:7]] == [
        "│   ├── NUMA 0, 0000:17:00.0: GPU 0-1, mlx5_0 400G RoCE to leaf1 swp7",
        "│   ├── NUMA 1, pci0000:80: GPU 2",
        "│   ├── NUMA ?, not on PCI: eth1 Ethernet",
        "│   └── NUMA ?, pci0000:00: eth0 down Ethernet",
    ]
    assert len(lines) == 12, "nodes that are alike have their own lines here"


def test_importing_without_hosts_prints_the_section(cluster: Cluster) -> None:
    conf = cluster.state / "topology.conf"
    conf.write_text(
        "SwitchName=r1 Nodes=dgx[1-2] LinkSpeed=800G\nSwitchName=r2 Nodes=here\nSwitchName=s Switches=r[1-2]"
    )
    section = cluster.run("init", "--topology", str(conf)).stdout
    assert section.splitlines()[2] == '  r1: {nodes: "dgx[1-2]", uplink: 800G, parent: s}'
    cluster.inventory.write_text(cluster.inventory.read_text() + section)
    assert [s["name"] for s in cluster.json("nodes", "--topology")["switches"]] == ["s", "r1", "r2"]
    wrong = cluster.run("init", "--topology", str(conf.parent / "none"), code=2).stderr
    assert "none: no such file or directory; expected what ibnetdiscover" in wrong


def test_without_any(cluster: Cluster) -> None:
    assert cluster.json("nodes", "--topology", "dgx1")["source"] == "none"
    assert "dgx[1-2] ×2  A100, 8 GPUs, wiring not read yet" in cluster.run("nodes", "--topology").stdout


def test_declared_beats_discovered_in_decisions(read: Cluster) -> None:
    def decided() -> Topology:
        return snapshot_of_store(read.store, load_inventory(read.inventory), {}, time.time()).topology

    assert decided() == Topology(switches=(Switch(name="leaf1", nodes=("dgx1", "dgx2")),))
    read.inventory.write_text(read.inventory.read_text() + DECLARED)
    assert decided().racks() == {"dgx1": "r1", "dgx2": "r1", "here": "r2"}


def test_racks_by_neighbours() -> None:
    found = discover_topology({
        "a": wired("l1"), "b": wired("l2"), "c": wired("l1", "l2"), "d": wired("l3"), "e": Wiring(),
        "f": Wiring(gpus=(GpuWiring(index=0, domain="u.1"),)), "g": Wiring(gpus=(GpuWiring(index=3, domain="u.1"),)),
        "h": wired("l3", domain="u.1"),
    })  # fmt: skip
    assert [(s.name, s.nodes) for s in found.switches] == [
        ("l1+l2", ("a", "b", "c")), ("l3", ("d", "h")), ("u.1", ("f", "g")),
    ]  # fmt: skip
    pairs = {"a": wired("l1"), "b": wired("l2", "l3"), "c": wired("l1", "l2"), "d": wired("l3")}
    assert [s.nodes for s in discover_topology(pairs).switches] == [("a", "b", "c", "d")]


def test_islands() -> None:
    assert islands({0: {1: 60}, 1: {}}) == ()
    assert islands({0: {1: 100}, 1: {}, 2: {3: 100}, 3: {4: 100}, 4: {}}) == ((0, 1), (2, 3, 4))
