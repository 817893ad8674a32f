"""Replays decided from snapshots by the live `sched.decide.decide`, where GPUs are cut into MIG slices on demand.

A GPU is cut as live: what to cut is planned (`sched.slices.plan`) after the starts of a decision, a cut takes `CUT_S`,
and meanwhile the GPU cannot be had. Trained policies that cannot decide about slices are replayed so, too: with their
fallback for the slices, as live; and those that choose sizes and start jobs in another order than first come, first
served. Slower than the compiled runs by a factor of a hundred or more.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from msgspec.structs import replace

from gpusched.config.plugins import components
from gpusched.errors import GpuschedError, UsageError
from gpusched.estimation import REMEMBERED
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Allocation, JobSpec, Preemptions
from gpusched.model.limits import Bound, LimitRule, Unit, leaf_of
from gpusched.model.plan import Preempt, Resize, Start
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.slices import Cut, gpu_of, slice_index
from gpusched.model.snapshot import (
    FinishedView,
    NodeView,
    PendingView,
    RunningView,
    SliceView,
    Snapshot,
    with_partners,
)
from gpusched.model.units import count_of
from gpusched.sched.agent import prepared_weights
from gpusched.sched.decide import decide
from gpusched.sched.fairtree import account
from gpusched.sched.slicenames import base_of, inner_name
from gpusched.sched.slices.plan import CUT_S, cuts_of
from gpusched.sim.engine.build import SimWorld, usage_scale
from gpusched.sim.engine.generic import (
    backfill_now,
    count_held_gpus,
    dequeue_started,
    new_queue,
    update_queue,
    usage_leaves,
    wake_to_backfill,
)
from gpusched.sim.engine.ledger import note_charged
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.pace import elapsed_run_s, work_left
from gpusched.sim.engine.queue import enter
from gpusched.sim.engine.share import put_beside
from gpusched.sim.engine.sized import Sizer
from gpusched.sim.engine.state import DECIDE, DECISIONS, DONE, ENDED, RUNNING, EventLog, Passes, Sim
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job, stop_job
from gpusched.sim.knowledge import keys_of
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import node_lists
from gpusched.sim.result import PREEMPTED
from gpusched.sim.sized import notes_of
from gpusched.sim.slicing import node_views, profile_index
from gpusched.sim.snapshot_sizes import SnapshotSizes

_UNITS: tuple[Unit, ...] = ("jobs", "gpus", "gpu_s")  # by the number in `LINK`
_PLACES = {"consolidate": "best-fit", "worst-fit": "spread"}


class SnapshotRun:
    """One replay; call it until it says OVER (see `state`).

    Raises:
        UsageError: Its policy or placement does not exist live.
    """

    def __init__(self, world: SimWorld, sizer: Sizer | None = None) -> None:
        assert world.unsplit is not None
        self._sizes = None if sizer is None else SnapshotSizes(world, sizer)
        self._world, self._of, self._queue = world, world.unsplit, new_queue(world)
        self._groups, self._leaves, *_ = usage_leaves(world)
        policy = policy_of(world)
        self._policies = dict.fromkeys(self._of.pool.partitions, policy)
        self._without_backfill = dict.fromkeys(self._policies, replace(policy, backfill="none"))
        self._beliefs = beliefs_of(world)
        self._waits = dict[str, float]()
        model = world.policy.model
        self._models = {} if model is None else dict.fromkeys(self._policies, model)
        self._ranks = prepared_weights(model) if model is not None and model.preempts else None
        self._preemptions = dict[int, Preemptions]()
        self._nodes, believed = {view.name: view for view in node_views(self._of.pool)}, world.options.believed
        self._rows = [np.flatnonzero(self._of.node == node) for node in range(len(self._of.pool))]
        self._row = {name: row for row, name in enumerate(world.pool.names)}
        if believed is not None:
            for view, (row, *_) in zip(list(self._nodes.values()), self._rows, strict=True):
                sharing, memory_mib = believed.places[believed.kind[row]]
                self._nodes[view.name] = replace(view, sharing=sharing, shareable=dict.fromkeys(view.gpus, memory_mib))
        self._specs = dict[int, JobSpec]()
        self._held = dict[int, Allocation]()
        self._cuts = dict[tuple[str, int], tuple[float, Cut]]()  # under way, and when each is over
        self._cut_count = 0
        self._finished = deque[FinishedView](maxlen=REMEMBERED)
        bookings = world.options.reservations
        numbered = enumerate(bookings)
        self._reserved = [Reservation(name=f"{i:06}", nodes=(), begin=b.start, end=b.end) for i, b in numbered]
        self._reserved_nodes = [{int(self._of.node[row]) for row in booking.nodes} for booking in bookings]
        place = {name: job for job, name in enumerate(world.trace.ids)}
        self._own_booking = {place[name]: i for i, b in enumerate(bookings) for name in b.jobs if name in place}
        self._priority = keys_of(world.trace, world.knowledge.expected).priority
        self._units: list[Unit] = []
        if (ledger := world.sim.ledger) is not None:
            unit = {int(link["bound"]): _UNITS[link["unit"]] for link in ledger.links}
            self._units = [unit.get(at, "jobs") for at in range(len(ledger.room))]

    def __call__(self, log: EventLog) -> int:
        """Replay to the end; return OVER, or GROW (call again)."""
        return _run(self._world.sim, log, self._world.passes, self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the result: how many cuts there were, and why an agent chose no sizes."""
        notes = [] if self._sizes is None else notes_of(self._world.policy, self._sizes.troubles)
        if self._of.pool.cuttable:
            cut = f"{count_of(self._cut_count, 'time')} a GPU was cut into slices or made whole, in {CUT_S:g} s each"
            notes.append(cut)
        return tuple(notes)

    def decide(self, log: EventLog) -> int:
        """Start and stop jobs, then begin to cut GPUs, as cycles of the controller do."""
        self._settle()
        update_queue(self._world.sim, self._world.passes, self._queue)
        self._world.sim.dirty[:] = 0
        if (snapshot := self._act(log)) is None:
            self._world.sim.clock[1] = self._world.sim.clock[0]
            return DECIDE
        if self._of.pool.cuttable:
            self._begin(cuts_of(snapshot))
        self._wake()
        wake_to_backfill(self._world.sim, self._queue)
        return DECIDE

    def _act(self, log: EventLog) -> Snapshot | None:
        """Decide once; return what is then, or None if jobs were stopped: what they leave is decided about next."""
        sim, queue = self._world.sim, self._queue
        if self._sizes is not None:
            self._sizes.note_speeds(self._held)
        waiting = queue.waiting[: queue.size[0]].copy()
        snapshot = self._snapshot(waiting.tolist())
        plan = decide(snapshot, self._models)
        self._waits = plan.waits
        for trouble in plan.troubles.values():
            if self._sizes is None:
                raise GpuschedError(f"{self._world.policy.name}: {trouble}", "train it again")
            self._sizes.troubles[trouble] += 1
        for action in sorted(plan.actions, key=lambda action: isinstance(action, Resize)):  # starts go first
            if isinstance(action, Preempt):
                self._stop(log, int(action.job_id), action.for_job)
            elif isinstance(action, Start):
                self._start(log, int(action.job_id), action.allocation)
            else:
                assert isinstance(action, Resize)
                self._resize(log, int(action.job_id), action)
        if not plan.actions:
            return snapshot
        dequeue_started(sim, queue, waiting)
        if not all(isinstance(action, Start) for action in plan.actions):
            return None
        return self._snapshot(queue.waiting[: queue.size[0]].tolist()) if self._of.pool.cuttable else snapshot

    def _settle(self) -> None:
        """Forget the jobs that stopped, and put slices in place that have been cut by now."""
        sim, now = self._world.sim, float(self._world.sim.clock[0])
        for job, times in Counter(sim.ended[: sim.counter[ENDED]].tolist()).items():
            held = self._held.pop(job)
            if times > 1 or sim.state[job]["status"] == RUNNING:
                self._lose_ranks(job, held, times)
            if sim.state[job]["status"] == DONE and self._models:
                self._finished.append(self._finished_view(job, held))
        for (name, gpu), (end, cut) in list(self._cuts.items()):
            if end <= now:
                del self._cuts[name, gpu]
                view = self._nodes[name]
                kept = [one for one in view.slices if gpu_of(one.number) != gpu]
                new = [SliceView(slice_index(gpu, start), profile) for profile, start in cut.slices]
                slices = tuple(sorted((*kept, *new), key=lambda one: one.number))
                self._nodes[name] = replace(view, slices=slices)

    def _begin(self, cuts: tuple[Cut, ...]) -> None:
        for cut in cuts:
            if (cut.node, cut.gpu) not in self._cuts:  # what is under way comes to its end, as live
                self._cuts[cut.node, cut.gpu] = float(self._world.sim.clock[0]) + CUT_S, cut
                self._cut_count += 1

    def _wake(self) -> None:
        sim, policy = self._world.sim, next(iter(self._policies.values()))
        ends = [end for end, _ in self._cuts.values()]
        waiting = self._queue.waiting[: self._queue.size[0]]
        wait_s = np.full(len(waiting), policy.placement_wait_s if policy.place == "rack-wait" else 0.0)
        if (own := self._world.trace.placement_wait) is not None:
            wait_s = np.where(own[waiting] >= 0, own[waiting], wait_s)
        until = sim.jobs["submit"][waiting] + wait_s
        ends += until[until > sim.clock[0]].tolist()
        ends += self._waits.values()
        if self._ranks is not None:
            ends += map(self._rank_changes_at, self._held)
        sim.clock[1] = min((sim.clock[1], *ends))

    def _start(self, log: EventLog, job: int, allocation: Allocation) -> None:
        sim, profile = self._world.sim, self._spec(job).profile
        rows = [self._row[inner_name(part.node, profile)] for part in allocation.parts]
        sim.chosen[: len(rows)] = rows
        if self._sizes is not None:
            self._specs[job] = self._sizes.start(job, self._spec(job), allocation)
        if self._spec(job).max_nodes is not None:
            sim.jobs[job]["shape"] = self._shape(job, allocation)
        if (mate := self._holder(job, allocation)) >= 0:
            assert sim.pace is not None
            put_beside(sim.pace, sim, log, job, mate)
        start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, float(self._world.restart_s[job]))
        note_charged(sim.ledger, job)
        self._held[job] = allocation

    def _shape(self, job: int, allocation: Allocation) -> int:
        """Return the engine's request for what a job that may be on several numbers of nodes was given."""
        (part, *_), of = allocation.parts, self._world.sim.shapes
        now = of[self._world.sim.jobs[job]["shape"]]
        given = {"parts": len(allocation.parts), "gpus": len(part.gpus), "cores": part.cores, "memory": part.memory_mib}
        same = [of[name] == given.get(name, now[name]) for name in of.dtype.names or ()]
        return int(np.flatnonzero(np.logical_and.reduce(same))[0])

    def _holder(self, job: int, allocation: Allocation) -> int:
        """Return the job beside which one is started; -1: none."""
        if not self._spec(job).share:
            return -1
        (part,) = allocation.parts
        held = ((other, of.parts[0]) for other, of in self._held.items() if self._spec(other).share)
        return next((other for other, of in held if of.node == part.node and set(of.gpus) & set(part.gpus)), -1)

    def _stop(self, log: EventLog, job: int, for_job: str) -> None:
        sim, policy = self._world.sim, next(iter(self._policies.values()))
        now, state = float(sim.clock[0]), sim.state[job]
        before, again = self._preemptions.get(job, Preemptions()), bool(state["restarts"] > 0)
        before = before.once_more(now, policy.name, policy.version, for_job)
        self._preemptions[job] = before.with_run(now - float(state["start"]), again)
        self._let_wait(log, job)

    def _let_wait(self, log: EventLog, job: int) -> None:
        """Stop a job, which keeps its work and waits again."""
        sim, queue = self._world.sim, self._queue
        stop_job(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, self._world.restart_s[job]))
        count_held_gpus(sim, queue.users, queue.leaf, job, -1)
        enter(sim, queue.waiting, queue.size, job)
        del self._held[job]

    def _resize(self, log: EventLog, job: int, action: Resize) -> None:
        """Stop a job that will go on at another size, or let ranks of a hot one join or leave."""
        assert self._sizes is not None
        if not self._spec(job).is_hot:
            self._sizes.stop(job, action.gpus)
            self._let_wait(log, job)
            return
        sim, queue = self._world.sim, self._queue
        count_held_gpus(sim, queue.users, queue.leaf, job, -1)
        self._held[job] = self._sizes.change_ranks(log, job, action, self._held[job])
        self._specs[job] = self._spec(job).as_allocated(self._held[job])
        count_held_gpus(sim, queue.users, queue.leaf, job, 1)

    def _lose_ranks(self, job: int, held: Allocation, times: int) -> None:
        """Let a hot job go on without the ranks whose nodes failed, unless it stopped at last; noted ``times``."""
        assert self._sizes is not None
        sim, queue = self._world.sim, self._queue
        before, now = self._sizes.shape(job, held.gpus), int(sim.jobs[job]["shape"])
        if sim.state[job]["status"] == RUNNING:
            times += 1
            self._held[job] = self._sizes.lose_ranks(job, held)
            self._specs[job] = self._spec(job).as_allocated(self._held[job])
        for shape, sign in ((before, -1), *[(now, 1)] * times):  # `update_queue` takes it each time that it is noted
            sim.jobs[job]["shape"] = shape
            count_held_gpus(sim, queue.users, queue.leaf, job, sign)

    def _rank_changes_at(self, job: int) -> float:
        """Return when a running job may be stopped, or else when its rank changes."""
        sim, rules, view = self._world.sim, next(iter(self._policies.values())).preempt, self._running(job)
        now, cost_s = float(sim.clock[0]), float(self._world.restart_s[job])
        until = view.start_time + rules.min_run_s
        if view.preemptions is not None:
            until = max(until, view.preemptions.spared_until(rules.per_hour))
        if until > now:
            return until
        assert view.spec is not None
        assert self._ranks is not None
        resumes = max(now, view.start_time + (cost_s if view.attempt > 1 else 0.0))
        had_s = elapsed_run_s(sim.pace, sim, job, cost_s)
        return resumes + float(self._ranks.changes_after_s(view.spec.gpus_counted, had_s))

    # The snapshot

    def _snapshot(self, waiting: list[int]) -> Snapshot:
        sim, options = self._world.sim, self._world.options
        running = [*map(self._running, sorted(self._held))]
        due = backfill_now(sim, self._queue) == self._queue.backfill
        policies = self._policies if due else self._without_backfill
        return Snapshot(
            now=float(sim.clock[0]), nodes=tuple(map(self._node, range(len(self._rows)))), policies=policies,
            pending=tuple(map(self._pending, waiting)), running=with_partners(running, {view.id for view in running}),
            usage=self._usage(), seed=options.seed + int(sim.counter[DECISIONS]),
            finished=tuple(self._finished), bounds=self._bounds(), groups=self._groups,
            topology=options.topology, beliefs=self._beliefs,
        )  # fmt: skip

    def _node(self, node: int) -> NodeView:
        view = self._nodes[self._of.pool.names[node]]
        cutting = {gpu: cut.slices for (name, gpu), (_, cut) in self._cuts.items() if name == view.name}
        numbers = [*cutting, *(one.number for one in view.slices if gpu_of(one.number) in cutting)]
        bookings = zip(self._reserved, self._reserved_nodes, strict=True)
        reserved = [one for one, nodes in bookings if node in nodes and one.end > self._world.sim.clock[0]]
        return replace(
            view, available=bool(self._world.sim.node["up"][self._rows[node]].all()), cutting=cutting,
            blocked=dict.fromkeys(numbers, "BUSY: it is being cut into slices, or made whole"),
            reservations=tuple(sorted(reserved, key=lambda one: one.begin)),
        )  # fmt: skip

    def _spec(self, job: int) -> JobSpec:
        if job not in self._specs:
            spec = _spec_of(self._world, job)
            self._specs[job] = spec if self._sizes is None else self._sizes.resizable(job, spec)
        return self._specs[job]

    def _pending(self, job: int) -> PendingView:
        world, number = self._world, int(self._own_booking.get(job, -1))
        spec, limit_s = self._spec(job), _limit_s(world, job)
        if spec.time_limit_s != limit_s:  # an estimate that was renewed
            spec = self._specs[job] = replace(spec, time_limit_s=limit_s)
        user, group = self._leaves[self._queue.leaf[job]]
        view = PendingView(
            id=f"{job:09}", user=user, group=group, spec=spec, priority=int(self._priority[job]),
            submit_time=float(world.sim.jobs[job]["submit"]),
            estimate_s=float(world.passes.jobs.limit[job]), bounds=self._bounds_of(job),
            reserved=self._reserved[number] if number >= 0 else None, preemptions=self._preemptions.get(job),
        )  # fmt: skip
        return view if self._sizes is None else self._sizes.pending(job, view)

    def _running(self, job: int) -> RunningView:
        state, (user, group) = self._world.sim.state[job], self._leaves[self._queue.leaf[job]]
        view = RunningView(
            id=f"{job:09}", user=user, group=group, allocation=self._held[job], start_time=float(state["start"]),
            expected_end=float(state["until"]), submit_time=float(self._world.sim.jobs[job]["submit"]),
            spec=self._spec(job), bounds=self._bounds_of(job), priority=int(self._priority[job]),
            attempt=int(state["restarts"]) + 1, preemptions=self._preemptions.get(job),
        )  # fmt: skip
        return view if self._sizes is None else self._sizes.running(job, view)

    def _finished_view(self, job: int, held: Allocation) -> FinishedView:
        sim, spec = self._world.sim, self._spec(job)
        end = float(sim.clock[0])
        return FinishedView(
            user=self._leaves[self._queue.leaf[job]][0], partition=spec.partition, profile=spec.profile,
            nodes=spec.nodes, gpus=held.gpus,
            cores=spec.nodes * spec.cores_per_node, memory_mib=spec.nodes * spec.memory_mib_per_node,
            submit_time=float(sim.jobs[job]["submit"]), end_time=end, ran_s=end - float(sim.state[job]["start"]),
            attempt=int(sim.state[job]["restarts"]) + 1, preemptions=self._preemptions.get(job),
        )  # fmt: skip

    def _usage(self) -> dict[str, float]:
        """Return users' decayed GPU hours, as in `Snapshot.usage`, and one for each GPU held outside the trace.

        Those held in it come with its running jobs.
        """
        queue, users, (now, _, half_life_s) = self._queue, self._queue.users, self._world.sim.clock
        if not self._world.policy.by_usage:
            return {}
        for user in range(len(users)):
            account(users, user, now, half_life_s)
        past, held = queue.others[: queue.passed[0]], np.zeros(len(users), np.int64)
        np.add.at(held, queue.leaf[past["row"]], np.where(past["over"], -past["gpus"], past["gpus"]))
        hours = (users["used"] / 3600 + held) / usage_scale(self._world)
        return {leaf_of(*leaf): used for leaf, used in zip(self._leaves, hours.tolist(), strict=True) if used > 0}

    def _bounds(self) -> tuple[Bound, ...]:
        """Return what is left of the limits, as limits of which nothing is used."""
        ledger = self._world.sim.ledger
        if ledger is None:
            return ()
        rooms = zip(self._units, np.maximum(ledger.room, 0).tolist(), strict=True)
        left = ((unit, room if unit == "jobs" else room / ledger.scale) for unit, room in rooms)
        return tuple(Bound(LimitRule(("", "", ""), "limit", unit, room, "AssocGrpGRES")) for unit, room in left)

    def _bounds_of(self, job: int) -> tuple[int, ...]:
        ledger, found = self._world.sim.ledger, list[int]()
        at = -1 if ledger is None else int(ledger.account[job, 0])
        while ledger is not None and at >= 0:
            found.append(int(ledger.links[at]["bound"]))
            at = int(ledger.links[at]["next"])
        return tuple(found)


def _decide(sim: Sim, log: EventLog, passes: Passes, run: SnapshotRun) -> int:
    return run.decide(log)


_run = looped(_decide, compiled=False)


def beliefs_of(world: SimWorld) -> dict[str, JobClassEstimate]:
    """Return the estimates by job class that live decisions go by.

    Raises:
        UsageError: They would go by what placement costs, and that was not learned.
    """
    policy, network, believed = world.policy, world.options.network, world.options.believed
    of_sharing = {} if believed is None else dict(believed.classes)
    if network is not None and network.learned is not None:
        return of_sharing | dict(network.learned.table.beliefs)
    if network is not None and (policy.places or world.rule == "contention"):
        problem = f"{policy.name}: this replay decides as live, where placement goes by costs learned of jobs"
        raise UsageError(problem, f"replay own jobs, or with {_otherwise(policy)}")
    return of_sharing | (dict(world.options.learned) if world.rule in MAPPING_PLACES else {})


def policy_of(world: SimWorld) -> PolicySpec:
    """Return the live policy that a replay's policy is.

    Raises:
        UsageError: There is none.
    """
    policy, place = world.policy, _PLACES.get(world.rule, world.rule)
    if place == "contention" and world.options.network is None:
        place = "rack"
    if policy.by_agent:
        assert policy.spec is not None
        return replace(policy.spec, place=place)
    for group, name in (("orders", policy.order), ("placements", place)):
        if name not in components(group):
            problem = f"{policy.name}: {name} does not exist live, and this replay decides as live"
            raise UsageError(problem, f"one of {', '.join(components(group))}, or {_otherwise(policy)}")
    spec = policy.spec or PolicySpec(name=policy.name)
    return replace(
        spec, order=policy.order, ties=policy.ties, place=place, backfill=policy.backfill,
        sizes="base" if world.options.elastic is None else spec.sizes,
    )  # fmt: skip


def _otherwise(policy: ReplayPolicy) -> str:
    """Return with what a replay of the policy would not be decided from snapshots."""
    return "order: fifo" if policy.sizes_in_order else "fixed slices"


def _limit_s(world: SimWorld, job: int) -> float:
    """Return a job's limit; to orders it is the run time that they know, to agents both are known."""
    limit = float(world.trace.limit[job])
    own = world.policy.by_agent or world.options.elastic is not None
    return limit if own and np.isfinite(limit) and limit > 0 else float(world.passes.jobs.limit[job])


def _spec_of(world: SimWorld, job: int) -> JobSpec:
    """Return a job's request, as split into equal parts for the pool."""
    assert world.unsplit is not None
    trace, shape = world.trace, world.sim.shapes[world.sim.jobs[job]["shape"]]
    index, names = profile_index(trace)
    profile, queue = names[index[job]], world.pool.partitions[int(shape["queue"])]
    wanted = trace.gpu_types[trace.gpu_type[job]].split("|") if trace.gpu_type[job] >= 0 else []
    named = node_lists(trace, world.unsplit.pool)
    only, avoided = (() if of is None else tuple(named[of[job]]) for of in (trace.nodelist, trace.exclude))
    if trace.exclusive is not None and trace.exclusive[job] and shape["mask"] >= 0:  # the nodes of its size
        row = world.demand.masks[shape["mask"]]
        only = tuple(dict.fromkeys(base_of(world.pool.names[at]) for at in np.flatnonzero(row).tolist()))
    shares = world.options.believed is not None and world.options.believed.row[job] >= 0
    most = -1 if trace.max_nodes is None else int(trace.max_nodes[job])
    own_wait = -1 if trace.placement_wait is None else int(trace.placement_wait[job])
    return JobSpec(
        nodelist=only, exclude=avoided, placement_wait_s=own_wait if own_wait >= 0 else None,
        preemptible=trace.preemptible is None or bool(trace.preemptible[job]),
        max_spread="rack" if trace.one_rack is not None and trace.one_rack[job] else "",
        name=trace.model_name(trace.model[job]), profile=profile,
        partition=queue.removesuffix(inner_name("", profile)) if profile else queue, nodes=int(shape["parts"]),
        gpus_per_node=int(shape["gpus"]), cores_per_node=int(shape["cores"]), memory_mib_per_node=int(shape["memory"]),
        gpu_types=tuple(name for name in wanted if world.pool.gpu_types != ("",)),
        time_limit_s=_limit_s(world, job),  # type: ignore[arg-type]
        max_nodes=most if most > 0 else None, share="pairs" if shares else "",
        gpu_memory_mib=int(trace.share_mib[job]) if shares and trace.share_mib is not None else None,
    )  # fmt: skip
