"""One cycle: record outcomes, apply commands, observe, reconcile, account, decide, check, launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from gpusched.cluster.base import ClusterBackend, NodeObservation, Operation, RankKey
from gpusched.config.paths import SHARED_STATE, log_path, result_path
from gpusched.controller.cleanup import clean_up_leftovers, forget_jobs, remove_strays
from gpusched.controller.commandfiles import CommandApplier, requeue_fields
from gpusched.controller.cutting import CutPlanner, begin_cuts, has_cuts, nodes_being_cut, settle_cuts
from gpusched.controller.deciding import Decider
from gpusched.controller.escalating import stuck_message
from gpusched.controller.estimating import EstimateWriter
from gpusched.controller.healthchecks import CheckSchedule, before_job_checks, reasons_against_jobs
from gpusched.controller.idleness import judge_idle
from gpusched.controller.injob import InJobCommandHandler, Prepare
from gpusched.controller.launcher import Launcher
from gpusched.controller.launchfaults import Failures, Fault, image_of, judge_nodes, with_failure, with_success
from gpusched.controller.learning import learn
from gpusched.controller.ledger import UsageWriter, run_of
from gpusched.controller.metering import Timings
from gpusched.controller.nodestate import (
    is_dead,
    may_forget_leftovers,
    removed_record,
    update_record,
    with_removed,
    without_gap,
)
from gpusched.controller.outcomes import OutcomeRecorder
from gpusched.controller.outputs import CollectionRetries, readers_of
from gpusched.controller.planning import CycleDecision, Planner
from gpusched.controller.progress import record_progress
from gpusched.controller.promoting import LivePolicies, load_active_policies
from gpusched.controller.ranks import ReconcileInput, ReconcileResult, rank_key
from gpusched.controller.reconcile import reconcile_job
from gpusched.controller.recovery.unsettled import UnsettledNodes
from gpusched.controller.secretfiles import SecretFiles
from gpusched.controller.shadowing import Shadowing
from gpusched.model.attemptrecords import attempt_record
from gpusched.model.events import Event
from gpusched.model.health import to_requeue
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.outputs import expand_error, expand_output
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.slices import Cut
from gpusched.model.snapshot import Snapshot
from gpusched.queue.inbox import Inbox
from gpusched.queue.lifecycle import set_aside
from gpusched.queue.snapshots import held_gpus, snapshot_of_store
from gpusched.queue.store import FailedLaunch, NodeRecord, RankRecord, Store
from gpusched.sched.slices.plan import cuts_of

FORGET_PROGRAMS_S = 60.0


class Cycle:
    """The controller's state between cycles, nearly all of which can be read again from the store."""

    def __init__(
        self,
        store: Store,
        state: Path,
        inventory: Inventory,
        policies: dict[str, PolicySpec],
        cluster: ClusterBackend,
        clock: Callable[[], float] = time.time,
        prepare: Prepare | None = None,
        timings: Timings | None = None,
        arrange: Callable[[Snapshot], Iterable[Cut]] = cuts_of,
    ) -> None:
        self._store, self._state, self._cluster, self._clock = store, state, cluster, clock
        self._timings = timings or Timings()
        self.inventory, self.policies = inventory, policies  # as declared; promoted policies override them
        self._observed = inventory  # plus removed nodes on which ranks remain
        self._decider, self._shadowing = Decider(store, self._timings), Shadowing(store)
        self.inbox = Inbox(state)
        self._secrets = SecretFiles(state)
        self._programs_checked_at, self._ends_seen = 0.0, store.latest_event()
        cluster_id = store.meta("cluster_id")
        assert cluster_id is not None
        self._cluster_id = cluster_id
        self._collection_retries = CollectionRetries()
        self._read_at: dict[str, float] = {}
        self._being_cut: Set[str] = frozenset()
        self._has_cuts = False
        self._drained = _drained(store.node_records())
        self._cuts, self._checks = CutPlanner(arrange), CheckSchedule()
        self._reported_strays: set[RankKey] = set()
        self._ledger = UsageWriter(store)
        self._in_job_commands = InJobCommandHandler(store, self.inbox, prepare)
        self._launcher = Launcher(store, self._secrets, cluster_id, state == SHARED_STATE)
        self._outcomes = OutcomeRecorder(store, self._collection_retries, self._launcher.errors)
        self._unsettled = UnsettledNodes(store, cluster_id)
        self._planner = Planner(store, self._launcher, self._decider, EstimateWriter(store), self._unsettled.reasons)

    def is_unsettled(self, node: str) -> bool:
        """Return whether a node has not answered since the store was recovered; safe in any thread."""
        return node in self._unsettled

    def take_over(self, previous: Cycle) -> None:
        """Take over the operation outcomes of a cycle that could not be recorded."""
        self._outcomes.unrecorded = previous._outcomes.unrecorded

    def run(self, patience_s: float) -> None:
        """Run one cycle, waiting for slow nodes at most ``patience_s``.

        Nodes without jobs that answered within the last tick are not probed again, since a wake-up between ticks rarely
        concerns them. If a start needs one of them, it is probed first and the decision repeated; if that decision
        needs yet another one, all nodes are probed.
        """
        now = self._clock()
        self._timings.begin()
        self._outcomes.record(self._cluster.finished())
        CommandApplier(self._store, self.inbox, self.inventory, self._secrets).apply_inbox(now)
        policies = load_active_policies(self._store, self.inventory, self.policies, now)
        self._decider.refresh(*policies, now)
        self._timings.end("commands")
        recent = skipped = self._recently_read(now)
        needed = self._observe_and_decide(patience_s, skipped, recent, policies)
        if needed:
            self._outcomes.record(self._cluster.finished())
            # Probe just the nodes that a start needs; a second decision may still need others.
            skipped = {node.name for node in self._observed.nodes} - needed
            needed = self._observe_and_decide(patience_s, skipped, recent - needed, policies)
        if needed:
            self._outcomes.record(self._cluster.finished())
            self._observe_and_decide(patience_s, frozenset(), frozenset(), policies)
        # After the decision, so that what a job waits for goes before what is due by its interval.
        self._cluster.perform(self._checks.due(self._store, self.inventory, self._cluster.busy(), self._clock()))
        self._remove_old_secrets()
        self._timings.end("send")

    def _recently_read(self, now: float) -> Set[str]:
        """Return the nodes that need not be probed in this cycle."""
        since = now - self.inventory.settings.tick_s
        quiet = {name for name, at in self._read_at.items() if since < at <= now}
        return quiet - self._store.nodes_of_ranks() - self._being_cut

    def _observe_and_decide(
        self, patience_s: float, skipped: Set[str], recent: Set[str], policies: LivePolicies
    ) -> Set[str]:
        """Observe all nodes but ``skipped``, record the result, and start jobs.

        Nothing starts if a start needs a node of ``recent`` that was not observed.

        Returns:
            The nodes of ``recent`` that must be observed first; empty: the decision was carried out.
        """
        self._observed = self._inventory_to_observe()
        observations = self._cluster.observe(self._observed.nodes, patience_s, skipped, self._drained)
        self._timings.end("observe")
        now = self._clock()
        observations = self._unsettled.withhold(self._observed, observations, now)
        self._read_at |= {name: now for name, o in observations.items() if o.complete_reading is not None}
        self._cluster.perform(self._record(observations, now))
        self._cluster.perform(self._in_job_commands.answers(observations, self.inventory, now))
        self._timings.end("record")
        decided = self._planner.plan(self.inventory, policies, recent - observations.keys(), now)
        self._timings.end("decide")
        if decided is not None:
            if decided.unread:
                return decided.unread
            self._cluster.perform(decided.operations)
            self._shadowing.ask(self.inventory, decided.snapshot, decided.plan)
        self._cut_gpus(policies, decided, observations.keys(), now)
        return frozenset()

    def _cut_gpus(
        self, policies: LivePolicies, decided: CycleDecision | None, observed: Set[str], now: float
    ) -> None:
        """Begin the cuts that the jobs that wait now, after this cycle's starts, ask for, on nodes just observed."""
        asked = decided is not None and any(job.spec.profile for job in decided.snapshot.pending)
        if not (asked and any(node.cut_on_demand() for node in self.inventory.nodes)) and not self._has_cuts:
            return
        if decided is not None and not decided.plan.actions:
            snapshot = decided.snapshot  # nothing has changed since
        else:
            snapshot = snapshot_of_store(self._store, self.inventory, policies.policies, now)
        operations = begin_cuts(self._store, self.inventory, self._cuts.cuts(snapshot, observed), now)
        self._being_cut |= {operation.node for operation in operations}
        self._cluster.perform(operations)

    def _inventory_to_observe(self) -> Inventory:
        left = self._store.nodes_of_ranks() - {node.name for node in self.inventory.nodes}
        return with_removed(self.inventory, self._store.node_records(), left, self._clock()) if left else self.inventory

    def close(self) -> None:
        """Leave no process behind."""
        self._decider.close()
        self._unsettled.close()

    def warm_up(self) -> None:
        """Compile the active agents' passes, so that their first decision is in time."""
        self._decider.warm_up(*load_active_policies(self._store, self.inventory, self.policies, self._clock()))

    # -- recording what is ---------------------------------------------------------------------------------------

    def _record(self, observations: dict[str, NodeObservation], now: float) -> list[Operation]:
        """Record this cycle's observations in nodes, jobs, ranks and usage, in one transaction; return operations."""
        gap_s = now - self._store.number("heartbeat", now)
        before = without_gap(self._store.node_records(), gap_s, self.inventory.settings)
        active = self._store.active()
        ranks = self._store.ranks()
        held = held_gpus(active)
        busy_nodes = {p.node for job in active if job.allocation for p in job.allocation.parts}
        unfit = reasons_against_jobs(self._store, self.inventory)
        records: dict[str, NodeRecord] = {}
        events: list[Event] = []
        for node in self._observed.nodes:
            records[node.name], news = update_record(
                before.get(node.name, NodeRecord(name=node.name)),
                node,
                observations.get(node.name),
                held.get(node.name, {}),
                node.name in busy_nodes,
                self.inventory.settings,
                now,
                stuck_message(node.name, ranks),
                left=self.inventory.node(node.name) is None,
                unfit=unfit.get(node.name, ""),
            )
            events += news
            records[node.name], news = settle_cuts(
                records[node.name], observations.get(node.name), self._cluster.busy(), now
            )
            events += news
        self._being_cut = nodes_being_cut(records)
        self._has_cuts = any(node.cut_on_demand() and has_cuts(records[node.name]) for node in self.inventory.nodes)
        self._drained = _drained(records)
        unobserved = {rank.node for rank in ranks} | {name for name, record in before.items() if record.left}
        # Nodes that left the inventory and are not observed any more; their records keep when they were first missed.
        for name in unobserved - records.keys():
            records[name] = removed_record(before.get(name, NodeRecord(name=name)), now)
        steps = self._reconcile(active, ranks, before, records, observations, now)
        # One transaction: a crash leaves either all of this cycle in the store or nothing, and the operations returned
        # here are sent after the commit. Each step reads what those before it wrote.
        with self._store.transaction():
            operations = self._apply_steps(steps, records, events, now)
            record_progress(self._store, active, observations)
            ended = [job for job, step in zip(active, steps, strict=True) if step.ended_attempt is not None]
            learn(self._store, self.inventory, ended)
            operations += self._clean_up(observations, records, now)
            self._store.put_nodes(records.values())
            self._store.append(events)
            after = [s.job for s in steps]
            self._ledger.charge(self._observed, before, observations, active, after, now)
            idle = judge_idle(after, before, observations, self.inventory, now)
            self._store.put_jobs(idle.changed)
            self._store.append(idle.events)
            self._store.set_meta("heartbeat", str(now))
        return operations

    def _reconcile(
        self,
        active: list[JobRecord],
        ranks: list[RankRecord],
        before: dict[str, NodeRecord],
        records: dict[str, NodeRecord],
        observations: dict[str, NodeObservation],
        now: float,
    ) -> list[ReconcileResult]:
        settings = self.inventory.settings
        allocated = {p.node for job in active if job.allocation for p in job.allocation.parts}
        inputs = ReconcileInput(
            now=now,
            settings=settings,
            observations=observations,
            dead=frozenset(n for n in allocated if n not in records or is_dead(records[n], settings, now)),
            busy=self._cluster.busy(),
            launch_errors=self._launcher.errors,
            earlier=before,
            failed_launches={name: record.failed_launches for name, record in records.items()},
            checks=before_job_checks(self.inventory),
            failed_gpus={
                node.name: to_requeue(records[node.name].health.conditions, node.health, node.indices())
                for node in self._observed.nodes if records[node.name].health.conditions
            },
        )  # fmt: skip
        by_attempt: dict[tuple[str, int], list[RankRecord]] = {}
        for rank in sorted(ranks, key=rank_key):
            if rank.hot == "left":
                continue  # a leftover, as of an attempt that ended
            by_attempt.setdefault((rank.job_id, rank.attempt), []).append(rank)
        return [_reconcile_or_set_aside(job, by_attempt.get((job.id, job.attempt), []), inputs) for job in active]

    def _apply_steps(
        self, steps: list[ReconcileResult], records: dict[str, NodeRecord], events: list[Event], now: float
    ) -> list[Operation]:
        operations: list[Operation] = []
        for step in steps:
            operations += step.operations
            operations += self._launcher.launch_operations(self._observed, step.job, step.to_launch)
            events += step.events
            self._store.put_ranks(step.ranks.values())
            if step.began is not None:
                self._store.open_run(run_of(step.began, self.inventory))
            events += self._judge_launch(step, records, now)
            if step.span_from is not None and step.ended_attempt is None:
                self._store.close_run(step.job.id, step.job.attempt, step.span_from, JobState.PENDING)
                self._store.open_run(run_of(step.job, self.inventory, step.span_from))
            if step.ended_attempt is not None:
                end, outcome = step.ended_attempt
                self._store.close_run(step.job.id, step.job.attempt, end, outcome, step.worked_until)
        self._store.put_jobs(step.job for step in steps if step.events)
        return operations

    def _judge_launch(self, step: ReconcileResult, records: dict[str, NodeRecord], now: float) -> list[Event]:
        """Update the failed launches in ``records`` by a launch that failed or succeeded; return events."""
        if step.launch_failed is None and step.began is None:
            return []
        job = step.began or step.job
        failures: Failures = {name: record.failed_launches for name, record in records.items()}
        launch = FailedLaunch(job=job.id, user=job.user, image=image_of(job), gpus=job.spec.gpus_per_node > 0)
        why = ""
        if step.launch_failed is not None:
            node, error, fault = step.launch_failed
            failures = with_failure(failures, node, msgspec.structs.replace(launch, own=fault is Fault.OWN))
            why = f"the last, of job {job.id}: {' '.join(error.split())}"
        elif any(failures.values()):
            for part in job.allocation.parts if job.allocation else ():
                failures = with_success(failures, part.node, launch)
        else:
            return []
        changed, events = judge_nodes(self.inventory, records, failures, now, why)
        records.update(changed)
        return events

    def _remove_old_secrets(self) -> None:
        """Remove the secrets of ended jobs; only committed states count."""
        self._ends_seen, ended = self._store.ended_since(self._ends_seen)
        now = self._clock()
        job_ids = [name for name in {job_id.partition("_")[0] for job_id in ended} if self._secrets.has_any(name)]
        if is_due := abs(now - self._programs_checked_at) > FORGET_PROGRAMS_S:  # there may be thousands of files
            self._programs_checked_at = now
            job_ids = self._secrets.job_ids()
        for job_id in job_ids:
            if not self._store.has_unended(job_id):
                self._secrets.delete(job_id)
        if is_due:
            self._secrets.programs.delete_unless(self._store.has_unended)

    def _clean_up(
        self, observations: dict[str, NodeObservation], records: dict[str, NodeRecord], now: float
    ) -> list[Operation]:
        current = {(job.id, job.attempt) for job in self._store.active()}
        ranks = self._store.ranks()
        leftovers = [r for r in ranks if (r.job_id, r.attempt) not in current or r.hot == "left"]
        busy = self._cluster.busy()
        forgotten = {n for n, r in records.items() if self.inventory.node(n) is None and may_forget_leftovers(r, now)}
        old = clean_up_leftovers(leftovers, observations, forgotten, busy, now)
        removed = self._outcomes.removed_lately(now)
        known = frozenset(map(rank_key, ranks))
        strays = remove_strays(
            self._observed.nodes, known, removed, observations, self._cluster_id, busy, now, self._reported_strays
        )
        self._store.append([*old.events, *strays.events])
        self._store.put_ranks(old.changed)
        for rank in old.settled:
            self._store.remove_rank(rank)
        self._launcher.forget_errors({rank_key(r) for r in ranks if (r.job_id, r.attempt) in current})
        forget = forget_jobs(self._observed.nodes, observations, lambda job: not self._store.has_unended(job), busy)
        ended = [self._with_record(operation, records.get(operation.node), now) for operation in old.operations]
        operations = [self._with_destination(operation) for operation in (*ended, *strays.operations, *forget)]
        return [o for o in operations if o.verb != "collect" or self._collection_retries.is_due(o.key, now)]

    def _with_record(self, operation: Operation, node: NodeRecord | None, now: float) -> Operation:
        """Add what the node keeps of an ended attempt to its removal."""
        job = self._store.job(operation.rank.job_id) if operation.verb == "remove" else None
        if job is None:
            return operation
        rank, reading = operation.rank, node.reading if node is not None else None
        is_later, runs = job.attempt != rank.attempt, list[dict[str, Any]]()
        if is_later or (job.state is JobState.PENDING and job.allocation is None):
            runs = [msgspec.to_builtins(run) for run in self._store.runs_of_attempt(job.id, rank.attempt)]
        if is_later:  # its present attempt has a record of its own
            if not runs:
                return operation
            job = msgspec.structs.replace(job, state=JobState.PENDING, attempt=rank.attempt, **requeue_fields(""))
        record = attempt_record(job, rank.rank, rank.runtime, rank.gpus, rank.intended_at, reading, now, tuple(runs))
        return msgspec.structs.replace(operation, note=record.decode())

    def _with_destination(self, operation: Operation) -> Operation:
        if operation.verb != "collect":
            return operation
        job = self._store.job(operation.rank.job_id)
        log = str(log_path(self._state, *operation.key)) if operation.rank.output is None else None
        left = str(result_path(self._state, *operation.key)) if job is not None and job.spec.function else None
        finish = _has_own_files(job, operation.rank)
        readers = readers_of(job, self.inventory) if log is not None or left is not None else ()
        return msgspec.structs.replace(operation, destination=log, result=left, finish=finish, readers=readers)


def _has_own_files(job: JobRecord | None, rank: RankRecord) -> bool:
    """Return whether a rank's output has files of the job's which are not a later attempt's by now.

    Those must not be written anew.
    """
    if job is None:
        return rank.output is not None
    files = {rank.output, expand_error(job, rank.rank, rank.node)} - {None}
    if not files or job.attempt <= rank.attempt or job.spec.append:
        return bool(files)
    parts = job.allocation.parts if job.allocation is not None else ()
    later = {expand(job, part.rank, part.node) for part in parts for expand in (expand_output, expand_error)}
    return bool(parts) and files.isdisjoint(later)


def _drained(records: Mapping[str, NodeRecord]) -> Set[str]:
    """Return the nodes that were drained, with jobs left or not: one of their GPUs may have to be reset."""
    return {name for name, record in records.items() if record.drain_reason is not None}


def _reconcile_or_set_aside(job: JobRecord, ranks: list[RankRecord], inputs: ReconcileInput) -> ReconcileResult:
    """Return the job's next step. A job whose step raises is set aside, so that it cannot fail the whole cycle."""
    try:
        return reconcile_job(job, ranks, inputs)
    except Exception as error:
        failed, event = set_aside(job, error, inputs.now)
        began = job.start_time is not None
        return ReconcileResult(job=failed, events=[event], ended_attempt=(inputs.now, failed.state) if began else None)
