"""Records the outcomes of node operations (`cluster.base.Operation`) in the store: in rank records, and as events.

Success means that the node accepted an operation. Whether a rank has started or ended shows only in the next probe.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpusched.cluster.base import OperationOutcome, RankKey
from gpusched.controller.cutting import with_outcome
from gpusched.controller.escalating import with_try
from gpusched.controller.healthchecks import record_check
from gpusched.controller.outputs import MAX_FAILURES, CollectionRetries
from gpusched.controller.ranks import rank_key
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE
from gpusched.queue.store import RankRecord, Store

REMEMBER_REMOVED_S = 600.0


class OutcomeRecorder:
    """Records the outcomes of operations.

    Attributes:
        unrecorded: Outcomes that are not in the store yet, as its disk was full. The backend reports each one once, so
            they are kept here for the next cycle.
    """

    def __init__(self, store: Store, retries: CollectionRetries, launch_errors: dict[RankKey, str]) -> None:
        """Add launches that nodes rejected to ``launch_errors``, the launcher's own, which has those it rejected."""
        self._store, self._retries, self._launch_errors = store, retries, launch_errors
        self._removed_at: dict[RankKey, float] = {}  # Unix seconds
        # The last error of strays (containers without a rank record); of others it is `RankRecord.trouble`.
        self._stray_trouble: dict[RankKey, str] = {}
        self.unrecorded: list[OperationOutcome] = []

    def removed_lately(self, now: float) -> dict[RankKey, float]:
        """Return when ranks were removed from their nodes lately; a probe that began before may still report them."""
        self._removed_at = {key: at for key, at in self._removed_at.items() if now - at < REMEMBER_REMOVED_S}
        return self._removed_at

    def record(self, outcomes: Sequence[OperationOutcome]) -> None:
        """Record these outcomes, and those that could not be recorded before.

        A rank has at most one operation in progress, and a cycle that cannot record starts no other: here is at most
        one outcome for each rank.
        """
        self.unrecorded += outcomes
        if not self.unrecorded:
            return
        ranks = {rank_key(r): r for r in self._store.ranks()}
        with self._store.transaction():
            for outcome in self.unrecorded:
                if outcome.operation.verb == "check":
                    record_check(self._store, outcome)
                    continue
                if outcome.operation.verb == "cut":
                    self._record_cut(outcome)
                    continue
                rank = ranks.get(outcome.operation.key)
                if outcome.error:
                    self._record_error(outcome, rank)
                elif rank is not None:
                    self._record_success(outcome, rank)
        self.unrecorded = []

    def _record_cut(self, outcome: OperationOutcome) -> None:
        record = self._store.node_record(outcome.operation.node)
        if record is not None:
            self._store.put_nodes([with_outcome(record, outcome)])

    def _record_success(self, outcome: OperationOutcome, rank: RankRecord) -> None:
        operation = outcome.operation
        if operation.verb == "remove":
            self._removed_at[operation.key] = outcome.time
            job = self._store.job(rank.job_id)
            if job is not None and job.state in ACTIVE and job.attempt == rank.attempt and rank.hot != "left":
                # The job still counts on this rank: it was cancelled while starting. The record stays until a probe
                # shows that nothing is left on the node.
                self._store.put_ranks([with_try(rank, outcome.time)])
                return
            self._store.remove_rank(rank)
            return
        if operation.verb == "launch":
            rank = msgspec.structs.replace(rank, launched_at=outcome.time)
            self._store.append([self._rank_event("launched", rank, outcome.time)])
        elif operation.verb == "signal":
            if operation.for_idle:
                rank = msgspec.structs.replace(rank, idle_signalled_at=outcome.time)
            elif operation.for_warning:
                rank = msgspec.structs.replace(rank, warned_at=outcome.time)
            elif rank.signalled != "FENCE":  # a leftover stays marked as one
                rank = msgspec.structs.replace(rank, signalled=operation.signal)
            if operation.signal != "KILL":
                rank = msgspec.structs.replace(rank, trouble="")
            else:
                # Delivered, but still a try: after too many the rank is removed, and at last stuck.
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
        # A lost connection and a full local disk are transient: retry, and report a collection only if they persist.
        # Compared with ==, so that it is reported once.
        lasting = operation.verb == "collect" and self._retries.failed(operation.key, outcome.time) == MAX_FAILURES
        if outcome.transient and not lasting:
            return
        if operation.verb == "launch":
            self._launch_errors[operation.key] = outcome.error
        if outcome.error != (rank.trouble if rank is not None else self._stray_trouble.get(operation.key)):
            # Only a new error is an event: a failed operation is retried again and again.
            facts = {"work": operation.verb, "error": outcome.error}
            self._store.append([self._rank_event("work_failed", operation.rank, outcome.time, **facts)])
        if rank is None:
            self._stray_trouble[operation.key] = outcome.error
            return
        rank = msgspec.structs.replace(rank, trouble=outcome.error)
        if operation.verb in ("start", "remove") or operation.signal == "KILL":
            rank = with_try(rank, outcome.time)
        if operation.verb == "collect" and not outcome.transient:
            rank = self._with_refusal(rank, operation.key)
        self._store.put_ranks([rank])

    def _with_refusal(self, rank: RankRecord, key: RankKey) -> RankRecord:
        """Return the record of a rank whose node answered that it cannot give the output."""
        rank = msgspec.structs.replace(rank, refusals=rank.refusals + 1)
        if rank.refusals < MAX_FAILURES:
            return rank
        # Give the output up: a rank counts as collected before its container is removed from the node.
        self._retries.forget(key)
        return msgspec.structs.replace(rank, collected=True)
