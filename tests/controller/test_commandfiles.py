"""Commands: who may do what, what is refused, and that no file can stop the controller."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.controller.commandfiles import Caller, CommandApplier, CommandRefused
from gpusched.model import ids
from gpusched.model.commands import (
    AnyCommand,
    Cancel,
    Drain,
    Hold,
    Release,
    Requeue,
    Resume,
    SetPriority,
    ShadowOff,
    Submit,
)
from gpusched.model.health import Condition, NodeHealth
from gpusched.model.jobs import Dependency, DependencyKind, JobState, Mount
from gpusched.queue.inbox import MAX_COMMAND_BYTES
from gpusched.queue.store import UsageRow
from tests.builders import spec
from tests.controller.applying import ADMIN, ALICE, BOB, ME, NOW, InboxWorld, fresh_id, names
from tests.controller.rights import needs_root
from tests.logged import messages


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    world = InboxWorld(tmp_path)
    yield world
    world.store.close()


def on(job: str) -> list[AnyCommand]:
    ids_ = (job,)
    return [
        Cancel(time=NOW, job_ids=ids_), Hold(time=NOW, job_ids=ids_), Release(time=NOW, job_ids=ids_),
        Requeue(time=NOW, job_ids=ids_), SetPriority(time=NOW, job_ids=ids_, priority=-1),
    ]  # fmt: skip


# -- permissions -------------------------------------------------------------------------------------------------


@needs_root
def test_the_files_owner_is_the_user(world: InboxWorld) -> None:
    job = world.job(world.submit(ALICE))
    assert (job.user, job.uid) == (str(ALICE), ALICE)


def test_beside_slurm_no_command_touches_jobs_or_nodes(world: InboxWorld) -> None:
    job = world.submit()
    world.inventory = msgspec.structs.replace(world.inventory, engine="slurm")
    before = world.job(job)
    for command in (
        *on(job),
        Drain(time=NOW, nodes=("n0",), reason="x"),
        Submit(time=NOW, id=ids.mint(NOW), spec=spec()),
    ):
        assert "Slurm is the engine here" in world.say(command)
    assert world.job(job) == before
    assert "no shadow policy" in world.say(ShadowOff(time=NOW, partition="p")), "policies are ours"


@needs_root
def test_others_may_do_nothing_with_a_job_and_it_is_recorded(world: InboxWorld) -> None:
    job = world.submit(ALICE)
    before = world.job(job)
    for command in on(job):
        assert world.say(command, BOB) == f"job {job} belongs to {ALICE}"
    assert world.job(job) == before
    assert [e.user for e in world.refusals()] == [str(BOB)] * 5
    assert world.kinds("refused") == [], "strangers write nothing into a job's story"


@needs_root
@pytest.mark.parametrize("uid", [ALICE, ADMIN, ME])
def test_owner_admin_and_the_controllers_user_may(world: InboxWorld, uid: int) -> None:
    for command in reversed(on(world.submit(ALICE))):
        assert world.say(command, uid) == ""


@needs_root
def test_an_admins_hold_is_not_released_by_the_owner(world: InboxWorld) -> None:
    job = world.submit(ALICE)
    world.say(Hold(time=NOW, job_ids=(job,)), ADMIN)
    assert world.job(job).held_by == "admin"
    assert world.say(Release(time=NOW, job_ids=(job,)), ALICE) == f"job {job} is held by an admin"
    assert world.say(Hold(time=NOW, job_ids=(job,)), ALICE) == f"job {job} is already held by an admin"
    assert world.job(job).held_by == "admin", "a hold of one's own over it would be one's own to release"
    assert world.say(Release(time=NOW, job_ids=(job,)), ADMIN) == ""
    assert world.job(job).held_by == ""


def test_a_users_hold_does_not_take_the_place_of_an_admins(world: InboxWorld) -> None:
    """Nor is a hold of one's own job an admin's, who may be a user like others."""
    job = world.submit()
    owner = world.job(job).uid
    users, admins = Caller(owner, "ann", False), Caller(owner + 1, "root", True)

    def say(command: AnyCommand, caller: Caller) -> str:
        try:
            world.applier()._apply(command, caller, NOW)
        except CommandRefused as refused:
            return str(refused)
        return ""

    hold, release = Hold(time=NOW, job_ids=(job,)), Release(time=NOW, job_ids=(job,))
    assert say(hold, admins) == ""
    for command in (release, hold, release):
        say(command, users)
        assert world.job(job).held_by == "admin"
    assert say(release, users) == f"job {job} is held by an admin"
    assert say(release, admins) == ""
    for caller in (users, Caller(owner, "ann", True)):
        assert say(hold, caller) == ""
        assert world.job(job).held_by == "user"
        assert say(release, users) == ""
        assert world.job(job).held_by == ""


def test_root_the_controllers_own_user_and_the_named_are_admins(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4242)
    admins = [uid for uid in (0, 1, 4241, 4242, 4243, ADMIN, ALICE) if world.applier()._caller(uid).admin]
    assert admins == [0, 4242, ADMIN]


@needs_root
def test_priorities_go_down_freely_and_up_for_admins(world: InboxWorld) -> None:
    job = world.submit(ALICE)
    assert world.say(SetPriority(time=NOW, job_ids=(job,), priority=-5), ALICE) == ""
    assert "needs an admin" in world.say(SetPriority(time=NOW, job_ids=(job,), priority=0), ALICE)
    assert world.say(SetPriority(time=NOW, job_ids=(job,), priority=7), ADMIN) == ""
    assert world.job(job).priority == 7
    assert "needs an admin" in world.say(Submit(time=NOW, id=ids.mint(NOW), spec=spec(priority=1)), ALICE)
    assert "is between" in world.say(SetPriority(time=NOW, job_ids=(job,), priority=10**23), ADMIN)


@needs_root
def test_drain_and_resume_are_for_admins(world: InboxWorld) -> None:
    drain, resume = Drain(time=NOW, nodes=("n0",), reason="fan"), Resume(time=NOW, nodes=("n0",))
    assert "is not an admin" in world.say(drain, ALICE)
    assert world.store.node_records() == {}
    assert world.say(drain, ADMIN) == ""
    record = world.store.node_records()["n0"]
    assert (record.drain_reason, record.drained_by) == ("fan", str(ADMIN))
    assert "is not an admin" in world.say(resume, ALICE)
    assert world.say(resume, ADMIN) == ""
    assert world.store.node_records()["n0"].drain_reason is None
    found = Condition(kind="xid-gpu", gpu="u", index=0, since=NOW, last_seen=NOW, detail="Xid 48 (x)", stays=True)
    health = NodeHealth(conditions=(found,), log_us=7, boot_id="b")
    world.store.put_nodes([msgspec.structs.replace(record, health=health)])
    assert world.say(drain, ADMIN) == ""
    assert world.store.node_records()["n0"].health == health
    assert world.say(resume, ADMIN) == ""
    assert world.store.node_records()["n0"].health == NodeHealth(log_us=7, boot_id="b")
    assert world.say(Drain(time=NOW, nodes=("n1", "nowhere"), reason="x"), ADMIN) == "no such node: nowhere"
    assert world.store.node_records()["n1"].drain_reason == "x"


@needs_root
@pytest.mark.parametrize(
    ("source", "fine"),
    [("/data", True), ("/data/x", True), ("/database", False), ("/", False), ("//data", False), ("/data//y", True)],
)
def test_mounts_of_others_must_be_allowed(world: InboxWorld, source: str, fine: bool) -> None:
    mounts = (Mount(source, "/in"),)
    refused = world.say(Submit(time=NOW, id=ids.mint(NOW), spec=spec(mounts=mounts)), ALICE)
    path = f"mount of {source}: settings.allowed_mounts of inventory.yaml allows /data"
    assert refused == ("" if fine else path)
    assert world.say(Submit(time=NOW, id=ids.mint(NOW), spec=spec(mounts=mounts))) == ""


def test_images_that_name_files_of_the_nodes_are_refused_from_everybody(world: InboxWorld) -> None:
    for user in (ALICE, 0):
        submit = Submit(time=NOW, id=ids.mint(NOW), spec=spec(image="docker-archive:/etc/shadow"))
        assert "image transport 'docker-archive:' is not allowed by settings.image_transports" in world.say(
            submit, user
        )


@needs_root
def test_an_early_date_in_a_command_gains_no_priority(world: InboxWorld) -> None:
    command = Submit(time=5.0, id=ids.mint(NOW), spec=spec())
    path = world.lay(command, ALICE)
    written = path.stat().st_ctime
    world.apply_inbox()
    assert written - 61 < world.job(command.id).submit_time <= written


# -- what it does to jobs ----------------------------------------------------------------------------------------


def test_cancel_by_state(world: InboxWorld) -> None:
    pending, running = world.submit(), world.submit()
    world.put(running, JobState.RUNNING)
    world.say(Cancel(time=NOW, job_ids=(pending, running)))
    assert world.job(pending).state == JobState.CANCELLED
    assert world.job(pending).end_time == world.now
    ending = world.job(running).ending
    assert ending is not None
    assert (ending.outcome, ending.kill_at) == (JobState.CANCELLED, world.now + 10)
    assert world.say(Cancel(time=NOW, job_ids=(running,), now=True)) == ""
    at_once = world.job(running).ending
    assert at_once is not None
    assert at_once.kill_at == min(ending.kill_at, world.now)
    assert world.say(Cancel(time=NOW, job_ids=(pending,))) == ""  # what has ended stays ended
    assert len([e for e in world.store.events(job_id=pending) if e.kind == "ended"]) == 1


def test_cancelled_as_it_waits_again_a_job_keeps_what_it_has_used(world: InboxWorld) -> None:
    job = world.submit()
    world.put(job, JobState.PENDING, start_time=None)
    used = UsageRow(bucket=0, node="n0", partition="p", job_id=job, user="u", gpu_s=10.0, energy_j=900.0)
    world.store.add_usage([used])
    world.say(Cancel(time=NOW, job_ids=(job,)))
    assert world.job(job).energy_j == 900.0


def test_cancel_beats_a_requeue_under_way(world: InboxWorld) -> None:
    job = world.submit()
    world.put(job, JobState.RUNNING)
    world.say(Requeue(time=NOW, job_ids=(job,)))
    ending = world.job(job).ending
    assert ending is not None
    assert ending.outcome == JobState.PENDING
    world.say(Cancel(time=NOW, job_ids=(job,)))
    ending = world.job(job).ending
    assert ending is not None
    assert ending.outcome == JobState.CANCELLED


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.NODE_FAIL])
def test_requeue_of_an_ended_job_starts_it_anew(world: InboxWorld, state: JobState) -> None:
    job = world.submit()
    world.put(job, state, end_time=NOW, exit_code=1, retries=3, unlaunched_on=("n0",), eligible_time=NOW + 600)
    assert world.say(Requeue(time=NOW, job_ids=(job,))) == ""
    again = world.job(job)
    assert (again.state, again.end_time, again.exit_code, again.retries) == (JobState.PENDING, None, None, 0)
    assert (again.unlaunched_on, again.eligible_time) == ((), None), "neither failed launches nor a back-off count"
    assert again.attempt == 1, "attempts count on: their containers have different names"


def test_requeue_of_an_ended_job_whose_secrets_are_gone_is_refused(world: InboxWorld) -> None:
    job = world.submit(secret_names=("TOKEN",), secrets={"TOKEN": "s3cr3t"})
    assert world.secrets.read(job) == {"TOKEN": "s3cr3t"}
    world.put(job, JobState.FAILED)
    world.secrets.delete(job)
    assert "submit it again" in world.say(Requeue(time=NOW, job_ids=(job,)))
    assert world.job(job).state == JobState.FAILED
    (event,) = world.kinds("refused")  # in the job's events, where its owner looks
    assert (event.job_id, event.data["command"]) == (job, "requeue")
    assert "submit it again" in event.data["why"]


def test_secrets_named_and_given_must_agree(world: InboxWorld) -> None:
    command = Submit(time=NOW, id=ids.mint(NOW), spec=spec(secret_names=("A",)), secrets={"B": "s3cr3t"})
    assert world.say(command) == "secrets named and secrets passed differ: A, B"
    assert b"s3cr3t" not in (world.state / "gpusched.db").read_bytes()


def test_secrets_count_in_the_size_of_a_users_pending_jobs(world: InboxWorld) -> None:
    """They are files of the controller, of up to 4 MiB each: 100,000 jobs of one user filled its disk."""
    settings = msgspec.structs.replace(world.inventory.settings, max_queued_mib_per_user=1)
    world.inventory = msgspec.structs.replace(world.inventory, settings=settings)
    given = {"A": "x" * 100_000}

    def says() -> str:
        command = Submit(time=NOW, id=fresh_id(NOW), spec=spec(secret_names=("A",)), secrets=given)
        return world.say(command, ALICE)

    assert [says() for _ in range(10)] == [""] * 10
    assert "more than the allowed 1 MiB" in says()
    assert world.say(Submit(time=NOW, id=fresh_id(NOW), spec=spec()), ALICE) == ""
    world.put(world.store.pending()[0].id, JobState.FAILED)
    assert says() == "", "the secrets of a job that has ended are about to go"
    given["A"] = "x" * 130_000
    assert says().startswith("secret A has 130000 bytes")
    given["A"] = "x\0y"
    assert says() == "secret A contains a NUL character"


def test_an_array_is_many_jobs_and_its_id_stands_for_all(world: InboxWorld) -> None:
    array = world.submit(array=(2, 0, 1, 1), max_running=1)
    assert [j.id for j in world.store.jobs_of_array(array)] == [f"{array}_{i}" for i in range(3)]
    assert world.store.array_limits() == {array: 1}
    world.say(Cancel(time=NOW, job_ids=(array,)))
    assert {j.state for j in world.store.jobs_of_array(array)} == {JobState.CANCELLED}


@pytest.mark.parametrize("array", [(), (-1,), (10**30,), tuple(range(100_001))])
def test_arrays_that_cannot_be(world: InboxWorld, array: tuple[int, ...]) -> None:
    assert world.say(Submit(time=NOW, id=ids.mint(NOW), spec=spec(), array=array)) != ""
    assert world.store.counts() == {}


@pytest.mark.parametrize("bad", ["../../etc/cron", "", "x", "a/b", "ABCDEFGHJKM", "0123456789a_1", "a-b-c-d-e-f"])
def test_an_id_that_is_none_is_refused(world: InboxWorld, bad: str) -> None:
    (world.inbox.new / "evil.submit").write_bytes(
        msgspec.json.encode(Submit(time=NOW, id=bad, spec=spec(secret_names=("A",)), secrets={"A": "x"}))
    )
    world.apply_inbox()
    assert world.store.counts() == {}
    assert "is not a job id" in world.refusals()[0].data["why"]
    assert not list(world.state.rglob("*.json"))


def test_the_error_shows_the_beginning_of_a_long_id(world: InboxWorld) -> None:
    long = "x" * 39 + "yz"
    (world.inbox.new / "evil.submit").write_bytes(msgspec.json.encode(Submit(time=NOW, id=long, spec=spec())))
    world.apply_inbox()
    assert world.refusals()[0].data["why"] == f"'{long[:40]}' is not a job id"


def test_one_bad_job_in_a_command_does_not_keep_the_others_from_it(world: InboxWorld) -> None:
    first, last = world.submit(), world.submit()
    assert world.say(Cancel(time=NOW, job_ids=(first, "00000000000", last))) == "job 00000000000: no such job"
    assert world.job(first).state == world.job(last).state == JobState.CANCELLED


# -- files -------------------------------------------------------------------------------------------------------


def test_applying_the_same_file_twice_changes_nothing(world: InboxWorld) -> None:
    """A crash between the commit and the removal of the files."""
    job = world.submit()
    world.put(job, JobState.FAILED)
    path = world.lay(Requeue(time=NOW, job_ids=(job,)))
    content = path.read_bytes()
    world.apply_inbox()
    assert world.job(job).state == JobState.PENDING
    world.put(job, JobState.COMPLETED)
    for later in (1, 3 * 86400):
        world.now += later
        path.write_bytes(content)
        newer = world.lay(Hold(time=NOW, job_ids=("00000000000",)))
        world.apply_inbox()
        assert not path.exists()
        assert not newer.exists()
        assert world.job(job).state == JobState.COMPLETED, "the requeue was done once"


def test_a_crash_in_the_middle_leaves_all_or_nothing(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [Submit(time=NOW, id=ids.mint(NOW + i), spec=spec()) for i in range(3)]
    for command in commands:
        world.lay(command)
    monkeypatch.setattr(world.store, "mark_applied", _crash_at(2, world.store.mark_applied))
    with pytest.raises(KeyboardInterrupt):
        world.apply_inbox()
    assert world.store.counts() == {}
    assert len(list(world.inbox.new.iterdir())) == 3
    monkeypatch.undo()
    world.apply_inbox()
    assert world.store.counts() == {"PENDING": 3}
    assert list(world.inbox.new.iterdir()) == []
    assert world.refusals() == []


def _crash_at(call: int, real: object) -> object:
    count = iter(range(100))

    def mark(name: str, now: float) -> None:
        if next(count) == call:
            raise KeyboardInterrupt
        real(name, now)  # type: ignore[operator]

    return mark


def test_the_same_submission_under_another_file_name_is_refused(world: InboxWorld) -> None:
    job = world.submit()
    (world.inbox.new / "again.submit").write_bytes(msgspec.json.encode(Submit(time=NOW, id=job, spec=spec(name="x"))))
    world.apply_inbox()
    assert world.refusals()[0].data["why"] == f"the submission of job {job} is not in {job}.submit"
    assert world.job(job).spec.name == "j"


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_confirmed_submission_that_cannot_be_read_now_is_not_refused(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    confirmed = Submit(time=NOW, id=ids.mint(NOW), spec=spec())
    world.lay(confirmed)
    opened = os.open

    def broken(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".submit"):
            raise OSError(code, os.strerror(code))
        return opened(path, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", broken)
        assert world.apply_inbox() == 0
        assert world.apply_inbox() == 0, "not again at once"
    assert world.refusals() == []
    world.inbox._postponed.clear()
    assert world.apply_inbox() == 1
    assert world.job(confirmed.id).state is JobState.PENDING


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\x00" * 100, b"[" * 100_000, b'{"command":"nonsense","time":1}', b'{"command":"cancel"}',
        b'{"command":"cancel","time":1,"job_ids":["a"],"more":1}', b'{"command":"hold","time":1,"job_ids":["\xff"]}',
        b'{"command":"hold","time":1e999,"job_ids":["a"]}',
    ],
    ids=range(9),
)  # fmt: skip
def test_malformed_files_are_set_aside(world: InboxWorld, content: bytes) -> None:
    (world.inbox.new / "bad.cancel").write_bytes(content)
    good = Submit(time=NOW, id=ids.mint(NOW), spec=spec())
    world.lay(good)
    world.apply_inbox()
    assert world.job(good.id).state == JobState.PENDING
    assert names(world.inbox.new) == []
    assert names(world.inbox.refused) == ["bad.cancel"]
    (event,) = world.refusals()
    assert event.data["file"] == "bad.cancel"
    assert "\n" not in event.data["why"]


def test_links_pipes_folders_and_oversized_files_are_set_aside(world: InboxWorld) -> None:
    new, secret = world.inbox.new, world.state / "secret"
    secret.write_bytes(msgspec.json.encode(Drain(time=NOW, nodes=("n0",), reason="x")))
    os.symlink(secret, new / "link.drain")
    os.mkfifo(new / "pipe.drain")
    (new / "folder.drain").mkdir()
    (new / "folder.drain" / "x").touch()
    (new / "huge.drain").write_bytes(b" " * (MAX_COMMAND_BYTES + 1))
    os.close(os.open(os.fsencode(new) + b"/\xff\xfe.drain", os.O_CREAT | os.O_WRONLY))
    (new / "two\nlines").touch()
    assert world.apply_inbox() == 6
    assert names(new) == []
    assert len(world.refusals()) == 6
    assert world.store.node_records() == {}
    assert secret.exists()
    assert world.apply_inbox() == 0


def test_a_file_that_cannot_be_moved_away_is_logged_once(world: InboxWorld) -> None:
    for place in (world.inbox.new, world.inbox.refused):
        (place / "same.cancel").mkdir()
        (place / "same.cancel" / "x").touch()
    assert world.apply_inbox() == 1
    assert world.apply_inbox() == 0, "the controller would never rest"
    assert len(world.refusals()) == 1


def test_an_unexpected_command_stops_nothing(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.submit()
    world.lay(Hold(time=NOW, job_ids=(job,)))
    submitted = Submit(time=NOW, id=ids.mint(NOW), spec=spec())
    world.lay(submitted)

    def fault(*_: object) -> None:
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    monkeypatch.setattr("gpusched.controller.commandfiles.CommandApplier._hold", fault)
    world.apply_inbox()
    assert world.job(submitted.id).state == JobState.PENDING
    assert "OverflowError" in world.refusals()[0].data["why"]
    assert len(list(world.inbox.refused.iterdir())) == 1


# -- bounds ------------------------------------------------------------------------------------------------------


def bounded(world: InboxWorld, jobs: int, mib: int) -> None:
    settings = msgspec.structs.replace(
        world.inventory.settings, max_queued_jobs_per_user=jobs, max_queued_mib_per_user=mib
    )
    world.inventory = msgspec.structs.replace(world.inventory, settings=settings)


def submission(world: InboxWorld, **fields: Any) -> Submit:
    more = {k: fields.pop(k) for k in ("array",) if k in fields}
    world.now += 1
    return Submit(time=NOW, id=ids.mint(world.now), spec=spec(**fields), **more)


@needs_root
def test_a_users_waiting_jobs_are_bounded(world: InboxWorld) -> None:
    bounded(world, 5, 1)
    first = submission(world, array=(1, 2, 3))
    assert world.say(first, ALICE) == ""
    assert world.say(submission(world, array=(1, 2, 3)), ALICE) == (
        f"{ALICE} has 3 of 5 pending jobs; 3 more exceed the limit "
        "(settings.max_queued_jobs_per_user of inventory.yaml)"
    )
    assert world.say(submission(world, array=(1, 2, 3)), BOB) == "", "each has their own"
    together = [submission(world) for _ in range(4)]
    for command in together:
        world.lay(command, ALICE)
    world.apply_inbox()
    assert len([c for c in together if world.store.job(c.id)]) == 2, "also what is applied at once is counted"
    world.say(Cancel(time=NOW, job_ids=(first.id,)), ALICE)
    assert world.say(submission(world), ALICE) == ""


@needs_root
def test_the_dependencies_of_a_users_waiting_jobs_are_bounded(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those applied together, too, also if that fails at first; tasks in one row count once, equal jobs each."""
    monkeypatch.setattr("gpusched.controller.commandfiles.MAX_WAITING_DEPENDENCIES", 7)
    others = tuple(Dependency(DependencyKind.AFTEROK, world.submit()) for _ in range(2))
    ended = tuple(world.submit(ALICE, dependencies=others) for _ in range(2))
    for job in ended:
        world.put(job, JobState.FAILED, end_time=NOW)
    odd = {"dependencies": others, "comment": '"kind":"x"'}
    for fields in ({"dependencies": others, "array": (1, 2, 3)}, odd):
        assert world.say(submission(world, **fields), ALICE) == ""
    together, faults = [submission(world, **odd) for _ in range(2)], [OSError(errno.EIO, "bad disk")]
    for command in together:
        world.lay(command, ALICE)
    monkeypatch.setattr(world.secrets, "sync", lambda: raise_first(faults))
    world.apply_inbox()
    assert [world.store.job(command.id) is not None for command in together] == [True, False]
    says = (
        f"{ALICE}'s pending jobs have 6 of 7 dependencies; 2 more exceed the limit; depend on an array instead of each "
        "of its tasks"
    )
    assert world.say(submission(world, dependencies=others), ALICE) == says
    assert world.say(submission(world), ALICE) == world.say(submission(world, dependencies=others), BOB) == ""
    world.say(Cancel(time=NOW, job_ids=(together[0].id,)), ALICE)
    assert world.say(Requeue(time=NOW, job_ids=ended), ALICE) == f"job {ended[1]}: {says}"


def raise_first(faults: list[OSError]) -> None:
    if faults:
        raise faults.pop()


def test_requeued_jobs_count_among_a_users_pending_jobs(world: InboxWorld) -> None:
    ended = [world.submit() for _ in range(3)]
    for job in ended:
        world.put(job, JobState.FAILED, end_time=NOW)
    bounded(world, 2, 1)
    refused = world.say(Requeue(time=NOW, job_ids=tuple(ended)))
    assert refused.startswith(f"job {ended[2]}: ")
    assert "has 2 of 2 pending jobs; 1 more exceed the limit" in refused
    assert [world.job(job).state for job in ended] == [JobState.PENDING, JobState.PENDING, JobState.FAILED]


@needs_root
def test_a_users_waiting_bytes_are_bounded_and_an_array_counts_once(world: InboxWorld) -> None:
    bounded(world, 10_000, 1)
    large = {f"V{n}": "x" * 100_000 for n in range(8)}
    assert world.say(submission(world, env=large, array=tuple(range(300))), ALICE) == ""
    refused = world.say(submission(world, env=large | {"other": "y"}), ALICE)
    assert refused == (
        f"the pending jobs of {ALICE} would take 1 MiB, more than the allowed 1 MiB "
        "(settings.max_queued_size_per_user of inventory.yaml)"
    )
    assert world.say(submission(world), ALICE) == ""
    assert world.say(submission(world, env=large | {"other": "y"}), BOB) == ""


def test_a_command_that_does_not_fit_on_the_disk_waits_and_others_go_on(
    world: InboxWorld, caplog: pytest.LogCaptureFixture
) -> None:
    (pages,) = world.store._db.execute("PRAGMA page_count").fetchone()
    world.store._db.execute(f"PRAGMA max_page_count = {pages + 60}")
    first = submission(world)
    large = submission(world, env={f"V{n}": "x" * 100_000 for n in range(9)})
    last = submission(world)
    for command in (first, large, last):
        world.lay(command)

    def apply_inbox() -> int:
        world.now += 1
        return CommandApplier(world.store, world.inbox, world.inventory, world.secrets).apply_inbox(world.now)

    assert apply_inbox() == 2
    assert [j.id for j in world.store.pending()] == [first.id, last.id]
    assert names(world.inbox.new) == [f"{large.id}.submit"]
    assert names(world.inbox.refused) == []
    (line,) = messages(caplog)
    assert line.startswith("1 command in the inbox cannot be recorded: database or disk is full")
    world.store._db.execute("PRAGMA max_page_count = 1000000")
    assert apply_inbox() == 0, "the controller would never rest"
    assert not world.inbox.has_any()
    world.inbox._postponed.clear()
    assert apply_inbox() == 1
    assert world.store.job(large.id) is not None
    assert len(messages(caplog)) == 1


def test_the_first_five_of_many_problems_are_listed(world: InboxWorld) -> None:
    ids = tuple(f"nobody{n}" for n in range(8))
    for count, more in ((5, ""), (6, "; and 1 more"), (8, "; and 3 more")):
        why = world.say(Cancel(time=world.now, job_ids=ids[:count]))
        assert why == "; ".join(f"job {one}: no such job" for one in ids[:5]) + more


@pytest.mark.parametrize(("asked", "kept"), [(1, 1), (600, 600), (601, 600), (1 << 60, 600)])
def test_a_session_is_kept_no_longer_than_the_site_allows(world: InboxWorld, asked: int, kept: int) -> None:
    assert world.job(world.submit(session=asked)).spec.session == kept


@pytest.mark.parametrize("asked", [0, -5])
def test_a_session_that_would_end_at_once_is_refused(world: InboxWorld, asked: int) -> None:
    said = world.say(Submit(time=NOW, id=ids.mint(NOW), spec=spec(session=asked)), ME)
    assert "kept for at least a second" in str(said)


@needs_root
def test_nobody_takes_the_id_of_a_submission_that_waits(world: InboxWorld) -> None:
    """The id is seen in the arguments of a ``wait``; a file of another name that sorts first was applied first."""
    job_id = ids.mint(NOW)
    world.lay(Submit(time=NOW, id=job_id, spec=spec()), ALICE)
    path = world.inbox.new / f"{job_id}.submit"
    (world.inbox.new / "0.submit").write_bytes(path.read_bytes())
    os.chown(world.inbox.new / "0.submit", BOB, -1)
    world.apply_inbox()
    assert world.job(job_id).uid == ALICE
    (refusal,) = world.refusals()
    assert (refusal.user, refusal.job_id) == (str(BOB), "0")


@needs_root
def test_dependencies_on_many_tasks_count_as_many(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 of them, each on 100,000 tasks, would be looked up in every cycle."""
    monkeypatch.setattr("gpusched.controller.commandfiles.MAX_WAITING_DEPENDENCIES", 7)
    array = world.submit(ALICE, array=(0, 1, 2))
    on = tuple(Dependency(DependencyKind.AFTERANY, name) for name in (array, f"{array}_[0-1]"))
    for _ in range(2):
        world.submit(ALICE, dependencies=on, script="#!/bin/sh\n: ${x_[0]}")
    submission = Submit(time=NOW, id=ids.mint(NOW), spec=spec(dependencies=on))
    assert "have 6 of 7 dependencies; 3 more" in world.say(submission, ALICE)
    world.submit(ALICE, dependencies=on[:1])
    huge = spec(dependencies=(Dependency(DependencyKind.AFTERANY, f"{array}_[0-9999999]"),))
    assert "10000000 more exceed" in world.say(Submit(time=NOW, id=fresh_id(NOW), spec=huge), BOB)


def test_the_names_of_applied_files_are_remembered_for_a_day_and_nothing_is_written_without_commands(
    world: InboxWorld,
) -> None:
    first, second = world.submit(), world.submit()
    applied_at = world.now
    for now, kept in ((applied_at + 86400.0, True), (applied_at + 86400.1, False)):
        world.now = now - 1
        world.submit()
        assert world.store.was_applied(f"{second}.submit") is kept
        assert not world.store.was_applied(f"{first}.submit")
    writes = world.store._db.total_changes
    world.now += 999_999
    assert world.apply_inbox() == 0
    assert world.store._db.total_changes == writes
