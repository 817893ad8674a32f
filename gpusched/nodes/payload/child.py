"""A process for what may hang in the kernel: a driver, a shared disk. Runs on the node: stdlib, Python 3.6+."""

# ruff: noqa: UP031

import os
import select
import time

from gpusched.nodes.payload.jsontext import dumps, loads

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from collections.abc import Iterable
    from typing import Any


SIGKILL = 9  # to import signal would import enum


MOST_STUCK = 16  # children of earlier readings that hang in the kernel: more would fill the node with processes


class Stuck:
    """Children that SIGKILL could not end, noted in a file from one reading to the next; without its folder, none."""

    def __init__(self, path: str) -> None:
        self.path = path
        noted = []  # type: list[str]
        try:
            with open(path) as file:
                noted = file.read().split("\n")
        except (OSError, ValueError):
            pass
        self.left = [line for line in noted if line and _since(line.partition(" ")[0]) == line.partition(" ")[2]]
        if len(self.left) < len(noted):
            self._write("w", self.left)

    def note(self, pid: int) -> None:
        """Note a child that was killed; whether it is gone is found at the next reading."""
        since = _since(str(pid))
        if since:
            self._write("a", ["%d %s" % (pid, since)])

    def _write(self, mode: str, lines: "list[str]") -> None:
        try:
            with open(self.path, mode) as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError:
            pass


def _since(pid: str) -> str:
    """Return when a process began, by its boot's clock; "": it is gone, or waits to be."""
    try:
        with open("/proc/%s/stat" % pid) as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError, ValueError):
        return ""


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
