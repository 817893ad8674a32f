"""From a plan to what is asked of Slurm, by each partition's mode: nothing, an order, or the lease and starts in it.

What is intended stands in Slurm alone: the reservation, and the jobs that are in it. A controller that is killed
between any two steps reads that again, so nothing starts twice and nothing is lost; one that never comes back leaves a
lease that ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from gpusched.controller.slurm.admitting import PIN_S, SlurmQueue, lease_of, leased_nodes, shut, why_left
from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.controller.slurm.mirror import NOT_YET, is_pinned
from gpusched.controller.slurm.nodes import takes_jobs
from gpusched.controller.slurm.ordering import Ordering
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.controller.slurm.tenancy import Tenancy, trouble_of
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

_RENEW = 1 / 6  # of the lease has gone by; each renewal is a line in slurmctld's log, some a row in the database
_MOST_TRIES = 2  # a job that did not start on decided nodes so often starts where Slurm wants
_REMEMBER_S = 600.0  # of a failed start, and of a requeue of ours
_REST_S = 15.0  # a job that Slurm held in the lease twice rests four times as long, and twice that each further time
_GONE = ("no longer pending", "already finished", "Invalid job id", "already completing")


class ScontrolCall(NamedTuple):
    """One line for scontrol, and what it is for; ``job``: the store's id, "": it has none."""

    line: str
    what: str
    job: str = ""
    nodes: tuple[str, ...] = ()


class Tries(NamedTuple):
    """How often a job did not start where it was to, when last, and why; how often Slurm held it for that."""

    times: int
    at: float
    why: str
    holds: int = 0

    @property
    def rests_until(self) -> float:
        """Until when it is not asked for again (Unix seconds)."""
        return self.at + min(_REMEMBER_S / 2, _REST_S * 2**self.holds) if self.holds > 1 else self.at


class LeaseApplier:
    """Makes Slurm do what was decided (`cycle.Applier`)."""

    def __init__(self, store: Store, slurm: Slurm, say: Callable[[str], None] = lambda text: None) -> None:
        self._store, self._slurm, self._say = store, slurm, say
        self._ordering, self._tenancy = Ordering(store, slurm, say), Tenancy(store)
        self._tries: dict[str, Tries] = {}
        self._let_in: set[str] = set()  # jobs on which no policy decides
        self._seen: dict[str, float] = {}  # a start whose begin the store does not know, since when

    def apply(
        self,
        inventory: Inventory,
        modes: Mapping[str, SlurmMode],
        told: SlurmReading,
        decided: SlurmDecision | None,
        now: float,
    ) -> None:
        """What was decided, asked of Slurm; see `cycle.Applier`."""
        deciding = {name for name, mode in modes.items() if mode is SlurmMode.DECIDE}
        leased = leased_nodes(inventory, deciding, told, now, self._lasts_s(inventory))
        queue = SlurmQueue(told, decided, self._store)
        known = lease_of(told)
        if known is not None and self._tenancy.is_anothers(known, bool(leased), now):
            self._note_trouble(trouble_of(known, now) if deciding else "")
            self._refuse_starts(decided, deciding)
            self._ordering.order(modes, queue.waiting, decided, lease.MAX_UPDATES, now)
            return
        self._tries = {job: tries for job, tries in self._tries.items() if now < tries.at + _REMEMBER_S}
        withdrawn = self._withdrawals(queue, deciding, leased, now)
        self._send(withdrawn, now, decided)
        room = lease.MAX_UPDATES - len(withdrawn)
        asks: list[ScontrolCall] = []
        undecided = decided is None and any(job.spec.partition in deciding for job in self._store.pending())
        if not undecided and self._hold(leased, told, self._lasts_s(inventory)) and decided is not None:
            withdrawn_now = {ask.job for ask in withdrawn}
            asks = [*self._stops(queue, decided.plan, deciding), *self._begins(queue, now)]
            starts = self._starts(queue, decided, deciding, leased, withdrawn_now, now)
            asks += starts + self._admissions(queue, decided, deciding, leased, {ask.job for ask in starts}, now)
        else:
            self._refuse_starts(decided, deciding)
        late = {ask.job: _LATER for ask in asks[room:] if ask.what in ("start", "admit")}
        self._explain(late)
        self._send(asks[:room], now, decided)
        self._ordering.order(modes, queue.waiting, decided, max(0, room - len(asks)), now)

    def _refuse_starts(self, decided: SlurmDecision | None, deciding: Set[str]) -> None:
        if deciding and decided is not None:
            why = self._store.meta(LEASE_TROUBLE) or "the lease was not renewed"
            self._explain({a.job_id: _refused(why) for a in _starts_of(decided, deciding)})

    def _lasts_s(self, inventory: Inventory) -> int:
        return max(lease.LEASE_S, int(3 * inventory.settings.tick_s))

    # -- the lease -----------------------------------------------------------------------------------------------

    def _hold(self, leased: Sequence[str], told: SlurmReading, lasts_s: int) -> bool:
        """Create, renew or end the lease; whether there is one now."""
        known = lease_of(told)
        if not leased:
            if known is not None and known.end_time > told.time + 2:
                self._slurm.update([lease.end()])
            self._note_trouble("")
            return False
        enough = known is not None and known.end_time > told.time + (1 - _RENEW) * lasts_s
        same = known is not None and set(known.nodes) == set(leased)
        if enough and same:
            return True

        lasts_s = self._tenancy.lasts_s(lasts_s)

        def renewed() -> str:
            return lease.renew(() if same else leased, lasts_s)

        def created() -> str:
            enforced = lease.enforces_associations(self._slurm.config())
            return lease.create(leased, lasts_s, enforced, enforced and self._has_own_account())

        # One that has ended lingers for seconds: it can be renewed, and no other can be created beside it. One that
        # was not there and cannot be created is another controller's.
        why = ""
        for line in (renewed, created) if known is not None else (created,):
            why = self._slurm.update([line()]).get(0, "")
            if not why:
                self._tenancy.note_asked(lasts_s)
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
            self._say(why or "the lease works again")

    # -- what is withdrawn ---------------------------------------------------------------------------------------

    def _withdrawals(
        self, queue: SlurmQueue, deciding: Set[str], leased: Sequence[str], now: float
    ) -> list[ScontrolCall]:
        """Starts that did not come about, and those that nobody wants any more."""
        asks = []
        self._seen = {job: since for job, since in self._seen.items() if job in queue.waiting}
        self._let_in &= queue.waiting.keys()
        startable = {node for node in leased if takes_jobs(queue.told.nodes.get(node))}
        for job in queue.waiting.values():
            is_held = is_held_in_reservation(job)
            if job.reservation != LEASE and (job.reservation or not (job.req_nodes or is_held)):
                continue
            stored = queue.stored(job)
            facts = stored.slurm if stored is not None else None
            own = facts.nodelist if facts is not None else job.req_nodes
            if is_held and (job.reservation == LEASE or (facts is not None and (facts.leased or facts.pinned))):
                asks += [ScontrolCall(line, "withdraw", queue.name(job)) for line in lease.undo(job, own)]
                self._tried(job.id, now, job.reason, held=True)
                continue
            if job.reservation != LEASE:
                # Slurm has ended the lease: it took the reservation off the job, and left it our nodes.
                if facts is not None and facts.pinned:
                    asks.append(ScontrolCall(lease.withdraw(job.id, own), "withdraw", queue.name(job)))
                continue
            theirs = stored is not None and stored.spec.partition in deciding
            if is_pinned(job):
                since = facts.pinned_at if facts is not None else None
                since = since if since is not None else self._seen.setdefault(job.id, now)
                late = theirs and now - since >= PIN_S
                keep = not late and set(job.req_nodes) <= startable and not shut(queue, job, now)
                if late:
                    self._tried(job.id, now, job.reason)
            elif len(job.req_nodes) >= max(1, job.nodes) and theirs:
                keep = False  # it does not start now: held since, or requeued
            else:
                keep = bool(leased) and (not theirs or job.id in self._let_in or bool(self._left(job)))
                keep = keep and not shut(queue, job, now)
            if not keep:
                asks.append(ScontrolCall(lease.withdraw(job.id, own), "withdraw", queue.name(job)))
        return asks[: lease.MAX_UPDATES]

    def _tried(self, job: str, now: float, why: str, held: bool = False) -> None:
        before = self._tries.get(job, Tries(0, now, ""))
        self._tries[job] = Tries(before.times + 1, now, why, before.holds + held)

    def _rests(self, job: SlurmJob, now: float) -> str:
        """Why a job is not asked for again yet, or ""."""
        tries = self._tries.get(job.id)
        if tries is None or now >= tries.rests_until:
            return ""
        rest = format_duration(tries.rests_until - now)
        return f"Slurm held it in the lease ({tries.why}); it is asked for again in {rest}"

    def _left(self, job: SlurmJob) -> str:
        """Why Slurm is to choose the job's nodes, or ""."""
        tries = self._tries.get(job.id)
        if tries is not None and tries.times >= _MOST_TRIES:
            return f"it did not start on the chosen nodes ({tries.why})"
        return why_left(job)

    # -- what is asked for ---------------------------------------------------------------------------------------

    def _stops(self, queue: SlurmQueue, plan: Plan, deciding: Set[str]) -> list[ScontrolCall]:
        """Jobs that consent (by partition, and by Slurm's own flag) are requeued."""
        asks = []
        for action in plan.actions:
            if isinstance(action, Preempt):
                job, stored = queue.jobs.get(slurm_id(action.job_id)), self._store.job(action.job_id)
                if job is None or stored is None or stored.spec.partition not in deciding:
                    continue
                if job.requeue and job.state == "RUNNING":
                    asks.append(ScontrolCall(lease.requeue(job.id), "requeue", action.job_id))
        return asks

    def _begins(self, queue: SlurmQueue, now: float) -> list[ScontrolCall]:
        """Jobs that we requeued need not wait the two minutes that Slurm gives them."""
        asks = []
        for view in queue.views.values():
            job = queue.waiting.get(slurm_id(view.id))
            if job is None or job.reason != "BeginTime" or view.preemptions is None or not view.preemptions.times:
                continue
            since, begin = view.preemptions.times[-1], job.eligible_time or now
            if now - since < _REMEMBER_S and now < begin < since + _REMEMBER_S:
                asks.append(ScontrolCall(lease.begin_now(job.id), "begin", view.id))
        return asks

    def _starts(
        self,
        queue: SlurmQueue,
        decided: SlurmDecision,
        deciding: Set[str],
        leased: Sequence[str],
        withdrawn: Set[str],
        now: float,
    ) -> list[ScontrolCall]:
        """The plan's starts, in its order; where Slurm is to choose the nodes, it may do so now."""
        asks: list[ScontrolCall] = []
        reasons: dict[str, Reason] = {}
        inside = set(leased)
        for action in _starts_of(decided, deciding):
            job = queue.waiting.get(slurm_id(action.job_id))
            if job is None or action.job_id in withdrawn:
                continue
            nodes = tuple(part.node for part in action.allocation.parts)
            left = self._left(job)
            if job.reservation not in ("", LEASE):
                reasons[action.job_id] = _refused(f"it uses reservation {job.reservation}: Slurm starts it there")
            elif why := self._rests(job, now) or shut(queue, job, now, () if left else nodes):
                reasons[action.job_id] = _unavailable(why)
            elif left:
                reasons[action.job_id] = _admitted(left)
                asks += self._admit(queue, job)
            elif not inside.issuperset(nodes):
                out = ", ".join(node for node in nodes if node not in inside)
                reasons[action.job_id] = _refused(f"{out} is not in the lease: it is in another reservation")
            else:
                asks.append(ScontrolCall(lease.start(job.id, nodes), "start", action.job_id, nodes))
        self._explain(reasons)
        return list(dict.fromkeys(asks))

    def _admissions(
        self,
        queue: SlurmQueue,
        decided: SlurmDecision,
        deciding: Set[str],
        leased: Sequence[str],
        asked: Set[str],
        now: float,
    ) -> list[ScontrolCall]:
        """Jobs that the lease would keep from starting for ever, though no policy decides on them."""
        touched = {name for name, p in queue.told.partitions.items() if not set(leased).isdisjoint(p.nodes)}
        reasons: dict[str, Reason] = {}
        asks: list[ScontrolCall] = []
        for job in queue.waiting.values():
            if job.reservation or job.priority == 0 or blocking_reason(job.reason) or job.reason.startswith(NOT_YET):
                continue
            name = queue.name(job)
            mine = deciding & set(job.partitions)
            known = decided.plan.reasons.get(name)
            if name in asked or touched.isdisjoint(job.partitions):
                continue
            if mine and queue.views.get(name) is None:
                left = "no policy could consider it"
            elif mine and known is not None and known.code is ReasonCode.BAD_CONSTRAINTS:
                left = f"gpusched finds no nodes for it ({known.message})"
            elif not mine:
                left = "its partition shares these nodes, but gpusched does not decide there"
            else:
                continue
            if why := self._rests(job, now) or shut(queue, job, now):
                reasons[name] = _unavailable(why)
                continue
            reasons[name] = _admitted(left)
            asks += self._admit(queue, job)
            self._let_in.add(job.id)
        self._explain(reasons)
        return asks

    def _admit(self, queue: SlurmQueue, job: SlurmJob) -> list[ScontrolCall]:
        """The job, or all parts of it where it has several that start together."""
        base = job.id.partition("+")[0]
        parts = [j for j in queue.waiting.values() if j.id.startswith(f"{base}+")] if "+" in job.id else [job]
        return [ScontrolCall(lease.admit(j.id), "admit", queue.name(j)) for j in parts if j.reservation != LEASE]

    # -- sending, and noting what came of it ---------------------------------------------------------------------

    def _send(self, asks: Sequence[ScontrolCall], now: float, decided: SlurmDecision | None) -> None:
        before = self._intend(asks, now, decided)
        errors = self._slurm.update([ask.line for ask in asks])
        changed: list[JobRecord] = []
        events: list[Event] = []
        for at, ask in enumerate(asks):
            error = errors.get(at, "")
            gone = any(text in error for text in _GONE)
            if ask.job in before and ask.what == "requeue" and error:
                changed.append(before[ask.job])
            if ask.what not in ("start", "requeue") or gone:
                continue
            job = self._store.job(ask.job)
            policy = _policy_of(job, decided)
            if job is None or decided is None or policy is None:
                continue
            if error and ask.what == "start":
                self._tried(slurm_id(job.id), now, error)
                reason = _refused(f"Slurm rejects a start on {', '.join(ask.nodes)}: {error}")
                changed.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
            elif error:
                events.append(Event(time=now, kind="plan_rejected", data={"action": ask.line, "why": error}))
            elif ask.what == "requeue" and (stops := job.preemptions) is not None:
                data = {"policy": policy.name, "version": policy.version, "for": stops.for_job, "count": stops.count}
                events.append(Event(time=now, kind="preempted", job_id=job.id, user=job.user, data=data))
        self._write(changed, events)

    def _intend(self, asks: Sequence[ScontrolCall], now: float, decided: SlurmDecision | None) -> dict[str, JobRecord]:
        """Record what is asked for before it is asked, and return the jobs that are to be stopped, as they were.

        A job in the lease, so that what Slurm does to it there can be undone; a stop, since one that nobody counted
        would be done again.
        """
        changed: list[JobRecord] = []
        before: dict[str, JobRecord] = {}
        actions = decided.plan.actions if decided is not None else ()
        for_whom = {a.job_id: a.for_job for a in actions if isinstance(a, Preempt)}
        for ask in asks:
            job = self._store.job(ask.job) if ask.what in ("start", "admit", "requeue") else None
            policy = _policy_of(job, decided)
            if job is None:
                continue
            if ask.what == "requeue" and policy is not None:
                before[job.id] = job
                stops = job.preemptions or Preemptions()
                stops = stops.once_more(now, policy.name, policy.version, for_whom[job.id])
                changed.append(msgspec.structs.replace(job, preemptions=stops))
            elif ask.what == "admit" and job.slurm is not None:
                facts = msgspec.structs.replace(job.slurm, leased=True)
                changed.append(msgspec.structs.replace(job, slurm=facts))
            elif ask.what == "start" and job.slurm is not None and policy is not None:
                facts = msgspec.structs.replace(job.slurm, leased=True, pinned=ask.nodes, pinned_at=now)
                named = {"policy": policy.name, "policy_version": policy.version}
                changed.append(msgspec.structs.replace(job, **named, slurm=facts))
        self._write(changed, [])
        return before

    def _write(self, changed: list[JobRecord], events: list[Event]) -> None:
        if changed or events:
            with self._store.transaction():
                self._store.put_jobs(changed)
                self._store.append(events)

    def _explain(self, reasons: Mapping[str, Reason]) -> None:
        """Why jobs wait that the policy would start, where it is not the policy that says so."""
        found = []
        for name, reason in reasons.items():
            job = self._store.job(name) if name else None
            if job is not None and (job.reason, job.message) != (reason.code, reason.message):
                found.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
        if found:
            with self._store.transaction():
                self._store.put_jobs(found)


def _starts_of(decided: SlurmDecision, deciding: Set[str]) -> list[Start]:
    """The plan's starts in these partitions, in its order."""
    there = {view.id for view in decided.snapshot.pending if view.spec.partition in deciding}
    return [action for action in decided.plan.actions if isinstance(action, Start) and action.job_id in there]


def _policy_of(job: JobRecord | None, decided: SlurmDecision | None) -> PolicySpec | None:
    return decided.deciders.get(job.spec.partition) if job is not None and decided is not None else None


def _refused(why: str) -> Reason:
    return Reason(code=ReasonCode.REJECTED, message=why)


def _unavailable(why: str) -> Reason:
    return Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=why)


def _admitted(why: str) -> Reason:
    return Reason(code=ReasonCode.RESOURCES, message=f"Slurm starts it as soon as it fits: {why}")


_LATER = Reason(
    code=ReasonCode.PRIORITY, message=f"at most {lease.MAX_UPDATES} requests per cycle go to Slurm; it is next"
)
