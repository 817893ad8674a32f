"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for a near miss, else the known names, else ""."""
    from difflib import get_close_matches  # costs start-up time; only errors come here

    names = list(dict.fromkeys(known))
    close = get_close_matches(found.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{next(n for n in names if n.lower() == close[0])}'?"
    return f" (available: {', '.join(names[:30])})" if names else ""
