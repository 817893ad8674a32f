"""The controller's process and start-up phase, in a small world-readable file.

The lock, which only its holder may open, prevents a second controller. This file informs other processes and is valid
only while the process that wrote it is alive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpusched.queue.clock import boot_id

FILE = "controller.json"
STARTING, COMPILING = "is starting", "is starting: compiling the scheduling passes (once only, about ten seconds)"


class HostProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this boot of this machine, or of another.

    Attributes:
        started: When it began, as /proc has it: a process id alone may have been reused.
    """

    pid: int
    started: str
    boot_id: str

    def is_alive_here(self) -> bool:
        """Return whether it runs on this machine."""
        return self.boot_id == boot_id() and _is_alive(self)


def this_process() -> HostProcess:
    """Return this process."""
    return HostProcess(pid=os.getpid(), started=_started(os.getpid()) or "", boot_id=boot_id())


class Presence(HostProcess, frozen=True, kw_only=True):
    """A controller or tick.

    Attributes:
        doing: What keeps it from its first cycle (`STARTING`, `COMPILING`); "" from then on.
    """

    doing: str = ""

    def line(self, otherwise: str) -> str:
        """Return its phase as a sentence; ``otherwise`` once it has started."""
        return f"the controller (pid {self.pid}) {self.doing or otherwise}"


@contextlib.contextmanager
def controller_presence(state: Path) -> Iterator[None]:
    """Announce this process as the controller while the context lasts (it holds the lock)."""
    announce(state, STARTING)
    try:
        yield
    finally:
        found = _read(state)
        own = found is not None and (found.pid, found.boot_id) == (os.getpid(), boot_id())
        if found is None or own:  # otherwise another controller owns the folder now
            with contextlib.suppress(OSError):
                (state / FILE).unlink()


def announce(state: Path, doing: str = "") -> None:
    """Write this controller's start-up phase. A full disk must not stop the controller."""
    own = Presence(**msgspec.structs.asdict(this_process()), doing=doing)
    part = state / f"{FILE}.part"
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(own))
        part.chmod(0o644)
        part.replace(state / FILE)


def controller_of(state: Path) -> Presence | None:
    """Return the controller that runs on a state folder; None: none, or unknown."""
    found = _read(state)
    return found if found is not None and found.is_alive_here() else None


def _read(state: Path) -> Presence | None:
    try:
        return msgspec.json.decode((state / FILE).read_bytes(), type=Presence)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_alive(found: HostProcess) -> bool:
    started = _started(found.pid)
    if started is not None:
        return started == found.started
    try:
        os.kill(found.pid, 0)
    except PermissionError:
        return True  # there is one, and /proc shows users their own processes only (hidepid)
    except OSError:
        pass
    return False  # there is none, or a zombie


def _started(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in "ZX" else None
