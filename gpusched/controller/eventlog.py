"""Logs events once they are stored: what a cycle could not record did not happen."""

from __future__ import annotations

import logging

import msgspec

from gpusched.controller.logsetup import JOBS
from gpusched.queue.store import Store
from gpusched.views.show import event_line

_WARNINGS = (
    "node_down", "gpu_lost", "condition", "stuck", "work_failed", "plan_rejected", "check_failed", "check_hung",
    "check_slow", "gpu_cut_failed",
)  # fmt: skip
_NEWS = (
    "node_up", "gpu_back", "condition_over", "check_passed", "drained", "resumed", "left_inventory",
    "back_in_inventory", "policy_changed", "reserved", "reservation_changed", "reservation_cancelled", "gpu_cut",
)  # fmt: skip
_ROUTINE = (
    "starting", "running", "ended", "requeued", "preempted", "resized", "rank_joined", "rank_left", "reaped", "fenced",
    "refused_command", "idle_acted",
)  # fmt: skip
_DETAILS = ("submitted", "held", "released", "priority", "sharing", "launched", "ending", "signalled", "refused",
            "idle_warned", "idle_ended")  # fmt: skip
_LEVELS = {
    **dict.fromkeys(_WARNINGS, logging.WARNING), **dict.fromkeys(_NEWS + _ROUTINE, logging.INFO),
    **dict.fromkeys(_DETAILS, logging.DEBUG),
}  # fmt: skip
"""Level of each kind of event; others are logged where they happen."""
MAX_PER_CYCLE = 10_000
_log, _jobs = logging.getLogger(__name__), logging.getLogger(JOBS)


def _logger_of(kind: str) -> logging.Logger:
    return _jobs if kind in _ROUTINE or kind in _DETAILS else _log


class EventLogger:
    """Logs new events after each cycle; warnings that every cycle repeats once."""

    def __init__(self, store: Store) -> None:
        self._store, self._seen = store, store.latest_event()
        self._kinds = [kind for kind, level in _LEVELS.items() if _logger_of(kind).isEnabledFor(level)]
        self._last_warnings: set[tuple[str | None, str | None, str]] = set()

    def step(self) -> None:
        """Log new events."""
        last = self._store.latest_event()
        if last == self._seen:
            return
        found, warnings = self._store.events_after(self._seen, self._kinds, MAX_PER_CYCLE), set()
        for _, event in found:
            text = event_line(msgspec.structs.replace(event, node=None)) + (f" user={event.user}" if event.user else "")
            key = event.job_id, event.node, text
            if _LEVELS[event.kind] == logging.WARNING:
                warnings.add(key)
            if key not in self._last_warnings:
                nodes = event.node or ",".join(event.data.get("nodes") or ()) or None
                fields = {"job": event.job_id, "node": nodes}
                _logger_of(event.kind).log(_LEVELS[event.kind], "%s", text, extra=fields)
        self._last_warnings = warnings
        self._seen = found[-1][0] if len(found) == MAX_PER_CYCLE else last
