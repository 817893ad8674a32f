"""How fast replays are whose policy gives resizable jobs their GPUs, and what comes of it.

    .venv/bin/python -m benchmarks.sizing [--jobs 10000] [--nodes 16] [--load 0.9] [--seed 0] [--restart 30]
        [--policy FOLDER]...

Poisson arrivals on nodes of eight GPUs; jobs were submitted with 1, 2, 4 or 8 GPUs for a log-normal time (median 18
minutes) and may all have 1, 2, 4 or 8; their pace is in proportion to their GPUs, or with ``--power 0.8`` to that power
of them. A line a policy: jobs a second (the best of ``--repeat`` runs, compiled before), how many times slower than the
same jobs at fixed sizes (`easy`), mean JCT and resizes. ``agent``: one that answers at once, asked in Python as trained
agents are, with the rule of `drf`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import TrainedModel
from gpusched.model.policy import AGENTS, AgentTraits
from gpusched.sched.sizing.question import Question
from gpusched.sched.sizing.rules import DRF, wish
from gpusched.sched.state import Floats, Ints
from gpusched.sim.engine.build import ResizableJobs
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import one_job, replay
from gpusched.sim.result import ReplayResult
from gpusched.traces.trace import Trace

POLICIES = ("elastic", "drf", "optimus", "proportional", "sia")
GPUS, SIZES = 8, (1, 2, 4, 8)


def workload(jobs: int, nodes: int, load: float, seed: int) -> Trace:
    """Jobs whose fixed sizes use ``load`` of the GPUs."""
    rng = np.random.default_rng(seed)
    gpus: Ints = rng.choice(SIZES, jobs)
    lasts: Floats = rng.lognormal(7, 1, jobs)
    submit = np.cumsum(rng.exponential((gpus * lasts).mean() / (load * nodes * GPUS), jobs))
    zero, unknown = np.zeros(jobs, np.int64), np.full(jobs, -1, np.int64)
    return replace(
        one_job(), name="benchmark", ids=tuple(f"{i:06}" for i in range(jobs)), submit=submit, duration=lasts,
        limit=np.ceil(3 * lasts), gpus=gpus, gpu_milli=1000 + zero, nodes=zero, cores=unknown, memory_mib=unknown,
        user=unknown, group=unknown, model=zero, models=("m",), gpu_type=unknown, depends_on=unknown, status=unknown,
        wait=np.full(jobs, np.nan),
    )  # fmt: skip


def answers(question: Question) -> Ints:
    """Return the sizes that `drf` chooses."""
    wish(DRF, question.claims)
    return question.claims.jobs["wished"].copy()


def asked() -> ReplayPolicy:
    """Return a policy whose agent is called in Python."""
    live = SimpleNamespace(prepare=lambda model: None, choose_sizes=lambda weights, question: answers(question))
    REGISTRY["asked"] = AgentParts(sizes=lambda: live)
    AGENTS["asked"] = AgentTraits(sizes=True)
    spec = msgspec.structs.replace(load_policy(BUILT_IN / "drf.yaml"), agent="asked", name="agent")
    return replace(policy_by_name("drf"), name="agent", spec=spec, model=TrainedModel("asked", {}, {}, "", "asked"))


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--nodes", type=int, default=16)
    options.add_argument("--load", type=float, default=0.9)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--restart", type=float, default=30.0)
    options.add_argument("--power", type=float, default=1.0)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--policy", action="append", default=[], help="a trained agent's folder; may repeat")
    args = options.parse_args()
    trace, pool = workload(args.jobs, args.nodes, args.load, args.seed), Pool.uniform(args.nodes, GPUS)
    sizes = ResizableJobs(least=np.ones(args.jobs, np.int64), most=np.full(args.jobs, GPUS), linear=True)
    per_s = {(gpus, 1): gpus**args.power for gpus in SIZES}
    rates = Rates(profiles=Profiles(series={("m", ""): Series(per_s, "any")}))

    def best(policy: ReplayPolicy) -> ReplayResult:
        elastic = sizes if policy.chooses_sizes else None
        runs = [
            replay(trace, pool, policy, elastic=elastic, restart_s=args.restart, rates=rates)
            for _ in range(args.repeat)
        ]
        return max(runs, key=lambda run: run.jobs_per_s)

    fixed = best(policy_by_name("easy"))
    agents = [policy_of_spec(load_policy(folder), folder) for folder in args.policy]
    for policy in (None, *(policy_by_name(name) for name in POLICIES), asked(), *agents):
        run = fixed if policy is None else best(policy)
        jct = float((run.end - trace.submit).mean())
        print(
            f"{run.policy:>13}: {run.jobs_per_s:8,.0f} jobs/s, {fixed.jobs_per_s / run.jobs_per_s:5.1f} times easy's"
            f" time; mean JCT {jct:6,.0f} s, {int(run.restarts.sum()):6,} resizes",
            flush=True,
        )


if __name__ == "__main__":
    main()
