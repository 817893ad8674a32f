"""The wiring from sysfs, lldpctl and NVML's fabric calls; an odd value affects nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.model.readings import GpuWiring, Nic, Wiring
from gpusched.nodes.payload import wiring

PLX = ("pci0000:16", "0000:16:02.0", "0000:17:00.0")
LLDP = """\
lldp.eth0.via=LLDP
lldp.eth0.chassis.mac=00:11:22:33:44:55
lldp.eth0.chassis.name=mgmt-1
lldp.eth0.port.ifname=ge-0/0/1
lldp.ens1f0.100.chassis.name=other
lldp.ens1f0.chassis.mac=aa:bb:cc:dd:ee:ff
lldp.ens1f0.chassis.descr=Cumulus
lldp.ens1f0.port.descr=swp\x1b7
more of a description = of two lines
"""


class Sysfs:
    """A made-up /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, *path: str, numa: str = "0") -> Path:
        folder = self.root.joinpath("devices", *path)
        self.write(folder / "numa_node", numa)
        link = self.root / "bus/pci/devices" / path[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def link(self, place: str, folder: Path, device: Path) -> None:
        (self.root / place).parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "device").symlink_to(device)
        (self.root / place).symlink_to(folder)

    def interface(self, name: str, device: Path, **files: str) -> None:
        folder = device / "net" / name
        self.link(f"class/net/{name}", folder, device)
        for file, text in {"operstate": "up", "type": "1", "dev_port": "0", **files}.items():
            self.write(folder / file, text)

    def card(self, name: str, device: Path, port: str = "1", **files: str) -> None:
        folder = device / "infiniband" / name
        if not folder.exists():
            self.link(f"class/infiniband/{name}", folder, device)
        for file, text in {"state": "4: ACTIVE", "link_layer": "InfiniBand", **files}.items():
            self.write(folder / "ports" / port / file, text)


def test_a_server(tmp_path) -> None:
    sys = Sysfs(tmp_path)
    sys.device(*PLX, "0000:18:01.0", "0000:1a:00.0", numa="0")
    ib = sys.device(*PLX, "0000:18:00.0", "0000:19:00.0", numa="0")
    sys.card("mlx5_0", ib, rate="400 Gb/sec (4X NDR)")
    sys.card("mlx5_0", ib, port="2", rate="10 Gb/sec (4X SDR)", state="1: DOWN")
    sys.interface("ib0", ib, type="32", speed="400000")
    sys.interface("ib1", ib, type="32", dev_port="1", operstate="down")
    roce = sys.device("pci0000:80", "0000:80:01.0", "0000:81:00.0", numa="1")
    sys.card("mlx5_1", roce, rate="100 Gb/sec (4X EDR)", link_layer="Ethernet")
    sys.interface("ens1f0", roce, speed="100000")
    sys.interface("eth0", sys.device("pci0000:00", "0000:00:1f.6", numa="-1"), speed="1000")
    virtual = sys.device("pci0000:80", "0000:80:01.0", "0000:81:00.1")
    (virtual / "physfn").symlink_to(roce)
    sys.card("mlx5_2", virtual, rate="100 Gb/sec (4X EDR)")
    sys.interface("ens1f0v0", virtual, speed="100000")
    sys.interface("usb0", sys.device("pci0000:00", "0000:00:14.0", "usb1", "1-1"), speed="425")
    sys.write(tmp_path / "class/net/br0/operstate", "up")

    gpus = [{"index": 0, "bus": "00000000:1A:00.0", "domain": "u.1"}, {"index": 1, "bus": None, "domain": None}]
    found = msgspec.convert(wiring.read(gpus, str(tmp_path), LLDP), Wiring)
    assert found.gpus == (
        GpuWiring(index=0, pci_path=(*PLX, "0000:18:01.0", "0000:1a:00.0"), numa=0, domain="u.1"),
        GpuWiring(index=1),
    )
    there = (*PLX, "0000:18:00.0", "0000:19:00.0")
    assert found.nics == (
        Nic(name="mlx5_0", kind="infiniband", interface="ib0", up=True, rate_gbps=400.0, pci_path=there, numa=0),
        Nic(name="mlx5_0/2", kind="infiniband", interface="ib1", up=False, pci_path=there, numa=0),
        Nic(name="mlx5_1", kind="roce", interface="ens1f0", up=True, rate_gbps=100.0,
            pci_path=("pci0000:80", "0000:80:01.0", "0000:81:00.0"), numa=1,
            switch="aa:bb:cc:dd:ee:ff", switch_port="swp?7"),
        Nic(name="eth0", kind="ethernet", interface="eth0", up=True, rate_gbps=1.0,
            pci_path=("pci0000:00", "0000:00:1f.6"), switch="mgmt-1", switch_port="ge-0/0/1"),
    )  # fmt: skip
    assert [nic.name for nic in found.fabric_nics()] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    "junk", ["", "-1", "\0\xff\x7f", "100 Gb/sec" * 9999, "nan", "1e999", "9" * 5000, "٤ Gb/sec", "Gb/sec\n" * 10]
)
def test_junk_costs_nothing_else(tmp_path, junk: str) -> None:
    sys = Sysfs(tmp_path)
    bad = sys.device("pci0000:00", "0000:00:01.0", numa=junk)
    files = ("state", "rate", "link_layer", "gid_attrs/ndevs/0")
    sys.card("mlx5_0", bad, port="x", **dict.fromkeys(files, junk))
    sys.interface("eth1", bad, **dict.fromkeys(("speed", "operstate", "type", "dev_port"), junk))
    good = sys.device("pci0000:00", "0000:00:02.0")
    sys.interface("eth2", good, speed="25000")
    (tmp_path / "class/net/gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "class/net/loop").symlink_to(tmp_path / "class/net/loop")
    os.mkdir(tmp_path / "class/net/empty")
    gpus = [{"index": 0, "bus": junk, "domain": None}, {"index": 1, "bus": "0000:00:03.0", "domain": None}]
    found = msgspec.convert(wiring.read(gpus, str(tmp_path), f"{LLDP}lldp.eth2.chassis.name={junk}\n"), Wiring)
    assert [(n.name, n.rate_gbps) for n in found.nics if n.up] == [("eth2", 25.0)]
    assert [len(gpu.pci_path) for gpu in found.gpus] == [0, 1]
    assert len(msgspec.json.encode(found)) < 4000


def test_this_machine() -> None:
    msgspec.convert(wiring.read([]), Wiring)
    assert wiring.read([], "/nowhere", "") == {"gpus": [], "nics": []}


def lldpctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "lldpctl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "lldpctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_lldpctl_is_asked_within_bounds(tmp_path, monkeypatch) -> None:
    lldpctl(tmp_path, monkeypatch, '[ "$*" = "-f keyvalue" ] && echo lldp.eth0.chassis.name=leaf1')
    assert wiring.lldp_neighbours(wiring.ask_lldp()) == {"eth0": {"switch": "leaf1", "switch_port": None}}
    lldpctl(tmp_path, monkeypatch, "exec yes lldp.eth0.chassis.name=leaf1")
    assert len(wiring.ask_lldp()) < 2 * wiring.LLDP_BYTES
    lldpctl(tmp_path, monkeypatch, "echo lldp.eth0.chassis.name=leaf1; exec sleep 6000")
    monkeypatch.setattr(wiring, "LLDP_LIMIT_S", 0.05)
    assert wiring.ask_lldp() == ""
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert wiring.ask_lldp() == ""


@pytest.mark.parametrize(
    ("state", "uuid", "domain"),
    [
        (3, "00" * 8 + "0a" * 8, "00000000-0000-0000-0a0a-0a0a0a0a0a0a.7"),
        (3, "00" * 16, None),  # NVSwitch inside of one server
        (2, "0a" * 16, None),  # has not joined yet
    ],
)
def test_nvlink_domains(state: int, uuid: str, domain: str | None) -> None:
    pynvml = pytest.importorskip("pynvml")
    from gpusched.nodes.payload import nvml

    def fill(handle: Any, reference: Any) -> None:
        info = reference._obj
        info.clusterUuid[:] = bytes.fromhex(uuid)
        info.cliqueId, info.state, info.status = 7, state, 0

    def older(handle: Any, reference: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    both = {name: getattr(pynvml, name) for name in ("c_nvmlGpuFabricInfo_v2_t", "c_nvmlGpuFabricInfo_t")}
    for calls in ({"V": fill, "": older}, {"V": older, "": fill}):
        given = {f"nvmlDeviceGetGpuFabricInfo{suffix}": call for suffix, call in calls.items()}
        assert nvml.fabric(SimpleNamespace(**both, **given), None) == domain
    assert nvml.fabric(SimpleNamespace(), None) is None
