"""A partition's recorded jobs, made resizable, that share its GPUs slot by slot: where agents learn to choose sizes.

Arrivals, sizes and run times are recorded ones; how a job's speed goes with its GPUs is drawn, for no log tells: a
power of their number, up to a number from which no more of them help. The agent sees what it would see live: the pace
that a job told at the sizes it had, and a guess for others. Places are not looked at: the final table of a training
comes from replays, which do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.request import TrainJob
from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.model.units import count_of
from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, OTHERS, TOTAL, Claims, new_claims
from gpusched.sched.sizing.rules import DRF, wish
from gpusched.sched.sizing.settle import speed_at
from gpusched.sched.state import Floats, Ints
from gpusched.sim.engine.state import ARRIVED
from gpusched.sim.rounds import DECISIONS, NOW, SLOT_BY_SLOT, EngineRun, RoundProgress, give
from gpusched.traces.trace import Trace

_JOBS = (40, 100)  # of a workload
_LOADS = (0.5, 1.3)
_POWERS = (0.3, 1.0)
_CHOICE, _CHOSEN = 1 << 20, 8  # seeds by which weights are chosen
_LONGEST = 4000  # slots of a workload
_FEWEST = 40  # jobs
_SHORTEST_S, _SLOTS = 60.0, 10  # of a slot; slots of a job of median run time

Policy = Callable[[Claims, int], Ints]
"""From what jobs claim, and how many are yet to come, to the GPUs of each."""


@dataclass(frozen=True)
class Range:
    """What the ``train`` section of a policy's file says of jobs.

    Attributes:
        least, most: GPUs between which a job may be given powers of two.
        restart_s: What another size costs a job.
        slot_s: Seconds between decisions; 0: a tenth of the median run time.
    """

    least: int = 1
    most: int = 8
    restart_s: float = 30.0
    slot_s: float = 0.0


class ResizableWorkload(NamedTuple):
    """Jobs, by arrival.

    Attributes:
        gpus: Of the partition.
        submit: ``float64[jobs]``: in slots.
        work: ``float64[jobs]``: steps, of which it does one a slot with one GPU.
        base: ``int64[jobs]``: GPUs that it was submitted with.
        sizes: ``int64[most]``: that any of them may have. speed: ``float64[jobs, most]``: steps a slot at these.
    """

    gpus: int
    submit: Floats
    work: Floats
    base: Ints
    sizes: Ints
    speed: Floats


class WorkloadLog:
    """A log to draw workloads from.

    Args:
        trace: Jobs without GPUs, or with more than ``sizes``, are left out.
        gpus: Of the partition.
        sizes: GPUs that a job may have, ascending.
        slot_s: Seconds of a slot. restart_s: What another size costs.

    Attributes:
        restart: What another size costs, in slots.
    """

    def __init__(self, trace: Trace, gpus: int, sizes: Ints, slot_s: float, restart_s: float) -> None:
        fits = np.flatnonzero((trace.gpus > 0) & (trace.gpus <= sizes[-1]) & (trace.duration > 0))
        fits = fits[np.argsort(trace.submit[fits], kind="stable")]
        self._submit, self._base = trace.submit[fits], trace.gpus[fits].astype(np.int64)
        self._run = np.maximum(trace.duration[fits], 0.2 * slot_s)
        self._gpus, self._sizes, self._slot_s, self.restart = gpus, sizes, slot_s, restart_s / slot_s

    def __len__(self) -> int:
        """Jobs to learn from."""
        return len(self._submit)

    def draw(self, rng: np.random.Generator) -> ResizableWorkload:
        """Jobs that came one after another, so close together that the load is a drawn one."""
        count = min(int(rng.integers(*_JOBS)), len(self))
        first = int(rng.integers(0, len(self) - count + 1))
        part = slice(first, first + count)
        base = self._sizes[np.searchsorted(self._sizes, self._base[part])]
        run = self._run[part] / self._slot_s
        power = np.where(rng.random(count) < 0.25, 1.0, rng.uniform(*_POWERS, count))
        most = rng.choice(self._sizes, count)
        speed = np.minimum(self._sizes, np.maximum(most, base)[:, None]) ** power[:, None]
        work = run * speed[np.arange(count), np.searchsorted(self._sizes, base)]
        gaps = np.diff(self._submit[part], prepend=self._submit[part.start])
        gaps = np.where(gaps > 0, gaps, rng.exponential(max(float(gaps.mean()), 1e-3), count) * 0.1)
        wanted = float((run * base).sum()) / (self._gpus * rng.uniform(*_LOADS))
        return ResizableWorkload(self._gpus, np.cumsum(gaps * (wanted / gaps.sum())), work, base, self._sizes, speed)

    def choice(self) -> list[ResizableWorkload]:
        """Drawn with seeds of their own, to choose weights by."""
        return [self.draw(np.random.default_rng(_CHOICE + k)) for k in range(_CHOSEN)]


def log_of(job: TrainJob, given: Range) -> tuple[WorkloadLog, dict[str, str]]:
    """The log that a training learns from, and what its weights say about it.

    Raises:
        UsageError: The range is none, or too few jobs are within it.
    """
    if not (1 <= given.least <= given.most and given.slot_s >= 0 and given.restart_s >= 0):
        raise UsageError(f"train: {given} is not a range", "1 <= least <= most, no time below 0")
    sizes = np.array([1 << k for k in range(given.most.bit_length()) if given.least <= 1 << k <= given.most], np.int64)
    if not sizes.size:
        raise UsageError(f"train: no power of two is between {given.least} and {given.most} GPUs")
    trace = job.scenario.trace
    slot_s = given.slot_s or max(_SHORTEST_S, float(np.median(trace.duration)) / _SLOTS)
    log = WorkloadLog(trace, job.scenario.pool.total_gpus, sizes, slot_s, given.restart_s)
    if len(log) < _FEWEST:
        raise UsageError(
            f"{trace.name}: {count_of(len(log), 'job')} of at most {count_of(sizes[-1], 'GPU')}: too few to train on"
        )
    about = {"knows": "oracle", "slot_s": f"{slot_s:g}", "sizes": f"{sizes[0]}-{sizes[-1]}",
             "restart_s": f"{given.restart_s:g}"}  # fmt: skip
    return log, about


def by_drf(claims: Claims, coming: int = 0) -> Ints:
    """The policy that an agent is compared with while it learns."""
    wish(DRF, claims)
    chosen: Ints = claims.jobs["wished"][: claims.number[COUNT]].copy()
    return chosen


def run(one: ResizableWorkload, policy: Policy, restart: float) -> Floats:
    """Every job's end, ``float64[jobs]`` in slots."""
    of, (count, most) = EngineRun(one.submit, one.work, SLOT_BY_SLOT), one.speed.shape
    told, held, progress = np.zeros((count, most)), np.zeros(count, np.int64), of.progress
    while of.next_round() and progress.counts[DECISIONS] <= _LONGEST:
        there = of.there
        admitted = np.sort(there[np.argsort(held[there] == 0, kind="stable")][: one.gpus // int(one.sizes[0])])
        claims = new_claims(len(admitted), most)
        _claims(one, admitted, progress, told, held, restart, claims)
        chosen = policy(claims, count - int(of.sim.counter[ARRIVED]))
        _resize(one, admitted, chosen, progress, told, held, restart)
    return np.where(np.isnan(of.end), progress.time[NOW], of.end)


@jit
def _claims(
    one: ResizableWorkload, there: Ints, progress: RoundProgress, told: Floats, held: Ints, restart: float,
    claims: Claims
) -> None:  # fmt: skip
    most, running, slot = one.sizes.size, 0, progress.time[NOW]
    for i in range(there.size):
        j, job = there[i], claims.jobs[i]
        known = np.flatnonzero(told[j] > 0.0)
        for k in range(most):
            claims.sizes[i, k], claims.allowed[i, k] = one.sizes[k], 1
            claims.reported[i, k] = told[j, k] > 0.0
            claims.pace[i, k] = speed_at(one.sizes, told[j], known, one.sizes[k])
        now = np.searchsorted(one.sizes, held[j]) if held[j] > 0 else 0
        job["row"], job["held"], job["count"], job["base"] = i, held[j], most, one.base[j]
        job["restarts"], job["cost_s"], job["share"] = progress.restarts[j], restart, 1.0 / one.gpus
        job["age_s"] = slot - one.submit[j] if slot > one.submit[j] else 0.0
        # Before it told anything: what its length is at its own size, as a limit that is kept would say.
        work = one.work[j] - progress.done[j]
        true = one.speed[j, now] if known.size > 0 else one.speed[j, np.searchsorted(one.sizes, one.base[j])]
        scale = 1.0 if known.size > 0 else claims.pace[i, np.searchsorted(one.sizes, one.base[j])] / claims.pace[i, now]
        job["left_s"] = max(work / true * scale, 1e-6)
        running += held[j]
    claims.number[COUNT], claims.number[CAPACITY], claims.number[TOTAL] = there.size, one.gpus, one.gpus
    claims.number[FREE], claims.number[OTHERS] = one.gpus - running, 0


@jit
def _resize(
    one: ResizableWorkload, there: Ints, chosen: Ints, progress: RoundProgress, told: Floats, held: Ints, restart: float
) -> None:  # fmt: skip
    for i in range(there.size):
        j = there[i]
        k = np.searchsorted(one.sizes, chosen[i])
        if chosen[i] != held[j]:
            give(progress, j, one.speed[j, k], restart)
        held[j], told[j, k] = chosen[i], one.speed[j, k]
