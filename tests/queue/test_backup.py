"""Backups: what is in them, which are kept, how damage is noticed, and a disk without room."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.errors import GpuschedError
from gpusched.model.audit import audit_entry
from gpusched.model.events import Event
from gpusched.model.jobs import JobState
from gpusched.model.resources import BackupSettings
from gpusched.queue import backup, private
from gpusched.queue.audit import CURRENT, entries
from gpusched.queue.audit import FOLDER as AUDIT
from gpusched.queue.backup import BackupStopped, backups, check_backup, find_backup, make_backup
from gpusched.queue.inbox import MAX_COMMAND_BYTES
from gpusched.queue.reading import DATABASE
from gpusched.queue.schema import FIRST_VERSION, MIGRATIONS, SCHEMA, SCHEMA_VERSION
from gpusched.queue.store import Reader, Store
from tests.builders import job

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path / "state")
    store.put_jobs([job(state=JobState.PENDING)])
    store.append(Event(time=NOW, kind="noise", data={"n": n, "text": "x" * 500}) for n in range(4000))
    yield store
    store.close()


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Callable[..., Path]:
    def made(after: float = 0.0, **settings: int) -> Path:
        to = BackupSettings(to=str(tmp_path / "backups"), **settings)
        return make_backup(tmp_path / "state", to, NOW + after).path

    return made


def names(tmp_path: Path) -> list[str]:
    return [one.name for one in backups(tmp_path / "backups")]


def test_a_backup_holds_what_cannot_be_made_anew_with_its_permissions(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    for name, mode in (("secrets/j", 0o600), ("policies/p/w.safetensors", 0o644), ("logs/j/1.0.log", 0o640)):
        (state / name).parent.mkdir(parents=True)
        (state / name).write_text(name)
        (state / name).chmod(mode)
    (state / "secrets").chmod(0o700)
    first = make()
    (state / "secrets/j").write_text("changed")
    for file in (state / "logs/k/1.0.log", tmp_path / "backups/logs/k/1.0.log.part"):  # which a killed backup left
        file.parent.mkdir()
        file.write_text("whole" if file.suffix == ".log" else "begun before it was cut")
    second = make(HOUR)
    assert (first / "secrets/j").read_text() == "secrets/j"
    assert (second / "secrets/j").read_text() == "changed"
    assert stat.S_IMODE((second / "secrets/j").stat().st_mode) == 0o600
    assert stat.S_IMODE((second / "secrets").stat().st_mode) == 0o700
    assert os.path.samefile(first / "policies/p/w.safetensors", second / "policies/p/w.safetensors"), "kept once"
    assert (tmp_path / "backups/logs/j/1.0.log").read_text() == "logs/j/1.0.log"
    assert (tmp_path / "backups/logs/k/1.0.log").read_text() == "whole"
    reader = Reader.open(second)
    assert reader is not None
    assert [one.id for one in reader.rows_of("0123456789a")] == ["0123456789a"]
    reader.close()


def test_a_copy_is_of_one_moment_however_often_the_writer_commits_meanwhile(
    store: Store, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def commit(_: float) -> None:
        nonlocal steps
        steps += 1
        assert steps < 1000, "each commit makes it begin anew"
        store.append([Event(time=NOW, kind="late")])

    monkeypatch.setattr(backup.time, "sleep", commit)
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 20)
    made = make()
    assert steps > 20
    with sqlite3.connect(made / DATABASE) as db:
        assert db.execute("SELECT count(*) FROM events WHERE kind = 'late'").fetchone() == (0,)
    assert store.latest_event() == 4000 + steps


@pytest.mark.parametrize("moment", ["listed", "opened", "copied"])
def test_files_that_vanish_meanwhile_fail_no_backup(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Commands are applied, and jobs with secrets end, while it copies."""
    files = [tmp_path / "state" / name for name in ("inbox/new/1.submit", "secrets/j.json", "policies/p.yaml")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    gone = files[1]
    (real_walk, real_copy) = os.walk, backup._copy_content

    def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in real_walk(folder):
            if moment == "listed" and Path(found[0]) == gone.parent:
                gone.unlink()
            yield found

    def copy_content(source: Path, copy: Path, status: os.stat_result) -> None:
        if moment == "opened" and source == gone:
            gone.unlink()
        real_copy(source, copy, status)
        if moment == "copied" and source == gone:
            gone.unlink()

    monkeypatch.setattr(backup.os, "walk", walk)
    monkeypatch.setattr(backup, "_copy_content", copy_content)
    made = make()
    assert not gone.exists()
    assert [(made / file.relative_to(tmp_path / "state")).exists() for file in (files[0], files[2])] == [True, True]
    assert [path.name for path in (made / "secrets").glob("*")] == (["j.json"] if moment == "copied" else [])


@pytest.mark.parametrize("copied", [False, True])
def test_entries_of_the_audit_log_that_are_moved_meanwhile_are_in_the_backup_once(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Its latest file is renamed before it is copied, or after."""
    folder = tmp_path / "state" / AUDIT
    folder.mkdir()
    current, real_copy = folder / CURRENT, backup._copy_content

    def write(*numbers: int) -> None:
        entries = [audit_entry(NOW, "h", (0, "root"), "drain", (f"n{n}",), refused="", via="inbox") for n in numbers]
        lines = [msgspec.json.encode(msgspec.structs.replace(e, seq=n)) for e, n in zip(entries, numbers, strict=True)]
        current.write_bytes(b"".join(line + b"\n" for line in lines))

    def copy_content(source: Path, copy: Path, status: os.stat_result) -> None:
        if source == current and len(list(folder.iterdir())) == 1 and not copied:
            current.rename(folder / "audit-000000000000002.jsonl")
            write(3)
        real_copy(source, copy, status)
        if source == current and len(list(folder.iterdir())) == 1 and copied:
            current.rename(folder / "audit-000000000000002.jsonl")  # nothing is written until the next entry

    write(1, 2)
    monkeypatch.setattr(backup, "_copy_content", copy_content)
    assert [entry.seq for entry in entries(make(), None)] == ([1, 2] if copied else [1, 2, 3])


def test_a_submission_that_is_applied_meanwhile_is_in_the_backup(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "state/inbox/new/1.submit"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.touch()
    copy_database = backup._copy_database

    def copying(*given: Any) -> object:
        manifest = copy_database(*given)
        command.unlink()  # applied right after the database was read
        return manifest

    monkeypatch.setattr(backup, "_copy_database", copying)
    assert (make() / "inbox/new/1.submit").exists()


@pytest.mark.parametrize("swap", ["link", "link to itself", "pipe", "another"])
def test_of_what_all_users_may_put_into_the_inbox_only_commands_are_copied(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """One is exchanged between the look at it and the copy: root would follow a link, and wait for a pipe."""
    new, others = tmp_path / "state/inbox/new", tmp_path / "others"
    (new / "0dir.submit").mkdir(parents=True)
    for file in (others, new / "0good.submit", new / "0mine.submit", new / "0dir.submit/0deep.submit"):
        file.write_text("secret")
    for name, size in (("0huge.submit", MAX_COMMAND_BYTES + 1), ("0large.submit", MAX_COMMAND_BYTES)):
        (new / name).touch()
        os.truncate(new / name, size)
    (new / "0cancel.cancel").write_text("secret")
    os.link(others, new / "0linked.submit")
    real = backup._copy_content

    def copy_content(source: Path, copy: Path, status: os.stat_result) -> None:
        if source == new / "0mine.submit":
            source.rename(tmp_path / "mine")
            if swap.startswith("link"):
                source.symlink_to(others if swap == "link" else tmp_path / "mine")
            elif swap == "pipe":
                os.mkfifo(source)
            else:
                others.rename(source)
        real(source, copy, status)

    monkeypatch.setattr(backup, "_copy_content", copy_content)
    assert sorted(path.name for path in (make() / "inbox/new").iterdir()) == ["0good.submit", "0large.submit"]


def test_a_file_that_is_replaced_as_it_is_copied_is_in_the_backup(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "state/policies/mine.yaml"
    policy.parent.mkdir(parents=True)
    policy.write_text("old")
    real = backup._copy_content

    def copy_content(source: Path, copy: Path, status: os.stat_result) -> None:
        if source == policy and policy.read_text() == "old":
            draft = policy.with_name("draft")
            draft.write_text("new")
            draft.replace(policy)
        real(source, copy, status)

    monkeypatch.setattr(backup, "_copy_content", copy_content)
    assert (make() / "policies/mine.yaml").read_text() == "new"


def test_output_that_is_added_during_a_copy_is_in_the_next_one(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, copies = tmp_path / "state/logs", tmp_path / "backups/logs"
    (logs / "j").mkdir(parents=True)
    (logs / ".collecting").mkdir()
    for name in ("j/1.0.log", ".collecting/j.2.0.log"):
        (logs / name).write_text(name)
    real = backup._copy_content

    def copy_content(source: Path, copy: Path, status: os.stat_result) -> None:
        real(source, copy, status)
        if source == logs / "j/1.0.log":
            (logs / "j/1.1.log").write_text("later")
            os.utime(logs / "j", (NOW, NOW))  # whatever the resolution of the disk's clock

    monkeypatch.setattr(backup, "_copy_content", copy_content)
    make()
    make(HOUR)
    assert sorted(str(path.relative_to(copies)) for path in copies.glob("*/*")) == ["j/1.0.log", "j/1.1.log"]


def test_without_wal_the_writer_is_not_kept_waiting_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network filesystem the store has a rollback journal: a reader keeps its writer out."""
    monkeypatch.setattr(private, "lacks_shared_memory", lambda _: True)
    with closing(Store.create_or_open(tmp_path / "state")) as store:
        store.append(Event(time=NOW, kind="noise", data={"text": "x" * 500}) for _ in range(400))
    pauses = list[float]()
    monkeypatch.setattr(backup.time, "sleep", pauses.append)
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 20)
    made = make_backup(tmp_path / "state", BackupSettings(to=str(tmp_path / "backups")), NOW)
    assert len(pauses) == 1
    assert check_backup(made.path) == ""


def test_other_users_cannot_read_or_plant_a_backup(make: Callable[..., Path], store: Store, tmp_path: Path) -> None:
    """In a folder that all can read; backups have secrets and entries of the audit log."""
    folder = tmp_path / "backups"
    folder.mkdir(mode=0o755)
    made = make()
    assert [stat.S_IMODE(p.stat().st_mode) for p in (made, made / DATABASE, folder / ".lock")] == [0o700, 0o600, 0o600]
    folder.chmod(0o777)
    with pytest.raises(GpuschedError, match="all users can write to"):
        make(HOUR)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_does_not_leave_files_that_the_controller_cannot_use(make: Callable[..., Path], tmp_path: Path) -> None:
    os.chown(tmp_path / "state", 64007, 64007)
    with pytest.raises(GpuschedError, match="belongs to user 64007"):
        make()
    assert not (tmp_path / "backups").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("owner", "copied"), [(64006, False), (64007, True), (64008, False)])
def test_without_root_files_of_other_users_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, copied: bool
) -> None:
    """Who owns a command file is who sent it."""
    for folder in ("from", "to"):
        (tmp_path / folder).mkdir()
    (tmp_path / "from" / "a.submit").touch()
    os.chown(tmp_path / "from" / "a.submit", owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 64007)
    backup._copy_file(tmp_path / "from", tmp_path / "to", Path("a.submit"))
    assert (tmp_path / "to" / "a.submit").exists() is copied


def test_an_interrupted_backup_removes_no_other(make: Callable[..., Path], store: Store, tmp_path: Path) -> None:
    """A superseded controller leaves them to the other one."""
    kept = [make(), make(HOUR)]
    settings = BackupSettings(to=str(tmp_path / "backups"), keep=1, keep_days=0)
    for stop in (lambda: True, lambda: len(names(tmp_path)) == 3):
        with pytest.raises(BackupStopped):
            make_backup(tmp_path / "state", settings, NOW + DAY, stop=stop)
        assert names(tmp_path)[:2] == [path.name for path in kept]
    assert len(names(tmp_path)) == 3
    assert not list((tmp_path / "backups").glob("*.part"))


def test_which_backups_are_kept(make: Callable[..., Path], tmp_path: Path) -> None:
    times = [*(day * DAY for day in range(6)), *(6 * DAY + hour * HOUR for hour in range(4))]
    made = [make(after, keep=2, keep_days=3).name for after in times]
    # The last two, and the last one of this day and of the two days before it.
    assert names(tmp_path) == [made[4], made[5], made[-2], made[-1]]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free some space"),
        (OSError(errno.EROFS, "Read-only file system"), "choose another folder"),
    ],
)
def test_why_there_is_no_backup_and_what_helps(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: OSError, hint: str
) -> None:
    def copy(*_: object) -> None:
        raise error

    monkeypatch.setattr(backup, "_copy_database", copy)
    with pytest.raises(GpuschedError, match=error.strerror) as raised:
        make()
    assert hint in raised.value.hint


def test_a_file_is_no_folder_for_backups_nor_is_a_path_without_end(
    make: Callable[..., Path], store: Store, tmp_path: Path
) -> None:
    (tmp_path / "backups").touch()
    with pytest.raises(GpuschedError, match="backups: Not a directory"):
        make()
    for to in (tmp_path / "backups/deeper", tmp_path / "/".join("d" * 3000)):
        with pytest.raises(GpuschedError, match=r"no backup in .*: (Not a directory|File name too long)") as raised:
            make_backup(tmp_path / "state", BackupSettings(to=str(to)), NOW)
        assert "choose another folder" in raised.value.hint


@pytest.mark.parametrize("change", ["nothing", "size", "time", "mode", "owner"])
def test_only_a_file_that_is_the_same_in_all_is_kept_once(
    make: Callable[..., Path], tmp_path: Path, change: str
) -> None:
    file = tmp_path / "state/policies/p.yaml"
    file.parent.mkdir()
    file.write_text("order: sjf")
    os.utime(file, (NOW, NOW))
    first = make()
    match change:
        case "size":
            file.write_text("order: sjff")
            os.utime(file, (NOW, NOW))
        case "time":
            os.utime(file, (NOW, NOW + 1))
        case "mode":
            file.chmod(0o600)
        case "owner" if os.geteuid() == 0:
            os.chown(file, 64007, -1)
    kept, status = (make(HOUR) / "policies/p.yaml").lstat(), file.lstat()
    same = change == "nothing" or (change == "owner" and os.geteuid() != 0)
    assert os.path.samestat(kept, (first / "policies/p.yaml").lstat()) is same
    assert (kept.st_size, kept.st_mtime, kept.st_mode, kept.st_uid) == (
        status.st_size, status.st_mtime, status.st_mode, status.st_uid
    )  # fmt: skip


def test_what_an_interrupted_backup_left_goes_and_nothing_else_does(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    for name in (".20270115T080000Z.part", ".mine.part", "20270115T08000Z", "20270115T080000Zx"):
        (folder / name).mkdir(parents=True)
    made = make(HOUR)
    found = [".lock", ".mine.part", "20270115T08000Z", "20270115T080000Zx", made.name]
    assert sorted(os.listdir(folder)) == sorted(found)
    assert names(tmp_path) == [made.name]
    assert find_backup(folder).path == find_backup(made).path == made


def test_what_cannot_be_removed_fails_no_backup(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "backups/logs"
    (copies / "old").mkdir(parents=True)
    (tmp_path / "state/logs").mkdir()
    make(keep_days=999)
    os.utime(copies / "old", (NOW, NOW - 99 * DAY))
    (tmp_path / "backups/.20270115T080001Z.part").mkdir()

    def stays(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "rmdir", stays)
    made = make(9 * DAY, keep=1, keep_days=0)
    assert (check_backup(made), names(tmp_path)) == ("", [made.name])
    assert (copies / "old").exists()


def test_what_is_wrong_with_a_backup_is_said(make: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(GpuschedError, match=r"no usable backup in .*nowhere \(there are none\)"):
        find_backup(tmp_path / "nowhere")
    made = make()
    manifest = (made / backup.MANIFEST).read_text()
    for old, new, said in (
        ('"events":4000', '"events":4001', "table events has 4000 rows of 4001"),
        ('"events":4000', '"left":7', "table left has 0 rows of 7"),
        (f'"schema":{SCHEMA_VERSION}', f'"schema":{SCHEMA_VERSION - 1}',
         f"{DATABASE} has schema {SCHEMA_VERSION} instead of {SCHEMA_VERSION - 1}"),
        (f'"schema":{SCHEMA_VERSION}', f'"schema":{SCHEMA_VERSION + 1}', "it is of a newer gpusched ("),
    ):  # fmt: skip
        assert old in manifest
        (made / backup.MANIFEST).write_text(manifest.replace(old, new))
        assert check_backup(made).startswith(said)
    with pytest.raises(GpuschedError, match=rf"no usable backup in .* \({made.name}: it is of a newer"):
        find_backup(made.parent)


def test_of_output_folders_of_jobs_are_copied_once(make: Callable[..., Path], tmp_path: Path) -> None:
    logs, copies = tmp_path / "state/logs", tmp_path / "backups/logs"
    for name in ("j/1.0.log", ".collecting/k.log", "j/deep/2.log"):
        (logs / name).parent.mkdir(parents=True, exist_ok=True)
        (logs / name).write_text("old")
    (logs / "l").symlink_to(logs / "j")
    (logs / "note").touch()
    make()
    found = sorted(str(path.relative_to(copies)) for path in copies.rglob("*"))
    assert found == ["j", "j/1.0.log", "j/deep", "j/deep/2.log"]
    (copies / "j/1.0.log").write_text("as it was copied")
    (logs / "j/3.log").touch()
    make(HOUR)
    assert (copies / "j/3.log").exists()
    assert (copies / "j/1.0.log").read_text() == "as it was copied", "output does not change"
    (copies / "j/3.log").unlink()
    os.utime(copies / "j", ns=(0, (logs / "j").stat().st_mtime_ns))
    make(2 * HOUR)
    assert not (copies / "j/3.log").exists(), "its folder has not changed since"


def test_output_is_kept_as_long_as_the_job_or_as_daily_backups(make: Callable[..., Path], tmp_path: Path) -> None:
    logs, copies = tmp_path / "state/logs", tmp_path / "backups/logs"
    for name, ago in (("late", 3 * DAY - 1), ("border", 3 * DAY), ("gone", 3 * DAY + 1), ("there", 99 * DAY)):
        (logs / name).mkdir(parents=True)
        (logs / name / "1.0.log").write_text(name)
        os.utime(logs / name, (NOW, NOW + HOUR - ago))
    make(keep_days=100)
    assert len(os.listdir(copies)) == 4
    for name in ("late", "border", "gone"):
        shutil.rmtree(logs / name)
    make(HOUR, keep_days=3)
    assert sorted(os.listdir(copies)) == ["border", "late", "there"]


def test_one_backup_at_a_time_and_none_in_anothers_place(make: Callable[..., Path], tmp_path: Path) -> None:
    made = make()
    with pytest.raises(GpuschedError, match="exists"):
        make()
    assert check_backup(made) == ""
    lock = tmp_path / "backups/.lock"
    with lock.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(GpuschedError, match=r"another backup to .* is being made"):
            make(HOUR)
    after = make(HOUR)
    assert names(tmp_path) == [made.name, after.name]
    lock.unlink()
    lock.symlink_to(tmp_path / "planted")
    with pytest.raises(GpuschedError, match="no backup in"):
        make(2 * HOUR)
    assert not (tmp_path / "planted").exists()


def test_all_of_a_backup_is_on_the_disk_before_it_is_called_one(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state/policies/p").mkdir(parents=True)
    (tmp_path / "state/policies/p/w.safetensors").touch()
    synced, unsynced = set[int](), list[str]()
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(part: Path, name: Path) -> Path:
        unsynced.extend(str(path) for path in (part, *part.rglob("*")) if path.stat().st_ino not in synced)
        synced.clear()
        return rename(part, name)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    made = make()
    assert (made / "policies/p/w.safetensors").exists()
    assert unsynced == []
    assert made.parent.stat().st_ino in synced, "its name, too"


def test_backups_are_ordered_by_events_not_by_a_clock_that_was_ahead(
    make: Callable[..., Path], store: Store, tmp_path: Path
) -> None:
    ahead = make(100 * DAY)
    store.append([Event(time=NOW, kind="clock_stepped")])
    made = make()
    assert find_backup(tmp_path / "backups").path == made
    assert names(tmp_path) == [ahead.name, made.name]


@pytest.mark.parametrize("harm", ["truncate", "overwrite", "lose rows", "no manifest", "half a manifest", "newer"])
def test_a_damaged_backup_is_noticed_and_the_one_before_it_found(
    make: Callable[..., Path], tmp_path: Path, harm: str
) -> None:
    first, second = make(), make(HOUR)
    assert check_backup(second) == ""
    file = second / DATABASE
    match harm:
        case "truncate":
            os.truncate(file, file.stat().st_size // 2)
        case "overwrite":
            with file.open("r+b") as raw:
                raw.seek(4096 * 30)
                raw.write(b"\xff" * 4096)
        case "lose rows":
            with sqlite3.connect(file) as db:
                db.execute("DELETE FROM events WHERE seq = 7")
            db.close()
        case "no manifest":
            (second / backup.MANIFEST).unlink()
        case "half a manifest":
            os.truncate(second / backup.MANIFEST, 20)
        case "newer":
            text = (second / backup.MANIFEST).read_text().replace('"schema":', '"schema":9')
            (second / backup.MANIFEST).write_text(text)
    assert check_backup(second) != ""
    assert find_backup(tmp_path / "backups").path == first
    with pytest.raises(GpuschedError, match="no usable backup"):
        find_backup(second)


def test_a_damaged_database_makes_no_backup(make: Callable[..., Path], store: Store, tmp_path: Path) -> None:
    made = make()
    store.close()
    with (tmp_path / "state" / DATABASE).open("r+b") as raw:
        raw.seek(4096 * 30)
        raw.write(b"\xff" * 4096)
    with pytest.raises(GpuschedError, match=r"malformed|not sound: ."):
        make(HOUR)
    assert sorted(os.listdir(tmp_path / "backups")) == [".lock", made.name]


def test_an_abandoned_backup_leaves_nothing(make: Callable[..., Path], tmp_path: Path) -> None:
    made = make()
    settings = BackupSettings(to=str(tmp_path / "backups"))
    with pytest.raises(BackupStopped):
        make_backup(tmp_path / "state", settings, NOW + HOUR, stop=lambda: True)
    assert sorted(os.listdir(tmp_path / "backups")) == [".lock", made.name]


def test_backups_of_another_installation_are_not_rotated_away(make: Callable[..., Path], tmp_path: Path) -> None:
    made = make()
    Store.create_or_open(tmp_path / "other").close()
    with pytest.raises(GpuschedError, match="another installation"):
        make_backup(tmp_path / "other", BackupSettings(to=str(tmp_path / "backups"), keep=1), NOW + HOUR)
    assert names(tmp_path) == [made.name]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small disk")
def test_a_full_disk_keeps_the_earlier_backups(make: Callable[..., Path], store: Store, tmp_path: Path) -> None:
    to = tmp_path / "backups"
    to.mkdir()
    size = (tmp_path / "state" / DATABASE).stat().st_size + (tmp_path / "state" / f"{DATABASE}-wal").stat().st_size
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.5)},mode=0700", "small", to], check=True)
    try:
        made = make(keep=1)
        with pytest.raises(GpuschedError, match=r"No space left|disk is full"):
            make(HOUR, keep=1)
        assert names(tmp_path) == [made.name]
        assert check_backup(made) == ""
        assert [name for name in os.listdir(to) if name.endswith(".part")] == []
    finally:
        subprocess.run(["umount", "-l", to], check=True)


def older(state: Path, version: int) -> None:
    state.mkdir(exist_ok=True)
    with sqlite3.connect(state / DATABASE) as db:
        for step in (SCHEMA, *MIGRATIONS[: version - FIRST_VERSION]):
            db.executescript(step)
        db.execute("INSERT INTO meta VALUES ('cluster_id', 'c')")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


def version_of(file: Path) -> int:
    with closing(sqlite3.connect(file)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_a_migration_leaves_a_copy_of_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / f"{DATABASE}.v3").touch()
    older(tmp_path, 17)
    Store.create_or_open(tmp_path).close()
    assert version_of(tmp_path / DATABASE) == SCHEMA_VERSION
    copy = tmp_path / f"{DATABASE}.v17"
    assert (version_of(copy), stat.S_IMODE(copy.stat().st_mode)) == (17, 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DATABASE, copy.name]
    Store.create_or_open(tmp_path).close()


KILLED = """
import os, signal, sys
from pathlib import Path
from gpusched.queue import store
connect = store.connect_to_write
def traced(*given):
    db = connect(*given)
    db.set_trace_callback(lambda sql: os.kill(os.getpid(), signal.SIGKILL) if "CREATE TABLE audit" in sql else None)
    return db
store.connect_to_write = traced
store.Store.create_or_open(Path(sys.argv[1]))
"""


def test_a_kill_between_two_steps_of_a_migration_leaves_the_old_version(tmp_path: Path) -> None:
    older(tmp_path, 17)
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert version_of(tmp_path / DATABASE) == version_of(tmp_path / f"{DATABASE}.v17") == 17
    Store.create_or_open(tmp_path).close()
    assert version_of(tmp_path / DATABASE) == SCHEMA_VERSION
    assert (tmp_path / f"{DATABASE}.v17").exists()


def test_without_room_for_it_nothing_is_migrated(tmp_path: Path) -> None:
    older(tmp_path, 17)
    (tmp_path / f"{DATABASE}.v17").mkdir()
    with pytest.raises(GpuschedError, match="cannot be opened for writing"):
        Store.create_or_open(tmp_path)
    assert version_of(tmp_path / DATABASE) == 17
