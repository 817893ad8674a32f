"""A policy as its file describes it."""

from __future__ import annotations

from typing import Literal

import msgspec

Order = Literal["fifo", "ljf", "sjf", "fairshare"]
Place = Literal["first-fit", "best-fit", "spread", "naive"]
Backfill = Literal["none", "skip", "easy"]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """policies/<name>.yaml, checked: the stages of a staged policy.

    Attributes:
        order: fifo (submit time, id), ljf (largest job first: GPUs, then cores), sjf (shortest limit first), fairshare
            (least recent GPU hours of the user first).
        place: Where a job goes among nodes that fit.
        backfill: ``none`` the head of the queue blocks; ``skip`` whoever fits goes; ``easy`` whoever fits goes unless
            it would delay the head (Lifka 1995).
        version: Short digest of the file's meaning; recorded with every start.
    """

    name: str
    order: Order = "fifo"
    place: Place = "first-fit"
    backfill: Backfill = "none"
    description: str = ""
    version: str = ""
