"""A site without nodes (tests/cli) with a history of some days, and a controller over imagined nodes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.pool import Pool
from gpusched.sim.replay import one_job, replay
from tests.cli.conftest import Site, site

__all__ = ["site"]

DAY_S = 86400.0


def record_days(state: Path, days: int, partition: str = "V100", until_days_ago: float = 1.0, first: int = 0) -> None:
    """So many days, on each of which one large job blocks a small one under fifo, which EASY backfill lets pass."""
    store = Store.create_or_open(state)
    now = time.time()
    jobs = [("a", 0.0, 3600.0, 12), ("b", 10.0, 3600.0, 16), ("c", 20.0, 600.0, 2)]
    with store.transaction():
        for day in range(days):
            begin = (now - (until_days_ago + day) * DAY_S - 20000.0) // 3600 * 3600  # no day ends in between
            for name, at, seconds, gpus in jobs:
                _ended(store, f"{name}{first + day:03d}", partition, begin + at, seconds, gpus)
    store.close()


def _ended(store: Store, name: str, partition: str, submit: float, seconds: float, gpus: int) -> None:
    nodes = 2 if gpus > 8 else 1
    spec = JobSpec(
        name=name, partition=partition, nodes=nodes, gpus_per_node=gpus // nodes, cores_per_node=1,
        memory_mib_per_node=1, time_limit_s=int(seconds) + 60,
    )  # fmt: skip
    store.put_jobs([
        JobRecord(id=name, user="ann", uid=0, spec=spec, state=JobState.COMPLETED, submit_time=submit,
        start_time=submit,
            end_time=submit + seconds, attempt=1)
    ])  # fmt: skip
    store.open_run(
        RunRecord(job_id=name, attempt=1, user="ann", partition=partition, flavor=None, share=0.5, gpus=gpus,
            start_time=submit, end_time=None, outcome=None, nodes={"n": gpus})
    )  # fmt: skip
    store.close_run(name, 1, submit + seconds, JobState.COMPLETED)


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile beforehand what would report its compilation on stderr."""
    for policy in ("fifo", "fifo+easy"):
        replay(one_job(), Pool.uniform(1, 1), policy)


@pytest.fixture
def proved(site: Site) -> Site:
    """With eight days of history in V100, on which easy is better than fifo, the live policy."""
    record_days(site.state, 8)
    site.apply_inbox()
    return site
