"""How fast replays are in which placement and neighbours cost jobs something.

    .venv/bin/python -m benchmarks.topology [--jobs 20000] [--load 0.9] [--seed 0] [--topology 16x4-racks] [--repeat 3]

The setting of `gpusched reproduce topology`. A line a policy: jobs a second (the best of ``--repeat`` runs, compiled
before) and mean JCT.
"""

from __future__ import annotations

import argparse

from gpusched.agents.topology.reproduce import POLICIES, run_of, settings_of
from gpusched.agents.topology.workloads import draw


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=20_000)
    options.add_argument("--load", type=float, default=0.9)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--topology", default="16x4-racks")
    options.add_argument("--repeat", type=int, default=3)
    args = options.parse_args()
    setting = settings_of(args.topology, None)[0]
    drawn = draw(setting, args.load, args.seed, args.jobs)
    for name in POLICIES:
        runs = [run_of(setting, drawn, args.seed, name) for _ in range(args.repeat)]
        run = max(runs, key=lambda run: run.jobs_per_s)
        jct = float((run.end - run.trace.submit).mean()) / 3600
        print(f"{name:>15}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)


if __name__ == "__main__":
    main()
