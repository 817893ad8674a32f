"""Probing many nodes at once: gpusched's probe against asyncssh running the very same remote command.

    python -m benchmarks.probe64 [--nodes 64] [--threads 32] [--rounds 7] [--runtime process] [--slices]

Both keep one open connection per node; every round asks all nodes. Prints medians in seconds, their ratio, and what the
probe itself spends its time on. The nodes' own work (64 sshds, 64 python3) is on the same machine and in both figures.

With --slices gpusched's probe of whole GPUs is compared with that of GPUs cut into seven MIG slices each, by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncssh

from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.probe import probe, request_script
from gpusched.nodes.transport import RemoteScript, Transport
from tests.testbed import Testbed
from tests.testbed.hardware import A100_MIG

CLUSTER = "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runtime", default="process")
    parser.add_argument("--slices", action="store_true")
    options = parser.parse_args()
    compare = measure_slices if options.slices else measure
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder), count=options.nodes) as testbed:
        print(json.dumps(compare(testbed, options.threads, options.rounds, RuntimeName(options.runtime)), indent=1))


def measure(testbed: Testbed, threads: int, rounds: int, runtime: RuntimeName) -> dict[str, object]:
    settings, nodes = declared(testbed, runtime)
    transports = [open_transport(node, settings) for node in nodes]

    def ask(pair: tuple[Transport, Node]) -> int:
        return len(probe(pair[0], pair[1], CLUSTER, settings, time.time).gpus)

    pairs = list(zip(transports, nodes, strict=True))
    with ThreadPoolExecutor(threads) as pool:
        installed = timed(lambda: list(pool.map(ask, pairs)))
        for transport in transports:
            transport.close()
        cold = timed(lambda: list(pool.map(ask, pairs)))
        with asyncio.Runner() as runner:
            peer = runner.run(open_asyncssh(testbed, nodes, settings))
            # Rounds alternate, so that whatever else the machine does falls on both alike.
            ours, theirs, parts = [], [], []
            for _ in range(rounds):
                ours.append(timed(lambda: list(pool.map(ask, pairs))))
                theirs.append(timed(lambda: runner.run(peer.ask_all())))
                parts.append(timed(lambda: list(pool.map(lambda t: t.run(RemoteScript(("true",)), 60), transports))))
            runner.run(peer.close())
        local = timed(lambda: ask(pairs[0]))
    for transport in transports:
        transport.close()
    warm, rival = statistics.median(ours), statistics.median(theirs)
    return {
        "nodes": len(nodes), "threads": threads, "runtime": str(runtime),
        "first_contact_s": round(installed, 3), "cold_s": round(cold, 3), "warm_median_s": round(warm, 3),
        "warm_each_s": [round(s, 3) for s in ours], "asyncssh_cold_connect_s": round(peer.connect_s, 3),
        "asyncssh_median_s": round(rival, 3), "asyncssh_each_s": [round(s, 3) for s in theirs],
        "ratio": round(warm / rival, 2), "exec_true_all_median_s": round(statistics.median(parts), 3),
        "one_probe_alone_s": round(local, 3),
    }  # fmt: skip


def declared(testbed: Testbed, runtime: RuntimeName) -> tuple[Settings, list[Node]]:
    """Return the settings and the testbed's nodes as an inventory would have them."""
    nodes = [
        Node(name=n.name, partition="p", address=n.address, user="root", key=str(testbed.identity), gpus=n.gpus,
             cores=4, memory_mib=4096, runtime=runtime) for n in testbed.nodes
    ]  # fmt: skip
    return Settings(known_hosts=str(testbed.known_hosts), probe_timeout_s=60), nodes


def measure_slices(testbed: Testbed, threads: int, rounds: int, runtime: RuntimeName) -> dict[str, object]:
    """Return the medians of rounds with whole GPUs and with GPUs cut into seven slices, and their ratio."""
    settings, nodes = declared(testbed, runtime)
    pairs = [(open_transport(node, settings), node) for node in nodes]

    def ask(pair: tuple[Transport, Node]) -> int:
        return sum(len(gpu.slices) for gpu in probe(pair[0], pair[1], CLUSTER, settings, time.time).gpus)

    whole, cut, seen = [], [], 0
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(ask, pairs))
        for _ in range(rounds):
            for node in testbed.nodes:
                node.nvml_reset()
            whole.append(timed(lambda: list(pool.map(ask, pairs))))
            for node in testbed.nodes:
                node.nvml_set(cut_into_sevens(node.gpus))
            cut.append(timed(lambda: list(pool.map(ask, pairs))))
        seen = ask(pairs[0])
    for transport, _ in pairs:
        transport.close()
    return {
        "nodes": len(nodes), "threads": threads, "runtime": str(runtime), "slices_per_node": seen,
        "whole_each_s": [round(s, 3) for s in whole], "slices_each_s": [round(s, 3) for s in cut],
        "whole_median_s": round(statistics.median(whole), 3), "slices_median_s": round(statistics.median(cut), 3),
        "ratio": round(statistics.median(cut) / statistics.median(whole), 2),
    }  # fmt: skip


def cut_into_sevens(gpus: int) -> dict[str, object]:
    """Return what NVML answers where all GPUs are cut into seven slices."""
    values: dict[str, object] = {f"gpu*.mig_profile.{number}": line for number, line in A100_MIG.items()}
    for gpu in range(gpus):
        values[f"gpu{gpu}.mig"] = 1
        values[f"gpu{gpu}.gis"] = ",".join(f"{7 + start}:19:{start}:1" for start in range(7))
        values[f"gpu{gpu}.cis"] = ",".join(f"{7 + s}:0:1:MIG-{gpu:08x}-0000-4000-8000-{s:012x}" for s in range(7))
    return values


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Peer:
    """asyncssh with one open connection per node."""

    def __init__(
        self, connections: list[asyncssh.SSHClientConnection], scripts: list[RemoteScript], connect_s: float
    ) -> None:
        self.connections, self.scripts, self.connect_s = connections, scripts, connect_s

    async def ask_all(self) -> None:
        """One round over all nodes."""
        await asyncio.gather(*(self._ask(c, s) for c, s in zip(self.connections, self.scripts, strict=True)))

    async def _ask(self, connection: asyncssh.SSHClientConnection, script: RemoteScript) -> None:
        done = await connection.run(shlex.join(script.argv), input=script.stdin, encoding=None)
        assert done.exit_status == 0
        assert isinstance(done.stdout, bytes)
        assert b"@gpusched-probe@" in done.stdout

    async def close(self) -> None:
        """End all connections."""
        for connection in self.connections:
            connection.close()
        await asyncio.gather(*(c.wait_closed() for c in self.connections))


async def open_asyncssh(testbed: Testbed, nodes: list[Node], settings: Settings) -> Peer:
    began = time.perf_counter()
    limit = asyncio.Semaphore(32)

    async def connect(node: Node) -> asyncssh.SSHClientConnection:
        async with limit:
            return await asyncssh.connect(
                node.address, username="root", client_keys=[str(testbed.identity)], config=None,
                known_hosts=str(testbed.known_hosts), agent_path=None,
            )  # fmt: skip

    connections = await asyncio.gather(*(connect(n) for n in nodes))
    scripts = [request_script(n, CLUSTER, settings) for n in nodes]
    return Peer(list(connections), scripts, time.perf_counter() - began)


if __name__ == "__main__":
    main()
