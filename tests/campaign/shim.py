"""Orders to the preloaded library of shim.c: which disk operation fails, and how far off the clock is."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import subprocess
from pathlib import Path

from tests import commands

WRITE, SYNC, NAME, CREATE = 1, 2, 4, 8
DIE, TEAR = -1, -2
"""In place of an errno: die by SIGKILL before the operation; write half of it and die."""
_ORDERS = struct.Struct("=qiiiiii256s")
SERVER = {"NUMBA_DISABLE_JIT": "0"}
"""Says nothing new to numba; `tests.commands` has a server for each value."""
_HERE = Path(__file__).parent
CACHE = _HERE.parents[1] / "build" / "testbed"


def built(cache: Path, source: Path, *flags: str) -> Path:
    """Return the compiled form of a C file of this folder; compiled once."""
    made = cache / f"{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}.part")
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-Wall", *flags, "-o", part, source, "-ldl"], check=True)
        part.rename(made)
    return made


def shim() -> Path:
    """The library."""
    return built(CACHE, _HERE / "shim.c", "-shared", "-fPIC")


def preload() -> None:
    """Load shim.c into a process of its own from which commands with `SERVER` in their environment are forked."""
    os.environ["LD_PRELOAD"] = str(shim())
    try:
        commands._server(os.getpid(), SERVER["NUMBA_DISABLE_JIT"])
    finally:
        del os.environ["LD_PRELOAD"]


class Shim:
    """The orders of one kind of process: set ``CAMPAIGN_SHIM`` to `path` in its environment."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self._folder = path, os.fsencode(folder)
        path.write_bytes(bytes(_ORDERS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ORDERS.size)
        self.clear()

    def fail(self, mask: int, after: int, error: int, times: int = 1) -> None:
        """Let ``after`` operations of ``mask`` pass, then fail ``times`` of them with ``error``."""
        clock = self.clock_s
        self._map[:] = _ORDERS.pack(clock, 0, after, times, error, 0, 0, self._folder)
        self._map[8:12] = struct.pack("=i", mask)  # last: all else is there

    def clear(self) -> None:
        """Fail nothing more."""
        self._map[:] = _ORDERS.pack(self.clock_s, 0, 0, 0, 0, 0, self.failed, self._folder)

    @property
    def clock_s(self) -> int:
        """How far ahead the clock is."""
        return int(struct.unpack_from("=q", self._map)[0])

    @clock_s.setter
    def clock_s(self, value: int) -> None:
        self._map[:8] = struct.pack("=q", value)

    @property
    def is_armed(self) -> bool:
        """Whether something has been ordered that has not come yet."""
        return any(self._map[8:12]) and self.failed == 0

    @property
    def failed(self) -> int:
        """Those that failed since `fail`."""
        return int(struct.unpack_from("=i", self._map, 28)[0])
