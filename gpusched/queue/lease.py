"""The controller's lease on a state folder: which process writes, and in which term.

A term is a fencing token: each take-over has a higher one, and the store and the nodes refuse lower ones. The lease
itself only decides when a standby may try: `lease/TERM` is one small file per term, the highest counts, and its holder
rewrites it every `RENEW_S`. A term is claimed by creating its file, which is atomic on network filesystems too. The
file is rewritten in place, since their clients may keep an old name for half a minute.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpusched.errors import GpuschedError
from gpusched.queue.presence import HostProcess, this_process

LEASE, STANDBYS = "lease", "standbys"
RENEW_S = 2.0
EXPIRY_S = 15.0
"""A standby takes over when the lease was not renewed for that long."""
TERM = "term"  # of the meta table


class Superseded(GpuschedError):
    """Another controller took over; nothing may be written or sent any more."""


class ControllerLease(HostProcess, frozen=True, kw_only=True):
    """The content of a lease file.

    Attributes:
        beat: Grows with each renewal.
        released: Its holder has ended and will write nothing more.
    """

    term: int
    host: str
    beat: int = 0
    released: bool = False

    @property
    def holder(self) -> str:
        """Return the holder in words: "login1, pid 12"."""
        return f"{self.host}, pid {self.pid}"


class LeaseHolder:
    """The holder of a term. `renew` may run in a thread of its own."""

    def __init__(self, state: Path, lease: ControllerLease) -> None:
        self._state, self._path, self._lease = state, state / LEASE / str(lease.term), lease
        self.standbys: tuple[str, ...] = ()
        self._watches: dict[str, RenewalWatch] = {}

    @property
    def term(self) -> int:
        """The held term."""
        return self._lease.term

    def check(self) -> None:
        """Raise unless this is the highest term.

        Raises:
            Superseded: There is a higher one.
            OSError: The folder cannot be read.
        """
        if (highest := highest_term(self._state)) > self.term:
            lease = read_lease(self._state)
            raise superseded(lease.holder if lease is not None else "another controller", highest)

    def renew(self) -> None:
        """Renew the lease, and see which standbys watch it.

        Raises:
            Superseded, OSError: As `check`; it is not renewed then.
        """
        self.check()
        self._lease = msgspec.structs.replace(self._lease, beat=self._lease.beat + 1)
        _write(self._path, self._lease)
        self.standbys = tuple(sorted(self._alive_standbys()))

    def _alive_standbys(self) -> list[str]:
        found = []
        with contextlib.suppress(OSError):
            for path in (self._state / STANDBYS).iterdir():
                with contextlib.suppress(FileNotFoundError):  # one has just ended; the others have not
                    content = path.read_bytes()
                    if not self._watches.setdefault(path.name, RenewalWatch(EXPIRY_S)).is_stale(content):
                        found.append(path.name.rpartition(".")[0])
        return found

    def raised(self, term: int) -> LeaseHolder:
        """Return the holder of a higher term, claimed in place of this one.

        Raises:
            Superseded, OSError: As `check`.
        """
        holder = claim(self._state, term, self.term)
        if holder is None:
            self.check()
            raise superseded("another controller", term)
        return holder

    def release(self) -> None:
        """Let a standby take over at once."""
        with contextlib.suppress(OSError):
            _write(self._path, msgspec.structs.replace(self._lease, released=True))


class RenewalWatch:
    """Notices that a file is no longer renewed, by this process's own monotonic clock: other clocks do not matter."""

    def __init__(self, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s, self._clock = expiry_s, clock
        self._content: bytes | None = None
        self._since = clock()

    def is_stale(self, content: bytes) -> bool:
        """Return whether the content has been the same for the expiry."""
        now = self._clock()
        if content != self._content:
            self._content, self._since = content, now
        return now - self._since >= self._expiry_s


def superseded(by: str, term: int) -> Superseded:
    """Return the error of a controller that was superseded."""
    return Superseded(f"{by} took over (term {term}): this controller stops, jobs keep running")


def claim(state: Path, term: int, highest: int | None = None) -> LeaseHolder | None:
    """Claim a term for this process; None: another process has it, or a higher one.

    ``highest``: The highest term when this was decided; of others that claimed one since then, none is superseded.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = state / LEASE
    folder.mkdir(mode=0o755, exist_ok=True)
    lease = ControllerLease(**msgspec.structs.asdict(this_process()), term=term, host=os.uname().nodename)
    draft = folder / f".{os.urandom(8).hex()}"
    try:
        _write(draft, lease)
        os.link(draft, folder / str(term))
    except FileExistsError:
        return None
    finally:
        draft.unlink(missing_ok=True)
    if highest_term(state) > term or (highest is not None and any(highest < one < term for one in _terms(state))):
        (folder / str(term)).unlink(missing_ok=True)
        return None
    for old in _terms(state):
        if old < term:
            (folder / str(old)).unlink(missing_ok=True)
    return LeaseHolder(state, lease)


def adopt(state: Path, lease: ControllerLease) -> LeaseHolder:
    """Go on with the term of a holder known to be dead: it ran under this kernel, and this process has its lock.

    Raises:
        OSError: The lease cannot be written.
    """
    own = msgspec.structs.replace(
        lease, **msgspec.structs.asdict(this_process()), host=os.uname().nodename, beat=lease.beat + 1, released=False
    )
    _write(state / LEASE / str(own.term), own)
    return LeaseHolder(state, own)


def next_term(lease: ControllerLease | None, stored: int, now: float) -> int:
    """Return the term after this lease and the store's.

    Where the two differ, or there is no lease, the folder is new or was restored, and later terms may have been given
    away: Unix seconds are higher than all of them.
    """
    before = max(stored, lease.term if lease is not None else 0)
    return before + 1 if lease is not None and lease.term == stored else max(before + 1, int(now))


def read_lease(state: Path) -> ControllerLease | None:
    """Return the lease; None: none, or not readable."""
    return decoded_lease(read_lease_bytes(state))


def decoded_lease(content: bytes) -> ControllerLease | None:
    """Return what a lease file says; None: it cannot be read."""
    try:
        return msgspec.json.decode(content, type=ControllerLease) if content else None
    except msgspec.MsgspecError:
        return None


def read_lease_bytes(state: Path) -> bytes:
    """Return the content of the lease as it is, maybe while it is being written; b"": none."""
    try:
        return (state / LEASE / str(highest_term(state))).read_bytes()
    except OSError:
        return b""


def announce_standby(state: Path, beat: int) -> None:
    """Write that this process watches the lease; the holder notices when ``beat`` no longer changes."""
    with contextlib.suppress(OSError):
        (state / STANDBYS).mkdir(exist_ok=True)
        standby_file(state).write_text(str(beat))


def standby_file(state: Path) -> Path:
    """Return this process's file among the standbys."""
    return state / STANDBYS / f"{os.uname().nodename}.{os.getpid()}"


def _write(path: Path, lease: ControllerLease) -> None:
    # As a whole, in place, and always of one length: it never has the end of a longer one. Closing sends it to the
    # server of a network filesystem; nothing depends on its surviving a power cut.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
        file.write(msgspec.json.encode(lease).ljust(400))


def _terms(state: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(state / LEASE) if name.isdecimal()]
    except FileNotFoundError:
        return []


def highest_term(state: Path) -> int:
    """Return the highest claimed term; 0: none.

    Raises:
        OSError: The folder cannot be read.
    """
    return max(_terms(state), default=0)
