"""Jobs that may be resized: traces, their sizes, agents that choose them; replays that are to be equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import TrainedModel
from gpusched.sched.sizing.question import Question
from gpusched.sim.engine.build import Outage, ResizableJobs
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.traces.trace import ProgressRecords, Trace
from tests.sim.worlds import trace_of


def mixed(seed: int, jobs: int = 60) -> Trace:
    """Jobs of all sizes, some after others, some at one instant; cores and memory bind."""
    rng = np.random.default_rng(seed)
    sizes, lasts = rng.choice([1, 2, 4, 6, 16], jobs), np.round(rng.lognormal(6, 1, jobs), 1)
    submit = np.sort(np.round(rng.uniform(0, 40 * jobs, jobs), -1))
    after = np.where(rng.random(jobs) < 0.1, np.arange(jobs) - 1, -1)
    return trace_of(
        submit, lasts, sizes, limit=np.ceil(lasts * 3), cores=sizes * rng.choice([2, 6], jobs), memory=sizes * 1000,
        depends_on=after,
    )  # fmt: skip


POOL = Pool.of(
    [NodeSpec(8, 64, 1 << 16, "A", "p"), NodeSpec(8, 40, 1 << 15, "A", "p"), NodeSpec(4, 32, 1 << 15, "A", "p")]
)
SMALL_NODES = Pool.of([NodeSpec(4, 32, 1 << 15, "A", "p")] * 5 + [NodeSpec(2, 8, 1 << 13, "A", "p")])
AWAY = (Outage(1, 500.0, 900.0), Outage(0, 1000.0, 1400.0, drain=True))


def some_sizes(trace: Trace, seed: int) -> ResizableJobs:
    """A quarter of the jobs are rigid."""
    rigid = np.random.default_rng(seed).random(len(trace)) < 0.25
    least, most = np.where(trace.gpus == 6, 2, 1), np.maximum(trace.gpus, 8)
    return ResizableJobs(least=np.where(rigid, trace.gpus, least), most=np.where(rigid, trace.gpus, most), linear=True)


def assert_same(fast: Any, slow: Any) -> None:
    assert fast.events.time.tolist() == slow.events.time.tolist()
    assert fast.events.kind.tolist() == slow.events.kind.tolist()
    assert fast.events.subject.tolist() == slow.events.subject.tolist()
    for name in ("start", "end", "restarts", "part_nodes", "part_gpus"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), name)
    for name in ("job", "start", "end", "part_nodes", "part_gpus"):
        np.testing.assert_array_equal(getattr(fast.cut, name), getattr(slow.cut, name), name)


SPECS = {name: load_policy(BUILT_IN / f"{name}.yaml") for name in ("elastic", "drf", "optimus", "proportional", "sia")}


class Moody:
    """An agent: sizes by the jobs' names and reports; now and then it cannot choose, or wishes too much."""

    @staticmethod
    def prepare(model: TrainedModel) -> Any:
        return model.arrays["mood"]

    @staticmethod
    def choose_sizes(prepared: Any, question: Question) -> Any:
        if question.others == 2:
            raise ValueError("a score of its network is no number")
        claims = question.claims
        mood = int(prepared[0]) + sum(len(name) for name in question.names) + int(claims.reported.sum())
        sizes = [int(row[allowed != 0][0]) for row, allowed in zip(claims.sizes, claims.allowed, strict=True)]
        for j in range(mood % len(sizes), len(sizes)):
            more = int(claims.sizes[j][claims.allowed[j] != 0][-1])
            left = question.capacity - sum(sizes) + sizes[j]
            sizes[j] = more if more <= left or mood % 11 == 0 else sizes[j]
            if mood % 5 == 0 and claims.jobs["held"][j] == 0 and question.free < question.total // 2:
                sizes[j] = 0
        return np.array(sizes)


def with_progress(trace: Trace, seed: int) -> Trace:
    """Add progress as own history has it: sizes of each job, speed at some, cost of a stop, cool-down."""
    rng, jobs = np.random.default_rng(seed), len(trace)
    sizes = [(int(own),) if rng.random() < 0.3 else tuple(sorted({int(own), 1, 3, 8})) for own in trace.gpus]
    reports = rng.random(jobs) < 0.7
    return replace(
        trace,
        progress=ProgressRecords(
            steps=np.where(reports, 100.0, np.nan),
            cost_s=np.where(rng.random(jobs) < 0.5, rng.integers(5, 60, jobs), np.nan),
            cooldown_s=rng.choice([0.0, 100.0], jobs),
            size_job=np.array([job for job, own in enumerate(sizes) for _ in own]),
            size_gpus=np.array([gpus for own in sizes for gpus in own]),
            steps_per_s=np.array([
                gpus ** rng.uniform(0.3, 1.0) if reports[job] and rng.random() < 0.6 else np.nan
                for job, own in enumerate(sizes) for gpus in own
            ]),
            run_job=np.zeros(0, np.int64), run_gpus=np.zeros(0, np.int64), run_after_s=np.zeros(0), run_s=np.zeros(0),
        ),
    )  # fmt: skip


def with_ranks(trace: Trace, seed: int, counts: tuple[int, ...] = (1, 2, 3)) -> Trace:
    """The same with hot jobs: many of those with one or two GPUs, in ranks of one or two."""
    trace = with_progress(trace, seed)
    assert trace.progress is not None
    rng, known = np.random.default_rng(seed), trace.progress
    ranks = np.where((trace.gpus <= 2) & (rng.random(len(trace)) < 0.7), trace.gpus, 0)
    ranks = np.where(rng.random(len(trace)) < 0.5, np.minimum(ranks, 1), ranks)
    each = [{n * int(rank) for n in counts} if rank else known.sizes(job) for job, rank in enumerate(ranks)]
    sizes = [tuple(sorted({int(gpus), *found})) for gpus, found in zip(trace.gpus, each, strict=True)]
    known = replace(
        known, rank_gpus=ranks,
        size_job=np.array([job for job, found in enumerate(sizes) for _ in found]),
        size_gpus=np.array([gpus for found in sizes for gpus in found]),
        steps_per_s=np.array([gpus ** rng.uniform(0.3, 1.0) for found in sizes for gpus in found]),
    )  # fmt: skip
    return replace(trace, progress=known, nodes=np.where(ranks > 0, trace.gpus // np.maximum(ranks, 1), 0))


FAILING = (
    *(Outage(n % 6, 300.0 * n, 300.0 * n + 400.0, drain=n % 5 == 0) for n in range(1, 14)),
    *(Outage(n, 1500.0, 1600.0) for n in (2, 3, 4)),
)


class Thrifty(Moody):
    """An agent that also limits cores and memory, of some jobs."""

    @classmethod
    def choose_sizes(cls, prepared: Any, question: Question) -> Any:
        sizes = super().choose_sizes(prepared, question)
        by = np.arange(len(sizes)) % 3
        return np.column_stack((sizes, np.where(by > 0, 3 * sizes, 0), np.where(by > 1, 1500 * sizes, 0)))


def with_ranges(trace: Trace, seed: int) -> ResizableJobs:
    return replace(some_sizes(trace, seed), cores=(2, 40), memory_mib=(500, 24_000))


def few_sizes(trace: Trace, seed: int) -> ResizableJobs:
    """Half of the jobs are rigid."""
    rigid = np.random.default_rng(seed).random(len(trace)) < 0.5
    return ResizableJobs(least=np.where(rigid, trace.gpus, 1), most=np.where(rigid, trace.gpus, 8), linear=True)
