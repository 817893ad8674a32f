"""The inventory's ``notices`` section."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from gpusched.config import fields
from gpusched.config.yamlfile import Value
from gpusched.model.notices import NoticeKind, Notices, Receiver, is_address
from gpusched.model.resources import EventSettings

_URL = re.compile(r"https?://[!-~]{1,2000}")
_ABSOLUTE = re.compile(r"/[^\x00-\x1f\x7f]{1,4000}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?")


def read_notices(value: Value | None) -> Notices:
    """Read the section; defaults where it is missing.

    Raises:
        FileError: The first thing wrong with it.
    """
    values = fields.read(value, NOTICES, "a mapping with to, smtp, from, idle")
    return Notices(**values)


def read_events(value: Value | None) -> EventSettings:
    """Read ``settings.events``; defaults where it is missing.

    Raises:
        FileError: The first thing wrong with it.
    """
    return EventSettings(**fields.read(value, EVENTS, "a mapping with file, webhook or both"))


def _receivers(value: Value) -> tuple[Receiver, ...]:
    return tuple(_receiver(item) for item in value.items("a list of receivers, each a webhook or a command"))


def _receiver(value: Value) -> Receiver:
    values: dict[str, Any] = fields.read(value, RECEIVER, "a mapping with webhook, command or notifier, on, users")
    ways = [key for key in ("webhook", "command", "notifier") if key in values]
    if len(ways) != 1:
        raise value.error("a webhook, a command or a notifier", " and ".join(ways) or "none of them")
    if "options" in values and ways != ["notifier"]:
        raise value.error("options only with a notifier", f"them with a {ways[0]}")
    return Receiver(**values)


def _options(value: Value) -> dict[str, str]:
    given = value.fields("a mapping of the notifier's options, each a text")
    for option in given.values():
        if not option.is_text:
            raise option.error("a text", "something else")  # it may be a secret, and errors are shown to all users
    return {name: option.text("a text") for name, option in given.items()}


def _url(value: Value) -> str:
    expected = "a URL such as https://chat.example.org/hooks/gpusched"
    text = value.text(expected)
    try:
        parts = urlsplit(text)
        good = _URL.fullmatch(text) and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        good = False
    if not good:
        raise value.error(expected, "another text")  # much of it is a secret, and errors are shown to all users
    return text


def _argv(value: Value) -> tuple[str, ...]:
    words = tuple(item.text("a word of the command") for item in value.items("a command as a list of its words"))
    if not words or not words[0].startswith("/"):
        raise value.error("a command whose first word is an absolute path", " ".join(words)[:80] or "nothing")
    return words


def _sender(value: Value) -> str:
    text = value.text("a mail address")
    if not is_address(text):
        raise value.error("a mail address such as gpusched@example.org")
    return text


def _kinds(value: Value) -> tuple[NoticeKind, ...]:
    words = {item.choice((*NoticeKind, "all")) for item in value.items("a list of kinds of notices")}
    return tuple(kind for kind in NoticeKind if kind in words or "all" in words)


RECEIVER: fields.Fields = {
    "webhook": ("webhook", _url),
    "command": ("command", _argv),
    "notifier": ("notifier", lambda value: value.component("notifiers", ("webhook", "command"))),
    "options": ("options", _options),
    "on": ("on", _kinds),
    "users": ("users", fields.users),
}
EVENTS: fields.Fields = {
    "file": ("file", lambda value: value.text("an absolute path", _ABSOLUTE)),
    "webhook": ("webhook", _url),
}
NOTICES: fields.Fields = {
    "to": ("to", _receivers),
    "smtp": ("smtp", lambda value: value.text("a mail server: host or host:port", _HOST)),
    "from": ("sender", _sender),
    "idle": ("idle_s", fields.whole_seconds),
}
