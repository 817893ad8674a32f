"""Rules on jobs that hold idle GPUs, and the state of such a job."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

IdleAction = Literal["warn", "signal", "requeue", "cancel"]

IDLE_BELOW = 0.05
"""Utilization below which a GPU is idle where the inventory does not say."""
MAX_WARN_BEFORE_S = 900
IDLE_POLICY = "idle"
"""Stands for a policy's name in the preemptions of a job that was requeued by such a rule."""


class IdleRule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a job whose GPUs are all idle.

    Attributes:
        after_s: For so long without interruption.
        then: ``warn`` only warns its user, once that time is over; before the others the user is warned.
        warn_before_s: So long before the action; 0 for ``warn``.
    """

    after_s: int
    then: IdleAction = "warn"
    warn_before_s: int = 0


class IdleExempt(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs to which the rules do not apply; ``names``: of jobs, with the wildcards of the shell."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()


class IdleRules(msgspec.Struct, frozen=True, kw_only=True):
    """A partition's rules on idle GPUs.

    Attributes:
        jobs: Of batch jobs; ``sessions``: of those of ``gpusched run``. None: there is no rule.
        below, sessions_below: Utilization below which their GPUs are idle; for usage reports, too.
    """

    jobs: IdleRule | None = None
    sessions: IdleRule | None = None
    below: float = IDLE_BELOW
    sessions_below: float = IDLE_BELOW
    exempt: IdleExempt = IdleExempt()

    def is_exempt(self, *, user: str, group: str, name: str, partition: str) -> bool:
        """Return whether the rules do not apply to a job."""
        exempt = self.exempt
        return (
            user in exempt.users
            or (group != "" and group in exempt.groups)
            or partition in exempt.partitions
            or any(fnmatchcase(name, pattern) for pattern in exempt.names)
        )


class IdleState(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose GPUs are all idle at present. Times are Unix seconds.

    Attributes:
        since: The first reading that showed it.
        below: Utilization below which they count as idle.
        then: The action to take; ``at``: when; None: it has been done, or there is only a warning.
        warned_at: When its user was warned; None: not yet.
        acted_at: When the action was decided, once; None: not yet.
    """

    since: float
    below: float
    then: IdleAction
    at: float | None = None
    warned_at: float | None = None
    acted_at: float | None = None
