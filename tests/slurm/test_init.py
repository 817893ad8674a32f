"""``gpusched init --slurm``: the inventory of a real site, and of larger ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.bootstrap.slurm import SlurmSite, choose, inventory_of_site
from gpusched.config.inventory import load_inventory
from gpusched.model.resources import Inventory
from gpusched.model.slurm import SlurmNode, SlurmPartition
from tests.slurm.conftest import SlurmCluster
from tests.testbed.slurm_files import CPUS, MEMORY_MIB, OPERATOR


@pytest.fixture
def home(slurm_cluster: SlurmCluster) -> dict[str, str]:
    """A user who may log in to the nodes."""
    ssh = slurm_cluster.folder / ".ssh"
    ssh.mkdir()
    testbed = slurm_cluster.testbed
    (ssh / "config").write_text(
        f"Host *\n  User root\n  IdentityFile {testbed.identity}\n  UserKnownHostsFile {testbed.known_hosts}\n"
    )
    slurm_cluster.inventory.unlink()
    return {"HOME": str(slurm_cluster.folder)}


def state_of_slurm(cluster: SlurmCluster) -> list[str]:
    kinds = ("partition", "reservation", "job")
    texts = (cluster.site.run(["scontrol", "-o", "show", kind]).stdout for kind in kinds)
    return [re.sub(r"(RunTime|LastSchedEval)=\S+", "", text) for text in texts]


def test_a_site_is_observed_from_its_slurm_alone(slurm_cluster: SlurmCluster, home: dict[str, str]) -> None:
    site, path = slurm_cluster.site, str(slurm_cluster.inventory)
    site.run("scontrol update PartitionName=A100 MaxTime=2-0".split())
    job = site.sbatch("sleep 1000", "-N2", "--gpus-per-node=2")
    site.wait(job, "RUNNING")
    before = state_of_slurm(slurm_cluster)
    said = slurm_cluster.cli("init", "--slurm", "-o", path, env=home)
    assert "wrote" in said.stdout
    inventory = load_inventory(path)
    assert (inventory.engine, inventory.settings.admins) == ("slurm", (OPERATOR,))
    assert {p.name: p.max_time_s for p in inventory.partitions} == {"A100": 2 * 86400, "V100": None}
    for node, real in zip(sorted(inventory.nodes, key=lambda n: n.name), slurm_cluster.testbed.nodes, strict=True):
        model = real.model.key
        fields = (node.name, node.address, node.partition, node.gpus, node.gpu_type, node.cores, node.memory_mib)
        assert fields == (real.name, real.address, model.upper(), 8, model, CPUS[model], MEMORY_MIB[model])
        assert (node.transport, node.rated_power_w is not None) == ("ssh", True)
    checked = slurm_cluster.cli("check", env=home).stdout
    assert "0 warnings, 0 failures" in checked
    slurm_cluster.cli("tick", env=home)
    assert "dgx[001,003]" in slurm_cluster.cli("status").stdout
    assert state_of_slurm(slurm_cluster) == before
    again = slurm_cluster.cli("init", "--slurm", "-o", path, check=False, env=home)
    assert (again.returncode, "already exists" in again.stderr) == (2, True)


def test_a_site_without_ssh_knows_what_it_lacks(slurm_cluster: SlurmCluster, home: dict[str, str]) -> None:
    path = str(slurm_cluster.inventory)
    said = slurm_cluster.cli("init", "--slurm", "--no-ssh", "-o", path)
    assert "4 of 4 nodes not probed over SSH (transport: none): utilization, power, energy" in said.stderr
    assert {node.transport for node in load_inventory(path).nodes} == {"none"}
    checked = slurm_cluster.cli("check").stdout
    assert "dgx[001-004]: not probed over SSH" in checked
    job = slurm_cluster.site.sbatch("sleep 1000", "--gpus-per-node=3")
    slurm_cluster.site.wait(job, "RUNNING")
    slurm_cluster.cli("tick")
    assert "dgx001" in slurm_cluster.cli("status").stdout
    assert "5/8" in slurm_cluster.cli("nodes").stdout


def test_nodes_that_do_not_answer_are_not_read(slurm_cluster: SlurmCluster, home: dict[str, str]) -> None:
    path = str(slurm_cluster.inventory)
    one = slurm_cluster.testbed.node("dgx003")
    config = slurm_cluster.folder / ".ssh" / "config"
    config.write_text(f"Host {one.address}\n  Port 1\n" + config.read_text())
    slurm_cluster.cli("init", "--slurm", "-o", path, env=home)
    transports = {node.name: node.transport for node in load_inventory(path).nodes}
    assert transports == {"dgx001": "ssh", "dgx002": "ssh", "dgx003": "none", "dgx004": "ssh"}


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["dgx1"], 2, "--slurm uses the hosts that Slurm names; omit HOSTS"),
        ([], 1, "is not on PATH; run gpusched where Slurm's commands are installed"),
    ],
)
def test_errors_of_init_are_one_line(tmp_path: Path, words: list[str], code: int, error: str) -> None:
    argv = [sys.executable, "-m", "gpusched", "init", "--slurm", "-o", str(tmp_path / "i.yaml"), *words]
    env = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert error in done.stderr
    assert not (tmp_path / "i.yaml").exists()


# Sites as texts


def node(name: str, address: str = "", gpus: int = 8, kind: str = "a100", cores: int = 64) -> SlurmNode:
    has = {kind: gpus} if gpus else {}
    return SlurmNode(name=name, address=address or name, states=("IDLE",), cpus=cores, memory_mib=515_001, gpus=has)


def partition(name: str, *nodes: SlurmNode, default: bool = False) -> SlurmPartition:
    return SlurmPartition(name=name, nodes=tuple(n.name for n in nodes), is_default=default)


def written(site: SlurmSite, path: Path) -> tuple[str, Inventory]:
    text = inventory_of_site(site, choose(site), {})
    path.write_text(text)
    return text, load_inventory(path)


def test_hundreds_of_nodes_take_a_few_lines(tmp_path: Path) -> None:
    left = [node(f"gpu{i:03}", f"10.1.0.{i}") for i in range(1, 251) if i != 77]
    right = [node(f"r{r}n{i}", f"r{r}n{i}.ib.example", gpus=4, kind="h100") for r in (1, 2) for i in range(1, 41)]
    odd = [node("gpu251", "10.9.9.9", gpus=6)]
    all_nodes = (*left, *right, *odd)
    site = SlurmSite(version="22.05.8", nodes=all_nodes, partitions=(partition("gpu", *all_nodes),))
    text, inventory = written(site, tmp_path / "inventory.yaml")
    assert '- {name: "gpu[001-076,078-250]", address: "10.1.0.[1-76,78-250]"}' in text
    assert '- {name: "r2n[1-40]", address: "r2n[1-40].ib.example", gpus: 4, gpu_type: h100}' in text
    assert "- {name: gpu251, address: 10.9.9.9, gpus: 6}" in text
    assert len(text.splitlines()) < 30
    assert len(inventory.nodes) == 330


NAMES = st.lists(
    st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 120), st.sampled_from(["{}", "{:03}"])),
    min_size=1, max_size=40, unique=True,
)  # fmt: skip


@given(names=NAMES, data=st.data())
def test_every_node_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, int, str]], data: st.DataObject
) -> None:
    own = sorted({stem + form.format(i) for stem, i, form in names})
    numbers = data.draw(st.permutations(range(len(own))))
    nodes = tuple(
        node(name, data.draw(st.sampled_from([name, f"{name}.lan", f"10.0.0.{i}"])), data.draw(st.sampled_from([4, 8])))
        for name, i in zip(own, numbers, strict=True)
    )
    site = SlurmSite(version="", nodes=nodes, partitions=(partition("p", *nodes),))
    _, inventory = written(site, tmp_path_factory.mktemp("site") / "inventory.yaml")
    assert {(n.name, n.address, n.gpus) for n in inventory.nodes} == {
        (n.name, n.address, sum(n.gpus.values())) for n in nodes
    }
    assert {n.memory_mib for n in inventory.nodes} == {515_001}


def test_a_node_is_in_the_partition_whose_jobs_are_most(tmp_path: Path) -> None:
    nodes = [node(f"n{i}") for i in range(1, 5)]
    cpus = [node(f"c{i}", gpus=0) for i in range(1, 3)]
    parts = (
        partition("all", *nodes, *cpus, default=True), partition("gpu", *nodes), partition("debug", nodes[0]),
        partition("cpu", *cpus), partition("none"),
    )  # fmt: skip
    site = SlurmSite(version="", nodes=(*nodes, *cpus), partitions=parts, jobs={"gpu": 7, "debug": 1})
    chosen = choose(site)
    assert {name: [n.name for n in has] for name, has in chosen.nodes.items()} == {
        "all": ["c1", "c2"], "gpu": ["n1", "n2", "n3", "n4"],
    }  # fmt: skip
    assert chosen.shared["gpu"] == {"debug": ("n1",), "all": ("n1", "n2", "n3", "n4")}
    assert dict(chosen.left_out) == {
        "debug": "its nodes are in gpu", "cpu": "none of its 2 nodes has GPUs", "none": "it has no nodes",
    }  # fmt: skip
    assert "n[1-4] are in Slurm's gpu and all; here in gpu" in chosen.notes
    text, inventory = written(site, tmp_path / "inventory.yaml")
    assert "# n[1-4]: also in Slurm's partition all" in text
    assert "# - cpu: none of its 2 nodes has GPUs" in text
    assert [p.name for p in inventory.partitions] == ["all", "gpu"]


def test_without_any_job_the_default_partition_has_them() -> None:
    nodes = [node("n1"), node("n2")]
    parts = (partition("long", *nodes), partition("gpu", *nodes, default=True))
    assert list(choose(SlurmSite(version="", nodes=tuple(nodes), partitions=parts)).nodes) == ["gpu"]
