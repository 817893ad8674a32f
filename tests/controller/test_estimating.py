"""``order: sjf-estimate`` live: each waiting job has an estimate, renewed while others start, run on, and end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.controller.cycle import Cycle
from gpusched.controller.estimating import EstimateWriter, estimate_jobs
from gpusched.estimation.estimators import followed
from gpusched.model import ids
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.policy import PolicySpec
from gpusched.traces.readers.history import as_submitted
from tests.builders import spec
from tests.controller.imagined import inventory
from tests.controller.site import Site

POLICY = PolicySpec(name="short", order="sjf-estimate", backfill="skip")
WHOLE = {"gpus_per_node": 4}  # of the only node
BEGIN = 1_799_000_000.0


def past(name: str, seconds: float, submit: float = BEGIN, user: str = "someone") -> JobRecord:
    return JobRecord(
        id=ids.mint(submit), user=user, uid=1, spec=spec(name=name), state=JobState.COMPLETED, submit_time=submit,
        start_time=submit, end_time=submit + seconds, attempt=1,
    )  # fmt: skip


def waits(name: str, submit: float, limit: int = 5000) -> JobRecord:
    return JobRecord(
        id=ids.mint(submit), user="someone", uid=1, spec=spec(name=name, time_limit_s=limit), state=JobState.PENDING,
        submit_time=submit,
    )  # fmt: skip


def runs(name: str, submit: float) -> JobRecord:
    return JobRecord(
        id=ids.mint(submit), user="someone", uid=1, spec=spec(name=name), state=JobState.RUNNING, submit_time=submit,
        start_time=submit, attempt=1,
    )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.cycle = Cycle(
        site.store, site.state, inventory(1), {"p": POLICY}, site.cluster, clock=lambda: site.world.now,
    )  # fmt: skip
    yield site
    site.store.close()


def teach(site: Site, user: str, name: str, seconds: float, jobs: int = 5) -> None:
    with site.store.transaction():
        site.store.put_jobs([past(name, seconds, BEGIN + i, user) for i in range(jobs)])


def test_what_was_short_before_goes_first_and_tasks_of_an_array_have_one_estimate(site: Site) -> None:
    slow = site.submit(spec=spec(name="slow", **WHOLE))
    site.submit(spec=spec(name="quick", **WHOLE))
    user = next(iter(site.store.pending())).user if site.store.pending() else "alice"
    teach(site, user, "slow", 500.0)
    teach(site, user, "quick", 20.0)
    site.turn(3)
    (found,) = site.store.active()
    assert found.spec.name == "quick"
    assert list(site.store.estimates()) == [slow]  # of those that wait
    assert 200.0 < site.store.estimates()[slow] < 900.0


def test_an_end_renews_the_estimates_of_those_that_wait(site: Site) -> None:
    waiting = waits("a", BEGIN + 10)
    site.store.put_jobs([waiting])
    writer = EstimateWriter(site.store)
    writer.run([POLICY], BEGIN + 20)
    before = site.store.estimates()[waiting.id]
    writer.run([POLICY], BEGIN + 40)
    assert site.store.estimates()[waiting.id] == before
    site.store.put_jobs([past("a", 30.0, BEGIN + 5)])
    writer.run([POLICY], BEGIN + 50)
    after = site.store.estimates()[waiting.id]
    assert after < 0.7 * before
    site.store.put_jobs([past("a", 4000.0, BEGIN - 3955)])
    writer.run([POLICY], BEGIN + 51)  # too soon after the last
    assert site.store.estimates()[waiting.id] == after
    writer.run([POLICY], BEGIN + 61)
    assert site.store.estimates()[waiting.id] > after


def test_other_policies_ask_nothing(site: Site) -> None:
    site.store.put_jobs([waits("new", BEGIN + 2)])
    EstimateWriter(site.store).run([PolicySpec(name="easy")], BEGIN + 3)
    assert site.store.estimates() == {}
    EstimateWriter(site.store).run([PolicySpec(name="a", agent="gist", fallback=PolicySpec(name="easy"))], BEGIN + 3)
    assert site.store.estimates() == {}
    EstimateWriter(site.store).run([PolicySpec(name="a", agent="gist", fallback=POLICY)], BEGIN + 3)
    assert len(site.store.estimates()) == 1
    site.store.put_jobs([waits("other", BEGIN + 3)])
    EstimateWriter(site.store).run([PolicySpec(name="a", agent="rltune")], BEGIN + 4)
    assert len(site.store.estimates()) == 2


def test_only_what_has_happened_counts() -> None:
    job = waits("a", BEGIN + 200)
    ended, later = past("a", 100.0), past("a", 4000.0, BEGIN + 10)
    (now,) = estimate_jobs([ended, later], [job], BEGIN + 300)
    (same,) = estimate_jobs([ended, runs("a", BEGIN + 10)], [job], BEGIN + 300)
    assert now.seconds == pytest.approx(same.seconds, rel=1e-9)
    (after,) = estimate_jobs([ended, later], [job], BEGIN + 5000)
    assert after.seconds > 1.05 * now.seconds


def test_those_that_run_on_make_their_like_wait() -> None:
    """Of a burst one ended soon, the others run and run: what waits of it is likely to be long."""
    burst = [past("a", 60.0), *(runs("a", BEGIN + i) for i in range(1, 6))]
    job = waits("a", BEGIN + 10, limit=100_000)
    (early,), (late,) = (estimate_jobs(burst, [job], BEGIN + t) for t in (70.0, 20_000.0))
    assert late.seconds > 3 * early.seconds


def test_never_more_than_the_limit_and_as_replays_do() -> None:
    job = waits("a", BEGIN + 5000, limit=60)
    (found,) = estimate_jobs([past("a", 4000.0)], [job], BEGIN + 5000)
    assert found.seconds <= 60.0
    said, _ = followed(as_submitted([past("a", 4000.0), job]))
    assert found.seconds == pytest.approx(said.expected[-1])
