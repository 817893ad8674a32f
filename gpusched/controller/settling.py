"""How operations ended, written down: launches, signals, removals, collected outputs, and what went wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpusched.cluster.base import OperationOutcome, RankKey
from gpusched.controller.escalating import tried
from gpusched.controller.outputs import MAX_FAILURES, Collecting
from gpusched.controller.ranks import rank_key
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE
from gpusched.queue.store import RankRecord, Store


class Settling:
    """Settles outcomes; to ``launch_errors``, with what we refused, comes what nodes refused, with the reason."""

    def __init__(self, store: Store, collecting: Collecting, launch_errors: dict[RankKey, str]) -> None:
        self._store, self._collecting, self._launch_errors = store, collecting, launch_errors
        self._removed: dict[RankKey, float] = {}
        self._trouble: dict[RankKey, str] = {}  # of strays, which have no record
        self.unsettled: list[OperationOutcome] = []  # not written down yet: an operation is told of once

    def removed_since(self, moment: float) -> dict[RankKey, float]:
        """When ranks' remains were removed: a node asked before that may still speak of them. Earlier ones go."""
        self._removed = {key: at for key, at in self._removed.items() if at > moment}
        return self._removed

    def settle(self, outcomes: Sequence[OperationOutcome]) -> None:
        """Write down how the operations ended, those too that could not be written down before."""
        self.unsettled += outcomes
        if not self.unsettled:
            return
        ranks = {rank_key(r): r for r in self._store.ranks()}
        with self._store.transaction():
            for outcome in self.unsettled:
                rank = ranks.get(outcome.operation.key)
                if outcome.error:
                    self._settle_error(outcome, rank)
                elif rank is not None:
                    self._settle_done(outcome, rank)
        self.unsettled = []

    def _settle_done(self, outcome: OperationOutcome, rank: RankRecord) -> None:
        operation = outcome.operation
        if operation.verb == "remove":
            self._removed[operation.key] = outcome.time
            job = self._store.job(rank.job_id)
            if job is not None and job.state in ACTIVE and job.attempt == rank.attempt:
                # Taken away before it began (cancelled while starting): its absence is seen by the next probe.
                self._store.put_ranks([tried(rank, outcome.time)])
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
                rank = tried(rank, outcome.time)
            self._store.append([self._rank_event("signalled", rank, outcome.time, signal=operation.signal)])
        elif operation.verb == "collect":
            rank = msgspec.structs.replace(rank, collected=True)
            self._collecting.done(operation.key)
        self._store.put_ranks([rank])

    @staticmethod
    def _rank_event(kind: str, rank: RankRecord, now: float, **data: object) -> Event:
        facts = {"attempt": rank.attempt, "rank": rank.rank} | data
        return Event(time=now, kind=kind, job_id=rank.job_id, node=rank.node, data=facts)

    def _settle_error(self, outcome: OperationOutcome, rank: RankRecord | None) -> None:
        operation = outcome.operation
        # A lost connection and a full disk here pass: they are told of where they do not, and asked again.
        lasting = operation.verb == "collect" and self._collecting.failed(operation.key, outcome.time) == MAX_FAILURES
        if outcome.transient and not lasting:
            return
        if operation.verb == "launch":
            self._launch_errors[operation.key] = outcome.error
        if outcome.error != (rank.trouble if rank is not None else self._trouble.get(operation.key)):
            # The same again is no news: what cannot be done is tried for ever.
            facts = {"work": operation.verb, "error": outcome.error}
            self._store.append([self._rank_event("work_failed", operation.rank, outcome.time, **facts)])
        if rank is None:
            self._trouble[operation.key] = outcome.error
            return
        rank = msgspec.structs.replace(rank, trouble=outcome.error)
        if operation.verb in ("start", "remove") or operation.signal == "KILL":
            rank = tried(rank, outcome.time)
        if operation.verb == "collect" and not outcome.transient:
            rank = msgspec.structs.replace(rank, refusals=rank.refusals + 1)
            if rank.refusals >= MAX_FAILURES:
                # The output cannot be had; what is left on the node must not stay there for ever.
                self._collecting.done(operation.key)
                rank = msgspec.structs.replace(rank, collected=True)
        self._store.put_ranks([rank])
