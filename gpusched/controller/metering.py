"""Keeps the totals of metrics: counts of events, durations of cycles and of agents' decisions."""

from __future__ import annotations

import time

from gpusched.model.metrics import DECISION_BUCKETS_S, WAIT_BUCKETS_S, Histogram, MetricTotals
from gpusched.queue.metrics import CountedEvent
from gpusched.queue.store import Store

MAX_EVENTS = 5000
OTHER = "other"


class Timings:
    """Durations that the cycle measures, until `Metering` takes them.

    Attributes:
        phases: Part of the cycle -> seconds.
        decisions: (partition, seconds, late) of each decision of an agent.
    """

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.decisions: list[tuple[str, float, bool]] = []
        self._at = time.perf_counter()

    def begin(self) -> None:
        """Begin a phase; the time before belongs to none."""
        self._at = time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase and begin the next."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._at
        self._at = now

    def decided(self, partition: str, seconds: float, late: bool) -> None:
        """Record an agent's decision; of one that is still running, the time until it was given up."""
        self.decisions.append((partition, seconds, late))


class Metering:
    """Adds what happened to the store's totals, in one row.

    The row has the number of the last event in it, so a crash neither loses an event nor counts one twice. Durations
    since the last write are lost by a crash; no reader has seen them.
    """

    def __init__(self, store: Store, timings: Timings) -> None:
        self._store, self._timings = store, timings
        self._totals = store.metric_totals() or MetricTotals(seq=store.latest_event())

    def count(self, cycle_s: float) -> None:
        """Count a cycle by its duration."""
        self._totals.cycles.add(cycle_s)

    def write(self) -> None:
        """Add what has happened since the last call, and store the totals.

        Raises:
            OSError, sqlite3.Error, Damaged: The store cannot be written or read; nothing is lost by it.
        """
        self._add_timings()
        self._add_events()
        self._store.put_metric_totals(self._totals)

    def _add_timings(self) -> None:
        totals, timings = self._totals, self._timings
        for phase, seconds in timings.phases.items():
            totals.phases[phase] = totals.phases.get(phase, 0.0) + seconds
        for partition, seconds, late in timings.decisions:
            _histogram(totals.decisions, partition, DECISION_BUCKETS_S).add(seconds)
            totals.late[partition] = totals.late.get(partition, 0) + late
        timings.phases.clear()
        timings.decisions.clear()

    def _add_events(self) -> None:
        last = self._store.latest_event()
        events = self._store.counted_events(self._totals.seq, MAX_EVENTS) if last > self._totals.seq else []
        for event in events:
            add_event(self._totals, event)
        self._totals.seq = events[-1].seq if len(events) == MAX_EVENTS else last


def add_event(totals: MetricTotals, event: CountedEvent) -> None:
    """Count an event."""
    partition, data, count = event.partition, event.data, event.jobs
    match event.kind:
        case "submitted":
            totals.submitted[partition] = totals.submitted.get(partition, 0) + count
        case "running":
            totals.started[partition] = totals.started.get(partition, 0) + count
            if data.attempt == 1 and event.submit_time is not None:  # later attempts waited for another reason
                start = event.time if data.start is None else data.start
                _histogram(totals.waits, partition, WAIT_BUCKETS_S).add(max(0.0, start - event.submit_time))
        case "ended":
            _add(totals.ended, partition, data.to, count)
        case "requeued":
            _add(totals.requeued, partition, data.outcome or OTHER, count)
        case "node_down":
            totals.nodes_down[partition] = totals.nodes_down.get(partition, 0) + 1
        case "gpu_lost":
            totals.gpus_lost[partition] = totals.gpus_lost.get(partition, 0) + 1
        case "agent_disabled":
            totals.fallbacks[partition] = totals.fallbacks.get(partition, 0) + 1


def _add(counts: dict[str, dict[str, int]], partition: str, key: str, count: int) -> None:
    of = counts.setdefault(partition, {})
    of[key] = of.get(key, 0) + count


def _histogram(of: dict[str, Histogram], partition: str, bounds: tuple[float, ...]) -> Histogram:
    """Return a partition's histogram; one of other bounds, of an earlier version, begins anew."""
    if partition not in of or of[partition].bounds != bounds:
        of[partition] = Histogram.of(bounds)
    return of[partition]
