"""Bound the gain of full knowledge where topology agents decide: bounds beside the policies of the setting.

    .venv/bin/python -m benchmarks.topology_bound [--seed 401 --seed 402 ...] [--load 0.9] [--topology 16x4-racks]
        [--jobs 800] [--tries 200] [--workers 2]

On the four-rack clusters of `gpusched reproduce topology`, per cluster and load: the mean JCT of the better of
``contention`` and ``untrained`` (the reference, chosen by cell on these seeds), and changes from it:

- ``agents``: the included weights; ``patience``: ``contention`` with the best of seven patiences, chosen in hindsight
- ``ideal``: links that take no time; ``capacity``: also one node with all GPUs. Same queue; no bounds, as the order of
  starts differs
- ``any order``: the lower bound that no schedule passes, whatever it knows (`gpusched.study.bounds`)

With ``--tries`` only ``hindsight``: each job whose best place costs something takes it or waits as a search finds best
with all run times, arrivals and speeds known: so many changes to a few jobs each, replayed to the end, kept where the
mean JCT falls; against the better of the two on each draw. That schedule exists, so it bounds from the other side.

Mean relative changes over seeds with 95 % intervals by Student's t. ``--jobs``: of a draw; 0: as the setting has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from gpusched.agents.common.evaluate import interval
from gpusched.agents.topology.network import start, weights_from
from gpusched.agents.topology.replay import TopologyRun, agents_spec, new_replay_state, placed_by
from gpusched.agents.topology.reproduce import run_of
from gpusched.agents.topology.workloads import TopologySetting, draw, load_scenario, settings
from gpusched.model.topology import Topology
from gpusched.sched.state import Floats
from gpusched.sched.topology.queue import PATIENCE_S
from gpusched.sim.engine.build import ReplayOptions, log_of, result_of, world_of
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay, to_the_end
from gpusched.sim.result import ReplayResult
from gpusched.study.bounds import bounds_of

FOUR_RACKS = ("16x4-racks", "16x4-racks-large")
PATIENCES = tuple(PATIENCE_S * 2.0**k for k in range(-3, 4))
RULES = ("contention", "untrained")
_NOISE, _FEW = 0.5, 24  # of the worth of waiting; jobs that one try changes

Cell = tuple[str, float, int]


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, action="append")
    options.add_argument("--load", type=float, action="append")
    options.add_argument("--topology", choices=FOUR_RACKS, action="append")
    options.add_argument("--tries", type=int, default=0)
    options.add_argument("--jobs", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()
    seeds, loads = args.seed or list(range(401, 411)), args.load or list(load_scenario().loads)
    every: list[dict[str, list[float]]] = []
    with ProcessPoolExecutor(args.workers) as workers:
        for name in args.topology or FOUR_RACKS:
            for load in loads:
                cells = [(name, load, seed) for seed in seeds]
                if args.tries:
                    found = gains(workers.map(partial(improved, args.tries, args.jobs), cells))
                else:
                    found = rules(workers.map(partial(figures, args.jobs), cells))
                every.append({of: changes for of, changes in found.items() if of != "hours"})
                hours = float(np.mean(found["hours"]))
                print(f"{name} {load:g}: {hours:.2f} h; {text(every[-1])}", flush=True)
    pooled = {of: list(np.mean([cell[of] for cell in every], axis=0)) for of in every[0]}
    print(f"all: {text(pooled)}")


def text(changes: dict[str, list[float]]) -> str:
    """Return mean changes with their intervals."""
    parts = []
    for name, values in changes.items():
        low, high = interval(values)
        more = "" if low is None or high is None else f" ± {50 * (high - low):.1f}"
        parts.append(f"{name} {100 * np.mean(values):+.1f}{more} %")
    return ", ".join(parts)


def rules(found: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """Return changes from the better rule of a cell, and its hours, by seed."""
    rows = list(found)
    mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    reference = min(RULES, key=mean.__getitem__)
    patient = min((name for name in mean if name.startswith("patience ")), key=mean.__getitem__)
    shown = {"agents": "agents", "patience": patient, "ideal": "ideal", "capacity": "capacity", "any order": "bound"}
    changes = {name: [row[of] / row[reference] - 1 for row in rows] for name, of in shown.items()}
    return {"hours": [row[reference] for row in rows]} | changes


def figures(jobs: int, cell: Cell) -> dict[str, float]:
    """Return mean JCTs in hours, one draw."""
    name, load, seed = cell
    setting = settings()[name]
    drawn = trace, kind = draw(setting, load, seed, jobs)
    found = {rule: hours(run_of(setting, drawn, seed, rule)) for rule in (*RULES, "agents", "ideal")}
    for patience_s in PATIENCES:
        network = PlacementNetwork(setting.tree, setting.model, kind, patience_s=patience_s)
        run = replay(trace, setting.pool, placed_by("contention"), network=network, seed=seed)
        found[f"patience {patience_s:.0f}"] = hours(run)
    one = Pool.of([NodeSpec(setting.pool.total_gpus, name="all")])
    whole = TopologySetting("all", Topology(), one, setting.machine, setting.mix)
    found["capacity"] = hours(run_of(whole, drawn, seed, "ideal"))
    found["bound"] = (bounds_of(trace, setting.pool).mean_jct_s or np.nan) / 3600
    return found


def hours(run: ReplayResult) -> float:
    """Return the mean JCT."""
    return float((run.end - run.trace.submit).mean()) / 3600


def gains(found: Iterable[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the changes by `improved`, and hours before, by seed."""
    pairs = list(found)
    return {"hours": [before for before, _ in pairs], "hindsight": [after / before - 1 for before, after in pairs]}


def improved(tries: int, jobs: int, cell: Cell) -> tuple[float, float]:
    """Return hours of the better rule on one draw, and of what a search with hindsight makes of ``untrained``."""
    name, load, seed = cell
    setting = settings()[name]
    drawn = trace, kind = draw(setting, load, seed, jobs)
    network = PlacementNetwork(setting.tree, setting.model, kind)

    def played(noise: Floats) -> float:
        policy = replace(placed_by("contention"), name="hindsight")
        world = world_of(trace, setting.pool, policy, ReplayOptions(network=network))
        world, state = new_replay_state(world, weights_from(start(0)), agents_spec(1), noise)
        for auction in state.auctions:
            assert auction.tape is not None
            auction.tape.again[:] = np.inf  # records nothing
        return hours(result_of(world, to_the_end(world, log_of(world), TopologyRun(world, state)), 0.0))

    rng = np.random.default_rng(seed)
    best = np.zeros(len(trace))
    least = begun = played(best)
    for _ in range(tries):
        tried, first = best.copy(), int(rng.integers(0, len(trace)))
        part = tried[first : first + _FEW]
        part[:] = rng.normal(0.0, _NOISE, len(part))
        if (mean := played(tried)) < least:
            best, least = tried, mean
    return min(begun, hours(run_of(setting, drawn, seed, "contention"))), least


if __name__ == "__main__":
    main()
