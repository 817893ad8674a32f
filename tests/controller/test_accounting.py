"""GPU seconds, joules and utilization between two readings, by holder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.accounting.usage import BUCKET_S, MAX_POWER_GAP_S, GpuHolding, holdings, usage_between
from gpusched.cluster.base import NodeObservation
from gpusched.controller.ledger import UsageWriter, run_of, share_of
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading, ProbeFailure
from gpusched.model.slurm import SlurmFacts
from gpusched.queue.store import NodeRecord, Store, UsageRow
from tests import builders
from tests.builders import spec
from tests.controller.imagined import GPUS, inventory

NODE = inventory().nodes[0]
T = 1_800_000_000.0  # a bucket begins here


def reading(time: float, boot: str = "b", **gpu: Any) -> NodeReading:
    return NodeReading(node="n0", time=time, boot_id=boot, gpus=(Gpu(**{"index": 0, "uuid": "u"} | gpu),))


def between(before: NodeReading, after: NodeReading, *held: GpuHolding) -> dict[str, UsageRow]:
    """Holder -> its rows added up."""
    sums: dict[str, UsageRow] = {}
    for row in usage_between(NODE, before, after, {0: list(held)}):
        old = sums.get(row.job_id)
        fields = ("gpu_s", "energy_j", "energy_unknown_s", "util_s", "util_known_s", "idle_s")
        values = {f: getattr(row, f) + (getattr(old, f) if old else 0) for f in fields}
        sums[row.job_id] = UsageRow(
            bucket=0, node=row.node, partition=row.partition, job_id=row.job_id, user=row.user, **values
        )
    return sums


def test_a_job_that_ended_in_between_pays_its_part() -> None:
    """10 s, 1000 J; held for the first 4 s: 400 J are the job's, 600 J nobody's."""
    rows = between(
        reading(T, energy_j=5000.0, utilization_pct=0.0), reading(T + 10, energy_j=6000.0, utilization_pct=100.0),
        GpuHolding("j", "alice", T + 4),
    )  # fmt: skip
    assert (rows["j"].gpu_s, rows["j"].energy_j, rows["j"].user) == (4.0, pytest.approx(400.0), "alice")
    assert (rows[""].gpu_s, rows[""].energy_j) == (6.0, pytest.approx(600.0))
    assert rows["j"].util_s == pytest.approx(2.0)  # half of its 4 s


def test_two_jobs_within_one_span() -> None:
    rows = between(
        reading(T, power_w=100.0), reading(T + 10, power_w=200.0),
        GpuHolding("a", "alice", T + 2), GpuHolding("b", "bob", T + 5),
    )  # fmt: skip
    assert {k: r.gpu_s for k, r in rows.items()} == {"a": 2.0, "b": 3.0, "": 5.0}
    assert {k: r.energy_j for k, r in rows.items()} == pytest.approx({"a": 300.0, "b": 450.0, "": 750.0})


def test_two_jobs_on_one_gpu_have_half_each_while_both_are_there() -> None:
    """10 s, 1000 J; both for 4 s, then one alone."""
    rows = between(
        reading(T, energy_j=5000.0, utilization_pct=0.0), reading(T + 10, energy_j=6000.0, utilization_pct=100.0),
        GpuHolding("b", "bob", T + 4, shares=True), GpuHolding("a", "alice", T + 10, shares=True),
    )  # fmt: skip
    assert {k: (r.gpu_s, r.energy_j, r.util_s) for k, r in rows.items()} == {
        "b": (2.0, pytest.approx(200.0), 1.0), "a": (8.0, pytest.approx(800.0), 4.0),
    }  # fmt: skip


def test_slices_are_charged_their_share_of_the_gpu() -> None:
    """10 s, 5600 J; a seventh is held throughout, half for 5 s: the rest is nobody's."""
    jobs = [
        JobRecord(
            id=name, user="u", uid=1, spec=spec(gpus_per_node=1, profile=profile), state=JobState.RUNNING,
            submit_time=T, attempt=1, end_time=end,
            allocation=Allocation(name, (NodeAllocation(rank=0, node="n0", gpus=(number,), cores=1, memory_mib=1),)),
        )
        for name, profile, number, end in (("a", "1g.10gb", 1000, None), ("b", "3g.40gb", 1004, T + 5))
    ]  # fmt: skip
    before, after = reading(T, energy_j=0.0), reading(T + 10, energy_j=5600.0)
    rows = {row.job_id: row for row in usage_between(NODE, before, after, holdings("n0", jobs, T + 10))}
    assert {name: row.energy_j for name, row in rows.items()} == pytest.approx({"a": 800.0, "b": 1400.0, "": 3400.0})
    assert {name: row.gpu_s for name, row in rows.items()} == pytest.approx(
        {"a": 10 / 7, "b": 2.5, "": 10 - 10 / 7 - 2.5}
    )
    assert all(row.util_known_s == 0 for row in rows.values()), "nobody knows how busy a slice was"


def test_slices_are_their_share_of_the_partition() -> None:
    """λ of GIST's Eq. 4, of the dominant resource: here GPUs, of which each slice is a seventh."""
    (partition,) = inventory(nodes=3).partitions
    sliced = builders.job(spec=spec(profile="1g.10gb", gpus_per_node=2, cores_per_node=1))
    assert share_of(sliced, partition) == pytest.approx(2 / 7 / (3 * GPUS))


def test_jobs_one_after_the_other_share_nothing() -> None:
    """Where one of two did not agree they were never there together."""
    for shares in ((True, False), (False, True)):
        rows = between(
            reading(T, power_w=100.0), reading(T + 10, power_w=100.0),
            GpuHolding("a", "alice", T + 4, shares=shares[0]), GpuHolding("b", "bob", T + 10, shares=shares[1]),
        )  # fmt: skip
        assert {k: r.gpu_s for k, r in rows.items()} == {"a": 4.0, "b": 6.0}


def test_a_span_over_a_buckets_border_is_split_there() -> None:
    rows = usage_between(
        NODE, reading(T + BUCKET_S - 3, energy_j=0.0), reading(T + BUCKET_S + 1, energy_j=40.0), {}
    )  # fmt: skip
    assert {r.bucket: (r.gpu_s, r.energy_j) for r in rows} == {
        int(T): (3.0, pytest.approx(30.0)), int(T) + BUCKET_S: (1.0, pytest.approx(10.0)),
    }  # fmt: skip


def test_a_counter_that_went_back_is_not_believed() -> None:
    before, after = reading(T, energy_j=9000.0, power_w=50.0), reading(T + 10, energy_j=10.0, power_w=70.0)
    (row,) = usage_between(NODE, before, after, {})
    assert (row.energy_j, row.energy_unknown_s) == (pytest.approx(600.0), 0.0)
    (row,) = usage_between(NODE, reading(T, energy_j=9000.0), reading(T + 10, energy_j=10.0), {})
    assert (row.energy_j, row.energy_unknown_s) == (0.0, 10.0)
    (row,) = usage_between(NODE, reading(T, energy_j=9.0), reading(T + 10, "new boot", energy_j=500.0), {})
    assert (row.energy_j, row.energy_unknown_s) == (0.0, 10.0)


def test_the_gpus_of_a_job_add_up() -> None:
    """Two GPUs of one holder within one bucket are one row: all that is summed is their sum."""

    def both(time: float, joules: float, **more: Any) -> NodeReading:
        gpus = tuple(Gpu(index=i, uuid=f"u{i}", energy_j=joules * (1 + i), **more) for i in range(2))
        return NodeReading(node="n0", time=time, boot_id="b", gpus=gpus)

    held = {0: [GpuHolding("j", "alice", T + 99)], 1: [GpuHolding("j", "alice", T + 99)]}
    (row,) = usage_between(NODE, both(T, 0.0, utilization_pct=2.0), both(T + 10, 100.0, utilization_pct=2.0), held)
    assert (row.gpu_s, row.energy_j, row.energy_unknown_s) == (20.0, pytest.approx(300.0), 0.0)
    assert (row.util_s, row.util_known_s, row.idle_s) == (pytest.approx(0.4), 20.0, 20.0)
    before = reading(T), reading(T + 10)
    unknown = [msgspec.structs.replace(r, gpus=tuple(Gpu(index=i, uuid="u") for i in range(2))) for r in before]
    (row,) = usage_between(NODE, *unknown, held)
    assert (row.energy_j, row.energy_unknown_s, row.util_known_s) == (0.0, 20.0, 0.0)


def test_a_job_that_goes_back_to_the_queue_pays_until_then(tmp_path: Path) -> None:
    """10 s at 100 W, through the ledger and the store; the job is requeued, ends, or runs on within the cycle."""
    part = NodeAllocation(rank=0, node="n0", gpus=(0,), cores=1, memory_mib=1)
    running = JobRecord(
        id="j", user="alice", uid=1, spec=spec(), state=JobState.RUNNING, submit_time=T - 9, start_time=T - 5,
        allocation=Allocation("j", (part,)), attempt=1,
    )  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "requeued": {"state": JobState.PENDING, "allocation": None, "start_time": None},
        "ended": {"state": JobState.COMPLETED, "end_time": T + 4},
        "runs": {},
    }
    paid = {"requeued": (8.0, 2.0), "ended": (4.0, 6.0), "runs": (10.0, None)}
    for name, change in changes.items():
        store = Store.create_or_open(tmp_path / name)
        after = msgspec.structs.replace(running, **change)
        store.put_jobs([after])
        before = {"n0": NodeRecord(name="n0", reading=reading(T, energy_j=0.0))}
        news = {"n0": NodeObservation(began=T + 9, result=reading(T + 10, energy_j=1000.0))}
        now = T + 8 if name == "requeued" else T + 10  # it let go when the cycle said so
        UsageWriter(store).charge(inventory(), before, news, [running], [after], now)
        rows = {row.job_id: row for row in store.usage(0)}
        theirs, nobodys = paid[name]
        assert (rows["j"].gpu_s, rows["j"].energy_j, rows["j"].user) == (theirs, pytest.approx(theirs * 100), "alice")
        assert (rows[""].gpu_s if "" in rows else None) == nobodys
        kept = store.job("j")
        assert kept is not None
        assert kept.energy_j == (pytest.approx(400.0) if name == "ended" else None)
        store.close()


def test_a_job_that_ended_while_its_engine_was_silent_pays_until_its_end(tmp_path: Path) -> None:
    """Readings each 10 s at 100 W, over a bucket's border; the fourth one says that it had ended after 5 s."""
    store = Store.create_or_open(tmp_path)
    began = T - 15
    running = builders.job("j", nodes={"n0": (0,)}, start_time=began)
    ended = msgspec.structs.replace(running, state=JobState.COMPLETED, end_time=began + 5)
    writer, energy = UsageWriter(store), (100.0 * second for second in range(0, 100, 10))
    readings = [reading(began + second, energy_j=next(energy)) for second in (0, 10, 20, 30, 40)]
    for before, after in pairwise(readings):
        job = ended if after is readings[-1] else running
        store.put_jobs([job])
        news = {"n0": NodeObservation(began=after.time - 1, result=after)}
        writer.charge(inventory(), {"n0": NodeRecord(name="n0", reading=before)}, news, [running], [job], after.time)
    sums: dict[str, float] = {"j": 0.0, "": 0.0}
    for row in store.usage(0):
        assert row.gpu_s >= 0.0
        assert row.energy_j == pytest.approx(100.0 * row.gpu_s)
        sums[row.job_id] += row.gpu_s
    assert sums == {"j": pytest.approx(5.0), "": pytest.approx(35.0)}
    kept = store.job("j")
    assert kept is not None
    assert kept.energy_j == pytest.approx(500.0)
    totals = store.usage_totals()
    assert sum(row.gpu_s for row in totals if row.held) == pytest.approx(30.0), "a total never decreases"
    store.close()


@pytest.mark.parametrize(("named", "gpus"), [({"n0": (0, 1, 2), "n1": (4, 5)}, 5), ({"n0": (0, 1, 2)}, 3), ({}, 6)])
def test_a_job_of_slurm_is_charged_what_it_got_or_else_what_it_asked_for(
    named: dict[str, tuple[int, ...]], gpus: int
) -> None:
    """Of one that began and ended while no controller ran, only the GPUs of one node counted."""
    facts = SlurmFacts(gpus=named)
    nodes = {node: named.get(node, ()) for node in ("n0", "n1")}
    job = builders.job("7", nodes=nodes, start_time=T, spec=spec(nodes=2, gpus_per_node=3), slurm=facts)
    assert run_of(job, inventory()).gpus == gpus


def test_a_node_is_charged_by_looking_at_its_own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job was looked at for every node: seconds of each cycle with a few hundred nodes."""
    looked_at: list[tuple[str, str]] = []

    def noted(node: str, jobs: Iterable[JobRecord], *rest: Any) -> dict[int, list[GpuHolding]]:
        jobs = list(jobs)
        looked_at.extend((node, job.id) for job in jobs)
        return holdings(node, jobs, *rest)

    monkeypatch.setattr("gpusched.controller.ledger.holdings", noted)
    with closing(Store.create_or_open(tmp_path)) as store:
        jobs = [builders.job(f"j{node}", nodes={node: (0,)}, start_time=T) for node in ("n0", "n1")]
        jobs.append(builders.job("gang", nodes={"n0": (1,), "n1": (1,)}, start_time=T))
        before = {n: NodeRecord(name=n, reading=reading(T)) for n in ("n0", "n1")}
        news = {n: NodeObservation(began=T + 9, result=reading(T + 10)) for n in before}
        UsageWriter(store).charge(inventory(), before, news, jobs, jobs, T + 10)
    assert sorted(looked_at) == [("n0", "gang"), ("n0", "jn0"), ("n1", "gang"), ("n1", "jn1")]


def test_a_job_that_had_ended_before_is_charged_as_it_was(tmp_path: Path) -> None:
    """Slurm lists an ended job for minutes, so that it is among the active ones again."""
    store = Store.create_or_open(tmp_path)
    ended = builders.job("j", nodes={"n0": (0,)}, start_time=T, state=JobState.COMPLETED, end_time=T + 100)
    store.put_jobs([ended])
    writer, readings = UsageWriter(store), [reading(T), reading(T + 120), reading(T + 240)]
    for before, after in pairwise(readings):
        news = {"n0": NodeObservation(began=after.time - 1, result=after)}
        writer.charge(inventory(), {"n0": NodeRecord(name="n0", reading=before)}, news, [ended], [ended], after.time)
    assert sum(row.gpu_s for row in store.usage(0) if row.job_id == "j") == pytest.approx(100.0)
    store.close()


def test_a_requeued_attempt_pays_for_nodes_that_answer_later_whatever_became_of_the_job(tmp_path: Path) -> None:
    """Two nodes are silent as the job is requeued; one answers before, one after it is cancelled as it waits."""
    store = Store.create_or_open(tmp_path)
    running = builders.job("j", nodes={"n0": (0,), "n1": (0,)}, start_time=T - 5)
    pending = msgspec.structs.replace(running, state=JobState.PENDING, allocation=None, start_time=None)
    before = {n: NodeRecord(name=n, reading=reading(T, energy_j=0.0)) for n in ("n0", "n1")}
    failure = ProbeFailure(node="n", time=T, kind="timeout", reason="x")
    silent = dict.fromkeys(before, NodeObservation(began=T, result=failure))
    answer = NodeObservation(began=T + 9, result=reading(T + 10, energy_j=1000.0))
    writer = UsageWriter(store)
    store.put_jobs([pending])
    writer.charge(inventory(), before, silent, [running], [pending], T + 8)
    store.put_jobs([msgspec.structs.replace(pending, state=JobState.CANCELLED, end_time=T + 9)])
    for node in ("n0", "n1"):
        writer.charge(inventory(), before, {node: answer}, [], [], T + 10)
    assert [row.gpu_s for row in store.usage(0) if row.job_id == "j"] == [8.0, 8.0]
    kept = store.job("j")
    assert kept is not None
    assert kept.energy_j == pytest.approx(1600.0)
    store.close()


def test_another_gpu_in_the_same_place_is_another_counter() -> None:
    (row,) = usage_between(NODE, reading(T, energy_j=9.0), reading(T + 10, uuid="v", energy_j=500.0), {})
    assert (row.gpu_s, row.energy_unknown_s) == (10.0, 10.0)


def test_unknown_stays_unknown() -> None:
    (row,) = usage_between(NODE, reading(T), reading(T + 10, error="lost"), {})
    assert (row.gpu_s, row.energy_unknown_s, row.util_known_s, row.idle_s) == (10.0, 10.0, 0.0, 0.0)


def test_power_and_utilization_say_nothing_of_a_long_gap_a_counter_does() -> None:
    gap = MAX_POWER_GAP_S + 1
    first, last = {"power_w": 100.0, "utilization_pct": 0.0}, {"power_w": 100.0, "utilization_pct": 0.0}
    rows = between(reading(T, **first), reading(T + gap, **last))
    assert (rows[""].energy_unknown_s, rows[""].util_known_s, rows[""].idle_s) == (pytest.approx(gap), 0.0, 0.0)
    rows = between(reading(T, energy_j=0.0, **first), reading(T + gap, energy_j=10.0, **last))
    assert (rows[""].energy_j, rows[""].energy_unknown_s) == (pytest.approx(10.0), 0.0)


def test_idle_is_below_five_percent() -> None:
    for percent, idle in ((4.0, 10.0), (5.0, 0.0)):
        (row,) = usage_between(NODE, reading(T, utilization_pct=percent), reading(T + 10, utilization_pct=percent), {})
        assert row.idle_s == idle


def test_utilization_is_the_mean_of_both_ends() -> None:
    for first, last, mean in ((95.0, 90.0, 0.925), (4.0, 5.0, 0.045), (None, 50.5, 0.505)):
        (row,) = usage_between(NODE, reading(T, utilization_pct=first), reading(T + 10, utilization_pct=last), {})
        assert (row.util_s, row.util_known_s) == (pytest.approx(10 * mean, abs=1e-9), 10.0)
        assert row.idle_s == (10.0 if mean < 0.05 else 0.0)


def test_undeclared_gpus_and_clocks_that_stand_still_count_nothing() -> None:
    assert usage_between(NODE, reading(T), reading(T), {}) == []
    assert usage_between(NODE, reading(T), reading(T - 5), {}) == []
    assert usage_between(NODE, None, reading(T), {}) == []
    assert usage_between(NODE, reading(T, index=GPUS), reading(T + 5, index=GPUS), {}) == []


def test_holdings_of_jobs_that_wait_run_and_have_ended() -> None:
    def job(job_id: str, gpus: tuple[int, ...], start: float | None, end: float | None) -> JobRecord:
        part = NodeAllocation(rank=0, node="n0", gpus=gpus, cores=1, memory_mib=1)
        return JobRecord(
            id=job_id, user="u", uid=1, spec=spec(), state=JobState.RUNNING, submit_time=T, start_time=start,
            end_time=end, allocation=Allocation(job_id, (part,)),
        )  # fmt: skip

    jobs = [job("a", (0, 1), T, None), job("b", (0,), T - 9, T - 2), job("c", (2,), None, None)]
    held = holdings("n0", jobs, T + 5)
    assert held[0] == [GpuHolding("b", "u", T - 2), GpuHolding("a", "u", T + 5)], "the first to let go first"
    assert held[1] == [GpuHolding("a", "u", T + 5)]
    assert held[2] == [GpuHolding("c", "u", T + 5)], "pulling an image holds the GPU too"
    assert holdings("n1", [job("a", (0,), T, None)], T) == {}


def test_slurms_jobs_begin_when_it_says() -> None:
    """10 s, 1000 J; a job of ours and one of Slurm's, which began 4 s before the second reading."""
    part = NodeAllocation(rank=0, node="n0", gpus=(0,), cores=1, memory_mib=1)
    ours = JobRecord(
        id="j", user="u", uid=1, spec=spec(), state=JobState.RUNNING, submit_time=T, start_time=T + 6,
        allocation=Allocation("j", (part,)),
    )  # fmt: skip
    theirs = msgspec.structs.replace(ours, slurm=SlurmFacts())
    readings = reading(T, energy_j=5000.0), reading(T + 10, energy_j=6000.0)
    drawn = {}
    for job in (ours, theirs):
        held = holdings("n0", [job], T + 10)[0]
        drawn[job.slurm is None] = {name: row.energy_j for name, row in between(*readings, *held).items()}
    assert drawn == {True: {"j": 1000.0}, False: {"": pytest.approx(600.0), "j": pytest.approx(400.0)}}


def test_only_requests_that_agree_share() -> None:
    part = NodeAllocation(rank=0, node="n0", gpus=(0,), cores=1, memory_mib=1)
    pair = [
        JobRecord(
            id=name, user="u", uid=1, spec=spec(share="pairs", gpu_memory_mib=1), state=JobState.RUNNING,
            submit_time=T, allocation=Allocation(name, (part,)),
        )
        for name in ("a", "b")
    ]  # fmt: skip
    assert [holding.shares for holding in holdings("n0", pair, T)[0]] == [True, True]


@given(
    ends=st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=5), joules=st.integers(0, 10**6),
    use=st.integers(0, 100),
)  # fmt: skip
def test_what_a_shared_gpu_did_is_charged_once(ends: list[tuple[int, bool]], joules: int, use: int) -> None:
    held = [GpuHolding(f"j{i}", "u", T + end, shares) for i, (end, shares) in enumerate(sorted(ends))]
    before = reading(T, energy_j=0.0, utilization_pct=float(use))
    rows = usage_between(NODE, before, reading(T + 600, energy_j=float(joules), utilization_pct=float(use)), {0: held})
    assert sum(r.energy_j for r in rows) == pytest.approx(joules)
    assert sum(r.gpu_s for r in rows) == pytest.approx(600)
    most = {h.job_id: max(0.0, min(h.end, T + 600) - T) for h in held}
    for name, seconds in most.items():
        mine = sum(r.gpu_s for r in rows if r.job_id == name)
        assert mine <= seconds + 1e-9
        assert sum(r.energy_j for r in rows if r.job_id == name) == pytest.approx(joules * mine / 600)
    agreed = [h for h in held if h.shares]
    if len(agreed) == len(held) == 2:
        both, longer = (most[h.job_id] for h in held)
        assert sum(r.gpu_s for r in rows if r.job_id == held[1].job_id) == pytest.approx(longer - both / 2)


MOMENTS = st.floats(0, 2000, allow_nan=False).map(lambda s: T + round(s, 3))


@given(span=st.tuples(MOMENTS, MOMENTS).map(sorted), cuts=st.lists(MOMENTS, max_size=6), joules=st.floats(0, 1e9))
def test_nothing_is_lost_or_invented_however_the_span_is_cut(
    span: list[float], cuts: list[float], joules: float
) -> None:
    begin, end = span
    held = [GpuHolding(f"j{i}", "u", end_) for i, end_ in enumerate(sorted(cuts))]
    rows = usage_between(NODE, reading(begin, energy_j=7.0), reading(end, energy_j=7.0 + joules), {0: held})
    if end <= begin:
        assert rows == []
        return
    assert sum(r.gpu_s for r in rows) == pytest.approx(end - begin)
    assert sum(r.energy_j for r in rows) == pytest.approx(7.0 + joules - 7.0)
    since = begin
    for holding in held:
        mine = sum(r.gpu_s for r in rows if r.job_id == holding.job_id)
        assert mine == pytest.approx(max(0.0, min(end, holding.end) - since), abs=1e-6)
        since = max(since, min(end, holding.end))
    for row in rows:
        assert row.bucket % BUCKET_S == 0
        assert 0 <= row.energy_unknown_s <= row.gpu_s <= BUCKET_S + 1e-6


def test_a_counter_that_stands_still_is_zero_joules_known() -> None:
    (row,) = usage_between(NODE, reading(T, energy_j=7.0), reading(T + 10, energy_j=7.0), {})
    assert (row.energy_j, row.energy_unknown_s) == (0.0, 0.0)


def test_power_and_utilization_hold_for_a_minute_and_no_longer() -> None:
    known = {"power_w": 100.0, "utilization_pct": 50.0}
    (row,) = usage_between(NODE, reading(T, **known), reading(T + 60, **known), {})
    assert (row.energy_j, row.energy_unknown_s, row.util_s) == (pytest.approx(6000.0), 0.0, pytest.approx(30.0))
    (row,) = usage_between(NODE, reading(T, **known), reading(T + 60.5, **known), {})
    assert (row.energy_unknown_s, row.util_known_s) == (60.5, 0.0)


def test_a_gpu_that_was_not_there_before_has_no_energy_but_its_own_utilization() -> None:
    before = msgspec.structs.replace(reading(T), gpus=())
    (row,) = usage_between(NODE, before, reading(T + 10, energy_j=9.0, power_w=5.0, utilization_pct=40.0), {})
    assert (row.energy_j, row.energy_unknown_s) == (0.0, 10.0)
    assert (row.util_s, row.util_known_s) == (pytest.approx(4.0), 10.0)


def test_every_row_lies_within_its_bucket() -> None:
    """Also where the last bucket has begun less than a second ago, and where a span ends with one."""
    long = {0: 1.0, 300: 300.0, 600: 300.0, 900: 0.25}
    for last, rows in ((300.5, {0: 1.0, 300: 0.5}), (300.0, {0: 1.0}), (900.25, long)):
        found = usage_between(NODE, reading(T + 299), reading(T + last), {})
        assert {row.bucket - int(T): row.gpu_s for row in found} == pytest.approx(rows)


DAY = 86400.0


def test_a_gap_of_days_has_a_row_for_each_hour_but_the_last_day_and_a_month_none() -> None:
    """A row for every five minutes took 40 s on 1,000 nodes, and hours after a clock had jumped by decades."""
    begin, end, left = T - 500, T + 3 * DAY + 500, T + 4000
    held = [GpuHolding("j", "u", left)]
    rows = usage_between(NODE, reading(begin, energy_j=0.0), reading(end, energy_j=end - begin), {0: held})
    assert sum(row.gpu_s for row in rows) == pytest.approx(end - begin)
    assert all(row.energy_j == pytest.approx(row.gpu_s) for row in rows)
    assert [(row.bucket - T, row.gpu_s) for row in rows if row.job_id] == [
        (-600, 200.0), (-300, 300.0), (0, 3600.0), (3600, 400.0)
    ]  # fmt: skip
    assert {row.gpu_s for row in rows if T + 7200 <= row.bucket < T + 2 * DAY} == {3600.0}
    assert {row.gpu_s for row in rows if T + 2 * DAY < row.bucket < T + 3 * DAY} == {300.0}
    assert usage_between(NODE, reading(T, energy_j=0.0), reading(T + 40 * 365 * DAY, energy_j=9.0), {0: held}) == []


@pytest.mark.parametrize("ran_s", [5000.0, 2 * DAY + 5400.0])
def test_a_job_that_ended_in_a_gap_of_days_pays_until_its_end(tmp_path: Path, ran_s: float) -> None:
    """The cycle after the first one learns when: within an hour's row, or in the last day, between rows of minutes."""
    store = Store.create_or_open(tmp_path)
    running = builders.job("j", nodes={"n0": (0,)}, start_time=T - 100)
    ended = msgspec.structs.replace(running, state=JobState.COMPLETED, end_time=T + ran_s)
    writer, readings = UsageWriter(store), [reading(T), reading(T + 3 * DAY), reading(T + 3 * DAY + 10)]
    for (before, after), job in zip(pairwise(readings), (running, ended), strict=True):
        store.put_jobs([job])
        news = {"n0": NodeObservation(began=after.time - 1, result=after)}
        writer.charge(inventory(), {"n0": NodeRecord(name="n0", reading=before)}, news, [running], [job], after.time)
    assert sum(row.gpu_s for row in store.usage(0) if row.job_id) == pytest.approx(ran_s)
    store.close()


def test_an_undeclared_gpu_does_not_hide_those_after_it() -> None:
    def both(time: float) -> NodeReading:
        return NodeReading(node="n0", time=time, gpus=(Gpu(index=GPUS), Gpu(index=0)))

    assert [row.gpu_s for row in usage_between(NODE, both(T), both(T + 5), {})] == [5.0]
