"""Measure the cost of metrics: of making them, and for the controller's cycle during scrapes.

    python -m benchmarks.metrics [--nodes 1000] [--minutes 10]

First the text of a store with so many nodes of 8 GPUs, all held by jobs, and 2,000 pending jobs; and the whole
command. Then 500 jobs start again and again on 125 nodes that exist in memory only; all is written to disk as in
earnest. In every second round ``gpusched metrics --listen``, a process of its own, is scraped each second, for so many
minutes in all. What a round's cycles take is compared pair by pair.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from gpusched.client.metrics import collect
from gpusched.controller.cycle import Cycle
from gpusched.controller.reporting import Reporting
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState
from gpusched.model.resources import Node
from gpusched.queue.store import NodeRecord, Reader, Store
from gpusched.views.metrics import metrics_text
from tests import builders
from tests.controller.applying import fresh_id
from tests.controller.imagined import GPUS, Host, ImaginedCluster, World, inventory

JOBS = 500
PORT = 9837
URL = f"http://127.0.0.1:{PORT}/metrics"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendering(Path(folder), given.nodes)
        scraping(Path(folder), 60 * given.minutes)


def rendering(folder: Path, nodes: int) -> None:
    state = folder / "large"
    store = Store.create_or_open(state)
    with store.transaction():
        store.put_nodes(map(record, range(nodes)))
        store.put_jobs(holder(n) for n in range(2 * nodes))
        store.put_jobs(builders.job(f"q{n}", JobState.PENDING, reason="Resources") for n in range(2000))
    store.close()
    reader = Reader.open(state)
    assert reader is not None
    wall, cpu = [], []
    for _ in range(21):
        began = time.perf_counter(), time.process_time()
        text = metrics_text(collect(reader))
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    print(f"{nodes} nodes, {text.count(chr(10))} lines: median {statistics.median(wall) * 1e3:.0f} ms "
          f"({statistics.median(cpu) * 1e3:.0f} ms of CPU), least {min(wall) * 1e3:.0f} ms")  # fmt: skip
    command = []
    for _ in range(7):
        at = time.perf_counter()
        environment = os.environ | {"GPUSCHED_STATE": str(state)}
        subprocess.run(
            [sys.executable, "-m", "gpusched", "metrics"], stdout=subprocess.DEVNULL, env=environment, check=True
        )
        command.append(time.perf_counter() - at)
    print(f"the whole command: median {statistics.median(command) * 1e3:.0f} ms, least {min(command) * 1e3:.0f} ms")


def record(number: int) -> NodeRecord:
    """Return a node whose GPUs all have a process of a job."""
    name = f"n{number}"
    process = GpuProcess(pid=4711, user="ada", command="python train.py", container="gpusched-r1-1-0")
    gpus = tuple(
        Gpu(
            index=i, uuid=f"GPU-{name}-{i}", name="NVIDIA A100-SXM4-80GB", memory_total_mib=81920,
            memory_used_mib=60000, utilization_pct=80.0, power_w=300.5, power_limit_w=400.0, energy_j=12345678.9,
            temperature_c=60, ecc_errors=0, mig_mode=False, processes=(process,),
        )
        for i in range(8)
    )  # fmt: skip
    declared = Node(
        name=name, partition=f"p{number % 4}", address=name, gpus=8, cores=64, memory_mib=1, gpu_type="A100",
        runtime="podman",
    )  # fmt: skip
    reading = NodeReading(node=name, time=1.0, source="nvml", gpus=gpus, containers=())
    return NodeRecord(name=name, state=NodeState.ALLOCATED, declared=declared, reading=reading)


def holder(number: int) -> JobRecord:
    half = number % 2
    return builders.job(f"r{number}", nodes={f"n{number // 2}": tuple(range(4 * half, 4 * half + 4))})


class Rounds:
    """A controller's cycles on nodes in memory."""

    def __init__(self, state: Path) -> None:
        nodes = JOBS // GPUS
        self.state, self.store = state, Store.create_or_open(state)
        self.world = World(now=time.time(), hosts={f"n{i}": Host(f"n{i}") for i in range(nodes)})
        self.cluster, self.reporting = ImaginedCluster(self.world), Reporting(self.store, state)
        policies = {"p": PolicySpec(name="easy", backfill="easy")}
        self.cycle = Cycle(
            self.store, state, inventory(nodes), policies, self.cluster, clock=lambda: self.world.now,
            timings=self.reporting.timings,
        )  # fmt: skip
        self.cycle.inbox.create()
        self.reported_s = 0.0

    def run(self) -> tuple[float, float, int]:
        """Start and end so many jobs; return the seconds and the CPU seconds that the cycles took, and their number."""
        spec = builders.spec(time_limit_s=600)
        for _ in range(JOBS):
            self.cycle.inbox.deliver(Submit(time=self.world.now, id=fresh_id(self.world.now), spec=spec))
        wall = cpu = 0.0
        for number in range(12):
            began = time.perf_counter(), time.thread_time()
            self.cycle.run(0)
            cycle_s = time.perf_counter() - began[0]
            self.reporting.step(cycle_s, self.cycle.inventory.settings.events)
            wall += time.perf_counter() - began[0]
            cpu += time.thread_time() - began[1]
            self.reported_s += time.perf_counter() - began[0] - cycle_s
            self.cluster.deliver(lambda _: "ok")
            if number == 5:
                for _, box in self.world.running():
                    self.world.end(box, 0)
            self.world.now += 1.0
            self.world.progress()
        counts = self.store.counts()
        assert counts == {JobState.COMPLETED: counts[JobState.COMPLETED]}, counts
        return wall, cpu, 12


SCRAPER = """
import sys, time, urllib.request
from pathlib import Path
while True:
    time.sleep(1.0)
    if Path(sys.argv[1]).exists():
        began = time.perf_counter()
        urllib.request.urlopen(sys.argv[2], timeout=20).read()
        print(time.perf_counter() - began, flush=True)
"""
"""Scrapes each second while a file exists."""


def scraping(folder: Path, seconds: float) -> None:
    rounds = Rounds(folder / "busy")
    for _ in range(3):
        rounds.run()  # compiles, fills caches
    rounds.reported_s = 0.0
    environment = os.environ | {"GPUSCHED_STATE": str(rounds.state)}
    argv = [sys.executable, "-m", "gpusched", "metrics", "--listen", str(PORT)]
    server = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
    wait_for_server()
    is_on, took = folder / "on", folder / "took"
    with took.open("w") as file:
        scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, str(is_on), URL], stdout=file)
    found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    scraped_s = 0.0
    while scraped_s < seconds:
        order = (False, True) if len(found[True]) % 2 else (True, False)
        for scraped in order:
            is_on.touch() if scraped else is_on.unlink(missing_ok=True)
            began = time.perf_counter()
            found[scraped].append(rounds.run())
            scraped_s += (time.perf_counter() - began) * scraped
    for process in (scraper, server):
        process.terminate()
        process.wait()
    report(found, [float(line) for line in took.read_text().split()], scraped_s, rounds.reported_s)


def wait_for_server() -> None:
    for _ in range(100):
        try:
            with urllib.request.urlopen(URL, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError


def report(
    found: dict[bool, list[tuple[float, float, int]]], took: list[float], scraped_s: float, reported_s: float
) -> None:
    pairs = list(zip(found[True], found[False], strict=True))
    print(f"{len(pairs)} pairs of rounds of {JOBS} jobs, {scraped_s:.0f} s with {len(took)} scrapes of "
          f"{statistics.median(took) * 1e3:.0f} ms")  # fmt: skip
    for name, part in (("wall time", 0), ("CPU time", 1)):
        with_, without = (statistics.median(one[part] / one[2] for one in found[on]) for on in (True, False))
        ratio = statistics.median(a[part] / b[part] for a, b in pairs)
        total = sum(a[part] for a, _ in pairs) / sum(b[part] for _, b in pairs)
        print(f"a cycle's {name}: {without * 1e3:.1f} ms, scraped {with_ * 1e3:.1f} ms; "
              f"median of pairs {ratio - 1:+.1%}, all together {total - 1:+.1%}")  # fmt: skip
    whole = sum(one[0] for rounds in found.values() for one in rounds)
    print(f"keeping the totals: {reported_s / whole:.2%} of the cycles' time")


if __name__ == "__main__":
    main()
