"""A store as a site would have it after some days of resizable jobs: a replay by one policy, written down as lived."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from gpusched.model.jobs import Elastic, JobRecord, JobSpec, JobState, Resizes
from gpusched.model.progress import JobProgress
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.sim.resizing import elastic_of
from gpusched.traces.trace import ProgressRecords, Trace
from tests.sim.worlds import trace_of

SIZES = (1, 2, 4, 8)
DAY = 86400.0


def drawn(jobs: int, gpus: int, seed: int, days: float) -> Trace:
    """Jobs of all kinds of speed, each of which reports its progress; every sixth is rigid."""
    rng = np.random.default_rng(seed)
    submit = np.sort(rng.uniform(0, days * DAY, jobs))
    power, most, base = rng.choice([0.2, 0.6, 1.0], jobs), rng.choice(SIZES, jobs), rng.choice(SIZES[:3], jobs)
    rigid = np.arange(jobs) % 6 == 5
    speeds = np.minimum(np.array(SIZES), most[:, None]) ** power[:, None] + np.arange(4) * 1e-3
    lasts = rng.lognormal(0, 1, jobs)
    lasts *= days * DAY * gpus * 0.7 / (lasts * base).sum()
    trace = trace_of(submit.tolist(), lasts.tolist(), base.tolist(), limit=(lasts * 30).tolist())
    sizes = [(base[j],) if rigid[j] else SIZES for j in range(jobs)]
    size_job = np.repeat(np.arange(jobs), [len(s) for s in sizes])
    size_gpus = np.array([g for s in sizes for g in s])
    none = np.zeros(0)
    return replace(
        trace,
        progress=ProgressRecords(
            steps=np.ones(jobs), cost_s=np.full(jobs, np.nan), cooldown_s=np.zeros(jobs), size_job=size_job,
            size_gpus=size_gpus, steps_per_s=speeds[size_job, np.searchsorted(SIZES, size_gpus)],
            run_job=none.astype(np.int64), run_gpus=none.astype(np.int64), run_after_s=none, run_s=none,
        ),
    )  # fmt: skip


def lived(
    folder: Path, policy: str, *, jobs: int = 200, gpus: int = 16, seed: int = 0, days: float = 6.0,
    start: float = 1.75e9, restart_s: float = 20.0, partition: str = "p",
) -> None:  # fmt: skip
    """Write the store of a site that ran such jobs under a policy from ``start`` (Unix seconds) on."""
    trace = drawn(jobs, gpus, seed, days)
    assert trace.progress is not None
    done = replay(
        trace, Pool.uniform(gpus // 8, 8), policy_by_name(policy), restart_s=restart_s, elastic=elastic_of(trace)
    )
    attempts: dict[int, list[tuple[float, float, int]]] = {j: [] for j in range(jobs)}
    cut = done.cut
    for i, job in enumerate(cut.job.tolist()):
        part = slice(cut.part_offsets[i], cut.part_offsets[i + 1])
        assert cut.part_gpus is not None
        attempts[job].append((float(cut.start[i]), float(cut.end[i]), int(cut.part_gpus[part].sum())))
    for job in range(jobs):
        part = slice(done.part_offsets[job], done.part_offsets[job + 1])
        begin = max((end for _, end, _ in attempts[job]), default=float(done.start[job]))
        attempts[job].append((begin, float(done.end[job]), int(done.part_gpus[part].sum())))
    with_store(folder, trace, {j: sorted(a) for j, a in attempts.items()}, policy, start, restart_s, partition)


def with_store(
    folder: Path, trace: Trace, attempts: dict[int, list[tuple[float, float, int]]], policy: str, start: float,
    restart_s: float, partition: str,
) -> None:  # fmt: skip
    store = Store.create_or_open(folder)
    with store.transaction():
        for job, tried in attempts.items():
            name, speeds = f"{job:04}", (trace.progress.sizes(job) if trace.progress else {})
            step, base = 0.0, int(trace.gpus[job])
            sizes = Elastic(sizes=SIZES, base_gpus=base, base_cores=base, base_memory_mib=base)
            for n, (begin, end, gpus) in enumerate(tried, 1):
                last = n == len(tried)
                store.open_run(
                    RunRecord(job_id=name, attempt=n, user="ann", partition=partition, flavor=None, share=0.1,
                        gpus=gpus, start_time=start + begin, end_time=None, outcome=None, nodes={"n1": gpus})
                )  # fmt: skip
                outcome = JobState.COMPLETED if last else JobState.PENDING
                store.close_run(name, n, start + end, outcome, None if last else start + end)
                works = begin + (restart_s if n > 1 else 0.0)
                progress = JobProgress(job_id=name, attempt=n, gpus=gpus).with_step(step, 1e9, None, start + works)
                if end - works > 1e-3:
                    step += speeds[gpus] * (end - works)
                    progress = progress.with_step(step, 1e9, None, start + end)
                store.put_progress([progress])
            spec = JobSpec(
                name=f"kind{job % 5}", partition=partition, gpus_per_node=tried[-1][2], cores_per_node=1,
                memory_mib_per_node=1, time_limit_s=int(trace.limit[job]),
                elastic=sizes if len(speeds) > 1 else None,
            )  # fmt: skip
            stops = len(tried) - 1
            record = JobRecord(
                id=name, user="ann", uid=0, spec=spec, state=JobState.COMPLETED, policy=policy,
                submit_time=start + float(trace.submit[job]), start_time=start + tried[-1][0],
                end_time=start + tried[-1][1],
            )  # fmt: skip
            if stops:
                cost = Resizes(count=stops, costs_s=restart_s * stops, measured=stops)
                record = msgspec.structs.replace(record, resizes=cost)
            store.put_jobs([record])
    store.close()
