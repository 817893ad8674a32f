"""Quota usage: counted from active jobs and from recent GPU hours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from gpusched.errors import UsageError
from gpusched.model.jobs import HOUR_S, JobRecord, JobSpec, JobState
from gpusched.model.limits import WEEK_S, Bound, LimitRule, Quotas, limit_units
from gpusched.model.slicetables import gpus_counted
from gpusched.model.units import count_of
from gpusched.queue.rows import JobReads

_SLOT_S = 3 * HOUR_S  # attempts that ended within one such slot leave the seven days together
_RUNNING = ("gpus", "jobs", "gpu_s")


class QuotaUsage(NamedTuple):
    """GPU seconds of one user, group and class; ``until``: end of the last attempt (Unix seconds)."""

    user: str
    group: str
    qos: str
    until: float
    gpu_s: float


class _Subject(msgspec.Struct):
    """The group and class of a stored spec."""

    group: str = ""
    qos: str = ""


_SUBJECT = msgspec.json.Decoder(_Subject)


class QuotaReads(JobReads):
    """Queries for quotas."""

    _summed: tuple[float, list[QuotaUsage]] | None = None  # of attempts that ended before an hour began

    def gpu_seconds_of_week(self, now: float) -> list[QuotaUsage]:
        """Return GPU seconds of the seven days before ``now``; time on a shared GPU counts in full for each job.

        Attempts that ended before the present hour are summed up once an hour: of those that were running a week ago,
        up to an hour more counts.
        """
        hour = now // HOUR_S * HOUR_S
        if self._summed is None or self._summed[0] != hour:
            ended = self._sums("end_time > :since AND end_time <= :hour", "end_time", since=hour - WEEK_S, hour=hour)
            self._summed = hour, ended
        times = {"since": now - WEEK_S, "hour": hour, "now": now}
        recent = self._sums("end_time > :hour AND end_time > :since", "min(end_time, :now)", **times)
        recent += self._sums("end_time IS NULL AND start_time < :now", ":now", **times)
        return [*self._summed[1], *recent]

    def _sums(self, which: str, until: str, **times: float) -> list[QuotaUsage]:
        """Return usage of the attempts that ``which`` selects, from ``since`` to ``until``, by subject and end."""
        slot = f"cast({until} / {_SLOT_S} AS INTEGER)"
        rows = self._db.execute(
            f"SELECT user, coalesce(account, ''), coalesce(qos, ''), {slot}, "
            f"sum(gpus * ({until} - max(start_time, :since))) FROM runs WHERE {which} GROUP BY 1, 2, 3, 4",
            times,
        )
        return [QuotaUsage(user, group, name, (at + 1) * _SLOT_S, gpu_s) for user, group, name, at, gpu_s in rows]

    def runs_of_week(self, until: float) -> list[tuple[str, str, str, int, float, float]]:
        """Return (user, group, class, GPUs, start, end) of attempts in the seven days before ``until``."""
        return self._db.execute(
            "SELECT user, coalesce(account, ''), coalesce(qos, ''), gpus, start_time, "
            "min(coalesce(end_time, :until), :until) FROM runs "
            "WHERE start_time < :until AND (end_time IS NULL OR end_time > :since)",
            {"until": until, "since": until - WEEK_S - HOUR_S},
        ).fetchall()

    def waiting_by_class(self) -> dict[tuple[str, str, str], int]:
        """Return (user, group, class) -> number of pending jobs; each array task counts."""
        query = "SELECT user, spec, sum(tasks) FROM jobs WHERE state = ? GROUP BY 1, 2"
        rows = self._db.execute(query, (JobState.PENDING,))
        found: dict[tuple[str, str, str], int] = {}
        subjects: dict[bytes, _Subject] = {}
        for user, digest, count in rows.fetchall():
            if digest not in subjects:
                (data,) = self._db.execute("SELECT data FROM specs WHERE digest = ?", (digest,)).fetchone()
                subjects[digest] = _SUBJECT.decode(data)
            key = (user, subjects[digest].group, subjects[digest].qos)
            found[key] = found.get(key, 0) + count
        return found


class QuotaLedger:
    """Quotas of running jobs with their usage; each (user, group, class) is looked up once."""

    def __init__(self, quotas: Quotas, active: Iterable[JobRecord], used: Sequence[QuotaUsage], now: float) -> None:
        """Count ``active`` jobs and what was ``used`` in the last seven days."""
        self._quotas = quotas
        self._rules: list[LimitRule] = []
        self._used: list[float] = []
        self._frees: list[dict[float, int]] = []
        self._row: dict[tuple[tuple[str, str, str], str], int] = {}
        self._known: dict[tuple[str, str, str], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, str], str] = {}
        if not quotas:
            return
        for job in active:
            left = _left_s(job, now)
            gpus = gpus_counted(job.allocation.gpus if job.allocation is not None else job.spec.gpus, job.spec.profile)
            for at in self.of(job.user, job.spec):
                self._used[at] += limit_units(self._rules[at].unit, gpus, left)
        for one in used:
            for at in self.of_kind(one.user, self.group(one.user, one.group), one.qos):
                if self._rules[at].unit == "gpu_s":
                    self._used[at] += round(one.gpu_s)
                    leaves = one.until + WEEK_S
                    self._frees[at][leaves] = self._frees[at].get(leaves, 0) + round(one.gpu_s)

    def group(self, user: str, asked: str) -> str:
        """Return the group that a job counts for."""
        if (user, asked) not in self._groups:
            self._groups[user, asked] = self._quotas.groups.for_job(user, asked)
        return self._groups[user, asked]

    def of(self, user: str, spec: JobSpec) -> tuple[int, ...]:
        """Return the bounds that apply to a job, as indices into `bounds`."""
        if not self._quotas:
            return ()
        return self.of_kind(user, self.group(user, spec.group), spec.qos)

    def of_kind(self, user: str, group: str, qos: str) -> tuple[int, ...]:
        """Return the bounds that apply to jobs of ``user`` in a group and a class ("": none)."""
        key = (user, group, qos)
        if key not in self._known:
            rules = (rule for rule in self._quotas.rules(*key) if rule.unit in _RUNNING)
            self._known[key] = tuple(self._enter(rule) for rule in rules)
        return self._known[key]

    def _enter(self, rule: LimitRule) -> int:
        row = self._row.setdefault((rule.key, rule.unit), len(self._rules))
        if row == len(self._rules):
            self._rules.append(rule)
            self._used.append(0)
            self._frees.append({})
        return row

    def bounds(self) -> tuple[Bound, ...]:
        """Return all bounds looked up so far."""
        rows = zip(self._rules, self._used, self._frees, strict=True)
        return tuple(Bound(rule, used, tuple(sorted(frees.items()))) for rule, used, frees in rows)


def _left_s(job: JobRecord, now: float) -> float:
    """Return how long a job may still hold its resources, seconds; before its start, its whole limit."""
    if job.start_time is None:
        return job.limit_s
    return max(0.0, (job.ending.kill_at if job.ending is not None else job.start_time + job.limit_s) - now)


class PendingJobLimits:
    """Pending jobs per user, group and class against their limits; counted on first use."""

    def __init__(self, store: QuotaReads, quotas: Quotas) -> None:
        self._store, self._quotas = store, quotas
        self._counts: Counter[tuple[str, str, str]] | None = None
        self._rules = cache(self._rules_of)

    def check(self, user: str, spec: JobSpec, count: int) -> None:
        """Check that ``count`` more jobs may be queued.

        Raises:
            UsageError: A limit does not let them.
        """
        for rule in self._rules(user, spec.group, spec.qos):
            has = self._counted[rule.key]
            if has + count > rule.limit:
                raise UsageError(
                    f"limit of {rule.subject}: {has} of {count_of(rule.limit, 'pending job')}; {count} more exceed it "
                    f"({rule.reason})"
                )

    def add(self, user: str, spec: JobSpec, count: int) -> None:
        """Count jobs that were queued."""
        for rule in self._rules(user, spec.group, spec.qos):
            self._counted[rule.key] += count

    @property
    def _counted(self) -> Counter[tuple[str, str, str]]:
        if self._counts is None:
            self._counts = Counter()
            for (user, group, qos), jobs in self._store.waiting_by_class().items():
                for rule in self._rules(user, group, qos):
                    self._counts[rule.key] += jobs
        return self._counts

    def _rules_of(self, user: str, group: str, qos: str) -> tuple[LimitRule, ...]:
        found = self._quotas.rules(user, self._quotas.groups.for_job(user, group), qos)
        return tuple(rule for rule in found if rule.unit == "queued")


def recent_quota_usage(reader: QuotaReads, quotas: Quotas, now: float) -> list[QuotaUsage]:
    """Return usage for GPU-hour quotas; empty without such quotas."""
    return reader.gpu_seconds_of_week(now) if quotas.by_hours else []
