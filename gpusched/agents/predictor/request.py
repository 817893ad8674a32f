"""``gpusched predict``: train a predictor, or predict the run times of a job or a trace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gpusched.config.paths import state_folder
from gpusched.errors import GpuschedError, UsageError
from gpusched.estimation.predictor import USUAL_NAME, Predictor, ends_of
from gpusched.model.units import count_of
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.agents.predictor.train import EstimateEvaluation, TrainedPredictor
    from gpusched.model.jobs import JobRecord


class PredictorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched predict --train``, as given."""

    trace: str | None = None
    format: str | None = None
    vc: str | None = None
    since: str | None = None
    until: str | None = None
    hold_out: float = 0.2
    seed: int = 0
    out: str | None = None


class PredictedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job's predicted run time, in seconds; ``run_s``: the real one, None: not known yet."""

    id: str
    p10_s: float
    p50_s: float
    p90_s: float
    limit_s: float | None = None
    run_s: float | None = None


class TracePredictions(msgspec.Struct, frozen=True, kw_only=True):
    """The predictions for a trace's jobs, and their accuracy on jobs later than the training data."""

    model: str
    jobs: tuple[PredictedJob, ...]
    evaluation: EstimateEvaluation | None
    notes: tuple[str, ...]


def is_trace(text: str) -> bool:
    """Return whether the text names a file or folder, not a job."""
    return Path(text).exists() or "/" in text or "." in text


def default_file() -> Path:
    """Return the path of this installation's predictor."""
    return state_folder() / USUAL_NAME


def train_predictor(request: PredictorRequest) -> TrainedPredictor:
    """Train and save a predictor; evaluate another, trained without the held-out end, on that end.

    The saved one is trained on all jobs: the newest are the best guide to the next.

    Raises:
        UsageError: An option is invalid.
        GpuschedError: A trace cannot be read, or has too few jobs.
    """
    from gpusched.agents.predictor import train as predict

    if not 0 <= request.hold_out < 1:
        raise UsageError(f"--hold-out {request.hold_out:g} is not a fraction", "say for example 0.2")
    begin = time.perf_counter()
    trace, last = _workload(request)
    notes = list(_waits_note(trace))
    evaluation = None
    if request.hold_out > 0:
        edge = float(trace.submit[0] + (1 - request.hold_out) * (trace.submit[-1] - trace.submit[0]))
        held_out = np.flatnonzero(trace.submit >= edge)
        partial = predict.train(trace, until=edge, seed=request.seed)
        evaluation = predict.evaluate(partial, trace, held_out, predict.training_median(trace, edge))
        notes.append(f"evaluated on the last {count_of(len(held_out), 'job')} by a predictor trained only on jobs that "
                     "ended before the first of them was submitted; the saved one is trained on all")  # fmt: skip
    predictor = predict.train(trace, until=last, seed=request.seed)
    if predictor.about["calibration_jobs"] == "0":
        notes.append(
            "too few jobs to calibrate: its 10 % and 90 % estimates are uncalibrated, and likely too close together"
        )
    path = Path(request.out) if request.out is not None else default_file()
    predictor.save(path)
    return predict.TrainedPredictor(
        path=str(path), jobs=int(predictor.about["jobs"]), seconds=time.perf_counter() - begin, evaluation=evaluation,
        notes=tuple(notes),
    )  # fmt: skip


def _workload(request: PredictorRequest) -> tuple[Trace, float]:
    """Return the jobs, and the end of the training data on their clock: ``--until``, else the end of all jobs."""
    from gpusched.study.own import history
    from gpusched.traces.load import load
    from gpusched.traces.slicing import parse_trace_time, slice_trace

    if request.trace is None:
        from gpusched.model.units import parse_time

        trace = history(request.since or "30d", request.until, vc=request.vc)
        until = None if request.until is None else parse_time(request.until, time.time()) - (trace.epoch or 0.0)
    else:
        whole = load(request.trace, request.format)
        until = None if request.until is None else parse_trace_time(whole, request.until)
        trace = slice_trace(whole, vc=request.vc, since=request.since, until=until)
    return trace, float(ends_of(trace).max()) if until is None else until


def _waits_note(trace: Trace) -> tuple[str, ...]:
    unknown = int(np.isnan(trace.wait).sum())
    if not unknown:
        return ()
    return (f"{count_of(unknown, 'job')} without a waiting time in the source: counted as if they had not waited",)


def predict_trace(model: str | None, file: str, format: str | None, vc: str | None) -> TracePredictions:
    """Predict the run time of every job of a trace.

    Raises:
        GpuschedError: The predictor or the trace cannot be read.
    """
    from gpusched.agents.predictor.train import evaluate
    from gpusched.traces.load import load

    predictor, trace = load_predictor(model), load(file, format, vc=vc)
    seconds = predictor.of(trace)
    later = np.flatnonzero(~predictor.in_training_data(trace))
    notes = list(_waits_note(trace))
    if predictor.calendar != (trace.epoch is not None):
        notes.append("the trace and the training data share no calendar: make sure that they differ")
    if len(later) < len(trace):
        notes.append(f"{count_of(len(trace) - len(later), 'job')} older than the training data excluded")
    jobs = tuple(_predicted_job(trace, job, row) for job, row in enumerate(seconds.tolist()))
    evaluation = evaluate(predictor, trace, later) if len(later) else None
    return TracePredictions(model=predictor.digest, jobs=jobs, evaluation=evaluation, notes=tuple(notes))


def _predicted_job(trace: Trace, job: int, row: list[float]) -> PredictedJob:
    limit = float(trace.limit[job])
    return PredictedJob(
        id=trace.ids[job], p10_s=row[0], p50_s=row[1], p90_s=row[-1], limit_s=limit if limit > 0 else None,
        run_s=float(trace.duration[job]),
    )  # fmt: skip


def predict_jobs(predictor: Predictor, past: Iterable[JobRecord], jobs: Sequence[JobRecord]) -> list[PredictedJob]:
    """Predict the run times of this cluster's jobs as of their submission; ``past``: jobs that ended before."""
    from gpusched.traces.readers.history import as_submitted

    trace = as_submitted(list({job.id: job for job in (*past, *jobs)}.values()))
    place, rows = {job_id: i for i, job_id in enumerate(trace.ids)}, predictor.of(trace).tolist()
    predictions = (_predicted_job(trace, place[job.id], rows[place[job.id]]) for job in jobs)
    pairs = zip(predictions, jobs, strict=True)
    return [msgspec.structs.replace(predicted, run_s=job.ran_s or None) for predicted, job in pairs]


def load_predictor(model: str | None) -> Predictor:
    """Load the predictor from a file, or that of this installation.

    Raises:
        GpuschedError: There is none, or it cannot be read.
    """
    path = Path(model) if model is not None else default_file()
    if not path.is_file():
        raise GpuschedError(f"{path}: no predictor", "train one: gpusched predict --train")
    return Predictor.load(path)
