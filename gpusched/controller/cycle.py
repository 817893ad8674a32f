"""One cycle: settle what was done, fold what was asked, observe, reconcile, account, decide, check, apply, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpusched.cluster.base import Cluster, Observation, Outcome, RankKey, Work
from gpusched.config.paths import log_path
from gpusched.controller.deciding import Decider
from gpusched.controller.escalating import stuck_on, tried
from gpusched.controller.estimating import Estimator
from gpusched.controller.fold import OUR_DISK, Folder
from gpusched.controller.isolating import isolated
from gpusched.controller.launcher import Launcher
from gpusched.controller.launchfaults import Failures, image_of, judge_nodes, with_failure, with_success
from gpusched.controller.ledger import Ledger
from gpusched.controller.nodestate import attended, is_dead, is_forgotten, record_of_unknown, update_record
from gpusched.controller.outputs import MAX_FAILURES, Collecting, readers_of
from gpusched.controller.promoting import Charge, take_up
from gpusched.controller.reconcile import Step, World, rank_key, reconcile_job
from gpusched.controller.secretfiles import SecretFiles
from gpusched.controller.shadowing import Shadowing
from gpusched.controller.tidy import Tidy, reap_strays, tidy_leftovers
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, Ending, Job, JobState, Preemptions
from gpusched.model.plan import CancelJob, Plan, Preempt, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Inventory, Partition
from gpusched.model.snapshot import Snapshot
from gpusched.queue.inbox import Inbox
from gpusched.queue.lifecycle import move, set_aside
from gpusched.queue.snapshots import held_gpus, snapshot_of_store
from gpusched.queue.store import FailedLaunch, NodeRecord, RankRecord, Run, Store
from gpusched.sched.check import check
from gpusched.sched.decide import decide

MESSAGE_REFRESH_S = 30.0  # waiting messages hold durations; writing them all in every cycle would help nobody
REMEMBER_REMOVED_S = 600.0


class _Decided(NamedTuple):
    """What a decision leaves: the launches, what it was made from, and nodes that must be read before it can hold."""

    works: list[Work]
    snapshot: Snapshot
    plan: Plan
    unread: Set[str] = frozenset()


class Cycle:
    """The state of a controller between cycles: little more than what can be read again from the store."""

    def __init__(
        self,
        store: Store,
        state: Path,
        inventory: Inventory,
        policies: dict[str, PolicySpec],
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store, self._state, self._cluster, self._clock = store, state, cluster, clock
        self.inventory, self.policies = inventory, policies  # as declared; promotions go before them
        self._attended = inventory  # with nodes that left it while something of ours is on them
        self._say, self._undecided = say, ""
        self._decider, self._shadowing = Decider(store, say), Shadowing(store)
        self._estimator = Estimator(store, state, say)
        self.inbox = Inbox(state)
        self._secrets = SecretFiles(state)
        cluster_id = store.meta("cluster_id")
        assert cluster_id is not None
        self._cluster_id = cluster_id
        self._trouble: dict[RankKey, str] = {}  # of strays, which have no record
        self._collecting = Collecting()
        self._removed: dict[RankKey, float] = {}
        self._read_at: dict[str, float] = {}
        self._reaped: set[RankKey] = set()
        self._messages_at: dict[str, float] = {}
        self._ledger = Ledger(store)
        self._launcher = Launcher(store, self._secrets, cluster_id)

    def run(self, patience_s: float) -> None:
        """One cycle. Slow nodes are waited for no longer than ``patience_s``.

        Nodes without anything of ours are asked once a tick, and before something is placed on them: what wakes the
        controller in between is seldom about them.
        """
        unread = self._unasked(self._clock())
        if needed := self._once(patience_s, unread, unread):
            others = {node.name for node in self._attended.nodes} - needed
            if self._once(patience_s, others, unread - needed):  # with these as they are now, another one is wanted
                self._once(patience_s, frozenset(), frozenset())

    def _unasked(self, now: float) -> Set[str]:
        since = now - self.inventory.settings.tick_s
        return {name for name, at in self._read_at.items() if since < at <= now} - self._store.nodes_of_ranks()

    def _once(self, patience_s: float, unasked: Set[str], unread: Set[str]) -> Set[str]:
        """A cycle in which some nodes are not asked; where a start needs one that is ``unread``, it starts nothing.

        Args:
            patience_s: See `run`.
            unasked: Nodes that are not asked now.
            unread: Those of them that were last read in an earlier cycle.

        Returns:
            Of the unread those that must be asked; none where the cycle is over.
        """
        now = self._clock()
        self._settle(self._cluster.finished())
        Folder(self._store, self.inbox, self.inventory, self._secrets, self._say).fold(now)
        charge = take_up(self._store, self.inventory, self.policies, now)
        self._decider.look(*charge, now)
        self._attended = self._attend()
        observations = self._cluster.observe(self._attended.nodes, patience_s, unasked)
        now = self._clock()
        self._read_at |= {name: now for name, o in observations.items() if isinstance(o.result, NodeReading)}
        works = self._record(observations, now)
        self._cluster.perform(works)
        decided = self._decide(charge, unread - observations.keys(), now)
        if decided is not None and decided.unread:
            return decided.unread
        if decided is not None:
            self._cluster.perform(decided.works)
            self._shadowing.ask(self.inventory, decided.snapshot, decided.plan)
        self._forget_secrets()
        return frozenset()

    def _attend(self) -> Inventory:
        left = self._store.nodes_of_ranks() - {node.name for node in self.inventory.nodes}
        return attended(self.inventory, self._store.node_records(), left, self._clock()) if left else self.inventory

    def warm_up(self) -> None:
        """Make the agents in charge ready to decide."""
        self._decider.warm_up(*take_up(self._store, self.inventory, self.policies, self._clock()))

    # -- settling ------------------------------------------------------------------------------------------------

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Write down how the works ended."""
        if not outcomes:
            return
        ranks = {rank_key(r): r for r in self._store.ranks()}
        with self._store.transaction():
            for outcome in outcomes:
                rank = ranks.get(outcome.work.key)
                if outcome.error:
                    self._settle_error(outcome, rank)
                elif rank is not None:
                    self._settle_done(outcome, rank)

    def _settle_done(self, outcome: Outcome, rank: RankRecord) -> None:
        work = outcome.work
        if work.verb == "remove":
            self._removed[work.key] = outcome.time
            job = self._store.job(rank.job_id)
            if job is not None and job.state in ACTIVE and job.attempt == rank.attempt:
                # Taken away before it began (cancelled while starting): its absence is seen by the next probe.
                self._store.put_ranks([tried(rank, outcome.time)])
                return
            self._store.remove_rank(rank)
            return
        if work.verb == "launch":
            rank = msgspec.structs.replace(rank, launched_at=outcome.time)
            self._store.append([self._rank_event("launched", rank, outcome.time)])
        elif work.verb == "signal":
            if rank.signalled != "FENCE":
                rank = msgspec.structs.replace(rank, signalled=work.signal)
            if work.signal == "KILL":
                rank = tried(rank, outcome.time)
            self._store.append([self._rank_event("signalled", rank, outcome.time, signal=work.signal)])
        elif work.verb == "collect":
            rank = msgspec.structs.replace(rank, collected=True)
            self._collecting.done(work.key)
        self._store.put_ranks([rank])

    @staticmethod
    def _rank_event(kind: str, rank: RankRecord, now: float, **data: object) -> Event:
        facts = {"attempt": rank.attempt, "rank": rank.rank} | data
        return Event(time=now, kind=kind, job_id=rank.job_id, node=rank.node, data=facts)

    def _settle_error(self, outcome: Outcome, rank: RankRecord | None) -> None:
        work = outcome.work
        # A lost connection and a full disk here pass: they are told of where they do not, and asked again.
        lasting = work.verb == "collect" and self._collecting.failed(work.key, outcome.time) == MAX_FAILURES
        if outcome.transient and not lasting:
            return
        if work.verb == "launch":
            self._launcher.errors[work.key] = outcome.error
        if outcome.error != (rank.trouble if rank is not None else self._trouble.get(work.key)):
            # The same again is no news: what cannot be done is tried for ever.
            facts = {"work": work.verb, "error": outcome.error}
            self._store.append([self._rank_event("work_failed", work.rank, outcome.time, **facts)])
        if rank is None:
            self._trouble[work.key] = outcome.error
            return
        rank = msgspec.structs.replace(rank, trouble=outcome.error)
        if work.verb in ("start", "remove") or work.signal == "KILL":
            rank = tried(rank, outcome.time)
        if work.verb == "collect" and not outcome.transient:
            rank = msgspec.structs.replace(rank, refusals=rank.refusals + 1)
            if rank.refusals >= MAX_FAILURES:
                # The output cannot be had; what is left on the node must not stay there for ever.
                self._collecting.done(work.key)
                rank = msgspec.structs.replace(rank, collected=True)
        self._store.put_ranks([rank])

    # -- recording what is ---------------------------------------------------------------------------------------

    def _record(self, observations: dict[str, Observation], now: float) -> list[Work]:
        """Fold this cycle's news into nodes, jobs, ranks and usage, in one transaction; returns what is to be done."""
        before = self._store.node_records()
        active = self._store.active()
        ranks = self._store.ranks()
        held = held_gpus(active)
        busy_nodes = {p.node for job in active if job.allocation for p in job.allocation.parts}
        records: dict[str, NodeRecord] = {}
        events: list[Event] = []
        for node in self._attended.nodes:
            records[node.name], news = update_record(
                before.get(node.name, NodeRecord(name=node.name)),
                node,
                observations.get(node.name),
                held.get(node.name, {}),
                node.name in busy_nodes,
                self.inventory.settings,
                now,
                stuck_on(node.name, ranks),
                left=self.inventory.node(node.name) is None,
            )
            events += news
        unattended = {rank.node for rank in ranks} | {name for name, record in before.items() if record.left}
        for name in unattended - records.keys():
            records[name] = record_of_unknown(before.get(name, NodeRecord(name=name)), now)
        steps = self._reconcile(active, ranks, before, records, observations, now)
        with self._store.transaction():
            works = self._apply_steps(steps, records, events, now)
            works += self._tidy(observations, records, now)
            self._store.put_nodes(records.values())
            self._store.append(events)
            self._ledger.charge(self._attended, before, observations, active, [s.job for s in steps], now)
            self._store.set_meta("heartbeat", str(now))
        return works

    def _reconcile(
        self,
        active: list[Job],
        ranks: list[RankRecord],
        before: dict[str, NodeRecord],
        records: dict[str, NodeRecord],
        observations: dict[str, Observation],
        now: float,
    ) -> list[Step]:
        settings = self.inventory.settings
        allocated = {p.node for job in active if job.allocation for p in job.allocation.parts}
        world = World(
            now=now,
            settings=settings,
            observations=observations,
            dead=frozenset(n for n in allocated if n not in records or is_dead(records[n], settings, now)),
            busy=self._cluster.busy(),
            launch_errors=self._launcher.errors,
            earlier=before,
            failed_launches={name: record.failed_launches for name, record in records.items()},
        )
        by_attempt: dict[tuple[str, int], list[RankRecord]] = {}
        for rank in sorted(ranks, key=rank_key):
            by_attempt.setdefault((rank.job_id, rank.attempt), []).append(rank)
        return [_step(job, by_attempt.get((job.id, job.attempt), []), world) for job in active]

    def _apply_steps(
        self, steps: list[Step], records: dict[str, NodeRecord], events: list[Event], now: float
    ) -> list[Work]:
        works: list[Work] = []
        for step in steps:
            works += step.works
            works += self._launcher.launches(self._attended, step.job, step.to_launch)
            events += step.events
            self._store.put_ranks(step.ranks.values())
            if any(e.kind == "running" for e in step.events):
                self._store.open_run(self._run_of(step.job))
            events += self._judge_launch(step, records, now)
            if step.ended_attempt is not None:
                end, outcome = step.ended_attempt
                self._store.close_run(step.job.id, step.job.attempt, end, outcome)
        self._store.put_jobs(step.job for step in steps if step.events)
        return works

    def _judge_launch(self, step: Step, records: dict[str, NodeRecord], now: float) -> list[Event]:
        """What a launch that failed, or worked, says about the nodes; changes ``records``."""
        if step.launch_failed is None and not any(e.kind == "running" for e in step.events):
            return []
        job = step.job
        failures: Failures = {name: record.failed_launches for name, record in records.items()}
        one = FailedLaunch(job=job.id, user=job.user, image=image_of(job), gpus=job.spec.gpus_per_node > 0)
        why = ""
        if step.launch_failed is not None:
            node, error = step.launch_failed
            failures = with_failure(failures, node, one)
            why = f"the last, of job {job.id}: {' '.join(error.split())}"
        elif any(failures.values()):
            for part in job.allocation.parts if job.allocation else ():
                failures = with_success(failures, part.node, one)
        else:
            return []
        changed, events = judge_nodes(self.inventory, records, failures, now, why)
        records.update(changed)
        return events

    def _run_of(self, job: Job) -> Run:
        assert job.allocation is not None
        assert job.start_time is not None
        partition = self.inventory.partition(job.spec.partition)
        return Run(
            job_id=job.id,
            attempt=job.attempt,
            user=job.user,
            partition=job.spec.partition,
            flavor=job.spec.flavor,
            share=share_of(job, partition) if partition else 0.0,
            gpus=job.spec.gpus,
            start_time=job.start_time,
            end_time=None,
            outcome=None,
            nodes={p.node: len(p.gpus) for p in job.allocation.parts},
        )

    def _forget_secrets(self) -> None:
        """Remove the secrets of what has ended, however it did; only what is committed counts."""
        for job_id in self._secrets.kept():
            if not self._store.has_unended(job_id):
                self._secrets.forget(job_id)

    def _tidy(self, observations: dict[str, Observation], records: dict[str, NodeRecord], now: float) -> list[Work]:
        current = {(job.id, job.attempt) for job in self._store.active()}
        ranks = self._store.ranks()
        leftovers = [r for r in ranks if (r.job_id, r.attempt) not in current]
        busy = self._cluster.busy()
        forgotten = {n for n, r in records.items() if self.inventory.node(n) is None and is_forgotten(r, now)}
        tidy = tidy_leftovers(leftovers, observations, forgotten, busy, now)
        self._removed = {key: at for key, at in self._removed.items() if now - at < REMEMBER_REMOVED_S}
        known = frozenset(map(rank_key, ranks))
        strays = reap_strays(
            self._attended.nodes, known, self._removed, observations, self._cluster_id, busy, now, self._reaped
        )
        self._apply_tidy(tidy)
        self._apply_tidy(strays)
        self._launcher.forget_errors({rank_key(r) for r in ranks if (r.job_id, r.attempt) in current})
        works = (self._with_destination(work) for work in (*tidy.works, *strays.works))
        return [work for work in works if work.verb != "collect" or self._collecting.is_due(work.key, now)]

    def _apply_tidy(self, tidy: Tidy) -> None:
        self._store.append(tidy.events)
        self._store.put_ranks(tidy.changed)
        for rank in tidy.settled:
            self._store.remove_rank(rank)

    def _with_destination(self, work: Work) -> Work:
        if work.verb != "collect" or work.rank.output is not None:
            return work
        path = log_path(self._state, *work.key)
        readers = readers_of(self._store.job(work.rank.job_id), self.inventory)
        return msgspec.structs.replace(work, destination=str(path), readers=readers)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, charge: Charge, unread: Set[str], now: float) -> _Decided | None:
        """Decide, or set those jobs aside of which no policy can take even a look; None where nothing is decided."""
        pending, active = self._store.pending(), self._store.active()
        if not pending:
            return None
        try:
            decided = self._decide_on(pending, active, charge, unread, now)
        except OUR_DISK:
            raise
        except Exception as error:
            self._set_aside([*active, *pending], charge, error, now)
            return None
        self._undecided = ""
        return decided

    def _set_aside(self, jobs: Sequence[Job], charge: Charge, error: Exception, now: float) -> None:
        """After a decision that raised: the jobs that make it raise, each for itself, are FAILED with the error in their events."""
        why: dict[str, Exception] = {}

        def fails(some: Sequence[Job]) -> bool:
            active, pending = ([j for j in some if (j.state in ACTIVE) is holds] for holds in (True, False))
            try:
                snapshot = snapshot_of_store(
                    self._store, self.inventory, charge.policies, now, active=active, pending=pending
                )
                # Jobs that wait are looked at by a policy that needs no weights, one that runs by any.
                check(decide(snapshot), snapshot)
            except OUR_DISK:
                raise
            except Exception as error:
                why[some[0].id] = error
                return True
            return False

        found = [set_aside(job, why[job.id], now) for job in isolated(jobs, fails)]
        with self._store.transaction():
            self._store.put_jobs(job for job, _ in found)
            self._store.append(event for _, event in found)
            for job, _ in found:
                self._store.close_run(job.id, job.attempt, now, job.state)
        what = f"{type(error).__name__}: {error}"[:500]
        if not found and what != self._undecided:
            self._say(f"nothing was decided, and no job alone is to blame: {what}")
        self._undecided = "" if found else what

    def _decide_on(
        self, pending: list[Job], active: list[Job], charge: Charge, unread: Set[str], now: float
    ) -> _Decided:
        """Ask the policies, check their plan, write the intent down; nothing where it needs a node that is unread."""
        waiting = {job.id: job for job in pending}
        shadows = [shadow.spec for shadow in self._store.shadows().values() if shadow.until is None]
        self._estimator.run([*charge.policies.values(), *shadows])
        ports = {job.master_port for job in active}
        snapshot = snapshot_of_store(
            self._store, self.inventory, charge.policies, now, active=active, pending=pending, seed=int(now * 1000)
        )
        wanted, deciders = self._decider.decide(snapshot, charge.digests)
        plan, rejections = check(wanted, snapshot)
        starts = [action for action in plan.actions if isinstance(action, Start)]
        if needed := unread & {part.node for start in starts for part in start.allocation.parts}:
            return _Decided([], snapshot, plan, needed)
        launches: list[tuple[Job, list[RankRecord]]] = []
        with self._store.transaction():
            for rejection in rejections:
                data = {"action": repr(rejection.action)[:500], "why": rejection.why}
                self._store.append([Event(time=now, kind="plan_rejected", data=data)])
            for action in plan.actions:
                if isinstance(action, Start):
                    job = waiting.pop(action.job_id)
                    policy = deciders[job.spec.partition]
                    launches.append(self._launcher.intend(self.inventory, job, action.allocation, policy, ports, now))
                    self._messages_at.pop(job.id, None)
                elif isinstance(action, (Preempt, CancelJob)):
                    waiting.pop(action.job_id, None)
                    self._end_by_policy(action, deciders, now)
            self._write_reasons(waiting.values(), plan, now)
        works = [work for job, ranks in launches for work in self._launcher.launches(self.inventory, job, ranks)]
        return _Decided(works, snapshot, plan)

    def _end_by_policy(self, action: Preempt | CancelJob, deciders: Mapping[str, PolicySpec], now: float) -> None:
        job = self._store.job(action.job_id)
        assert job is not None
        if isinstance(action, CancelJob):
            changed, event = move(
                job, JobState.CANCELLED, now, event="ended",
                reason=action.reason.code, message=action.reason.message, end_time=now,
            )  # fmt: skip
        else:
            policy = deciders[job.spec.partition]
            preemptions = (job.preemptions or Preemptions()).once_more(
                now, policy.name, policy.version, action.for_job
            )  # fmt: skip
            message = f"stopped by {policy.name}" + (f" for job {action.for_job}" if action.for_job else "")
            ending = Ending(
                outcome=JobState.PENDING,
                reason="Preempted",
                message=message,
                kill_at=now + self.inventory.settings.grace_s,
                preemptions=preemptions,
            )
            changed, event = move(
                job, JobState.COMPLETING, now, event="preempted", ending=ending, reason="Preempted", message=message,
                data={
                    "policy": policy.name, "version": policy.version, "for": action.for_job, "count": preemptions.count,
                },
            )  # fmt: skip
        self._store.put_jobs([changed])
        self._store.append([event])

    def _write_reasons(self, waiting: Iterable[Job], plan: Plan, now: float) -> None:
        changed = []
        for job in waiting:
            reason = plan.reasons.get(job.id)
            if reason is None or (job.reason == reason.code and job.message == reason.message):
                continue
            if reason.code is ReasonCode.BEGIN_TIME and job.retries and job.message and job.reason in ("", reason.code):
                # Why it is tried again says more than that it waits.
                changed += [msgspec.structs.replace(job, reason=str(reason.code))] if not job.reason else []
                continue
            if job.reason == reason.code and now - self._messages_at.get(job.id, 0.0) < MESSAGE_REFRESH_S:
                continue
            self._messages_at[job.id] = now
            changed.append(msgspec.structs.replace(job, reason=str(reason.code), message=reason.message))
        self._store.put_jobs(changed)


def _step(job: Job, ranks: list[RankRecord], world: World) -> Step:
    """A job's next step. One whose step raises is set aside, so that it never ends the cycle of all the others."""
    try:
        return reconcile_job(job, ranks, world)
    except Exception as error:
        failed, event = set_aside(job, error, world.now)
        began = job.start_time is not None
        return Step(job=failed, events=[event], ended_attempt=(world.now, failed.state) if began else None)


def share_of(job: Job, partition: Partition) -> float:
    """λ of the paper's Eq. 4: the job's part of the partition, by the resource it takes most of (its dominant share).

    For the paper's flavors, whose GPUs, cores and memory are in proportion, that is Table 2's rate.
    """
    spec, nodes = job.spec, partition.nodes
    pairs = [
        (spec.gpus_per_node, sum(n.gpus for n in nodes)),
        (spec.cores_per_node, sum(n.cores for n in nodes)),
        (spec.memory_mib_per_node, sum(n.memory_mib for n in nodes)),
    ]
    return max((spec.nodes * part / whole for part, whole in pairs if whole), default=0.0)
