"""Clocks that are set, on the login node and on the nodes: no duration may be bent by it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.model.health import Condition, NodeHealth
from gpusched.model.jobs import Ending, JobState, Preemptions, Resizes, ResizeTo
from gpusched.model.notices import Notice
from gpusched.model.readings import NodeReading
from gpusched.model.slices import Cut
from gpusched.queue.clock import ANCHOR, Clock, follow_wall_clock, now_by, shift_times
from gpusched.queue.store import CutState, NodeRecord, RankRecord, RunRecord, Store
from tests.controller.clock_site import LIMIT_S, clock_site

GIVEN_UP_S, BACK_OFF_S, PULL_S = 60, 10, 7
YEAR_S = 365 * 86400.0


CYCLES = st.lists(
    st.tuples(
        st.floats(0.5, 9.0),  # seconds to the next cycle
        st.sampled_from([0.0, 0.0, 0.0, 900.0, -900.0, YEAR_S, -86400.0]),  # by how much the wall clock is set
        st.sampled_from([0.0, 0.0, 900.0, -900.0]),  # and the node's
        st.sampled_from([False, False, False, True]),  # the controller is started again
    ),
    min_size=8,
    max_size=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cycles=CYCLES, fate=st.sampled_from(["limit", "silent", "vanished"]), reports_run_time=st.booleans())
def test_no_setting_of_a_clock_ends_a_job_early_or_keeps_one_waiting(
    cycles: list[tuple[float, float, float, bool]], fate: str, reports_run_time: bool
) -> None:
    with clock_site() as site:
        job = site.submit()
        site.turn()
        site.world.now += PULL_S
        for host in site.world.hosts.values():
            host.reports_run_time = reports_run_time
        site.world.progress()
        site.turn()
        ((host, box),) = site.world.running()
        assert site.job(job).state is JobState.RUNNING
        allowed, since = float(LIMIT_S), box.began
        if fate != "limit":
            since = site.world.now
            allowed = GIVEN_UP_S if fate == "silent" else 0.0
            host.up = fate != "silent"
            if fate == "vanished":
                host.boxes.clear()
        slack = 0.0
        for number in range(1000):
            seconds, wall, node, again = cycles[number % len(cycles)]
            site.ahead += wall
            host.ahead += node if reports_run_time else 0.0  # else the node's own clock counts
            if again:
                site.restart()
            site.turn(seconds)
            slack = max(slack, seconds + 1)
            if site.job(job).state is not JobState.RUNNING:
                break
        took = site.world.now - since
        assert allowed <= took <= allowed + 2 * slack, (fate, took)
        assert abs(site.clock() - site.wall()) < 2.1, "dates follow the wall clock"
        if fate == "limit":
            assert site.job(job).reason == "TimeLimit"
            return
        since, slack = site.world.now, max(seconds for seconds, *_ in cycles) + 1
        assert site.job(job).state is JobState.PENDING
        while len(site.world.starts) < 2:
            seconds, wall, _, again = cycles[int(site.world.now) % len(cycles)]
            site.ahead += wall
            site.restart() if again else None
            site.turn(seconds)
            site.world.progress()
            assert site.world.now - since < BACK_OFF_S + 4 * slack, "a retry waits for its back-off only"
        assert site.world.now - since >= BACK_OFF_S


def test_all_that_is_still_counted_moves_with_the_clock_and_nothing_else(tmp_path: Path) -> None:
    now, step = 1_800_000_000.0, 900.0
    store = Store.create_or_open(tmp_path)
    with clock_site() as site:
        for _ in range(4):
            site.submit()
        site.turn()
        plain = sorted(site.store.jobs(), key=lambda j: j.id)
    stops = Preemptions(count=1, times=(now - 50,))
    resize = ResizeTo(gpus=1, asked_at=now - 20)
    ending = Ending(outcome=JobState.CANCELLED, reason="", kill_at=now + 30, preemptions=stops, resize=resize)
    resizes = Resizes(count=1, times=(now - 70,))
    dated = msgspec.structs.replace(plain[1].spec, begin_time=now + 7200)
    jobs = [
        msgspec.structs.replace(
            plain[0], state=JobState.PENDING, eligible_time=now + 10, preemptions=stops, resizes=resizes
        ),
        msgspec.structs.replace(plain[1], spec=dated, state=JobState.PENDING, eligible_time=now + 7200),
        msgspec.structs.replace(plain[2], state=JobState.COMPLETING, start_time=now - 60, ending=ending),
        msgspec.structs.replace(plain[3], state=JobState.FAILED, start_time=now - 9000, end_time=now - 7200),
    ]
    store.put_jobs(jobs)
    rank = RankRecord(job_id="a", attempt=1, rank=0, node="n0", runtime="podman", intended_at=now - 9, tried_at=now - 3)
    store.put_ranks([rank])
    reading = NodeReading(node="n0", time=now - 1, clock_skew_s=0.5)
    cut = CutState(cut=Cut("n0", 0), began=now - 90, ended=now - 80, retry_at=now + 60)
    condition = Condition(kind="ecc", gpu="u", since=now - 30, last_seen=now - 1, detail="x")
    health = NodeHealth(conditions=(condition,), suspected=(condition,))
    store.put_nodes(
        [NodeRecord(name="n0", last_seen=now - 1, down_since=now - 40, reading=reading, cuts={0: cut}, health=health)]
    )
    run = RunRecord(
        job_id="a", attempt=1, user="u", partition="p", flavor=None, share=0.0, gpus=1, start_time=now - 60,
        end_time=None, outcome=None, nodes={},
    )  # fmt: skip
    store.open_run(run)
    store.set_meta("heartbeat", str(now - 1))
    notice = Notice(key="k", to="m", body={}, made=now - 8, due=now + 300)
    store.add_notices([notice, msgspec.structs.replace(notice, key="sent", due=None)])
    store.mark_applied("a.cancel", now)
    shift_times(store, step, now)
    waits, dated_job, ends, ended = (store.job(j.id) for j in jobs)
    assert waits is not None
    assert (waits.eligible_time, waits.submit_time) == (now + 10 + step, jobs[0].submit_time + step)
    assert waits.preemptions is not None
    assert waits.preemptions.times == (now - 50 + step,)
    assert dated_job is not None
    assert dated_job.eligible_time == now + 7200, "a date that a user gave"
    assert ends is not None
    assert ends.ending is not None
    assert (ends.start_time, ends.ending.kill_at) == (now - 60 + step, now + 30 + step)
    assert ends.ending.preemptions == waits.preemptions
    assert waits.resizes is not None
    assert waits.resizes.times == (now - 70 + step,)
    assert ends.ending.resize is not None
    assert ends.ending.resize.asked_at == now - 20 + step
    assert ended == jobs[3]
    assert [(r.intended_at, r.tried_at) for r in store.ranks()] == [(now - 9 + step, now - 3 + step)]
    record = store.node_records()["n0"]
    assert (record.last_seen, record.down_since) == (now - 1 + step, now - 40 + step)
    moved = record.cuts[0]
    assert (moved.began, moved.ended, moved.retry_at) == (now - 90 + step, now - 80 + step, now + 60 + step)
    for conditions in (record.health.conditions, record.health.suspected):
        assert [(c.since, c.last_seen) for c in conditions] == [(now - 30 + step, now - 1 + step)]
    assert record.reading is not None
    assert (record.reading.time, record.reading.clock_skew_s) == (now - 1 + step, 0.5 - step)
    assert [r.start_time for r in store.runs(0, now * 2)] == [now - 60 + step]
    assert store.meta("heartbeat") == str(now - 1 + step)
    assert store.due_notices(now + 299 + step, 9) == []
    assert store.due_notices(now + 300 + step, 9) == [
        msgspec.structs.replace(notice, made=now - 8 + step, due=now + 300 + step)
    ]
    store.forget_applied(now + step)
    assert store.was_applied("a.cancel"), "its file may still be there"
    store.close()


@pytest.mark.parametrize(("wall", "expected"), [(5000.0, 5000.0), (3000.0, 4000.0)])
def test_after_a_reboot_it_is_never_earlier_than_the_last_sign_of_life(wall: float, expected: float) -> None:
    before = Clock(lambda: 4000.0, lambda: 100.0, "before")
    clock = Clock(lambda: wall, lambda: 3.0, "now")
    clock.resume(before.anchor(), heartbeat=4000.0)
    assert clock() == expected
    assert clock.stepped() == wall - expected, "and follows a clock that lost its time"


def test_a_small_clock_difference_is_ignored_and_slow_drift_is_followed() -> None:
    ahead = [0.0]
    clock = Clock(lambda: 4000.0 + ahead[0], lambda: 0.0, "x")
    for ahead[0] in (0.5, 1.0, 1.5):
        assert clock.stepped() == 0.0
    ahead[0] = -2.5
    assert clock.stepped() == -2.5
    clock.follow(-2.5)
    assert (clock.stepped(), clock()) == (0.0, 3997.5)


def test_a_step_of_the_wall_clock_is_logged_with_the_new_time(tmp_path: Path) -> None:
    store, ahead = Store.create_or_open(tmp_path), [0.0]
    clock = Clock(lambda: 4000.0 + ahead[0], lambda: 100.0, "x")
    assert follow_wall_clock(store, clock) == 0.0
    assert (store.events(), store.meta(ANCHOR)) == ([], None)
    ahead[0] = -899.99951
    assert follow_wall_clock(store, clock) == pytest.approx(-899.99951, abs=1e-6)
    (event,) = store.events()
    assert (event.kind, event.data) == ("clock_stepped", {"seconds": -900.0})
    assert event.time == clock() == pytest.approx(3100.00049, abs=1e-6)
    assert store.meta(ANCHOR) == clock.anchor()
    store.close()


def test_commands_read_the_controllers_clock_where_it_runs_on_this_boot() -> None:
    clock = Clock(wall=lambda: 1000.0)
    assert now_by(clock.anchor()) == pytest.approx(1000.0, abs=600)
    assert now_by(Clock(this_boot="another").anchor()) == pytest.approx(now_by(None), abs=600)
    assert now_by("nonsense") > 1e9
