"""Room that waiting arrays take in the store: ``python -m benchmarks.store_size``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.queue.store import Reader, Store


def measure(what: str, tasks: int, env: dict[str, str]) -> None:
    spec = JobSpec(
        name="j", partition="p", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1024, time_limit_s=600,
        command=("true",), env=env,
    )  # fmt: skip
    job = {"user": "u", "uid": 1000, "spec": spec, "state": JobState.PENDING, "submit_time": time.time()}
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        store = Store.create_or_open(state)
        with store.transaction():
            store.put_jobs(
                JobRecord(id=f"0123456789a_{n}", array_id="0123456789a", array_index=n, **job) for n in range(tasks)
            )
        room = sum(file.stat().st_size for file in state.glob("gpusched.db*")) / 1e6
        reader = Reader.open(state)
        assert reader is not None
        begin = time.perf_counter()
        assert len(reader.pending()) == tasks
        print(f"{what}: {room:.1f} MB with the WAL, read in {time.perf_counter() - begin:.2f} s")
        store.close()


if __name__ == "__main__":
    measure("20,000 small tasks", 20_000, {"A": "b"})
    measure("300 tasks with 0.95 MB of environment", 300, {f"V{n}": "x" * 95_000 for n in range(10)})
