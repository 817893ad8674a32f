"""Durations, memory sizes and times as users write them and as screens show them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

MAX_DURATION_S = 100 * 366 * 86400  # nothing here lasts longer than a century
MAX_TIMESTAMP = 32_503_680_000.0  # the year 3000
_MAX_MEMORY_MIB = 1 << 50
_DURATION_SUFFIX = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MEMORY_SUFFIX = {"": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_duration(text: str) -> int:
    """Seconds of a time limit in Slurm's forms or with a unit.

    Accepts ``90`` (minutes), ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``, ``D-HH:MM:SS``, and ``30s``, ``15m``,
    ``2h``, ``7d``, ``1w`` or sums of them such as ``1d12h``.

    Raises:
        ValueError: Not such a form, not positive, or longer than a century.
    """
    seconds = _duration_or_none(text.strip())
    if seconds is None or not 0 < seconds <= MAX_DURATION_S:
        raise ValueError(
            "a time such as 90 (minutes), 2h, 1d12h, HH:MM:SS or D-HH:MM:SS, greater than zero and at most 100 years"
        )
    return seconds


def _duration_or_none(text: str) -> int | None:
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text) * 60
    if re.fullmatch(r"(?:[0-9]{1,9}[smhdw])+", text):
        return sum(int(n) * _DURATION_SUFFIX[u] for n, u in re.findall(r"([0-9]+)([smhdw])", text))
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,6}(?::[0-9]{1,2}){0,2})", text)
    if match is None:
        return None
    days, rest = match.groups()
    fields = [int(f) for f in rest.split(":")]
    if any(f > 59 for f in fields[1:]):
        return None
    if days is not None:
        fields += [0] * (3 - len(fields))
        return int(days) * 86400 + fields[0] * 3600 + fields[1] * 60 + fields[2]
    return fields[0] * 60 + fields[1] if len(fields) == 2 else fields[0] * 3600 + fields[1] * 60 + fields[2]


def parse_memory_mib(text: str) -> int:
    """MiB of a memory size: ``512M``, ``64G``, ``1.5T``; a bare number is MiB.

    As in Slurm, G means 1024 M; ``GB`` and ``GiB`` are taken for the same.

    Raises:
        ValueError: Not such a size, or not positive.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([MGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    mib = round(float(match[1]) * _MEMORY_SUFFIX[match[2].upper()]) if match else 0
    if not 0 < mib <= _MAX_MEMORY_MIB:
        raise ValueError("a memory size such as 512M, 64G or 1T, greater than zero")
    return mib


def format_duration(seconds: float | None) -> str:
    """``D-HH:MM:SS`` or ``H:MM:SS``; unknown is ``-``."""
    if seconds is None:
        return "-"
    days, rest = divmod(round(min(max(0, seconds), MAX_TIMESTAMP)), 86400)  # a sum may be without bound
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text:0>8}" if days else text


def format_gbps(rate: float | None) -> str:
    """Gbit/s as ``400G``, from 1000 on ``1.6T``; unknown is ``-``."""
    return "-" if rate is None else f"{rate / 1000:g}T" if rate >= 1000 else f"{rate:g}G"


def format_memory(mib: int | None) -> str:
    """MiB as ``512M``, ``64G``, from 4 TiB on ``6.2T``; unknown is ``-``."""
    if mib is None:
        return "-"
    mib = min(mib, _MAX_MEMORY_MIB)
    if mib >= 4 << 20:
        return f"{mib / (1 << 20):.1f}T".replace(".0T", "T")
    return f"{mib / 1024:.0f}G" if mib % 1024 == 0 or mib >= 10240 else f"{mib}M"


def local_time(timestamp: float | None) -> str:
    """Unix seconds as ``2026-11-20 18:00:03`` in the reader's time zone, for people; unknown is ``-``."""
    return "-" if timestamp is None else datetime.fromtimestamp(in_calendar(timestamp)).strftime("%Y-%m-%d %H:%M:%S")


def local_clock(timestamp: float, now: float) -> str:
    """``14:20`` in local time, on another day than ``now`` ``23 Nov 14:20``."""
    at, today = (datetime.fromtimestamp(in_calendar(time)) for time in (timestamp, now))
    return f"{at:%H:%M}" if at.date() == today.date() else f"{at.day} {at:%b %H:%M}"


def local_time_zone(timestamp: float | None) -> str:
    """As `local_time` with its zone, ``2026-11-20 18:00:03 +0100``: where the reader may be elsewhere."""
    if timestamp is None:
        return "-"
    return datetime.fromtimestamp(in_calendar(timestamp)).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def iso_utc(timestamp: float | None) -> str | None:
    """Unix seconds as UTC ISO-8601 with a ``Z``; None stays None. What no calendar holds is shown as 1970 or 3000."""
    if timestamp is None:
        return None
    return datetime.fromtimestamp(in_calendar(timestamp), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def in_calendar(timestamp: float) -> float:
    """The nearest time that can be shown: between the years 1970 and 3000."""
    return min(max(timestamp, 0.0), MAX_TIMESTAMP)


def parse_time(text: str, now: float) -> float:
    """Unix seconds of ``now+2h``, ``2026-11-20T18:00`` (local time) or ``...Z``.

    Raises:
        ValueError: Neither form.
    """
    text = text.strip()
    if text == "now":
        return now
    if text.startswith("now+"):
        return now + parse_duration(text[4:])
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("a time such as now+2h, 2026-11-20T18:00 or 2026-11-20T18:00:00Z") from None
