"""The last nightly replay's verdict on policies that are not in charge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

REPORTS = "reports"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is not in charge, against the one that is.

    Attributes:
        partition: Its name. state: ``shadow`` or ``candidate``.
        name, version: Of the policy. path: Where it lies.
        line: The verdict as a sentence. passed: It proved no worse.
        promoted: The command to promote it was sent (``auto_promote``).
        verdict: All of it (`gpusched.nightly.proof.Verdict`), or None where there was no replay.
    """

    partition: str
    state: str
    name: str
    version: str
    path: str
    line: str
    passed: bool = False
    promoted: bool = False
    verdict: dict[str, Any] | None = None


class _Page(msgspec.Struct):
    judged: tuple[Judged, ...] = ()


def last_verdicts(state: Path) -> dict[tuple[str, str, str], str]:
    """(partition, policy, version) -> the sentence, of the latest report that can be read."""
    for file in sorted((state / REPORTS).glob("????-??-??.json"), reverse=True):
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Page)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        return {(j.partition, j.name, j.version): j.line for j in found.judged}
    return {}
