"""Single key presses on a terminal, for live screens."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[None]:
    """Deliver keys one by one without echo; restore the terminal at the end."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def quit_pressed(within_s: float) -> bool:
    """Wait up to ``within_s`` seconds; return True as soon as ``q`` is pressed."""
    deadline = time.monotonic() + within_s
    while (remaining_s := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(remaining_s)
        elif select.select([sys.stdin], [], [], remaining_s)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False
