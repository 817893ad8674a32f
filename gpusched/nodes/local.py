"""The machine gpusched itself runs on, as a node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator

from gpusched.model.relay import Terminal
from gpusched.nodes.transport import CommandResult, RemoteScript, Session, TransportError, output_too_large, stream_argv

_CHUNK = 65536
_WRITE_S = 1.0
_DIAL_S = 10.0


def _set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class LocalTransport:
    """`gpusched.nodes.transport.Transport` over subprocesses, each in its own session."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        """See `gpusched.nodes.transport.Transport.run`; on timeout the whole process group is killed."""
        try:
            process = self._start(script.argv, stderr=subprocess.PIPE)
        except (FileNotFoundError, PermissionError) as error:  # what a shell, and so sshd, would say
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return CommandResult(code, b"", f"{script.argv[0]}: {error.strerror}\n".encode())
        try:
            stdout, stderr = self._exchange(process, script, time.monotonic() + timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise TransportError(
                "timeout",
                f"{self._name}: no answer from `{script.argv[0]}` within {timeout_s:g} s",
                "check the load of this machine",
            ) from None
        finally:
            _end(process)
        code = process.returncode
        return CommandResult(code if code >= 0 else 128 - code, stdout, stderr)

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        """See `gpusched.nodes.transport.Transport.stream`."""
        process = self._start(stream_argv(script.argv), stderr=subprocess.STDOUT)
        assert process.stdout is not None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while selector.select():
                    chunk = os.read(process.stdout.fileno(), _CHUNK)
                    if not chunk:
                        return
                    yield chunk
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
            _end(process)

    def session(self, argv: tuple[str, ...], terminal: Terminal | None = None) -> Session:
        """See `gpusched.nodes.transport.Transport.session`."""
        try:
            if terminal is None:
                process = self._start(argv, stderr=subprocess.PIPE)
                assert process.stdin is not None
                return _LocalSession(process, process.stdin.fileno())
            own_side, job_side = os.openpty()
            try:
                _set_size(job_side, terminal.rows, terminal.columns)  # before the job can ask for it
                process = subprocess.Popen(
                    ("setsid", "--ctty", *argv), stdin=job_side, stdout=job_side, stderr=job_side,
                    env={**os.environ, "TERM": terminal.name},
                )  # fmt: skip
            except OSError:
                os.close(own_side)
                raise
            finally:
                os.close(job_side)
        except OSError as error:
            raise TransportError("protocol", f"{self._name}: {argv[0]}: {error.strerror}") from None
        return _LocalSession(process, own_side, terminal=True)

    def dial(self, host: str, port: int) -> Session:
        """See `gpusched.nodes.transport.Transport.dial`."""
        try:
            return _LocalTunnel(socket.create_connection((host, port), _DIAL_S))
        except OSError as error:
            why = error.strerror or str(error)
            raise TransportError("refused", f"{self._name}: port {port} cannot be reached: {why}") from None

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, process: subprocess.Popen[bytes], script: RemoteScript, deadline: float) -> tuple[bytes, bytes]:
        """Return the process's output for this input; ``communicate`` would keep any amount."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        given, output = memoryview(script.stdin), {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for pipe in output:
                selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        given = _remaining_input(key.fd, given)
                        done = not given
                    else:
                        chunk = os.read(key.fd, _CHUNK)
                        output[key.fileobj] += chunk  # type: ignore[index]
                        done = not chunk
                    if done:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                if sum(map(len, output.values())) > script.max_bytes:
                    raise output_too_large(self._name, script)
        process.wait(max(0.0, deadline - time.monotonic()))
        return bytes(output[process.stdout]), bytes(output[process.stderr])

    def _start(self, argv: tuple[str, ...], stderr: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise TransportError(
                "protocol", f"{self._name}: cannot start a process on this machine: {error.strerror}",
                "check its memory and its limits (ulimit -u)",
            ) from None  # fmt: skip


def _remaining_input(descriptor: int, data: memoryview) -> memoryview:
    """Return the input that remains after the process took what it can now; empty if it does not read."""
    try:
        return data[os.write(descriptor, data[:_CHUNK]) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


class _LocalSession:
    """`gpusched.nodes.transport.Session` over the pipes or the terminal of a process."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: int, terminal: bool = False) -> None:
        self._process, self._stdin, self._terminal, self._closed = process, stdin, terminal, False
        self._lock = threading.Lock()  # a closed descriptor's number may be another's at once
        os.set_blocking(stdin, False)

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        pipes = {self._stdin: 1} if self._terminal else {}
        pipes |= {p.fileno(): n for n, p in ((1, self._process.stdout), (2, self._process.stderr)) if p is not None}
        try:
            with selectors.DefaultSelector() as selector:
                for pipe in pipes:
                    selector.register(pipe, selectors.EVENT_READ)
                while selector.get_map() and not self._closed:
                    for key, _ in selector.select(_WRITE_S):
                        chunk = _read(key.fd)
                        if chunk:
                            take(pipes[key.fd], chunk)
                        elif chunk is not None:
                            selector.unregister(key.fd)
            code = 255 if self._closed else self._process.wait()
        finally:
            if self._terminal:  # what runs in it gets a HUP
                with self._lock:
                    os.close(self._stdin)
                    self._stdin = -1
            else:
                self.end_input()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=3)
            _end(self._process)
        return code if code >= 0 else 128 - code

    def write(self, data: bytes) -> int:
        with self._lock:
            if self._stdin < 0:
                return len(data)
            try:
                poll = select.poll()
                poll.register(self._stdin, select.POLLOUT)
                return os.write(self._stdin, data[: select.PIPE_BUF]) if poll.poll(_WRITE_S * 1000) else 0
            except BlockingIOError:
                return 0
            except OSError:
                return len(data)

    def end_input(self) -> None:
        if self._terminal:
            self.write(b"\4")
            return
        with self._lock:
            self._stdin = -1
            with contextlib.suppress(OSError):
                if self._process.stdin is not None:
                    self._process.stdin.close()

    def resize(self, rows: int, columns: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._terminal and self._stdin >= 0:
                _set_size(self._stdin, rows, columns)

    def close(self) -> None:
        self._closed = True
        if not self._terminal:  # there it would be a key that is typed
            self.end_input()


class _LocalTunnel:
    """`gpusched.nodes.transport.Session` over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        with self._sock, contextlib.suppress(OSError):
            while data := self._sock.recv(_CHUNK):
                take(1, data)
        return 0

    def write(self, data: bytes) -> int:
        try:
            writable = select.select([], [self._sock], [], _WRITE_S)[1]
            return self._sock.send(data, socket.MSG_DONTWAIT) if writable else 0
        except BlockingIOError:
            return 0
        except (OSError, ValueError):  # ValueError: closed
            return len(data)

    def end_input(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def resize(self, rows: int, columns: int) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _read(descriptor: int) -> bytes | None:
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # EIO: no process has the terminal open any more
        return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
