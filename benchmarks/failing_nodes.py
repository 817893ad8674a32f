"""The cycle's time while a third of the nodes fails in changing ways, against the same without failures.

    python -m benchmarks.failing_nodes [--nodes 200] [--pairs 4] [--cycles 6]

Real sshds in namespaces of this machine; a controller's own cycles, as between two ticks of ``gpusched controller``. A
pair: cycles while all nodes are well, then as many while a third fails; every other cycle some of these recover and
others fail, in the next way: frozen, link down, garbage from the shell, answers byte by byte, sshd killed with its
connections, or without. Wall and CPU seconds of the controller's process, means and medians; the ratios of each pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpusched.controller.service import PATIENCE_S, Service
from gpusched.queue.inbox import Inbox
from tests.testbed import Testbed
from tests.testbed.node import TestNode

_GARBAGE = "#!/bin/sh\nhead -c 200000 /dev/urandom\n"
_SLOW = "#!/bin/sh\nwhile :; do printf x; sleep 0.2; done\n"


def garbage(node: TestNode, text: str = _GARBAGE) -> Callable[[], None]:
    """Make everything that the account runs there print this instead."""
    node.install_script("python3", text)
    return lambda: node.remove_script("python3")


def frozen(node: TestNode) -> Callable[[], None]:
    node.freeze()
    return node.thaw


def cut(node: TestNode) -> Callable[[], None]:
    node.cut()
    return node.join


def slow(node: TestNode) -> Callable[[], None]:
    return garbage(node, _SLOW)


def killed(node: TestNode) -> Callable[[], None]:
    node.stop_sshd(sessions=True)
    return node.start_sshd


def refusing(node: TestNode) -> Callable[[], None]:
    node.stop_sshd()
    return node.start_sshd


WAYS = (frozen, cut, garbage, slow, killed, refusing)


class Failing:
    """A third of the nodes, each with what heals it."""

    def __init__(self, nodes: list[TestNode], seed: int = 1) -> None:
        self._nodes, self._heal = nodes, dict[str, Callable[[], None]]()
        self._rng, self._ways = random.Random(seed), itertools.cycle(WAYS)

    def change(self) -> None:
        """Heal a quarter of those that fail, and let others fail until it is a third again."""
        well = [node for node in self._nodes if node.name not in self._heal]
        for name in self._rng.sample(sorted(self._heal), len(self._heal) // 4):
            self._heal.pop(name)()
        for node in self._rng.sample(well, len(self._nodes) // 3 - len(self._heal)):
            self._heal[node.name] = next(self._ways)(node)

    def heal(self) -> None:
        """Heal all."""
        while self._heal:
            self._heal.popitem()[1]()


def measured(service: Service) -> tuple[float, float]:
    """Return wall and CPU seconds of a cycle."""
    wall, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    service.run(PATIENCE_S)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter() - wall, now.ru_utime + now.ru_stime - cpu.ru_utime - cpu.ru_stime


def until_well(service: Service, nodes: int, limit_s: float = 300.0) -> None:
    """Run cycles until every node answers in time again."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        service.run(PATIENCE_S)
        if not service.cluster._slow and len(service.cluster._transports) == nodes:
            return
        time.sleep(0.5)
    raise TimeoutError(f"still slow: {sorted(service.cluster._slow)[:9]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=6)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder) / "bed", count=given.nodes) as testbed:
        path, state = Path(folder) / "inventory.yaml", Path(folder) / "state"
        nodes = ", ".join(f"{{name: {n.name}, address: {n.address}}}" for n in testbed.nodes)
        # Between ticks a quiet node is not probed again: here each cycle begins a new tick, which lasts until this
        # machine has answered for all nodes.
        pause_s = max(1.0, given.nodes / 20)
        path.write_text(
            f"settings: {{known_hosts: {testbed.known_hosts}, tick: {pause_s}s}}\n"
            f"defaults: {{user: root, key: {testbed.identity}, gpus: 8, cores: 64, memory: 512G, runtime: process}}\n"
            f"partitions: {{p: {{nodes: [{nodes}]}}}}\n"
        )
        Inbox(state).create()
        service, failing, ratios = Service(path, state), Failing(testbed.nodes), list[dict[str, float]]()
        print(f"{given.nodes} nodes, load {os.getloadavg()[0]:.0f}", flush=True)
        until_well(service, given.nodes)
        for _ in range(given.pairs):
            until_well(service, given.nodes)
            took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for fails in (False, True):
                for number in range(given.cycles):
                    if fails and number % 2 == 0:
                        failing.change()
                    time.sleep(pause_s)
                    took[fails].append(measured(service))
            failing.heal()
            left = {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}
            ratios.append(row(took) | left)
            print(json.dumps(ratios[-1]), flush=True)
        keys = ("mean_ratio", "median_ratio", "cpu_ratio")
        print({key: round(statistics.median(r[key] for r in ratios), 2) for key in keys})
        service.close()


def row(took: dict[bool, list[tuple[float, float]]]) -> dict[str, float]:
    """Return the figures of a pair."""
    wall, cpu = ({fails: [each[i] for each in found] for fails, found in took.items()} for i in (0, 1))
    return {
        "well_s": round(statistics.mean(wall[False]), 2), "failing_s": round(statistics.mean(wall[True]), 2),
        "mean_ratio": round(statistics.mean(wall[True]) / statistics.mean(wall[False]), 2),
        "median_ratio": round(statistics.median(wall[True]) / statistics.median(wall[False]), 2),
        "cpu_ratio": round(statistics.mean(cpu[True]) / statistics.mean(cpu[False]), 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
