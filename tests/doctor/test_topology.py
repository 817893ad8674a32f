"""The declared network against the nodes' reports."""

from __future__ import annotations

from typing import Any

from gpusched.doctor.topology import judge_topology
from gpusched.model.readings import GpuWiring, Nic, Wiring
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName
from gpusched.model.topology import Switch, Topology

NAMES = [f"g{i}" for i in range(1, 7)]
RACKS = (
    Switch(name="r1", nodes=("g1", "g2", "g3"), uplink_gbps=800.0),
    Switch(name="r2", nodes=("g4", "g5", "g6")),
)


def inventory(*switches: Switch, **partitions: list[str]) -> Inventory:
    def node(name: str, partition: str) -> Node:
        return Node(name=name, partition=partition, address=name, gpus=8, cores=8, memory_mib=8,
                    runtime=RuntimeName.PROCESS)  # fmt: skip

    made = {p: [node(n, p) for n in names] for p, names in (partitions or {"p": NAMES}).items()}
    return Inventory(
        path="i.yaml",
        partitions=tuple(Partition(name=p, nodes=tuple(nodes), flavors=()) for p, nodes in made.items()),
        topology=Topology(switches=switches),
    )


def wired(switch: str | None, rate: float = 400.0, nics: int = 2, domain: str | None = None) -> Wiring:
    ports = (Nic(name=f"m{i}", kind="roce", up=True, rate_gbps=rate, switch=switch) for i in range(nics))
    slow = Nic(name="eth0", kind="ethernet", up=True, rate_gbps=1.0)
    return Wiring(gpus=(GpuWiring(index=0, domain=domain),), nics=(*ports, slow))


AGREED = dict.fromkeys(("g1", "g2", "g3"), wired("l1")) | dict.fromkeys(("g4", "g5", "g6"), wired("l2"))


def messages(found: Inventory, **changes: Wiring) -> list[str]:
    return [f.message for f in judge_topology(found, AGREED | changes) if f.status == "warn"]


def test_agreement() -> None:
    (finding,) = judge_topology(inventory(*RACKS), AGREED)
    assert (finding.status, finding.message) == (
        "ok", "2 racks; confirmed by 6 of 6 nodes",
    )  # fmt: skip
    assert judge_topology(inventory(), AGREED) == [], "nothing is declared"
    (finding,) = judge_topology(inventory(*RACKS), {})
    assert finding.status == "ok"


def test_a_node_on_another_switch() -> None:
    assert messages(inventory(*RACKS), g3=wired("l2")) == [
        "LLDP sees g3 on l2, but most nodes of r1 on l1",
    ]


def test_two_racks_on_one_switch() -> None:
    assert messages(inventory(*RACKS), **dict.fromkeys(("g4", "g5", "g6"), wired("l1"))) == [
        "r1, r2 are declared as different racks, but LLDP sees all of them on l1",
    ]


def test_a_node_that_no_switch_names() -> None:
    short = Switch(name="r2", nodes=("g4",))
    assert messages(inventory(RACKS[0], short)) == ["not on any switch: g[5-6]"]
    assert messages(inventory(Switch(name="spine"))) == ["not on any switch: g[1-6]"]


def test_an_uplink_slower_than_a_nic() -> None:
    slow = Switch(name="r1", nodes=("g1", "g2", "g3"), uplink_gbps=100.0)
    assert messages(inventory(slow, RACKS[1])) == ["the uplink of r1, 100G, is slower than one NIC of g3 (400G)"]


def test_nics_that_differ_within_a_partition() -> None:
    changes: dict[str, Any] = {"g2": wired("l1", rate=200.0), "g5": wired("l2", nics=1), "g6": wired(None, nics=0)}
    assert messages(inventory(*RACKS), **changes) == [
        "g2 has 2 x 200G, most of p have 2 x 400G",
        "g5 has 1 x 400G, most of p have 2 x 400G",
        "g6 has 1 x 1G, most of p have 2 x 400G",
    ]
    apart = inventory(*RACKS, p=["g1", "g3", "g4", "g5", "g6"], q=["g2"])
    assert messages(apart, g2=wired("l1", rate=200.0)) == []


def test_an_nvlink_domain_across_racks() -> None:
    changes = {"g3": wired("l1", domain="u.1"), "g4": wired("l2", domain="u.1"), "g5": wired("l2", domain="u.2")}
    assert messages(inventory(*RACKS), **changes) == ["the NVLink domain u.1 of g[3-4] spans r1, r2"]
    assert messages(inventory(*RACKS), g3=wired(None, domain="u.1")) == [], "no LLDP, and alone in its domain"
