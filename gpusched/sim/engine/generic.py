"""Replays that walk the queue at every decision, with the live controller's own pass, `sched.kernel`.

For orders whose keys change while jobs wait, for the naive draw, for conservative backfill, and to check the fast runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.compiled import in_python, inlined, jit
from gpusched.errors import UsageError
from gpusched.model.limits import Groups, split_leaf
from gpusched.sched.fairtree import USER, FairShareTree, account, rank_users, tree_of
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.placement import NodeChooser, pass_by_component
from gpusched.sched.sorting import by_priority, stable_order
from gpusched.sched.state import (
    BACKFILLS,
    BEST_FIT,
    CONSERVATIVE,
    NAIVE,
    NONE,
    OK,
    RESERVED,
    RESOURCES,
    SKIP,
    Floats,
    Ints,
    PassOutcome,
    Records,
    filled,
    ints,
    new_outcome,
)
from gpusched.sim.engine.build import SimWorld, usage_scale
from gpusched.sim.engine.estimates import Estimates, new_estimates, note_arrivals, note_begin, note_ends, renew_waiting
from gpusched.sim.engine.ledger import SimLedger, drop_idle_repeat, other_changes
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import enter, remove_running, start_granted, state_of, waiting_in
from gpusched.sim.engine.share import pair_up, release_pairs_once, split_with
from gpusched.sim.engine.state import DECIDE, ENDED, READY, RUNNING, RUNS, EventLog, Paired, Passes, Sim
from gpusched.sim.knowledge import explicit_priorities
from gpusched.sim.policies import PLACEMENTS


class SimQueue(NamedTuple):
    """The waiting jobs and their users.

    Attributes:
        waiting: ``int64[jobs]``: waiting jobs by rank; ``size[0]`` of them.
        users: ``USER[users]``: what each user holds and has used; with groups each user in each of its groups.
        leaf: ``int64[jobs + others]``: the row of ``users`` for which a run's usage counts.
        others, passed: As in `SimLedger`.
        priority: ``int64[jobs]``: what goes before keys that change; empty: nothing does. In ranks it is anyway.
        tree: By which ``fairshare`` ranks them; empty without groups.
        outcome: Where the pass writes.
        run_times: What run times are estimated by, where they are (``estimates``).
        order: See `ORDER_CODES`. rule, backfill: See ``gpusched.sched.state``.
        last_first: Whether of jobs with equal keys the one submitted last goes first.
        every_s: Seconds between two times at which there is backfill; 0: at every decision.
        next_s: ``float64[1]``: when it is due; infinite: when something has happened.
        by_all: Whether all partitions decide at once, by users' usage before this instant's starts, as live.
        usage: ``USER[users]``: the usage that the order reads; ``users`` themselves, but with ``by_all``.
    """

    waiting: Ints
    size: Ints
    users: Records
    leaf: Ints
    others: Records
    passed: Ints
    priority: Ints
    tree: FairShareTree
    outcome: PassOutcome
    run_times: Estimates
    estimates: bool
    order: int
    rule: int
    backfill: int
    last_first: bool
    every_s: float
    next_s: Floats
    by_all: bool
    usage: Records


def new_queue(world: SimWorld) -> SimQueue:
    """Return an empty queue."""
    jobs, policy = len(world.sim.jobs), world.policy
    groups, leaves, leaf, users, others = usage_leaves(world)
    by_all = policy.kind == "changing"
    return SimQueue(
        waiting=np.zeros(jobs + 1, np.int64),
        size=np.zeros(1, np.int64),
        users=users,
        leaf=leaf,
        others=others,
        passed=np.zeros(1, np.int64),
        priority=explicit_priorities(world.trace),
        tree=tree_of(groups, leaves if groups else ()),
        outcome=new_outcome(jobs, len(world.sim.held)),
        run_times=new_estimates(world),
        estimates=policy.uses_run_time_estimates,
        order=ORDER_CODES.get(policy.order, PLAIN),
        rule=PLACEMENTS.get(world.rule, BEST_FIT),
        backfill=BACKFILLS[policy.backfill],
        last_first=policy.ties == "last",
        every_s=world.options.backfill_every_s,
        next_s=np.full(1, np.inf),
        by_all=by_all,
        usage=users.copy() if by_all else users,
    )


@jit
def decide_generic(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue) -> int:
    """Run the pass of every partition in which something happened."""
    update_queue(sim, passes, queue)
    backfill = backfill_now(sim, queue)
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            _decide(sim, log, passes, queue, partition, backfill)
    while must_draw_again(sim, passes, queue):
        for partition in range(sim.dirty.size):
            _decide(sim, log, passes, queue, partition, backfill)
    pair_waiting(sim.pairs, sim, log, passes, queue)
    if sim.pairs is None and not _order_matters(sim.ledger, sim, queue, backfill):
        drop_idle_repeat(sim.ledger, queue.waiting[: queue.size[0]], queue.outcome.code, backfill)
    sim.dirty[:] = 0
    wake_to_backfill(sim, queue)
    return DECIDE


run_generic = looped(decide_generic)


@jit
def update_queue(sim: Sim, passes: Passes, queue: SimQueue) -> None:
    """Record the jobs that ended and that became ready at this instant, and the order's inputs."""
    _count_others(sim, queue)
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        count_held_gpus(sim, queue.users, queue.leaf, job, -1)
    if queue.estimates:
        note_ends(queue.run_times, sim)
        note_arrivals(queue.run_times, sim, passes)
    for i in range(sim.counter[READY]):
        enter(sim, queue.waiting, queue.size, sim.ready[i])
    if queue.estimates:
        renew_waiting(queue.run_times, sim, passes, queue.waiting[: queue.size[0]])
    if queue.by_all:
        sim.dirty[:] = 0
        for i in range(queue.size[0]):  # the partitions where jobs wait
            sim.dirty[sim.shapes[sim.jobs[queue.waiting[i]]["shape"]]["queue"]] = 1
        queue.usage[:] = queue.users


@jit
def _count_others(sim: Sim, queue: SimQueue) -> None:
    """Count what runs outside the trace until now for its users; starts of this instant do not count yet, as here."""
    others, passed, now = queue.others, queue.passed, sim.clock[0]
    while passed[0] < others.size and others[passed[0]]["time"] <= now:
        change = others[passed[0]]
        if change["over"] == 0 and change["time"] == now:
            return
        user = queue.leaf[change["row"]]
        account(queue.users, user, change["time"], sim.clock[2])
        queue.users[user]["held"] += -change["gpus"] if change["over"] != 0 else change["gpus"]
        passed[0] += 1


@jit
def backfill_now(sim: Sim, queue: SimQueue) -> int:
    """Return the backfill of this decision: NONE between two times at which it is due."""
    return queue.backfill if queue.every_s == 0.0 or sim.clock[0] >= queue.next_s[0] else NONE


@jit
def wake_to_backfill(sim: Sim, queue: SimQueue) -> None:
    """After a decision without backfill set when it is due."""
    if queue.every_s == 0.0 or sim.clock[0] >= queue.next_s[0]:
        queue.next_s[0] = np.inf
    elif queue.size[0] > 0:
        queue.next_s[0] = (np.floor(sim.clock[0] / queue.every_s) + 1.0) * queue.every_s
        sim.clock[1] = min(sim.clock[1], queue.next_s[0])


@jit
def must_draw_again(sim: Sim, passes: Passes, queue: SimQueue) -> bool:
    """Return whether the naive draw failed, nothing runs, and a waiting job can: no event would come."""
    if queue.rule == NAIVE and sim.counter[RUNS] == 0:
        for i in range(queue.size[0]):
            if passes.jobs.feasibility[passes.jobs.shape[queue.waiting[i]]] == OK:
                return True
    return False


@jit
def _decide(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue, partition: int, backfill: int) -> None:
    """Run one partition's pass."""
    waiting = ordered(sim, queue, partition)
    queue.outcome.total[:] = 0
    release_pairs_once(sim.pairs, sim, passes.releases)
    pass_by_rule(state_of(sim, passes, queue.outcome), waiting, backfill, PlacementRule(queue.rule, passes.rng))
    start_granted(sim, log, queue.outcome, None)
    dequeue_started(sim, queue, waiting)


@inlined
@jit
def pair_waiting(pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, queue: SimQueue) -> None:
    """Start jobs that all partitions' passes left waiting beside others, as live: limits may cover partitions."""
    if pairs is None:
        return
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            waiting = ordered(sim, queue, partition)
            queue.outcome.total[:] = 0
            pair_up(pairs, sim, log, passes, queue.outcome, waiting, None)
            dequeue_started(sim, queue, waiting)


@jit
def ordered(sim: Sim, queue: SimQueue, partition: int) -> Ints:
    """Return the partition's waiting jobs by (priority, key, rank), ``int64[waiting]``."""
    jobs = waiting_in(sim, queue.waiting, queue.size, partition)
    if queue.order == PLAIN or jobs.size < 2:
        return jobs
    if queue.last_first:
        jobs = jobs[stable_order(-sim.jobs["submit"][jobs])]
    keys: Floats = order_keys(sim, queue.usage, queue.leaf, queue.tree, jobs, queue.order)
    return by_priority(jobs[stable_order(keys)], queue.priority)


@jit
def _order_matters(ledger: SimLedger | None, sim: Sim, queue: SimQueue, backfill: int) -> bool:
    """Return whether what starts have charged to users puts others before a job that holds these up."""
    if ledger is None:
        return False
    if not queue.by_all or ledger.kept[2] == 0 or backfill == SKIP:
        return False
    if queue.order == FAIRSHARE and queue.tree.parent.size == 0 and backfill != CONSERVATIVE:
        charged = False  # users' keys only grow: those before such a job stay where they are unless its own has grown
        for job in queue.waiting[: queue.size[0]]:
            code, user = queue.outcome.code[job], queue.leaf[job]
            if code == RESOURCES or code == RESERVED:
                charged |= queue.users[user]["held"] != queue.usage[user]["held"]
        if not charged:
            return False
    queue.usage[:] = queue.users
    for partition in range(sim.dirty.size):
        for job in ordered(sim, queue, partition):
            code = queue.outcome.code[job]
            if code == RESOURCES and backfill != CONSERVATIVE:
                break
            if code >= RESOURCES:
                return True
    return False


@jit
def dequeue_started(sim: Sim, queue: SimQueue, ordered: Ints) -> None:
    """Remove started jobs from the queue, and count their GPUs for their users."""
    started = 0
    for job in ordered:
        if sim.state[job]["status"] == RUNNING:
            note_start(sim, queue, job)
            started += 1
    if started > 0:
        remove_running(sim, queue.waiting, queue.size)


@jit
def note_start(sim: Sim, queue: SimQueue, job: int) -> None:
    """Count a started job's GPUs for its user, and record that it runs."""
    count_held_gpus(sim, queue.users, queue.leaf, job, 1)
    if queue.estimates:
        note_begin(queue.run_times, job)


# Orders whose keys change while jobs wait, and users' usage, on which they depend

PLAIN, FAIRSHARE, WFP3, UNICEF, MULTIFACTOR, SHORTEST, LONGEST = range(7)
ORDER_CODES = {
    "fairshare": FAIRSHARE,
    "wfp3": WFP3,
    "unicef": UNICEF,
    "multifactor": MULTIFACTOR,
    "sjf-estimate": SHORTEST,
    "lpt-estimate": LONGEST,
}

_MAX_AGE_S = 7 * 86400.0


def usage_leaves(world: SimWorld) -> tuple[Groups, list[tuple[str, str]], Ints, Records, Records]:
    """Return the policy's fair-share tree, its (user, group) leaves, each run's leaf, and these users.

    As live: a job counts for the group that it names, else for its user's first one. Without groups, for its user.
    Users without a job in the trace are there, too: what they used before counts for their groups; and what they hold
    outside the trace meanwhile, which comes last (`SimQueue.others`).
    """
    trace, groups = world.trace, world.options.groups if world.policy.by_usage else Groups()
    others, user = trace.others, np.append(trace.user, trace.others.user)
    account = np.full(len(trace), -1) if trace.account is None else trace.account
    account = np.append(account, others.account) if groups else np.full(len(user), -1)
    width = len(trace.accounts) + 1
    keys, of = np.unique((user + 1) * width + account + 1, return_inverse=True)
    kinds = np.column_stack((keys // width - 1, keys % width - 1))
    leaves: dict[tuple[str, str], int] = {}
    found = []
    for user, group in kinds.tolist():
        name = trace.user_name(user)
        leaf = name, groups.for_job(name, trace.accounts[group] if group >= 0 else "")
        found.append(leaves.setdefault(leaf, len(leaves)))
    before = [(split_leaf(name), gpu_hours) for name, gpu_hours in world.options.usage.items()]
    rows = [leaves.setdefault((user, group if groups else ""), len(leaves)) for (user, group), _ in before]
    since, scale, row = float(trace.arrivals[0]) if len(trace) else 0.0, usage_scale(world), ints(found)[of]
    users = filled(USER, len(leaves), since=since)
    np.add.at(users["used"], ints(rows), np.array([3600.0 * scale * gpu_hours for _, gpu_hours in before]))
    changes = other_changes(trace, np.flatnonzero(others.end > since), scale)
    np.maximum(changes["time"], since, out=changes["time"])
    return groups, list(leaves), row, users, changes


@jit
def count_held_gpus(sim: Sim, users: Records, leaf: Ints, job: int, sign: int) -> None:
    """Add (sign 1) a job's GPUs, by `SHAPE.weight`, to those that its user holds, or subtract them (-1)."""
    mate, both = split_with(sim.pace, job, sign > 0), 0
    if mate >= 0:
        both = min(_counted_gpus(sim, job), _counted_gpus(sim, mate)) // 2
        account(users, leaf[mate], sim.clock[0], sim.clock[2])
        users[leaf[mate]]["held"] -= sign * both
    account(users, leaf[job], sim.clock[0], sim.clock[2])
    users[leaf[job]]["held"] += sign * (_counted_gpus(sim, job) - both)


@jit
def _counted_gpus(sim: Sim, job: int) -> int:
    shape = sim.shapes[sim.jobs[job]["shape"]]
    return int(shape["parts"] * shape["gpus"] * shape["weight"])


@jit
def order_keys(sim: Sim, users: Records, leaf: Ints, tree: FairShareTree, jobs: Ints, order: int) -> Floats:
    """Return each job's current key, ``float64[jobs]``, smallest first; see `_key`. For the rest see `SimQueue`."""
    ranked = order == FAIRSHARE and tree.parent.size > 0
    if ranked:
        rank_users(tree, users, sim.clock[0], sim.clock[2])
    used = 0.0
    active = 0
    for user in range(users.size):
        account(users, user, sim.clock[0], sim.clock[2])
        used += users[user]["used"]
        active += users[user]["used"] > 0 or users[user]["held"] > 0
    gpus = 0
    for node in range(sim.node.size):
        gpus += sim.node[node]["total"]
    keys = np.empty(jobs.size)
    for i in range(jobs.size):
        user = users[leaf[jobs[i]]]
        if ranked:
            keys[i] = user["place"]
        else:
            keys[i] = _key(sim, user["used"], user["held"], jobs[i], order, used, max(active, 1), max(gpus, 1))
    return keys


@jit
def _key(
    sim: Sim, own: float, held: int, job: int, order: int, used: float, active: int, gpus: int
) -> float:  # fmt: skip
    """Return one job's key; ``own``, ``held``: its user's usage (GPU seconds) and GPUs.

    fairshare: the user's decayed GPU hours and one for each GPU held, as live without groups. WFP3: -(w / r)^3 n.
    UNICEF: -w / (log2(n) r), log2(1) taken as 1e-15 as in RLScheduler (Zhang et al., SC 2020), so that one-GPU jobs go
    first. multifactor: -(age + fair share + size) with equal weights, Slurm's factors in 0..1: age w / 7 days at most
    1; fair share 2^(-usage's share / one share of the active users); size n / all.
    """
    of = sim.jobs[job]
    shape = sim.shapes[of["shape"]]
    n, r, w = float(shape["parts"] * shape["gpus"]), of["expected"], sim.clock[0] - of["submit"]
    if order == FAIRSHARE:
        return float(own / 3600.0 + held)
    if order == WFP3:
        ratio = w / r
        return float(-(ratio * ratio * ratio) * n)
    if order == UNICEF:
        return float(-w / (max(math.log2(max(n, 1.0)), 1e-15) * r))
    if order == MULTIFACTOR:
        share = own / used if used > 0 else 0.0
        return float(-(min(w / _MAX_AGE_S, 1.0) + math.exp2(-share * active) + n / gpus))
    return float(-r if order == LONGEST else r)


# Replays whose nodes another package's component chooses, by the live pass (`sched.placement`), run by Python


def is_by_component(world: SimWorld) -> bool:
    """Return whether another package's component chooses the nodes."""
    return world.rule not in PLACEMENTS


def chooser_for(world: SimWorld) -> NodeChooser:
    """Return what chooses nodes by the component.

    Raises:
        UsageError: The policy, or an option, has a placement of its own.
        ComponentError: The component cannot be imported; when it is called, that it failed.
    """
    itself = world.policy.kind in ("preemptive", "agent") or world.policy.chooses_sizes
    if itself or world.policy.backfill == "conservative":
        raise UsageError(f"{world.policy.name} cannot be combined with placement {world.rule}", "use another placement")
    gpu_type = np.array(world.pool.gpu_types)[world.pool.gpu_type]
    return NodeChooser(world.rule, world.passes.usable, gpu_type, world.passes.rng, replays=True)


def component_run(world: SimWorld, chooser: NodeChooser) -> Callable[[EventLog], int]:
    """Return the function that replays to the end."""
    sim, passes, queue = world.sim, world.passes, new_queue(world)

    def decide(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue, partition: int, backfill: int) -> None:
        """Run one partition's pass, as `generic` does."""
        waiting = ordered(sim, queue, partition)
        queue.outcome.total[:] = 0
        pass_by_component(state_of(sim, passes, queue.outcome), waiting, backfill, chooser)
        start_granted(sim, log, queue.outcome, None)
        dequeue_started(sim, queue, waiting)

    run = looped(in_python(decide_generic, _decide=decide), compiled=False)
    return lambda log: run(sim, log, passes, queue)
