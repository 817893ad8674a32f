"""The sshd of a node: which processes it is, how it ends, and how it surely starts."""

import signal
from functools import partial
from typing import TYPE_CHECKING

from tests.testbed import processes
from tests.testbed.requirements import which
from tests.testbed.waiting import wait_until

if TYPE_CHECKING:
    from tests.testbed.node import TestNode

PATIENCE_S = (5.0, 10.0, 15.0)
"""How long each sshd that `start` starts may take to answer, in seconds."""


def is_listener(node: "TestNode", pid: int) -> bool:
    """Whether a process calls itself the node's listener; a test may run another sshd there, with its own files."""
    title = " ".join(processes.command_line(pid)[:1])
    return "[listener]" in title and f" {node.disk}/ssh/sshd_config " in title


def is_foreign(node: "TestNode", pid: int) -> bool:
    """Whether a process is the listener of another sshd than the node's own."""
    title = " ".join(processes.command_line(pid)[:1])
    return "[listener]" in title and not is_listener(node, pid)


def is_up(node: "TestNode") -> bool:
    """Whether the node's listener is there and not stopped; one that has not bound its port yet looks like it."""
    return any(is_listener(node, pid) and processes.state(pid) in ("S", "R") for pid in node.pids())


def listens(node: "TestNode") -> bool:
    """Whether a socket of the node listens on sshd's port."""
    return bool(processes.listening(node.init_pid, node.port))


def _listeners(node: "TestNode") -> list[int]:
    """Return sshd and its children that have its title or hold its socket."""
    inodes = processes.listening(node.init_pid, node.port)
    return [p for p in node.pids() if is_listener(node, p) or processes.holds(p, inodes)]


def stop(node: "TestNode", *, sessions: bool) -> None:
    """Kill sshd, and its open connections where `sessions` is true.

    Raises:
        TimeoutError: Something still listens on its port.
    """

    def ended() -> bool:
        # Again and again: a child that the listener had just forked holds the socket as well.
        listeners = _listeners(node)
        for pid in listeners:
            processes.send(pid, signal.SIGKILL)
        return not listeners and not listens(node)

    wait_until(ended, what=f"the end of sshd on {node.name}")
    for pid in node.pids() if sessions else []:
        if "".join(processes.command_line(pid)[:1]).startswith("sshd:"):  # it may have ended: one look
            processes.send(pid, signal.SIGKILL)


def start(node: "TestNode") -> None:
    """Start sshd where nothing listens, and wait until it answers; one that does not is replaced.

    Raises:
        TimeoutError: None answered; the message has the processes and the log as they were each time.
    """
    if not node.is_cut and node.answers(PATIENCE_S[0]):
        return  # to look for who listens is to read all of the kernel's table
    story = ""
    for patience_s in PATIENCE_S:
        if not listens(node):
            node.run([which("sshd") or "sshd", "-f", node.disk / "ssh" / "sshd_config", "-E", _log(node)])
        try:
            # sshd returns before it binds: only its port shows it. A node that is cut off can still be looked into.
            there = partial(listens, node) if node.is_cut else partial(node.answers, patience_s)
            wait_until(there, patience_s, "its greeting", least_s=0.0)
            return
        except TimeoutError as error:
            story += f"\n{error}\n{_situation(node)}"
            stop(node, sessions=False)
    raise TimeoutError(f"sshd on {node.name} would not start{story}")


def _log(node: "TestNode") -> str:
    return f"{node.disk}/ssh/log"


def _situation(node: "TestNode") -> str:
    with open(_log(node), "a+", errors="replace") as log:
        log.seek(0)
        said = log.read()[-2000:].strip()
    holders = _listeners(node) if listens(node) else "nobody"
    return f"port {node.port} is held by {holders}\n{processes.describe(node.pids())}\n{_log(node)} says: {said}"
