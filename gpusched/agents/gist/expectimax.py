"""Exact optima in the paper's setting, without training or sampling.

`best_online`: the best policy that knows the jobs submitted so far and that kinds are equally likely, by expectimax:
the best action at a decision, the mean over the kinds at a submission. `clairvoyant`: the best schedule, of those that
delay no job, of each sequence known in advance, by enumeration. `never_waits` is best_online among policies that start
a job whenever it fits, as the published reward demands (-1 for queueing a job that fits).

In hours and whole GPUs: the flavors of Table 2 request cores and memory in proportion to GPUs, so only GPUs bind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from gpusched.agents.gist.setting import HOUR_S, EpisodeSetting

Server = tuple[tuple[float, int], ...]  # (end, kind) of its running jobs, sorted
Servers = tuple[Server, ...]  # sorted: servers are identical
Kinds = tuple[int, ...]


class _Expectimax:
    """Expectimax over one setting."""

    def __init__(self, setting: EpisodeSetting, may_wait: bool, worst: bool = False) -> None:
        self.gpus = [k.gpus for k in setting.kinds]
        self.hours = [k.run_s / HOUR_S for k in setting.kinds]
        self.size = setting.servers[0].gpus
        self.total = sum(s.gpus for s in setting.servers)
        self.servers, self.jobs, self.gap = len(setting.servers), setting.jobs, setting.gap_s / HOUR_S
        self.may_wait, self.pick = may_wait, min if worst else max
        self.choose, self.advance = cache(self.choose), cache(self.advance)  # type: ignore[method-assign]

    def value(self) -> float:
        """Return mean U under the best policy."""
        return self.advance(0.0, ((),) * self.servers, (), ())

    def choose(self, now: float, servers: Servers, waiting: Kinds, at: int, submitted: Kinds) -> float:
        """Return the best U over choices for the waiting jobs from position ``at``; each job is decided once."""
        if at == len(waiting):
            return self.advance(now, servers, waiting, submitted)
        kind = waiting[at]
        options = []
        for i in range(self.servers):
            free = self.size - sum(self.gpus[k] for _, k in servers[i])
            if free < self.gpus[kind] or servers[i] in servers[:i]:
                continue
            fuller = tuple(sorted((*servers[i], (now + self.hours[kind], kind))))
            after = tuple(sorted((*servers[:i], fuller, *servers[i + 1 :])))
            options.append(self.choose(now, after, waiting[:at] + waiting[at + 1 :], at, submitted))
        if self.may_wait or not options:
            options.append(self.choose(now, servers, waiting, at + 1, submitted))
        return self.pick(options)

    def advance(self, now: float, servers: Servers, waiting: Kinds, submitted: Kinds) -> float:
        """Advance to the next end or submission; ``submitted``: kinds submitted so far, sorted."""
        times = [end for server in servers for end, _ in server]
        if len(submitted) < self.jobs:
            times.append(len(submitted) * self.gap)
        if not times:
            work = sum(self.gpus[k] * self.hours[k] for k in submitted)
            return -1.0 if waiting else work / (self.total * now)  # jobs waiting for ever: not a valid policy
        now = min(times)
        servers = tuple(sorted(tuple(run for run in server if run[0] != now) for server in servers))
        if len(submitted) == self.jobs or len(submitted) * self.gap > now:
            return self.choose(now, servers, waiting, 0, submitted)
        count = self.jobs if self.gap == 0 else 1
        total, draws = 0.0, list(itertools.product(range(len(self.gpus)), repeat=count))
        for drawn in draws:
            queue = tuple(sorted((*waiting, *drawn), reverse=True))  # largest first
            total += self.choose(now, servers, queue, 0, tuple(sorted((*submitted, *drawn))))
        return total / len(draws)


@cache
def best_online(setting: EpisodeSetting) -> float:
    """Return mean U of the best online policy, which may keep a job waiting although it fits."""
    return _Expectimax(setting, may_wait=True).value()


@cache
def never_waits(setting: EpisodeSetting) -> float:
    """Return mean U of the best online policy that starts every job that fits."""
    return _Expectimax(setting, may_wait=False).value()


@cache
def never_waits_at_worst(setting: EpisodeSetting) -> float:
    """Return mean U of starting every job that fits, largest first, on the worst server: a bound for such policies."""
    return _Expectimax(setting, may_wait=False, worst=True).value()


def clairvoyant(setting: EpisodeSetting, since: str = "start") -> float:
    """Return the mean over sequences of the best U: every placement order, every server, each job as early as it fits.

    Time counts ``since`` the first ``submission`` (the text above Eq. 3), by which this is the optimum; or the first
    ``start`` (Eq. 3 as printed), by which it is not: a schedule could delay all jobs until the last is submitted, and
    have the U of jobs submitted at once.
    """
    return _best_of_all(setting)[since != "start"]


@cache
def _best_of_all(setting: EpisodeSetting) -> tuple[float, float]:
    """Return the means of `_best` over sequences."""
    found = [_best(setting, sequence) for sequence in setting.sequences().tolist()]
    since_start, since_submission = zip(*found, strict=True)
    return sum(since_start) / len(found), sum(since_submission) / len(found)


def _best(setting: EpisodeSetting, sequence: Sequence[int]) -> tuple[float, float]:
    """Return the best U since the first start, and since the first submission."""
    total = sum(s.gpus for s in setting.servers)
    jobs = [(setting.kinds[k].gpus, setting.kinds[k].run_s / HOUR_S) for k in sequence]
    work = sum(gpus * hours for gpus, hours in jobs) / total
    taken: list[list[tuple[float, float, int]]] = [[] for _ in setting.servers]
    shortest = [float("inf")] * 2

    def place(left: tuple[int, ...], first: float, last: float) -> None:
        if not left:
            shortest[:] = min(shortest[0], last - first), min(shortest[1], last)
        for job in left:
            gpus, hours = jobs[job]
            # Servers are identical: that the first placed is on the first one leaves nothing out.
            for server in taken if len(left) < len(jobs) else taken[:1]:
                begin = _earliest(server, gpus, hours, job * setting.gap_s / HOUR_S, setting.servers[0].gpus)
                server.append((begin, begin + hours, gpus))
                place(tuple(one for one in left if one != job), min(first, begin), max(last, begin + hours))
                server.pop()

    place(tuple(range(len(jobs))), float("inf"), 0.0)
    return work / shortest[0], work / shortest[1]


def _earliest(taken: list[tuple[float, float, int]], gpus: int, hours: float, from_h: float, size: int) -> float:
    """Return the first time from which the job fits for all its hours; it may use a gap."""
    for time in sorted({from_h, *(end for _, end, _ in taken if end > from_h)}):
        steps = [time, *(begin for begin, _, _ in taken if time < begin < time + hours)]
        if all(sum(g for b, e, g in taken if b <= step < e) + gpus <= size for step in steps):
            return time
    raise AssertionError("unreachable: after the last end everything fits")
