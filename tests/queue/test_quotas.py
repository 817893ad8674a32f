"""Counts against limits: from the store, and from the jobs that hold something."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpusched.config.policies import PolicySpec
from gpusched.errors import UsageError
from gpusched.model.jobs import Allocation, Ending, JobRecord, JobState, NodeAllocation
from gpusched.model.limits import WEEK_S, Bound, Group, Groups, Limits, Qos, Quotas
from gpusched.queue.quotas import PendingJobLimits, QuotaLedger, QuotaUsage, recent_quota_usage
from gpusched.queue.snapshots import recent_usage, snapshot_of_store, usage_by_leaf
from gpusched.queue.store import RunRecord, Store
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.imagined import inventory

HOUR = 3600.0
GROUPS = Groups(
    groups=(
        Group(name="top", limits=Limits(jobs=9)),
        Group(name="a", parent="top", members={"ann": 1, "bob": 1}, limits=Limits(gpus=8)),
        Group(name="b", members={"ann": 1}),
    )
)
QUOTAS = Quotas(
    each=Limits(gpus=4, jobs=5, gpu_hours=100, queued=3),
    users={"bob": Limits(queued=1)},
    groups=GROUPS,
    qos=(Qos(name="high", per_user=Limits(gpus=1), limits=Limits(jobs=2)), Qos(name="spare", exempt=True)),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path)
    yield store
    store.close()


def active(name: str, gpus: int, user: str = "ann", **more: Any) -> JobRecord:
    part = NodeAllocation(rank=0, node="n0", gpus=tuple(range(gpus)), cores=1, memory_mib=1)
    asked = {key: more.pop(key) for key in ("group", "qos", "time_limit_s") if key in more}
    fields = {"state": JobState.RUNNING, "start_time": NOW, "submit_time": NOW - 1e6} | more
    return JobRecord(
        id=name,
        user=user,
        uid=1,
        spec=spec(gpus_per_node=gpus, **asked),
        allocation=Allocation(name, (part,)),
        **fields,
    )


def counted(ledger: QuotaLedger) -> dict[tuple[str, str], Bound]:
    return {(bound.rule.subject, bound.rule.unit): bound for bound in ledger.bounds()}


def run(name: str, user: str, start: float, gpus: int = 1, group: str = "", qos: str = "") -> RunRecord:
    return RunRecord(
        job_id=name, attempt=1, user=user, partition="p", flavor=None, share=0.1, gpus=gpus, start_time=start,
        end_time=None, outcome=None, nodes={"n0": gpus}, group=group, qos=qos,
    )  # fmt: skip


def entered(store: Store, *runs: tuple[RunRecord, float | None]) -> None:
    with store.transaction():
        for one, end in runs:
            store.open_run(one)
            if end is not None:
                store.close_run(one.job_id, 1, end, JobState.COMPLETED)


def test_a_job_counts_for_its_user_its_groups_upwards_and_its_class() -> None:
    jobs = [active("1", 2), active("2", 1, qos="high"), active("3", 2, group="b"), active("4", 3, qos="spare")]
    found = {key: bound.used for key, bound in counted(QuotaLedger(QUOTAS, jobs, (), NOW)).items()}
    assert found == {
        ("user ann", "gpus"): 5, ("user ann", "jobs"): 3, ("user ann", "gpu_s"): 5 * 600,
        ("group a", "gpus"): 3, ("group top", "jobs"): 2,
        ("user ann in class high", "gpus"): 1, ("class high", "jobs"): 1,
    }  # fmt: skip


def test_usage_leaves_the_week_with_the_end_of_its_three_hours(store: Store) -> None:
    now = 1_000 * 3 * HOUR + 2 * HOUR
    for name, ago in (("ann", 4.5 * HOUR), ("bob", 1.5 * HOUR)):
        entered(store, (run(name, name, now - ago - 1.5 * HOUR), now - ago))
    until = {(of.user, of.until, of.gpu_s) for of in store.gpu_seconds_of_week(now)}
    assert until == {("ann", 1_000 * 3 * HOUR, 1.5 * HOUR), ("bob", 1_001 * 3 * HOUR, 1.5 * HOUR)}


def test_gpu_seconds_are_those_of_the_week_and_those_that_running_jobs_may_use() -> None:
    half = active("half", 2, start_time=NOW - 1800, time_limit_s=3600)
    begins = active("begins", 1, start_time=None, state=JobState.STARTING, time_limit_s=3600)
    ends = active(
        "ends", 4, start_time=NOW - 10, ending=Ending(outcome=JobState.CANCELLED, reason="r", kill_at=NOW + 30)
    )
    used = [QuotaUsage("ann", "", "", NOW - 50 * HOUR, 7200.0), QuotaUsage("ann", "", "spare", NOW, 1e9)]
    bound = counted(QuotaLedger(QUOTAS, [half, begins, ends], used, NOW))["user ann", "gpu_s"]
    assert bound.used == 2 * 1800 + 3600 + 4 * 30 + 7200, (
        "one that has not begun has waited long, and has all before it"
    )
    assert bound.frees == ((NOW - 50 * HOUR + WEEK_S, 7200),)


def test_the_store_sums_what_was_used_in_seven_days(store: Store) -> None:
    since = NOW - WEEK_S
    entered(
        store,
        (run("over", "ann", since - 5 * HOUR, gpus=2, group="a"), since + 2 * HOUR),
        (run("in", "ann", NOW - 9 * HOUR, gpus=4, group="b", qos="high"), NOW - 8 * HOUR),
        (run("just", "ann", NOW - 9 * HOUR, gpus=1, group="b", qos="high"), NOW - 1),
        (run("now", "bob", NOW - HOUR, gpus=3), None),
        (run("before", "bob", since - 5 * HOUR), since - 4 * HOUR),
    )
    found: dict[tuple[str, str, str], list[QuotaUsage]] = {}
    for used in store.gpu_seconds_of_week(NOW):
        found.setdefault((used.user, used.group, used.qos), []).append(used)
    sums = {key: sum(one.gpu_s for one in some) / HOUR for key, some in found.items()}
    assert 4 <= sums.pop(("ann", "a", "")) <= 6, "to the hour: no less than it was"
    assert sums == {("ann", "b", "high"): pytest.approx(13, abs=0.01), ("bob", "", ""): pytest.approx(3)}
    until = min(one.until for one in found["ann", "b", "high"])
    assert NOW - 8 * HOUR <= until <= NOW - 5 * HOUR, "it leaves no sooner than it may"
    later = store.gpu_seconds_of_week(NOW + WEEK_S - 9 * HOUR)
    assert not [one for one in later if one.group == "a"]
    assert recent_quota_usage(store, Quotas(each=Limits(gpus=1)), NOW) == [], "nobody asks where no limit does"


def test_a_replay_begins_with_the_attempts_of_the_week_before_it(store: Store) -> None:
    """And of an hour more: in sums of whole hours they still count."""
    since = NOW - WEEK_S - HOUR
    entered(
        store,
        (run("long", "ann", since - 9, gpus=2, group="a", qos="high"), since + 1),
        (run("over", "ann", since - 9), since),
        (run("open", "bob", NOW - 5, gpus=3), None),
        (run("past", "bob", NOW - 4), NOW + 50),
        (run("later", "bob", NOW), None),
    )
    assert sorted(store.runs_of_week(NOW)) == [
        ("ann", "a", "high", 2, since - 9, since + 1),
        ("bob", "", "", 1, NOW - 4, NOW),
        ("bob", "", "", 3, NOW - 5, NOW),
    ]


def test_sums_that_are_kept_for_an_hour_miss_nothing(store: Store) -> None:
    now = NOW + HOUR / 2

    def total() -> float:
        return sum(one.gpu_s for one in store.gpu_seconds_of_week(now)) / HOUR

    entered(store, (run("open", "ann", now - 10 * HOUR), None))
    assert total() == pytest.approx(10)
    entered(store, (run("more", "ann", now - HOUR), now))
    assert total() == pytest.approx(11)
    with store.transaction():
        store.close_run("open", 1, now - 5 * HOUR, JobState.NODE_FAIL)
    assert total() == pytest.approx(6), "that it had ended long ago was known late"


def test_what_ended_before_the_hour_is_summed_once_in_it_and_what_is_recent_to_the_second(store: Store) -> None:
    since = NOW - WEEK_S
    entered(
        store,
        (run("over", "ann", since - 5 * HOUR, gpus=2), since + 2 * HOUR),
        (run("open", "bob", since - 5 * HOUR), None),
        (run("late", "cal", since - 5 * HOUR), NOW + 600),
    )
    asked = list[str]()
    store._db.set_trace_callback(asked.append)

    def used(now: float) -> dict[str, float]:
        return {one.user: one.gpu_s for one in store.gpu_seconds_of_week(now)}

    within = {"ann": 4 * HOUR, "bob": WEEK_S, "cal": WEEK_S - 1199}
    assert used(NOW + 1799) == within, "of what ended before, up to an hour more"
    all_sums = len(asked)
    assert used(NOW + 1799) == within
    assert all_sums < len(asked) < 2 * all_sums
    assert used(NOW + HOUR) == {"ann": 2 * HOUR, "bob": WEEK_S, "cal": WEEK_S - 3000}
    assert used(NOW + 1799) == within, "the clock was set back"


@pytest.mark.parametrize("half_lives", [1, 8, 12, 20])
def test_recent_use_is_what_it_was_and_what_came_since_however_old(store: Store, half_lives: int) -> None:
    """A replay begins with the usage of then and lets it decay, so live nothing of it may be forgotten, either."""
    half_life = 2 * HOUR
    begin, asked = NOW - 3 * HOUR, inventory()
    asked = replace(asked, settings=replace(asked.settings, fairshare_half_life_s=int(half_life)))
    old = begin - half_lives * half_life
    entered(
        store, (run("old", "ann", old - HOUR), old), (run("new", "ann", begin - HOUR), NOW - HOUR),
        (run("bobs", "bob", begin - 9 * HOUR, gpus=3), None),
    )  # fmt: skip
    then, now = usage_by_leaf(store, asked, begin), usage_by_leaf(store, asked, NOW)
    kept, rate = 0.5 ** (3 * HOUR / half_life), math.log(2) / half_life
    new = {"ann": (0.5 ** (HOUR / half_life) - kept) / rate, "bob": 3 * (1 - kept) / rate}
    assert now == {user: pytest.approx(then[user] * kept + new[user] / HOUR, rel=1e-8) for user in then}
    assert now == pytest.approx(usage_by_leaf(store, asked, NOW)), "what is kept of ended attempts adds up to the same"
    with store.transaction():
        store.close_run("bobs", 1, NOW - 2 * HOUR, JobState.NODE_FAIL)
    assert usage_by_leaf(store, asked, NOW)["bob"] < now["bob"], "that it had ended was known late"


def test_the_snapshot_has_it_and_fair_share_goes_by_groups(store: Store) -> None:
    entered(store, (run("x", "ann", NOW - HOUR, gpus=2, group="b"), NOW), (run("y", "ann", NOW - HOUR), NOW))
    waits = JobRecord(id="w", user="ann", uid=1, spec=spec(group="b"), state=JobState.PENDING, submit_time=NOW)
    with store.transaction():
        store.put_jobs([waits, active("r", 2)])
    asked = replace(inventory(), quotas=QUOTAS)
    fair = {"p": PolicySpec(name="f", order="fairshare")}
    snap = snapshot_of_store(store, asked, fair, NOW)
    (job,) = snap.pending
    assert (job.group, [snap.bounds[at].rule.subject for at in job.bounds]) == ("b", ["user ann"] * 3)
    assert [snap.bounds[at].room for at in job.bounds] == [2, 4, 360_000 - 3 * 3600 - 2 * 600]
    assert {leaf: round(hours, 1) for leaf, hours in snap.usage.items()} == {"b/ann": 2.0, "a/ann": 1.0}
    assert recent_usage(store, inventory(), fair, NOW).keys() == {"ann"}


def test_waiting_jobs_are_counted_by_all_their_limits(store: Store) -> None:
    waits = JobRecord(id="w", user="bob", uid=1, spec=spec(group="a"), state=JobState.PENDING, submit_time=NOW)
    tasks = replace(waits, id="t_[0-1]", user="ann", array_id="t", tasks=((0, 1),))
    with store.transaction():
        store.put_jobs([waits, tasks, replace(waits, id="old", state=JobState.COMPLETED)])
    assert store.waiting_by_class() == {("bob", "a", ""): 1, ("ann", "a", ""): 2}
    queued = PendingJobLimits(store, QUOTAS)
    queued.check("ann", spec(), 1)
    with pytest.raises(UsageError, match=r"limit of user bob: 1 of 1 pending job; 1 more exceed it \(AssocMax"):
        queued.check("bob", spec(), 1)
    queued.add("ann", spec(), 1)
    with pytest.raises(UsageError, match="limit of user ann: 3 of 3 pending jobs"):
        queued.check("ann", spec(), 1)
    queued.check("ann", spec(qos="spare"), 9)
