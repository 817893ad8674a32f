"""The engine that stops at decisions: for policies written in plain Python and for learned ones.

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
from collections.abc import Callable, Sequence

import numpy as np

from gpusched.errors import UsageError
from gpusched.sched.backfill import attempt
from gpusched.sched.place import node_fits
from gpusched.sched.state import OK, STARTED, Ints
from gpusched.sim.cluster import Pool
from gpusched.sim.engine_build import Options, log_of, result_of, world_of
from gpusched.sim.engine_fast import settle_instant
from gpusched.sim.engine_state import CHANGED, DECISIONS, GROW, OVER, READY, RUNNING, WAITING, grown, shape_request
from gpusched.sim.engine_step import advance, cut, occupy
from gpusched.sim.policies import PLACEMENTS, Knows, ReplayPolicy
from gpusched.sim.result import PREEMPTED, Result
from gpusched.sim.trace import Trace


class Stepper:
    """A replay that asks at every decision.

    Attributes:
        trace, pool: As given. decisions: How often it has stopped.
    """

    def __init__(self, trace: Trace, pool: Pool, options: Options | None = None) -> None:
        options = options or Options()
        policy = ReplayPolicy(name="", order="fifo", knows="nothing", source="")
        self._world = world_of(trace, pool, policy, options)
        self._log = log_of(self._world)
        self._rule = PLACEMENTS[self._world.rule]
        self._begin = time.perf_counter()
        self._waiting: dict[int, None] = {}
        self.trace, self.pool = trace, pool

    @property
    def now(self) -> float:
        """Seconds on the trace's clock."""
        return float(self._world.sim.clock[0])

    @property
    def free_gpus(self) -> Ints:
        """``int64[nodes]``: GPUs free now; -1 where the node is not available. A copy, as all that is given out."""
        return self._world.sim.rooms.gpus.copy()

    def advance(self, until: float = np.inf) -> bool:
        """On to the next instant at which something happens, or to ``until`` if that is sooner; False: it is over."""
        sim = self._world.sim
        changed = sim.counter[CHANGED]
        if np.isfinite(until):
            sim.clock[1] = until
        code = advance(sim, self._log)
        while code == GROW:
            log = self._log
            self._log = grown(log, len(log.events), len(log.cuts) + len(sim.jobs), len(log.cut_nodes) + len(sim.held))
            code = advance(sim, self._log)
        if code == OVER:
            return False
        sim.counter[DECISIONS] += 1
        settle_instant(sim, self._world.passes, changed, 0)
        for job in sorted(sim.ready[: sim.counter[READY]].tolist()):
            self._waiting[job] = None
        return True

    def waiting(self) -> list[int]:
        """Jobs that wait and could run on the nodes that are available, by (submit, id)."""
        sim, standing = self._world.sim, self._world.passes.jobs.standing
        return [j for j in sorted(self._waiting) if standing[sim.jobs[j]["shape"]] == OK]

    def running(self) -> list[int]:
        """Jobs that run, by (submit, id)."""
        ends = self._world.sim.ends
        return sorted(ends.item[: ends.size[0]].tolist())

    def nodes_of(self, job: int) -> Ints:
        """The nodes of a running job, ``int64[parts]``."""
        sim = self._world.sim
        offset = int(sim.jobs[job]["offset"])
        return sim.held[offset : offset + self.parts(job)[0]].copy()

    def parts(self, job: int) -> tuple[int, int]:
        """How many nodes it needs, and GPUs on each."""
        shape = self._world.sim.shapes[self._world.sim.jobs[job]["shape"]]
        return int(shape["parts"]), int(shape["gpus"])

    def fits(self, job: int, placement: str | None = None) -> tuple[int, ...] | None:
        """The nodes that the placement rule would take now, or None (the naive draw may draw another time)."""
        world = self._world
        rule = self._rule if placement is None else PLACEMENTS[placement]
        request = shape_request(world.sim.shapes, world.sim.jobs[job]["shape"])
        passes = world.passes
        code = attempt(world.sim.rooms, passes.jobs.masks, request, 0, rule, False, passes.rng, passes.scratch)
        return tuple(int(n) for n in passes.scratch.chosen[: request.parts]) if code == STARTED else None

    def start(self, job: int, nodes: Sequence[int] | None = None) -> bool:
        """Starts a waiting job on ``nodes``, or where the placement rule says; whether it did.

        Raises:
            UsageError: The job does not wait, or the nodes are not what it needs (they must be distinct, and free).
        """
        sim = self._world.sim
        if job not in self._waiting or sim.state[job]["status"] != WAITING:
            raise UsageError(f"job {job} cannot start: it does not wait")
        request = shape_request(sim.shapes, sim.jobs[job]["shape"])
        if nodes is None:
            nodes = self.fits(job)
            if nodes is None:
                return False
        masks = self._world.passes.jobs.masks
        within = all(request.lo <= n < request.hi and node_fits(sim.rooms, masks, request, n) for n in nodes)
        if len(set(nodes)) != request.parts or len(nodes) != request.parts or not within:
            raise UsageError(f"job {job} cannot start on nodes {tuple(nodes)}: not free, or not what it needs")
        sim.chosen[: request.parts] = nodes
        overhead = self._world.options.restart_s if sim.state[job]["restarts"] > 0 else 0.0
        occupy(sim, self._log, job, request, overhead)
        del self._waiting[job]
        return True

    def preempt(self, job: int) -> None:
        """Stops a running job; its work is kept and it waits again.

        Raises:
            UsageError: It does not run, or has been cut at this instant before.
        """
        sim, state = self._world.sim, self._world.sim.state[job]
        if state["status"] != RUNNING or state["start"] == self.now:
            raise UsageError(f"job {job} cannot be preempted: it does not run, or has only just started")
        overhead = self._world.options.restart_s if state["restarts"] > 0 else 0.0
        left = float(state["left"] - max(0.0, self.now - state["start"] - overhead))
        cut(sim, self._log, job, PREEMPTED, left)
        self._waiting[job] = None

    def result(self, name: str, knows: Knows = "nothing", source: str = "") -> Result:
        """What was done so far; ``sim_seconds`` counts the policy's own time too."""
        policy = ReplayPolicy(name=name, order="fifo", knows=knows, source=source)
        world = self._world._replace(policy=policy, knowledge=self._world.knowledge._replace(knows=knows))
        return result_of(world, self._log, time.perf_counter() - self._begin)


PolicyFunction = Callable[[Stepper], None]


def run_function(trace: Trace, pool: Pool, policy: PolicyFunction, options: Options) -> Result:
    """Replays under a function, which may say what it knows and where it is from: ``f.knows``, ``f.source``."""
    stepper = Stepper(trace, pool, options)
    while stepper.advance():
        policy(stepper)
    name = getattr(policy, "__name__", type(policy).__name__)
    return stepper.result(name, getattr(policy, "knows", "oracle"), getattr(policy, "source", ""))
