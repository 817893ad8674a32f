"""Judge run time estimates on a trace's later days: coverage, errors, and waits where the shortest goes first.

python -m benchmarks.run_times philly_2017.csv.gz --format philly-csv --since 2017-10-16 --by-group
python -m benchmarks.run_times --generate 3

Each line: a cluster (or a generated history) and its load; coverage of the 50 and 90 % intervals, CRPS, log error of
the median and of the mean of the user's last two run times; mean waits under sjf-estimate: by the last two, by history
with ties in order of submission, with the last first, and by real run times. Replays begin with the days judged, so
estimates have no past there.
"""

from __future__ import annotations

import argparse

import numpy as np

from gpusched.agents.predictor.evaluate import evaluate
from gpusched.errors import GpuschedError
from gpusched.estimation.estimators import Estimator, HistoryEstimator, LastTwo, followed
from gpusched.model.policy import PolicySpec, Ties
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.traces.load import load
from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.slicing import nodes_for_load, parse_trace_time, slice_trace
from gpusched.traces.trace import Trace

GPUS = 8  # per node
MIN_JOBS = 300
LOADS = (0.9, 1.1)
DAY_S = 86400.0


def history(seed: int, jobs: int = 12_000, users: int = 150, days: int = 60) -> Trace:
    """Generate jobs of many users in the form of PAI's and Helios' tables, which cannot be redistributed.

    A user has projects, begun and left over time, each with its own GPUs and typical run time; runs are submitted one
    by one or in sweeps of one length, named with a number; one in six fails early.
    """
    rng = np.random.default_rng(seed)
    owner = np.minimum(rng.zipf(1.5, 4 * users) - 1, users - 1)  # of projects
    begin = rng.uniform(-10, days, len(owner)) * DAY_S
    gpus = rng.choice([1, 2, 4, 8, 16], len(owner), p=[0.55, 0.15, 0.15, 0.12, 0.03])
    typical, spread = rng.lognormal(7.6, 1.6, len(owner)), rng.uniform(0.1, 0.9, len(owner))
    rows: list[tuple[float, float, int, int, str]] = []
    while len(rows) < jobs:
        project = int(rng.integers(len(owner)))
        at = begin[project] + rng.exponential(8 * DAY_S)
        length = typical[project] * rng.lognormal(0.0, spread[project])
        for run in range(int(rng.geometric(0.1)) if rng.random() < 0.35 else 1):
            ran = rng.lognormal(4.0, 1.0) if rng.random() < 1 / 6 else length * rng.lognormal(0.0, 0.15)
            name = f"project{'abcdefghij'[project % 10]}{'klmnopqrst'[project // 10 % 10]}-{len(rows)}"
            rows.append((at + 20.0 * run, ran, int(gpus[project]), int(owner[project]), name))
    rows = sorted(row for row in rows if 0 <= row[0] < days * DAY_S)
    submit, ran, size, user, names = map(list, zip(*rows, strict=True))
    return assemble(
        name=f"generated {seed}", epoch=0.0, ids=tuple(map(str, range(len(rows)))), submit=np.array(submit) - submit[0],
        duration=np.maximum(np.array(ran), 1.0), gpus=np.array(size, np.int64),
        names={"user": intern([f"u{one}" for one in user]), "model": intern(names)},
        columns={"wait": np.zeros(len(rows))},
    )  # fmt: skip


def wait_h(trace: Trace, load_: float, policy: ReplayPolicy, estimator: Estimator | None) -> float:
    """Return the mean wait, in hours."""
    pool = Pool.uniform(nodes_for_load(trace, GPUS, load_), GPUS)
    return float(np.nanmean(replay(trace, pool, policy, estimator=estimator).start - trace.submit)) / 3600


def shortest(ties: Ties) -> ReplayPolicy:
    """Return the rule that all estimates are judged under."""
    return policy_of_spec(PolicySpec(name="short", order="sjf-estimate", place="best-fit", backfill="skip", ties=ties))


def judge(trace: Trace, since: float) -> list[list[float]]:
    """Print a trace's lines and return its waits."""
    found = evaluate(followed(trace)[0], trace, np.flatnonzero(trace.submit >= since))
    errors = " ".join(f"{row.log_error:.3f}" for row in found.rows[:2])
    later, waits = slice_trace(trace, since=since), []
    for load_ in LOADS:
        by = [wait_h(later, load_, shortest("first"), LastTwo())]
        by += [wait_h(later, load_, shortest(ties), HistoryEstimator()) for ties in ("first", "last")]
        by.append(wait_h(later, load_, policy_by_name("sjf-oracle+skip"), None))
        quality = f"{found.covered_50:.1%} {found.covered_90:.1%} {found.crps:.3f} {errors}"
        hours = " ".join(f"{wait:.2f} h" for wait in by)
        print(f"{trace.name} {load_}: {found.jobs} jobs {quality} | {hours}", flush=True)
        waits.append(by)
    return waits


def main() -> None:
    """Judge what the command line names, and print waits relative to those by the last two: geometric mean, pooled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--format")
    parser.add_argument("--since")
    parser.add_argument("--by-group", action="store_true")
    parser.add_argument("--generate", type=int, default=0, metavar="SEEDS")
    args = parser.parse_args()
    waits: list[list[float]] = []
    if args.generate:
        for seed in range(args.generate):
            trace = history(seed)
            waits += judge(trace, float(trace.submit[-1]) / 2)
    else:
        whole = load(args.trace, args.format)
        for group in whole.groups if args.by_group else (None,):
            try:
                trace = slice_trace(whole, vc=group)
                since = parse_trace_time(trace, args.since)
            except GpuschedError:
                continue
            if (trace.submit >= since).sum() >= MIN_JOBS:
                waits += judge(trace, since)
    ratio, total = np.array(waits) / np.array(waits)[:, :1], np.sum(waits, 0)
    print("geometric mean", np.exp(np.log(ratio).mean(0)).round(3), "pooled", (total / total[0]).round(3))


if __name__ == "__main__":
    main()
