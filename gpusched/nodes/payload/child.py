"""A process for what may hang in the kernel: a driver, a shared disk. Runs on the node: stdlib, Python 3.6+."""

import os
import select
import time

from gpusched.nodes.payload.jsontext import dumps, loads

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from collections.abc import Iterable
    from typing import Any


SIGKILL = 9  # to import signal would import enum


class Child:
    """A process that makes messages, such as `nvml.messages`, and sends them through a pipe."""

    def __init__(self, made: "Iterable[dict[str, Any]]") -> None:
        self.buffer = b""
        self.fd, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.fd)
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):  # the session must be able to end without this process
                    os.dup2(null, fd)
                for message in made:
                    os.write(write, dumps(message).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(write)

    def next(self, until: float) -> "dict[str, Any] | None":
        """Return the next message; None at the time ``until`` (monotonic); EOFError when the child is gone.

        What lies ready is taken, however late it is: the container engine may have kept us.
        """
        while b"\n" not in self.buffer:
            if not select.select([self.fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            chunk = os.read(self.fd, 65536)
            if not chunk:
                raise EOFError
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return dict(loads(line.decode()))

    def kill(self) -> None:
        """End it, once or more; one stuck in the kernel is left to init."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            os.kill(self.pid, SIGKILL)
            os.waitpid(self.pid, os.WNOHANG)
        except OSError:
            pass
