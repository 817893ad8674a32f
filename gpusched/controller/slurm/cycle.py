"""One cycle beside Slurm: apply commands, read nodes and Slurm, mirror, account, decide, check, apply."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpusched.cluster.base import ClusterBackend, NodeObservation
from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.deciding import Decider
from gpusched.controller.estimating import EstimateWriter
from gpusched.controller.ledger import UsageWriter, run_of
from gpusched.controller.metering import Timings
from gpusched.controller.nodestate import with_result
from gpusched.controller.planning import PendingReasonWriter, failing_alone
from gpusched.controller.promoting import LivePolicies, load_active_policies
from gpusched.controller.secretfiles import SecretFiles
from gpusched.controller.shadowing import Shadowing
from gpusched.controller.slurm.advised import all_advised_jobs, without_advice
from gpusched.controller.slurm.devices import devices_of
from gpusched.controller.slurm.following import JobMirror, Missing
from gpusched.controller.slurm.guesses import with_guesses
from gpusched.controller.slurm.mirror import (
    UNACCOUNTED,
    MirrorContext,
    MirrorResult,
    ended_in_accounting,
    ended_unknown,
    ends_unaccounted,
)
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

if TYPE_CHECKING:
    from gpusched.controller.slurm.applying import LeaseApplier

READ_AT = "slurm_read_at"  # meta: time of the last reading of Slurm (Unix seconds)
MISSING = "slurm_missing"  # meta: jobs absent from the last reading of Slurm: `Missing` by id, as JSON
ACCOUNTING_DELAY_S = 60.0  # how long Slurm's accounting may take to report a job that slurmctld has purged
MAX_ASKED = 1000  # purged jobs that Slurm's accounting is asked about in a cycle
UNLIMITED = 1_000_000
_log = logging.getLogger(__name__)


class SlurmDecision(NamedTuple):
    """A checked plan, its snapshot, and the policy that decided in each partition."""

    snapshot: Snapshot
    plan: Plan
    deciders: Mapping[str, PolicySpec]


class SlurmCycle:
    """The controller's state between cycles beside Slurm; all that matters is in Slurm or in the store."""

    def __init__(
        self,
        store: Store,
        state: Path,
        inventory: Inventory,
        policies: dict[str, PolicySpec],
        cluster: ClusterBackend,
        clock: Callable[[], float] = time.time,
        slurm: Slurm | None = None,
        applier: LeaseApplier | None = None,
        timings: Timings | None = None,
    ) -> None:
        self._store, self._cluster, self._clock = store, cluster, clock
        self.inventory, self.policies = inventory, policies  # as declared; promoted policies override them
        self.inbox = Inbox(state)
        self._secrets = SecretFiles(state)
        self._slurm = slurm or Slurm()
        self._reader = SlurmReader(self._slurm)
        self._applier = applier
        missing = msgspec.json.decode(store.meta(MISSING) or "{}", type=dict[str, Missing])
        self._mirror = JobMirror(store.job, [*store.pending(), *store.active()], missing)
        self._array_limits = store.array_limits()
        self._timings = timings or Timings()
        self._decider, self._shadowing = Decider(store, self._timings), Shadowing(store)
        self._estimator, self._reasons = EstimateWriter(store), PendingReasonWriter(store)
        self._ledger = UsageWriter(store)
        self._failing: dict[str, tuple[float, str]] = {}  # node that cannot be read -> since when, why
        self._undecidable: set[str] = set()
        self._modes: Mapping[str, SlurmMode] = {}
        self._logged: set[str] = set()

    def close(self) -> None:
        """Leave no process behind."""
        self._decider.close()

    def warm_up(self) -> None:
        """Compile the active agents' passes, so that their first decision is in time."""
        self._decider.warm_up(*load_active_policies(self._store, self.inventory, self.policies, self._clock()))

    def run(self, patience_s: float) -> None:
        """Run one cycle, waiting for slow nodes at most ``patience_s``."""
        now = self._clock()
        self._timings.begin()
        CommandApplier(self._store, self.inbox, self.inventory, self._secrets).apply_inbox(now)
        live = load_active_policies(self._store, self.inventory, self.policies, now)
        modes = live_modes(self.inventory, self._store)
        self._decider.refresh(*live, now)
        self._store.set_meta("heartbeat", str(now))  # before Slurm is asked, which may take long
        if modes == self._modes and not self._reader.is_due(now):
            return
        self._modes = modes
        askable = [node for node in self.inventory.nodes if node.transport != "none"]
        self._timings.end("commands")
        # Nothing stays open on nodes: Slurm's epilogs may reset GPUs.
        observations = self._cluster.observe(askable, patience_s, frozenset(), {node.name for node in askable})
        # Read Slurm after the nodes, so that it covers which jobs held the GPUs up to their readings.
        reading = self._read_slurm(SlurmMode.ADVISE in modes.values())
        self._timings.end("observe")
        now = self._clock()
        self._record(reading, observations, now)
        self._timings.end("record")
        if reading is None:
            return
        decision = self._decide(live, modes, now)
        self._timings.end("decide")
        try:
            if self._applier is not None:
                self._applier.apply(self.inventory, modes, reading, decision, now)
        except NoAnswer as error:
            self._note_trouble(error, now)
        if decision is not None:
            self._shadowing.ask(self.inventory, decision.snapshot, decision.plan)
        self._timings.end("send")

    def _read_slurm(self, site_factors: bool) -> SlurmReading | None:
        """Return Slurm's state; None if it does not respond, and then nothing may be decided for it."""
        now = self._clock()
        try:
            reading = self._reader.read(now, site_factors)
        except NoAnswer as error:
            self._note_trouble(error, now)
            return None
        if self._store.meta(TROUBLE):
            self._store.set_meta(TROUBLE, "")
            _log.info("Slurm responds again")
        return reading

    def _note_trouble(self, error: NoAnswer, now: float) -> None:
        known = self._store.meta(TROUBLE)
        since = msgspec.json.decode(known, type=Trouble).since if known else now
        self._store.set_meta(TROUBLE, msgspec.json.encode(Trouble(since=since, why=error.line())).decode())
        if not known:
            _log.warning("no decisions until Slurm responds: %s", error.line())

    # -- recording what is ---------------------------------------------------------------------------------------

    def _record(self, reading: SlurmReading | None, observations: dict[str, NodeObservation], now: float) -> None:
        """Record this cycle's readings in jobs, nodes and usage, in one transaction."""
        before = self._store.node_records()
        active = {job.id: job for job in self._active()}
        observed = self._observed(observations, before, now)
        context, steps = None, list[MirrorResult]()
        if reading is not None:
            features = {node.name: node.features for node in reading.nodes.values() if node.features}
            site = SlurmContext(inventory=self.inventory, partitions=reading.partitions, features=features)
            devices = devices_of(self.inventory, reading.gres_conf, reading.nodes, _with_wiring(before, observed))
            standing = self._standing(reading)
            context = MirrorContext(site=site, positions=reading.positions, standing=standing, devices=devices, now=now)
            steps = self._mirror.steps(reading.jobs, context) + self._disappeared(reading, now)
        with self._store.transaction():
            self._write(steps)
            after = {job.id: job for job in self._active()}
            if context is not None and reading is not None:
                guesses = with_guesses(after.values(), context.site)
                self._store.put_jobs(guesses)
                after |= {job.id: job for job in guesses}
                self._put_array_limits(reading)
                self._put_reservations(reading, now)
                self._put_nodes(reading, before, observed, active, after, now)
                self._store.set_meta(READ_AT, str(now))
            self._charge(before, observed, active, after, steps, now)
            self._store.set_meta("heartbeat", str(now))
        if context is not None and reading is not None:
            self._mirror.mark_stored(steps, reading.jobs, context)

    def _observed(
        self, observations: Mapping[str, NodeObservation], before: Mapping[str, NodeRecord], now: float
    ) -> dict[str, NodeObservation]:
        observed = {}
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
                observed[node.name] = read
        return observed

    def _disappeared(self, reading: SlurmReading, now: float) -> list[MirrorResult]:
        """Return what happened to jobs that had not ended at the last reading, and that Slurm no longer lists."""
        missing = self._mirror.missing(reading.jobs, self._store.number(READ_AT, now), now)
        jobs = [job for name in missing if (job := self._store.job(name)) is not None]
        asked = jobs[:MAX_ASKED]
        text = self._ends_of(asked, min(missing[job.id].named_at for job in asked), now) if asked else ""
        if text is None:
            missing = self._mirror.note_silence(now)
        noted = msgspec.json.encode(missing).decode()
        if noted != (self._store.meta(MISSING) or "{}"):
            self._store.set_meta(MISSING, noted)
        if text is None:
            return [step for job in jobs if (step := ends_unaccounted(job, now)) is not None]
        rows, steps = ended_jobs(text), []
        for job in asked:
            facts, found = job.slurm, rows.get(slurm_id(job.id), [])
            ended = [row for submit, row in found if facts is not None and submit >= facts.submit_time]
            if ended:
                steps.append(ended_in_accounting(job, ended[-1].state, ended[-1].start_time, ended[-1].end_time))
            elif now - missing[job.id].since >= ACCOUNTING_DELAY_S:
                steps.append(ended_unknown(job, now))
        return steps

    def _ends_of(self, jobs: Sequence[JobRecord], named_at: float, now: float) -> str | None:
        """Return what Slurm's accounting says of jobs since then; "": there is none; None: it does not answer."""
        try:
            return self._slurm.ended(named_at - ACCOUNTING_DELAY_S, now, [slurm_id(job.id) for job in jobs])
        except NoAnswer as error:
            if error.line() not in self._logged:
                self._logged.add(error.line())
                _log.warning("cannot query the end of jobs that slurmctld has purged: %s", error.line())
        with contextlib.suppress(NoAnswer):
            return None if "slurmdbd" in self._slurm.config().get("AccountingStorageType", "") else ""
        return None

    def _active(self) -> list[JobRecord]:
        """Return the active jobs; those that Slurm no longer lists hold nothing."""
        return [job for job in self._store.active() if job.reason != UNACCOUNTED]

    def _write(self, steps: list[MirrorResult]) -> None:
        self._store.put_jobs(step.job for step in steps)
        self._store.append(event for step in steps for event in step.events)
        for step in steps:
            if step.began:
                self._store.open_run(run_of(step.job, self.inventory))
            if step.ended is not None:
                self._store.close_run(step.job.id, *step.ended)

    def _put_array_limits(self, reading: SlurmReading) -> None:
        found = {job.array_id: job.array_limit for job in reading.jobs if job.array_id and job.state == "PENDING"}
        for array, limit in found.items():
            if limit is None and array not in self._array_limits:
                continue
            if self._array_limits.get(array) != (limit or UNLIMITED):
                self._array_limits[array] = limit or UNLIMITED
                self._store.set_meta(f"array_limit:{array}", str(limit or UNLIMITED))

    def _put_reservations(self, reading: SlurmReading, now: float) -> None:
        """Mirror Slurm's reservations; one that Slurm no longer has ends now, if it had begun."""
        existing = {r.name: r for r in self._store.reservations(now)}
        found = {r.name: r for r in calendar_of(reading.reservations, {n.name for n in self.inventory.nodes})}
        for name, r in existing.items():
            if name not in found and r.begin < now:
                self._store.put_reservation(msgspec.structs.replace(r, end=now), now)
            elif name not in found:
                self._store.drop_reservation(name, now)
        for name, r in found.items():
            if existing.get(name) != r:
                self._store.put_reservation(r, now)

    def _standing(self, reading: SlurmReading) -> dict[str, int]:
        """Return Slurm's id -> priority without our advice, of the advised jobs."""
        if not (ordered := all_advised_jobs(self._store)):
            return {}
        waiting = {job.id: job for job in reading.jobs if job.state == "PENDING"}
        bases = without_advice(waiting, ordered & waiting.keys(), not self._slurm.has_factors)
        return {job: max(1, base) for job, base in bases.items()}  # as Slurm reports the others

    def _put_nodes(
        self,
        reading: SlurmReading,
        before: Mapping[str, NodeRecord],
        observed: dict[str, NodeObservation],
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
            holders, read = held.get(node.name, {}), observed.get(node.name)
            if read is not None and isinstance(read.result, NodeReading):
                result = with_known_processes(read.result, holders, was_held.get(node.name, {}), jobs)
                read = observed[node.name] = msgspec.structs.replace(read, result=result)
            record, facts = record_beside_slurm(
                before.get(node.name, NodeRecord(name=node.name)), node, reading.nodes.get(node.name), read, holders,
                node.name in busy, node.name in reserved, self._failing.get(node.name, (0.0, ""))[1], now,
            )  # fmt: skip
            records.append(record)
            events += facts
        self._store.put_nodes(records)
        self._store.append(events)

    def _charge(
        self,
        before: Mapping[str, NodeRecord],
        observed: Mapping[str, NodeObservation],
        active: Mapping[str, JobRecord],
        after: Mapping[str, JobRecord],
        steps: list[MirrorResult],
        now: float,
    ) -> None:
        """Charge the time since the last readings, except to jobs whose GPUs Slurm does not name."""
        current = {**active, **{step.job.id: step.job for step in steps}, **after}
        pairs = [(active.get(name, job), job) for name, job in current.items() if name in active or job.start_time]
        known = [(old, new) for old, new in pairs if _has_known_gpus(new if new.allocation is not None else old)]
        self._ledger.charge(self.inventory, before, observed, [old for old, _ in known], [new for _, new in known], now)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, live: LivePolicies, modes: Mapping[str, SlurmMode], now: float) -> SlurmDecision | None:
        """Return the checked plan; None if no job is pending, or deciding failed."""
        waiting = [job for job in self._store.pending() if job.id not in self._undecidable and job.slurm is not None]
        active = self._active()
        if not waiting:
            return None
        shadows = [shadow.spec for shadow in self._store.shadows().values() if shadow.until is None]
        self._estimator.run([*live.policies.values(), *shadows], now)

        def snapshot_of(jobs: Sequence[JobRecord]) -> Snapshot:
            return snapshot_of_store(
                self._store,
                self.inventory,
                live.policies,
                now,
                active=active,
                pending=list(jobs),
                seed=int(now * 1000),
            )

        try:
            snapshot = snapshot_of(waiting)
            proposed, deciders = self._decider.decide(snapshot, live.digests)
            plan, rejections = check(proposed, snapshot)
        except STORE_FAULTS:
            raise
        except Exception as error:
            self._leave_to_slurm(waiting, snapshot_of, error)
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

    def _leave_to_slurm(
        self, waiting: list[JobRecord], snapshot_of: Callable[[Sequence[JobRecord]], Snapshot], error: Exception
    ) -> None:
        """Leave to Slurm each job that by itself makes a decision raise, after one raised."""

        def fails(some: Sequence[JobRecord]) -> bool:
            try:
                snapshot = snapshot_of(some)
                check(decide(snapshot), snapshot)
            except STORE_FAULTS:
                raise
            except Exception:
                return True
            return False

        failing = failing_alone(waiting, fails)
        self._undecidable |= {job.id for job in failing}
        description = f"{type(error).__name__}: {error}"[:500]
        blamed = ", ".join(job.id for job in failing[:5])
        line = f"no decision was made: {description}; " + (
            f"left to Slurm: {blamed}" if failing else "no single job is the cause"
        )
        if line not in self._logged:
            self._logged.add(line)
            _log.error("%s", line, exc_info=error)


def _with_wiring(records: Mapping[str, NodeRecord], observed: Mapping[str, NodeObservation]) -> dict[str, NodeRecord]:
    """Return the node records updated by the latest readings."""
    found = dict(records)
    for name, read in observed.items():
        if isinstance(read.result, NodeReading) and read.result.wiring is not None:
            found[name] = with_result(records.get(name, NodeRecord(name=name)), read.result)
    return found


def _has_known_gpus(job: JobRecord) -> bool:
    return job.slurm is not None and bool(job.slurm.gpus)


def _not_started(action: Start, mode: SlurmMode | None, policy: PolicySpec) -> Reason:
    """Return why a job is pending that the policy would start: Slurm has not started it."""
    nodes = ", ".join(part.node for part in action.allocation.parts)
    does = "starts it now" if mode is SlurmMode.DECIDE else "would start it now"
    return Reason(code=ReasonCode.PRIORITY, message=f"{policy.name} {does} on {nodes}; Slurm has not started it yet")
