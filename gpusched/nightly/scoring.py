"""Forecast accuracy: predicted against real start times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from gpusched.model.units import count_of
from gpusched.queue.predictions import PredictedStart
from gpusched.views.replay import span

_GRACE_S = 60.0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy of one partition's forecasts.

    Attributes:
        made: Jobs with a predicted start. started: Of these, started since.
        overdue: Still waiting though even the late end of their range is over. open: Waiting within it.
        gone: Cancelled (or ended otherwise) without a start.
        median_abs_error_s: Of the started: half were predicted nearer than that. Overdue ones count with what they are
            late by now.
        median_error_s: The same with its sign: above 0 they started later than predicted.
        within_range: Part of started and overdue jobs with a start in the predicted range (10 % to 90 % of the
            runs), give or take the minute that a cycle and a container's start take.
        median_wait_s: From forecast to start, of the started: what the errors are to be measured by.
    """

    partition: str
    made: int
    started: int
    overdue: int
    open: int
    gone: int
    median_abs_error_s: float | None = None
    median_error_s: float | None = None
    within_range: float | None = None
    median_wait_s: float | None = None

    @property
    def line(self) -> str:
        """Return the score in a sentence."""
        if self.median_abs_error_s is None or self.within_range is None:
            return f"{count_of(self.made, 'start')} predicted, none due yet"
        return (
            f"{self.started} of {count_of(self.made, 'predicted start')} happened, half of them within "
            f"{span(self.median_abs_error_s)} of the predicted time, {self.within_range:.0%} within the predicted range"
        )


def scores(found: Iterable[PredictedStart], now: float) -> tuple[Score, ...]:
    """Return the scores by partition, in order of name; ``now``: Unix seconds."""
    by_partition: dict[str, list[PredictedStart]] = {}
    for item in found:
        by_partition.setdefault(item.prediction.partition, []).append(item)
    return tuple(_score(name, items, now) for name, items in sorted(by_partition.items()))


def _score(partition: str, items: Sequence[PredictedStart], now: float) -> Score:
    started = [i for i in items if i.started is not None]
    waiting = [i for i in items if i.started is None and i.waits]
    overdue = [i for i in waiting if i.prediction.high is not None and i.prediction.high + _GRACE_S < now]
    counts = {
        "made": len(items),
        "started": len(started),
        "overdue": len(overdue),
        "open": len(waiting) - len(overdue),
        "gone": len(items) - len(started) - len(waiting),
    }
    due = [*((i.prediction, i.started or 0.0, True) for i in started), *((i.prediction, now, False) for i in overdue)]
    if not due:
        return Score(partition=partition, **counts)
    errors = np.array([at - p.median for p, at, _ in due])
    within = [came and p.low - _GRACE_S <= at <= (p.high or np.inf) + _GRACE_S for p, at, came in due]
    waits = [at - p.made for p, at, came in due if came]
    return Score(
        partition=partition,
        **counts,
        median_abs_error_s=float(np.median(np.abs(errors))),
        median_error_s=float(np.median(errors)),
        within_range=float(np.mean(within)),
        median_wait_s=float(np.median(waits)) if waits else None,
    )
