"""Predicted run times as tables, and their accuracy compared with other estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.units import count_of
from gpusched.views.common import UNKNOWN, clean, plain_table
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.agents.predictor.evaluate import EstimateEvaluation
    from gpusched.agents.predictor.request import PredictedJob, TracePredictions
    from gpusched.model.interference import JobClassReport

MAX_ROWS = 20


def trace_screen(result: TracePredictions) -> RenderableType:
    """Return the first jobs, and the accuracy."""
    parts: list[RenderableType] = [jobs_table(result.jobs[:MAX_ROWS])]
    if len(result.jobs) > MAX_ROWS:
        parts.append(Text(f"and {len(result.jobs) - MAX_ROWS:,} more; list all with --json"))
    parts += [Text(), *_evaluation(result.evaluation)]
    return Group(*parts, *(Text(f"- {note}") for note in result.notes))


def jobs_table(jobs: Sequence[PredictedJob]) -> RenderableType:
    """Return the run times that 5 %, 25 %, 50 %, 75 % and 95 % of such jobs do not exceed, job by job."""
    heads = ("JOB", "5 %", "25 %", "50 %", "75 %", "95 %", "LIMIT", "RAN")
    table = plain_table(*heads, right=heads[1:], drop=("LIMIT", "25 %", "75 %", "RAN"))
    for job in jobs:
        seconds = (job.p5_s, job.p25_s, job.p50_s, job.p75_s, job.p95_s, job.limit_s, job.run_s)
        table.add_row(clean(job.id), *(span(s) for s in seconds))
    return table


def kind_screen(job_class: JobClassReport) -> RenderableType:
    """Return what was learned of a job class."""
    parts: list[RenderableType] = [Text(clean(line)) for line in job_class.lines]
    if job_class.paces:
        heads = ("GPUS", "NODES", "RACKS", "TYPE", "PACE", "4 IN 5", "MEASURED")
        table = plain_table(*heads, right=(*heads[:3], *heads[4:]), drop=("4 IN 5", "MEASURED"))
        for speed in job_class.paces[:MAX_ROWS]:
            shape = speed.shape
            where = (str(shape.gpus), str(shape.nodes), str(shape.racks), clean(shape.gpu_type))
            interval = f"{speed.low:.4g} to {speed.high:.4g}"
            table.add_row(*where, f"{speed.pace:.4g} {shape.unit}/s", interval, str(speed.measurements))
        parts += [Text(f"{job_class.kind}, alone:" if not parts else f"\n{job_class.kind}, alone:"), table]
    if job_class.links:
        columns = ("SHARED", "SENSITIVITY", "80 %", "PRESSURE", "80 %", "MEASURED")
        table = plain_table(*columns, right=columns[1:], drop=("80 %", "MEASURED"))
        for link in job_class.links:
            cells = (f"{x[1]:.2f}|{x[0]:.2f} to {x[2]:.2f}".split("|") for x in (link.sensitivity, link.pressure))
            table.add_row(link.link, *(cell for pair in cells for cell in pair), str(link.measurements))
        parts += [Text("\nbeside other jobs a step takes 1 + sensitivity x their pressure times as long:"), table]
    return Group(*parts) if parts else Text(f"{job_class.kind}: no measurements yet")


def _evaluation(found: EstimateEvaluation) -> list[RenderableType]:
    columns = ("ESTIMATE", "JOBS", "LOG ERROR", "95 %", "BIAS", "TOO SHORT", "OVER TWICE", "WITHIN 2x", "MEAN WAIT")
    waits = any(row.wait_s is not None for row in found.rows)
    heads: tuple[str, ...] = columns if waits else columns[:-1]
    table = plain_table(*heads, right=heads[1:], drop=("BIAS", "OVER TWICE", "TOO SHORT", "95 %", "JOBS"))
    for row in found.rows:
        interval = UNKNOWN if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        cells = [row.estimate, f"{row.jobs:,}", f"{row.log_error:.3f}", interval, f"{row.bias:+.3f}"]
        cells += [f"{share:.1%}" for share in (row.under, row.over, row.within_2)]
        table.add_row(*cells, *([UNKNOWN if row.wait_s is None else span(row.wait_s)] if waits else []))
    return [
        Text(f"on {count_of(found.jobs, 'job')} of {count_of(found.days, 'day')}, each as of its submission:"),
        table,
        Text(
            f"{found.covered_50:.1%} of the run times lie between the 25 % and 75 % estimates (target: 50 %), "
            f"{found.covered_90:.1%} between the 5 % and 95 % (target: 90 %); CRPS {found.crps:.3f}"
        ),
    ]
