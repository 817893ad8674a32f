"""Ctrl-C while a command's modules are imported, and afterwards.

An import is no place for KeyboardInterrupt: it shows a traceback, or is lost in a callback of the import system and the
command runs on. Nothing was begun by then, so the process may end at once.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def end_at_once() -> None:
    """From now on Ctrl-C ends the process; one that was told to ignore it (nohup, ``&``) still does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, for a command that has something to put right."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
