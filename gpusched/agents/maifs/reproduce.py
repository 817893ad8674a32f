"""Our setting of MAIFS under each policy: mean JCT and makespan, one row per drawn week and policy."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.common.origin import origin_of, paper_command
from gpusched.agents.common.vector import read_vector, to_arrays
from gpusched.agents.maifs.engine import best_alone_jct, simulate, simulate_agent
from gpusched.agents.maifs.joint import MODES
from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, PROPORTIONAL, MaifsJobClasses, MaifsRival, maifs, read_kinds
from gpusched.agents.maifs.learn import MaifsSearchSettings, learn
from gpusched.agents.maifs.network import SHAPES, untrained
from gpusched.agents.maifs.rules import RULES
from gpusched.agents.maifs.workloads import MaifsJobs, draw, drawn_arrivals, read_arrivals
from gpusched.agents.maifs.world import MaifsWorld, exact_estimates, world_of
from gpusched.config.weights import make_writable, save_model
from gpusched.sched.state import Floats
from gpusched.sim.rounds import RoundsResult
from gpusched.study.options import PaperOptions
from gpusched.study.paper import Advance, PaperFigures, play_all
from gpusched.traces.trace import Trace

QUICK = MaifsSearchSettings(generations=1, population=4, tries=2, density=0.1, choose=1)
weights_of = partial(read_vector, "maifs", SHAPES)
"""Load the agents' weights from a file; None: the shipped ones."""


class MaifsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn week under a policy.

    ``bound_s``: the mean JCT if each job had all nodes to itself, at its best size within its bounds;
    ``bound_makespan_s``: the makespan then.
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


def result_of(rival: MaifsRival, world: MaifsWorld, kinds: MaifsJobClasses, learned: Floats) -> RoundsResult:
    """Simulate a workload under a policy; ``learned``: the trained agents' weights."""
    if not rival.rule:
        return simulate_agent(world, learned if rival.trained else untrained(0), MODES[rival.choose], rival.attends)
    may = np.arange(kinds.speed.shape[1]) % (len(CORES) * len(MEMORY_GB)) == PROPORTIONAL
    speed = kinds.speed if rival.speeds == "all" else np.where(may, kinds.speed, 0.0)
    return simulate(world, exact_estimates(speed), RULES[rival.rule])


def reproduce(options: PaperOptions, advance: Advance) -> PaperFigures:
    """Run every test week, at every load and seed, under every policy.

    Raises:
        UsageError: A name or a folder is invalid.
        GpuschedError: A file is invalid.
    """
    chosen, every = maifs().chosen(options.policies), maifs().policies | maifs().ablations
    kinds = read_kinds(Path(options.speeds) if options.speeds is not None else None)
    if options.workloads is None:
        arrivals = {"drawn": drawn_arrivals()}
    else:
        files = [name for name, of in maifs().traces.items() if of.file]
        arrivals = {name: read_arrivals(Path(options.workloads), name) for name in files}
    drawn = [
        (trace, week, load, seed)
        for trace in arrivals
        for week in maifs().traces[trace].test
        for load in maifs().loads
        for seed in maifs().drawn_with(options)
    ]
    size = {"density": 0.1, "days": 2.0} if options.quick else {}
    learned = _trained(arrivals, kinds, options, advance) if options.out else weights_of(options.weights)

    def rows(at: tuple[str, int, float, int]) -> list[MaifsRow]:
        trace, week, load, seed = at
        workload = draw(arrivals[trace], trace, kinds, kinds.names, week, load, seed, **size)
        bound = best_alone_jct(world_of(workload, kinds))
        results = {name: result_of(every[name], world_of(workload, kinds), kinds, learned) for name in chosen}
        return [_row(*at, workload, name, result, bound) for name, result in results.items()]

    return PaperFigures(maifs(), play_all(drawn, rows, options, advance))


def _trained(arrivals: dict[str, Trace], kinds: MaifsJobClasses, options: PaperOptions, advance: Advance) -> Floats:
    make_writable(Path(options.out or "").parent)
    settings, seed = QUICK if options.quick else MaifsSearchSettings(), maifs().drawn_with(options)[0]
    learned = learn(arrivals, kinds, settings, seed, options.jobs, advance)
    generation, cost = min(learned.course, key=lambda at: at[1])
    folder = options.workloads
    data = [] if folder is None else [Path(folder) / maifs().traces[name].file for name in arrivals]
    about = origin_of(paper_command("maifs", options), seed, data) | {
        "generation": str(generation), "choosing": f"{np.exp(cost):.4f}",
        "absent": " ".join(maifs().absent), **{name: str(value) for name, value in asdict(settings).items()},
    }  # fmt: skip
    save_model(Path(options.out or ""), "maifs", to_arrays(learned.numbers, SHAPES), about)
    return learned.numbers


def _row(
    trace: str, week: int, load: float, seed: int, workload: MaifsJobs, name: str, result: RoundsResult, bound: Floats
) -> MaifsRow:  # fmt: skip
    ends = workload.arrival + bound
    return MaifsRow(
        trace=trace, week=week, load=load, seed=seed, nodes=len(workload.node), groups=len(workload.group) - 1,
        jobs=len(bound), policy=name, mean_jct_s=float(result.jct.mean()), makespan_s=result.makespan,
        restarts=result.restarts, bound_s=float(bound.mean()),
        bound_makespan_s=float(ends.max() - workload.arrival[0]),
    )  # fmt: skip
