"""Networks as Slurm and ibnetdiscover write them, in samples of these formats made for this."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.config.fabric import import_topology, read_ibnetdiscover, read_slurm_topology
from gpusched.errors import FileError
from gpusched.model.topology import Topology

CONF = """\
# A fat tree
SwitchName=leaf1 Nodes=gpu-[01-04] LinkSpeed=4x100G
switchname=leaf2 nodes=gpu-05,gpu-[06-07] \\
   LinkSpeed=400       # what Slurm's manual leaves open
SwitchName=leaf3 Nodes=r[1-2]n[1-2] LinkSpeed=3
SwitchName=spine1 Switches=leaf[1-3]
SwitchName=spine2 Switches=leaf[1-3] LinkSpeed=800
SwitchName=edge Nodes=login1
"""
YAML = """\
---
- topology: blocks
  cluster_default: {blocks_first}
  block:
    block_sizes:
      - 4
    blocks:
      - block: b1
        nodes: gpu-[01-04]
      - block: b2
        nodes: gpu-[05-08]
- topology: tree
  cluster_default: {tree_first}
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: gpu-[01-04]
      - switch: s2
        nodes: gpu-[05-08]
- topology: flat
  flat: true
"""


def drawn(topology: Topology) -> dict[str, tuple[int, float | None, str | None]]:
    return {s.name: (len(s.nodes), s.uplink_gbps, s.parent) for s in topology.switches}


def test_slurm_conf() -> None:
    topology = read_slurm_topology(CONF)
    assert drawn(topology) == {
        "spine": (0, None, None),
        "edge": (1, None, None),
        "leaf1": (4, 400.0, "spine"),
        "leaf2": (3, 400.0, "spine"),
        "leaf3": (4, None, "spine"),
    }
    assert topology.racks()["gpu-07"] == "leaf2"
    assert topology.racks()["r2n1"] == "leaf3"
    ours = read_slurm_topology(CONF, lambda name: {"gpu-01": "a", "gpu-05": "b"}.get(name))
    assert drawn(ours) == {"spine": (0, None, None), "leaf1": (1, 400.0, "spine"), "leaf2": (1, 400.0, "spine")}
    assert ours.racks() == {"a": "leaf1", "b": "leaf2"}
    blocks = read_slurm_topology("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n")
    assert blocks.racks() == {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}


def test_slurm_yaml() -> None:
    tree = {"sw_root": (0, None, None), "s1": (4, None, "sw_root"), "s2": (4, None, "sw_root")}
    assert drawn(read_slurm_topology(YAML.format(blocks_first="false", tree_first="true"))) == tree
    blocks = {"b1": (4, None, None), "b2": (4, None, None)}
    assert drawn(read_slurm_topology(YAML.format(blocks_first="true", tree_first="true"))) == blocks


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=b Node=n1\n", ":2: Node: found an unknown key"),
        ("SwitchName=a Nodes=n[1-\n", ':1: nodes: found "n[1-", expected names of nodes'),
        ("SwitchName=a Nodes=n[4-2]\n", ':1: nodes: found "n[4-2]", expected a range'),
        ("SwitchName=a Nodes=n1\n\nSwitchName=a \\\n Nodes=n2\n", ':3: found "a" again'),
        ("SwitchName=a Nodes=n1\nhello\n", ':2: found "hello", expected KEY=VALUE'),
        ("hello: [\n", ":2: found neither a topology.conf nor a topology.yaml"),
        ("- topology: x\n  flat: true\n", ":1: found a list, expected a topology with tree or block"),
        ("- tree:\n    switches:\n      - nodes: n1\n", ":3: [0].tree.switches[0].switch: found nothing"),
        ("", ": found no switch with nodes, expected what ibnetdiscover prints"),
    ],
)
def test_errors(tmp_path, monkeypatch, text: str, where: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.conf").write_text(text)
    with pytest.raises(FileError) as caught:
        import_topology("f.conf")
    assert caught.value.line().startswith(f"f.conf{where}")


class Fabric:
    """The text of ibnetdiscover for a network of links."""

    def __init__(self) -> None:
        self.ports: dict[str, list[str]] = {}
        self.names: dict[str, str] = {}

    def _guid(self, name: str) -> str:
        return self.names.setdefault(name, f"{0x248A070300000000 + len(self.names):016x}")

    def host(self, switch: str, description: str, rate: str = "4xHDR") -> Fabric:
        ports, guid = self.ports.setdefault(switch, []), self._guid(f"H {description}")
        ports.append(f'[{len(ports) + 1}]\t"H-{guid}"[1]({guid[2:]}) \t\t# "{description}" lid 12 {rate}')
        return self

    def link(self, low: str, high: str, rate: str = "4xHDR") -> Fabric:
        a, b = self.ports.setdefault(low, []), self.ports.setdefault(high, [])
        p, q = len(a) + 1, len(b) + 1
        a.append(f'[{p}]\t"S-{self._guid(high)}"[{q}]\t\t# "MF0;{high}:MQM8700/U1" lid 3 {rate}')
        b.append(f'[{q}]\t"S-{self._guid(low)}"[{p}]\t\t# "MF0;{low}:MQM8700/U1" lid 4 {rate}')
        return self

    def text(self) -> str:
        lines = ["#", "# Topology file: generated on Mon Nov 10 08:46:55 2025", "#", ""]
        for name, ports in self.ports.items():
            guid = self._guid(name)
            described = f"MF0;{name}:MQM8700/U1" if name[0] != "?" else "Quantum Mellanox Technologies"
            lines += ["vendid=0x2c9", "devid=0xd2f0", f"switchguid=0x{guid}({guid})"]
            lines += [f'Switch\t41 "S-{guid}"\t\t# "{described}" enhanced port 0 lid 3 lmc 0', *ports, ""]
        lines += ['Ca\t1 "H-98039b03"\t\t# "gpu-99 mlx5_0"']
        lines += ['[1](98039b03) \t"S-248a0703"[1]\t\t# lid 12 lmc 0 "MF0;leaf1:MQM8700/U1" lid 3 4xHDR']
        return "\n".join(lines)


def test_a_fat_tree_of_infiniband() -> None:
    fabric = Fabric()
    for leaf, hosts in (("leaf1", ("gpu-01", "gpu-02")), ("leaf2", ("gpu-03", "gpu-04.cluster"))):
        for host in hosts:
            fabric.host(leaf, f"{host} mlx5_0").host(leaf, f"{host} mlx5_1")
        fabric.host(leaf, "Mellanox Technologies Aggregation Node")
        fabric.link(leaf, "spine-1").link(leaf, "spine-2").link(leaf, "spine-2", "2xHDR")
    topology = read_ibnetdiscover(fabric.text())
    assert drawn(topology) == {"spine": (0, None, None), "leaf1": (2, 500.0, "spine"), "leaf2": (2, 500.0, "spine")}
    assert topology.racks()["gpu-04.cluster"] == "leaf2"
    ours = read_ibnetdiscover(fabric.text(), lambda name: name if name == "gpu-01" else None)
    assert drawn(ours) == {"leaf1": (1, 500.0, None)}, "what is not ours holds nothing together"
    assert not read_ibnetdiscover(fabric.text(), lambda name: None)


def test_rails_are_one_rack() -> None:
    fabric = Fabric()
    for unit in ("a", "b"):
        for rail in (1, 2):
            for host in (1, 2):
                fabric.host(f"{unit}-rail{rail}", f"{unit}{host} mlx5_{rail}", "4xNDR")
            fabric.link(f"{unit}-rail{rail}", f"?{rail}", "4xNDR")
    topology = read_ibnetdiscover(fabric.text())
    top = topology.switches[0].name
    assert drawn(topology) == {top: (0, None, None), "a-rail": (2, 800.0, top), "b-rail": (2, 800.0, top)}


def test_a_storage_server_on_two_leaves_makes_no_rack_of_them() -> None:
    fabric = Fabric()
    for leaf in (1, 2):
        for host in range(4):
            fabric.host(f"leaf{leaf}", f"n{leaf}{host} HCA-1")
        fabric.host(f"leaf{leaf}", f"storage HCA-{leaf}").link(f"leaf{leaf}", "spine")
    topology = read_ibnetdiscover(fabric.text())
    assert drawn(topology) == {"spine": (0, None, None), "leaf1": (5, 200.0, "spine"), "leaf2": (4, 200.0, "spine")}


def test_parts_of_a_chassis_and_an_output_that_ends_early() -> None:
    text = (
        'Switch 36 "S-01"  # "MF0;director:SX6536/L01/U1" enhanced port 0 lid 3 lmc 0\n'
        '[1][ext 4] "H-0a"[1](0a) # "n1 HCA-1" lid 4 4xFDR\n[19] "S-03"[1] # "MF0;director:SX6536/S01/U1" lid 9 4xFDR\n'
        'Switch 36 "S-02"  # "MF0;director:SX6536/L02/U1" enhanced port 0 lid 5 lmc 0\n'
        '[1][ext 4] "H-0b"[1](0b) # "n2 HCA-1" lid 6 4xFDR\n[19] "S-03"[2] # "MF0;director:SX6536/S01/U1" lid 9 4xFDR\n'
    )
    assert drawn(read_ibnetdiscover(text)) == {
        "S-03": (0, None, None),
        "director": (1, 56.0, "S-03"),
        "director-L02-U1": (1, 56.0, "S-03"),
    }


def test_leaves_without_a_spine() -> None:
    fabric = Fabric().host("x1", "n1 HCA-1").host("x2", "n2 HCA-1").host("x3", "n3 HCA-1")
    fabric.link("x1", "x2").link("x2", "x3", "1xFDR")
    assert drawn(read_ibnetdiscover(fabric.text())) == {
        "fabric": (0, None, None),
        "x1": (1, 200.0, "fabric"),
        "x2": (1, 214.0, "fabric"),
        "x3": (1, 14.0, "fabric"),
    }


def test_three_levels() -> None:
    fabric = Fabric()
    for pod in (1, 2):
        for leaf in (1, 2):
            fabric.host(f"p{pod}l{leaf}", f"n{pod}{leaf} mlx5_0")
            fabric.link(f"p{pod}l{leaf}", f"p{pod}s1").link(f"p{pod}l{leaf}", f"p{pod}s2")
        for spine in (1, 2):
            fabric.link(f"p{pod}s{spine}", f"core{spine}")
    topology = read_ibnetdiscover(fabric.text())
    assert drawn(topology) == {
        "core": (0, None, None),
        "p1s": (0, 400.0, "core"),
        "p2s": (0, 400.0, "core"),
        "p1l1": (1, 400.0, "p1s"), "p1l2": (1, 400.0, "p1s"),
        "p2l1": (1, 400.0, "p2s"), "p2l2": (1, 400.0, "p2s"),
    }  # fmt: skip
    ours = read_ibnetdiscover(fabric.text(), lambda name: name if name != "n22" else None)
    assert drawn(ours)["p2l1"] == (1, 400.0, "p2s")
    ours = read_ibnetdiscover(fabric.text(), lambda name: name if name < "n2" else None)
    assert drawn(ours) == {"p1s": (0, 400.0, None), "p1l1": (1, 400.0, "p1s"), "p1l2": (1, 400.0, "p1s")}
