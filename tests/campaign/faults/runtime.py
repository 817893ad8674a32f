"""The container engine hangs, fails, lies; what supervises jobs is killed."""

from __future__ import annotations

import signal

from tests.campaign.faults.base import NODES, PODMAN, Fault, environment
from tests.testbed import processes


class _Engine(Fault):
    nodes = PODMAN
    ends_attempts = True
    script = ""

    def inject(self) -> None:
        self.node.install_script("podman", f"#!/bin/sh\n{self.script}\nexec /usr/bin/podman \"$@\"\n")

    def heal(self) -> None:
        self.node.remove_script("podman")


class Hang(_Engine):
    """Every call hangs."""

    def inject(self) -> None:
        self.node.hang_runtime("podman")

    def heal(self) -> None:
        self.node.unhang_runtime("podman")


class Exists(_Engine):
    """Containers are said to exist already."""

    script = 'case $1 in run|create|start) echo "Error: the container name is already in use" >&2; exit 125;; esac'


class Fails(_Engine):
    """Every call fails at once."""

    script = 'echo "Error: database is locked" >&2; exit 125'


class Forgets(_Engine):
    """It lists nothing and knows no container, as after its state was lost."""

    costs_exit_codes = True
    script = 'case $1 in ps) exit 0;; inspect|container) echo "Error: no such container" >&2; exit 125;; esac'


class Conmon(Fault):
    """``kill -9`` of one container's conmon."""

    nodes, lasts, ends_attempts, costs_exit_codes = PODMAN, False, True, True

    def inject(self) -> None:
        found = [p for p in self.node.pids() if processes.command_line(p)[:1] == ["/usr/bin/conmon"]]
        self.had_effect = bool(found)
        if found:
            processes.send(found[self.pick(len(found))], signal.SIGKILL)


class Process(Fault):
    """``kill -9`` of one process of one job: its shell, its sleep, or what supervises it."""

    nodes, lasts, ends_attempts, costs_exit_codes = NODES, False, True, True

    def inject(self) -> None:
        found = [p for p in self.node.pids() if b"GPUSCHED_JOB_ID" in environment(p)]
        self.had_effect = bool(found)
        if found:
            victim = found[self.pick(len(found))]
            self.site.killed(victim)
            processes.send(victim, signal.SIGKILL)
