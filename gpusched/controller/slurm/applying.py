"""From a plan to what is asked of Slurm, by each partition's mode: nothing, an order, or the lease and starts in it.

What is intended stands in Slurm alone: the reservation, and the jobs that are in it. A controller that is killed
between any two steps reads that again, so nothing starts twice and nothing is lost; one that never comes back leaves a
lease that ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from gpusched.controller.slurm.cycle import Decided
from gpusched.controller.slurm.mirror import NOT_YET, is_pinned
from gpusched.controller.slurm.nodes import takes_jobs
from gpusched.controller.slurm.ordering import Ordering
from gpusched.controller.slurm.reading import Told
from gpusched.model.events import Event
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import Job, Preemptions
from gpusched.model.plan import Plan, Preempt, Reason, ReasonCode, Start
from gpusched.model.resources import Inventory
from gpusched.model.slurm import LEASE, LEASE_TROUBLE, SlurmJob, SlurmMode, bar
from gpusched.queue.store import Store
from gpusched.slurm import lease
from gpusched.slurm.commands import Slurm

PIN_S = 30.0
"""A start that has not come about by then is withdrawn."""

_RENEW = 1 / 6  # of the lease has gone by; each renewal is a line in slurmctld's log, some a row in the database
_MOST_TRIES = 2  # a job that did not start on decided nodes so often starts where Slurm wants
_REMEMBER_S = 600.0  # of a failed start, and of a requeue of ours
_GONE = ("no longer pending", "already finished", "Invalid job id", "already completing")


class Ask(NamedTuple):
    """One line for scontrol, and what it is for; ``job``: the store's id, "": it has none."""

    line: str
    what: str
    job: str = ""
    nodes: tuple[str, ...] = ()


class Tries(NamedTuple):
    """How often a job did not start where it was to, when last, and why."""

    times: int
    at: float
    why: str


class LeaseApplier:
    """Makes Slurm do what was decided (`cycle.Applier`)."""

    def __init__(self, store: Store, slurm: Slurm, say: Callable[[str], None] = lambda text: None) -> None:
        self._store, self._slurm, self._say = store, slurm, say
        self._ordering = Ordering(store, slurm, say)
        self._tries: dict[str, Tries] = {}
        self._let_in: set[str] = set()  # jobs on which no policy decides
        self._seen: dict[str, float] = {}  # a start whose begin the store does not know, since when

    def apply(
        self, inventory: Inventory, modes: Mapping[str, SlurmMode], told: Told, decided: Decided | None, now: float
    ) -> None:
        """What was decided, asked of Slurm; see `cycle.Applier`."""
        deciding = {name for name, mode in modes.items() if mode is SlurmMode.DECIDE}
        leased = leased_nodes(inventory, deciding, told, now, self._lasts_s(inventory))
        queue = _Queue(told, decided, self._store)
        self._tries = {job: tries for job, tries in self._tries.items() if now < tries.at + _REMEMBER_S}
        withdrawn = self._withdrawals(queue, deciding, leased, now)
        self._send(withdrawn, now, decided)
        room = lease.MAX_UPDATES - len(withdrawn)
        asks: list[Ask] = []
        undecided = decided is None and any(job.spec.partition in deciding for job in self._store.pending())
        if not undecided and self._hold(leased, told, self._lasts_s(inventory)) and decided is not None:
            withdrawn_now = {ask.job for ask in withdrawn}
            asks = [*self._stops(queue, decided.plan, deciding), *self._begins(queue, now)]
            starts = self._starts(queue, decided, deciding, leased, withdrawn_now)
            asks += starts + self._admissions(queue, decided, deciding, leased, {ask.job for ask in starts})
        elif deciding and decided is not None:
            why = self._store.meta(LEASE_TROUBLE) or "the lease was not renewed"
            self._explain({a.job_id: _refused(why) for a in _starts_of(decided, deciding)})
        late = {ask.job: _LATER for ask in asks[room:] if ask.what in ("start", "admit")}
        self._explain(late)
        self._send(asks[:room], now, decided)
        self._ordering.order(modes, queue.waiting, decided, max(0, room - len(asks)), now)

    def _lasts_s(self, inventory: Inventory) -> int:
        return max(lease.LEASE_S, int(3 * inventory.settings.tick_s))

    # -- the lease -----------------------------------------------------------------------------------------------

    def _hold(self, leased: Sequence[str], told: Told, lasts_s: int) -> bool:
        """Create, renew or end the lease; whether there is one now."""
        known = next((r for r in told.reservations if r.name == LEASE), None)
        if not leased:
            if known is not None and known.end_time > told.time + 2:
                self._slurm.update([lease.end()])
            self._note_trouble("")
            return False
        enough = known is not None and known.end_time > told.time + (1 - _RENEW) * lasts_s
        same = known is not None and set(known.nodes) == set(leased)
        if enough and same:
            return True

        def renewed() -> str:
            return lease.renew(() if same else leased, lasts_s)

        def created() -> str:
            return lease.create(leased, lasts_s, lease.enforces_associations(self._slurm.config()))

        # One that has ended lingers for seconds: it can be renewed, and no other can be created beside it.
        why = ""
        for line in (renewed, created) if known is not None else (created, renewed):
            why = self._slurm.update([line()]).get(0, "")
            if not why:
                break
        self._note_trouble(f"Slurm refuses the lease, so it decides itself: {why}" if why else "")
        return not why

    def _note_trouble(self, why: str) -> None:
        if why != (self._store.meta(LEASE_TROUBLE) or ""):
            self._store.set_meta(LEASE_TROUBLE, why)
            self._say(why or "the lease is in order again")

    # -- what is withdrawn ---------------------------------------------------------------------------------------

    def _withdrawals(self, queue: _Queue, deciding: Set[str], leased: Sequence[str], now: float) -> list[Ask]:
        """Starts that did not come about, and those that nobody wants any more."""
        asks = []
        self._seen = {job: since for job, since in self._seen.items() if job in queue.waiting}
        self._let_in &= queue.waiting.keys()
        startable = {node for node in leased if takes_jobs(queue.told.nodes.get(node))}
        for job in queue.waiting.values():
            if job.reservation != LEASE and not (job.req_nodes and not job.reservation):
                continue
            stored = queue.stored(job)
            facts = stored.slurm if stored is not None else None
            own = facts.nodelist if facts is not None else job.req_nodes
            if job.reservation != LEASE:
                # Slurm has ended the lease: it took the reservation off the job, and left it our nodes.
                if facts is not None and facts.pinned:
                    asks.append(Ask(lease.withdraw(job.id, own), "withdraw", queue.name(job)))
                continue
            theirs = stored is not None and stored.spec.partition in deciding
            if is_pinned(job):
                since = facts.pinned_at if facts is not None else None
                since = since if since is not None else self._seen.setdefault(job.id, now)
                late = theirs and now - since >= PIN_S
                keep = not late and set(job.req_nodes) <= startable
                if late:
                    self._tried(job.id, now, job.reason)
            elif len(job.req_nodes) >= max(1, job.nodes) and theirs:
                keep = False  # it does not start now: held since, or requeued
            else:
                keep = bool(leased) and (not theirs or job.id in self._let_in or bool(self._left(job)))
            if not keep:
                asks.append(Ask(lease.withdraw(job.id, own), "withdraw", queue.name(job)))
        return asks[: lease.MAX_UPDATES]

    def _tried(self, job: str, now: float, why: str) -> None:
        self._tries[job] = Tries(self._tries.get(job, Tries(0, now, "")).times + 1, now, why)

    def _left(self, job: SlurmJob) -> str:
        """Why Slurm is to choose the job's nodes, or ""."""
        tries = self._tries.get(job.id)
        if tries is not None and tries.times >= _MOST_TRIES:
            return f"it did not start on the nodes that were chosen ({tries.why})"
        return why_left(job)

    # -- what is asked for ---------------------------------------------------------------------------------------

    def _stops(self, queue: _Queue, plan: Plan, deciding: Set[str]) -> list[Ask]:
        """Jobs that consent (by partition, and by Slurm's own flag) are requeued."""
        asks = []
        for action in plan.actions:
            if isinstance(action, Preempt):
                job, stored = queue.jobs.get(slurm_id(action.job_id)), self._store.job(action.job_id)
                if job is None or stored is None or stored.spec.partition not in deciding:
                    continue
                if job.requeue and job.state == "RUNNING":
                    asks.append(Ask(lease.requeue(job.id), "requeue", action.job_id))
        return asks

    def _begins(self, queue: _Queue, now: float) -> list[Ask]:
        """Jobs that we requeued need not wait the two minutes that Slurm gives them."""
        asks = []
        for view in queue.views.values():
            job = queue.waiting.get(slurm_id(view.id))
            if job is None or job.reason != "BeginTime" or view.preemptions is None or not view.preemptions.times:
                continue
            since, begin = view.preemptions.times[-1], job.eligible_time or now
            if now - since < _REMEMBER_S and now < begin < since + _REMEMBER_S:
                asks.append(Ask(lease.begin_now(job.id), "begin", view.id))
        return asks

    def _starts(
        self,
        queue: _Queue,
        decided: Decided,
        deciding: Set[str],
        leased: Sequence[str],
        withdrawn: Set[str],
    ) -> list[Ask]:
        """The plan's starts, in its order; where Slurm is to choose the nodes, it may do so now."""
        asks: list[Ask] = []
        reasons: dict[str, Reason] = {}
        inside = set(leased)
        for action in _starts_of(decided, deciding):
            job = queue.waiting.get(slurm_id(action.job_id))
            if job is None or action.job_id in withdrawn:
                continue
            nodes = tuple(part.node for part in action.allocation.parts)
            left = self._left(job)
            if job.reservation not in ("", LEASE):
                reasons[action.job_id] = _refused(f"it names reservation {job.reservation}: Slurm starts it there")
            elif left:
                reasons[action.job_id] = _admitted(left)
                asks += self._admit(queue, job)
            elif not inside.issuperset(nodes):
                out = ", ".join(node for node in nodes if node not in inside)
                reasons[action.job_id] = _refused(f"{out} is not in the lease: another reservation has it")
            else:
                asks.append(Ask(lease.start(job.id, nodes), "start", action.job_id, nodes))
        self._explain(reasons)
        return list(dict.fromkeys(asks))

    def _admissions(
        self, queue: _Queue, decided: Decided, deciding: Set[str], leased: Sequence[str], asked: Set[str]
    ) -> list[Ask]:
        """Jobs that the lease would keep from starting for ever, though no policy decides on them."""
        touched = {name for name, p in queue.told.partitions.items() if not set(leased).isdisjoint(p.nodes)}
        reasons: dict[str, Reason] = {}
        asks: list[Ask] = []
        for job in queue.waiting.values():
            if job.reservation or job.priority == 0 or bar(job.reason) or job.reason.startswith(NOT_YET):
                continue
            name = queue.name(job)
            mine = deciding & set(job.partitions)
            known = decided.plan.reasons.get(name)
            if name in asked or touched.isdisjoint(job.partitions):
                continue
            if mine and queue.views.get(name) is None:
                left = "no policy could look at it"
            elif mine and known is not None and known.code is ReasonCode.BAD_CONSTRAINTS:
                left = f"gpusched finds no nodes for it ({known.message})"
            elif not mine:
                left = "it is of a partition that gpusched does not decide for, on the same nodes"
            else:
                continue
            reasons[name] = _admitted(left)
            asks += self._admit(queue, job)
            self._let_in.add(job.id)
        self._explain(reasons)
        return asks

    def _admit(self, queue: _Queue, job: SlurmJob) -> list[Ask]:
        """The job, or all parts of it where it has several that start together."""
        base = job.id.partition("+")[0]
        parts = [j for j in queue.waiting.values() if j.id.startswith(f"{base}+")] if "+" in job.id else [job]
        return [Ask(lease.admit(j.id), "admit", queue.name(j)) for j in parts if j.reservation != LEASE]

    # -- sending, and noting what came of it ---------------------------------------------------------------------

    def _send(self, asks: Sequence[Ask], now: float, decided: Decided | None) -> None:
        errors = self._slurm.update([ask.line for ask in asks])
        changed: list[Job] = []
        events: list[Event] = []
        for at, ask in enumerate(asks):
            error = errors.get(at, "")
            if ask.what not in ("start", "requeue") or any(text in error for text in _GONE):
                continue
            job = self._store.job(ask.job)
            policy = decided.deciders.get(job.spec.partition) if job is not None and decided is not None else None
            if job is None or decided is None or policy is None:
                continue
            if error and ask.what == "start":
                self._tried(slurm_id(job.id), now, error)
                reason = _refused(f"Slurm refuses to start it on {', '.join(ask.nodes)}: {error}")
                changed.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
            elif error:
                events.append(Event(time=now, kind="plan_rejected", data={"action": ask.line, "why": error}))
            elif ask.what == "start":
                facts = job.slurm and msgspec.structs.replace(job.slurm, pinned=ask.nodes, pinned_at=now)
                changed.append(
                    msgspec.structs.replace(job, policy=policy.name, policy_version=policy.version, slurm=facts)
                )
            else:
                stop = next(a for a in decided.plan.actions if isinstance(a, Preempt) and a.job_id == ask.job)
                stops = (job.preemptions or Preemptions()).once_more(now, policy.name, policy.version, stop.for_job)
                changed.append(msgspec.structs.replace(job, preemptions=stops))
                data = {"policy": policy.name, "version": policy.version, "for": stop.for_job, "count": stops.count}
                events.append(Event(time=now, kind="preempted", job_id=job.id, user=job.user, data=data))
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


class _Queue:
    """What waits, as Slurm has it, beside what the store has of it.

    ``jobs``: Slurm's id -> any job. waiting: those that are PENDING. views: the store's id -> as it was decided on.
    """

    def __init__(self, told: Told, decided: Decided | None, store: Store) -> None:
        self.told, self._store = told, store
        self.jobs = {job.id: job for job in told.jobs}
        self.waiting = {job.id: job for job in told.jobs if job.state == "PENDING"}
        self.views = {view.id: view for view in decided.snapshot.pending} if decided is not None else {}
        self._names = {slurm_id(name): name for name in self.views}
        self._active = {slurm_id(job.id): job for job in store.active()}
        self._names |= {job: stored.id for job, stored in self._active.items()}

    def name(self, job: SlurmJob) -> str:
        """The store's id."""
        return self._names.get(job.id, job.id)

    def stored(self, job: SlurmJob) -> Job | None:
        """As the store has it."""
        return self._active.get(job.id) or self._store.job(self.name(job))


def why_left(job: SlurmJob) -> str:
    """Why Slurm must choose the nodes of a job, or "": policies decide when it starts, and where."""
    if "+" in job.id:
        return "it is heterogeneous: its parts start together"
    if 0 < len(job.req_nodes) < job.nodes:
        return f"it names {len(job.req_nodes)} of its {job.nodes} nodes"
    return ""


def leased_nodes(inventory: Inventory, deciding: Set[str], told: Told, now: float, lasts_s: int) -> tuple[str, ...]:
    """The nodes of these partitions that Slurm has, but those that another reservation has before the lease's end."""
    taken = {
        node
        for reservation in told.reservations
        if reservation.name != LEASE and reservation.start_time < now + lasts_s + PIN_S and now < reservation.end_time
        for node in reservation.nodes
    }
    nodes = (node.name for p in inventory.partitions if p.name in deciding for node in p.nodes)
    return tuple(name for name in nodes if name in told.nodes and name not in taken)


def _starts_of(decided: Decided, deciding: Set[str]) -> list[Start]:
    """The plan's starts in these partitions, in its order."""
    there = {view.id for view in decided.snapshot.pending if view.spec.partition in deciding}
    return [action for action in decided.plan.actions if isinstance(action, Start) and action.job_id in there]


def _refused(why: str) -> Reason:
    return Reason(code=ReasonCode.REJECTED, message=why)


def _admitted(why: str) -> Reason:
    return Reason(code=ReasonCode.RESOURCES, message=f"Slurm starts it as soon as it finds room for it: {why}")


_LATER = Reason(code=ReasonCode.PRIORITY, message=f"{lease.MAX_UPDATES} requests go to Slurm in one cycle; it is next")
