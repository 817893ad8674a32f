"""Whole cycles over an imagined cluster: what only shows when the parts work together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.cluster.base import Operation, OperationOutcome
from gpusched.config.paths import log_path
from gpusched.controller.cycle import FORGET_PROGRAMS_S, Cycle
from gpusched.controller.ledger import share_of
from gpusched.controller.outputs import MAX_BACKOFF_S, MAX_FAILURES, readers_of
from gpusched.controller.planning import PendingReasonWriter
from gpusched.model.attemptrecords import AttemptRecord
from gpusched.model.commands import Cancel, Drain, Requeue, Resume
from gpusched.model.events import Event
from gpusched.model.jobs import ENDED, JobRecord, JobState, container_name
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.readings import NodeState
from gpusched.model.resources import Partition
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import RunRecord
from tests.builders import spec
from tests.controller.crash_orders import POLICIES
from tests.controller.imagined import inventory, without
from tests.controller.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


def test_nothing_stays_open_on_a_drained_node(site: Site) -> None:
    site.inbox.deliver(Drain(time=site.world.now, nodes=("n0", "n1"), reason="reset"))
    site.turn(2)
    assert site.cluster.drained == {"n0", "n1"}
    site.restart()
    site.turn()
    assert site.cluster.drained == {"n0", "n1"}
    site.inbox.deliver(Resume(time=site.world.now, nodes=("n1",)))
    site.turn(2)
    assert site.cluster.drained == {"n0"}


SECRET = {"spec": spec(secret_names=("A",)), "secrets": {"A": "s3cr3t"}}


def test_the_secrets_of_an_array_go_when_its_last_tasks_end_together(site: Site) -> None:
    site.submit(array=(0, 1), **SECRET)
    site.turn(3)
    assert len(site.secrets()) == 1
    boxes = [box for _, box in site.world.running()]
    assert len(boxes) == 2
    for box in boxes:
        site.world.end(box, 0)
    site.turn(2)
    assert site.secrets() == []


@pytest.mark.parametrize("more", [{}, {"array": (0, 1, 2)}])
def test_the_secrets_of_what_is_cancelled_before_it_began_go_too(site: Site, more: dict[str, object]) -> None:
    job = site.submit(**SECRET | {"spec": spec(secret_names=("A",), hold=True)} | more)
    site.turn()
    assert len(site.secrets()) == 1
    site.inbox.deliver(Cancel(time=site.world.now, job_ids=(job,)))
    site.turn()
    assert site.secrets() == []


def test_secrets_of_jobs_that_wait_cost_no_cycle(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was looked up in every cycle: one user's 100,000 jobs cost all others two seconds each time."""
    job, looked = site.submit(**SECRET | {"spec": spec(secret_names=("A",), hold=True)}), list[str]()
    site.turn()
    has_unended = site.store.has_unended
    monkeypatch.setattr(site.store, "has_unended", lambda name: looked.append(name) or has_unended(name))
    site.turn(3)
    assert looked == []
    site.turn(1, FORGET_PROGRAMS_S)
    assert looked == [job], "now and then all the same: a controller may have died before it removed them"
    assert len(site.secrets()) == 1


def test_secrets_stay_for_a_retry(site: Site) -> None:
    site.submit(**SECRET)
    site.turn(3)
    ((host, _),) = site.world.running()
    host.up = False
    site.turn(5, 30)
    assert len(site.world.starts) == 2
    assert len(site.secrets()) == 1


def test_an_output_that_cannot_be_had_is_asked_for_again_then_given_up(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(MAX_FAILURES):
        assert host.boxes, "nothing is removed whose output is not home"
        site.cycle.run(0)
        for key, operation in list(site.cluster._pending.items()):
            assert operation.verb == "collect"
            del site.cluster._pending[key]
            site.cluster._done.append(OperationOutcome(operation=operation, time=site.world.now, error="podman is ill"))
        site.world.now += MAX_BACKOFF_S
    site.turn(3)
    assert not host.boxes
    assert not site.store.ranks()


def test_why_a_job_is_tried_again_is_not_overwritten_by_its_waiting(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((host, _),) = site.world.running()
    host.boxes.clear()
    site.turn(4)
    waiting = site.store.job(job)
    assert waiting is not None
    assert (waiting.state, waiting.reason) == (JobState.PENDING, "BeginTime")
    assert "retrying in 10 s" in waiting.message
    host.up = False
    site.turn(3, 20)
    assert len(site.world.starts) == 2


def test_a_reading_from_before_the_removal_is_no_news(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(4):
        site.cluster.overtaken(host.name)
        site.turn()
    assert not site.store.ranks()
    kinds = [e.kind for e in site.store.events()]
    assert "reaped" not in kinds
    assert "fenced" not in kinds
    assert {j.state for j in site.store.jobs()} <= ENDED


def kinds(site: Site) -> list[str]:
    return [e.kind for e in site.store.events()]


def test_a_node_that_vanishes_from_the_inventory_keeps_its_jobs_until_they_have_ended(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.cycle.inventory = without([host.name])
    site.turn(2)
    record = site.store.node_records()[host.name]
    assert (record.state, record.left) == (NodeState.DRAINING, True)
    assert record.reason == "no longer in inventory.yaml; its jobs keep running"
    site.restart()
    for _ in range(3):
        site.submit(spec=spec(gpus_per_node=2))
    site.turn(40, 10)
    found = site.store.job(job)
    assert found is not None
    assert (found.state, found.attempt) == (JobState.RUNNING, 1)
    assert len(site.world.starts) == 4
    assert list(host.boxes.values()) == [box], "nothing new goes there"
    site.world.end(box, 0)
    site.turn(3)
    assert site.state_of(job) is JobState.COMPLETED
    assert not host.boxes, "what it left is brought home and taken away"
    assert not site.store.node_records()[host.name].left
    assert kinds(site).count("left_inventory") == 1
    assert "node_down" not in kinds(site)


def test_a_node_that_left_and_is_silent_is_given_up_after_node_fail_after_and_fenced_when_it_returns(
    site: Site,
) -> None:
    job = site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.cycle.inventory = without([host.name])
    host.up = False
    site.turn(5, 10)
    assert site.state_of(job) is JobState.RUNNING
    site.turn(8, 10)
    assert len(site.world.starts) == 2, "given up, and started elsewhere"
    assert not site.store.node_records()[host.name].left, "nobody asks it any more"
    site.turn(50, 60)
    host.up = True
    site.cycle.inventory = inventory()
    site.turn()
    assert box.name not in {b.name for _, b in site.world.running()}, "killed before its GPUs are handed out"
    assert kinds(site).count("fenced") == 1


def test_a_first_probe_that_fails_after_a_long_stop_gives_up_no_node(site: Site) -> None:
    """A login node that reboots: its network goes before the controller, and comes after it."""
    job = site.submit()
    site.turn(3)
    ((host, _),) = site.world.running()
    host.up = False
    site.turn(2, 5)
    site.world.now += 200.0
    site.restart()
    site.turn()
    assert site.state_of(job) is JobState.RUNNING
    host.up = True
    site.turn(2, 5)
    assert site.state_of(job) is JobState.RUNNING
    host.up = False
    site.turn(14, 10)
    assert len(site.world.starts) == 2, "silence that was watched counts"


def test_a_node_of_an_older_store_of_which_no_declaration_is_kept_is_given_up_no_sooner(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((host, _),) = site.world.running()
    record = site.store.node_records()[host.name]
    site.store.put_nodes([msgspec.structs.replace(record, declared=None)])
    site.cycle.inventory = without([host.name])
    site.turn(5, 10)
    assert site.state_of(job) is JobState.RUNNING
    site.turn(8, 10)
    assert len(site.world.starts) == 2


def site_events(site: Site, kind: str) -> list[Event]:
    return [e for e in site.store.events() if e.kind == kind]


def test_a_rank_that_cannot_be_ended_keeps_its_gpus_lets_its_job_go_and_is_reported_once(site: Site) -> None:
    job = site.submit(spec=spec(nodes=2, gpus_per_node=2))
    site.turn(4)
    boxes = [box for _, box in site.world.running()]
    assert len(boxes) == 2
    for box in boxes:
        box.stuck = True
    site.inbox.deliver(Cancel(time=site.world.now, job_ids=(job,), now=True))
    for _ in range(400):
        site.turn()
        ended = site.store.job(job)
        assert ended is not None
    assert ended.state == JobState.CANCELLED
    # A gang of two, 400 cycles: reported once each.
    assert [e.data["gpus"] for e in site_events(site, "stuck")] == [[0, 1], [0, 1]]
    assert len(site_events(site, "work_failed")) == 2
    assert len(site_events(site, "fenced")) == 2
    snapshot = snapshot_of_store(site.store, inventory(), POLICIES, site.world.now)
    stuck = {n.name: n.blocked for n in snapshot.nodes if n.blocked}
    assert {tuple(b) for b in stuck.values()} == {(0, 1)}
    assert all("cannot be killed (it is stuck)" in why for b in stuck.values() for why in b.values())
    records = site.store.node_records()
    assert all("GPU 0, 1 not allocated: " in records[name].reason for name in stuck)
    for box in boxes:
        box.stuck = False
    site.turn(3, 61)
    site.turn(3)
    assert not site.store.ranks()
    assert not any(host.boxes for host in site.world.hosts.values())


@pytest.mark.parametrize("phase", ["ready", "preparing"])
def test_a_leftover_that_never_began_is_removed(site: Site, phase: str) -> None:
    """A slow create on a node that is given up: `kill` does nothing to what does not run."""
    site.submit()
    site.turn(2)
    ((host, box),) = [(h, b) for h in site.world.hosts.values() for b in h.boxes.values()]
    box.phase = phase
    host.up = False
    site.turn(4, 30)
    host.up = True
    box.phase, box.hold = phase, True
    site.turn(4)
    assert box.name not in host.boxes
    assert len(site_events(site, "fenced")) == 1


def test_a_job_without_gpus_proves_nothing_about_a_nodes_gpus(site: Site) -> None:
    refuse, carry_out = [True], site.world.carry_out

    def broken(operation: Operation) -> str:
        asks = operation.verb == "launch" and operation.request is not None and operation.request.gpus
        return "no such device" if asks and refuse[0] else carry_out(operation)

    def failed() -> list[tuple[str, bool]]:
        return [(f.job, f.gpus) for f in site.store.node_records()["n0"].failed_launches]

    site.world.carry_out = broken  # type: ignore[method-assign]
    first = site.submit(spec=spec(nodelist=("n0",)))
    site.turn(4)
    assert set(failed()) == {(first, True)}
    plain = site.submit(spec=spec(gpus_per_node=0, nodelist=("n0",)))
    site.turn(4)
    assert site.state_of(plain) == JobState.RUNNING
    assert set(failed()) == {(first, True)}
    refuse[0] = False
    second = site.submit(spec=spec(nodelist=("n0",)))
    site.turn(4)
    assert site.state_of(second) == JobState.RUNNING
    assert failed() == []


def test_output_is_collected_to_its_attempts_own_place_or_left_where_the_job_wants_it(site: Site) -> None:
    collected, carry_out = {}, site.world.carry_out

    def noted(operation: Operation) -> str:
        if operation.verb == "collect":
            collected[operation.rank.job_id] = (operation.destination, operation.readers)
        return carry_out(operation)

    site.world.carry_out = noted  # type: ignore[method-assign]
    ours, own = site.submit(), site.submit(spec=spec(output="/data/out"))
    site.turn(4)
    for _, box in site.world.running():
        site.world.end(box, 0)
    site.turn(4)
    job = site.store.job(ours)
    assert job is not None
    assert collected == {
        ours: (str(log_path(site.state, ours, 1, 0)), readers_of(job, site.cycle.inventory)), own: (None, ()),
    }  # fmt: skip


@pytest.mark.parametrize("is_full", [False, True])
def test_an_attempt_still_on_a_node_keeps_its_run_after_a_requeue(site: Site, is_full: bool) -> None:
    """``is_full``: the job still waits when its first attempt is removed, as nodes are drained."""
    kept, carry_out = list[bytes](), site.world.carry_out

    def noted(operation: Operation) -> str:
        kept.extend([operation.note.encode()] if operation.verb == "remove" and operation.note else [])
        return carry_out(operation)

    site.world.carry_out = noted  # type: ignore[method-assign]
    job = site.submit()
    site.turn(4)
    if is_full:
        site.inbox.deliver(Drain(time=site.world.now, nodes=tuple(site.world.hosts), reason="test"))
    site.inbox.deliver(Requeue(time=site.world.now, job_ids=(job,)))
    site.turn(8)
    assert (site.job(job).attempt, site.state_of(job)) == (1, "PENDING") if is_full else (2, "RUNNING")
    found = msgspec.json.decode(kept[-1], type=AttemptRecord)
    assert (found.job.attempt, found.job.state, found.job.allocation, len(found.held)) == (1, "PENDING", None, 1)
    (run,) = site.store.runs_of_attempt(job, 1)
    assert run.end_time is not None
    assert msgspec.convert(found.runs, tuple[RunRecord, ...]) == (run,)


def test_of_an_array_so_many_tasks_run_at_once_and_the_next_starts_when_one_ends(site: Site) -> None:
    array = site.submit(array=tuple(range(6)), max_running=3)

    def running() -> int:
        return sum(job.state == JobState.RUNNING for job in site.store.jobs_of_array(array))

    site.turn(5)
    assert running() == 3
    for started in (4, 5, 6):
        _, box = site.world.running()[0]
        site.world.end(box, 0)
        site.turn(4)
        assert len(site.world.starts) == started
    assert running() == 3


def test_each_rank_of_a_gang_is_launched_with_the_gpus_of_its_own_node(site: Site) -> None:
    small = site.submit()
    site.turn(5)
    gang = site.submit(spec=spec(nodes=3))
    site.turn(5)
    boxes = {host.name: [(b.name, b.gpus) for b in host.boxes.values()] for host in site.world.hosts.values()}
    found = site.store.job(gang)
    assert found is not None
    assert found.allocation is not None
    given = {p.node: (container_name(gang, 1, p.rank), p.gpus) for p in found.allocation.parts}
    assert len({gpus for _, gpus in given.values()}) > 1, "or a mistake would not show"
    assert {node: next(b for b in boxes[node] if small not in b[0]) for node in given} == given


def test_a_pull_that_hangs_is_ended_before_the_job_is_tried_elsewhere(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hangs:
        hangs.setattr(site.world, "progress", lambda: None)
        job = site.submit()
        site.turn(4, 1200)
        assert (site.state_of(job), site.job(job).attempt) == ("STARTING", 1)
        site.turn(1, 7200)
        assert site.state_of(job) == "COMPLETING"
        site.turn(2)
    assert site.state_of(job) == "PENDING"
    assert [box for host in site.world.hosts.values() for box in host.boxes.values()] == []
    site.turn(4, 10)
    ((host, _),) = site.world.running()
    assert (host.name, site.world.starts) == ("n1", [container_name(job, 2, 0)])


def test_a_gang_that_a_node_cannot_start_goes_elsewhere(site: Site) -> None:
    """Each try fails: not for ever, not with an event for each, and not the job's fault."""
    job = site.submit(spec=spec(nodes=2))
    refuse = [True]
    carry_out = site.world.carry_out
    site.world.carry_out = lambda operation: (
        "no folder" if operation.verb == "start" and refuse[0] else carry_out(operation)
    )  # type: ignore[method-assign]
    site.turn(60)
    refuse[0] = False
    found = site.store.job(job)
    assert found is not None
    assert found.retries >= 1
    assert len(site_events(site, "work_failed")) <= 2 * (found.retries + 1)
    site.turn(20, 30)
    found = site.store.job(job)
    assert found is not None
    assert found.state == JobState.RUNNING


@pytest.mark.parametrize("files", [("output",), ("error",), ("output", "error")], ids="+".join)
@pytest.mark.parametrize(
    ("path", "append", "written"), [("/data/out", False, False), ("/data/out", True, True), ("/data/%N", False, True)]
)
def test_a_node_that_comes_back_does_not_overwrite_the_output_of_the_next_attempt(
    site: Site, files: tuple[str, ...], path: str, append: bool, written: bool
) -> None:
    """Its follower died with it, so it would write the file anew: on a shared disk, the one that is being written."""
    collected, carry_out = list[tuple[int, bool, bool]](), site.world.carry_out

    def noted(operation: Operation) -> str:
        if operation.verb == "collect":
            collected.append((operation.rank.attempt, operation.finish, operation.destination is not None))
        return carry_out(operation)

    site.world.carry_out = noted  # type: ignore[method-assign]
    site.submit(spec=spec(append=append, **{name: f"{path}.{name}" for name in files}))
    site.turn(3)
    ((host, _),) = site.world.running()
    assert host.name == "n0"
    host.up = False
    site.turn(9, 30)
    assert len(site.world.starts) == 2
    host.up = True
    site.turn(6)
    is_kept = "output" not in files
    assert collected == [(1, written, is_kept)]
    ((_, box),) = site.world.running()
    site.world.end(box, 0)
    site.turn(3)
    assert collected[1:] == [(2, True, is_kept)]


def test_an_attempt_of_which_another_rank_failed_at_the_end_has_failed_as_its_job_has(site: Site) -> None:
    """Otherwise `gpusched nodes --failures` took the node's failure for a success."""
    gang = site.submit(spec=spec(nodes=2))
    site.turn(5)
    for rank, code in ((0, 0), (1, 3)):
        (box,) = (box for _, box in site.world.running() if box.name == container_name(gang, 1, rank))
        site.world.end(box, code)
        site.turn()
    found = site.store.job(gang)
    assert found is not None
    assert (found.state, found.exit_code) == (JobState.FAILED, 3)
    assert [run.outcome for run in site.store.runs(0, site.world.now + 1)] == ["FAILED"]


def test_a_collection_that_breaks_off_is_not_begun_anew_at_once_for_ever(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((_, box),) = site.world.running()
    site.world.end(box, 0)
    asked = 0
    for _ in range(600):  # ten minutes, a cycle each second
        site.world.now += 1
        site.cycle.run(0)
        asked += len(site.cluster._pending)
        site.cluster.deliver(lambda _: "lost")
    assert 5 < asked < 15
    failures = [e for e in site.store.events(job_id=job) if e.kind == "work_failed"]
    assert len(failures) == 1
    site.turn(3, MAX_BACKOFF_S)  # the connection is well again
    assert not site.store.ranks()


def test_every_tick_counts_an_output_that_cannot_be_had(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(MAX_FAILURES):
        assert host.boxes
        site.cycle = Cycle(site.store, site.state, inventory(), POLICIES, site.cluster, clock=lambda: site.world.now)
        site.cycle.run(0)
        for key, operation in list(site.cluster._pending.items()):
            del site.cluster._pending[key]
            site.cluster._done.append(OperationOutcome(operation=operation, time=site.world.now, error="podman is ill"))
        site.world.now += 60
        site.cycle.run(0)  # settles
        site.cluster._pending.clear()
    site.turn(3)
    assert not host.boxes


def asked(site: Site, seconds: float) -> list[str]:
    """Which nodes the next cycle asks."""
    site.cluster.asked.clear()
    site.turn(seconds=seconds)
    return site.cluster.asked


def test_between_two_ticks_only_nodes_that_matter_are_asked(site: Site) -> None:
    assert site.cycle.inventory.settings.tick_s == 5.0
    assert asked(site, 1) == ["n0", "n1", "n2"]
    assert asked(site, 1) == [], "nothing of ours is there"
    site.submit()
    (chosen,) = asked(site, 1)
    site.world.progress()
    assert asked(site, 1) == [chosen], "its job begins"
    other = {"n0", "n1", "n2"} - {chosen}
    assert other < set(asked(site, 4.9)), "a tick is over since they were read"
    assert asked(site, 0.1) == [chosen]
    site.begin(inventory())
    assert asked(site, 0.1) == ["n0", "n1", "n2"], "a controller that begins knows nothing"


def test_nodes_that_did_not_answer_are_probed_in_every_cycle(site: Site) -> None:
    site.world.hosts["n1"].up = False
    site.turn()
    site.world.hosts["n2"].engine = False
    assert asked(site, 5.1) == ["n0", "n1", "n2"]
    assert asked(site, 0.1) == ["n1", "n2"]


def test_nothing_is_placed_on_a_node_as_it_was(site: Site) -> None:
    site.turn()
    job = site.submit()
    plain, *_ = sorted(site.world.hosts)
    site.world.hosts[plain].up = False  # since it was read
    assert asked(site, 1) == [plain, *sorted(site.world.hosts)], "as soon as another one is wanted, all are asked"
    found = site.store.job(job)
    assert found is not None
    assert found.allocation is not None
    assert found.allocation.parts[0].node != plain
    assert [event.job_id for event in site_events(site, "starting")] == [job], "and is decided once"


def test_a_gang_over_a_node_in_use_and_a_free_one_asks_each_once(site: Site) -> None:
    site.turn()
    site.submit(spec=spec(gpus_per_node=1))
    (first,) = asked(site, 1)
    site.submit(spec=spec(gpus_per_node=1, nodes=3))
    rest = [name for name in sorted(site.world.hosts) if name != first]
    assert asked(site, 0.1) == [first, *rest]


def test_a_clock_that_is_set_back_does_not_keep_nodes_from_being_asked(site: Site) -> None:
    site.turn()
    assert asked(site, -1000) == ["n0", "n1", "n2"]


def test_why_a_job_waits_is_written_when_it_changes_and_its_words_every_half_minute(site: Site) -> None:
    job = site.submit(spec=spec(hold=True))
    site.turn()
    reasons, now = PendingReasonWriter(site.store), site.world.now + 100

    def written(code: ReasonCode, message: str, at: float) -> tuple[str, str]:
        found = site.store.job(job)
        assert found is not None
        reasons.write([found], {job: Reason(code=code, message=message)}, now + at)
        after = site.store.job(job)
        assert after is not None
        return after.reason, after.message

    for code, message, at, expected in (
        (ReasonCode.PRIORITY, "a", 0.0, "a"),
        (ReasonCode.PRIORITY, "b", 29.9, "a"),
        (ReasonCode.PRIORITY, "b", 30.0, "b"),
        (ReasonCode.RESOURCES, "b", 31.0, "b"),
        (ReasonCode.RESOURCES, "c", 60.9, "b"),
        (ReasonCode.BACKFILL, "c", 60.9, "c"),
    ):
        reason, words = written(code, message, at)
        assert (reason, words) == (str(code), expected), (message, at)
    other = site.store.job(job)
    assert other is not None
    reasons.write([other], {}, now + 999)
    assert site.store.job(job) == other, "nothing is said of it"
    assert reasons._messages_at == {}, "of jobs and arrays that wait no more, nothing is kept"


def test_a_jobs_part_of_its_partition_is_that_of_what_it_takes_most_of() -> None:
    """Three nodes of 4 GPUs, 16 cores and 64 GiB."""
    one = JobRecord(id="j", user="u", uid=1, spec=spec(), state=JobState.PENDING, submit_time=0.0)
    (partition,) = inventory().partitions

    def share(whole: Partition, **fields: int) -> float:
        return share_of(msgspec.structs.replace(one, spec=spec(**fields)), whole)

    assert share(partition, nodes=2, gpus_per_node=3) == pytest.approx(6 / 12)
    assert share(partition, nodes=2, cores_per_node=15) == pytest.approx(30 / 48)
    assert share(partition, nodes=3, memory_mib_per_node=65536) == 1.0
    bare = tuple(msgspec.structs.replace(n, gpus=0) for n in partition.nodes)
    cpus = msgspec.structs.replace(partition, nodes=bare)
    assert share(cpus, gpus_per_node=0, cores_per_node=4) == pytest.approx(4 / 48)
    assert share(msgspec.structs.replace(partition, nodes=())) == 0.0
