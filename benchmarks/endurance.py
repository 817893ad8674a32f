"""A controller's day in some minutes: does it grow, and how long does ``status`` take at the end?

    python -m benchmarks.endurance [--hours 24] [--jobs 100000] [--nodes 64] [--tick 15]

The real service with its store, inbox, notices, events, metrics and predictions of starts; nodes in memory stand behind
the cluster port, and time goes on by one tick after each cycle. Jobs of one GPU arrive all the time, 90 % of what the
nodes can do; they end by themselves. Printed every tenth: resident memory after a collection of garbage, descriptors,
threads, Python objects, the store's size. Warm-up: the first tenth. ``status``: its CPU seconds against those of a
process that only imports the modules it loads.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from gpusched.controller import service as module
from gpusched.controller.service import Service
from gpusched.model.commands import Submit
from gpusched.queue.clock import Clock
from tests.builders import spec
from tests.controller.applying import fresh_id
from tests.controller.imagined import GPUS, Host, ImaginedCluster, World

PAGE = os.sysconf("SC_PAGE_SIZE")
HOUR = 3600.0
_STATUS = """import sys
from gpusched.cli.main import main
sys.argv = ['gpusched', 'status']
try: main()
except SystemExit: pass
"""
_PACKAGES = ("gpusched", "msgspec", "rich", "typer", "click", "sqlite3")


class Day:
    """A service over nodes in memory, and jobs that arrive and end by the virtual clock."""

    def __init__(self, folder: Path, nodes: int, tick_s: float, seed: int = 1) -> None:
        names = [f"n{i}" for i in range(nodes)]
        self.state, self.inventory = folder / "state", folder / "inventory.yaml"
        self.inventory.write_text(
            f"settings: {{tick: {tick_s:.0f}s}}\n"
            f"defaults: {{runtime: podman, gpu_type: A100, gpus: {GPUS}, cores: 64, memory: 512G, port: 1}}\n"
            f"partitions: {{p: {{policy: easy, nodes: [{', '.join(names)}]}}}}\n"
        )
        self.world = World(now=time.time() - 25 * HOUR, hosts={name: Host(name, use=90.0) for name in names})
        self.cluster, self._tick_s = ImaginedCluster(self.world), tick_s
        self._rng, self._ends = random.Random(seed), dict[str, float]()
        self._run_s, self._due = 1.0, 0.0
        clock = Clock(lambda: self.world.now, lambda: self.world.now, "virtual")
        with mock.patch.object(module, "SshCluster", return_value=self.cluster):
            self.service = Service(self.inventory, self.state, clock)
        self._housekept = self.world.now

    def turns(self, seconds: float, jobs: int) -> Iterator[None]:
        """Run cycles for so many virtual seconds, in which ``jobs`` arrive."""
        until, rate = self.world.now + seconds, jobs / seconds
        # A job holds its GPU for two ticks more: its start and its end are seen by the next.
        self._run_s = max(self._tick_s, 0.9 * GPUS * len(self.world.hosts) / rate - 2 * self._tick_s)
        while self.world.now < until:
            self._due += rate * self._tick_s
            while self._due >= 1:
                self._due -= 1
                self.submit()
            self._turn()
            yield

    def drain(self) -> None:
        """Run cycles until all jobs have ended and nothing of them is left on the nodes."""
        while self.service.store.pending_rows() or any(host.boxes for host in self.world.hosts.values()):
            self._turn()

    def submit(self) -> None:
        """Put a job into the inbox."""
        asked = spec(name=f"train-{self._rng.randrange(50)}", time_limit_s=4 * int(self._run_s) + 600)
        self.service.cycle.inbox.deliver(Submit(time=self.world.now, id=fresh_id(self.world.now), spec=asked))

    def _turn(self) -> None:
        for host in self.world.hosts.values():
            for box in host.boxes.values():
                if box.phase == "running":
                    ends = self._ends.setdefault(box.name, self.world.now + self._run_s * self._rng.uniform(0.2, 1.8))
                    if ends <= self.world.now:
                        self.world.end(box, 0 if self._rng.random() < 0.95 else 1)
                        del self._ends[box.name]
        if self.world.now - self._housekept > HOUR:
            self._housekept, self.service._housekept_at = self.world.now, float("-inf")
        self.service.run(0)
        self.cluster.deliver(lambda _: "ok")
        if self._rng.random() < 0.1:
            self.service.predict_starts(0.02)
        self.world.now += self._tick_s
        self.world.progress()
        for history in (self.world.starts, self.world.signals, self.cluster.asked):
            history.clear()

    def close(self) -> None:
        """End the service."""
        self.service.close()


def figures(state: Path) -> dict[str, float]:
    """Return what must not grow in this process, and the size of the store, which may."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20
    return {
        "rss_mib": round(resident, 1), "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(), "objects": len(gc.get_objects()),
        "store_mib": round(sum(f.stat().st_size for f in state.glob("gpusched.db*")) / 2**20, 1),
    }  # fmt: skip


def status(day: Day, rounds: int = 9) -> tuple[float, float]:
    """Return the medians of CPU seconds of ``status`` and of the imports it needs, measured in turn."""
    environment = os.environ | {"GPUSCHED_STATE": str(day.state), "GPUSCHED_INVENTORY": str(day.inventory)}
    listing = _STATUS + f"print('\\nmodules', *(m for m in sys.modules if m.partition('.')[0] in {_PACKAGES!r}))"
    said = subprocess.run([sys.executable, "-c", listing], env=environment, capture_output=True, text=True, check=True)
    modules = said.stdout.splitlines()[-1].split()[1:]
    imports = "".join(f"import {name}\n" for name in modules)
    took: dict[str, list[float]] = {_STATUS: [], imports: []}
    for _ in range(rounds):
        for code, times in took.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, check=True)
            after = os.times()
            times.append(after[2] + after[3] - before[2] - before[3])
    return statistics.median(took[_STATUS]), statistics.median(took[imports])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--tick", type=float, default=15.0)
    given = parser.parse_args()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        day, found = Day(Path(folder), given.nodes, given.tick), list[dict[str, float]]()
        part = given.hours * HOUR / 10
        for number in range(10):
            began, cycles = time.process_time(), 0
            for _ in day.turns(part, given.jobs // 10):
                cycles += 1
            found.append(figures(day.state))
            cycle_ms = 1e3 * (time.process_time() - began) / cycles
            print(f"{(number + 1) * given.hours / 10:.1f} h: {found[-1]}, {cycle_ms:.0f} CPU ms a cycle", flush=True)
        print(dict(day.service.store.counts()))
        warm, end = found[0], found[-1]
        print(f"memory after the warm-up: {100 * (end['rss_mib'] / warm['rss_mib'] - 1):+.1f} %")
        took, imports = status(day)
        print(f"status: {took:.3f} CPU s, its imports {imports:.3f}: {took / imports:.2f}")
        day.close()


if __name__ == "__main__":
    main()
