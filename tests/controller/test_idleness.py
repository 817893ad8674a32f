"""Jobs that hold idle GPUs: what is measured counts, what is unknown never does, and each action is done once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from gpusched.accounting.usage import own_utilization
from gpusched.cluster.base import NodeObservation
from gpusched.controller.idleness import is_all_idle, judge_idle, signal_of_idle
from gpusched.model.idle import IdleAction, IdleExempt, IdleRule, IdleRules, IdleState
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.readings import Gpu, GpuProcess
from gpusched.model.resources import Inventory
from gpusched.queue.clock import shift_times
from gpusched.queue.store import NodeRecord
from tests.builders import job as record
from tests.builders import spec
from tests.controller.clock_site import ClockSite, clock_site
from tests.controller.imagined import GPUS, Host, inventory, reading_of

AFTER_S, WARN_S = 200, 60
TICK_S = 5.0


def declared(then: str = "cancel", **changes: Any) -> Inventory:
    rule = IdleRule(after_s=AFTER_S, then=then, warn_before_s=0 if then == "warn" else WARN_S)  # type: ignore[arg-type]
    whole = inventory()
    rules = IdleRules(**{"jobs": rule} | changes)
    return msgspec.structs.replace(whole, partitions=(msgspec.structs.replace(whole.partitions[0], idle=rules),))


@contextmanager
def running(whole: Inventory, use: float | None = 0.0, **changes: Any) -> Iterator[tuple[ClockSite, str]]:
    """A job that runs on one node whose GPUs are used so much."""
    with clock_site(whole) as site:
        job = site.submit(**{"time_limit_s": 3600} | changes)
        for _ in range(4):
            site.turn()
            site.world.progress()
        assert site.job(job).state is JobState.RUNNING
        for host in site.world.hosts.values():
            host.use = use
        yield site, job


def host_of(site: ClockSite, job: str) -> Host:
    allocation = site.job(job).allocation
    assert allocation is not None
    return site.world.hosts[allocation.parts[0].node]


def pass_time(site: ClockSite, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        site.turn(TICK_S)


def happened(site: ClockSite, job: str) -> list[str]:
    kinds = ("idle_warned", "idle_acted", "idle_ended", "signalled", "preempted")
    return [event.kind for event in site.store.events(job_id=job) if event.kind in kinds]


def test_a_warning_comes_first_then_the_job_is_cancelled() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S - WARN_S - 2 * TICK_S)
        assert happened(site, job) == []
        pass_time(site, 3 * TICK_S)
        assert happened(site, job) == ["idle_warned"]
        found = site.job(job).idle
        assert found is not None
        assert found.at == pytest.approx(found.since + AFTER_S, abs=2 * TICK_S)
        pass_time(site, WARN_S - 4 * TICK_S)
        assert site.job(job).state is JobState.RUNNING, "not before it was said"
        pass_time(site, 6 * TICK_S)
        assert happened(site, job) == ["idle_warned", "idle_acted", "signalled"]
        ended = site.job(job)
        assert (ended.state, ended.reason) == (JobState.CANCELLED, "IdleLimit")
        assert "its GPU has been below 5% utilization for 0:03:2" in ended.message
        (warned,) = (e for e in site.store.events(job_id=job) if e.kind == "idle_warned")
        assert "unless used, it is cancelled in 0:01:00" in warned.data["message"]


def test_a_warning_alone_ends_nothing_and_is_not_repeated() -> None:
    with running(declared("warn")) as (site, job):
        pass_time(site, AFTER_S - 2 * TICK_S)
        assert happened(site, job) == []
        pass_time(site, 3 * AFTER_S)
        assert happened(site, job) == ["idle_warned"]
        assert site.job(job).state is JobState.RUNNING


def test_a_requeue_counts_as_a_preemption_and_keeps_the_work_of_a_job_that_saves() -> None:
    for saves in (True, False):
        with running(declared("requeue"), preemptible=saves) as (site, job):
            pass_time(site, AFTER_S + 4 * TICK_S)
            assert happened(site, job) == ["idle_warned", "idle_acted", "preempted", "signalled"]
            again = site.job(job)
            assert again.preemptions is not None
            assert (again.preemptions.count, again.retries, again.preemptions.policy) == (1, 0, "idle")
            assert (again.preemptions.kept_s >= AFTER_S) is saves
            assert again.attempt == 2, "it starts again as soon as it fits"
            assert again.idle is None
            outcomes = [run.outcome for run in site.store.runs(0, site.clock() * 2)]
            assert outcomes[0] == "PREEMPTED"


def test_a_job_that_must_not_be_requeued_is_cancelled() -> None:
    with running(declared("requeue"), requeue=False) as (site, job):
        pass_time(site, AFTER_S + 4 * TICK_S)
        assert site.job(job).state is JobState.CANCELLED


def test_a_signal_is_sent_once_and_again_only_after_work() -> None:
    with running(declared("signal")) as (site, job):
        ((_, box),) = site.world.running()
        box.survives = ("USR1",)
        pass_time(site, 4 * AFTER_S)
        assert site.world.signals == ["USR1"]
        assert happened(site, job) == ["idle_warned", "idle_acted", "signalled"]
        host_of(site, job).use = 80.0
        pass_time(site, 2 * TICK_S)
        host_of(site, job).use = 0.0
        pass_time(site, AFTER_S + 4 * TICK_S)
        assert site.world.signals == ["USR1", "USR1"]
        assert site.job(job).state is JobState.RUNNING
        box.survives = ()
        job_record = site.job(job)
        assert signal_of_idle(job_record.spec) == "USR1"
        assert signal_of_idle(spec(signal="INT", signal_before_s=60)) == "INT"


def test_a_signal_that_a_crash_swallowed_is_sent_after_it() -> None:
    with running(declared("signal")) as (site, job):
        ((_, box),) = site.world.running()
        box.survives = ("USR1",)
        while "idle_acted" not in happened(site, job):
            site.turn(TICK_S)
        site.cluster.crash(late=False)  # decided and recorded, and not sent
        site.restart()
        pass_time(site, AFTER_S)
        assert site.world.signals == ["USR1"]


def test_work_resets_the_time() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S - WARN_S / 2)
        assert happened(site, job) == ["idle_warned"]
        host_of(site, job).use = 30.0
        site.turn(TICK_S)
        host_of(site, job).use = 0.0
        assert happened(site, job) == ["idle_warned", "idle_ended"]
        assert site.job(job).idle is None
        pass_time(site, AFTER_S - WARN_S - 3 * TICK_S)
        assert happened(site, job) == ["idle_warned", "idle_ended"]
        pass_time(site, 5 * TICK_S)
        assert happened(site, job)[-1] == "idle_warned"


def test_without_measurements_no_job_is_idle() -> None:
    with running(declared(), use=None) as (site, job):
        pass_time(site, 2 * AFTER_S)
        assert site.job(job).idle is None
        host_of(site, job).use = 0.0
        pass_time(site, AFTER_S / 2)
        assert site.job(job).idle is not None
        host_of(site, job).use = None
        pass_time(site, 2 * TICK_S)
        assert site.job(job).idle is None, "unknown is not idle"


def test_all_gpus_have_to_be_idle() -> None:
    with running(declared(), gpus_per_node=2) as (site, job):
        allocation = site.job(job).allocation
        assert allocation is not None
        one = allocation.parts[0].gpus[1]
        for use in (6.0, None):
            host_of(site, job).own_use = {one: use}
            pass_time(site, 2 * AFTER_S)
            assert happened(site, job) == []
        host_of(site, job).own_use = {one: 4.0}
        pass_time(site, AFTER_S)
        assert happened(site, job) == ["idle_warned"]


def test_all_nodes_have_to_be_idle() -> None:
    with running(declared(), nodes=2, gpus_per_node=GPUS) as (site, job):
        allocation = site.job(job).allocation
        assert allocation is not None
        second = site.world.hosts[allocation.parts[1].node]
        second.use = 50.0
        pass_time(site, 2 * AFTER_S)
        assert happened(site, job) == []
        second.use = 0.0
        pass_time(site, AFTER_S + 4 * TICK_S)
        assert site.job(job).reason == "IdleLimit"


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize(("gap_s", "goes_on"), [(10.0, True), (30.0, False)])
def test_a_gap_of_more_than_some_ticks_begins_the_time_anew(gap_s: float, goes_on: bool, silent: bool) -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S / 2)
        before = site.job(job).idle
        assert before is not None
        if silent:
            host_of(site, job).up = False
            site.turn(TICK_S)
            gap_s -= TICK_S
            site.turn(gap_s - TICK_S)
            host_of(site, job).up = True
            site.turn(TICK_S)
        else:  # no cycle at all, as without a controller
            site.turn(gap_s)
        site.turn(TICK_S)
        after = site.job(job).idle
        assert after is not None
        assert (after.since == before.since) is goes_on


def test_a_node_that_stays_silent_is_not_idle() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S - WARN_S / 2)
        assert happened(site, job) == ["idle_warned"]
        host_of(site, job).up = False
        pass_time(site, 6 * TICK_S)
        assert happened(site, job) == ["idle_warned", "idle_ended"]


def test_a_restart_in_the_middle_loses_nothing() -> None:
    with running(declared()) as (site, job):
        for _ in range(7):
            pass_time(site, (AFTER_S - WARN_S) / 7)
            site.restart()
        pass_time(site, 2 * TICK_S)
        assert happened(site, job) == ["idle_warned"]
        site.restart()
        pass_time(site, WARN_S + 3 * TICK_S)
        assert happened(site, job)[:2] == ["idle_warned", "idle_acted"]
        assert site.job(job).state is JobState.CANCELLED


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_step_of_an_hour_makes_no_job_idle(step: float) -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S / 2)
        site.ahead += step
        pass_time(site, AFTER_S / 2 - WARN_S - 2 * TICK_S)
        assert happened(site, job) == []
        pass_time(site, 3 * TICK_S)
        assert happened(site, job) == ["idle_warned"]
        found = site.job(job).idle
        site.ahead += step
        pass_time(site, WARN_S / 2)
        moved = site.job(job).idle
        assert found is not None
        assert moved is not None
        assert found.at is not None
        assert moved.at == pytest.approx(found.at + step)
        assert site.job(job).state is JobState.RUNNING
        pass_time(site, WARN_S / 2 + 3 * TICK_S)
        assert site.job(job).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("exempt", "applies"),
    [
        (IdleExempt(names=("notebook-*",)), False),
        (IdleExempt(names=("note",)), True),
        (IdleExempt(groups=("physics",)), False),
        (IdleExempt(groups=("chemistry",)), True),
        (IdleExempt(users=("alice",)), False),
        (IdleExempt(users=("ali",)), True),
        (IdleExempt(partitions=("p",)), False),
        (IdleExempt(partitions=("q",)), True),
    ],
)
def test_exempt(exempt: IdleExempt, applies: bool) -> None:
    rules = IdleRules(jobs=IdleRule(after_s=AFTER_S), exempt=exempt)
    assert rules.is_exempt(user="alice", group="physics", name="notebook-1", partition="p") is not applies
    assert not rules.is_exempt(user="bob", group="", name="x", partition="r")


def test_sessions_have_a_rule_of_their_own() -> None:
    rules = {"jobs": None, "sessions": IdleRule(after_s=AFTER_S, then="cancel", warn_before_s=WARN_S)}
    with running(declared(**rules)) as (site, job):
        pass_time(site, 2 * AFTER_S)
        assert site.job(job).idle is None, "a batch job"
        session = msgspec.structs.replace(site.job(job), spec=spec(session=9000, time_limit_s=3600))
        site.store.put_jobs([session])
        pass_time(site, AFTER_S)
        assert "idle_warned" in happened(site, job)


def test_a_rule_that_becomes_stricter_warns_first_all_the_same() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S / 2)
        short = IdleRule(after_s=60, then="cancel", warn_before_s=50)
        site.cycle.inventory = declared(jobs=short)
        pass_time(site, 40)
        (warned,) = (e for e in site.store.events(job_id=job) if e.kind == "idle_warned")
        assert "it is cancelled in 0:00:50" in warned.data["message"], "although the time is over"
        assert happened(site, job) == ["idle_warned"]
        pass_time(site, 50)
        assert site.job(job).state is JobState.CANCELLED


def test_a_rule_that_is_taken_away_leaves_nothing() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S / 2)
        site.cycle.inventory = inventory()
        site.turn(TICK_S)
        assert site.job(job).idle is None


class Shared:
    """Two jobs on one GPU, read twice."""

    def __init__(self, use: float, own: dict[str, float | None]) -> None:
        pair = [spec(share="pairs", gpu_memory_mib=1, name=name) for name in own]
        self.jobs = [
            record(name, JobState.RUNNING, {"n0": (0,)}, spec=asked) for name, asked in zip(own, pair, strict=True)
        ]
        processes = tuple(
            GpuProcess(pid=pid, container=container_name(name, 1, 0), utilization_pct=part)
            for pid, (name, part) in enumerate(own.items())
        )
        self.host = Host("n0", use=use, processes=processes)

    def idle(self, jobs: list[JobRecord] | None = None) -> list[str]:
        before = {"n0": NodeRecord(name="n0", reading=reading_of(self.host, 100.0))}
        news = {"n0": NodeObservation(began=104.0, result=reading_of(self.host, 105.0))}
        found = judge_idle(self.jobs if jobs is None else jobs, before, news, declared(), 105.0)
        return [job.id for job in found.changed if job.idle is not None]


def test_of_two_jobs_on_a_gpu_each_is_judged_by_its_processes_where_they_are_known() -> None:
    assert Shared(2.0, {"a": None, "b": None}).idle() == ["a", "b"], "neither can use more than the GPU is used"
    assert Shared(90.0, {"a": 1.0, "b": 89.0}).idle() == ["a"]
    assert Shared(90.0, {"a": None, "b": 89.0}).idle() == [], "a's part is not known"
    assert Shared(90.0, {"a": 90.0}).idle() == []
    alone = Shared(90.0, {"a": 1.0, "b": 89.0})
    assert alone.idle(alone.jobs[:1]) == [], "on a GPU of its own all use is its own"


def test_the_part_of_a_job_that_was_alone_on_a_gpu_is_all() -> None:
    def process(name: str, use: float | None) -> GpuProcess:
        return GpuProcess(pid=1, container=container_name(name, 1, 0), utilization_pct=use)

    alone = Gpu(index=0, utilization_pct=4.0, processes=(process("a", None),))
    both = Gpu(index=0, utilization_pct=90.0, processes=(process("a", 2.0), process("b", 88.0)))
    assert own_utilization(alone, both, 5.0, "a") == pytest.approx(0.03)
    assert own_utilization(alone, both, 5.0, "b") is None
    assert own_utilization(both, both, 61.0, "a") is None, "too far apart"


def test_before_anything_is_done_each_node_has_been_read_since_the_idle_time_began() -> None:
    idle = IdleState(since=100.0, below=0.05, then="cancel")
    two = record("j", JobState.RUNNING, {"n0": (0,), "n1": (0,)}, idle=idle)
    news = {"n0": NodeObservation(began=104.0, result=reading_of(Host("n0", use=0.0), 105.0))}
    for last, found in ((99.0, None), (101.0, True)):
        before = {
            name: NodeRecord(name=name, reading=reading_of(Host(name, use=0.0), at))
            for name, at in (("n0", 103.0), ("n1", last))
        }
        assert is_all_idle(two, before, news, (), 0.05, 10.0, 105.0) is found
        again = news | {"n1": NodeObservation(began=104.0, result=reading_of(Host("n1", use=0.0), last))}  # the same
        assert is_all_idle(two, before, again, (), 0.05, 10.0, 105.0) is found
    assert is_all_idle(two, before, {}, (), 0.05, 3.0, 105.0) is False, "n1 was not read for too long"


SINCE = 1000.0


class Judged:
    """A job on idle GPUs after a cycle at ``now``."""

    def __init__(
        self, now: float, idle: IdleState | None, rule: IdleRule, use: float = 0.0, gpus: int = 1, **asked: Any
    ) -> None:
        before = record(
            "j", JobState.RUNNING, {"n0": tuple(range(gpus))}, idle=idle, spec=spec(gpus_per_node=gpus, **asked)
        )
        host = Host("n0", use=use)
        old = {"n0": NodeRecord(name="n0", reading=reading_of(host, now - 5.0))}
        news = {"n0": NodeObservation(began=now - 0.1, result=reading_of(host, now))}
        found = judge_idle([before], old, news, declared(jobs=rule), now)
        (self.job,) = found.changed or [before]
        self.events = [(event.kind, event.data) for event in found.events]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def idle_since(then: IdleAction = "cancel", **changes: Any) -> IdleState:
    return IdleState(**{"since": SINCE, "below": 0.05, "then": then, "at": SINCE + AFTER_S} | changes)


CANCEL = IdleRule(after_s=AFTER_S, then="cancel", warn_before_s=WARN_S)


def test_an_idle_time_begins_with_the_first_reading_that_shows_it() -> None:
    assert Judged(SINCE, None, CANCEL).job.idle == idle_since()
    warns = IdleRule(after_s=AFTER_S)
    assert Judged(SINCE, None, warns).job.idle == idle_since("warn", at=None)
    assert Judged(SINCE, None, CANCEL, use=5.0).job.idle is None
    assert Judged(SINCE, None, CANCEL, use=5.1).job.idle is None
    assert Judged(SINCE, None, CANCEL, use=4.9).job.idle == idle_since()


@pytest.mark.parametrize("late_s", [-0.1, 0.0, 7.0])
def test_the_warning_says_since_when_and_when_what_is_done(late_s: float) -> None:
    now = SINCE + AFTER_S - WARN_S + late_s
    found = Judged(now, idle_since(), CANCEL, gpus=2)
    if late_s < 0:
        assert (found.events, found.job.idle) == ([], idle_since())
        return
    at = SINCE + AFTER_S + late_s  # the user has all of the time for it
    assert found.job.idle == idle_since(warned_at=now, at=at)
    message = f"its 2 GPUs have been below 5% utilization for 0:02:{20 + late_s:02.0f}; unless used, it is cancelled"
    data = {"attempt": 1, "idle_s": 140 + late_s, "then": "cancel", "at": at, "message": f"{message} in 0:01:00"}
    assert found.events == [("idle_warned", data)]


@pytest.mark.parametrize(
    ("then", "kinds", "state"),
    [
        ("signal", ["idle_acted"], "RUNNING"), ("cancel", ["idle_acted", "ending"], "COMPLETING"),
        ("requeue", ["idle_acted", "preempted"], "COMPLETING"),
    ],
)  # fmt: skip
def test_the_action_comes_at_the_time_that_was_said_and_once(then: IdleAction, kinds: list[str], state: str) -> None:
    rule, at = IdleRule(after_s=AFTER_S, then=then, warn_before_s=WARN_S), SINCE + AFTER_S + 10.0
    warned = idle_since(then, warned_at=at - WARN_S, at=at)
    early = Judged(at - 0.1, warned, rule)
    assert (early.events, early.job.idle) == ([], warned)
    assert Judged(at + 3.0, warned, rule).kinds == kinds
    found = Judged(at, warned, rule)
    assert (found.kinds, found.job.state) == (kinds, state)
    assert found.job.idle == idle_since(then, warned_at=at - WARN_S, at=None, acted_at=at)
    message = "its GPU has been below 5% utilization for 0:03:30 (inventory: idle)"
    assert found.events[0][1] == {"attempt": 1, "idle_s": 210, "then": then, "at": None, "message": message}
    if then == "signal":
        assert Judged(at + 5.0, found.job.idle, rule).events == []
        return
    ending = found.job.ending
    assert ending is not None
    assert (ending.reason, ending.message, ending.kill_at) == ("IdleLimit", message, at + 10.0)
    assert ending.outcome == (JobState.PENDING if then == "requeue" else JobState.CANCELLED)


def test_the_end_of_an_idle_time_is_an_event_where_its_user_was_warned() -> None:
    now = SINCE + 150.0
    assert Judged(now, idle_since(), CANCEL, use=5.0).events == []
    found = Judged(now, idle_since(warned_at=now - 5.0), CANCEL, use=5.0)
    data = {"attempt": 1, "idle_s": 150, "then": "cancel", "at": SINCE + AFTER_S}
    assert (found.events, found.job.idle) == ([("idle_ended", data)], None)


def test_a_rule_that_changes_after_the_warning_gives_no_less_time_than_was_said() -> None:
    now = SINCE + 150.0
    warned = idle_since(warned_at=now, at=now + WARN_S)
    for after_s, at in ((100, now + WARN_S), (400, SINCE + 400)):
        rule = IdleRule(after_s=after_s, then="signal", warn_before_s=WARN_S)
        assert Judged(now + 5.0, warned, rule).job.idle == idle_since("signal", warned_at=now, at=at)
    assert Judged(now + 5.0, warned, IdleRule(after_s=100)).job.idle == idle_since("warn", warned_at=now, at=None)


@pytest.mark.parametrize(("then", "done"), [("signal", "it is sent USR1"), ("requeue", "it is requeued")])
def test_the_warning_names_the_action(then: IdleAction, done: str) -> None:
    rule = IdleRule(after_s=AFTER_S, then=then, warn_before_s=WARN_S)
    now = SINCE + AFTER_S - WARN_S
    ((_, data),) = Judged(now, idle_since(then), rule).events
    assert data["message"].endswith(f"for 0:02:20; unless used, {done} in 0:01:00")
    ((_, data),) = Judged(now, idle_since(then), rule, requeue=False).events
    assert ("it is cancelled" in data["message"]) is (then == "requeue")


def test_idle_times_move_with_the_clock() -> None:
    with running(declared()) as (site, job):
        pass_time(site, AFTER_S - WARN_S / 2)
        before = site.job(job).idle
        shift_times(site.store, 900.0, site.clock())
        assert before is not None
        assert before.at is not None
        assert before.warned_at is not None
        assert site.job(job).idle == IdleState(
            since=before.since + 900.0, below=before.below, then="cancel", at=before.at + 900.0,
            warned_at=before.warned_at + 900.0,
        )  # fmt: skip
