"""Turns a plan into requests to Slurm, by each partition's mode: nothing, an order, or starts in the lease.

The intent is recorded in Slurm alone: the reservation, and the jobs in it. A controller killed between any two steps
reads it again, so nothing starts twice and nothing is lost. Without a controller the lease ends by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from gpusched.controller.slurm.admitting import (
    PIN_TIMEOUT_S,
    SlurmQueue,
    lease_of,
    leased_nodes,
    reservation_conflict,
    why_slurm_places,
)
from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.controller.slurm.mirror import NOT_YET, is_pinned
from gpusched.controller.slurm.nodes import takes_jobs
from gpusched.controller.slurm.ordering import Ordering
from gpusched.controller.slurm.ownership import LeaseOwnership, other_owner_message
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.model.events import Event
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import JobRecord, Preemptions
from gpusched.model.plan import Plan, Preempt, Reason, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.slurm import LEASE, LEASE_TROUBLE, SlurmJob, SlurmMode, blocking_reason, is_held_in_reservation
from gpusched.model.units import format_duration
from gpusched.queue.store import Store
from gpusched.slurm import lease
from gpusched.slurm.accounts import has_account
from gpusched.slurm.commands import NoAnswer, Slurm

_RENEW = 1 / 6  # renew after this part of the lease; each renewal adds a line to slurmctld's log, some a database row
_MAX_TRIES = 2  # after so many failed starts on chosen nodes, Slurm chooses the nodes
_REMEMBER_S = 600.0  # how long a failed start, or a requeue by us, is remembered
_BACKOFF_S = 15.0  # back-off of a job that Slurm held in the lease: 4 times this after two holds, doubled with each one
_GONE = ("no longer pending", "already finished", "Invalid job id", "already completing")
_log = logging.getLogger(__name__)


class ScontrolCall(NamedTuple):
    """One line for scontrol, and its purpose; ``job``: the store's id, "": none."""

    line: str
    purpose: str
    job: str = ""
    nodes: tuple[str, ...] = ()


class Tries(NamedTuple):
    """A job's failed starts: count, time and reason of the last, and how often Slurm held the job."""

    times: int
    at: float
    why: str
    holds: int = 0

    @property
    def backoff_until(self) -> float:
        """When the job may be requested again (Unix seconds)."""
        return self.at + min(_REMEMBER_S / 2, _BACKOFF_S * 2**self.holds) if self.holds > 1 else self.at


class LeaseApplier:
    """Carries out decisions in Slurm, by each partition's mode."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._ordering, self._ownership = Ordering(store, slurm), LeaseOwnership(store)
        self._tries: dict[str, Tries] = {}
        self._undecided: set[str] = set()  # jobs admitted without a policy's decision
        self._first_seen: dict[str, float] = {}  # starts without a time in the store: when first seen

    def apply(
        self,
        inventory: Inventory,
        modes: Mapping[str, SlurmMode],
        reading: SlurmReading,
        decision: SlurmDecision | None,
        now: float,
    ) -> None:
        """Carry out a decision; called in every cycle in which Slurm responded, after mirroring. None: no pending jobs.

        Raises:
            NoAnswer: Slurm no longer responds.
        """
        deciding = {name for name, mode in modes.items() if mode is SlurmMode.DECIDE}
        leased = leased_nodes(inventory, deciding, reading, now, self._duration_s(inventory))
        queue = SlurmQueue(reading, decision, self._store)
        current = lease_of(reading)
        if current is not None and self._ownership.is_other_controllers(current, bool(leased), now):
            self._note_trouble(other_owner_message(current, now) if deciding else "")
            self._refuse_starts(decision, deciding)
            self._ordering.order(modes, queue.waiting, decision, lease.MAX_UPDATES, now)
            return
        # Withdrawals first: they use the budget of updates before anything new, and a withdrawn job starts at the
        # earliest in the next cycle.
        self._tries = {job: tries for job, tries in self._tries.items() if now < tries.at + _REMEMBER_S}
        withdrawn = self._withdrawals(queue, deciding, leased, now)
        self._send(withdrawn, now, decision)
        room = lease.MAX_UPDATES - len(withdrawn)
        calls: list[ScontrolCall] = []
        # Without a decision for pending jobs the lease is not renewed: it ends, and Slurm decides.
        undecided = decision is None and any(job.spec.partition in deciding for job in self._store.pending())
        if not undecided and self._keep_lease(leased, reading, self._duration_s(inventory)) and decision is not None:
            withdrawn_now = {call.job for call in withdrawn}
            calls = [*self._requeues(queue, decision.plan, deciding), *self._skipped_delays(queue, now)]
            starts = self._starts(queue, decision, deciding, leased, withdrawn_now, now)
            calls += starts + self._admissions(queue, decision, deciding, leased, {call.job for call in starts}, now)
        else:
            self._refuse_starts(decision, deciding)
        late = {call.job: _LATER for call in calls[room:] if call.purpose in ("start", "admit")}
        self._explain(late)
        self._send(calls[:room], now, decision)
        self._ordering.order(modes, queue.waiting, decision, max(0, room - len(calls)), now)

    def _refuse_starts(self, decision: SlurmDecision | None, deciding: Set[str]) -> None:
        if deciding and decision is not None:
            why = self._store.meta(LEASE_TROUBLE) or "the lease was not renewed"
            self._explain({a.job_id: _rejected(why) for a in _starts_in(decision, deciding)})

    def _duration_s(self, inventory: Inventory) -> int:
        return max(lease.LEASE_S, int(3 * inventory.settings.tick_s))

    # -- the lease -----------------------------------------------------------------------------------------------

    def _keep_lease(self, leased: Sequence[str], reading: SlurmReading, duration_s: int) -> bool:
        """Create, renew or end the lease; return whether it exists now."""
        current = lease_of(reading)
        if not leased:
            if current is not None and current.end_time > reading.time + 2:
                self._slurm.update([lease.end()])
            self._note_trouble("")
            return False
        lasts_long = current is not None and current.end_time > reading.time + (1 - _RENEW) * duration_s
        has_same_nodes = current is not None and set(current.nodes) == set(leased)
        if lasts_long and has_same_nodes:
            return True

        duration_s = self._ownership.claim(duration_s)

        def renewed() -> str:
            return lease.renew(() if has_same_nodes else leased, duration_s)

        def created() -> str:
            enforced = lease.enforces_associations(self._slurm.config())
            return lease.create(leased, duration_s, enforced, enforced and self._has_own_account())

        # An ended lease lingers for seconds: it can be renewed, but no other one created. If there was none and
        # creating it fails, another controller has created it meanwhile.
        why = ""
        for line in (renewed, created) if current is not None else (created,):
            why = self._slurm.update([line()]).get(0, "")
            if not why:
                self._ownership.note_requested(duration_s)
                break
        self._note_trouble(f"Slurm rejects the lease and decides itself: {why}" if why else "")
        return not why

    def _has_own_account(self) -> bool:
        try:
            return has_account(self._slurm, LEASE)
        except NoAnswer:
            return False

    def _note_trouble(self, why: str) -> None:
        if why != (self._store.meta(LEASE_TROUBLE) or ""):
            self._store.set_meta(LEASE_TROUBLE, why)
            _log.log(logging.ERROR if why else logging.INFO, "%s", why or "the lease works again")

    # -- what is withdrawn ---------------------------------------------------------------------------------------

    def _withdrawals(
        self, queue: SlurmQueue, deciding: Set[str], leased: Sequence[str], now: float
    ) -> list[ScontrolCall]:
        """Return withdrawals of starts that did not happen, or that are no longer wanted."""
        calls = []
        self._first_seen = {job: since for job, since in self._first_seen.items() if job in queue.waiting}
        self._undecided &= queue.waiting.keys()
        startable = {node for node in leased if takes_jobs(queue.reading.nodes.get(node))}
        for job in queue.waiting.values():
            is_held = is_held_in_reservation(job)
            if job.reservation != LEASE and (job.reservation or not (job.req_nodes or is_held)):
                continue
            stored = queue.stored(job)
            facts = stored.slurm if stored is not None else None
            user_nodes = facts.nodelist if facts is not None else job.req_nodes
            if is_held and (job.reservation == LEASE or (facts is not None and (facts.leased or facts.pinned))):
                calls += [ScontrolCall(line, "withdraw", queue.store_id(job)) for line in lease.undo(job, user_nodes)]
                self._count_try(job.id, now, job.reason, held=True)
                continue
            if job.reservation != LEASE:
                # Slurm ended the lease: it cleared the job's reservation, but not the nodes that we set.
                if facts is not None and facts.pinned:
                    calls.append(ScontrolCall(lease.withdraw(job.id, user_nodes), "withdraw", queue.store_id(job)))
                continue
            decides = stored is not None and stored.spec.partition in deciding
            if is_pinned(job):
                since = facts.pinned_at if facts is not None else None
                since = since if since is not None else self._first_seen.setdefault(job.id, now)
                late = decides and now - since >= PIN_TIMEOUT_S
                keep = not late and set(job.req_nodes) <= startable and not reservation_conflict(queue, job, now)
                if late:
                    self._count_try(job.id, now, job.reason)
            elif len(job.req_nodes) >= max(1, job.nodes) and decides:
                keep = False  # it cannot start now: held since, or requeued
            else:
                keep = bool(leased) and (not decides or job.id in self._undecided or bool(self._why_slurm_places(job)))
                keep = keep and not reservation_conflict(queue, job, now)
            if not keep:
                calls.append(ScontrolCall(lease.withdraw(job.id, user_nodes), "withdraw", queue.store_id(job)))
        return calls[: lease.MAX_UPDATES]

    def _count_try(self, job: str, now: float, why: str, held: bool = False) -> None:
        before = self._tries.get(job, Tries(0, now, ""))
        self._tries[job] = Tries(before.times + 1, now, why, before.holds + held)

    def _backoff(self, job: SlurmJob, now: float) -> str:
        """Return why a job is in back-off, or ""."""
        tries = self._tries.get(job.id)
        if tries is None or now >= tries.backoff_until:
            return ""
        rest = format_duration(tries.backoff_until - now)
        return f"Slurm held it in the lease ({tries.why}); it is asked for again in {rest}"

    def _why_slurm_places(self, job: SlurmJob) -> str:
        """Return why Slurm is to choose the job's nodes, or ""."""
        tries = self._tries.get(job.id)
        if tries is not None and tries.times >= _MAX_TRIES:
            return f"it did not start on the chosen nodes ({tries.why})"
        return why_slurm_places(job)

    # -- what is asked for ---------------------------------------------------------------------------------------

    def _requeues(self, queue: SlurmQueue, plan: Plan, deciding: Set[str]) -> list[ScontrolCall]:
        """Return requeues of preempted jobs that allow it, by their partition and by Slurm's requeue flag."""
        calls = []
        for action in plan.actions:
            if isinstance(action, Preempt):
                job, stored = queue.jobs.get(slurm_id(action.job_id)), self._store.job(action.job_id)
                if job is None or stored is None or stored.spec.partition not in deciding:
                    continue
                if job.requeue and job.state == "RUNNING":
                    calls.append(ScontrolCall(lease.requeue(job.id), "requeue", action.job_id))
        return calls

    def _skipped_delays(self, queue: SlurmQueue, now: float) -> list[ScontrolCall]:
        """Return commands that skip the two-minute delay that Slurm gives jobs requeued by us."""
        calls = []
        for view in queue.considered.values():
            job = queue.waiting.get(slurm_id(view.id))
            if job is None or job.reason != "BeginTime" or view.preemptions is None or not view.preemptions.times:
                continue
            since, begin = view.preemptions.times[-1], job.eligible_time or now
            if now - since < _REMEMBER_S and now < begin < since + _REMEMBER_S:
                calls.append(ScontrolCall(lease.begin_now(job.id), "begin", view.id))
        return calls

    def _starts(
        self,
        queue: SlurmQueue,
        decision: SlurmDecision,
        deciding: Set[str],
        leased: Sequence[str],
        withdrawn: Set[str],
        now: float,
    ) -> list[ScontrolCall]:
        """Return the plan's starts in order; where Slurm chooses the nodes, the job is admitted to the lease."""
        calls: list[ScontrolCall] = []
        reasons: dict[str, Reason] = {}
        leased_set = set(leased)
        for action in _starts_in(decision, deciding):
            job = queue.waiting.get(slurm_id(action.job_id))
            if job is None or action.job_id in withdrawn:
                continue
            nodes = tuple(part.node for part in action.allocation.parts)
            slurm_places = self._why_slurm_places(job)
            if job.reservation not in ("", LEASE):
                reasons[action.job_id] = _rejected(f"it uses reservation {job.reservation}: Slurm starts it there")
            elif why := self._backoff(job, now) or reservation_conflict(queue, job, now, () if slurm_places else nodes):
                reasons[action.job_id] = _unavailable(why)
            elif slurm_places:
                reasons[action.job_id] = _admitted(slurm_places)
                calls += self._admit(queue, job)
            elif not leased_set.issuperset(nodes):
                outside = ", ".join(node for node in nodes if node not in leased_set)
                reasons[action.job_id] = _rejected(f"{outside} is not in the lease: it is in another reservation")
            else:
                calls.append(ScontrolCall(lease.start(job.id, nodes), "start", action.job_id, nodes))
        self._explain(reasons)
        # The plan has a start for each component of a heterogeneous job, and each admits all of them.
        return list(dict.fromkeys(calls))

    def _admissions(
        self,
        queue: SlurmQueue,
        decision: SlurmDecision,
        deciding: Set[str],
        leased: Sequence[str],
        starting: Set[str],
        now: float,
    ) -> list[ScontrolCall]:
        """Return admissions of jobs that the lease would block forever, since no policy decides on them."""
        # Partitions that share nodes with the lease, whether or not gpusched decides for them.
        touched = {name for name, p in queue.reading.partitions.items() if not set(leased).isdisjoint(p.nodes)}
        reasons: dict[str, Reason] = {}
        calls: list[ScontrolCall] = []
        for job in queue.waiting.values():
            if job.reservation or job.priority == 0 or blocking_reason(job.reason) or job.reason.startswith(NOT_YET):
                continue
            name = queue.store_id(job)
            decides = deciding & set(job.partitions)
            known = decision.plan.reasons.get(name)
            if name in starting or touched.isdisjoint(job.partitions):
                continue
            if decides and queue.considered.get(name) is None:
                slurm_places = "no policy could consider it"
            elif decides and known is not None and known.code is ReasonCode.BAD_CONSTRAINTS:
                slurm_places = f"gpusched finds no nodes for it ({known.message})"
            elif not decides:
                slurm_places = "its partition shares these nodes, but gpusched does not decide there"
            else:
                continue
            if why := self._backoff(job, now) or reservation_conflict(queue, job, now):
                reasons[name] = _unavailable(why)
                continue
            reasons[name] = _admitted(slurm_places)
            calls += self._admit(queue, job)
            self._undecided.add(job.id)
        self._explain(reasons)
        return list(dict.fromkeys(calls))

    def _admit(self, queue: SlurmQueue, job: SlurmJob) -> list[ScontrolCall]:
        """Return the admission of a job, or of all its components if it is heterogeneous."""
        parts = (j for j in queue.components(job) if j.reservation != LEASE)
        return [ScontrolCall(lease.admit(j.id), "admit", queue.store_id(j)) for j in parts]

    # -- sending, and recording the result -----------------------------------------------------------------------

    def _send(self, calls: Sequence[ScontrolCall], now: float, decision: SlurmDecision | None) -> None:
        before = self._save(calls, now, decision)
        errors = self._slurm.update([call.line for call in calls])
        changed: list[JobRecord] = []
        events: list[Event] = []
        for at, call in enumerate(calls):
            error = errors.get(at, "")
            gone = any(text in error for text in _GONE)
            if call.job in before and call.purpose == "requeue" and error:
                changed.append(before[call.job])
            if call.purpose not in ("start", "requeue") or gone:
                continue
            job = self._store.job(call.job)
            policy = _policy_of(job, decision)
            if job is None or decision is None or policy is None:
                continue
            # A rejected start counts as a try; a rejected requeue was undone above, so its count is not recorded.
            if error and call.purpose == "start":
                self._count_try(slurm_id(job.id), now, error)
                reason = _rejected(f"Slurm rejects a start on {', '.join(call.nodes)}: {error}")
                changed.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
            elif error:
                events.append(Event(time=now, kind="plan_rejected", data={"action": call.line, "why": error}))
            elif call.purpose == "requeue" and (stops := job.preemptions) is not None:
                data = {"policy": policy.name, "version": policy.version, "for": stops.for_job, "count": stops.count}
                events.append(Event(time=now, kind="preempted", job_id=job.id, user=job.user, data=data))
        self._write(changed, events)

    def _save(self, calls: Sequence[ScontrolCall], now: float, decision: SlurmDecision | None) -> dict[str, JobRecord]:
        """Record requests before they are sent; return the jobs to be stopped, as they were.

        Jobs placed in the lease are recorded so that it can be undone; stops, so that they are counted and not
        repeated.
        """
        changed: list[JobRecord] = []
        before: dict[str, JobRecord] = {}
        actions = decision.plan.actions if decision is not None else ()
        preempted_for = {a.job_id: a.for_job for a in actions if isinstance(a, Preempt)}
        for call in calls:
            job = self._store.job(call.job) if call.purpose in ("start", "admit", "requeue") else None
            policy = _policy_of(job, decision)
            if job is None:
                continue
            if call.purpose == "requeue" and policy is not None:
                before[job.id] = job
                stops = job.preemptions or Preemptions()
                stops = stops.once_more(now, policy.name, policy.version, preempted_for[job.id])
                changed.append(msgspec.structs.replace(job, preemptions=stops))
            elif call.purpose == "admit" and job.slurm is not None:
                facts = msgspec.structs.replace(job.slurm, leased=True)
                changed.append(msgspec.structs.replace(job, slurm=facts))
            elif call.purpose == "start" and job.slurm is not None and policy is not None:
                facts = msgspec.structs.replace(job.slurm, leased=True, pinned=call.nodes, pinned_at=now)
                policy_fields = {"policy": policy.name, "policy_version": policy.version}
                changed.append(msgspec.structs.replace(job, **policy_fields, slurm=facts))
        self._write(changed, [])
        return before

    def _write(self, changed: list[JobRecord], events: list[Event]) -> None:
        if changed or events:
            with self._store.transaction():
                self._store.put_jobs(changed)
                self._store.append(events)

    def _explain(self, reasons: Mapping[str, Reason]) -> None:
        """Record why jobs are pending that the policy would start."""
        found = []
        for name, reason in reasons.items():
            job = self._store.job(name) if name else None
            if job is not None and (job.reason, job.message) != (reason.code, reason.message):
                found.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
        if found:
            with self._store.transaction():
                self._store.put_jobs(found)


def _starts_in(decision: SlurmDecision, deciding: Set[str]) -> list[Start]:
    """Return the plan's starts in these partitions, in order."""
    pending = {view.id for view in decision.snapshot.pending if view.spec.partition in deciding}
    return [action for action in decision.plan.actions if isinstance(action, Start) and action.job_id in pending]


def _policy_of(job: JobRecord | None, decision: SlurmDecision | None) -> PolicySpec | None:
    return decision.deciders.get(job.spec.partition) if job is not None and decision is not None else None


def _rejected(why: str) -> Reason:
    return Reason(code=ReasonCode.REJECTED, message=why)


def _unavailable(why: str) -> Reason:
    return Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=why)


def _admitted(why: str) -> Reason:
    return Reason(code=ReasonCode.RESOURCES, message=f"Slurm starts it as soon as it fits: {why}")


_LATER = Reason(
    code=ReasonCode.PRIORITY, message=f"at most {lease.MAX_UPDATES} requests per cycle go to Slurm; it is next"
)
