"""The topology agents in the live controller: several schedulers, each with a part of a partition's nodes.

They decide side by side against the same snapshot; what they offer is settled in the queue's order (`bids`). One alone
has all nodes, and makes every offer at its job's turn.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gpusched.agents.common.vector import to_vector
from gpusched.agents.topology.auction import Auction, Site, Workspace, new_auction, open_auction, workspace_of
from gpusched.agents.topology.bids import offer, retries_at, settle
from gpusched.agents.topology.network import SHAPES, TopologyWeights, weights_from
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NAN_OUTPUT, Context, Unusable
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.stages import held_back, set_wait_reasons
from gpusched.sched.state import BACKFILLS, Ints
from gpusched.sched.topology.contention import new_search
from gpusched.sched.topology.load import Load
from gpusched.sched.topology.queue import Costs, Priced

NOTHING_LEARNED = "no measured placement costs yet"
_MIN_REPORTED_COST = 0.005


def prepare(model: TrainedModel) -> TopologyWeights:
    """Return the weights. ValueError: they are of another shape."""
    return weights_from(to_vector(model.arrays, SHAPES))


def decide_queue(prepared: TopologyWeights, context: Context) -> tuple[list[int], QueueBlock]:
    """Decide for one partition; see `gpusched.sched.agent`.

    Raises:
        Unusable: Nothing was ever learned of places; a value is NaN.
    """
    if context.costs is None:
        raise Unusable(NOTHING_LEARNED)
    queue = context.waiting.ordered(context.partition, context.policy.order)
    costs = copy_costs(context.costs)
    auction = auction_of(prepared, context, costs, queue)
    if (count := context.policy.schedulers) > 1:
        workspaces = workspaces_of(auction, context, costs)
        with ThreadPoolExecutor(count) as pool:  # compiled passes run side by side
            for others in (False, True):
                done = pool.map(
                    lambda n, of=others: offers_of(auction, n, of, workspaces[n], context, queue), range(count)
                )
                list(done)
    block = settle_offers(auction, context, costs, queue)
    for shared, own in zip(context.costs.load, costs.load, strict=True):  # partitions may share ways up
        shared[:] = own
    return queue.tolist(), block


def auction_of(agent: TopologyWeights, context: Context, costs: Costs, queue: Ints) -> Auction:
    """Return the partition's nodes, and the jobs of its queue, as they are now."""
    world, waiting = context.world, context.waiting
    site = Site(*world.span.get(context.partition, (0, 0)), world.rack, world.total.gpus)
    ids = (view.id for view in waiting.views)
    auction = new_auction(agent, context.policy.schedulers, site, costs, waiting.jobs, waiting.requests, ids)
    open_auction(auction, costs, waiting.jobs, queue, world.resources, world.usable, context.snapshot.now)
    return auction


def workspaces_of(auction: Auction, context: Context, costs: Costs) -> list[Workspace]:
    """Return every scheduler's workspace, with costs of its own."""
    jobs, resources = context.waiting.jobs, context.world.resources
    return [workspace_of(auction, copy_costs(costs), jobs, resources) for _ in range(context.policy.schedulers)]


def offers_of(auction: Auction, number: int, others: bool, workspace: Workspace, context: Context, queue: Ints) -> None:
    """Make one scheduler's offers to its jobs, or, after all have, to those of ``others`` that ask."""
    offer(auction, number, others, context.waiting.jobs, queue, context.snapshot.now, workspace)


def settle_offers(auction: Auction, context: Context, costs: Costs, queue: Ints) -> QueueBlock:
    """Settle the offers and start the jobs.

    Raises:
        Unusable: A value is NaN.
    """
    policy = context.policy
    head, shadow = settle(context.state, queue, BACKFILLS[policy.backfill], Priced(costs, auction))
    if not auction.offers.sound.all():
        raise Unusable(NAN_OUTPUT)
    held, now = held_back(context, queue), float(context.snapshot.now)
    waits = [job for job in held if costs.wait_cost[job].max() >= _MIN_REPORTED_COST]
    set_wait_reasons(context, costs, {job: float(costs.since[job] + costs.wait_s[job]) for job in waits})
    context.waits.update({context.waiting.views[job].id: retries_at(costs, job, now) for job in held})
    return QueueBlock(policy, int(head), float(shadow))


def copy_costs(costs: Costs) -> Costs:
    """Return the costs with copies of all that a scheduler changes."""
    load = Load(*(array.copy() for array in costs.load))
    return costs._replace(load=load, wait_cost=costs.wait_cost.copy(), search=new_search(costs.tree))
