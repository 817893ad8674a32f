"""A one-line summary of how good a mapping is."""

from __future__ import annotations

from typing import NamedTuple


class MappingReport(NamedTuple):
    """One mapping: jobs considered and started, its value and the greedy one's, and its optimality gap."""

    jobs: int
    started: int
    value: float
    greedy: float
    gap: float
    solver: str
    note: str


def summary(reports: list[MappingReport]) -> str:
    """Summarise the mappings of one decision in a line; "" if there were none."""
    if not reports:
        return ""
    jobs, started = sum(r.jobs for r in reports), sum(r.started for r in reports)
    gap = max(r.gap for r in reports)
    gain = sum(r.value - r.greedy for r in reports)
    known = f"at most {gap:.2%} below the best" if gap < 1 else "gap to the best unknown"
    notes = "; ".join(dict.fromkeys(r.note for r in reports if r.note))
    return f"{started} of {jobs} jobs mapped, worth {gain:.3g} GPUs more than greedily, {known}" + (
        f" ({notes})" if notes else ""
    )
