"""Which process is the controller of a state folder: by the folder's lock and its lease, which standbys watch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from gpusched.errors import GpuschedError
from gpusched.model.units import format_duration
from gpusched.queue.clock import boot_id
from gpusched.queue.damage import UNREADABLE
from gpusched.queue.lease import (
    EXPIRY_S,
    RENEW_S,
    TERM,
    ControllerLease,
    LeaseHolder,
    RenewalWatch,
    Superseded,
    adopt,
    announce_standby,
    claim,
    decoded_lease,
    highest_term,
    next_term,
    read_lease_bytes,
    standby_file,
)
from gpusched.queue.store import Reader

WATCH_S = 0.5
CHILD_S = 5.0  # how long a start waits for children of a killed controller
_LOCK = "controller.lock"
_log = logging.getLogger(__name__)


class AlreadyRunning(GpuschedError):
    """Another controller has the lock, or the lease. ``pid``: of the lock's holder, as it wrote it; "": unknown."""

    pid = ""


class Leadership:
    """What makes this process the controller: the lock, a term, and a thread that renews the lease.

    Args:
        check_lock: Raises if the state folder, or the lock in it, was replaced.
        holder: The lease.
        former: The lease that it took over, if that was not given up.
    """

    def __init__(self, check_lock: Callable[[], None], holder: LeaseHolder, former: ControllerLease | None) -> None:
        self._check_lock, self.holder, self.former = check_lock, holder, former
        self._lost: GpuschedError | None = None
        self._stop, self._renewing = threading.Event(), threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def term(self) -> int:
        """The fencing token."""
        return self.holder.term

    def on_loss(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, by any thread, when `check` would raise."""
        self._wake = wake

    def lose(self, error: GpuschedError) -> None:
        """Record that another controller took over; safe in any thread."""
        self._lost = self._lost or error
        self._wake()

    def raise_term(self, term: int) -> None:
        """Go on with a higher term.

        Raises:
            Superseded: Another controller took over.
            OSError: It cannot be claimed.
        """
        with self._renewing:
            self.holder = self.holder.raised(term)

    @property
    def is_lost(self) -> bool:
        """Whether `check` raises, as another controller took over."""
        return self._lost is not None

    def check(self) -> None:
        """Raise unless this process is still the controller.

        Raises:
            Superseded: Another controller took over.
            GpuschedError: The state folder was removed or replaced.
            OSError: It cannot be read.
        """
        if self._lost is not None:
            raise self._lost
        self.holder.check()  # first: its error says who replaced the lock
        self._check_lock()

    def _renew(self) -> None:
        while True:
            try:
                with self._renewing:
                    self.holder.renew()
            except OSError as error:
                _log.warning("the lease cannot be renewed: %s", error)
            except Superseded as error:
                self.lose(error)
                return
            if self._stop.wait(RENEW_S):
                return

    def end(self) -> None:
        """Release the lease."""
        self._stop.set()
        self._thread.join(RENEW_S)
        if self._lost is None:
            self.holder.release()


@contextlib.contextmanager
def leadership(state: Path) -> Iterator[Leadership]:
    """Be the controller, or fail.

    Where the lease is another machine's that did not release it, wait to see whether it is renewed: a lock of a network
    filesystem may not reach that machine.

    Raises:
        AlreadyRunning: There is a controller.
        GpuschedError: The lock file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        check_lock = _enter_lock(state, stack)
        highest, first = highest_term(state), read_lease_bytes(state)
        holder, former = None, decoded_lease(first)
        watch = RenewalWatch(EXPIRY_S)
        if former is not None and not _is_over(former):
            _log.info("waiting to see whether the controller of %s is alive", former.holder)
            while not watch.is_stale(found := read_lease_bytes(state)):
                if found != first:
                    raise AlreadyRunning(f"a controller ({former.holder}) already runs on {state}", _ONE)
                time.sleep(WATCH_S)
        stored = _stored_term(state)
        if former is not None and former.boot_id == boot_id() and former.term == stored:
            holder = adopt(state, former)
        else:
            holder = claim(state, next_term(former, stored, time.time()), highest)
        if holder is None:
            raise AlreadyRunning(f"another controller has just started on {state}", _ONE)
        yield from _led(Leadership(check_lock, holder, None))


def _enter_lock(state: Path, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Enter the lock. A child that a killed holder was starting has it, too, until it runs its own program."""
    until = time.monotonic() + CHILD_S
    while True:
        try:
            return stack.enter_context(controller_lock(state))
        except AlreadyRunning as error:
            if not error.pid.isdecimal() or os.path.exists(f"/proc/{error.pid}") or time.monotonic() >= until:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def standby(state: Path, expiry_s: float, wait: Callable[[float], bool]) -> Iterator[Leadership | None]:
    """Wait until there is no controller, and be it then.

    Args:
        state: The state folder.
        expiry_s: A controller whose lease was not renewed for that long is taken for dead.
        wait: Waits so many seconds; returns whether to stop waiting.

    Yields:
        None: waiting was stopped.
    """
    state.mkdir(parents=True, exist_ok=True)
    watch, beat, reported = RenewalWatch(expiry_s), 0, ""
    try:
        with contextlib.ExitStack() as stack:
            while True:
                highest, content = highest_term(state), read_lease_bytes(state)
                stale, lease = watch.is_stale(content), decoded_lease(content)
                holder = None
                try:
                    check_lock = stack.enter_context(controller_lock(state))
                    free = True
                except AlreadyRunning:
                    free = False
                if (free and (lease is None or _is_over(lease))) or stale or (lease is not None and lease.released):
                    holder = claim(state, next_term(lease, _stored_term(state), time.time()), highest)
                    if holder is not None:
                        break
                stack.close()
                if lease is not None and lease.holder != reported:
                    reported = lease.holder
                    _log.info("standby: the controller is %s (term %d)", reported, lease.term)
                announce_standby(state, beat := beat + 1)
                if wait(WATCH_S):
                    yield None
                    return
            standby_file(state).unlink(missing_ok=True)
            if not free:
                check_lock = stack.enter_context(controller_lock(state, replace=True))
            if lease is not None and reported:
                why = "ended" if free or lease.released else f"was silent for {format_duration(expiry_s)}"
                _log.warning("taking over with term %d: the controller of %s %s", holder.term, reported, why)
            yield from _led(Leadership(check_lock, holder, lease))
    finally:
        with contextlib.suppress(OSError):
            standby_file(state).unlink(missing_ok=True)


def _led(found: Leadership) -> Iterator[Leadership]:
    try:
        yield found
    finally:
        found.end()


_ONE = "only one may run"


def _is_over(lease: ControllerLease) -> bool:
    """Return whether its holder cannot be alive, for the holder of a lock that reaches all of this machine.

    The name of another machine might be this one's, but not that of one which uses the same folder.
    """
    return lease.released or lease.boot_id == boot_id() or lease.host == os.uname().nodename


def _stored_term(state: Path) -> int:
    with contextlib.suppress(GpuschedError, *UNREADABLE):  # a damaged store may be recovered
        if (reader := Reader.open(state)) is not None:
            with contextlib.closing(reader):
                return int(reader.number(TERM, 0))
    return 0


def end_former(former: ControllerLease) -> bool:
    """Kill a superseded controller that hangs on this machine, as it has a lock on the store; return whether it did."""
    if not former.is_alive_here():
        return False
    _log.warning("killing the controller of %s: it hangs and holds a lock on the store", former.holder)
    try:
        os.kill(former.pid, signal.SIGKILL)
    except OSError as error:
        _log.error("it cannot be killed: %s", error.strerror)
        return False
    return True


@contextlib.contextmanager
def controller_lock(state: Path, replace: bool = False) -> Iterator[Callable[[], None]]:
    """Hold the lock of the single writer. The kernel releases it when the process dies.

    ``replace``: put a new lock in place of one whose holder was superseded.

    Yields:
        A function that raises `GpuschedError` if the state folder, or the lock in it, is no longer the locked one: it
            was removed, restored from a copy, or taken over. A controller that went on would take commands meant for
            another one.

    Raises:
        AlreadyRunning: Another process holds the lock.
        GpuschedError: The lock file cannot be opened.
    """
    state.mkdir(parents=True, exist_ok=True)
    path = state / _LOCK
    part = path.with_name(f"{_LOCK}.{os.getpid()}")
    while True:
        with _open_lock(part if replace else path) as file:
            _take(file, state)
            if replace:
                part.replace(path)
            locked = os.fstat(file.fileno())
            if _is_file(path, locked):  # else it was replaced between opening and locking
                yield partial(_check_lock, path, locked)
                return


def _is_file(path: Path, locked: os.stat_result) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), locked)
    return False


def _check_lock(path: Path, locked: os.stat_result) -> None:
    if not _is_file(path, locked):
        raise GpuschedError(
            f"{path.parent} was removed or replaced while this controller used it; it stops, jobs keep running",
            "start a controller on the new folder, and run 'gpusched check'",
        )


def _open_lock(path: Path) -> IO[str]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        hint = "it must belong to the controller's user"
        if error.errno == errno.EIO:
            hint = "its disk or file system is broken: see 'dmesg'; jobs keep running"
        raise GpuschedError(f"{path} cannot be opened: {error.strerror}", hint) from None
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600 and os.fstat(descriptor).st_uid == os.getuid():
        os.fchmod(descriptor, 0o600)  # anyone who can open it can lock it; earlier versions let all read it
    return open(descriptor, "r+")


def _take(file: IO[str], state: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read(20).strip()
        error = AlreadyRunning(f"a controller (pid {pid or 'unknown'}) already runs on {state}", _ONE)
        error.pid = pid
        raise error from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
