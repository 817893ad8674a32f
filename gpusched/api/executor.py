"""An executor as those of concurrent.futures, whose workers are jobs; users of submitit find its names, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor as BaseExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, Unpack

from gpusched.api import options
from gpusched.api.cluster import Cluster
from gpusched.api.functions import Call
from gpusched.api.jobs import Job
from gpusched.api.options import Options
from gpusched.errors import UsageError
from gpusched.model.jobs import JobState

T = TypeVar("T")

_SUBMITIT = {"timeout_min": "time", "slurm_job_name": "name", "slurm_array_parallelism": "max_running"}
"""What submitit calls options of ours, besides those with ``slurm_`` before the same name."""
_TASKS = ("tasks_per_node", "slurm_ntasks_per_node")
_NEEDLESS = ("stderr_to_stdout",)  # they always are one


class Executor(BaseExecutor):
    """Each call is a job of its own, with the options given here; `map` makes one array of many calls.

    Leaving its ``with`` block waits for what was submitted, but for an exception. The jobs end neither with the block
    nor with the program.

    Args:
        cluster: Where to; None: the one that commands find.
        asked: Options of every job, see `Options`.
    """

    def __init__(self, cluster: Cluster | None = None, /, **asked: Unpack[Options]) -> None:
        self._cluster = cluster if cluster is not None else Cluster()
        self._options = options.checked(asked)
        self._jobs: list[Job[Any]] = []
        self._batch: list[tuple[Job[Any], Callable[..., Any], Call]] | None = None
        self._lock = threading.Lock()
        self._shut = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        """Queue a call, as `concurrent.futures.Executor.submit` does: named arguments are the function's.

        Raises:
            RuntimeError: After `shutdown`.
            UsageError, GpuschedError: As `Cluster.submit`.
        """
        self._check_open()
        if self._batch is not None:
            job = Job[T](self._cluster, "")
            self._batch.append((job, fn, (args, kwargs)))
            return job
        alone = {name: value for name, value in self._options.items() if name != "max_running"}
        return self._kept(self._cluster._queue_functions([fn], [(args, kwargs)], alone))[0]

    def map_array(self, fn: Callable[..., T], /, *iterables: Iterable[Any]) -> list[Job[T]]:
        """Queue one array: a call with what the iterables give, one after the other; its jobs, in order."""
        self._check_open()
        calls: list[Call] = [(args, {}) for args in zip(*iterables, strict=False)]
        return self._kept(self._cluster._queue_functions([fn], calls, self._options, array=True))

    def map(
        self, fn: Callable[..., T], /, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """As `concurrent.futures.Executor.map`: the results in order, as they come.

        The calls are queued at once, as one array, each task of which does ``chunksize`` of them, one after the other:
        worth it where one takes seconds. Where one raises, or the iterator is given up, the others go on.
        """
        self._check_open()
        if chunksize < 1:
            raise ValueError("chunksize must be at least 1")
        calls = list(zip(*iterables, strict=False))
        chunks: list[Call] = [((calls[i : i + chunksize],), {}) for i in range(0, len(calls), chunksize)]
        return _results(
            self._kept(self._cluster._queue_functions([fn], chunks, self._options, array=True, many=True)), timeout
        )

    @contextmanager
    def batch(self) -> Iterator[None]:
        """What is submitted within the block is queued as one array at its end, as in submitit.

        Until then its jobs have no id, and nothing is known of them.
        """
        if self._batch is not None:
            raise UsageError("a batch within a batch")
        self._batch = []
        try:
            yield
            gathered = self._batch
        finally:
            self._batch = None
        calls = [call for _, _, call in gathered]
        jobs = [job for job, _, _ in gathered]
        self._kept(
            self._cluster._queue_functions([fn for _, fn, _ in gathered], calls, self._options, array=True, jobs=jobs)
        )

    def update_parameters(self, **parameters: Any) -> None:
        """Other options for the jobs to come, also by submitit's names (``timeout_min``, ``mem_gb``, ``slurm_...``).

        Raises:
            TypeError: There is no such option.
            UsageError: It cannot be had here.
        """
        self._options |= options.checked(_translated(parameters))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more jobs. ``cancel_futures`` ends those that have not started; ``wait`` waits for the others.

        Without ``wait`` they go on, also after this program.
        """
        self._shut = True
        if cancel_futures:
            for job in self._jobs:
                if not job.done() and job.state is JobState.PENDING:
                    job.cancel()
        if wait:
            wait_for(self._jobs)

    def __exit__(self, kind: object, error: object, trace: object) -> Literal[False]:
        """Wait for what was submitted, or, when an exception leaves the block, for nothing: jobs may take days."""
        self.shutdown(wait=kind is None)
        return False

    def _check_open(self) -> None:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _kept(self, jobs: list[Job[Any]]) -> list[Job[Any]]:
        with self._lock:
            self._jobs += jobs
        return jobs


def _results(jobs: list[Job[Any]], timeout: float | None) -> Iterator[Any]:
    end = None if timeout is None else time.monotonic() + timeout
    for job in jobs:
        yield from job.result(None if end is None else max(0.0, end - time.monotonic()))


def _translated(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        bare = name.removeprefix("slurm_")
        if name in _TASKS:
            found["ntasks_per_node"] = None if value == 1 else value
        elif name in _NEEDLESS:
            continue
        elif name == "mem_gb":
            found["mem_per_node"] = f"{round(value * 1024)}M"
        else:
            found[_SUBMITIT.get(name, bare if bare in Options.__annotations__ else name)] = value
    return found
