"""``order: sjf-estimate`` live: each waiting job is asked about once, by what had ended before it was submitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpusched.controller.cycle import Cycle
from gpusched.controller.estimating import EstimateWriter, estimate_jobs
from gpusched.estimation.predictor import USUAL_NAME
from gpusched.model import ids
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Estimate
from tests.builders import spec
from tests.controller.imagined import inventory
from tests.controller.site import Site
from tests.controller.usual import usual
from tests.logged import messages

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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.cycle = Cycle(
        site.store, site.state, inventory(1), {"p": POLICY}, site.cluster, clock=lambda: site.world.now,
    )  # fmt: skip
    with site.store.transaction():
        site.store.put_jobs([past("slow", 500.0), past("quick", 20.0, BEGIN + 1)])
    yield site
    site.store.close()


def first_started(site: Site) -> str:
    site.turn(3)
    (found,) = site.store.active()
    return found.spec.name


def test_what_was_short_before_goes_first(site: Site) -> None:
    usual().save(site.state / USUAL_NAME)
    slow = site.submit(spec=spec(name="slow", **WHOLE))
    quick = site.submit(spec=spec(name="quick", **WHOLE))
    assert first_started(site) == "quick"
    assert site.store.estimates() == {slow: pytest.approx(500.0)}  # of those that wait
    (job,) = site.store.pending()
    assert job.id == slow
    assert quick not in site.store.estimates()


def test_without_a_predictor_it_goes_by_the_users_last_two_as_replays_do_and_says_so_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    first = site.submit(spec=spec(name="new", time_limit_s=400, hold=True))
    site.turn()
    (job,) = site.store.pending()
    site.store.put_jobs([past("a", seconds, user=job.user) for seconds in (500.0, 20.0)])
    long, brief = (site.submit(spec=spec(name="new", time_limit_s=limit, hold=True)) for limit in (600, 100))
    site.turn()
    (line,) = [text for text in messages(caplog) if "sjf-estimate" in text]
    assert line.endswith("train it: gpusched predict --train")
    assert site.store.estimates() == {first: 400.0, long: 260.0, brief: 100.0}
    (site.state / USUAL_NAME).write_bytes(b"torn")
    site.submit(spec=spec(name="new", hold=True))
    site.turn(2)
    assert "cannot be read" in messages(caplog)[-1]


def test_what_was_said_stays_when_the_predictor_is_trained_anew(site: Site) -> None:
    usual().save(site.state / USUAL_NAME)
    job = site.submit(spec=spec(name="new", hold=True))
    site.turn()
    before = site.store.estimates()[job]
    usual(times=2.0).save(site.state / USUAL_NAME)
    later = site.submit(spec=spec(name="new too", hold=True))
    site.turn()
    assert site.store.estimates()[job] == before
    assert site.store.estimates()[later] == pytest.approx(2 * before)


def test_other_policies_ask_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.store.put_jobs([waits("new", BEGIN + 2)])
    EstimateWriter(site.store, site.state).run([PolicySpec(name="easy")])
    assert messages(caplog) == []
    EstimateWriter(site.store, site.state).run([PolicySpec(name="a", agent="rltune", fallback=POLICY)])
    assert len(messages(caplog)) == 1


def test_only_what_ended_before_the_submission_counts() -> None:
    ended = [past("a", 100.0), past("a", 4000.0, BEGIN + 10)]
    early, late = waits("a", BEGIN + 200), waits("a", BEGIN + 5000)
    by_id = {e.job_id: e.seconds for e in estimate_jobs(usual(), ended, [late, early])}
    assert by_id[early.id] == pytest.approx(100.0)
    assert by_id[late.id] == pytest.approx(np.exp(0.7 * np.log(100.0) + 0.3 * np.log(4000.0)))


def test_never_more_than_the_limit() -> None:
    job = waits("a", BEGIN + 5000, limit=60)
    assert estimate_jobs(usual(), [past("a", 4000.0)], [job]) == [Estimate(job.id, 60.0, "")]
    assert estimate_jobs(usual(30.0), [], [job]) == [Estimate(job.id, pytest.approx(30.0), "")]
