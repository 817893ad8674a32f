"""Metrics for Prometheus: what there is, totals that the controller keeps, and values as families of samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

WAIT_BUCKETS_S = (
    1.0,
    5.0,
    15.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    3 * 3600.0,
    12 * 3600.0,
    86400.0,
    3 * 86400.0,
    7 * 86400.0,
)
CYCLE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DECISION_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram(msgspec.Struct, kw_only=True):
    """Counts of values by upper bound, which is inclusive.

    Attributes:
        bounds: Ascending; beyond the last is one more count.
        counts: Of each bucket alone, not cumulative.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return an empty one."""
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class MetricTotals(msgspec.Struct, kw_only=True):
    """Running totals since the controller first kept them; they only grow, whatever is removed from the store.

    Attributes:
        seq: Number of the last event that they include.
        submitted, started: Partition -> jobs. ended: Partition -> final state -> jobs. requeued: Partition -> cause ->
            jobs. waits: Partition -> time from submission to the first start.
        nodes_down, gpus_lost: Partition -> how often.
        cycles: Durations of the controller's cycles. phases: Part of a cycle -> seconds.
        fallbacks: Partition -> how often its agent was replaced by its fallback.
        decisions: Partition -> time of its agent's decisions. late: Partition -> decisions beyond their time budget.
    """

    seq: int
    submitted: dict[str, int] = {}
    started: dict[str, int] = {}
    ended: dict[str, dict[str, int]] = {}
    requeued: dict[str, dict[str, int]] = {}
    waits: dict[str, Histogram] = {}
    nodes_down: dict[str, int] = {}
    gpus_lost: dict[str, int] = {}
    cycles: Histogram = msgspec.field(default_factory=lambda: Histogram.of(CYCLE_BUCKETS_S))
    phases: dict[str, float] = {}
    fallbacks: dict[str, int] = {}
    decisions: dict[str, Histogram] = {}
    late: dict[str, int] = {}


class UsageTotal(NamedTuple):
    """Sums of all usage rows of a partition; ``held``: of GPUs that jobs held, else of the others."""

    partition: str
    held: bool
    gpu_s: float
    energy_j: float
    energy_unknown_s: float
    util_s: float
    util_known_s: float
    idle_s: float


Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One metric as documented; ``name`` without the suffix ``_total`` of a counter."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


Sample = tuple[tuple[str, ...], float | Histogram]


class Family(NamedTuple):
    """A metric with its samples: values of the labels, in the order of `Metric.labels`, and the value."""

    metric: Metric
    samples: tuple[Sample, ...]


_P = ("partition",)
_NODE = ("node", "partition")
_TABLE: tuple[tuple[str, Kind, tuple[str, ...], str], ...] = (
    ("build_info", "gauge", ("version",), "Version of gpusched that reads the store; always 1."),
    ("controller_last_cycle_timestamp_seconds", "gauge", (), "End of the controller's last cycle, in Unix time."),
    ("controller_standbys", "gauge", (), "Standby controllers that are running."),
    ("controller_cycle_seconds", "histogram", (), "Duration of the controller's cycles."),
    ("controller_phase_seconds", "counter", ("phase",), "Time spent in the parts of the cycles."),
    ("inventory_valid", "gauge", (), "1 if inventory.yaml and the policies as they are now are in force, else 0."),
    ("backup_last_success_timestamp_seconds", "gauge", (), "When the newest backup of the controller was made."),
    ("backup_failed", "gauge", (), "1 if the controller's latest backup failed, else 0."),
    ("jobs", "gauge", ("partition", "state"), "Jobs that have not ended."),
    ("pending_jobs", "gauge", ("partition", "reason"), "Pending jobs by the reason for which they wait."),
    ("pending_gpus", "gauge", _P, "GPUs that pending jobs request."),
    ("job_submissions", "counter", _P, "Submitted jobs; each task of an array counts."),
    ("job_starts", "counter", _P, "Started attempts."),
    ("job_ends", "counter", ("partition", "state"), "Ended jobs by final state."),
    ("job_requeues", "counter", ("partition", "cause"), "Attempts that ended with the job back in the queue."),
    ("job_wait_seconds", "histogram", _P, "Time from submission to the first start."),
    ("nodes", "gauge", ("partition", "state"), "Nodes by state."),
    ("gpus", "gauge", ("partition", "gpu_type", "state"), "GPUs by state."),
    ("slices", "gauge", ("partition", "profile", "state"), "MIG slices by state."),
    ("node_conditions", "gauge", ("node", "partition", "condition"), "Open conditions of the node and its GPUs."),
    ("node_up", "gauge", _NODE, "1 if the node answers, else 0."),
    ("node_gpus", "gauge", _NODE, "GPUs of the node."),
    ("node_gpus_allocated", "gauge", _NODE, "GPUs that jobs hold; a slice counts by its share."),
    ("node_gpu_utilization_ratio", "gauge", _NODE, "Mean utilization of the node's GPUs at its last reading."),
    ("node_gpu_power_watts", "gauge", _NODE, "Power of the node's GPUs at its last reading."),
    ("node_failures", "counter", _P, "Times that a node became DOWN."),
    ("gpu_failures", "counter", _P, "Times that a GPU became LOST."),
    ("gpu_allocated_seconds", "counter", _P, "GPU time held by jobs."),
    ("gpu_unallocated_seconds", "counter", _P, "GPU time held by no job."),
    ("gpu_held_idle_seconds", "counter", _P, "GPU time held by jobs and idle."),
    ("gpu_measured_seconds", "counter", _P, "GPU time held by jobs whose utilization is known."),
    ("gpu_utilized_seconds", "counter", _P, "The same multiplied by the utilization."),
    ("gpu_energy_joules", "counter", ("partition", "holder"), "Measured energy of GPUs; holder: job or none."),
    ("quota_limit", "gauge", ("kind", "name", "resource"), "Limits of groups and classes; gpu_seconds in seven days."),
    ("quota_used", "gauge", ("kind", "name", "resource"), "What their jobs use of them."),
    ("agent_fallback", "gauge", _P, "1 while the fallback decides instead of the partition's agent, else 0."),
    ("agent_fallbacks", "counter", _P, "Times that the fallback took over."),
    ("agent_decision_seconds", "histogram", _P, "Time that the partition's agent took to decide."),
    ("agent_late_decisions", "counter", _P, "Decisions beyond the agent's time budget."),
    ("notices_failed", "gauge", (), "Notices whose last delivery failed."),
    ("events_unsent", "gauge", ("receiver",), "Events that the file or webhook of settings.events has not got yet."),
)
METRICS: Mapping[str, Metric] = {row[0]: Metric(f"gpusched_{row[0]}", *row[1:]) for row in _TABLE}
"""Name without prefix -> metric, in the order in which they are written."""


def family(name: str, values: Iterable[Sample]) -> Family:
    """Return a family of `METRICS` with these values by labels."""
    return Family(METRICS[name], tuple(values))
