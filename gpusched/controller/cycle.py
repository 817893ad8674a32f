"""One cycle: settle what was done, fold what was asked, observe, reconcile, account, decide, check, apply, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpusched.cluster.base import Cluster, Observation, Outcome, RankKey, Work
from gpusched.controller.collected import MAX_FAILURES, Collecting, readers_of, refusals
from gpusched.controller.deciding import Decider
from gpusched.controller.estimating import Estimator
from gpusched.controller.fold import Folder
from gpusched.controller.launcher import Launcher
from gpusched.controller.ledger import Ledger
from gpusched.controller.nodestate import blame_launch, is_dead, update_record
from gpusched.controller.promoting import Charge, take_up
from gpusched.controller.reconcile import Step, World, rank_key, reconcile_job
from gpusched.controller.secretfiles import SecretFiles
from gpusched.controller.shadowing import Shadowing
from gpusched.controller.tidy import Tidy, reap_strays, tidy_leftovers
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, Ending, Job, JobState, Preemptions
from gpusched.model.plan import CancelJob, Plan, Preempt, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.snapshot import Snapshot
from gpusched.paths import log_path
from gpusched.queue.inbox import Inbox
from gpusched.queue.lifecycle import move
from gpusched.queue.snapshots import held_gpus, snapshot_of_store
from gpusched.queue.store import NodeRecord, RankRecord, Run, Store
from gpusched.sched.check import check

MESSAGE_REFRESH_S = 30.0  # waiting messages hold durations; writing them all in every cycle would help nobody
REMEMBER_REMOVED_S = 600.0


class _Decided(NamedTuple):
    """What a decision leaves: the launches, and what it was made from."""

    works: list[Work]
    snapshot: Snapshot
    plan: Plan


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
        self._decider, self._shadowing = Decider(store, say), Shadowing(store)
        self._estimator = Estimator(store, state, say)
        self.inbox = Inbox(state)
        self._secrets = SecretFiles(state)
        cluster_id = store.meta("cluster_id")
        assert cluster_id is not None
        self._cluster_id = cluster_id
        self._collecting = Collecting()
        self._removed: dict[RankKey, float] = {}
        self._messages_at: dict[str, float] = {}
        self._ledger = Ledger(store)
        self._launcher = Launcher(store, self._secrets, cluster_id)

    def run(self, patience_s: float) -> None:
        """One cycle. Slow nodes are waited for no longer than ``patience_s``."""
        now = self._clock()
        self._settle(self._cluster.finished())
        Folder(self._store, self.inbox, self.inventory, self._secrets).fold(now)
        charge = take_up(self._store, self.inventory, self.policies, now)
        self._decider.look(*charge, now)
        observations = self._cluster.observe(self.inventory.nodes, patience_s)
        now = self._clock()
        works = self._record(observations, now)
        self._cluster.perform(works)
        decided = self._decide(charge, now)
        if decided is not None:
            self._cluster.perform(decided.works)
            self._shadowing.ask(self.inventory, decided.snapshot, decided.plan)
        self._forget_secrets()

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
                    self._settle_error(outcome)
                elif rank is not None:
                    self._settle_done(outcome, rank)

    def _settle_done(self, outcome: Outcome, rank: RankRecord) -> None:
        work = outcome.work
        if work.verb == "remove":
            self._removed[work.key] = outcome.time
            job = self._store.job(rank.job_id)
            if job is not None and job.state in ACTIVE and job.attempt == rank.attempt:
                # Taken away before it began (cancelled while starting): its absence is seen by the next probe.
                return
            self._store.remove_rank(rank)
            return
        if work.verb == "launch":
            rank = msgspec.structs.replace(rank, launched_at=outcome.time)
            self._store.append([self._rank_event("launched", rank, outcome.time)])
        elif work.verb == "signal":
            if rank.signalled != "FENCE":
                rank = msgspec.structs.replace(rank, signalled=work.signal)
            self._store.append([self._rank_event("signalled", rank, outcome.time, signal=work.signal)])
        elif work.verb == "collect":
            rank = msgspec.structs.replace(rank, collected=True)
            self._collecting.done(work.key)
        self._store.put_ranks([rank])

    @staticmethod
    def _rank_event(kind: str, rank: RankRecord, now: float, **data: object) -> Event:
        facts = {"attempt": rank.attempt, "rank": rank.rank} | data
        return Event(time=now, kind=kind, job_id=rank.job_id, node=rank.node, data=facts)

    def _settle_error(self, outcome: Outcome) -> None:
        work = outcome.work
        if work.verb == "launch" and not outcome.transient:
            self._launcher.errors[work.key] = outcome.error
        # A lost connection and a full disk here pass: they are told of where they do not, and asked again.
        lasting = work.verb == "collect" and self._collecting.failed(work.key, outcome.time) == MAX_FAILURES
        if not outcome.transient or lasting:
            facts = {"work": work.verb, "error": outcome.error}
            self._store.append([self._rank_event("work_failed", work.rank, outcome.time, **facts)])
        if work.verb == "collect" and not outcome.transient:
            if refusals(self._store.events(job_id=work.rank.job_id), work.key) >= MAX_FAILURES:
                # The output cannot be had; what is left on the node must not stay there for ever.
                self._collecting.done(work.key)
                self._store.put_ranks([msgspec.structs.replace(work.rank, collected=True)])

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
        for node in self.inventory.nodes:
            records[node.name], news = update_record(
                before.get(node.name, NodeRecord(name=node.name)),
                node,
                observations.get(node.name),
                held.get(node.name, {}),
                node.name in busy_nodes,
                self.inventory.settings,
                now,
            )
            events += news
        steps = self._reconcile(active, ranks, records, observations, now)
        with self._store.transaction():
            works = self._apply_steps(steps, records, events, now)
            works += self._tidy(observations, now)
            self._store.put_nodes(records.values())
            self._store.append(events)
            self._ledger.charge(self.inventory, before, observations, active, [s.job for s in steps], now)
            self._store.set_meta("heartbeat", str(now))
        return works

    def _reconcile(
        self,
        active: list[Job],
        ranks: list[RankRecord],
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
            # A node taken out of inventory.yaml is as good as dead to its jobs.
            dead=frozenset(n for n in allocated if n not in records or is_dead(records[n], settings, now)),
            busy=self._cluster.busy(),
            launch_errors=self._launcher.errors,
        )
        by_attempt: dict[tuple[str, int], list[RankRecord]] = {}
        for rank in sorted(ranks, key=rank_key):
            by_attempt.setdefault((rank.job_id, rank.attempt), []).append(rank)
        return [reconcile_job(job, by_attempt.get((job.id, job.attempt), []), world) for job in active]

    def _apply_steps(
        self, steps: list[Step], records: dict[str, NodeRecord], events: list[Event], now: float
    ) -> list[Work]:
        works: list[Work] = []
        for step in steps:
            works += step.works
            works += self._launcher.launches(self.inventory, step.job, step.to_launch)
            events += step.events
            self._store.put_ranks(step.ranks.values())
            for name in step.launch_failed_on:
                records[name], news = blame_launch(records[name], step.job.id, now)
                events += news
            if any(e.kind == "running" for e in step.events):
                self._store.open_run(self._run_of(step.job))
                for part in step.job.allocation.parts if step.job.allocation else ():
                    if part.node in records:
                        records[part.node] = msgspec.structs.replace(records[part.node], launch_failures=())
            if step.ended_attempt is not None:
                end, outcome = step.ended_attempt
                self._store.close_run(step.job.id, step.job.attempt, end, outcome)
        self._store.put_jobs(step.job for step in steps if step.events)
        return works

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

    def _tidy(self, observations: dict[str, Observation], now: float) -> list[Work]:
        current = {(job.id, job.attempt) for job in self._store.active()}
        ranks = self._store.ranks()
        leftovers = [r for r in ranks if (r.job_id, r.attempt) not in current]
        busy = self._cluster.busy()
        tidy = tidy_leftovers(leftovers, observations, self.inventory, busy, now)
        self._removed = {key: at for key, at in self._removed.items() if now - at < REMEMBER_REMOVED_S}
        known = frozenset(map(rank_key, ranks))
        strays = reap_strays(self.inventory.nodes, known, self._removed, observations, self._cluster_id, busy, now)
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

    def _decide(self, charge: Charge, now: float) -> _Decided | None:
        """Ask the policies, check their plan, write the intent down; None where nobody waits."""
        pending = self._store.pending()
        if not pending:
            return None
        active = self._store.active()
        waiting = {job.id: job for job in pending}
        shadows = [shadow.spec for shadow in self._store.shadows().values() if shadow.until is None]
        self._estimator.run([*charge.policies.values(), *shadows])
        ports = {job.master_port for job in active}
        snapshot = snapshot_of_store(
            self._store, self.inventory, charge.policies, now, active=active, pending=pending, seed=int(now * 1000)
        )
        wanted, deciders = self._decider.decide(snapshot, charge.digests)
        plan, rejections = check(wanted, snapshot)
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
