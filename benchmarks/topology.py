"""How fast replays are in which placement and neighbours cost jobs something, and live decisions.

    .venv/bin/python -m benchmarks.topology [--jobs 20000] [--load 0.9] [--seed 0] [--topology 16x4-racks] [--repeat 3]
        [--policy contention] [--hosts 847]
    .venv/bin/python -m benchmarks.topology --live [--agents] [--nodes 1000] [--waiting 1000] [--repeat 7]

The setting of `gpusched reproduce topology`. A line a policy: jobs a second (the best of ``--repeat`` runs, compiled
before) and mean JCT. Placements once more with EASY backfill, by limits of one to five times the run time alone.
``--live``: CPU time of one decision with EASY backfill on nodes of 8 GPUs in four racks, nearly full and empty, jobs of
40 kinds of which half have reported their speed; `anew`: the first after something was learned.
``--agents``: the same in racks of neighbouring nodes by untrained topology agents, CPU time: what one scheduler takes
for dealing out and settling; of four also the longest of their offers, as on four cores; and all of the decision's
elapsed time here.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec.structs import replace as with_changes

from benchmarks.decide import build, median_ms
from gpusched.agents.common.vector import to_arrays
from gpusched.agents.topology import live as agents
from gpusched.agents.topology.network import SHAPES, TopologyWeights, untrained
from gpusched.agents.topology.replay import placed_by
from gpusched.agents.topology.reproduce import run_of, settings_of
from gpusched.agents.topology.workloads import draw, load_scenario
from gpusched.config.weights import TrainedModel
from gpusched.model.interference import ContentionEstimate, JobClassEstimate, JobShape, Link, SpeedSamples
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.model.topology import Switch, Topology
from gpusched.sched.agent import Context
from gpusched.sched.decide import decide
from gpusched.sched.reasons import QueueBlock
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.placed import RULES
from gpusched.sim.replay import replay


def clos(hosts: int) -> str:
    """Three tiers: racks of odd sizes, below pods, below one switch; one host of some racks on a way up of its own."""
    lines, left, leaf, pod = ["spine: {}"], [f"h{i}" for i in range(hosts)], 0, 0
    while left:
        lines.append(f"pod{pod}: {{uplink: {(800, 400, 1600)[pod % 3]}G, parent: spine}}")
        for _ in range((8, 7, 9, 6)[pod % 4] if left else 0):
            names, left = left[: 9 + leaf % 8], left[9 + leaf % 8 :]
            if leaf % 5 == 0 and len(names) > 1:
                lines.append(f"own{leaf}: {{nodes: [{names.pop()}], uplink: {25 + leaf}G, parent: leaf{leaf}}}")
            uplink = (400, 800, 200, 1600)[leaf % 4]
            lines.append(f"leaf{leaf}: {{nodes: [{', '.join(names)}], uplink: {uplink}G, parent: pod{pod}}}")
            leaf += 1
        pod += 1
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=20_000)
    options.add_argument("--load", type=float, default=0.9)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--topology", default="16x4-racks")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--policy", action="append")
    options.add_argument("--hosts", type=int, help="a Clos of three tiers with so many, in place of --topology")
    options.add_argument("--live", action="store_true")
    options.add_argument("--agents", action="store_true")
    options.add_argument("--nodes", type=int, default=1_000)
    options.add_argument("--waiting", type=int, default=1_000)
    args = options.parse_args()
    if args.agents:
        by_agents(args.nodes, args.waiting, args.repeat)
        return
    if args.live:
        live(args.nodes, args.waiting, args.repeat)
        return
    with TemporaryDirectory() as folder:
        if args.hosts:
            args.topology = f"{folder}/clos.yaml"
            Path(args.topology).write_text(clos(args.hosts))
        setting = settings_of(args.topology, None)[0]
    drawn = draw(setting, args.load, args.seed, args.jobs)
    wanted = args.policy or list(load_scenario().policies)
    for name in wanted:
        runs = [run_of(setting, drawn, args.seed, name) for _ in range(args.repeat)]
        run = max(runs, key=lambda run: run.jobs_per_s)
        jct = float((run.end - run.trace.submit).mean()) / 3600
        print(f"{name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)
    trace, kind = drawn
    trace = replace(trace, limit=trace.duration * np.random.default_rng(args.seed).uniform(1.0, 5.0, len(trace)))
    network = PlacementNetwork(setting.tree, setting.model, kind)
    for name in (name for name in wanted if name in RULES):
        policy = replace(placed_by(name, f"{name}+easy"), backfill="easy", knows="limit")
        done = [replay(trace, setting.pool, policy, network=network, seed=args.seed) for _ in range(args.repeat)]
        run = max(done, key=lambda run: run.jobs_per_s)
        jct = float((run.end - trace.submit).mean()) / 3600
        print(f"{policy.name:>20}: {run.jobs_per_s:9,.0f} jobs/s; mean JCT {jct:6.2f} h", flush=True)


def live(nodes: int, waiting: int, repeat: int) -> None:
    """One decision, by placement."""
    for name, full in (("full", 0.97), ("empty", 0.0)):
        for place, racks, snapshot in decisions(nodes, waiting, full):
            plan = decide(snapshot)
            ms = median_ms(repeat, lambda s=snapshot: decide(s))  # type: ignore[misc]
            anew = median_ms(repeat, lambda s=snapshot: decide(with_changes(s, beliefs=dict(s.beliefs))))  # type: ignore[misc]
            more = f", anew {anew:.1f} ms" if snapshot.beliefs else ""
            print(f"{name:>6} {place:>11} {racks:>8}: {ms:6.1f} ms{more}; {len(plan.actions)} start", flush=True)


def by_agents(nodes: int, waiting: int, repeat: int) -> None:
    """One decision, by one scheduler and by four."""
    model = TrainedModel("topology", to_arrays(untrained(0), SHAPES), {}, "", "")
    for name, full in (("full", 0.97), ("empty", 0.0)):
        *_, (_, _, snapshot) = decisions(nodes, waiting, full)
        names = [node.name for node in snapshot.nodes]
        racks = [names[i * nodes // 4 : (i + 1) * nodes // 4] for i in range(4)]
        switches = tuple(Switch(name=f"r{i}", nodes=tuple(own), uplink_gbps=800.0) for i, own in enumerate(racks))
        for schedulers in (1, 4):
            policy = PolicySpec(
                name="b", agent="topology", place="contention", backfill="easy", schedulers=schedulers,
                fallback=snapshot.policies["p"],
            )  # fmt: skip
            asked = with_changes(snapshot, policies={"p": policy}, topology=Topology(switches=switches))
            times = []
            for _ in range(repeat + 1):
                begun = time.perf_counter()
                plan = decide(asked, {"p": model})
                times.append(1000 * (time.perf_counter() - begun))
            runs = [parts_ms(asked, model) for _ in range(repeat + 1)][1:]
            deal, offers, settled = (statistics.median(run[i] for run in runs) for i in range(3))
            print(
                f"{name:>6} {schedulers} schedulers: deal {deal:.1f} ms, offers {offers:.1f} ms (the longest), "
                f"settle {settled:.1f} ms, in all {deal + offers + settled:.1f} ms; "
                f"decision {statistics.median(times[1:]):.1f} ms elapsed; {len(plan.actions)} start",
                flush=True,
            )


def parts_ms(snapshot: Snapshot, model: TrainedModel) -> tuple[float, float, float]:
    """CPU milliseconds: dealing out, the longest of the schedulers' offers, settling."""
    found: list[tuple[float, float, float]] = []

    def timed(agent: TopologyWeights, context: Context) -> tuple[list[int], QueueBlock]:
        assert context.costs is not None
        marks = [time.thread_time()]
        queue = context.waiting.ordered(context.partition, context.policy.order)
        costs = agents.copy_costs(context.costs)
        deal = agents.auction_of(agent, context, costs, queue)
        marks.append(time.thread_time())
        count, longest = context.policy.schedulers, 0.0
        desks = agents.workspaces_of(deal, context, costs) if count > 1 else []
        for others in (False, True):
            took = []
            for number, desk in enumerate(desks):
                begin = time.thread_time()
                agents.offers_of(deal, number, others, desk, context, queue)
                took.append(time.thread_time() - begin)
            longest += max(took, default=0.0)
        marks.append(time.thread_time())
        block = agents.settle_offers(deal, context, costs, queue)
        found.append((1000 * (marks[1] - marks[0]), 1000 * longest, 1000 * (time.thread_time() - marks[2])))
        return queue.tolist(), block

    before, agents.decide_queue = agents.decide_queue, timed
    try:
        decide(snapshot, {"p": model})
    finally:
        agents.decide_queue = before
    return found[0]


def decisions(nodes: int, waiting: int, full: float) -> Iterator[tuple[str, str, Snapshot]]:
    """Placement, racks, snapshot."""
    rng = random.Random(1)
    flat = build(nodes, waiting, full, PolicySpec(name="b"), links=False)
    flat = with_changes(
        flat,
        running=tuple(
            with_changes(job, spec=with_changes(flat.pending[0].spec, name=kind(rng)), start_time=-1e5)
            for job in flat.running
        ),
        pending=tuple(with_changes(job, user="u", spec=with_changes(job.spec, name=kind(rng))) for job in flat.pending),
    )
    names = [node.name for node in flat.nodes]
    in_racks = Topology(
        switches=tuple(Switch(name=f"r{i}", nodes=tuple(names[i::4]), uplink_gbps=800.0) for i in range(4))
    )
    for place in ("best-fit", "rack", "rack-wait", "contention"):
        for racks in (Topology(), in_racks):
            policies = {"p": PolicySpec(name="b", place=place, backfill="easy")}  # type: ignore[arg-type]
            snapshot = with_changes(flat, policies=policies, topology=racks)
            if place == "contention":
                snapshot = with_changes(snapshot, beliefs=dict(believed(rng) for _ in range(60)))
            yield place, "4 racks" if racks else "no racks", snapshot


def kind(rng: random.Random) -> str:
    """Return a job's name; half of the existing jobs have reported their pace."""
    return f"train-{'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN'[rng.randrange(40)]}"


def believed(rng: random.Random) -> tuple[str, JobClassEstimate]:
    """Return the speeds that jobs of a kind may have reported."""
    name = f"u/train-{'abcdefghijklmnopqrst'[rng.randrange(20)]}"
    shapes = []
    for gpus, racks in ((16, 1), (16, 2), (32, 1), (32, 2)):
        shape = JobShape(gpu_type="", unit="steps", gpus=gpus, max_gpus_per_node=8, nodes=gpus // 8, racks=racks)
        pace = rng.gauss(2.0 - 0.2 * (racks > 1), 0.02)
        shapes.append(SpeedSamples(shape=shape, logs=((pace, 1.0),) * 5, count=5, best=pace))
    links = tuple(
        ContentionEstimate(
            link=link, sensitivity=rng.gauss(-1.5, 0.5), pressure=rng.gauss(-1.5, 0.5), cov=(0.1, 0.1, 0.0), count=5
        )
        for link in LINKS
    )
    return name, JobClassEstimate(kind=name, shapes=tuple(shapes), links=links)


LINKS: tuple[Link, ...] = ("server", "nic", "uplink")

if __name__ == "__main__":
    main()
