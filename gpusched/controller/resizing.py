"""A job that is stopped to go on at another size: how that begins, and what becomes of it. Pure.

resize.json is written, then every rank signalled; the job saves, says so in saved.json and ends, or is ended when it
has said so, or when the grace is over. It waits in the queue's first place, and starts at the new size, or a smaller
one where others took the room. Where it does not come up there, it goes back, and that size is not tried again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.controller.fold import back_in_queue
from gpusched.controller.ranks import RankStatus, ReconcileInput, ReconcileResult
from gpusched.model.events import Event
from gpusched.model.jobs import Ending, JobRecord, JobState, Resizes, ResizeTo
from gpusched.model.plan import Resize
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading
from gpusched.model.units import count_of
from gpusched.queue.lifecycle import transition_to

NOT_SAVED = "it did not save its work when asked"
_COMES_UP_S = 30.0  # a job that tells nothing has come up if it runs for that long


def begin_resize(
    job: JobRecord, action: Resize, policy: PolicySpec, grace_s: float, now: float
) -> tuple[JobRecord, Event]:
    """Ask a running job to save and end, to go on with other GPUs."""
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


def note_of(job: JobRecord, ending: Ending) -> str | None:
    """The text of resize.json; None where the job is not resized."""
    if ending.resize is None:
        return None
    facts = {"from": job.spec.gpus, "to": ending.resize.gpus, "deadline": ending.kill_at}
    return msgspec.json.encode(facts).decode()


def update_save_status(step: ReconcileResult, ending: Ending, seen: list[RankStatus], world: ReconcileInput) -> Ending:
    """The ending with what the job has said since it was asked to save; it is heard while its container is there."""
    to = ending.resize
    if to is None:
        return ending
    saved = to.saved or any(at is not None and at >= to.asked_at for at in (_saved_at(s, world) for s in seen))
    done = to.done or _is_done(seen)
    if (saved, done) == (to.saved, to.done):
        return ending
    changed = msgspec.structs.replace(ending, resize=msgspec.structs.replace(to, saved=saved, done=done))
    step.job = msgspec.structs.replace(step.job, ending=changed)
    kind = "finished" if done else "saved"
    step.events.append(Event(time=world.now, kind=kind, job_id=step.job.id, user=step.job.user, data={}))
    return changed


def _saved_at(s: RankStatus, world: ReconcileInput) -> float | None:
    if s.container is None or s.container.saved is None:
        return None
    return _reading(s, world).time - s.container.saved.age_s


def _reading(s: RankStatus, world: ReconcileInput) -> NodeReading:
    found = world.observations[s.rank.node].result
    assert isinstance(found, NodeReading)
    return found


def _is_done(seen: list[RankStatus]) -> bool:
    for s in seen:
        told = s.container.progress if s.container is not None else None
        if s.rank.rank == 0 and s.rank.exit_code == 0 and told is not None and told.of and told.step >= told.of:
            return True
    return False


def requeue_resized(
    step: ReconcileResult, seen: list[RankStatus], ending: Ending, end: float, world: ReconcileInput
) -> None:
    """All ranks are gone: the job waits for its start at the other size."""
    job, to = step.job, ending.resize
    assert to is not None
    data: dict[str, Any] = {"outcome": "RESIZED"}
    began = job.start_time if job.start_time is not None else end
    resizes = job.resizes or Resizes()
    resizes = msgspec.structs.replace(resizes, resume_at=to.gpus, had_s=resizes.had_s + end - began)
    step.worked_until = began if to.back else to.asked_at
    if not to.back and not to.saved:
        kept = max((at for s in seen if (at := _saved_at(s, world)) is not None), default=began)
        step.worked_until = min(max(kept, began), end)
        lost = end - step.worked_until
        resizes = msgspec.structs.replace(resizes, lost_s=resizes.lost_s + lost)
        data["message"] = f"{lost:.0f} s of work lost"
        if all(s.rank.finished_at is not None for s in seen):  # else its node is to blame
            resizes = msgspec.structs.replace(resizes, frozen=NOT_SAVED)
            data["message"] = f"{NOT_SAVED}: {data['message']}; it will not be resized again"
    fields = back_in_queue(ending.message) | {"resizes": resizes}
    step.job, event = transition_to(job, JobState.PENDING, world.now, event="requeued", data=data, **fields)
    step.events.append(event)


def look_after_resize(step: ReconcileResult, seen: list[RankStatus], failure: str, world: ReconcileInput) -> bool:
    """Of a running job that was resized: note that it came up, or that it does not; whether it goes back.

    Args:
        step: Of the job.
        seen: Its ranks.
        failure: How one of them failed; "": none did.
        world: What is known.
    """
    job, resizes = step.job, step.job.resizes
    if resizes is None or resizes.before is None or job.start_time is None or job.spec.elastic is None:
        return False
    ran_s = world.now - job.start_time
    if _has_stepped(seen, job.start_time, ran_s, world):
        asked = resizes.times[-1] if resizes.times else job.start_time
        changed = msgspec.structs.replace(
            resizes,
            before=None,
            costs_s=resizes.costs_s + max(0.0, job.start_time - asked),
            measured=resizes.measured + 1,
        )
        step.job = msgspec.structs.replace(job, resizes=changed)
        data = {"gpus_from": resizes.before, "gpus_to": job.spec.gpus, "cost_s": changed.cost_s}
        step.events.append(Event(time=world.now, kind="resized", job_id=job.id, user=job.user, data=data))
        return False
    if not failure and ran_s < resizes.start_timeout_s:
        return False
    what = failure or f"no step within {resizes.start_timeout_s:.0f} s"
    why = f"back to {count_of(resizes.before, 'GPU')}: it failed to start with {job.spec.gpus}: {what}"
    changed = msgspec.structs.replace(
        resizes, before=None, unusable=(*resizes.unusable, job.spec.gpus), count=resizes.count + 1, why=why
    )
    to = ResizeTo(gpus=resizes.before, asked_at=world.now, back=True)
    kill_at = world.now + (0.0 if failure else world.settings.grace_s)
    step.job, event = _stop(job, to, changed, why, kill_at, world.now)
    step.events.append(event)
    return True


def _has_stepped(seen: list[RankStatus], since: float, ran_s: float, world: ReconcileInput) -> bool:
    """Whether the present attempt made a step; one that tells nothing, whether it runs for a while."""
    for s in seen:
        if s.rank.rank == 0 and s.container is not None and (told := s.container.progress) is not None:
            return _reading(s, world).time - told.age_s > since
    return ran_s > _COMES_UP_S
