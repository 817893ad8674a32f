"""Small graphics for tables: bars with one cell per GPU, meters and formatted numbers. Unknown is ``-``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from gpusched.model.readings import GpuState, NodeState
from gpusched.views.common import UNKNOWN

GLYPHS: dict[GpuState, tuple[str, str, str]] = {
    GpuState.ALLOCATED: ("■", "cyan", "allocated"),
    GpuState.FREE: ("□", "green", "free"),
    GpuState.BUSY: ("!", "bold yellow", "busy"),
    GpuState.LOST: ("✗", "bold red", "lost"),
    GpuState.SLICED: ("▤", "cyan", "cut into slices"),
    GpuState.UNUSABLE: ("%", "bold red", "unusable"),
    GpuState.UNKNOWN: ("?", "dim", "unknown"),
}

STATE_STYLES: dict[NodeState, str] = {
    NodeState.IDLE: "green",
    NodeState.MIXED: "cyan",
    NodeState.ALLOCATED: "cyan",
    NodeState.DOWN: "bold red",
    NodeState.DRAINING: "yellow",
    NodeState.DRAINED: "yellow",
    NodeState.UNKNOWN: "dim",
}

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = "▏▎▍▌▋▊▉█"


def states_bar(states: Iterable[GpuState]) -> Text:
    """Return one glyph per GPU."""
    bar = Text(no_wrap=True)
    for state in states:
        glyph, style, _ = GLYPHS[state]
        bar.append(glyph, style)
    return bar


def legend(states: Iterable[GpuState]) -> Text:
    """Return the meaning of the glyphs that occur."""
    line = Text(style="dim")
    seen = set(states)
    for state, (glyph, style, word) in GLYPHS.items():
        if state in seen:
            line.append(glyph, f"not dim {style}")
            line.append(f" {word}   ")
    return line


def utilization_bar(percents: Iterable[float | None]) -> Text:
    """Return one cell per GPU, as high as its utilization; ``-`` if unknown."""
    bar = Text(no_wrap=True)
    for percent in percents:
        if percent is None:
            bar.append(UNKNOWN, "dim")
        else:
            level = min(len(_LEVELS) - 1, max(0, int(percent / 100 * len(_LEVELS))))
            bar.append(_LEVELS[level], "dim" if percent < 5 else heat(percent / 100))
    return bar


def meter(fraction: float | None, width: int, style: str | None = None) -> Text:
    """Return a horizontal bar of ``width`` cells, filled to ``fraction`` (0..1); empty if unknown."""
    if fraction is None:
        return Text(" " * width)
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest - 1] if rest else "")
    bar = Text(no_wrap=True)
    bar.append(filled, style or heat(fraction))
    bar.append("·" * (width - len(filled)), "dim")
    return bar


def heat(fraction: float) -> str:
    """Return a color for how much something is used."""
    return "green" if fraction < 0.7 else "yellow" if fraction < 0.95 else "magenta"


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators; unknown is ``-``."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def quantity(value: float | None) -> str:
    """Format a number with its significant digits: ``1,234``, ``31.4``, ``0.03``, ``0.00042``; unknown is ``-``."""
    if value is None or value == 0:
        return UNKNOWN if value is None else "0"
    size = abs(value)
    if size < 0.01:
        return f"{value:.2g}" if size >= 1e-4 else f"{value:.0e}"
    return number(value, 0 if size >= 100 else 1 if size >= 10 else 2)


def percent(fraction: float | None, digits: int = 0) -> str:
    """Format 0.5 as ``50%``; unknown is ``-``."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.{digits}f}%"


def change(fraction: float | None) -> str:
    """Format 0.5 as ``+50.0%``; unknown is ``-``."""
    return UNKNOWN if fraction is None else f"{fraction:+.1%}"


def watts(used: float | None, limit: float | None = None) -> str:
    """Format ``412 W``, or with a limit ``2.1/3.2 kW``; unknown is ``-``."""
    if used is None:
        return UNKNOWN
    if (limit or used) >= 1000:
        return f"{used / 1000:.1f}/{limit / 1000:.1f} kW" if limit else f"{used / 1000:.1f} kW"
    return f"{used:.0f}/{limit:.0f} W" if limit else f"{used:.0f} W"


def gibibytes(used_mib: float | None, total_mib: float | None) -> str:
    """Format ``412/640G``; unknown is ``-``."""
    if used_mib is None and total_mib is None:
        return UNKNOWN
    parts = (UNKNOWN if m is None else _gib(m) for m in (used_mib, total_mib))
    return "/".join(parts) + "G"


def _gib(mib: float) -> str:
    gib = mib / 1024
    return f"{gib:.0f}" if gib >= 10 or gib == int(gib) else f"{gib:.1f}"
