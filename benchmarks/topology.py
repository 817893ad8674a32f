"""How fast replays are in which placement and neighbours cost jobs something.

    .venv/bin/python -m benchmarks.topology [--jobs 20000] [--load 0.9] [--seed 0] [--topology 16x4-racks] [--repeat 3]
        [--policy contention] [--hosts 847]

The setting of `gpusched reproduce topology`. A line a policy: jobs a second (the best of ``--repeat`` runs, compiled
before) and mean JCT. Placements once more with EASY backfill, by limits of one to five times the run time alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gpusched.agents.topology.engine import placed_by
from gpusched.agents.topology.reproduce import POLICIES, WEIGHTS, learns, run_of, settings_of
from gpusched.agents.topology.workloads import draw
from gpusched.sim.engine.placing import Network
from gpusched.sim.placed import RULES
from gpusched.sim.replay import replay


def clos(hosts: int) -> str:
    """Three tiers: racks of odd sizes, below pods, below one switch; one host of some racks on a way up of its own."""
    lines, left, leaf, pod = ["spine: {}"], [f"h{i}" for i in range(hosts)], 0, 0
    while left:
        lines.append(f"pod{pod}: {{uplink: {(800, 400, 1600)[pod % 3]}G, parent: spine}}")
        for _ in range((8, 7, 9, 6)[pod % 4] if left else 0):
            names, left = left[: 9 + leaf % 8], left[9 + leaf % 8 :]
            if leaf % 5 == 0 and len(names) > 1:
                lines.append(f"own{leaf}: {{nodes: [{names.pop()}], uplink: {25 + leaf}G, parent: leaf{leaf}}}")
            uplink = (400, 800, 200, 1600)[leaf % 4]
            lines.append(f"leaf{leaf}: {{nodes: [{', '.join(names)}], uplink: {uplink}G, parent: pod{pod}}}")
            leaf += 1
        pod += 1
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=20_000)
    options.add_argument("--load", type=float, default=0.9)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--topology", default="16x4-racks")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--policy", action="append")
    options.add_argument("--hosts", type=int, help="a Clos of three tiers with so many, in place of --topology")
    args = options.parse_args()
    with TemporaryDirectory() as folder:
        if args.hosts:
            args.topology = f"{folder}/clos.yaml"
            Path(args.topology).write_text(clos(args.hosts))
        setting = settings_of(args.topology, None)[0]
    drawn = draw(setting, args.load, args.seed, args.jobs)
    wanted = args.policy or [name for name in POLICIES if WEIGHTS.is_file() or not learns(name)]
    for name in wanted:
        runs = [run_of(setting, drawn, args.seed, name) for _ in range(args.repeat)]
        run = max(runs, key=lambda run: run.jobs_per_s)
        jct = float((run.end - run.trace.submit).mean()) / 3600
        print(f"{name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)
    trace, kind = drawn
    trace = replace(trace, limit=trace.duration * np.random.default_rng(args.seed).uniform(1.0, 5.0, len(trace)))
    network = Network(setting.tree, setting.model, kind)
    for name in (name for name in wanted if name in RULES):
        policy = replace(placed_by(name, f"{name}+easy"), backfill="easy", knows="limit")
        done = [replay(trace, setting.pool, policy, network=network, seed=args.seed) for _ in range(args.repeat)]
        run = max(done, key=lambda run: run.jobs_per_s)
        jct = float((run.end - trace.submit).mean()) / 3600
        print(f"{policy.name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)


if __name__ == "__main__":
    main()
