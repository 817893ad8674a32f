"""What is asked of Slurm, as lines for one scontrol: the lease, starts on decided nodes, orders, requeues.

Nothing gets into a line that is no job id, no node name and no number, so that no text of a user's can become a
command or a field of one. The lease is a reservation that only jobs which are put into it may use: while it is renewed,
no job starts on its nodes but those; once it is not, it ends by itself, and Slurm starts what waits. Running jobs do
not notice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpusched.model.slurm import LEASE, SlurmJob

LEASE_S = 60
"""Seconds until the lease ends by itself after its last renewal."""

MAX_UPDATES = 200
"""Of jobs, in one cycle: some tenths of a second of slurmctld's time."""

_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10}|\+[0-9]{1,5})?")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_MOST_PRIORITY = (1 << 31) - 1


def create(nodes: Collection[str], lasts_s: int = LEASE_S, enforced: bool = True, has_own_account: bool = False) -> str:
    """The lease begins; refused while one lingers that has ended (`renew` it then).

    Every job can be put into it. That takes another wording where Slurm enforces associations (``enforced``: jobs of
    all accounts below root) than where it does not: there a job's account has to be the very one that is named.
    A reservation's idle time is booked on the accounts that it names, so on root; on nobody where it names those that
    it is not for: of an account `LEASE` (``has_own_account``) there are no jobs.
    """
    who = f"Accounts={f'-{LEASE}' if has_own_account else 'root'}" if enforced else "Users=-nobody"
    return (
        f"create reservation ReservationName={LEASE} Nodes={_nodes(nodes)} StartTime=now EndTime=now+{int(lasts_s)} "
        f"{who} Flags=FLEX,IGNORE_JOBS,NO_HOLD_JOBS_AFTER_END"
    )


def enforces_associations(config: Mapping[str, str]) -> bool:
    """Whether Slurm lets only those submit whom its accounting database knows (scontrol show config)."""
    words = set(re.split(r"[, ]+", config.get("AccountingStorageEnforce", "").lower()))
    return not words.isdisjoint(("associations", "limits", "qos", "safe", "wckeys", "all"))


def renew(nodes: Collection[str] = (), lasts_s: int = LEASE_S) -> str:
    """The lease lasts longer, on other nodes than so far where they are given; refused where there is none."""
    other = f" Nodes={_nodes(nodes)}" if nodes else ""
    return f"update ReservationName={LEASE} EndTime=now+{int(lasts_s)}{other}"


def end() -> str:
    """The lease is over in a second: at once is refused right after it was created or renewed."""
    return f"update ReservationName={LEASE} EndTime=now+1"


def start(job: str, nodes: Collection[str]) -> str:
    """The job may start, on exactly these nodes; all of it or nothing, and nothing of a job that waits no more."""
    return f"update JobId={_job(job)} ReservationName={LEASE} ReqNodeList={_nodes(nodes)}"


def admit(job: str) -> str:
    """The job may start on nodes that Slurm chooses, in the lease or outside it."""
    return f"update JobId={_job(job)} ReservationName={LEASE}"


def withdraw(job: str, nodelist: Collection[str]) -> str:
    """Neither of these; ``nodelist``: the nodes that its user named, which it keeps. Refused once it runs."""
    return f"update JobId={_job(job)} ReservationName= ReqNodeList={_nodes(nodelist) if nodelist else ''}"


def undo(job: SlurmJob, nodelist: Collection[str]) -> list[str]:
    """A job that Slurm holds for what we asked has its priority again, and is as its user wants it; as `withdraw`.

    To leave the reservation suffices; one that Slurm has taken out of it, as it ended, has to be released.
    """
    return [withdraw(job.id, nodelist), *([f"release {_job(job.id)}"] if job.reservation != LEASE else [])]


def requeue(job: str) -> str:
    """A running job is ended and waits again."""
    return f"requeue {_job(job)}"


def begin_now(job: str) -> str:
    """A job that waits again after its requeue need not wait two minutes; refused until it has ended on its nodes."""
    return f"update JobId={_job(job)} StartTime=now"


def site_factor(job: str, factor: int) -> str:
    """What is added to its priority, under priority/multifactor."""
    return f"update JobId={_job(job)} SiteFactor={_priority(factor)}"


def priority(job: str, value: int) -> str:
    """Its priority itself, under priority/basic."""
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


def _priority(value: int, most: int = _MOST_PRIORITY) -> str:
    return str(max(0, min(int(value), most)))


# -- the order of a queue, as priorities


class PendingSlurmJob(NamedTuple):
    """A job that waits, in Slurm's order: larger priority first, then smaller id.

    Attributes:
        priority: As Slurm has it, at least 1.
        base: Without what we added; may be less than 1, which Slurm does not show.
        added: What we added to it.
    """

    id: str
    priority: int
    base: int
    added: int = 0

    def place(self, priority: int) -> tuple[int, int, int]:
        """Larger: sooner."""
        job, _, task = self.id.partition("+")[0].partition("_")
        return max(1, priority), -int(job), -int(task or 0)


def raised(queue: Iterable[PendingSlurmJob], wanted: Sequence[str]) -> dict[str, int]:
    """What to add to priorities so that the wanted jobs go first, in their order, before all others of ``queue``.

    Nothing where they are in order already. Else each gets the least that puts it before who follows it, and jobs that
    were raised earlier and are not wanted first any more get nothing. Only what changes is given, the first job first.
    """
    jobs = {job.id: job for job in queue}
    first = [jobs[name] for name in dict.fromkeys(wanted) if name in jobs]
    names = {job.id for job in first}
    others = [job for job in jobs.values() if job.id not in names]
    back = {job.id: 0 for job in others if job.added}
    behind = max((job.place(job.base) for job in others), default=None)
    if not back and _in_order([job.place(job.priority) for job in first], behind):
        return {}
    found = {}
    for job in reversed(first):
        value = job.base
        if behind is not None and job.place(value) <= behind:
            value = behind[0] + (job.place(behind[0]) <= behind)
        behind = job.place(value)
        if value - job.base != job.added:
            found[job.id] = value - job.base
    return dict(reversed(found.items())) | back


def _in_order(places: Sequence[tuple[int, int, int]], behind: tuple[int, int, int] | None) -> bool:
    following = [*places[1:], *([behind] if behind is not None else [])]
    return all(place > after for place, after in zip(places, following, strict=False))


def fifo_base(queue: Mapping[str, int], changed: Collection[str]) -> dict[str, int]:
    """Under priority/basic: job -> the priority that puts it back to where it came in.

    Args:
        queue: Job -> its priority.
        changed: Those of which we set it. Each goes right before the next later job that is untouched, which has a
            greater id; behind all of them, where there is none.
    """
    order = sorted(queue, key=lambda job: PendingSlurmJob(job, 1, 1).place(1), reverse=True)
    base: dict[str, int] = {}
    untouched = [queue[job] for job in order if job not in changed]
    later = max(1, min(untouched, default=2) - 1)
    for job in reversed(order):
        if job not in changed:
            later = queue[job]
        elif job in queue:
            base[job] = later
    return base
