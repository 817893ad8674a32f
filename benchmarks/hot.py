"""What a resize costs a real torchrun, hot and by a restart: the longest time between two steps around it.

    .venv/bin/python -m benchmarks.hot [--times 3]

Needs what the testbed needs (root, podman's packages), and torch. Two nodes, plain processes, a tick of 0.5 s, gloo,
one process a node: docs/examples/elastic_train.py grows from one node to two and shrinks again, for another job. A step
takes 0.4 s on one node, half of it on two. Times are those of progress.json, which each step writes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tests.e2e.conftest import SETTINGS, Cluster
from tests.e2e.test_hot import crowd, kept, torchrun_options
from tests.testbed import Testbed, wait_until

POLICY = (
    "order: fifo\nplace: best-fit\nbackfill: easy\nsizes: greedy-gain\n"
    "resize: {min_run: 0s, per_hour: 1000, start_timeout: 5m}\n"
)
_WATCHED_S = 600.0


def longest_pause(cluster: Cluster, job: str, nodes: int, change: Callable[[], object]) -> float:
    """Return the seconds between the two steps that lie furthest apart until ten steps on so many nodes are saved."""
    change()
    end, times, since = time.monotonic() + _WATCHED_S, list[float](), None
    while time.monotonic() < end:
        for path in cluster.folder.glob(f"jobs/*/{job}/progress.json"):
            times += [at] if (at := path.stat().st_mtime) not in times[-1:] else []
        saved = kept(cluster, job, "saved")
        if saved.get("gpus") == nodes:
            since = saved["step"] if since is None else since
            if saved["step"] >= since + 10:
                return max(b - a for a, b in pairwise(times))
        time.sleep(0.02)
    raise TimeoutError(f"no {nodes} nodes within {_WATCHED_S:.0f} s")


def pauses(testbed: Testbed, folder: Path, hot: bool, times: int) -> tuple[list[float], list[float]]:
    """Return the longest pauses of growing and of shrinking."""
    cluster = Cluster(testbed, folder, ("A100",))
    cluster.runtime = "process"
    cluster.settings = {**SETTINGS, "tick": "500ms", "grace": "20s", "job_dirs": str(folder / "jobs")}
    share = folder / "files"
    for made in (folder / "policies", share):
        made.mkdir(parents=True)
    (folder / "policies" / "quick.yaml").write_text(POLICY)
    cluster.write_inventory(policies={"A100": "quick"})
    cluster.start_controller()
    try:
        options, run = torchrun_options(folder)
        sizes = [
            "--resizable",
            *(["hot", "--gpus-per-node", "8"] if hot else []),
            "--sizes",
            "8,16",
            "--cooldown",
            "1s",
        ]
        group = "" if hot else "--nnodes $WORLD_SIZE --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT "
        script = f"exec {run.replace('--nproc', group + '--nproc', 1)}"
        other = crowd(cluster, share, "0")
        cluster.wait_state(other, "RUNNING")
        job = cluster.shared(script, share, *sizes, *options)
        wait_until(lambda: kept(cluster, job, "saved").get("step", 0) > 20, 120, "its first steps")
        grown, shrunk = [], []
        for turn in range(times):
            grown.append(longest_pause(cluster, job, 2, (share / str(turn)).touch))
            shrunk.append(longest_pause(cluster, job, 1, lambda turn=turn: crowd(cluster, share, str(turn + 1))))  # type: ignore[misc]
        cluster.clear()
        return grown, shrunk
    finally:
        cluster.close()


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=3)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as where, Testbed(Path(where) / "testbed") as testbed:
        for name, hot in (("hot", True), ("restart", False)):
            grown, shrunk = pauses(testbed, Path(where) / name, hot, args.times)
            for what, found in (("grows", grown), ("shrinks", shrunk)):
                each = ", ".join(f"{one:.1f}" for one in found)
                print(f"{name}, {what}: {statistics.mean(found):.1f} s without a step ({each})", flush=True)


if __name__ == "__main__":
    main()
