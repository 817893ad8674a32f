"""Two controllers: the one that waits takes over, the other ends, and every job runs exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.jobs import ENDED
from gpusched.queue.lease import TERM
from tests import commands
from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.testbed import wait_until

pytestmark = [pytest.mark.one_partition, pytest.mark.processes]
SILENT_S = "5"


class Standby:
    """``gpusched controller --standby``, as on a second login node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._log = Path(cluster.folder / f"{name}.log")
        with self._log.open("ab") as log, open(os.devnull) as nothing:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            words = ["controller", "--standby", "--takeover-after", SILENT_S]
            self.process = commands.start(words, cluster.env(), "/", files, session=True)
        wait_until(lambda: "standby: the controller is" in self.log, 60, "the standby")
        self.process.send_signal(signal.SIGSTOP)  # until it is wanted: a busy machine is silent for so long, too

    def watch(self) -> None:
        """Have it go on."""
        self.process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[tuple[Cluster, Standby]]:
    standby = Standby(cluster, "second")
    yield cluster, standby
    standby.process.send_signal(signal.SIGCONT)
    standby.process.kill()
    standby.process.wait()
    assert "Traceback" not in standby.log


def term(cluster: Cluster) -> int:
    with cluster.reader() as reader:
        assert reader is not None
        return int(reader.number(TERM, 0))


def load(traces: Traces) -> list[str]:
    """Jobs that wait for `let_go`, that run by themselves, and that fail; more than fit at once."""
    jobs = [traces.until("go", "--gpus", "4"), traces.submit("sleep 0.3", "--gpus", "4"), traces.submit("exit 3")]
    return [*jobs, *(traces.submit("sleep 0.2", "--gpus", "4") for _ in range(3))]


def test_the_standby_takes_over_and_no_job_is_lost_or_runs_twice(pair: tuple[Cluster, Standby]) -> None:
    cluster, second = pair
    first, traces = cluster.controller, Traces(cluster)
    assert first is not None
    jobs = load(traces)
    cluster.wait_state(jobs[0], "RUNNING")
    before = term(cluster)
    with contextlib.closing(sqlite3.connect(cluster.state / "gpusched.db", timeout=300)) as db, db:
        db.execute("BEGIN IMMEDIATE")  # so that it stands still outside of a transaction of its own
        first.send_signal(signal.SIGSTOP)
    jobs += load(traces)  # nobody works on these
    second.watch()
    wait_until(lambda: term(cluster) == before + 1, 60, "the take-over")
    wait_until(lambda: cluster.state_of(jobs[-1]) != "", 60, "the standby's first cycle")
    first.send_signal(signal.SIGCONT)
    assert first.wait(300) == 1
    said = f"pid {second.process.pid} took over (term {before + 1}): this controller stops, jobs keep running"
    assert [said in line for line in cluster.controller_log.splitlines() if "took over" in line] == [True]
    third = Standby(cluster, "third")
    second.process.kill()
    third.watch()
    wait_until(lambda: term(cluster) == before + 2, 60, "the take-over of a dead one's place")
    cluster.controller = third.process
    traces.let_go("go")
    for job in jobs:
        ended = cluster.wait_state(job, timeout=90)
        assert ended.state in ENDED
        assert (str(ended.state), ended.attempt) == ("FAILED" if ended.exit_code == 3 else "COMPLETED", 1), ended
    assert sorted(line[0] for line in traces.lines) == sorted(jobs)
    cluster.wait_clean()
    with cluster.reader() as reader:
        assert reader is not None
        assert [e.kind for e in reader.events()].count("controller_took_over") == 2
