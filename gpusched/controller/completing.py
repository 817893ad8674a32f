"""A job that is ending: its ranks are asked to end, then made to, and the outcome becomes its state. Pure."""

from __future__ import annotations

import msgspec

from gpusched.controller.escalating import TRIES_BEFORE_REMOVING, gives_up, is_due, stuck_event
from gpusched.controller.fold import back_in_queue
from gpusched.controller.ranks import RankStatus, ReconcileInput, ReconcileResult, is_idle, operation_on, update
from gpusched.controller.resizing import note_of, requeue_resized, update_save_status
from gpusched.model.events import Event
from gpusched.model.jobs import Ending, JobRecord, JobState, Preemptions
from gpusched.model.units import format_memory
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import RankRecord


def complete(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> None:
    """The next step of a job that is COMPLETING."""
    ending = _own_end(step, seen, world) or _asked_late(step, seen, world) or step.job.ending
    assert ending is not None
    ending = update_save_status(step, ending, seen, world)
    left = False
    for s in seen:
        if s.phase in ("gone", "exited", "failed", "lost", "absent"):
            if not s.rank.gone:
                update(step, s.rank, gone=True)
        elif s.phase == "unlaunched":
            # Nothing was sent, or it is not known to have arrived; what turns up later is fenced as a stray.
            update(step, s.rank, gone=True)
        elif s.rank.stuck or (s.phase != "unknown" and gives_up(s.rank, world.now)):
            # Its GPUs stay blocked by its record, until it is gone; the job need not wait for that.
            if not s.rank.stuck:
                update(step, s.rank, stuck=True)
                step.events.append(stuck_event(s.rank, world.now))
        else:
            left = True
            if s.phase != "unknown" and is_idle(s, world):
                _press(step, s, ending, world)
    if not left:
        _close(step, seen, ending, world)


def _own_end(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> Ending | None:
    """How a job ends that a policy meant to stop, and that had come to its own end before; None elsewhere.

    Only what ended before the decision, and was sent no signal, has ended by itself: many a job that is told to end
    saves its work and exits with 0.
    """
    ending = step.job.ending
    if ending is None or (decided := _decided(ending)) is None:
        return None
    early = [
        s.rank for s in seen
        if s.rank.signalled is None and s.rank.finished_at is not None and s.rank.finished_at < decided
    ]  # fmt: skip
    rank = next((r for r in early if r.exit_code != 0), None) or next((r for r in early if r.rank == 0), None)
    if rank is None:
        return None
    outcome, reason, message = (JobState.COMPLETED, "", "") if rank.exit_code == 0 else failure_of(step.job, rank)
    own = msgspec.structs.replace(
        ending, outcome=outcome, reason=reason, message=message, exit_code=rank.exit_code, preemptions=None, resize=None
    )
    step.job = msgspec.structs.replace(step.job, ending=own, reason=reason, message=message)
    data = {"outcome": outcome, "message": message or "it had already ended"}
    step.events.append(Event(time=world.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return own


def _decided(ending: Ending) -> float | None:
    """When a policy decided to stop the job, to have it go on later; None: it did not."""
    if ending.resize is not None:
        return None if ending.resize.back else ending.resize.asked_at
    return ending.preemptions.times[-1] if ending.preemptions is not None else None


def _asked_late(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> Ending | None:
    """A new grace for a job that is stopped for another and that nobody has asked to end: it is to save its work.

    The controller was down meanwhile, or the node could not be reached. None: it needs none.
    """
    ending = step.job.ending
    if ending is None or _decided(ending) is None or world.now < ending.kill_at:
        return None
    if not any(s.phase == "running" and s.rank.signalled is None and is_idle(s, world) for s in seen):
        return None
    again = msgspec.structs.replace(ending, kill_at=world.now + world.settings.grace_s)
    step.job = msgspec.structs.replace(step.job, ending=again)
    data = {"outcome": ending.outcome, "message": f"{ending.message}; asked to end only now"}
    step.events.append(Event(time=world.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return again


def _press(step: ReconcileResult, s: RankStatus, ending: Ending, world: ReconcileInput) -> None:
    """Ask a rank to end, then make it; at once where its work is saved."""
    if s.phase in ("preparing", "ready") or s.rank.tries >= TRIES_BEFORE_REMOVING:
        if is_due(s.rank, world.now):
            # It has not begun, so there is no output; or it cannot be ended.
            step.operations.append(operation_on("remove", s))
    elif world.now >= ending.kill_at or (ending.resize is not None and ending.resize.saved):
        if is_due(s.rank, world.now):
            step.operations.append(operation_on("signal", s, signal="KILL"))
    elif s.rank.signalled in (None, step.job.spec.signal if step.job.spec.signal_before_s is not None else None):
        polite = "TERM" if step.job.spec.signal_before_s is not None else step.job.spec.signal
        # A gang whose rank 0 is done may finish by itself. Where a script was, the others only wait for its steps.
        if ending.outcome is not JobState.COMPLETED or step.job.spec.script is not None:
            step.operations.append(operation_on("signal", s, signal=polite, note=note_of(step.job, ending)))


def _close(step: ReconcileResult, seen: list[RankStatus], ending: Ending, world: ReconcileInput) -> None:
    """All ranks are gone: the outcome becomes the job's state, or it goes back to the queue."""
    job, now = step.job, world.now
    finished = [s.rank.finished_at for s in seen if s.rank.finished_at is not None]
    end = max(finished) if finished and len(finished) == len(seen) else now
    if job.start_time is not None:
        end = min(max(end, job.start_time), now)
        step.ended_attempt = (end, ending.outcome if ending.preemptions is None else JobState.PREEMPTED)
    if ending.resize is not None and ending.resize.done:
        ending = Ending(outcome=JobState.COMPLETED, reason="", kill_at=ending.kill_at, exit_code=0)
        step.ended_attempt = (end, JobState.COMPLETED)
    if ending.resize is not None:
        requeue_resized(step, seen, ending, end, world)
        return
    # A new attempt that is no resize has the whole time limit, as that of every other job.
    again = {"resizes": job.resizes and msgspec.structs.replace(job.resizes, before=None, had_s=0.0)}
    if ending.preemptions is not None:
        fields = back_in_queue(ending.message) | again | {"preemptions": _stopped(job, ending.preemptions, seen, end)}
        step.job, event = transition_to(
            job, JobState.PENDING, now, event="requeued", data={"outcome": "PREEMPTED"}, **fields
        )
    elif ending.outcome is JobState.PENDING:
        fields = back_in_queue(ending.message) | again
        step.job, event = transition_to(job, JobState.PENDING, now, event="requeued", retries=0, **fields)
    elif ending.outcome is JobState.NODE_FAIL and _may_retry(job) and job.retries < world.settings.max_retries:
        wait = retry_delay_s(job.retries)
        fields = back_in_queue(f"attempt {job.attempt} failed ({ending.message}); retrying in {wait} s")
        fields |= again | {"retries": job.retries + 1, "eligible_time": now + wait}
        step.job, event = transition_to(
            job, JobState.PENDING, now, event="requeued", data={"outcome": "NODE_FAIL"}, **fields
        )
    else:
        codes = [s.rank.exit_code for s in seen if s.rank.exit_code]
        code = ending.exit_code if ending.exit_code is not None else next(iter(codes), None)
        if ending.outcome is JobState.COMPLETED and codes:
            # A rank failed while the gang was already on its way out after rank 0's success.
            code = codes[0] if any(s.rank.exit_code not in (None, 0, 137, 143) for s in seen) else 0
        outcome = JobState.FAILED if ending.outcome is JobState.COMPLETED and code else ending.outcome
        reason = "NonZeroExitCode" if outcome is not ending.outcome else ending.reason
        fields = {"end_time": end, "exit_code": code, "ending": None, "reason": reason}
        data = {"exit_code": code, "end": end, "message": ending.message}
        step.job, event = transition_to(job, outcome, now, event="ended", data=data, **fields)
    step.events.append(event)


def _may_retry(job: JobRecord) -> bool:
    """What people worked in is not begun anew: they are gone."""
    return job.spec.requeue and (job.spec.session is None or job.start_time is None)


def _stopped(job: JobRecord, preemptions: Preemptions, seen: list[RankStatus], end: float) -> Preemptions:
    """With what the stopped attempt ran; one that was lost with its node has saved nothing that one could count on."""
    if job.start_time is None or any(s.rank.finished_at is None for s in seen):
        return preemptions
    return preemptions.with_run(end - job.start_time, job.attempt > 1)


def failure_of(job: JobRecord, rank: RankRecord) -> tuple[JobState, str, str]:
    """What becomes of a job by a rank that failed: its state, and why in a word and in a sentence."""
    where = f"rank {rank.rank} on {rank.node}"
    if rank.oom_killed:
        memory = format_memory(job.spec.memory_mib_per_node)
        message = f"{where} ran out of memory ({memory} requested): the kernel killed one of its processes"
        return JobState.OUT_OF_MEMORY, "OutOfMemory", message
    if rank.exit_code == 137 and rank.signalled not in ("KILL", "9"):
        # Only containers have a limit on memory whose crossing is known.
        also = "" if rank.runtime in ("podman", "docker") else ", manually or because the node ran out of memory"
        return JobState.FAILED, "NonZeroExitCode", f"{where} was killed by an external SIGKILL{also} (137)"
    code = rank.exit_code if rank.exit_code is not None else "an unknown code"
    return JobState.FAILED, "NonZeroExitCode", f"{where} exited with {code}"


def retry_delay_s(retries: int) -> int:
    """Seconds before the next try after a node's failure: 10, 20, 40 ... 600, so that a bad hour burns few retries."""
    return int(min(600, 10 * 2**retries))
