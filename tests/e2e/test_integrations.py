"""Other programs that run here by their own plugins: submitit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit

from gpusched.integrations import submitit as plugin
from tests.e2e.conftest import Cluster, functions
from tests.e2e.site_packages import install, install_plugins
from tests.testbed import wait_until

pytestmark = [pytest.mark.one_partition, pytest.mark.processes, functions]


class Counting:
    """Count a file's lines up; asked to stop, go on from there in another start of the job."""

    def __init__(self, file: Path, until: int, at: int = 0) -> None:
        self.file, self.until, self.at = file, until, at

    def __call__(self) -> tuple[int, int]:
        began = self.at
        while self.at < self.until:
            with self.file.open("a") as lines:
                lines.write(f"{self.at}\n")
            self.at += 1
            time.sleep(0.1)
        return began, self.at

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Counting(self.file, self.at + 3, self.at))


def place(sum_of: list[int]) -> tuple[int, int, int, int]:
    here = submitit.JobEnvironment()
    print("task", here.global_rank)
    return sum(sum_of), here.global_rank, here.num_tasks, here.num_nodes


def failing() -> None:
    raise ValueError("not today")


@pytest.fixture(scope="module")
def site_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of an image: submitit, and this package, by which it finds its environment."""
    return install_plugins(install(tmp_path_factory.mktemp("site"), "submitit"))


@pytest.fixture
def executor(
    house: Cluster, site_of_nodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., submitit.AutoExecutor]:
    """`submitit.AutoExecutor` on the running cluster, with these parameters."""
    monkeypatch.setenv("GPUSCHED_STATE", str(house.state))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(house.inventory))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes do not have the tests
    plugin._cluster.cache_clear()

    def made(**parameters: Any) -> submitit.AutoExecutor:
        folder, python = tmp_path / "log" / "%j", "/usr/bin/python3"
        found = submitit.AutoExecutor(folder=folder, cluster="gpusched", gpusched_python=python)
        env = {"PYTHONPATH": str(site_of_nodes)}
        found.update_parameters(**({"gpusched_partition": "A100", "gpusched_env": env} | parameters))
        return found

    return made


def test_functions_run_on_every_task_and_return(executor: Callable[..., submitit.AutoExecutor]) -> None:
    job = executor(nodes=2, tasks_per_node=2, gpus_per_node=1, timeout_min=5, name="sum").submit(place, [1, 2, 3])
    assert job.results() == [(6, rank, 4, 2) for rank in range(4)]
    for rank in (1, 3):
        assert f"task {rank}" in job.task(rank).stdout().splitlines()
    assert (job.state, job.done()) == ("COMPLETED", True)
    many = executor(gpus_per_node=1)
    with many.batch():
        jobs = [many.submit(place, [number]) for number in range(3)]
    assert [job.result()[0] for job in jobs] == [0, 1, 2]


def test_what_a_function_raises_and_a_cancelled_job(executor: Callable[..., submitit.AutoExecutor]) -> None:
    with pytest.raises(submitit.core.utils.FailedJobError, match="not today"):
        executor(gpus_per_node=1).submit(failing).result()
    job = executor(gpus_per_node=1).submit(time.sleep, 1000)
    wait_until(lambda: job.state == "RUNNING", 60, "the job to run")
    job.cancel()
    wait_until(job.done, 60, "the job to end")
    assert job.state == "CANCELLED"
    with pytest.raises(submitit.core.utils.UncompletedJobError):
        job.result()


@pytest.mark.parametrize("how", ["requeue", "limit"])
def test_a_checkpoint_goes_on_in_the_next_start(
    house: Cluster, executor: Callable[..., submitit.AutoExecutor], tmp_path: Path, how: str
) -> None:
    file = tmp_path / "lines"
    # The signal comes at once where it is due 50 s before the end of one minute: after ten seconds.
    more = {"gpusched_signal_delay_s": 50} if how == "limit" else {}
    job = executor(gpus_per_node=1, timeout_min=1 if how == "limit" else 60, **more).submit(Counting(file, 600))
    wait_until(lambda: file.exists() and file.read_text().count("\n") > 3, 90, "the function to count")
    if how == "requeue":
        house.cli("requeue", job.job_id)
    wait_until(job.done, 120, "the job to end")
    began, ended = job.result()
    assert (began > 3, ended - began) == (True, 3)
    assert file.read_text().split() == [str(number) for number in range(ended)], "no number twice, none left out"
    found = house.job(job.job_id)
    assert found is not None
    assert found.attempt == 2


def test_parameters_that_are_not_known(executor: Callable[..., submitit.AutoExecutor]) -> None:
    with pytest.raises((ValueError, NameError), match="gpusched_partitions"):
        executor(gpusched_partitions="A100")
    with pytest.raises(Exception, match="no partition 'B100'"):
        executor(gpusched_partition="B100").submit(place, [1])
