"""Predicted run times as tables, and how good they are beside other estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.views.common import UNKNOWN, clean, plain_table
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.agents.predictor.request import Told, TraceTold
    from gpusched.agents.predictor.train import Evaluation, Trained

MOST_ROWS = 20


def trained_screen(trained: Trained) -> RenderableType:
    """How good it is, and where."""
    head = Text(f"{trained.jobs:,} jobs learned from in {trained.seconds:.1f} s, saved in {trained.path}")
    parts = [head] if trained.evaluation is None else [head, Text(), *_evaluation(trained.evaluation)]
    return Group(*parts, *(Text(f"- {note}") for note in trained.notes))


def trace_screen(told: TraceTold) -> RenderableType:
    """The first jobs, and how good it was."""
    parts: list[RenderableType] = [jobs_table(told.jobs[:MOST_ROWS])]
    if len(told.jobs) > MOST_ROWS:
        parts.append(Text(f"and {len(told.jobs) - MOST_ROWS:,} more: --json has all"))
    if told.evaluation is not None:
        parts += [Text(), *_evaluation(told.evaluation)]
    return Group(*parts, *(Text(f"- {note}") for note in told.notes))


def jobs_table(jobs: Sequence[Told]) -> RenderableType:
    """Job by job: one in ten is shorter, one in two, nine in ten."""
    heads = ("JOB", "10 %", "50 %", "90 %", "LIMIT", "RAN")
    table = plain_table(*heads, right=heads[1:])
    for job in jobs:
        table.add_row(clean(job.id), *(span(s) for s in (job.p10_s, job.p50_s, job.p90_s, job.limit_s, job.run_s)))
    return table


def _evaluation(found: Evaluation) -> list[RenderableType]:
    heads = ("ESTIMATE", "JOBS", "LOG ERROR", "95 %", "BIAS", "TOO SHORT", "OVER TWICE", "WITHIN 2x")
    table = plain_table(*heads, right=heads[1:])
    for row in found.rows:
        sure = UNKNOWN if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        shares = (f"{share:.1%}" for share in (row.under, row.over, row.within_2))
        table.add_row(row.estimate, f"{row.jobs:,}", f"{row.log_error:.3f}", sure, f"{row.bias:+.3f}", *shares)
    parts: list[RenderableType] = [
        Text(f"on {found.jobs:,} jobs of {found.days} days, none of them learned from:"),
        table,
    ]
    if found.covered is not None:
        before = (
            "" if found.uncalibrated_covered is None else f"; uncalibrated it were {found.uncalibrated_covered:.1%}"
        )
        parts.append(
            Text(f"{found.covered:.1%} of the run times lie between the 10 % and the 90 % (80 % are meant to){before}")
        )
    return parts
