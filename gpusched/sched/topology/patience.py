"""The waiting time for a better place than the best one free now: one rule, live and in replays."""

from __future__ import annotations

from gpusched.compiled import jit

PATIENCE_S = 1_555_200.0
"""A job waits at most cost ** 2 times this; the cost is 1 where it would run twice as long in the place free now."""
HARMLESS = 0.05  # what costs no more is taken at once
WAIT_S, HOLD_S = 86_400.0, 604_800.0
"""In replays: how long jobs wait for one rack; how long the first of all is passed over by those behind it."""


@jit
def waits_until(since: float, cost: float, patience_s: float, wait_s: float) -> float:
    """Return when a job accepts a place of this cost; it waits from ``since`` on, at most ``wait_s``."""
    return float(since + min(cost * cost * patience_s, wait_s))


@jit
def is_waiting(cost: float, until: float, now: float) -> bool:
    """Return whether a job waits rather than takes a place of this cost, acceptable at ``until``."""
    return bool(cost > HARMLESS and now < until)
