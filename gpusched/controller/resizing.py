"""Resizing: stops a job so that it continues at another size. Pure.

The controller writes resize.json, then signals every rank. The job saves its work, reports this in saved.json and ends;
it is killed once it has reported, or after the grace period. It is requeued at the head of the queue, and starts at the
new size, or at a smaller one if others took the GPUs. If it does not start up there, it returns to its former size, and
the failed size is not tried again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.controller.commandfiles import requeue_fields
from gpusched.controller.ranks import RankStatus, ReconcileInput, ReconcileResult
from gpusched.model.events import Event
from gpusched.model.jobs import Ending, JobRecord, JobState, Resizes, ResizeTo
from gpusched.model.plan import Resize
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading
from gpusched.model.units import count_of
from gpusched.queue.lifecycle import transition_to

NOT_SAVED = "it did not save its work when asked"
_STARTED_AFTER_S = 30.0  # run time after which a job without progress reports counts as started up


def begin_resize(
    job: JobRecord, action: Resize, policy: PolicySpec, grace_s: float, now: float
) -> tuple[JobRecord, Event]:
    """Return a running job as it is stopped to continue with another number of GPUs, and the event."""
    why = f"{action.why} (decided by {policy.name})"
    resizes = (job.resizes or Resizes()).again(
        now, why=why, before=job.spec.gpus, start_timeout_s=policy.resize.start_timeout_s
    )
    return _stop(job, ResizeTo(gpus=action.gpus, asked_at=now), resizes, why, now + grace_s, now)


def _stop(
    job: JobRecord, to: ResizeTo, resizes: Resizes, why: str, kill_at: float, now: float
) -> tuple[JobRecord, Event]:
    ending = Ending(outcome=JobState.PENDING, reason="Resized", message=why, kill_at=kill_at, resize=to)
    data = {"gpus_from": job.spec.gpus, "gpus_to": to.gpus, "message": why}
    return transition_to(
        job, JobState.COMPLETING, now, event="resizing", data=data,
        ending=ending, reason="Resized", message=why, resizes=resizes,
    )  # fmt: skip


def resize_file(job: JobRecord, ending: Ending) -> str | None:
    """Return the text of resize.json; None if the job is not resized."""
    if ending.resize is None:
        return None
    facts = {"from": job.spec.gpus, "to": ending.resize.gpus, "deadline": ending.kill_at}
    return msgspec.json.encode(facts).decode()


def record_saved(step: ReconcileResult, ending: Ending, ranks: list[RankStatus], inputs: ReconcileInput) -> Ending:
    """Return the ending with what the job reported since the request: that it saved, or finished all steps.

    It is called while containers exist, since the reports are read from their nodes.
    """
    to = ending.resize
    if to is None:
        return ending
    saved = to.saved or any(at is not None and at >= to.asked_at for at in (_saved_at(s, inputs) for s in ranks))
    done = to.done or _is_done(ranks)
    if (saved, done) == (to.saved, to.done):
        return ending
    changed = msgspec.structs.replace(ending, resize=msgspec.structs.replace(to, saved=saved, done=done))
    step.job = msgspec.structs.replace(step.job, ending=changed)
    kind = "finished" if done else "saved"
    step.events.append(Event(time=inputs.now, kind=kind, job_id=step.job.id, user=step.job.user, data={}))
    return changed


def _saved_at(s: RankStatus, inputs: ReconcileInput) -> float | None:
    """Return when a rank last reported that it saved (Unix seconds, our clock); None: never, or unknown."""
    if s.container is None or s.container.saved is None:
        return None
    return _reading(s, inputs).time - s.container.saved.age_s


def _reading(s: RankStatus, inputs: ReconcileInput) -> NodeReading:
    found = inputs.observations[s.rank.node].result
    assert isinstance(found, NodeReading)
    return found


def _is_done(ranks: list[RankStatus]) -> bool:
    """Return whether rank 0 exited with 0 after its last step: the job is complete, and need not resume."""
    for s in ranks:
        steps = s.container.progress if s.container is not None else None
        if s.rank.rank == 0 and s.rank.exit_code == 0 and steps is not None and steps.of and steps.step >= steps.of:
            return True
    return False


def requeue_resized(
    step: ReconcileResult, ranks: list[RankStatus], ending: Ending, end: float, inputs: ReconcileInput
) -> None:
    """Requeue a job whose ranks are all gone, to start at the other size; account for lost work."""
    job, to = step.job, ending.resize
    assert to is not None
    data: dict[str, Any] = {"outcome": "RESIZED"}
    began = job.start_time if job.start_time is not None else end
    resizes = job.resizes or Resizes()
    resizes = msgspec.structs.replace(resizes, resume_at=to.gpus, had_s=resizes.had_s + end - began)
    # An attempt that did not start up did no work. Else its work counts until it was asked to save, if it did.
    step.worked_until = began if to.back else to.asked_at
    if not to.back and not to.saved:
        saved_at = max((at for s in ranks if (at := _saved_at(s, inputs)) is not None), default=began)
        step.worked_until = min(max(saved_at, began), end)
        lost = end - step.worked_until
        resizes = msgspec.structs.replace(resizes, lost_s=resizes.lost_s + lost)
        data["message"] = f"{lost:.0f} s of work lost"
        if all(s.rank.finished_at is not None for s in ranks):  # otherwise its node failed, which is not its fault
            resizes = msgspec.structs.replace(resizes, frozen=NOT_SAVED)
            data["message"] = f"{NOT_SAVED}: {data['message']}; it will not be resized again"
    fields = requeue_fields(ending.message) | {"resizes": resizes}
    step.job, event = transition_to(job, JobState.PENDING, inputs.now, event="requeued", data=data, **fields)
    step.events.append(event)


def check_resize(step: ReconcileResult, ranks: list[RankStatus], failure: str, inputs: ReconcileInput) -> bool:
    """Record that a resized job started up, or return it to its former size; return whether it goes back.

    Args:
        step: The step of a running job, updated.
        ranks: Its ranks.
        failure: Why one of them failed, or "".
        inputs: The step's input.
    """
    job, resizes = step.job, step.job.resizes
    if resizes is None or resizes.before is None or job.start_time is None or job.spec.elastic is None:
        return False
    ran_s = inputs.now - job.start_time
    if job.spec.is_hot:
        # A hot job is stopped only if growing made rank 0 fail; else `hot` waits until its ranks form the new group.
        return bool(failure) and job.spec.gpus > resizes.before and _go_back(step, failure, inputs)
    # ``before`` is set from the resize until the job has started up at the new size.
    if _has_stepped(ranks, job.start_time, ran_s, inputs):
        asked = resizes.times[-1] if resizes.times else job.start_time
        changed = msgspec.structs.replace(
            resizes,
            before=None,
            costs_s=resizes.costs_s + max(0.0, job.start_time - asked),
            measured=resizes.measured + 1,
        )
        step.job = msgspec.structs.replace(job, resizes=changed)
        data = {"gpus_from": resizes.before, "gpus_to": job.spec.gpus, "cost_s": changed.cost_s}
        step.events.append(Event(time=inputs.now, kind="resized", job_id=job.id, user=job.user, data=data))
        return False
    if not failure and ran_s < resizes.start_timeout_s:
        return False
    return _go_back(step, failure, inputs)


def _go_back(step: ReconcileResult, failure: str, inputs: ReconcileInput) -> bool:
    job, resizes = step.job, step.job.resizes
    assert resizes is not None
    assert resizes.before is not None
    cause = failure or f"no step within {resizes.start_timeout_s:.0f} s"
    why = f"back to {count_of(resizes.before, 'GPU')}: it failed to start with {job.spec.gpus}: {cause}"
    changed = msgspec.structs.replace(
        resizes, before=None, unusable=(*resizes.unusable, job.spec.gpus), count=resizes.count + 1, why=why
    )
    to = ResizeTo(gpus=resizes.before, asked_at=inputs.now, back=True)
    kill_at = inputs.now + (0.0 if failure else inputs.settings.grace_s)
    step.job, event = _stop(job, to, changed, why, kill_at, inputs.now)
    step.events.append(event)
    return True


def _has_stepped(ranks: list[RankStatus], since: float, ran_s: float, inputs: ReconcileInput) -> bool:
    """Return whether the attempt has made a step; without progress reports, whether it has run for a while."""
    for s in ranks:
        if s.rank.rank == 0 and s.container is not None and (progress := s.container.progress) is not None:
            return _reading(s, inputs).time - progress.age_s > since
    return ran_s > _STARTED_AFTER_S
