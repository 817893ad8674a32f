"""An array of 100,000 tasks on 64 nodes that exist in memory only: what commands and the cycle take.

    python -m benchmarks.arrays [--tasks 100000]

Commands are whole processes, the median of five; a cycle is the controller's own, its nodes apart. All is written
to disk as it is in earnest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpusched.controller.cycle import Cycle
from gpusched.model.policy import PolicySpec
from gpusched.queue.store import Store
from tests.controller.imagined import GPUS, Host, ImaginedCluster, World, inventory

NODES = 64
INVENTORY = """
partitions:
  p:
    defaults: {gpus: 4, cores: 64, memory: 512G, runtime: podman}
    nodes: [{name: n0, address: 127.0.0.1, port: 9}]
"""
ASKED = ("--gpus", "1", "--cpus", "1", "--mem", "1G", "-t", "10", "--image", "i", "--", "true")


def timed(*words: str, times: int = 1) -> tuple[str, float]:
    """Return the command's output and the median of its seconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "gpusched", *words], capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - began)
    return done.stdout.strip(), statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    tasks = parser.parse_args().tasks
    with tempfile.TemporaryDirectory() as folder:
        state, path = Path(folder) / "state", Path(folder) / "inventory.yaml"
        path.write_text(INVENTORY)
        os.environ |= {"GPUSCHED_STATE": str(state), "GPUSCHED_INVENTORY": str(path)}
        world = World(now=time.time(), hosts={f"n{i}": Host(f"n{i}") for i in range(NODES)})
        store = Store.create_or_open(state)
        policies = {"p": PolicySpec(name="easy", backfill="easy")}
        cluster = ImaginedCluster(world)
        cycle = Cycle(store, state, inventory(NODES), policies, cluster, clock=lambda: world.now)
        cycle.inbox.create()

        def turn(what: str, act: Callable[[], object] = lambda: None) -> None:
            began = time.perf_counter()
            cycle.run(1.0)
            print(f"{what:<58} {time.perf_counter() - began:7.3f} s")
            cluster.deliver(lambda _: "ok")
            act()
            world.now += 5.0
            world.progress()

        turn("an empty cycle, all passes compiled or loaded")
        (one, took) = timed("submit", "--json", "--array", f"0-{tasks - 1}", *ASKED, times=1)
        job = json.loads(one)["id"]
        print(f"{'submit --array':<58} {took:7.3f} s")
        print(f"{'status, still in the inbox':<58} {timed('status', times=5)[1]:7.3f} s")
        turn(f"the cycle that takes it and starts {NODES * GPUS}")
        turn("the next cycle, all nodes full")
        turn("one more")
        for words in (("status",), ("status", "--json"), ("show", job), ("why", job), ("why", f"{job}_{tasks // 2}")):
            print(f"{words[0] + ' ' + ' '.join(w.replace(job, 'ID') for w in words[1:]):<58} "
                  f"{timed(*words, times=5)[1]:7.3f} s")  # fmt: skip
        for _, box in world.running():
            world.end(box, 0)
        turn("the cycle in which all have ended, and as many start")
        turn("the cycle after it")
        print(f"{'hold ID_[50000-59999]':<58} {timed('hold', f'{job}_[50000-59999]')[1]:7.3f} s")
        turn("the cycle that holds them")
        print(f"{'cancel ID':<58} {timed('cancel', '-y', job)[1]:7.3f} s")
        turn("the cycle that cancels all")
        room = sum(file.stat().st_size for file in state.glob("gpusched.db*")) / 1e6
        print(f"{'room of the store':<58} {room:7.1f} MB")


if __name__ == "__main__":
    main()
