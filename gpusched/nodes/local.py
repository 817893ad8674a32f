"""The machine gpusched itself runs on, as a node."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator

from gpusched.nodes.transport import Result, Script, TransportError, stream_argv

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
            stdout, stderr = process.communicate(script.stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
