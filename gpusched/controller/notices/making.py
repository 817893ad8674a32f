"""Turns events and running jobs into notices: receivers and texts. Pure, except that it reads the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import msgspec

from gpusched.accounting.held_idle import held_idle
from gpusched.accounting.usage import BUCKET_S
from gpusched.model.arrays import first_task_of
from gpusched.model.events import Event
from gpusched.model.health import KIND, HealthAction
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.notices import DEFAULT_NOTICE_KINDS, NEAR_LIMIT, Notice, NoticeKind, Notices, Receiver
from gpusched.model.slices import gpu_of
from gpusched.model.units import format_duration, iso_utc
from gpusched.queue.store import Reader

MAIL = "mail "
EVENTS: dict[str, tuple[NoticeKind, ...]] = {
    "running": (NoticeKind.BEGIN,),
    "ended": (NoticeKind.END, NoticeKind.FAIL),
    "requeued": (NoticeKind.REQUEUE,),
    "idle_warned": (NoticeKind.IDLE,),
    "idle_acted": (NoticeKind.IDLE,),
    "node_down": (NoticeKind.NODE,),
    "gpu_lost": (NoticeKind.NODE,),
    "check_failed": (NoticeKind.NODE,),
    "check_hung": (NoticeKind.NODE,),
    "check_slow": (NoticeKind.NODE,),
    "condition": (NoticeKind.NODE,),
    "backup_failed": (NoticeKind.NODE,),
}
"""Kind of event -> kinds of the notices that it creates."""
_NO_FAILURE = (JobState.COMPLETED, JobState.CANCELLED)


def digest_of(receiver: Receiver) -> str:
    """Return a receiver's key in the store, which must not hold its secret address."""
    place: tuple[object, ...] = (receiver.webhook, receiver.command)
    if receiver.notifier:  # without one, the digest is that of versions that had no notifiers
        place += (receiver.notifier, sorted(receiver.options.items()))
    return hashlib.blake2b(msgspec.json.encode(place), digest_size=8).hexdigest()


class NoticeMaker:
    """Creates the notices of one cycle."""

    def __init__(self, reader: Reader, asked: Notices, cluster: str, now: float) -> None:
        self._reader, self._asked, self._cluster, self._now = reader, asked, cluster, now
        self._ended: dict[str, bool] = {}  # whether an array has ended without a notice of it so far, read once

    def of_event(self, event: Event) -> Iterator[Notice]:
        """Yield the notices of an event of a job or a node."""
        if event.node is not None and event.job_id is None:
            yield from self._node_notices(event, event.node)
            return
        if event.kind == "backup_failed":
            yield from self._operator_notices(f"backup.{event.time:.3f}", f"backup failed: {event.data['why']}", event)
            return
        if event.kind == "condition":
            yield from self._program_notices(event)
            return
        job = self._job_of(event)
        if job is None or not any(self._receivers(job)):
            return
        attempt = int(event.data.get("attempt", job.attempt))
        if event.kind != "ended":
            yield from self._job_notices(job, EVENTS[event.kind][0], event, attempt, _event_text(job, event))
            return
        outcome = str(event.data.get("to", job.state))
        failed = outcome not in _NO_FAILURE
        text = f"{_job_text(job)} {_ended_text(job, outcome)}"
        if job.array_id is None:
            for receiver, kinds in self._receivers(job):
                kind = NoticeKind.END if NoticeKind.END in kinds else NoticeKind.FAIL
                if kind in kinds and (failed or kind is NoticeKind.END):
                    yield self._notice(receiver, kind, f"{job.id}.{attempt}", text, job, event.time)
            return
        if failed:  # per array one notice of the first failed task, and one when all have ended
            yield from self._job_notices(job, NoticeKind.FAIL, event, attempt, text)
        if self._is_over(job.array_id):
            self._ended[job.array_id] = False  # the text goes through all tasks, of which many may end at once
            yield from self._job_notices(job, NoticeKind.END, event, attempt, self._array_text(job))

    def _job_of(self, event: Event) -> JobRecord | None:
        """Return the event's job; if the event covers several array tasks, the first of them."""
        if event.job_id is None:
            return None
        tasks = event.data.get("tasks")
        rows = self._reader.rows_of(event.job_id if tasks is None else f"{event.job_id}_[{tasks}]")
        return first_task_of(rows[0]) if rows else None

    def _is_over(self, array: str) -> bool:
        if array not in self._ended:
            self._ended[array] = not self._reader.has_unended(array)
        return self._ended[array]

    def _array_text(self, job: JobRecord) -> str:
        assert job.array_id is not None
        counts: dict[str, int] = {}
        for row in self._reader.rows_of(job.array_id):
            counts[row.state] = counts.get(row.state, 0) + row.count
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return f"array {job.array_id} ({job.spec.name}) of {job.user} has ended: {states}"

    def _node_notices(self, event: Event, node: str) -> Iterator[Notice]:
        """Yield notices of what is wrong with a node or GPU, to the operator's receivers and those of jobs there.

        Jobs get no notice of a check.
        """
        text = _node_text(event, node)
        if not text:
            return
        what = [event.data[key] for key in ("gpu", "condition", "check") if event.data.get(key) is not None]
        mark = f"{node}.{'.'.join(map(str, what))}.{event.time:.3f}"
        yield from self._operator_notices(mark, text, event)
        if "check" in event.data:
            return
        gpu = event.data.get("gpu")
        jobs_there = (
            job for job in self._jobs_by_node.get(node, ())
            if any(
                part.node == node and (gpu is None or gpu in map(gpu_of, part.gpus))
                for part in (job.allocation.parts if job.allocation else ())
            )
        )  # fmt: skip
        for job in jobs_there:
            for to, kinds in self._receivers(job, own_only=True):
                if NoticeKind.NODE in kinds:
                    about = f"{_job_text(job)}: {text}"
                    yield self._notice(to, NoticeKind.NODE, f"{job.id}.{mark}", about, job, event.time, node)

    @cached_property
    def _jobs_by_node(self) -> dict[str, list[JobRecord]]:
        """Return node -> active jobs there, read once: all GPUs of all nodes may get hot at once."""
        found: dict[str, list[JobRecord]] = {}
        for job in self._reader.active():
            for node in {part.node for part in (job.allocation.parts if job.allocation else ())}:
                found.setdefault(node, []).append(job)
        return found

    def _operator_notices(self, mark: str, text: str, event: Event) -> Iterator[Notice]:
        for receiver in self._asked.to:
            if NoticeKind.NODE in receiver.on and not receiver.users:
                yield self._notice(digest_of(receiver), NoticeKind.NODE, mark, text, None, event.time, event.node)

    def _program_notices(self, event: Event) -> Iterator[Notice]:
        """Yield notices of an error of a program on a GPU to the receivers of its job alone."""
        job = self._job_of(event)
        if job is None or event.node is None:
            return
        mark = f"{job.id}.{event.node}.{event.data.get('gpu')}.{event.time:.3f}"
        for to, kinds in self._receivers(job, own_only=True):
            if NoticeKind.NODE in kinds:
                text = f"{_job_text(job)}: GPU {event.data.get('gpu')} of node {event.node}: {event.data.get('detail')}"
                yield self._notice(to, NoticeKind.NODE, mark, text, job, event.time, event.node)

    def of_running(self, active: Iterable[JobRecord]) -> Iterator[Notice]:
        """Yield notices of jobs near their time limit, and of jobs that have left their GPUs idle for long."""
        running = [job for job in active if job.state is JobState.RUNNING and job.start_time is not None]
        asked = [(job, kinds) for job in running if (kinds := {k for _, on in self._receivers(job) for k in on})]
        for job, kinds in asked:
            assert job.start_time is not None
            left = job.start_time + job.limit_s - self._now
            if NoticeKind.LIMIT in kinds and left <= (1 - NEAR_LIMIT) * job.limit_s:
                text = f"{_job_text(job)} reaches its time limit in {format_duration(max(0.0, left))}"
                yield from self._job_notices(job, NoticeKind.LIMIT, None, job.attempt, text)
        watched = {job.id: job for job, kinds in asked if NoticeKind.IDLE in kinds and job.spec.gpus}
        if not watched:
            return
        usage = self._reader.usage(self._now - self._asked.idle_s - 3 * BUCKET_S)
        for idle in held_idle(watched.values(), usage, self._now):
            if idle.idle_s >= self._asked.idle_s:
                job = watched[idle.job]
                held = f"{idle.idle_gpus} of its {idle.gpus} GPUs have" if idle.gpus > 1 else "its GPU has"
                text = f"{_job_text(job)}: {held} been idle for {format_duration(idle.idle_s)}"
                yield from self._job_notices(job, NoticeKind.IDLE, None, job.attempt, text)

    def _job_notices(
        self, job: JobRecord, kind: NoticeKind, event: Event | None, attempt: int, text: str
    ) -> Iterator[Notice]:
        at = event.time if event is not None else self._now
        whole_array = job.array_id is not None and kind not in (NoticeKind.LIMIT, NoticeKind.IDLE, NoticeKind.REQUEUE)
        for to, kinds in self._receivers(job):
            if kind in kinds:
                mark = str(job.array_id) if whole_array else f"{job.id}.{attempt}"
                if event is not None and kind is NoticeKind.IDLE:  # by a rule, each time it applies
                    mark += f".{event.kind}.{event.time:.3f}"
                yield self._notice(to, kind, mark, text, job, at)

    def _receivers(self, job: JobRecord, own_only: bool = False) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield a job's receivers and their kinds; ``own_only``: leave out receivers of all jobs."""
        if job.spec.mail:
            yield MAIL + job.spec.mail, job.spec.notify or DEFAULT_NOTICE_KINDS
        for receiver in self._asked.to:
            if job.user in receiver.users or not (receiver.users or own_only):
                yield digest_of(receiver), receiver.on

    def _notice(
        self, to: str, kind: NoticeKind, mark: str, text: str, job: JobRecord | None, at: float, node: str | None = None
    ) -> Notice:
        key = f"{to} {kind} {mark}"
        body: dict[str, Any] = {
            "id": hashlib.blake2b(f"{self._cluster} {key}".encode(), digest_size=8).hexdigest(),
            "notice": str(kind), "time": iso_utc(at), "cluster": self._cluster, "text": text, "node": node,
            "job": _facts(job) if job is not None else None,
        }  # fmt: skip
        return Notice(key=key, to=to, body=body, made=self._now, due=self._now)


def _node_text(event: Event, node: str) -> str:
    data = event.data
    if event.kind == "condition":
        return _condition_text(event, node)
    if "check" in data:
        return f"node {node}: {data.get('detail')}"
    lost = f"GPU {data.get('gpu')} of node {node}" if event.kind == "gpu_lost" else f"node {node}"
    return f"{lost} is lost: {data.get('reason') or 'it does not respond'}"


def _condition_text(event: Event, node: str) -> str:
    """Return the condition and what to do; "" where another notice has it, or only its job's receivers get one."""
    kind, gpu = KIND.get(str(event.data.get("condition"))), event.data.get("gpu")
    if kind is None or kind.fault == "program" or kind.name == "off-bus":
        return ""
    where = f"node {node}" if gpu is None else f"GPU {gpu} of node {node}"
    out = "" if event.data.get("action") == HealthAction.WARN else f" ({event.data.get('action')})"
    return f"{where}: {event.data.get('detail')}{out}; {kind.advice}"


def _job_text(job: JobRecord) -> str:
    return f"job {job.id} ({job.spec.name}) of {job.user}"


def _event_text(job: JobRecord, event: Event) -> str:
    nodes = ", ".join(part.node for part in job.allocation.parts) if job.allocation else ""
    if event.kind == "running":
        return f"{_job_text(job)} has started" + (f" on {nodes}" if nodes else "")
    why = event.data.get("message") or event.data.get("outcome") or job.message
    if event.kind == "idle_warned":
        return f"{_job_text(job)}: {why}"
    if event.kind == "idle_acted":
        done = {"signal": "was signalled", "requeue": "is requeued", "cancel": "is cancelled"}
        return f"{_job_text(job)} {done[event.data['then']]}: {why}"
    return f"{_job_text(job)} is queued again" + (f": {why}" if why else "")


def _ended_text(job: JobRecord, outcome: str) -> str:
    ran = f" after {format_duration(job.ran_s)}" if job.start_time is not None else ""
    why = f": {job.message or job.reason}" if job.message or job.reason else ""
    return f"has ended {outcome}{ran}{why}"


def _facts(job: JobRecord) -> dict[str, Any]:
    return {
        "id": job.id, "array": job.array_id, "name": job.spec.name, "user": job.user, "partition": job.spec.partition,
        "state": str(job.state), "reason": job.reason, "message": job.message, "exit_code": job.exit_code,
        "nodes": [part.node for part in job.allocation.parts] if job.allocation else [], "gpus": job.spec.gpus,
        "submitted": iso_utc(job.submit_time), "started": iso_utc(job.start_time), "ended": iso_utc(job.end_time),
        "limit_s": job.limit_s, "attempt": job.attempt, "comment": job.spec.comment,
    }  # fmt: skip
