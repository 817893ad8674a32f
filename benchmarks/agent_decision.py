"""CPU time of one live decision through the GIST agent, from the snapshot to the plan with all reasons.

`.venv/bin/python -m benchmarks.agent_decision [--jobs 1000] [--nodes 140] [--repeat 15] [--width 8]`
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from benchmarks.decide import build, median_ms
from gpusched.agents.gist.networks import heuristic
from gpusched.config.weights import TrainedModel
from gpusched.model.policy import PolicySpec
from gpusched.sched.check import check
from gpusched.sched.decide import decide

EASY = PolicySpec(name="easy", place="best-fit", backfill="easy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=140)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--width", type=int, default=8, help="of the networks' hidden layers")
    args = parser.parse_args()
    gist = PolicySpec(name="gist", agent="gist", fallback=EASY, place="best-fit", backfill="easy")
    models = {"p": TrainedModel("gist", heuristic(args.width, log_limit=-1.0), {}, "", "of the benchmark")}
    print(f"{args.jobs} pending jobs, {args.nodes} nodes; median CPU ms of {args.repeat}")
    print(f"{'cluster':10}{'started':>8}{'agent':>8}{'check':>8}{'sjf, EASY':>11}")
    for cluster, full in (("full", 0.97), ("busy", 0.6), ("empty", 0.0)):
        snapshot = build(args.nodes, args.jobs, full, gist, links=False)
        staged = msgspec.structs.replace(snapshot, policies={"p": msgspec.structs.replace(EASY, order="sjf")})
        plan = decide(snapshot, models)
        assert not plan.troubles, plan.troubles
        agent = median_ms(args.repeat, lambda s=snapshot: decide(s, models))  # type: ignore[misc]
        checked = median_ms(args.repeat, lambda s=snapshot, p=plan: check(p, s))  # type: ignore[misc]
        decide(staged)
        plain = median_ms(args.repeat, lambda s=staged: decide(s))  # type: ignore[misc]
        print(f"{cluster:10}{len(plan.actions):8}{agent:8.2f}{checked:8.2f}{plain:11.2f}", flush=True)
    print("torch was imported" if "torch" in sys.modules else "torch was not imported")


if __name__ == "__main__":
    main()
