"""Speed of the engine on generated jobs: jobs per second inside, whole time and the process's largest memory.

`.venv/bin/python benchmarks/replay.py [--jobs 1000000] [--nodes 550] [--loads 0.7 0.9 1.1] [--policy fifo ...]`

CPU seconds of one thread are printed beside wall time: on a busy machine the first is what the engine costs.
`--queue` instead prints the cost of one decision as the queue and the pool grow, the least of three runs each;
`--svg FOLDER` draws it (the figures in docs). `--special` instead compares each special way to decide with the next
more general one.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plot import Series, loglog
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.replay import KINDS, replay, to_the_end
from gpusched.traces.trace import Trace

# GPUs of a job and how often: most are small, as in the Philly and Helios traces
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32), (0.60, 0.12, 0.12, 0.12, 0.03, 0.01)


def generated(jobs: int, pool: Pool, load: float, seed: int = 0) -> Trace:
    """Poisson arrivals at an offered load, lognormal run times, limits one to five times too long."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice(SIZES, jobs, p=WEIGHTS).astype(np.int64)
    duration = np.round(rng.lognormal(7.0, 1.5, jobs), 3) + 1.0
    rate = load * pool.total_gpus / float(np.mean(gpus * duration))
    none = np.full(jobs, -1, np.int64)
    return Trace(
        name=f"{jobs} jobs at load {load}",
        epoch=None,
        ids=tuple(map(str, range(jobs))),
        submit=np.cumsum(rng.exponential(1.0 / rate, jobs)),
        duration=duration,
        limit=duration * rng.uniform(1.0, 5.0, jobs),
        gpus=gpus,
        gpu_milli=np.full(jobs, 1000),
        nodes=np.zeros(jobs, np.int64),
        cores=none,
        memory_mib=none,
        user=rng.integers(0, 50, jobs),
        group=none,
        model=none,
        gpu_type=none,
        depends_on=none,
        status=none,
        wait=np.full(jobs, np.nan),
    )


def longest_queue(submit: np.ndarray, start: np.ndarray) -> int:
    """Return the maximum of waiting jobs at any time."""
    times = np.concatenate((submit, start))
    steps = np.concatenate((np.ones(len(submit)), -np.ones(len(start))))
    return int(np.cumsum(steps[np.lexsort((steps, times))]).max())


def row(trace: Trace, pool: Pool, policy: str, load: float) -> None:
    begin, cpu = time.perf_counter(), time.process_time()
    result = replay(trace, pool, policy)
    cpu, whole = time.process_time() - cpu, time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    jct = float(np.nanmean(result.end - trace.submit))
    print(
        f"{load:5.2f} {policy:20}{result.jobs_per_s:12,.0f}{result.sim_seconds:9.2f}{whole:9.2f}{cpu:9.2f}"
        f"{longest_queue(trace.submit, result.start):9,}{jct:12,.1f}{peak:9,.0f}",
        flush=True,
    )


def grow(folder: Path | None) -> None:
    """Microseconds per decision by nodes and queue length; the queue grows with the jobs at load 1.1."""
    print(f"{'nodes':>6}{'jobs':>9}{'queue':>8}  policy               us per decision")
    by_nodes: Series = {}
    by_queue: Series = {}
    policies = ("fifo+none", "sjf-oracle", "fifo+skip", "fifo+easy")
    for nodes, jobs in [(n, 60 * n) for n in (10, 32, 100, 320, 1000)] + [(100, j) for j in (600, 2000, 20000, 60000)]:
        pool = Pool.uniform(nodes, 8)
        trace = generated(jobs, pool, 1.1)
        for policy in policies:
            results = [replay(trace, pool, policy) for _ in range(3)]
            cost = 1e6 * min(result.sim_seconds / result.decisions for result in results)
            queue = longest_queue(trace.submit, results[0].start)
            print(f"{nodes:6}{jobs:9,}{queue:8,}  {policy:20}{cost:16.2f}", flush=True)
            if jobs == 60 * nodes:
                by_nodes.setdefault(policy, []).append((nodes, cost))
            if nodes == 100:
                by_queue.setdefault(policy, []).append((max(queue, 1), cost))
    if folder is not None:
        for name, x_name, series in (
            ("nodes", "nodes of 8 GPUs", by_nodes),
            ("queue", "longest queue, jobs", by_queue),
        ):
            lines = {policy: sorted(points) for policy, points in series.items()}
            text = loglog(f"Cost of a decision by {name}", x_name, "microseconds per decision", lines)
            (folder / f"replay-by-{name}.svg").write_text(text)


def special(pool: Pool, loads: list[float]) -> None:
    """Return the least CPU seconds of five alternating rounds inside the engine; starts and ends must be equal."""
    print(f"{'load':>5} {'policy':12}{'special':>9}{'s':>8}{'general':>9}{'s':>8}{'ratio':>7}")
    cases = (
        ("fifo+none", ("strict", "merged")),
        ("fifo+skip", ("merged", "generic")),
        ("fifo+easy", ("merged", "generic")),
    )
    for load in loads:
        trace = generated(20_000, pool, load)
        for policy, kinds in cases:
            least = dict.fromkeys(kinds, np.inf)
            for round_ in range(6):  # the first loads the code
                done = set()
                for kind in kinds:
                    world = world_of(trace, pool, policy_by_name(policy), ReplayOptions(generic=kind == "generic"))
                    log, cpu = log_of(world), time.process_time()
                    world, run = next(k for k in KINDS if k.name == kind).ready(world)
                    to_the_end(world, log, run)
                    if round_:
                        least[kind] = min(least[kind], time.process_time() - cpu)
                    done.add(world.sim.state["start"].tobytes() + world.sim.state["end"].tobytes())
                assert len(done) == 1, (policy, load)
            (fast, a), (slow, b) = least.items()
            print(f"{load:5.2f} {policy:12}{fast:>9}{a:8.3f}{slow:>9}{b:8.3f}{b / a:7.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=550)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9, 1.1])
    parser.add_argument("--policy", action="append", help="default: fifo+none, sjf-oracle, fifo+easy, sjf-oracle+easy")
    parser.add_argument("--queue", action="store_true", help="how the cost grows")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="with --queue: draw it, too")
    parser.add_argument("--special", action="store_true", help="whether special ways to decide pay; on 100 nodes")
    args = parser.parse_args()
    if args.special:
        special(Pool.uniform(100, args.gpus_per_node), args.loads)
        return
    policies = args.policy or ["fifo+none", "sjf-oracle", "fifo+easy", "sjf-oracle+easy"]
    pool = Pool.uniform(args.nodes, args.gpus_per_node)
    cpu = time.process_time()
    for policy in policies:
        replay(generated(100, pool, 0.9), pool, policy)
    print(f"compiling or loading: {time.process_time() - cpu:.1f} CPU s; best fit, {args.nodes} nodes", flush=True)
    if args.queue:
        grow(args.svg)
        return
    head = f"{'load':>5} {'policy':20}{'jobs/s':>12}{'inside s':>9}{'whole s':>9}{'CPU s':>9}"
    print(head + f"{'queue':>9}{'mean JCT':>12}{'MiB':>9}", flush=True)
    for load in args.loads:
        trace = generated(args.jobs, pool, load)
        for policy in policies:
            row(trace, pool, policy, load)


if __name__ == "__main__":
    main()
