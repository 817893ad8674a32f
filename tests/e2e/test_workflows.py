"""Snakemake and TorchX, as their users call them, with their own packages (`make`: requirements/workflows.txt)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpusched.model.jobs import JobRecord
from tests.e2e.conftest import Cluster, functions
from tests.testbed import wait_until

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "workflows"
NODES_PYTHON = "/usr/bin/python3"
pytestmark = [
    pytest.mark.processes,
    functions,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="Snakemake and TorchX are not installed: see `make`"),
]


@pytest.fixture(scope="module")
def site_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an image would have: a copy, for nodes have another /root."""
    site = tmp_path_factory.mktemp("site") / "packages"
    shutil.copytree(PACKAGES, site, ignore=shutil.ignore_patterns("solverdir", "__pycache__", "test*", "docutils"))
    return site


class Workflow:
    """A folder with a Snakefile, and Snakemake in it."""

    def __init__(self, house: Cluster, folder: Path, site: Path) -> None:
        self.house, self.folder, self._site = house, folder, site
        self._started: list[subprocess.Popen[str]] = []
        self.logs = folder / ".snakemake/gpusched_logs"

    def env(self) -> dict[str, str]:
        """Snakemake's environment."""
        more = {"SITE_OF_NODES": str(self._site), "PYTHON_OF_NODES": NODES_PYTHON, "HOME": str(self.folder)}
        return self.house.env(**more, PYTHONPATH=f"{PACKAGES}:{ROOT}", TOKEN="t0k3n")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``snakemake``."""
        defaults = ["gpusched_partition=A100", f"gpusched_env=PYTHONPATH={self._site}"]
        command = ["--executor", "gpusched", "--jobs", "9", "--gpusched-python", NODES_PYTHON, *words]
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *command, "--default-resources", *defaults], cwd=self.folder,
            env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a test that failed has left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(self, snakefile: str, *words: str) -> tuple[int, str]:
        """Run ``snakemake``; return its exit code and what it says."""
        (self.folder / "Snakefile").write_text(snakefile)
        process = self.start(*words)
        said, _ = process.communicate(timeout=240)
        return process.returncode, said

    def job(self, said: str, number: int = 0) -> JobRecord:
        """Return the job that Snakemake said it had queued first, or later."""
        found = self.house.job(re.findall(r"gpusched job (\w+)", said)[number])
        assert found is not None
        return found


@pytest.fixture
def workflow(house: Cluster, site_of_nodes: Path, tmp_path: Path) -> Iterator[Workflow]:
    """An empty one, on the running cluster."""
    found = Workflow(house, tmp_path, site_of_nodes)
    yield found
    found.close()


def test_rules_get_what_they_ask_for(workflow: Workflow) -> None:
    snakefile = """
envvars: "TOKEN"

rule all:
    input: "sum"

rule train:
    output: "model.{lr}"
    threads: 2
    resources: gpus=1, mem_mb=300, runtime=15, gpusched_comment="sweep", gpusched_requeue=False
    shell: "echo $GPUSCHED_GPUS_TOTAL {threads} $TOKEN {wildcards.lr} > {output}"

rule sum:
    input: expand("model.{lr}", lr=[1, 2, 3])
    output: "sum"
    shell: "cat {input} > {output}"
"""
    ended, said = workflow.run(snakefile)
    assert ended == 0, said
    assert (workflow.folder / "sum").read_text() == "".join(f"1 2 t0k3n {lr}\n" for lr in (1, 2, 3))
    spec = workflow.job(said).spec
    assert (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node) == (1, 2, 300)
    assert (spec.time_limit_s, spec.comment, spec.partition, spec.requeue) == (900, "sweep", "A100", False)
    assert "t0k3n" not in str(spec), "a variable of the workflow is a secret"
    assert workflow.job(said, 3).spec.gpus == 0
    logs = sorted(path.name.split(".")[0] for path in workflow.logs.rglob("*.log"))
    assert logs == ["lr_1", "lr_2", "lr_3", "sum"], said


def test_a_group_is_one_job(workflow: Workflow) -> None:
    snakefile = """
rule b:
    input: "a"
    output: "b"
    group: "both"
    shell: "cp a b"

rule a:
    output: "a"
    group: "both"
    shell: "echo $GPUSCHED_JOB_ID > a"
"""
    ended, said = workflow.run(snakefile)
    assert ended == 0, said
    assert re.findall(r"gpusched job (\w+)", said) == [(workflow.folder / "b").read_text().strip()]


def test_what_failed_says_why(workflow: Workflow) -> None:
    snakefile = """
rule fails:
    output: "never"
    log: "own.log"
    shell: "echo gone wrong; exit 3"
"""
    ended, said = workflow.run(snakefile)
    job = workflow.job(said)
    assert ended == 1
    assert re.search(rf"job {job.id} ended FAILED \(NonZeroExitCode", said), said
    log = workflow.logs / f"fails.{job.id}.log"
    assert str(log) in said
    assert "gone wrong" in log.read_text()
    ended, said = workflow.run(snakefile.replace("log:", 'resources: gpusched_partitoin="V100"\n    log:'))
    assert ended == 1
    assert "not queued: no option 'partitoin'; did you mean 'partition'?" in said
    ended, said = workflow.run(snakefile.replace("log:", 'resources: gpusched_partition="B100"\n    log:'))
    assert ended == 1
    assert "not queued: there is no partition 'B100'" in said


WAITS = """
rule waits:
    output: "done"
    shell: "touch running; until [ -e go ]; do sleep 0.1; done; mv running done"
"""


def test_ctrl_c_cancels(workflow: Workflow) -> None:
    (workflow.folder / "Snakefile").write_text(WAITS)
    process = workflow.start()
    wait_until((workflow.folder / "running").exists, 90, "the job to run")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert workflow.house.wait_state(workflow.job(said).id).state == "CANCELLED"


def test_a_killed_snakemake_goes_on(workflow: Workflow) -> None:
    (workflow.folder / "Snakefile").write_text(WAITS)
    killed = workflow.start()
    wait_until((workflow.folder / "running").exists, 90, "the job to run")
    killed.kill()
    job = workflow.job(killed.communicate()[0])
    unlock = workflow.start("--unlock")
    unlock.communicate(timeout=120)
    again = workflow.start()
    logs = workflow.folder / ".snakemake/log"
    said = wait_until(lambda: re.findall("is (?:still )?gpusched job .*", _newest(logs)), 60, "the job to be found")
    assert said == [f"is still gpusched job {job.id}."]
    (workflow.folder / "go").touch()
    again.communicate(timeout=120)
    assert again.returncode == 0
    assert (workflow.folder / "done").exists()


def _newest(folder: Path) -> str:
    return max(folder.iterdir(), key=lambda path: path.name).read_text()


def test_the_suite_that_snakemake_offers(workflow: Workflow) -> None:
    command = ["-m", "pytest", "-c", os.devnull, "--noconftest", "-q", "--basetemp", str(workflow.folder / "tests")]
    done = subprocess.run(
        [sys.executable, *command, "--rootdir", str(ROOT), str(ROOT / "tests/e2e/snakemake_suite.py")],
        env=workflow.env(), cwd=workflow.folder, text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout


COMPONENT = """
from torchx.specs import AppDef, Resource, Role, macros

MEET = '''
import os, socket
rank, there = int(os.environ["TORCHX_REPLICA_ID"]), (os.environ["MASTER_ADDR"], 29511)
if rank == 0:
    with socket.create_server(there) as server:
        print("met", server.accept()[0].recv(9).decode())
while rank:
    try:
        socket.create_connection(there).sendall(b"rank %d" % rank)
        break
    except ConnectionRefusedError:
        pass
'''
SMALL = Resource(cpu=1, gpu=0, memMB=100)


def app() -> AppDef:
    says = f"echo replica {macros.replica_id} of $APP, $GREETING; exec python3 -c '{MEET}'"
    env = {"APP": macros.app_id, "GREETING": "good day"}
    large = Resource(cpu=2, gpu=4, memMB=200)
    reads = ["-c", "echo reads $0 >&2", macros.replica_id]
    trainer = Role("trainer", "", entrypoint="sh", args=["-c", says], env=env, num_replicas=2, resource=large)
    return AppDef("meeting", [trainer, Role("reader", "", entrypoint="sh", args=reads, num_replicas=2, resource=SMALL)])


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
            env=self.house.env(PYTHONPATH=f"{PACKAGES}:{ROOT}", HOME=str(self.folder)), timeout=240,
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
    assert "reader/1 reads 1" in torchx.cli("log", f"{handle}/reader")
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
