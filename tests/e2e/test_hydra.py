"""Hydra's sweeps run here by its submitit launcher: what people write with ``submitit_slurm``, under another name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster, functions
from tests.e2e.site_packages import install, install_plugins
from tests.testbed import wait_until

pytestmark = [pytest.mark.one_partition, pytest.mark.processes, functions]

TRAIN = """
import os, sys, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path="conf", config_name="config")
def train(cfg):
    job, starts = HydraConfig.get().job, Path(cfg.starts)
    with starts.open("a") as lines:
        lines.write(f"{cfg.lr} {job.num} {job.id} {os.environ['CUDA_VISIBLE_DEVICES'].count(',') + 1}\\n")
    if cfg.lr > 1:
        raise ValueError(f"{cfg.lr} is too high")
    while cfg.stop_after > starts.read_text().count("\\n"):
        time.sleep(0.1)
    return cfg.lr * 10

if __name__ == "__main__":
    train()
"""
RETURNS = """
import json
from pathlib import Path
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from train import train

with initialize_config_dir(str(Path("conf").absolute()), version_base=None):
    hydra = GlobalHydra.instance().hydra
    [found] = hydra.multirun("config", train.__wrapped__, ["lr=0.1,0.2", "hydra.launcher.gpus_per_node=2"])
print(json.dumps([[one.status.name, one.return_value, one.overrides] for one in found]))
"""
CONFIG = """
defaults:
  - override hydra/launcher: submitit_gpusched
lr: 0.5
stop_after: 0
starts: {starts}
hydra:
  launcher:
    partition: A100
    gpus_per_node: 1
    timeout_min: 5
    python: /usr/bin/python3
    env: {{PYTHONPATH: {site}}}
    additional_parameters: {{nice: 3}}
"""
WITHOUT_LAUNCHER = """
import sys
sys.modules["hydra_plugins.hydra_submitit_launcher"] = None
from hydra.core.plugins import Plugins
print([one.__name__ for one in Plugins.instance().discover() if "gpusched" in one.__module__])
"""


@pytest.fixture(scope="module")
def site_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plugins(install(tmp_path_factory.mktemp("site"), "hydra-core", "hydra-submitit-launcher"))


@pytest.fixture
def project(site_of_nodes: Path, tmp_path: Path) -> Path:
    """A folder that the nodes see, with what its owner would have there."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text(CONFIG.format(starts=tmp_path / "starts", site=site_of_nodes))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "returns.py").write_text(RETURNS)
    return tmp_path


@pytest.fixture
def start(house: Cluster, project: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python with these words in the project's folder; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def python(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, *words]
        started.append(subprocess.Popen(command, cwd=project, env=house.env(), text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield python
    for process in started:
        process.kill()
        process.communicate()


def test_each_run_is_a_job_and_its_value_comes_back(
    house: Cluster, project: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out, err = start("returns.py").communicate(timeout=300)
    returns = json.loads(out.splitlines()[-1] if out else err)
    assert [[status, value] for status, value, _ in returns] == [["COMPLETED", 1.0], ["COMPLETED", 2.0]]
    assert [overrides[0] for *_, overrides in returns] == ["lr=0.1", "lr=0.2"]
    starts = sorted(line.split() for line in (project / "starts").read_text().splitlines())
    assert [(lr, number, gpus) for lr, number, _, gpus in starts] == [("0.1", "0", "2"), ("0.2", "1", "2")]
    for *_, job, _gpus in starts:
        found = house.job(job)
        assert found is not None
        assert (found.spec.partition, found.spec.nice) == ("A100", 3)


def test_a_run_that_raises_is_reported_and_a_requeued_one_begins_again(
    house: Cluster, project: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    failing = start("train.py", "--multirun", "lr=2")
    _, err = failing.communicate(timeout=300)
    assert failing.returncode == 1
    assert "ValueError: 2 is too high" in err
    (project / "starts").unlink()
    again = start("train.py", "--multirun", "lr=0.1", "stop_after=2")
    starts = project / "starts"
    wait_until(lambda: starts.exists() and starts.read_text().endswith("\n"), 120, "the run to begin")
    job = starts.read_text().split()[2]
    found = house.job(job)
    assert found is not None
    assert found.spec.name == "train"
    house.cli("requeue", job)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert starts.read_text() == f"0.1 0 {job} 1\n" * 2


def test_hydra_without_that_launcher_starts_without_a_warning() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_LAUNCHER], text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
