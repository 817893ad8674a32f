"""The initial state of `run` from a snapshot: dependencies, allocations, order; in the engine's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from gpusched.forecast.run import KIND, QUEUE, QUEUED, PlacementCosts
from gpusched.forecast.sharing import pace_of, sharers_of
from gpusched.model.ids import split_task
from gpusched.model.jobs import Dependency, DependencyKind
from gpusched.model.limits import WEEK_S, leaf_of, split_leaf
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import OVERRUN_S
from gpusched.model.slicetables import GPU_PARTS
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.accounts import COLUMNS, chain, scaled_gpus
from gpusched.sched.arrays import NodeArrays, PendingArrays, releases_of, scratch_for, waiting_of
from gpusched.sched.eligible import out_of_reach
from gpusched.sched.fairtree import USER, FairShareTree, tree_of
from gpusched.sched.fit import set_feasibility
from gpusched.sched.sharing.rules import Sharer
from gpusched.sched.state import (
    BACKFILLS,
    BEST_FIT,
    LINK,
    NAIVE,
    PLACES,
    Floats,
    Ints,
    QueueJobs,
    Records,
    copied,
    filled,
    ints,
    new_scratch,
    seed_words,
)
from gpusched.sched.topology.live import costs_of
from gpusched.sched.topology.queue import Costs
from gpusched.sched.topology.spread import rack_wait_until, supports_racks
from gpusched.sim.engine.ledger import HOUR_S, HOURS, SimLedger
from gpusched.sim.engine.nodeindex import new_index
from gpusched.sim.engine.state import (
    ARRIVED,
    CHANGE,
    JOB,
    JOB_ELIGIBLE,
    JOB_SETTLES,
    NODE,
    NODE_RESERVED,
    PARTS,
    RUNNING,
    RUNS,
    SHAPE,
    Passes,
    Sim,
    new_sim,
    shapes_of,
)


class InitialState(NamedTuple):
    """The state with which every run begins; see `run.QueueArrays`.

    Attributes:
        waiting: The jobs that wait.
        sim, passes: Of the waiting jobs and, after them, one job for each node that a running job holds.
        owner: ``int64[held]``: its job, index into `Snapshot.running`; a job's first row represents the whole job.
    """

    waiting: PendingArrays
    sim: Sim
    passes: Passes
    owner: Ints
    jobs: Records
    queues: Records
    users: Records
    kinds: Records
    tree: FairShareTree
    placing: PlacementCosts | None


def simulated_policy(policy: PolicySpec) -> PolicySpec:
    """Return the policy that is simulated: an agent's fallback instead of the agent, best fit instead of a mapping."""
    return policy.fallback or policy if policy.agent else policy


def may_start(job: PendingView, snapshot: Snapshot) -> bool:
    """Return whether the job can start at some time without any user's or operator's action."""
    policy = snapshot.policies.get(job.spec.partition)
    if policy is None or out_of_reach(job.spec, policy):
        return False
    if job.unreserved or (job.reserved is not None and snapshot.now + job.limit_s > job.reserved.end + OVERRUN_S):
        return False
    return not job.held_by and job.dependency != "never"


def pending_and_relaxed(
    views: list[PendingView], world: NodeArrays, snapshot: Snapshot
) -> tuple[PendingArrays, Ints, Floats, Costs | None, Ints]:
    """Return the jobs' arrays, and what changes when they stop waiting for better nodes.

    That depends on the time alone, so it is known when the run begins.

    Returns:
        The arrays; each job's relaxed request, and when it takes effect (infinite: unchanged); the placement costs of
        the jobs and, after them, of their relaxed requests; each job's row there once it is relaxed.
    """
    until = [
        rack_wait_until(job, policy) if supports_racks(policy := snapshot.policies[job.spec.partition]) else -np.inf
        for job in views
    ]
    later = [i for i, time in enumerate(until) if time > snapshot.now]
    settled = [
        replace(views[i], spec=replace(views[i].spec, placement_wait_s=0.0), submit_time=-np.inf, eligible_time=None)
        for i in later
    ]
    waiting = waiting_of([*views, *settled], world, {}, snapshot, by_limit=True)
    costs = costs_of(snapshot, world, waiting, new_scratch(len(world.nodes), 0, world.rack, waiting.calendar))
    own = np.arange(len(views))
    jobs, shape = waiting.jobs, waiting.jobs.shape
    relaxed, wait_ends = shape[: len(views)].copy(), np.full(len(views), np.inf)
    relaxed[later] = shape[len(views) :]
    then = np.arange(len(views))
    then[later] = len(views) + np.arange(len(later))
    differs = relaxed != shape[: len(views)]
    wait_ends[differs] = np.array(until)[differs]
    waiting = waiting._replace(
        views=views,
        jobs=jobs._replace(shape=jobs.shape[own], limit=jobs.limit[own], account=jobs.account[own]),
        keys=waiting.keys.of(own),
        queues={name: [i for i in rows if i < len(views)] for name, rows in waiting.queues.items()},
    )
    return waiting, relaxed, wait_ends, costs, then


def initial_state_of(
    snapshot: Snapshot, views: list[PendingView], own: int, world: NodeArrays, half_life_s: float
) -> InitialState:
    """Return everything that does not depend on run times.

    ``views``: the jobs, in the order of the arrays; the first ``own`` are the queue's, the others variants of them.
    """
    count, running, policies = len(views), snapshot.running, list(snapshot.policies)
    waiting, relaxed, wait_ends, costs, then = pending_and_relaxed(views, world, snapshot)
    sharers = sharers_of(snapshot, views)
    shared = sharers or {}
    held = np.array(_allocations(running, world, shared), np.int64).reshape(-1, 5)
    owner, row = held[:, 0], held[:, 1]
    first = np.searchsorted(owner, np.arange(len(running)))
    leaves = [leaf_of(v.user, v.group) for v in views] + [leaf_of(r.user, r.group) for r in running]
    names = list(dict.fromkeys([*leaves, *(snapshot.usage if snapshot.groups else ())]))
    index = {name: i for i, name in enumerate(names)}
    # The engine has a job for each waiting job, and one for each node that a running job holds.
    every = np.append(np.arange(count), count + owner)  # of the waiting and the running ones
    jobs = np.zeros(len(every), QUEUED)
    jobs["user"] = ints([index[leaf] for leaf in leaves])[every]
    jobs["partition"] = _partitions(views, running, policies, world)[every]
    # Where there are MIG slices or shared GPUs, usage is in parts of GPUs.
    specs = [*(view.spec for view in views), *(job.spec for job in running)]
    split = sharers is not None or any(spec is not None and spec.profile for spec in specs)
    scale = GPU_PARTS if split else 1
    asked = zip(waiting.keys.gpus.tolist(), views, strict=True)
    jobs["gpus"][:count] = [scaled_gpus(gpus, view.spec, scale) for gpus, view in asked]
    whole = [_whole_gpus(job, shared) for job in running]
    jobs["gpus"][count + first] = [scaled_gpus(gpus, r.spec, scale) for gpus, r in zip(whole, running, strict=True)]
    jobs["level"][:count], jobs["relaxed"][:count] = _ranks(-waiting.keys.priority), relaxed
    queues = _queues(jobs, waiting, {name: simulated_policy(policy) for name, policy in snapshot.policies.items()})
    queues["priced"] &= costs is not None
    kinds = _kinds(jobs[:count], queues, waiting)
    usage = [3600.0 * scale * snapshot.usage.get(name, 0.0) for name in names]
    users = filled(USER, len(names), used=usage, since=snapshot.now)
    np.add.at(users["held"], jobs["user"][count:], jobs["gpus"][count:])
    at = dict(zip([job.id for job in running], (count + first).tolist(), strict=True))
    for name, sharer in shared.items():
        if sharer.partner in at and sharer.partner in shared:
            both = jobs["gpus"][[at[name], at[sharer.partner]]].min()
            users["held"][jobs["user"][at[name]]] -= both // 2
    nodes = _nodes(world, policies)
    shapes = shapes_of(waiting.requests, np.append(nodes["queue"], 0)[waiting.requests.lo])
    holds = filled(SHAPE, len(held), parts=row >= 0, mask=-1, queue=jobs["partition"][count:])
    holds["gpus"], holds["cores"], holds["memory"] = held[:, 2:].T
    engine = filled(JOB, len(jobs), submit=np.inf)
    engine["expected"][:count], engine["shape"][:count] = waiting.jobs.limit, waiting.jobs.shape
    engine["shape"][count:] = len(shapes) + np.arange(len(held))
    engine["expected"][count:] = np.array([r.expected_end for r in running], np.float64)[owner] - snapshot.now
    needs, children = _dependents(engine, snapshot, views, own, (count + first).tolist())
    passes = _passes(snapshot, world, waiting, first, len(held), whole)
    eligible = np.array(list(map(_eligible_time, views)), np.float64)
    sim = new_sim(
        engine, np.concatenate((shapes, holds)), nodes, world.resources, needs=needs, children=children,
        parts=np.append(_max_parts(waiting, relaxed), row >= 0), partitions=len(queues), runs=len(jobs),
        changes=_changes(snapshot.now, eligible, wait_ends, jobs["rank"], waiting.calendar.end),
        half_life_s=half_life_s, scratch=passes.scratch, by_free=new_index(world.resources, False),
        ledger=_ledger(snapshot, passes.jobs, waiting.scale),
    )  # fmt: skip
    state, known = sim.state[count:], row[row >= 0]
    state["until"] = np.array([r.expected_end for r in running], np.float64)[owner]
    # Running jobs are there from the beginning; each draw sets when they end (`QueueForecast`).
    state["status"], state["start"] = RUNNING, snapshot.now  # from when on it counts for limits
    if sharers is not None:
        pace, pairs = pace_of(snapshot, views, world, sharers, engine, count + first)
        sim = sim._replace(pace=pace, pairs=pairs)
    sim.held[len(sim.held) - len(known) :] = known
    sim.counter[ARRIVED], sim.counter[RUNS], sim.counter[PARTS] = len(jobs), len(held), len(known)
    tree = tree_of(snapshot.groups, [*map(split_leaf, names)])
    placing = None if costs is None else _placing(costs, then, first, len(jobs))
    return InitialState(waiting, sim, passes, owner, jobs, queues, users, kinds, tree, placing)


def _placing(costs: Costs, then: Ints, first: Ints, jobs: int) -> PlacementCosts:
    """Return placement costs; ``then``: see `pending_and_relaxed`; ``first``: each running job's first row."""
    slot, waiting = np.full(jobs, -1), len(then)
    slot[:waiting] = np.arange(waiting)
    slot[waiting + first] = len(costs.of) + np.arange(len(first))
    return PlacementCosts(costs, slot, then)


def _max_parts(waiting: PendingArrays, relaxed: Ints) -> Ints:
    """Return the most nodes that each job may have, by any of its requests."""
    looser = waiting.requests.looser
    most: Ints = np.minimum(waiting.requests.parts, waiting.requests.hi - waiting.requests.lo)  # of more, it has none
    for at in range(len(most)):  # a looser one comes before
        if looser is not None and looser[at] >= 0:
            most[at] = max(most[at], most[looser[at]])
    found: Ints = np.maximum(most[waiting.jobs.shape], most[relaxed])
    return found


def _nodes(world: NodeArrays, partitions: Sequence[str]) -> Records:
    """Return the nodes in the engine's form, ``NODE[nodes]``, without blocked GPUs."""
    index = {name: i for i, name in enumerate(partitions)}
    free, total = (np.maximum(column, 0) for column in (world.resources.gpus, world.usable.gpus))
    queue = [index.get(node.partition, 0) for node in world.nodes]
    return filled(NODE, len(queue), free=free, total=total, up=world.usable.gpus >= 0, queue=queue)


def _changes(now: float, eligible: Floats, wait_ends: Ints | Floats, rank: Ints, ends: Floats) -> Records:
    """Return all known events, ``CHANGE[n]``: jobs become eligible, in order, or settle; reservations end."""
    jobs, nothing = np.arange(len(eligible)), np.zeros(len(ends), np.int64)
    times = np.concatenate((np.maximum(eligible, now), wait_ends, ends))
    kind = np.repeat([JOB_ELIGIBLE, JOB_SETTLES, NODE_RESERVED], [len(jobs), len(jobs), len(ends)])
    subject, place = np.concatenate((jobs, jobs, nothing)), np.concatenate((rank[jobs], rank[jobs], nothing))
    order = np.lexsort((place, kind, times))
    order = order[np.isfinite(times[order])]
    return filled(CHANGE, len(order), time=times[order], kind=kind[order], subject=subject[order])


def _passes(
    snapshot: Snapshot, world: NodeArrays, waiting: PendingArrays, first: Ints, held: int, whole: Sequence[int]
) -> Passes:  # fmt: skip
    """Return the passes' inputs: waiting jobs, and their accounts before those of running jobs (``first`` row).

    ``whole``: running jobs' GPUs, of which limits count those that two share for both.
    """
    links, account, jobs = waiting.jobs.links.tolist(), np.zeros((held, 3), np.int64), waiting.jobs
    left = np.array([job.expected_end for job in snapshot.running], np.float64) - snapshot.now
    of_array = {
        view.array_id or view.id: links[at][0]
        for view, at in zip(waiting.views, jobs.account[:, 0].tolist(), strict=True)
        if view.array_room is not None
    }
    scale = waiting.scale
    held_gpus = [scaled_gpus(gpus, job.spec, scale) for gpus, job in zip(whole, snapshot.running, strict=True)]
    account[:, 0], account[first, 1] = -1, held_gpus
    account[first, 2] = account[first, 1] * np.clip(left, 0.0, WEEK_S)
    for at, job in zip(first, snapshot.running, strict=True):
        bounds = [(bound, COLUMNS[snapshot.bounds[bound].rule.unit]) for bound in job.bounds]
        if job.array_id in of_array:
            bounds.insert(0, (of_array[job.array_id], 0))
        if bounds:
            account[at, 0] = len(links)
            links += chain(bounds, len(links))
    releases = releases_of(snapshot.running, world, waiting.parts)
    used, scratch = int(releases.used[0]), scratch_for(world, waiting, releases)
    releases.owner[:used] = (len(jobs.shape) + first)[-1 - releases.owner[:used]]
    set_feasibility(world.total, world.usable, waiting.requests, jobs, scratch)
    jobs = jobs._replace(account=np.concatenate((jobs.account, account)), links=np.array(links, LINK))
    return Passes(waiting.requests, jobs, releases, scratch, seed_words(0), world.total, copied(world.usable))


def _ledger(snapshot: Snapshot, bound: QueueJobs, scale: int) -> SimLedger:
    """Return the limits that running jobs release; used GPU seconds from the hour when they leave the seven days."""
    hourly = np.zeros(len(bound.room), bool)
    hourly[: len(snapshot.bounds)] = [one.rule.unit == "gpu_s" for one in snapshot.bounds]
    row, hour = np.where(hourly, np.cumsum(hourly) - 1, -1).astype(np.int64), int(snapshot.now // HOUR_S)
    used = np.zeros((int(hourly.sum()), HOURS), np.int64)
    for at, one in enumerate(snapshot.bounds):
        for time, amount in one.frees:
            used[row[at], min(max(-int(-time // HOUR_S), hour + 1), hour + HOURS) % HOURS] += amount * scale
    week, kept = np.full(len(bound.account), float(WEEK_S)), ints([int(used.sum()), 0, 0])
    return SimLedger(bound.account, bound.room, bound.links, row, used, ints([hour]), kept, np.zeros(1), week)


def _eligible_time(view: PendingView) -> float:
    """Return the earliest start of a job: its own begin time, and that of its reservation."""
    begin = view.reserved.begin if view.reserved is not None else -np.inf
    return max(begin, -np.inf if view.eligible_time is None else view.eligible_time)


def _queues(jobs: Records, waiting: PendingArrays, policies: Mapping[str, PolicySpec]) -> Records:
    """Return the partitions' empty queues; set each job's rank in its partition's order."""
    queues = np.zeros(len(policies), QUEUE)
    for queue, (name, policy) in zip(queues, policies.items(), strict=True):
        queue["rule"], queue["backfill"] = PLACES.get(policy.place, BEST_FIT), BACKFILLS[policy.backfill]
        queue["fair"], queue["priced"] = policy.order == "fairshare", policy.place == "contention"
        if name in waiting.queues:
            # Fair share is sorted by usage on the way; equal users are sorted by submission.
            ordered = waiting.ordered(name, "fifo" if policy.order == "fairshare" else policy.order, policy.ties)
            jobs["rank"][ordered] = np.arange(len(ordered))
    return queues


def _kinds(jobs: Records, queues: Records, waiting: PendingArrays) -> Records:
    """Return the kinds of waiting jobs (`run.KIND`); set each job's kind, now and after it has settled."""
    account, partition = waiting.jobs.account, jobs["partition"]
    drawn, fair = queues["rule"][partition] == NAIVE, queues["fair"][partition] != 0
    same = [account[:, 2], _ranks(waiting.jobs.limit)]
    users = [np.where(fair, jobs["user"], 0), np.where(fair, jobs["level"], 0)]
    rows = [
        np.stack([partition, *(np.where(drawn, -1, fact) for fact in (*account[:, :2].T, shape, *same)), *users])
        for shape in (waiting.jobs.shape, jobs["relaxed"])
    ]
    every = np.concatenate(rows, axis=1)
    number, first = _row_ranks(every)
    kinds = np.zeros(len(first), KIND)
    jobs["kind"], jobs["settled"] = number[: len(jobs)], number[len(jobs) :]
    of_account, _ = _row_ranks(every[:2, first])
    kinds["first"] = kinds["last"] = -1
    kinds["account"], kinds["gpus"] = every[1:3, first]
    kinds["past"] = np.searchsorted(of_account, of_account, side="right")
    queues["kind"] = np.searchsorted(every[0, first], np.arange(len(queues)))
    queues["kind_stop"] = np.searchsorted(every[0, first], np.arange(len(queues)), side="right")
    return kinds


def _row_ranks(rows: Ints | Floats) -> tuple[Ints, Ints]:
    """Return each row's number in sorted order (equal rows share it), and one row of each; ``rows: [columns, n]``."""
    order = np.lexsort(rows[::-1])
    differs = np.ones(len(order), bool)
    differs[1:] = (np.diff(rows[:, order], axis=1) != 0).any(axis=0)
    number = np.zeros(len(order), np.int64)
    number[order] = np.cumsum(differs) - 1
    return number, order[differs]


def _ranks(values: Ints | Floats) -> Ints:
    """Return the values' places in sorted order; equal values share one."""
    return _row_ranks(values[None])[0]


def _partitions(
    views: Sequence[PendingView], running: Sequence[RunningView], names: Sequence[str], world: NodeArrays
) -> Ints:
    """Return each job's partition: by its spec, if running by its first node; the first one for unknown nodes."""
    index = {name: i for i, name in enumerate(names)}
    found = [index[v.spec.partition] for v in views]
    for job in running:
        rows = [world.row[p.node] for p in job.allocation.parts if p.node in world.row]
        found.append(index.get(world.nodes[rows[0]].partition, 0) if rows else 0)
    return ints(found)


def _allocations(
    running: Sequence[RunningView], world: NodeArrays, sharers: Mapping[str, Sharer]
) -> list[tuple[int, int, int, int, int]]:
    """Return what running jobs hold: (job, node, GPUs, cores, MiB), without blocked GPUs; node -1: no known node.

    GPUs that two have are of both here: `engine.pace` gives them back once.
    """
    found = []
    for at, job in enumerate(running):
        both = sharers[job.id].gpus if job.id in sharers and job.partner in sharers else None
        own = [
            (at, row, len(set(both or part.gpus).difference(world.nodes[row].blocked)), part.cores, part.memory_mib)
            for part in job.allocation.parts
            if (row := world.row.get(part.node, -1)) >= 0
        ]
        found += own or [(at, -1, 0, 0, 0)]
    return found


def _whole_gpus(job: RunningView, sharers: Mapping[str, Sharer]) -> int:
    """Return how many GPUs a job has, those that two have included."""
    return len(sharers[job.id].gpus) if job.id in sharers and job.partner in sharers else job.allocation.gpus


def _dependents(
    jobs: Records, snapshot: Snapshot, views: Sequence[PendingView], own: int, running: Sequence[int]
) -> tuple[Ints, Ints]:
    """Return how many jobs each job waits for, and the dependent jobs; set each job's range in them in ``jobs``.

    ``running``: each running job's index among all. A job that waits for one which never starts (held, say), or for
    something that is not known, waits for ever.
    """
    by_id: dict[str, list[int]] = {}
    needs = np.zeros(len(jobs), np.int64)
    known: list[PendingView | RunningView] = [*views[:own], *snapshot.running]
    for k, job in enumerate(known):
        for name in {job.id, job.array_id or job.id}:
            by_id.setdefault(name, []).append(k if k < own else running[k - own])
    # A dependency on a job that no run starts is never satisfied.
    stuck = {n for j in snapshot.pending if not may_start(j, snapshot) for n in (j.id, j.array_id or j.id)}
    alone = _singletons(views[:own], running, snapshot.running)
    ends: dict[int, list[int]] = {}
    begins: dict[int, list[int]] = {}
    for j, view in enumerate(views):
        for dependency in view.spec.dependencies if view.dependency == "waiting" else ():
            name = _dependency_target(dependency, view)
            single = dependency.kind is DependencyKind.SINGLETON
            needs[j] += name in stuck
            on_start = dependency.kind is DependencyKind.AFTER
            for other in alone.get(view.array_id or view.id, ()) if single else by_id.get(name, ()):
                if other != j and not (on_start and other >= len(views)):
                    needs[j] += 1
                    (begins if on_start else ends).setdefault(other, []).append(j)
        # It waits for something outside of the snapshot: a need that is never met keeps it waiting.
        if view.dependency == "waiting" and not needs[j]:
            needs[j] = 1
    child: list[int] = []
    # First the jobs that wait for the end of k, then those that wait for its start (`state.JOB`).
    for k in ends.keys() | begins.keys():
        jobs["child"][k] = len(child)
        child += ends.get(k, [])
        jobs["child_begun"][k] = len(child)
        child += begins.get(k, [])
        jobs["child_stop"][k] = len(child)
    return needs, ints(child)


def _singletons(
    views: Sequence[PendingView], found_at: Sequence[int], running: Sequence[RunningView]
) -> dict[str, list[int]]:
    """Return, for each job (array) that runs alone among its user's of that name, the jobs for which it waits.

    Those since the one before it that runs alone, too, which waits for all others; the first such one for what runs
    (``found_at``). The tasks of an array do not wait for each other.
    """
    groups: dict[tuple[str, str], dict[tuple[float, str], list[int]]] = {}
    alone: set[str] = set()
    for j, view in enumerate(views):
        own = view.array_id or view.id
        groups.setdefault((view.user, view.spec.name), {}).setdefault((view.submit_time, own), []).append(j)
        if any(d.kind is DependencyKind.SINGLETON for d in view.spec.dependencies):
            alone.add(own)
    begun: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for at, job in zip(found_at, running, strict=True):
        if job.spec is not None:
            begun.setdefault((job.user, job.spec.name), []).append((at, job.array_id or job.id))
    found: dict[str, list[int]] = {}
    for key, places in groups.items() if alone else ():
        since = begun.get(key, [])
        for place in sorted(places):
            _, own = place
            if own in alone:
                found[own], since = [k for k, other in since if other != own], []
            since = [*since, *((j, own) for j in places[place])]
    return found


def _dependency_target(dependency: Dependency, view: PendingView) -> str:
    """Return the job or array on which a job, or a task of an array, depends."""
    base, index = split_task(view.id)
    if dependency.kind is DependencyKind.CHAIN:
        return f"{base}_{index - 1}"
    if dependency.kind is DependencyKind.AFTERCORR and index >= 0 and "_" not in dependency.job_id:
        return f"{dependency.job_id}_{index}"
    return dependency.job_id
