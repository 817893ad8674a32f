"""Interactive jobs: queue the job, wait for it, and connect its terminal (or stdin, stdout and stderr) to ours.

Both ways use the requests of `gpusched.model.relay`: the controller's relay answers them, or a thread of this process
for users who have an account on the nodes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.client.forwarding import Forwards
from gpusched.client.options import WarningSignal
from gpusched.client.request import SubmitRequest
from gpusched.client.resolve import Resolver, refusal
from gpusched.client.submit import prepare, submit
from gpusched.client.wait import EXIT_CODES, REOPEN_S, exit_code
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.commands import Cancel, Submit
from gpusched.model.jobs import ENDED, JobRecord, JobState
from gpusched.model.relay import BEGAN, NOT_STARTED, REQUEST, Attach, Forward, Frames, Terminal, frame, size_frame
from gpusched.nodes.transport import TransportError
from gpusched.views.jobs import idle_line, idle_of

if TYPE_CHECKING:
    from gpusched.controller.relay import RelayContext

POLL_S = 0.2
IDLE_POLL_S = 5.0
LOST = 255
"""Exit code if the connection was lost while the job keeps running, as for ssh."""
_RETRY_S = 1.0
_END_GRACE_S = 3.0  # a connection that ends may have ended with its job
_REDRAW_S = 0.3
_RELAY_S = 20.0  # the controller is expected to be restarted within this time
_STARTED = frozenset({JobState.STARTING, JobState.RUNNING})
_PROGRAM_ENDS = frozenset({JobState.COMPLETED, JobState.FAILED})


class Screen(Protocol):
    """Where messages for people are shown."""

    def waiting(self, line: str) -> None:
        """Show a line in place of the previous one; "" removes it."""

    def note(self, line: str) -> None:
        """Show a line that stays."""


class ShellSignal(Exception):
    """A signal asks the client to exit."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def prepare_session(client: Client, request: SubmitRequest, pty: bool) -> Submit:
    """Call `prepare` for an interactive job.

    Raises:
        UsageError: The first error, in one line; nothing was queued.
    """
    if pty and not sys.stdin.isatty():
        raise UsageError("--pty needs a terminal as stdin", "omit it, or run it in a terminal")
    changes: dict[str, object] = {"preemptible": False, "resizable": False}
    if pty:  # an interactive shell ignores TERM
        changes["signal"] = request.signal or WarningSignal("HUP")
        changes["env"] = (f"TERM={relay.terminal().name}", *request.env)
    prepared = prepare(client, msgspec.structs.replace(request, **changes))
    spec = msgspec.structs.replace(prepared.spec, session=client.inventory.settings.session_keep_s, pty=pty)
    return msgspec.structs.replace(prepared, spec=spec)


def run(client: Client, prepared: Submit, forwards: Forwards, screen: Screen) -> int:
    """Queue a job of `prepare_session`, wait until it runs and connect to it; return its exit code.

    An interrupt while it waits cancels it.

    Raises:
        GpuschedError: The controller refused it, or it cannot be reached.
    """
    return _Session(client, "", forwards, screen, cancels=True).until_end(lambda: submit(client, prepared))


def attach(client: Client, text: str, forwards: Forwards, screen: Screen) -> int:
    """Connect to a job of ``gpusched run`` (again), as soon as it runs; return its exit code.

    Raises:
        UsageError: No such job, or it is not interactive.
        GpuschedError: It has ended, or cannot be reached.
    """
    target = Resolver(client).target(text)
    job = target.jobs[0]
    if job.spec.session is None:
        raise UsageError(f"cannot attach to job {target.id}: it was not started with 'gpusched run'",
                         f"gpusched logs -f {target.id}, or gpusched exec -it {target.id} -- sh")  # fmt: skip
    if job.spec.pty and not sys.stdin.isatty():
        raise UsageError(f"job {job.id} has a terminal; attach needs a terminal as stdin")
    if job.state in ENDED:
        raise GpuschedError(f"job {job.id} has ended {_end_text(job)}")
    return _Session(client, job.id, forwards, screen, cancels=False).until_end()


class _Session:
    """One client's session with one job, until either ends."""

    def __init__(self, client: Client, job_id: str, forwards: Forwards, screen: Screen, cancels: bool) -> None:
        self._client, self._id, self._forwards, self._screen = client, job_id, forwards, screen
        self._cancel_on_exit, self._has_output, self._reopened_at, self._unreachable_since = cancels, False, 0.0, 0.0
        self._shown_idle_warning: float | None = None
        self._signals: list[int] = []  # that came while the job was being queued

    def until_end(self, queue: Callable[[], str] | None = None) -> int:
        """Stay with the job, which ``queue`` submits first; return its exit code."""
        try:
            with _handling(dict.fromkeys((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), self._on_signal)):
                if queue is not None:
                    self._id = queue()
                    for number in self._signals:
                        self._on_signal(number, None)
                return self._wait_for_end()
        except (KeyboardInterrupt, ShellSignal) as ended:
            self._leave()
            return 128 + (ended.number if isinstance(ended, ShellSignal) else signal.SIGINT)
        except BrokenPipeError:  # the reader of the output has gone (| head), and will not attach again
            if self._cancel_on_exit:
                self._cancel()
            raise
        finally:
            self._forwards.close()

    def _on_signal(self, number: int, frame: object) -> None:
        """Exit on Ctrl-C, a closed terminal or ``kill``, but only once the job has an id, which is then reported."""
        if not self._id:
            self._signals.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise ShellSignal(number)

    def _wait_for_end(self) -> int:
        while True:
            job = self._read_job()
            if job is None:
                self._wait("submitted")
            elif job.state in ENDED:
                return self._ended(job)
            elif job.state in _STARTED:
                if (code := self._connect_and_work(job)) is not None:
                    return code
            else:
                self._wait(f"{job.state}{_reason_text(job)}")
            time.sleep(POLL_S)

    def _read_job(self) -> JobRecord | None:
        """Return the job as the store has it now; None if the controller has not queued it yet.

        Raises:
            GpuschedError: The controller refused it.
        """
        if time.monotonic() - self._reopened_at > REOPEN_S:
            self._client.reopen()
            self._reopened_at = time.monotonic()
        reader = self._client.reader
        job = reader.job(self._id) if reader is not None else None
        if job is None and reader is not None and (why := refusal(reader, self._id)) is not None:
            raise GpuschedError(f"job {self._id} was refused: {why}")
        return job

    def _wait(self, what: str) -> None:
        trouble = self._client.controller_warning()
        self._screen.waiting(f"job {self._id} {what}{f'; {trouble}' if trouble else ''}")

    # -- being attached --------------------------------------------------------------------------------------------

    def _connect_and_work(self, job: JobRecord) -> int | None:
        """Connect to the job; return the exit code, or None to look at its state again."""
        try:
            with self._connect(self._request(job)) as sock:
                frames = Frames()
                if not self._wait_for_output(sock, frames, job):
                    return None
                self._screen.waiting("")
                self._has_output, self._unreachable_since = True, 0.0
                code = self._copy_streams(sock, frames, job)
        except relay.NotListening as error:
            self._unreachable_since = self._unreachable_since or time.monotonic()
            if time.monotonic() - self._unreachable_since > _RELAY_S:
                raise
            self._wait(f"{job.state}: {error.line()}")
            return None
        except TransportError as error:
            if self._has_output:
                return self._lost(job, error)
            self._wait(f"{job.state}: {error.line()}")
            time.sleep(_RETRY_S)
            return None
        except GpuschedError:
            if self._has_output or not self._has_changed(job):
                raise
            return None
        if code == NOT_STARTED:  # the store will show how it ends
            self._has_output = False
            time.sleep(_RETRY_S)
            return None
        return self._finished(code)

    @staticmethod
    def _request(job: JobRecord) -> Attach:
        terminal = relay.terminal() if job.spec.pty else None
        if terminal is not None and job.state is JobState.RUNNING and terminal.columns > 1:
            # Programs redraw their screen when its size changes; the true size follows a moment later.
            terminal = Terminal(name=terminal.name, rows=terminal.rows, columns=terminal.columns - 1)
        return Attach(job=job.id, attempt=job.attempt, terminal=terminal)

    def _wait_for_output(self, sock: socket.socket, frames: Frames, job: JobRecord) -> bool:
        """Wait until the connection carries the job's output; return False if the job has changed before."""
        node = job.allocation.parts[0].node if job.allocation is not None else "its node"
        preparing = (
            ": it is being prepared (the image may still be downloading)" if job.state is JobState.STARTING else ""
        )
        while True:
            if not select.select([sock], [], [], POLL_S)[0]:
                self._wait(f"{job.state} on {node}{preparing}")
                if self._has_changed(job, 0.0):
                    return False
                continue
            if any(kind == BEGAN for kind, _ in relay.decoded_frames(frames, relay.receive(sock))):
                return True

    def _copy_streams(self, sock: socket.socket, frames: Frames, job: JobRecord) -> int:
        for line in self._forwards.serve(
            lambda port: self._connect(Forward(job=job.id, attempt=job.attempt, port=port))
        ):
            self._screen.note(line)
        if not job.spec.pty:
            with self._cancel_on_interrupt():
                return relay.copy_streams(sock, True, None, frames, watch=(IDLE_POLL_S, self._show_idle_warning))
        with relay.raw_terminal(), relay.window_changes() as resized:
            return relay.copy_streams(
                sock, True, resized, frames, (_REDRAW_S, lambda: size_frame(*relay.window_size())),
                keep_input_open=True, watch=(IDLE_POLL_S, self._show_idle_warning),
            )  # fmt: skip

    def _show_idle_warning(self) -> None:
        """Show once what happens to the job as its GPUs are idle, beside its output."""
        with contextlib.suppress(GpuschedError):  # what is wrong with the store is said elsewhere
            job = self._read_job()
            idle = idle_of(job) if job is not None else None
            if job is None or idle is None or idle.warned_at in (None, self._shown_idle_warning):
                return
            self._shown_idle_warning = idle.warned_at
            line = f"job {job.id}: {idle_line(job, time.time())}"
            if job.spec.pty:  # the terminal is raw
                relay.show_line(line)
            else:
                self._screen.note(line)

    def _connect(self, request: Attach | Forward) -> socket.socket:
        if relay.is_needed(self._client):
            return relay.connect(self._client, request)
        from gpusched.controller.relay import serve

        client_end, server_end = socket.socketpair()
        client_end.sendall(frame(REQUEST, msgspec.json.encode(request)))

        def answer() -> None:
            with server_end:
                serve(server_end, os.getuid(), self._relay_context)

        threading.Thread(target=answer, daemon=True).start()
        return client_end

    @cached_property
    def _relay_context(self) -> RelayContext:
        from gpusched.controller.relay import RelayContext

        return RelayContext(self._client.state, Path(self._client.inventory.path))

    # -- how it went -----------------------------------------------------------------------------------------------

    def _has_changed(self, job: JobRecord, within_s: float = _END_GRACE_S) -> bool:
        """Return whether the attempt is over: the job is ending, for instance, or pending again."""
        deadline = time.monotonic() + within_s
        while True:
            current = self._read_job()
            if current is not None and (current.attempt != job.attempt or current.state not in _STARTED):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)

    def _finished(self, code: int) -> int:
        """Return the exit code to report after the program has exited with ``code``."""
        job = self._read_job()
        if job is not None and code == EXIT_CODES[JobState.OUT_OF_MEMORY]:
            self._has_changed(job)
            job = self._read_job()
        outcome = None if job is None else job.ending.outcome if job.ending is not None else job.state
        if job is None or outcome is None or outcome in _STARTED | _PROGRAM_ENDS:
            return code
        if job.state not in ENDED:
            job = msgspec.structs.replace(job, state=outcome)
        return self._ended(job)

    def _ended(self, job: JobRecord) -> int:
        self._screen.waiting("")
        if job.state is not JobState.COMPLETED:
            self._screen.note(f"job {job.id} ended {_end_text(job)}")
        return exit_code(job) if job.state in EXIT_CODES else 1

    def _lost(self, job: JobRecord, error: TransportError) -> int | None:
        if self._has_changed(job):
            self._has_output = False
            return None
        self._screen.note(f"{error.reason}; job {job.id} keeps running for {self._keep_text}: gpusched attach {job.id}")
        return LOST

    def _leave(self) -> None:
        if self._cancel_on_exit and not self._has_output:
            self._cancel()
            message = f"job {self._id} cancelled"
        else:
            kept_text = f", and is kept for {self._keep_text}" if self._has_output else ""
            message = f"job {self._id} goes on{kept_text}: gpusched attach {self._id}"
        with contextlib.suppress(OSError):  # usually the terminal is gone
            self._screen.note(message)

    @property
    def _keep_text(self) -> str:
        job = self._read_job()
        seconds = (job.spec.session if job is not None else None) or self._client.inventory.settings.session_keep_s
        return f"{seconds} s" if seconds % 60 else f"{seconds // 60} min"

    def _cancel(self) -> None:
        self._client.deliverable_inbox().deliver(Cancel(time=time.time(), job_ids=(self._id,)))

    @contextlib.contextmanager
    def _cancel_on_interrupt(self) -> Iterator[None]:
        """Cancel the job on the first Ctrl-C, and still show its end; stop waiting on the second."""
        cancelled = False

        def interrupt(*_: object) -> None:
            nonlocal cancelled
            if cancelled:
                raise KeyboardInterrupt
            cancelled = True
            self._cancel()
            self._screen.note(f"job {self._id} is being cancelled; press Ctrl-C again to stop waiting")

        with _handling({signal.SIGINT: interrupt}):
            yield


def _reason_text(job: JobRecord) -> str:
    return f" ({job.reason}{': ' + job.message if job.message else ''})" if job.reason else ""


def _end_text(job: JobRecord) -> str:
    return f"{job.state}{_reason_text(job)}"


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Install signal handlers, except for signals that are ignored."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in handlers:
            signal.signal(number, before[number])
