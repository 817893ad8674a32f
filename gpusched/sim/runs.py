"""The kinds of runs, `KINDS`: the first that applies to a world prepares it and runs it to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.policy import AGENTS
from gpusched.sched.agent import agent_parts, component_errors, prepared_weights
from gpusched.sched.state import BACKFILLS, filled
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.component import component_run, is_by_component
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.placing_index import run_placed
from gpusched.sim.engine.placing_walk import run_walk
from gpusched.sim.engine.preempt import PREEMPTIVE_CODES, Preemptive, new_filling, new_plan, run_preemptive
from gpusched.sim.engine.sized import run_sized
from gpusched.sim.engine.state import EventLog, Passes, Sim
from gpusched.sim.engine.static import LAST, Fixed, run_merged, run_strict
from gpusched.sim.engine.waitlist import new_waitlist
from gpusched.sim.placed import walked, walks, with_ways
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.sized import sized_run, with_sizes

State = TypeVar("State")
Loop = Callable[[Sim, EventLog, Passes, State], int]
Runner = Callable[[EventLog], int]
"""Replays to the end: OVER, or GROW (call it again with more room in the log). It may have ``notes`` for the result."""


class RunKind(NamedTuple):
    """A way to run a replay.

    Attributes:
        applies: Whether a world is run so, where no kind before it applies.
        ready: The world with all that its jobs may have, and what runs it.
        compiled: The loop, where all of it is compiled; ``versions`` of it, with speeds of jobs and without.
    """

    name: str
    applies: Callable[[SimWorld], bool]
    ready: Callable[[SimWorld], tuple[SimWorld, Runner]]
    compiled: Callable[..., int] | None = None
    versions: int = 2


def _by(run: Loop[State], world: SimWorld, state: State) -> tuple[SimWorld, Runner]:
    sim, passes = world.sim, world.passes
    return world, lambda log: run(sim, log, passes, state)


def _sized(world: SimWorld) -> tuple[SimWorld, Runner]:
    world, sizer = with_sizes(world)
    return world, sized_run(world, sizer)


def _by_snapshot(world: SimWorld) -> tuple[SimWorld, Runner]:
    from gpusched.sim.snapshots import SnapshotRun  # other replays start faster without

    return world, SnapshotRun(world)


def _by_agent(world: SimWorld) -> tuple[SimWorld, Runner]:
    """Run by the agent's own passes, as live, called at the engine's decisions (`gpusched.agents.base.Replay`)."""
    model = world.policy.model
    assert model is not None
    agent, replay = model.agent, agent_parts(model.agent).replay
    assert replay is not None
    if is_mapped(world) and not replay().maps(model):
        problem = f"{world.policy.name} cannot be combined with --placement {world.rule}"
        raise UsageError(problem, "use another placement")
    try:
        own = prepared_weights(model)
        with component_errors(agent):
            world, run = replay().runner(world, own)
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "train it again") from None
    return world, run if agent in AGENTS else _naming(agent, run)


def _naming(agent: str, run: Runner) -> Runner:
    """Return the run of another package's agent: what it raises is one line with its name."""

    def to_end(log: EventLog) -> int:
        with component_errors(agent):
            return run(log)
        raise AssertionError

    return to_end


def _preemptive(world: SimWorld) -> tuple[SimWorld, Runner]:
    levels = np.array(sorted(world.options.las_thresholds_gpu_s), np.float64)
    code, restart_s = PREEMPTIVE_CODES[world.policy.order], world.restart_s
    return _by(run_preemptive, world, Preemptive(new_plan(world, filling=new_filling(world)), code, restart_s, levels))


def _fixed(world: SimWorld, strict: bool) -> Fixed:
    demand, sim = world.demand, world.sim
    waitlist = new_waitlist(demand.shape, sim.jobs["rank"], demand.queue, len(sim.dirty), strict)
    return Fixed(waitlist, filled(LAST, 1, head=-1), PLACEMENTS[world.rule], BACKFILLS[world.policy.backfill])


def _is_strict(world: SimWorld) -> bool:
    """Return whether there is one queue whose head blocks, on unchanging nodes; excludes speeds to compile less."""
    sim = world.sim
    return world.policy.backfill == "none" and sim.pace is None and len(sim.dirty) == 1 and len(sim.changes) == 0


KINDS = (
    RunKind("by snapshot", lambda w: w.by_snapshot, _by_snapshot),
    RunKind("placed by a component", is_by_component, lambda w: (w, component_run(w))),
    RunKind("placing agent", lambda w: w.policy.places, _by_agent),
    RunKind("placed walk", walks, lambda w: _by(run_walk, *walked(*with_ways(w))), run_walk, 1),
    RunKind("placed", lambda w: w.options.network is not None, lambda w: _by(run_placed, *with_ways(w)), run_placed, 1),
    RunKind("sized", lambda w: w.policy.chooses_sizes and w.options.elastic is not None, _sized, run_sized, 1),
    RunKind("agent", lambda w: w.policy.by_agent, _by_agent),
    RunKind("mapped", is_mapped, lambda w: (w, MappedRun(w))),
    RunKind("preemptive", lambda w: w.policy.kind == "preemptive", _preemptive, run_preemptive),
    RunKind("generic", lambda w: w.generic, lambda w: _by(run_generic, w, new_queue(w)), run_generic),
    RunKind("strict", _is_strict, lambda w: _by(run_strict, w, _fixed(w, True)), run_strict),
    RunKind("merged", lambda w: True, lambda w: _by(run_merged, w, _fixed(w, False)), run_merged),
)
"""The first that applies is taken. Where none walks the queue, the order never changes, and indexes decide."""
