"""Replays compared: outcomes as a table, changes in plain words, and the schedule as CSV rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from gpusched.model.units import count_of
from gpusched.views import bars, common

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from gpusched.sim.result import ReplayResult
    from gpusched.study.compare import MeanDifference
    from gpusched.study.metrics import Metrics
    from gpusched.study.study import StudyOutcome

MAX_HOLDERS = 30
_KNOWS = {
    "nothing": "no run times",
    "limit": "requested limits",
    "estimate": "estimates from past jobs",
    "oracle": "the real run times (not known in practice)",
}


def span(seconds: float | None) -> str:
    """Format seconds with a suitable unit: ``42.0 s``, ``3.50 min``, ``1.20 h``, ``12.3 d``; unknown is ``-``."""
    if seconds is None:
        return common.UNKNOWN
    for size, unit in ((2 * 86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{bars.quantity(seconds / (86400 if unit == 'd' else size))} {unit}"
    return f"{bars.quantity(seconds)} s"


def label(outcome: StudyOutcome, outcomes: Sequence[StudyOutcome]) -> str:
    """Return the policy's name, with its trace and seed if several were replayed."""
    result = outcome.result
    words = [result.policy]
    if len({o.result.trace.name for o in outcomes}) > 1:
        words.append(result.trace.name)
    if len({o.result.seed for o in outcomes}) > 1:
        words.append(f"seed {result.seed}")
    return ", ".join(words)


def table(outcomes: Sequence[StudyOutcome]) -> Table:
    """Return one line per replay; a narrow screen shows fewer columns."""
    columns = ["POLICY", "KNOWS", "JOBS", "MEAN JCT", "P95 JCT", "MEAN WAIT", "P95 WAIT", "SLOWDOWN", "UTIL", "KWH"]
    columns += ["MAKESPAN", "GAP", "FRAG", "JAIN", "INEFF. KWH", "JOBS/S"]
    drop = ("JOBS/S", "INEFF. KWH", "JAIN", "FRAG", "GAP", "MAKESPAN", "P95 WAIT", "P95 JCT", "KWH", "JOBS", "SLOWDOWN")
    shown = common.plain_table(*columns, right=columns[2:], wrap=("POLICY",), drop=(*drop, "KNOWS", "UTIL"))
    for outcome in outcomes:
        cells = _cells(outcome) | {"POLICY": common.clean(label(outcome, outcomes))}
        shown.add_row(*(cells[c] for c in columns))
    return shown


def _cells(outcome: StudyOutcome) -> dict[str, str]:
    m, gap = outcome.metrics, outcome.gap_to_bound
    return {
        "KNOWS": outcome.result.knows,
        "JOBS": f"{m.jobs:,}",
        "MEAN JCT": span(m.mean_jct_s),
        "P95 JCT": span(m.p95_jct_s),
        "MEAN WAIT": span(m.mean_wait_s),
        "P95 WAIT": span(m.p95_wait_s),
        "SLOWDOWN": bars.quantity(m.mean_bounded_slowdown),
        "MAKESPAN": span(m.makespan_s),
        "UTIL": bars.percent(m.utilization, 1),
        "GAP": common.UNKNOWN if gap is None else f"+{gap:.0%}",
        "FRAG": bars.percent(m.fragmentation, 1),
        "JAIN": bars.quantity(m.jain),
        "KWH": bars.quantity(m.energy_kwh),
        "INEFF. KWH": bars.quantity(m.inefficient_energy_kwh),
        "JOBS/S": f"{outcome.result.jobs_per_s:,.0f}",
    }


def screen(
    outcomes: Sequence[StudyOutcome], changes: Sequence[tuple[MeanDifference, ...]], by: str | None = None
) -> RenderableType:
    """Return the table, the changes, remarks, and (``by`` user or group) the usage of each."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [table(outcomes), Text()]
    lines = (*summary(outcomes, changes), *recorded(outcomes), *published(outcomes))
    parts += [Text(common.clean(line)) for line in lines]
    if by is not None:
        for outcome in outcomes:
            parts += [Text(), Text(common.clean(label(outcome, outcomes)), "bold"), _holders(outcome, by)]
    parts += [Text(), *(Text(common.clean(line), "dim") for line in remarks(outcomes))]
    return Group(*parts)


def _holders(outcome: StudyOutcome, by: str) -> RenderableType:
    from rich.text import Text

    found = outcome.metrics.users if by == "user" else outcome.metrics.groups
    if not found:
        return Text(f"the trace has no {by}s", "dim")
    columns = (by.upper(), "JOBS", "GPU HOURS", "MEAN JCT", "MEAN WAIT", "SLOWDOWN")
    shown = common.plain_table(*columns, right=columns[1:], drop=("SLOWDOWN", "MEAN JCT"))
    for h in found[:MAX_HOLDERS]:
        times = (span(h.mean_jct_s), span(h.mean_wait_s), bars.quantity(h.mean_bounded_slowdown))
        shown.add_row(common.clean(h.name), f"{h.jobs:,}", bars.quantity(h.gpu_hours), *times)
    if len(found) > MAX_HOLDERS:
        shown.add_row(f"and {len(found) - MAX_HOLDERS} more", *[""] * (len(columns) - 1))
    return shown


def summary(outcomes: Sequence[StudyOutcome], changes: Sequence[tuple[MeanDifference, ...]]) -> list[str]:
    """Return the changes of each replay from the first of its trace and seed, in plain words."""
    return [_sentence(o, change, outcomes) for o, change in zip(outcomes, changes, strict=True) if change]


def recorded(outcomes: Sequence[StudyOutcome]) -> list[str]:
    """Return the waiting times in each trace's source, if recorded, and how far each replay is from them."""
    lines = []
    for name in dict.fromkeys(o.result.trace.name for o in outcomes):
        with_waits = [o for o in outcomes if o.result.trace.name == name and o.metrics.recorded_mean_wait_s is not None]
        if with_waits:
            waits = "; ".join(f"{label(o, outcomes)} {_recorded_text(o.metrics)}" for o in with_waits)
            trace_text = f" of {name}" if len(outcomes) > len(with_waits) else ""
            mean_wait = span(with_waits[0].metrics.recorded_mean_wait_s)
            lines.append(f"As recorded, jobs{trace_text} waited {mean_wait} on average: {waits}.")
    return lines


def published(outcomes: Sequence[StudyOutcome]) -> list[str]:
    """Return the figures published with a scenario's source, beside those of this replay."""
    lines = []
    for outcome in outcomes:
        for figure, value in outcome.scenario.published.get(outcome.result.policy, {}).items():
            measured = getattr(outcome.metrics, figure)
            change = f" ({measured / value - 1:+.1%})" if measured is not None and value else ""
            text = common.UNKNOWN if measured is None else f"{measured:.6g}{change}"
            lines.append(f"Published of {label(outcome, outcomes)}: {figure} {value:.6g}; here {text}.")
    return lines


def _recorded_text(metrics: Metrics) -> str:
    recorded, error = metrics.recorded_mean_wait_s, metrics.wait_error
    if recorded is None or error is None:
        return span(metrics.mean_wait_s)
    return f"{span(recorded * (1 + error))} ({error:+.1%})"


def _sentence(outcome: StudyOutcome, change: Sequence[MeanDifference], outcomes: Sequence[StudyOutcome]) -> str:
    base = next(o for o in outcomes if o.scenario is outcome.scenario and o.result.seed == outcome.result.seed)
    jct = next(c for c in change if c.figure == "jct_s")
    wait = next(c for c in change if c.figure == "wait_s")
    name, other = label(outcome, outcomes), label(base, outcomes)
    text = f"Under {name}, jobs took {span(jct.other)} on average, {_comparison(jct)} {other} ({span(jct.base)})"
    text += f"{_interval_text(jct)}. {_wait_text(wait)}."
    metrics, base_metrics = outcome.metrics, base.metrics
    if metrics.utilization is not None and base_metrics.utilization is not None:
        points = (metrics.utilization - base_metrics.utilization) * 100
        text += f" Utilization is {bars.percent(metrics.utilization, 1)} ({points:+.1f} points)"
    if metrics.energy_kwh is not None and base_metrics.energy_kwh:
        share = metrics.energy_kwh / base_metrics.energy_kwh - 1
        text += f", energy {bars.quantity(metrics.energy_kwh)} kWh ({share:+.1%})"
    text += "."
    if outcome.result.knows != base.result.knows:
        text += f" Note: {name} uses {_KNOWS[outcome.result.knows]}; {other} uses {_KNOWS[base.result.knows]}."
    return text


def _wait_text(wait: MeanDifference) -> str:
    before, after = span(wait.base), span(wait.other)
    return f"Waiting was unchanged ({after})" if before == after else f"They waited {after} instead of {before}"


def _comparison(change: MeanDifference) -> str:
    if change.relative is None:
        return "more than under" if change.difference > 0 else "the same as under"
    if abs(change.relative) < 5e-4:
        return "the same as under"
    return f"{abs(change.relative):.1%} {'less' if change.relative < 0 else 'more'} than under"


def _interval_text(change: MeanDifference) -> str:
    if change.low is None or change.high is None:
        verb = "are" if change.days != 1 else "is"
        return f"; {count_of(change.days, 'day')} {verb} too little data for a confidence interval"
    remark = "" if change.is_significant else ", not significant"
    return f"; 95% interval over {change.days} days {change.low:+.1%} to {change.high:+.1%}{remark}"


def remarks(outcomes: Sequence[StudyOutcome]) -> list[str]:
    """Return what information each policy uses, and other notes on the figures; each once."""
    policies = dict.fromkeys((o.result.policy, o.result.knows) for o in outcomes)
    lines = [f"{policy} uses {_KNOWS[knows]}." for policy, knows in policies]
    if len({o.result.knows for o in outcomes}) > 1:
        lines.append("These policies use different information; compare with care.")
    notes = dict.fromkeys(n for o in outcomes for n in (*o.scenario.notes, *o.result.notes))
    bound = next((o.bounds for o in outcomes if o.bounds.mean_jct_s is not None), None)
    if bound is not None:
        bound_text = f"no schedule has a mean JCT below {span(bound.mean_jct_s)}"
        lines.append(f"GAP: {bound_text} or a makespan below {span(bound.makespan_s)} (proven lower bounds).")
    names = tuple(f"{policy} " for policy, _ in policies)
    lines += [f"{note if note.startswith(names) else note[:1].upper() + note[1:]}." for note in notes]
    for outcome in outcomes:
        if outcome.metrics.infeasible:
            reason = outcome.result.infeasible_why[0]
            jobs = count_of(outcome.metrics.infeasible, "job")
            lines.append(f"{jobs} excluded that can never run on these nodes ({reason}).")
            break
    return list(dict.fromkeys(lines))


def schedule_paths(outcomes: Sequence[StudyOutcome], path: str) -> list[str]:
    """Return each replay's schedule file: ``path``; of several, each with its policy (and seed) in the name.

    Equal names, as of two traces of one name, are numbered: no file is written twice.
    """
    if len(outcomes) == 1:
        return [path]
    stem, dot, suffix = path.rpartition(".") if "." in path.rpartition("/")[2] else (path, "", "")
    names = [re.sub(r"[^\w+-]+", "-", label(o, outcomes)).strip("-") for o in outcomes]
    times = [names[: i + 1].count(name) for i, name in enumerate(names)]
    numbered = [name if count == 1 else f"{name}-{count}" for name, count in zip(names, times, strict=True)]
    return [f"{stem}.{name}{dot}{suffix}" for name in numbered]


def write_schedule(result: ReplayResult, file: TextIO) -> None:
    """Write every job as ``job,start,end,nodes``: trace seconds, names separated by spaces; empty if it never ran."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("job", "start", "end", "nodes"))
    names, offsets, nodes = result.pool.names, result.part_offsets.tolist(), result.part_nodes.tolist()
    columns = zip(result.trace.ids, result.ran.tolist(), result.start.tolist(), result.end.tolist(), strict=True)
    for job, (name, ran, start, end) in enumerate(columns):
        where = " ".join(names[n] for n in nodes[offsets[job] : offsets[job + 1]]) if ran else ""
        writer.writerow((name, repr(start), repr(end), where) if ran else (name, "", "", ""))
