"""Clusters whose jobs slow each other down over links."""

from __future__ import annotations

from functools import cache
from math import exp

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.controller.learning import shared_link
from gpusched.model.interference import ColocationSamples, ContentionEstimate, JobClassEstimate, JobShape, SpeedSamples
from gpusched.model.snapshot import RunningView, Snapshot
from gpusched.sched.arrays import node_arrays_of, waiting_of
from gpusched.sched.interference.beliefs import cost_of_neighbour
from gpusched.sched.state import new_scratch
from gpusched.sched.tally import usage_of
from gpusched.sched.topology.live import costs_of
from tests.sched.worlds import node, pending, running, snapshot, topology
from tests.strategies import among

NAMES = ("calm", "loud", "new")


LATE = 1e6  # so that jobs can have waited for days


LINKS = ("server", "nic", "uplink")


def paces(nodes: int, racks: int, pace: float, gpus: int = 16) -> SpeedSamples:
    shape = JobShape(gpu_type="", unit="steps", gpus=gpus, max_gpus_per_node=gpus // nodes, nodes=nodes, racks=racks)
    return SpeedSamples(shape=shape, logs=((float(np.log(pace)), 1.0),) * 5, count=5, best=float(np.log(pace)))


def estimate(link: str, sensitivity: float, pressure: float, count: int = 5) -> ContentionEstimate:
    mine, its = float(np.log(sensitivity)), float(np.log(pressure))
    return ContentionEstimate(link=link, sensitivity=mine, pressure=its, cov=(0.01, 0.01, 0.0), count=count)  # type: ignore[arg-type]


def beliefs(calm: float, loud: float, spread: float, pair: float | None = None) -> dict[str, JobClassEstimate]:
    """Two kinds of alice's: one that minds others, one that presses on them; over two racks both are slower."""
    shapes = tuple(paces(nodes, racks, 10.0 / (spread if racks > 1 else 1.0), gpus)
                   for gpus, nodes in ((16, 2), (8, 2), (4, 2), (2, 2)) for racks in (1, 2))  # fmt: skip
    beside = (ColocationSamples(link="nic", kind="alice/loud", logs=(-pair,) * 5, count=5),) if pair is not None else ()
    return {
        "alice/calm": JobClassEstimate(kind="alice/calm", shapes=shapes, beside=beside,
                                 links=tuple(estimate(link, calm, 0.01) for link in LINKS)),
        "alice/loud": JobClassEstimate(kind="alice/loud", shapes=shapes, links=tuple(estimate(n, 0.01,
        loud) for n in LINKS)),
    }  # fmt: skip


def named(job: RunningView, name: str) -> RunningView:
    spec = replace(pending("x", 1).spec, name=name)
    return replace(job, user="alice", spec=spec)


STRONG = among(0.02, 0.3, 1.0)
PAIR = st.none() | STRONG


@cache
def _racks(count: int) -> st.SearchStrategy[list[str]]:
    return st.one_of(st.just([]), st.lists(among("r1", "r2", "r3"), min_size=count, max_size=count))


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Up to six nodes of 8 GPUs in up to three racks, or in none; some jobs run, others wait, over one node or two."""
    count = draw(st.integers(1, 6))
    nodes = [node(f"n{i}") for i in range(count)]
    racks = draw(_racks(count))
    free = {n.name: list(range(8)) for n in nodes}
    busy = []
    for i in range(draw(st.integers(0, 5))):
        parts, gpus = draw(st.integers(1, min(2, count))), draw(among(1, 2, 4))
        where = draw(st.permutations(sorted(free)))[:parts]
        if all(len(free[n]) >= gpus for n in where):
            held = {n: tuple(free[n].pop(0) for _ in range(gpus)) for n in where}
            job = running(f"r{i}", held, LATE + draw(among(60.0, 7200.0)))
            busy.append(named(job, draw(among(*NAMES))))
    jobs = [
        pending(f"j{i}", draw(among(1, 2, 4, 8)), nodes=draw(st.integers(1, 2)),
                limit=draw(among(600, 300_000)),
                submit=LATE - draw(among(0.0, 3600.0, 20_000.0, 86_000.0, 200_000.0)), user="alice",
                name=draw(among(*NAMES)))
        for i in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    jobs = [replace(job, spec=replace(job.spec, max_spread=draw(among("", "rack")))) for job in jobs]
    known = beliefs(draw(STRONG), draw(STRONG), draw(among(1.0, 1.1, 1.6)), draw(PAIR))
    return snapshot(
        nodes, jobs, busy, place="contention", now=LATE, backfill=draw(among("none", "skip", "easy")),
        topology=topology(*racks) if racks else topology(), beliefs=known,
    )  # fmt: skip


class Plain:
    """The cost of a place, one job and one neighbour after the other."""

    def __init__(self, snap: Snapshot) -> None:
        self.beliefs, self.racks = snap.beliefs, snap.topology.racks()
        self.running = [(job.spec.name if job.spec else "", {p.node: len(p.gpus) for p in job.allocation.parts})
                        for job in snap.running]  # fmt: skip

    def slower(self, name: str, parts: dict[str, int]) -> float:
        """By which factor a step is longer here than in one rack, alone."""
        racks = {self.racks.get(n, n) for n in parts} if self.racks else {""}
        own = self.beliefs.get(f"alice/{name}")
        if len(racks) < 2 or own is None:
            return 1.0
        by_racks = {p.shape.racks: p.logs[0][0] for p in own.shapes if p.shape.gpus == sum(parts.values())}
        return exp(by_racks[1] - by_racks[2]) if by_racks else 1.0

    def lost(self, mine: tuple[str, dict[str, int]], its: tuple[str, dict[str, int]]) -> float:
        """By how much a step of one is longer beside another, where they share a link and either was measured."""
        link = shared_link(set(mine[1]), set(its[1]), self.racks)
        kinds = [self.beliefs.get(f"alice/{name}") for name in (mine[0], its[0])]
        if link is None or kinds == [None, None]:
            return 0.0
        if link == "server" and 1 in (next(iter(mine[1].values())), next(iter(its[1].values()))):
            return 0.0  # jobs with one GPU on a node share nothing
        own, other = (kind or JobClassEstimate(kind="") for kind in kinds)
        if any((b.link, b.kind) == (link, other.kind) for b in own.beside):
            return cost_of_neighbour(own, other, link).slower
        bare = replace(own, beside=())
        return cost_of_neighbour(bare, other, link).slower

    def cost(self, name: str, parts: dict[str, int]) -> tuple[float, float]:
        mine = (name, parts)
        own = self.slower(name, parts) * (1 + sum(self.lost(mine, its) for its in self.running)) - 1
        harm = sum(self.lost(its, mine) * sum(its[1].values()) for its in self.running)
        return own, harm / sum(parts.values())


def arrays(snap: Snapshot) -> tuple:
    world = node_arrays_of(snap)
    waiting = waiting_of(list(snap.pending), world, usage_of(snap), snap)
    scratch = new_scratch(len(world.nodes), waiting.jobs.feasibility.size, world.rack)
    return world, waiting, costs_of(snap, world, waiting, scratch)
