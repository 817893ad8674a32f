"""Shared parts of the failure tests: jobs that leave a trace on the nodes' common /tmp each time they begin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Cluster


class Traces:
    """A shared folder where every rank that begins appends a line; what ran how often is read from it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "share"
        self.folder.mkdir(exist_ok=True)

    def submit(self, script: str = "true", *options: str, **more: Any) -> str:
        """Submit a job that leaves its trace, then runs ``script`` with the folder at /share."""
        mark = 'echo "$GPUSCHED_JOB_ID $RANK $GPUSCHED_ATTEMPT $GPUSCHED_NODE" >>/share/starts'
        if not {"--gpus", "-F", "--cpus"} & set(options):
            options = ("--gpus", "2", *options)
        return self.cluster.shared(f"{mark}; {script}", self.folder, *options, **more)

    def until(self, name: str, *options: str) -> str:
        """Submit a job that runs until `let_go` (name)."""
        return self.submit(f"until [ -e /share/{name} ]; do sleep 0.1; done", *options)

    def let_go(self, name: str) -> None:
        """End the jobs of `until` (name)."""
        (self.folder / name).touch()

    @property
    def lines(self) -> list[list[str]]:
        """[job, rank, attempt, node] of each start so far."""
        path = Path(self.folder, "starts")
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, job: str) -> list[list[str]]:
        """The starts of one job (all tasks of an array)."""
        return [line for line in self.lines if line[0].partition("_")[0] == job]

    def counted(self) -> Counter[tuple[str, str]]:
        """(job, rank) -> how often it began."""
        return Counter((line[0], line[1]) for line in self.lines)
