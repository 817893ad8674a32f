"""How much of their time limits users' jobs use: draws of run times for waiting and running jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gpusched.compiled.arrays import Floats

ENOUGH_OF_ONE_USER = 5
_LEAST_S = 1.0


class LimitUse:
    """Ratios of run time to limit, per user; those of all users for users with fewer than five.

    Made from the user, the seconds and the time limit of jobs that ended. ``count``: how many of them there are.
    """

    def __init__(self, past: Iterable[tuple[str, float, int]]) -> None:
        by_user: dict[str, list[float]] = {}
        for user, ran_s, limit_s in past:
            by_user.setdefault(user, []).append(min(1.0, max(ran_s, 0.0) / max(limit_s, 1)))
        self._all: Floats = np.sort([r for ratios in by_user.values() for r in ratios])
        self._own = {u: np.sort(r) for u, r in by_user.items() if len(r) >= ENOUGH_OF_ONE_USER}
        self.count = len(self._all)

    def known(self, user: str) -> bool:
        """Return whether the user's own runs are used."""
        return user in self._own

    def draw(self, rng: np.random.Generator, users: Sequence[str], limits: Floats, elapsed: Floats) -> Floats:
        """Draw run times, ``float64[jobs]``, seconds: longer than ``elapsed``, at most the limit.

        A job that has run for a while is drawn from those past runs that had used more of their limit by then; where
        there are none, it uses the whole of it.

        ``users`` of each job; ``limits`` and ``elapsed``: ``float64[jobs]``, seconds; 0 elapsed of jobs that wait.
        """
        used = np.divide(elapsed, limits, out=np.ones(len(limits)), where=limits > 0)
        ratio = np.ones(len(limits))
        rows: dict[str, list[int]] = {}
        for i, user in enumerate(users):
            rows.setdefault(user if user in self._own else "", []).append(i)
        for user, chosen in rows.items():
            ratio[chosen] = self._beyond(rng, self._own.get(user, self._all), used[chosen])
        return np.maximum(ratio * limits, _LEAST_S)

    def _beyond(self, rng: np.random.Generator, ratios: Floats, used: Floats) -> Floats:
        """Draw one of the sorted ``ratios`` above each of ``used``, uniformly; else of all users', else 1."""
        first = np.searchsorted(ratios, used, side="right")
        left = len(ratios) - first
        some = left > 0
        drawn = np.ones(len(used))
        place = first + (rng.random(len(used)) * left).astype(np.int64)
        drawn[some] = ratios[place[some]]
        if ratios is not self._all and not some.all():
            drawn[~some] = self._beyond(rng, self._all, used[~some])
        return drawn
