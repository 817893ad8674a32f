"""Measure the gain of mapping jobs to GPU types, and the time of a live decision.

    .venv/bin/python -m benchmarks.mapping DATA              # the folder with traces/ and profiles/
    .venv/bin/python -m benchmarks.mapping DATA --decision   # only the live decision

The cluster: as many nodes of 8 V100 as of 8 P100 and 8 K80, jobs at Gavel's measured speeds. The workload: jobs drawn
from Gavel's trace (models, GPUs, steps), Poisson arrivals. Load: work at the recorded (V100) speed over what the
cluster does when every type works at the jobs' mean speed there.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.rates import RateClass, Rates, alone_on, read_rates
from gpusched.sim.replay import replay
from gpusched.study.timeline import run_seconds
from gpusched.traces.load import load
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

TYPES = ("V100", "P100", "K80")
PLACEMENTS = ("best-fit", "fastest", "milp")


class Figures(NamedTuple):
    """Mean JCT in hours, and useful GPU throughput: V100 GPU-seconds of work done per GPU-second held."""

    jct_h: float
    useful: float


def cluster(nodes: int) -> Pool:
    """So many nodes of each type, in turn."""
    return Pool.of([NodeSpec(8, gpu_type=kind) for _ in range(nodes) for kind in TYPES])


def drawn(source: Trace, rates: Rates, jobs: int, load_factor: float, nodes: int, seed: int) -> Trace:
    """Jobs drawn from the trace, arriving at a load."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(source), jobs)
    trace = select(source, rows)
    kinds = [
        RateClass(source.models[m], g, 1, None, g)
        for m, g in zip(trace.model.tolist(), trace.gpus.tolist(), strict=True)
    ]
    speeds = np.array([[alone_on(rates, one, gpu_type) or 1.0 for gpu_type in TYPES] for one in kinds])
    does = 8 * nodes * speeds.mean(0).sum()
    gap = float((trace.gpus * trace.duration).mean() / (load_factor * does))
    submit = np.cumsum(rng.exponential(gap, jobs))
    return replace(trace, ids=tuple(map(str, range(jobs))), submit=submit - submit[0])


def measured(trace: Trace, pool: Pool, rates: Rates, placement: str, policy: str) -> Figures:
    """One replay."""
    result = replay(trace, pool, policy, placement=placement, rates=rates)
    ran = result.ran
    held = float((trace.gpus * run_seconds(result))[ran].sum())
    return Figures(
        float((result.end - trace.submit)[ran].mean()) / 3600, float((trace.gpus * trace.duration)[ran].sum()) / held
    )


def interval(values: list[float]) -> str:
    """Mean and its 95 % interval over seeds (Student's t)."""
    t95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{mean:+.1%} ({mean - t95[len(values)] * error:+.1%} to {mean + t95[len(values)] * error:+.1%})"


def gains(data: Path, seeds: int = 8, jobs: int = 800, nodes: int = 5) -> None:
    """By load and backfill: mean JCT and useful throughput against type-blind best fit, and against greedy."""
    source = load(data / "traces" / "gavel_msr_seed0_103959.trace.gz", "gavel")
    rates = read_rates([data / "profiles" / "gavel_throughputs.json.gz"])
    pool = cluster(nodes)
    print(f"{seeds} seeds of {jobs} jobs on {len(pool)} nodes; change against type-blind best fit (95 % over seeds)")
    for policy in ("fifo-skip", "fifo+easy"):
        for factor in (0.6, 0.9, 1.2):
            traces = [drawn(source, rates, jobs, factor, nodes, seed) for seed in range(seeds)]
            found = {p: [measured(t, pool, rates, p, policy) for t in traces] for p in PLACEMENTS}
            for base, other in (("best-fit", "fastest"), ("best-fit", "milp"), ("fastest", "milp")):
                pairs = list(zip(found[base], found[other], strict=True))
                jct = interval([b.jct_h / a.jct_h - 1 for a, b in pairs])
                useful = interval([b.useful / a.useful - 1 for a, b in pairs])
                print(
                    f"{policy} load {factor}: {other} against {base}: mean JCT {jct}, useful throughput {useful}",
                    flush=True,
                )
    for placement in PLACEMENTS:
        one = measured(source, cluster(2), rates, placement, "fifo-skip")
        print(
            f"Gavel's trace as it is, 6 nodes, fifo-skip, {placement}: mean JCT {one.jct_h:.2f} h, "
            f"useful {one.useful:.3f}"
        )


def busy_site(seed: int, waiting: int = 256, nodes: int = 150) -> Snapshot:
    """Nodes of three types, partly in use, of which about 720 GPUs are free, and 256 jobs of 26 models that wait."""
    rng = np.random.default_rng(seed)
    full = max(0.0, 1.0 - 150 / nodes)  # of the nodes; the others are as those of a site of 150
    speeds = {
        f"m{m}-*": {"V100": 1.0, "P100": float(rng.uniform(0.4, 1.3)), "K80": float(rng.uniform(0.1, 0.5))}
        for m in range(26)
    }
    views = tuple(NodeView(name=f"n{i}", partition="p", gpus=tuple(range(8)), cores=80, memory_mib=512 << 10,
                           gpu_type=TYPES[i % 3]) for i in range(nodes))  # fmt: skip
    running = []
    for i in range(nodes):
        held = int(rng.integers(0, 9)) if rng.random() < 0.8 else 0
        if held := 8 if full and rng.random() < full else held:
            part = NodeAllocation(rank=0, node=f"n{i}", gpus=tuple(range(held)), cores=8 * held, memory_mib=held << 16)
            running.append(RunningView(id=f"r{i}", user="u", allocation=Allocation(f"r{i}", (part,)), start_time=0.0,
                                       expected_end=float(rng.uniform(10, 9e4))))  # fmt: skip
    gpus, many = rng.choice([1, 2, 4, 8], waiting, p=[0.5, 0.15, 0.15, 0.2]), rng.choice([1, 2], waiting, p=[0.9, 0.1])
    jobs = tuple(
        PendingView(
            id=f"j{j:03}", user=f"u{rng.integers(20)}", submit_time=float(j),
            spec=JobSpec(name=f"m{rng.integers(26)}-x", partition="p", nodes=int(many[j]), gpus_per_node=int(gpus[j]),
                         cores_per_node=int(gpus[j]) * 8, memory_mib_per_node=int(gpus[j]) << 15,
                         time_limit_s=int(rng.integers(600, 90000))),
        )
        for j in range(waiting)
    )  # fmt: skip
    mapping = Mapping(speeds=speeds)
    policy = PolicySpec(name="m", place="milp", backfill="skip", mapping=mapping)
    return Snapshot(now=0.0, nodes=views, running=tuple(running), pending=jobs, policies={"p": policy})


def decision(rounds: int = 100) -> None:
    """Wall time of whole live decisions, with what the optimiser made of them."""
    for nodes in (150, 1000):
        for backfill in ("skip", "easy"):
            for place in ("best-fit", "fastest", "milp"):
                line = timed(rounds, nodes, place, backfill)
                print(f"256 jobs, {nodes} nodes, {backfill}, {place}: {line}", flush=True)


def timed(rounds: int, nodes: int, place: str, backfill: str) -> str:
    """Figures of so many decisions, each of its own site, in one line."""
    decide(replace_policy(busy_site(10**6, nodes=nodes), place, backfill))
    took, used, remarks = [], [], []
    for seed in range(rounds):
        snapshot = replace_policy(busy_site(seed, nodes=nodes), place, backfill)
        begin, cpu = time.perf_counter(), time.process_time()
        plan = decide(snapshot)
        took.append(1000 * (time.perf_counter() - begin))
        used.append(1000 * (time.process_time() - cpu))
        remarks.append(plan.remarks.get("p", ""))
    line = f"median {np.median(took):.0f} ms, 99 % {np.quantile(took, 0.99):.0f} ms, worst {max(took):.0f} ms, "
    line += f"processor {np.median(used):.0f} ms"
    if place != "milp":
        return line
    gaps = [float(found[1]) for text in remarks if (found := re.search(r"at most ([\d.]+)% below", text))]
    gains = [float(found[1]) for text in remarks if (found := re.search(r"worth ([\d.e+]+) GPUs more", text))]
    proven = sum(gap <= 0.01 for gap in gaps)
    return (
        f"{line}; worth {np.median(gains):.1f} GPUs more than greedily, {sum(g <= 0 for g in gains)} left greedy; "
        f"{proven} proven best, gap median {np.median(gaps):.2f} %, worst {max(gaps, default=np.nan):.2f} %"
    )


def replace_policy(snapshot: Snapshot, place: str, backfill: str) -> Snapshot:
    """Return the policy with other stages."""
    import msgspec

    policy = msgspec.structs.replace(snapshot.policies["p"], place=place, backfill=backfill)
    return msgspec.structs.replace(snapshot, policies={"p": policy})


if __name__ == "__main__":
    if "--decision" not in sys.argv:
        gains(Path(sys.argv[1]))
    decision()
