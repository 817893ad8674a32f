"""Report at once when a job has ended, over one channel for all jobs of a node. Runs on the node: stdlib, Python 3.6+.

stdin: lines of NAME:PID words, each line all that is to be waited for from now on (PID: the job's first process, 0
where it is not known, -1 where it has none yet). stdout: the word of each that ended, or whose launcher did. It ends
with stdin, which is when the connection does, and costs nothing while it waits.
"""
# ruff: noqa: UP031

import os
import select
import sys

MYPY = False  # as mypy knows it
POLL_S = 1.0  # between two reads of processes that have no descriptor on this kernel
END_RECORDERS = ("conmon", "containerd-shim")  # engines' processes that wait for a container's end and write it down
_PIDFD_OPEN = 434  # the same number on every architecture


class WatchedProcess:
    """A process that is watched for its end."""

    def __init__(self, pid: int, start: str) -> None:
        self.pid, self.start = pid, start
        self.fd = open_pid(pid)
        if self.fd is not None and stat(pid)[1] != start:  # the PID was reused in between
            self.close()

    def has_ended(self, ready: "set[int]") -> bool:
        """Return whether it has ended, by descriptors that are ready."""
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


def end_recorder(folder: str, pid: int) -> int:
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
            return parent if file.read().startswith(END_RECORDERS) else pid
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


class EndWatcher:
    """The processes whose ends are reported."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.watched = {}  # type: dict[str, WatchedProcess]  # by NAME:PID
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.buffer = b""

    def run(self) -> None:
        """Run until stdin ends."""
        while True:
            # A process without a descriptor wakes no poll: its start time is read once in a while.
            must_poll = any(process.fd is None for process in self.watched.values())
            ready = {fd for fd, _ in self.poll.poll(POLL_S * 1000 if must_poll else None)}
            if 0 in ready and not self.read_request():
                return
            for job, process in list(self.watched.items()):
                if process.has_ended(ready):
                    self.unwatch(job)
                    report_end(job)

    def read_request(self) -> bool:
        """Read which jobs to watch; False at the end of stdin."""
        chunk = os.read(0, 65536)
        lines = (self.buffer + chunk).split(b"\n")
        self.buffer = lines.pop()
        if lines:
            self.watch_only(lines[-1].decode().split())  # each line replaces those before it
        return bool(chunk)

    def watch_only(self, jobs: "list[str]") -> None:
        """Watch these jobs (NAME:PID) and no others; report those that have ended already."""
        for job in set(self.watched) - set(jobs):
            self.unwatch(job)
        for job in jobs:
            name, pid = job.rsplit(":", 1)
            if job in self.watched:
                continue
            recorder = end_recorder(os.path.join(self.root, name), int(pid))
            start = stat(recorder)[1] if recorder else ""
            if start:
                process = self.watched[job] = WatchedProcess(recorder, start)
                if process.fd is not None:
                    self.poll.register(process.fd, select.POLLIN)
            elif int(pid) >= 0:  # -1: it has no process yet, so nothing can have ended
                report_end(job)

    def unwatch(self, job: str) -> None:
        """Stop watching a job."""
        process = self.watched.pop(job)
        if process.fd is not None:
            self.poll.unregister(process.fd)
            process.close()


def report_end(job: str) -> None:
    """Write that the job has ended."""
    os.write(1, job.encode() + b"\n")


def main() -> None:
    """Run ``ends.py CLUSTER/NODE``."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    EndWatcher(os.path.join(state, "gpusched-node", sys.argv[1])).run()


if __name__ == "__main__":
    main()
