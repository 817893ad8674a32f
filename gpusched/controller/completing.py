"""Ends jobs: ranks are signalled, then killed, and the outcome becomes the job's state. Pure."""

from __future__ import annotations

import msgspec

from gpusched.controller.commandfiles import requeue_fields
from gpusched.controller.escalating import TRIES_BEFORE_REMOVING, is_due, is_exhausted, stuck_event
from gpusched.controller.healthchecks import CHECK_FAILED
from gpusched.controller.ranks import RankStatus, ReconcileInput, ReconcileResult, is_idle, operation_on, update
from gpusched.controller.resizing import record_saved, requeue_resized, resize_file
from gpusched.model.events import Event
from gpusched.model.idle import IDLE_POLICY
from gpusched.model.jobs import Ending, JobRecord, JobState, Preemptions
from gpusched.model.units import format_memory
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import RankRecord


def complete(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> None:
    """Advance a COMPLETING job by one step."""
    ending = _earlier_end(step, ranks, inputs) or _with_new_grace(step, ranks, inputs) or step.job.ending
    assert ending is not None
    ending = record_saved(step, ending, ranks, inputs)
    remaining = False
    for s in ranks:
        if s.phase in ("gone", "exited", "failed", "lost", "absent"):
            if not s.rank.gone:
                update(step, s.rank, gone=True)
        elif s.phase == "unlaunched":
            # The launch was not sent, or may not have arrived; a container that appears later is removed as a stray.
            update(step, s.rank, gone=True)
        elif s.rank.stuck or (s.phase != "unknown" and is_exhausted(s.rank, inputs.now)):
            # The rank's record keeps its GPUs blocked until it is gone; the job need not wait for that.
            if not s.rank.stuck:
                update(step, s.rank, stuck=True)
                step.events.append(stuck_event(s.rank, inputs.now))
        else:
            remaining = True
            if s.phase != "unknown" and is_idle(s, inputs):
                _terminate(step, s, ending, inputs)
    if not remaining:
        _finish(step, ranks, ending, inputs)


def _earlier_end(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> Ending | None:
    """Return the ending of a job that had ended by itself before a policy decided to stop it; otherwise None.

    Only an end before the decision and without a signal counts: many jobs save their work on a signal and exit with 0.
    """
    ending = step.job.ending
    if ending is None or (decided := _decided_at(ending)) is None:
        return None
    early = [
        s.rank for s in ranks
        if s.rank.signalled is None and s.rank.warned_at is None
        and s.rank.finished_at is not None and s.rank.finished_at < decided
    ]  # fmt: skip
    rank = next((r for r in early if r.exit_code != 0), None) or next((r for r in early if r.rank == 0), None)
    if rank is None:
        return None
    outcome, reason, message = (JobState.COMPLETED, "", "") if rank.exit_code == 0 else failure_of(step.job, rank)
    ending_by_itself = msgspec.structs.replace(
        ending, outcome=outcome, reason=reason, message=message, exit_code=rank.exit_code, preemptions=None, resize=None
    )
    step.job = msgspec.structs.replace(step.job, ending=ending_by_itself, reason=reason, message=message)
    data = {"outcome": outcome, "message": message or "it had already ended"}
    step.events.append(Event(time=inputs.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return ending_by_itself


def _decided_at(ending: Ending) -> float | None:
    """Return when a policy decided to stop the job and run it again later; None: it did not."""
    if ending.resize is not None:
        return None if ending.resize.back else ending.resize.asked_at
    return ending.preemptions.times[-1] if ending.preemptions is not None else None


def _with_new_grace(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> Ending | None:
    """Return an ending with a new grace period for a stopped job whose ranks were not signalled in time to save work.

    This happens when the controller was down or the node unreachable. None: not needed, or a node cannot signal it: it
    must end all the same.
    """
    ending = step.job.ending
    if ending is None or _decided_at(ending) is None or inputs.now < ending.kill_at:
        return None
    unasked = [s for s in ranks if s.phase == "running" and s.rank.signalled is None and not s.rank.trouble]
    if not any(is_idle(s, inputs) for s in unasked):
        return None
    extended = msgspec.structs.replace(ending, kill_at=inputs.now + inputs.settings.grace_s)
    step.job = msgspec.structs.replace(step.job, ending=extended)
    data = {"outcome": ending.outcome, "message": f"{ending.message}; signalled only now"}
    step.events.append(Event(time=inputs.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return extended


def _terminate(step: ReconcileResult, s: RankStatus, ending: Ending, inputs: ReconcileInput) -> None:
    """Signal a rank, and later kill it; kill at once if its work is saved."""
    if s.phase in ("preparing", "ready") or s.rank.tries >= TRIES_BEFORE_REMOVING:
        if is_due(s.rank, inputs.now):
            # It has not started, so there is no output to collect; or kills had no effect.
            step.operations.append(operation_on("remove", s))
    elif inputs.now >= ending.kill_at or (ending.resize is not None and ending.resize.saved):
        if is_due(s.rank, inputs.now):
            step.operations.append(operation_on("signal", s, signal="KILL"))
    else:
        warning = step.job.spec.signal if step.job.spec.signal_before_s is not None else None
        # The others hold a script's nodes for its steps until TERM; other signals may be the steps' own.
        holds = s.rank.rank > 0 and step.job.spec.script is not None and ending.outcome is JobState.COMPLETED
        polite = "TERM" if warning or holds else step.job.spec.signal
        if s.rank.signalled is not None and (s.rank.signalled != warning or warning == polite):
            return  # a controller of before there was warned_at noted the warning there
        # After rank 0 succeeded the others may finish by themselves; a batch script's other ranks only run its steps.
        if ending.outcome is not JobState.COMPLETED or step.job.spec.script is not None:
            step.operations.append(operation_on("signal", s, signal=polite, note=resize_file(step.job, ending)))


def _finish(step: ReconcileResult, ranks: list[RankStatus], ending: Ending, inputs: ReconcileInput) -> None:
    """Set the job's final state, or requeue it, when all ranks are gone."""
    job, now = step.job, inputs.now
    finished = [s.rank.finished_at for s in ranks if s.rank.finished_at is not None]
    end = max(finished) if finished and len(finished) == len(ranks) else now
    if job.start_time is not None:
        end = min(max(end, job.start_time), now)
        step.ended_attempt = (end, ending.outcome if ending.preemptions is None else JobState.PREEMPTED)
    if ending.resize is not None and ending.resize.done:
        ending = Ending(outcome=JobState.COMPLETED, reason="", kill_at=ending.kill_at, exit_code=0)
        step.ended_attempt = (end, JobState.COMPLETED)
    if ending.resize is not None:
        requeue_resized(step, ranks, ending, end, inputs)
        return
    # An attempt that is not a resize has the full time limit again.
    reset = {"resizes": job.resizes and msgspec.structs.replace(job.resizes, before=None, had_s=0.0)}
    if ending.preemptions is not None:
        fields = (
            requeue_fields(ending.message) | reset | {"preemptions": _with_run(job, ending.preemptions, ranks, end)}
        )
        step.job, event = transition_to(
            job, JobState.PENDING, now, event="requeued", data={"outcome": "PREEMPTED"}, **fields
        )
    elif ending.outcome is JobState.PENDING:
        fields = requeue_fields(ending.message) | reset
        retries = job.retries if ending.reason == CHECK_FAILED else 0
        why = {"message": ending.message} if ending.reason == CHECK_FAILED else None
        step.job, event = transition_to(
            job, JobState.PENDING, now, event="requeued", data=why, retries=retries, **fields
        )
    elif ending.outcome is JobState.NODE_FAIL and _may_retry(job) and job.retries < inputs.settings.max_retries:
        wait = retry_delay_s(job.retries)
        fields = requeue_fields(f"attempt {job.attempt} failed ({ending.message}); retrying in {wait} s")
        fields |= reset | {"retries": job.retries + 1, "eligible_time": now + wait}
        step.job, event = transition_to(
            job, JobState.PENDING, now, event="requeued", data={"outcome": "NODE_FAIL"}, **fields
        )
    else:
        codes = [s.rank.exit_code for s in ranks if s.rank.exit_code]
        code = ending.exit_code if ending.exit_code is not None else next(iter(codes), None)
        if ending.outcome is JobState.COMPLETED and codes:
            # Another rank failed while the gang was ending after rank 0's success; signals we sent do not count.
            code = next((code for code in codes if code not in (137, 143)), 0)
        outcome = JobState.FAILED if ending.outcome is JobState.COMPLETED and code else ending.outcome
        reason = "NonZeroExitCode" if outcome is not ending.outcome else ending.reason
        step.ended_attempt = (end, outcome) if step.ended_attempt is not None else None
        fields = {"end_time": end, "exit_code": code, "ending": None, "reason": reason}
        data = {"exit_code": code, "end": end, "message": ending.message}
        step.job, event = transition_to(job, outcome, now, event="ended", data=data, **fields)
    step.events.append(event)


def _may_retry(job: JobRecord) -> bool:
    """Return whether a failed node may restart the job; an interactive job that began is not restarted."""
    return job.spec.requeue and (job.spec.session is None or job.start_time is None)


def _with_run(job: JobRecord, preemptions: Preemptions, ranks: list[RankStatus], end: float) -> Preemptions:
    """Return ``preemptions`` with the stopped attempt's run, unless it was lost with its node and saved nothing."""
    # A job with idle GPUs is requeued even if it does not save its work.
    saved = job.spec.preemptible or preemptions.policy != IDLE_POLICY
    if not saved or job.start_time is None or any(s.rank.finished_at is None for s in ranks):
        return preemptions
    return preemptions.with_run(end - job.start_time, job.attempt > 1)


def failure_of(job: JobRecord, rank: RankRecord) -> tuple[JobState, str, str]:
    """Return state, reason and message of a job whose rank failed."""
    rank_name = f"rank {rank.rank} on {rank.node}"
    if rank.oom_killed:
        memory = format_memory(job.spec.memory_mib_per_node)
        message = f"{rank_name} ran out of memory ({memory} requested): the kernel killed one of its processes"
        return JobState.OUT_OF_MEMORY, "OutOfMemory", message
    if rank.exit_code == 137 and rank.signalled not in ("KILL", "9"):
        # Only containers report that a process exceeded the memory limit.
        also = "" if rank.runtime in ("podman", "docker") else ", manually or because the node ran out of memory"
        return JobState.FAILED, "NonZeroExitCode", f"{rank_name} was killed by an external SIGKILL{also} (137)"
    code = rank.exit_code if rank.exit_code is not None else "an unknown code"
    return JobState.FAILED, "NonZeroExitCode", f"{rank_name} exited with {code}"


def retry_delay_s(retries: int) -> int:
    """Return the delay before a retry after a node failure: 10, 20, 40 ... 600 s, so an outage uses few."""
    return int(min(600, 10 * 2**retries))
