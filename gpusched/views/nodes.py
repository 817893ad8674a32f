"""Nodes, their GPUs and flavors, as tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.health import HealthAction
from gpusched.model.readings import GpuState, NodeState
from gpusched.model.reports import ConditionRow, FlavorRow, GpuRow, NodeRow, SliceRow
from gpusched.model.units import format_duration, format_memory, iso_utc, local_time
from gpusched.views import bars, common

_HEALTHY = frozenset({GpuState.FREE, GpuState.ALLOCATED, GpuState.SLICED})
_MIN_SHOWN_SKEW_S = 2.0
_NODE_COLUMNS = (
    "NODE", "PARTITION", "STATE", "GPUS", "FREE", "SLICES", "UTIL", "GPU MEM", "GPU POWER", "TEMP", "FREE CORES",
    "FREE MEM", "FIGURES", "HELD BY",
)  # fmt: skip
_NODE_DROP = ("FREE MEM", "FREE CORES", "HELD BY", "GPU MEM", "TEMP", "GPU POWER", "FIGURES", "UTIL", "PARTITION")
_GPU_COLUMNS = ("NODE", "GPU", "NAME", "STATE", "UTIL", "MEMORY", "POWER", "TEMP", "JOB", "USER", "FIGURES")
_GPU_DROP = ("NAME", "TEMP", "POWER", "FIGURES", "MEMORY", "USER", "UTIL")


def nodes_json(rows: Sequence[NodeRow]) -> list[dict[str, Any]]:
    """Return one object per node."""
    return [
        msgspec.to_builtins(row)
        | {
            "last_seen": iso_utc(row.last_seen),
            "conditions": [_condition_dict(one) for one in row.conditions],
        }
        for row in rows
    ]


def _condition_dict(row: ConditionRow) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(row)
    return fields | {"since": iso_utc(row.since), "last_seen": iso_utc(row.last_seen)}


def nodes_screen(
    rows: Sequence[NodeRow], width: int, *, detail: bool = False, warning: str = "", default: str | None = None
) -> RenderableType:
    """Return the table, the legend of its glyphs, and the problems of each node.

    A terminal of fewer columns (``width``) shows fewer values. ``detail``: one line per GPU. ``warning``: why the
    values are not updated, or "". ``default``: the partition of jobs that name none, which is marked.
    """
    parts: list[RenderableType] = [Text(f"warning: {warning}", "bold red"), Text()] if warning else []
    parts.append(_gpu_table(rows, width) if detail else _node_table(rows, default))
    if not detail and any(row.gpus for row in rows):
        parts += [Text(), bars.legend(gpu.state for row in rows for gpu in row.gpus)]
    if notes := [note for row in rows for note in _notes(row)]:
        parts += [Text(), _note_table(notes)]
    return Group(*parts)


def _node_table(rows: Sequence[NodeRow], default: str | None) -> Table:
    columns = _shown(_NODE_COLUMNS, rows)
    numbers = ("FREE", "GPU MEM", "GPU POWER", "TEMP", "FREE CORES", "FREE MEM")
    table = common.plain_table(*columns, right=numbers, wrap=("HELD BY",), drop=_NODE_DROP)
    for row in rows:
        cells = _node_cells(row) | {"PARTITION": _partition(row.partition, default)}
        table.add_row(*(cells[name] for name in columns))
    return table


def _node_cells(row: NodeRow) -> dict[str, Text | str]:
    hottest = max((g.temperature_c for g in row.gpus if g.temperature_c is not None), default=None)
    used_mib = [g.memory_used_mib for g in row.gpus if g.memory_used_mib is not None]
    total_mib = [g.memory_total_mib for g in row.gpus if g.memory_total_mib is not None]
    return {
        "NODE": Text(row.name, "bold"),
        "STATE": Text(str(row.state), bars.STATE_STYLES[row.state]),
        "GPUS": bars.states_bar(g.state for g in row.gpus) if row.gpus else Text(common.UNKNOWN, "dim"),
        "FREE": f"{row.gpus_free}/{row.gpus_total}",
        "SLICES": Text(", ".join(f"{free}/{total} {name}" for name, (free, total) in row.slices.items())),
        "UTIL": bars.utilization_bar(g.utilization_pct for g in row.gpus) if row.gpus else Text(common.UNKNOWN, "dim"),
        "GPU MEM": bars.gibibytes(sum(used_mib) if used_mib else None, sum(total_mib) if total_mib else None),
        "GPU POWER": bars.watts(row.power_w, row.power_limit_w),
        "TEMP": common.UNKNOWN if hottest is None else f"{hottest}°C",
        "FREE CORES": f"{row.cores_free}/{row.cores_total}",
        "FREE MEM": bars.gibibytes(row.memory_free_mib, row.memory_total_mib),
        "FIGURES": _figures(row),
        "HELD BY": _holders(row),
    }


def _partition(name: str, default: str | None) -> Text:
    """Return the name, with Slurm's mark after the default."""
    return Text(f"{name}*" if name == default else name)


def _shown(columns: Sequence[str], rows: Sequence[NodeRow]) -> list[str]:
    """Return the columns; slices only if there are any, the source of the values if some do not come from NVML."""
    mixed = any(row.source not in ("nvml", "none") for row in rows)
    shown = {"FIGURES": mixed, "SLICES": any(row.slices for row in rows)}
    return [name for name in columns if shown.get(name, True)]


def _figures(row: NodeRow) -> Text:
    if row.source == "none":
        return Text(common.UNKNOWN, "dim")
    return Text(row.source, "bold magenta" if row.simulated else "dim")


def _holders(row: NodeRow) -> Text:
    gpu_counts = Counter(gpu.user or gpu.job for gpu in row.gpus if gpu.job)
    gpu_counts.update(one.user or one.job for gpu in row.gpus for one in gpu.slices if one.job)
    gpu_counts.update(g.shared_user or g.shared_with for g in row.gpus if g.shared_with and g.shared_user != g.user)
    line = Text()
    for user, count in gpu_counts.most_common():
        line.append(f"{', ' if line else ''}{common.clean(user or '')} ")
        line.append(f"×{count}", "dim")
    return line


def _gpu_table(rows: Sequence[NodeRow], width: int) -> Table:
    columns = _shown(_GPU_COLUMNS, rows)
    table = common.plain_table(*columns, right=("GPU", "MEMORY", "POWER", "TEMP"), wrap=("NAME",), drop=_GPU_DROP)
    bar_width = 16 if width >= 120 else 8 if width >= 90 else 0
    for row in rows:
        for gpu in row.gpus:
            cells = _gpu_cells(row, gpu, bar_width)
            table.add_row(*(cells[name] for name in columns))
            for one in gpu.slices:
                table.add_row(*(_slice_cells(row, one).get(name, "") for name in columns))
    return table


def _slice_cells(row: NodeRow, one: SliceRow) -> dict[str, Text | str]:
    return {
        "NODE": Text(row.name, "bold"),
        "GPU": one.label,
        "STATE": Text(str(one.state), bars.GLYPHS[one.state][1]),
        "UTIL": Text(common.UNKNOWN, "dim"),  # NVML does not say it of slices
        "MEMORY": bars.gibibytes(one.memory_used_mib, one.memory_total_mib),
        "JOB": Text(one.job or ("" if one.state is GpuState.FREE else common.UNKNOWN)),
        "USER": Text(common.clean(one.user or "")),
    }


def _gpu_cells(row: NodeRow, gpu: GpuRow, bar_width: int) -> dict[str, Text | str]:
    use = None if gpu.utilization_pct is None else gpu.utilization_pct / 100
    jobs = " + ".join(filter(None, (gpu.job, gpu.shared_with)))
    return {
        "NODE": Text(row.name, "bold"),
        "GPU": str(gpu.index),
        "NAME": Text(common.clean(gpu.name or common.UNKNOWN)),
        "STATE": Text(str(gpu.state), bars.GLYPHS[gpu.state][1]),
        "UTIL": Text.assemble(bars.meter(use, bar_width), f"{' ' if bar_width else ''}{bars.percent(use):>4}"),
        "MEMORY": bars.gibibytes(gpu.memory_used_mib, gpu.memory_total_mib),
        "POWER": bars.watts(gpu.power_w, gpu.power_limit_w),
        "TEMP": common.UNKNOWN if gpu.temperature_c is None else f"{gpu.temperature_c}°C",
        "JOB": Text(jobs or ("" if gpu.state in (GpuState.FREE, GpuState.SLICED) else common.UNKNOWN)),
        "USER": Text(common.clean(" + ".join(dict.fromkeys(filter(None, (gpu.user, gpu.shared_user)))))),
        "FIGURES": _figures(row),
    }


def _notes(row: NodeRow) -> list[tuple[str, Text, str]]:
    """Return (node, problem, reason) for each problem of a node."""
    notes = []
    is_silent = row.state in (NodeState.DOWN, NodeState.UNKNOWN)
    if row.reason or is_silent:
        seen = f"last seen {common.age(row.age_s)} ago" if is_silent and row.age_s is not None else ""
        why = "; ".join(part for part in (row.reason.removeprefix(f"{row.name}: "), seen) if part)
        notes.append((row.name, Text(str(row.state), bars.STATE_STYLES[row.state]), why))
    if not is_silent:
        grouped: dict[tuple[GpuState, str], list[int]] = {}
        details = {c.detail for c in row.conditions}  # listed below, with the time and what to do
        for gpu in row.gpus:
            is_listed = bool(gpu.reason) and set(gpu.reason.split("; ")) <= details
            if (gpu.reason or gpu.state not in _HEALTHY) and not is_listed:
                grouped.setdefault((gpu.state, gpu.reason), []).append(gpu.index)
        for (state, reason), indices in grouped.items():
            notes.append((row.name, Text(f"GPU {common.ranges(indices)} {state}", bars.GLYPHS[state][1]), reason))
        for one in (one for gpu in row.gpus for one in gpu.slices):
            if (one.reason or one.state not in _HEALTHY) and one.reason not in details:
                notes.append((row.name, Text(f"slice {one.label} {one.state}", bars.GLYPHS[one.state][1]), one.reason))
    for condition in row.conditions:
        if condition.check is not None and condition.detail in row.reason:
            continue
        where = "node" if condition.gpu is None else f"GPU {condition.gpu}"
        action = "" if condition.action is HealthAction.WARN else f", {condition.action}"
        since = f"since {local_time(condition.since)}{action}"
        job = f"; job {condition.job}" if condition.job else ""
        text = "; ".join(filter(None, (f"{condition.detail}{job}", since, condition.advice)))
        notes.append((row.name, Text(f"{where} {condition.condition}", "yellow"), text))
    if row.reserved:
        notes.append((row.name, Text("reserved", "cyan"), row.reserved))
    if row.runtime_error:
        notes.append((row.name, Text("runtime", "bold red"), row.runtime_error.removeprefix(f"{row.name}: ")))
    if row.clock_skew_s is not None and abs(row.clock_skew_s) >= _MIN_SHOWN_SKEW_S:
        direction = "ahead of" if row.clock_skew_s > 0 else "behind"
        notes.append((row.name, Text("clock", "yellow"), f"{abs(row.clock_skew_s):.1f} s {direction} the controller"))
    if row.stale and not is_silent:
        notes.append(
            (row.name, Text("stale", "yellow"), f"last seen {common.age(row.age_s)} ago; figures are from then")
        )
    if row.simulated:
        notes.append((row.name, Text("simulated", "bold magenta"), "GPU figures are simulated, not measured"))
    return notes


def _note_table(notes: Sequence[tuple[str, Text, str]]) -> Table:
    table = common.plain_table("NODE", "WHAT", "WHY", wrap=("WHY",), header=False)
    for node, what, why in notes:
        table.add_row(Text(node, "bold"), what, Text(common.clean(why)))
    return table


def flavors_screen(rows: Sequence[FlavorRow], default: str | None = None) -> RenderableType:
    """Return the table of flavors; the partition called ``default`` is marked."""
    columns = ("PARTITION", "FLAVOR", "GPUS", "CORES", "MEMORY", "TIME LIMIT", "NODES", "SHARE", "FREE NOW")
    table = common.plain_table(*columns, right=columns[2:], drop=(columns[7], "NODES", "TIME LIMIT"))
    for row in rows:
        free_now = Text(str(row.free_now), "green" if row.free_now else "dim")
        table.add_row(
            _partition(row.partition, default),
            Text(row.flavor, "bold"),
            str(row.gpus),
            str(row.cores),
            format_memory(row.memory_mib),
            format_duration(row.time_limit_s),
            common.UNKNOWN if row.nodes is None else str(row.nodes),
            f"{row.share:.3g}",
            free_now if row.nodes is not None else Text("never fits", "red"),
        )
    return table
