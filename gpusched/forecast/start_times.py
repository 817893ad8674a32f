"""When one waiting job will start, and what would start it sooner, from runs of `queue.QueueForecast`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.forecast.queue import ENOUGH_WORK, QueueForecast, RunTimeDraw
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.model.forecast import ExpectedStart, Sooner, Spread, SpreadStart
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.state import Floats

LOW, HIGH = 0.1, 0.9
_RUNS_OF_ALL = 12_000  # jobs times draws, within bounds: so a large queue still answers at once
_FEWEST_DRAWS, _MOST_DRAWS = 8, 40
_MOST_ENDINGS = 25
_MOST_LATER = 3
_ENOUGH_WORK = 80_000_000  # queue entries of all runs for one answer: some tenths of a second
_MIN_SAVED = 0.1  # of the wait must be saved to be shown
_MIN_SAVED_S = 60.0
_PACE_SPREAD = 0.1  # of what is left of a job that reports progress: standard deviation of its logarithm


class Alternative(NamedTuple):
    """Another request instead of the job's: in words, as options, and as it would be in the queue.

    Of one ``kind``, ordered by what is given up, the first that helps is shown.
    """

    kind: str
    what: str
    how: str
    view: PendingView


class SpreadView(NamedTuple):
    """The job with a fixed spread: the options that request it, and the job as it would be in the queue."""

    spread: Spread
    how: str
    view: PendingView


class StartForecast:
    """One snapshot simulated for one job and its alternatives. The same snapshot gives the same answer."""

    def __init__(
        self,
        snapshot: Snapshot,
        job: PendingView,
        run_times: RunTimeSampler,
        alternatives: Sequence[Alternative] = (),
        spreads: Sequence[SpreadView] = (),
        *,
        half_life_s: float,
        tick_s: float,
    ) -> None:
        self._snapshot, self._job, self._alternatives, self._spreads = snapshot, job, alternatives, spreads
        variants = [*(a.view for a in alternatives), *(s.view for s in spreads)]
        self.ahead = QueueForecast(snapshot, half_life_s=half_life_s, tick_s=tick_s, variants=variants, components=True)
        self._target = self.ahead.index.get(job.id, -1)
        self._own_nodes = {n.name for n in snapshot.nodes if n.partition == job.spec.partition}
        self._draws = draws_of(self.ahead, run_times, draws_for(self.ahead))
        self._starts: Floats = np.full(1, np.inf)
        self._left, self._cut = work_for(snapshot.policies.get(job.spec.partition)), False

    def expected(self) -> ExpectedStart:
        """Return median, range and nodes; all None if no run starts it, or the queue is too long for one run.

        In a queue of many thousands fewer draws than wanted are made: as many as the work allowed is enough for.
        """
        if self._target < 0:
            return ExpectedStart()
        by_limits = self._start(self.ahead.by_limits, self._target)
        starts, nodes, often = self._drawn(self._target, len(self._draws))
        self._starts = np.array(starts or [np.inf])
        low, median, high = quantiles(self._starts)
        return ExpectedStart(
            median=median,
            low=low,
            high=high,
            by_limits=_known(by_limits),
            nodes=nodes,
            certain=often / len(self._starts),
            runs=len(starts),
        )

    def by_spread(self) -> tuple[SpreadStart, ...]:
        """Return the start for each spread that the job can have; call it after `expected`.

        By the same draws, so that of two spreads the sooner is sooner for no other reason.
        """
        found = []
        for i, (spread, how, _) in enumerate(self._spreads if self._target >= 0 else ()):
            place = self.ahead.first_variant + len(self._alternatives) + i
            if not np.isfinite(self._start(self.ahead.by_limits, place)):
                continue
            starts, nodes, _ = self._drawn(place, len(self._starts))
            if starts:
                low, median, high = quantiles(np.array(starts))
                found.append(SpreadStart(spread=spread, how=how, median=median, low=low, high=high, nodes=nodes))
        return tuple(found)

    def _drawn(self, target: int, most: int) -> tuple[list[float], tuple[str, ...], int]:
        """Return starts for so many draws, as far as work allows, the most frequent nodes, and how often these are."""
        places: Counter[tuple[str, ...]] = Counter()
        starts = []
        for i, times in enumerate(self._draws[:most]):
            start = self._start(times, target, seed=i)
            if self._cut:
                break  # the next would not come further
            starts.append(start)
            if np.isfinite(start):
                places[self.ahead.nodes_of(target)] += 1
        nodes, often = places.most_common(1)[0] if places else ((), 0)
        return starts, tuple(sorted(nodes)), often

    def _start(self, times: RunTimeDraw, target: int, until: float = np.inf, seed: int = 0) -> float:
        """Return when ``target`` starts; infinite if it does not, or the work allowed was used up (``_cut``)."""
        without = [self._target] if target != self._target and self._target >= 0 else []
        work = min(ENOUGH_WORK, max(self._left, 0))
        result = self.ahead.run(times, target=target, without=without, until=until, seed=seed, work=work)
        self._left -= result.work
        self._cut = not result.whole
        return float(result.start[target])

    def sooner(self) -> tuple[Sooner, ...]:
        """Return what would start it sooner: at once first, then what saves most; call it after `expected`."""
        now = self._snapshot.now
        if self._target >= 0 and _median(self._starts) <= now:
            return ()
        found: dict[str, Sooner] = {}
        for place, alternative in enumerate(self._alternatives, self.ahead.first_variant):
            if alternative.kind not in found and self._start(self.ahead.by_limits, place, until=now) <= now:
                nodes = tuple(sorted(self.ahead.nodes_of(place)))
                what, how = alternative.what, alternative.how
                found[alternative.kind] = Sooner(what=what, how=how, start=now, now=True, nodes=nodes)
        later: dict[str, int] = {}
        for i, alternative in enumerate(self._alternatives):
            if alternative.kind not in found:
                later.setdefault(alternative.kind, i)
        return (*found.values(), *self._endings(), *self._later(list(later.values())))

    def _endings(self) -> list[Sooner]:
        """Return the running job that alone would let it start when it ends, the one expected to end first."""
        if self._target < 0 or not self._draws:
            return []
        now, running, limits = self._snapshot.now, self._snapshot.running, self.ahead.by_limits
        expected = _median([times.ends for times in self._draws])
        order = np.argsort(expected, kind="stable").tolist()
        rows = [i for i in order if any(part.node in self._own_nodes for part in running[i].allocation.parts)]
        for i in rows[:_MOST_ENDINGS]:
            ends = limits.ends.copy()
            ends[i] = now
            if self._start(RunTimeDraw(limits.lasts, ends), self._target, until=now) <= now:
                nodes = tuple(sorted(self.ahead.nodes_of(self._target)))
                what = f"after job {running[i].id} of {running[i].user} ends"
                return [Sooner(what=what, start=float(expected[i]), nodes=nodes)]
        return []

    def _later(self, alternatives: list[int]) -> list[Sooner]:
        """Return the alternatives that start later than now but sooner than the job by the same draws."""
        jobs = len(self.ahead.views) + len(self._snapshot.running)
        runs = min(len(self._starts), max(1, 3000 // max(jobs, 1)))  # by the same draws, so one can do
        median = float(_median(self._starts[:runs])) if self._target >= 0 else np.inf
        found = []
        for i in alternatives[:_MOST_LATER]:
            if self._left <= 0:
                break
            place = self.ahead.first_variant + i
            starts = [self._start(t, place, until=median, seed=k) for k, t in enumerate(self._draws[:runs])]
            start = float(_median(starts))
            if start + max(_MIN_SAVED_S, _MIN_SAVED * (min(median, 1e18) - self._snapshot.now)) < median:
                found.append(Sooner(what=self._alternatives[i].what, how=self._alternatives[i].how, start=start))
        return sorted(found, key=lambda s: s.start)


def work_for(policy: PolicySpec | None) -> int:
    """Return the queue entries to examine for one answer; entries cost least if the head blocks, most by usage."""
    if policy is not None and policy.order == "fairshare":
        return _ENOUGH_WORK // 4
    return 3 * _ENOUGH_WORK if policy is not None and policy.backfill == "none" else _ENOUGH_WORK


def draws_for(ahead: QueueForecast) -> int:
    """Return the number of draws: enough for a range, few enough for an immediate answer."""
    if ahead.by_components:
        return _FEWEST_DRAWS
    jobs = len(ahead.views) + len(ahead.snapshot.running)
    return max(_FEWEST_DRAWS, min(_MOST_DRAWS, _RUNS_OF_ALL // max(jobs, 1)))


def draws_of(ahead: QueueForecast, run_times: RunTimeSampler, count: int) -> list[RunTimeDraw]:
    """Draw all run times; each variant of a job has its own draw.

    A running job that reports progress ends at its own pace, within about a tenth of what is left.
    """
    rng = np.random.default_rng(0)
    snapshot, running, waiting = ahead.snapshot, ahead.snapshot.running, len(ahead.views)
    latest = np.maximum(ahead.by_limits.ends, snapshot.now)
    own = np.array([np.nan if r.own_end is None else min(r.own_end, r.expected_end) for r in running], np.float64)
    reports = ~np.isnan(own)
    left = np.maximum(own[reports] - snapshot.now, 0.0)
    draws = []
    for drawn in run_times.draw(rng, snapshot, ahead.views, count):
        ends = np.minimum(snapshot.now + drawn[waiting:], latest)
        ends[reports] = np.minimum(snapshot.now + left * rng.lognormal(0.0, _PACE_SPREAD, len(left)), latest[reports])
        draws.append(RunTimeDraw(drawn[:waiting], ends))
    return draws


def quantiles(starts: Floats) -> tuple[float | None, float | None, float | None]:
    """Return the starts that 10 %, half and 90 % of the runs do not exceed; None if not within the runs."""
    ordered = np.sort(starts)
    places = [max(0, int(np.ceil(q * len(ordered))) - 1) for q in (LOW, 0.5, HIGH)]
    low, median, high = (_known(float(ordered[p])) for p in places)
    return low, median, high


def _median(draws: Sequence[Floats] | Sequence[float] | Floats) -> Floats:
    """Return the value, of those of all draws, that half of them do not exceed, as `quantiles` does."""
    median: Floats = np.sort(draws, axis=0)[(len(draws) - 1) // 2]
    return median


def _known(time: float) -> float | None:
    return time if np.isfinite(time) else None
