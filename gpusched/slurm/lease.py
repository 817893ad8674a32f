"""scontrol commands for the lease, for starts on chosen nodes, for priorities and for requeues.

A command is built from job ids, node names and numbers only, so no user-supplied text can become a command or one of
its fields. The lease is a reservation that only jobs placed in it may use. While it is renewed, no other job starts on
its nodes. Without renewal it ends by itself, and Slurm starts pending jobs again. Running jobs are not affected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpusched.model.slurm import LEASE, SlurmJob

LEASE_S = 60
"""Seconds from the last renewal until the lease ends by itself."""

MAX_UPDATES = 200
"""Job updates per cycle: they take slurmctld some tenths of a second."""

_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10}|\+[0-9]{1,5})?")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_MAX_PRIORITY = (1 << 31) - 1


def create(nodes: Collection[str], duration_s: int = LEASE_S, enforced: bool = True, own_account: bool = False) -> str:
    """Return the command that creates the lease; Slurm rejects it while an ended one still lingers (`renew` that one).

    The reservation must admit every job. Where Slurm enforces associations (``enforced``) it names accounts, since
    those include all accounts below root; elsewhere an account would have to match a job's exactly, so it names users.
    Slurm charges a reservation's idle time to the accounts it names, that is to root, and to none where accounts are
    excluded instead: ``own_account`` means that there is an account `LEASE`, which no job uses, to exclude.
    """
    access = f"Accounts={f'-{LEASE}' if own_account else 'root'}" if enforced else "Users=-nobody"
    return (
        f"create reservation ReservationName={LEASE} Nodes={_nodes(nodes)} StartTime=now EndTime=now+{int(duration_s)} "
        f"{access} Flags=FLEX,IGNORE_JOBS,NO_HOLD_JOBS_AFTER_END"
    )


def enforces_associations(config: Mapping[str, str]) -> bool:
    """Return whether only users known to the accounting database may submit (by ``scontrol show config``)."""
    words = set(re.split(r"[, ]+", config.get("AccountingStorageEnforce", "").lower()))
    return not words.isdisjoint(("associations", "limits", "qos", "safe", "wckeys", "all"))


def renew(nodes: Collection[str] = (), duration_s: int = LEASE_S) -> str:
    """Return the command that extends the lease, and moves it to ``nodes`` if given; rejected if there is none."""
    other = f" Nodes={_nodes(nodes)}" if nodes else ""
    return f"update ReservationName={LEASE} EndTime=now+{int(duration_s)}{other}"


def end() -> str:
    """Return the command that ends the lease in a second; Slurm rejects "now" right after a create or renew."""
    return f"update ReservationName={LEASE} EndTime=now+1"


def start(job: str, nodes: Collection[str]) -> str:
    """Return the command that starts a pending job on exactly these nodes; Slurm applies all of it or nothing."""
    return f"update JobId={_job(job)} ReservationName={LEASE} ReqNodeList={_nodes(nodes)}"


def admit(job: str) -> str:
    """Return the command that lets a job start on nodes of Slurm's choice, inside the lease or outside."""
    return f"update JobId={_job(job)} ReservationName={LEASE}"


def withdraw(job: str, nodelist: Collection[str]) -> str:
    """Return the command that reverts `start` and `admit`, restoring the user's ``nodelist``; rejected once it runs."""
    return f"update JobId={_job(job)} ReservationName= ReqNodeList={_nodes(nodelist) if nodelist else ''}"


def undo(job: SlurmJob, nodelist: Collection[str]) -> list[str]:
    """Return the commands that restore a job that Slurm holds because of our request, and its priority.

    As with `withdraw`, leaving the reservation is enough; a job that Slurm removed from it at its end must be released.
    """
    return [withdraw(job.id, nodelist), *([f"release {_job(job.id)}"] if job.reservation != LEASE else [])]


def requeue(job: str) -> str:
    """Return the command that stops a running job and requeues it."""
    return f"requeue {_job(job)}"


def begin_now(job: str) -> str:
    """Return the command that skips the two-minute delay after a requeue; rejected until the job has left its nodes."""
    return f"update JobId={_job(job)} StartTime=now"


def site_factor(job: str, factor: int) -> str:
    """Return the command that sets the job's SiteFactor, which priority/multifactor adds to its priority."""
    return f"update JobId={_job(job)} SiteFactor={_priority(factor)}"


def priority(job: str, value: int) -> str:
    """Return the command that sets the job's priority, under priority/basic."""
    return f"update JobId={_job(job)} Priority={_priority(value, (1 << 32) - 3)}"


def _job(job: str) -> str:
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r} is no id of a job")
    return job


def _nodes(nodes: Collection[str]) -> str:
    for node in nodes:
        if not _NODE.fullmatch(node):
            raise ValueError(f"{node!r} is no name of a node")
    if not nodes:
        raise ValueError("no nodes")
    return ",".join(nodes)


def _priority(value: int, limit: int = _MAX_PRIORITY) -> str:
    return str(max(0, min(int(value), limit)))


# -- the order of a queue, as priorities


class PendingSlurmJob(NamedTuple):
    """A pending job in Slurm's order: higher priority first, then lower id.

    Attributes:
        priority: As Slurm reports it, at least 1.
        base: The priority without our addition; may be below 1, which Slurm does not show.
        added: Our addition.
    """

    id: str
    priority: int
    base: int
    added: int = 0

    def sort_key(self, priority: int) -> tuple[int, int, int]:
        """Return the sort key with this priority; larger starts sooner."""
        job_id, _, task = self.id.partition("+")[0].partition("_")
        return max(1, priority), -int(job_id), -int(task or 0)


def priority_additions(queue: Iterable[PendingSlurmJob], wanted: Sequence[str]) -> dict[str, int]:
    """Return the additions to priorities that put the wanted jobs first, in order, before all others of ``queue``.

    Empty if they are in order already. Otherwise each gets the smallest addition that puts it before the next one, and
    jobs raised earlier that are no longer wanted get 0. Only changes are returned, the first job first.
    """
    jobs = {job.id: job for job in queue}
    first = [jobs[name] for name in dict.fromkeys(wanted) if name in jobs]
    names = {job.id for job in first}
    others = [job for job in jobs.values() if job.id not in names]
    resets = {job.id: 0 for job in others if job.added}
    following = max((job.sort_key(job.base) for job in others), default=None)
    if not resets and _in_order([job.sort_key(job.priority) for job in first], following):
        return {}
    additions = {}
    # From the last wanted job to the first: each must come before the one placed just now.
    for job in reversed(first):
        value = job.base
        if following is not None and job.sort_key(value) <= following:
            value = following[0] + (job.sort_key(following[0]) <= following)
        following = job.sort_key(value)
        if value - job.base != job.added:
            additions[job.id] = value - job.base
    return dict(reversed(additions.items())) | resets


def _in_order(places: Sequence[tuple[int, int, int]], last: tuple[int, int, int] | None) -> bool:
    following = [*places[1:], *([last] if last is not None else [])]
    return all(place > after for place, after in zip(places, following, strict=False))


def fifo_priorities(queue: Mapping[str, int], changed: Collection[str]) -> dict[str, int]:
    """Return, under priority/basic, the priorities that put changed jobs back into submission order.

    Args:
        queue: Job -> its priority.
        changed: Jobs whose priority we set. Each goes right before the next unchanged job with a higher id, or after
            all of them if there is none.
    """
    order = sorted(queue, key=lambda job: PendingSlurmJob(job, 1, 1).sort_key(1), reverse=True)
    priorities: dict[str, int] = {}
    untouched = [queue[job] for job in order if job not in changed]
    next_priority = max(1, min(untouched, default=2) - 1)
    # From the last job to the first, so that an unchanged job is seen before those that precede it.
    for job in reversed(order):
        if job not in changed:
            next_priority = queue[job]
        elif job in queue:
            priorities[job] = next_priority
    return priorities
