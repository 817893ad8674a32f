"""Run ``gpusched`` in a process of its own for each command, without importing all of it each time.

Most of what a short command costs is imports, and tests run thousands of commands. A server, one for each test
process, has imported what they need, and forks for each: the child has the command's own words, environment, folder,
standard files, signals and exit code, or another user, and runs ``gpusched.__main__.main``. What happens before that
(Python's own switches) takes a Python of its own; tests of imports start that themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TextIO

ROOT = str(Path(__file__).parents[1])
_AT_START = ("GPUSCHED_COMPILED", "PYTHON", "LC_", "LANG", "LD_", "OPENBLAS", "OMP_")
"""Beginnings of variables that Python, or a library that the server has imported, looks at when it starts."""
_NEEDED = (
    "gpusched.cli.main", "gpusched.cli.complete", "gpusched.cli.jobs", "gpusched.cli.nodes", "gpusched.cli.submit",
    "gpusched.cli.control", "gpusched.cli.logs", "gpusched.cli.show", "gpusched.cli.wait", "gpusched.cli.why",
    "gpusched.client.show", "gpusched.client.overview", "gpusched.client.control", "gpusched.client.logs",
    "gpusched.client.why", "gpusched.client.alternatives", "gpusched.client.script.layers", "gpusched.client.submit",
    "gpusched.client.relay", "gpusched.queue.presence", "gpusched.views.show", "gpusched.views.nodes", "rich.console",
    "gpusched.controller.service", "gpusched.nodes.ssh_connect", "numpy", "paramiko",
    # Another user may not read where these lie.
    "encodings.utf_8_sig", "encodings.idna", "secrets",
)  # fmt: skip
_PR_SET_DUMPABLE = 4  # whether /proc/self is its own


def run(
    *words: str, env: Mapping[str, str] | None = None, cwd: str | Path = "/", input: str = "", timeout: float = 300,
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``gpusched WORDS``; as `subprocess.run` does with ``text`` and ``capture_output``.

    ``prefix``: words before it, as ``setpriv --reuid 1234``.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    env, own = dict(os.environ if env is None else env), os.environ | {"PYTHONPATH": ROOT}
    differs = any(env.get(name, ROOT) != own.get(name) for name in {*env, *own} if name.startswith(_AT_START))
    user = _user_of(prefix)
    if differs or (prefix and user is None):
        return subprocess.run(
            [*prefix, sys.executable, "-m", "gpusched", *words], env=env, cwd=cwd, input=input, text=True,
            capture_output=True, timeout=timeout, check=False,
        )  # fmt: skip
    process = popen(words, env, cwd, user)
    try:
        out, err = process.communicate(input, timeout)
    finally:
        process.close()
    return subprocess.CompletedProcess(["gpusched", *words], process.wait(), out, err)


def _user_of(prefix: Sequence[str]) -> tuple[int, int] | None:
    """User and group that these words make a command's, if that is all that they do."""
    match prefix:
        case ["setpriv", "--reuid", user, "--regid", group, "--clear-groups"]:
            return int(user), int(group)
    return None


def popen(
    words: Sequence[str], env: Mapping[str, str], cwd: str | Path = "/", user: tuple[int, int] | None = None
) -> Piped:
    """Start ``gpusched WORDS`` with its standard files in pipes."""
    (given, to), (said, said_end), (wrong, wrong_end) = os.pipe(), os.pipe(), os.pipe()
    try:
        return Piped(_start(words, env, cwd, (given, said_end, wrong_end), user=user), to, said, wrong)
    finally:
        for descriptor in (given, said_end, wrong_end):
            os.close(descriptor)


def start(
    words: Sequence[str], env: Mapping[str, str], cwd: str | Path, files: tuple[int, int, int], session: bool = False
) -> Process:
    """Start ``gpusched WORDS`` with these standard files; ``session``: in a session of its own."""
    return Process(_start(words, env, cwd, files, session))


def _start(
    words: Sequence[str], env: Mapping[str, str], cwd: str | Path, files: tuple[int, int, int], session: bool = False,
    user: tuple[int, int] | None = None,
) -> int:  # fmt: skip
    request = {"words": list(words), "env": dict(env), "cwd": str(cwd), "session": session, "user": user}
    ended, ended_end = os.pipe()
    try:
        _send(_server(os.getpid(), env.get("NUMBA_DISABLE_JIT", ""))[0], request, (*files, ended_end))
    finally:
        os.close(ended_end)
    return ended


class Process:
    """A command that was started: of `subprocess.Popen` what is used.

    Attributes:
        pid: Its process.
        returncode: Once it is known that it has ended; negative: the signal that it died by.
    """

    def __init__(self, ended: int) -> None:
        self._ended, self._said = ended, b""
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        if self.returncode is None:
            if not self._said and not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("gpusched", timeout or 0)
            self.returncode = self._number()
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """``kill -9``."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        """Return the server's next number: its process id, then its exit code."""
        self._said += b"" if b";" in self._said else os.read(self._ended, 64)
        number, _, self._said = self._said.partition(b";")
        return int(number)


class Piped(Process):
    """A command with its standard files in pipes."""

    def __init__(self, ended: int, given: int, out: int, err: int) -> None:
        super().__init__(ended)
        self._given, self._out, self._err = self._files = [given, out, err]
        self._texts: list[TextIO] = []

    @cached_property
    def stdout(self) -> TextIO:
        """Return its stdout as a stream."""
        return self._text(self._out)

    @cached_property
    def stderr(self) -> TextIO:
        """Return its stderr as a stream."""
        return self._text(self._err)

    def _text(self, descriptor: int) -> TextIO:
        self._files.remove(descriptor)
        self._texts.append(open(descriptor))
        return self._texts[-1]

    def communicate(self, input: str = "", timeout: float = 300) -> tuple[str, str]:
        """Give it its input, and return what it said when it has ended.

        Raises:
            subprocess.TimeoutExpired: It ran on, and was killed.
        """
        until = time.monotonic() + timeout
        try:
            self._files.clear()  # they are closed there
            out, err = _talk(input.encode(), self._given, (self._out, self._err), until)
            self.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.close()
            raise
        return out.decode(), err.decode()

    def close(self) -> None:
        """Kill it, where it still runs, and forget its files."""
        self.kill()
        self.wait()
        for text in self._texts:
            text.close()
        while self._files:
            os.close(self._files.pop())


def _talk(given: bytes, to: int, sources: tuple[int, int], until: float) -> tuple[bytes, bytes]:
    """Write what is given, and read both to their ends.

    Raises:
        subprocess.TimeoutExpired: They had not come by then.
    """
    found = {source: bytearray() for source in sources}
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        os.set_blocking(to, False)
        selector.register(to, selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(until - time.monotonic()):
                if key.fd == to:
                    try:
                        given = given[os.write(to, given[:65536]) :] if given else b""
                    except BrokenPipeError:
                        given = b""
                    data = given
                else:
                    data = os.read(key.fd, 65536)
                    found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
        left = [key.fd for key in selector.get_map().values()]
        for descriptor in left:
            os.close(descriptor)
    out, err = (bytes(found[source]) for source in sources)
    if left:
        raise subprocess.TimeoutExpired("gpusched", 0, out, err)
    return out, err


# -- the server


@cache
def _server(owner: int, disable_jit: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server of this process; it ends with it."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())], pass_fds=[its.fileno()], cwd="/",
            env=os.environ | {"PYTHONPATH": ROOT, "NUMBA_DISABLE_JIT": disable_jit},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return own, process


def _send(to: socket.socket, request: object, descriptors: Sequence[int]) -> None:
    with open(os.memfd_create("request"), "wb+", buffering=0) as file:
        file.write(json.dumps(request).encode())
        file.seek(0)
        socket.send_fds(to, [b"."], [file.fileno(), *descriptors])


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request, and say the child's process and exit code; a child has its request, the end None."""
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != channel.fileno():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, ended = running.pop(key.fd)
                    with contextlib.suppress(BrokenPipeError):
                        os.write(ended, b"%d;" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    os.close(ended)
                    continue
                data, descriptors, _, _ = socket.recv_fds(channel, 1, 8)
                if not data:
                    return None
                with open(descriptors[0], "rb") as file:
                    request = json.load(file)
                ended = descriptors.pop()
                if not (pid := os.fork()):
                    for descriptor in [ended, *running, *(ended for _, ended in running.values())]:
                        os.close(descriptor)
                    channel.close()
                    return request, descriptors[1:]
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
                os.write(ended, b"%d;" % pid)
                running[process := os.pidfd_open(pid)] = pid, ended
                selector.register(process, selectors.EVENT_READ)


def _become(
    words: Sequence[str], env: Mapping[str, str], cwd: str, session: bool, user: Sequence[int] | None,
    files: Sequence[int],
) -> None:  # fmt: skip
    """Be the command in this process, to its end."""
    if session:
        os.setsid()
    for place, descriptor in enumerate(files):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # these look at what they are when made
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    if user is not None:
        os.setgroups([])
        os.setresgid(*[user[1]] * 3)
        os.setresuid(*[user[0]] * 3)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as whom a program is started by
    os.chdir(cwd)
    sys.argv = ["gpusched", *words]
    try:
        importlib.import_module("gpusched.__main__").main()
    except SystemExit as end:  # as the interpreter ends, but for taking apart what the server has imported
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1 if end.code else 0)


if __name__ == "__main__":
    for name in _NEEDED:
        importlib.import_module(name)
    from gpusched.compiled import NotCached, nothing_compiled
    from gpusched.sched.warming import warm_up

    with contextlib.suppress(NotCached), nothing_compiled():  # a tenth of a second of every controller
        warm_up()
    gc.freeze()
    if found := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _become(**found[0], files=found[1])
