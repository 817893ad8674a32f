"""Resource usage: hourly over days, every five minutes over the last one, and by user over days.

SQLite sums the store's usage rows, each hour once; only what may have changed since is queried again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gpusched.accounting.held_idle import held_idle
from gpusched.accounting.usage import BUCKET_S
from gpusched.queue.store import Reader, UsageSum
from gpusched.views.jobs import idle_line

HOUR_S, DAY_S = 3600, 86400
DAYS = 14
_J_PER_KWH = 3.6e6
_MAX_USERS = 200
_MAX_IDLE = 50
_IDLE_SPAN_S = 6 * HOUR_S  # a job is not shown as idle for longer


class Bins:
    """Sums in bins of ``width_s`` seconds over the last ``span_s``, updated incrementally."""

    def __init__(self, width_s: int, span_s: int) -> None:
        self.width_s, self.span_s = width_s, span_s
        self._known: dict[int, list[UsageSum]] = {}
        self._last = -math.inf  # the last bin when it was updated

    def update(self, reader: Reader, now: float) -> None:
        """Query what may have changed: the two bins before the last update, and at first all."""
        first = int((now - self.span_s) // self.width_s) * self.width_s
        last = int(now // self.width_s) * self.width_s
        since = int(max(first, min(self._last, last) - 2 * self.width_s))
        self._known = {bin_start: sums for bin_start, sums in self._known.items() if first <= bin_start < since}
        for usage_sum in reader.usage_sums(since, self.width_s):
            self._known.setdefault(usage_sum.bin, []).append(usage_sum)
        self._last = last

    def sums(self) -> Iterable[tuple[int, list[UsageSum]]]:
        """Return the bins by time (Unix seconds of their begin)."""
        return sorted(self._known.items())


class UsageStats:
    """The page's usage figures, from one store."""

    def __init__(self) -> None:
        self._hours, self._fine = Bins(HOUR_S, DAYS * DAY_S), Bins(BUCKET_S, DAY_S)

    def figures(self, reader: Reader | None, now: float) -> dict[str, Any]:
        """Return curves and users as the page gets them.

        ``hours``, ``fine``: rows of begin, GPU hours allocated, GPU hours in total, measured utilization (0..1), kW;
        ``users``: by span in days, the largest first; ``idle``: jobs that hold idle GPUs now, the longest first.
        """
        if reader is not None:
            self._hours.update(reader, now)
            self._fine.update(reader, now)
        return {
            "now": round(now),
            "hours": [_point(begin, sums, HOUR_S, now) for begin, sums in self._hours.sums()],
            "fine": [
                _point(begin, sums, BUCKET_S, now) for begin, sums in self._fine.sums() if begin + BUCKET_S <= now
            ],
            "idle": [] if reader is None else _idle(reader, now),
            "users": {
                str(days): self._users(bins, now - days * DAY_S)
                for days, bins in ((1, self._fine), (7, self._hours), (DAYS, self._hours))
            },
        }

    def _users(self, bins: Bins, since: float) -> list[dict[str, Any]]:
        found: dict[str, list[float]] = {}
        for bin_start, sums in bins.sums():
            for row in sums if bin_start >= since else ():  # as the page chooses the points of its curves
                if row.user:
                    total = found.setdefault(row.user, [0.0] * 5)
                    added = (row.gpu_s, row.energy_j, row.util_s, row.util_known_s, row.idle_s)
                    found[row.user] = [a + b for a, b in zip(total, added, strict=True)]
        ranked = sorted(found.items(), key=lambda item: -item[1][0])[:_MAX_USERS]
        return [
            {
                "user": user,
                "gpu_hours": round(gpu_s / 3600, 2),
                "kwh": round(joules / _J_PER_KWH, 2),
                "util": round(util_s / known_s, 4) if known_s else None,
                "idle_hours": round(idle_s / 3600, 2),
            }
            for user, (gpu_s, joules, util_s, known_s, idle_s) in ranked
        ]


def _idle(reader: Reader, now: float) -> list[dict[str, Any]]:
    active = {job.id: job for job in reader.active()}
    found = held_idle(active.values(), reader.usage(now - _IDLE_SPAN_S), now)[:_MAX_IDLE]
    return [
        {
            "job": idle.job,
            "name": idle.name,
            "user": idle.user,
            "gpus": idle.gpus,
            "idle_gpus": idle.idle_gpus,
            "since": round(now - idle.idle_s),
            "rule": idle_line(active[idle.job], now),
        }
        for idle in found
    ]


def _point(bin_start: int, sums: list[UsageSum], width_s: int, now: float) -> list[float | None]:
    """Return begin, GPU hours allocated, GPU hours in total, measured utilization, kW (of what was measured).

    The power of a bin that has not ended is that of its time so far; None: too short to measure.
    """
    held, elapsed_s = sum(row.gpu_s for row in sums if row.user), min(width_s, now - bin_start)
    known_s = sum(row.util_known_s for row in sums)
    measured = elapsed_s >= BUCKET_S and any(row.gpu_s > row.energy_unknown_s for row in sums)
    return [
        bin_start,
        round(held / 3600, 2),
        round(sum(row.gpu_s for row in sums) / 3600, 2),
        round(sum(row.util_s for row in sums) / known_s, 4) if known_s else None,
        round(sum(row.energy_j for row in sums) / elapsed_s / 1000, 3) if measured else None,
    ]
