"""The jobs on each link now, and how fast each of them runs there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints, Records
from gpusched.sched.topology.slowdown import (
    NARROWEST,
    SlowdownModel,
    beside,
    learned,
    learned_link,
    lost_beside,
    needs_of,
    set_pressure,
)
from gpusched.sched.topology.tree import LinkUse, NetworkTree, links_of

# One job on one link. next: the next on that link, more: the next link of that job; -1: none. need: seconds S_l.
# part: of its step alone that it occupies the link, in units of 1 / ONE: whole numbers add up the same in any order.
USE = np.dtype([(name, np.int64) for name in ("job", "link", "next", "more", "part")] + [("need", np.float64)])
# first: its first use; -1: none. best: seconds of a step alone where that is least. seen: number of the last look.
# alone: seconds of a step where it is, without neighbours; 0: it does not run. gpus: of the job. speed: 1: as where it
# is fastest, by what was learned as alone where it is; kept by the caller that runs the jobs.
JOB = np.dtype([(name, np.int64) for name in ("first", "kind", "gpus", "seen")]
               + [(name, np.float64) for name in ("best", "alone", "speed")])  # fmt: skip
FULL_STEP = 1 << 32
MIN_SPEED = 0.05
"""What is left of a job's speed at the least where what neighbours take adds up."""


class Load(NamedTuple):
    """The running jobs.

    Attributes:
        jobs: ``JOB[jobs]``. uses: ``USE[most]``.
        on: ``int64[links]``: the first use of a link. pressure: ``int64[links]``: the parts of all on it.
        more: ``int64[links]``: what a placement that is looked at would add; zeros between calls.
        at: ``int64[2]``: the first of the unused uses, chained by ``next``; number of the last look.
    """

    jobs: Records
    uses: Records
    on: Ints
    pressure: Ints
    more: Ints
    at: Ints


def new_load(tree: NetworkTree, kind: Ints, gpus: Ints, best: Floats, most: int) -> Load:
    """Return an empty load; ``most`` uses at once."""
    jobs, uses = np.zeros(len(kind), JOB), np.zeros(most + 1, USE)
    jobs["first"], jobs["kind"], jobs["gpus"], jobs["best"] = -1, kind, gpus, best
    uses["next"] = np.append(np.arange(1, most + 1), -1)
    links = len(tree.weight)
    return Load(
        jobs, uses, np.full(links, -1), np.zeros(links, np.int64), np.zeros(links, np.int64), np.zeros(2, np.int64)
    )


@jit
def enter(load: Load, job: int, use: LinkUse, needs: Floats, count: int, alone: float) -> None:
    """Add ``job`` to the first ``count`` links of ``use``."""
    of = load.jobs[job]
    of["alone"] = alone
    for i in range(count):
        at, link = load.at[0], use.link[i]
        row = load.uses[at]
        load.at[0] = row["next"]
        row["job"], row["link"], row["need"], row["part"] = job, link, needs[i], part_of(needs[i], alone)
        row["next"], row["more"] = load.on[link], of["first"]
        load.on[link] = of["first"] = at
        load.pressure[link] += row["part"]


@jit
def enter_links(
    tree: NetworkTree,
    model: SlowdownModel,
    load: Load,
    slot: int,
    nodes: Ints,
    parts: int,
    gpus: int,
    use: LinkUse,
    needs: Floats,
) -> None:
    """Add a job on ``nodes[:parts]`` with ``gpus`` on each."""
    kind = load.jobs[slot]["kind"]
    count = links_of(tree, nodes, parts, gpus, use)
    alone = needs_of(tree, model, kind, use, count, needs)
    step = set_pressure(model.believed, kind, use, count, needs, alone)
    enter(load, slot, use, needs, count, step)
    load.jobs[slot]["alone"] = alone


@jit
def leave(load: Load, job: int) -> None:
    """Remove ``job``."""
    of = load.jobs[job]
    at = of["first"]
    while at >= 0:
        row = load.uses[at]
        link, more = row["link"], row["more"]
        load.pressure[link] -= row["part"]
        before = load.on[link]
        if before == at:
            load.on[link] = row["next"]
        else:
            while load.uses[before]["next"] != at:
                before = load.uses[before]["next"]
            load.uses[before]["next"] = row["next"]
        row["next"] = load.at[0]
        load.at[0] = at
        at = more
    of["first"], of["alone"] = -1, 0.0


@jit
def part_of(need: float, alone: float) -> int:
    """Return the part of a step that a link is occupied, in units of 1 / ONE."""
    return int(need / alone * FULL_STEP)


@jit
def speed_of(model: SlowdownModel, load: Load, job: int) -> float:
    """Return a running job's speed (`JOB`), with `Load.more` on the links."""
    of = load.jobs[job]
    if model.ratio.size > 0:
        return _speed_by_table(model, load, job)
    if of["alone"] == 0.0:
        return 1.0
    if learned(model.believed):
        return _speed_by_estimates(model, load, job)
    worst, at = 0.0, of["first"]
    while at >= 0:
        row = load.uses[at]
        others = load.pressure[row["link"]] - row["part"] + load.more[row["link"]]
        worst = max(worst, row["need"] * (1.0 + others / FULL_STEP))
        at = row["more"]
    return float(of["best"] / (model.kinds[of["kind"]]["compute"] + worst))


@jit
def rate_of(model: SlowdownModel, load: Load, job: int) -> float:
    """Return a running job's rate by its speed; 1: alone where it is fastest."""
    of = load.jobs[job]
    if not learned(model.believed):
        return float(of["speed"])
    return float(min(1.0, of["speed"] * of["best"] / of["alone"]))


@jit
def set_speeds(model: SlowdownModel, load: Load, job: int) -> None:
    """Set the speed of a started job and of every job that shares a link with it."""
    load.jobs[job]["speed"] = speed_of(model, load, job)
    at = load.jobs[job]["first"]
    while at >= 0:
        other = load.on[load.uses[at]["link"]]
        while other >= 0:
            name = load.uses[other]["job"]
            load.jobs[name]["speed"] = speed_of(model, load, name)
            other = load.uses[other]["next"]
        at = load.uses[at]["more"]


@jit
def _speed_by_table(model: SlowdownModel, load: Load, job: int) -> float:
    """Return the speed by the jobs that share a node with it, each counted once."""
    visit, left, kind = new_visit(load), 1.0, load.jobs[job]["kind"]
    load.jobs[job]["seen"] = visit
    at = load.jobs[job]["first"]
    while at >= 0:
        other = load.on[load.uses[at]["link"]]
        while other >= 0:
            neighbour = load.jobs[load.uses[other]["job"]]
            if neighbour["seen"] != visit:
                neighbour["seen"] = visit
                left = beside(model, left, kind, neighbour["kind"])
            other = load.uses[other]["next"]
        at = load.uses[at]["more"]
    return max(left, MIN_SPEED) if model.by_sum else left


@jit
def _speed_by_estimates(model: SlowdownModel, load: Load, job: int) -> float:
    """Return the speed by learned losses: each neighbour counts once, over the narrowest link that is shared."""
    own, visit, lost = load.jobs[job], new_visit(load), 0.0
    own["seen"] = visit
    for link in NARROWEST:
        at = own["first"]
        while at >= 0:
            row = load.uses[at]
            at = row["more"]
            other = load.on[row["link"]] if learned_link(model.believed, row["link"]) == link else -1
            while other >= 0:
                neighbour = load.jobs[load.uses[other]["job"]]
                other = load.uses[other]["next"]
                if neighbour["seen"] != visit:
                    neighbour["seen"] = visit
                    lost += lost_beside(model.believed, link, own["kind"], neighbour["kind"])
    return float(1.0 / (1.0 + lost))


@jit
def new_visit(load: Load) -> int:
    """Return a number that marks visited jobs."""
    load.at[1] += 1
    return int(load.at[1])


@jit
def neighbours(load: Load, job: int, found: Ints) -> int:
    """Write the jobs that share a link with a running job to ``found``, each once; return the count."""
    visit, count = new_visit(load), 0
    load.jobs[job]["seen"] = visit
    at = load.jobs[job]["first"]
    while at >= 0:
        other = load.on[load.uses[at]["link"]]
        while other >= 0:
            name = load.uses[other]["job"]
            if load.jobs[name]["seen"] != visit:
                load.jobs[name]["seen"] = visit
                found[count] = name
                count += 1
            other = load.uses[other]["next"]
        at = load.uses[at]["more"]
    return count
