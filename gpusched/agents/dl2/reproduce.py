"""DL2's public setting under each policy: mean JCT and makespan, one row a workload and policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.dl2 import speeds
from gpusched.agents.dl2.rules import RULES
from gpusched.agents.dl2.slots import fastest_alone, jobs_of, play
from gpusched.agents.dl2.workloads import SETTINGS, Workload, draw, read_workloads
from gpusched.errors import UsageError

SEEDS = range(10)


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


def reproduce(
    workloads: str | None, speed_file: str | None, policies: Sequence[str], seeds: Sequence[int]
) -> list[Row]:
    """Every workload under every policy.

    Args:
        workloads: A JSON file of them; None: drawn, each setting with each seed.
        speed_file: DL2's measured speeds; None: looked for, see `speeds.find`.
        policies: Names; none: all.
        seeds: What drawn workloads are drawn with; of a file, those that are played. None: all, or ten.

    Raises:
        UsageError: A name or a file is not what it should be.
    """
    if unknown := [name for name in policies if name not in RULES]:
        raise UsageError(f"no policy of this setting is called {unknown[0]!r}", f"known: {', '.join(RULES)}")
    path = Path(workloads) if workloads is not None else None
    chosen = _workloads(path, seeds)
    file = Path(speed_file) if speed_file is not None else speeds.find(path)
    tables = {most: speeds.read_speeds(file, most) for most in {w.max_tasks for w in chosen}}
    rows = []
    for workload in chosen:
        jobs = jobs_of(workload, tables[workload.max_tasks])
        bound = float(fastest_alone(jobs).mean())
        for name in dict.fromkeys(policies or RULES):
            played = play(jobs, RULES[name](jobs, np.random.default_rng(workload.seed)))
            rows.append(
                Row(
                    setting=workload.setting, nodes=workload.nodes, seed=workload.seed, policy=name,
                    mean_jct_slots=float(played.jct.mean()), makespan_slots=played.makespan, bound_slots=bound,
                )
            )  # fmt: skip
    return rows


def _workloads(path: Path | None, seeds: Sequence[int]) -> list[Workload]:
    if path is None:
        return [draw(name, seed) for name in SETTINGS for seed in dict.fromkeys(seeds or SEEDS)]
    found = read_workloads(path)
    chosen = [workload for workload in found if not seeds or workload.seed in seeds]
    if not chosen:
        has = ", ".join(str(seed) for seed in sorted({w.seed for w in found})) or "none"
        raise UsageError(f"{path} has no workload of seed {', '.join(map(str, seeds))}", f"it has {has}")
    return chosen
