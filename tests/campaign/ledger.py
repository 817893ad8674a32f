"""The ledger that jobs write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.campaign.shim import CACHE, built
from tests.testbed import TestNode


class Line(NamedTuple):
    """``what``: start, end or clash; ``time``: seconds since the machine's start; ``more``: GPUs, exit code or GPU."""

    what: str
    job: str
    attempt: int
    rank: int
    node: str
    time: float
    more: str


class Ledger:
    """The file, read on from where it was read last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gpus").mkdir(parents=True)
        here = Path(__file__).parent
        shutil.copy(here / "job.sh", folder)
        shutil.copy(built(CACHE, here / "lock.c", "-static"), folder / "lock")
        self._file = (folder / "ledger").open("a+")
        self._file.seek(0)
        self._part = ""
        self.lines: list[Line] = []

    def open_to_all(self, nodes: Iterable[TestNode]) -> None:
        """Let jobs of all users write there."""
        for path in (self.folder, self.folder / "gpus"):
            path.chmod(0o777)
        for node in nodes:
            for gpu in range(node.gpus):
                (self.folder / "gpus" / f"{node.name}.{gpu}").touch()
        for path in (self.folder / "ledger", *(self.folder / "gpus").iterdir()):
            path.chmod(0o666)

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def read(self) -> int:
        """How many lines there are by now."""
        *whole, self._part = (self._part + self._file.read()).split("\n")
        for text in whole:
            what, job, attempt, rank, node, time, more = (text + " ").split(" ", 6)
            self.lines.append(Line(what, job, int(attempt), int(rank), node, float(time), more.strip()))
        return len(self.lines)


def now() -> float:
    """Seconds since the machine's start, as jobs write them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
