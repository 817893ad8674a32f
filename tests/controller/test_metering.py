"""Totals of metrics: each event counted once, whenever the controller dies, and never fewer than before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.controller import metering
from gpusched.controller.metering import Metering, Timings
from gpusched.model.arrays import restricted_row
from gpusched.model.events import Event
from gpusched.model.jobs import JobState
from gpusched.model.metrics import Histogram, MetricTotals
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import NodeRecord, Store, UsageRow
from tests import builders
from tests.controller.imagined import inventory
from tests.controller.site import Site

T = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create_or_open(tmp_path)


def totals(store: Store) -> MetricTotals:
    found = store.metric_totals()
    assert found is not None
    return found


def test_a_job_of_the_real_cycle_is_counted_once_in_each_of_its_states(tmp_path: Path) -> None:
    site = Site(tmp_path)
    kept = Metering(site.store, site.cycle._timings)
    job = site.submit()
    site.turn(3)
    site.turn(2)
    kept.count(0.5)
    kept.write()
    found = totals(site.store)
    partition = site.job(job).spec.partition
    assert found.submitted == {partition: 1}
    assert found.started == {partition: 1}
    assert sum(found.waits[partition].counts) == 1
    assert {"commands", "observe", "record", "decide", "send"} == set(found.phases)
    assert (found.cycles.sum, sum(found.cycles.counts)) == (0.5, 1)


def test_a_wait_goes_from_the_submission_to_the_start_of_the_first_attempt(store: Store) -> None:
    kept = Metering(store, Timings())
    store.put_jobs([builders.job("j", submit_time=T - 100), builders.job("k", submit_time=T - 100, attempt=2)])
    store.append([Event(time=T, kind="running", job_id="j", data={"attempt": 1, "start": T - 40})])
    store.append([Event(time=T, kind="running", job_id="k", data={"attempt": 2, "start": T})])
    kept.write()
    waits = totals(store).waits["p"]
    assert (waits.sum, sum(waits.counts), totals(store).started) == (60.0, 1, {"p": 2})
    assert waits.counts[waits.bounds.index(60.0)] == 1, "a bound belongs to its bucket"


def test_tasks_that_end_together_are_counted_one_by_one_even_if_scattered(store: Store) -> None:
    kept = Metering(store, Timings())
    spans = tuple((i, i) for i in range(0, 600, 2))
    row = restricted_row(builders.job("a", JobState.PENDING, array_id="a", attempt=0), spans)
    store.put_jobs([row])
    ended, event = transition_to(row, JobState.CANCELLED, T, event="ended")
    store.put_jobs([ended])
    store.append([event])
    kept.write()
    assert totals(store).ended == {"p": {"CANCELLED": 300}}


def test_a_node_that_is_lost_counts_for_its_partition(store: Store) -> None:
    kept = Metering(store, Timings())
    node = inventory().nodes[0]
    store.put_nodes([NodeRecord(name=node.name, declared=node)])
    store.append([Event(time=T, kind="node_down", node=node.name), Event(time=T, kind="node_up", node=node.name)])
    store.append([Event(time=T, kind="agent_disabled", data={"partition": "q", "why": "x"})])
    kept.write()
    assert (totals(store).nodes_down, totals(store).fallbacks) == ({node.partition: 1}, {"q": 1})
    store.append([Event(time=T, kind="gpu_lost", node=node.name) for _ in range(3)])
    kept.write()
    assert totals(store).gpus_lost == {node.partition: 3}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4))
def test_whenever_it_dies_each_event_is_counted_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], limit: int
) -> None:
    """0: it dies before it writes; else so many events happen, and it writes."""
    store = Store.create_or_open(tmp_path_factory.mktemp("totals"))
    store.put_jobs([builders.job("j")])
    kept, happened = Metering(store, Timings()), 0
    kept.write()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metering, "MAX_EVENTS", limit)
        for step in steps:
            store.append([Event(time=T, kind="submitted", job_id="j")] * step)
            happened += step
            if not step:
                kept = Metering(store, Timings())
                continue
            kept.write()
        for _ in range(happened):
            kept.write()
    assert totals(store).submitted.get("p", 0) == happened
    store.close()


def test_removed_events_and_usage_do_not_lower_a_total(store: Store) -> None:
    kept = Metering(store, Timings())
    store.put_jobs([builders.job("j")])
    store.append([Event(time=T, kind="submitted", job_id="j")])
    row = UsageRow(bucket=0, node="n", job_id="j", user="u", partition="p", gpu_s=2.0, energy_j=5.0)
    store.add_usage([row, row, UsageRow(bucket=300, node="n", job_id="", user="", partition="p", gpu_s=1.0)])
    kept.write()
    before = totals(store), store.usage_totals()
    store._db.executescript("DELETE FROM events; DELETE FROM usage;")
    Metering(store, Timings()).write()
    assert totals(store).submitted == before[0].submitted == {"p": 1}
    assert store.usage_totals() == before[1]
    assert [(t.held, t.gpu_s, t.energy_j) for t in before[1]] == [(False, 1.0, 0.0), (True, 4.0, 10.0)]
    store.compact_usage(T, 3600)
    store.add_usage([row])
    assert [t.gpu_s for t in store.usage_totals()] == [1.0, 6.0]


def test_durations_are_counted_once(store: Store) -> None:
    timings = Timings()
    kept = Metering(store, timings)
    timings.decided("p", 0.004, late=False)
    for _ in range(2):
        timings.decided("p", 3.0, late=True)
    timings.phases["observe"] = 1.5
    kept.count(0.2)
    for _ in range(2):
        kept.write()
    found = totals(store)
    assert (sum(found.decisions["p"].counts), found.decisions["p"].sum) == (3, 6.004)
    assert (found.late, found.phases) == ({"p": 2}, {"observe": 1.5})


def test_rolled_back_usage_is_in_no_total(store: Store) -> None:
    row = UsageRow(bucket=0, node="n", job_id="j", user="u", partition="p", gpu_s=2.0)

    def fails() -> None:
        with store.transaction():
            store.add_usage([row])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert store.usage_totals() == []


def test_a_histogram_of_other_bounds_begins_anew(store: Store) -> None:
    old = MetricTotals(seq=0, waits={"p": Histogram.of((1.0,))})
    old.waits["p"].add(7.0)
    store.put_metric_totals(old)
    store.put_jobs([builders.job("j", submit_time=T)])
    store.append([Event(time=T, kind="running", job_id="j", data={"attempt": 1})])
    Metering(store, Timings()).write()
    assert totals(store).waits["p"].bounds == metering.WAIT_BUCKETS_S


def test_the_parts_of_a_cycle_are_timed_and_what_is_repeated_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.25, 0.5, 2.5, 4.5, 7.5, 9.0))
    monkeypatch.setattr(metering.time, "perf_counter", lambda: next(now))
    timings = Timings()
    timings.begin()
    for phase in ("probe", "decide", "probe", "decide"):
        timings.end(phase)
    assert timings.phases == {"probe": 5.0, "decide": 3.5}
