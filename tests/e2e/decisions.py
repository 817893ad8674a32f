"""Every decision of a live controller, written down, and made again: from its snapshot, and by a replay's own path.

A replay knows a cluster by a trace, a pool and what has happened in it; a controller by its store. `replayed` brings a
replay to the state that a controller's snapshot shows, and asks the policy there; `compiled` does so with the passes
that replays run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.compiled import in_python
from gpusched.model.jobs import Allocation, JobSpec, JobState
from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.releases import add
from gpusched.sched.sizing.live import pace_of
from gpusched.sched.sizing.rules import wish
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.queue import remove_running, start_granted
from gpusched.sim.engine.sized import _arrive, _resize, ask, place_queue, set_size, space_of
from gpusched.sim.engine.state import DECIDE, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.resizing import elastic_of, own_speed
from gpusched.sim.sized import with_sizes
from gpusched.sim.stepper import Stepper
from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.trace import ProgressRecords, Trace
from tests.sim.reference_sized import SizedPolicy

RECORDER = """
import os
import msgspec
from gpusched.__main__ import main
from gpusched.controller.planning import Planner

def noted(self, *args, plan=Planner.plan):
    decided = plan(self, *args)
    if decided is not None:
        with open(os.environ["DECISIONS"], "ab") as file:
            file.write(msgspec.json.encode((decided.snapshot, decided.plan)) + b"\\n")
    return decided

Planner.plan = noted
main()
"""
"""A controller for `Cluster.start_controller` (``program=("-c", RECORDER)``, ``DECISIONS``: the file)."""

TIMER = """
import os
from gpusched.__main__ import main
from gpusched.controller.planning import Planner

def noted(self, inventory, charge, unread, now, plan=Planner.plan):
    decided = plan(self, inventory, charge, unread, now)
    if decided is None or not decided.unread:  # else it is decided again, with these nodes read
        with open(os.environ["DECISIONS"], "a") as file:
            print(repr(now), file=file)
    return decided

Planner.plan = noted
main()
"""
"""Another one: writes down when it decides, not what."""

_NEVER_S = 1e9


class Agreement(NamedTuple):
    """Of recorded decisions: how many there were, did anything, came out the same from their snapshot, and in a replay.

    ``overdue``: otherwise in a replay, where a job was past its reported end, or had reported no speed: no job is
    in a replay. ``others``: all that came out otherwise.
    """

    decisions: int
    acting: int
    again: int
    replayed: int
    overdue: int
    others: list[str]

    def __str__(self) -> str:
        return (
            f"{self.decisions} decisions, {self.acting} with actions: {self.again} the same again from their snapshot, "
            f"{self.replayed} the same in a replay"
            + (f", {self.overdue} otherwise: a job was past its end, or had reported no speed" if self.overdue else "")
        )


def agreement(file: Path) -> Agreement:
    """Make all decisions of a file once more."""
    acting = again = same = overdue = 0
    others = []
    for line in file.read_bytes().splitlines():
        snapshot, plan = msgspec.json.decode(line, type=tuple[Snapshot, Plan])
        live = done(plan)
        acting += bool(live)
        once_more = check(decide(snapshot), snapshot)[0]
        again += (once_more.actions, once_more.reasons) == (plan.actions, plan.reasons)
        found, fast = replayed(snapshot), compiled(snapshot)
        same += found == fast == live
        late = any(job.own_end is not None and job.own_end <= snapshot.now for job in snapshot.running)
        # One report is no speed: live, such a job is not resized yet; the engine's jobs report a speed at once.
        vague = any(job.left is not None and not job.speeds for job in snapshot.running)
        excused = (late and (vague or found == fast)) or (vague and found == live)
        overdue += excused and not found == fast == live
        if not (found == fast == live) or once_more != plan:
            results = f"live {live}, again {done(once_more)}, replayed {found}, compiled {fast}"
            others.append(f"at {snapshot.now:.3f}: {results}")
    return Agreement(len(file.read_bytes().splitlines()), acting, again, same, overdue, others)


Done = list[tuple[str, str, int, tuple[str, ...]]]


def done(plan: Plan, ids: Sequence[str] = ()) -> Done:
    """Return the actions of a plan: (what, job, GPUs, nodes); ``ids``: of jobs that are called by their row."""
    found: Done = []
    for action in plan.actions:
        name = ids[int(action.job_id)] if ids else action.job_id
        if isinstance(action, Start):
            nodes = tuple(sorted(part.node for part in action.allocation.parts))
            found.append(("start", name, action.allocation.gpus, nodes))
        elif isinstance(action, Resize):
            found.append(("resize", name, action.gpus, ()))
    return sorted(found)


def replayed(snapshot: Snapshot) -> Done:
    """Return the decision of a replay's policy in the state of a snapshot of one partition."""
    (policy,) = snapshot.policies.values()
    jobs = _in_order(snapshot)
    epoch = min([snapshot.now, *(job.submit_time or 0.0 for job in jobs)])
    trace, pool = _trace(jobs, epoch, snapshot.now), _pool(snapshot)
    options = ReplayOptions(elastic=elastic_of(trace))
    stepper, sized = Stepper(trace, pool, options), SizedPolicy(policy, trace, pool, options)
    row = {job.id: n for n, job in enumerate(jobs)}
    for job in sorted(snapshot.running, key=lambda job: job.start_time):
        _advance(stepper, job.start_time - epoch)
        sized._start(stepper, row[job.id], Allocation(str(row[job.id]), job.allocation.parts))
    _advance(stepper, snapshot.now - epoch)
    for job in jobs:  # what it learned on the way here
        n = row[job.id]
        if job.resizes is not None:
            times = tuple(t - epoch for t in job.resizes.times)
            sized._resizes[n] = msgspec.structs.replace(job.resizes, times=times)
        base = job.spec.elastic.base_gpus if job.spec is not None and job.spec.elastic is not None else 0
        if job.speeds and base:
            sized._speeds[n] = {gpus: own_speed(trace, n, gpus) for gpus in job.speeds}
    return done(decide(sized._snapshot(stepper)), trace.ids)


def compiled(snapshot: Snapshot) -> Done:
    """As `replayed`, by the passes that `gpusched replay` runs under a rule."""
    (policy,) = snapshot.policies.values()
    jobs = _in_order(snapshot)
    epoch = min([snapshot.now, *(job.submit_time or 0.0 for job in jobs)])
    trace, pool = _trace(jobs, epoch, snapshot.now), _pool(snapshot)
    elastic = elastic_of(trace)
    if elastic is None:  # nobody to give another size
        return replayed(snapshot)
    world, sizer = with_sizes(world_of(trace, pool, policy_of_spec(policy), ReplayOptions(elastic=elastic)))
    sim, passes, log, row = world.sim, world.passes, log_of(world), {job.id: n for n, job in enumerate(jobs)}

    def advance(until: float) -> None:
        sim.clock[1] = until
        while sim.clock[0] < until and next_decision(sim, log, passes) == DECIDE:
            _arrive(sim, sizer)
            sim.clock[1] = until

    for view in sorted(snapshot.running, key=lambda job: job.start_time):
        advance(view.start_time - epoch)
        n = row[view.id]
        if not sizer.jobs[n]["rigid"]:
            set_size(sim, passes, sizer, n, view.allocation.gpus)
        request = shape_request(sim.shapes, sim.jobs[n]["shape"])
        for place, part in enumerate(view.allocation.parts):
            sim.chosen[place] = pool.names.index(part.node)
            add(passes.releases, view.expected_end - epoch, sim.chosen[place], request, n)
        start_job(sim, log, n, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        sizer.jobs[n]["changed"] = sim.clock[0]
        remove_running(sim, sizer.waiting, sizer.size)
    advance(snapshot.now - epoch)
    for n, job in enumerate(jobs):
        own, resizes = sizer.jobs[n], job.resizes
        if not own["rigid"]:
            sizes = sizer.space.scene.menus.sizes[own["menu"]].tolist()
            for gpus in job.speeds:
                sizer.space.scene.reported[n, sizes.index(gpus)] = own_speed(trace, n, gpus)
        if resizes is None:
            continue
        assert not resizes.unusable, "no part of this"
        own["stops"], own["resume"], own["cost_s"] = resizes.count, resizes.resume_at or 0, resizes.cost_s or 0.0
        sizer.restart_s[n] = own["cost_s"]
        if resizes.frozen or resizes.before is not None:  # in a replay each comes up at once, and saves
            own["cooldown_s"] = _NEVER_S
        ring = sizer.stopped.shape[1]
        for i, at in enumerate(resizes.times[-ring:]):
            sizer.stopped[n, (resizes.count - min(ring, len(resizes.times)) + i) % ring] = at - epoch
    own = in_python(space_of)(sizer.space, sizer.first, 0)
    ask(sim, passes, sizer, own, 0)
    wish(sizer.rule, own.claims)
    assert place_queue(sim, passes, sizer, own)
    start_granted(sim, log, sizer.outcome, sizer.restart_s)
    _resize(sim, log, passes, sizer)
    found: Done = [
        ("resize", job.id, int(sizer.jobs[row[job.id]]["resume"]), ())
        for job in snapshot.running if sizer.jobs[row[job.id]]["resume"] > 0
    ]  # fmt: skip
    for n in sizer.outcome.started[: sizer.outcome.total[0]].tolist():
        shape, first = sim.shapes[sim.jobs[n]["shape"]], sizer.outcome.offset[n]
        nodes = sizer.outcome.nodes[first : first + shape["parts"]].tolist()
        found.append(
            ("start", trace.ids[n], int(shape["parts"] * shape["gpus"]), tuple(sorted(pool.names[i] for i in nodes)))
        )
    return sorted(found)


def _in_order(snapshot: Snapshot) -> list[RunningView | PendingView]:
    return sorted([*snapshot.running, *snapshot.pending], key=lambda job: (job.submit_time or 0.0, job.id))


def _advance(stepper: Stepper, until: float) -> None:
    while stepper.now < until and stepper.advance(until):
        pass


def _pool(snapshot: Snapshot) -> Pool:
    assert all(node.available and not node.blocked for node in snapshot.nodes), "no part of this"
    return Pool.of([
        NodeSpec(len(n.gpus), n.cores, n.memory_mib, n.gpu_type, n.partition, n.name) for n in snapshot.nodes
    ])  # fmt: skip


def _trace(jobs: Sequence[RunningView | PendingView], epoch: float, now: float) -> Trace:
    """Return the jobs of the views with their requests, progress and work left; jobs being stopped are rigid."""
    specs = [job.spec for job in jobs]
    sizes = [_sizes(job) for job in jobs]
    bases = [_base(spec, len(own)) for spec, own in zip(specs, sizes, strict=True)]

    def column(values: Sequence[float], kind: type = np.int64) -> np.ndarray:
        return np.array(values, kind)

    progress = ProgressRecords(
        steps=column([1.0 if _reports_progress(job) else np.nan for job in jobs], np.float64),
        cost_s=column([np.nan] * len(jobs), np.float64),
        cooldown_s=column([s.elastic.cooldown_s if s and s.elastic else 0 for s in specs], np.float64),
        size_job=column([n for n, own in enumerate(sizes) for _ in own]),
        size_gpus=column([gpus for own in sizes for gpus in own]),
        steps_per_s=column(
            [job.speeds.get(g, np.nan) for job, own in zip(jobs, sizes, strict=True) for g in own], np.float64
        ),
        run_job=column([]), run_gpus=column([]), run_after_s=column([], np.float64), run_s=column([], np.float64),
    )  # fmt: skip
    submit = column([(job.submit_time or 0.0) - epoch for job in jobs], np.float64)
    trace = assemble(
        name="a snapshot", epoch=epoch, ids=tuple(job.id for job in jobs), submit=submit,
        duration=column([_NEVER_S] * len(jobs), np.float64), gpus=column([b[0] for b in bases]),
        names={"user": intern([job.user for job in jobs]), "group": intern([s.partition for s in specs if s])},
        columns={
            "limit": column([_limit(job) for job in jobs], np.float64), "nodes": column([b[3] for b in bases]),
            "cores": column([b[1] for b in bases]), "memory_mib": column([b[2] for b in bases]),
        },
    )  # fmt: skip
    trace = replace(trace, progress=progress)
    return replace(trace, duration=column([_work(trace, n, job, now) for n, job in enumerate(jobs)], np.float64))


def _sizes(job: RunningView | PendingView) -> tuple[int, ...]:
    assert job.spec is not None
    stays = isinstance(job, RunningView) and job.state is not JobState.RUNNING
    return job.spec.elastic.sizes if job.spec.elastic is not None and not stays else (job.spec.gpus,)


def _base(spec: JobSpec | None, sizes: int) -> tuple[int, int, int, int]:
    """GPUs, cores and MiB of the whole job, and over how many nodes (0: the fewest)."""
    assert spec is not None
    if spec.elastic is not None and sizes > 1:
        return spec.elastic.base_gpus, spec.elastic.base_cores, spec.elastic.base_memory_mib, 0
    return spec.gpus, spec.nodes * spec.cores_per_node, spec.nodes * spec.memory_mib_per_node, spec.nodes


def _reports_progress(job: RunningView | PendingView) -> bool:
    return isinstance(job, RunningView) and job.own_end is not None


def _limit(job: RunningView | PendingView) -> float:
    if isinstance(job, RunningView):
        return job.expected_end - job.start_time
    assert job.spec is not None
    return float(job.spec.time_limit_s)


def _work(trace: Trace, row: int, job: RunningView | PendingView, now: float) -> float:
    """Seconds at its base size; of one that runs so much that it ends when it says."""
    if isinstance(job, PendingView):
        return job.left / pace_of(job.speeds, int(trace.gpus[row])) if job.speeds and job.left else _NEVER_S
    end = job.own_end if job.own_end is not None else max(job.expected_end, now + 1.0)
    return (max(end, now + 1e-3) - job.start_time) * own_speed(trace, row, job.allocation.gpus)
