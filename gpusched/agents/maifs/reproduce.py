"""Our setting of MAIFS under each policy: mean JCT and makespan, one row a drawn week and policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.common.vector import named, read_vector
from gpusched.agents.maifs import rules
from gpusched.agents.maifs.engine import alone, play, play_agent
from gpusched.agents.maifs.joint import ALONE, GRAPH, UNCOORDINATED
from gpusched.agents.maifs.kinds import ABSENT, CORES, MEMORY_GB, PROPORTIONAL, Kinds, read_kinds
from gpusched.agents.maifs.network import SHAPES, untrained
from gpusched.agents.maifs.rules import Rule
from gpusched.agents.maifs.train import Settings, train
from gpusched.agents.maifs.workloads import FILES, LOADS, WEEKS, Arrivals, Jobs, draw, drawn_arrivals, read_arrivals
from gpusched.agents.maifs.world import Known, World, told, world_of
from gpusched.config.weights import save_model
from gpusched.errors import UsageError
from gpusched.sched.state import Floats
from gpusched.sim.rounds import Played

SEEDS = range(3)
QUICK = Settings(generations=1, population=4, tries=2, density=0.1, choose=1)
weights_of = partial(read_vector, "maifs", SHAPES)
"""What agents have learned, from a file; None: that which comes along."""
Policy = Callable[[World, Kinds, Floats], Played]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn week under one policy.

    ``bound_s``: the mean JCT of jobs that are each alone on all nodes, at their best size within their bounds;
    ``bound_makespan_s``: until the last of these would have ended.
    """

    trace: str
    week: int
    load: float
    seed: int
    nodes: int
    groups: int
    jobs: int
    policy: str
    mean_jct_s: float
    makespan_s: float
    restarts: int
    bound_s: float
    bound_makespan_s: float


def proportional_only(speed: Floats) -> Known:
    """Every speed with cores and memory in proportion to GPUs, and no other point."""
    offset = np.arange(speed.shape[1]) % (len(CORES) * len(MEMORY_GB))
    return told(np.where(offset == PROPORTIONAL, speed, 0.0))


def _by(rule: int, known: Callable[[Floats], Known] = told) -> Policy:
    return lambda world, kinds, learned: play(world, known(kinds.speed), Rule(rule))


def _agents(mode: int = GRAPH, attends: bool = True) -> Policy:
    return lambda world, kinds, learned: play_agent(world, learned, mode, attends)


POLICIES: dict[str, Policy] = {
    "proportional": _by(rules.PROPORTIONAL_RULE),
    "las": _by(rules.LAS),
    "optimus": _by(rules.OPTIMUS, proportional_only),
    "synergy": _by(rules.SYNERGY),
    "greedy-true": _by(rules.GREEDY),
    "maifs-untrained": lambda world, kinds, learned: play_agent(world, untrained(0)),
    "maifs": _agents(),
}
"""Name -> what plays a workload with what the agents learned."""
ABLATIONS: dict[str, Policy] = {
    "maifs-no-graph": _agents(mode=UNCOORDINATED),
    "maifs-no-attention": _agents(attends=False),
    "maifs-one-chooser": _agents(mode=ALONE),
}
"""The trained agents without a part: played only where they are named."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to make.

    Attributes:
        traces: Folder of the two traces; None: jobs are drawn in the likeness of Philly's.
        profiles: Folder of other measurements than those that come along.
        policies: Names; none: all of `POLICIES`.
        seeds: What is drawn with; none: three.
        quick: Two days of a tenth of the jobs, one seed.
        jobs: Threads; 0: one per core.
        weights: What the agents have learned; None: what comes along.
        out: Train them instead, with the first seed, and write this file.
    """

    traces: str | None = None
    profiles: str | None = None
    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    quick: bool = False
    jobs: int = 0
    weights: str | None = None
    out: str | None = None


def reproduce(options: Options, advance: Callable[[int, int], None]) -> list[Row]:
    """Every week that is kept for tests, at every load and seed, under every policy.

    Raises:
        UsageError: A name or a folder is not what it should be.
        GpuschedError: A file is not what it should be.
    """
    policies, seeds, quick = options.policies, options.seeds, options.quick
    every = POLICIES | ABLATIONS
    if unknown := [name for name in policies if name not in every]:
        raise UsageError(f"no policy of this setting is named {unknown[0]!r}", f"known: {', '.join(every)}")
    kinds = read_kinds(Path(options.profiles) if options.profiles is not None else None)
    if options.traces is None:
        arrivals = {"drawn": drawn_arrivals()}
    else:
        arrivals = {trace: read_arrivals(Path(options.traces), trace) for trace in FILES}
    drawn = [
        (trace, week, load, seed)
        for trace in arrivals
        for week in WEEKS[trace]["test"]
        for load in LOADS
        for seed in (dict.fromkeys(seeds) if seeds else SEEDS[:1] if quick else SEEDS)
    ]
    size = {"density": 0.1, "days": 2.0} if quick else {}
    chosen = {name: every[name] for name in policies or POLICIES}
    learned = _trained(arrivals, kinds, options, advance) if options.out else weights_of(options.weights)

    def one(at: tuple[str, int, float, int]) -> list[Row]:
        trace, week, load, seed = at
        workload = draw(arrivals[trace], trace, kinds, kinds.names, week, load, seed, **size)
        bound = alone(world_of(workload, kinds))
        return [
            _row(trace, week, load, seed, workload, name, policy(world_of(workload, kinds), kinds, learned), bound)
            for name, policy in chosen.items()
        ]

    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs or os.cpu_count()) as pool:  # compiled passes run side by side
        for done, found in enumerate(pool.map(one, drawn), 1):
            rows += found
            advance(done, len(drawn))
    return rows


def _trained(
    arrivals: dict[str, Arrivals], kinds: Kinds, options: Options, advance: Callable[[int, int], None]
) -> Floats:  # fmt: skip
    settings, seed = QUICK if options.quick else Settings(), (options.seeds or tuple(SEEDS))[0]
    learned = train(arrivals, kinds, settings, seed, options.jobs, advance)
    generation, cost = min(learned.course, key=lambda at: at[1])
    about = {
        "seed": str(seed), "generation": str(generation), "choosing": f"{np.exp(cost):.4f}",
        "absent": " ".join(ABSENT), **{name: str(value) for name, value in asdict(settings).items()},
    }  # fmt: skip
    save_model(Path(options.out or ""), "maifs", named(learned.numbers, SHAPES), about)
    return learned.numbers


def _row(
    trace: str, week: int, load: float, seed: int, workload: Jobs, name: str, played: Played, bound: Floats
) -> Row:  # fmt: skip
    ends = workload.arrival + bound
    return Row(
        trace=trace, week=week, load=load, seed=seed, nodes=len(workload.node), groups=len(workload.group) - 1,
        jobs=len(bound), policy=name, mean_jct_s=float(played.jct.mean()), makespan_s=played.makespan,
        restarts=played.restarts, bound_s=float(bound.mean()),
        bound_makespan_s=float(ends.max() - workload.arrival[0]),
    )  # fmt: skip
