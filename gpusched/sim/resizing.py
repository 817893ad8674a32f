"""Jobs that change size while they run: what they ask for, and how fast they go, at every number of GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpusched.errors import UsageError
from gpusched.sched.fit import set_feasibility
from gpusched.sched.state import Requests, filled
from gpusched.sim.engine.build import World
from gpusched.sim.engine.state import SHAPE, Pace
from gpusched.sim.pool import demand_of
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import Kind, Rates, alone_on, recorded_on, table_of
from gpusched.traces.slicing import select


class Sizes:
    """The shapes and speeds of resized jobs, made when they are first asked for."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, int], int] = {}
        self._rows: dict[Kind, int] = {}
        self._own_rows: dict[int, int] = {}

    def shape(self, world: World, job: int, gpus: int) -> tuple[World, int]:
        """The world with the shape that ``job`` has with ``gpus`` GPUs, and its index.

        Raises:
            UsageError: The job may not have that size, can never have it here, or nothing says how fast it goes then.
        """
        elastic, trace = world.options.elastic, world.trace
        if elastic is None or not elastic.least[job] <= gpus <= elastic.most[job]:
            allowed = "is rigid" if elastic is None else f"may have {elastic.least[job]} to {elastic.most[job]} GPUs"
            raise UsageError(f"job {trace.ids[job]} cannot be resized to {gpus} GPUs: it {allowed}")
        own = int(world.demand.shape[job])
        if own < 0 or trace.gpus[job] < 1:
            raise UsageError(f"job {trace.ids[job]} cannot be resized: it has no GPUs, or can never run here")
        if gpus == trace.gpus[job]:
            return world, own
        key = own, gpus
        if key not in self._shapes:
            world = self._with_shape(world, job, own, gpus)
            self._shapes[key] = len(world.sim.shapes) - 1
        return world, self._shapes[key]

    def _with_shape(self, world: World, job: int, own: int, gpus: int) -> World:
        """Cores and memory go with the GPUs."""
        sim, passes, trace = world.sim, world.passes, world.trace
        base, before = sim.shapes[own], int(trace.gpus[job])
        one = select(trace, np.array([job]))
        cores, memory = (-(-int(base[name]) * int(base["parts"]) * gpus // before) for name in ("cores", "memory"))
        one = replace(
            one, gpus=np.array([gpus]), nodes=np.array([0]), cores=np.array([cores]), memory_mib=np.array([memory])
        )
        found = demand_of(one, world.pool)
        if found.shape[0] < 0:
            raise UsageError(f"job {trace.ids[job]} cannot have {gpus} GPUs: {found.infeasible[0]}")
        row = {name: int(getattr(found.requests, name)[0]) for name in Requests._fields} | {"mask": int(base["mask"])}
        shapes = np.append(sim.shapes, filled(SHAPE, 1, **row, queue=int(base["queue"])))
        requests = Requests(*(np.append(getattr(passes.requests, name), row[name]) for name in Requests._fields))
        jobs = passes.jobs._replace(feasibility=np.append(passes.jobs.feasibility, 0))
        passes = passes._replace(requests=requests, jobs=jobs)
        set_feasibility(passes.total, passes.usable, jobs.masks, requests, passes.scratch, jobs.feasibility)
        assert sim.pace is not None
        pace = sim.pace._replace(milli=np.append(sim.pace.milli, 1000))
        return world._replace(sim=sim._replace(shapes=shapes, pace=pace), passes=passes)

    def row(self, world: World, job: int, gpus: int, nodes: int) -> tuple[World, int]:
        """The world with the speeds that ``job`` has with ``gpus`` GPUs over ``nodes`` nodes, and their row.

        Raises:
            UsageError: Nothing says how fast it goes then.
        """
        trace, pool, options = world.trace, world.pool, world.options
        assert world.sim.pace is not None
        own = self._own_rows.setdefault(job, int(world.sim.pace.runs[job]["row"]))
        if gpus == trace.gpus[job]:
            return world, own
        rates = options.rates or Rates(profiles=Profiles(series={}))
        name = trace.models[trace.model[job]] if trace.model[job] >= 0 else ""
        before = int(trace.gpus[job])
        kind = Kind(name, gpus, nodes, recorded_on(rates, trace, name, int(trace.gpu_type[job])), before)
        if kind in self._rows:
            return world, self._rows[kind]
        known = all(alone_on(rates, kind, t) is not None for t in pool.gpu_types)
        assert options.elastic is not None
        if not known and not options.elastic.linear:
            raise UsageError(
                f"job {trace.ids[job]} cannot be resized to {gpus} GPUs: nothing measured says how fast"
                f" {name or 'it'} is there"
            )
        pace, self._rows[kind] = _with_row(world.sim.pace, rates, pool.gpu_types, kind, known)
        return world._replace(sim=world.sim._replace(pace=pace)), self._rows[kind]


def _with_row(pace: Pace, rates: Rates, gpu_types: tuple[str, ...], kind: Kind, known: bool) -> tuple[Pace, int]:
    """One more row of speeds; how it and others slow each other down on shared GPUs is left unknown."""
    types, row = len(gpu_types), pace.speed.shape[1]
    speed = np.full((types, row + 1, row + 2), np.nan)
    speed[:, :row, : row + 1] = pace.speed
    speed[:, row, 0] = table_of(rates, [kind], gpu_types)[:, 0, 0] if known else kind.gpus / kind.before
    return pace._replace(speed=speed), row
