"""The machine gpusched itself runs on, as a node."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator

from gpusched.nodes.transport import Result, Script, TransportError, stream_argv, too_much

_CHUNK = 65536


class LocalTransport:
    """`gpusched.nodes.transport.Transport` over subprocesses, each in its own session."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, script: Script, timeout_s: float) -> Result:
        """See `gpusched.nodes.transport.Transport.run`; on timeout the whole process group is killed."""
        try:
            process = self._start(script.argv, stderr=subprocess.PIPE)
        except (FileNotFoundError, PermissionError) as error:  # what a shell, and so sshd, would say
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return Result(code, b"", f"{script.argv[0]}: {error.strerror}\n".encode())
        try:
            stdout, stderr = self._exchange(process, script, time.monotonic() + timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise TransportError(
                "timeout",
                f"{self._name}: no answer from `{script.argv[0]}` within {timeout_s:g} s",
                "look at the load of this machine",
            ) from None
        finally:
            _end(process)
        code = process.returncode
        return Result(code if code >= 0 else 128 - code, stdout, stderr)

    def stream(self, script: Script) -> Iterator[bytes]:
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

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, process: subprocess.Popen[bytes], script: Script, deadline: float) -> tuple[bytes, bytes]:
        """What the process said to what it was given; ``communicate`` would keep however much it says."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        given, said = memoryview(script.stdin), {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for pipe in said:
                selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        given = _given(key.fd, given)
                        done = not given
                    else:
                        chunk = os.read(key.fd, _CHUNK)
                        said[key.fileobj] += chunk  # type: ignore[index]
                        done = not chunk
                    if done:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                if sum(map(len, said.values())) > script.max_bytes:
                    raise too_much(self._name, script)
        process.wait(max(0.0, deadline - time.monotonic()))
        return bytes(said[process.stdout]), bytes(said[process.stderr])

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
                "look at its memory and its limits (ulimit -u)",
            ) from None  # fmt: skip


def _given(descriptor: int, data: memoryview) -> memoryview:
    """What is left to give to a process after as much as it takes now; nothing where it does not read."""
    try:
        return data[os.write(descriptor, data[:_CHUNK]) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
