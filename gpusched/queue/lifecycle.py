"""The table of allowed state transitions of gpusched's own jobs. Any other transition is a bug and raises.

Slurm's jobs are not bound by it: they are what Slurm says, and may have made many changes since it was last asked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.model.arrays import event_log_id, task_event_data
from gpusched.model.events import Event
from gpusched.model.jobs import ENDED, JobRecord, JobState

_S = JobState

TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (_S.PENDING, _S.STARTING),
        (_S.PENDING, _S.CANCELLED),
        (_S.PENDING, _S.FAILED),  # its secrets are gone, or it is set aside: planning failed because of it
        (_S.STARTING, _S.RUNNING),
        (_S.STARTING, _S.COMPLETING),
        (_S.RUNNING, _S.COMPLETING),
        (_S.STARTING, _S.FAILED),  # set aside, as its own step raised; what is left on the nodes is fenced
        (_S.RUNNING, _S.FAILED),
        (_S.COMPLETING, _S.PENDING),  # requeue, retry, preemption
    }
    | {(_S.COMPLETING, ended) for ended in ENDED}
    | {(ended, _S.PENDING) for ended in ENDED}  # requeue of an ended job
)


class IllegalTransition(RuntimeError):
    """A state transition that is not in the table."""

    def __init__(self, job: JobRecord, to: JobState) -> None:
        super().__init__(
            f"job {job.id}: {job.state} -> {to} is not a transition (attempt {job.attempt}, reason {job.reason!r}, "
            f"submitted {job.submit_time}, started {job.start_time}, ending {job.ending})"
        )


def transition_to(
    job: JobRecord, to: JobState, now: float, *, event: str, data: dict[str, Any] | None = None, **changes: Any
) -> tuple[JobRecord, Event]:
    """Return the job in its new state, and the event that records the transition.

    ``event`` is the event's kind (see `model.events.Event`), ``data`` is more for it than states, reason and attempt;
    ``changes`` are fields of the job that change with the state.

    Raises:
        IllegalTransition: Not in `TRANSITIONS`.
    """
    if (job.state, to) not in TRANSITIONS:
        raise IllegalTransition(job, to)
    moved = msgspec.structs.replace(job, state=to, **changes)
    facts = (
        {"from": job.state, "to": to, "reason": moved.reason, "attempt": moved.attempt}
        | (data or {})
        | task_event_data(job)
    )
    return moved, Event(time=now, kind=event, job_id=event_log_id(job), user=job.user, data=facts)


def set_aside(job: JobRecord, error: Exception, now: float) -> tuple[JobRecord, Event]:
    """Return the job as FAILED, with the error as its event, so that scheduling continues for the others.

    What may still run of it is a leftover from now on.
    """
    message = f"set aside after an internal error: {type(error).__name__}: {error}"[:500]
    return transition_to(
        job, JobState.FAILED, now, event="ended", data={"message": message}, end_time=now, ending=None,
        reason="InternalError", message=message,
    )  # fmt: skip
