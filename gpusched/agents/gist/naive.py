"""GIST's naive scheme in the paper's setting (`setting`): exact means over all random draws, and sampled episodes.

The paper says: "a Naive scheme that submits a job to a randomly selected GPU server if the server has enough resources
to run the job"; else the job returns to the queue. It does not say when the queue is tried again. This reading comes
nearest to the published figures (0.622, 0.635, 0.584 with jobs at once, 1 h and 24 h apart; 467.0 h): new jobs are
tried before waiting ones; after every start the queue is tried again from its front; then nothing happens until a job
ends or is submitted. It gives 0.622, 0.633, 0.584 and 467.3 h. ``place: naive`` (`gpusched.sched.place.draw`), with one
pass per instant, gives 0.614, 0.635, 0.585 and 472.3 h.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from gpusched.agents.gist.setting import HOUR_S, Episodes, EpisodeSetting
from gpusched.sched.state import Ints

# States are tuples, so that they can be cached. Times are hours since the first submission; a job is its number in the
# order of submission, counted from 0; a server is its index.
Running = tuple[tuple[float, int, int], ...]
"""(end, server, job) of each running job, sorted, so that equal states are equal tuples."""
Queue = tuple[int, ...]
"""Jobs that wait, the first to be tried first."""


class Exact(NamedTuple):
    """Means over all sequences of jobs and all draws: utilization U, and hours until the last job, f, starts."""

    utilization: float
    hours: float


@cache
def exact(setting: EpisodeSetting, *, one_pass: bool = False) -> Exact:
    """Return the means, by recursion over all possible draws; servers must be identical.

    ``one_pass``: by the other reading, in which waiting jobs go before new ones, and jobs that were tried before a
    start are not tried again after it.
    """
    results = [_DrawTree(setting, s, one_pass=one_pass).mean() for s in setting.sequences().tolist()]
    return Exact(*(float(np.mean(column)) for column in zip(*results, strict=True)))


@cache
def lowest(setting: EpisodeSetting) -> float:
    """Return the lowest U of any sequence under the worst possible draws."""
    return min(_DrawTree(setting, s, worst=True).mean()[0] for s in setting.sequences().tolist())


class _DrawTree:
    """The tree of draws of one sequence: at each node the server drawn for the next job that is tried."""

    def __init__(
        self, setting: EpisodeSetting, sequence: list[int], *, one_pass: bool = False,
        rng: np.random.Generator | None = None,
        worst: bool = False,
    ) -> None:  # fmt: skip
        """Sample one run with ``rng``; without it, enumerate all runs for their mean, or for the worst."""
        # (GPUs, run time in hours) by job; hours between submissions; GPUs of one server; servers
        self.jobs = [(setting.kinds[k].gpus, setting.kinds[k].run_s / HOUR_S) for k in sequence]
        self.gap, self.gpus, self.servers = setting.gap_s / HOUR_S, setting.servers[0].gpus, len(setting.servers)
        self.one_pass, self.rng, self.worst = one_pass, rng, worst
        if rng is None:  # many draws lead to the same state; a sampled run must not be cached
            self.try_queue = cache(self.try_queue)  # type: ignore[method-assign]

    def mean(self) -> tuple[float, float]:
        """Return mean U and hours: over all runs; or of the sampled run; or of the worst, that with the lowest U."""
        return self.try_queue(0.0, (), (), 0, 0)

    def try_queue(self, now: float, running: Running, queue: Queue, submitted: int, at: int) -> tuple[float, float]:
        """Try the queue from position ``at``, then advance to the next end or submission; return as `mean`.

        ``submitted``: how many jobs have been submitted.
        """
        if at == len(queue):
            return self._advance(running, queue, submitted, now)
        gpus, hours = self.jobs[queue[at]]
        # All servers, equally likely; or the one that is drawn.
        drawn = range(self.servers) if self.rng is None else [int(self.rng.integers(self.servers))]
        results = []
        for server in drawn:
            if self.gpus - sum(self.jobs[j][0] for _, s, j in running if s == server) >= gpus:
                more = tuple(sorted((*running, (now + hours, server, queue[at]))))
                rest = queue[:at] + queue[at + 1 :]
                results.append(self.try_queue(now, more, rest, submitted, at if self.one_pass else 0))
            else:
                results.append(self.try_queue(now, running, queue, submitted, at + 1))
        if self.worst:
            return min(results)
        utilization, until_f = (np.sum(results, axis=0) / len(drawn)).tolist()
        return utilization, until_f

    def _advance(self, running: Running, queue: Queue, submitted: int, now: float) -> tuple[float, float]:
        """Advance to the next end or submission, and try the queue again; at the end return U and hours."""
        # Nothing waits while nothing runs: any job fits an empty server. So with no job to come either, f starts now.
        if not running and submitted == len(self.jobs):
            work = sum(gpus * hours for gpus, hours in self.jobs)
            return work / (self.gpus * self.servers * now), now
        times = [end for end, _, _ in running] + ([submitted * self.gap] if submitted < len(self.jobs) else [])
        now = min(times)
        running = tuple(run for run in running if run[0] != now)
        new = tuple(j for j in range(submitted, len(self.jobs)) if j * self.gap <= now)
        queue = (*queue, *new) if self.one_pass else (*new, *queue)
        return self.try_queue(now, running, queue, submitted + len(new), 0)


def simulate(setting: EpisodeSetting, sequences: Ints, seed: int) -> Episodes:
    """Sample one episode for each sequence, ``int64[episodes, jobs]``, in order."""
    rng = np.random.default_rng([seed, 2])
    results = [_DrawTree(setting, s, rng=rng).mean() for s in sequences.tolist()]
    return Episodes(*(np.array(column) for column in zip(*results, strict=True)))
