"""Limits of users, groups, classes and arrays in replays: which of them each job of a trace counts for, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.model.limits import WEEK_S, Bound, LimitRule, Quotas
from gpusched.model.plan import ReasonCode
from gpusched.model.slicetables import GPU_PARTS
from gpusched.sched.accounts import COLUMNS, chain
from gpusched.sched.limits import limit_message
from gpusched.sched.state import LINK, Floats, Ints, ints
from gpusched.sim.engine.ledger import HOUR_S, HOURS, SimLedger, other_changes, record_usage
from gpusched.sim.slicing import parts_by_job
from gpusched.traces.trace import Trace


class _Bounds:
    """The bounds of a trace's jobs; each kind of job (user, group, class) is looked up once."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._row: dict[tuple[tuple[str, str, str], str], int] = {}
        self.rules: list[LimitRule] = []
        self.links: list[tuple[int, int, int]] = []

    def of(self, user: str | None, group: str, qos: str) -> list[int]:
        """Return the bounds of such a job; None: an unknown user; no user limit applies."""
        group = self._quotas.groups.for_job(user or "", group)
        rules = [r for r in self._quotas.rules(user or "", group, qos) if r.unit in COLUMNS]
        return [self._enter(rule) for rule in rules if user is not None or rule.key[1]]

    def of_array(self, number: int, limit: int) -> list[int]:
        """Return the bound of an array that may have ``limit`` tasks running; -1: no array, no limit."""
        if number < 0 or limit < 0:
            return []
        key = "array", str(number), str(limit)  # no other has three parts
        return [self._enter(LimitRule(key, "its array", "jobs", limit, ReasonCode.ARRAY_TASK_LIMIT))]

    def _enter(self, rule: LimitRule) -> int:
        row = self._row.setdefault((rule.key, rule.unit), len(self.rules))
        if row == len(self.rules):
            self.rules.append(rule)
        return row

    def chain(self, bounds: list[int]) -> int:
        """Return the first link of a new chain of these bounds; -1 without any."""
        first = len(self.links)
        self.links += chain([(at, COLUMNS[self.rules[at].unit]) for at in bounds], first)
        return first if bounds else -1


def ledger_of(
    trace: Trace, limit: Floats, least: Ints, applied: QuotaSet
) -> tuple[SimLedger | None, dict[int, str]]:  # fmt: skip
    """Return the limits that the trace's jobs count for (None: none), and which jobs exceed one alone, with why.

    ``limit: float64[jobs]``: time limits, seconds; ``least: int64[jobs]``: the fewest GPUs that each may have.
    """
    bounds, never, others = _Bounds(applied.quotas), dict[int, str](), trace.others
    unknown, outside = np.full(len(trace), -1, np.int64), np.full(len(others.user), -1, np.int64)
    some = trace.account, trace.qos, trace.array, trace.array_limit
    more = others.account, others.qos, outside, outside
    columns = [np.append(unknown if own is None else own, other) for own, other in zip(some, more, strict=True)]
    # Limits are looked up once for each user, account, class and array: jobs are many, these are few.
    users = np.append(trace.user, others.user)
    kinds, of = np.unique(np.column_stack((users, *columns)), axis=0, return_inverse=True)
    of, first = of.reshape(-1), np.full(len(kinds), -1, np.int64)
    own = of[: len(trace)]
    rows = np.split(np.argsort(own, kind="stable"), np.cumsum(np.bincount(own, minlength=len(kinds)))[:-1])
    week = np.minimum(limit, WEEK_S)
    # With slices GPUs are counted in parts, as live.
    sliced = trace.profile is not None
    scale, part = (GPU_PARTS, parts_by_job(trace)) if sliced else (1, np.ones(len(trace), np.int64))
    least, gpus = least * part, trace.gpus * part
    costs = {"jobs": np.ones(len(trace), np.int64), "gpus": least, "gpu_s": (least * week).astype(np.int64)}
    for i, (user, group, name, array, most) in enumerate(kinds.astype(np.int64).tolist()):
        found = bounds.of_array(array, most) + bounds.of(
            None if user < 0 else trace.user_name(user),
            trace.accounts[group] if group >= 0 else "", trace.classes[name] if name >= 0 else "",
        )  # fmt: skip
        first[i] = bounds.chain(found)
        for rule in (bounds.rules[at] for at in found):
            cost, of_gpus = costs[rule.unit], 1 if rule.unit == "jobs" else scale
            # A job that exceeds a limit by itself can never run.
            for job in rows[i][cost[rows[i]] > rule.limit * of_gpus].tolist():
                needs = int(cost[job]) if of_gpus == 1 else float(cost[job]) / scale
                never.setdefault(job, limit_message(Bound(rule), needs, 0))
    if not bounds.links:
        return None, never
    hourly = np.array([rule.unit == "gpu_s" for rule in bounds.rules])
    epoch, week = trace.epoch or 0.0, np.append(week, np.minimum(others.limit, WEEK_S))
    gpus = np.append(gpus, np.round(others.gpus * scale).astype(np.int64))
    ledger = SimLedger(
        account=np.column_stack((first[of], gpus, (gpus * week).astype(np.int64))),
        room=ints([rule.limit * (1 if rule.unit == "jobs" else scale) for rule in bounds.rules]),
        links=np.array(bounds.links, LINK),
        row=np.where(hourly, np.cumsum(hourly) - 1, -1).astype(np.int64),
        used=np.zeros((int(hourly.sum()), HOURS), np.int64),
        hour=ints([int((float(trace.submit.min(initial=0.0)) + epoch) // HOUR_S)]),
        kept=np.zeros(3, np.int64),
        epoch=np.array([epoch]),
        limit=week,
        scale=scale,
        others=other_changes(trace, np.flatnonzero(first[of[len(trace) :]] >= 0), scale),
        passed=np.zeros(1, np.int64),
    )
    known = len(bounds.rules)
    # Usage before the replay counts until it leaves the seven days.
    for use in applied.used:
        for at in bounds.of(use.user, use.group, use.qos):
            if at < known and hourly[at]:
                parts = round(use.gpus * scale)
                ledger.room[at] -= record_usage(ledger, int(ledger.row[at]), parts, use.begin, use.end)
    return ledger, never


class QuotaSpan(NamedTuple):
    """GPUs that a user had, for a group and in a class ("": none), from ``begin`` to ``end`` (the trace's clock)."""

    user: str
    group: str
    qos: str
    gpus: int
    begin: float
    end: float


class QuotaSet(NamedTuple):
    """The limits that a replay applies; ``used``: in the seven days before it, which limits of GPU hours count."""

    quotas: Quotas
    used: tuple[QuotaSpan, ...] = ()
