"""The limits of users, groups and classes that a replay applies."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.model.limits import Quotas


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
