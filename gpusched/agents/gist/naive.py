"""The paper's naive scheme: exactly, and played.

The paper says: "a Naive scheme that submits a job to a randomly selected GPU server if the server has enough resources
to run the job"; else the job goes back to the queue. It does not say when the queue is tried again. The reading here
comes nearest to the figures it is held to (0.622, 0.635, 0.584 with jobs at once, 1 h and 24 h apart; 467.0 h): what
comes is tried before what waits; after every start the queue is tried again from its front; then nothing until a job
ends or comes. It gives 0.622, 0.633, 0.584 and 467.3 h. The one pass per instant of ``place: naive``
(`gpusched.sched.place.draw`) gives 0.614, 0.635, 0.585 and 472.3 h.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from gpusched.agents.gist.setting import HOUR_S, Episodes, EpisodeSetting
from gpusched.sched.state import Ints

Running = tuple[tuple[float, int, int], ...]  # (end, server, job), sorted
Queue = tuple[int, ...]


class Exact(NamedTuple):
    """Means over all sequences and all draws: U, hours until f starts."""

    utilization: float
    hours: float


@cache
def exact(setting: EpisodeSetting, *, one_pass: bool = False) -> Exact:
    """The mean, by recursion over what the draws can give; servers are alike.

    ``one_pass``: the other reading: what waits goes before what comes, and is not tried again after a start.
    """
    found = [_Draws(setting, s, one_pass=one_pass).mean() for s in setting.sequences().tolist()]
    return Exact(*(float(np.mean(column)) for column in zip(*found, strict=True)))


@cache
def lowest(setting: EpisodeSetting) -> float:
    """The worst U of any sequence under the worst draws there can be."""
    return min(_Draws(setting, s, worst=True).mean()[0] for s in setting.sequences().tolist())


class _Draws:
    """One sequence."""

    def __init__(
        self, setting: EpisodeSetting, sequence: list[int], *, one_pass: bool = False,
        rng: np.random.Generator | None = None,
        worst: bool = False,
    ) -> None:  # fmt: skip
        """With ``rng`` one course of things is drawn, without it all are gone through: their mean, or the worst."""
        self.jobs = [(setting.kinds[k].gpus, setting.kinds[k].run_s / HOUR_S) for k in sequence]
        self.gap, self.size, self.servers = setting.gap_s / HOUR_S, setting.servers[0].gpus, len(setting.servers)
        self.one_pass, self.rng, self.worst = one_pass, rng, worst
        if rng is None:
            self.go = cache(self.go)  # type: ignore[method-assign]

    def mean(self) -> tuple[float, float]:
        """Mean U and hours, or those of the worst course."""
        return self.go(0.0, (), (), 0, 0)

    def go(self, now: float, running: Running, queue: Queue, come: int, at: int) -> tuple[float, float]:
        """Tries the queue from place ``at`` on, then goes to the next end or submission."""
        if at == len(queue):
            return self._on(running, queue, come, now)
        gpus, hours = self.jobs[queue[at]]
        drawn = range(self.servers) if self.rng is None else [int(self.rng.integers(self.servers))]
        found = []
        for server in drawn:
            if self.size - sum(self.jobs[j][0] for _, s, j in running if s == server) >= gpus:
                more = tuple(sorted((*running, (now + hours, server, queue[at]))))
                found.append(self.go(now, more, queue[:at] + queue[at + 1 :], come, at if self.one_pass else 0))
            else:
                found.append(self.go(now, running, queue, come, at + 1))
        if self.worst:
            return min(found)
        utilization, length = (np.sum(found, axis=0) / len(drawn)).tolist()
        return utilization, length

    def _on(self, running: Running, queue: Queue, come: int, now: float) -> tuple[float, float]:
        # With nothing running the first job tried would have started, so something is always to come here.
        if not running and come == len(self.jobs):
            work = sum(gpus * hours for gpus, hours in self.jobs)
            return work / (self.size * self.servers * now), now
        times = [end for end, _, _ in running] + ([come * self.gap] if come < len(self.jobs) else [])
        now = min(times)
        running = tuple(run for run in running if run[0] != now)
        new = tuple(j for j in range(come, len(self.jobs)) if j * self.gap <= now)
        queue = (*queue, *new) if self.one_pass else (*new, *queue)
        return self.go(now, running, queue, come + len(new), 0)


def play(setting: EpisodeSetting, sequences: Ints, seed: int) -> Episodes:
    """Episodes under the naive scheme, in order."""
    rng = np.random.default_rng([seed, 2])
    found = [_Draws(setting, s, rng=rng).mean() for s in sequences.tolist()]
    return Episodes(*(np.array(column) for column in zip(*found, strict=True)))
