"""Notices: events that users subscribe to, receivers, and delivery."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec


class NoticeKind(StrEnum):
    """Kinds of notices."""

    BEGIN = "begin"
    END = "end"
    FAIL = "fail"
    REQUEUE = "requeue"
    LIMIT = "limit"
    NODE = "node"
    IDLE = "idle"


DEFAULT_NOTICE_KINDS = (NoticeKind.END, NoticeKind.LIMIT, NoticeKind.NODE, NoticeKind.IDLE)
"""Default of a job with ``--mail``; ``end`` is sent for every end."""
NEAR_LIMIT = 0.9
"""The part of its limit after which a job is near it, as of Slurm's TIME_LIMIT_90."""
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}(@[A-Za-z0-9][A-Za-z0-9.-]{0,252})?")


def is_address(text: str) -> bool:
    """Return whether mail can be sent to it: ``name@host``, or a user of the controller's machine."""
    return _ADDRESS.fullmatch(text) is not None


def kinds_of(words: Iterable[str]) -> tuple[NoticeKind, ...]:
    """Return the named kinds in the order of `NoticeKind`; ``all`` is all of them.

    Raises:
        ValueError: Another word; it is the message.
    """
    asked = set(words)
    for word in asked - {*NoticeKind, "all"}:
        raise ValueError(word)
    return tuple(kind for kind in NoticeKind if kind in asked or "all" in asked)


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver of notices that the operator configured, by one of the methods below.

    Attributes:
        webhook: URL that gets the notice as JSON by POST. command: Gets it on stdin, run as the controller's user.
        notifier: Component of the group ``notifiers`` that sends it. options: What it is given besides.
        on: Of these kinds. users: Of the jobs of these users, and of nothing else; empty: of all, and of nodes.
    """

    webhook: str = ""
    command: tuple[str, ...] = ()
    notifier: str = ""
    options: dict[str, str] = {}
    on: tuple[NoticeKind, ...] = tuple(NoticeKind)
    users: tuple[str, ...] = ()

    @property
    def way(self) -> tuple[str, dict[str, str] | tuple[str, ...]]:
        """Return the notifier's name and its options: a webhook's URL, a command's argv."""
        if self.webhook:
            return "webhook", {"url": self.webhook}
        return ("command", self.command) if self.command else (self.notifier, self.options)


class Notices(msgspec.Struct, frozen=True, kw_only=True):
    """The inventory's ``notices`` section.

    Attributes:
        smtp: Host, or host:port, that takes mail; "": the program ``sendmail`` does.
        sender: Mail comes from it; "": the mail server's default.
        idle_s: Idle time of a job's GPUs that causes a notice.
    """

    to: tuple[Receiver, ...] = ()
    smtp: str = ""
    sender: str = ""
    idle_s: int = 1800


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One notice to one receiver.

    Attributes:
        key: Deduplication key: no receiver gets a notice twice.
        to: ``mail ADDRESS``, or the digest of a `Receiver`; what it says is a secret, so it stays in the inventory.
        body: The content; ``text`` in it is one line for people.
        made: Creation time (Unix seconds). tries: Failed deliveries. due: Next delivery; None: never again.
        error: Why the last try failed, one line; "": there was none, or it arrived.
    """

    key: str
    to: str
    body: dict[str, Any]
    made: float
    tries: int = 0
    due: float | None = None
    error: str = ""
