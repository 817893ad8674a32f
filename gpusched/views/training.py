"""Trainings as tables: how good the agent is, beside what it was measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.units import count_of, format_duration
from gpusched.views.bars import change, number
from gpusched.views.common import plain_table
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.agents.common.request import ResultRow, TrainingProgress
    from gpusched.agents.training.train import TrainedFiles

PROGRESS = "{task.fields[figures]}"


def progress_fields(progress: TrainingProgress) -> dict[str, Any]:
    """What the bar shows of a progress."""
    figures = (("reward", progress.reward), ("utilization", progress.utilization))
    words = [f"{what} {value:.3f}" for what, value in figures if value is not None]
    if progress.left_s is not None:
        words.append(f"{format_duration(progress.left_s)} left")
    return {
        "description": progress.label, "completed": progress.done, "total": progress.total, "figures": ", ".join(words),
    }  # fmt: skip


def screen(made: Sequence[TrainedFiles]) -> RenderableType:
    """Partition by partition: the final table, notes, where the files are."""
    return Group(*(part for one in made for part in _partition(one)))


def _partition(made: TrainedFiles) -> list[RenderableType]:
    card = made.card
    head = f"{made.partition}: {card.agent} trained on {count_of(card.trace.jobs, 'job')} of {card.trace.name}"
    head += f" in {format_duration(card.wall_time_s)}, seed {card.seed}"
    parts: list[RenderableType] = [Text(head), Text(f"decides by: {card.decides}")]
    parts += [_table(card.metrics) if card.metrics else Text("no held-out jobs to evaluate it")]
    parts += [Text(f"- {note}") for note in card.notes]
    return [*parts, Text(f"weights: {made.weights}"), Text(f"card: {made.card_file}"), Text()]


def _table(rows: Sequence[ResultRow]) -> Table:
    jct = rows[0].figure == "mean_jct_s"
    heads = ["POLICY", "KNOWS", "MEAN JCT" if jct else "UTILIZATION", "95 %"]
    heads += ["MEAN WAIT", "UTILIZATION", "CHANGE", "95 %"] if jct else []
    table = plain_table(*heads, right=heads[2:], wrap=("POLICY",), drop=("95 %", "UTILIZATION", "KNOWS", "MEAN WAIT"))
    for row in rows:
        cells = [row.policy, row.knows, _figure(row.value, jct), _between(row.low, row.high, jct)]
        if jct:
            cells += [span(row.mean_wait_s), number(row.utilization, 3), change(row.change)]
            known = row.change_low is not None and row.change_high is not None
            cells.append(f"{change(row.change_low)} to {change(row.change_high)}" if known else "-")
        table.add_row(*cells)
    return table


def _figure(value: float | None, jct: bool) -> str:
    if value is None:
        return "-"
    return span(value) if jct else f"{value:.4f}"


def _between(low: float | None, high: float | None, jct: bool) -> str:
    return "-" if low is None or high is None else f"{_figure(low, jct)} to {_figure(high, jct)}"
