"""init without hosts: names, powers, flavors, and a file that can always be read back."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.bootstrap import Discovered, NotDiscovered, inventory_text, known_names, parse_hosts, write_inventory
from gpusched.bootstrap.discover import Host, choose_runtime, describe, gpu_type, rated_power
from gpusched.config.fabric import import_topology
from gpusched.config.fields import is_name
from gpusched.config.inventory import load_inventory
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Flavor, RuntimeName
from gpusched.nodes.inspection import Inspection, RuntimeFacts


def server(name: str, **values: object) -> Discovered:
    defaults: dict[str, object] = {
        "gpus": 8,
        "gpu_type": "A100",
        "gpu_memory_mib": 40960,
        "cores": 256,
        "memory_mib": 1031000,
        "runtime": RuntimeName.PODMAN,
        "rated_power_w": 6500.0,
    }
    return Discovered(host=Host(name, name), name=name, **{**defaults, **values})  # type: ignore[arg-type]


def test_an_imported_topology_is_written_with_our_names(tmp_path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text(
        "SwitchName=leaf1 Nodes=gpu01.cluster,gpu02,login LinkSpeed=400G\nSwitchName=leaf2 Nodes=10.0.0.3\n"
        "SwitchName=top Switches=leaf[1-2]\n"
    )
    hosts = [server("gpu01"), server("gpu02"), server("gpu03")]
    hosts[1] = msgspec.structs.replace(hosts[1], host=Host("gpu02.site", "gpu02.site"))
    hosts[2] = msgspec.structs.replace(hosts[2], host=Host("10.0.0.3", "10.0.0.3"))
    text = inventory_text(hosts, topology=import_topology(conf, known_names(hosts)))
    assert text.endswith(
        "\ntopology:\n  top: {}\n"
        '  leaf1: {nodes: "gpu[01-02]", uplink: 400G, parent: top}\n  leaf2: {nodes: gpu03, parent: top}\n'
    )
    write_inventory(tmp_path / "inventory.yaml", text)
    racks = load_inventory(tmp_path / "inventory.yaml").topology.racks()
    assert racks == {"gpu01": "leaf1", "gpu02": "leaf1", "gpu03": "leaf2"}
    assert "topology" not in inventory_text(hosts, topology=import_topology(conf, lambda name: None))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090Ti"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA L40S", "L40S"),
        ("Graphics Device", "GPU"),
        ("", "GPU"),
    ],
)
def test_gpu_type(name: str, short: str) -> None:
    assert gpu_type(name) == short


@pytest.mark.parametrize(
    ("product", "limits", "expected"),
    [
        ("DGXA100 920-23687-2530-000", [400.0] * 8, (6500.0, False)),
        ("DGX-1 with V100-32", [300.0] * 8, (3500.0, False)),
        ("DGX-2", [350.0] * 16, (10000.0, False)),
        ("DGXH100", [700.0] * 8, (10200.0, False)),
        ("DGX Station A100 920", [275.0] * 4, (1900.0, True)),
        ("X11DPG", [400.0] * 8, (5600.0, True)),
        ("X11DPG", [400.0, None], (None, True)),
        ("X11DPG", [], (None, True)),
    ],
)
def test_rated_power(product: str, limits: list[float | None], expected: tuple[float | None, bool]) -> None:
    gpus = tuple(Gpu(index=i, power_limit_w=w) for i, w in enumerate(limits))
    assert rated_power(product, NodeReading(node="n", time=0.0, gpus=gpus)) == expected


def test_runtime_is_the_first_that_can_give_gpus() -> None:
    podman, docker = RuntimeFacts(name="podman", cdi=False), RuntimeFacts(name="docker", toolkit=True)
    assert choose_runtime(Inspection(runtimes=(podman, docker)), 8)[0] is RuntimeName.DOCKER
    assert choose_runtime(Inspection(runtimes=(podman, docker)), 0)[0] is RuntimeName.PODMAN
    runtime, notes = choose_runtime(Inspection(runtimes=(podman,)), 8)
    assert runtime is RuntimeName.PODMAN
    assert "nvidia-ctk cdi generate" in notes[0]
    broken = RuntimeFacts(name="docker", error="no daemon")
    assert choose_runtime(Inspection(runtimes=(broken,)), 8)[0] is RuntimeName.PROCESS


def test_hosts() -> None:
    hosts = parse_hosts(["dgx[1-2]", "root@10.0.0.1:2222", "[fe80::1]:22", "a.example.org"])
    assert [(h.address, h.user, h.port) for h in hosts] == [
        ("dgx1", None, None),
        ("dgx2", None, None),
        ("10.0.0.1", "root", 2222),
        ("fe80::1", None, 22),
        ("a.example.org", None, None),
    ]
    for bad in (["a b"], ["-oProxyCommand=x"], ["h:99999"], ["h:x"], ["@h"], ["a", "a"], ["n[2-1]"], []):
        with pytest.raises(UsageError):
            parse_hosts(bad)


def test_dgx_a100s_become_the_paper_s_partition(tmp_path: Path) -> None:
    servers = [server("dgx1", memory_mib=1 << 20), server("dgx2", memory_mib=1 << 20)]
    write_inventory(tmp_path / "inventory.yaml", inventory_text(servers))
    inventory = load_inventory(tmp_path / "inventory.yaml")
    (partition,) = inventory.partitions
    paper = load_inventory(Path(__file__).parents[2] / "inventory.yaml").partition("A100")
    assert paper is not None
    assert partition.flavors == paper.flavors
    assert [(n.gpus, n.cores, n.memory_mib, n.rated_power_w) for n in partition.nodes] == [
        (8, 256, 1 << 20, 6500.0)
    ] * 2


def test_flavors_where_quarters_do_not_come_out(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    write_inventory(path, inventory_text([server("n1", gpus=2, cores=7, memory_mib=3000, gpu_type="L4")]))
    (partition,) = load_inventory(path).partitions
    assert partition.flavors == (
        Flavor(name="m-L4", gpus=1, cores=3, memory_mib=1024, time_limit_s=168 * 3600),
        Flavor(name="l-L4", gpus=2, cores=7, memory_mib=2048, time_limit_s=336 * 3600),
    )


def test_sizes_of_one_type_are_partitions_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    servers = [server("a"), server("b", gpu_memory_mib=81920), server("c", gpus=0, gpu_type="", gpu_memory_mib=None)]
    write_inventory(path, inventory_text(servers))
    assert {p.name: [n.name for n in p.nodes] for p in load_inventory(path).partitions} == {
        "A100-40GB": ["a"],
        "A100-80GB": ["b"],
        "CPU": ["c"],
    }


def test_one_user_for_all_nodes_is_written_once(tmp_path: Path) -> None:
    servers = [Discovered(host=Host(n, n, "hpc"), **{**_fields(server(n)), "name": n}) for n in ("a", "b")]
    text = inventory_text(servers)
    assert text.count("hpc") == 1
    write_inventory(tmp_path / "inventory.yaml", text)
    assert [n.user for n in load_inventory(tmp_path / "inventory.yaml").nodes] == ["hpc", "hpc"]


def _fields(one: Discovered) -> dict[str, object]:
    return {k: v for k, v in msgspec.structs.asdict(one).items() if k != "host"}


def test_no_host_answered(tmp_path: Path) -> None:
    with pytest.raises(GpuschedError, match="no host responded; nothing was written: h: no route"):
        inventory_text([NotDiscovered(Host("h", "h"), "h: no route", "look")])


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text("mine")
    text = inventory_text([server("n")])
    with pytest.raises(UsageError, match="already exists"):
        write_inventory(path, text)
    assert path.read_text() == "mine"
    write_inventory(path, text, force=True)
    assert path.read_text() == text
    with pytest.raises(GpuschedError, match="cannot be written"):
        write_inventory(tmp_path / "nowhere/inventory.yaml", text)


def test_a_link_that_another_user_put_there_is_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / f".inventory.yaml.{os.getpid()}.part"
    victim.write_text("precious")
    link.symlink_to(victim)
    write_inventory(tmp_path / "inventory.yaml", inventory_text([server("n1", gpus=2)]))
    assert (victim.read_text(), link.is_symlink()) == ("precious", True)


@pytest.mark.parametrize(
    ("address", "hostname", "name"),
    [
        ("10.0.0.1", "dgx1.example.org", "dgx1"),
        ("dgx2.example.org", "x", "dgx2"),
        ("fe80::1", None, "node"),
        ("10.0.0.1", "-", "10.0.0.1"),
    ],
)
def test_names(address: str, hostname: str | None, name: str) -> None:
    reading = NodeReading(node="n", time=0.0, hostname=hostname, cores=1, memory_total_mib=1024)
    outcome = describe(Host(address, address), Inspection(), reading)
    assert isinstance(outcome, Discovered)
    assert outcome.name == name


TEXT = st.text(max_size=20)
SERVERS = st.builds(
    Discovered,
    host=st.builds(
        Host, typed=TEXT, address=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,20}", fullmatch=True),
        user=st.none() | st.sampled_from(["root", "null", "on", "a-b"]), port=st.none() | st.integers(1, 65535),
    ),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(is_name)
    | st.sampled_from(["null", "on", "1"]),
    gpus=st.integers(0, 16),
    gpu_type=st.sampled_from(["", "A100", "GPU", "null", "1e5"]),
    gpu_memory_mib=st.none() | st.integers(1000, 200_000),
    cores=st.integers(1, 512),
    memory_mib=st.integers(1, 3_000_000),
    runtime=st.sampled_from(RuntimeName),
    rated_power_w=st.none() | st.integers(1, 200).map(lambda n: 100.0 * n),
    rated_power_is_estimate=st.booleans(),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip
FAILURES = st.builds(NotDiscovered, host=st.builds(Host, typed=TEXT, address=TEXT), reason=TEXT, hint=TEXT)
UNIQUE = st.lists(SERVERS, min_size=1, max_size=6, unique_by=(lambda s: s.name, lambda s: s.host.address))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(UNIQUE, st.lists(FAILURES, max_size=2))
def test_whatever_is_found_can_be_read_back(
    tmp_path: Path, servers: list[Discovered], failures: list[NotDiscovered]
) -> None:
    path = tmp_path / "inventory.yaml"
    write_inventory(path, inventory_text([*servers, *failures], user="gpu", key="/a b/#c"), force=True)
    found = {n.name: n for n in load_inventory(path).nodes}
    assert set(found) == {s.name for s in servers}
    for one in servers:
        node = found[one.name]
        assert (node.gpus, node.cores, node.address, node.port) == (
            one.gpus,
            one.cores,
            one.host.address,
            one.host.port,
        )
        assert node.runtime == one.runtime
        assert node.memory_mib == (one.memory_mib // 1024 * 1024 if one.memory_mib >= 1024 else one.memory_mib)
        assert (node.key, node.user) == ("/a b/#c", one.host.user or "gpu")
        assert one.rated_power_w in (None, node.rated_power_w)
