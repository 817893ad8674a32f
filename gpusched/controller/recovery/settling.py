"""Settles a restored store by what nodes keep of attempts: changes jobs, ranks, runs and usage in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gpusched.accounting.usage import GpuHolding, holdings, usage_between
from gpusched.controller.hot import with_parts
from gpusched.controller.launcher import rank_record
from gpusched.controller.ledger import run_of
from gpusched.controller.nodestate import with_result
from gpusched.model.attemptrecords import AttemptRecord
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, ENDED, Allocation, JobRecord, JobState, NodeAllocation, container_name
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.recovery import RecoveredJob, RecoveryOutcome
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.records import NodeRecords, name_of
from gpusched.queue.store import NodeRecord, RankRecord, RunRecord, Store, UsageRow

UNKNOWN_OUTCOME = "OutcomeUnknown"


class NodeEvidence(NamedTuple):
    """What a node that answered shows and keeps."""

    reading: NodeReading
    records: NodeRecords


class Settled(NamedTuple):
    """The jobs that were looked at, and attempts without a usable record: (node, name)."""

    jobs: list[RecoveredJob]
    strays: list[tuple[str, str]]


class _Evidence:
    """Evidence of all nodes that answered, by job and attempt."""

    def __init__(self, nodes: Mapping[str, NodeEvidence]) -> None:
        self.nodes = nodes
        self.live: dict[str, list[tuple[str, AttemptRecord]]] = {}
        self.latest: dict[str, AttemptRecord] = {}
        self.seen: dict[str, str] = {}  # name of an attempt's container -> its phase
        for node, found in nodes.items():
            for record in found.records.live:
                self.live.setdefault(record.job.id, []).append((node, record))
            for record in (*found.records.live, *found.records.ended):
                best = self.latest.get(record.job.id)
                if best is None or (best.job.attempt, best.time) < (record.job.attempt, record.time):
                    self.latest[record.job.id] = record
            self.seen |= dict.fromkeys(found.records.unknown, "unknown")
            self.seen |= {c.name: c.phase for c in found.reading.containers or ()}

    def is_there(self, job: JobRecord, rank: int) -> bool:
        """Return whether anything of a rank of the job's attempt is on its node."""
        return container_name(job.id, job.attempt, rank) in self.seen or any(
            (record.job.attempt, record.rank) == (job.attempt, rank) for _, record in self.live.get(job.id, ())
        )

    def has_begun(self, job: JobRecord) -> bool:
        """Return whether the job's own program was started by any rank of its attempt."""
        names = (container_name(job.id, job.attempt, rank) for rank in job.past_ranks)
        return any(self.seen.get(name) in ("running", "exited") for name in names)


def settle(
    store: Store, inventory: Inventory, nodes: Mapping[str, NodeEvidence], silent: Set[str], now: float
) -> Settled:
    """Settle all jobs of which these nodes know more than the store; inside the caller's transaction.

    Args:
        store: As restored.
        inventory: With all these nodes.
        nodes: Those that answered.
        silent: Those that did not: of their jobs nothing is concluded from silence.
        now: Unix seconds.
    """
    evidence, before = _Evidence(nodes), store.node_records()
    active = {job.id: job for job in store.active()}
    asked = silent | nodes.keys()
    concerned = {job.id for job in active.values() if not asked.isdisjoint(_nodes(job))}
    found: list[RecoveredJob] = []
    changed: list[JobRecord] = []
    for job_id in sorted(concerned | evidence.latest.keys()):
        known = active.get(job_id) or store.job(job_id)
        job, outcome, note = _judge(known, evidence.latest.get(job_id), evidence, now)
        if job is None:
            continue
        if job is not known:
            changed.append(job)
        found.append(
            RecoveredJob(
                id=job.id, name=job.spec.name, user=job.user, outcome=outcome, state=job.state,
                exit_code=job.exit_code, nodes=_nodes(job), note=note,
            )
        )  # fmt: skip
    store.put_jobs(changed)
    _record_earlier_runs(store, evidence)
    for job in changed:
        _record_run(store, inventory, active.get(job.id), job, now)
    _add_ranks(store, inventory, evidence, changed)
    _charge(store, inventory, before, evidence, {**active, **{job.id: job for job in changed}})
    store.put_jobs(
        msgspec.structs.replace(job, energy_j=store.job_energy(job.id)) for job in changed if job.state in ENDED
    )
    store.put_nodes(with_result(before.get(n, NodeRecord(name=n)), found.reading) for n, found in nodes.items())
    for job in changed:  # its command file, if it is still there, must not submit it again
        store.mark_applied(f"{job.array_id or job.id}.submit", now)
    outcomes = {one.id: one.outcome for one in found}
    store.append(
        Event(
            time=now, kind="recovered", job_id=job.id, user=job.user,
            data={"to": job.state, "attempt": job.attempt, "outcome": outcomes[job.id]},
        )
        for job in changed
    )  # fmt: skip
    strays = [(name, stray) for name, one in nodes.items() for stray in _strays(store, one)]
    return Settled(found, strays)


def _judge(
    known: JobRecord | None, latest: AttemptRecord | None, evidence: _Evidence, now: float
) -> tuple[JobRecord | None, RecoveryOutcome, str]:
    """Return a job as it is by all that is known, and how that was found; None: it is as the store has it, at rest.

    Args:
        known: As in the store, which the result is (the same object) where nothing changes.
        latest: The nodes' latest record of it.
        evidence: Of the nodes that answered.
        now: Unix seconds.
    """
    if latest is not None:
        is_newer = known is None or latest.job.attempt > known.attempt
        outcome: RecoveryOutcome = "recovered" if known is None else "settled"
        if latest.job.state not in ACTIVE and (known is None or is_newer or known.state in ACTIVE):
            if known is None or latest.job.attempt >= known.attempt:
                return _with_end(latest), outcome, ""
        elif is_newer:
            return _as_left(latest.job, evidence), outcome, ""
        elif known is not None and known.state in ACTIVE and _has_joined(known, latest.job):
            grown = msgspec.structs.replace(known, allocation=latest.job.allocation, resizes=latest.job.resizes)
            return _as_left(grown, evidence), outcome, ""
    if known is None or known.state not in ACTIVE:
        return None, "running", ""
    if any(evidence.is_there(known, rank) for rank in known.ranks):
        return known, "running", ""
    if missing := sorted(set(_nodes(known)) - evidence.nodes.keys()):
        return known, "unknown", f"{', '.join(missing)} does not answer"
    message = "it ended after the last backup, and its nodes keep no record of it; 'gpusched requeue' runs it again"
    ended = msgspec.structs.replace(
        known, state=JobState.NODE_FAIL, reason=UNKNOWN_OUTCOME, message=message, ending=None, end_time=now
    )
    return ended, "unknown", message


def _nodes(job: JobRecord) -> tuple[str, ...]:
    return tuple(part.node for part in job.allocation.parts) if job.allocation is not None else ()


def _as_left(job: JobRecord, evidence: _Evidence) -> JobRecord:
    """Return an active job; of a hot one, ranks that have left since are no part of it."""
    if not job.spec.is_hot or job.allocation is None:
        return job
    parts = tuple(p for p in job.allocation.parts if p.node not in evidence.nodes or evidence.is_there(job, p.rank))
    return with_parts(job, parts) if parts else job


def _has_joined(known: JobRecord, latest: JobRecord) -> bool:
    """Return whether ranks of the same attempt have joined a hot job since."""
    return known.spec.is_hot and known.attempt == latest.attempt and not set(latest.ranks) <= set(known.ranks)


def _with_end(record: AttemptRecord) -> JobRecord:
    """Return the job of a record; one that has ended, and does not say when, had by then."""
    if record.job.state not in ENDED or record.job.end_time is not None:
        return record.job
    return msgspec.structs.replace(record.job, end_time=record.time)


def _record_earlier_runs(store: Store, evidence: _Evidence) -> None:
    """Close, or add, the runs of attempts after which their jobs waited again."""
    records = {(r.job.id, r.job.attempt): r for found in evidence.nodes.values() for r in found.records.ended if r.runs}
    for (job_id, attempt), record in records.items():
        is_known = bool(store.runs_of_attempt(job_id, attempt))
        for run in msgspec.convert(record.runs, tuple[RunRecord, ...]):
            if not is_known:
                store.open_run(msgspec.structs.replace(run, group=record.job.spec.group, qos=record.job.spec.qos))
            end = run.end_time if run.end_time is not None else record.time
            store.close_run(job_id, attempt, end, JobState(run.outcome or JobState.NODE_FAIL), run.worked_until)


def _record_run(store: Store, inventory: Inventory, before: JobRecord | None, job: JobRecord, now: float) -> None:
    """Close the run that the store has open, and add that of an attempt which it does not know."""
    if before is not None and before.start_time is not None:
        same = before.attempt == job.attempt
        end = job.end_time if same and job.end_time is not None else now
        outcome = JobState.PENDING if job.state in ACTIVE else job.state
        store.close_run(job.id, before.attempt, end, outcome if same else JobState.NODE_FAIL)
        if same and job.state in ACTIVE:  # ranks have joined; when, is not known
            store.open_run(run_of(job, inventory, now))
        if same:
            return
    if job.state in ENDED and job.start_time is not None and job.allocation is not None:
        store.open_run(run_of(job, inventory))
        store.close_run(job.id, job.attempt, job.end_time or now, job.state)


def _add_ranks(store: Store, inventory: Inventory, evidence: _Evidence, changed: Iterable[JobRecord]) -> None:
    """Add records of all ranks that are on the nodes, and of those that the changed jobs hold."""
    known = {(rank.job_id, rank.attempt, rank.rank) for rank in store.ranks()}
    added: dict[tuple[str, int, int], RankRecord] = {}
    for records in evidence.live.values():
        for node, record in records:
            part = _part(record.job, record.rank)
            if part is not None and part.node == node:
                rank = rank_record(inventory, record.job, part, record.time)
                added[rank.job_id, rank.attempt, rank.rank] = msgspec.structs.replace(
                    rank, runtime=record.runtime, launched_at=record.time, boot_id=record.boot_id
                )
    for job in changed:
        for part in job.allocation.parts if job.state in ACTIVE and job.allocation else ():
            key = (job.id, job.attempt, part.rank)
            if key not in added and inventory.node(part.node) is not None:
                latest = evidence.latest[job.id].time
                rank = rank_record(inventory, job, part, latest)
                # A rank that its node does not know was never launched, unless its gang has begun.
                there = part.node not in evidence.nodes or evidence.has_begun(job)
                added[key] = msgspec.structs.replace(rank, launched_at=latest if there else None)
    store.put_ranks(rank for key, rank in added.items() if key not in known)


def _part(job: JobRecord, rank: int) -> NodeAllocation | None:
    return next((p for p in (job.allocation.parts if job.allocation else ()) if p.rank == rank), None)


def _strays(store: Store, found: NodeEvidence) -> list[str]:
    """Return attempts on a node that the store does not know."""
    known = {container_name(rank.job_id, rank.attempt, rank.rank) for rank in store.ranks()}
    containers = [container.name for container in found.reading.containers or ()]
    there = {*found.records.unknown, *containers, *map(name_of, found.records.live)}
    return sorted(there - known)


# ---- usage since the backup ---------------------------------------------------------------------------------------


def _charge(
    store: Store,
    inventory: Inventory,
    before: Mapping[str, NodeRecord],
    evidence: _Evidence,
    jobs: Mapping[str, JobRecord],
) -> None:
    """Charge the time from the backup's readings to the present ones, by the energy counters that records have."""
    rows: list[UsageRow] = []
    for name, found in evidence.nodes.items():
        node, record = inventory.node(name), before.get(name)
        if node is None:
            continue
        held = _held(name, found, jobs)
        for points in _points(record.reading if record is not None else None, found).values():
            rows += _rows(node, found.reading, points, held)
    store.add_usage(rows)


_Point = tuple[float, str | None, Gpu]


def _points(base: NodeReading | None, found: NodeEvidence) -> dict[int, list[_Point]]:
    """Return GPU index -> its counters as they were read since the backup, by time."""
    points: dict[int, list[_Point]] = {}
    for gpu in base.gpus if base is not None else ():
        assert base is not None
        points.setdefault(gpu.index, []).append((base.time, base.boot_id, gpu))
    for is_live, records in ((True, found.records.live), (False, found.records.ended)):
        for record in records:
            # A launch follows its reading at once: what was used in between is the job's.
            at = record.intended_at if is_live else record.read
            if record.read is not None and at is not None and (base is None or at > base.time):
                for gpu in record.gpus:
                    points.setdefault(gpu.index, []).append((at, record.boot_id, gpu))
    for gpu in found.reading.gpus:
        points.setdefault(gpu.index, []).append((found.reading.time, found.reading.boot_id, gpu))
    return {index: sorted(some, key=lambda point: point[0]) for index, some in points.items()}


def _rows(
    node: Node, reading: NodeReading, points: Sequence[_Point], held: Mapping[int, list[GpuHolding]]
) -> list[UsageRow]:
    readings = [msgspec.structs.replace(reading, time=t, boot_id=boot, gpus=(gpu,)) for t, boot, gpu in points]
    return [row for a, b in pairwise(readings) for row in usage_between(node, a, b, held)]


def _held(
    node: str, found: NodeEvidence, jobs: Mapping[str, JobRecord]
) -> dict[int, list[GpuHolding]]:
    """Return which job held which GPU of a node, and when, as far as it is known."""
    spans = {(job.id, job.attempt, -1): (job, job.start_time or float("-inf")) for job in jobs.values()}
    for record in (*found.records.ended, *found.records.live):
        begin = record.intended_at if record.intended_at is not None else record.time
        job = jobs.get(record.job.id)
        if job is None or job.attempt != record.job.attempt:
            job = msgspec.structs.replace(record.job, end_time=record.job.end_time or record.time)
        if record.runs:
            part = NodeAllocation(rank=record.rank, node=node, gpus=record.held, cores=0, memory_mib=0)
            end = record.runs[-1]["end_time"] or record.time
            job = msgspec.structs.replace(record.job, allocation=Allocation(job.id, (part,)), end_time=end)
        spans[job.id, job.attempt, record.rank if record.runs else -1] = (job, begin)
    held: dict[int, list[GpuHolding]] = {}
    for job, begin in spans.values():
        for gpu, some in holdings(node, [job], found.reading.time).items():
            held.setdefault(gpu, []).extend(msgspec.structs.replace(one, begin=begin) for one in some)
    for holders in held.values():
        holders.sort(key=lambda one: one.end)
    return held
