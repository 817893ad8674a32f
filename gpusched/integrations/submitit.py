"""submitit's plugin: ``AutoExecutor(folder, cluster="gpusched")`` and all that is built on it run here unchanged.

submitit finds it by the entry points ``submitit``. A job is a job script whose step runs submitit's own worker on each
task; its folder must be one that login node and nodes share. A function with ``checkpoint`` goes on after its time
limit and after a preemption, as under Slurm: submitit's handler saves it at the signal and queues the job again.
"""

from __future__ import annotations

import math
import shlex
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from submitit.core import core, job_environment, utils

from gpusched.errors import GpuschedError, UsageError

if TYPE_CHECKING:  # on nodes, submitit loads this module for its environment, and has nothing else of ours
    from gpusched.api import Cluster, Options

R = TypeVar("R")
_SHARED = {  # submitit's parameters for every cluster -> ours
    "name": "name", "nodes": "nodes", "gpus_per_node": "gpus_per_node", "cpus_per_task": "cpus_per_task",
    "tasks_per_node": "ntasks_per_node",
}  # fmt: skip
_OWN = ("signal_delay_s", "setup", "stderr_to_stdout")
_ACTIVE = {"PENDING": "PENDING", "STARTING": "PENDING", "RUNNING": "RUNNING", "COMPLETING": "COMPLETING"}
"""Our states of jobs that have not ended -> Slurm's."""


@lru_cache
def _cluster() -> Cluster:
    from gpusched.api import Cluster

    return Cluster()


class GpuschedJob(core.Job[R]):
    """A job, as submitit's callers see it."""

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended, or there is none of that id; False while its state cannot be read."""
        try:
            return self._own_state() not in _ACTIVE
        except UsageError:
            return True
        except GpuschedError:
            return False

    @property
    def state(self) -> str:
        """Return its state, in Slurm's words; ``UNKNOWN`` where there is none of that id."""
        try:
            state = self._own_state()
        except GpuschedError:
            return "UNKNOWN"
        return _ACTIVE.get(state, state)

    def _own_state(self) -> str:
        """Return its state now; submitit asks often, so no future is made, which would be kept until its end."""
        from gpusched.api import Job

        return str(Job[Any](_cluster(), self.job_id).state)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return what ``gpusched show`` says, as texts, with Slurm's ``State``."""
        return {key: str(value) for key, value in _cluster().show(self.job_id).items()} | {"State": self.state}

    def cancel(self, check: bool = True) -> None:
        """Ask for its end.

        Raises:
            GpuschedError: There is no such job, or it has ended; only with ``check``.
        """
        try:
            _cluster().cancel([self.job_id])
        except GpuschedError:
            if check:
                raise


class GpuschedJobEnvironment(job_environment.JobEnvironment):
    """What a task knows of its job; its step has Slurm's variables."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "GPUSCHED_JOB_ID", "num_tasks": "SLURM_NTASKS", "num_nodes": "SLURM_JOB_NUM_NODES",
        "node": "SLURM_NODEID", "global_rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID",
    }  # fmt: skip

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        """Save at TERM, too: it comes before a preemption, a resize and ``gpusched requeue``, which queue it again."""
        super()._handle_signals(paths, submission)
        handler = job_environment.SignalHandler(self, paths, submission)
        signal.signal(signal.SIGTERM, handler.checkpoint_and_exit)

    def _requeue(self, countdown: int) -> None:
        """Queue the job again, as submitit does after it has saved a checkpoint."""
        subprocess.run(["scontrol", "requeue", self.job_id], check=True, timeout=300)


class GpuschedExecutor(core.PicklingExecutor):
    """Queues functions here.

    Args:
        folder: Pickles, results and output; a folder that login node and nodes share. ``%j`` is the job's id.
        max_num_timeout: So often a function with ``checkpoint`` goes on after its time limit.
        max_pickle_size_gb: As of submitit's other executors.
        python: The interpreter on the nodes, which has submitit; by default this one.
    """

    job_class = GpuschedJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python or sys.executable
        self._throttling = 0.0  # the inbox takes thousands of jobs a second

    @classmethod
    def affinity(cls) -> int:
        """Return how well this executor fits the machine: chosen by itself where an inventory is and no Slurm."""
        try:
            _cluster().nodes()
        except GpuschedError:
            return -1
        return 2

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        from gpusched.api import Options

        return {*Options.__annotations__, *_OWN} - {"output", "error", "script", "array", "name", "nodes"}

    def _internal_update_parameters(self, **given: Any) -> None:
        known = self._valid_parameters() | {*_SHARED, "timeout_min", "mem_gb"}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"unknown parameters {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        self.python = given.pop("python", self.python)
        super()._internal_update_parameters(**given)

    def _num_tasks(self) -> int:
        return int(self.parameters.get("nodes", 1)) * int(self.parameters.get("tasks_per_node", 1))

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([self.python, "-u", "-m", "submitit.core._submit", str(self.folder)])

    def _submit_command(self, command: str) -> core.Job[Any]:
        script = self._make_submission_file_text(command, "")
        job = _cluster().submit("", **self._options(script))
        made: core.Job[Any] = GpuschedJob(self.folder, job.id, list(range(self._num_tasks())))
        made.paths.folder.mkdir(parents=True, exist_ok=True)
        made.paths.submission_file.write_text(script)
        return made

    def _options(self, script: str) -> Options:
        """Return the job's options: those given as gpusched's own go before submitit's for every cluster."""
        from gpusched.api import Options

        given, minutes = self.parameters, self.parameters.get("timeout_min", 5)
        options: dict[str, Any] = {ours: given[name] for name, ours in _SHARED.items() if name in given}
        options |= {"cpus_per_task": 1} if not options.keys() & {"cpus_per_task", "gpus_per_node"} else {}
        options |= {"time": math.ceil(minutes), "name": given.get("name", "submitit"), "slurm_env": True}
        if "mem_gb" in given:
            options["mem_per_node"] = f"{math.ceil(given['mem_gb'] * 1024)}M"
        usr = job_environment.JobEnvironment.USR_SIG
        options["signal"] = f"{usr}@{int(given.get('signal_delay_s', 90))}"
        options |= {name: value for name, value in given.items() if name in Options.__annotations__}
        output = str(self.folder / "%j_log.out")
        return cast("Options", {**options, "script": script, "output": output, "open_mode": "append"})

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Return the job script: one step with a task for each of submitit's, each with files of its own."""
        files = ["--output", str(self.folder / "%j_%t_log.out")]
        if not self.parameters.get("stderr_to_stdout"):
            files += ["--error", str(self.folder / "%j_%t_log.err")]
        lines = ["#!/bin/bash", "export SUBMITIT_EXECUTOR=gpusched", *self.parameters.get("setup", ())]
        return "\n".join([*lines, f"exec srun {shlex.join(files)} {command}", ""])

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError("jobs are queued by gpusched.Cluster")

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError("jobs are queued by gpusched.Cluster")
