"""Switches as declared: what is read, and in what order it comes out."""

from pathlib import Path

import pytest

from gpusched.config.fields import parse_gbps
from gpusched.config.inventory import load_inventory
from gpusched.config.topology import load_topology
from gpusched.model.topology import Switch, Topology

PARTITIONS = """\
partitions:
  A:
    defaults: {gpus: 8, cores: 16, memory: 64G, runtime: podman}
    nodes: ['gpu-[01-08]']
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "inventory.yaml"
    path.write_text(text)
    return path


def test_the_words_of_the_issue(tmp_path) -> None:
    path = written(tmp_path, PARTITIONS + "topology: {r1: {nodes: gpu-[01-04], uplink: 100G, parent: spine}}\n")
    topology = load_inventory(path).topology
    assert topology.switches == (
        Switch(name="spine"),
        Switch(name="r1", nodes=("gpu-01", "gpu-02", "gpu-03", "gpu-04"), uplink_gbps=100.0, parent="spine"),
    )
    assert load_topology(path) == topology
    assert load_inventory(written(tmp_path, PARTITIONS + "topology:\n")).topology == Topology()
    assert load_inventory(written(tmp_path, PARTITIONS)).topology == Topology()


def test_those_above_come_first(tmp_path) -> None:
    text = """\
r1: {nodes: 'n[1-2],n5', uplink: 4x100G, parent: pod1}  # n[7-8], not yet
r2: {nodes: [n3, r[1-2]x[3-4]], uplink_gbps: 12.5, parent: pod1}
pod1: {uplink: 1.6T, parent: core}
core:
"""
    topology = load_topology(written(tmp_path, text))
    assert [(s.name, s.uplink_gbps) for s in topology.switches] == [
        ("core", None),
        ("pod1", 1600.0),
        ("r1", 400.0),
        ("r2", 12.5),
    ]
    assert topology.above("r2") == ("r2", "pod1", "core")
    assert topology.racks() == dict.fromkeys(("n1", "n2", "n5"), "r1") | dict.fromkeys(
        ("n3", "r1x3", "r1x4", "r2x3", "r2x4"), "r2"
    )


@pytest.mark.parametrize(
    ("text", "gbps"),
    [("100G", 100), ("4x100G", 400), ("400Gb/s", 400), ("2 x 25 Gbit/s", 50), ("200gbps", 200), ("2500M", 2.5)],
)
def test_rates(text: str, gbps: float) -> None:
    assert parse_gbps(text) == gbps


def test_a_switch_called_topology(tmp_path) -> None:
    assert load_topology(written(tmp_path, "topology: {nodes: [n1]}\n")).racks() == {"n1": "topology"}
