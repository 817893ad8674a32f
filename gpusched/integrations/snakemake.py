"""Snakemake's executor plugin: ``snakemake --executor gpusched --jobs 50``.

Snakemake finds it by the package `snakemake_executor_plugin_gpusched`. A job of a workflow, or a group of jobs, is a
job script that calls Snakemake again in the workflow's folder, which login node and nodes share. If Snakemake itself is
killed, its jobs continue, and the next call waits for those that have not ended.
"""

import hashlib
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from gpusched.config.paths import write_atomic
from gpusched.errors import GpuschedError, UsageError

if TYPE_CHECKING:  # Snakemake loads the plugin for every command, also in each job
    from gpusched.api import Cluster

CHECK_S = 1  # Snakemake's ten seconds spare a scheduler that is asked; here a check costs little, but 0 s would spin
OWN = "gpusched_"
"""Prefix of resources that are options of ``gpusched submit``."""
_OPTIONS = {
    "runtime": "time", "mem_mb": "mem_per_node", "gpu": "gpus", "gpus": "gpus", "nvidia_gpu": "gpus",
    "gpu_model": "gpu_type", "nodes": "nodes", "tasks": "ntasks", "tasks_per_node": "ntasks_per_node",
    "slurm_partition": "partition", "slurm_account": "group", "qos": "qos",
}  # fmt: skip
_INSTEAD = {"cpus_per_task": "cpus_per_task", "cpus_per_gpu": "cpus_per_gpu", "mem_mb_per_cpu": "mem_per_cpu"}
"""Resources of Snakemake and of its plugin for Slurm -> options; the second instead of threads and memory."""
_REFUSED = ("slurm_extra", "constraint")
"""To ignore these would run jobs on the wrong nodes, or without their GPUs."""

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_envvar_declarations_to_cmd=False,  # they are secrets of the job
    auto_deploy_default_storage_provider=False,
    pass_group_args=True,
)


@dataclass
class SnakemakeSettings(ExecutorSettingsBase):
    """What ``snakemake --gpusched-...`` sets; Snakemake calls the annotation, which must be a type, no text."""

    python: str = field(
        default="",
        metadata={"help": "Interpreter in the jobs' image, which has Snakemake; default: this one", "required": False},
    )


@lru_cache
def _cluster() -> "Cluster":
    from gpusched.api import Cluster

    return Cluster()


class SnakemakeExecutor(RemoteExecutor):
    """Queues the jobs of a workflow here."""

    def __post_init__(self) -> None:
        """Set the time between two checks of the jobs."""
        self._submitted: dict[str, SubmittedJobInfo] = {}
        self.next_seconds_between_status_checks = CHECK_S

    def get_python_executable(self) -> str:
        """Return the interpreter on the nodes."""
        return str(self.workflow.executor_settings.python or super().get_python_executable())

    def get_job_args(self, job: JobExecutorInterface) -> str:
        """Return Snakemake's arguments in the job, which uses no more cores than it has."""
        return f"{super().get_job_args(job)} --cores {job.threads}"  # of two the last counts

    def run_job(self, job: JobExecutorInterface) -> None:
        """Queue a job, or wait for the one that an earlier Snakemake queued for the same files."""
        try:
            found, still = self._unended(job), "still "
            if found is None:
                found, still = self._queued(job), ""
        except (GpuschedError, TypeError) as error:  # TypeError: no such option
            text = error.line() if isinstance(error, GpuschedError) else str(error)
            self.report_job_error(SubmittedJobInfo(job), msg=f"not queued: {text}. ")
            return
        assert found.external_jobid is not None
        self._submitted[found.external_jobid] = found
        self.logger.info(f"Job {job.jobid} is {still}gpusched job {found.external_jobid}.")
        self.report_job_submission(found)

    def _queued(self, job: JobExecutorInterface) -> SubmittedJobInfo:
        path = self.get_jobscript(job)
        self.write_jobscript(job, path)
        options = {"name": self.get_jobname(job)} | job_options(job.resources, job.threads)
        if variables := self.envvars():
            options["secret"] = variables
        if self.workflow.storage_settings.assume_common_workdir:
            folder = Path(self.workflow.workdir_init)
            log = folder / job.logfile_suggestion(".snakemake/gpusched_logs").replace("%", "%%")
            log = log.with_name(f"{log.stem}.%j.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            options = {"workdir": str(folder), "output": str(log), "open_mode": "append"} | options
        options["script"] = Path(path).read_text()
        made = _cluster().submit_command("", note=lambda job_id: self._keep(job, job_id), **options)
        return SubmittedJobInfo(job, made.id, {"job": made, "output": options.get("output", "")})

    def _note(self, job: JobExecutorInterface) -> Path | None:
        """Return the file with the id of the job that writes the same files; None if it writes none.

        Snakemake remembers ids, too, but only until the job begins: there it writes its own note over ours.
        """
        files = "\n".join(sorted(map(str, job.output)))
        name = hashlib.sha256(files.encode()).hexdigest()[:32]
        return Path(self.workflow.persistence.path) / "gpusched" / name if files else None

    def _keep(self, job: JobExecutorInterface, job_id: str) -> None:
        if note := self._note(job):
            note.parent.mkdir(exist_ok=True)
            write_atomic(note, job_id.encode())

    def _unended(self, job: JobExecutorInterface) -> SubmittedJobInfo | None:
        from gpusched.client.resolve import Refused

        note = self._note(job)
        try:
            if note is None or not note.exists():
                return None
            found = _cluster().job(note.read_text())
            known = found.info()
        except (UsageError, Refused):  # so old that it is forgotten, or another cluster's
            return None
        output = known["spec"]["output"] or ""
        return None if known["end_time"] else SubmittedJobInfo(job, found.id, {"job": found, "output": output})

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report jobs that have ended and yield the others; one thread watches the store for all of them."""
        for info in active_jobs:
            assert info.aux is not None
            job = info.aux["job"]
            if not job.done():
                yield info
                continue
            self._submitted.pop(job.id, None)
            if error := _failure(job):
                self.report_job_error(info, msg=f"{error}. ", aux_logs=[info.aux["output"].replace("%j", job.id)])
            else:
                self.report_job_success(info)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel what has not ended; Snakemake's own list lacks the jobs that it is checking just then."""
        ids = [number for number, info in list(self._submitted.items()) if info.aux and not info.aux["job"].done()]
        try:
            if ids:
                _cluster().cancel(ids)
        except GpuschedError as error:
            self.logger.warning(error.line())


def job_options(resources: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Return the options of a job with these resources; gpusched's own go before Snakemake's.

    Raises:
        WorkflowError: One of them would be ignored.
    """
    given = {name: value for name, value in resources.items() if value is not None}
    for name in _REFUSED:
        if name in given:
            raise WorkflowError(f"resource {name} is not known to gpusched: use {OWN}OPTION (gpusched submit --help)")
    options = {"cpus_per_task": threads} | {_OPTIONS[name]: given[name] for name in _OPTIONS if name in given}
    kind, _, gpus = str(given.get("gres", "")).partition(":")
    if kind == "gpu":  # gpu:2, gpu:a100:2
        model, _, count = gpus.rpartition(":")
        options |= {"gpus": int(count or 1)} | ({"gpu_type": model} if model else {})
    options = _replaced(options, {_INSTEAD[name]: given[name] for name in _INSTEAD if name in given})
    return _replaced(options, {n.removeprefix(OWN): value for n, value in given.items() if n.startswith(OWN)})


def _replaced(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return both, but of ``options`` none that says the same as one of ``more``, such as memory in another way."""
    kinds = {name.partition("_")[0] for name in more}
    if "flavor" in kinds:
        kinds |= {"gpus", "cpus", "mem"}
    return {name: value for name, value in options.items() if name.partition("_")[0] not in kinds} | more


def _failure(job: Any) -> str | None:
    try:
        error = job.exception()
    except CancelledError:
        return f"job {job.id} was cancelled"
    return None if error is None else str(error)
