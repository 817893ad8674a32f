"""Records how operations ended: launches, signals, removals, collected outputs, and their errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpusched.cluster.base import OperationOutcome, RankKey
from gpusched.controller.escalating import with_try
from gpusched.controller.outputs import MAX_FAILURES, CollectionRetries
from gpusched.controller.ranks import rank_key
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE
from gpusched.queue.store import RankRecord, Store


class OutcomeRecorder:
    """Records outcomes; nodes' rejections are added to ``launch_errors``, which also has ours."""

    def __init__(self, store: Store, collecting: CollectionRetries, launch_errors: dict[RankKey, str]) -> None:
        self._store, self._retries, self._launch_errors = store, collecting, launch_errors
        self._removed: dict[RankKey, float] = {}
        self._trouble: dict[RankKey, str] = {}  # of strays, which have no rank record
        self.unrecorded: list[OperationOutcome] = []  # not recorded yet; each outcome is reported once

    def removed_since(self, since: float) -> dict[RankKey, float]:
        """Return when leftovers of ranks were removed: a node probed before may still report them. Drops older ones."""
        self._removed = {key: at for key, at in self._removed.items() if at > since}
        return self._removed

    def record(self, outcomes: Sequence[OperationOutcome]) -> None:
        """Record these outcomes, and those that could not be recorded before."""
        self.unrecorded += outcomes
        if not self.unrecorded:
            return
        ranks = {rank_key(r): r for r in self._store.ranks()}
        with self._store.transaction():
            for outcome in self.unrecorded:
                rank = ranks.get(outcome.operation.key)
                if outcome.error:
                    self._record_error(outcome, rank)
                elif rank is not None:
                    self._record_success(outcome, rank)
        self.unrecorded = []

    def _record_success(self, outcome: OperationOutcome, rank: RankRecord) -> None:
        operation = outcome.operation
        if operation.verb == "remove":
            self._removed[operation.key] = outcome.time
            job = self._store.job(rank.job_id)
            if job is not None and job.state in ACTIVE and job.attempt == rank.attempt:
                # Removed before it started (cancelled while starting): the next probe shows its absence.
                self._store.put_ranks([with_try(rank, outcome.time)])
                return
            self._store.remove_rank(rank)
            return
        if operation.verb == "launch":
            rank = msgspec.structs.replace(rank, launched_at=outcome.time)
            self._store.append([self._rank_event("launched", rank, outcome.time)])
        elif operation.verb == "signal":
            if rank.signalled != "FENCE":
                rank = msgspec.structs.replace(rank, signalled=operation.signal)
            if operation.signal == "KILL":
                rank = with_try(rank, outcome.time)
            self._store.append([self._rank_event("signalled", rank, outcome.time, signal=operation.signal)])
        elif operation.verb == "collect":
            rank = msgspec.structs.replace(rank, collected=True)
            self._retries.forget(operation.key)
        self._store.put_ranks([rank])

    @staticmethod
    def _rank_event(kind: str, rank: RankRecord, now: float, **data: object) -> Event:
        facts = {"attempt": rank.attempt, "rank": rank.rank} | data
        return Event(time=now, kind=kind, job_id=rank.job_id, node=rank.node, data=facts)

    def _record_error(self, outcome: OperationOutcome, rank: RankRecord | None) -> None:
        operation = outcome.operation
        # A lost connection and a full local disk are transient: retry, and report them only if they persist.
        lasting = operation.verb == "collect" and self._retries.failed(operation.key, outcome.time) == MAX_FAILURES
        if outcome.transient and not lasting:
            return
        if operation.verb == "launch":
            self._launch_errors[operation.key] = outcome.error
        if outcome.error != (rank.trouble if rank is not None else self._trouble.get(operation.key)):
            # Record only a new error: what fails is retried forever.
            facts = {"work": operation.verb, "error": outcome.error}
            self._store.append([self._rank_event("work_failed", operation.rank, outcome.time, **facts)])
        if rank is None:
            self._trouble[operation.key] = outcome.error
            return
        rank = msgspec.structs.replace(rank, trouble=outcome.error)
        if operation.verb in ("start", "remove") or operation.signal == "KILL":
            rank = with_try(rank, outcome.time)
        if operation.verb == "collect" and not outcome.transient:
            rank = msgspec.structs.replace(rank, refusals=rank.refusals + 1)
            if rank.refusals >= MAX_FAILURES:
                # The output cannot be read; give it up, so that the leftovers are removed from the node.
                self._retries.forget(operation.key)
                rank = msgspec.structs.replace(rank, collected=True)
        self._store.put_ranks([rank])
