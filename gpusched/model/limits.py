"""Groups of users, their limits, and classes of service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

WEEK_S = 7 * 86400


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a user, a group or a class. None: unlimited.

    Attributes:
        gpus: GPUs of its running jobs together.
        jobs: Running jobs.
        queued: Waiting jobs; each task of an array is one.
        gpu_hours: GPU hours in any seven days; a job is charged its whole time limit until it has ended.
        time_s: Time limit of a job, seconds.
    """

    gpus: int | None = None
    jobs: int | None = None
    queued: int | None = None
    gpu_hours: float | None = None
    time_s: int | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Users who share; groups form a tree.

    Attributes:
        members: User -> shares within the group.
        parent: The group above it; "": none is.
        shares: Of its parent's part, beside the parent's other groups and members.
        limits: Of all jobs of this group and of those below it together (``time_s``: of each).
    """

    name: str
    members: dict[str, int] = {}
    parent: str = ""
    shares: int = 1
    limits: Limits = Limits()


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The tree of groups, in the file's order."""

    groups: tuple[Group, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __getitem__(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def get(self, name: str) -> Group | None:
        """Return the group called ``name``, or None."""
        return next((group for group in self.groups if group.name == name), None)

    def of(self, user: str) -> tuple[str, ...]:
        """Return the groups that ``user`` is a member of, in the file's order."""
        return tuple(group.name for group in self.groups if user in group.members)

    def for_job(self, user: str, asked: str) -> str:
        """Return the group that a job counts for: the one it names, else its user's first one; "": none."""
        return asked if asked and self.get(asked) is not None else next(iter(self.of(user)), "")

    def above(self, name: str) -> tuple[str, ...]:
        """Return the group and its ancestors, upwards; () where it does not exist."""
        known = {group.name: group for group in self.groups}
        path: list[str] = []
        while (group := known.get(name)) is not None and name not in path:
            path.append(name)
            name = group.parent
        return tuple(path)

    def within(self, user: str, groups: Sequence[str]) -> bool:
        """Return whether ``user`` is a member of one of these groups or their descendants."""
        return any(set(self.above(name)) & set(groups) for name in self.of(user))


def leaf_of(user: str, group: str) -> str:
    """Return ``group/user``; the user's name without a group."""
    return f"{group}/{user}" if group else user


def split_leaf(leaf: str) -> tuple[str, str]:
    """Return user and group of a `leaf_of`."""
    group, slash, user = leaf.partition("/")
    return (user, group) if slash else (leaf, "")


class Qos(msgspec.Struct, frozen=True, kw_only=True):
    """A class of service.

    Attributes:
        priority: Added to the priority of its jobs.
        preemptible: Whether a policy may stop its jobs for others; None: as each job says.
        users, groups: Who may use it (members of these groups and of those below them); both empty: all users.
        limits: Of all its jobs together. per_user: Of each user's jobs in it.
        exempt: Its jobs count for its own limits only, not for those of their users and groups.
    """

    name: str
    priority: int = 0
    preemptible: bool | None = None
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    limits: Limits = Limits()
    per_user: Limits = Limits()
    exempt: bool = False

    def may_use(self, user: str, groups: Groups) -> bool:
        """Return whether ``user`` may submit jobs to the class."""
        if not self.users and not self.groups:
            return True
        return user in self.users or groups.within(user, self.groups)


Unit = Literal["gpus", "jobs", "gpu_s", "queued", "time_s"]


class LimitRule(msgspec.Struct, frozen=True):
    """One limit that applies to a job.

    Attributes:
        subject: For people: ``user ann``, ``group physics``, ``class high``, ``user ann in class high``.
        key: The same for machines: (user, group, class), "" where it is not of one.
        reason: In Slurm's words.
    """

    key: tuple[str, str, str]
    subject: str
    unit: Unit
    limit: int
    reason: str


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """All limits: of each user, of those named (``users``, complete), of groups, of classes."""

    each: Limits = Limits()
    users: dict[str, Limits] = {}
    groups: Groups = Groups()
    qos: tuple[Qos, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.users or self.qos) or self.each != Limits() or any(g.limits != Limits() for g in self._all)

    @property
    def _all(self) -> tuple[Group, ...]:
        return self.groups.groups

    @property
    def by_hours(self) -> bool:
        """Return whether any limit is on GPU hours."""
        found = [self.each, *self.users.values(), *(group.limits for group in self._all)]
        found += [limits for qos in self.qos for limits in (qos.limits, qos.per_user)]
        return any(limits.gpu_hours is not None for limits in found)

    def of_class(self, name: str) -> Qos | None:
        """Return the class called ``name``, or None."""
        return next((qos for qos in self.qos if qos.name == name), None)

    def rules(self, user: str, group: str, qos: str) -> tuple[LimitRule, ...]:
        """Return the limits of a job of ``user`` in ``group`` and class ``qos`` ("": none), class limits first."""
        found: list[LimitRule] = []
        known = self.of_class(qos)
        if known is not None:
            found += _rules((user, "", qos), f"user {user} in class {qos}", known.per_user, _CLASS_USER)
            found += _rules(("", "", qos), f"class {qos}", known.limits, _CLASS)
        if known is None or not known.exempt:
            found += _rules((user, "", ""), f"user {user}", self.users.get(user, self.each), _USER)
            for name in self.groups.above(group):
                found += _rules(("", name, ""), f"group {name}", self.groups[name].limits, _GROUP)
        return tuple(found)


_UNITS: dict[str, Unit] = {"gpus": "gpus", "jobs": "jobs", "gpu_hours": "gpu_s", "queued": "queued", "time_s": "time_s"}
# As Slurm calls them, by unit.
_USER = ("AssocGrpGRES", "AssocMaxJobsLimit", "AssocGrpGRESMinutes", "AssocMaxSubmitJobLimit",
         "AssocMaxWallDurationPerJobLimit")  # fmt: skip
_GROUP = ("AssocGrpGRES", "AssocGrpJobsLimit", "AssocGrpGRESMinutes", "AssocGrpSubmitJobsLimit",
          "AssocMaxWallDurationPerJobLimit")  # fmt: skip
_CLASS = ("QOSGrpGRES", "QOSGrpJobsLimit", "QOSGrpGRESMinutes", "QOSGrpSubmitJobsLimit",
          "QOSMaxWallDurationPerJobLimit")  # fmt: skip
_CLASS_USER = ("QOSMaxGRESPerUser", "QOSMaxJobsPerUserLimit", "QOSMaxGRESMinutesPerUser", "QOSMaxSubmitJobPerUserLimit",
               "QOSMaxWallDurationPerJobLimit")  # fmt: skip


def _rules(key: tuple[str, str, str], subject: str, limits: Limits, reasons: Sequence[str]) -> list[LimitRule]:
    found = []
    for (name, unit), reason in zip(_UNITS.items(), reasons, strict=True):
        limit = getattr(limits, name)
        if limit is not None:
            found.append(LimitRule(key, subject, unit, int(limit * 3600) if unit == "gpu_s" else int(limit), reason))
    return found


def limit_units(unit: Unit, gpus: float, limit_s: float) -> float:
    """Return what a running job takes of a limit: 1 job, its GPUs, or GPU seconds of its time limit.

    ``gpus``: slices by their share of one (`gpusched.model.slicetables.gpus_counted`).
    """
    if unit == "gpu_s":
        return int(gpus * min(limit_s, WEEK_S))
    return gpus if unit == "gpus" else 1


class Bound(msgspec.Struct, frozen=True):
    """A limit of running jobs with its current usage.

    Attributes:
        used: What running jobs take; of GPU seconds also those used in the last seven days.
        frees: Of used GPU seconds, when they leave the seven days: (Unix seconds, GPU seconds), ascending.
    """

    rule: LimitRule
    used: float = 0
    frees: tuple[tuple[float, int], ...] = ()

    @property
    def room(self) -> float:
        """Return the unused part; below 0 where the limit was lowered."""
        return self.rule.limit - self.used
