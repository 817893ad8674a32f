"""A job as a future: what it will return, how it is doing, and ending it."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
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
"""Of several results, which one is told of: an exception before those that were ended for its sake."""
LAST_LINES, LAST_BYTES = 20, 10_000
NO_SUCH_PROGRAM = 127  # a shell's exit code


class JobFailed(GpuschedError):
    """A job ended otherwise than well, and not by an exception of its function.

    Attributes:
        job_id: Which one.
        state: ``FAILED``, ``TIMEOUT``, ``OUT_OF_MEMORY``, ``NODE_FAIL``...
        returncode: As ``gpusched wait`` would exit.
        reason: In a word: ``NonZeroExitCode``, ``TimeLimit``...
        output: The last lines of what it said; "": nothing, or it cannot be had.
    """

    def __init__(self, job: JobRecord, told: str = "", output: str = "") -> None:
        because = told or ": ".join(part for part in (job.reason, job.message) if part)
        text = f"job {job.id} ended {job.state}" + (f" ({because})" if because else "")
        super().__init__(text + _said(output), "" if output else "see its output()")
        self.output = output
        self.job_id, self.state, self.returncode, self.reason = job.id, job.state, exit_code(job), job.reason


class RemoteTraceback(Exception):
    """The cause of an exception that a function raised in its job: where that was, and what it had said before."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""' + _said("".join(self.args[1:]))


def _said(output: str) -> str:
    return f"; its last output:\n{output}" if output else ""


class Job(Future[T], Generic[T]):
    """A job in the queue, running, or ended.

    It is a `concurrent.futures.Future`: `concurrent.futures.wait` and ``as_completed`` take it, ``await job`` works.
    It is done once the job has ended and what it returned is here. The job outlives the program that submitted it:
    `Cluster.job` gives it again by its id.
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
        """Its id, as the command line has it."""
        return self._id

    @property
    def job_id(self) -> str:
        """The same, under submitit's name."""
        return self._id

    @property
    def state(self) -> JobState:
        """Its state now; of an array RUNNING where a task runs, else that of one that has not ended, or went wrong.

        Raises:
            GpuschedError: The controller refused it.
        """
        return _state_of(self._records())

    @property
    def reason(self) -> str:
        """Why it is where it is, as ``gpusched status`` says: ``Resources``, ``NonZeroExitCode: rank 0...``."""
        job = self._records()[0]
        return ": ".join(part for part in (job.reason, job.message) if part)

    @property
    def tasks(self) -> list[Job[Any]]:
        """Of an array its tasks, else the job itself."""
        jobs = self._records()
        return [self] if jobs[0].id == self._id else [self._cluster.job(job.id) for job in tasks_of(jobs)]

    def info(self) -> dict[str, Any]:
        """All that ``gpusched show --json`` says of it."""
        return self._cluster.show(self._id)

    def running(self) -> bool:
        """Whether it runs now."""
        return not self.done() and self.state is JobState.RUNNING

    def cancel(self) -> bool:
        """Ask for its end, waiting or running; False where it had ended already.

        From then on it counts as cancelled, whatever it does with the signal and the grace it is given.
        """
        if self.done():
            return self.cancelled()
        try:
            self._cluster.cancel([self])
        except GpuschedError:
            if all(job.state in ENDED for job in self._records()):
                return False
            raise
        super().cancel()
        self._notify_cancelled()
        return True

    def _notify_cancelled(self) -> None:
        with self._condition:
            if self._state == "CANCELLED":  # else somebody has told the waiters already
                self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """Wait for its end; what its function returned (on the first node), or of a command 0.

        Args:
            timeout: Seconds; None: as long as it takes.

        Raises:
            Exception: What the function raised.
            JobFailed: It ended otherwise than well.
            TimeoutError: Not within ``timeout``; the job goes on.
            concurrent.futures.CancelledError: It was cancelled.
            GpuschedError: It was refused, or its result cannot be had.
        """
        return self.results(timeout)[0]  # type: ignore[no-any-return]

    def results(self, timeout: float | None = None) -> list[Any]:
        """The same of all its nodes, and of the tasks on each (of an array: its tasks)."""
        super().result(timeout)
        values, error = self._outcome_of()
        try:
            if error is not None:
                raise error
            return values
        finally:
            del error  # no circle with the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end; what `result` would raise, or None."""
        refused = super().exception(timeout)
        return refused if refused is not None else self._outcome_of()[1]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, however that is; whether it came within ``timeout`` seconds."""
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
        """What it said so far (stdout and stderr as one), of all its nodes or one.

        Raises:
            GpuschedError: It has not started, or its output cannot be had.
        """
        return self._cluster.output(self._id, rank)

    def stdout(self) -> str:
        """The same, under submitit's name."""
        return self.output()

    def __await__(self) -> Generator[Any, None, T]:
        """`result`, without holding up the event loop. Who stops waiting does not cancel the job."""
        import asyncio  # takes as long to load as half of the rest

        return asyncio.shield(asyncio.wrap_future(self)).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._cluster.job, (self._id,)

    def _records(self) -> list[JobRecord]:
        return list(self._ended) or self._cluster._records(self._id)

    def _end(self, jobs: tuple[JobRecord, ...]) -> None:
        """It has ended so, and what it left is here. For the watcher."""
        self._ended = jobs
        if any(job.state is JobState.CANCELLED for job in jobs):
            super().cancel()
            self._notify_cancelled()
        elif not self.done():
            self.set_result(None)  # type: ignore[arg-type]

    def _refused(self, error: GpuschedError) -> None:
        if not self.done():
            self.set_exception(error)

    def _outcome_of(self) -> tuple[list[Any], BaseException | None]:
        with self._outcome_lock:
            if self._outcome is None:
                try:
                    self._outcome = [value for job in self._ended for value in self._values(job)], None
                except Exception as error:  # the function's own among them
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
        found = [task for left in found for task in (left.tasks() if left is not None else [None])]
        told = sorted(filter(None, found), key=lambda left: _ORDER.get(str(left.header.get("outcome")), 2))
        for left in (*told, *(None for one in found if one is None)):
            _raise_of(job, left, lambda: self._last_lines(job))
        if job.state is not JobState.COMPLETED:
            raise JobFailed(job, output=self._last_lines(job))
        for left in found:
            assert left is not None
            yield self._fetched(job, left) if "file" in left.header else _unpickled(job, left)

    def _fetched(self, job: JobRecord, left: StoredResult) -> Any:
        """Return a result that was too large to travel, and remove it."""
        client = self._cluster._client()
        with open_large(client, job, left) as file:
            value = _unpickled(job, left, file)
        with contextlib.suppress(OSError):  # somebody else's folder: it stays
            os.unlink(large_path(client, job, left))
        return value

    def _last_lines(self, job: JobRecord) -> str:
        """Return the end of its output: with a job that failed on the other side of the cluster, mostly the reason."""
        if not job.attempt:
            return ""
        try:
            text = self._cluster._output(job.id, tail=LAST_LINES)
        except (GpuschedError, OSError):
            return ""
        return text[-LAST_BYTES:].rstrip("\n")


def _raise_of(job: JobRecord, left: StoredResult | None, output: Callable[[], str]) -> None:
    """Raise what became of a call, unless it returned."""
    if left is None and job.exit_code == NO_SUCH_PROGRAM:
        python = job.spec.command[-1] if job.spec.command else "program"
        raise JobFailed(job, f"no {python} here: use an image with Python, or name its interpreter (python=...)")
    if left is None:
        told = "" if job.state is not JobState.COMPLETED else "its function left no result"
        raise JobFailed(job, told, output())
    outcome, told = left.header.get("outcome"), str(left.header.get("error", ""))
    if outcome == "returned":
        return
    if outcome != "raised":
        raise JobFailed(job, told, output())
    text = str(left.header.get("traceback", ""))
    lines = output()
    # The traceback was written to stderr, too: what stands before it is news.
    at = lines.rfind("Traceback (most recent call last):")
    trace = RemoteTraceback(text, (lines[:at] if at >= 0 else lines).rstrip())
    if not left.data:
        raise JobFailed(job, told) from trace
    try:
        error = _unpickled(job, left)
    except GpuschedError:  # of a library that is not here
        error = None
    raise (error if isinstance(error, BaseException) else JobFailed(job, told)) from trace


def _unpickled(job: JobRecord, left: StoredResult, file: BinaryIO | None = None) -> Any:
    try:
        return pickle.loads(left.data) if file is None else pickle.load(file)
    except Exception as error:
        python = ".".join(map(str, left.header.get("python") or ()))
        raise GpuschedError(
            f"what job {job.id} returned, in Python {python}, cannot be unpickled: {type(error).__name__}: {error}",
            "the same versions of its libraries are needed here",
        ) from error


def _state_of(jobs: list[JobRecord]) -> JobState:
    """Of several tasks the state of one that has not ended, else of one that went wrong."""
    states = {job.state for job in jobs}
    for state in (JobState.RUNNING, JobState.COMPLETING, JobState.STARTING, JobState.PENDING):
        if state in states:
            return state
    return max(jobs, key=exit_code).state
