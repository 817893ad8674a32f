"""A controller on a machine whose clock is set while jobs run on real nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpusched.controller.leadership import controller_lock
from gpusched.controller.service import Service
from gpusched.model.jobs import JobRecord, JobState
from gpusched.queue.clock import Clock
from tests.e2e.conftest import Cluster
from tests.logged import messages

pytestmark = [pytest.mark.one_partition, pytest.mark.processes]

PATIENCE_S = 300.0


def test_no_limit_comes_early_and_none_is_missed_when_the_clock_is_set(
    stopped: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = 0.0
    with controller_lock(stopped.state):
        clock = Clock(wall=lambda: time.time() + ahead)
        service = Service(stopped.inventory, stopped.state, clock)

        def job(job_id: str) -> JobRecord | None:
            return service.store.job(job_id)

        def until(what: Callable[[], bool]) -> None:
            end = time.monotonic() + PATIENCE_S
            while not what():
                assert time.monotonic() < end, (messages(caplog), service.store.jobs())
                service.run(1.0)

        try:
            long = stopped.submit("--gpus", "1", "-t", "0:14:00", command=("sleep", "10000"))
            until(lambda: (found := job(long)) is not None and found.state is JobState.RUNNING)
            for step in (900.0, -900.0, -86400.0):
                ahead += step
                began = job(long)
                for _ in range(3):
                    service.run(1.0)
                found = job(long)
                assert found is not None
                assert began is not None
                assert (found.state, found.attempt) == (JobState.RUNNING, 1)
                assert found.start_time is not None
                assert began.start_time is not None
                assert abs(found.start_time - began.start_time - step) < 1.0
            records = service.store.node_records().values()
            readings = [record.reading for record in records if record.reading is not None]
            running = [(c, r.time) for r in readings for c in r.containers or () if c.phase == "running"]
            assert [c.name.split("-")[1] for c, _ in running] == [long]
            assert found.start_time is not None
            ((container, read_at),) = running
            assert container.ran_s is not None
            assert abs(container.ran_s - (read_at - found.start_time)) < 60.0, "the node counts by its boot clock"
            short = stopped.submit("--gpus", "1", "-t", "0:00:03", command=("sleep", "1000"))
            until(lambda: (found := job(short)) is not None and found.state is JobState.TIMEOUT)
            ended = job(short)
            assert ended is not None
            assert ended.start_time is not None
            assert ended.end_time is not None
            # By two clocks, whose difference is known to half a round trip to a busy node.
            assert 2.5 <= ended.end_time - ended.start_time < 600.0
            assert [e.data["seconds"] for e in service.store.events() if e.kind == "clock_stepped"] != []
            assert [line for line in messages(caplog) if "clock was set by -86400 s" in line]
            stopped.cli("cancel", long, "--now")
            until(lambda: (found := job(long)) is not None and found.state is JobState.CANCELLED)
            until(lambda: not service.store.ranks())
        finally:
            service.close()
