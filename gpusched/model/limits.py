"""Who belongs where, and how much each may have: groups, limits, classes of service."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WEEK_S = 7 * 86400


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a user, a group or a class may have. None: there is no bound.

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

    def over(self, other: Limits) -> Limits:
        """These limits, and where they say nothing what ``other`` says."""
        own = {name: found for name in self.__struct_fields__ if (found := getattr(self, name)) is not None}
        return msgspec.structs.replace(other, **own)


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

    def get(self, name: str) -> Group | None:
        """The group called ``name``, or None."""
        return next((group for group in self.groups if group.name == name), None)

    def of(self, user: str) -> tuple[str, ...]:
        """The groups that ``user`` is a member of, in the file's order."""
        return tuple(group.name for group in self.groups if user in group.members)

    def for_job(self, user: str, asked: str) -> str:
        """The group that a job counts for: the one it names, else the first that its user is a member of; "": none."""
        return asked if asked and self.get(asked) is not None else next(iter(self.of(user)), "")

    def above(self, name: str) -> tuple[str, ...]:
        """The group itself and those above it, upwards; none where there is no such group."""
        known = {group.name: group for group in self.groups}
        path: list[str] = []
        while (group := known.get(name)) is not None and name not in path:
            path.append(name)
            name = group.parent
        return tuple(path)

    def within(self, user: str, groups: Sequence[str]) -> bool:
        """Whether ``user`` is a member of one of these groups, or of one below it."""
        return any(set(self.above(name)) & set(groups) for name in self.of(user))
