"""Training results as tables: the agent compared with its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.units import count_of, format_duration
from gpusched.views.bars import change, number
from gpusched.views.common import plain_table
from gpusched.views.policy import gate_words
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.agents.common.request import ResultRow, TrainingProgress
    from gpusched.agents.training.train import TrainedFiles

PROGRESS = "{task.fields[figures]}"


def progress_fields(progress: TrainingProgress) -> dict[str, Any]:
    """Return the fields of the progress bar."""
    figures = (("reward", progress.reward), ("utilization", progress.utilization))
    words = [f"{name} {value:.3f}" for name, value in figures if value is not None]
    if progress.left_s is not None:
        words.append(f"{format_duration(progress.left_s)} left")
    return {
        "description": progress.label, "completed": progress.done, "total": progress.total, "figures": ", ".join(words),
    }  # fmt: skip


def screen(files: Sequence[TrainedFiles]) -> RenderableType:
    """Return for each partition the final table, notes, and where the files are."""
    return Group(*(part for one in files for part in _partition(one)))


def _partition(files: TrainedFiles) -> list[RenderableType]:
    card = files.card
    head = f"{files.partition}: {card.agent} trained on {count_of(card.trace.jobs, 'job')} of {card.trace.name}"
    head += f" in {format_duration(card.wall_time_s)}, seed {card.seed}"
    parts: list[RenderableType] = [Text(head), Text(f"decides by: {card.decides}")]
    parts += [_table(card.metrics) if card.metrics else Text("no held-out jobs to evaluate it")]
    parts += [Text(f"- {note}") for note in card.notes]
    parts.append(Text(f"gate: {gate_words(card.gate.outcome, card.gate.line, card.gate.kept_anyway)}"))
    if files.weights is None:
        return [*parts, Text("weights: not saved"), Text()]
    return [*parts, Text(f"weights: {files.weights}"), Text(f"card: {files.card_file}"), Text()]


def _table(rows: Sequence[ResultRow]) -> Table:
    jct = rows[0].figure == "mean_jct_s"
    heads = ["POLICY", "KNOWS", "MEAN JCT" if jct else "UTILIZATION", "95 %"]
    heads += ["MEAN WAIT", "UTILIZATION", "CHANGE", "95 %"] if jct else []
    table = plain_table(*heads, right=heads[2:], wrap=("POLICY",), drop=("95 %", "UTILIZATION", "KNOWS", "MEAN WAIT"))
    for row in rows:
        cells = [row.policy, row.knows, _figure(row.value, jct), _between(row.low, row.high, jct)]
        if jct:
            cells += [span(row.mean_wait_s), number(row.utilization, 3), change(row.change)]
            is_known = row.change_low is not None and row.change_high is not None
            cells.append(f"{change(row.change_low)} to {change(row.change_high)}" if is_known else "-")
        table.add_row(*cells)
    return table


def _figure(value: float | None, jct: bool) -> str:
    if value is None:
        return "-"
    return span(value) if jct else f"{value:.4f}"


def _between(low: float | None, high: float | None, jct: bool) -> str:
    return "-" if low is None or high is None else f"{_figure(low, jct)} to {_figure(high, jct)}"
