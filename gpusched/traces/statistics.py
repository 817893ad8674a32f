"""Statistics of a trace: for people (lines) and for programs (a dict)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusched.model.units import count_of, format_duration, iso_utc, local_time_zone
from gpusched.traces.slicing import gpu_seconds, gpus_used, span_s
from gpusched.traces.trace import Trace

QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
_SHOWN = 10
Dist = dict[str, float]


def trace_stats(trace: Trace) -> dict[str, Any]:
    """Return the trace's figures as one JSON object. Times in seconds; unknown is None.

    ``load_gpus`` is how many GPUs would be busy all the time between the first and the last submission: offered load is
    this over the GPUs there are.
    """
    gpu_s, span = gpu_seconds(trace), span_s(trace)
    known_limit = np.isfinite(trace.limit)
    over = trace.limit[known_limit] / trace.duration[known_limit]
    epoch = trace.epoch
    return {
        "name": trace.name,
        "jobs": len(trace),
        "rejected": len(trace.rejected),
        "rejected_why": rejected_kinds(trace),
        "notes": list(trace.notes),
        "first_submit": None if epoch is None else iso_utc(epoch + float(trace.submit[0])),
        "last_submit": None if epoch is None else iso_utc(epoch + float(trace.submit[-1])),
        "span_s": span,
        "jobs_per_hour": (len(trace) - 1) / span * 3600 if span > 0 else None,
        "gap_cv": _gap_cv(trace),
        "gpu_hours": gpu_s / 3600,
        "load_gpus": gpu_s / span if span > 0 else None,
        "run_time_s": _distribution(trace.duration),
        "wait_s": _distribution(trace.wait[np.isfinite(trace.wait)]),
        "limit_over_run_time": _distribution(over),
        "gpus": {str(g): share for g, share in _shares(trace.gpus)},
        "gpu_hours_by_gpus": _hours_by_gpus(trace),
        "shared_gpu_jobs": int(np.count_nonzero((trace.gpus > 0) & (trace.gpu_milli < 1000))),
        "with_predecessor": int(np.count_nonzero(trace.depends_on >= 0)),
        "users": len(trace.users),
        "by_group": _by_name(trace.group, trace.groups),
        "by_status": _by_name(trace.status, trace.statuses),
        "by_model": _by_name(trace.model, trace.models),
        "by_gpu_type": _by_name(trace.gpu_type, trace.gpu_types),
        "by_profile": {} if trace.profile is None else _by_name(trace.profile, trace.profiles),
    }


def rejected_kinds(trace: Trace) -> dict[str, int]:
    """Return expected content -> number of rejected rows, most frequent first."""
    kinds = Counter(why.partition(", expected ")[2] or why for _, why in trace.rejected)
    return dict(kinds.most_common())


def rejected_lines(trace: Trace, shown: int = 5) -> list[str]:
    """Describe the first rejected rows with their lines, for people."""
    lines = [f"line {line}: {why}" for line, why in trace.rejected[:shown]]
    if len(trace.rejected) > shown:
        lines.append(f"... and {len(trace.rejected) - shown} more rows rejected")
    return lines


def stats_lines(stats: dict[str, Any]) -> list[str]:
    """Format the figures as aligned lines for people."""
    rows = [("trace", stats["name"]), ("jobs", f"{stats['jobs']:,}")]
    if stats["rejected"]:
        why = "; ".join(f"{n:,} not {what}" for what, n in list(stats["rejected_why"].items())[:_SHOWN])
        rows.append(("rejected", f"{count_of(stats['rejected'], 'row')}: {why}"))
    if stats["first_submit"]:
        first, last = (
            local_time_zone(datetime.fromisoformat(stats[key]).timestamp()) for key in ("first_submit", "last_submit")
        )
        rows.append(("submitted", f"{first} to {last}"))
    rows.append(("span", f"{format_duration(stats['span_s'])} ({stats['span_s'] / 86400:.1f} days)"))
    if stats["jobs_per_hour"] is not None:
        rows.append(("arrivals", f"{stats['jobs_per_hour']:.1f} per hour, gaps' CV {_plain(stats['gap_cv'])}"))
        rows.append(("GPU hours", f"{stats['gpu_hours']:,.0f}: {stats['load_gpus']:.1f} GPUs busy on average"))
    rows += [(label, _spread(stats[key])) for label, key in (("run time", "run_time_s"), ("waited", "wait_s"))]
    if over := stats["limit_over_run_time"]:
        rows.append(("limit / run time", ", ".join(f"{name} {value:.2f}" for name, value in over.items())))
    hours = stats["gpu_hours_by_gpus"]
    total = sum(hours.values()) or 1.0
    usual = sorted(stats["gpus"].items(), key=lambda pair: -pair[1])[:_SHOWN]
    rows += [
        (f"{gpus} GPU{'' if gpus == '1' else 's'}", f"{share:7.2%} of jobs, {hours[gpus] / total:7.2%} of GPU hours")
        for gpus, share in sorted(usual, key=lambda pair: int(pair[0]))
    ]
    if others := len(stats["gpus"]) - len(usual):
        rows.append(("other sizes", f"{others}, {1 - sum(share for _, share in usual):.2%} of jobs"))
    for label, key in (("shared GPUs", "shared_gpu_jobs"), ("after another", "with_predecessor")):
        if stats[key]:
            rows.append((label, f"{count_of(stats[key], 'job')}"))
    if stats["users"]:
        rows.append(("users", f"{stats['users']:,}"))
    rows += [
        (label, _counts(stats[key]))
        for label, key in (("groups", "by_group"), ("ended as", "by_status"), ("models", "by_model"),
                           ("GPU types", "by_gpu_type"), ("MIG slices", "by_profile"))
    ]  # fmt: skip
    rows += [("note", note) for note in stats["notes"]]
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows if text]


def _distribution(values: npt.NDArray[np.float64]) -> Dist | None:
    if not len(values):
        return None
    found = np.quantile(values, list(QUANTILES.values())).tolist()
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, found, strict=True))}


def _gap_cv(trace: Trace) -> float | None:
    """Return the coefficient of variation of interarrival times: 1 for a Poisson process."""
    gaps = np.diff(trace.submit)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None


def _shares(values: npt.NDArray[np.int64]) -> Iterable[tuple[int, float]]:
    distinct, counts = np.unique(values, return_counts=True)
    return zip(distinct.tolist(), (counts / len(values)).tolist(), strict=True)


def _hours_by_gpus(trace: Trace) -> dict[str, float]:
    distinct, index = np.unique(trace.gpus, return_inverse=True)
    hours = np.bincount(index, gpus_used(trace) * trace.duration / 3600)
    return {str(gpus): float(h) for gpus, h in zip(distinct.tolist(), hours, strict=True)}


def _by_name(index: npt.NDArray[np.int64], names: tuple[str, ...]) -> dict[str, int]:
    """Return jobs by name, most first."""
    counts = np.bincount(index[index >= 0], minlength=len(names)).tolist()
    return dict(sorted(zip(names, counts, strict=True), key=lambda pair: (-pair[1], pair[0])))


def _counts(counts: dict[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _spread(found: Dist | None) -> str:
    return ", ".join(f"{name} {format_duration(value)}" for name, value in found.items()) if found else ""


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
