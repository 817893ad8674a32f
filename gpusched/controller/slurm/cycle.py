"""One cycle beside Slurm: fold what was asked, read the nodes and Slurm, mirror, account, decide, check, hand over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from gpusched.cluster.base import ClusterBackend, NodeObservation
from gpusched.controller.cycle import run_of
from gpusched.controller.deciding import Decider
from gpusched.controller.estimating import Estimates
from gpusched.controller.fold import CommandApplier
from gpusched.controller.ledger import UsageWriter
from gpusched.controller.nodestate import with_news
from gpusched.controller.planning import Reasons, isolated
from gpusched.controller.promoting import LivePolicies, load_active_policies
from gpusched.controller.secretfiles import SecretFiles
from gpusched.controller.shadowing import Shadowing
from gpusched.controller.slurm.advised import ordered_jobs, without_advice
from gpusched.controller.slurm.devices import devices_of
from gpusched.controller.slurm.following import Mirror, Missing
from gpusched.controller.slurm.guesses import with_guesses
from gpusched.controller.slurm.mirror import MirrorContext, MirrorResult, forgotten, told_ended
from gpusched.controller.slurm.nodes import (
    reading_beside_slurm,
    record_beside_slurm,
    with_known_processes,
)
from gpusched.controller.slurm.reading import SlurmReader, SlurmReading, ended_jobs
from gpusched.controller.slurm.requests import SlurmContext
from gpusched.controller.slurm.reserved import calendar_of
from gpusched.model.events import Event
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import JobRecord
from gpusched.model.plan import Plan, Reason, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.reservations import by_node
from gpusched.model.resources import Inventory
from gpusched.model.slurm import TROUBLE, SlurmMode, Trouble
from gpusched.model.snapshot import Snapshot
from gpusched.promotion.live import live_modes
from gpusched.queue.damage import STORE_FAULTS
from gpusched.queue.inbox import Inbox
from gpusched.queue.snapshots import held_gpus, snapshot_of_store
from gpusched.queue.store import NodeRecord, Store
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.slurm.commands import NoAnswer, Slurm

READ_AT = "slurm_read_at"  # meta: when Slurm was last read (Unix seconds)
MISSING = "slurm_missing"  # meta: jobs that Slurm named no more when it was last read: `Missing` by id, as JSON
ASK_AGAIN_S = 60.0  # so long Slurm's accounting may take to tell of a job that slurmctld has forgotten
UNLIMITED = 1_000_000


class SlurmDecision(NamedTuple):
    """A checked plan, what it was made from, and who decided in each partition."""

    snapshot: Snapshot
    plan: Plan
    deciders: Mapping[str, PolicySpec]


class Applier(Protocol):
    """Makes Slurm do what was decided, by each partition's mode."""

    def apply(
        self,
        inventory: Inventory,
        modes: Mapping[str, SlurmMode],
        told: SlurmReading,
        decided: SlurmDecision | None,
        now: float,
    ) -> None:
        """Called once in every cycle in which Slurm answered, after it was mirrored; None: nobody waits.

        Raises:
            NoAnswer: Slurm does not answer any more.
        """


class SlurmCycle:
    """The state of a controller between cycles beside Slurm; all that counts is in Slurm, or in the store."""

    def __init__(
        self,
        store: Store,
        state: Path,
        inventory: Inventory,
        policies: dict[str, PolicySpec],
        cluster: ClusterBackend,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda text: None,
        slurm: Slurm | None = None,
        applier: Applier | None = None,
    ) -> None:
        self._store, self._cluster, self._clock, self._say = store, cluster, clock, say
        self.inventory, self.policies = inventory, policies  # as declared; promotions go before them
        self.inbox = Inbox(state)
        self._secrets = SecretFiles(state)
        self._slurm = slurm or Slurm()
        self._reader = SlurmReader(self._slurm)
        self._applier = applier
        missing = msgspec.json.decode(store.meta(MISSING) or "{}", type=dict[str, Missing])
        self._mirror = Mirror(store.job, [*store.pending(), *store.active()], missing)
        self._array_limits = store.array_limits()
        self._decider, self._shadowing = Decider(store, say), Shadowing(store)
        self._estimator, self._reasons = Estimates(store, state, say), Reasons(store)
        self._ledger = UsageWriter(store)
        self._failing: dict[str, tuple[float, str]] = {}  # nodes that cannot be read, since when, and why
        self._undecidable: set[str] = set()
        self._modes: Mapping[str, SlurmMode] = {}
        self._said: set[str] = set()

    def warm_up(self) -> None:
        """Make the agents in charge ready to decide."""
        self._decider.warm_up(*load_active_policies(self._store, self.inventory, self.policies, self._clock()))

    def run(self, patience_s: float) -> None:
        """One cycle. Slow nodes are waited for no longer than ``patience_s``."""
        now = self._clock()
        CommandApplier(self._store, self.inbox, self.inventory, self._secrets, self._say).fold(now)
        charge = load_active_policies(self._store, self.inventory, self.policies, now)
        modes = live_modes(self.inventory, self._store)
        self._decider.look(*charge, now)
        self._store.set_meta("heartbeat", str(now))  # Slurm may keep us waiting
        if modes == self._modes and not self._reader.is_due(now):
            return
        self._modes = modes
        askable = [node for node in self.inventory.nodes if node.transport != "none"]
        observations = self._cluster.observe(askable, patience_s)
        # Slurm is asked after the nodes: who held what until they were read is known then.
        told = self._ask(SlurmMode.ADVISE in modes.values())
        now = self._clock()
        self._record(told, observations, now)
        if told is None:
            return
        decided = self._decide(charge, modes, now)
        try:
            if self._applier is not None:
                self._applier.apply(self.inventory, modes, told, decided, now)
        except NoAnswer as error:
            self._note_trouble(error, now)
        if decided is not None:
            self._shadowing.ask(self.inventory, decided.snapshot, decided.plan)

    def _ask(self, site_factors: bool) -> SlurmReading | None:
        """What Slurm says, or None where it does not: then nothing may be decided for it."""
        now = self._clock()
        try:
            told = self._reader.read(now, site_factors)
        except NoAnswer as error:
            self._note_trouble(error, now)
            return None
        if self._store.meta(TROUBLE):
            self._store.set_meta(TROUBLE, "")
            self._say("Slurm responds again")
        return told

    def _note_trouble(self, error: NoAnswer, now: float) -> None:
        known = self._store.meta(TROUBLE)
        since = msgspec.json.decode(known, type=Trouble).since if known else now
        self._store.set_meta(TROUBLE, msgspec.json.encode(Trouble(since=since, why=error.line())).decode())
        if not known:
            self._say(f"no decisions until Slurm responds: {error.line()}")

    # -- recording what is ---------------------------------------------------------------------------------------

    def _record(self, told: SlurmReading | None, observations: dict[str, NodeObservation], now: float) -> None:
        """Fold this cycle's news into jobs, nodes and usage, in one transaction."""
        before = self._store.node_records()
        active = {job.id: job for job in self._store.active()}
        news = self._news_of(observations, before, now)
        world, steps = None, list[MirrorResult]()
        if told is not None:
            features = {node.name: node.features for node in told.nodes.values() if node.features}
            site = SlurmContext(inventory=self.inventory, partitions=told.partitions, features=features)
            devices = devices_of(self.inventory, told.gres_conf, told.nodes, _read_now(before, news))
            standing = self._standing(told)
            world = MirrorContext(site=site, positions=told.positions, standing=standing, devices=devices, now=now)
            steps = self._mirror.steps(told.jobs, world) + self._gone(told, now)
        with self._store.transaction():
            self._write(steps)
            after = {job.id: job for job in self._store.active()}
            if world is not None and told is not None:
                guesses = with_guesses(after.values(), world.site)
                self._store.put_jobs(guesses)
                after |= {job.id: job for job in guesses}
                self._put_array_limits(told)
                self._put_reservations(told, now)
                self._put_nodes(told, before, news, active, after, now)
                self._store.set_meta(READ_AT, str(now))
            self._charge(before, news, active, after, steps, now)
            self._store.set_meta("heartbeat", str(now))
        if world is not None and told is not None:
            self._mirror.note(steps, told.jobs, world)
        for trouble in self._mirror.troubles.values():
            if trouble not in self._said:
                self._said.add(trouble)
                self._say(trouble)

    def _news_of(
        self, observations: Mapping[str, NodeObservation], before: Mapping[str, NodeRecord], now: float
    ) -> dict[str, NodeObservation]:
        news = {}
        for node in self.inventory.nodes:
            observation = observations.get(node.name)
            if observation is not None and isinstance(observation.result, ProbeFailure):
                since, _ = self._failing.get(node.name, (now, ""))
                self._failing[node.name] = since, observation.result.reason
            elif observation is not None:
                self._failing.pop(node.name, None)
            failing_s = now - self._failing.get(node.name, (now, ""))[0]
            record = before.get(node.name, NodeRecord(name=node.name))
            read = reading_beside_slurm(node, observation, record, failing_s, self.inventory.settings, now)
            if read is not None:
                news[node.name] = read
        return news

    def _gone(self, told: SlurmReading, now: float) -> list[MirrorResult]:
        """What became of jobs that had not ended when Slurm was last read, and that it does not name any more."""
        missing = self._mirror.missing(told.jobs, self._store.number(READ_AT, now), now)
        noted = msgspec.json.encode(missing).decode()
        if noted != (self._store.meta(MISSING) or "{}"):
            self._store.set_meta(MISSING, noted)
        jobs = [job for name in missing if (job := self._store.job(name)) is not None]
        if not jobs:
            return []
        rows = {}
        try:
            last = min(missing[job.id].named_at for job in jobs)
            rows = ended_jobs(self._slurm.ended(last - ASK_AGAIN_S, now))
        except NoAnswer as error:
            if error.line() not in self._said:
                self._said.add(error.line())
                self._say(f"cannot query the end of jobs that slurmctld has purged: {error.line()}")
        steps = []
        for job in jobs:
            facts, found = job.slurm, rows.get(slurm_id(job.id), [])
            ended = [row for submit, row in found if facts is not None and submit >= facts.submit_time]
            if ended:
                steps.append(told_ended(job, ended[-1].state, ended[-1].start_time, ended[-1].end_time))
            elif now - missing[job.id].since >= ASK_AGAIN_S:
                steps.append(forgotten(job, now))
        return steps

    def _write(self, steps: list[MirrorResult]) -> None:
        self._store.put_jobs(step.job for step in steps)
        self._store.append(event for step in steps for event in step.events)
        for step in steps:
            if step.began:
                self._store.open_run(run_of(step.job, self.inventory))
            if step.ended is not None:
                self._store.close_run(step.job.id, *step.ended)

    def _put_array_limits(self, told: SlurmReading) -> None:
        found = {job.array_id: job.array_limit for job in told.jobs if job.array_id and job.state == "PENDING"}
        for array, limit in found.items():
            if limit is None and array not in self._array_limits:
                continue
            if self._array_limits.get(array) != (limit or UNLIMITED):
                self._array_limits[array] = limit or UNLIMITED
                self._store.set_meta(f"array_limit:{array}", str(limit or UNLIMITED))

    def _put_reservations(self, told: SlurmReading, now: float) -> None:
        """As Slurm has them; of one that Slurm has no more stays what was."""
        there = {one.name: one for one in self._store.reservations(now)}
        found = {one.name: one for one in calendar_of(told.reservations, {n.name for n in self.inventory.nodes})}
        for name, one in there.items():
            if name not in found and one.begin < now:
                self._store.put_reservation(msgspec.structs.replace(one, end=now), now)
            elif name not in found:
                self._store.drop_reservation(name, now)
        for name, one in found.items():
            if there.get(name) != one:
                self._store.put_reservation(one, now)

    def _standing(self, told: SlurmReading) -> dict[str, int]:
        """Slurm's id -> priority without our advice, of the jobs that have some."""
        if not (ordered := ordered_jobs(self._store)):
            return {}
        waiting = {job.id: job for job in told.jobs if job.state == "PENDING"}
        bases = without_advice(waiting, ordered & waiting.keys(), not self._slurm.has_factors)
        return {job: max(1, base) for job, base in bases.items()}  # as Slurm says it of the others

    def _put_nodes(
        self,
        told: SlurmReading,
        before: Mapping[str, NodeRecord],
        news: dict[str, NodeObservation],
        active: Mapping[str, JobRecord],
        after: Mapping[str, JobRecord],
        now: float,
    ) -> None:
        held, was_held = held_gpus(after.values()), held_gpus(active.values())
        jobs = {**active, **after}
        busy = {part.node for job in after.values() if job.allocation for part in job.allocation.parts}
        reserved = by_node((one for one in self._store.reservations(now) if one.begin <= now), now)
        records, events = [], []
        for node in self.inventory.nodes:
            mine, read = held.get(node.name, {}), news.get(node.name)
            if read is not None and isinstance(read.result, NodeReading):
                reading = with_known_processes(read.result, mine, was_held.get(node.name, {}), jobs)
                read = news[node.name] = msgspec.structs.replace(read, result=reading)
            record, facts = record_beside_slurm(
                before.get(node.name, NodeRecord(name=node.name)), node, told.nodes.get(node.name), read, mine,
                node.name in busy, node.name in reserved, self._failing.get(node.name, (0.0, ""))[1], now,
            )  # fmt: skip
            records.append(record)
            events += facts
        self._store.put_nodes(records)
        self._store.append(events)

    def _charge(
        self,
        before: Mapping[str, NodeRecord],
        news: Mapping[str, NodeObservation],
        active: Mapping[str, JobRecord],
        after: Mapping[str, JobRecord],
        steps: list[MirrorResult],
        now: float,
    ) -> None:
        """Charge the time since the last readings; not to jobs of which Slurm does not say which GPUs they have."""
        now_as = {**active, **{step.job.id: step.job for step in steps}, **after}
        pairs = [(active.get(name, job), job) for name, job in now_as.items() if name in active or job.start_time]
        sure = [(old, new) for old, new in pairs if _has_known_gpus(new if new.allocation is not None else old)]
        self._ledger.charge(self.inventory, before, news, [old for old, _ in sure], [new for _, new in sure], now)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, charge: LivePolicies, modes: Mapping[str, SlurmMode], now: float) -> SlurmDecision | None:
        """The checked plan; None where nobody waits, or no policy can take even a look."""
        waiting = [job for job in self._store.pending() if job.id not in self._undecidable and job.slurm is not None]
        active = self._store.active()
        if not waiting:
            return None
        shadows = [shadow.spec for shadow in self._store.shadows().values() if shadow.until is None]
        self._estimator.run([*charge.policies.values(), *shadows])

        def snapshot_of(jobs: Sequence[JobRecord]) -> Snapshot:
            return snapshot_of_store(
                self._store,
                self.inventory,
                charge.policies,
                now,
                active=active,
                pending=list(jobs),
                seed=int(now * 1000),
            )

        try:
            snapshot = snapshot_of(waiting)
            wanted, deciders = self._decider.decide(snapshot, charge.digests)
            plan, rejections = check(wanted, snapshot)
        except STORE_FAULTS:
            raise
        except Exception as error:
            self._leave_out(waiting, snapshot_of, error)
            return None
        reasons = dict(plan.reasons)
        partitions = {view.id: view.spec.partition for view in snapshot.pending}
        for action in plan.actions:
            if isinstance(action, Start):
                partition = partitions[action.job_id]
                reasons[action.job_id] = _not_started(action, modes.get(partition), deciders[partition])
        with self._store.transaction():
            for rejection in rejections:
                data = {"action": repr(rejection.action)[:500], "why": rejection.why}
                self._store.append([Event(time=now, kind="plan_rejected", data=data)])
            self._reasons.write(waiting, reasons, now)
        return SlurmDecision(snapshot, plan, deciders)

    def _leave_out(
        self, waiting: list[JobRecord], snapshot_of: Callable[[Sequence[JobRecord]], Snapshot], error: Exception
    ) -> None:
        """After a decision that raised: jobs that make it raise, each for itself, are not decided on any more."""

        def fails(some: Sequence[JobRecord]) -> bool:
            try:
                snapshot = snapshot_of(some)
                check(decide(snapshot), snapshot)
            except STORE_FAULTS:
                raise
            except Exception:
                return True
            return False

        found = isolated(waiting, fails)
        self._undecidable |= {job.id for job in found}
        what = f"{type(error).__name__}: {error}"[:500]
        blamed = ", ".join(job.id for job in found[:5])
        line = f"no decision was made: {what}; " + (
            f"left to Slurm: {blamed}" if found else "no single job is the cause"
        )
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def _read_now(records: Mapping[str, NodeRecord], news: Mapping[str, NodeObservation]) -> dict[str, NodeRecord]:
    """The records with what has come in just now."""
    found = dict(records)
    for name, read in news.items():
        if isinstance(read.result, NodeReading) and read.result.wiring is not None:
            found[name] = with_news(records.get(name, NodeRecord(name=name)), read.result)
    return found


def _has_known_gpus(job: JobRecord) -> bool:
    return job.slurm is not None and bool(job.slurm.gpus)


def _not_started(action: Start, mode: SlurmMode | None, policy: PolicySpec) -> Reason:
    """Why a job waits that the policy would start: it is Slurm that starts it."""
    where = ", ".join(part.node for part in action.allocation.parts)
    does = "starts it now" if mode is SlurmMode.DECIDE else "would start it now"
    return Reason(code=ReasonCode.PRIORITY, message=f"{policy.name} {does} on {where}; Slurm has not started it yet")
