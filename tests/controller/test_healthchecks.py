"""Checks of the site's own: what results change, and which runs are due."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cluster.base import Operation, OperationOutcome
from gpusched.cluster.ssh import SshCluster
from gpusched.controller.healthchecks import (
    LOOK_S,
    CheckSchedule,
    awaits_checks,
    before_job_checks,
    operation_key,
    reasons_against_jobs,
    record_check,
)
from gpusched.model.healthchecks import (
    RECHECK_S,
    CheckRecord,
    CheckResult,
    CheckRun,
    HealthCheck,
    holding_reasons,
    open_conditions,
    with_result,
)
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.model.slices import MigSlice
from gpusched.nodes.healthcheck import parse_answer, run_check
from gpusched.nodes.local import LocalTransport
from gpusched.queue.store import SUSPENDED_BY, NodeRecord, RankRecord, Store
from tests.queue.records import job as job_record

NOW = 1_790_000_000.0
CHECK = HealthCheck(name="c", command="x", every_s=60)


def after(*values: float) -> CheckRecord:
    record = CheckRecord(node="n", check="c")
    for number, value in enumerate(values):
        record = with_result(record, CHECK, CheckResult(exit_code=0, value=value, unit="GB/s"), NOW + number)
    return record


def kinds(record: CheckRecord) -> list[str]:
    return [condition.kind for condition in open_conditions([record], [("n", CHECK)])]


def test_a_value_is_compared_with_the_median_of_those_before_it() -> None:
    assert kinds(after(100, 100, 100, 100, 1)) == [], "four values are too few"
    assert kinds(after(100, 100, 100, 100, 100, 79.9)) == ["check-slow"]
    assert kinds(after(100, 100, 100, 100, 100, 80)) == []
    # The median is of the last twenty: what was usual long ago does not count.
    assert kinds(after(*[1000] * 30, *[100] * 20, 90)) == []
    assert kinds(after(*[1000] * 30, *[100] * 9, 90)) == ["check-slow"]
    record = after(100, 100, 100, 100, 100, 50, 51)
    assert (record.slow_since, record.median, record.values[-1]) == (NOW + 5, 100, 51)
    assert len(after(*[1.0] * 300).values) == 200


def test_a_condition_keeps_the_time_at_which_it_opened() -> None:
    record = CheckRecord(node="n", check="c")
    for number, code in enumerate((0, 1, 2)):
        record = with_result(record, CHECK, CheckResult(exit_code=code, line=f"line {number}"), NOW + number)
    (condition,) = open_conditions([record], [("n", CHECK)])
    assert (condition.since, condition.detail) == (NOW + 1, "check c failed: line 2 (exit code 2)")
    assert condition.gpu is None
    record = with_result(record, CHECK, CheckResult(), NOW + 9)
    (condition,) = open_conditions([record], [("n", CHECK)])
    assert (condition.kind, condition.since) == ("check-hung", NOW + 9)
    assert open_conditions([record], []) == [], "of a check that is not declared any more"


@pytest.mark.parametrize(
    ("then", "held"), [("warn", {}), ("no-new-jobs", {"n": "check c failed: exit code 1"}), ("drain", {})]
)
def test_only_checks_declared_so_hold_their_node(then: str, held: dict[str, str]) -> None:
    record = with_result(CheckRecord(node="n", check="c"), CHECK, CheckResult(exit_code=1), NOW)
    check = msgspec.structs.replace(CHECK, then=then)
    assert holding_reasons(open_conditions([record], [("n", check)])) == held


def test_a_lost_run_runs_again_and_changes_nothing_else() -> None:
    before = msgspec.structs.replace(after(7.0), run="c.1", began=NOW)
    lost = with_result(before, CHECK, CheckResult(lost=True), NOW + 50)
    assert (lost.run, lost.began, lost.state, lost.values) == ("", None, "ok", (7.0,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0\nfirst\n=====\nlast\n-----\n", CheckResult(exit_code=0, line="last")),
        ("3\nvalue=1.5e2 GB/s\nvalue=12 GB/s\n", CheckResult(exit_code=3, value=12.0, unit="GB/s")),
        ("0\nvalue=12\nat value=13\n", CheckResult(exit_code=0, line="at value=13", value=12.0)),
        ("0\n\x1b[31mred\x07 text\n", CheckResult(exit_code=0, line="[31mred text")),
        ("lost\n", CheckResult(lost=True)),
        ("0\nvalue=1e999 GB/s\n", CheckResult(exit_code=0, line="value=1e999 GB/s")),  # it damaged the database
        ("0\nsum\nvalue=3\nnode left\n", CheckResult(exit_code=0, line="sum", value=3.0)),  # as torchrun's shutdown
        ("1\nsum\nvalue=3\nnode left\n", CheckResult(exit_code=1, line="node left", value=3.0)),
        ("hung\nscanning\nvalue=3\n", CheckResult(line="killed after its time; last output: scanning")),
        ("stuck\n", CheckResult(line="cannot be killed after its time")),
    ],
)
def test_an_answer_is_read(text: str, expected: CheckResult) -> None:
    assert parse_answer(text) == expected


@pytest.mark.parametrize("name", ["COMMAND", "SUPERVISOR"])  # places in the script
def test_a_check_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    check = HealthCheck(name=name, command="echo well", every_s=60)
    run = CheckRun(id=f"{name}.1", node="n", check=check)
    assert run_check(LocalTransport("n"), "c", run) == CheckResult(exit_code=0, line="well")


class Site:
    """A store, and nodes that answer."""

    def __init__(self, folder: Path, *checks: HealthCheck) -> None:
        node = dict(partition="p", address="a", gpus=2, cores=4, memory_mib=64, runtime="process")
        nodes = tuple(Node(name=name, health_checks=checks, **node) for name in ("a", "b"))
        self.inventory = Inventory(path="", partitions=(Partition(name="p", nodes=nodes, flavors=()),))
        self.store, self.schedule = Store.create_or_open(folder), CheckSchedule()
        self.store.put_nodes(NodeRecord(name=name, last_seen=NOW) for name in ("a", "b"))

    def due(self, now: float, *busy: str) -> dict[str, str]:
        """Node -> id of the run that is sent to it."""
        operations = self.schedule.due(self.store, self.inventory, frozenset(map(operation_key, busy)), now)
        return {o.check.node: o.check.id for o in operations if o.check is not None}

    def end(self, node: str, check: HealthCheck, code: int, now: float) -> None:
        record = self.store.check_record(node, check.name)
        assert record is not None
        self.store.put_check_records([with_result(record, check, CheckResult(exit_code=code), now)])


def test_a_run_is_asked_for_again_until_it_has_a_result(tmp_path: Path) -> None:
    site = Site(tmp_path, CHECK)
    first = site.due(NOW)
    assert set(first) == {"a", "b"}
    assert site.due(NOW + 1, "a", "b") == {}, "in progress"
    assert site.due(NOW + 500) == first, "as after a crash: the same runs"
    site.store.put_nodes([NodeRecord(name="b", last_seen=NOW, down_since=NOW + 501)])
    assert site.due(NOW + 502) == {"a": first["a"]}, "a node that does not answer is not asked"


def test_a_check_runs_again_after_its_interval_counted_from_its_start(tmp_path: Path) -> None:
    site = Site(tmp_path, CHECK)
    first = site.due(NOW)
    for node in first:
        site.end(node, CHECK, 0, NOW + 50)
    assert site.due(NOW + 59.9) == {}
    again = site.due(NOW + 60)
    assert set(again) == {"a", "b"}
    assert again["a"] != first["a"]
    site.end("a", CHECK, 0, NOW + 60)
    site.store.put_check_records([CheckRecord(node="a", check="c")])  # as one that was added anew
    assert site.due(NOW + 60.002)["a"] != again["a"], "also within a second"


def test_checks_of_a_node_run_one_after_the_other_the_most_overdue_first(tmp_path: Path) -> None:
    seldom, often = (HealthCheck(name=n, command="x", every_s=s) for n, s in (("seldom", 600), ("often", 60)))
    site = Site(tmp_path, seldom, often)
    order = []
    for minute in range(24):
        now = NOW + 60 * minute
        sent = site.due(now)["a"].partition(".")[0]
        order.append(sent)
        for node in ("a", "b"):
            site.end(node, seldom if sent == "seldom" else often, 0, now + 1)
    assert order.count("seldom") == 3
    assert set(order[:2]) == {"seldom", "often"}


def test_a_check_before_jobs_runs_by_itself_only_while_it_holds_its_node(tmp_path: Path) -> None:
    check = HealthCheck(name="c", command="x", before_job=True)
    site = Site(tmp_path, check)
    assert site.due(NOW) == {}
    site.store.put_check_records([CheckRecord(node="a", check="c", began=NOW, state="failed", since=NOW)])
    assert site.due(NOW + RECHECK_S - 1) == {}
    assert set(site.due(NOW + RECHECK_S)) == {"a"}


def test_checks_no_longer_declared_are_forgotten(tmp_path: Path) -> None:
    site = Site(tmp_path, CHECK)
    site.due(NOW)
    site.inventory = Site(tmp_path / "other").inventory
    assert site.due(NOW + 1) == {}
    assert site.store.check_records() == []


@given(st.lists(st.one_of(st.none(), st.integers(0, 2)), max_size=30))
def test_a_record_is_bad_exactly_while_its_last_run_was(codes: list[int | None]) -> None:
    record = CheckRecord(node="n", check="c")
    for number, code in enumerate(codes):
        before = record
        record = with_result(record, CHECK, CheckResult(exit_code=code), NOW + number)
        assert record.is_bad == (code != 0)
        assert (record.since == NOW + number) == (before.state != record.state)


MEET, DISK = (HealthCheck(name=name, command="x", before_job=True) for name in ("meet", "disk"))


def start_job(site: Site, job_id: str, *nodes: str, at: float = NOW) -> list[RankRecord]:
    """Put a STARTING job of these nodes into the store; return its ranks."""
    parts = tuple(NodeAllocation(rank=r, node=n, gpus=(r,), cores=1, memory_mib=1) for r, n in enumerate(nodes))
    site.store.put_jobs(
        [
            job_record(
                job_id, JobState.STARTING, attempt=1, submit_time=at, start_time=None, ending=None,
                allocation=Allocation(job_id, parts), master_port=23456,
            )
        ]
    )  # fmt: skip
    ranks = [
        RankRecord(job_id=job_id, attempt=1, rank=p.rank, node=p.node, runtime="process", gpus=p.gpus) for p in parts
    ]
    site.store.put_ranks(ranks)
    return ranks


def answer(site: Site, now: float, sent: Sequence[Operation], code: int = 0) -> None:
    with site.store.transaction():
        for operation in sent:
            record_check(
                site.store, OperationOutcome(operation=operation, time=now, result=CheckResult(exit_code=code))
            )  # fmt: skip


def operations(site: Site, now: float) -> list[Operation]:
    return site.schedule.due(site.store, site.inventory, frozenset(), now)


def names(sent: Sequence[Operation]) -> list[tuple[str, str]]:
    return [(o.node, o.check.check.name) for o in sent if o.check is not None]


def test_a_jobs_checks_run_one_after_the_other_each_on_all_nodes_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET, DISK)
    start_job(site, "0123456789a", "a", "b")
    required = before_job_checks(site.inventory)
    for name in ("meet", "disk"):
        assert awaits_checks(site.store.ranks(), required)
        sent = operations(site, NOW)
        assert names(sent) == [("a", name), ("b", name)]
        assert [o.check.env["GPUSCHED_NODE_RANK"] for o in sent if o.check] == ["0", "1"]
        assert {o.check.env["MASTER_PORT"] for o in sent if o.check} == {"23456"}
        assert operations(site, NOW) == sent, "as it was first sent, until there is a result"
        answer(site, NOW + 1, sent[:1])
        assert names(operations(site, NOW + 1)) == [("b", name)], "the other's run is open, and none begins before"
        answer(site, NOW + 2, sent[1:])
    assert not awaits_checks(site.store.ranks(), required)
    assert operations(site, NOW + 3) == []


def test_no_node_has_two_runs_and_no_run_of_a_gang_begins_alone(tmp_path: Path) -> None:
    periodic = HealthCheck(name="periodic", command="x", every_s=60)
    site = Site(tmp_path, MEET, periodic)
    both = operations(site, NOW)
    assert names(both) == [("a", "periodic"), ("b", "periodic")]
    start_job(site, "0123456789a", "a", "b", at=NOW + 1)
    start_job(site, "0123456789b", "b", at=NOW + 2)
    answer(site, NOW + 100, both[:1])
    assert names(operations(site, NOW + 100)) == [("b", "periodic")], "b is busy, so the gang waits; a is kept for it"
    answer(site, NOW + 101, both[1:])
    gang = operations(site, NOW + 101)
    assert names(gang) == [("a", "meet"), ("b", "meet")], "before what is due by its interval, and in order"
    answer(site, NOW + 102, gang)
    assert names(operations(site, NOW + 102)) == [("b", "meet"), ("a", "periodic")]


def test_a_failed_check_is_noted_on_its_own_rank_and_starts_no_other(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET, DISK)
    start_job(site, "0123456789a", "a", "b")
    sent = operations(site, NOW)
    answer(site, NOW + 1, sent[:1], code=0)
    answer(site, NOW + 1, sent[1:], code=7)
    errors = {rank.node: rank.check_error for rank in site.store.ranks()}
    assert errors == {"a": "", "b": "check meet failed: exit code 7"}
    assert {rank.node: rank.checks_passed for rank in site.store.ranks()} == {"a": ("meet",), "b": ()}
    assert operations(site, NOW + 2) == []


def test_a_node_that_cannot_keep_a_term_keeps_no_job_waiting_for_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full or read-only, say: the check was asked for again and again, and the job held its GPUs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nodes"))
    site = Site(tmp_path / "state", msgspec.structs.replace(MEET, command="true"))
    (node, other), (partition,) = site.inventory.nodes, site.inventory.partitions
    here = msgspec.structs.replace(node, transport="local")
    site.inventory = msgspec.structs.replace(
        site.inventory, partitions=(msgspec.structs.replace(partition, nodes=(here, other)),)
    )
    term = tmp_path / "nodes/gpusched-node/c/a/term"
    term.parent.mkdir(parents=True)
    term.write_text("damaged")
    (rank,) = start_job(site, "j", "a")
    with contextlib.closing(SshCluster(site.inventory, "c", tmp_path, term=5)) as cluster:
        cluster.perform(operations(site, NOW))
        cluster.wait_for_operations(600)
        (outcome,) = cluster.finished()
    with site.store.transaction():
        record_check(site.store, outcome)
    (after,) = site.store.ranks()
    assert "is damaged" in after.check_error
    assert after.checks_passed == rank.checks_passed == ()
    assert "is damaged" in reasons_against_jobs(site.store, site.inventory)["a"], "and no other job comes there"
    site.store.close()


def test_after_a_lost_run_the_whole_gang_is_checked_again(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET)
    start_job(site, "0123456789a", "a", "b")
    sent = operations(site, NOW)
    answer(site, NOW + 1, sent[:1])
    with site.store.transaction():
        lost = OperationOutcome(operation=sent[1], time=NOW + 1, result=CheckResult(lost=True))
        record_check(site.store, lost)
    assert names(operations(site, NOW + 2)) == [("a", "meet"), ("b", "meet")], "the one finds the other only so"


@pytest.mark.parametrize("adopt", [False, True])
def test_a_node_that_loses_each_run_fails_the_check(tmp_path: Path, adopt: bool) -> None:
    """Its supervisor is killed, say: the job waited for ever, with its GPUs. Adopting starts nothing to be lost."""
    site = Site(tmp_path, MEET)
    start_job(site, "0123456789a", "a")
    for second in range(2):
        (sent,) = operations(site, NOW + second)
        assert sent.check is not None
        sent = msgspec.structs.replace(sent, check=msgspec.structs.replace(sent.check, adopt=adopt))
        with site.store.transaction():
            record_check(site.store, OperationOutcome(operation=sent, time=NOW + second, result=CheckResult(lost=True)))
        (rank,) = site.store.ranks()
        assert ("two runs in a row" in rank.check_error) == (second == 1 and not adopt)
    assert ("a" in reasons_against_jobs(site.store, site.inventory)) != adopt


def test_a_run_that_was_never_started_is_no_first_loss(tmp_path: Path) -> None:
    """As of a job that was cancelled before its check was sent: then one reboot failed the check."""
    site = Site(tmp_path, MEET)
    start_job(site, "0123456789a", "a")
    for second, adopt in enumerate((True, False)):
        (sent,) = operations(site, NOW + second)
        assert sent.check is not None
        sent = msgspec.structs.replace(sent, check=msgspec.structs.replace(sent.check, adopt=adopt))
        with site.store.transaction():
            record_check(site.store, OperationOutcome(operation=sent, time=NOW + second, result=CheckResult(lost=True)))
    assert reasons_against_jobs(site.store, site.inventory) == {}
    assert names(operations(site, NOW + 2)) == [("a", "meet")], "it is run again"


def test_a_run_whose_job_is_gone_is_only_asked_for_its_result(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET)
    ranks = start_job(site, "0123456789a", "a")
    (first,) = operations(site, NOW)
    for rank in ranks:
        site.store.remove_rank(rank)
    (again,) = operations(site, NOW + 1)
    assert first.check is not None
    assert again.check is not None
    assert (again.check.id, first.check.adopt, again.check.adopt) == (first.check.id, False, True)


def test_a_rank_that_joins_a_running_job_is_not_kept_from_starting() -> None:
    rank = RankRecord(job_id="j", attempt=1, rank=1, node="a", runtime="process", hot="joins")
    assert not awaits_checks([rank], {"a": ("meet",)})


def test_a_failing_check_keeps_its_node_drained(tmp_path: Path) -> None:
    check = HealthCheck(name="c", command="x", every_s=60, then="drain")
    site = Site(tmp_path, check)
    answer(site, NOW + 1, operations(site, NOW)[:1], code=1)
    record = site.store.node_records()["a"]
    assert (record.drain_reason, record.drained_by) == ("check c failed: exit code 1", "health check")
    answer(site, NOW + 100, [o for o in operations(site, NOW + 99) if o.node == "a"])
    assert site.store.node_records()["a"].drain_reason is not None, "until somebody resumes it"
    kinds = [event.kind for event in site.store.events(node="a")]
    assert kinds == ["check_failed", "drained", "check_passed"]


def test_a_check_drains_a_node_that_is_suspended_meanwhile(tmp_path: Path) -> None:
    site = Site(tmp_path, HealthCheck(name="c", command="x", every_s=60, then="drain"))
    suspended = msgspec.structs.replace(site.store.node_records()["a"], drain_reason="x", drained_by=SUSPENDED_BY)
    site.store.put_nodes([suspended])
    answer(site, NOW + 1, operations(site, NOW)[:1], code=1)
    assert site.store.node_records()["a"].drained_by == "health check"


def test_times_go_with_the_clock(tmp_path: Path) -> None:
    site = Site(tmp_path, CHECK)
    answer(site, NOW + 1, operations(site, NOW))
    with site.store.transaction():
        site.store.shift_rows(-5000.0, NOW - 1)
    assert operations(site, NOW - 5000 + 59) == []
    assert len(operations(site, NOW - 5000 + 60)) == 2


def test_a_check_sees_the_slices_of_its_job_as_the_job_does_and_alone_whole_gpus_only(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET, HealthCheck(name="alone", command="x", every_s=60))
    cut = [MigSlice(gpu=0, start=at, profile="3g.40gb", uuid=f"MIG-{at}", gi=at, ci=0, device=at) for at in (0, 4)]
    gpus = (Gpu(index=0, mig_mode=True, slices=tuple(cut)), Gpu(index=1, mig_mode=False))
    site.store.put_nodes(
        NodeRecord(name=n, last_seen=NOW, reading=NodeReading(node=n, time=NOW, gpus=gpus)) for n in ("a", "b")
    )
    (rank,) = start_job(site, "0123456789a", "a")
    job = site.store.job("0123456789a")
    assert job is not None
    assert job.allocation is not None
    part = msgspec.structs.replace(job.allocation.parts[0], gpus=(cut[1].number,))
    site.store.put_jobs([msgspec.structs.replace(job, allocation=Allocation(job.id, (part,)))])
    site.store.put_ranks([msgspec.structs.replace(rank, gpus=part.gpus)])
    before, other = operations(site, NOW)
    assert before.check is not None
    assert other.check is not None
    assert before.check.env["CUDA_VISIBLE_DEVICES"] == "MIG-4"
    assert before.check.env["GPUSCHED_GPUS"] == "0:3g.40gb@4"
    assert other.check.env["CUDA_VISIBLE_DEVICES"] == "1"  # of b, where there is no job, and GPU 0 is cut
    answer(site, NOW + 1, [before, other])
    (alone,) = [o.check for o in operations(site, NOW + 1) if o.check is not None and o.node == "a"]
    assert (alone.rank, alone.env["GPUSCHED_GPUS"], alone.env["CUDA_VISIBLE_DEVICES"]) == (None, "1", "1")


def test_checks_do_not_run_on_gpus_in_use(tmp_path: Path) -> None:
    site = Site(tmp_path, CHECK)
    site.store.put_ranks([RankRecord(job_id="0123456789a", attempt=1, rank=0, node="a", runtime="process", gpus=(1,))])
    assert [o.check.env["GPUSCHED_GPUS"] for o in operations(site, NOW) if o.check] == ["0", "0,1"]


def reads_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each table as it is read."""
    reads: list[str] = []

    def noting(name: str) -> None:
        read = getattr(Store, name)
        monkeypatch.setattr(site.store, name, lambda: reads.append(name) or read(site.store))

    for name in ("node_records", "active", "ranks", "check_records"):
        noting(name)
    return reads


def test_nothing_is_read_while_nothing_can_be_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, CHECK, MEET)
    answer(site, NOW + 1, operations(site, NOW))
    assert operations(site, NOW + 1) == []
    reads = reads_of(site, monkeypatch)
    for seconds in range(2, int(LOOK_S)):
        assert operations(site, NOW + seconds) == []
    assert reads == []
    assert names(operations(site, NOW + 60)) == [("a", "c"), ("b", "c")]
    assert reads != []


def test_without_checks_nothing_is_looked_for_in_each_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    assert operations(site, NOW) == []
    reads = reads_of(site, monkeypatch)
    for seconds in range(1, int(LOOK_S)):
        assert operations(site, NOW + seconds) == []
    assert reads == []
    assert operations(site, NOW + LOOK_S) == []
    assert reads == ["check_records"]


def test_neither_a_silent_node_nor_jobs_without_checks_make_each_cycle_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, CHECK)
    answer(site, NOW + 1, operations(site, NOW))
    site.store.put_nodes([NodeRecord(name="b", last_seen=NOW, down_since=NOW + 1)])
    answer(site, NOW + 61, operations(site, NOW + 60))
    assert operations(site, NOW + 61) == []
    start_job(site, "0123456789a", "a")
    reads = reads_of(site, monkeypatch)
    for seconds in range(62, 61 + int(LOOK_S)):
        assert operations(site, NOW + seconds) == []
    assert reads == []
    site.store.put_nodes([NodeRecord(name="b", last_seen=NOW + 90)])
    assert names(operations(site, NOW + 61 + LOOK_S)) == [("b", "c")]  # it answers again, and is overdue


def test_a_changed_inventory_counts_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert operations(site, NOW) == []
    site.inventory = Site(tmp_path / "other", CHECK).inventory
    assert names(operations(site, NOW + 1)) == [("a", "c"), ("b", "c")]


def test_a_job_is_not_kept_waiting_by_what_was_known_before(tmp_path: Path) -> None:
    site = Site(tmp_path, MEET)
    assert operations(site, NOW) == []
    start_job(site, "0123456789a", "a")
    assert names(operations(site, NOW + 1)) == [("a", "meet")]
