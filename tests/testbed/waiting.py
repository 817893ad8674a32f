"""Wait for a condition instead of sleeping."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 4.0
"""As many times the seconds that a condition takes at most here, as other machines are slower, or do other things."""
LEAST_S = 300.0
"""Seconds. Long, as it costs nothing in a test that passes; less fails on machines that stand still for a while."""


def wait_until(
    condition: Callable[[], T], timeout_s: float = 30.0, what: str = "", interval_s: float = 0.05,
    least_s: float = LEAST_S,
) -> T:  # fmt: skip
    """Call `condition` until it returns something true, and return that.

    The pause between calls doubles from `interval_s` up to 0.4 s.

    Args:
        condition: Called at least twice; an exception it raises is not caught.
        timeout_s: Seconds that it takes at most on a machine with nothing else to do; `PATIENCE` times that is waited.
        what: Completes the sentence "timed out waiting for ...".
        interval_s: First pause in seconds.
        least_s: Seconds that are waited at least; less is for who goes on without it.

    Raises:
        TimeoutError: The condition was still false.
    """
    timeout_s = max(least_s, PATIENCE * timeout_s)
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"timed out after {timeout_s:g} s waiting for {what or condition}")
        time.sleep(interval_s)
        interval_s = min(interval_s * 2, 0.4)
    return value
