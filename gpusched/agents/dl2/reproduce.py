"""DL2's public setting under rules and the agent: mean JCT and makespan, one row a workload and policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.dl2.agent import Player, prepare
from gpusched.agents.dl2.decide import Actor
from gpusched.agents.dl2.learn import Public, Recipe, learn, looked_around
from gpusched.agents.dl2.rules import RULES
from gpusched.agents.dl2.slots import Change, fastest_alone, play
from gpusched.agents.dl2.weights import AGENT, arrays_of, read_actors
from gpusched.agents.dl2.workloads import MOST_TASKS, SETTINGS, Workload, draw, read_workloads
from gpusched.config.weights import save_model
from gpusched.errors import UsageError
from gpusched.sim.profiles.dl2 import read_speeds

SEEDS = range(10)
AGENTS = {"dl2": "trained", "dl2-warm-up": "warm", "dl2-untrained": "untrained"}
"""Name -> stage of the weights."""
QUICK = Recipe(taught=4, teaching=200, rounds=4, batch=4, kept=128)
_LOOKED = 3  # seed of what the agent saw before it is judged
_MOST_FASTER = 100.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one policy; times in slots.

    ``bound_slots``: the mean JCT of jobs that are each alone on all nodes, at their best size.
    """

    setting: str
    nodes: int
    seed: int
    policy: str
    mean_jct_slots: float
    makespan_slots: float
    bound_slots: float


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        workloads: A JSON file of them; None: drawn, each setting with each seed.
        speeds: Another file of measured speeds than the one that comes along.
        policies: Names; none: all.
        seeds: What drawn workloads are drawn with; of a file, those that are played. None: all, or ten.
        weights: The agent's. None: learned here where workloads are drawn, else those that come with gpusched.
        out: Where weights that are learned here are written.
        restart_s: What a job loses that goes on with another size.
        changes: MODEL:SLOT:FACTOR: from that slot on, it goes so much faster.
        quick: Learns for seconds only.
        device: Of learning. workers: Threads that play.
    """

    workloads: str | None = None
    speeds: str | None = None
    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    weights: str | None = None
    out: str | None = None
    restart_s: float = 0.0
    changes: tuple[str, ...] = ()
    quick: bool = False
    device: str = "cpu"
    workers: int = 2


def reproduce(options: Options, tell: Callable[[str, float], None] = lambda text, done: None) -> list[Row]:
    """Every workload under every policy; ``tell``: how learning goes, and the part of it that is done.

    Raises:
        UsageError: A name or a file is not what it should be.
        GpuschedError: There is no torch to learn with.
    """
    known = (*RULES, *AGENTS)
    if unknown := [name for name in options.policies if name not in known]:
        raise UsageError(f"no policy of this setting is named {unknown[0]!r}", f"known: {', '.join(known)}")
    names = tuple(dict.fromkeys(options.policies or known))
    path = Path(options.workloads) if options.workloads is not None else None
    chosen = _workloads(path, options.seeds)
    file = Path(options.speeds) if options.speeds is not None else None
    tables = {most: read_speeds(file, most) for most in {w.max_tasks for w in chosen}}
    changes = [_change(text) for text in options.changes]
    actors: dict[str, Actor] = {}
    if set(names) & set(AGENTS):
        actors = _actors(options, file, tell)
        seen = {most: looked_around(table, most, _LOOKED) for most, table in tables.items()}
    rows = []
    for workload in chosen:
        one = prepare(workload, tables[workload.max_tasks])
        bound = float(fastest_alone(one.jobs).mean())
        slower = [Change(slot, k, by) for model, slot, by in changes for k, n in enumerate(one.names) if n == model]
        for name in names:
            policy = (
                Player(actors[AGENTS[name]], seen[workload.max_tasks].copy(), one)
                if name in AGENTS
                else RULES[name](one.jobs, np.random.default_rng(workload.seed))
            )
            played = play(one.jobs, policy, options.restart_s / workload.slot_s, slower)
            rows.append(
                Row(
                    setting=workload.setting, nodes=workload.nodes, seed=workload.seed, policy=name,
                    mean_jct_slots=float(played.jct.mean()), makespan_slots=played.makespan, bound_slots=bound,
                )
            )  # fmt: skip
    return rows


def _actors(options: Options, file: Path | None, tell: Callable[[str, float], None]) -> dict[str, Actor]:
    """The agent's weights, by stage."""
    if options.weights is not None or options.workloads is not None:
        return read_actors(Path(options.weights) if options.weights is not None else None)
    recipe = QUICK if options.quick else Recipe()
    table = read_speeds(file, MOST_TASKS)
    learned = learn(recipe, Public(recipe, table), 0, options.device, options.workers, tell)
    stages = {"untrained": learned.untrained, "warm": learned.warm, "trained": learned.best}
    if options.out is not None:
        save_model(Path(options.out), AGENT, arrays_of(stages), {"setting": "Peng et al., TPDS 2021"})
    return stages


def _change(text: str) -> tuple[str, int, float]:
    try:
        model, slot, factor = text.rsplit(":", 2)
        found = model, int(slot), float(factor)
    except ValueError:
        found = "", -1, 0.0
    if found[1] < 0 or not 0.0 < found[2] <= _MOST_FASTER:
        raise UsageError(f"--change {text[:60]!r}", "expected MODEL:SLOT:FACTOR, such as vgg-16:20:0.5")
    return found


def _workloads(path: Path | None, seeds: Sequence[int]) -> list[Workload]:
    if path is None:
        return [draw(name, seed) for name in SETTINGS for seed in dict.fromkeys(seeds or SEEDS)]
    found = read_workloads(path)
    chosen = [workload for workload in found if not seeds or workload.seed in seeds]
    if not chosen:
        has = ", ".join(str(seed) for seed in sorted({w.seed for w in found})) or "none"
        raise UsageError(f"{path} has no workload of seed {', '.join(map(str, seeds))}", f"it has {has}")
    return chosen
