"""TorchX as its users call it, with its own packages."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.e2e.workflow_packages import MARKS, PACKAGES, ROOT

pytestmark = MARKS


COMPONENT = """
from torchx.specs import AppDef, Resource, Role, macros

MEET = '''
import os, socket, time
rank, there = int(os.environ["TORCHX_REPLICA_ID"]), (os.environ["MASTER_ADDR"], 29511)
if rank == 0:
    with socket.create_server(there) as server:
        print("met", server.accept()[0].recv(9).decode())
while rank:
    try:
        socket.create_connection(there).sendall(b"rank %d" % rank)
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
'''
SMALL = Resource(cpu=1, gpu=0, memMB=100)


def app() -> AppDef:
    says = f"echo replica {macros.replica_id} of $APP, $GREETING; exec python3 -c '{MEET}'"
    env = {"APP": macros.app_id, "GREETING": "good day"}
    large = Resource(cpu=2, gpu=4, memMB=200)
    reads = ["-c", "echo reads $0 >&2", macros.replica_id]
    trainer = Role("trainer", "", entrypoint="sh", args=["-c", says], env=env, num_replicas=2, resource=large)
    reader = Role("data reader", "", entrypoint="sh", args=reads, num_replicas=2, resource=SMALL)
    return AppDef("meeting", [trainer, reader])


def fails(folder: str, retries: int) -> AppDef:
    says = f"echo once >> {folder}/starts; [ $(wc -l < {folder}/starts) -gt 1 ]"
    return AppDef("fails", [Role("r", "", entrypoint="sh", args=["-c", says], max_retries=retries, resource=SMALL)])


def waits() -> AppDef:
    return AppDef("waits", [Role("r", "", entrypoint="sleep", args=["1000"], num_replicas=2, resource=SMALL)])
"""


class Torchx:
    """A folder with components, and TorchX in it."""

    def __init__(self, house: Cluster, folder: Path) -> None:
        self.house, self.folder = house, folder
        (folder / "apps.py").write_text(COMPONENT)

    def cli(self, *words: str, ends: int = 0) -> str:
        """Run ``torchx``; return what it says."""
        done = subprocess.run(
            [sys.executable, str(PACKAGES / "bin/torchx"), *words], cwd=self.folder, text=True, capture_output=True,
            env=self.house.env(PYTHONPATH=f"{PACKAGES}:{ROOT}", HOME=str(self.folder)), timeout=300,
        )  # fmt: skip
        assert done.returncode == ends, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    def run(self, *words: str) -> str:
        """``torchx run``; return the app's handle."""
        said = self.cli("run", "-s", "gpusched", "-cfg", "partition=A100,image=none", *words)
        return re.findall(r"gpusched://\w+/\w+", said)[0]


@pytest.fixture
def torchx(house: Cluster, tmp_path: Path) -> Torchx:
    """TorchX, on the running cluster."""
    return Torchx(house, tmp_path)


def test_roles_and_replicas(torchx: Torchx) -> None:
    handle = torchx.run("apps.py:app")
    job = torchx.house.wait_state(handle.rpartition("/")[2], timeout=60)
    assert job.state == "COMPLETED", torchx.house.logs(job.id)
    spec = job.spec
    assert (spec.name, spec.nodes, spec.gpus_per_node, spec.cores_per_node) == ("meeting", 2, 8, 4)
    assert spec.memory_mib_per_node == 400
    said = torchx.cli("log", f"{handle}/trainer/0")
    assert f"trainer/0 replica 0 of {job.id}, good day" in said
    assert "trainer/0 met rank 1" in said
    assert "replica 1" not in said, "another replica's line"
    assert "data reader/1 reads 1" in torchx.cli("log", f"{handle}/data reader")
    assert "SUCCEEDED" in torchx.cli("status", handle)
    assert re.search(rf"{handle} +SUCCEEDED", torchx.cli("list", "-s", "gpusched"))


def test_an_app_is_started_again_as_often_as_it_says(torchx: Torchx) -> None:
    handle = torchx.run("apps.py:fails", "--folder", str(torchx.folder), "--retries", "1")
    job = torchx.house.wait_state(handle.rpartition("/")[2], timeout=60)
    assert (job.state, job.attempt) == ("COMPLETED", 2)
    (torchx.folder / "starts").unlink()
    handle = torchx.run("apps.py:fails", "--folder", str(torchx.folder), "--retries", "0")
    job = torchx.house.wait_state(handle.rpartition("/")[2], timeout=60)
    assert (job.state, job.attempt) == ("FAILED", 1)
    assert "NonZeroExitCode" in torchx.cli("status", handle)


def test_cancelling_and_what_is_refused(torchx: Torchx) -> None:
    handle = torchx.run("apps.py:waits")
    job = torchx.house.wait_state(handle.rpartition("/")[2], "RUNNING", timeout=60)
    assert "RUNNING" in torchx.cli("status", handle)
    torchx.cli("cancel", handle)
    assert torchx.house.wait_state(job.id).state == "CANCELLED"
    said = torchx.cli("run", "-s", "gpusched", "-cfg", "partition=B100", "apps.py:waits", ends=1)
    assert "no partition 'B100'" in said


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: see `make`")
def test_ddp_trains_on_all_nodes(torchx: Torchx) -> None:
    site = sysconfig.get_path("purelib")
    if site.startswith("/root/"):
        pytest.skip("nodes have another /root")
    for node in torchx.house.testbed.nodes:
        run = node.disk / "bin/torchrun"
        run.write_text('#!/bin/sh\nexec /usr/bin/python3 -m torch.distributed.run "$@"\n')
        run.chmod(0o755)
    (torchx.folder / "main.py").write_text("""
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "has", total.item())
dist.barrier()
dist.destroy_process_group()  # else gloo may abort at the end
""")
    ddp = ["dist.ddp", "-j", "2x1", "--cpu", "1", "--memMB", "1500", "--env", f"PYTHONPATH={site}"]
    cfg = f"partition=A100,image=none,nodes=2,workdir={torchx.folder}"
    said = torchx.cli("run", "-s", "gpusched", "-cfg", cfg, *ddp, "--script", "main.py")
    handle = re.findall(r"gpusched://\w+/\w+", said)[0]
    job = torchx.house.wait_state(handle.rpartition("/")[2], timeout=90)
    assert job.state == "COMPLETED", torchx.house.logs(job.id)
    assert "rank 1 of 2 has 3.0" in torchx.cli("log", f"{handle}/main")
