"""Working in a job: it is queued, waited for, and then its terminal (or stdin, stdout and stderr) is ours.

One way for all: the requests of `gpusched.model.relay`, answered by the controller's relay, or here, in a thread, for
users who have an account on the nodes themselves.
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
from gpusched.client.resolve import Resolver, refusal
from gpusched.client.submit import SubmitRequest, prepare, submit
from gpusched.client.wait import EXIT_CODES, REOPEN_S, exit_code
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.commands import Cancel, Submit
from gpusched.model.jobs import ENDED, JobRecord, JobState
from gpusched.model.relay import BEGAN, NOT_STARTED, REQUEST, Attach, Forward, Frames, Terminal, frame, size_frame
from gpusched.nodes.transport import TransportError

if TYPE_CHECKING:
    from gpusched.controller.relay import RelayContext

POLL_S = 0.2
LOST = 255
"""Exit code where the connection was lost and the job goes on, as ssh has it."""
_RETRY_S = 1.0
_LAST_LOOK_S = 3.0  # a connection that ends may have ended with its job
_REDRAW_S = 0.3
_RELAY_S = 20.0  # in which a relay that was lost is there again
_TAKEN_UP = frozenset({JobState.STARTING, JobState.RUNNING})
_OWN_ENDS = frozenset({JobState.COMPLETED, JobState.FAILED})


class Screen(Protocol):
    """Where people read what happens."""

    def waiting(self, line: str) -> None:
        """A line that takes the place of the one before; "" takes it away."""

    def note(self, line: str) -> None:
        """A line that stays."""


class ShellSignal(Exception):
    """A signal asks us to go."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def prepare_session(client: Client, request: SubmitRequest, pty: bool) -> Submit:
    """`prepare` for a job that people work in.

    Raises:
        UsageError: The first thing wrong, in one line; nothing was queued.
    """
    if pty and not sys.stdin.isatty():
        raise UsageError("--pty needs a terminal as stdin", "omit it, or run it in a terminal")
    changes: dict[str, object] = {"preemptible": False, "resizable": False}
    if pty:  # an interactive shell does not hear TERM
        changes["signal"] = request.signal or "HUP"
        changes["env"] = (f"TERM={relay.terminal().name}", *request.env)
    prepared = prepare(client, msgspec.structs.replace(request, **changes))
    spec = msgspec.structs.replace(prepared.spec, session=client.inventory.settings.session_keep_s, pty=pty)
    return msgspec.structs.replace(prepared, spec=spec)


def run(client: Client, prepared: Submit, forwards: Forwards, screen: Screen) -> int:
    """Queue a job of `prepare_session`, wait for its place, work in it; returns its exit code.

    Whoever is interrupted while it waits takes it away again.

    Raises:
        GpuschedError: The controller refused it, or it cannot be reached.
    """
    return _Attending(client, "", forwards, screen, cancels=True).until_end(lambda: submit(client, prepared))


def attach(client: Client, text: str, forwards: Forwards, screen: Screen) -> int:
    """Work in a job of ``gpusched run`` (again), from its start on; returns its exit code.

    Raises:
        UsageError: No such job, or one of another kind.
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
        raise GpuschedError(f"job {job.id} has ended {_ended_as(job)}")
    return _Attending(client, job.id, forwards, screen, cancels=False).until_end()


class _Attending:
    """One client and one job, until either is done."""

    def __init__(self, client: Client, job_id: str, forwards: Forwards, screen: Screen, cancels: bool) -> None:
        self._client, self._id, self._forwards, self._screen = client, job_id, forwards, screen
        self._cancels, self._began, self._opened, self._missed = cancels, False, 0.0, 0.0
        self._signals: list[int] = []  # that came while the job was being queued

    def until_end(self, queue: Callable[[], str] | None = None) -> int:
        """Attend the job, which ``queue`` submits first; returns its exit code."""
        try:
            with _handling(dict.fromkeys((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), self._told)):
                if queue is not None:
                    self._id = queue()
                    for number in self._signals:
                        self._told(number, None)
                return self._until_end()
        except (KeyboardInterrupt, ShellSignal) as told:
            self._leave()
            return 128 + (told.number if isinstance(told, ShellSignal) else signal.SIGINT)
        except BrokenPipeError:  # whoever read what it says has gone (| head), and nobody will attach to it again
            if self._cancels:
                self._cancel()
            raise
        finally:
            self._forwards.close()

    def _told(self, number: int, frame: object) -> None:
        """Leave, for Ctrl-C, a closed terminal or ``kill``; only once it is known which job that leaves behind."""
        if not self._id:
            self._signals.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise ShellSignal(number)

    def _until_end(self) -> int:
        while True:
            job = self._look()
            if job is None:
                self._wait("submitted")
            elif job.state in ENDED:
                return self._ended(job)
            elif job.state in _TAKEN_UP:
                if (code := self._attend(job)) is not None:
                    return code
            else:
                self._wait(f"{job.state}{_because(job)}")
            time.sleep(POLL_S)

    def _look(self) -> JobRecord | None:
        """The job as the store has it now; None: the controller has not taken it up.

        Raises:
            GpuschedError: It refused it.
        """
        if time.monotonic() - self._opened > REOPEN_S:
            self._client.reopen()
            self._opened = time.monotonic()
        reader = self._client.reader
        job = reader.job(self._id) if reader is not None else None
        if job is None and reader is not None and (why := refusal(reader, self._id)) is not None:
            raise GpuschedError(f"job {self._id} was refused: {why}")
        return job

    def _wait(self, what: str) -> None:
        trouble = self._client.controller_warning()
        self._screen.waiting(f"job {self._id} {what}{f'; {trouble}' if trouble else ''}")

    # -- being attached --------------------------------------------------------------------------------------------

    def _attend(self, job: JobRecord) -> int | None:
        """Work in it; returns the exit code, None where it is to be looked at again."""
        try:
            with self._connect(self._request(job)) as sock:
                frames = Frames()
                if not self._has_begun(sock, frames, job):
                    return None
                self._screen.waiting("")
                self._began, self._missed = True, 0.0
                code = self._work(sock, frames, job)
        except relay.NotListening as error:
            self._missed = self._missed or time.monotonic()
            if time.monotonic() - self._missed > _RELAY_S:
                raise
            self._wait(f"{job.state}: {error.line()}")
            return None
        except TransportError as error:
            if self._began:
                return self._lost(job, error)
            self._wait(f"{job.state}: {error.line()}")
            time.sleep(_RETRY_S)
            return None
        except GpuschedError:
            if self._began or not self._has_changed(job):
                raise
            return None
        if code == NOT_STARTED:  # what becomes of it the store will say
            self._began = False
            time.sleep(_RETRY_S)
            return None
        return self._finished(code)

    @staticmethod
    def _request(job: JobRecord) -> Attach:
        terminal = relay.terminal() if job.spec.pty else None
        if terminal is not None and job.state is JobState.RUNNING and terminal.columns > 1:
            # Programs draw their screen anew when its size changes, and the right one comes a moment later.
            terminal = Terminal(name=terminal.name, rows=terminal.rows, columns=terminal.columns - 1)
        return Attach(job=job.id, attempt=job.attempt, terminal=terminal)

    def _has_begun(self, sock: socket.socket, frames: Frames, job: JobRecord) -> bool:
        """Wait until what is said is the job's; False where it has changed before."""
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
            if any(kind == BEGAN for kind, _ in relay.checked(frames, relay.receive(sock))):
                return True

    def _work(self, sock: socket.socket, frames: Frames, job: JobRecord) -> int:
        for line in self._forwards.serve(
            lambda port: self._connect(Forward(job=job.id, attempt=job.attempt, port=port))
        ):
            self._screen.note(line)
        if not job.spec.pty:
            with self._interrupts_cancel():
                return relay.talk(sock, True, None, frames)
        with relay.raw_terminal(), relay.resizes() as resized:
            return relay.talk(
                sock, True, resized, frames, (_REDRAW_S, lambda: size_frame(*relay.window_size())), keeps=True
            )

    def _connect(self, request: Attach | Forward) -> socket.socket:
        if relay.is_needed(self._client):
            return relay.connect(self._client, request)
        from gpusched.controller.relay import serve

        ours, theirs = socket.socketpair()
        ours.sendall(frame(REQUEST, msgspec.json.encode(request)))

        def answer() -> None:
            with theirs:
                serve(theirs, os.getuid(), self._site, lambda text: None)

        threading.Thread(target=answer, daemon=True).start()
        return ours

    @cached_property
    def _site(self) -> RelayContext:
        from gpusched.controller.relay import RelayContext

        return RelayContext(self._client.state, Path(self._client.inventory.path))

    # -- how it went -----------------------------------------------------------------------------------------------

    def _has_changed(self, job: JobRecord, within_s: float = _LAST_LOOK_S) -> bool:
        """Whether it is not what it was any more: it is being ended, say, or waits again."""
        until = time.monotonic() + within_s
        while True:
            now = self._look()
            if now is not None and (now.attempt != job.attempt or now.state not in _TAKEN_UP):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)

    def _finished(self, code: int) -> int:
        """After its program has ended with ``code``."""
        job = self._look()
        if job is not None and code == EXIT_CODES[JobState.OUT_OF_MEMORY]:
            self._has_changed(job)
            job = self._look()
        outcome = None if job is None else job.ending.outcome if job.ending is not None else job.state
        if job is None or outcome is None or outcome in _TAKEN_UP | _OWN_ENDS:
            return code
        if job.state not in ENDED:
            job = msgspec.structs.replace(job, state=outcome)
        return self._ended(job)

    def _ended(self, job: JobRecord) -> int:
        self._screen.waiting("")
        if job.state is not JobState.COMPLETED:
            self._screen.note(f"job {job.id} ended {_ended_as(job)}")
        return exit_code(job) if job.state in EXIT_CODES else 1

    def _lost(self, job: JobRecord, error: TransportError) -> int | None:
        if self._has_changed(job):
            self._began = False
            return None
        self._screen.note(f"{error.reason}; job {job.id} keeps running for {self._kept}: gpusched attach {job.id}")
        return LOST

    def _leave(self) -> None:
        if self._cancels and not self._began:
            self._cancel()
            said = f"job {self._id} cancelled"
        else:
            kept = f", and is kept for {self._kept}" if self._began else ""
            said = f"job {self._id} goes on{kept}: gpusched attach {self._id}"
        with contextlib.suppress(OSError):  # the terminal is gone, mostly
            self._screen.note(said)

    @property
    def _kept(self) -> str:
        job = self._look()
        seconds = (job.spec.session if job is not None else None) or self._client.inventory.settings.session_keep_s
        return f"{seconds} s" if seconds % 60 else f"{seconds // 60} min"

    def _cancel(self) -> None:
        self._client.deliverable_inbox().deliver(Cancel(time=time.time(), job_ids=(self._id,)))

    @contextlib.contextmanager
    def _interrupts_cancel(self) -> Iterator[None]:
        """The first Ctrl-C cancels the job, whose end is still shown; the second leaves."""
        asked = False

        def interrupt(*_: object) -> None:
            nonlocal asked
            if asked:
                raise KeyboardInterrupt
            asked = True
            self._cancel()
            self._screen.note(f"job {self._id} is being cancelled; press Ctrl-C again to stop waiting")

        with _handling({signal.SIGINT: interrupt}):
            yield


def _because(job: JobRecord) -> str:
    return f" ({job.reason}{': ' + job.message if job.message else ''})" if job.reason else ""


def _ended_as(job: JobRecord) -> str:
    return f"{job.state}{_because(job)}"


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Handlers of signals that are not ignored."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in handlers:
            signal.signal(number, before[number])
