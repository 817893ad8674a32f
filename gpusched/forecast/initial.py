"""From a snapshot to what `run` runs: who waits for whom, who holds what, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from gpusched.forecast.run import FREE, JOB, KIND, PART, QUEUE, USER
from gpusched.model.ids import split_task
from gpusched.model.jobs import Dependency, DependencyKind
from gpusched.model.limits import leaf_of, split_leaf
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import OVERRUN_S
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.accounts import COLUMNS, chain
from gpusched.sched.arrays import NodeArrays, Waiting, waiting_of
from gpusched.sched.eligible import out_of_reach
from gpusched.sched.fairtree import Tree, tree_of
from gpusched.sched.state import BACKFILLS, BEST_FIT, LINK, NAIVE, PLACES, Floats, Ints, Records
from gpusched.sched.topology.spread import knows_racks, waits_until


class InitialState(NamedTuple):
    """What every run begins with; see `run.QueueArrays`."""

    jobs: Records
    parts: Records
    child: Ints
    queues: Records
    users: Records
    kinds: Records
    links: Records
    hourly: Ints
    frees: Records
    tree: Tree


def staged(policy: PolicySpec) -> PolicySpec:
    """The stages that are run ahead: an agent's fallback stands in for it, and best fit for a mapping."""
    return policy.fallback or policy if policy.agent else policy


def may_start(job: PendingView, snapshot: Snapshot) -> bool:
    """Whether the job can start at some time without anybody doing anything."""
    policy = snapshot.policies.get(job.spec.partition)
    if policy is None or out_of_reach(job.spec, policy):
        return False
    if job.unreserved or (job.reserved is not None and snapshot.now + job.limit_s > job.reserved.end + OVERRUN_S):
        return False
    return not job.held_by and job.dependency != "never"


def waiting_and_settling(
    views: list[PendingView], world: NodeArrays, snapshot: Snapshot
) -> tuple[Waiting, dict[str, Ints | Floats]]:
    """The jobs' arrays, and of each what it asks for once it has waited for better nodes: see `run.JOB`.

    Until when a job waits, and what it asks for then, hang on the time alone: that is known when the run begins.
    """
    until = [
        waits_until(job, policy) if knows_racks(policy := snapshot.policies[job.spec.partition]) else -np.inf
        for job in views
    ]
    later = [i for i, time in enumerate(until) if time > snapshot.now]
    settled = [
        replace(views[i], spec=replace(views[i].spec, placement_wait_s=0.0), submit_time=-np.inf, eligible_time=None)
        for i in later
    ]
    waiting = waiting_of([*views, *settled], world, {}, snapshot, by_limit=True)
    own = np.arange(len(views))
    jobs, shape = waiting.jobs, waiting.jobs.shape
    settles, gives_up = shape[: len(views)].copy(), np.full(len(views), np.inf)
    settles[later] = shape[len(views) :]
    differs = settles != shape[: len(views)]
    gives_up[differs] = np.array(until)[differs]
    return waiting._replace(
        views=views,
        jobs=jobs._replace(shape=jobs.shape[own], limit=jobs.limit[own], account=jobs.account[own]),
        keys=waiting.keys.of(own),
        queues={name: [i for i in rows if i < len(views)] for name, rows in waiting.queues.items()},
    ), {"settles": settles, "gives_up": gives_up}


def initial_state_of(
    snapshot: Snapshot,
    views: Sequence[PendingView],
    own: int,
    world: NodeArrays,
    waiting: Waiting,
    settling: dict[str, Ints | Floats],
) -> InitialState:
    """Everything that does not depend on run times.

    ``views``: the jobs, in the order of the arrays; the first ``own`` are the queue's, the others variants of them.
    ``settling``: as `waiting_and_settling` says.
    """
    running, count = snapshot.running, len(views)
    leaves = [leaf_of(v.user, v.group) for v in views] + [leaf_of(r.user, r.group) for r in running]
    names = list(dict.fromkeys([*leaves, *(snapshot.usage if snapshot.groups else ())]))
    index = {name: i for i, name in enumerate(names)}
    jobs = np.zeros(count + len(running), JOB)
    jobs["user"] = [index[leaf] for leaf in leaves]
    jobs["gpus"] = [v.spec.gpus for v in views] + [r.allocation.gpus for r in running]
    own_accounts, links = _accounts_of_running(views, snapshot, waiting)
    jobs["account"] = [*waiting.jobs.account[:, 0].tolist(), *own_accounts]
    jobs["limit"][count:] = [r.expected_end for r in running]
    left = np.maximum(jobs["limit"][count:] - snapshot.now, 0.0)
    jobs["gpu_s"][:count], jobs["gpu_s"][count:] = waiting.jobs.account[:, 2], jobs["gpus"][count:] * left
    jobs["partition"] = _partitions(views, running, list(snapshot.policies), world)
    jobs["start"], jobs["eligible"] = np.nan, -np.inf
    jobs["level"][:count] = _numbered(-waiting.keys.priority)
    for name, column in settling.items():
        jobs[name][:count] = column
    jobs["eligible"][:count] = [_eligible(view) for view in views]
    parts = _held_parts(jobs[count:], running, world)
    child = _dependents(jobs, snapshot, views, own)
    queues = _queues(jobs, waiting, {name: staged(policy) for name, policy in snapshot.policies.items()})
    kinds = _kinds(jobs[:count], queues, waiting)
    users = np.zeros(len(names), USER)
    users["used"] = [3600.0 * snapshot.usage.get(name, 0.0) for name in names]
    users["since"] = snapshot.now
    np.add.at(users["held"], jobs["user"][count:], jobs["gpus"][count:])
    hourly = np.zeros(len(waiting.jobs.room), np.int64)
    hourly[: len(snapshot.bounds)] = [bound.rule.unit == "gpu_s" for bound in snapshot.bounds]
    frees = [(at, amount, time) for at, bound in enumerate(snapshot.bounds) for time, amount in bound.frees]
    tree = tree_of(snapshot.groups, [split_leaf(name) for name in names])
    return InitialState(jobs, parts, child, queues, users, kinds, links, hourly, np.array(frees, FREE), tree)


def _eligible(view: PendingView) -> float:
    """Not before it: as set for the job, and by the reservation that it is of."""
    begin = view.reserved.begin if view.reserved is not None else -np.inf
    return max(begin, -np.inf if view.eligible_time is None else view.eligible_time)


def _queues(jobs: Records, waiting: Waiting, policies: Mapping[str, PolicySpec]) -> Records:
    """The partitions' queues, all empty; sets each job's place in its partition's order."""
    queues = np.zeros(len(policies), QUEUE)
    for queue, (name, policy) in zip(queues, policies.items(), strict=True):
        queue["rule"], queue["backfill"] = PLACES.get(policy.place, BEST_FIT), BACKFILLS[policy.backfill]
        queue["fair"] = policy.order == "fairshare"
        if name in waiting.queues:
            # Fair share is sorted by usage on the way; where users are equal it goes by submission.
            ordered = waiting.ordered(name, "fifo" if policy.order == "fairshare" else policy.order)
            jobs["rank"][ordered] = np.arange(len(ordered))
    return queues


def _kinds(jobs: Records, queues: Records, waiting: Waiting) -> Records:
    """The kinds of the waiting jobs (``run.KIND``); sets each job's, and what they become once it has settled."""
    account, partition = waiting.jobs.account, jobs["partition"]
    drawn, fair = queues["rule"][partition] == NAIVE, queues["fair"][partition] != 0
    same = [account[:, 2], _numbered(waiting.jobs.limit)]
    users = [np.where(fair, jobs["user"], 0), np.where(fair, jobs["level"], 0)]
    rows = [
        np.stack([partition, *(np.where(drawn, -1, fact) for fact in (*account[:, :2].T, shape, *same)), *users])
        for shape in (waiting.jobs.shape, jobs["settles"])
    ]
    every = np.concatenate(rows, axis=1)
    number, first = _groups(every)
    kinds = np.zeros(len(first), KIND)
    jobs["kind"], jobs["settled"] = number[: len(jobs)], number[len(jobs) :]
    of_account, _ = _groups(every[:2, first])
    kinds["first"] = kinds["last"] = -1
    kinds["account"], kinds["gpus"] = every[1:3, first]
    kinds["past"] = np.searchsorted(of_account, of_account, side="right")
    queues["kind"] = np.searchsorted(every[0, first], np.arange(len(queues)))
    queues["kind_stop"] = np.searchsorted(every[0, first], np.arange(len(queues)), side="right")
    return kinds


def _groups(rows: Ints | Floats) -> tuple[Ints, Ints]:
    """Of ``rows: [columns, n]`` the number of each in their order, equal ones alike, and one of each number."""
    order = np.lexsort(rows[::-1])
    differs = np.ones(len(order), bool)
    differs[1:] = (np.diff(rows[:, order], axis=1) != 0).any(axis=0)
    number = np.zeros(len(order), np.int64)
    number[order] = np.cumsum(differs) - 1
    return number, order[differs]


def _numbered(values: Ints | Floats) -> Ints:
    """Their places in order, equal ones alike."""
    return _groups(values[None])[0]


def _partitions(
    views: Sequence[PendingView], running: Sequence[RunningView], names: Sequence[str], world: NodeArrays
) -> Ints:
    """Jobs by their spec, running ones by their first node; the first partition for nodes nobody knows."""
    index = {name: i for i, name in enumerate(names)}
    found = [index[v.spec.partition] for v in views]
    for job in running:
        rows = [world.row[p.node] for p in job.allocation.parts if p.node in world.row]
        found.append(index.get(world.nodes[rows[0]].partition, 0) if rows else 0)
    return _ints(found)


def _accounts_of_running(
    views: Sequence[PendingView], snapshot: Snapshot, waiting: Waiting
) -> tuple[list[int], Records]:
    """The first bound of each running job (-1: none), and all links, theirs behind those of the waiting ones."""
    links = waiting.jobs.links.tolist()
    of_array = {
        view.array_id or view.id: links[first][0]
        for view, first in zip(views, waiting.jobs.account[:, 0].tolist(), strict=True)
        if view.array_room is not None
    }
    found = []
    for job in snapshot.running:
        bounds = [(at, COLUMNS[snapshot.bounds[at].rule.unit]) for at in job.bounds]
        if job.array_id in of_array:
            bounds.insert(0, (of_array[job.array_id], 0))
        found.append(len(links) if bounds else -1)
        links += chain(bounds, len(links))
    return found, np.array(links, LINK)


def _held_parts(jobs: Records, running: Sequence[RunningView], world: NodeArrays) -> Records:
    """What running jobs hold on known nodes (``PART``); blocked GPUs do not come back."""
    rows: list[tuple[int, int, int, int]] = []
    for job, view in zip(jobs, running, strict=True):
        job["part"] = len(rows)
        for part in view.allocation.parts:
            row = world.row.get(part.node, -1)
            if row >= 0:
                well = sum(1 for g in part.gpus if g not in world.nodes[row].blocked)
                rows.append((row, well, part.cores, part.memory_mib))
        job["part_stop"] = len(rows)
    return np.array(rows, PART)


def _dependents(jobs: Records, snapshot: Snapshot, views: Sequence[PendingView], own: int) -> Ints:
    """Who waits for whom: sets ``needs`` and the bounds of each job's part of the answer, see `run.JOB`.

    A job that waits for one which never starts (held, say), or for something that is not known, waits for ever.
    """
    by_id: dict[str, list[int]] = {}
    known: list[PendingView | RunningView] = [*views[:own], *snapshot.running]
    for k, job in enumerate(known):
        for name in {job.id, job.array_id or job.id}:
            by_id.setdefault(name, []).append(k if k < own else len(views) + k - own)
    stuck = {n for j in snapshot.pending if not may_start(j, snapshot) for n in (j.id, j.array_id or j.id)}
    alone = _alone(views[:own], len(views), snapshot.running)
    ends: dict[int, list[int]] = {}
    begins: dict[int, list[int]] = {}
    for j, view in enumerate(views):
        for dependency in view.spec.dependencies if view.dependency == "waiting" else ():
            name = _waits_for(dependency, view)
            single = dependency.kind is DependencyKind.SINGLETON
            jobs["needs"][j] += name in stuck
            on_start = dependency.kind is DependencyKind.AFTER
            for other in alone.get(view.array_id or view.id, ()) if single else by_id.get(name, ()):
                if other != j and not (on_start and other >= len(views)):
                    jobs["needs"][j] += 1
                    (begins if on_start else ends).setdefault(other, []).append(j)
        if view.dependency == "waiting" and not jobs["needs"][j]:
            jobs["needs"][j] = 1
    child: list[int] = []
    for k in ends.keys() | begins.keys():
        jobs["child"][k] = len(child)
        child += ends.get(k, [])
        jobs["child_begun"][k] = len(child)
        child += begins.get(k, [])
        jobs["child_stop"][k] = len(child)
    return _ints(child)


def _alone(views: Sequence[PendingView], shift: int, running: Sequence[RunningView]) -> dict[str, list[int]]:
    """Of each job (array) that runs alone among those of its user and name, the ones for which it waits.

    Those since the one before it that runs alone, too, which waits for all others; the first such one for what runs
    (from ``shift`` on). The tasks of an array do not wait for each other.
    """
    groups: dict[tuple[str, str], dict[tuple[float, str], list[int]]] = {}
    alone: set[str] = set()
    for j, view in enumerate(views):
        own = view.array_id or view.id
        groups.setdefault((view.user, view.spec.name), {}).setdefault((view.submit_time, own), []).append(j)
        if any(d.kind is DependencyKind.SINGLETON for d in view.spec.dependencies):
            alone.add(own)
    begun: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for k, job in enumerate(running):
        if job.spec is not None:
            begun.setdefault((job.user, job.spec.name), []).append((shift + k, job.array_id or job.id))
    found: dict[str, list[int]] = {}
    for key, places in groups.items() if alone else ():
        since = begun.get(key, [])
        for place in sorted(places):
            _, own = place
            if own in alone:
                found[own], since = [k for k, other in since if other != own], []
            since = [*since, *((j, own) for j in places[place])]
    return found


def _waits_for(dependency: Dependency, view: PendingView) -> str:
    """The job or array whose end, or start, a job or a task of an array waits for."""
    base, index = split_task(view.id)
    if dependency.kind is DependencyKind.CHAIN:
        return f"{base}_{index - 1}"
    if dependency.kind is DependencyKind.AFTERCORR and index >= 0 and "_" not in dependency.job_id:
        return f"{dependency.job_id}_{index}"
    return dependency.job_id


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
