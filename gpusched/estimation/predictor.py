"""Run time estimators: the mean of a user's last two, or a trained predictor (safetensors, never pickle)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from gpusched.compiled.arrays import Floats
from gpusched.config.weights import ModelError, TrainedModel, load_file, save_model
from gpusched.errors import GpuschedError
from gpusched.estimation.features import (
    FEATURES,
    Forest,
    PastRunTimes,
    fill_rows,
    of_all_keys,
    of_owners,
    predict_all,
    time_limits,
)

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

KIND = "predictor"
USUAL_NAME = "run-times.safetensors"


class Estimator(Protocol):
    """Estimates how long jobs run from what had ended when they were submitted; the same live and in replays."""

    @property
    def digest(self) -> str:
        """Name of the estimator, as printed with its estimates."""

    def medians(self, trace: Trace) -> Floats:
        """Return the expected run time of each job at its submission, ``float64[jobs]``, seconds."""

    def in_replay(self, trace: Trace) -> PastRunTimes:
        """Return the same as arrays, for a replay of ``trace`` from its beginning."""


class LastTwo:
    """The mean of the user's last two run times, at most the limit; without any the limit, else an hour."""

    digest = "last two"

    def medians(self, trace: Trace) -> Floats:
        """Return the medians; see `Estimator`."""
        return _filled_features(trace, self.in_replay(trace), 1)[:, 0]

    def in_replay(self, trace: Trace) -> PastRunTimes:
        """Return the arrays; see `Estimator`."""
        return of_owners(trace)


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A trained forest that predicts run times.

    Attributes:
        forest: See `Forest`. quantiles: What its parts are, ascending, 0.5 among them.
        shifts: What is added to each, in logarithms of seconds, so that they keep what they say (see
            `gpusched.agents.predictor.calibrate`); none to the median, by which policies go.
        learned_until: Nothing that ended later was learned from: Unix seconds, or seconds of a trace without calendar.
        calendar: Whether those are Unix seconds.
        about: What it was learned from, for people. digest: Of its file.
    """

    forest: Forest
    quantiles: tuple[float, ...]
    shifts: tuple[float, ...]
    learned_until: float
    calendar: bool
    about: dict[str, str]
    digest: str = ""

    @classmethod
    def load(cls, path: Path | str) -> Predictor:
        """Load a predictor from a file.

        Raises:
            ModelError: It cannot be read, or is of something else.
        """
        model = load_file(Path(path), KIND)
        try:
            quantiles = tuple(json.loads(model.about["quantiles"]))
            return cls(
                forest=_forest(model),
                quantiles=quantiles,
                shifts=_shifts(model, quantiles),
                learned_until=float(model.about["learned_until"]),
                calendar=model.about["calendar"] == "unix",
                about=model.about,
                digest=model.digest,
            )
        except (KeyError, ValueError) as error:
            raise ModelError(f"{path}: not a predictor of this version ({error})", "train it again") from None

    def save(self, path: Path) -> None:
        """Write the predictor to a file atomically."""
        about = {
            **self.about,
            "features": _digest(),
            "quantiles": json.dumps(self.quantiles),
            "shifts": json.dumps(self.shifts),
            "learned_until": repr(self.learned_until),
            "calendar": "unix" if self.calendar else "trace",
        }
        arrays = {name: np.asarray(array) for name, array in self.forest._asdict().items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(path, KIND, arrays, about)
        except OSError as error:
            raise GpuschedError(f"{path}: {error.strerror or error}") from None

    def predict(self, features: Floats) -> Floats:
        """Return seconds, ``float64[jobs, quantiles]``, of ``features: float64[jobs, FEATURES]``; quantiles ascend.

        Where two would, the one farther from the median gives way: the median is what policies believe.
        """
        logs = np.zeros((len(features), len(self.quantiles)))
        predict_all(self.forest, np.ascontiguousarray(features, np.float64), logs)
        logs += self.shifts
        middle = self.quantiles.index(0.5)
        logs[:, middle::-1] = np.minimum.accumulate(logs[:, middle::-1], axis=1)
        logs[:, middle:] = np.maximum.accumulate(logs[:, middle:], axis=1)
        return np.exp(np.maximum(logs, 0.0))

    def of(self, trace: Trace) -> Floats:
        """Return seconds, ``float64[jobs, quantiles]``, for each job of a trace at its submission."""
        return self.predict(features_of(trace, float(self.forest.typical[0])))

    def medians(self, trace: Trace) -> Floats:
        """Return the medians; see `Estimator`."""
        return np.minimum(self.of(trace)[:, self.quantiles.index(0.5)], time_limits(trace))

    def in_replay(self, trace: Trace) -> PastRunTimes:
        """Return the arrays; see `Estimator`."""
        return of_all_keys(trace, float(self.forest.typical[0]), self.forest, self.quantiles.index(0.5))

    def notes_for(self, trace: Trace) -> list[str]:
        """Return notes on the estimates for a replay's result."""
        notes = [f"estimates by predictor {self.digest or 'in memory'}, learned from {self.about.get('trace', '?')}"]
        if old := int(self.in_training_data(trace).sum()):
            notes.append(f"{old} of these jobs are older than the end of the predictor's training data")
        return notes

    def in_training_data(self, trace: Trace) -> npt.NDArray[np.bool_]:
        """Return which jobs were submitted before the training data's end (by the same calendar), ``bool[jobs]``."""
        if self.calendar != (trace.epoch is not None):
            return np.zeros(len(trace), np.bool_)
        known: npt.NDArray[np.bool_] = trace.submit + (trace.epoch or 0.0) < self.learned_until
        return known


def ends_of(trace: Trace) -> Floats:
    """Return when each job ended in the source, or would have without waiting if unknown, ``float64[jobs]``."""
    return trace.submit + np.where(np.isnan(trace.wait), 0.0, trace.wait) + trace.duration


def features_of(trace: Trace, typical: float) -> Floats:
    """Return each job's features at submission, from jobs ended by then: ``float64[jobs, FEATURES]``.

    ``typical``: the predictor's `Forest.typical`.
    """
    return _filled_features(trace, of_all_keys(trace, typical), len(FEATURES))


def _filled_features(trace: Trace, known: PastRunTimes, columns: int) -> Floats:
    end, rows = ends_of(trace), np.zeros((len(trace), columns))
    fill_rows(known, trace.submit, end, trace.duration, np.argsort(end, kind="stable"), rows)
    return rows


def _forest(model: TrainedModel) -> Forest:
    if model.about["features"] != _digest():
        raise ValueError("it asks for other features")
    forest = Forest(*(model.arrays[name] for name in Forest._fields))  # type: ignore[arg-type]
    nodes = len(forest.feature)
    inside = all(
        0 <= int(array.min(initial=0)) and int(array.max(initial=0)) < nodes
        for array in (forest.left, forest.right, forest.roots)
    )
    downwards = (forest.feature < 0) | ((forest.left > np.arange(nodes)) & (forest.right > np.arange(nodes)))
    if not inside or not downwards.all() or int(forest.feature.max(initial=0)) >= len(FEATURES):
        raise ValueError("its trees lead nowhere")
    return forest


def _shifts(model: TrainedModel, quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """Return each quantile's shift; 0 for files older than shifts."""
    shifts = tuple(float(shift) for shift in json.loads(model.about.get("shifts", "null")) or (0.0,) * len(quantiles))
    if len(shifts) != len(quantiles) or 0.5 not in quantiles or not np.isfinite(shifts).all():
        raise ValueError("its quantiles make no sense")
    return shifts


def _digest() -> str:
    return hashlib.sha256("\n".join(FEATURES).encode()).hexdigest()[:12]
