"""Stored policies: changes of the active policy, shadows and their decisions, agents in fallback."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gpusched.model.policy import PolicySpec
from gpusched.model.slurm import SlurmMode
from gpusched.queue.damage import TABLE_CHECKS, TableCheck, json_of
from gpusched.queue.rows import JobReads

Act = Literal["inventory", "files", "promote", "rollback"]
KEPT_DIFFERENCES = 1000
_FALLBACKS = "fallbacks"


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a partition's active policy.

    Attributes:
        seq: Its number; 0 before it is stored.
        user: Who made it; "" for changes of files, whose author is unknown.
        act: ``inventory`` (inventory.yaml names another), ``files`` (the policy's file or weights changed),
            ``promote``, ``rollback``.
        reason: In one line.
        spec: The active policy from then on. from_name, from_version: the one before; "" for the first.
        override: ``spec`` decides though inventory.yaml names another (or another state of the same files).
        declared: What inventory.yaml named for the partition then. Once it names another, that one decides.
        digest: Of the weights that were promoted, as `gpusched.config.weights.Model` has it; "": not known.
        back_to: ``seq`` of the change that a rollback restores; None: there is none.
        forced: Promoted without proof.
        evidence: `gpusched.nightly.proof.Verdict` of a promotion, as JSON; None where there was none.
        mode: Of a partition of Slurm, what gpusched does there from then on; None: it reads.
    """

    seq: int = 0
    time: float
    partition: str
    user: str
    act: Act
    reason: str
    spec: PolicySpec
    from_name: str = ""
    from_version: str = ""
    override: bool = False
    declared: str = ""
    digest: str = ""
    back_to: int | None = None
    forced: bool = False
    evidence: dict[str, Any] | None = None
    mode: SlurmMode | None = None


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy evaluated beside a partition's active one, with agreement counts.

    Attributes:
        since: When it began, Unix seconds. until: When it was taken out; None while it is asked.
        by: Who began it.
        decisions: Times it answered: ``same`` of them as the live policy did. live_starts, shadow_starts: Jobs started
            in these decisions, by either.
        late: Times it took longer than its budget. unusable: Times it could not answer; ``trouble`` says why.
    """

    partition: str
    spec: PolicySpec
    digest: str = ""
    since: float
    until: float | None = None
    by: str
    decisions: int = 0
    same: int = 0
    live_starts: int = 0
    shadow_starts: int = 0
    late: int = 0
    unusable: int = 0
    trouble: str = ""


class ShadowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A decision in which a shadow differed: job -> nodes, only starts that the other did not make."""

    partition: str
    time: float
    live: dict[str, tuple[str, ...]]
    shadow: dict[str, tuple[str, ...]]


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that cannot decide, and the heuristic that decides instead."""

    partition: str
    policy: str
    version: str
    fallback: str
    why: str
    since: float

    @property
    def line(self) -> str:
        """Return it as a sentence."""
        return f"{self.partition}: {self.policy} cannot decide ({self.why}); falling back to {self.fallback}"


class PolicyReads(JobReads):
    """Queries for policies."""

    def policy_changes(self, partition: str | None = None, limit: int = 1000) -> list[PolicyChange]:
        """Return the latest changes, oldest first."""
        where, values = ("1", ()) if partition is None else ("partition = ?", (partition,))
        query = f"SELECT seq, data FROM policy_changes WHERE {where} ORDER BY seq DESC LIMIT ?"
        return [_change(*row) for row in self._rows(query, (*values, limit))][::-1]

    def policy_change(self, seq: int) -> PolicyChange | None:
        """Return the change with this number."""
        found = self._rows("SELECT seq, data FROM policy_changes WHERE seq = ?", (seq,))
        return _change(*found[0]) if found else None

    def live_changes(self) -> dict[str, PolicyChange]:
        """Return partition -> its last change."""
        last = "SELECT max(seq) FROM policy_changes GROUP BY partition"
        found = [_change(*row) for row in self._rows(f"SELECT seq, data FROM policy_changes WHERE seq IN ({last})")]
        return {change.partition: change for change in found}

    def shadows(self) -> dict[str, Shadow]:
        """Return partition -> its shadow, including ended ones."""
        rows = self._rows("SELECT data FROM shadows")
        return {s.partition: s for s in (msgspec.json.decode(row[0], type=Shadow) for row in rows)}

    def differences(self, partition: str, limit: int = 20) -> list[ShadowDifference]:
        """Return the latest decisions in which the partition's shadow differed, oldest first."""
        query = "SELECT data FROM shadow_differences WHERE partition = ? ORDER BY seq DESC LIMIT ?"
        rows = self._rows(query, (partition, limit))
        return [msgspec.json.decode(row[0], type=ShadowDifference) for row in rows][::-1]

    def fallbacks(self) -> dict[str, Fallback]:
        """Return partition -> its agent in fallback."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (_FALLBACKS,)).fetchone()
        found = msgspec.json.decode(row[0], type=tuple[Fallback, ...]) if row else ()
        return {fallback.partition: fallback for fallback in found}


class PolicyWrites:
    """Writes of policies."""

    _db: sqlite3.Connection

    def add_policy_change(self, change: PolicyChange) -> None:
        """Append a change; the store assigns its number."""
        row = (change.partition, msgspec.json.encode(change))
        self._db.execute("INSERT INTO policy_changes (partition, data) VALUES (?, ?)", row)

    def put_shadow(self, shadow: Shadow) -> None:
        """Insert or replace a partition's shadow."""
        self._db.execute(
            "INSERT OR REPLACE INTO shadows VALUES (?, ?)", (shadow.partition, msgspec.json.encode(shadow))
        )

    def add_difference(self, difference: ShadowDifference) -> None:
        """Append a difference; each partition keeps its last `KEPT_DIFFERENCES`."""
        row = (difference.partition, difference.time, msgspec.json.encode(difference))
        self._db.execute("INSERT INTO shadow_differences (partition, time, data) VALUES (?, ?, ?)", row)
        self._db.execute(
            "DELETE FROM shadow_differences WHERE partition = :partition AND seq <= (SELECT seq FROM "
            "shadow_differences WHERE partition = :partition ORDER BY seq DESC LIMIT 1 OFFSET :kept)",
            {"partition": difference.partition, "kept": KEPT_DIFFERENCES},
        )

    def forget_differences(self, partition: str) -> None:
        """Delete the differences of a partition's former shadow."""
        self._db.execute("DELETE FROM shadow_differences WHERE partition = ?", (partition,))

    def put_fallbacks(self, fallbacks: Iterable[Fallback]) -> None:
        """Replace the set of agents in fallback."""
        value = msgspec.json.encode(tuple(fallbacks)).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_FALLBACKS, value))


def _change(seq: int, data: bytes) -> PolicyChange:
    return msgspec.structs.replace(msgspec.json.decode(data, type=PolicyChange), seq=seq)


TABLE_CHECKS.append(TableCheck("policy_changes", ("seq",), ("data",), json_of(PolicyChange)))
TABLE_CHECKS.append(TableCheck("shadows", ("partition",), ("data",), json_of(Shadow)))
TABLE_CHECKS.append(TableCheck("shadow_differences", ("seq",), ("data",), json_of(ShadowDifference)))
