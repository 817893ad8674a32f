"""Ctrl-C while a command's modules are imported, and afterwards.

During an import KeyboardInterrupt shows a traceback, or is lost in a callback of the import system and the command
continues. Nothing has been done by then, so the process may exit at once.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def end_at_once() -> None:
    """Make Ctrl-C end the process, unless the process was started to ignore it (nohup, ``&``)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, for commands that must clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
