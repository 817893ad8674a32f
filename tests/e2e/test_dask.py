"""Dask's workers are jobs here."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
from dask import config
from distributed import Client

from gpusched.integrations import dask as plugin
from gpusched.integrations.dask import GpuschedCluster, WorkerJob
from gpusched.model.jobs import JobRecord
from tests.e2e.conftest import Cluster, functions
from tests.e2e.site_packages import install
from tests.testbed import wait_until

pytestmark = [pytest.mark.one_partition, pytest.mark.processes, functions]


def gpus_and_job() -> tuple[str, str]:
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPUSCHED_JOB_ID"]


@pytest.fixture(scope="module")
def site_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of an image: Dask, and nothing of ours."""
    return install(tmp_path_factory.mktemp("site"), "distributed")


@pytest.fixture
def dask(
    house: Cluster, site_of_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GpuschedCluster]]:
    """Clusters whose workers have these options; closed after the test."""
    monkeypatch.setenv("GPUSCHED_STATE", str(house.state))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(house.inventory))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes do not have the tests
    plugin._cluster.cache_clear()
    made: list[GpuschedCluster] = []

    def cluster(**options: object) -> GpuschedCluster:
        address = house.testbed.nodes[0].address.rsplit(".", 2)[0] + ".0.1"  # the machine's on the nodes' bridge
        common = {
            "cores": 1, "memory": "400MiB", "processes": 1, "nanny": False, "python": "/usr/bin/python3",
            "queue": "A100", "env": {"PYTHONPATH": str(site_of_nodes)},
            "scheduler_options": {"host": address, "dashboard_address": ":0"},
        }  # fmt: skip
        made.append(GpuschedCluster(**(common | options)))
        return made[-1]

    yield cluster
    for one in made:
        one.close()


def jobs_of(house: Cluster) -> list[JobRecord]:
    with house.reader() as reader:
        assert reader is not None
        return [*reader.pending(), *reader.active()]


def test_workers_are_jobs_and_close_cancels_them(house: Cluster, dask: Callable[..., GpuschedCluster]) -> None:
    cluster = dask(gpus=2, walltime="00:30:00", job_name="squares", nanny=True)
    cluster.scale(2)
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=300)
        found = client.run(gpus_and_job)
        jobs = {job.id: job for job in jobs_of(house)}
        assert {job for _, job in found.values()} == jobs.keys()
        assert all(len(gpus.split(",")) == 2 for gpus, _ in found.values())
        for job in jobs.values():
            assert (job.spec.name, job.spec.partition, job.spec.time_limit_s) == ("squares", "A100", 1800)
        assert sum(client.gather(client.map(lambda x: x * x, range(10)))) == 285
        cluster.scale(1)
        wait_until(lambda: len(jobs_of(house)) == 1, 60, "a job to be cancelled")
    cluster.close()
    wait_until(lambda: not jobs_of(house), 60, "the last one to end")


def test_adaptive_clusters_have_jobs_while_there_is_work(house: Cluster, dask: Callable[..., GpuschedCluster]) -> None:
    cluster = dask(gpus=1)
    cluster.adapt(minimum=0, maximum=2, interval="500ms")
    with Client(cluster) as client:
        job = client.submit(lambda: os.environ["GPUSCHED_JOB_ID"]).result(timeout=300)
        assert job in {job.id for job in jobs_of(house)}
        wait_until(lambda: not jobs_of(house), 120, "idle workers to be ended")


def test_a_worker_that_ended_is_replaced_and_a_cancelled_one_when_scaled(
    house: Cluster, dask: Callable[..., GpuschedCluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = dask(gpus=1)
    cluster.scale(1)
    with Client(cluster) as client:
        client.wait_for_workers(1, timeout=300)
        [first] = jobs_of(house)
        client.retire_workers(list(client.scheduler_info()["workers"]))  # as Dask's --lifetime does
        house.wait_state(first.id)
        wait_until(lambda: [job.id for job in jobs_of(house)] not in ([], [first.id]), 60, "another job")
        client.wait_for_workers(1, timeout=300)
        [second] = jobs_of(house)
        house.cli("cancel", second.id)
        wait_until(lambda: second.id in caplog.text, 60, "the cluster to hear of it")
        assert f"job {second.id} ended CANCELLED" in caplog.text
        house.wait_state(
            house.sh("true", "--gpus", "1"), "COMPLETED"
        )  # had the cluster queued a job, the store would have it by now
        assert jobs_of(house) == []
        cluster.scale(1)
        client.wait_for_workers(1, timeout=300)


def test_a_job_whose_worker_is_silent_is_cancelled_and_replaced(
    house: Cluster, dask: Callable[..., GpuschedCluster]
) -> None:
    patience = {"distributed.scheduler.worker-ttl": "2s", "distributed.deploy.lost-worker-timeout": "1s"}
    with config.set(patience):
        cluster = dask(gpus=1)
        cluster.scale(1)
        with Client(cluster) as client:
            client.wait_for_workers(1, timeout=300)
            [first] = jobs_of(house)
            client.run(lambda: threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start())
            wait_until(lambda: {job.id for job in jobs_of(house)} - {first.id}, 60, "another job")
            assert house.wait_state(first.id, "COMPLETING").reason == "Cancelled"
            house.cli("cancel", "--now", first.id)  # a process that hears no signal would have all of its grace period


def test_options() -> None:
    with config.set({"jobqueue.gpusched.image": "dask:2026", "jobqueue.gpusched.queue": "A100"}):
        job = WorkerJob("tcp://here:1", "one", cores=2, memory="1GB", processes=2, gpus=1, partition="V100")
    assert job._options == {"cpus": 2, "mem": "954M", "gpus": 1, "image": "dask:2026", "partition": "V100"}
    assert "exec python3 -m distributed.cli.dask_worker tcp://here:1 --name one" in job.job_script()
    with pytest.raises(TypeError, match="partitions"):
        WorkerJob(cores=1, memory="1GB", partitions="A100")
    with pytest.raises(ValueError, match="gpus=1"):
        WorkerJob(cores=1, memory="1GB", job_extra_directives=["--gres=gpu:1"])
