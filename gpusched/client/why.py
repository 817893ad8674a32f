"""Why a job waits, or why it ended: the store's facts, explained as the controller would decide now."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpusched.client.context import Client
from gpusched.client.inbox import inbox_jobs
from gpusched.client.resolve import Resolver
from gpusched.client.sharing import sharing_of
from gpusched.client.slurm import with_slurm_commands
from gpusched.config.accounts import priority_of
from gpusched.config.users import user_name
from gpusched.model import ids
from gpusched.model.arrays import first_task_of, restricted_row, restricted_rows, split_task_ids
from gpusched.model.indices import difference, intersection
from gpusched.model.jobs import ENDED, JobRecord, JobSpec, JobState
from gpusched.model.units import count_of, format_duration
from gpusched.views.jobs import idle_line, resizes_line
from gpusched.views.why import Why

if TYPE_CHECKING:
    from gpusched.config.weights import TrainedModel
    from gpusched.model.snapshot import Snapshot
    from gpusched.sched.sizing.explain import SizesNow

_ENDED_STEPS = {
    JobState.TIMEOUT: "ask for a longer limit with -t, or have the job save its work (--signal USR1@300)",
    JobState.OUT_OF_MEMORY: "ask for more with --mem, or use a larger flavor",
    JobState.NODE_FAIL: "see 'gpusched nodes' for what is wrong there, then 'gpusched requeue {id}'",
    JobState.FAILED: "see 'gpusched logs {id}' for what it printed",
    JobState.PREEMPTED: "'gpusched requeue {id}' queues it again",
    JobState.CANCELLED: "'gpusched requeue {id}' queues it again",
    JobState.COMPLETING: "'gpusched show {id}' shows what was tried and what is still running",
}


def why(client: Client, text: str) -> Why:
    """Return why the job is in its state; for an array, of the first pending task (else the first).

    Raises:
        UsageError: No such job.
    """
    target = Resolver(client).target(text)
    job = first_task_of(next((j for j in target.jobs if j.state is JobState.PENDING), target.jobs[0]))
    found = _why(client, job)
    if job.slurm is None:
        return found
    return msgspec.structs.replace(
        found,
        next_steps=tuple(with_slurm_commands(step) for step in found.next_steps),
        sooner=tuple(msgspec.structs.replace(s, how=with_slurm_commands(s.how)) for s in found.sooner),
    )


def _why(client: Client, job: JobRecord) -> Why:
    warning = client.warning()
    if job.state is JobState.PENDING:
        fallback = client.reader.fallbacks().get(job.spec.partition) if client.reader else None
        line = fallback.line if fallback is not None else _slice_fallback(client, job)
        return msgspec.structs.replace(explain_pending(client, job), warning=warning, fallback=line)
    partner, shared = sharing_of(client, job)
    parts = (
        _message(client, job), *_gpu_errors(client, job), shared and f"shares {shared}", idle_line(job, time.time())
    )  # fmt: skip
    return Why(
        job=job,
        reason=job.reason,
        message="; ".join(filter(None, parts)),
        partner=partner,
        next_steps=_steps(job),
        warning="" if job.state in ENDED else warning,
        now=time.time(),
    )


def _message(client: Client, job: JobRecord) -> str:
    if job.state is JobState.COMPLETING:
        return f"ending ({job.message})" if job.message else "ending"
    if job.message:
        return job.message
    if job.state is JobState.COMPLETED:
        return "completed normally"
    if job.state is JobState.RUNNING and job.resizes is not None:
        return f"has {count_of(job.spec.gpus, 'GPU')}; resized {resizes_line(job)}"
    if job.state is JobState.FAILED and job.exit_code is not None:
        return f"its command exited with code {job.exit_code}"
    if job.state is not JobState.STARTING:
        return ""
    if job.slurm is not None:
        return f"{job.policy or 'its policy'} chose it; Slurm is starting it"
    return _preparing(client, job)


def _preparing(client: Client, job: JobRecord) -> str:
    from gpusched.controller.ranks import container_of

    assert client.reader is not None  # only a stored job is starting
    ranks, ready = [rank for rank in client.reader.ranks(job_id=job.id) if rank.attempt == job.attempt], set()
    for rank in ranks:
        record = client.reader.node_record(rank.node)
        found = container_of(rank, record.reading) if record is not None and record.reading is not None else None
        if found is not None and found.phase == "ready":
            ready.add(rank.rank)
    if job.spec.session is not None and 0 in ready:
        kept = format_duration(job.spec.session)
        return f"waits for a client: gpusched attach {job.id}; ended after {kept} without one"
    since = [rank.launched_at for rank in ranks if rank.rank not in ready and rank.launched_at is not None]
    if not since:
        return "preparing its container"
    limit_s = client.inventory.settings.launch_timeout_s
    return (
        f"preparing its container for {format_duration(max(0.0, time.time() - min(since)))} (the image may still be "
        f"downloading); given up and retried elsewhere after {format_duration(limit_s)}"
    )


def _gpu_errors(client: Client, job: JobRecord) -> list[str]:
    """Return the errors that its programs made on GPUs, as the driver reported them; the last few."""
    events = client.reader.events(job_id=job.id) if client.reader else []
    errors = [f"GPU {e.data.get('gpu')} of {e.node}: {e.data.get('detail')}" for e in events if e.kind == "condition"]
    return list(dict.fromkeys(errors))[-3:]


def _steps(job: JobRecord) -> tuple[str, ...]:
    if job.reason == "LaunchFailed":
        return ("correct the error and submit it again; nothing has run",)
    step = _ENDED_STEPS.get(job.state)
    return (step.format(id=job.id),) if step else ()


def dry_run(client: Client, spec: JobSpec) -> Why:
    """Return what `why` would say of this request if it were queued now (``submit --dry-run``)."""
    now, uid = time.time(), os.getuid()
    job = JobRecord(
        id=ids.mint(now),
        user=user_name(uid),
        uid=uid,
        spec=spec,
        state=JobState.PENDING,
        priority=priority_of(spec, client.inventory),
        submit_time=now,
        eligible_time=spec.begin_time,
        held_by="user" if spec.hold else "",
    )
    return explain_pending(client, job)


def explain_pending(client: Client, job: JobRecord) -> Why:
    """Return the explanation of a pending job, which may be in the inbox or not submitted at all."""
    from gpusched.client.forecast import forecast_job
    from gpusched.compiled import compiled_if_long
    from gpusched.sched.explain import explain
    from gpusched.sched.slices.split import split

    snapshot, sizes = sizes_of_pending(client, job)
    explanation = compiled_if_long(lambda: explain(snapshot, job.id))
    forecast = forecast_job(client, split(snapshot), job, explanation)
    parts = (
        explanation.reason.message, explanation.beside, _cost_of(client, job, explanation.racks),
        *_preemption_lines(client, job), explanation.sharing,
    )  # fmt: skip
    return Why(
        job=job,
        reason=str(explanation.reason.code),
        message="; ".join(filter(None, parts)),
        nodes=explanation.nodes,
        position=explanation.position,
        queue_length=explanation.queue_length,
        next_steps=forecast.next_steps,
        expected=forecast.expected,
        spreads=forecast.spreads,
        sooner=forecast.sooner,
        sizes=sizes,
        now=snapshot.now,
    )


def sizes_of_pending(client: Client, job: JobRecord) -> tuple[Snapshot, SizesNow | None]:
    """Return the cluster with this pending job, and for a resizable job the sizes that it would get."""
    with client.reader.one_moment() if client.reader is not None else nullcontext():
        snapshot = _snapshot(client, job)
    if job.spec.elastic is None:
        return snapshot, None
    from gpusched.sched.sizing.explain import sizes_now

    return sizes_now(snapshot, job.id, _sizing_agent(client, snapshot, job.spec.partition))


def _sizing_agent(client: Client, snapshot: Snapshot, partition: str) -> dict[str, TrainedModel]:
    """Return the weights of the agent that chooses sizes in this partition; none if a rule does."""
    policy = snapshot.policies.get(partition)
    if policy is None or policy.agent is None or not policy.traits.sizes or client.reader is None:
        return {}
    from gpusched.config.weights import ModelError, load_model

    try:
        return {partition: load_model(Path(policy.folder), partition, policy.agent)}
    except (ModelError, OSError):
        return {}


def _cost_of(client: Client, job: JobRecord, racks: int | None) -> str:
    """Return the cost of not waiting for one rack, if known; or ""."""
    if client.reader is None or racks is None:
        return ""
    from gpusched.client.predict import spread_cost

    found = spread_cost(client.reader.beliefs(), job, racks)
    return found[0] if found is not None else ""


def _preemption_lines(client: Client, job: JobRecord) -> list[str]:
    """Return a line for each job that is being stopped for this one."""
    active = client.reader.active() if client.reader else []
    stopping = ((other.id, other.ending.preemptions) for other in active if other.ending is not None)
    return [f"job {other} is being stopped for it" for other, cause in stopping if cause and cause.for_job == job.id]


def _without_job(row: JobRecord, job: JobRecord) -> list[JobRecord]:
    """Return a row of the queue without this job: the tasks of its array before it and after it."""
    if not row.tasks or row.array_id != job.array_id or job.array_index is None:
        return [row]
    index = job.array_index
    parts = (difference(row.tasks, ((index, row.tasks[-1][1]),)), difference(row.tasks, ((0, index),)))
    return (
        [restricted_row(row, part) for part in parts if part] if intersection(row.tasks, ((index, index),)) else [row]
    )


def _slice_fallback(client: Client, job: JobRecord) -> str:
    from gpusched.promotion.live import slice_fallbacks

    found = slice_fallbacks(client.inventory, client.reader, [job]) if job.spec.profile else {}
    return found.get(job.spec.partition, "")


def _snapshot(client: Client, job: JobRecord) -> Snapshot:
    """Return the cluster as the store knows it, with this job and the inbox in its queue.

    Where an agent is out, its fallback is the policy, as in the controller.
    """
    from gpusched.client.reservations import known_reservations
    from gpusched.promotion.live import live_policies
    from gpusched.queue.quotas import recent_quota_usage
    from gpusched.queue.snapshots import build_snapshot, job_class_estimates, recent_usage

    inventory, reader = client.inventory, client.reader
    policies = live_policies(inventory, reader)
    fallbacks = reader.fallbacks() if reader else {}
    policies = {name: p.effective_fallback if name in fallbacks else p for name, p in policies.items()}
    now = time.time()
    in_inbox = inbox_jobs(client)
    stored = reader.pending_rows() if reader else []
    rows = [part for row in (*in_inbox, *stored) for part in _without_job(row, job)]
    pending = {j.id: j for j in (*rows, job)}  # the job comes last and replaces its own row

    def lookup(job_id: str) -> list[JobRecord]:
        if reader and (jobs := reader.dependency_rows(job_id)):
            return jobs
        base, spans = split_task_ids(job_id)
        found = [j for j in in_inbox if base in (j.id, j.array_id)]
        return restricted_rows(found, spans) if spans else found

    snapshot = build_snapshot(
        inventory,
        policies,
        reader.node_records() if reader else {},
        active=reader.active() if reader else [],
        pending=sorted(pending.values(), key=lambda j: (j.submit_time, j.array_id or j.id, j.array_index or 0)),
        ranks=reader.ranks() if reader else [],
        lookup=lookup,
        completed_tasks=reader.completed_tasks if reader else None,
        usage=recent_usage(reader, inventory, policies, now) if reader else {},
        used=recent_quota_usage(reader, inventory.quotas, now) if reader else (),
        array_limits=reader.array_limits() if reader else {},
        estimates=reader.estimates() if reader else {},
        progress=reader.progress_of_unended() if reader else {},
        now=now,
        whole=True,
        reservations=known_reservations(client, now),
    )
    beliefs = job_class_estimates(reader, policies, snapshot) if reader else {}
    return msgspec.structs.replace(snapshot, beliefs=beliefs) if beliefs else snapshot
