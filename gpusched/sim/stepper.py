"""An engine that stops at decisions: for policies in plain Python and for learned ones.

    stepper = Stepper(trace, pool)
    while stepper.advance():
        for job in stepper.waiting():
            if stepper.fits(job):
                stepper.start(job)
    result = stepper.result("mine")

A policy function is called once per decision with the stepper and starts what it likes (`replay(trace, pool, f)`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gpusched.errors import UsageError
from gpusched.sched.backfill import attempt, give
from gpusched.sched.place import node_fits
from gpusched.sched.sizing.ranks import join_nodes
from gpusched.sched.state import OK, STARTED, Ints, PlacementRequest, Resources, copied
from gpusched.sim.engine.build import ReplayOptions, log_of, result_of, world_of
from gpusched.sim.engine.hot import change_ranks
from gpusched.sim.engine.ledger import exceeds_at, exceeds_limit, set_gpus
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.pace import work_left
from gpusched.sim.engine.state import GROW, OVER, READY, RUNNING, WAITING, grown, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job, stop_job
from gpusched.sim.layouts import OwnLayouts
from gpusched.sim.orders import Knows
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.resizing import ResizedShapes, TargetSize, own_speed, pauses, rank_gpus, with_lost_ranks
from gpusched.sim.result import PREEMPTED, RESIZED, ReplayResult
from gpusched.traces.trace import Trace


class Stepper:
    """A replay that stops at every decision.

    Attributes:
        trace, pool: As given. decisions: How often it has stopped.
    """

    def __init__(self, trace: Trace, pool: Pool, options: ReplayOptions | None = None) -> None:
        policy = ReplayPolicy(name="", order="fifo", knows="nothing", source="")
        self._world = world_of(trace, pool, policy, options or ReplayOptions())
        if self._world.by_snapshot:
            raise UsageError("a policy in Python cannot decide where GPUs are cut on demand", "give nodes fixed slices")
        self._layouts: OwnLayouts | None = None
        network, elastic = self._world.options.network, self._world.options.elastic
        self._sizes = ResizedShapes()
        if network is not None and network.keeps_nodes and (elastic is None or trace.spreads):
            self._layouts = OwnLayouts(self._world, self._sizes)
            self._world = self._layouts.prepared(self._world)
        self._log = log_of(self._world)
        if self._world.rule not in PLACEMENTS:
            raise UsageError(f"a policy in Python cannot be combined with placement {self._world.rule}")
        self._rule = PLACEMENTS[self._world.rule]
        self._begin = time.perf_counter()
        self._waiting: dict[int, None] = {}
        self._space: dict[int, int] = {}  # job -> nodes that have space behind its offset, where it has new space
        if elastic is not None and elastic.rank_gpus is not None:
            self._world = with_lost_ranks(self._world, self._sizes)
        self._resized: Counter[int] = Counter()
        self.trace, self.pool = trace, pool

    @property
    def now(self) -> float:
        """Seconds on the trace's clock."""
        return float(self._world.sim.clock[0])

    @property
    def free_gpus(self) -> Ints:
        """``int64[nodes]``: GPUs free now; -1 where the node is not available. A copy, like all arrays returned."""
        return self._world.sim.resources.gpus.copy()

    def advance(self, until: float = np.inf) -> bool:
        """Advance to the next instant with an event, or to ``until`` if that is sooner; False: the replay is over."""
        sim = self._world.sim
        if self._layouts is not None:  # a job that no longer waits for one rack accepts other nodes
            ends = (float(sim.jobs[j]["submit"] + self._layouts.wait_s[j]) for j in self._waiting)
            until = min((until, *(end for end in ends if end > self.now)))
        sim.clock[1] = max(until, self.now)  # time does not go back, and what was asked for before is over
        while (code := next_decision(sim, self._log, self._world.passes)) == GROW:
            self._log = grown(self._log, sim)
        if code == OVER:
            return False
        self._waiting |= dict.fromkeys(sorted(sim.ready[: sim.counter[READY]].tolist()))
        return True

    def waiting(self) -> list[int]:
        """Return waiting jobs that could run on available nodes, by (submit, id); none that a limit holds."""
        first = {job: self._shapes(job)[0] for job in sorted(self._waiting)}
        feasibility = self._world.passes.jobs.feasibility
        return [job for job, shape in first.items() if feasibility[shape] == OK and not self._held(job)]

    def _shapes(self, job: int) -> list[int]:
        """Return the requests that the job accepts now, first choice first; of a running job the one that it has."""
        of = self._world.sim.jobs[job]
        shape = int(of["shape"])
        if job not in self._waiting or self._layouts is None:
            return [shape]
        waits = self.now < of["submit"] + self._layouts.wait_s[job]
        return self._shapes_at(job, self._sizes.base_of(shape), bool(waits))

    def _shapes_at(self, job: int, size: int, waits: bool = False) -> list[int]:
        """Return the requests that a job accepts at a size; ``waits``: for one rack."""
        if self._layouts is None:
            return [size]
        self._world, found = self._layouts.at(self._world, job, size, waits)
        return found

    def running(self) -> list[int]:
        """Return the running jobs, by (submit, id)."""
        ends = self._world.sim.ends
        return sorted(ends.item[: ends.size[0]].tolist())

    def nodes_of(self, job: int) -> Ints:
        """Return the nodes of a running job, ``int64[parts]``."""
        sim = self._world.sim
        offset = int(sim.jobs[job]["offset"])
        return sim.held[offset : offset + self.parts(job)[0]].copy()

    def parts(self, job: int) -> tuple[int, int]:
        """Return how many nodes the job has, or asks for first, and GPUs on each."""
        return self._nodes_and_gpus(self._shapes(job)[0])

    def _nodes_and_gpus(self, shape: int) -> tuple[int, int]:
        of = self._world.sim.shapes[shape]
        return int(of["parts"]), int(of["gpus"])

    def partition(self, job: int) -> int:
        """Return the index of the job's partition."""
        return int(self.pool.partition[self._world.sim.shapes[self._world.sim.jobs[job]["shape"]]["lo"]])

    def cores_and_memory(self, job: int) -> tuple[int, int]:
        """Return the cores and MiB that the job needs on each of these nodes."""
        first = self._shapes(job)[0]
        shape = self._world.sim.shapes[first]
        return int(shape["cores"]), int(shape["memory"])

    def pace_of(self, job: int) -> tuple[float, float, float]:
        """Return a running job's start, its end at the current rate, and its rate (1: as recorded)."""
        state, pace = self._world.sim.state[job], self._world.sim.pace
        return float(state["start"]), float(state["due"]), 1.0 if pace is None else float(pace.runs[job]["rate"])

    def left_of(self, job: int) -> float:
        """Return the seconds of work that a waiting job has left, at the speed behind its recorded duration."""
        return float(self._world.sim.state[job]["left"])

    def fits(self, job: int, placement: str | None = None) -> tuple[int, ...] | None:
        """Return the nodes that the placement rule would choose now, or None (the naive draw may succeed later)."""
        if self._held(job):
            return None
        return self._first_fit(job, self._shapes(job), self._world.sim.resources, placement)

    def _first_fit(
        self, job: int, shapes: Sequence[int], resources: Resources, placement: str | None = None
    ) -> tuple[int, ...] | None:
        """Return the nodes of the first of these requests that fits, or None."""
        requests = (shape_request(self._world.sim.shapes, shape) for shape in shapes)
        found = (self._nodes_for(job, request, resources, placement) for request in requests)
        return next((nodes for nodes in found if nodes is not None), None)

    def _nodes_for(
        self, job: int, request: PlacementRequest, resources: Resources, placement: str | None = None
    ) -> tuple[int, ...] | None:
        passes = self._world.passes
        rule = self._rule if placement is None else PLACEMENTS[placement]
        scratch, request = passes.scratch, self._with_part(job, request)
        found = attempt(resources, passes.jobs.masks, request, 0, rule, False, passes.rng, scratch) == STARTED
        return tuple(int(n) for n in scratch.chosen[: request.parts]) if found else None

    def _held(self, job: int) -> bool:
        """Return whether a limit leaves too little for a waiting job."""
        ledger = self._world.sim.ledger
        return ledger is not None and bool(exceeds_limit(ledger, job))

    def _with_part(self, job: int, request: PlacementRequest) -> PlacementRequest:
        """Return the request for the thousandths of its one GPU, where GPUs are shared."""
        shared = self._world.sim.resources.shared
        return request if shared is None else request._replace(milli=int(shared.milli[job]))

    def _fit(
        self, job: int, request: PlacementRequest, resources: Resources, nodes: Sequence[int],
        own: Sequence[int] | Ints = (),
    ) -> bool:  # fmt: skip
        """Return whether these are distinct nodes of the job's partition, as many as needed, and each fits a part.

        ``own``: nodes that it has beside them.
        """
        passes, request = self._world.passes, self._with_part(job, request)
        racks = passes.scratch.racks
        distinct = len(set(nodes)) == len(nodes) == request.parts
        if request.spread and racks is not None:
            distinct &= len({*racks["number"][[*nodes, *own]].tolist()}) < 2
        if not distinct or not all(request.lo <= n < request.hi for n in nodes):
            return False
        return all(node_fits(resources, passes.jobs.masks, request, n) for n in nodes)

    def _shape_on(self, job: int, shapes: Sequence[int], resources: Resources, nodes: Sequence[int]) -> int | None:
        """Return the first of these requests for which these are the nodes, or None."""
        requests = ((shape, shape_request(self._world.sim.shapes, shape)) for shape in shapes)
        return next((shape for shape, request in requests if self._fit(job, request, resources, nodes)), None)

    def start(self, job: int, nodes: Sequence[int] | None = None) -> bool:
        """Start a waiting job on ``nodes``, or where the placement rule says; return whether it started.

        Raises:
            UsageError: The job does not wait, or the nodes are not what it needs (they must be distinct, and free).
        """
        sim = self._world.sim
        if job not in self._waiting or sim.state[job]["status"] != WAITING:
            raise UsageError(f"job {job} cannot start: it is not pending")
        nodes = self.fits(job) if nodes is None else nodes
        if nodes is None:
            return False
        if self._held(job):
            raise UsageError(f"job {job} cannot start: a limit leaves too little for it")
        shape = self._shape_on(job, self._shapes(job), sim.resources, nodes)
        if shape is None:
            raise UsageError(f"job {job} cannot start on nodes {tuple(nodes)}: not free, or not what it needs")
        self._make_room(job, len(nodes))
        sim = self._world.sim
        sim.jobs[job]["shape"] = shape
        sim.chosen[: len(nodes)] = nodes
        start_job(sim, self._log, job, sim.chosen, 0, NOTHING_TAKEN, self.restart_s(job))
        del self._waiting[job]
        return True

    def preempt(self, job: int) -> None:
        """Stop a running job, which keeps its work and waits again.

        Raises:
            UsageError: It does not run, or has been cut at this instant before.
        """
        sim, state = self._world.sim, self._world.sim.state[job]
        if state["status"] != RUNNING or state["start"] == self.now:
            raise UsageError(f"job {job} cannot be preempted: it does not run, or has only just started")
        stop_job(sim, self._log, job, PREEMPTED, work_left(sim.pace, sim, job, self.restart_s(job)))
        self._waiting[job] = None

    def restart_s(self, job: int) -> float:
        """Return the seconds that a restart of the job holds its nodes before its work resumes."""
        return float(self._world.restart_s[job])

    def resize(self, job: int, size: int | TargetSize, nodes: Sequence[int] | None = None) -> bool:
        """Resize an elastic job; return whether it was (a running job that does not fit continues unchanged).

        A waiting job will start with it. A running one is stopped and at once started again on ``nodes``, or where
        the placement rule says; its own nodes count as free for that, its work is kept, and its `restart_s` pass before
        it goes on. ``size``: its GPUs, with which cores and memory go; or a `TargetSize`. It goes as fast as was
        measured (`ReplayOptions.rates`) with so many GPUs over so many nodes, cores and memory. A hot job that runs is
        not stopped: ranks join on those of ``nodes`` that it does not have, or its last ones leave. If a rank's node
        fails, and the rank is not its first, it goes on without that rank, as far as its least size.

        Raises:
            UsageError: The job may not have that size (`ReplayOptions.elastic`), its speed then is unknown, it
                neither waits nor runs, or has only just started; or the nodes are not what it needs.
        """
        state = self._world.sim.state[job]
        runs = state["status"] == RUNNING
        if (runs and state["start"] == self.now) or (not runs and job not in self._waiting):
            raise UsageError(f"job {job} cannot be resized: it neither waits nor runs, or has only just started")
        if self._world.options.elastic is None:
            raise UsageError(f"job {job} cannot be resized: no jobs are elastic", "see Options.elastic")
        world, shape = self._sizes.shape(self._world, job, self._target(job, size))
        world, row = self._sizes.row(world, job, shape)
        self._world = world
        if not runs:
            self._set_size(job, shape, row)
            return True
        (parts, each), (more, gpus), ledger = self.parts(job), self._nodes_and_gpus(shape), world.sim.ledger
        if ledger is not None and exceeds_at(ledger, job, more * gpus, parts * each, np.inf):
            return False
        if rank_gpus(self._world, job) > 0:
            return self._change_ranks(job, shape, row, nodes)
        resources, shapes = self._resources_without(job), self._shapes_at(job, shape)
        chosen = self._first_fit(job, shapes, resources) if nodes is None else tuple(nodes)
        if chosen is None:
            return False
        if self._shape_on(job, shapes, resources, chosen) is None:
            raise UsageError(f"job {job} cannot go on on nodes {chosen}: not free, or not what it needs")
        sim, overhead = self._world.sim, self.restart_s(job)
        stop_job(sim, self._log, job, RESIZED, work_left(sim.pace, sim, job, overhead))
        self._set_size(job, shape, row)
        sim = self._world.sim
        sim.chosen[: len(chosen)] = chosen
        start_job(sim, self._log, job, sim.chosen, 0, NOTHING_TAKEN, overhead)
        return True

    def rate_at(self, job: int, size: int | TargetSize) -> float:
        """Return a job's speed at a size, on the slowest GPUs of its partition (1: as recorded).

        For policies that know speeds and declare so (``knows``).

        Raises:
            UsageError: As `resize`.
        """
        world, shape = self._sizes.shape(self._world, job, self._target(job, size))
        self._world, row = self._sizes.row(world, job, shape)
        pace, at = self._world.sim.pace, self._world.sim.shapes[shape]
        assert pace is not None
        if row < 0:
            return own_speed(world.trace, job, int(at["parts"] * at["gpus"]))
        return float(pace.speed[np.unique(pace.kind[at["lo"] : at["hi"]]), row, 0].min())

    def _target(self, job: int, size: int | TargetSize) -> TargetSize:
        """Return the size, of a hot job with a node for each rank."""
        size = TargetSize(size) if isinstance(size, int) else size
        rank = rank_gpus(self._world, job)
        return size._replace(nodes=size.gpus // rank) if rank else size

    def _change_ranks(self, job: int, shape: int, row: int, nodes: Sequence[int] | None) -> bool:
        """Let ranks of a running hot job join or leave; return whether those that are to join find nodes."""
        (shape,) = self._shapes_at(job, shape)
        sim, passes, own = self._world.sim, self._world.passes, self.nodes_of(job)
        request = shape_request(sim.shapes, shape)
        joins = np.zeros(max(0, request.parts - len(own)), np.int64)
        if nodes is not None:
            given = [node for node in nodes if node not in own]
            if not self._fit(job, request._replace(parts=len(joins)), sim.resources, given, own):
                raise UsageError(f"job {job} cannot have ranks on nodes {given}: not free, or not what it needs")
            joins[:] = given
        elif join_nodes(sim.resources, passes.jobs.masks, request, own, passes.scratch.racks, joins) < len(joins):
            return False
        elif not self._fit(job, request._replace(parts=len(joins)), sim.resources, joins.tolist(), own):
            return False  # it runs in one rack only
        self._make_room(job, request.parts, own)
        self._resized[row] += 1
        speed = own_speed(self._world.trace, job, request.parts * request.gpus)
        pause_s = float(pauses(self._world.trace)[job])
        change_ranks(self._world.sim, self._log, job, shape, row, speed, joins, np.inf, pause_s)
        return True

    def _make_room(self, job: int, parts: int, held: Sequence[int] | Ints = ()) -> None:
        """Give the job space for so many nodes, of which it has ``held``."""
        sim = self._world.sim
        if parts > self._space.get(job, int(self._world.demand.parts[job])):
            self._space[job], sim.jobs[job]["offset"] = parts, len(sim.held)
            self._world = self._world._replace(sim=sim._replace(held=np.append(sim.held, np.full(parts, -1))))
            self._world.sim.held[len(sim.held) : len(sim.held) + len(held)] = held

    def _resources_without(self, job: int) -> Resources:
        """Return what would be free without a running job."""
        sim = self._world.sim
        resources = copied(sim.resources)
        request = shape_request(sim.shapes, sim.jobs[job]["shape"])
        for node in self.nodes_of(job):
            if resources.gpus[node] >= 0:
                give(resources, request, int(node))
        return resources

    def _set_size(self, job: int, shape: int, row: int) -> None:
        """Set the job's shape and speed from its next start on, with space for its nodes."""
        world, parts = self._world, int(self._world.sim.shapes[shape]["parts"])
        self._make_room(job, parts)
        sim = self._world.sim
        assert sim.pace is not None
        if shape != self._sizes.base_of(int(sim.jobs[job]["shape"])):
            self._resized[row] += 1
        sim.jobs[job]["shape"] = shape
        if sim.resources.shared is not None and world.passes.requests.milli is not None:
            sim.resources.shared.milli[job] = world.passes.requests.milli[shape]
        set_gpus(sim.ledger, job, int(sim.shapes[shape]["gpus"]) * parts, np.inf)
        sim.pace.runs[job]["row"] = row
        sim.pace.runs[job]["own"] = own_speed(world.trace, job, int(sim.shapes[shape]["gpus"]) * parts)

    def result(self, name: str, knows: Knows = "nothing", source: str = "") -> ReplayResult:
        """Return the result so far; ``sim_seconds`` includes the policy's own time."""
        policy = ReplayPolicy(name=name, order="fifo", knows=knows, source=source)
        world = self._world._replace(policy=policy, knowledge=self._world.knowledge._replace(knows=knows))
        result = result_of(world, self._log, time.perf_counter() - self._begin)
        notes = dict.fromkeys((*result.notes, *self._sizes.notes(self._resized, "after resizes")))
        return replace(result, notes=tuple(notes))


PolicyFunction = Callable[[Stepper], None]


def run_function(trace: Trace, pool: Pool, policy: PolicyFunction, options: ReplayOptions) -> ReplayResult:
    """Replay under a function, which may state what it knows and its source: ``f.knows``, ``f.source``."""
    stepper = Stepper(trace, pool, options)
    while stepper.advance():
        policy(stepper)
    name = getattr(policy, "__name__", type(policy).__name__)
    return stepper.result(name, getattr(policy, "knows", "oracle"), getattr(policy, "source", ""))
