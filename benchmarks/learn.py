"""Batched clusters and the paper's agent: decisions per second, and seconds to 99 % of the optimum.

python -m benchmarks.learn
"""

from __future__ import annotations

import argparse
import time

from gpusched.agents.gist import dqn, expectimax
from gpusched.agents.gist.dqn import decisions_per_s
from gpusched.agents.gist.setting import paper

MARK = 0.99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of speed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for clusters in (256, 1024, 4096, 16384):
        for variant in ("masked", "wait"):
            wall, cpu = decisions_per_s(paper("A100", 24), variant, clusters, options.seconds)
            print(f"{variant:7} {clusters:6} clusters: {wall:9,.0f} decisions/s of wall time, {cpu:9,.0f} of CPU time")
    optimum = expectimax.clairvoyant(paper("A100"))
    for variant in ("masked", "paper"):
        for seed in range(options.seeds):
            cpu = time.process_time()
            found = dqn.train(
                paper("A100"), variant, dqn.DQNSettings(), seed, until=lambda point: point.utilization >= MARK * optimum
            )
            last = found.evaluations[-1]
            print(
                f"{variant:7} seed {seed}: U {last.utilization:.4f} after {last.episodes} episodes, "
                f"{found.seconds:.2f} s, {time.process_time() - cpu:.2f} s of CPU time"
            )


if __name__ == "__main__":
    main()
