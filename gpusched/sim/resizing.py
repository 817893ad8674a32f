"""Requests and speeds of resizable jobs at every size, added to a replay's world when first used."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.units import count_of
from gpusched.sched.fit import entry, set_feasibility
from gpusched.sched.sizing.live import pace_of
from gpusched.sched.state import WHOLE, Floats, Ints, filled
from gpusched.sim.engine.build import ResizableJobs, SimWorld
from gpusched.sim.engine.state import SHAPE, Pace, Ranks
from gpusched.sim.pool import demand_of, over_nodes
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import RateClass, Rates, alone_on, recorded_on, resized_on, share_of
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace


def elastic_of(trace: Trace) -> ResizableJobs | None:
    """Return the sizes that the trace itself permits its jobs; None: all are rigid."""
    if trace.progress is None or len(trace.progress.size_job) == len(trace):
        return None
    sizes = [tuple(trace.progress.sizes(job)) for job in range(len(trace))]
    least, most = (np.array([size[i] for size in sizes], np.int64) for i in (0, -1))
    return ResizableJobs(least=least, most=most, linear=True, sizes=sizes, rank_gpus=trace.progress.rank_gpus)


def own_speed(trace: Trace, job: int, gpus: int) -> float:
    """Return a job's speed with this number of GPUs by its own reports; 1.0 at the size that the trace recorded."""
    if trace.progress is None or gpus == trace.gpus[job]:
        return 1.0
    speeds = trace.progress.speeds(job)
    return pace_of(speeds, gpus) / pace_of(speeds, int(trace.gpus[job]))


def pauses(trace: Trace) -> Floats:
    """Return the seconds that each hot job makes no step when ranks join or leave, ``float64[jobs]``; 0: unknown."""
    return np.zeros(len(trace)) if trace.progress is None else np.nan_to_num(trace.progress.cost_s)


def rank_gpus(world: SimWorld, job: int) -> int:
    """Return the GPUs of each rank of a hot job; 0: a resize stops the job (not hot, or ranks share nodes)."""
    elastic, shape = world.options.elastic, int(world.demand.shape[job])
    found = 0 if elastic is None or elastic.rank_gpus is None or shape < 0 else int(elastic.rank_gpus[job])
    return found if found and world.sim.shapes[shape]["gpus"] == found else 0


def counts_of_ranks(least: int, most: int, rank: int) -> range:
    """Return the numbers of ranks, of ``rank`` GPUs each, with which a job has ``least`` to ``most`` GPUs."""
    return range(-(-least // rank), most // rank + 1)


class TargetSize(NamedTuple):
    """The target size of a job in total; None: in proportion to its GPUs; ``nodes`` None: the fewest."""

    gpus: int
    cores: int | None = None
    memory_mib: int | None = None
    nodes: int | None = None


class ResizedShapes:
    """The shapes and speeds of resized jobs, created on first use.

    Its methods return a new world, since each new shape or speed adds a row to arrays.
    """

    def __init__(self) -> None:
        self._own: dict[int, tuple[int, int]] = {}  # job -> its recorded shape, and the row of its speeds
        self._shapes: dict[tuple[int, TargetSize], int] = {}  # (recorded shape, size) -> shape
        self._rows: dict[RateClass, int] = {}
        self._layouts: dict[tuple[int, int, bool], int] = {}  # (shape, nodes, in one rack only) -> shape
        self._bases: dict[int, int] = {}  # and back
        self._known: dict[int, str] = {}  # row of speeds -> how they are known (see `notes`)
        self._notes: dict[str, None] = {}

    def shape(self, world: SimWorld, job: int, size: TargetSize) -> tuple[SimWorld, int]:
        """Return the world with the shape of ``job`` at a size, and the shape's index.

        Raises:
            UsageError: The job may not have this size, or the pool can never provide it.
        """
        elastic, trace, gpus = world.options.elastic, world.trace, size.gpus
        if elastic is None or not elastic.least[job] <= gpus <= elastic.most[job]:
            allowed = "is rigid" if elastic is None else f"may have {elastic.least[job]} to {elastic.most[job]} GPUs"
            raise UsageError(f"job {trace.ids[job]} cannot be resized to {gpus} GPUs: it {allowed}")
        world, found = self._shape(world, job, size)
        if (rank := rank_gpus(world, job)) and world.sim.shapes[found]["gpus"] != rank:
            why = f"no {count_of(gpus // rank, 'node')} can have a rank each"
            raise UsageError(f"job {trace.ids[job]} cannot be resized to {gpus} GPUs: {why}")
        return world, found

    def shape_of_rank(self, world: SimWorld, job: int) -> tuple[SimWorld, int]:
        """Return the world with the request of one rank of a hot job, and its index."""
        return self._shape(world, job, TargetSize(rank_gpus(world, job), nodes=1))

    def _shape(self, world: SimWorld, job: int, size: TargetSize) -> tuple[SimWorld, int]:
        trace, gpus, own = world.trace, size.gpus, int(world.demand.shape[job])
        if own < 0 or trace.gpus[job] < 1:
            raise UsageError(f"job {trace.ids[job]} cannot be resized: it has no GPUs, or can never run here")
        base = world.sim.shapes[own]
        parts, before = int(base["parts"]), int(trace.gpus[job])
        amounts = [int(base[name]) * parts for name in ("cores", "memory")]
        # Cores or memory that the trace or pool does not know (0) are not allocated at any size.
        cores, memory = (
            0 if not amount else -(-amount * gpus // before) if asked is None else asked
            for amount, asked in zip(amounts, (size.cores, size.memory_mib), strict=True)
        )
        same = gpus == before and size.nodes in (None, parts)
        if same and -(-cores // parts) == base["cores"] and -(-memory // parts) == base["memory"]:
            return world, own
        key = own, TargetSize(gpus, cores, memory, size.nodes)
        if key not in self._shapes:
            world = self._with_shape(world, job, *key)
            self._shapes[key] = len(world.sim.shapes) - 1
        return world, self._shapes[key]

    def layout(self, world: SimWorld, shape: int, parts: int, one_rack: bool) -> tuple[SimWorld, int]:
        """Return the world with a request for a shape's GPUs over ``parts`` equal nodes, and its index.

        ``one_rack``: all in one rack only.
        """
        base = world.sim.shapes[shape]
        key = shape, parts, one_rack
        if (base["parts"], base["spread"]) == (parts, one_rack):
            return world, shape
        if key not in self._layouts:
            row = over_nodes({name: int(base[name]) for name in SHAPE.names or ()}, parts, one_rack)
            world = _with_request(world, row, entry(world.passes.requests.milli, shape, WHOLE))
            self._layouts[key] = len(world.sim.shapes) - 1
            self._bases[self._layouts[key]] = shape
        return world, self._layouts[key]

    def base_of(self, shape: int) -> int:
        """Return the shape that `layout` was given for this one; a shape without layouts itself."""
        return self._bases.get(shape, shape)

    def _with_shape(self, world: SimWorld, job: int, own: int, size: TargetSize) -> SimWorld:
        trace, base = world.trace, world.sim.shapes[own]
        gpus, cores, memory, nodes = (np.array([amount or 0]) for amount in size)
        # Split the request over nodes as for any job, then append its row to the arrays of shapes, requests and speeds.
        one = replace(select(trace, np.array([job])), gpus=gpus, cores=cores, memory_mib=memory, nodes=nodes)
        found = demand_of(one, world.pool)
        if found.shape[0] < 0:
            raise UsageError(f"job {trace.ids[job]} cannot have {size.gpus} GPUs: {found.infeasible[0]}")
        row = {name: int(column[0]) for name, column in found.requests._asdict().items() if column is not None}
        row |= {name: int(base[name]) for name in ("mask", "queue", "weight")}
        return _with_request(world, row, WHOLE)

    def row(self, world: SimWorld, job: int, shape: int) -> tuple[SimWorld, int]:
        """Return the world with the speeds of ``job`` in a shape, and their row.

        Raises:
            UsageError: The job's speed in this shape is unknown.
        """
        trace, pool, options, sim = world.trace, world.pool, world.options, world.sim
        assert sim.pace is not None
        own = self._own.setdefault(job, (self.base_of(int(sim.jobs[job]["shape"])), int(sim.pace.runs[job]["row"])))
        if shape == own[0] or (trace.progress is not None and own[1] < 0):
            return world, own[1]  # at its own speed
        rates = options.rates or Rates(profiles=Profiles(series={}))
        name = trace.model_name(trace.model[job])
        now, before = sim.shapes[shape], sim.shapes[own[0]]
        gpus, recorded = int(now["parts"] * now["gpus"]), int(trace.gpus[job])
        share = share_of(rates, name, (gpus, *held_amounts(now)), (recorded, *held_amounts(before)))
        on = recorded_on(rates, trace, name, int(trace.gpu_type[job]))
        kind = RateClass(name, gpus, int(now["parts"]), on, recorded, share)
        if kind not in self._rows:
            assert options.elastic is not None
            if not options.elastic.linear and any(alone_on(rates, kind, t) is None for t in pool.gpu_types):
                raise UsageError(
                    f"job {trace.ids[job]} cannot be resized to {gpus} GPUs: the speed of {name or 'its model'} there"
                    " was not measured"
                )
            found = [resized_on(rates, kind, t) for t in pool.gpu_types]
            self._rows[kind] = row = sim.pace.speed.shape[1]
            self._notes |= dict.fromkeys(rates.profiles.notes_of(name))
            if options.rates is not None:
                self._known[row] = max((how for _, how in found), key=_BEST_FIRST.index)
            types = np.zeros(len(sim.pace.speed), np.int64)
            types[sim.pace.kind] = pool.gpu_type
            alone = np.array([s for s, _ in found])[types]
            world = world._replace(sim=sim._replace(pace=_with_row(sim.pace, alone)))
        return world, self._rows[kind]

    def notes(self, rows: Counter[int], what: str) -> tuple[str, ...]:
        """Return a note on how the speeds ``what`` (such as "at other sizes") are known; ``rows``: uses of each row."""
        if not self._known:
            return ()
        by: Counter[str] = Counter()
        for row, count in rows.items():
            by[self._known.get(row, "recorded")] += count
        words = {
            "recorded": "as recorded",
            "measured": "measured",
            "nearest": "from the nearest measured size",
            "proportion": "in proportion to GPUs (not measured)",
        }
        counts = ", ".join(f"{by[how]} {words[how]}" for how in words if by[how])
        return (*self._notes, f"speeds {what}: {counts}") if counts else ()


def _with_request(world: SimWorld, row: dict[str, int], milli: int) -> SimWorld:
    """Append a request, a row of `SHAPE`; ``milli``: thousandths of its one GPU, where GPUs are shared."""
    sim, passes = world.sim, world.passes
    columns = {name: of for name, of in passes.requests._asdict().items() if of is not None}
    row = {"spread": 0} | row | {"milli": milli, "looser": -1}
    requests = passes.requests._replace(**{name: np.append(of, row[name]) for name, of in columns.items()})
    jobs = passes.jobs._replace(feasibility=np.append(passes.jobs.feasibility, 0))
    set_feasibility(passes.total, passes.usable, requests, jobs, passes.scratch)
    shapes = np.append(sim.shapes, filled(SHAPE, 1, **{name: row[name] for name in SHAPE.names or ()}))
    return world._replace(sim=sim._replace(shapes=shapes), passes=passes._replace(requests=requests, jobs=jobs))


def with_lost_ranks(world: SimWorld, made: ResizedShapes) -> SimWorld:
    """Return the world in which hot jobs continue without ranks whose nodes fail.

    Their shapes and speeds at all sizes are made before the replay, since its compiled loop cannot add any.
    """
    elastic, jobs = world.options.elastic, len(world.trace)
    fails = elastic is not None and elastic.rank_gpus is not None and bool(world.options.failures)
    ranks = [rank_gpus(world, job) if fails else 0 for job in range(jobs)]
    hot = [(job, rank, counts_of_ranks(int(elastic.least[job]), int(elastic.most[job]), rank))
           for job, rank in enumerate(ranks) if elastic is not None and rank]  # fmt: skip
    most = max((counts[-1] for _, _, counts in hot if counts), default=0)
    fewest, (shape, row), own = np.zeros(jobs, np.int64), np.full((2, jobs, most), -1, np.int64), np.ones((jobs, most))
    for job, rank, counts in hot:
        fewest[job] = counts.start
        for count in counts:
            try:
                world, found = made.shape(world, job, TargetSize(count * rank, nodes=count))
                world, row[job, count - 1] = made.row(world, job, found)
            except UsageError:  # it cannot have this size, or its speed there is unknown
                continue
            shape[job, count - 1], own[job, count - 1] = found, own_speed(world.trace, job, count * rank)
    of = Ranks(fewest, shape, row, own, pauses(world.trace), np.full(jobs, np.inf), np.zeros(jobs, np.int64))
    return world._replace(sim=world.sim._replace(ranks=of))


def with_own_requests(world: SimWorld) -> tuple[SimWorld, Ints]:
    """Return the world with a request of its own for each job, first a copy, and these rows, ``int64[jobs]``."""
    sim, passes = world.sim, world.passes
    own = np.maximum(world.demand.shape, 0) if len(sim.shapes) else np.zeros(0, np.int64)
    count, feasibility = len(sim.shapes), passes.jobs.feasibility
    columns = {name: np.append(c, c[own]) for name, c in passes.requests._asdict().items() if c is not None}
    sim = sim._replace(shapes=np.append(sim.shapes, sim.shapes[own]))
    jobs = passes.jobs._replace(feasibility=np.append(feasibility, feasibility[own]))
    passes = passes._replace(requests=passes.requests._replace(**columns), jobs=jobs)
    return world._replace(sim=sim, passes=passes), count + np.arange(len(own))


_BEST_FIRST = ("measured", "nearest", "proportion")


def held_amounts(shape: np.void) -> tuple[int | None, int | None]:
    """Return cores and MiB of the whole job; None: unknown."""
    cores, memory = (int(shape[name] * shape["parts"]) for name in ("cores", "memory"))
    return cores or None, memory or None


def _with_row(pace: Pace, alone: Floats) -> Pace:
    """Append a row of speeds by kind of nodes, with unknown slowdowns on shared GPUs."""
    row = pace.speed.shape[1]
    speed = np.full((len(alone), row + 1, row + 2), np.nan)
    speed[:, :row, : row + 1] = pace.speed
    speed[:, row, 0] = alone
    return pace._replace(speed=speed)
