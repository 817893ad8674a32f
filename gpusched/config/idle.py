"""``idle:`` of the inventory's settings and partitions -> IdleRules, validated."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from gpusched.config import fields
from gpusched.config.yamlfile import Value, suggestion
from gpusched.model.idle import IDLE_BELOW, MAX_WARN_BEFORE_S, IdleExempt, IdleRule, IdleRules

IdleKeys = Mapping[str, Any]
"""What an ``idle`` mapping says, of sessions under ``sessions``."""

_EXPECTED = "none, or a mapping with after, below, then, warn_before, exempt, sessions"
_EXPECTED_OF_SESSIONS = "a mapping with after, below, then, warn_before"
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)\s*%")
_PATTERN = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


def read_idle(value: Value, inherited: IdleKeys = MappingProxyType({})) -> IdleKeys:
    """Read an ``idle`` mapping over ``inherited`` keys; empty for ``none``.

    Raises:
        FileError: The first thing wrong with it.
    """
    if value.is_text and value.found() == '"none"':
        return {}
    own = fields.read(value, IDLE, _EXPECTED)
    sessions = {**inherited.get("sessions", {}), **own.get("sessions", {})}
    keys = {**inherited, **own, "sessions": sessions}
    if "after_s" not in keys and "after_s" not in sessions:
        raise value.missing("after", "how long all GPUs of a job may be idle, such as 2h")
    for each in (keys, {**keys, **sessions}):
        after_s, before_s = each.get("after_s", math.inf), each.get("warn_before_s", 0)
        if before_s >= after_s:
            raise value.error("a warn_before that is shorter than after", f"{before_s} s and {after_s} s")
    return keys


def idle_rules(keys: IdleKeys) -> IdleRules:
    """Return the rules that checked keys say."""
    sessions = {**keys, **keys.get("sessions", {})}
    if sessions.get("then") == "requeue":
        sessions["then"] = "cancel"  # a shell cannot go on where it was
    return IdleRules(
        jobs=_rule(keys),
        sessions=_rule(sessions),
        below=keys.get("below", IDLE_BELOW),
        sessions_below=sessions.get("below", IDLE_BELOW),
        exempt=keys.get("exempt", IdleExempt()),
    )


def _rule(keys: IdleKeys) -> IdleRule | None:
    if "after_s" not in keys:
        return None
    after_s, then = keys["after_s"], keys.get("then", "warn")
    if then == "warn":
        return IdleRule(after_s=after_s)
    before_s = keys.get("warn_before_s", min(MAX_WARN_BEFORE_S, after_s // 2))
    return IdleRule(after_s=after_s, then=then, warn_before_s=before_s)


def check_exempt_partitions(value: Value, partitions: Collection[str]) -> None:
    """Check that the partitions in ``exempt`` are there.

    Raises:
        FileError: One is not.
    """
    keys = {} if value.is_text else value.fields(_EXPECTED)
    exempt = keys["exempt"].fields("a mapping") if "exempt" in keys else {}
    for item in exempt["partitions"].items("a list") if "partitions" in exempt else ():
        if (name := item.text("the name of a partition")) not in partitions:
            raise item.error(f"the name of a partition of this inventory{suggestion(name, partitions)}")


def _below(value: Value) -> float:
    expected = "a utilization such as 5%, greater than zero and at most 100%"
    found = _PERCENT.fullmatch(value.text(expected))
    if found is None or not 0 < float(found[1]) <= 100:
        raise value.error(expected)
    return float(found[1]) / 100


def _exempt(value: Value) -> IdleExempt:
    return IdleExempt(**fields.read(value, EXEMPT, "a mapping with users, groups, names, partitions"))


def _texts(value: Value) -> tuple[str, ...]:
    return tuple(item.text("a name of jobs, such as jupyter-*", _PATTERN) for item in value.items("a list of names"))


def _names(value: Value) -> tuple[str, ...]:
    return tuple(fields.name(item) for item in value.items("a list of names"))


def _of_sessions(value: Value) -> dict[str, Any]:
    return fields.read(value, SESSIONS, _EXPECTED_OF_SESSIONS)


EXEMPT: fields.Fields = {
    "users": ("users", fields.users),
    "groups": ("groups", _names),
    "names": ("names", _texts),
    "partitions": ("partitions", _names),
}
SESSIONS: fields.Fields = {
    "after": ("after_s", fields.whole_seconds),
    "below": ("below", _below),
    "then": ("then", lambda value: value.choice(("warn", "signal", "cancel"))),
    "warn_before": ("warn_before_s", fields.whole_seconds),
}
IDLE: fields.Fields = {
    **SESSIONS,
    "then": ("then", lambda value: value.choice(("warn", "signal", "requeue", "cancel"))),
    "exempt": ("exempt", _exempt),
    "sessions": ("sessions", _of_sessions),
}
