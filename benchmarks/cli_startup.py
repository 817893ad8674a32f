"""Wall time of ``status --json`` and ``submit`` with 100,000 finished jobs in the store, against a bare typer + rich.

    .venv/bin/python benchmarks/cli_startup.py [--jobs 100000] [--rounds 30] [--waiting]

``--waiting``: these jobs of 100 users wait; ``status --json``, which then lists them all, is left out.

Prints medians and ratios; the goal is a ratio of at most 2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpusched.model import ids
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store

INVENTORY = Path(__file__).resolve().parent.parent / "inventory.yaml"
BASELINE = [sys.executable, "-c", "import typer, rich.table"]
GPUSCHED = str(Path(sys.executable).parent / "gpusched")


def finished_job(number: int, end: float) -> JobRecord:
    job_id = ids.mint(end - 3600 - number)
    spec = JobSpec(
        name=f"train-{number}", partition="A100", flavor="s-A100", gpus_per_node=2, cores_per_node=64,
        memory_mib_per_node=262144, time_limit_s=86400, image="docker.io/library/python:3.12",
        command=("python", "train.py", f"--seed={number}"),
    )  # fmt: skip
    part = NodeAllocation(rank=0, node="dgx-a100-1", gpus=(0, 1), cores=64, memory_mib=262144)
    return JobRecord(
        id=job_id, user=f"user{number % 20}", uid=1000 + number % 20, spec=spec, state=JobState.COMPLETED,
        submit_time=end - 3600 - number, start_time=end - 1800 - number, end_time=end - number, exit_code=0, attempt=1,
        allocation=Allocation(job_id, (part,)), energy_j=1e6, policy="easy", policy_version="0",
    )  # fmt: skip


def waiting_job(number: int, end: float) -> JobRecord:
    job, user = finished_job(number, end), number % 100
    spec = msgspec.structs.replace(job.spec, name=f"train-{user}", command=("python", "train.py", f"--user={user}"))
    return JobRecord(
        id=job.id, user=f"user{user}", uid=1000 + user, spec=spec, state=JobState.PENDING, reason="Priority",
        message="12,300 jobs are ahead of it", submit_time=job.submit_time,
    )  # fmt: skip


def build(state: Path, count: int, made: Callable[[int, float], JobRecord]) -> None:
    """Create a store as left by the controller, with ``count`` such jobs."""
    Inbox(state).create()
    store = Store.create_or_open(state)
    now = time.time()
    with store.transaction():
        jobs = [made(n, now) for n in range(count)]
        store.put_jobs(jobs)
        kinds = ("submitted", "starting", "running", "ended")
        store.append(Event(time=now, kind=k, job_id=j.id, user=j.user, data={"n": 1}) for j in jobs for k in kinds)
        store.set_meta("heartbeat", str(now + 3600))
        store.set_meta("tick_s", "5.0")
    store.close()


def wall_s(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--waiting", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"GPUSCHED_STATE": folder, "GPUSCHED_INVENTORY": str(INVENTORY), "PYTHONDONTWRITEBYTECODE": ""}
        build(Path(folder), arguments.jobs, waiting_job if arguments.waiting else finished_job)
        commands = {
            "import typer, rich.table": BASELINE,
            "gpusched status --json": [GPUSCHED, "status", "--json"],
            "gpusched submit": [GPUSCHED, "submit", "--flavor", "s-A100", "--image", "busybox", "--", "true"],
            "gpusched status": [GPUSCHED, "status"],
        }
        if arguments.waiting:
            del commands["gpusched status --json"]
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):  # interleaved, so that a busy moment hits all alike
            for name, command in commands.items():
                times[name].append(wall_s(command))
                for file in Inbox(Path(folder)).new.iterdir():
                    file.unlink()
        base = statistics.median(times["import typer, rich.table"])
        what = "waiting" if arguments.waiting else "finished"
        print(f"{arguments.jobs} {what} jobs in the store, median of {arguments.rounds} rounds")
        for name, values in times.items():
            median = statistics.median(values)
            print(f"{name:28} {median * 1000:7.1f} ms  ratio {median / base:.2f}")


if __name__ == "__main__":
    main()
