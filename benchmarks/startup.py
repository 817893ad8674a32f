"""CPU time of short commands, as a ratio to ``python -c "import numpy"``: with everything compiled, and the first use.

    .venv/bin/python -m benchmarks.startup [--rounds 9] [--cold]

Whole processes in turn, in a folder of its own: a workload of 200 jobs, a store with some days of history and a queue,
two nodes that
refuse to be asked. The goal is a ratio of at most 4, and less than 10 s for the first use.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpusched.config.inventory import load_inventory
from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.secretfiles import SecretFiles
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import NodeRecord, RunRecord, Store

BASE = 'python -c "import numpy"'
INVENTORY = """\
settings: {tick: 5s}
defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G, port: 1}
partitions:
  A100:
    policy: easy
    nodes: [{name: a1, address: 127.0.0.1}, {name: a2, address: 127.0.0.2}]
    flavors: {all: {gpus: 16, cores: 128, memory: 1024G, time: 72h}}
"""
DAY_S = 86400.0


def site(folder: Path) -> str:
    """Create an inventory, a store with eight days of history and one pending job, and a trace; return the job's id."""
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "log.swf").write_text(
        "; UnixStartTime: 1500000000\n"
        + "".join(f"{n} {n * 40} -1 {100 + n * 37 % 900} {1 + n % 8} -1 -1 {1 + n % 8} 1000 -1 1 1 1 -1 1 -1 -1 -1\n"
                  for n in range(1, 201))
    )  # fmt: skip
    state, now = folder / "state", time.time()
    inbox, inventory = Inbox(state), load_inventory(folder / "inventory.yaml")
    inbox.create()
    store = Store.create_or_open(state)
    with store.transaction():
        for day in range(8):
            for name, at, seconds, nodes in (("a", 0, 3600, 2), ("b", 10, 3600, 2), ("c", 20, 600, 1)):
                ended(store, f"{name}{day}", now - (9 - day) * DAY_S + at, seconds, nodes)
        for node in inventory.nodes:
            gpus = tuple(Gpu(index=i, uuid=f"{node.name}-{i}") for i in node.indices())
            reading = NodeReading(node=node.name, time=now, source="nvml", gpus=gpus, containers=())
            well = NodeRecord(name=node.name, state=NodeState.IDLE, reason="", last_seen=1.0, reading=reading)
            store.put_nodes([well])
    job = ids.mint(now)
    spec = JobSpec(name="w", partition="A100", nodes=2, gpus_per_node=8, cores_per_node=1, memory_mib_per_node=1,
                   time_limit_s=3600, hold=False, command=("true",))  # fmt: skip
    inbox.deliver(Submit(time=now, id=job, spec=spec))
    CommandApplier(store, inbox, inventory, SecretFiles(state)).apply_inbox(now)
    store.set_meta("tick_s", "5.0")
    store.set_meta("heartbeat", str(now + DAY_S))
    store.close()
    return job


def ended(store: Store, name: str, begin: float, seconds: float, nodes: int) -> None:
    """One job of the past."""
    spec = JobSpec(name=name, partition="A100", nodes=nodes, gpus_per_node=8, cores_per_node=1, memory_mib_per_node=1,
                   time_limit_s=int(seconds) + 60)  # fmt: skip
    store.put_jobs([
        JobRecord(id=name, user="ann", uid=0, spec=spec, state=JobState.COMPLETED, submit_time=begin, start_time=begin,
            end_time=begin + seconds, attempt=1)
    ])  # fmt: skip
    store.open_run(
        RunRecord(job_id=name, attempt=1, user="ann", partition="A100", flavor=None, share=0.5, gpus=8 * nodes,
            start_time=begin, end_time=None, outcome=None, nodes={"a1": 8})
    )  # fmt: skip
    store.close_run(name, 1, begin + seconds, JobState.COMPLETED)


def commands(job: str) -> dict[str, list[str]]:
    """Name -> words, the baseline first."""
    ours = {
        "replay log.swf -P easy": ["replay", "log.swf", "-P", "easy", "-N", "2"],
        "why JOB": ["why", job],
        "tick": ["tick"],
        "policy compare fifo easy": ["policy", "compare", "fifo", "easy"],
        "metrics": ["metrics"],
    }
    return {BASE: ["-c", "import numpy"]} | {name: ["-m", "gpusched", *words] for name, words in ours.items()}


def spent(words: list[str], folder: Path, **more: str) -> tuple[float, float]:
    """CPU and wall seconds of one process and all that it waited for; ticks begin with the same store."""
    env = os.environ | {"GPUSCHED_STATE": str(folder / "now"), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "NUMBA_CACHE_DIR": str(folder / "cache")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": ""} | more  # as users have it
    shutil.rmtree(folder / "now", ignore_errors=True)
    shutil.copytree(folder / "state", folder / "now")
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=env, cwd=folder, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="each command's first use, too: minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = commands(site(folder))
        first = {}
        for what, words in chosen.items():
            if options.cold:
                shutil.rmtree(folder / "cache", ignore_errors=True)
            first[what] = spent(words, folder)
        for words in list(chosen.values()) * 2:  # a tick that compiled predicts nothing before the next
            spent(words, folder, GPUSCHED_COMPILED="always")
        times: dict[str, list[float]] = {what: [] for what in chosen}
        for _ in range(options.rounds):  # interleaved, so that a busy moment hits all alike
            for what, words in chosen.items():
                times[what].append(spent(words, folder)[0])
    base = statistics.median(times[BASE])
    print(f"CPU time, median of {options.rounds} rounds")
    for what, values in times.items():
        said = f", first use {first[what][0]:.1f} s of CPU, {first[what][1]:.1f} s" if options.cold else ""
        median = statistics.median(values)
        print(f"{what:28} {median * 1000:7.1f} ms  ratio {median / base:.2f}{said}")


if __name__ == "__main__":
    main()
