"""CPU time of one decision (one thread: elapsed time on an idle machine).

`.venv/bin/python benchmarks/decide.py [--jobs 10000] [--nodes 1000] [--repeat 7] [--links]`
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import get_args

from gpusched.__main__ import GC_THRESHOLD
from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.policy import ORDERS, Backfill, Place, PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.arrays import node_arrays_of, releases_of, waiting_of
from gpusched.sched.check import check
from gpusched.sched.decide import _Effects, _run, decide, starts
from gpusched.sched.reasons import Verdicts
from gpusched.sched.tally import usage_of

# (nodes, GPUs per node, weight): most jobs are small, as in the Philly and Helios traces
SIZES = [(1, 1, 50), (1, 2, 15), (1, 4, 12), (1, 8, 12), (2, 8, 5), (4, 8, 3), (8, 8, 2), (16, 8, 1)]
LIMITS_S = [1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600]


def build(nodes: int, jobs: int, full: float, policy: PolicySpec, links: bool, seed: int = 1) -> Snapshot:
    rng = random.Random(seed)
    nvlink = {a: {b: 3 if a // 4 == b // 4 else 1 for b in range(8) if b != a} for a in range(8)} if links else {}
    views = tuple(
        NodeView(
            name=f"n{i:04}", partition="p", gpus=tuple(range(8)), cores=128, memory_mib=1 << 20, links=dict(nvlink)
        )
        for i in range(nodes)
    )
    running: list[RunningView] = []
    for node in views:
        at = 0
        while at < 8 and rng.random() < full:
            gpus = min(rng.choice([1, 1, 2, 4, 8]), 8 - at)
            part = NodeAllocation(
                rank=0, node=node.name, gpus=tuple(range(at, at + gpus)), cores=8 * gpus, memory_mib=1024 * gpus
            )
            job_id, end = f"r{len(running)}", rng.uniform(0, 72 * 3600)
            running.append(
                RunningView(
                    id=job_id, user="u", allocation=Allocation(job_id, (part,)), start_time=0.0, expected_end=end
                )
            )
            at += gpus
    pending = tuple(waiting_job(rng, i) for i in range(jobs))
    return Snapshot(
        now=0.0,
        nodes=views,
        running=tuple(running),
        pending=pending,
        policies={"p": policy},
        usage={f"u{i}": rng.random() * 100 for i in range(50)},
        seed=seed,
    )


def waiting_job(rng: random.Random, i: int) -> PendingView:
    count, gpus, _ = rng.choices(SIZES, [w for *_, w in SIZES])[0]
    spec = JobSpec(
        name="j",
        partition="p",
        nodes=count,
        gpus_per_node=gpus,
        cores_per_node=gpus * rng.choice([2, 4, 8, 12]),
        memory_mib_per_node=gpus * rng.choice([8192, 16384, 65536]),
        time_limit_s=rng.choice(LIMITS_S),
    )
    return PendingView(
        id=f"j{i:08}", user=f"u{rng.randrange(50)}", spec=spec, submit_time=-rng.random() * 1e5, priority=0
    )


def median_ms(repeat: int, call: Callable[[], object]) -> float:
    gc.set_threshold(GC_THRESHOLD)  # as the controller
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        call()
        times.append(1000 * (time.process_time() - begin))
    return statistics.median(times)


def breakdown(snapshot: Snapshot, repeat: int) -> dict[str, float]:
    """Median CPU milliseconds of each stage of `decide`, run one after the other as it does."""
    columns: dict[str, list[float]] = {}
    for _ in range(repeat):
        marks = [time.process_time()]
        world = node_arrays_of(snapshot)
        marks.append(time.process_time())
        waiting = waiting_of(list(snapshot.pending), world, usage_of(snapshot))
        releases_of(snapshot.running, world, waiting.parts)
        marks.append(time.process_time())
        outcome, blocks = _run(snapshot, world, waiting, {}, _Effects({}, {}, [], {}, {}, []))
        marks.append(time.process_time())
        verdicts = Verdicts(snapshot, world, waiting, outcome.code.tolist())
        for queue, block in blocks.values():
            verdicts.add(queue, block, {})
        marks.append(time.process_time())
        starts(world, waiting, outcome)
        marks.append(time.process_time())
        names = ("nodes", "queue", "passes", "reasons", "starts")
        for name, a, b in zip(names, marks, marks[1:], strict=False):
            columns.setdefault(name, []).append(1000 * (b - a))
    return {name: statistics.median(values) for name, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--links", action="store_true", help="nodes know their NVLink islands")
    args = parser.parse_args()
    begin = time.process_time()
    decide(build(4, 20, 0.5, PolicySpec(name="warm"), links=False))
    print(f"first decision, compiling or loading included: {time.process_time() - begin:.2f} s")
    print(f"{args.jobs} pending jobs, {args.nodes} nodes; median CPU ms of {args.repeat}")
    stages = ("nodes", "queue", "passes", "reasons", "starts")
    print(f"{'cluster':8}{'order':11}{'place':11}{'backfill':9}{'started':>8}{'decide':>8}{'check':>7}", end="")
    print("".join(f"{s:>9}" for s in stages))
    for cluster, full in (("full", 0.97), ("empty", 0.0)):
        for order in ORDERS:
            for place in get_args(Place):
                for backfill in get_args(Backfill):
                    policy = PolicySpec(name="b", order=order, place=place, backfill=backfill)
                    snapshot = build(args.nodes, args.jobs, full, policy, args.links)
                    plan = decide(snapshot)
                    whole = median_ms(args.repeat, lambda s=snapshot: decide(s))  # type: ignore[misc]
                    checked = median_ms(3, lambda s=snapshot, p=plan: check(p, s))  # type: ignore[misc]
                    parts = breakdown(snapshot, args.repeat)
                    row = f"{cluster:8}{order:11}{place:11}{backfill:9}{len(plan.actions):8}{whole:8.1f}{checked:7.1f}"
                    print(row + "".join(f"{parts[s]:9.1f}" for s in stages), flush=True)


if __name__ == "__main__":
    main()
