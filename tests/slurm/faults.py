"""For tests of mode decide when things go wrong: an installation, jobs that prove what they did, and what was asked."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from tests.slurm.conftest import SlurmCluster
from tests.testbed import wait_until
from tests.testbed.slurm import SlurmSite


class Line(NamedTuple):
    """The line that a job wrote as it began: Slurm's id (``12_3``: a task), where it ran, when."""

    job: str
    host: str
    nodes: tuple[str, ...]
    time: float


class Asked(NamedTuple):
    """A decision of a controller, or what it was about to ask of Slurm: a job, and the nodes it should start on."""

    time: float
    job: str
    nodes: tuple[str, ...]


class Proofs:
    """Jobs that write a line into a file that all users may write to, and what is in it."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        folder = site.shared / "proofs"  # not sticky: there the kernel keeps even root from others' files
        folder.mkdir()
        self.file = folder / "began"
        self.file.touch()
        folder.chmod(0o777)
        self.file.chmod(0o666)
        self.script = (
            "id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; "
            f'echo "${{id:-$SLURM_JOB_ID}} $(uname -n) $SLURM_JOB_NODELIST $(date +%s.%N)" >> {self.file}; '
        )

    def submit(self, jobs: Iterable[tuple[str, str, str]]) -> list[str]:
        """Submit many: (user, options, what the job does after it wrote); ids in this order."""
        asked = list(jobs)
        found: dict[int, str] = {}
        for user in dict.fromkeys(user for user, _, _ in asked):
            mine = [at for at, job in enumerate(asked) if job[0] == user]
            text = "".join(
                f"sbatch --parsable -o /dev/null {asked[at][1]} <<'END' || exit 1\n#!/bin/sh\n{self.script}\n"
                f"{asked[at][2]}\nEND\n"
                for at in mine
            )
            found |= zip(mine, self.site.run(["sh"], user, input=text).stdout.split(), strict=True)
        return [found[at] for at in range(len(asked))]

    def lines(self) -> list[Line]:
        """In the order in which they were written."""
        words = [line.split() for line in self.file.read_text().splitlines()]
        return [Line(job, host, expand(nodes), float(when)) for job, host, nodes, when in words]

    def wait(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many lines were written."""
        try:
            wait_until(lambda: self.file.read_text().count("\n") >= count, timeout_s, f"{count} jobs that began")
        except TimeoutError as error:
            error.add_note(f"{len(self.lines())} began; Slurm has")
            error.add_note(self.site.run(["squeue", "-o", "%i %T %r %P %u %v %R %n"]).stdout)
            raise


class Decided:
    """An installation in mode decide in both partitions; its controller is `tests.slurm.mortal`."""

    def __init__(self, cluster: SlurmCluster, lease_s: int = 60, limit_s: float = 10) -> None:
        self.cluster, self.site = cluster, cluster.site
        self.folder = cluster.folder / "mortal"
        self.folder.mkdir()
        (self.folder / "asked").touch()
        (self.folder / "deaths").touch()
        cluster.write_inventory(
            {"tick": "0.5s"}, nodes={n.name: {"transport": "none"} for n in self.site.testbed.nodes}
        )
        self._env = {"MORTAL_FOLDER": str(self.folder), "MORTAL_LEASE_S": str(lease_s), "MORTAL_LIMIT_S": str(limit_s)}

    def start(self) -> None:
        """Start the controller, and put it in charge of all nodes."""
        self.start_again()
        self.cluster.cli("policy", "promote", "easy", "--mode", "decide", "--force", "a test")
        self.wait_lease()

    def wait_lease(self) -> None:
        """Wait until there is a lease over all nodes."""
        wait_until(lambda: self.lease_end() > time.time(), 30, "the lease")

    def start_again(self) -> None:
        """Start the controller; it does not die."""
        (self.folder / "steps").unlink(missing_ok=True)
        self.cluster.start_controller(nodes=False, program=("-m", "tests.slurm.mortal"), **self._env)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The controller stands still."""
        with self.cluster.reader() as reader:
            assert reader is not None
            pid = int(reader.meta("controller_pid") or 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def going(self) -> list[str]:
        """Slurm's ids of jobs that run, and of those that it was asked to start."""
        rows = [row.split() for row in self.site.run(["squeue", "-h", "-o", "%A %T %v"]).stdout.splitlines()]
        return sorted(job for job, state, lease in rows if state != "PENDING" or lease == "gpusched")

    def shorten_lease(self, seconds: int) -> float:
        """Have the lease end soon, as if it had been renewed so long ago; return when."""
        self.site.run(["scontrol", "update", "ReservationName=gpusched", f"EndTime=now+{seconds}"])
        return self.lease_end()

    def lease_end(self) -> float:
        """When the lease over all nodes ends, or ended; 0: there is none."""
        show = ["env", "SLURM_TIME_FORMAT=%s", "scontrol", "-o", "show", "reservation"]
        pattern = r"ReservationName=gpusched .* EndTime=(\d+) .* Nodes=dgx\[001-004\]"
        found = re.search(pattern, self.site.run(show).stdout)
        return float(found[1]) if found else 0.0

    def kill_at(self, steps: Sequence[str]) -> None:
        """The next controllers die at these steps, the present one at once."""
        (self.folder / "steps").write_text("\n".join(steps))
        (self.folder / "now").touch()

    def deaths(self) -> list[str]:
        """At which steps controllers have died."""
        return (self.folder / "deaths").read_text().splitlines()

    def wait_deaths(self, count: int) -> None:
        """Wait until so many controllers have died."""
        try:
            wait_until(lambda: len(self.deaths()) == count, 60, f"the deaths of {count} controllers")
        except TimeoutError as error:
            last = (self.folder / "asked").read_text().splitlines()[-5:]
            error.add_note(f"at {time.time()}; died at {self.deaths()}; last asked {last}; going: {self.going()}")
            raise

    def asked(self, kind: str) -> list[Asked]:
        """Everything of this kind in order: ``plan``, decided; ``start``, to be asked for; ``back``, withdrawn."""
        words = [line.split() for line in (self.folder / "asked").read_text().splitlines()]
        return [Asked(float(when), job, tuple(nodes.split(","))) for when, what, job, nodes in words if what == kind]

    def batches(self) -> Iterator[tuple[list[Asked], list[Asked]]]:
        """The starts that were asked for at once, and the plan that they come from, each in its order."""
        plans = [list(plan) for _, plan in groupby(self.asked("plan"), key=lambda asked: asked.time)]
        for when, batch in groupby(self.asked("start"), key=lambda asked: asked.time):
            yield list(batch), [plan for plan in plans if plan[0].time <= when][-1]

    def last_asked(self, line: Line) -> Asked | None:
        """The start that was last asked for before a job began: one that begins just then is not withdrawn any more."""
        return next((a for a in reversed(self.asked("start")) if a.job == line.job and a.time < line.time), None)


def expand(nodes: str) -> tuple[str, ...]:
    """``dgx[001,003-004]`` -> the names."""
    found = re.fullmatch(r"dgx\[([0-9,-]+)\]", nodes)
    if found is None:
        return (nodes,)
    spans = [span.split("-") for span in found[1].split(",")]
    return tuple(f"dgx{n:03d}" for span in spans for n in range(int(span[0]), int(span[-1]) + 1))
