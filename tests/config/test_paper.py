"""The inventory.yaml at the repository's root is the cluster of the GIST paper, to the number."""

from pathlib import Path

from gpusched.config.inventory import flavor_nodes, load_inventory
from gpusched.config.policies import load_policies

ROOT = Path(__file__).parents[2]

# Narantuya et al., CMC 2022, Table 2: GPUs, CPU cores, memory (GB), run time (h).
TABLE_2 = {
    "s-A100": (2, 64, 256, 72),
    "m-A100": (4, 128, 512, 168),
    "l-A100": (8, 256, 1024, 336),
    "f-A100": (16, 512, 2048, 504),
    "s-V100": (2, 20, 128, 72),
    "m-V100": (4, 40, 256, 168),
    "l-V100": (8, 80, 512, 336),
    "f-V100": (16, 160, 1024, 504),
}
# Section 4: GPUs, CPU cores, memory (GB), rated power (kW) of each of the two servers of a partition.
SERVERS = {"A100": (8, 256, 1024, 6.5), "V100": (8, 80, 512, 3.5)}


def test_flavors_are_table_2() -> None:
    inventory = load_inventory(ROOT / "inventory.yaml")
    flavors = {f.name: f for p in inventory.partitions for f in p.flavors}
    found = {n: (f.gpus, f.cores, f.memory_mib / 1024, f.time_limit_s / 3600) for n, f in flavors.items()}
    assert found == TABLE_2


def test_servers() -> None:
    inventory = load_inventory(ROOT / "inventory.yaml")
    assert {p.name: len(p.nodes) for p in inventory.partitions} == {"A100": 2, "V100": 2}
    for node in inventory.nodes:
        assert node.rated_power_w is not None
        assert (node.gpus, node.cores, node.memory_mib / 1024, node.rated_power_w / 1000) == SERVERS[node.partition]
        assert node.gpu_type == node.partition
    assert [n.name for n in inventory.nodes] == ["dgx-a100-1", "dgx-a100-2", "dgx-1v-1", "dgx-1v-2"]


def test_f_is_two_whole_servers() -> None:
    for partition in load_inventory(ROOT / "inventory.yaml").partitions:
        assert [flavor_nodes(f, partition.nodes) for f in partition.flavors] == [1, 1, 1, 2]


def test_policies_exist() -> None:
    assert {p.name for p in load_policies(load_inventory(ROOT / "inventory.yaml")).values()} == {"easy"}
