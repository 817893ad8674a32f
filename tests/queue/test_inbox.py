"""The inbox: many writers at once, one reader, nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.leadership import AlreadyRunning, controller_lock
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import Cancel, Submit
from gpusched.queue.inbox import Inbox, MalformedCommand, ReceivedCommand, _entries, deliver_submit
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.imagined import inventory

SUBMIT = """
import sys, time
from pathlib import Path
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.queue.inbox import Inbox, deliver_submit
from tests.builders import spec
inbox = Inbox(Path(sys.argv[1]))
for number in range(125):
    name = f"{sys.argv[2]}-{number}"
    make = lambda i: Submit(time=time.time(), id=i, spec=spec(name=name))
    print(deliver_submit(inbox, make, lambda: ids.mint(time.time())))
"""


def test_a_thousand_submissions_by_eight_processes_at_once(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    workers = [
        subprocess.Popen([sys.executable, "-c", SUBMIT, tmp_path, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(8)
    ]
    store = Store.create_or_open(tmp_path)
    folder = CommandApplier(store, inbox, inventory(), SecretFiles(tmp_path))
    while any(w.poll() is None for w in workers):
        folder.apply_inbox(NOW + 1e6)  # while they are at it
    printed = [line for w in workers for line in w.communicate()[0].split()]
    folder.apply_inbox(NOW + 1e6)
    jobs = store.pending()
    store.close()
    assert len(printed) == len(set(printed)) == 1000
    assert sorted(job.id for job in jobs) == sorted(printed)
    assert len({job.spec.name for job in jobs}) == 1000
    assert not list(inbox.new.iterdir())
    assert not list(inbox.tmp.iterdir())
    assert not list(inbox.refused.iterdir())


def test_a_name_that_is_taken_is_minted_again(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    first = ids.mint(NOW)
    names = iter([first, first, "0123456789b"])
    made = [deliver_submit(inbox, lambda i: Submit(time=NOW, id=i, spec=spec()), lambda: next(names)) for _ in range(2)]
    assert made == [first, "0123456789b"]


def test_commands_come_back_as_they_went_oldest_first(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    hostile = spec(name="ünï 'x'", command=("sh", "-c", "$(x)\n`y`" + "z" * 100_000), env={"A": "\t\x01é"})
    commands = [Submit(time=NOW + i, origin="ssh ::1", id=ids.mint(NOW + i), spec=hostile) for i in (3, 1, 2)]
    for command in commands:
        inbox.deliver(command)
    found = [item for item in inbox.waiting() if isinstance(item, ReceivedCommand)]
    assert [item.command for item in found] == sorted(commands, key=lambda c: c.time)
    assert {item.uid for item in found} == {os.getuid()}
    for item in found:
        inbox.remove(item.file_name)
        inbox.remove(item.file_name)
    assert list(inbox.waiting()) == []


def test_commands_are_for_the_controllers_eyes_only(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    (file,) = inbox.new.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    shared = Inbox(tmp_path / "shared")
    shared.create(shared=True)
    assert (shared.new.stat().st_mode & 0o7777, shared.refused.stat().st_mode & 0o777) == (0o3733, 0o700)


def test_no_state_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(GpuschedError, match="does not exist, so nothing can be queued"):
        Inbox(tmp_path / "nowhere").deliver(Cancel(time=NOW, job_ids=("x",)))
    assert list(Inbox(tmp_path / "nowhere").waiting()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "you have no write access to {}"),
        (OSError(errno.ENOSPC, "No space left on device"), "{} cannot be written: No space left on device"),
    ],
)
def test_what_cannot_be_queued_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()

    def link(*_: Path) -> None:
        raise error

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(GpuschedError) as raised:
        inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    assert raised.value.line().startswith(said.format(tmp_path / "inbox"))
    assert list(inbox.tmp.iterdir()) == []


def test_an_inbox_is_shared_no_longer_where_the_inventory_says_so(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create(shared=True)
    for _ in range(2):
        inbox.make_private()
        assert [folder.stat().st_mode & 0o7777 for folder in (inbox.new, inbox.tmp)] == [0o700, 0o700]
    inbox.new.chmod(0o750)
    inbox.make_private()
    assert inbox.new.stat().st_mode & 0o7777 == 0o750, "its group's rights stay"


@pytest.mark.parametrize("taken", [False, True])
def test_a_command_is_on_the_disk_though_its_folder_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """In a shared inbox its own file is synced instead, unless the controller has taken it."""
    inbox, synced = Inbox(tmp_path), list[str]()
    inbox.create()
    real, fsync = os.open, os.fsync

    def shut(path: Path, flags: int, *more: int) -> int:
        if path == inbox.new:
            if taken:
                next(inbox.new.iterdir()).unlink()
            raise PermissionError
        return real(path, flags, *more)

    def noted(descriptor: int) -> None:
        synced.append(os.path.dirname(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "open", shut)
    monkeypatch.setattr(os, "fsync", noted)
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    assert synced == [str(inbox.tmp), str(inbox.new)][: 1 if taken else 2]


def test_a_command_that_cannot_be_removed_is_not_read_again_at_once(tmp_path: Path) -> None:
    """Applied again it would be refused; and what is discarded may be a folder."""
    inbox = Inbox(tmp_path)
    inbox.create()
    (inbox.new / "applied").mkdir()
    assert [item.file_name for item in inbox.waiting()] == ["applied"]
    inbox.remove("applied")
    assert list(inbox.waiting()) == []
    (inbox.new / "folder").mkdir()
    (inbox.new / "file").touch()
    inbox.discard(["folder", "never was", "file"])
    assert [path.name for path in inbox.new.iterdir()] == ["applied"]
    assert [path.name for path in inbox.refused.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("192.0.2.7 50123 192.0.2.1 22", "ssh 192.0.2.7"),
        ("fe80::1%eth0 1 fe80::2 22", "ssh fe80::1%eth0"),
        ("::", "ssh ::"),
        ("1" * 45, "ssh " + "1" * 45),
        ("1" * 46, "no terminal"),
        (":", "no terminal"),
        ("evil\x1b[2J 1 2 3", "no terminal"),
        ("", "no terminal"),
    ],
)
def test_a_command_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, origin: str
) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    monkeypatch.setenv("SSH_CONNECTION", address)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    (item,) = inbox.waiting()
    assert isinstance(item, ReceivedCommand)
    assert item.command.origin == origin
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    inbox.remove(item.file_name)
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    (item,) = inbox.waiting()
    assert isinstance(item, ReceivedCommand)
    assert item.command.origin == origin.replace("no terminal", "terminal")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_others_can_only_drop_commands_in_a_shared_inbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path(tempfile.gettempdir()) and parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(0o755)
    inbox = Inbox(tmp_path)
    inbox.create(shared=True)
    inbox.deliver(Cancel(time=NOW, job_ids=("mine",)))
    (mine,) = inbox.new.iterdir()
    pid = os.fork()
    if pid == 0:
        failed = 0
        try:
            os.setgid(54321)
            os.setuid(54321)
            Inbox(tmp_path).deliver(Cancel(time=NOW, job_ids=("theirs",)))
            for forbidden in (
                lambda: os.listdir(inbox.new), mine.unlink, mine.read_bytes, lambda: mine.rename(inbox.new / "x"),
                lambda: (inbox.refused / "x").touch(),
            ):  # fmt: skip
                try:
                    forbidden()
                    failed += 1
                except PermissionError:
                    pass
        except BaseException:
            failed = 99
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    found = {item.uid: item for item in inbox.waiting()}
    assert set(found) == {0, 54321}
    assert not any(isinstance(item, MalformedCommand) for item in found.values())


def test_folders_in_the_inbox_leave_no_descriptor_open(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    for number in range(5):
        (inbox.new / f"folder{number}.cancel").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        found = list(inbox.waiting())
        assert {(item.file_name[:6], getattr(item, "why", "")) for item in found} == {("folder", "not a regular file")}
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_command_with_another_name_waits_for_its_client_and_is_refused_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    (file,) = inbox.new.iterdir()
    draft = inbox.tmp / "draft"
    os.link(file, draft)  # as it is for a moment while a client links it into place
    assert list(inbox.waiting()) == []
    assert inbox.next_batch() == []
    now = time.time()
    with monkeypatch.context() as other:  # a controller whose clock is ahead of the file server's
        other.setattr(time, "time", lambda: now + 600)
        assert list(inbox.waiting()) == []
        assert inbox.next_batch() == []
    monkeypatch.setattr("gpusched.queue.arrivals.LINKING_S", -1.0)
    assert inbox.next_batch() == [file.name]
    (item,) = inbox.waiting()
    assert isinstance(item, MalformedCommand)
    assert item.why == "a file with another name (hard link)"
    draft.unlink()
    (item,) = inbox.waiting()
    assert isinstance(item, ReceivedCommand)


def test_a_draft_is_closed_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On NFS the removal of an open file leaves it a second name (.nfs...) until it is closed.
    inbox, link = Inbox(tmp_path), os.link
    inbox.create()
    opened = []

    def linked(draft: Path, name: Path) -> None:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                opened.append(os.readlink(f"/proc/self/fd/{number}"))
        link(draft, name)
        assert str(draft) not in opened

    monkeypatch.setattr(os, "link", linked)
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    assert opened


def test_files_set_aside_are_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    for name, size in (("old", 1), ("large", 600), ("folder", 0), ("newer", 600), ("newest", 10)):
        if name == "folder":
            (inbox.new / name / "deep").mkdir(parents=True)
            (inbox.new / name / "deep" / "link").symlink_to(tmp_path)
        else:
            (inbox.new / name).write_bytes(b"x" * size)
        time.sleep(0.01)  # the kernel's times are that coarse
        inbox.refuse(name)
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REFUSED", 4)
    inbox.tidy()
    assert sorted(p.name for p in inbox.refused.iterdir()) == ["large", "newer", "newest", "old"]
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REFUSED", 2)
    inbox.tidy()
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REFUSED_BYTES", 500)
    inbox.tidy()
    assert [p.name for p in inbox.refused.iterdir()] == ["newest"]
    (inbox.tmp / "draft of a client that died").touch()
    inbox.tidy()
    assert len(list(inbox.tmp.iterdir())) == 1
    for bound in ("KEEP_REFUSED_S", "KEEP_DRAFTS_S"):
        monkeypatch.setattr(f"gpusched.queue.inbox.{bound}", -1.0)
    inbox.tidy()
    assert [*inbox.refused.iterdir(), *inbox.tmp.iterdir()] == []
    assert (tmp_path / "inbox").exists(), "no link was followed"


def test_how_much_of_what_was_set_aside_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB, 1000 files, 30 days; drafts for a day."""
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REFUSED_OF_USER", 10_000)
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REFUSED_BYTES_OF_USER", 1 << 30)
    inbox = Inbox(tmp_path)
    inbox.create()

    def set_aside(name: str, mib: int) -> None:
        with open(inbox.new / name, "wb") as file:
            file.truncate(mib << 20)
        inbox.refuse(name)
        time.sleep(0.01)  # the kernel's times are that coarse

    def left() -> set[str]:
        inbox.tidy()
        return {p.name for p in inbox.refused.iterdir()}

    set_aside("first", 1)
    set_aside("second", 63)
    assert left() == {"first", "second"}
    set_aside("third", 1)
    assert left() == {"second", "third"}
    for path in inbox.refused.iterdir():
        path.unlink()
    for number in range(1001):
        (inbox.refused / str(number)).touch()
    assert len(left()) == 1000
    (inbox.tmp / "draft").touch()
    now = time.time()
    for days, refused, drafts in ((0.9, 1000, 1), (1.1, 1000, 0), (29.9, 1000, 0), (30.1, 0, 0)):
        monkeypatch.setattr("gpusched.queue.inbox.time.time", lambda days=days: now + days * 86400)
        assert (len(left()), len(list(inbox.tmp.iterdir()))) == (refused, drafts), days


def test_other_users_cannot_take_the_controllers_lock(tmp_path: Path) -> None:
    (tmp_path / "controller.lock").touch(mode=0o644)  # as earlier versions made it
    with controller_lock(tmp_path) as still_held:
        still_held()
        assert (tmp_path / "controller.lock").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "controller.lock").read_text() == str(os.getpid())
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"), controller_lock(tmp_path):
            pass
        (tmp_path / "controller.lock").unlink()
        with pytest.raises(GpuschedError, match="removed or replaced"):
            still_held()
        (tmp_path / "controller.lock").touch()
        with pytest.raises(GpuschedError, match="removed or replaced"):
            still_held()
    (tmp_path / "controller.lock").unlink()
    (tmp_path / "controller.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GpuschedError, match="cannot be opened"), controller_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_invalid_command_gives_a_reason_and_blocks_no_other(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    (inbox.new / ".hidden").write_text("{}")
    (inbox.new / "a-folder").mkdir()
    os.mkfifo(inbox.new / "b-fifo")
    (inbox.new / "c-link").symlink_to(inbox.new / "gone")
    for name, size in (("d-large", (4 << 20) + 1), ("e-full", 4 << 20)):
        with open(inbox.new / name, "wb") as file:
            file.truncate(size)
    (inbox.new / "f-text").write_text("{")
    inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    found = {item.file_name: item for item in inbox.waiting()}
    why = {name[0]: item.why for name, item in found.items() if isinstance(item, MalformedCommand)}
    assert sorted(why) == list("abcdef")
    assert (why["a"], why["b"]) == ("not a regular file", "not a regular file")
    assert why["c"].startswith("cannot be read: ")
    assert why["d"] == "4194305 bytes, at most 4194304"
    assert why["e"].startswith("not a command: ")
    assert why["f"].startswith("not a command: ")
    assert [type(item) for item in found.values()].count(ReceivedCommand) == 1
    assert {item.uid for item in found.values()} == {os.getuid()}


def test_a_command_that_cannot_be_recorded_now_waits_a_quarter_of_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, now = Inbox(tmp_path), [100.0]
    inbox.create()
    for _ in range(2):
        inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    first, second = (item.file_name for item in inbox.waiting())
    monkeypatch.setattr("gpusched.queue.inbox.time.monotonic", lambda: now[0])
    inbox.postpone(first)
    now[0] = 114.9
    assert [item.file_name for item in inbox.waiting()] == [second], "it holds up no other"
    now[0] = 115.0
    assert [item.file_name for item in inbox.waiting()] == [first, second]
    now[0] = 100.0
    content = (inbox.new / first).read_bytes()
    inbox.remove(first)
    (inbox.new / first).write_bytes(content)
    assert [item.file_name for item in inbox.waiting()] == [first, second], "another of its name waits for nothing"


def test_a_submission_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    one = Submit(time=NOW, origin="here", id=ids.mint(NOW), spec=spec())
    assert inbox.submission(one.id) is None
    inbox.deliver(one)
    found = inbox.submission(one.id)
    assert found is not None
    assert (found.command, found.uid, found.written > 1e9) == (one, os.getuid(), True)
    (inbox.new / "odd.submit").write_text("{")
    assert inbox.submission("odd") is None
    with pytest.raises(FileExistsError):
        inbox.deliver(one)
    assert not list(inbox.tmp.iterdir())

    def stale(name: str) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(inbox, "_read", stale)
    assert inbox.submission(one.id) is None


def test_a_file_that_cannot_be_set_aside_is_skipped(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    (inbox.new / "odd").write_text("{")
    (inbox.refused / "odd" / "in the way").mkdir(parents=True)
    inbox.refuse("odd")
    inbox.refuse("never was")
    assert (list(inbox.waiting()), (inbox.new / "odd").exists()) == ([], True)
    shared = Inbox(tmp_path / "shared")
    shared.create(shared=True)
    shared.deliver(Cancel(time=NOW, job_ids=("x",)))
    assert [f.stat().st_mode & 0o777 for f in shared.new.iterdir()] == [0o640], "the folder's group is the controller's"
    assert shared.tmp.parent.stat().st_mode & 0o777 == 0o755
    assert shared.tmp.stat().st_mode & 0o7777 == 0o3733


# -- many files ----------------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to give files away")
ALICE, BOB = 12301, 12302


def put(inbox: Inbox, owner: int, *names: str, size: int = 1) -> None:
    for name in names:
        with open(inbox.new / name, "wb") as file:
            file.truncate(size)
        os.chown(inbox.new / name, owner, -1)


def test_a_draft_is_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users may put one where drafts are, were its name known."""
    inbox, precious = Inbox(tmp_path), tmp_path / "precious"
    inbox.create()
    precious.touch()
    monkeypatch.setattr("gpusched.queue.inbox.os.urandom", bytes)
    (inbox.tmp / f"x.{os.getpid()}.00000000").symlink_to(precious)
    with pytest.raises(FileExistsError):
        inbox._link("x", b"content")
    assert precious.read_bytes() == b""


@needs_root
def test_users_take_turns_and_each_ones_files_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FILES_OF_USER", 3), ("FILES_OF_ALL", 5), ("BYTES_OF_USER", 100), ("BYTES_OF_ALL", 150)):
        monkeypatch.setattr(f"gpusched.queue.arrivals.{name}", value)
    inbox = Inbox(tmp_path)
    inbox.create()
    assert (inbox.has_any(), inbox.next_batch()) == (False, [])
    put(inbox, ALICE, *(f"a{n}" for n in range(9)))
    assert inbox.next_batch() == ["a0", "a1", "a2"], "so many of one user"
    put(inbox, BOB, "z1", "z2")
    assert inbox.next_batch() == ["a0", "a1", "a2", "z1", "z2"]
    put(inbox, 12303, "m1", "m2")
    assert len(found := inbox.next_batch()) == 5, "so many of all"
    assert {"a0", "m1", "z1"} < set(found)
    inbox.postpone("a0")
    inbox.remove("a1")
    put(inbox, BOB, "large", size=101)
    assert {"a2", "large", "m1"} <= set(inbox.next_batch()), "one is taken, however large"
    put(inbox, ALICE, "a20", size=101)
    assert inbox.next_batch() == ["a2", "large", "m1", "m2"], "100 bytes of one"
    put(inbox, 12303, "m0", size=60)
    assert inbox.next_batch() == ["a2", "large"], "150 bytes of all"
    for name in ("large", "z1", "z2", "m0", "m1", "m2", "a20", *(f"a{n}" for n in range(2, 9))):
        inbox.remove(name)
    assert (inbox.next_batch(), inbox.has_any()) == ([], False), "a0 is put off"
    assert inbox.postponed_of(ALICE) == ["a0"]
    assert inbox.postponed_of(BOB) == []


@needs_root
def test_a_user_without_further_files_takes_no_turn_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusched.queue.arrivals.FILES_OF_ALL", 5)
    inbox = Inbox(tmp_path)
    inbox.create()
    for owner, *names in ((ALICE, "a0", "a1", "a2"), (BOB, "b0"), (12303, "c0", "c1", "c2")):
        put(inbox, owner, *names)
        inbox.next_batch()  # in this order
    assert inbox.next_batch() == ["a0", "a1", "b0", "c0", "c1"]


@needs_root
def test_the_latest_files_beyond_a_users_limit_are_refused_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_WAITING", 6), ("FILES_OF_USER", 1), ("MAX_REFUSED_AT_ONCE", 2)):
        monkeypatch.setattr(f"gpusched.queue.arrivals.{name}", value)
    inbox = Inbox(tmp_path)
    inbox.create()
    put(inbox, BOB, "b")
    inbox.next_batch()  # before the other's
    put(inbox, ALICE, *(f"a{n}" for n in range(10)))
    assert inbox.surplus() == {}, "nothing was looked for yet"
    inbox.next_batch()
    assert inbox.surplus() == {ALICE: ["a9", "a8"]}
    inbox.discard(["a9", "a8"])
    assert inbox.surplus() == {ALICE: ["a7", "a6"]}
    inbox.discard(["a7", "a6"])
    assert inbox.surplus() == {}
    assert len(list(inbox.new.iterdir())) == 7
    assert not list(inbox.refused.iterdir())


def test_a_folder_that_cannot_be_read_at_once_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()
    put(inbox, os.getuid(), *(f"{n:04d}" for n in range(1200)))
    monkeypatch.setattr("gpusched.queue.arrivals.WALK_S", -1.0)
    counts = [len(inbox._arrivals._owner) for _ in range(4) if inbox.next_batch() is not None]
    assert counts == [500, 1000, 1200, 1200]
    (inbox.new / "0000").unlink()
    for _ in range(5):
        inbox.next_batch()
    assert not inbox.is_listed("0000")
    inbox.close()


@needs_root
def test_one_users_bad_files_do_not_displace_those_of_others(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.create()

    def set_aside(owner: int, *names: str, size: int = 1) -> None:
        put(inbox, owner, *names, size=size)
        for name in names:
            inbox.refuse(name)
        inbox.tidy_refused()

    set_aside(BOB, "bobs")
    set_aside(ALICE, "sparse", size=1 << 30)
    assert [p.name for p in inbox.refused.iterdir()] == ["bobs"]
    set_aside(ALICE, *(f"a{n}" for n in range(150)))
    assert len(list(inbox.refused.iterdir())) == 101
    set_aside(ALICE, "six", "three", size=3 << 20)
    sizes = [p.stat().st_size for p in inbox.refused.iterdir() if p.stat().st_uid == ALICE]
    assert 6 << 20 <= sum(sizes) <= 8 << 20
    assert (inbox.refused / "bobs").exists()


def test_folders_are_cleared_in_bounded_steps_and_no_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, precious = Inbox(tmp_path), tmp_path / "precious"
    inbox.create()
    precious.mkdir()
    (precious / "file").touch()
    folder = os.open(inbox.new, os.O_RDONLY)
    for depth in range(1500):  # deeper than Python's stack
        os.mkdir("deep", dir_fd=folder)
        below = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
        if depth % 100 == 0:
            os.symlink(precious, "link", dir_fd=folder)
    os.close(folder)
    inbox.refuse("deep")
    monkeypatch.setattr("gpusched.queue.inbox.KEEP_REFUSED_S", -1.0)
    monkeypatch.setattr("gpusched.queue.inbox.MAX_REMOVED_PER_CALL", 1000)
    calls = 0
    while list(inbox.refused.iterdir()):
        inbox.tidy_refused()
        calls += 1
        assert calls < 10
    assert calls > 1
    assert (precious / "file").exists()
    inbox.refused.joinpath("swapped").symlink_to(precious)  # for a folder, after it was looked at
    with pytest.raises(NotADirectoryError):
        next(_entries(inbox.refused / "swapped", 1))
