"""The relay's process (`gpusched.controller.relay`), kept running beside the controller of a shared installation."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpusched
from gpusched.model.relay import SOCKET

RESTART_S = 10.0


class Relaying:
    """Nothing here waits for the relay: without it users cannot look into running jobs, and all else goes on."""

    def __init__(self, state: Path, inventory_path: Path, say: Callable[[str], None]) -> None:
        self._state, self._inventory_path, self._say = state, inventory_path, say
        self._process: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")

    def watch(self) -> None:
        """Start it, or start it again."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._say(f"the relay to running jobs ended (exit code {self._process.returncode}); it is started again")
            self._forget()
        if time.monotonic() - self._started < RESTART_S:
            return
        self._started = time.monotonic()
        # -P: the current folder, perhaps somebody else's, is no place to take code from.
        argv = [sys.executable, "-P", "-m", "gpusched.controller.relay", str(self._state), str(self._inventory_path)]
        paths = [str(Path(gpusched.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        except OSError as error:
            self._say(f"the relay to running jobs cannot be started: {error}")

    def close(self) -> None:
        """End it, with the sessions that it has."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                (self._state / SOCKET).unlink()
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
