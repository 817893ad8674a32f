"""The GIST agent at scale against every heuristic that knows as much: mean JCT and utilization, seed by seed.

Poisson arrivals at an offered load of 0.9, jobs of 1 to 32 GPUs (one to four servers), run times drawn from two
lognormals and limits from a menu above them: `workload`. The seeds were used neither for learning nor for choosing.
Beside the agent stand the starts of its search as they are, so that what the training added can be seen.

`.venv/bin/python -m benchmarks.agent_scale [--policy DIR] [--servers 8 32] [--first-seed 9000] [--seeds 10]
[--jobs 10000]`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.evaluate import heuristics, interval
from gpusched.agents.gist.scale import STARTS, figures, policy_of, start
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.sim.policies import ReplayPolicy, policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.traces.generate import generate
from gpusched.traces.workload import Workload, load_workload

FIRST_SEED = 9000
WORKLOAD = Path(__file__).with_name("agent_workload.yaml")
_FINALISTS = 8

Figures = npt.NDArray[np.float64]


def workload(servers: int, jobs: int) -> Workload:
    """Return the workload's description for ``servers`` servers of 8 GPUs."""
    from dataclasses import replace

    return replace(load_workload(WORKLOAD), jobs=jobs, load_gpus=8 * servers)


def measured(
    policies: list[tuple[ReplayPolicy, str]], servers: int, seeds: int, jobs: int, first_seed: int = FIRST_SEED
) -> Figures:
    """``float64[policies, seeds, 2]``: mean JCT in hours, utilization in %."""
    found = np.zeros((len(policies), seeds, 2))
    pool = Pool.uniform(servers, 8)
    for s in range(seeds):
        trace = generate(workload(servers, jobs), first_seed + s)
        for p, (policy, placement) in enumerate(policies):
            agent_figures = figures(policy, trace, pool, placement or None)
            found[p, s] = agent_figures.mean_jct_s / 3600, 100 * agent_figures.utilization
    return found


def compare(agent: ReplayPolicy, servers: int, seeds: int, jobs: int, first_seed: int) -> None:
    """Every heuristic with best fit, then the best of them with other placements; the agent and untrained starts."""
    plain = [(h, "best-fit") for h in heuristics("estimate")]
    found = measured(plain, servers, seeds, jobs, first_seed)
    best = np.argsort(found[:, :, 0].mean(1))[:_FINALISTS]
    more = [(plain[i][0], placement) for i in best for placement in ("first-fit", "spread")]
    rivals = plain + more
    found = np.concatenate((found, measured(more, servers, seeds, jobs, first_seed)))
    starts = [policy_of(start(name, width=0), f"untrained: {name}") for name in STARTS]
    agent_figures, *begun = measured([(p, "") for p in (agent, *starts)], servers, seeds, jobs, first_seed)
    order = np.argsort(found[:, :, 0].mean(1))
    top = found[order[0]]
    print(f"\n{servers} servers, {seeds} seeds of {jobs} jobs from {first_seed} on: mean JCT (h), utilization (%), "
          "JCT against the best heuristic (%)")  # fmt: skip
    rows = [("agent", agent_figures), *((p.name, f) for p, f in zip(starts, begun, strict=True))]
    rows += [(f"{rivals[i][0].name}, {rivals[i][1]}", found[i]) for i in order[:6]]
    for name, row in rows:
        change = 100 * (row[:, 0] / top[:, 0] - 1)
        print(f"{name:36}{row[:, 0].mean():8.3f}{row[:, 1].mean():8.2f}{change.mean():+8.1f}")
    untrained = min(begun, key=lambda row: row[:, 0].mean())
    for what, row in (("the best heuristic", top), ("the best untrained start", untrained)):
        against(what, agent_figures, row[:, 0], row[:, 1])
    against("the best heuristic of each seed", agent_figures, found[:, :, 0].min(0), found[:, :, 1].max(0))


def against(what: str, agent_figures: Figures, jct: Figures, use: Figures) -> None:
    """Print the agent's results relative to these, over the seeds, with Student's 95 % interval."""
    change, points = 100 * (agent_figures[:, 0] / jct - 1), agent_figures[:, 1] - use
    low, high = interval(change.tolist())
    between = "" if low is None else f" ({low:+.1f} to {high:+.1f})"
    print(f"against {what}: JCT {change.mean():+.1f} %{between} on the mean, {change.max():+.1f} % on the worst seed; "
          f"utilization {points.mean():+.2f} points on the mean, {points.min():+.2f} on the worst")  # fmt: skip
    print("  JCT % by seed:      ", " ".join(f"{x:+6.1f}" for x in change))
    print("  utilization by seed:", " ".join(f"{x:+6.2f}" for x in points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default=str(BUILT_IN / "gist.yaml"))
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=10_000)
    args = parser.parse_args()
    agent = policy_of_spec(load_policy(args.policy))
    for servers in args.servers:
        compare(agent, servers, args.seeds, args.jobs, args.first_seed)


if __name__ == "__main__":
    main()
