"""Tells at once when a job has ended, over one channel for all jobs of a node. Runs on the node: stdlib, Python 3.6+.

stdin: lines of NAME:PID words, each line all that is to be waited for from now on (PID: the job's first process, 0
where it is not known, -1 where it has none yet). stdout: the word of each that ended, or whose launcher did. It ends
with stdin, which is when the connection does, and costs nothing while it waits.
"""
# ruff: noqa: UP031

import os
import select
import sys

MYPY = False  # as mypy knows it
LOOK_S = 1.0  # between two looks at processes that this kernel gives no descriptor for
KEEPERS = ("conmon", "containerd-shim")  # engines' processes that wait for a container's end and write it down
_PIDFD_OPEN = 434  # the same number on every architecture


class Awaited:
    """A process whose end is waited for."""

    def __init__(self, pid: int, start: str) -> None:
        self.pid, self.start = pid, start
        self.fd = open_pid(pid)
        if self.fd is not None and stat(pid)[1] != start:  # the number was given anew in between
            self.close()

    def has_ended(self, ready: "set[int]") -> bool:
        """Whether it has, by descriptors that are ready."""
        return self.fd in ready if self.fd is not None else stat(self.pid)[1] != self.start

    def close(self) -> None:
        """Give its descriptor back."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def stat(pid: int) -> "tuple[int, str]":
    """Return a process's parent and start time; (0, "") if it is gone or a zombie."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().decode("utf-8", "replace").rsplit(")", 1)[-1].split()
    except OSError:
        return 0, ""
    return (0, "") if fields[0] in "ZX" else (int(fields[1]), fields[19])


def keeper(folder: str, pid: int) -> int:
    """Return the process whose end means that the job's end is written down; 0 if there is none to wait for."""
    try:
        with open(folder + "/launcher.pid") as file:
            launcher, since = file.read().split()
        if stat(int(launcher))[1] == since:
            return int(launcher)
    except (OSError, ValueError):
        pass
    if pid <= 0:
        return 0
    parent = stat(pid)[0]
    try:
        with open("/proc/%d/comm" % parent) as file:
            return parent if file.read().startswith(KEEPERS) else pid
    except OSError:
        return pid


def open_pid(pid: int) -> "int | None":
    """Return a descriptor that becomes readable when the process ends; None if the kernel or Python has none."""
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        import ctypes

        fd = ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0)
        return fd if fd >= 0 else None
    except (OSError, ImportError, AttributeError):
        return None


class EndWatches:
    """All that is waited for."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.known = {}  # type: dict[str, Awaited]  # by their words
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.buffer = b""

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            looks = any(one.fd is None for one in self.known.values())
            ready = {fd for fd, _ in self.poll.poll(LOOK_S * 1000 if looks else None)}
            if 0 in ready and not self.hear():
                return
            for word, one in list(self.known.items()):
                if one.has_ended(ready):
                    self.forget(word)
                    tell(word)

    def hear(self) -> bool:
        """Take up what is to be waited for; False at the end of stdin."""
        chunk = os.read(0, 65536)
        lines = (self.buffer + chunk).split(b"\n")
        self.buffer = lines.pop()
        if lines:
            self.use(lines[-1].decode().split())
        return bool(chunk)

    def use(self, words: "list[str]") -> None:
        """From now on these are waited for; those that have ended by now are told of."""
        for word in set(self.known) - set(words):
            self.forget(word)
        for word in words:
            name, pid = word.rsplit(":", 1)
            if word in self.known:
                continue
            process = keeper(os.path.join(self.root, name), int(pid))
            start = stat(process)[1] if process else ""
            if start:
                one = self.known[word] = Awaited(process, start)
                if one.fd is not None:
                    self.poll.register(one.fd, select.POLLIN)
            elif int(pid) >= 0:
                tell(word)

    def forget(self, word: str) -> None:
        """Wait for it no longer."""
        one = self.known.pop(word)
        if one.fd is not None:
            self.poll.unregister(one.fd)
            one.close()


def tell(word: str) -> None:
    """Say that it has ended."""
    os.write(1, word.encode() + b"\n")


def main() -> None:
    """``ends.py CLUSTER/NODE``."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    EndWatches(os.path.join(state, "gpusched-node", sys.argv[1])).run()


if __name__ == "__main__":
    main()
