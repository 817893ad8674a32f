"""Snakemake's own tests of executor plugins, and ours of its resources: run by test_snakemake.py where Snakemake is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from snakemake.common.tests import TestWorkflowsLocalStorageBase
from snakemake.settings.types import ResourceSettings
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from gpusched.api import Cluster
from gpusched.client.resolve import Refused
from gpusched.errors import GpuschedError, UsageError
from gpusched.integrations import snakemake as plugin
from gpusched.integrations.snakemake import job_options
from gpusched.queue.inbox import Inbox
from snakemake_executor_plugin_gpusched import ExecutorSettings


class TestGpusched(TestWorkflowsLocalStorageBase):
    __test__ = True

    def get_executor(self) -> str:
        return "gpusched"

    def get_executor_settings(self) -> ExecutorSettings:
        return ExecutorSettings(python=os.environ["PYTHON_OF_NODES"])

    def get_resource_settings(self) -> ResourceSettings:
        env = f"PYTHONPATH={os.environ['SITE_OF_NODES']}"
        return ResourceSettings(default_resources={"gpusched_partition": "A100", "gpusched_env": env})


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"cpus_per_task": 4}),
        ({"mem_mb": 1000, "runtime": 90}, {"cpus_per_task": 4, "mem_per_node": 1000, "time": 90}),
        ({"gpu": 2, "gpu_model": "a100"}, {"cpus_per_task": 4, "gpus": 2, "gpu_type": "a100"}),
        ({"gres": "gpu:a100:2"}, {"cpus_per_task": 4, "gpus": 2, "gpu_type": "a100"}),
        ({"gres": "gpu:3"}, {"cpus_per_task": 4, "gpus": 3}),
        ({"gres": "license:3"}, {"cpus_per_task": 4}),
        ({"gpus": 2, "cpus_per_gpu": 8}, {"gpus": 2, "cpus_per_gpu": 8}),
        ({"mem_mb": 1000, "mem_mb_per_cpu": 9}, {"cpus_per_task": 4, "mem_per_cpu": 9}),
        ({"slurm_partition": "A", "slurm_account": "g"}, {"cpus_per_task": 4, "partition": "A", "group": "g"}),
        ({"slurm_partition": "A100", "gpusched_partition": "V100"}, {"cpus_per_task": 4, "partition": "V100"}),
        ({"mem_mb": 1000, "gpusched_cpus": 2, "gpusched_mem": "4G"}, {"cpus": 2, "mem": "4G"}),
        ({"gpu": 1, "mem_mb": 1000, "gpusched_flavor": "s-A100", "runtime": 5}, {"flavor": "s-A100", "time": 5}),
    ],
)  # fmt: skip
def test_resources_are_options(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert job_options({"_cores": 4, "tmpdir": "/tmp", "gpu_manufacturer": None, **given}, 4) == options


@pytest.mark.parametrize("name", ["slurm_extra", "constraint"])
def test_options_that_would_be_ignored_are_refused(name: str) -> None:
    with pytest.raises(WorkflowError, match=name):
        job_options({name: "x"}, 1)


def test_ctrl_c_cancels_what_is_being_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Mock()
    monkeypatch.setattr(plugin, "_cluster", lambda: cluster)
    executor: Any = object.__new__(plugin.SnakemakeExecutor)
    executor.logger = Mock()
    executor.report_job_submission = Mock()
    executor.__post_init__()
    for number, ended in (("7", True), ("8", False)):
        info = SubmittedJobInfo(Mock(), number, {"job": Mock(id=number, done=Mock(return_value=ended))})
        monkeypatch.setattr(executor, "_unended", lambda _, found=info: found)
        executor.run_job(info.job)
    assert executor.next_seconds_between_status_checks > 0, "whatever Snakemake asks for: 0 would spin"
    executor.cancel_jobs([])  # Snakemake takes jobs from its list while it checks them
    cluster.cancel.assert_called_once_with(["8"])


@pytest.mark.parametrize(
    ("error", "is_queued"),
    [
        (UsageError("there is no job 7"), True),
        (Refused("job 7 was refused: no"), True),
        (GpuschedError("the store cannot be read"), False),
    ],
)
def test_a_job_that_cannot_be_looked_up_is_not_queued_twice(
    error: GpuschedError, is_queued: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "_cluster", lambda: Mock(job=Mock(side_effect=error)))
    executor: Any = object.__new__(plugin.SnakemakeExecutor)
    executor.workflow = Mock(persistence=Mock(path=tmp_path))
    executor.logger, executor.report_job_submission, executor.report_job_error = Mock(), Mock(), Mock()
    executor.__post_init__()
    job = Mock(output=["result"])
    note = executor._note(job)
    note.parent.mkdir()
    note.write_text("7")
    queued = Mock(return_value=SubmittedJobInfo(job, "8", {}))
    monkeypatch.setattr(executor, "_queued", queued)
    executor.run_job(job)
    assert (queued.called, executor.report_job_error.called) == (is_queued, not is_queued)


def test_a_job_queued_as_snakemake_was_killed_is_not_queued_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job is on disk, and nothing after that is done."""
    executor: Any = object.__new__(plugin.SnakemakeExecutor)
    settings = Mock(assume_common_workdir=False)
    executor.workflow = Mock(persistence=Mock(path=tmp_path), storage_settings=settings)
    for name in ("logger", "report_job_submission", "report_job_error", "write_jobscript"):
        setattr(executor, name, Mock())
    executor.envvars, executor.get_jobname = dict, lambda _: "killed"
    executor.get_jobscript = lambda _: tmp_path / "script"
    (tmp_path / "script").write_text("#!/bin/sh\nsleep 600\n")
    executor.__post_init__()
    job = Mock(output=["result"], threads=1, resources={"gpusched_partition": "A100", "gpusched_hold": True})
    deliver = Inbox.deliver

    def killed(inbox: Inbox, command: Any, name: str | None = None) -> None:
        deliver(inbox, command, name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Inbox, "deliver", killed)
        with pytest.raises(KeyboardInterrupt):
            executor.run_job(job)
    executor.run_job(job)
    queued = [found["id"] for found in Cluster().jobs() if found["name"] == "killed"]
    Cluster().cancel(queued)
    assert [info.external_jobid for info in executor._submitted.values()] == queued
    executor.report_job_error.assert_not_called()
