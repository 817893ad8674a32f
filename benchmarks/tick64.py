"""One whole tick over many warm nodes, and where its time goes.

    python -m benchmarks.tick64 [--nodes 64] [--rounds 9] [--pending 200]

Real sshds and podman in namespaces of this machine. Every round is one cycle of the real controller (probe of all
nodes, container listing included, reconcile, accounting, decision, one SQLite transaction) with held jobs in the queue;
beside it asyncssh runs the very same remote command on the same nodes. The decision itself is benchmarks/decide.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.probe64 import open_asyncssh
from gpusched.config.inventory import load_inventory
from gpusched.controller.cycle import Cycle
from gpusched.controller.service import Service
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobSpec
from gpusched.queue.inbox import Inbox
from tests.testbed import Testbed

PHASES = {"_settle": "settle", "_record": "reconcile + account + write", "_decide": "decide + write"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pending", type=int, default=200)
    options = parser.parse_args()
    for runtime in ("process", "podman"):
        with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder) / "bed", count=options.nodes) as testbed:
            print(json.dumps(measure(testbed, Path(folder), runtime, options.rounds, options.pending), indent=1))


def measure(testbed: Testbed, folder: Path, runtime: str, rounds: int, pending: int) -> dict[str, object]:
    """Medians over ``rounds`` of ticks and of asyncssh's rounds, taken in turn."""
    path, state = folder / "inventory.yaml", folder / "state"
    path.write_text(inventory_text(testbed, runtime))
    Inbox(state).create()
    for _ in range(pending):
        submit(state, len(testbed.nodes))
    service = Service(path, state)
    spent = watch(service)
    inventory = load_inventory(path)
    with asyncio.Runner() as runner:
        peer = runner.run(open_asyncssh(testbed, list(inventory.nodes), inventory.settings))
        ticks, theirs = [], []
        for number in range(rounds + 2):
            for values in spent.values() if number == 2 else ():
                values.clear()  # the first two: connecting, uploading the probe, compiling
            ticks.append(timed(lambda: service.run(60.0)))
            theirs.append(timed(lambda: runner.run(peer.ask_all())))
        runner.run(peer.close())
    service.close()
    probing, rival = statistics.median(spent["observe"]), statistics.median(theirs[2:])
    parts = {name: round(statistics.median(values), 4) for name, values in spent.items()}
    return {
        "nodes": len(testbed.nodes), "runtime": runtime, "rounds": rounds, "pending": pending,
        "tick_median_s": round(statistics.median(ticks[2:]), 3), "parts_median_s": parts,
        "asyncssh_median_s": round(rival, 3), "probing_over_asyncssh": round(probing / rival, 2),
        "tick_over_asyncssh": round(statistics.median(ticks[2:]) / rival, 2),
    }  # fmt: skip


def inventory_text(testbed: Testbed, runtime: str) -> str:
    nodes = "\n".join(f"      - {{name: {n.name}, address: {n.address}}}" for n in testbed.nodes)
    return f"""
settings: {{known_hosts: {testbed.known_hosts}, probe_timeout: 60s}}
partitions:
  p:
    defaults: {{user: root, key: {testbed.identity}, gpus: 8, cores: 64, memory: 512G, runtime: {runtime}}}
    nodes:
{nodes}
    flavors: {{all: {{gpus: {8 * len(testbed.nodes)}, cores: {8 * len(testbed.nodes)}, memory: 64G, time: 1h}}}}
"""


def submit(state: Path, nodes: int) -> None:
    now = time.time()
    spec = JobSpec(
        name="waits", partition="p", nodes=nodes, gpus_per_node=8, cores_per_node=8, memory_mib_per_node=1024,
        time_limit_s=3600, image="localhost/gs/busybox:1", command=("true",), hold=True,
    )  # fmt: skip
    Inbox(state).deliver(Submit(time=now, id=ids.mint(now), spec=spec))


def watch(service: Service) -> dict[str, list[float]]:
    """Time the cycle's phases without changing them."""
    spent: dict[str, list[float]] = defaultdict(list)

    def wrap(owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed_call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                spent[name].append(time.perf_counter() - began)

        setattr(owner, method, timed_call)

    wrap(service.cluster, "observe", "observe")
    cycle: Cycle = service.cycle
    for method, name in PHASES.items():
        wrap(cycle, method, name)
    return spent


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
