"""Replays in which topology agents place jobs: the live decision (`bids`) at the engine's instants.

The queue is walked as live: in their policy's order, with its backfill, by so many schedulers as it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.topology.auction import Auction, Site, new_auction, open_auction
from gpusched.agents.topology.bids import offer_in_turn, retries_at, settle
from gpusched.agents.topology.network import SHAPES, TopologyWeights
from gpusched.agents.topology.tape import new_tape
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.sched.agent import NAN_OUTPUT
from gpusched.sched.slicenames import profile_of
from gpusched.sched.state import POLICY, SKIP, Flags, Floats, Ints
from gpusched.sched.topology.queue import Priced
from gpusched.sim.engine.build import ReplayOptions, SimWorld, log_of, result_of, world_of
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.engine.placing_walk import (
    Walk,
    begin,
    begin_walk,
    end_walk,
    jobs_behind,
    place,
    put_beside,
    queue_now,
    state_now,
)
from gpusched.sim.engine.state import ARRIVED, IN_SYSTEM, OVER, EventLog, Passes, Sim
from gpusched.sim.knowledge import static_ranks
from gpusched.sim.placed import walked, with_ways
from gpusched.sim.policies import ReplayPolicy, policy_of_order
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay, to_the_end
from gpusched.sim.result import ReplayResult
from gpusched.traces.trace import Trace

# Code is compiled for each length of a tuple, for half a minute: one of a partition serves up to so many.
_PARTITIONS = 4
UNBOUNDED: Floats = np.array([np.inf])


class TopologyReplayState(NamedTuple):
    """State kept between decisions.

    Attributes:
        auctions: Of each partition, the last one repeated (`_PARTITIONS`).
        staged: ``uint8[partitions]``: 1: of MIG slices, about which the policy decides without its agent.
        spent: ``float64[3]``: seconds that jobs have spent in the system, the sum over jobs, by when; and how many are
            there since then.
        by_arrivals: ``float64[2, jobs + 1]``: that sum when so many jobs had arrived, and above which the replay ends.
    """

    walk: Walk
    auctions: tuple[Auction, ...]
    staged: Flags
    spent: Floats
    by_arrivals: Floats


@jit
def decide_agents(sim: Sim, log: EventLog, passes: Passes, state: TopologyReplayState) -> int:
    """Decide for every partition."""
    if _is_beyond(sim, state.spent, state.by_arrivals):
        return OVER
    walk = state.walk
    begin_walk(sim, passes, walk)
    for queue in range(walk.placing.queues.size):
        auction = state.auctions[queue]
        waiting, held = queue_now(sim, passes, walk, queue)
        if state.staged[queue]:
            place(sim, passes, walk, waiting, walk.placing.backfill)
            begin(sim, log, passes, walk)
            continue
        _pass(sim, log, passes, walk, auction, waiting[: held + 1], SKIP)
        _pass(sim, log, passes, walk, auction, jobs_behind(sim, walk, queue, waiting, held), walk.placing.backfill)
        put_beside(sim, log, passes, walk, waiting)
    return end_walk(sim, walk)


@jit
def _is_beyond(sim: Sim, spent: Floats, by_arrivals: Floats) -> bool:
    """Add up what jobs have spent until now; return whether it is too much."""
    now, arrived = sim.clock[0], sim.counter[ARRIVED]
    spent[0] += spent[2] * (now - spent[1])
    spent[1], spent[2] = now, sim.counter[IN_SYSTEM]
    by_arrivals[0, arrived] = spent[0]
    return bool(spent[0] > by_arrivals[1, arrived])


run_agents = looped(decide_agents)


@jit
def _pass(sim: Sim, log: EventLog, passes: Passes, walk: Walk, auction: Auction, waiting: Ints, backfill: int) -> None:
    """Start these jobs where possible, and record when to reconsider those that wait for a better place."""
    if waiting.size == 0:
        return
    of, costs, now, state = walk.placing, walk.costs, sim.clock[0], state_now(sim, passes, walk)
    open_auction(auction, costs, passes.jobs, waiting, sim.resources, passes.usable, now)
    if auction.offers.rank.shape[0] > 1:
        offer_in_turn(auction, costs, passes.jobs, sim.resources, waiting, now)
    settle(state, waiting, backfill, Priced(costs, auction))
    for job in waiting:
        if walk.outcome.code[job] == POLICY:
            of.wake[0] = min(of.wake[0], retries_at(costs, job, now))
    begin(sim, log, passes, walk)


def placed_by(placement: str, name: str = "") -> ReplayPolicy:
    """Return a policy that starts fitting jobs in submission order, placed by ``placement``; named so, or ``name``."""
    return replace(policy_of_order("fifo+skip"), name=name or placement, placement=placement)


def agents_spec(parts: int, wait_s: float = np.inf) -> PolicySpec:
    """Return a policy of so many schedulers, in submission order; no longer waits than ``wait_s``."""
    return PolicySpec(name="agents", agent="topology", backfill="skip", schedulers=parts, placement_wait_s=wait_s)


def replayed(
    trace: Trace, pool: Pool, network: PlacementNetwork, agent: TopologyWeights, spec: PolicySpec, seed: int = 0
) -> ReplayResult:
    """Replay a trace under schedulers with equal weights, by their policy."""
    model = TrainedModel("topology", dict(zip(SHAPES, agent, strict=True)), {}, "", "<weights in memory>")
    policy = replace(placed_by("contention", "agents"), order="topology", model=model, spec=spec)
    return replay(trace, pool, policy, network=network, seed=seed)


def replayed_within(
    trace: Trace, pool: Pool, network: PlacementNetwork, agent: TopologyWeights, spec: PolicySpec, most_s: Floats
) -> tuple[ReplayResult, Floats]:
    """Return the same as `replayed`, and the seconds that jobs had spent in the system when so many had arrived.

    Both are ``float64[jobs + 1]``. The replay ends where the sum exceeds ``most_s``.
    """
    world = world_of(trace, pool, placed_by("contention", "agents"), ReplayOptions(network=network))
    world, state = new_replay_state(world, agent, spec, most_s=most_s)
    log = to_the_end(world, log_of(world), TopologyRun(world, state))
    return result_of(world, log, 0.0), np.maximum.accumulate(state.by_arrivals[0])


def new_replay_state(
    world: SimWorld, agent: TopologyWeights, spec: PolicySpec, noise: Floats | None = None, most_s: Floats = UNBOUNDED
) -> tuple[SimWorld, TopologyReplayState]:
    """Return the world with its jobs' possible layouts, and the agents' state.

    ``noise``: with a tape, see `tape`; ``most_s``: see `replayed_within`.
    """
    rule = replace(
        policy_of_order(f"{spec.order}+{spec.backfill}"), placement="contention", placement_wait_s=spec.placement_wait_s
    )
    world.sim.jobs["rank"] = static_ranks(rule.order, world.trace, world.knowledge.expected, world.trace.duration)
    policy = world.policy
    world, walk = walked(*with_ways(world._replace(policy=rule)))
    racks, total = world.passes.scratch.racks, world.pool.gpus.astype(np.int64)
    assert racks is not None
    sites = [Site(*world.pool.span(queue), racks["number"].copy(), total) for queue in range(len(world.sim.dirty))]
    passes, count = world.passes, spec.schedulers
    auctions = [
        new_auction(agent, count, on, walk.costs, passes.jobs, passes.requests, world.trace.ids) for on in sites
    ]
    if noise is not None:
        auctions = [auction._replace(tape=new_tape(auction.graph, noise)) for auction in auctions]
    unused = -len(auctions) % _PARTITIONS
    staged = np.array([profile_of(name) != "" for name in world.pool.partitions], np.uint8)
    by_arrivals = np.zeros((2, len(world.trace) + 1))
    by_arrivals[1] = most_s
    return world._replace(policy=policy), TopologyReplayState(
        walk, (*auctions, *auctions[-1:] * unused), staged, np.zeros(3), by_arrivals
    )


class TopologyRun:
    """A replay by agents."""

    notes: tuple[str, ...] = ()

    def __init__(self, world: SimWorld, state: TopologyReplayState) -> None:
        self._world, self._acting = world, state

    def __call__(self, log: EventLog) -> int:
        """Run to the end, or until the log is full.

        Raises:
            UsageError: A value was no number.
        """
        code = run_agents(self._world.sim, log, self._world.passes, self._acting)
        if not all(auction.offers.sound.all() for auction in self._acting.auctions):
            raise UsageError(f"{self._world.policy.name}: {NAN_OUTPUT}", "train it again")
        return code


def maps(model: TrainedModel) -> bool:
    """Return True: the agent chooses nodes itself."""
    return False


def runner(world: SimWorld, prepared: TopologyWeights) -> tuple[SimWorld, TopologyRun]:
    """Return the run of one replay.

    Raises:
        UsageError: Placement costs nothing there, or is another rule's.
    """
    policy, spec = world.policy, world.policy.spec
    if world.options.network is None:
        raise UsageError(f"{policy.name}: topology agents decide by what placement costs", "say --topology FILE")
    if world.rule != policy.placement:
        raise UsageError(f"{policy.name} cannot be combined with --placement {world.rule}", "omit --placement")
    assert spec is not None
    world, state = new_replay_state(world, prepared, spec)
    return world, TopologyRun(world, state)
