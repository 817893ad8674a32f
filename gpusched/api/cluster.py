"""The cluster in a Python program: queue work, find jobs, and query their state."""

from __future__ import annotations

import contextlib
import operator
import os
import shlex
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec

from gpusched.api import functions, options
from gpusched.api.functions import Call
from gpusched.api.jobs import Job
from gpusched.api.options import Options
from gpusched.api.watching import Watcher
from gpusched.client import control
from gpusched.client.context import Client
from gpusched.client.jobs import Query, parse_states, queried
from gpusched.client.resolve import Refused, Resolver
from gpusched.client.submit import FunctionProgram, prepare, submit
from gpusched.config.paths import expanded
from gpusched.errors import UsageError
from gpusched.model.jobs import JobRecord as JobRecord
from gpusched.model.jobs import JobState

if TYPE_CHECKING:
    from gpusched.client.control import ControlResult

T = TypeVar("T")
Command = str | Sequence[str]
CLIENT_LIFETIME_S = 5.0  # a changed inventory takes effect after that
_inherited: list[Client] = []  # through a fork: SQLite's connections must then be neither used nor closed


class NoController(UserWarning):
    """The controller is not running: what was queued waits."""


class Cluster:
    """An installation of gpusched, found as the commands find it.

    Args:
        state: The state folder; None: ``GPUSCHED_STATE``, or the default.
        inventory: The inventory file; None: ``GPUSCHED_INVENTORY``, or the default.
    """

    def __init__(
        self, *, state: str | PathLike[str] | None = None, inventory: str | PathLike[str] | None = None
    ) -> None:
        self._state = expanded(state).absolute() if state is not None else None
        self._inventory = expanded(inventory).absolute() if inventory is not None else None
        self._local = threading.local()
        self._watcher = Watcher(lambda: Client(self._state, self._inventory))

    def __reduce__(self) -> tuple[Any, ...]:
        return _cluster, (self._state, self._inventory)

    def _client(self) -> Client:
        """Return this thread's client, renewed every few seconds: inventory and store may change."""
        created_at = getattr(self._local, "made", 0.0)
        if created_at and self._local.process != os.getpid():
            _inherited.append(self._local.client)
            created_at = 0.0
        if not 0 <= time.monotonic() - created_at < CLIENT_LIFETIME_S:
            if created_at:
                self._local.client.reopen()
            self._local.client, self._local.made = Client(self._state, self._inventory), time.monotonic()
            self._local.process = os.getpid()
        return self._local.client  # type: ignore[no-any-return]

    # -- queueing

    @overload
    def submit(self, function: Callable[..., T], /, *args: Any, **options: Unpack[Options]) -> Job[T]: ...

    @overload
    def submit(self, command: Command, /, **options: Unpack[Options]) -> Job[int]: ...

    def submit(self, what: Any, /, *args: Any, **asked: Unpack[Options]) -> Job[Any]:
        """Queue a function, called with ``args`` (more by `functools.partial`), or a command.

        A command is a list of words, or a line split like a shell's; no shell runs it.

        Raises:
            UsageError: The request is invalid; nothing was queued.
            GpuschedError: The job cannot be queued.
            TypeError: There is no such option.
        """
        if callable(what):
            return self._queue_functions([what], [(args, {})], options.checked(asked))[0]
        if args:
            raise TypeError("a command takes no further arguments")
        return self.submit_command(what, **asked)

    def submit_command(
        self, command: Command, /, *, note: Callable[[str], object] = str, **asked: Unpack[Options]
    ) -> Job[int]:
        """Queue a command; ``note`` is called with its id first."""
        given = options.checked(asked)
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if not all(isinstance(word, str) for word in words):
            raise TypeError(f"a command is a list of strings, found {words!r}"[:200])
        if wrong := given.keys() & options.FUNCTION_ONLY.keys():
            raise UsageError(f"{min(wrong)} is for functions, not commands")
        return self._watch([Job[int](self, self._queue(*options.request(given, words), note=note))])[0]

    def map_array(
        self, function: Callable[..., T], *iterables: Iterable[Any], **asked: Unpack[Options]
    ) -> list[Job[T]]:
        """Queue one array of jobs: one call of the function for each tuple of the iterables' items.

        Raises:
            UsageError, GpuschedError, TypeError: As `submit`.
        """
        calls: list[Call] = [(args, {}) for args in zip(*iterables, strict=False)]
        return self._queue_functions([function], calls, options.checked(asked), array=True)

    def _queue_functions(
        self, called: Sequence[Callable[..., Any]], calls: Sequence[Call], given: Mapping[str, Any], *,
        array: bool = False, is_batch: bool = False, jobs: Sequence[Job[Any]] = (),
    ) -> list[Job[Any]]:  # fmt: skip
        """Queue one job, or an array with a task for each call.

        Args:
            called: One function for all, or one for each call.
            calls: The arguments; with ``is_batch`` the one argument of each call is a list of argument tuples.
            given: `Options`, checked.
            array: Whether to queue an array.
            is_batch: Each task calls the function for each of its arguments, and returns a list.
            jobs: Futures made before; they are given ids.
        """
        for name in given.keys() & options.COMMAND_ONLY:
            raise UsageError(f"{name} is for commands, not functions", options.COMMAND_ONLY[name])
        if not calls:
            return []
        if array:
            given = dict(given, array=f"0-{len(calls) - 1}")
        request, environ = options.request(given, functions.command(given.get("python", "python3")))
        settings = self._own_client().inventory.settings
        given = dict(given, ntasks_per_node=request.ntasks_per_node, gpus_per_task=request.gpus_per_task)  # as numbers
        program = functions.program(called, calls, settings, given, array=array, is_batch=is_batch)
        if request.name is None:
            request = msgspec.structs.replace(request, name=program.function.rpartition(".")[2].strip("<>"))
        job_id = self._queue(request, environ, program)
        ids = [f"{job_id}_{index}" for index in range(len(calls))] if array else [job_id]
        for job, its_id in zip(jobs, ids, strict=False):
            job._id = its_id
        return self._watch(jobs or [Job[Any](self, its_id) for its_id in ids])

    def _queue(
        self, request: Any, environ: dict[str, str], program: FunctionProgram | None = None,
        note: Callable[[str], object] = str,
    ) -> str:  # fmt: skip
        client = self._own_client()
        job_id = submit(client, prepare(client, request, program, environ), note)
        if warning := client.controller_warning():
            warnings.warn(warning, NoController, stacklevel=4)
        return job_id

    def _watch(self, jobs: Sequence[Job[Any]]) -> list[Job[Any]]:
        self._watcher.watch(jobs)
        return list(jobs)

    # -- finding

    def job(self, job: str) -> Job[Any]:
        """Return a job by its id or a unique prefix of it.

        Raises:
            UsageError: There is none.
        """
        return self._watch([Job[Any](self, Resolver(self._client()).target(job).id)])[0]

    def jobs(
        self, *, user: str | None = None, partition: str | None = None, state: str | Iterable[str] = (),
        ended: int | None = 0,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return jobs as ``gpusched status --json``: pending and running ones, and the last ``ended`` (-1: all)."""
        from gpusched.views.jobs import job_dict

        states = parse_states([state] if isinstance(state, str) and state else state)
        found = queried(self._client(), Query(user=user, partition=partition, states=states, ended=ended))
        now = time.time()
        return _plain([job_dict(job, now) for job in found])

    def show(self, job: str | Job[Any]) -> dict[str, Any]:
        """Return the details of a job, as ``gpusched show --json``."""
        from gpusched.client.show import show
        from gpusched.views.show import page_dict

        return _plain(page_dict(show(self._client(), _id(job))))

    def why(self, job: str | Job[Any]) -> dict[str, Any]:
        """Return why a job waits and when it is expected to start, as ``gpusched why --json``."""
        from gpusched.client.why import why
        from gpusched.views.why import why_dict

        return _plain(why_dict(why(self._client(), _id(job))))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, as ``gpusched nodes --json``."""
        from gpusched.client.overview import cluster_rows
        from gpusched.views.nodes import nodes_json

        client = self._client()
        return _plain(nodes_json(cluster_rows(client.reader, client.inventory, time.time())))

    def output(self, job: str | Job[Any], rank: int | None = None) -> str:
        """Return a job's output so far, as ``gpusched logs``."""
        return self._output(_id(job), rank)

    def _output(self, job_id: str, rank: int | None = None, tail: int | None = None) -> str:
        from gpusched.client.logs import LogRequest, PrefixedLines, ranks_of, show_log

        client, request = self._client(), LogRequest(job=job_id, rank=rank, tail=tail)
        found = bytearray()
        if ranks_of(client, request) == 1:
            show_log(client, request, lambda _, chunk: found.extend(chunk), lambda line: None)
        else:
            lines = PrefixedLines(found.extend)
            show_log(client, request, lines, lambda line: None)
            lines.finish()
        return found.decode(errors="replace")

    def _own_client(self) -> Client:
        """Return this thread's client, if gpusched manages the jobs.

        Raises:
            UsageError: Slurm manages them.
        """
        client = self._client()
        if client.inventory.engine == "slurm":
            raise UsageError(
                "jobs here are managed by Slurm", "use sbatch, scancel and scontrol; submitit for functions"
            )
        return client

    def _records(self, job_id: str) -> list[JobRecord]:
        return list(Resolver(self._client()).target(job_id).jobs)

    # -- asking for changes

    def cancel(self, jobs: Iterable[str | Job[Any]], *, now: bool = False) -> ControlResult:
        """Cancel pending or running jobs; ``now``: without the grace period."""
        return control.cancel(self._own_client(), map(_id, jobs), now=now)

    def _cancel_pending(self, jobs: Iterable[Job[Any]]) -> None:
        """Cancel those of the jobs that are pending; inbox and store are read once for all of them."""
        resolver, pending = Resolver(self._client()), list[Job[Any]]()
        for job in jobs:
            with contextlib.suppress(Refused):
                if all(record.state is JobState.PENDING for record in resolver.target(job.id).jobs):
                    pending.append(job)
        control.cancel(self._own_client(), map(_id, pending), now=False, named=False)
        for job in pending:
            job._drop()

    def hold(self, jobs: Iterable[str | Job[Any]]) -> ControlResult:
        """Prevent pending jobs from starting."""
        return control.hold(self._own_client(), map(_id, jobs))

    def release(self, jobs: Iterable[str | Job[Any]]) -> ControlResult:
        """Release held jobs."""
        return control.release(self._own_client(), map(_id, jobs))

    def requeue(self, jobs: Iterable[str | Job[Any]]) -> ControlResult:
        """Queue running or ended jobs again."""
        return control.requeue(self._own_client(), map(_id, jobs))

    def set_priority(self, jobs: Iterable[str | Job[Any]], priority: int) -> ControlResult:
        """Set the priority of pending jobs."""
        return control.set_priority(self._own_client(), map(_id, jobs), operator.index(priority))


def _id(job: str | Job[Any]) -> str:
    return job if isinstance(job, str) else job.id


def _plain(value: T) -> T:
    """Return the value as it is after a round trip through JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))  # type: ignore[no-any-return]


def _cluster(state: Path | None, inventory: Path | None) -> Cluster:
    return Cluster(state=state, inventory=inventory)
