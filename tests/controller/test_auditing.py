"""The audit log: an entry with each command, none lost and none twice; rotation; who may add entries."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.controller import auditing
from gpusched.controller.auditing import AuditFile, audit_stream
from gpusched.controller.publishing import Publisher
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.audit import AuditEntry, audit_entry
from gpusched.model.commands import Cancel, Drain, RecordAudit, RelayedCommand, Submit
from gpusched.queue import audit
from gpusched.queue.reading import CURRENT, PUBLISHED
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.applying import ADMIN, ALICE, BOB, ME, NOW, InboxWorld
from tests.controller.rights import needs_root


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    world = InboxWorld(tmp_path)
    yield world
    world.store.close()


def recorded(world: InboxWorld) -> list[AuditEntry]:
    return list(audit.entries(world.state, world.store))


def export(world: InboxWorld) -> None:
    """Write the log as the controller does, to the end."""
    stream = audit_stream(world.store, world.state)
    stream.wake()
    stream.stop(30)
    world.store.forget_audit(stream.position)


@needs_root
def test_an_applied_command_has_one_entry_with_its_sender(world: InboxWorld) -> None:
    job = world.submit(ALICE)
    assert world.say(Cancel(time=NOW, origin="ssh 203.0.113.7", job_ids=(job,)), ALICE) == ""
    submitted, cancelled = recorded(world)
    assert (submitted.command, submitted.subject, submitted.uid) == ("submit", (job,), ALICE)
    assert [submitted.result, cancelled.result] == ["applied", "applied"]
    assert (cancelled.command, cancelled.origin, cancelled.seq) == ("cancel", "ssh 203.0.113.7", submitted.seq + 1)
    assert cancelled.host == os.uname().nodename


@needs_root
def test_a_refused_command_has_one_with_the_reason(world: InboxWorld) -> None:
    job = world.submit(ALICE)
    why = world.say(Cancel(time=NOW, job_ids=(job,)), BOB)
    entry = recorded(world)[-1]
    assert (entry.uid, entry.command, entry.result, entry.reason) == (BOB, "cancel", "refused", why)


def test_a_malformed_file_has_one(world: InboxWorld) -> None:
    (world.inbox.new / "x.cancel").write_text("{}")
    world.apply_inbox()
    (entry,) = recorded(world)
    assert (entry.uid, entry.command, entry.subject, entry.result) == (ME, "malformed", ("x.cancel",), "refused")


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_at_the_commit_neither_loses_an_entry_nor_writes_two(
    world: InboxWorld, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.lay(Drain(time=NOW, nodes=("n0",), reason="x"))

    class Crash(BaseException):
        pass

    def crashing(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(*((world.secrets, "sync") if crash == "before" else (world.inbox, "remove")), crashing)
        with pytest.raises(Crash):
            world.apply_inbox()
    drained = world.store.node_record("n0") is not None
    assert drained == bool(recorded(world)) == (crash == "after")
    world.apply_inbox()
    assert [entry.command for entry in recorded(world)] == ["drain"]


def test_the_log_has_each_entry_once_wherever_writing_it_was_cut_off(world: InboxWorld) -> None:
    for node in ("n0", "n1"):
        world.say(Drain(time=NOW, nodes=(node,), reason="x"))
    stored = recorded(world)
    stream = audit_stream(world.store, world.state)
    stream.wake()
    stream.stop(30)  # killed before the store forgot what was written
    log = world.state / audit.FOLDER / audit.CURRENT
    log.write_bytes(log.read_bytes()[:-10])  # and a power cut took half a line
    export(world)
    assert recorded(world) == stored
    assert log.read_bytes().count(b"\n") == 2
    assert stat.S_IMODE(log.stat().st_mode) == 0o640
    assert not world.store.audit_entries(0, 10)
    world.say(Drain(time=NOW, nodes=("n0",), reason="y"))
    export(world)
    assert [entry.seq for entry in recorded(world)] == [1, 2, 3]


def test_a_store_from_a_backup_repeats_no_number(world: InboxWorld, tmp_path: Path) -> None:
    for _ in range(3):
        world.say(Drain(time=NOW, nodes=("n0",), reason="x"))
    export(world)
    world.store.close()
    for file in tmp_path.glob("gpusched.db*"):
        file.unlink()
    world.store = Store.create_or_open(tmp_path)
    export(world)
    world.say(Drain(time=NOW, nodes=("n1",), reason="x"))
    export(world)
    assert [entry.seq for entry in recorded(world)] == [1, 2, 3, 4]


def test_a_full_file_is_renamed_and_the_oldest_go(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(auditing, "KEPT_FILES", 2)
    file = AuditFile(world.state)
    for seq in range(1, 6):
        entry = msgspec.structs.replace(audit_entry(NOW, "h", (1, "a"), "drain"), seq=seq)
        file.write([msgspec.json.encode(entry)])
        assert audit.last_number(world.state) == seq
    file.close()
    assert [path.name for path in audit.old_files(world.state)] == [f"audit-{3:015d}.jsonl", f"audit-{4:015d}.jsonl"]
    assert [entry.seq for entry in recorded(world)] == [3, 4, 5]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["audit_entries", "old_files"])
def test_entries_that_are_moved_while_it_is_read_are_read_once(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch, what: str, when: str
) -> None:
    """From the store to the log's latest file, or with that to an old one."""
    world.say(Drain(time=NOW, nodes=("n0",), reason="x"))
    if what == "old_files":
        export(world)
        monkeypatch.setattr(auditing, "MAX_FILE_BYTES", 1)
    world.say(Drain(time=NOW, nodes=("n1",), reason="x"))
    place: Any = Store if what == "audit_entries" else audit
    real, moved = getattr(place, what), list[int]()

    def move() -> None:
        if not moved:
            moved.append(1)
            export(world)

    def read(*given: Any) -> Any:
        if when == "before":
            move()
        found = real(*given)
        move()
        return found

    monkeypatch.setattr(place, what, read)
    assert [entry.seq for entry in recorded(world)] == [1, 2]
    assert len(audit.old_files(world.state)) == (what == "old_files")
    assert [entry.seq for entry in recorded(world)] == [1, 2]


def test_a_line_that_is_no_entry_is_named(world: InboxWorld) -> None:
    world.say(Drain(time=NOW, nodes=("n0",), reason="x"))
    export(world)
    log = world.state / audit.FOLDER / audit.CURRENT
    log.write_bytes(b"{}\n" + log.read_bytes())
    with pytest.raises(GpuschedError, match=r"audit\.jsonl:1: not an entry of the audit log"):
        recorded(world)


@needs_root
@pytest.mark.parametrize("more", [0, 1, 30])
def test_refusals_of_one_user_do_not_fill_the_log(world: InboxWorld, more: int) -> None:
    for _ in range(auditing.MAX_REFUSALS + more):
        world.lay(Drain(time=NOW, nodes=("n0",), reason="x"), BOB)
    world.lay(Drain(time=NOW, nodes=("n0",), reason="x"), ALICE)
    world.apply_inbox()
    mine = [entry for entry in recorded(world) if entry.uid == BOB]
    assert len(mine) == auditing.MAX_REFUSALS + (more > 0)
    said = [(entry.command, entry.reason) for entry in mine if entry.command == "commands"]
    assert said == ([("commands", f"{more} more were refused")] if more else [])
    assert [entry.reason for entry in recorded(world) if entry.uid == ALICE] != []


def test_many_subjects_are_counted(world: InboxWorld) -> None:
    world.say(Drain(time=NOW, nodes=tuple(f"none{i}" for i in range(50)), reason="x"))
    (entry,) = recorded(world)
    assert (len(entry.subject), entry.data) == (20, {"subjects": 50})


def test_a_command_from_inside_a_job_is_its_users(world: InboxWorld) -> None:
    job = world.submit()
    world.store.put_jobs([msgspec.structs.replace(world.job(job), uid=ALICE, user="alice", attempt=1)])
    world.say(RelayedCommand(time=NOW, origin=f"job {job}", job_id=job, attempt=1, act="cancel", job_ids=(job,)))
    entry = recorded(world)[-1]
    assert (entry.uid, entry.user, entry.command, entry.via) == (ALICE, "alice", "cancel", f"job {job}")


@needs_root
@pytest.mark.parametrize(("uid", "fields", "why"), [
    (BOB, {}, "only admins, root and the controller's user add entries to the audit log"),
    (ADMIN, {"uid": ALICE, "user": "alice"}, "only root and the controller's user add entries about others"),
    (ADMIN, {}, ""),
    (ME, {"uid": ALICE, "user": "alice", "via": "relay"}, ""),
    (ME, {"uid": ALICE}, ""),
    (ME, {"user": "alice"}, ""),
])  # fmt: skip
def test_only_permitted_users_add_audit_entries(world: InboxWorld, uid: int, fields: dict[str, Any], why: str) -> None:
    assert world.say(RecordAudit(time=NOW, action="exec", subject=("j",), **fields), uid) == why
    (entry,) = recorded(world)
    about = fields.get("uid", -1 if fields else uid)
    expected = ("audit", uid, ("exec", "j"), why) if why else ("exec", about, ("j",), "")
    assert (entry.command, entry.uid, entry.subject, entry.reason) == expected


def test_an_origin_is_claimed_by_the_client_and_nothing_else_fits(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.7 5 198.51.100.1 22")
    world.say(Drain(time=NOW, nodes=("n0",), reason="x"))
    monkeypatch.setenv("SSH_CONNECTION", "a\nb 5 198.51.100.1 22")
    world.say(Drain(time=NOW, nodes=("n0",), reason="x"))
    assert recorded(world)[0].origin == "ssh 203.0.113.7"
    assert recorded(world)[1].origin in ("terminal", "no terminal")
    assert world.say(Drain(time=NOW, origin="a\nb", nodes=("n0",), reason="x")).startswith("not a command: ")


def test_the_copy_that_everyone_reads_has_no_entry(world: InboxWorld) -> None:
    world.say(Drain(time=NOW, origin="ssh 203.0.113.99", nodes=("n0",), reason="x"))
    world.store._db.execute("PRAGMA secure_delete=OFF")  # where it is not SQLite's default
    for _ in range(200):  # so many that whole pages become free
        world.store.add_audit(audit_entry(NOW, "h", (1, "a"), "drain", origin="ssh 203.0.113.99"))
    publisher = Publisher(world.state)
    copy = world.state / PUBLISHED / CURRENT
    for _ in range(2):  # while it waits, and after it was deleted
        publisher.publish()
        assert b"203.0.113.99" not in copy.read_bytes()
        export(world)
    publisher.stop()
    assert recorded(world)[0].origin == "ssh 203.0.113.99"


def test_a_reporter_counts_what_one_sender_is_refused_too_often(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reporter = 0.0, audit.AuditReporter(world.state)
    monkeypatch.setattr(audit, "time", SimpleNamespace(monotonic=lambda: now))
    refused = RecordAudit(time=NOW, origin="relay", action="exec", refused="no", via="relay", uid=BOB, user="bob")
    for now, times in ((0.0, 23), (3.0, 2), (6.0, 1), (1e6, 21)):  # noqa: B007
        for _ in range(times):
            reporter.refused(refused)
        world.apply_inbox()
    reporter.refused(msgspec.structs.replace(refused, uid=ALICE, user="alice"))
    world.apply_inbox()
    found = Counter((entry.user, entry.reason) for entry in recorded(world))
    more = {("bob", f"no (and {count} more before)"): 1 for count in (3, 1)}
    assert found == {("alice", "no"): 1, ("bob", "no"): 40, **more}


def test_a_reporter_reports_the_same_once_an_hour_if_asked(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reporter = 0.0, audit.AuditReporter(world.state)
    monkeypatch.setattr(audit, "time", SimpleNamespace(monotonic=lambda: now))
    command = RecordAudit(time=NOW, origin="relay", action="forward", subject=("j",), via="relay", uid=ME, user="me")
    for now, reports in ((0.0, 1), (3599.0, 1), (3600.0, 2), (3601.0, 2)):  # noqa: B007
        reporter.done(command, once=True)
        world.apply_inbox()
        assert len(recorded(world)) == reports
    reporter.done(msgspec.structs.replace(command, subject=("k",)), once=True)
    reporter.done(command)
    world.apply_inbox()
    assert len(recorded(world)) == 4


def test_a_submission_leaves_no_secret_in_the_log(world: InboxWorld) -> None:
    secret = "s3cr3t-of-the-log"
    for given in ({"TOKEN": secret}, {"OTHER": secret}):
        job = ids.mint(NOW)
        world.lay(Submit(time=NOW, id=job, spec=spec(secret_names=("TOKEN",)), secrets=given))
        world.apply_inbox()
    assert [entry.result for entry in recorded(world)] == ["applied", "refused"]
    export(world)
    assert secret.encode() not in (world.state / audit.FOLDER / audit.CURRENT).read_bytes()
