"""An executor like those of concurrent.futures, with jobs as workers; it also has submitit's names."""

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

T = TypeVar("T")

_SUBMITIT = {"timeout_min": "time", "slurm_job_name": "name", "slurm_array_parallelism": "max_running"}
"""submitit's names of our options, besides those with the prefix ``slurm_``."""
_TASKS = ("tasks_per_node", "slurm_ntasks_per_node")
_NO_EFFECT = ("stderr_to_stdout",)  # always the case here


class Executor(BaseExecutor):
    """An executor that runs each call as a job, with the options given here; `map` makes one array of many calls.

    Leaving its ``with`` block waits for what was submitted, unless by an exception. The jobs outlive the block and the
    program.

    Args:
        cluster: The cluster; None: the one that commands find.
        asked: Options of every job, see `Options`.
    """

    def __init__(self, cluster: Cluster | None = None, /, **asked: Unpack[Options]) -> None:
        self._cluster = cluster if cluster is not None else Cluster()
        self._options = options.checked(asked)
        self._jobs: list[Job[Any]] = []
        self._batch: list[tuple[Job[Any], Callable[..., Any], Call]] | None = None
        self._lock = threading.Lock()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        """Queue a call, as `concurrent.futures.Executor.submit` does: keyword arguments are the function's.

        Raises:
            RuntimeError: After `shutdown`.
            UsageError, GpuschedError: As `Cluster.submit`.
        """
        self._check_open()
        job = Job[T](self._cluster, "")
        with self._lock:  # the block may end meanwhile, in another thread
            if self._batch is not None:
                self._batch.append((job, fn, (args, kwargs)))
                return job
        options_of_one = {name: value for name, value in self._options.items() if name != "max_running"}
        return self._remember(self._cluster._queue_functions([fn], [(args, kwargs)], options_of_one))[0]

    def map_array(self, fn: Callable[..., T], /, *iterables: Iterable[Any]) -> list[Job[T]]:
        """Queue one array with a call for each tuple of the iterables' items; return its jobs, in order."""
        self._check_open()
        calls: list[Call] = [(args, {}) for args in zip(*iterables, strict=False)]
        return self._remember(self._cluster._queue_functions([fn], calls, self._options, array=True))

    def map(
        self, fn: Callable[..., T], /, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Yield the results in order, as they arrive, as `concurrent.futures.Executor.map` does.

        The calls are queued at once as one array. Each task makes ``chunksize`` calls in turn, which pays off if a call
        takes seconds. If a call raises, or the iterator is dropped, the others continue.
        """
        self._check_open()
        if chunksize < 1:
            raise ValueError("chunksize must be at least 1")
        calls = list(zip(*iterables, strict=False))
        chunks: list[Call] = [((calls[i : i + chunksize],), {}) for i in range(0, len(calls), chunksize)]
        jobs = self._cluster._queue_functions([fn], chunks, self._options, array=True, is_batch=True)
        return _results(self._remember(jobs), timeout)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Queue what is submitted within the block as one array at its end, as in submitit.

        Until then its jobs have no id and no state. They are cancelled if it cannot be queued, or the block raises.
        """
        if self._batch is not None:
            raise UsageError("a batch within a batch")
        self._batch = []
        queued = False
        try:
            yield
            queued = True
        finally:
            with self._lock:
                gathered, self._batch = self._batch, None
            if not queued:
                _drop(job for job, _, _ in gathered)
        calls = [call for _, _, call in gathered]
        jobs = [job for job, _, _ in gathered]
        try:
            self._cluster._queue_functions([fn for _, fn, _ in gathered], calls, self._options, array=True, jobs=jobs)
        except BaseException:
            _drop(jobs)
            raise
        self._remember(jobs)

    def update_parameters(self, **parameters: Any) -> None:
        """Change the options of later jobs, also by submitit's names (``timeout_min``, ``mem_gb``, ``slurm_...``).

        Raises:
            TypeError: There is no such option.
            UsageError: It is not supported.
        """
        self._options |= options.checked(_translated(parameters))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. ``cancel_futures`` cancels pending ones; ``wait`` waits for the others.

        Without ``wait`` they continue, even after this program.
        """
        self._is_shut_down = True
        if cancel_futures:
            self._cluster._cancel_pending([job for job in self._jobs if not job.done()])
        if wait:
            wait_for(self._jobs)

    def __exit__(self, kind: object, error: object, trace: object) -> Literal[False]:
        """Wait for what was submitted; after an exception do not wait: jobs may take days."""
        self.shutdown(wait=kind is None)
        return False

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _remember(self, jobs: list[Job[Any]]) -> list[Job[Any]]:
        with self._lock:
            self._jobs += jobs
        return jobs


def _drop(jobs: Iterable[Job[Any]]) -> None:
    """Cancel futures of jobs that were never queued."""
    for job in jobs:
        job._drop()


def _results(jobs: list[Job[Any]], timeout: float | None) -> Iterator[Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    for job in jobs:
        yield from job.result(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _translated(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        plain_name = name.removeprefix("slurm_")
        if name in _TASKS:
            found["ntasks_per_node"] = None if value == 1 else value
        elif name in _NO_EFFECT:
            continue
        elif name == "mem_gb":
            found["mem_per_node"] = f"{round(value * 1024)}M"
        else:
            found[_SUBMITIT.get(name, plain_name if plain_name in Options.__annotations__ else name)] = value
    return found
