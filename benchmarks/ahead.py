"""Time to answer ``gpusched why JOB`` with its forecast: 1,000 waiting jobs on 150 nodes, under each policy.

Inside: CPU time after start-up (one thread: elapsed time on an idle machine), store and snapshot included.

`.venv/bin/python -m benchmarks.ahead [--jobs 1000] [--nodes 150] [--repeat 5] [--limits]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.decide import LIMITS_S, SIZES
from gpusched.client.context import Client
from gpusched.client.why import why
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.queue.store import NodeRecord, RunRecord, Store

GPUS, CORES, MEMORY_MIB, USERS = 8, 128, 1 << 20, 50
LEAST_GPUS = 10  # of the group with the smallest limit; the others have as many times more


def limits() -> str:
    """Ten groups of the users below two others, all with limits, and limits of each user."""
    lines = ["groups:", *(f"  d{i}: {{limits: {{gpus: 3000}}}}" for i in range(2))]
    for i in range(10):
        members = ", ".join(f"u{u}" for u in range(i, USERS, 10))
        own = f"{{gpus: {LEAST_GPUS * (i + 1)}, jobs: 900, gpu_hours: 50000}}"
        lines.append(f"  g{i}: {{parent: d{i % 2}, members: [{members}], limits: {own}}}")
    return "\n".join([*lines, "limits: {each_user: {gpus: 64, jobs: 40, gpu_hours: 8000}}", ""])


def inventory(folder: Path, nodes: int, policy: str, limited: bool = False) -> None:
    text = f"""\
settings: {{tick: 5s}}
defaults: {{runtime: process, gpus: {GPUS}, cores: {CORES}, memory: 1024G}}
partitions:
  p: {{policy: {policy}, nodes: ["n[0001-{nodes:04}]"], flavors: {{x: {{gpus: 8, cores: 64, memory: 1T, time: 72h}}}}}}
  q: {{policy: {policy}, nodes: [m1], flavors: {{x: {{gpus: 8, cores: 64, memory: 512G, time: 72h}}}}}}
"""
    (folder / "inventory.yaml").write_text(text + (limits() if limited else ""))


def spec_of(rng: random.Random) -> JobSpec:
    count, gpus, _ = rng.choices(SIZES, [w for *_, w in SIZES])[0]
    return JobSpec(
        name="j", partition="p", nodes=count, gpus_per_node=gpus, cores_per_node=gpus * rng.choice([2, 4, 8, 12]),
        memory_mib_per_node=gpus * rng.choice([8192, 16384, 65536]), time_limit_s=rng.choice(LIMITS_S), command=("x",),
    )  # fmt: skip


def fill(state: Path, nodes: int, jobs: int, past: int, now: float) -> list[str]:
    """Create a store with a full cluster, a long queue and a history; return the waiting jobs' ids."""
    rng = random.Random(1)
    store = Store.create_or_open(state)
    names = [f"n{i:04}" for i in range(1, nodes + 1)]
    with store.transaction():
        for name in (*names, "m1"):
            gpus = tuple(Gpu(index=i, uuid=f"{name}-{i}") for i in range(GPUS))
            reading = NodeReading(node=name, time=now, source="nvml", gpus=gpus, containers=())
            store.put_nodes([NodeRecord(name=name, state=NodeState.MIXED, last_seen=now, reading=reading)])
        number = 0
        for name in names:
            at = 0
            while at < GPUS and rng.random() < 0.97:
                number, gpus = number + 1, min(rng.choice([1, 1, 2, 4, 8]), GPUS - at)
                part = NodeAllocation(
                    rank=0, node=name, gpus=tuple(range(at, at + gpus)), cores=8 * gpus, memory_mib=1024 * gpus
                )
                _put(store, rng, f"r{number:010}", JobState.RUNNING, now - rng.random() * 36e3, 72 * 3600, part)
                at += gpus
        waiting = [f"w{i:010}" for i in range(jobs)]
        for job_id in waiting:
            store.put_jobs([_job(rng, job_id, JobState.PENDING, spec_of(rng), now - rng.random() * 1e5)])
        for i in range(past):
            job = _job(rng, f"p{i:010}", JobState.COMPLETED, spec_of(rng), now - 1e6)
            start, end = now - 9e5, now - 9e5 + rng.betavariate(0.6, 1.6) * job.spec.time_limit_s
            store.put_jobs([msgspec.structs.replace(job, start_time=start, end_time=end)])
            _run(store, job, start)
            store.close_run(job.id, 1, end, JobState.COMPLETED)
        store.set_meta("heartbeat", str(now))
    store.close()
    return waiting


def _job(rng: random.Random, job_id: str, state: JobState, spec: JobSpec, submit: float) -> JobRecord:
    user = f"u{rng.randrange(USERS)}"
    return JobRecord(id=job_id, user=user, uid=1, spec=spec, state=state, submit_time=submit)


def _put(
    store: Store, rng: random.Random, job_id: str, state: JobState, start: float, limit: int, part: NodeAllocation
) -> None:
    spec = JobSpec(
        name="r", partition="p", gpus_per_node=len(part.gpus), cores_per_node=part.cores,
        memory_mib_per_node=part.memory_mib, time_limit_s=limit,
    )  # fmt: skip
    job = _job(rng, job_id, state, spec, start)
    job = JobRecord(
        id=job.id, user=job.user, uid=1, spec=spec, state=state, submit_time=start, start_time=start, attempt=1,
        allocation=Allocation(job_id, (part,)),
    )  # fmt: skip
    store.put_jobs([job])
    _run(store, job, start)


def _run(store: Store, job: JobRecord, start: float) -> None:
    store.open_run(
        RunRecord(job_id=job.id, attempt=1, user=job.user, partition="p", flavor=None, share=0.01, gpus=job.spec.gpus,
            start_time=start, end_time=None, outcome=None, nodes={"n0001": 1})
    )  # fmt: skip


def timed(repeat: int, call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(repeat):
        begin = clock()
        call()
        times.append(clock() - begin)
    return statistics.median(times)


def process_s(job_id: str, env: dict[str, str], repeat: int) -> float:
    words = [str(Path(sys.executable).parent / "gpusched"), "why", "--json", job_id]
    return timed(repeat, lambda: subprocess.run(words, env=env, check=True, capture_output=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=150)
    parser.add_argument("--past", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limits", action="store_true", help="limits of users and groups")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"GPUSCHED_STATE": str(folder), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
        inventory(folder, args.nodes, "easy", args.limits)
        waiting = fill(folder, args.nodes, args.jobs, args.past, time.time())
        print(f"{args.jobs} waiting jobs, {args.nodes} nodes, {args.past} past runs; median seconds of {args.repeat}")
        print(f"{'policy':11}{'job':>14}{'runs':>6}{'why, inside':>13}{'whole command':>15}{'expected in':>14}")
        for policy in ("fifo", "fifo-skip", "sjf", "ljf", "spread", "easy", "fairshare"):
            inventory(folder, args.nodes, policy, args.limits)
            for what, job_id in jobs_of(waiting):
                found = why(Client(), job_id)
                assert found.expected is not None
                inside = timed(args.repeat, lambda j=job_id: why(Client(), j), time.process_time)  # type: ignore[misc]
                whole = process_s(job_id, dict(os.environ), max(1, args.repeat // 2))
                hours = (found.expected.median or float("nan")) - found.now
                row = f"{policy:11}{what:>14}{found.expected.runs:6}{inside:13.3f}{whole:15.2f}{hours / 3600:12.1f} h"
                print(row, flush=True)


def jobs_of(waiting: list[str]) -> list[tuple[str, str]]:
    """Return the job that is last to start under most policies, and one in the middle of the queue."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "gpusched"), "status", "--json"], check=True, capture_output=True
    )
    jobs = [j for j in json.loads(done.stdout) if j["state"] == "PENDING"]
    newest = max(jobs, key=lambda j: (j["gpus"] >= 64, j["submit_time"]))
    return [("last, 64+ GPUs", newest["id"]), ("in the middle", waiting[len(waiting) // 2])]


if __name__ == "__main__":
    main()
