"""DL2's public setting under rules and the agent: mean JCT and makespan, one row per workload and policy."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.common.origin import origin_of, paper_command
from gpusched.agents.dl2.agent import Player, explored_speeds, prepare
from gpusched.agents.dl2.decide import Actor
from gpusched.agents.dl2.learn import Dl2Recipe, PublicSetting, learn
from gpusched.agents.dl2.rules import policy_of
from gpusched.agents.dl2.slots import SpeedChange, fastest_alone, simulate
from gpusched.agents.dl2.weights import AGENT, arrays_of, read_actors
from gpusched.agents.dl2.workloads import MAX_TASKS, Dl2Workload, dl2, draw, read_workloads
from gpusched.config.weights import make_writable, save_model
from gpusched.errors import UsageError
from gpusched.model.units import parse_duration
from gpusched.sim.profiles.dl2 import read_speeds
from gpusched.study.options import PaperOptions
from gpusched.study.paper import Advance, PaperFigures, play_all

QUICK = Dl2Recipe(imitated=4, imitation_steps=200, rounds=4, batch=4, kept=128)
_TRAINING_SEED = 3  # of the included weights
_EXPLORATION_SEED = 3  # of the speeds observed before the evaluation
_MAX_FACTOR = 100.0


class Dl2Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one policy; times in slots.

    ``bound_slots``: the mean JCT if each job had all nodes to itself, at its best size.
    """

    setting: str
    nodes: int
    seed: int
    policy: str
    mean_jct_slots: float
    makespan_slots: float
    bound_slots: float


def reproduce(options: PaperOptions, advance: Advance) -> PaperFigures:
    """Run every workload under every policy.

    Raises:
        UsageError: A name or a file is invalid.
        GpuschedError: Torch is not installed, and training is needed.
    """
    names, chosen = dl2().chosen(options.policies), _workloads(options)
    file = Path(options.speeds) if options.speeds is not None else None
    tables = {most: read_speeds(file, most) for most in {w.max_tasks for w in chosen}}
    changes = [_change(text) for text in options.changes]
    restart_s = 0.0 if options.restart is None else _restart_s(options.restart)
    actors: dict[str, Actor] = {}
    rivals = {name: dl2().policies[name] for name in names}
    if options.out is not None and not any(rival.stage for rival in rivals.values()):
        raise UsageError("--out is for the agent's weights, but --policy names only rules", "omit it")
    if any(rival.stage for rival in rivals.values()):
        actors = _actors(options, file, advance)
        seen = {most: explored_speeds(table, most, _EXPLORATION_SEED) for most, table in tables.items()}

    def rows(workload: Dl2Workload) -> list[Dl2Row]:
        one = prepare(workload, tables[workload.max_tasks])
        bound = float(fastest_alone(one.jobs).mean())
        slower = [
            SpeedChange(slot, k, by) for model, slot, by in changes for k, n in enumerate(one.names) if n == model
        ]
        found = []
        for name, rival in rivals.items():
            policy = (
                Player(actors[rival.stage], seen[workload.max_tasks].copy(), one, best_sizes=restart_s == 0)
                if rival.stage
                else policy_of(rival, one.jobs, np.random.default_rng(workload.seed))
            )
            result = simulate(one.jobs, policy, restart_s / workload.slot_s, slower)
            found.append(
                Dl2Row(
                    setting=workload.setting, nodes=workload.nodes, seed=workload.seed, policy=name,
                    mean_jct_slots=float(result.jct.mean()), makespan_slots=result.makespan, bound_slots=bound,
                )
            )  # fmt: skip
        return found

    return PaperFigures(dl2(), play_all(chosen, rows, options, advance))


def _actors(options: PaperOptions, file: Path | None, advance: Advance) -> dict[str, Actor]:
    """Return the agent's weights by stage, read or trained."""
    if options.weights is not None or options.workloads is not None:
        return read_actors(Path(options.weights) if options.weights is not None else None)
    if options.out is not None:
        make_writable(Path(options.out).parent)
    recipe = QUICK if options.quick else Dl2Recipe()
    table = read_speeds(file, MAX_TASKS)
    processes = options.jobs or os.cpu_count() or 1
    learned = learn(
        recipe, PublicSetting(recipe, table), _TRAINING_SEED,
        "cpu" if options.device is None else options.device, processes,
        lambda text, done: advance(done, 1),
    )  # fmt: skip
    stages = {"untrained": learned.untrained, "warm": learned.warm, "trained": learned.best}
    if options.out is not None:
        origin = origin_of(paper_command("dl2", options), _TRAINING_SEED, [file] if file is not None else [])
        save_model(Path(options.out), AGENT, arrays_of(stages), {"setting": "Peng et al., TPDS 2021"} | origin)
    return stages


def _change(text: str) -> tuple[str, int, float]:
    try:
        model, slot, factor = text.rsplit(":", 2)
        found = model, int(slot), float(factor)
    except ValueError:
        found = "", -1, 0.0
    if found[1] < 0 or not 0.0 < found[2] <= _MAX_FACTOR:
        raise UsageError(f"--change {text[:60]!r}", "expected MODEL:SLOT:FACTOR, such as vgg-16:20:0.5")
    return found


def _restart_s(text: str) -> float:
    try:
        return float(parse_duration(text)) if text not in ("0", "0s") else 0.0
    except ValueError:
        raise UsageError(f"--restart {text!r} is not a duration", "for example 120s") from None


def _workloads(options: PaperOptions) -> list[Dl2Workload]:
    if options.workloads is None:
        return [draw(name, seed) for name in dl2().clusters for seed in dl2().drawn_with(options)]
    found = read_workloads(Path(options.workloads))
    chosen = [workload for workload in found if not options.seeds or workload.seed in options.seeds]
    if not chosen:
        has, asked = (", ".join(map(str, seeds)) for seeds in (sorted({w.seed for w in found}), options.seeds))
        raise UsageError(f"{options.workloads} has no workload of seed {asked}", f"it has {has or 'none'}")
    return chosen
