"""What an examination found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gpusched.errors import GpuschedError

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was examined.

    Attributes:
        subject: A file, the name of a node, or ``state``.
        check: What was examined, in a word or two: ``ssh``, ``gpus``, ``clock``...
        status: ``warn`` works but is not as it should be; ``fail`` jobs will not run as asked.
        message: What was found, one line.
        hint: What to do about it; "" where there is nothing to do.
    """

    subject: str
    check: str
    status: Status
    message: str
    hint: str = ""


def failed(subject: str, check: str, error: GpuschedError) -> Finding:
    """Return an error as a finding; the subject, which has its own column, is not repeated."""
    return Finding(subject, check, "fail", error.message.removeprefix(f"{subject}: "), error.hint)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status; ``ok`` if there are none."""
    found = {f.status for f in findings}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"
