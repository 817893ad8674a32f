"""The power report's arithmetic, by hand and by property."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.accounting.report import parse_period, parse_since, power_report, summarize
from gpusched.accounting.usage import BUCKET_S, GpuHolding, usage_between
from gpusched.errors import UsageError
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.reports import By, PowerReport, PowerRow
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName, Settings
from gpusched.queue.store import RunRecord, Store, UsageRow
from tests import builders

HOUR = 3600.0
DAY = 24 * HOUR


def node(name: str, partition: str, rated: float | None) -> Node:
    return Node(
        name=name, partition=partition, address=name, gpus=8, cores=256, memory_mib=1 << 20, rated_power_w=rated,
        runtime=RuntimeName.PODMAN,
    )  # fmt: skip


A100 = Partition(name="A100", nodes=(node("dgx1", "A100", 6500), node("dgx2", "A100", 6500)), flavors=())
V100 = Partition(name="V100", nodes=(node("dgx3", "V100", 3500), node("dgx4", "V100", 3500)), flavors=())
INVENTORY = Inventory(path="", partitions=(A100, V100), settings=Settings(power_price_per_kwh=0.25))


def run(job: str, nodes: dict[str, int], start: float, end: float | None, **fields: Any) -> RunRecord:
    gpus = sum(nodes.values())
    defaults = {"attempt": 1, "user": "ann", "partition": "A100", "flavor": None, "share": gpus / 16, "outcome": None}
    return RunRecord(**(defaults | fields), job_id=job, gpus=gpus, start_time=start, end_time=end, nodes=nodes)


def use(node: str, job: str = "", bucket: int = 0, **fields: Any) -> UsageRow:
    defaults = {"user": "ann" if job else "", "partition": "A100" if node in ("dgx1", "dgx2") else "V100"}
    return UsageRow(bucket=bucket, node=node, job_id=job, **(defaults | fields))


def report(
    runs: list[RunRecord], usage: list[UsageRow], by: By = "partition", *, until: float = 720 * HOUR,
    firsts: dict[str, float] | None = None, inventory: Inventory = INVENTORY,
) -> PowerReport:  # fmt: skip
    if firsts is None:
        firsts = {}
        for r in runs:
            firsts[r.partition] = min(r.start_time, firsts.get(r.partition, r.start_time))
    return summarize(inventory, inventory.partitions, runs, usage, firsts=firsts, since=0.0, until=until, by=by)


def row(made: PowerReport, name: str) -> PowerRow:
    return next(r for r in made.rows if r.name == name)


def test_worked_example_of_the_paper() -> None:
    """Two jobs hold half and a quarter of the A100 partition for the month: U = 0.75."""
    runs = [run("l", {"dgx1": 8}, 0, None), run("m", {"dgx2": 4}, 0, None)]
    a100 = row(report(runs, []), "A100")
    assert a100.utilization == pytest.approx(0.75)
    assert a100.hours == 720
    assert a100.gpu_hours == 12 * 720
    assert a100.rated_kwh == pytest.approx(2 * 6.5 * 720)
    assert a100.inefficient_kwh == pytest.approx(2 * 6.5 * 720 * 0.25)
    assert a100.inefficient_cost == pytest.approx(2 * 6.5 * 720 * 0.25 * 0.25)
    by_node = report(runs, [], "node")
    assert row(by_node, "dgx1").inefficient_kwh == pytest.approx(0)
    assert row(by_node, "dgx2").utilization == pytest.approx(0.5)
    assert row(by_node, "dgx2").inefficient_kwh == pytest.approx(6.5 * 720 * 0.5)


def test_run_time_begins_with_the_first_start() -> None:
    """Eq. 3: half of the window passed before the first job; it then held everything until the end."""
    a100 = row(report([run("f", {"dgx1": 8, "dgx2": 8}, 360 * HOUR, None)], []), "A100")
    assert a100.hours == 360
    assert a100.utilization == pytest.approx(1)
    assert a100.inefficient_kwh == pytest.approx(0)


def test_inefficient_energy_begins_with_the_first_start() -> None:
    """Eq. 3 again: nothing is wasted before a partition's first job."""
    a100 = row(report([run("f", {"dgx1": 8}, 360 * HOUR, None)], []), "A100")
    assert (a100.utilization, a100.rated_kwh) == (pytest.approx(0.5), pytest.approx(13 * 360))
    assert a100.inefficient_kwh == pytest.approx(13 * 360 * 0.5)
    assert report([run("f", {"dgx1": 8}, 360 * HOUR, None)], []).total.inefficient_kwh == pytest.approx(13 * 360 * 0.5)


def test_partitions_count_by_their_gpus_and_without_any_by_their_nodes() -> None:
    """All of 16 GPUs for 10 h and half of 8 for 5 h, of which the second partition's time began 5 h later."""
    small = Partition(name="T4", nodes=(node("t1", "T4", None),), flavors=())
    inventory = Inventory(path="", partitions=(A100, small))
    runs = [run("a", {"dgx1": 8, "dgx2": 8}, 0, None), run("t", {"t1": 4}, 5 * HOUR, None, partition="T4", share=0.5)]
    for by in ("partition", "node", "user", "job"):
        total = report(runs, [], by, until=10 * HOUR, inventory=inventory).total  # type: ignore[arg-type]
        assert total.utilization == pytest.approx((16 * 10 + 4 * 5) / (16 * 10 + 8 * 5)), by
    holders = report(runs, [], "job", until=10 * HOUR, inventory=inventory)
    assert row(holders, "t").utilization == pytest.approx(4 * 5 / (16 * 10 + 8 * 5))
    cpus = [
        Partition(name=p, flavors=(), nodes=tuple(
            Node(name=n, partition=p, address=n, gpus=0, cores=8, memory_mib=1, runtime=RuntimeName.PROCESS) for n in ns
        )) for p, ns in (("one", ("a",)), ("three", ("b", "c", "d")))
    ]  # fmt: skip
    runs = [run("x", {"a": 0}, 0, None, partition="one", share=0.5)]
    runs.append(run("y", {"b": 0}, 0, None, partition="three", share=1))
    made = report(runs, [], "partition", inventory=Inventory(path="", partitions=tuple(cpus)))
    assert made.total.utilization == pytest.approx((1 * 0.5 + 3 * 1) / 4)


@pytest.mark.parametrize(
    ("usage", "until", "begins"),
    [
        ({"dgx1": 8 * 100.0}, 1500, 800),  # 100 s of 8 GPUs in the bucket from 600 to 900
        ({"dgx1": 8 * 100.0, "dgx2": 8 * 250.0}, 1500, 650),  # the node that was measured for longest
        ({"dgx1": 8 * 300.0}, 1500, 600),
        ({"dgx1": 8 * 30.0}, 700, 670),  # a bucket that is not over yet
        ({"gone": 50.0}, 1500, 850),  # a node no longer declared: as of one GPU
        ({}, 1500, 1500),
    ],
)
def test_a_report_begins_where_measuring_began(
    tmp_path: Path, usage: dict[str, float], until: float, begins: float
) -> None:
    store = Store.create_or_open(tmp_path)
    store.add_usage([use(name, bucket=600, gpu_s=gpu_s) for name, gpu_s in usage.items()])
    if usage:
        store.add_usage([use("dgx1", bucket=900, gpu_s=8 * 300.0)])
    assert power_report(store, INVENTORY, since=0.0, until=until, by="node").since == begins
    store.close()


def test_an_earlier_start_makes_the_idle_time_count() -> None:
    runs = [run("f", {"dgx1": 8, "dgx2": 8}, 360 * HOUR, None)]
    assert row(report(runs, [], firsts={"A100": -5.0}), "A100").utilization == pytest.approx(0.5)


def test_only_the_part_inside_the_window_counts() -> None:
    a100 = row(report([run("f", {"dgx1": 8, "dgx2": 8}, -100 * HOUR, 72 * HOUR)], []), "A100")
    assert a100.utilization == pytest.approx(0.1)
    assert a100.gpu_hours == pytest.approx(16 * 72)


def test_a_partition_without_any_start_has_no_utilization_but_energy() -> None:
    made = report([run("f", {"dgx1": 8}, 0, None)], [use("dgx3", gpu_s=100, energy_j=3.6e6)])
    v100 = row(made, "V100")
    assert (v100.utilization, v100.hours, v100.rated_kwh, v100.inefficient_kwh) == (None, None, None, None)
    assert v100.energy_kwh == pytest.approx(1)
    assert v100.cost == pytest.approx(0.25)


def test_unknown_energy_is_none_not_zero() -> None:
    a100 = row(report([run("f", {"dgx1": 8}, 0, None)], [use("dgx1", "f", gpu_s=50, energy_unknown_s=50)]), "A100")
    assert (a100.energy_kwh, a100.cost, a100.measured_utilization, a100.idle_gpu_hours) == (None,) * 4
    assert a100.energy_unknown_share == 1


def test_time_without_any_reading_counts_as_unmeasured() -> None:
    half = 8 * HOUR
    usage = [use("dgx1", gpu_s=half, energy_j=3.6e6), use("dgx2", gpu_s=half, energy_j=3.6e6)]
    a100 = row(report([run("f", {"dgx1": 8}, 0, None)], usage, until=2 * HOUR), "A100")
    assert a100.energy_unknown_share == pytest.approx(0.5)


def test_whole_measurement_is_not_marked() -> None:
    usage = [use(n, gpu_s=8 * HOUR * 0.99, energy_j=1.0) for n in ("dgx1", "dgx2")]
    assert row(report([run("f", {"dgx1": 8}, 0, None)], usage, until=HOUR), "A100").energy_unknown_share == 0


def test_a_job_is_charged_its_own_gpus_and_the_rest_is_unallocated() -> None:
    usage = [
        use("dgx1", "j1", gpu_s=HOUR, energy_j=3.6e6, util_s=HOUR * 0.8, util_known_s=HOUR),
        use("dgx1", gpu_s=7 * HOUR, energy_j=7.2e6, util_known_s=7 * HOUR, idle_s=7 * HOUR),
    ]
    made = report([run("j1", {"dgx1": 1}, 0, HOUR)], usage, "job", until=HOUR)
    (j1,) = made.rows
    assert (j1.user, j1.partition, j1.gpu_hours) == ("ann", "A100", 1)
    assert j1.energy_kwh == pytest.approx(1)
    assert j1.measured_utilization == pytest.approx(0.8)
    assert j1.idle_gpu_hours == 0
    assert j1.inefficient_kwh is None
    assert made.unheld_kwh == pytest.approx(2)
    dgx1 = row(report([run("j1", {"dgx1": 1}, 0, HOUR)], usage, "node", until=HOUR), "dgx1")
    assert dgx1.energy_kwh == pytest.approx(3)
    assert dgx1.measured_utilization == pytest.approx(0.1)


def test_idle_energy_measured_before_a_run_is_not_its_own() -> None:
    """The GPU was its for 100 s, idle for 80, of which its run had 50: the first 50 were idle, so 30 of 80 count."""
    usage = use("dgx1", "j", gpu_s=100, util_known_s=100, idle_s=80, idle_energy_j=8 * 3.6e6, idle_energy_unknown_s=40)
    (j,) = report([run("j", {"dgx1": 1}, 0, 50)], [usage], "job", until=HOUR).rows
    assert j.idle_gpu_hours == pytest.approx(30 / HOUR)
    assert j.idle_energy_kwh == pytest.approx(3)
    assert j.idle_energy_unknown_share == pytest.approx(0.5), "as of all that was measured"


def test_without_rated_power_or_price() -> None:
    bare = Partition(name="A100", nodes=(node("dgx1", "A100", None), node("dgx2", "A100", 6500)), flavors=())
    made = report([run("f", {"dgx1": 8}, 0, None)], [use("dgx1", gpu_s=1, energy_j=1)],
                  inventory=Inventory(path="", partitions=(bare,)))  # fmt: skip
    (a100,) = made.rows
    assert a100.utilization == pytest.approx(0.5)
    assert (a100.rated_kwh, a100.inefficient_kwh, a100.inefficient_cost, a100.cost) == (None,) * 4
    assert a100.energy_kwh is not None


def test_a_node_no_longer_declared_still_shows_what_it_used() -> None:
    made = report([run("f", {"old": 4}, 0, HOUR)], [use("old", "f", partition="A100", gpu_s=1, energy_j=3.6e6)], "node")
    old = row(made, "old")
    assert (old.gpu_hours, old.energy_kwh, old.rated_kwh) == (4, 1, None)


@pytest.mark.parametrize("by", ["partition", "node", "user", "job"])
def test_of_no_time_there_is_no_utilization(by: By) -> None:
    made = report([run("f", {"dgx1": 8}, -HOUR, None)], [], by, until=0.0)
    assert {r.utilization for r in (*made.rows, made.total)} == {None}


def test_nothing_at_all() -> None:
    made = report([], [])
    assert [r.name for r in made.rows] == ["A100", "V100"]
    assert made.total.utilization is None
    assert made.total.energy_kwh is None
    assert report([], [], "user").rows == ()


def test_cpu_only_partition() -> None:
    cpu = Node(name="c1", partition="cpu", address="c1", gpus=0, cores=8, memory_mib=1024, runtime=RuntimeName.PROCESS)
    inventory = Inventory(path="", partitions=(Partition(name="cpu", nodes=(cpu,), flavors=()),))
    runs = [run("j", {"c1": 0}, 0, None, partition="cpu", share=0.5)]
    for by in ("partition", "node"):
        made = report(runs, [], by, inventory=inventory)
        assert made.rows[0].utilization == pytest.approx(0.5)
        assert made.total.utilization == pytest.approx(0.5)


def test_a_job_without_gpus_on_several_nodes_counts_on_each_for_its_part() -> None:
    """Half of a partition of two nodes, spread over both: half of each."""
    nodes = tuple(
        Node(name=n, partition="cpu", address=n, gpus=0, cores=8, memory_mib=1, runtime=RuntimeName.PROCESS)
        for n in "ab"
    )
    inventory = Inventory(path="", partitions=(Partition(name="cpu", nodes=nodes, flavors=()),))
    made = report([run("j", {"a": 0, "b": 0}, 0, None, partition="cpu", share=0.5)], [], "node", inventory=inventory)
    assert [(r.name, r.utilization) for r in made.rows] == [("a", pytest.approx(0.5)), ("b", pytest.approx(0.5))]
    assert made.total.utilization == pytest.approx(0.5)


@pytest.mark.parametrize(("text", "since"), [("7d", 93 * DAY), ("all", 0.0), ("90", 100 * DAY - 5400)])
def test_since(text: str, since: float) -> None:
    assert parse_since(text, 100 * DAY) == since


@pytest.mark.parametrize("text", ["", "soon", "2999-01-01", "now+1h", "-7d"])
def test_bad_since(text: str) -> None:
    with pytest.raises(UsageError):
        parse_since(text, 100 * DAY)


times = st.floats(-50 * HOUR, 150 * HOUR, allow_nan=False)
places = st.sampled_from([("A100", ("dgx1", "dgx2")), ("V100", ("dgx3", "dgx4"))])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[RunRecord], list[UsageRow]]:
    runs, usage = [], []
    for i in range(draw(st.integers(0, 8))):
        partition, names = draw(places)
        gpus = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 8), min_size=1))
        start = draw(times)
        end = draw(st.none() | times.map(lambda t, s=start: max(s, t)))
        user = draw(st.sampled_from(["ann", "bob"]))
        runs.append(run(f"j{i}", gpus, start, end, partition=partition, user=user))
        for name, count in gpus.items():
            seconds = float(count * draw(st.integers(1, 300)))
            known = draw(st.floats(0, 1))
            usage.append(
                use(name, f"j{i}", user=user, gpu_s=seconds, energy_j=seconds * 300 * known,
                    energy_unknown_s=seconds * (1 - known), util_s=seconds / 2, util_known_s=seconds)
            )  # fmt: skip
    for name in draw(st.sets(st.sampled_from(["dgx1", "dgx2", "dgx3", "dgx4"]))):
        usage.append(use(name, gpu_s=100.0, energy_j=5e5, util_known_s=100.0, idle_s=100.0))
    return [r for r in runs if r.start_time < 100 * HOUR and (r.end_time is None or r.end_time > 0)], usage


@given(data=st.data())
def test_nobody_was_idle_for_longer_than_he_held_gpus(data: st.DataObject) -> None:
    """By readings at any times, of a job whose image may take long, and a window that may begin within a bucket."""
    draw = data.draw
    allocated, pulls = draw(st.integers(0, 5000)), draw(st.integers(0, 2000))
    start = allocated + pulls
    end = draw(st.none() | st.integers(1, 9000).map(lambda s: start + s))
    until, since = draw(st.integers(start + 1, 20_000)), draw(st.integers(0, start))
    times = sorted(draw(st.sets(st.integers(0, until), min_size=2, max_size=30)))
    holder = GpuHolding("j", "ann", float("inf") if end is None else end, begin=allocated)
    readings = [
        NodeReading(node="dgx1", time=t, source="nvml", containers=(), gpus=tuple(
            Gpu(index=i, uuid=str(i), utilization_pct=draw(st.sampled_from([None, 0, 0, 3, 50]))) for i in (0, 1)
        )) for t in times
    ]  # fmt: skip
    held = {0: [holder], 1: [holder]}
    usage = [u for a, b in pairwise(readings) for u in usage_between(A100.nodes[0], a, b, held)]
    usage = [u for u in usage if u.bucket >= since // BUCKET_S * BUCKET_S]
    runs = [run("j", {"dgx1": 2}, start, end)]
    bys: tuple[By, ...] = ("partition", "node", "user", "job")
    for by in bys:
        made = summarize(INVENTORY, (A100,), runs, usage, firsts={"A100": start}, since=since, until=until, by=by)
        for one in (*made.rows, made.total):
            assert (one.idle_gpu_hours or 0.0) <= one.gpu_hours + 1e-9, (by, one)


def test_gpus_idle_while_an_image_is_on_its_way_are_not_idle_hours_of_the_run() -> None:
    """Ten minutes of pulling, then an hour at work: of the two GPUs' hours none were idle."""
    usage = [
        use("dgx1", "j", 0, gpu_s=2 * 600, util_known_s=2 * 600, idle_s=2 * 600),
        use("dgx1", "j", 600, gpu_s=2 * HOUR, util_known_s=2 * HOUR),
    ]
    (j,) = report([run("j", {"dgx1": 2}, 600, 600 + HOUR)], usage, "job", until=2 * HOUR).rows
    assert (j.gpu_hours, j.idle_gpu_hours) == (2, 0)
    idle = [*usage[:1], use("dgx1", "j", 600, gpu_s=2 * HOUR, util_known_s=2 * HOUR, idle_s=2 * HOUR)]
    (ann,) = report([run("j", {"dgx1": 2}, 600, 600 + HOUR)], idle, "user", until=2 * HOUR).rows
    assert (ann.gpu_hours, ann.idle_gpu_hours) == (2, 2)


@pytest.mark.parametrize("by", ["partition", "node", "user", "job"])
def test_of_gpus_that_two_jobs_had_each_has_half(by: By) -> None:
    """Job a has GPUs 0 to 3 of dgx1 for 10 h, job b GPUs 2 and 3 for 4 of these: 2 x 4 h count for both."""
    runs = [
        run("a", {"dgx1": 4}, 0, 10 * HOUR, user="ann", shareable={"dgx1": (0, 1, 2, 3)}),
        run("b", {"dgx1": 2}, 3 * HOUR, 7 * HOUR, user="bob", shareable={"dgx1": (2, 3)}),
        run("c", {"dgx2": 2}, 0, 10 * HOUR, user="cal", shareable={"dgx2": (2, 3)}),
        run("d", {"dgx1": 2}, 10 * HOUR, 20 * HOUR, user="dan", shareable={"dgx1": (2, 3)}),
    ]
    made = report(runs, [], by, until=100 * HOUR)
    assert made.total.gpu_hours == pytest.approx(40 + 20 + 20)
    if by in ("user", "job"):
        wanted = {"a": 36.0, "b": 4.0, "c": 20.0, "d": 20.0}
        users = {"a": "ann", "b": "bob", "c": "cal", "d": "dan"}
        found = {one.name: one.gpu_hours for one in made.rows}
        assert found == pytest.approx({users[job] if by == "user" else job: hours for job, hours in wanted.items()})
        part = row(made, "bob" if by == "user" else "b").utilization
        alone = report(runs[1:2], [], by, until=100 * HOUR, firsts={"A100": 0.0})
        assert part == pytest.approx((row(alone, "bob" if by == "user" else "b").utilization or 0) / 2)
    early = report(runs, [], by, until=5 * HOUR)  # both still run: 2 GPUs for 2 h are both's
    assert early.total.gpu_hours == pytest.approx(20 + 10)


def total_of(rows: tuple[PowerRow, ...], field: str) -> float:
    return sum(getattr(r, field) or 0.0 for r in rows)


@given(workloads())
def test_sums_agree_however_they_are_cut(work: tuple[list[RunRecord], list[UsageRow]]) -> None:
    runs, usage = work
    made = {by: report(runs, usage, by, until=100 * HOUR) for by in ("partition", "node", "user", "job")}
    held = total_of(made["partition"].rows, "gpu_hours")
    for by, one in made.items():
        assert one.total.gpu_hours == pytest.approx(total_of(one.rows, "gpu_hours"))
        assert one.total.gpu_hours == pytest.approx(held)
        assert (one.total.energy_kwh or 0) == pytest.approx(total_of(one.rows, "energy_kwh"))
        assert (one.total.inefficient_kwh or 0) == pytest.approx(total_of(one.rows, "inefficient_kwh"))
        assert one.total.utilization == pytest.approx(made["partition"].total.utilization)
        if by in ("user", "job"):
            assert total_of(one.rows, "utilization") == pytest.approx(one.total.utilization or 0)
            assert (one.total.energy_kwh or 0) + (one.unheld_kwh or 0) == pytest.approx(
                made["partition"].total.energy_kwh or 0
            )
    for partition in (A100, V100):
        whole = row(made["partition"], partition.name)
        parts = [row(made["node"], n.name) for n in partition.nodes]
        if whole.utilization is not None:
            assert sum(p.utilization or 0 for p in parts) / 2 == pytest.approx(whole.utilization)


@given(workloads())
def test_ratios_stay_ratios(work: tuple[list[RunRecord], list[UsageRow]]) -> None:
    for by in ("partition", "node", "user", "job"):
        for r in report(*work, by, until=100 * HOUR).rows:
            assert r.energy_unknown_share is None or 0 <= r.energy_unknown_share <= 1
            assert r.inefficient_kwh is None or 0 <= r.inefficient_kwh <= (r.rated_kwh or 0)
            assert r.measured_utilization is None or 0 <= r.measured_utilization <= 1


def test_since_goes_back_no_further_than_the_epoch_and_not_to_now() -> None:
    assert parse_since("200d", 100 * DAY) == 0.0
    with pytest.raises(UsageError, match="future"):
        parse_since("now", 100 * DAY)


@pytest.mark.parametrize(
    ("since", "until", "period"),
    [
        ("7d", None, (93 * DAY, math.inf)),
        ("7d", "1d", (93 * DAY, 99 * DAY)),
        ("7d", "now", (93 * DAY, 100 * DAY)),
        ("1970-03-01T00:00:00Z", "1970-03-01T00:00:01Z", (59 * DAY, 59 * DAY + 1)),
        ("7d", "7d", None),
        ("7d", "8d", None),
        ("7d", "soon", None),
    ],
)
def test_periods_end_after_they_begin(since: str, until: str | None, period: tuple[float, float] | None) -> None:
    if period is not None:
        assert parse_period(since, until, 100 * DAY) == period
    else:
        with pytest.raises(UsageError, match=f"--until '?{until}'? is"):
            parse_period(since, until, 100 * DAY)


def test_runs_and_partitions_outside_the_window_count_nothing() -> None:
    """Two runs that end before it or begin after it; a partition whose first start is its end has no window yet."""
    runs = [run("old", {"dgx1": 8}, -9 * HOUR, -HOUR), run("new", {"dgx1": 8}, 11 * HOUR, 12 * HOUR)]
    a100 = row(report(runs, [], until=10 * HOUR), "A100")
    assert (a100.gpu_hours, a100.utilization) == (0.0, 0.0)
    assert row(report([], [], until=HOUR, firsts={"A100": HOUR}), "A100").utilization is None
    assert row(report([], [], until=HOUR, firsts={"A100": HOUR - 1}), "A100").hours == pytest.approx(1 / 3600)


def test_holders_come_by_gpu_hours_then_energy_then_name() -> None:
    runs = [run(j, {"dgx1": n}, 0, HOUR) for j, n in (("b", 1), ("a", 1), ("c", 1), ("d", 2))]
    made = report(runs, [use("dgx1", "c", gpu_s=9.0, energy_j=3.6e6)], "job", until=HOUR)
    assert [r.name for r in made.rows] == ["d", "c", "a", "b"]


def test_energy_unknown_is_a_part_of_the_gpu_time_that_there_is() -> None:
    """Of 16 GPU hours of the partition's two nodes 4 were measured, of which 1 had no counter: 13 of 16 unknown."""
    usage = [use("dgx1", gpu_s=4 * HOUR, energy_j=3.6e6, energy_unknown_s=HOUR)]
    a100 = row(report([], usage, until=HOUR), "A100")
    assert (a100.energy_kwh, a100.energy_unknown_share) == (pytest.approx(1.0), pytest.approx(13 / 16))
    made = report([run("j", {"dgx1": 4}, 0, HOUR)], [use("dgx1", "j", gpu_s=4 * HOUR, energy_unknown_s=HOUR)], "job",
                  until=HOUR)  # fmt: skip
    assert made.rows[0].energy_unknown_share == pytest.approx(0.25)
    assert made.unheld_kwh is None
    nobodys = [use("dgx1", gpu_s=50, energy_unknown_s=50), use("dgx2", gpu_s=9, energy_j=7.2e6)]
    assert report([], nobodys, until=HOUR).unheld_kwh == pytest.approx(2.0)
    assert report([], nobodys[:1], until=HOUR).unheld_kwh is None


@pytest.mark.parametrize(("days", "first"), [(0.5, 600), (0.999, 600), (1.0, 0), (3.0, 0)])
def test_buckets_of_the_window_whole_and_of_long_ago_by_the_hour(tmp_path: Path, days: float, first: int) -> None:
    """From 850 s on: the bucket of 600 is the first, and for a day or more the hour's, since only that may be kept."""
    store, until = Store.create_or_open(tmp_path), 850 + days * DAY
    ends = int(until // 300) * 300
    store.add_usage([use("dgx1", bucket=b, gpu_s=300.0, energy_j=3.6e6) for b in (0, 300, 600, 900, ends, ends + 300)])
    store.add_usage([use("dgx3", bucket=900, gpu_s=300.0, energy_j=7.2e6)])
    made = power_report(store, INVENTORY, since=850.0, until=until, by="partition")
    assert row(made, "A100").energy_kwh == pytest.approx(len([b for b in (0, 300, 600, 900, ends) if b >= first]))
    assert made.total.energy_kwh == pytest.approx((row(made, "A100").energy_kwh or 0) + 2)
    only = power_report(store, INVENTORY, since=850.0, until=until, by="partition", partition="V100")
    assert [(r.name, r.energy_kwh) for r in only.rows] == [("V100", pytest.approx(2.0))]
    assert only.total.energy_kwh == pytest.approx(2.0)
    with pytest.raises(UsageError, match="there is no partition"):
        power_report(store, INVENTORY, since=0.0, until=until, by="node", partition="V10")
    store.close()


def test_a_report_reads_no_row_for_every_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 nodes a week's are five million, which took gigabytes; of jobs that are idle now, all theirs are read."""
    begin, end = 20 * 3600, 68 * 3600
    asked = builders.spec(partition="A100", gpus_per_node=1)
    jobs = [
        builders.job(name, spec=asked, nodes={"dgx1": (gpu,)}, start_time=1.0)
        for gpu, name in enumerate(("busy", "idle"))
    ]
    parts = [
        use("dgx1", job.id, bucket=at, gpu_s=300.0, util_known_s=300.0, idle_s=300.0 * (job.id == "idle" or at < begin))
        for job in jobs for at in range(0, end, 300)
    ]  # fmt: skip
    read: list[UsageRow] = []
    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs(jobs)
        store.add_usage([*parts, *(use("dgx2", bucket=at, gpu_s=2400.0) for at in range(0, end, 300))])
        rows_of = store._usage_rows
        monkeypatch.setattr(store, "_usage_rows", lambda *given: [read.append(r) or r for r in rows_of(*given)])
        made = power_report(store, INVENTORY, since=begin, until=end, by="job")
    assert [(held.job, held.idle_s) for held in made.held_idle] == [("idle", end - begin)]
    assert sum(row.job_id == "idle" for row in read) > end // 300
    assert sum(row.job_id != "idle" for row in read) < 20
