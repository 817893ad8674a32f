"""Cores and memory of jobs with ranges of these, in replays: by the rule, and the answers of agents, as live.

Speeds follow them as measured (`gpusched.sim.profiles`).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.jobs import Elastic, JobSpec
from gpusched.model.units import count_of
from gpusched.sched.sizing.shapes import granted, over_fewest
from gpusched.sched.state import Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.sized import ROWS, RUN, Sizer, SizingSpace
from gpusched.sim.rates import share_of
from gpusched.sim.resizing import held_amounts

_PLENTY = 1 << 40  # cores or MiB of a node that does not model them


def asks_for(world: SimWorld, job: int, gpus: int) -> JobSpec:
    """Return the request of a job with ranges of cores or memory for so many GPUs, as on empty nodes.

    Raises:
        UsageError: No equal parts of it fit the nodes.
    """
    pool, of = world.pool, world.sim.shapes[world.demand.shape[job]]
    own, parts = int(world.trace.gpus[job]), int(of["parts"])
    spec = JobSpec(
        name="", partition="", nodes=parts, gpus_per_node=own // parts, cores_per_node=1, memory_mib_per_node=1,
        time_limit_s=1, elastic=elastic_request(world, job, (own,)),
    )  # fmt: skip
    rows = np.arange(int(of["lo"]), int(of["hi"]))
    rows = rows if of["mask"] < 0 else rows[world.demand.masks[of["mask"], rows] != 0]
    columns = (
        np.where(column < 0, _PLENTY, column)[rows].tolist() for column in (pool.gpus, pool.cores, pool.memory_mib)
    )
    found = over_fewest(spec, gpus, Counter(zip(*columns, strict=True)))
    if found is None:
        raise UsageError(f"job {world.trace.ids[job]} cannot have {count_of(gpus, 'GPU')}")
    return found


def elastic_request(world: SimWorld, job: int, sizes: tuple[int, ...]) -> Elastic:
    """Return a job's request for these sizes, with the cores and memory that go with them."""
    elastic, of = world.options.elastic, world.sim.shapes[world.demand.shape[job]]
    assert elastic is not None
    cores, memory = (int(of[name] * of["parts"]) for name in ("cores", "memory"))
    return Elastic(
        sizes=sizes, base_gpus=int(world.trace.gpus[job]), base_cores=cores, base_memory_mib=memory,
        cores=_span(elastic.cores, cores), memory_mib=_span(elastic.memory_mib, memory),
    )  # fmt: skip


def _span(asked: tuple[int, int] | None, own: int) -> tuple[int, int] | None:
    """Return the range of cores or MiB: as requested, or the job's own; None: in proportion to the GPUs."""
    return (min(asked[0], own), max(asked[1], own)) if asked is not None and own > 0 else None


class Grants:
    """The cores and MiB that jobs with ranges of these are granted when they start, by the live rule."""

    def __init__(self, world: SimWorld, sizer: Sizer) -> None:
        self._world, self._sizer, self._rates = world, sizer, world.options.rates
        self._asked: dict[tuple[int, int], JobSpec] = {}
        self._shares: dict[tuple[int, int, int, int], float] = {}
        self._had: dict[int, tuple[int, int, int]] = {}

    def __call__(self, own: SizingSpace) -> None:
        """Set the requests of a partition's jobs that wait, at their chosen sizes."""
        scene, claims, at = own.scene, own.claims.jobs, int(own.used[RUN])
        claim, free = at, np.column_stack(self._world.sim.resources.columns)
        given: dict[tuple[int, int, tuple[int, int]], tuple[int, int]] = {}
        for row in scene.rows[at : own.used[ROWS]]:
            gpus, most = int(row["least"]), (0, 0)
            if row["admitted"] and not row["rigid"]:
                gpus, most = int(claims[claim]["wished"]), (int(claims[claim]["cores"]), int(claims[claim]["memory"]))
                claim += 1
            job, menu = int(row["job"]), int(row["menu"])
            had = (0, 0) if row["rigid"] else self._amounts(job)
            if gpus > 0 and not row["rigid"]:
                shape = self._shape(menu, gpus)
                key = menu, gpus, most
                if key not in given:
                    spec = granted(self._request(job, menu, gpus), most, self._rooms(shape, free))
                    given[key] = spec.cores_per_node, spec.memory_mib_per_node
                self.grant(job, shape, *given[key])
            elif row["least"] == 0 and not row["rigid"]:  # it waits as it is
                of = self._sizer.jobs[job]
                self.grant(job, self._shape(int(of["menu"]), int(of["size"])), *had)

    def _amounts(self, job: int) -> tuple[int, int]:
        """Return the cores and MiB of each part with which a waiting job ran last, or was submitted."""
        of, restarts = self._world.sim.shapes[self._sizer.request[job]], int(self._world.sim.state[job]["restarts"])
        if self._had.get(job, (-1, 0, 0))[0] != restarts:
            self._had[job] = restarts, int(of["cores"]), int(of["memory"])
        return self._had[job][1:]

    def _shape(self, menu: int, gpus: int) -> int:
        menus = self._sizer.space.scene.menus
        return int(menus.shape[menu, menus.sizes[menu].tolist().index(gpus)])

    def _request(self, job: int, menu: int, gpus: int) -> JobSpec:
        key = menu, gpus
        if key not in self._asked:
            self._asked[key] = asks_for(self._world, job, gpus)
        return self._asked[key]

    def _rooms(self, shape: int, free: Ints) -> list[tuple[int, int, int]]:
        """Return what is free on the nodes that a request may use."""
        of, masks = self._world.sim.shapes[shape], self._world.passes.jobs.masks
        rooms = free[of["lo"] : of["hi"]]
        rooms = rooms if of["mask"] < 0 else rooms[masks[of["mask"], of["lo"] : of["hi"]] != 0]
        return list(map(tuple, rooms.tolist()))

    def grant(self, job: int, shape: int, cores: int, memory: int) -> None:
        """Set a job's own request: that of its size, with these cores and MiB."""
        world, own = self._world, int(self._sizer.request[job])
        sim, requests, of = world.sim, world.passes.requests, world.sim.shapes[shape]
        for column in (c for c in requests if c is not None):
            column[own] = column[shape]
        requests.cores[own], requests.memory[own] = cores, memory
        sim.shapes[own] = of
        sim.shapes[own]["cores"], sim.shapes[own]["memory"] = cores, memory
        feasibility = world.passes.jobs.feasibility
        feasibility[own] = feasibility[shape]
        if self._rates is not None and sim.pace is not None:
            sim.pace.runs[job]["share"] = self._share(job, shape, own)

    def _share(self, job: int, shape: int, own: int) -> float:
        """Return by how much the job is faster than with the least cores and MiB of its size."""
        trace, shapes, rates = self._world.trace, self._world.sim.shapes, self._rates
        assert rates is not None
        model = int(trace.model[job])
        key = model, shape, int(shapes[own]["cores"]), int(shapes[own]["memory"])
        if model >= 0 and key not in self._shares:
            least, now = shapes[shape], shapes[own]
            gpus = int(now["parts"] * now["gpus"])
            self._shares[key] = share_of(
                rates, trace.models[model], (gpus, *held_amounts(now)), (gpus, *held_amounts(least))
            )
        return self._shares.get(key, 1.0)
