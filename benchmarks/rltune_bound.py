"""Whether any weighting of RLTune's features beats the best rule: chosen in hindsight, by cluster and load.

    .venv/bin/python -m benchmarks.rltune_bound philly_2017.csv.gz [--weightings 30] [--vc ed69ec ...] [--workers 2]
        [--preempt]

The cells of `gpusched reproduce rltune --policy rltune --trace ... --out F`: a cluster's last jobs on nodes for a load;
no job is stopped. Mean JCT by cell, and in percent of the best rule's that knows the same (of the agent's own table):

- ``untrained``, ``shipped``: the agent's start, and the included weights, which are trained on all of these clusters
- ``oracle``: the best of the rules, and of the start, with true run times: what better estimates could give
- ``hindsight``: the best weighting of this very cell: of the start, the included one, and so many more, every second
  drawn and every second a rule that training could choose; ``win``: how many are better than the best rule

Then on how many clusters weightings win, by load: the best of each cell in hindsight; the one that wins most cells, in
hindsight; and for each cluster the one that wins most on the others (of equals, by mean JCT), as training could choose.

With ``--preempt`` instead: `rltune-preempt` as included, in percent from `sjf-estimate-skip`. Mean wait (all time that
a job does not run), bounded slowdown and JCT, by cell, and means with 95 % intervals over clusters. Restarts take 30 s.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import gpusched.data
from benchmarks.mapping import interval
from gpusched.agents.rltune import candidates, table
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.agents.training.public import LOADS, _clusters
from gpusched.config.weights import load_file
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.sched.state import Floats
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_order
from gpusched.sim.replay import replay
from gpusched.study.options import PaperOptions
from gpusched.study.study import Scenario
from gpusched.traces.load import load
from gpusched.traces.slicing import of_whole_gpus

SHIPPED = Path(gpusched.data.__path__[0]) / "policies" / "rltune" / "default.safetensors"
MAYBE = ("waited", "burst_waiting", "burst_age", "burst_ahead", "burst_runs", "user_share", "hour_sin")


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace")
    options.add_argument("--weightings", type=int, default=30)
    options.add_argument("--vc", action="append")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--preempt", action="store_true")
    args = options.parse_args()
    trace = of_whole_gpus(load(args.trace, None))
    clusters = _clusters(trace, PaperOptions(vcs=tuple(args.vc or ())))
    cells = [(one.name, at, scenario) for at in LOADS for one in clusters
             for at_, scenario in zip(one.loads, one.scenarios, strict=True) if at_ == at]  # fmt: skip
    if args.preempt:
        with ProcessPoolExecutor(args.workers) as workers:
            changes = np.array(list(workers.map(preempting, [scenario for *_, scenario in cells])))
        for (name, at, _), row in zip(cells, changes, strict=True):
            print(f"{name:>7} {at:g}: wait {row[0]:+.0%}, bounded slowdown {row[1]:+.0%}, JCT {row[2]:+.0%}")
        for at, of in zip(LOADS, changes.reshape(len(LOADS), len(clusters), 3), strict=True):
            print(f"mean at {at:g}:", *(interval(list(figure)) for figure in of.T))
        return
    heads = " ".join(f"{head:>9}" for head in ("untrained", "shipped", "oracle", "hindsight"))
    print(f"{'cell':>12} {'best rule, same knowledge':>34} {heads} win")
    rows = []
    with ProcessPoolExecutor(args.workers) as workers:
        done = workers.map(partial(figures, args.weightings), [scenario for *_, scenario in cells])
        for (name, at, _), (rule, shown, ratios) in zip(cells, done, strict=True):
            rows.append(ratios)
            changes = " ".join(f"{100 * one - 100:+8.1f}%" for one in (*shown, ratios.min()))
            print(f"{name:>7} {at:g}: {rule:>34} {changes} {int((ratios < 1).sum())}", flush=True)
    if len(clusters) > 1:  # else there are no others to choose on
        summary(np.array(rows).reshape(len(LOADS), len(clusters), -1))


def preempting(scenario: Scenario) -> Floats:
    """Return the relative change of mean wait, bounded slowdown and JCT: ``float64[3]``."""
    found, run_s = [], scenario.trace.duration
    for policy in (policy_by_name("rltune-preempt"), policy_of_order("sjf-estimate-skip")):
        done = replay(scenario.trace, scenario.pool, policy, estimator=HistoryEstimator(), restart_s=30.0)
        jct = done.end - scenario.trace.submit
        found.append([(jct - run_s).mean(), np.maximum(1.0, jct / np.maximum(run_s, 10.0)).mean(), jct.mean()])
    return np.array(np.divide(*found) - 1.0)


def figures(weightings: int, scenario: Scenario) -> tuple[str, tuple[float, float, float], Floats]:
    """Return the best rule of a cell; untrained, shipped and oracle relative to it; and so each weighting."""

    def jct(policy: ReplayPolicy) -> float:
        done = replay(scenario.trace, scenario.pool, policy, estimator=HistoryEstimator())  # as live
        return float((done.end - scenario.trace.submit).mean())

    own, knowing = RltuneSettings(), RltuneSettings(knows="oracle")
    by_rule = {policy.name: jct(policy) for policy in table.heuristics(scenario.trace, own.knows)}
    best = min(by_rule, key=by_rule.__getitem__)
    included = candidates.agent_of_model("rltune", load_file(SHIPPED, "rltune"))
    weighed = [*(agent(rule, own) for rule in drawn(weightings)), included]
    ratios = np.array([jct(policy) for policy in weighed]) / by_rule[best]
    start = candidates.rules(knowing)[0]
    truth = min(*(jct(policy_of_order(name)) for name in ("sjf-oracle", "sjf-oracle-skip")), jct(agent(start, knowing)))
    shown = (float(ratios[0]), float(ratios[-1]), truth / by_rule[best])
    return f"{best} {by_rule[best]:,.0f} s", shown, ratios


def agent(rule: candidates.CandidateRule, settings: RltuneSettings) -> ReplayPolicy:
    """Return the agent with one weighting."""
    return candidates.agent_of(candidates.without_net(rule, settings), rule.name, settings)


def drawn(weightings: int) -> list[candidates.CandidateRule]:
    """Return the start, and so many of the agent's rules and of weightings drawn around what these weigh."""
    start, *others = candidates.rules(RltuneSettings())
    rng = np.random.default_rng(0)
    own, found = [others[i] for i in rng.permutation(len(others))], [start]
    for number in range(weightings):
        if number % 2 and own:
            found.append(own.pop())
            continue
        order = {"estimate": -1.0, "gpus": -rng.uniform(0, 1)}
        order |= {name: rng.normal(0, 0.3) for name in MAYBE if rng.random() < 0.25}
        found.append(candidates.CandidateRule(f"drawn {number}", order))
    return found


def summary(ratios: Floats) -> None:
    """Print on how many clusters weightings win, ``ratios: float64[loads, clusters, weightings]``."""
    wins, clusters = ratios < 1.0, ratios.shape[1]

    def line(words: str, of: Sequence[int] | Floats, mean: Floats) -> None:
        counts = ", ".join(f"{count} at {load:g} (mean {100 * m - 100:+.1f}%)"
                           for count, load, m in zip(of, LOADS, mean, strict=True))  # fmt: skip
        print(f"{words}, of {clusters}: {counts}")

    line("best of each cell in hindsight", wins.any(2).sum(1), ratios.min(2).mean(1))
    one = most(ratios)
    line(f"one for all in hindsight ({named(one, ratios.shape[2])})", wins[:, :, one].sum(1), ratios[:, :, one].mean(1))
    others = [most(np.delete(ratios, cluster, 1)) for cluster in range(clusters)]
    known = ratios[:, np.arange(clusters), others]
    line("chosen on the other clusters", (known < 1.0).sum(1), known.mean(1))
    print(f"weightings that win {clusters - 1} at every load: {int(((wins.sum(1) >= clusters - 1).all(0)).sum())}")


def most(ratios: Floats) -> int:
    """Return the weighting that wins most cells, of equals the one with the least mean JCT."""
    wins, mean = (ratios < 1.0).sum((0, 1)), np.log(ratios).mean((0, 1))
    return int(np.lexsort((mean, -wins))[0])


def named(number: int, count: int) -> str:
    """Return the name of a weighting; of one drawn what it weighs."""
    if number == count - 1:
        return "the included weights"
    rule = drawn(count)[number]
    weights = ", ".join(f"{name} {weight:+.2f}" for name, weight in rule.order.items())
    return weights if rule.name.startswith("drawn") else rule.name


if __name__ == "__main__":
    main()
