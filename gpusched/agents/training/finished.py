"""Finished trainings, kept on disk until the gate has decided: a kill, or a closed gate, does not cost the training."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gpusched.agents.common.checkpoint import Checkpoint, with_prefix
from gpusched.agents.common.request import ResultRow, TrainerResult

_TRAINED, _START = "trained.", "start."


class FinishedTraining(NamedTuple):
    """The best result of all seeds, its seed, and the seconds that training all of them took."""

    result: TrainerResult
    seed: int
    wall_time_s: float


def load_finished(store: Checkpoint) -> FinishedTraining | None:
    """Return the training of the same inputs that an earlier run finished and did not save as weights."""
    saved = store.load()
    if saved is None:
        return None
    arrays, state = saved
    rows = state["rows"]
    result = TrainerResult(
        arrays=with_prefix(_TRAINED, arrays), untrained=with_prefix(_START, arrays) or None, about=state["about"],
        score=state["score"], hyper_parameters=state["hyper_parameters"], notes=tuple(state["notes"]),
        rows=None if rows is None else msgspec.convert(rows, tuple[ResultRow, ...]),
    )  # fmt: skip
    return FinishedTraining(result, state["seed"], state["wall_time_s"])


def save_finished(store: Checkpoint, finished: FinishedTraining) -> None:
    """Keep a finished training; its ``rows``, once known, are kept with it."""
    result = finished.result
    arrays = {_TRAINED + name: array for name, array in result.arrays.items()}
    arrays |= {_START + name: array for name, array in (result.untrained or {}).items()}
    state = {
        "about": result.about, "score": result.score, "hyper_parameters": dict(result.hyper_parameters),
        "notes": result.notes, "rows": msgspec.to_builtins(result.rows), "seed": finished.seed,
        "wall_time_s": finished.wall_time_s,
    }  # fmt: skip
    store.save(arrays, state)
