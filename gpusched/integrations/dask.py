"""Dask's workers as jobs: ``GpuschedCluster(cores=8, memory="64GB", gpus=1, image=...).adapt(maximum_jobs=8)``.

A cluster of dask-jobqueue: programs written for its SLURMCluster run here with this class. Dask's scheduler runs in the
program that makes the cluster, and each job runs ``dask worker`` in its image, which needs Dask and nothing of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import dask
from dask_jobqueue.core import Job as JobqueueJob
from dask_jobqueue.core import JobQueueCluster
from distributed.core import Status

from gpusched.api import Cluster, Options
from gpusched.errors import GpuschedError

if TYPE_CHECKING:
    from gpusched.api import Job

log = logging.getLogger(__name__)

_SLURM = {"queue": "partition", "account": "group", "walltime": "time"}
"""What SLURMCluster calls some options -> their names here."""
_TAKEN = {"name", "script", "array", "chain", "python", "modules", "result_dir"}
"""Options that are not the caller's: the worker is named and started by Dask."""
_OPTIONS = Options.__annotations__.keys() - _TAKEN
_FAULTS = ("FAILED", "OUT_OF_MEMORY", "CANCELLED")
"""A job that ended so is not started again by itself: it would end so again, or a person ended it."""
DEFAULTS: dict[str, Any] = {
    "name": "dask-worker", "cores": None, "memory": None, "processes": None, "python": "python3", "interface": None,
    "death-timeout": 60, "local-directory": None, "shared-temp-directory": None, "extra": None,
    "worker-command": "distributed.cli.dask_worker", "worker-extra-args": [], "env-extra": None,
    "job-script-prologue": [], "job-extra": None, "job-extra-directives": [], "job-directives-skip": [],
    "log-directory": None, "shebang": "#!/usr/bin/env bash", "scheduler-options": {},
}  # fmt: skip
"""Of Dask's configuration, as ``jobqueue.gpusched``; an installation may set its image and partition there, too."""
dask.config.update_defaults({"jobqueue": {"gpusched": DEFAULTS}})


@lru_cache
def _cluster() -> Cluster:
    return Cluster()


class WorkerJob(JobqueueJob):
    """A job that runs Dask's worker, or several (``processes``), which share what it has.

    Args:
        scheduler: Address of Dask's scheduler.
        name: The worker's.
        config_name: Section of ``jobqueue`` in Dask's configuration.
        given: Parameters of every dask-jobqueue cluster, options of `gpusched.api.Options`, and SLURMCluster's
            ``queue``, ``account`` and ``walltime``.
    """

    config_name = "gpusched"

    def __init__(
        self, scheduler: str | None = None, name: str | None = None, config_name: str | None = None, **given: Any
    ) -> None:
        section = dask.config.get(f"jobqueue.{config_name or self.config_name}")
        options = {key.replace("-", "_"): value for key, value in section.items()}
        options |= {key: given.pop(key) for key in given.keys() & (_OPTIONS | _SLURM.keys())}
        options = {_SLURM.get(key, key): value for key, value in options.items()}
        if given.get("job_extra_directives"):
            raise ValueError("job_extra_directives is for other schedulers; here options have names: gpus=1, mount=...")
        super().__init__(scheduler=scheduler, name=name, config_name=config_name, **given)  # type: ignore[no-untyped-call]
        self.job_header = ""
        self._command_template = f"exec {self._command_template}"  # signals are the worker's, not the shell's
        memory = cast("int", self.worker_memory)  # bytes; without it, Dask's own class has raised
        self._options: dict[str, Any] = {"cpus": self.worker_cores, "mem": f"{math.ceil(memory / 2**20)}M"}
        if self.log_directory is not None:
            self._options["output"] = f"{self.log_directory}/{self.job_name}-%j.out"
        self._options |= {key: options[key] for key in options.keys() & _OPTIONS}
        self._job: Job[int] | None = None

    async def start(self) -> None:
        """Queue the job; Dask learns of the worker when it connects."""
        script = self.job_script()  # type: ignore[no-untyped-call]
        options = cast("Options", {"name": self.job_name, "requeue": False, **self._options, "script": script})
        job = await asyncio.to_thread(lambda: _cluster().submit("", **options))
        self._job, self.job_id = job, job.id
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the cluster, too
                loop.call_soon_threadsafe(self._has_ended)

        job.add_done_callback(ended)
        self.status = Status.running

    async def close(self) -> None:
        """Cancel the job: the cluster needs one less, or has not heard from the worker for long and needs another."""
        self.status = Status.closed
        if self._job is not None:
            with contextlib.suppress(GpuschedError):  # the store has forgotten it
                await asyncio.to_thread(self._job.cancel)
        self._event_finished.set()
        cluster = self._owner()
        if cluster is not None and self.name in cluster.worker_spec and self.name not in cluster.workers:
            cluster.replace_worker(self.name)

    def _owner(self) -> GpuschedCluster | None:
        return cast("GpuschedCluster | None", getattr(self, "_cluster", lambda: None)())

    def _has_ended(self) -> None:
        """Have a worker that met its time limit or lost its node replaced: Dask itself would not ask again."""
        self.status, cluster, job = Status.closed, self._owner(), self._job
        if job is None or cluster is None or cluster.workers.get(self.name) is not self:
            return
        if self.name in cluster.worker_spec:
            try:
                state, reason = str(job.state), job.reason
            except GpuschedError as error:  # it was refused
                state, reason = "FAILED", error.line()
            if has_failed := state in _FAULTS:
                log.warning("worker %s: job %s ended %s (%s); scale() starts another", self.name, job.id, state, reason)
            cluster.replace_worker(self.name, at_once=not has_failed)


class GpuschedCluster(JobQueueCluster):
    """A Dask cluster with jobs as workers, for ``Client(cluster)``, with ``scale`` and ``adapt``.

    Args:
        n_workers: Workers at the beginning.
        cores: CPU cores of each job, shared by its ``processes``.
        memory: Memory of each job.
        gpus, image, partition, time, mount...: Options of each job, by their names in `gpusched.api.Options`.
        queue, account, walltime: As of SLURMCluster, for partition, group and time.
        scheduler_options: Of Dask's scheduler; ``{"host": ...}`` is an address that the nodes reach.

    All other parameters of dask-jobqueue's clusters have their meaning, except ``job_extra_directives``.
    """

    job_cls = WorkerJob

    def replace_worker(self, name: str, *, at_once: bool = True) -> None:
        """Ask for another worker in place of one that is gone; without ``at_once`` at the next change of scale.

        It has a new name: Dask cancels what has the old one when that worker has been silent for long.
        """
        fresh = self.new_worker_spec()
        self.workers.pop(name, None)
        del self.worker_spec[name]
        self.worker_spec.update(fresh)
        if at_once:
            self._correct_state()
