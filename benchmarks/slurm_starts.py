"""How near replays of sacct's output come to Slurm's own starts: `python -m benchmarks.slurm_starts`.

Jobs of 1 to 16 GPUs with limits of 1 to 5 minutes sleep in one queue on four nodes of 8, under priority/basic with
backfill; intervals are as short as the jobs. Prints the recorded mean wait, and each policy's error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.testbed import Testbed
from tests.testbed.slurm import SlurmSite
from tests.testbed.slurm_load import completed, sleepers

SETTINGS = {
    "PriorityType": "priority/basic",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_resolution=1",
}
POLICIES = ("fifo+easy", "fifo+conservative", "fifo+skip", "fifo+none")


def errors(log: Path, *options: str) -> str:
    """Return the recorded mean wait, and the error of each policy's replay."""
    words = [word for policy in POLICIES for word in ("-P", policy)]
    argv = [sys.executable, "-m", "gpusched", "replay", str(log), "-N", "4", "--json", *words, *options]
    rows = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ).stdout)
    found = ", ".join(f"{row['policy']} {row['wait_error']:+.1%}" for row in rows)
    return f"recorded {rows[0]['recorded_mean_wait_s']:.1f} s: {found}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds; the shortest sleep one")
    parser.add_argument("--over", type=float, default=0.0, help="seconds over which they come")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Testbed(Path(folder), count=4) as testbed:
        site = SlurmSite(testbed, settings=SETTINGS)
        site.up()
        try:
            site.run(["scontrol", "update", "PartitionName=A100", "Nodes=ALL"])
            for seed in given.seed:
                log = Path(folder) / f"{seed}.txt"
                begin = time.time() + 1  # whole seconds: none of the draw before is of this one
                sleepers(site, given.jobs, given.longest, given.over, seed)
                log.write_text(completed(site, begin, given.jobs, timeout_s=3600))
                print(f"seed {seed}, --backfill-every 1s: {errors(log, '--backfill-every', '1s')}", flush=True)
                print(f"seed {seed}: {errors(log)}", flush=True)
        finally:
            site.down()


if __name__ == "__main__":
    main()
