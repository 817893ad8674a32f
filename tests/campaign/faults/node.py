"""Nodes freeze, fall silent, reboot, change their keys, talk nonsense."""

from __future__ import annotations

import signal

from tests.campaign.faults.base import NODES, Fault
from tests.campaign.shim import shim
from tests.testbed import files, processes

LONG_S = 40.0


class _OnNode(Fault):
    nodes = NODES


class Sshd(_OnNode):
    """``kill -9`` of sshd with its connections; started again later."""

    ends_attempts = True

    def inject(self) -> None:
        self.node.stop_sshd(sessions=True)

    def heal(self) -> None:
        self.node.start_sshd()


class Sessions(_OnNode):
    """``kill -9`` of all open connections, sshd stays."""

    lasts = False

    def inject(self) -> None:
        for pid in self.node.pids():
            title = "".join(processes.command_line(pid)[:1])
            if title.startswith("sshd:") and "[listener]" not in title:
                processes.send(pid, signal.SIGKILL)


class _Away(_OnNode):
    ends_attempts = True

    def may_heal(self, after_s: float) -> bool:
        """At once, or when its jobs were given up."""
        return self.amount < 0.6 or after_s > LONG_S or (after_s > 1.0 and not self.site.holds(self.node_name))


class Freeze(_Away):
    """All its processes stand still: for less or more than `node_fail_after`."""

    def inject(self) -> None:
        self.node.freeze()

    def heal(self) -> None:
        self.node.thaw()


class Cut(_Away):
    """Its network cable is pulled: for less or more than `node_fail_after`."""

    def inject(self) -> None:
        self.node.cut()

    def heal(self) -> None:
        self.node.join()


class Reboot(_OnNode):
    """Power off and on."""

    lasts, ends_attempts, costs_exit_codes = False, True, True

    def inject(self) -> None:
        self.node.reboot()


class HostKey(_OnNode):
    """Its host key changes, and changes back."""

    ends_attempts = True

    def inject(self) -> None:
        self.node.stop_sshd(sessions=True)
        self.node.new_host_key()

    def heal(self) -> None:
        files.restore_host_key(self.node.disk)
        self.node.stop_sshd(sessions=True)
        self.node.start_sshd()


class _Answers(_OnNode):
    """Its python3 is replaced by something that answers whatever it likes."""

    ends_attempts = True
    script = ""

    def inject(self) -> None:
        self.node.install_script("python3", f"#!/bin/sh\n{self.script}\n")
        self.node.stop_sshd(sessions=True)
        self.node.start_sshd()

    def heal(self) -> None:
        self.node.remove_script("python3")
        for pid in self.node.pids():
            if f"{self.node_name}-nonsense" in processes.command_line(pid):
                processes.send(pid, signal.SIGKILL)


class Clock(_Answers):
    """The wall clock of what python3 does there is an hour off, ahead or behind."""

    def inject(self) -> None:
        self.site.node_clock.clock_s = 3600 if self.amount < 0.5 else -3600
        self.script = f"CAMPAIGN_SHIM={self.site.node_clock.path} LD_PRELOAD={shim()} exec /usr/bin/python3 \"$@\""
        super().inject()

    def heal(self) -> None:
        super().heal()
        self.node.stop_sshd(sessions=True)  # else it stays off in what runs there
        self.node.start_sshd()


class Garbage(_Answers):
    """Random bytes."""

    script = "head -c 20000 /dev/urandom; exit 0"


class Flood(_Answers):
    """100 MB."""

    script = "head -c 100000000 /dev/zero | tr '\\0' x; exit 0"


class Trickle(_Answers):
    """One byte a second."""

    script = "while printf x; do sleep 1; done"


class Silent(_Answers):
    """Nothing, and it succeeds."""

    script = "exit 0"
