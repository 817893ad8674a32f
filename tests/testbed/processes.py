"""Signals to whole trees of processes, found in /proc."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants, parents first."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def state(pid: int) -> str:
    """The one-letter process state (R, S, D, T, Z..), or '' when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def stop_tree(pid: int, timeout_s: float = 300.0) -> None:
    """SIGSTOP `pid` and its descendants until none is left running, whatever they fork meanwhile.

    One that waits in the kernel for a disk (D) stops as soon as it comes back, before it does anything else.

    Raises:
        TimeoutError: Some could not be stopped.
    """
    deadline = time.monotonic() + timeout_s
    sent: set[int] = set()
    while running := [
        p for p in tree(pid) if (now := state(p)) not in ("T", "t", "Z", "X", "") and not (now == "D" and p in sent)
    ]:
        for process in running:
            send(process, signal.SIGSTOP)
        sent.update(running)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} would not stop")
        time.sleep(0.001)


def continue_tree(pid: int) -> None:
    """SIGCONT `pid` and its descendants."""
    for process in tree(pid):
        send(process, signal.SIGCONT)


def listening(pid: int, port: int) -> set[str]:
    """The inodes of the sockets that listen on TCP `port` in the network namespace of `pid`; empty when it is gone."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def holds(pid: int, inodes: set[str]) -> bool:
    """Whether a process has one of these sockets open."""
    links = {f"socket:[{inode}]" for inode in inodes}
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}") in links:
                    return True
    return False


def describe(pids: list[int]) -> str:
    """One line per process: its id, its state and its command line."""
    return "\n".join(f"{pid} {state(pid)} {' '.join(command_line(pid))}" for pid in pids)


def in_network_namespaces(inodes: set[int]) -> list[int]:
    """All processes whose network namespace has one of these inode numbers."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if os.stat(f"{entry.path}/ns/net").st_ino in inodes:
                    found.append(int(entry.name))
    return found
