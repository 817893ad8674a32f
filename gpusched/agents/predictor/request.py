"""``gpusched predict``: predict the run times of a job, or of a trace's jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gpusched.errors import UsageError
from gpusched.estimation.estimators import followed
from gpusched.estimation.quantiles import MIDDLE
from gpusched.model.units import count_of
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.agents.predictor.evaluate import EstimateEvaluation
    from gpusched.model.jobs import JobRecord


class PredictedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job's predicted run time, in seconds; ``run_s``: the real one, None: not known yet."""

    id: str
    p5_s: float
    p25_s: float
    p50_s: float
    p75_s: float
    p95_s: float
    limit_s: float | None = None
    run_s: float | None = None


class TracePredictions(msgspec.Struct, frozen=True, kw_only=True):
    """The predictions for a trace's jobs, each as of its submission, and their accuracy."""

    jobs: tuple[PredictedJob, ...]
    evaluation: EstimateEvaluation
    notes: tuple[str, ...]


def is_trace(text: str) -> bool:
    """Return whether the text names a file or folder, not a job."""
    return Path(text).exists() or "/" in text or "." in text


def predict_trace(
    file: str, format: str | None, vc: str | None, since: str | None = None, waits: bool = False
) -> TracePredictions:  # fmt: skip
    """Predict the run time of every job of a trace; judge those submitted since, else in the second half of the time.

    Raises:
        UsageError: The trace has no job since.
        GpuschedError: It cannot be read.
    """
    from gpusched.agents.predictor.evaluate import evaluate
    from gpusched.traces.load import load
    from gpusched.traces.slicing import parse_trace_time, span_text

    trace = load(file, format, vc=vc)
    edge = 0.5 * (trace.submit[0] + trace.submit[-1]) if since is None else parse_trace_time(trace, since)
    later = np.flatnonzero(trace.submit >= edge)
    if not len(later):
        hint = f"it has jobs submitted {span_text(trace)}"
        raise UsageError(f"{trace.name}: no job was submitted since {since}", hint)
    said, _ = followed(trace)
    jobs = tuple(_predicted_job(trace, job, row) for job, row in enumerate(said.seconds.tolist()))
    return TracePredictions(jobs=jobs, evaluation=evaluate(said, trace, later, waits), notes=_waits_note(trace))


def _waits_note(trace: Trace) -> tuple[str, ...]:
    unknown = int(np.isnan(trace.wait).sum())
    if not unknown:
        return ()
    return (f"{count_of(unknown, 'job')} without a waiting time in the source: counted as if they had not waited",)


def _predicted_job(trace: Trace, job: int, row: list[float]) -> PredictedJob:
    limit = float(trace.limit[job])
    return PredictedJob(
        id=trace.ids[job], p5_s=row[0], p25_s=row[1], p50_s=row[MIDDLE], p75_s=row[-2], p95_s=row[-1],
        limit_s=limit if limit > 0 else None, run_s=float(trace.duration[job]),
    )  # fmt: skip


def predict_jobs(past: Iterable[JobRecord], jobs: Sequence[JobRecord]) -> list[PredictedJob]:
    """Predict the run times of this cluster's jobs as of their submission; ``past``: jobs that ran or run."""
    from gpusched.traces.readers.history import as_submitted

    trace = as_submitted(list({job.id: job for job in (*past, *jobs)}.values()))
    place, rows = {job_id: i for i, job_id in enumerate(trace.ids)}, followed(trace)[0].seconds.tolist()
    predictions = (_predicted_job(trace, place[job.id], rows[place[job.id]]) for job in jobs)
    pairs = zip(predictions, jobs, strict=True)
    return [msgspec.structs.replace(predicted, run_s=job.ran_s or None) for predicted, job in pairs]
