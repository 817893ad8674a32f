"""A restored store, settled by what nodes show and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.cutting import settle_cuts
from gpusched.controller.ledger import run_of
from gpusched.controller.planning import Planner
from gpusched.controller.promoting import LivePolicies
from gpusched.controller.recovery.settling import UNKNOWN_OUTCOME, NodeEvidence, Settled, settle
from gpusched.controller.recovery.unsettled import UnsettledNodes, leave_unsettled
from gpusched.model.arrays import restricted_row, tasks_of
from gpusched.model.attemptrecords import AttemptRecord
from gpusched.model.jobs import Elastic, JobRecord, JobState, container_name
from gpusched.model.readings import ContainerReading, Gpu, NodeReading
from gpusched.model.slices import Cut, MigSlice
from gpusched.nodes.records import NodeRecords
from gpusched.queue.clock import shift_times
from gpusched.queue.snapshots import held_gpus, used_gpus
from gpusched.queue.store import CutState, NodeRecord, RankRecord, Store
from tests.builders import job, spec
from tests.controller.imagined import inventory

NOW = 10_000.0
A, B, C = (node.name for node in inventory().nodes)
PARTITION = inventory().nodes[0].partition


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path)
    yield store
    store.close()


def one(job_id: str = "j", state: JobState = JobState.STARTING, node: str = A, **more: Any) -> JobRecord:
    allocated = {"nodes": {node: (0,)}} if state is not JobState.PENDING else {}
    return job(job_id, state, **allocated, **{"spec": spec(partition=PARTITION), **more})


def record(of: JobRecord, rank: int = 0, at: float = 9_000.0, joules: float = 0.0) -> AttemptRecord:
    counters = (Gpu(index=0, uuid="u", energy_j=joules),)
    return AttemptRecord(
        job=of, rank=rank, runtime="podman", time=at, intended_at=at, boot_id="b", gpus=counters, read=at
    )  # fmt: skip


def reading(node: str, *running: JobRecord, joules: float = 0.0, time: float = NOW) -> NodeReading:
    names = [container_name(j.id, j.attempt, p.rank) for j in running for p in j.allocation.parts if p.node == node]  # type: ignore[union-attr]
    containers = tuple(ContainerReading(name=name, phase="running") for name in names)
    gpus = (Gpu(index=0, uuid="u", energy_j=joules),)
    return NodeReading(node=node, time=time, boot_id="b", source="nvml", gpus=gpus, containers=containers)


def evidence(
    node: str = A, live: tuple[AttemptRecord, ...] = (), ended: tuple[AttemptRecord, ...] = (), **more: Any
) -> dict[str, NodeEvidence]:
    shown = reading(node, *(r.job for r in live), **more)
    return {node: NodeEvidence(shown, NodeRecords(list(live), list(ended), []))}


def settled(store: Store, nodes: Mapping[str, NodeEvidence], silent: tuple[str, ...] = ()) -> Settled:
    every = {name: NodeEvidence(reading(name), NodeRecords([], [], [])) for name in (A, B, C)}
    asked = {name: found for name, found in (every | dict(nodes)).items() if name not in silent}
    with store.transaction():
        return settle(store, inventory(), asked, set(silent), NOW)


def kept(store: Store, job_id: str = "j") -> JobRecord:
    found = store.job(job_id)
    assert found is not None
    return found


def outcome(found: Settled) -> list[tuple[str, str]]:
    return [(one.id, one.outcome) for one in found.jobs]


def test_a_launch_since_the_backup_is_adopted_and_its_command_file_not_applied_again(store: Store) -> None:
    assert outcome(settled(store, evidence(live=(record(one()),)))) == [("j", "recovered")]
    assert kept(store) == one()
    (rank,) = store.ranks()
    assert (rank.node, rank.launched_at, rank.runtime, rank.collected) == (A, 9_000.0, "podman", False)
    assert store.was_applied("j.submit")
    assert settled(store, evidence(live=(record(one()),))).strays == []


def test_a_job_that_ended_during_recovery_is_not_started_again(store: Store) -> None:
    store.put_jobs([one(state=JobState.PENDING, attempt=0)])
    done = one(state=JobState.FAILED, exit_code=3, start_time=9_100.0, end_time=9_200.0)
    assert outcome(settled(store, evidence(ended=(record(done),)))) == [("j", "settled")]
    assert (kept(store).state, kept(store).exit_code) == (JobState.FAILED, 3)
    assert store.ranks() == []


def test_a_requeued_attempt_waits_again_and_the_next_one_counts(store: Store) -> None:
    store.put_jobs([one(state=JobState.RUNNING)])
    back = record(one(state=JobState.PENDING), at=9_100.0)
    settled(store, evidence(ended=(back,)))
    assert kept(store).state == JobState.PENDING
    again = record(one(attempt=2, node=B), at=9_200.0)
    settled(store, evidence(ended=(back,)) | evidence(B, live=(again,)))
    assert (kept(store).state, kept(store).attempt) == (JobState.STARTING, 2)


def test_an_older_record_changes_nothing(store: Store) -> None:
    later = one(state=JobState.COMPLETED, attempt=2, end_time=9_500.0)
    store.put_jobs([later, one("k", JobState.RUNNING, attempt=3, node=B)])
    live = record(one("k", attempt=3, node=B))
    old = evidence(ended=(record(one(state=JobState.FAILED)),))
    assert outcome(settled(store, old | evidence(B, live=(live,)))) == [("k", "running")]
    assert kept(store) == later


def test_an_active_job_without_a_trace_ends_as_unknown_but_not_while_its_node_is_silent(store: Store) -> None:
    store.put_jobs([one(state=JobState.RUNNING, start_time=1.0)])
    found = settled(store, {}, silent=(A,))
    assert (outcome(found), kept(store).state) == ([("j", "unknown")], JobState.RUNNING)
    assert found.jobs[0].note == f"{A} does not answer"
    settled(store, {})
    assert (kept(store).state, kept(store).reason) == (JobState.NODE_FAIL, UNKNOWN_OUTCOME)


def test_a_task_leaves_the_row_of_its_array(store: Store) -> None:
    row = one("a_[0-2]", JobState.PENDING, array_id="a", tasks=((0, 2),), attempt=0)
    store.put_jobs([row])
    task = msgspec.structs.replace(
        list(tasks_of([row]))[1], state=JobState.STARTING, attempt=1, allocation=one("a_1").allocation
    )
    settled(store, evidence(live=(record(task),)))
    assert kept(store, "a_1").state == JobState.STARTING
    assert [row.count for row in store.pending_rows()] == [2]


def test_a_gangs_missing_rank_is_launched_only_if_the_gang_has_not_begun(store: Store) -> None:
    gang = job("g", JobState.STARTING, {A: (0,), B: (0,)}, spec=spec(partition=PARTITION, nodes=2))
    first = record(gang)
    waits = {A: NodeEvidence(reading(A), NodeRecords([first], [], []))}
    settled(store, waits)
    assert {rank.node: rank.launched_at for rank in store.ranks()} == {A: 9_000.0, B: None}
    for rank in store.ranks():
        store.remove_rank(rank)
    store.put_jobs([msgspec.structs.replace(gang, state=JobState.PENDING, attempt=0, allocation=None)])
    settled(store, evidence(live=(first,)))
    assert {rank.node: rank.launched_at for rank in store.ranks()} == {A: 9_000.0, B: 9_000.0}


def test_energy_of_the_lost_time_is_charged_to_the_holders_of_the_gpu(store: Store) -> None:
    """Backup at 8,000 s; one job from 8,200 to 8,400, another since 8,600 s."""
    store.put_nodes([NodeRecord(name=A, reading=reading(A, joules=1000.0, time=8_000.0))])
    done = one("d", JobState.COMPLETED, start_time=8_250.0, end_time=8_400.0)
    ended = msgspec.structs.replace(record(done, at=8_200.0, joules=1500.0), time=8_400.0, read=8_400.0)
    begun = msgspec.structs.replace(record(one("r"), at=8_600.0, joules=1600.0), read=8_500.0)
    settled(store, evidence(live=(begun,), ended=(ended,), joules=4600.0))
    assert store.job_energy("r") == pytest.approx(3000.0)
    assert kept(store, "d").energy_j == store.job_energy("d") == pytest.approx(250.0)
    assert sum(row.energy_j for row in store.usage(0.0)) == pytest.approx(3600.0)


def test_a_slice_that_was_let_go_takes_nothing_of_the_gpu_that_is_whole_again(store: Store) -> None:
    store.put_nodes([NodeRecord(name=A, reading=reading(A, joules=1000.0, time=8_000.0))])
    done = job(
        "d", JobState.COMPLETED, {A: (1000,)}, spec=spec(partition=PARTITION, profile="1g.10gb"), end_time=8_400.0
    )
    ended = msgspec.structs.replace(record(done, at=8_200.0, joules=1700.0), time=8_400.0, read=8_400.0)
    begun = msgspec.structs.replace(record(one("r"), at=8_600.0, joules=1700.0), read=8_500.0)
    settled(store, evidence(live=(begun,), ended=(ended,), joules=4700.0))
    assert (store.job_energy("d"), store.job_energy("r")) == (pytest.approx(50.0), pytest.approx(3000.0))


def cut_reading(*running: JobRecord, joules: float = 0.0, time: float = NOW) -> NodeReading:
    """GPU 0 of node A is cut into three."""
    slices = tuple(MigSlice(gpu=0, start=start, size=1, profile="1g.10gb", uuid=f"MIG-{start}") for start in range(3))
    shown = reading(A, *running, joules=joules, time=time)
    return msgspec.structs.replace(shown, gpus=(msgspec.structs.replace(shown.gpus[0], mig_mode=True, slices=slices),))


@pytest.mark.parametrize("has_backup", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_slices_are_their_jobs_again(store: Store, has_backup: bool, is_late: bool) -> None:
    """One job ran in a slice of the GPU since the backup, another runs in the next; ``is_late``: as above."""
    if has_backup:
        store.put_nodes([NodeRecord(name=A, reading=cut_reading(joules=1000.0, time=8_000.0))])
    asked = spec(partition=PARTITION, profile="1g.10gb")
    done = job("d", JobState.COMPLETED, {A: (1000,)}, spec=asked, start_time=8_200.0, end_time=8_400.0)
    runs = job("r", JobState.STARTING, {A: (1001,)}, spec=asked)
    ended = msgspec.structs.replace(record(done, at=8_200.0, joules=1700.0), time=8_400.0, read=8_400.0)
    live = msgspec.structs.replace(record(runs, at=8_600.0, joules=1700.0), read=8_600.0)
    node = NodeEvidence(cut_reading(runs, joules=4500.0), NodeRecords([live], [ended], []))
    if is_late:
        settled(store, {}, silent=(A,))
    found = settled(store, {A: node})
    assert (sorted(outcome(found)), found.strays) == ([("d", "recovered"), ("r", "recovered")], [])
    assert [(rank.job_id, rank.node, rank.gpus) for rank in store.ranks()] == [("r", A, (1001,))]
    assert held_gpus(store.active()) == {A: {1001: ("r",)}}
    assert used_gpus(store.active(), store.ranks()) == {(A, 0)}, "so that its GPU is not cut anew"
    assert [one.number for one in store.node_readings()[A].gpus[0].slices] == [1000, 1001, 1002]
    assert store.job_energy("r") == pytest.approx(2800.0 / 7)
    assert kept(store, "d").energy_j == (pytest.approx(350.0 / 7) if has_backup else None)
    gpu_s = {name: sum(row.gpu_s for row in store.usage_of_job(name)) for name in "dr"}
    assert gpu_s == pytest.approx({"d": 200.0 / 7 if has_backup else 0.0, "r": 1400.0 / 7})
    assert {run.job_id: (run.gpus, run.nodes) for run in store.runs(0.0, NOW)}["d"] == (pytest.approx(1 / 7), {A: 1})


def test_a_cut_that_the_backup_has_under_way_is_judged_by_what_the_node_shows(store: Store) -> None:
    cut = Cut(A, 0, tuple(("1g.10gb", start) for start in range(3)))
    store.put_nodes([NodeRecord(name=A, cuts={0: CutState(cut=cut, began=8_000.0)})])
    settled(store, {A: NodeEvidence(cut_reading(), NodeRecords([], [], []))})
    restored = store.node_record(A)
    assert restored is not None
    assert restored.cuts[0].under_way, "nothing is begun on it before the controller has judged it"
    after, events = settle_cuts(restored, NodeObservation(began=NOW, result=cut_reading()), (), NOW)
    assert (after.cuts, [event.kind for event in events]) == ({}, ["gpu_cut"])


def test_a_run_that_the_backup_has_open_is_closed(store: Store) -> None:
    running = one(state=JobState.RUNNING, start_time=7_000.0)
    store.put_jobs([running])
    store.open_run(run_of(running, inventory()))
    done = msgspec.structs.replace(running, state=JobState.COMPLETED, end_time=9_000.0, exit_code=0)
    new = one("n", JobState.COMPLETED, node=B, start_time=8_000.0, end_time=8_500.0)
    settled(store, evidence(ended=(record(done),)) | evidence(B, ended=(record(new),)))
    runs = sorted(store.runs(0.0, NOW), key=lambda run: run.job_id)
    assert [(run.job_id, run.start_time, run.end_time, run.outcome) for run in runs] == [
        ("j", 7_000.0, 9_000.0, "COMPLETED"), ("n", 8_000.0, 8_500.0, "COMPLETED"),
    ]  # fmt: skip


def test_a_record_of_an_ended_job_that_does_not_say_when_is_of_its_own_time(store: Store) -> None:
    settled(store, evidence(ended=(record(one(state=JobState.FAILED, start_time=8_000.0), at=8_500.0),)))
    assert kept(store).end_time == 8_500.0
    assert [run.end_time for run in store.runs(0.0, NOW)] == [8_500.0]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_has_joined_a_hot_job_since_keeps_its_gpus(store: Store, is_late: bool) -> None:
    """``is_late``: its node answers after the others, when it is asked alone."""
    elastic = Elastic(sizes=(1, 2), base_gpus=1, base_cores=1, base_memory_mib=1024, rank_gpus=1)
    asked = spec(partition=PARTITION, elastic=elastic)
    before = job("h", JobState.RUNNING, {A: (0,)}, spec=asked, start_time=7_000.0)
    store.put_jobs([before])
    store.open_run(run_of(before, inventory()))
    grown = job("h", JobState.RUNNING, {A: (0,), B: (3,)}, spec=asked, start_time=7_000.0)
    first, joined = record(before, at=7_000.0), record(grown, rank=1, at=9_000.0)
    nodes = {
        A: NodeEvidence(reading(A, before), NodeRecords([first], [], [])),
        B: NodeEvidence(reading(B, grown), NodeRecords([joined], [], [])),
    }
    if is_late:
        assert outcome(settled(store, {A: nodes.pop(A)}, silent=(B,))) == [("h", "running")]
    with store.transaction():
        found = settle(store, inventory(), nodes, set(), NOW)
    assert (outcome(found), found.strays) == ([("h", "settled")], [])
    assert held_gpus(store.active()) == {A: {0: ("h",)}, B: {3: ("h",)}}
    assert (kept(store, "h").spec.nodes, kept(store, "h").spec.gpus) == (2, 2)
    parts = [(run.start_time, run.end_time, run.gpus) for run in store.runs_of_attempt("h", 1)]
    assert parts == [(7_000.0, NOW, 1), (NOW, None, 2)]
    assert sorted((rank.node, rank.gpus) for rank in store.ranks() if rank.node == B) == [(B, (3,))]


@pytest.mark.parametrize("is_open", [False, True])
def test_runs_and_energy_of_an_earlier_attempt_come_back(store: Store, is_open: bool) -> None:
    """It was stopped for another job and waits again, or has begun again elsewhere; ``is_open``: as in the backup."""
    store.put_nodes([NodeRecord(name=A, reading=reading(A, joules=1000.0, time=8_000.0))])
    first = one(state=JobState.RUNNING, start_time=8_100.0)
    run = msgspec.structs.replace(run_of(first, inventory()), end_time=8_500.0, outcome="PREEMPTED")
    if is_open:
        store.put_jobs([first])
        store.open_run(run)
    back = one(state=JobState.PENDING)
    back = msgspec.structs.replace(back, allocation=None)
    kept_there = msgspec.structs.replace(
        record(back, at=8_100.0, joules=5000.0), time=8_600.0, read=8_600.0, held=(0,), runs=(msgspec.to_builtins(run),)
    )
    again = record(one(attempt=2, node=B), at=9_200.0)
    settled(store, evidence(ended=(kept_there,), joules=5000.0) | evidence(B, live=(again,)))
    assert [(r.job_id, r.attempt, r.start_time, r.end_time, r.outcome) for r in store.runs(0.0, NOW)] == [
        ("j", 1, 8_100.0, 8_500.0, "PREEMPTED")
    ]
    assert (kept(store).state, kept(store).attempt) == (JobState.STARTING, 2)
    assert sum(row.gpu_s for row in store.usage_of_job("j") if row.node == A) == pytest.approx(400.0)
    assert store.job_energy("j") == pytest.approx(4000.0 * 400 / 600)


def test_attempts_without_a_record_are_named(store: Store) -> None:
    store.put_ranks([RankRecord(job_id="k", attempt=1, rank=0, node=A, runtime="podman")])
    shown = reading(A, one("k"), one("old"))
    found = settled(store, {A: NodeEvidence(shown, NodeRecords([], [], []))})
    assert found.strays == [(A, "gpusched-old-1-0")]


def test_only_jobs_of_before_the_recovery_wait_for_a_silent_node(store: Store) -> None:
    leave_unsettled(store, [C], 5_000.0, 0.0)
    unsettled = UnsettledNodes(store, "c")
    before, after = one("b", JobState.PENDING, submit_time=4_000.0), one("n", JobState.PENDING, submit_time=6_000.0)
    assert unsettled.reasons(inventory(), [before, after]).keys() == {"b"}
    store.put_jobs([before, after])
    shift_times(store, 3_600.0, NOW)  # a new login node gets the time
    unsettled = UnsettledNodes(store, "c")
    assert unsettled.reasons(inventory(), store.pending()).keys() == {"b"}, "or it would run twice"
    without = msgspec.structs.replace(inventory(), partitions=())
    assert unsettled.withhold(without, {}, NOW) == {}
    assert UnsettledNodes(store, "c").reasons(inventory(), [before]) == {}, "a node that left is given up"


def test_why_an_array_waits_for_a_silent_node_is_stored_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row was deleted in one commit and inserted in the next: killed in between, all its tasks were lost."""
    row = restricted_row(one("b", JobState.PENDING, array_id="b", submit_time=4_000.0), ((0, 9),))
    store.put_jobs([row])
    leave_unsettled(store, [C], 5_000.0, 0.0)
    planner = Planner(store, *[None] * 3, UnsettledNodes(store, "c").reasons)  # type: ignore[arg-type, list-item]

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "_insert", killed)
        with pytest.raises(KeyboardInterrupt):
            planner.plan(inventory(), LivePolicies({}, {}), frozenset(), NOW)
    assert [job.tasks for job in store.pending_rows()] == [((0, 9),)]
    planner.plan(inventory(), LivePolicies({}, {}), frozenset(), NOW)
    assert [job.reason for job in store.pending_rows()] == ["ReqNodeNotAvail"]
