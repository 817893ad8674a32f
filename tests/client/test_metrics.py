"""Metrics of a store: what each says, and texts that Prometheus reads."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.client.metrics import collect, write_textfile
from gpusched.controller.metering import Metering, Timings
from gpusched.model.events import Event
from gpusched.model.gpustates import gpu_states, plain_states
from gpusched.model.jobs import JobState
from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas
from gpusched.model.metrics import METRICS, Histogram
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.queue.lastgood import Declared, store_declared
from gpusched.queue.lease import STANDBYS
from gpusched.queue.metrics import ReadingFigures
from gpusched.queue.store import NodeRecord, Store, UsageRow
from gpusched.views.metrics import metrics_text
from tests import builders
from tests.builders import spec

T = 1_800_000_000.0
STRANGE = 'a"b\\c\nd'
Values = dict[tuple[str, ...], float | Histogram]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create_or_open(tmp_path)


def values(store: Store, name: str) -> Values:
    """The samples of a metric, by labels."""
    return {labels: value for f in collect(store) if f.metric is METRICS[name] for labels, value in f.samples}


def node(name: str = "n0", gpus: int = 2, partition: str = "p") -> Node:
    return Node(
        name=name, partition=partition, address=name, gpus=gpus, cores=8, memory_mib=1, runtime="podman", gpu_type="A"
    )


def read(*gpus: Gpu, source: str = "nvml") -> NodeReading:
    return NodeReading(node="n0", time=T, source=source, gpus=gpus, containers=())  # type: ignore[arg-type]


def busy_store(store: Store) -> None:
    """Something of everything."""
    kept = Metering(store, Timings())
    lit = Gpu(index=0, utilization_pct=50.0, power_w=100.0)
    store.put_nodes([
        NodeRecord(name="n0", state=NodeState.MIXED, declared=node(), reading=read(lit, Gpu(index=1))),
        NodeRecord(name="n1", state=NodeState.DOWN, declared=node("n1"), reading=read(lit, Gpu(index=1))),
    ])  # fmt: skip
    store.put_jobs([
        builders.job("r", nodes={"n0": (0,)}, submit_time=T),
        builders.job("w", JobState.PENDING, reason="Resources", spec=spec(gpus_per_node=4, nodes=2)),
        builders.job("h", JobState.PENDING, reason="JobHeldUser", spec=spec(partition=STRANGE)),
        builders.job("e", JobState.FAILED),
    ])  # fmt: skip
    store.add_usage([UsageRow(bucket=0, node="n0", job_id="r", user="u", partition="p", gpu_s=9.0, energy_j=1e9)])
    store.append([Event(time=T + 7, kind="running", job_id="r", data={"attempt": 1})])
    store.append([Event(time=T, kind="ended", job_id="e", data={"to": "FAILED"})])
    store.set_meta("heartbeat", str(T))
    kept.count(0.03)
    kept.write()


def test_the_queue_and_the_gpus(store: Store) -> None:
    busy_store(store)
    assert values(store, "jobs") == {("p", "PENDING"): 1, ("p", "RUNNING"): 1, (STRANGE, "PENDING"): 1}
    assert values(store, "pending_jobs") == {("p", "Resources"): 1, (STRANGE, "JobHeldUser"): 1}
    assert values(store, "pending_gpus") == {("p",): 8, (STRANGE,): 1}
    assert values(store, "nodes") == {("p", "MIXED"): 1, ("p", "DOWN"): 1}
    by_state = {("p", "A", "ALLOCATED"): 1, ("p", "A", "FREE"): 1, ("p", "A", "UNKNOWN"): 2}
    assert values(store, "gpus") == by_state
    assert values(store, "node_up") == {("n0", "p"): 1.0, ("n1", "p"): 0.0}
    assert values(store, "node_gpus_allocated") == {("n0", "p"): 1, ("n1", "p"): 0}
    assert values(store, "node_gpu_utilization_ratio") == {("n0", "p"): 0.5}, "of a silent node nothing is known"
    assert values(store, "job_ends") == {("p", "FAILED"): 1}
    (waits,) = values(store, "job_wait_seconds").values()
    assert isinstance(waits, Histogram)
    assert waits.sum == 7.0


def test_no_store_and_an_empty_one_have_metrics_too(store: Store) -> None:
    assert [family.metric.name for family in collect(None)] == ["gpusched_build_info"]
    assert values(store, "controller_last_cycle_timestamp_seconds") == {}
    assert values(store, "inventory_valid") == {(): 1.0}
    assert values(store, "controller_standbys") == {(): 0.0}
    assert store.standbys() == ""
    store.set_meta(STANDBYS, "login1, login2")
    assert values(store, "controller_standbys") == {(): 2.0}


@pytest.mark.parametrize(
    "gpu",
    [
        Gpu(index=0), Gpu(index=0, error="lost"), Gpu(index=0, mig_mode=True), Gpu(index=0, ecc_errors=1), Gpu(index=7),
        Gpu(index=0, processes=(GpuProcess(pid=1),)), Gpu(index=0, memory_used_mib=9999),
    ],
)  # fmt: skip
@pytest.mark.parametrize("held", [{}, {0: ("j",)}, {1: ("j",)}, {0: ("j",), 1: ("j", "k")}])
@pytest.mark.parametrize("source", ["nvml", "none"])
def test_states_without_reasons_are_those_with_them(gpu: Gpu, held: dict[int, tuple[str, ...]], source: str) -> None:
    for reading in (None, read(gpu, Gpu(index=1), source=source)):
        found = gpu_states(node(), reading, held)
        if reading is None or source == "none":
            continue
        figures = msgspec.json.decode(msgspec.json.encode(reading), type=ReadingFigures)
        plain = plain_states(node().indices(), {one.index: one for one in figures.gpus}, held)
        assert plain in (None, [status.state for status in found])
        assert plain is not None or gpu != Gpu(index=0)


def test_limits_of_groups_and_classes_but_not_of_each_user(store: Store) -> None:
    limits = Limits(gpus=8, gpu_hours=10.0)
    lab, idle = Group(name="lab", members={"alice": 1}, limits=limits), Group(name="idle", limits=Limits(jobs=3))
    groups = Groups(groups=(lab, idle))
    quotas = Quotas(each=Limits(gpus=1), groups=groups, qos=(Qos(name="high", limits=Limits(jobs=5)),))
    partition = Partition(name="p", nodes=(node(),), flavors=())
    declared = Declared(Inventory(path="/x", partitions=(partition,), quotas=quotas), {})
    store_declared(store, declared)
    store.put_jobs([builders.job("r", nodes={"n0": (0, 1)}, start_time=T, spec=spec(group="lab", gpus_per_node=2))])
    limit = values(store, "quota_limit")
    assert limit == {
        ("group", "lab", "gpus"): 8, ("group", "lab", "gpu_seconds"): 36000, ("group", "idle", "jobs"): 3,
        ("class", "high", "jobs"): 5,
    }  # fmt: skip
    used = values(store, "quota_used")
    assert (used["group", "lab", "gpus"], used["group", "idle", "jobs"], used["class", "high", "jobs"]) == (2, 0, 0)


# -- texts


def parsed(text: str) -> dict[str, Any]:
    """The families of an OpenMetrics text, read by the strict parser of Prometheus' own client."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_openmetrics_says_the_same_with_every_value(store: Store) -> None:
    busy_store(store)
    families = collect(store)
    found = parsed(metrics_text(families))
    with_samples = [family for family in families if family.samples]
    assert list(found) == [family.metric.name for family in with_samples]
    for family in with_samples:
        theirs = found[family.metric.name]
        assert (theirs.type, theirs.documentation) == (family.metric.kind, family.metric.help)
        for labels, value in family.samples:
            named = dict(zip(family.metric.labels, labels, strict=True))
            if isinstance(value, Histogram):
                (count,) = (s.value for s in theirs.samples if s.name.endswith("_count") and s.labels == named)
                infinite = named | {"le": "+Inf"}
                (last,) = (s.value for s in theirs.samples if s.labels == infinite)
                assert count == last == sum(value.counts)
            else:
                assert [s.value for s in theirs.samples if s.labels == named] == [value]


def promtool(text: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)


def test_promtool_has_nothing_against_the_text_format_and_reads_openmetrics(store: Store) -> None:
    busy_store(store)
    checked = promtool(metrics_text(collect(store), openmetrics=False))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    # It reads OpenMetrics as if it were the text format, and so misses the help of counters.
    said = promtool(metrics_text(collect(store))).stderr.strip().splitlines()
    assert [line for line in said if not line.endswith("_total no help text")] == []
    assert promtool("gpusched_x{ 1\n").returncode == 1


def test_each_metric_is_called_by_the_rules_of_prometheus() -> None:
    for metric in METRICS.values():
        assert metric.help.endswith("."), metric
        assert not metric.name.endswith(("_total", "_count", "_bucket", "_sum")), metric


def test_a_text_file_is_replaced_at_once_and_read_by_all(tmp_path: Path) -> None:
    target = tmp_path / "gpusched.prom"
    mask = os.umask(0o077)
    try:
        write_textfile(str(target), "a 1\n")
        write_textfile(str(target), "a 2\n")
    finally:
        os.umask(mask)
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("a 2\n", 0o644)
    assert os.listdir(tmp_path) == ["gpusched.prom"]
    os.mkfifo(pipe := tmp_path / "pipe")  # or /dev/null, which root could replace
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_textfile(str(pipe), "a 3\n")
    assert (os.read(reader, 99), pipe.is_fifo()) == (b"a 3\n", True)
    os.close(reader)
    with pytest.raises(FileNotFoundError):
        write_textfile(str(tmp_path / "none" / "x.prom"), "a 1\n")


def test_a_damaged_row_of_totals_is_found(store: Store) -> None:
    from gpusched.queue.damage import DatabaseDamaged

    store.set_meta("metric_totals", "{")
    with pytest.raises(DatabaseDamaged):
        collect(store)
