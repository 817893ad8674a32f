"""Leadership: the folder's lock, the lease, and standbys that wait for its end; on clocks of the test."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from gpusched.controller import leadership as module
from gpusched.controller.leadership import (
    AlreadyRunning,
    Leadership,
    controller_lock,
    end_former,
    leadership,
    standby,
)
from gpusched.controller.service import LockWait
from gpusched.errors import GpuschedError
from gpusched.queue.lease import (
    LEASE,
    STANDBYS,
    ControllerLease,
    LeaseHolder,
    RenewalWatch,
    Superseded,
    claim,
    read_lease,
)
from gpusched.queue.presence import this_process
from gpusched.queue.store import Store
from tests.logged import messages


class Time:
    """Seconds that pass only where something waits; ``during`` is called then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> bool:
        self.now += seconds
        self.during()
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    clock = Time()
    monkeypatch.setattr(module, "RenewalWatch", lambda expiry_s: RenewalWatch(expiry_s, lambda: clock.now))
    monkeypatch.setattr(module.time, "sleep", clock.sleep)
    yield clock
    monkeypatch.undo()


def lease_of(state: Path) -> ControllerLease:
    found = read_lease(state)
    assert found is not None
    return found


def put(state: Path, **changes: object) -> None:
    """Make the lease that of another machine's controller, or otherwise different."""
    found = msgspec.structs.replace(lease_of(state), **{"boot_id": "other", "host": "login1", **changes})
    (state / LEASE / str(found.term)).write_bytes(msgspec.json.encode(found))


def test_a_restart_keeps_the_term_and_a_restored_folder_gets_a_later_one(tmp_path: Path) -> None:
    with leadership(tmp_path) as first:
        Store.create_or_open(tmp_path, term=first.term).close()
        with pytest.raises(AlreadyRunning), leadership(tmp_path):
            pass
        assert not lease_of(tmp_path).released
    assert lease_of(tmp_path).released
    with leadership(tmp_path) as again:
        assert again.term == first.term
        assert again.former is None
    put(tmp_path, released=True, boot_id="before a reboot")
    with leadership(tmp_path) as rebooted:
        assert rebooted.term == first.term + 1, "the kernel that held the lock is another"
        Store.create_or_open(tmp_path, term=rebooted.term).close()
    for path in (tmp_path / LEASE).iterdir():
        path.unlink()
    claim(tmp_path, 7)  # an old copy: less than the store's
    with leadership(tmp_path) as restored:
        assert restored.term > rebooted.term


def test_a_killed_controllers_child_that_has_the_lock_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHILD_S", 120.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with (tmp_path / "controller.lock").open("w") as lock:
        lock.write(str(ended.pid))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    waits = threading.Thread(target=child.communicate)
    with pytest.raises(AlreadyRunning), controller_lock(tmp_path):
        pass
    waits.start()
    with leadership(tmp_path):
        waits.join()


@pytest.mark.parametrize("beat", [0, 9])
def test_the_lease_of_another_machine_is_waited_for(tmp_path: Path, clock: Time, beat: int) -> None:
    """Its lock may not reach here, as on some network filesystems. Any change is one, not only a later beat."""
    claim(tmp_path, 7)
    put(tmp_path, beat=beat)
    beats = iter(range(1, 9))
    clock.during = lambda: put(tmp_path, beat=next(beats)) if clock.now >= 2 else None
    with pytest.raises(AlreadyRunning, match=r"\(login1, pid "), leadership(tmp_path):
        pass
    assert clock.now == 2.0
    clock.during = lambda: None
    with leadership(tmp_path) as found:
        assert (clock.now, found.term > 8) == (2.0 + 15.0, True)
    put(tmp_path, released=True)
    with leadership(tmp_path):
        assert clock.now == 17.0, "nothing to wait for"


def test_a_standby_takes_over_what_is_silent_and_only_that(tmp_path: Path, clock: Time) -> None:
    with leadership(tmp_path) as active:
        Store.create_or_open(tmp_path, term=active.term).close()
        silent_from = 40.0

        def during() -> None:
            if clock.now < silent_from:
                active.holder.renew()
            assert [p.name.rpartition(".")[0] for p in (tmp_path / STANDBYS).iterdir()] == [os.uname().nodename]

        clock.during = during
        active._stop.set()  # renewals are the test's
        active._thread.join()
        with standby(tmp_path, 15.0, clock.sleep) as found:
            assert found is not None
            assert silent_from + 14 < clock.now <= silent_from + 16
            assert found.term == active.term + 1
            assert found.former is not None
            assert found.former.holder == f"{os.uname().nodename}, pid {os.getpid()}"
            assert list((tmp_path / STANDBYS).iterdir()) == []
            found.check()
            with pytest.raises(Superseded, match="took over"):
                active.check()
            with pytest.raises(AlreadyRunning), leadership(tmp_path):
                pass
    assert lease_of(tmp_path).released


def test_a_standby_begins_at_once_where_no_controller_is(tmp_path: Path, clock: Time) -> None:
    """The first of two that are started so; one whose controller was killed; one whose controller was stopped."""
    with standby(tmp_path, 15.0, clock.sleep) as found:
        assert found is not None
    put(tmp_path, released=False, boot_id=this_process().boot_id, pid=1)  # killed: the kernel gave its lock back
    with standby(tmp_path, 15.0, clock.sleep) as found:
        assert found is not None
    put(tmp_path, released=False)
    clock.during = lambda: put(tmp_path, released=clock.now >= 5)
    with standby(tmp_path, 15.0, clock.sleep) as found:
        assert found is not None
    assert clock.now == 5.0


@pytest.mark.parametrize("step", ["read_lease_bytes", "_stored_term"])
def test_of_two_standbys_the_slower_one_does_not_supersede_the_other(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Both see the same silence; one takes over between two steps of the other."""
    claim(tmp_path, 7)
    Store.create_or_open(tmp_path, term=7).close()
    put(tmp_path)
    real, others = getattr(module, step), list[LeaseHolder]()

    def overtaken(state: Path) -> object:
        found = real(state) if step == "read_lease_bytes" else None
        if clock.now >= 15 and not others:
            other = claim(state, 8)
            assert other is not None
            others.append(other)
            put(state)  # it is another machine's
            Store.create_or_open(state, term=8).close()
        return found if found is not None else real(state)

    monkeypatch.setattr(module, step, overtaken)
    with standby(tmp_path, 15.0, lambda seconds: clock.sleep(seconds) or clock.now > 25) as found:
        assert found is None
    (other,) = others
    other.check()
    assert lease_of(tmp_path).term == 8


def test_a_standby_whose_waiting_is_stopped_leaves_nothing(tmp_path: Path, clock: Time) -> None:
    claim(tmp_path, 7)
    put(tmp_path)
    with standby(tmp_path, 15.0, lambda seconds: clock.sleep(seconds) or clock.now > 3) as found:
        assert found is None
    assert list((tmp_path / STANDBYS).iterdir()) == []
    assert lease_of(tmp_path).term == 7
    with controller_lock(tmp_path):
        pass


@pytest.mark.parametrize(("code", "hint"), [(errno.EIO, "disk or file system is broken"), (errno.EACCES, "belong to")])
def test_a_lock_on_a_broken_disk_has_a_hint_of_its_own(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch, code: int, hint: str
) -> None:
    def fail(path: Path, *_: int) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(module.os, "open", fail)
    with pytest.raises(GpuschedError) as raised, standby(tmp_path, 15.0, clock.sleep):
        pass
    monkeypatch.undo()
    assert hint in raised.value.hint
    assert os.strerror(code) in raised.value.message


def test_a_removed_folder_is_not_taken_for_a_take_over(tmp_path: Path) -> None:
    with leadership(tmp_path) as found:
        (tmp_path / "controller.lock").unlink()
        with pytest.raises(GpuschedError, match="removed or replaced"):
            found.check()


def test_a_former_controller_that_hangs_here_is_killed_and_no_other_process(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim(tmp_path, 7)
    started = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[-1].split()[19]
    own = msgspec.structs.replace(lease_of(tmp_path), pid=child.pid, started=started)
    for other in (msgspec.structs.replace(own, started="1"), msgspec.structs.replace(own, boot_id="other")):
        assert not end_former(other)
    assert child.poll() is None
    assert end_former(own)
    assert child.wait(300) == -9
    assert child.stdin is not None
    child.stdin.close()


HOLDING = """
import sys
from pathlib import Path
from gpusched.controller.leadership import leadership
from gpusched.queue.store import Store
from tests.logged import messages
state = Path(sys.argv[1])
with leadership(state) as leads:
    store = Store.create_or_open(state, term=leads.term)
    with store.transaction():
        store.set_meta("key", "half")
        print("holds", flush=True)
        input()
"""


def test_a_store_that_a_frozen_controller_has_locked_is_freed(tmp_path: Path) -> None:
    """Frozen within a transaction, it would keep the lock for ever, and could commit after the take-over."""
    words = [sys.executable, "-c", HOLDING, str(tmp_path)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"holds\n"
    child.send_signal(signal.SIGSTOP)
    former = lease_of(tmp_path)
    wait = LockWait(tmp_path)
    wait.end_holder_after(0.5, partial(end_former, former))
    holder = claim(tmp_path, former.term + 1)
    assert holder is not None
    store = Store.create_or_open(tmp_path, wait, holder.term)
    assert (child.wait(300), store.meta("key")) == (-signal.SIGKILL, None)
    store.close()
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize("mode", [0o644, 0o400])
def test_a_lock_is_for_the_controllers_user_alone(tmp_path: Path, mode: int) -> None:
    """Whoever can open it can lock it."""
    path = tmp_path / "lock"
    path.touch()
    path.chmod(mode)
    with module._open_lock(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_lease_that_cannot_be_renewed_now_is_tried_again_until_another_controller_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ready, lost, released = threading.Event(), threading.Event(), list[bool]()
    errors = iter((OSError("no space"), OSError("no space"), Superseded("another one took over")))

    def renew() -> None:
        assert ready.wait(20)
        raise next(errors)

    monkeypatch.setattr(module, "RENEW_S", 0.0)
    holder = SimpleNamespace(renew=renew, check=lambda: None, release=lambda: released.append(True))
    leads = Leadership(lambda: None, holder, None)  # type: ignore[arg-type]
    leads.on_loss(lost.set)
    leads.check()
    ready.set()
    assert lost.wait(20)
    assert messages(caplog) == ["the lease cannot be renewed: no space"] * 2
    assert leads.is_lost
    with pytest.raises(Superseded, match="another one"):
        leads.check()
    leads.end()
    assert released == [], "it is the other one's"


def test_a_former_controller_that_may_not_be_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    former = ControllerLease(**msgspec.structs.asdict(this_process()), term=1, host="login1")
    monkeypatch.setattr(module.os, "kill", kill)
    assert not end_former(former)
    assert messages(caplog)[-1] == "it cannot be killed: Operation not permitted"


def test_a_state_folder_that_is_not_there_yet_is_made(tmp_path: Path, clock: Time) -> None:
    with leadership(tmp_path / "by" / "controller"):
        pass
    with standby(tmp_path / "of" / "standby", 100.0, clock.sleep) as leads:
        assert leads is not None
