"""The cycle's decision: run the policies, check the plan, record what to start and why other jobs wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import msgspec

from gpusched.cluster.base import Operation
from gpusched.controller.deciding import Decider
from gpusched.controller.estimating import EstimateWriter
from gpusched.controller.healthchecks import awaits_checks, before_job_checks
from gpusched.controller.hot import begin_hot_resize
from gpusched.controller.launcher import Launcher, rank_record
from gpusched.controller.ledger import run_of
from gpusched.controller.promoting import LivePolicies
from gpusched.controller.resizing import begin_resize
from gpusched.model.arrays import event_log_id, split_task_ids
from gpusched.model.events import Event
from gpusched.model.indices import intersection
from gpusched.model.jobs import ACTIVE, Ending, JobRecord, JobState, Preemptions
from gpusched.model.plan import CancelJob, Plan, Preempt, Reason, ReasonCode, Resize, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.queue.damage import STORE_FAULTS
from gpusched.queue.lifecycle import set_aside, transition_to
from gpusched.queue.snapshots import partners_of, snapshot_of_store
from gpusched.queue.store import RankRecord, Store
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.slicenames import queue_of

T = TypeVar("T")
MESSAGE_REFRESH_S = 30.0  # messages contain durations; rewriting all of them in every cycle is not worth it
_log = logging.getLogger(__name__)


class CycleDecision(NamedTuple):
    """The outcome of a decision: launches, its snapshot and plan, and the nodes to observe before it can be used."""

    operations: list[Operation]
    snapshot: Snapshot
    plan: Plan
    unread: Set[str] = frozenset()


class PendingReasonWriter:
    """Records in the store why jobs are pending."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._messages_at: dict[str, float] = {}
        self._pruned_at = float("-inf")

    def forget(self, job_id: str) -> None:
        """Drop a job that is no longer pending."""
        self._messages_at.pop(job_id, None)

    def write(self, waiting: Iterable[JobRecord], reasons: Mapping[str, Reason], now: float) -> None:
        """Record changed reasons, inside the caller's transaction; array tasks in one row share the first one's."""
        changed = []
        by_array = _by_array(reasons)
        if now - self._pruned_at >= MESSAGE_REFRESH_S:  # older ones say nothing, also of jobs that wait no more
            self._messages_at = {key: at for key, at in self._messages_at.items() if now - at < MESSAGE_REFRESH_S}
            self._pruned_at = now
        for job in waiting:
            reason = _row_reason(job, by_array.get(job.array_id or "", ())) if job.tasks else reasons.get(job.id)
            if reason is None or (job.reason == reason.code and job.message == reason.message):
                continue
            if reason.code is ReasonCode.BEGIN_TIME and job.retries and job.message and job.reason in ("", reason.code):
                # Keep the message of the failed attempt, which says more than BeginTime.
                changed += [msgspec.structs.replace(job, reason=str(reason.code))] if not job.reason else []
                continue
            if job.reason == reason.code and now - self._messages_at.get(event_log_id(job), 0.0) < MESSAGE_REFRESH_S:
                continue
            self._messages_at[event_log_id(job)] = now
            changed.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
        self._store.put_jobs(changed)


def _by_array(reasons: Mapping[str, Reason]) -> dict[str, list[tuple[int, Reason]]]:
    """Return array -> (index, reason) of its tasks that have a reason, ascending."""
    found: dict[str, list[tuple[int, Reason]]] = {}
    for job_id, reason in reasons.items():
        array_id, spans = split_task_ids(job_id)
        if spans:
            found.setdefault(array_id, []).append((spans[0][0], reason))
    return {array_id: sorted(pairs, key=lambda pair: pair[0]) for array_id, pairs in found.items()}


def _row_reason(row: JobRecord, reasons: Sequence[tuple[int, Reason]]) -> Reason | None:
    """Return the reason of the first of the row's tasks that the decision considered."""
    return next((reason for index, reason in reasons if intersection(row.tasks, ((index, index),))), None)


class Planner:
    """Makes the decisions of one controller; ``withheld``: reasons of pending jobs that no policy is asked about."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        decider: Decider,
        estimator: EstimateWriter,
        withheld: Callable[[Inventory, Iterable[JobRecord]], Mapping[str, Reason]] = lambda *_: {},
    ) -> None:
        self._store, self._launcher, self._withheld = store, launcher, withheld
        self._decider, self._estimator = decider, estimator
        self._reported_error = ""
        self._reasons = PendingReasonWriter(store)

    def plan(self, inventory: Inventory, live: LivePolicies, unread: Set[str], now: float) -> CycleDecision | None:
        """Decide, or set aside the jobs that make every decision fail; None: nothing was decided."""
        pending, active = self._store.pending_rows(), self._store.active()
        if withheld := self._withheld(inventory, pending):
            with self._store.transaction():
                self._reasons.write(pending, withheld, now)
            pending = [job for job in pending if job.id not in withheld]
        if not pending and not any(job.spec.elastic for job in active):
            return None
        try:
            decided = self._decide_on(inventory, pending, active, live, unread, now)
        except STORE_FAULTS:
            raise
        except Exception as error:
            self._set_aside([*active, *pending], inventory, live, error, now)
            return None
        self._reported_error = ""
        return decided

    def _set_aside(
        self,
        jobs: Sequence[JobRecord],
        inventory: Inventory,
        live: LivePolicies,
        error: Exception,
        now: float,
    ) -> None:
        """Mark as FAILED each job that by itself makes a decision raise, after one raised."""
        errors: dict[str, Exception] = {}

        def fails(some: Sequence[JobRecord]) -> bool:
            active, pending = ([j for j in some if (j.state in ACTIVE) is holds] for holds in (True, False))
            try:
                snapshot = snapshot_of_store(self._store, inventory, live.policies, now, active=active, pending=pending)
                # No weights needed: fallbacks examine pending jobs, and every policy examines running ones.
                check(decide(snapshot), snapshot)
            except STORE_FAULTS:
                raise
            except Exception as error:
                errors[some[0].id] = error
                return True
            return False

        failed = [set_aside(job, errors[job.id], now) for job in failing_alone(jobs, fails)]
        with self._store.transaction():
            self._store.put_jobs(job for job, _ in failed)
            self._store.append(event for _, event in failed)
            for job, _ in failed:
                self._store.close_run(job.id, job.attempt, now, job.state)
        description = f"{type(error).__name__}: {error}"[:500]
        if not failed and description != self._reported_error:
            _log.error("no decision was made, and no single job is the cause: %s", description, exc_info=error)
        self._reported_error = "" if failed else description

    def _decide_on(
        self,
        inventory: Inventory,
        pending: list[JobRecord],
        active: list[JobRecord],
        live: LivePolicies,
        unread: Set[str],
        now: float,
    ) -> CycleDecision:
        """Run the policies, check their plan and record the intent; record nothing if it needs an unobserved node."""
        waiting = {job.id: job for job in pending}
        shadows = [shadow.spec for shadow in self._store.shadows().values() if shadow.until is None]
        self._estimator.run([*live.policies.values(), *shadows], now)
        ports = {job.master_port for job in active}
        snapshot = snapshot_of_store(
            self._store, inventory, live.policies, now, active=active, pending=pending, seed=int(now * 1000)
        )
        proposed, deciders = self._decider.decide(snapshot, live.digests)
        plan, rejections = check(proposed, snapshot)
        starts = [action for action in plan.actions if isinstance(action, Start)]
        # Nothing is recorded yet, so the caller can observe these nodes and decide again.
        if needed := unread & {part.node for start in starts for part in start.allocation.parts}:
            return CycleDecision([], snapshot, plan, needed)
        launches: list[tuple[JobRecord, list[RankRecord]]] = []
        arrays: set[str] = set()  # arrays of which a task got a row of its own
        with self._store.transaction():
            for rejection in rejections:
                data = {"action": repr(rejection.action)[:500], "why": rejection.why}
                self._store.append([Event(time=now, kind="plan_rejected", data=data)])
            for action in plan.actions:
                if isinstance(action, Start):
                    job = waiting.pop(action.job_id) if action.job_id in waiting else self._task(action.job_id, arrays)
                    job = _at_size(job, action)
                    policy = deciders.get(queue_of(job.spec)) or deciders[job.spec.partition]
                    launches.append(self._launcher.record_intent(inventory, job, action.allocation, policy, ports, now))
                    self._reasons.forget(job.id)
                elif isinstance(action, Resize):
                    launches += self._resize(action, deciders, inventory, now)
                elif isinstance(action, (Preempt, CancelJob)):
                    if action.job_id in waiting:
                        waiting.pop(action.job_id)
                    elif isinstance(action, CancelJob):
                        self._task(action.job_id, arrays)
                    self._end_by_policy(action, deciders, inventory.settings.grace_s, now)
            self._record_sharing(active, [job for job, _ in launches], now)  # hot jobs share none
            # A task that started or was cancelled has left its array's row, so that row is read again.
            left = [job for job in waiting.values() if job.array_id not in arrays]
            left += [job for name in sorted(arrays) for job in self._store.waiting_of_array(name)]
            self._reasons.write(left, plan.reasons, now)
        # After the commit: nothing is sent before its intent is in the store.
        # A job whose nodes must be checked first is launched by a later cycle (`reconcile_job`).
        checks = before_job_checks(inventory)
        operations = [
            o
            for job, ranks in launches
            if not awaits_checks(ranks, checks)
            for o in self._launcher.launch_operations(inventory, job, ranks)
        ]
        return CycleDecision(operations, snapshot, plan)

    def _task(self, job_id: str, arrays: set[str]) -> JobRecord:
        """Return an array task as a job of its own, and add its array to ``arrays``."""
        job = self._store.job(job_id)
        assert job is not None
        if job.array_id is not None:
            arrays.add(job.array_id)
        return job

    def _record_sharing(self, active: Sequence[JobRecord], started: Sequence[JobRecord], now: float) -> None:
        """Record in the events of both jobs that they share GPUs from now on."""
        if not any(job.spec.share for job in started):
            return
        partners = partners_of([*active, *started])
        pairs = {job.id: partners[job.id] for job in started if job.id in partners}
        pairs |= {partner: job for job, partner in pairs.items()}
        self._store.append(Event(time=now, kind="sharing", job_id=a, data={"with": b}) for a, b in pairs.items())

    def _end_by_policy(
        self, action: Preempt | CancelJob, deciders: Mapping[str, PolicySpec], grace_s: float, now: float
    ) -> None:
        job = self._store.job(action.job_id)
        assert job is not None
        if isinstance(action, CancelJob):
            changed, event = transition_to(
                job, JobState.CANCELLED, now, event="ended",
                reason=action.reason.code, message=action.reason.message, end_time=now,
            )  # fmt: skip
        else:
            policy = deciders[job.spec.partition]
            earlier = job.preemptions or Preemptions()
            preemptions = earlier.once_more(now, policy.name, policy.version, action.for_job)
            message = f"preempted by {policy.name}" + (f" for job {action.for_job}" if action.for_job else "")
            why: dict[str, Any] = {"reason": "Preempted", "message": message}
            ending = Ending(outcome=JobState.PENDING, kill_at=now + grace_s, preemptions=preemptions, **why)
            data = {"policy": policy.name, "version": policy.version, "for": action.for_job, "count": preemptions.count}
            changed, event = transition_to(
                job, JobState.COMPLETING, now, event="preempted", data=data, ending=ending, **why
            )
        self._store.put_jobs([changed])
        self._store.append([event])

    def _resize(
        self, action: Resize, deciders: Mapping[str, PolicySpec], inventory: Inventory, now: float
    ) -> list[tuple[JobRecord, list[RankRecord]]]:
        """Record the intent of a resize; return the ranks to launch that join a hot job."""
        job = self._store.job(action.job_id)
        assert job is not None
        policy, grace_s = deciders[job.spec.partition], inventory.settings.grace_s
        if not job.spec.is_hot:
            changed, event = begin_resize(job, action, policy, grace_s, now)
            self._store.put_jobs([changed])
            self._store.append([event])
            return []
        own = [rank for rank in self._store.ranks(job_id=job.id) if rank.attempt == job.attempt]
        changed, joins, leaves, event = begin_hot_resize(job, action, own, policy, grace_s, now)
        ranks = [
            msgspec.structs.replace(rank_record(inventory, changed, part, now), hot="joins") for part in joins
        ]  # fmt: skip
        self._store.put_jobs([changed])
        self._store.put_ranks([*ranks, *leaves])
        self._store.append([event])
        if joins:
            self._store.close_run(job.id, job.attempt, now, JobState.PENDING)
            self._store.open_run(run_of(changed, inventory, now))
        return [(changed, ranks)] if joins else []


def _at_size(job: JobRecord, start: Start) -> JobRecord:
    """Return a job of variable size with the request of the size at which it starts."""
    if job.spec.elastic is None and job.spec.max_nodes is None:
        return job
    resizes = job.resizes and msgspec.structs.replace(job.resizes, resume_at=None)
    return msgspec.structs.replace(job, spec=job.spec.as_allocated(start.allocation), resizes=resizes)


def failing_alone(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return the items for which ``fails`` is true alone, in order, by bisection: about log2(items) calls for each."""
    if not items or not fails(items):
        return []
    if len(items) == 1:
        return list(items)
    half = len(items) // 2
    return failing_alone(items[:half], fails) + failing_alone(items[half:], fails)
