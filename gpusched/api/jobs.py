"""A job as a future: its state, its result and its cancellation."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from gpusched.client.results import StoredResult, large_path, open_large, read_result
from gpusched.client.wait import exit_code
from gpusched.config.users import user_name
from gpusched.errors import GpuschedError
from gpusched.model.arrays import tasks_of
from gpusched.model.jobs import ENDED, JobState
from gpusched.model.jobs import JobRecord as JobRecord

if TYPE_CHECKING:
    from gpusched.api.cluster import Cluster

T = TypeVar("T")

_ORDER = {"raised": 0, "exited": 1, "returned": 3}
"""Of several results, which one is reported: an exception before those that were ended because of it."""
LAST_LINES, LAST_BYTES = 20, 10_000
NO_SUCH_PROGRAM = 127  # a shell's exit code


class JobFailed(GpuschedError):
    """A job failed, other than by an exception of its function.

    Attributes:
        job_id: The job.
        state: ``FAILED``, ``TIMEOUT``, ``OUT_OF_MEMORY``, ``NODE_FAIL``...
        returncode: The exit code of ``gpusched wait``.
        reason: One word: ``NonZeroExitCode``, ``TimeLimit``...
        output: The last lines of its output; "" if there is none, or it cannot be read.
    """

    def __init__(self, job: JobRecord, message: str = "", output: str = "") -> None:
        cause = message or ": ".join(part for part in (job.reason, job.message) if part)
        text = f"job {job.id} ended {job.state}" + (f" ({cause})" if cause else "")
        super().__init__(text + _output_text(output), "" if output else "see its output()")
        self.output = output
        self.job_id, self.state, self.returncode, self.reason = job.id, job.state, exit_code(job), job.reason


class RemoteTraceback(Exception):
    """The cause of an exception that a function raised in its job: its traceback, and the output before it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""' + _output_text("".join(self.args[1:]))


def _output_text(output: str) -> str:
    return f"; its last output:\n{output}" if output else ""


class Job(Future[T], Generic[T]):
    """A job that is pending, running, or ended.

    It is a `concurrent.futures.Future`: `concurrent.futures.wait` and ``as_completed`` accept it, ``await job`` works.
    It is done once the job has ended and its result has arrived. The job outlives the program that submitted it:
    `Cluster.job` returns it by its id.
    """

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        super().__init__()
        self._cluster, self._id = cluster, job_id
        self._ended: tuple[JobRecord, ...] = ()
        self._outcome_lock = threading.Lock()
        self._outcome: tuple[list[Any], BaseException | None] | None = None

    def __repr__(self) -> str:
        return f"<Job {self._id} {self._shown_state()}>"

    def _shown_state(self) -> str:
        try:
            return str(self.state)
        except GpuschedError as error:
            return error.line()

    @property
    def id(self) -> str:
        """Return its id, as on the command line."""
        return self._id

    @property
    def job_id(self) -> str:
        """Return its id, under submitit's name."""
        return self._id

    @property
    def state(self) -> JobState:
        """Return its current state; for an array RUNNING if a task runs, else that of an unended or failed task.

        Raises:
            GpuschedError: The controller refused it.
        """
        return _state_of(self._records())

    @property
    def reason(self) -> str:
        """Return the reason of its state, as in ``gpusched status``: ``Resources``, ``NonZeroExitCode: rank 0...``."""
        job = self._records()[0]
        return ": ".join(part for part in (job.reason, job.message) if part)

    @property
    def tasks(self) -> list[Job[Any]]:
        """Return the tasks of an array, else the job itself."""
        jobs = self._records()
        return [self] if jobs[0].id == self._id else [self._cluster.job(job.id) for job in tasks_of(jobs)]

    def info(self) -> dict[str, Any]:
        """Return its details, as ``gpusched show --json``."""
        return self._cluster.show(self._id)

    def running(self) -> bool:
        """Return whether it is running."""
        return not self.done() and self.state is JobState.RUNNING

    def cancel(self) -> bool:
        """Cancel the job, pending or running; return False if it had already ended.

        From then on it counts as cancelled, whatever it does with the signal and the grace period.
        """
        if self.done():
            return self.cancelled()
        try:
            self._cluster.cancel([self])
        except GpuschedError:
            if all(job.state in ENDED for job in self._records()):
                return False
            raise
        self._drop()  # without effect if it has ended meanwhile
        return self.cancelled()

    def _drop(self) -> None:
        """Count as cancelled, whatever the job does."""
        super().cancel()
        self._notify_cancelled()

    def _notify_cancelled(self) -> None:
        with self._condition:
            if self._state == "CANCELLED":  # else the waiters were notified already
                self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """Wait for its end; return the result of its function (on the first node), or 0 for a command.

        Args:
            timeout: Seconds; None: no limit.

        Raises:
            Exception: What the function raised.
            JobFailed: It failed in another way.
            TimeoutError: Not within ``timeout``; the job continues.
            concurrent.futures.CancelledError: It was cancelled.
            GpuschedError: It was refused, or its result cannot be read.
        """
        return self.results(timeout)[0]  # type: ignore[no-any-return]

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait as `result` does; return the results of all nodes and of the tasks on each (for an array, its tasks)."""
        super().result(timeout)
        values, error = self._outcome_of()
        try:
            if error is not None:
                raise error
            return values
        finally:
            del error  # no reference cycle with the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end; return what `result` would raise, or None."""
        refused = super().exception(timeout)
        return refused if refused is not None else self._outcome_of()[1]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, however it ends; return whether it ended within ``timeout`` seconds."""
        try:
            super().exception(timeout)
        except TimeoutError:
            return False
        except BaseException as error:
            if not self.cancelled():
                raise
            del error
        return True

    def output(self, rank: int | None = None) -> str:
        """Return its output so far (stdout and stderr combined), of all its nodes or one.

        Raises:
            GpuschedError: It has not started, or its output cannot be read.
        """
        return self._cluster.output(self._id, rank)

    def stdout(self) -> str:
        """Return its output, under submitit's name."""
        return self.output()

    def __await__(self) -> Generator[Any, None, T]:
        """Return `result` without blocking the event loop. Cancelling the wait does not cancel the job."""
        import asyncio  # takes half as long to load as all else

        return asyncio.shield(asyncio.wrap_future(self)).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._cluster.job, (self._id,)

    def _records(self) -> list[JobRecord]:
        return list(self._ended) or self._cluster._records(self._id)

    def _end(self, jobs: tuple[JobRecord, ...]) -> None:
        """Set the final state, once the result has arrived. Called by the watcher."""
        self._ended = jobs
        if any(job.state is JobState.CANCELLED for job in jobs):
            self._drop()
        else:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                self.set_result(None)  # type: ignore[arg-type]

    def _refused(self, error: GpuschedError) -> None:
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            self.set_exception(error)

    def _outcome_of(self) -> tuple[list[Any], BaseException | None]:
        with self._outcome_lock:
            if self._outcome is None:
                try:
                    self._outcome = [value for job in self._ended for value in self._values(job)], None
                except Exception as error:  # including the function's own
                    self._outcome = [], error
            return self._outcome

    def _values(self, job: JobRecord) -> Iterator[Any]:
        if not job.spec.function:
            if job.state is not JobState.COMPLETED:
                raise JobFailed(job, output=self._last_lines(job))
            yield 0
            return
        if job.state not in (JobState.COMPLETED, JobState.FAILED):
            raise JobFailed(job, output=self._last_lines(job))
        if job.uid != os.getuid():
            raise GpuschedError(
                f"job {job.id} belongs to {user_name(job.uid)}: its result could run code as you",
                "only its own user may load it",
            )
        found = [read_result(self._cluster._client(), job, rank) for rank in range(job.spec.nodes)]
        found = [task for result in found for task in (result.tasks() if result is not None else [None])]
        results = sorted(filter(None, found), key=lambda result: _ORDER.get(str(result.header.get("outcome")), 2))
        for result in (*results, *(None for one in found if one is None)):
            _raise_of(job, result, lambda: self._last_lines(job))
        if job.state is not JobState.COMPLETED:
            raise JobFailed(job, output=self._last_lines(job))
        for result in found:
            assert result is not None
            yield self._fetched(job, result) if "file" in result.header else _unpickled(job, result)

    def _fetched(self, job: JobRecord, result: StoredResult) -> Any:
        """Return a result that was too large to collect, and remove its file."""
        client = self._cluster._client()
        with open_large(client, job, result) as file:
            value = _unpickled(job, result, file)
        with contextlib.suppress(OSError):  # in another user's folder it stays
            os.unlink(large_path(client, job, result))
        return value

    def _last_lines(self, job: JobRecord) -> str:
        """Return the end of its output: after a failure it usually has the reason."""
        if not job.attempt:
            return ""
        try:
            text = self._cluster._output(job.id, tail=LAST_LINES)
        except (GpuschedError, OSError):
            return ""
        return text[-LAST_BYTES:].rstrip("\n")


def _raise_of(job: JobRecord, result: StoredResult | None, output: Callable[[], str]) -> None:
    """Raise the outcome of a call, unless it returned."""
    if result is None and job.exit_code == NO_SUCH_PROGRAM:
        python = job.spec.command[-1] if job.spec.command else "program"
        raise JobFailed(job, f"no {python} here: use an image with Python, or name its interpreter (python=...)")
    if result is None:
        message = "" if job.state is not JobState.COMPLETED else "its function left no result"
        raise JobFailed(job, message, output())
    outcome, message = result.header.get("outcome"), str(result.header.get("error", ""))
    if outcome == "returned":
        return
    if outcome != "raised":
        raise JobFailed(job, message, output())
    text = str(result.header.get("traceback", ""))
    lines = output()
    # The traceback was written to stderr, too: show only what precedes it.
    position = lines.rfind("Traceback (most recent call last):")
    trace = RemoteTraceback(text, (lines[:position] if position >= 0 else lines).rstrip())
    if not result.data:
        raise JobFailed(job, message) from trace
    try:
        error = _unpickled(job, result)
    except GpuschedError:  # of a library that is not installed here
        error = None
    raise (error if isinstance(error, BaseException) else JobFailed(job, message)) from trace


def _unpickled(job: JobRecord, result: StoredResult, file: BinaryIO | None = None) -> Any:
    try:
        return pickle.loads(result.data) if file is None else pickle.load(file)
    except Exception as error:
        python = ".".join(map(str, result.header.get("python") or ()))
        raise GpuschedError(
            f"what job {job.id} returned, in Python {python}, cannot be unpickled: {type(error).__name__}: {error}",
            "the same versions of its libraries are needed here",
        ) from error


def _state_of(jobs: list[JobRecord]) -> JobState:
    """Return the state of a task that has not ended, else of one that failed."""
    states = {job.state for job in jobs}
    for state in (JobState.RUNNING, JobState.COMPLETING, JobState.STARTING, JobState.PENDING):
        if state in states:
            return state
    return max(jobs, key=exit_code).state
