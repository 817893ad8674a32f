"""RLTune's speed: environment steps per second with picks by the network, and one live decision over a full window.

`.venv/bin/python -m benchmarks.rltune [--seconds 5]`

A step is one job started by the policy. CPU seconds of one thread are printed beside wall time: on a busy machine the
first is what it costs. The public RLTune code does 25,600 steps in 117 s without its optimiser (2 cores), learning left
in; `learning` below counts it likewise.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpusched.agents.common import torch_
from gpusched.agents.rltune.candidates import CandidateRule, arrays_of, without_net
from gpusched.agents.rltune.episodes import cut_episodes
from gpusched.agents.rltune.evaluation import TraceEvaluation
from gpusched.agents.rltune.ppo import Learner
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import TrainedModel
from gpusched.model.plan import Plan
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.sched.decide import decide
from gpusched.sim.pool import Pool
from gpusched.traces.generate import generate
from gpusched.traces.workload import PHILLY_LIKE, load_workload
from tests.sched.worlds import node, pending, running, snapshot

PUBLIC = 25_600 / 117


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    settings = RltuneSettings()
    torch_.set_up(0)
    trace = generate(replace(load_workload(PHILLY_LIKE), jobs=3000), 0)
    base = without_net(CandidateRule("sjf", {"estimate": -1.0}), settings)
    evaluation = TraceEvaluation(trace, Pool.uniform(4, 8), settings)
    before = evaluation.result(base)
    assert before is not None
    episodes = cut_episodes(before, settings, 16, np.random.default_rng(0))
    learner = Learner(base, settings, 0)
    learner.imitate(episodes, lambda done: None)
    costs = [0.0] * len(episodes)
    for name, act in (
        ("playing", lambda: learner.plays(episodes, 2)),
        ("learning", lambda: learner.improve(episodes, costs)),
    ):
        act()
        first, wall, cpu = learner.steps, time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < options.seconds:
            act()
        steps = learner.steps - first
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{name}: {steps:,} steps, {steps / wall:,.0f} per second ({steps / cpu:,.0f} per CPU second): "
              f"{steps / wall / PUBLIC:.0f}x the public code ({steps / cpu / PUBLIC:.0f}x)")  # fmt: skip
    for name, place, attention in (
        ("", "best-fit", False), (", attention", "best-fit", True), (", place: milp", "milp", False),
    ):  # fmt: skip
        agent = Learner(base, replace(settings, attention=attention), 0)
        agent.imitate(episodes, lambda done: None)
        times, last = _decision(agent, settings, place)
        print(f"one live decision, 256 jobs on 150 nodes{name}: {1000 * min(times):.2f} ms (least of 20; median "
              f"{1000 * median(times):.2f}, most {1000 * max(times):.2f})")  # fmt: skip
        if last.remarks:
            print(f"  {last.remarks['p']}")


def _decision(learner: Learner, settings: RltuneSettings, place: str) -> tuple[list[float], Plan]:
    rng = np.random.default_rng(0)
    nodes = [node(f"n{i:03}", gpu_type=("V100", "P100", "K80")[i % 3]) for i in range(150)]
    busy = [
        running(f"r{i}", {f"n{i:03}": tuple(range(int(rng.integers(1, 8))))}, 5000.0 + 60.0 * i) for i in range(140)
    ]
    jobs = [pending(f"j{i}", int(rng.choice([1, 2, 4, 8])), submit=float(i), name=f"model{i % 5}") for i in range(256)]
    speeds = {f"model{m}": {"V100": 1.0, "P100": 0.7 - 0.1 * m, "K80": 0.4 - 0.08 * m} for m in range(5)}
    snap = snapshot(nodes, jobs, busy)
    mapping = Mapping(speeds=speeds)
    policies = {"p": PolicySpec(name="rltune", agent="rltune", place=place, mapping=mapping)}  # type: ignore[arg-type]
    import msgspec

    snap = msgspec.structs.replace(snap, policies=policies)
    model = TrainedModel(
        "rltune", arrays_of(learner.policy()), {"knows": settings.knows, "backfill": "skip"}, "", "bench"
    )
    decide(snap, {"p": model})
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        plan = decide(snap, {"p": model})
        times.append(time.perf_counter() - begin)
    assert plan.actions
    assert not plan.troubles
    return times, plan


if __name__ == "__main__":
    main()
