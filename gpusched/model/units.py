"""Parsing and formatting of durations, memory sizes and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

MAX_DURATION_S = 100 * 366 * 86400  # nothing here lasts longer than a century
MAX_TIMESTAMP = 32_503_680_000.0  # the year 3000
_MAX_MEMORY_MIB = 1 << 50
_DURATION_SUFFIX = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MEMORY_SUFFIX = {"": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_duration(text: str) -> int:
    """Parse a time limit, in Slurm's forms or with a unit, into seconds.

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
    """Parse a memory size into MiB: ``512M``, ``64G``, ``1.5T``; a bare number is MiB.

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
    """Format seconds as ``D-HH:MM:SS`` or ``H:MM:SS``; unknown is ``-``."""
    if seconds is None:
        return "-"
    days, rest = divmod(round(min(max(0, seconds), MAX_TIMESTAMP)), 86400)  # a sum may be without bound
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text:0>8}" if days else text


def format_gbps(rate: float | None) -> str:
    """Format Gbit/s as ``400G``, from 1000 on ``1.6T``; unknown is ``-``."""
    return "-" if rate is None else f"{rate / 1000:g}T" if rate >= 1000 else f"{rate:g}G"


def format_memory(mib: int | None) -> str:
    """Format MiB as ``512M``, ``64G``, from 4 TiB on ``6.2T``; unknown is ``-``."""
    if mib is None:
        return "-"
    mib = min(mib, _MAX_MEMORY_MIB)
    if mib >= 4 << 20:
        return f"{mib / (1 << 20):.1f}T".replace(".0T", "T")
    return f"{mib / 1024:.0f}G" if mib % 1024 == 0 or mib >= 10240 else f"{mib}M"


def local_time(timestamp: float | None) -> str:
    """Format Unix seconds as ``2026-11-20 18:00:03`` in the local time zone; unknown is ``-``."""
    return "-" if timestamp is None else datetime.fromtimestamp(in_calendar(timestamp)).strftime("%Y-%m-%d %H:%M:%S")


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Format ``1 GPU``, ``2 GPUs``, ``4,949 jobs``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def gpus_of(gpus: int, profile: str = "") -> str:
    """Format ``8 GPUs``, or ``2 slices of 1g.10gb``."""
    return f"{count_of(gpus, 'slice')} of {profile}" if profile else count_of(gpus, "GPU")


def amounts_of(gpus: int, cores: int, memory_mib: int, profile: str = "") -> str:
    """Format ``8 GPUs, 1 core, 64G``; with a profile its slices."""
    return f"{gpus_of(gpus, profile)}, {count_of(cores, 'core')}, {format_memory(memory_mib)}"


def whole_number(text: str) -> int | None:
    """Return a number of 1 to 18 ASCII digits, so that it fits 64 bits; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def local_clock(timestamp: float, now: float) -> str:
    """Format ``14:20`` in local time; on another day than ``now`` ``23 Nov 14:20``, in another year with it."""
    at, today = (datetime.fromtimestamp(in_calendar(time)) for time in (timestamp, now))
    if at.date() == today.date():
        return f"{at:%H:%M}"
    return f"{at.day} {at:%b %H:%M}" if at.year == today.year else f"{at.day} {at:%b %Y %H:%M}"


def local_time_zone(timestamp: float | None) -> str:
    """Format as `local_time` with the time zone: ``2026-11-20 18:00:03 +0100``."""
    if timestamp is None:
        return "-"
    return datetime.fromtimestamp(in_calendar(timestamp)).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def iso_utc(timestamp: float | None) -> str | None:
    """Format Unix seconds as UTC ISO-8601 with a ``Z``; None stays None. Times are clamped to 1970 to 3000."""
    if timestamp is None:
        return None
    return datetime.fromtimestamp(in_calendar(timestamp), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def in_calendar(timestamp: float) -> float:
    """Clamp Unix seconds to the years 1970 to 3000."""
    return min(max(timestamp, 0.0), MAX_TIMESTAMP)


_NAMED_TIMES = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}  # hours, as Slurm has them
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?\s*([ap]m)?", re.IGNORECASE)
_DATES = (  # Slurm's, besides ISO's: MMDDYY, MM/DD/YY, MM.DD.YY, the year left out
    re.compile(r"(?P<m>[0-9]{2})(?P<d>[0-9]{2})(?P<y>[0-9]{2})?"),
    re.compile(r"(?P<m>[0-9]{1,2})/(?P<d>[0-9]{1,2})(?:/(?P<y>[0-9]{2}|[0-9]{4}))?"),
    re.compile(r"(?P<m>[0-9]{1,2})\.(?P<d>[0-9]{1,2})(?:\.(?P<y>[0-9]{2}|[0-9]{4}))?"),
)


def parse_time(text: str, now: float) -> float:
    """Parse ``now+2h``, ``16:00``, ``2026-11-20T18:00`` (local time) or ``...Z``, and Slurm's other forms.

    A time of day without a date is the next one: today, or tomorrow if it has passed. ``today`` is now, ``tomorrow``
    its first second, ``teatime`` 16:00.

    Raises:
        ValueError: None of these.
    """
    text = text.strip()
    if text == "now":
        return now
    if text.startswith("now+"):
        return now + parse_duration(text[4:])
    try:
        found = _named_time(text.lower(), datetime.fromtimestamp(now)) or datetime.fromisoformat(text)
        return found.timestamp()
    except (ValueError, OverflowError):
        raise ValueError("a time such as now+2h, 16:00, tomorrow, 2026-11-20T18:00 or 2026-11-20T18:00:00Z") from None


def _named_time(text: str, now: datetime) -> datetime | None:
    """Parse Slurm's non-ISO time forms; None: it is none of them."""
    if text == "today":
        return now
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if text == "tomorrow":
        return midnight + timedelta(days=1)
    if text in _NAMED_TIMES:
        return _next_at(now, midnight.replace(hour=_NAMED_TIMES[text]))
    day, _, clock = text.replace("t", " ", 1).partition(" ") if not _CLOCK.fullmatch(text) else ("", "", text)
    match = next((m for form in _DATES if (m := form.fullmatch(day))), None)
    if match is None and (day or not clock):
        return None
    at = _CLOCK.fullmatch(clock) if clock else None
    if clock and at is None:
        return None
    found = midnight
    if at is not None:
        found = found.replace(hour=_hour(int(at[1]), at[4]), minute=int(at[2]), second=int(at[3] or 0))
    if match is None:
        return _next_at(now, found)
    year = int(match["y"]) if match["y"] else now.year
    found = found.replace(year=year + 2000 if year < 100 else year, month=int(match["m"]), day=int(match["d"]))
    return found if match["y"] or found.date() >= now.date() else found.replace(year=found.year + 1)


def _hour(hour: int, half: str | None) -> int:
    if half is None:
        return hour
    if not 1 <= hour <= 12:
        raise ValueError(hour)
    return hour % 12 + (12 if half == "pm" else 0)


def _next_at(now: datetime, at: datetime) -> datetime:
    return at if at > now else at + timedelta(days=1)
