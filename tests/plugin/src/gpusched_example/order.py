"""An order: jobs with the least GPU time by their limits go first. Live, in forecasts, in replays and in training."""

from __future__ import annotations

from gpusched.sched.order import Columns, Keys


def short_and_small(keys: Keys) -> Columns:
    """Return what to order by: one number for each job in each column, smaller first; the first that differs counts.

    Explicit priorities go before it, and ties by submit time and id come after it.
    """
    return (keys.limit * keys.gpus,)


short_and_small.knows = "limit"  # what it goes by of run times: "nothing" is the default


def failing(keys: Keys) -> Columns:
    """Fail, as code can: the queue goes on in order of submission, and a line says so."""
    raise ZeroDivisionError("no such thing")
