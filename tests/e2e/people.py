"""People at a cluster's command line: in a terminal, and as another user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

NOBODY = 65534


def nobody(*more: str) -> tuple[str, ...]:
    """Words that run a command as the user nobody."""
    words = ("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", *more)
    done = subprocess.run([*words, sys.executable, "-c", "import msgspec"], check=False, capture_output=True)
    if done.returncode and not more:  # this Python lies in root's home: let nobody read (not write) there
        return nobody("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    return words


class Screen:
    """A command in a terminal, as a person has it."""

    def __init__(self, cluster: Cluster, argv: Sequence[str], rows: int, columns: int) -> None:
        self._ours, theirs = os.openpty()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv], env=cluster.env(TERM="xterm"), stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def look(self) -> str:
        """All that was shown by now."""
        os.set_blocking(self._ours, False)
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.shown += data.decode(errors="replace")
        return self.shown

    def wait_for(self, text: str) -> None:
        try:
            wait_until(lambda: text in self.look(), 60, f"{text!r} on the screen")
        except TimeoutError as error:
            error.add_note(self.shown)
            raise

    def close(self) -> None:
        """As ``kill -9`` of the command, the terminal too; more than once is fine."""
        if self._ours >= 0:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)
            self._ours = -1
