"""A self-contained page of plots: figures and text from here, drawing by the template's own small script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpusched.compiled.arrays import Floats, Ints
from gpusched.model.units import count_of
from gpusched.sim.result import ReplayResult
from gpusched.study.compare import MeanDifference
from gpusched.study.metrics import job_times
from gpusched.study.study import StudyOutcome
from gpusched.study.timeline import Parts, binned_mean, parts_of, runs_of
from gpusched.views import bars, figures
from gpusched.views import replay as view

TEMPLATE = Path(__file__).with_name("page.html")
BINS, QUANTILES = 240, 200
MAX_BARS, MAX_ROWS = 1500, 64
MAX_HOLDERS = 20


def page(outcomes: Sequence[StudyOutcome], changes: Sequence[tuple[MeanDifference, ...]], title: str = "Replay") -> str:
    """Return the page: no network, no other files; light or dark by the reader's system.

    ``changes``: as `study.changes` gives them. The outcomes of the first one's trace share one time axis.
    """
    drawn = [o for o in outcomes if o.metrics.jobs]
    data = _data(drawn, outcomes) if drawn else None
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no "</script>" of a job's name gets out
    parts = {
        "{{title}}": html.escape(title),
        "{{subtitle}}": html.escape(_subtitle(outcomes)),
        "{{summary}}": _paragraphs(
            [*(view.summary(outcomes, changes) or [_alone(outcomes)]), *view.recorded(outcomes)]
        ),
        "{{table}}": _figures(outcomes),
        "{{holders}}": "".join(_holders(o, outcomes) for o in drawn),
        "{{remarks}}": _items(view.remarks(outcomes)),
        "{{data}}": text,
    }
    text = TEMPLATE.read_text("utf-8")
    for place, content in parts.items():  # the data comes last, so that nothing in it is taken for a place
        text = text.replace(place, content)
    return text


# -- words


def _subtitle(outcomes: Sequence[StudyOutcome]) -> str:
    traces = dict.fromkeys((o.result.trace.name, len(o.result.trace)) for o in outcomes)
    pools = dict.fromkeys((len(o.result.pool), o.result.pool.total_gpus) for o in outcomes)
    where = ", ".join(f"{nodes} {'node' if nodes == 1 else 'nodes'} with {gpus:,} GPUs" for nodes, gpus in pools)
    return "; ".join(f"{count_of(jobs, 'job')} of {name}" for name, jobs in traces) + f", on {where}"


def _alone(outcomes: Sequence[StudyOutcome]) -> str:
    m = outcomes[0].metrics if outcomes else None
    if m is None or not m.jobs:
        return "No job ran."
    name = view.label(outcomes[0], outcomes)
    return (
        f"Under {name}, jobs took {view.span(m.mean_jct_s)} on average, {view.span(m.mean_wait_s)} of it waiting. "
        "Add a second policy to compare."
    )


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _figures(outcomes: Sequence[StudyOutcome]) -> str:
    head = ("policy", "knows", "jobs", "mean JCT", "median", "p95", "p99", "mean wait", "p95 wait", "slowdown",
            "makespan", "utilization", "fragm.", "kWh", "inefficient kWh", "Jain")  # fmt: skip
    rows = []
    for o in outcomes:
        m = o.metrics
        times = (m.mean_jct_s, m.median_jct_s, m.p95_jct_s, m.p99_jct_s, m.mean_wait_s, m.p95_wait_s)
        rows.append([
            view.label(o, outcomes), o.result.knows, f"{m.jobs:,}", *map(view.span, times),
            bars.quantity(m.mean_bounded_slowdown), view.span(m.makespan_s), bars.percent(m.utilization, 1),
            bars.percent(m.fragmentation, 1), bars.quantity(m.energy_kwh), bars.quantity(m.inefficient_energy_kwh),
            bars.quantity(m.jain),
        ])  # fmt: skip
    return figures.table(head, rows)


def _holders(outcome: StudyOutcome, outcomes: Sequence[StudyOutcome]) -> str:
    blocks = ""
    for what, found in (("user", outcome.metrics.users), ("group", outcome.metrics.groups)):
        if not found:
            continue
        rows = [
            [h.name, f"{h.jobs:,}", bars.quantity(h.gpu_hours), view.span(h.mean_jct_s), view.span(h.mean_wait_s),
             bars.quantity(h.mean_bounded_slowdown)] for h in found[:MAX_HOLDERS]
        ]  # fmt: skip
        more = f" (the first {MAX_HOLDERS} of {len(found)})" if len(found) > MAX_HOLDERS else ""
        title = html.escape(f"{view.label(outcome, outcomes)}: by {what}{more}")
        head = (what, "jobs", "GPU hours", "mean JCT", "mean wait", "slowdown")
        blocks += f"<details><summary>{title}</summary>{figures.table(head, rows)}</details>"
    return blocks


# -- data for the script


def _data(drawn: Sequence[StudyOutcome], outcomes: Sequence[StudyOutcome]) -> dict[str, Any]:
    begin = min(float(o.result.trace.submit[o.result.ran].min()) for o in drawn)
    end = max(float(np.nanmax(o.result.end)) for o in drawn)
    edges = np.linspace(begin, max(end, begin + 1.0), BINS + 1)
    window = _bars_window(drawn[0], edges)
    return {
        "epoch": drawn[0].result.trace.epoch,
        "edges": np.round(edges, 3).tolist(),  # a trace may have begun years before
        "runs": [_run_data(o, view.label(o, outcomes), edges, window) for o in drawn],
    }


def _run_data(outcome: StudyOutcome, name: str, edges: Floats, window: tuple[float, float]) -> dict[str, Any]:
    result, power = outcome.result, outcome.scenario.power
    times, parts, runs = job_times(result), parts_of(result), runs_of(result)
    held = binned_mean(parts.start, parts.end, parts.gpus, edges)
    done = result.ran
    ones = np.ones(int(done.sum()))
    inside = binned_mean(result.trace.submit[done], result.end[done], ones, edges)
    running = binned_mean(runs.start, runs.end, np.ones(len(runs.job)), edges)
    per_gpu = (power.busy_w - power.idle_w) / np.maximum(result.pool.gpus, 1)
    watts = power.idle_w.sum() + binned_mean(parts.start, parts.end, per_gpu[parts.node] * parts.gpus, edges)
    return {
        "name": name,
        "jct": _short(_ecdf(times.jct[done])),
        "wait": _short(_ecdf(times.wait[done])),
        "utilization": _short(held / max(result.pool.total_gpus, 1)),
        "queue": _short(np.maximum(inside - running, 0.0)),
        "kw": _short(watts / 1000),
        "kwh": outcome.metrics.energy_kwh,
        "inefficient_kwh": outcome.metrics.inefficient_energy_kwh,
        "gantt": _gantt(result, parts, window),
        "heat": _heat(result, parts, edges),
    }


def _bars_window(outcome: StudyOutcome, edges: Floats) -> tuple[float, float]:
    """Return the whole time if the bars are distinguishable, else that around the longest queue with `MAX_BARS`."""
    result = outcome.result
    parts = parts_of(result)
    start = np.sort(parts.start[parts.node < MAX_ROWS])
    if len(start) <= MAX_BARS:
        return float(edges[0]), float(edges[-1])
    done = result.ran
    wait = binned_mean(result.trace.submit[done], result.start[done], np.ones(int(done.sum())), edges)
    peak = float(edges[int(np.argmax(wait))])
    first = min(int(np.searchsorted(start, peak)), len(start) - MAX_BARS)
    return float(start[first]), float(start[first + MAX_BARS - 1])


def _gantt(result: ReplayResult, parts: Parts, window: tuple[float, float]) -> dict[str, Any]:
    """Return bars of the first `MAX_ROWS` nodes in a window: node, start, end, GPUs, job name and owner."""
    begin, end = window
    seen = np.flatnonzero((parts.node < MAX_ROWS) & (parts.end > begin) & (parts.start < end) & (parts.gpus >= 0))
    found = len(seen)
    seen = seen[np.argsort(parts.start[seen], kind="stable")][: 2 * MAX_BARS]
    trace = result.trace
    owner = trace.user if trace.users else trace.group
    names = trace.users or trace.groups
    lanes = _lanes(parts, seen, result)
    return {
        "window": [begin, end],
        "nodes": list(result.pool.names[:MAX_ROWS]),
        "gpus": result.pool.gpus[:MAX_ROWS].tolist(),
        "more": max(0, len(result.pool) - MAX_ROWS),
        "cut": found - len(seen),
        "bars": [
            [
                int(parts.node[p]), round(float(parts.start[p]), 3), round(float(parts.end[p]), 3),
                int(np.ceil(parts.gpus[p])), lane, trace.ids[int(parts.job[p])],
                names[owner[parts.job[p]]] if owner[parts.job[p]] >= 0 else "",
            ]
            for p, lane in zip(seen.tolist(), lanes, strict=True)
        ],
    }  # fmt: skip


def _lanes(parts: Parts, seen: Ints, result: ReplayResult) -> list[int]:
    """Return the first GPU row to draw each bar in; for display only: the replay counts GPUs without numbering them."""
    free: dict[int, list[float]] = {}
    lane = dict.fromkeys(seen.tolist(), 0)
    for p in seen[np.lexsort((parts.job[seen], parts.start[seen]))].tolist():
        node, need = int(parts.node[p]), int(np.ceil(parts.gpus[p]))
        until = free.setdefault(node, [-np.inf] * int(result.pool.gpus[node]))
        begin, end = float(parts.start[p]), float(parts.end[p])
        places = [g for g, busy in enumerate(until) if busy <= begin + 1e-9]
        best = next((g for g in places if all(h in places for h in range(g, g + need))), min(places, default=0))
        lane[p] = best
        for g in range(best, min(best + need, len(until))):
            until[g] = max(until[g], end)
    return [lane[p] for p in seen.tolist()]


def _heat(result: ReplayResult, parts: Parts, edges: Floats) -> list[list[int]]:
    """Return the percentage of each of the first nodes' GPUs allocated, by bin."""
    rows = []
    order = np.argsort(parts.node, kind="stable")
    borders = np.searchsorted(parts.node[order], np.arange(min(len(result.pool), MAX_ROWS) + 1))
    for node in range(len(borders) - 1):
        here = order[borders[node] : borders[node + 1]]
        held = binned_mean(parts.start[here], parts.end[here], parts.gpus[here], edges)
        rows.append(np.clip(np.rint(100 * held / max(int(result.pool.gpus[node]), 1)), 0, 100).astype(int).tolist())
    return rows


def _ecdf(values: Floats) -> Floats:
    """Return ``float64[QUANTILES + 1]``: the least value that 0, 0.5 ... 100 % of the values do not exceed."""
    return np.percentile(values, np.linspace(0, 100, QUANTILES + 1), method="inverted_cdf")


def _short(values: Floats) -> list[float]:
    """Round to seven significant digits, more than a screen shows."""
    return [float(f"{v:.7g}") for v in values.tolist()]
