"""Reconciles one job: from its ranks and its nodes' answers to the next step. Pure.

Level-triggered: each call considers the complete state and returns everything to do now; nothing depends on having seen
an earlier message. A rank with an operation in progress gets no other.
"""

from __future__ import annotations

import msgspec

from gpusched.controller.completing import complete, failure_of
from gpusched.controller.escalating import is_due, is_exhausted
from gpusched.controller.healthchecks import CHECK_FAILED, awaits_checks
from gpusched.controller.hot import no_group, settle_ranks
from gpusched.controller.idleness import signal_of_idle
from gpusched.controller.launchfaults import Fault, fault_of, is_jobs_fault
from gpusched.controller.ranks import (
    RankStatus,
    ReconcileInput,
    ReconcileResult,
    is_idle,
    launch_timeout,
    operation_on,
    rank_key,
    rank_status,
    update,
)
from gpusched.controller.resizing import check_resize
from gpusched.model.jobs import Ending, JobRecord, JobState
from gpusched.model.readings import NodeReading
from gpusched.model.slices import gpu_of
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import RankRecord


def reconcile_job(job: JobRecord, ranks: list[RankRecord], inputs: ReconcileInput) -> ReconcileResult:
    """Return the next step of a job that holds resources; ``ranks``: of its current attempt, in order."""
    step = ReconcileResult(job=job)
    statuses = [rank_status(rank, step, inputs) for rank in ranks]
    if step.job.state is JobState.STARTING:
        _starting(step, statuses, inputs)
    if step.job.state is JobState.RUNNING:
        _running(step, statuses, inputs)
    if step.job.state is JobState.COMPLETING:
        complete(step, statuses, inputs)
    return step


def _starting(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    phases = {s.phase for s in ranks}
    for s in ranks:
        if s.phase == "failed":
            _launch_failed(step, s, inputs)
            return
        if why := launch_timeout(s, inputs):
            # No evidence against the node, for a registry that hangs does so for all.
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} could not be launched: {why}", inputs)
            return
        if s.phase in ("lost", "absent"):
            why = "the launcher died" if s.phase == "lost" else "the node has no trace of the launch"
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node}: {why.removeprefix(f'{s.rank.node}: ')}", inputs)
            return
    if step.job.spec.nodes > len(ranks) or "gone" in phases:
        dead = tuple(s.rank.node for s in ranks if s.phase == "gone")
        message = f"node {', '.join(dead)} went down while starting"
        _begin_ending(step, JobState.NODE_FAIL, "NodeFail", message, inputs, grace=0, blame=dead)
    elif phases <= {"running", "exited"}:
        _mark_running(step, ranks, inputs)
    elif phases <= {"ready", "running", "exited"} and awaits_client(step.job, ranks):
        if message := timeout_message(step.job, ranks, inputs):
            _begin_ending(step, JobState.TIMEOUT, INACTIVE, message, inputs, grace=0)
    elif phases <= {"ready", "running", "exited"}:
        for at, s in enumerate(ranks):
            if s.phase == "ready" and is_exhausted(s.rank, inputs.now):
                reason = s.rank.trouble or "no reason given by the node"
                # Tries to start are none to end it.
                ranks[at] = msgspec.structs.replace(s, rank=update(step, s.rank, tries=0, tried_at=None))
                _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} could not be started: {reason}", inputs)
                return
        ready = [s for s in ranks if s.phase == "ready" and is_idle(s, inputs) and is_due(s.rank, inputs.now)]
        step.operations += [operation_on("start", s) for s in ready]
    elif failed := [s for s in ranks if s.rank.check_error]:
        _check_failed(step, failed, inputs)
    elif not awaits_checks([s.rank for s in ranks], inputs.checks):
        step.to_launch += [s.rank for s in ranks if s.phase == "unlaunched" and is_idle(s, inputs)]


def _check_failed(step: ReconcileResult, failed: list[RankStatus], inputs: ReconcileInput) -> None:
    """Put a job back into the queue where a check of its nodes did not pass; none of its ranks was launched."""
    nodes = tuple(s.rank.node for s in failed)
    message = f"{failed[0].rank.check_error} on {', '.join(nodes)}"
    _begin_ending(step, JobState.PENDING, CHECK_FAILED, message, inputs, grace=0, blame=nodes)


def _mark_running(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    starts = []
    for at, s in enumerate(ranks):
        if s.rank.tries:
            ranks[at] = msgspec.structs.replace(s, rank=update(step, s.rank, tries=0, tried_at=None, trouble=""))
        starts.append(s.rank.intended_at or step.job.submit_time)  # a lower bound: a node's clock may be behind
        observation = inputs.observations[s.rank.node].result
        assert isinstance(observation, NodeReading)
        if s.container and s.container.ran_s is not None:
            starts.append(observation.time - s.container.ran_s)
        elif s.container and s.container.started_at is not None:
            starts.append(s.container.started_at - (observation.clock_skew_s or 0.0))
    start = min(max(starts), inputs.now)
    fields = {"start_time": start, "reason": "", "message": "", "unlaunched_on": ()}
    step.job, event = transition_to(
        step.job, JobState.RUNNING, inputs.now, event="running", data={"start": start}, **fields
    )
    step.began = step.job
    step.events.append(event)


def _launch_failed(step: ReconcileResult, s: RankStatus, inputs: ReconcileInput) -> None:
    assert s.container is not None
    error = s.container.error or "no reason given by the launcher"
    message = f"rank {s.rank.rank} on {s.rank.node} could not be launched: {error}"
    fault = fault_of(error, step.job.spec)
    if fault in (Fault.NODE, Fault.OWN):
        step.launch_failed = (s.rank.node, error, fault)
    if is_jobs_fault(fault, step.job, s.rank.node, inputs.failed_launches):
        if earlier := [n for n in dict.fromkeys(step.job.unlaunched_on) if n != s.rank.node]:
            message += f" (as earlier on {', '.join(earlier)})"
        _begin_ending(step, JobState.FAILED, "LaunchFailed", message, inputs, grace=0, exit_code=s.container.exit_code)
        return
    if fault is not Fault.REGISTRY:
        step.job = msgspec.structs.replace(step.job, unlaunched_on=(*step.job.unlaunched_on, s.rank.node))
    _node_fault(step, s, message, inputs)


def _node_fault(step: ReconcileResult, s: RankStatus, message: str, inputs: ReconcileInput) -> None:
    _begin_ending(step, JobState.NODE_FAIL, "NodeFail", message, inputs, grace=0, blame=(s.rank.node,))


def _running(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    settings = inputs.settings
    if step.job.spec.is_hot:
        ranks = settle_ranks(step, ranks, inputs)
    job = step.job
    for s in ranks:
        if s.rank.finished_at is not None:
            continue  # how it ended is known, whatever happens to its container
        if s.phase in ("absent", "lost", "ready", "failed") or (s.rebooted and s.phase not in ("exited", "running")):
            error = s.container.error if s.container is not None else None
            why = "the node was rebooted" if s.rebooted else error or f"its container is {s.phase}"
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} vanished: {why}", inputs)
            return
    if gone := [s for s in ranks if s.phase == "gone" and s.rank.finished_at is None]:
        nodes = tuple(s.rank.node for s in gone)
        message = f"node {', '.join(nodes)} is down"
        _begin_ending(step, JobState.NODE_FAIL, "NodeFail", message, inputs, grace=settings.grace_s, blame=nodes)
        return
    if message := _on_failed_gpu(ranks, inputs):
        # The GPU gets no new job: the node is not to blame, and its other GPUs may run the job again.
        _begin_ending(step, JobState.NODE_FAIL, "NodeFail", message, inputs, grace=settings.grace_s)
        return
    finished = [s for s in ranks if s.rank.finished_at is not None]
    bad = [s for s in finished if s.rank.exit_code != 0]
    failure = failure_of(job, bad[0].rank)[2] if bad else ""
    if check_resize(step, ranks, failure, inputs):
        return
    failed = failure if job.forming_from is not None else ""
    if why := failed or ("" if finished else no_group(job, inputs.now)):
        message = f"its ranks formed no new group after one left: {why}"
        _begin_ending(step, JobState.NODE_FAIL, "NodeFail", message, inputs, grace=settings.grace_s)
    elif bad:
        outcome, reason, message = failure_of(job, bad[0].rank)
        _begin_ending(step, outcome, reason, message, inputs, grace=settings.grace_s, exit_code=bad[0].rank.exit_code)
    elif len(finished) == len(ranks):
        _begin_ending(step, JobState.COMPLETED, "", "", inputs, grace=0, exit_code=0)
    elif _ran_s(job, ranks, inputs) >= job.limit_s and any(s.phase == "running" for s in ranks):
        # Only if a rank is seen running: a job on an unreachable node may have ended in time.
        message = f"exceeded its {job.spec.time_limit_s} s time limit"
        _begin_ending(step, JobState.TIMEOUT, "TimeLimit", message, inputs, grace=settings.grace_s)
    elif message := timeout_message(job, ranks, inputs):
        _begin_ending(step, JobState.TIMEOUT, INACTIVE, message, inputs, grace=settings.grace_s)
    elif any(s.rank.rank == 0 for s in finished):
        # Rank 0 ends the gang: the others have the grace period to finish.
        _begin_ending(step, JobState.COMPLETED, "", "", inputs, grace=settings.grace_s, exit_code=0)
    else:
        _warn_before_limit(step, ranks, inputs)
        _signal_idle(step, ranks, inputs)


def _on_failed_gpu(ranks: list[RankStatus], inputs: ReconcileInput) -> str:
    """Return which GPU of a running rank has a condition because of which its jobs end; "": none."""
    for s in ranks:
        failed = inputs.failed_gpus.get(s.rank.node, {}) if s.phase == "running" else {}
        for gpu in map(gpu_of, s.rank.gpus):
            if gpu in failed:
                return f"GPU {gpu} of {s.rank.node}: {failed[gpu]}"
    return ""


def _ran_s(job: JobRecord, ranks: list[RankStatus], inputs: ReconcileInput) -> float:
    """Return the seconds that a job has run, by its nodes' boot clocks, which cannot be set; otherwise by ours."""
    ranks = ranks[:1] if job.spec.is_hot else ranks  # its others may have joined later
    ran = [s.container.ran_s for s in ranks if s.phase == "running" and s.container and s.container.ran_s is not None]
    if ran:
        return min(ran)  # a gang runs once its last rank does
    return inputs.now - job.start_time if job.start_time is not None else 0.0


def _warn_before_limit(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    spec = step.job.spec
    # The script is on its first node; on the others TERM would end what starts its steps there.
    warned = [s for s in ranks if s.rank.rank == 0] if spec.signal_batch else ranks
    if spec.signal_before_s is not None and _ran_s(step.job, ranks, inputs) >= step.job.limit_s - spec.signal_before_s:
        step.operations += [
            operation_on("signal", s, signal=spec.signal, for_warning=True)
            for s in warned
            if s.phase == "running"
            and s.rank.warned_at is None
            and s.rank.signalled is None
            and is_idle(s, inputs)
        ]


def _signal_idle(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    """Signal an idle job as decided by `idleness`, until each rank has its signal: a crash must not lose it."""
    idle = step.job.idle
    if idle is None or idle.then != "signal" or idle.acted_at is None:
        return
    step.operations += [
        operation_on("signal", s, signal=signal_of_idle(step.job.spec), for_idle=True)
        for s in ranks
        if s.phase == "running"
        and (s.rank.idle_signalled_at is None or s.rank.idle_signalled_at < idle.acted_at)
        and is_idle(s, inputs)
        and not any(o.key == rank_key(s.rank) for o in step.operations)
    ]


def _begin_ending(
    step: ReconcileResult,
    outcome: JobState,
    reason: str,
    message: str,
    inputs: ReconcileInput,
    *,
    grace: float,
    exit_code: int | None = None,
    blame: tuple[str, ...] = (),
) -> None:
    ending = Ending(outcome=outcome, reason=reason, message=message, kill_at=inputs.now + grace, exit_code=exit_code)
    excluded = tuple(dict.fromkeys((*step.job.excluded_nodes, *blame)))
    fields = {"ending": ending, "reason": reason, "message": message, "excluded_nodes": excluded}
    data = {"outcome": outcome, "message": message}
    step.job, event = transition_to(step.job, JobState.COMPLETING, inputs.now, event="ending", data=data, **fields)
    step.events.append(event)


# Interactive jobs to which no client has been attached for too long are ended. Only what a node reports in this cycle
# counts, by its own boot clock: neither a controller's downtime nor an unreachable node ends a job.

INACTIVE = "InactiveLimit"
"""Slurm's reason for an allocation whose command is gone."""


def awaits_client(job: JobRecord, ranks: list[RankStatus]) -> bool:
    """Return whether the job is ready and will start when the first client attaches."""
    return job.spec.session is not None and any(s.rank.rank == 0 and s.phase == "ready" for s in ranks)


def timeout_message(job: JobRecord, ranks: list[RankStatus], inputs: ReconcileInput) -> str:
    """Return why the job is to be ended for lack of a client; "" if it is not."""
    limit_s = job.spec.session
    if limit_s is None:
        return ""
    first = next((s for s in ranks if s.rank.rank == 0 and s.container is not None), None)
    unattended_s = _unattended_s(first, inputs) if first is not None and first.phase in ("ready", "running") else None
    if unattended_s is None or unattended_s < limit_s:
        return ""
    return f"nobody attached for {limit_s} s (settings.session_keep)"


def _unattended_s(first: RankStatus, inputs: ReconcileInput) -> float | None:
    """Return the seconds since a client was attached, or since one could attach; None: unknown."""
    container = first.container
    assert container is not None
    if container.attached_s is not None:
        return container.attached_s
    if container.ran_s is not None:
        return container.ran_s
    return inputs.now - first.rank.launched_at if first.rank.launched_at is not None else None
