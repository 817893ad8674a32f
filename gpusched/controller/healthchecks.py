"""The site's own checks: which is due where, what their results change, and which jobs wait for them.

A run's intent is stored before it is sent. After a crash the same run is asked for again: the node starts each run once
and keeps its result. A node has one run at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from gpusched.cluster.base import Operation, OperationOutcome, RankKey
from gpusched.cluster.requests import fabric_address
from gpusched.controller.nodestate import usable_slices, with_drain
from gpusched.controller.ranks import rank_key
from gpusched.model.events import Event
from gpusched.model.healthchecks import (
    DRAINED_BY,
    RECHECK_S,
    CheckCondition,
    CheckRecord,
    CheckResult,
    CheckRun,
    HealthCheck,
    holding_reasons,
    open_conditions,
    with_result,
)
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.resources import Inventory, Node
from gpusched.model.slices import gpu_label, is_slice
from gpusched.queue.snapshots import used_gpus
from gpusched.queue.store import NodeRecord, RankRecord, Store

CHECK_FAILED = "CheckFailed"
"""Reason of the end of an attempt that a check kept from starting; it is no retry."""
LOOK_S = 30.0
"""A node that answers again is looked at for overdue checks after so long at the latest."""
NEVER = float("-inf")
_OWN_PORT = 29500  # of a run without a job: no job's MASTER_PORT


def before_job_checks(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """Return node -> names of the checks that must pass there before a job starts."""
    found = {n.name: tuple(c.name for c in n.health_checks if c.before_job) for n in inventory.nodes if n.health_checks}
    return {node: names for node, names in found.items() if names}


def awaits_checks(ranks: Iterable[RankRecord], required: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a check has not passed yet on some node of these ranks, which must not be launched before."""
    return any(not set(required.get(r.node, ())) <= set(r.checks_passed) for r in ranks if r.hot != "joins")


def reasons_against_jobs(store: Store, inventory: Inventory) -> dict[str, str]:
    """Return node -> why it takes no new jobs, where a check failed."""
    records = store.check_records()
    return holding_reasons(open_conditions(records, inventory.declared_checks())) if records else {}


# -- results


def record_check(store: Store, outcome: OperationOutcome) -> None:
    """Record a run's result in its check, its node and the rank that waits for it, in the caller's transaction.

    A run that could not be asked for stays open, and is asked for again.
    """
    run = outcome.operation.check
    assert run is not None
    record = store.check_record(run.node, run.check.name)
    if record is None or record.run != run.id or (outcome.error and outcome.transient):
        return
    result = outcome.result or CheckResult(exit_code=1, line=outcome.error)
    after = with_result(record, run.check, result, outcome.time)
    if result.lost and run.adopt:  # nothing was started, so nothing was lost
        after = msgspec.structs.replace(record, run="", rank=None, began=None)
    store.put_check_records([after])
    if result.lost and (run.adopt or after.lost):
        return
    found = open_conditions([after], [(run.node, run.check)])
    store.append(_events(record, after, found, outcome.time))
    condition = next((one for one in found if one.kind != "check-slow"), None)
    if condition is not None and condition.then == "drain":
        _drain(store, run.node, condition.detail, outcome.time)
    if run.rank is not None:
        _record_on_rank(store, run.rank, run.check.name, condition.detail if condition is not None else "")


def _events(
    before: CheckRecord, after: CheckRecord, conditions: Iterable[CheckCondition], now: float
) -> Iterator[Event]:
    """Yield an event for each condition that opened, and one when a check passes again."""
    for condition in conditions:
        if condition.since == now:  # `with_result` keeps the time at which it opened
            measured = {"value": after.value} if condition.kind == "check-slow" else {"exit_code": after.exit_code}
            data = {"check": after.check, "detail": condition.detail, **measured}
            yield Event(time=now, kind=condition.kind.replace("-", "_"), node=after.node, data=data)
    if before.is_bad and not after.is_bad:
        yield Event(time=now, kind="check_passed", node=after.node, data={"check": after.check})


def _drain(store: Store, node: str, reason: str, now: float) -> None:
    record = store.node_record(node) or NodeRecord(name=node)
    if not record.may_be_drained:
        return
    record, event = with_drain(record, reason, DRAINED_BY, now)
    store.put_nodes([record])
    store.append([event])


def _record_on_rank(store: Store, key: RankKey, check: str, error: str) -> None:
    for rank in store.ranks(job_id=key[0]):
        if rank_key(rank) == key:
            passed = rank.checks_passed if error else (*rank.checks_passed, check)
            store.put_ranks([msgspec.structs.replace(rank, checks_passed=passed, check_error=error)])


# -- runs that are due


class _Due:
    """Collects the runs to start and to ask for again in one cycle."""

    def __init__(self, store: Store, inventory: Inventory, busy: frozenset[RankKey], now: float) -> None:
        self._inventory, self._now = inventory, now
        self._required = before_job_checks(inventory)
        self._busy = {node.name for node in inventory.nodes if operation_key(node.name) in busy}
        self._records = {(r.node, r.check): r for r in store.check_records()}
        # A node of which a run is open, or that a job waits for, gets no other.
        self._taken = {r.node for r in self._records.values() if r.run} | self._busy
        self._nodes = store.node_records()
        self._reachable = {n for n, r in self._nodes.items() if r.down_since is None and r.last_seen is not None}
        self._active = store.active()
        self._ranks = store.ranks()
        self._used = used_gpus(self._active, self._ranks)
        self.runs: list[CheckRun] = []
        self.changed: list[CheckRecord] = []
        self.dropped: list[CheckRecord] = []

    def find(self) -> None:
        """Find them: first what is open, then what jobs wait for, then what is due by its interval."""
        declared = {(node, check.name): check for node, check in self._inventory.declared_checks()}
        self.dropped = [record for key, record in self._records.items() if key not in declared]
        for key, record in self._records.items():
            if record.run and key in declared and record.node not in self._busy and record.node in self._reachable:
                self.runs.append(self._again(record, declared[key]))
        for job, ranks in self._waiting_jobs():
            self._before_job(job, ranks)
        for node in self._inventory.nodes:
            if node.health_checks and node.name in self._reachable and node.name not in self._taken:
                self._by_interval(node)

    def _again(self, record: CheckRecord, check: HealthCheck) -> CheckRun:
        """Return an open run as it was first sent, as far as that can be known."""
        run = CheckRun(id=record.run, node=record.node, check=check, rank=record.rank)
        if record.rank is None:
            node = self._inventory.node(record.node)
            assert node is not None
            return msgspec.structs.replace(run, env=self._own_environment(node, check))
        for job, ranks in self._waiting_jobs():
            if record.rank in map(rank_key, ranks):
                rank = next(r for r in ranks if rank_key(r) == record.rank)
                env = self._job_environment(job, self._with_check(ranks, check.name), rank, check)
                return msgspec.structs.replace(run, env=env)
        return msgspec.structs.replace(run, adopt=True)

    def _waiting_jobs(self) -> Iterator[tuple[JobRecord, list[RankRecord]]]:
        """Yield jobs whose ranks are not launched yet, with their ranks, longest waiting first."""
        if not self._required:
            return
        starting = {(job.id, job.attempt): job for job in self._active if job.state is JobState.STARTING}
        ours = sorted((r for r in self._ranks if (r.job_id, r.attempt) in starting and not r.gone), key=rank_key)
        found = [(starting[key], list(ranks)) for key, ranks in groupby(ours, key=lambda r: (r.job_id, r.attempt))]
        for job, ranks in sorted(found, key=lambda pair: (pair[0].submit_time, pair[0].id)):
            if awaits_checks(ranks, self._required) and not any(r.check_error for r in ranks):
                yield job, ranks

    def _with_check(self, ranks: Sequence[RankRecord], check: str) -> list[RankRecord]:
        return [rank for rank in ranks if check in self._required.get(rank.node, ())]

    def _before_job(self, job: JobRecord, ranks: list[RankRecord]) -> None:
        """Start the job's next check, on all of its nodes at once: its ranks may have to find each other."""
        names = dict.fromkeys(name for rank in ranks for name in self._required.get(rank.node, ()))
        for name in names:
            concerned = self._with_check(ranks, name)
            if all(name in rank.checks_passed for rank in concerned):
                continue
            nodes = {rank.node for rank in concerned}
            if nodes <= self._reachable and not nodes & self._taken:
                for rank in concerned:
                    check = self._check(rank.node, name)
                    self._start(check, rank.node, self._job_environment(job, concerned, rank, check), rank)
            self._taken |= nodes
            return

    def _check(self, node: str, name: str) -> HealthCheck:
        found = self._inventory.node(node)
        assert found is not None
        return next(check for check in found.health_checks if check.name == name)

    def _by_interval(self, node: Node) -> None:
        """Start the node's most overdue check, if any is due."""
        overdue = [(late, check) for check in node.health_checks if (late := self._overdue_s(node, check)) >= 0]
        if overdue:
            check = max(overdue, key=lambda pair: pair[0])[1]
            self._start(check, node.name, self._own_environment(node, check), None)

    def _overdue_s(self, node: Node, check: HealthCheck) -> float:
        record = self._records.get((node.name, check.name))
        every = check.every_s
        if every is None and record is not None and record.is_bad:
            every = RECHECK_S  # else it would hold the node for ever
        if every is None:
            return NEVER
        return float("inf") if record is None or record.began is None else self._now - record.began - every

    def _own_environment(self, node: Node, check: HealthCheck) -> dict[str, str]:
        """Return the variables of a run by its interval, with the whole GPUs that nothing of ours uses."""
        reading = self._nodes[node.name].reading
        cut = {gpu.index for gpu in reading.gpus if gpu.mig_mode} if reading is not None else set()
        free = [str(gpu) for gpu in node.indices() if gpu not in cut and (node.name, gpu) not in self._used]
        return _environment(check, [node.name], 0, free, free) | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_OWN_PORT)
        }  # fmt: skip

    def _job_environment(
        self, job: JobRecord, ranks: Sequence[RankRecord], rank: RankRecord, check: HealthCheck
    ) -> dict[str, str]:
        """Return the variables of a run before a job, on the nodes of these ranks; slices by UUID, as the job's own."""
        nodes = [one.node for one in ranks]
        first = self._inventory.node(nodes[0])
        assert first is not None
        node = self._nodes.get(rank.node)
        slices = usable_slices(node.reading if node else None) if any(map(is_slice, rank.gpus)) else {}
        labels = [gpu_label(number, slices[number].profile if number in slices else "") for number in rank.gpus]
        visible = [slices[n].uuid or "" if n in slices else str(n) for n in rank.gpus if n in slices or not is_slice(n)]
        return _environment(check, nodes, nodes.index(rank.node), labels, visible) | {
            "GPUSCHED_JOB_ID": job.id, "GPUSCHED_JOB_USER": job.user, "GPUSCHED_JOB_NAME": job.spec.name,
            "GPUSCHED_ATTEMPT": str(job.attempt), "MASTER_ADDR": fabric_address(first),
            "MASTER_PORT": str(job.master_port),
        }  # fmt: skip

    def next_s(self) -> float:
        """Return for how many seconds from now on nothing is due, if nothing happens; 0: something is in progress."""
        if self.runs or any(r.run for r in self._records.values()) or any(self._waiting_jobs()):
            return 0.0
        late = [self._overdue_s(node, check) for node in self._inventory.nodes for check in node.health_checks]
        return min([LOOK_S, *(-s for s in late if NEVER < s < 0)])

    def _start(self, check: HealthCheck, node: str, env: dict[str, str], rank: RankRecord | None) -> None:
        record = self._records.get((node, check.name)) or CheckRecord(node=node, check=check.name)
        run = CheckRun(
            id=f"{check.name}.{int(self._now * 1000):x}", node=node, check=check, env=env,
            rank=rank_key(rank) if rank is not None else None,
        )  # fmt: skip
        self._taken.add(node)
        self.runs.append(run)
        self.changed.append(msgspec.structs.replace(record, run=run.id, rank=run.rank, began=self._now))


class CheckSchedule:
    """Says which runs are due; reads nodes and jobs only in cycles in which one may be."""

    def __init__(self) -> None:
        self._inventory: Inventory | None = None
        self._has_before_job, self._looked_at, self._next_at = False, 0.0, 0.0

    def due(self, store: Store, inventory: Inventory, busy: frozenset[RankKey], now: float) -> list[Operation]:
        """Store the intent of the runs that are due; return the operations that start them or ask for them again."""
        if inventory is self._inventory and self._looked_at <= now < self._next_at:
            if not self._has_before_job or not store.jobs(states=[JobState.STARTING], limit=1):
                return []
        self._inventory, self._looked_at, self._next_at = inventory, now, now + LOOK_S
        self._has_before_job = bool(before_job_checks(inventory))
        if not inventory.declared_checks() and not store.check_records():
            return []
        due = _Due(store, inventory, busy, now)
        due.find()
        if due.changed or due.dropped:
            with store.transaction():
                store.put_check_records(due.changed)
                store.drop_check_records(due.dropped)
        self._next_at = now + due.next_s()
        return [Operation(verb="check", node=run.node, rank=_stand_in(run.node), check=run) for run in due.runs]


def operation_key(node: str) -> RankKey:
    """Return the key of a node's checks: one is in progress at a time."""
    return f"check.{node}", 0, 0


def _stand_in(node: str) -> RankRecord:
    job_id, attempt, rank = operation_key(node)
    return RankRecord(job_id=job_id, attempt=attempt, rank=rank, node=node, runtime="")


def _environment(
    check: HealthCheck, nodes: Sequence[str], node_rank: int, gpus: Sequence[str], visible: Sequence[str]
) -> dict[str, str]:
    return {
        "GPUSCHED_CHECK": check.name, "GPUSCHED_NODE": nodes[node_rank], "GPUSCHED_NODES": ",".join(nodes),
        "GPUSCHED_NNODES": str(len(nodes)), "GPUSCHED_NODE_RANK": str(node_rank), "GPUSCHED_GPUS": ",".join(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
