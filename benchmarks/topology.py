"""How fast replays are in which placement and neighbours cost jobs something.

    .venv/bin/python -m benchmarks.topology [--jobs 20000] [--load 0.9] [--seed 0] [--topology 16x4-racks] [--repeat 3]

The setting of `gpusched reproduce topology`. A line a policy: jobs a second (the best of ``--repeat`` runs, compiled
before) and mean JCT. Placements once more with EASY backfill, by limits of one to five times the run time alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from gpusched.agents.topology.engine import placed_by
from gpusched.agents.topology.reproduce import POLICIES, WEIGHTS, learns, run_of, settings_of
from gpusched.agents.topology.workloads import draw
from gpusched.sim.engine.placing import Network
from gpusched.sim.placed import RULES
from gpusched.sim.replay import replay


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
    for name in (name for name in POLICIES if WEIGHTS.is_file() or not learns(name)):
        runs = [run_of(setting, drawn, args.seed, name) for _ in range(args.repeat)]
        run = max(runs, key=lambda run: run.jobs_per_s)
        jct = float((run.end - run.trace.submit).mean()) / 3600
        print(f"{name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)
    trace, kind = drawn
    trace = replace(trace, limit=trace.duration * np.random.default_rng(args.seed).uniform(1.0, 5.0, len(trace)))
    network = Network(setting.tree, setting.model, kind)
    for name in RULES:
        policy = replace(placed_by(name, f"{name}+easy"), backfill="easy", knows="limit")
        done = [replay(trace, setting.pool, policy, network=network, seed=args.seed) for _ in range(args.repeat)]
        run = max(done, key=lambda run: run.jobs_per_s)
        jct = float((run.end - trace.submit).mean()) / 3600
        print(f"{policy.name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)


if __name__ == "__main__":
    main()
