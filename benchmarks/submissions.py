"""1,000 submissions by 8 processes at once, then one tick: none lost, none doubled, all in the store.

    python -m benchmarks.submissions [--jobs 1000] [--processes 8]

Each process runs the command line's own entry point (so start-up is paid once per process, not per job); the tick is
the real one, on a node that does not exist, so that nothing starts and all stay in the queue.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gpusched.cli.main import run
from gpusched.controller.service import tick_once
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Reader

INVENTORY = """
settings: {connect_timeout: 1s, probe_timeout: 2s}
partitions:
  p:
    defaults: {gpus: 8, cores: 64, memory: 512G, runtime: podman}
    nodes: [{name: nowhere, address: 127.0.0.1, port: 9}]
    flavors: {s: {gpus: 2, cores: 16, memory: 128G, time: 1h}}
"""


def submit_many(count: int) -> list[str]:
    """Ids of ``count`` submissions made one after the other."""
    ids = []
    for number in range(count):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = run(["submit", "--json", "-J", f"job{number}", "--flavor", "s", "--image", "i", "--", "true"])
        assert code == 0, out.getvalue()
        ids.append(json.loads(out.getvalue())["id"])
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state, inventory = Path(folder) / "state", Path(folder) / "inventory.yaml"
        inventory.write_text(INVENTORY)
        os.environ |= {"GPUSCHED_STATE": str(state), "GPUSCHED_INVENTORY": str(inventory)}
        Inbox(state).create()
        began = time.perf_counter()
        with ProcessPoolExecutor(options.processes) as pool:
            share = options.jobs // options.processes
            ids = [i for batch in pool.map(submit_many, [share] * options.processes) for i in batch]
        submitted = time.perf_counter() - began
        waiting = len(list(Inbox(state).new.iterdir()))
        began = time.perf_counter()
        tick_once(inventory, state)
        ticked = time.perf_counter() - began
        reader = Reader.open(state)
        assert reader is not None
        stored = [job.id for job in reader.pending()]
    print(f"{len(ids)} submissions by {options.processes} processes in {submitted:.2f} s: {waiting} files in the inbox")
    print(f"one tick in {ticked:.2f} s: {len(stored)} jobs in the store")
    print(f"lost {len(set(ids) - set(stored))}, doubled {len(stored) - len(set(stored))}, ids all different: "
          f"{len(set(ids)) == len(ids)}")  # fmt: skip


if __name__ == "__main__":
    main()
