"""The Grafana dashboard over `gpusched metrics`, made of a table of panels."""

from __future__ import annotations

from typing import Any, NamedTuple

_COLUMNS = 24  # of Grafana's grid
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """A panel: its title, what it shows, and legend -> query. In queries P stands for the chosen partitions."""

    title: str
    help: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False


def _ratio(part: str, whole: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({_rate(part)}) / sum{grouped} ({_rate(whole)})"


def _rate(name: str, more: str = "") -> str:
    return f"rate(gpusched_{name}_total{{P{more}}}[$__rate_interval])"


def _quantiles(name: str, over: str, *parts: float) -> dict[str, str]:
    values = f"sum by (le) (rate(gpusched_{name}[{over}]))"
    return {f"{part:.0%}": f"histogram_quantile({part}, {values})" for part in parts}


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("GPUs allocated", "Part of all GPUs that jobs hold.",
              {"": '(sum(gpusched_gpus{P,state="ALLOCATED"}) or vector(0)) / sum(gpusched_gpus{P})'},
              "percentunit", "stat"),
        Panel("Utilization", "Of the GPUs that jobs hold, where it is measured.",
              {"": _ratio("gpu_utilized_seconds", "gpu_measured_seconds")}, "percentunit", "stat"),
        Panel("Pending jobs", "All that wait, held ones included.", {"": "sum(gpusched_pending_jobs{P}) or vector(0)"},
              kind="stat"),
        Panel("Nodes down", "Nodes that do not answer.", {"": "count(gpusched_node_up{P} == 0) or vector(0)"},
              kind="stat"),
        Panel("Last cycle", "Time since the controller's last cycle.",
              {"": "time() - gpusched_controller_last_cycle_timestamp_seconds"}, "s", "stat"),
        Panel("Agents in fallback", "Partitions whose agent cannot decide.",
              {"": "sum(gpusched_agent_fallback{P}) or vector(0)"}, kind="stat"),
    ),
    "GPUs": (
        Panel("GPUs by state", "FREE can be allocated; BUSY: a process of no job; LOST, UNUSABLE: faulty.",
              {"{{state}}": "sum by (state) (gpusched_gpus{P})"}, stacked=True),
        Panel("Utilization by partition", "Of the GPUs that jobs hold, where it is measured.",
              {"{{partition}}": _ratio("gpu_utilized_seconds", "gpu_measured_seconds", "partition")}, "percentunit"),
        Panel("Held but idle", "GPUs that jobs hold without using them.",
              {"{{partition}}": f"sum by (partition) ({_rate('gpu_held_idle_seconds')})"}),
        Panel("Power", "Measured power of GPUs that jobs hold (job), and of the others (none).",
              {"{{holder}}": f"sum by (holder) ({_rate('gpu_energy_joules')})"}, "watt", stacked=True),
        Panel("Nodes by state", "As in gpusched nodes.", {"{{state}}": "sum by (state) (gpusched_nodes{P})"},
              stacked=True),
        Panel("MIG slices by state", "Of each profile; as of GPUs.",
              {"{{profile}} {{state}}": "sum by (profile, state) (gpusched_slices{P})"}, stacked=True),
        Panel("Open conditions", "What is wrong with nodes and GPUs, also by the site's own checks.",
              {"{{condition}}": "sum by (condition) (gpusched_node_conditions{P})"}, stacked=True),
        Panel("Failures of nodes and GPUs", "Within the last hour.",
              {"nodes of {{partition}}": "increase(gpusched_node_failures_total{P}[1h])",
               "GPUs of {{partition}}": "increase(gpusched_gpu_failures_total{P}[1h])"}),
    ),
    "Jobs": (
        Panel("Pending jobs by reason", "The reasons are those of gpusched why.",
              {"{{reason}}": "sum by (reason) (gpusched_pending_jobs{P})"}, stacked=True),
        Panel("Requested GPUs of pending jobs", "What would run at once with enough free GPUs.",
              {"{{partition}}": "gpusched_pending_gpus{P}"}, stacked=True),
        Panel("Time to the first start", "Of jobs that started within the last hour.",
              _quantiles("job_wait_seconds_bucket{P}", "1h", 0.5, 0.9, 0.99), "s"),
        Panel("Jobs that have not ended", "By state.", {"{{state}}": "sum by (state) (gpusched_jobs{P})"},
              stacked=True),
        Panel("Submissions, starts and ends", "Per minute.",
              {"submitted": f"60 * sum({_rate('job_submissions')})", "started": f"60 * sum({_rate('job_starts')})",
               "{{state}}": f"60 * sum by (state) ({_rate('job_ends')})"}),
        Panel("Requeued attempts", "Per minute, by cause.",
              {"{{cause}}": f"60 * sum by (cause) ({_rate('job_requeues')})"}),
    ),
    "Controller": (
        Panel("Duration of a cycle", "It waits at most 3 s for a slow node.",
              _quantiles("controller_cycle_seconds_bucket", "$__rate_interval", 0.5, 0.9, 0.99), "s"),
        Panel("Time by part of the cycle", "Seconds of each second.",
              {"{{phase}}": "sum by (phase) (rate(gpusched_controller_phase_seconds_total[$__rate_interval]))"},
              "percentunit", stacked=True),
        Panel("Decision time of agents", "99th percentile by partition.",
              {"{{partition}}": "histogram_quantile(0.99, sum by (le, partition) "
                                "(rate(gpusched_agent_decision_seconds_bucket{P}[$__rate_interval])))"}, "s"),
        Panel("Late decisions and fallbacks", "Within the last hour.",
              {"late in {{partition}}": "increase(gpusched_agent_late_decisions_total{P}[1h])",
               "fallbacks in {{partition}}": "increase(gpusched_agent_fallbacks_total{P}[1h])"}),
        Panel("Use of limits", "Of groups and classes.",
              {"{{kind}} {{name}} {{resource}}": "gpusched_quota_used / gpusched_quota_limit"}, "percentunit"),
        Panel("Deliveries", "Notices that failed, and events that their receiver has not got yet.",
              {"notices": "gpusched_notices_failed", "events to {{receiver}}": "gpusched_events_unsent"}),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON for Grafana 9 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, _COLUMNS, 1)}
        )
        y += 1
        width, height = (4, 4) if row[0].kind == "stat" else (8, 8)
        for number, panel in enumerate(row):
            line, column = divmod(number * width, _COLUMNS)
            panels.append(_panel(panel) | {"gridPos": _place(column, y + line * height, width, height)})
        y += height * (1 + (len(row) - 1) * width // _COLUMNS)
    return {
        "title": "gpusched", "uid": "gpusched", "tags": [], "schemaVersion": 37, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "timezone": "",
        "templating": {"list": _VARIABLES},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }  # fmt: skip


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": name, "datasource": _SOURCE, "expr": _expression(query), "legendFormat": legend or "__auto"}
        for name, (legend, query) in zip("ABCDEF", panel.queries.items(), strict=False)
    ]
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        legend_below = {"displayMode": "list", "placement": "bottom"}
        options = {"legend": legend_below, "tooltip": {"mode": "multi", "sort": "desc"}}
        custom = {"fillOpacity": 5}
    if panel.stacked:
        custom = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    bounds = {"min": 0, "max": 1} if panel.title.startswith("Utilization") else {"min": 0}
    return {
        "type": panel.kind, "title": panel.title, "description": panel.help, "datasource": _SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **bounds}, "overrides": []},
        "options": options,
    }  # fmt: skip


def _expression(query: str) -> str:
    return query.replace("{P", '{partition=~"$partition"')


_VARIABLES: list[dict[str, Any]] = [
    {
        "name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus", "hide": 0,
        "refresh": 1,
    },
    {
        "name": "partition", "type": "query", "label": "Partition", "datasource": _SOURCE, "refresh": 2, "sort": 1,
        "query": {"query": "label_values(gpusched_nodes, partition)", "refId": "partition"}, "hide": 0,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    },
]  # fmt: skip
