"""Snakemake as its users call it, with its own packages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.jobs import JobRecord
from tests.e2e.conftest import Cluster
from tests.e2e.workflow_packages import MARKS, PACKAGES, ROOT
from tests.testbed import wait_until

NODES_PYTHON = "/usr/bin/python3"
pytestmark = MARKS


@pytest.fixture(scope="module")
def site_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of an image: a copy, for nodes have another /root; compiled, or each job would compile it."""
    site = tmp_path_factory.mktemp("site") / "packages"
    env = os.environ | {"PYTHONPATH": f"{PACKAGES}:{ROOT}", "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([NODES_PYTHON, "-m", "snakemake", "--version"], env=env, stdout=subprocess.DEVNULL, check=True)
    shutil.copytree(PACKAGES, site, ignore=shutil.ignore_patterns("solverdir", "test*", "docutils", "*.pyc.*"))
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

    def wait_running(self) -> JobRecord:
        """Wait until the job of `WAITS` runs and Snakemake knows that it has queued it; return the job."""
        wait_until((self.folder / "running").exists, 90, "the job to run")
        log = self.folder / ".snakemake/log"
        queued = re.compile(r"is gpusched job \w+\.")
        return self.job(wait_until(lambda: queued.findall(_newest(log)), 60, "Snakemake to know its job")[0])

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
        said, _ = process.communicate(timeout=300)
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


def test_a_failed_job_shows_its_error(workflow: Workflow) -> None:
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
    job = workflow.wait_running()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert workflow.house.wait_state(job.id).state == "CANCELLED"


def test_a_killed_snakemake_goes_on(workflow: Workflow) -> None:
    (workflow.folder / "Snakefile").write_text(WAITS)
    killed = workflow.start()
    job = workflow.wait_running()
    killed.kill()
    killed.communicate()
    unlock = workflow.start("--unlock")
    unlock.communicate(timeout=300)
    again = workflow.start()
    logs = workflow.folder / ".snakemake/log"
    said = wait_until(lambda: re.findall("is (?:still )?gpusched job .*", _newest(logs)), 60, "the job to be found")
    assert said == [f"is still gpusched job {job.id}."]
    (workflow.folder / "go").touch()
    again.communicate(timeout=300)
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
