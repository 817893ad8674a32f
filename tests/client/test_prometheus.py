"""A real Prometheus over ``gpusched metrics --listen``: each panel has data, each alert fires when it should.

Grafana itself is not among Debian's packages: of the dashboard its own form is checked, and every query is asked.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpusched.client.context import Client
from gpusched.client.metrics import collect
from gpusched.client.metricsserver import parse_address, start
from gpusched.config.paths import ALERT_RULES
from gpusched.controller.metering import Metering, Timings
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.events import Event
from gpusched.model.health import Condition, NodeHealth
from gpusched.model.jobs import JobState
from gpusched.model.limits import Group, Groups, Limits, Quotas
from gpusched.model.metrics import METRICS
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.model.slices import MigSlice
from gpusched.queue.lastgood import Declared, store_declared
from gpusched.queue.promotions import Fallback
from gpusched.queue.store import NodeRecord, Store, UsageRow
from gpusched.views.dashboard import ROWS, dashboard
from tests import builders
from tests.testbed.waiting import wait_until

RULES = yaml.safe_load(ALERT_RULES.read_text("utf-8"))["groups"][0]["rules"]
T = 1_800_000_000.0


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install prometheus)")


# -- the dashboard by itself


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


QUERIES = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def named_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bgpusched_[a-z_]+", text))


def sample_names() -> set[str]:
    suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    return {metric.name + suffix for metric in METRICS.values() for suffix in suffixes[metric.kind]}


def test_panels_lie_side_by_side_within_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    json.dumps(dashboard())


def test_dashboard_and_alerts_name_only_metrics_that_there_are() -> None:
    for text in [query for _, query in QUERIES] + [rule["expr"] for rule in RULES]:
        assert named_metrics(text)
        assert named_metrics(text) <= sample_names(), text


def test_each_metric_is_in_a_panel_or_an_alert_or_about_one_node() -> None:
    shown = set().union(*(named_metrics(query) for _, query in QUERIES), *(named_metrics(r["expr"]) for r in RULES))
    left = {name for name, m in METRICS.items() if not any(one.startswith(m.name) for one in shown)}
    of_nodes = {name for name in METRICS if name.startswith("node_gpu")}
    assert left == of_nodes | {"build_info", "gpu_unallocated_seconds"}
    assert all(panel.help.endswith(".") for row in ROWS.values() for panel in row)


# -- a real Prometheus


class Site:
    """A store in which everything happens again and again, so that every counter grows."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.store = Store.create_or_open(state)
        self.timings = Timings()
        self.metering = Metering(self.store, self.timings)
        node = Node(
            name="n0", partition="p", address="a", gpus=2, cores=8, memory_mib=1, runtime="podman", gpu_type="A"
        )
        groups = Groups(groups=(Group(name="lab", members={"alice": 1}, limits=Limits(gpus=8)),))
        inventory = Inventory(
            path="/x", partitions=(Partition(name="p", nodes=(node,), flavors=()),), quotas=Quotas(groups=groups)
        )
        store_declared(self.store, Declared(inventory, {}))
        cut = MigSlice(gpu=1, start=0, profile="1g.10gb", uuid="MIG-1", gi=7, ci=0, device=0)
        gpus = (Gpu(index=0, utilization_pct=50.0, power_w=100.0), Gpu(index=1, mig_mode=True, slices=(cut,)))
        reading = NodeReading(node="n0", time=T, source="nvml", gpus=gpus, containers=())
        hot = Condition(kind="temperature", gpu="GPU-0", index=0, since=T, last_seen=T, detail="d")
        health = NodeHealth(conditions=(hot,))
        self.store.put_nodes(
            [NodeRecord(name="n0", state=NodeState.MIXED, declared=node, reading=reading, health=health)]
        )
        self.store.put_jobs([builders.job("r", nodes={"n0": (0,)}, submit_time=T, start_time=T)])
        self.store.put_jobs([builders.job("w", JobState.PENDING, reason="Resources")])
        out = Fallback(partition="p", policy="x", version="1", fallback="fifo", why="late", since=T)
        self.store.put_fallbacks([out])
        self.store.put_event_position("file", 0)

    def go_on(self) -> None:
        with self.store.transaction():
            self.store.set_meta("heartbeat", str(T))
            for kind, data in (
                ("submitted", {}), ("running", {"attempt": 1, "start": T + 7}), ("ended", {"to": "FAILED"}),
                ("requeued", {"outcome": "NODE_FAIL"}), ("agent_disabled", {"partition": "p"}),
            ):  # fmt: skip
                self.store.append([Event(time=T, kind=kind, job_id=None if "partition" in data else "r", data=data)])
            self.store.append(Event(time=T, kind=kind, node="n0") for kind in ("node_down", "gpu_lost"))
            used = {"node": "n0", "user": "u", "partition": "p", "gpu_s": 2.0, "energy_j": 600.0}
            use = {"util_s": 1.0, "util_known_s": 2.0, "idle_s": 0.5}
            self.store.add_usage([UsageRow(bucket=0, job_id="r", **used, **use)])  # type: ignore[arg-type]
            self.store.add_usage([UsageRow(bucket=0, job_id="", **used)])  # type: ignore[arg-type]
            self.timings.decided("p", 0.004, late=False)
            self.timings.phases["observe"] = 0.1
            self.metering.count(0.2)
            self.metering.write()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    site.go_on()
    yield site
    site.store.close()


class Prometheus:
    """A Prometheus on a port of its own."""

    def __init__(self, folder: Path, target: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}\nrule_files: [{ALERT_RULES}]\n"
            f"scrape_configs: [{{job_name: g, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
        )
        self.log = folder / "log"
        argv = ["prometheus", "--config.file", f"{folder}/prometheus.yml", "--storage.tsdb.path", f"{folder}/data",
                "--web.listen-address", f"127.0.0.1:{port}", "--log.level", "warn"]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def get(self, path: str, **values: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(values)}"
        with urllib.request.urlopen(address, timeout=300) as answer:
            return json.load(answer)["data"]

    def has_answer(self) -> bool:
        try:
            return bool(self.get("targets"))
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return False

    def values(self, query: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]


@pytest.fixture
def prometheus(tmp_path: Path, site: Site) -> Iterator[Prometheus]:
    needs("prometheus")
    pytest.importorskip("prometheus_client")
    server, _ = start(Client(site.state), "127.0.0.1:0")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    found = Prometheus(folder, server.server_port)
    yield found
    found.process.terminate()
    found.process.wait()
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_every_panel_has_data_of_a_real_prometheus(site: Site, prometheus: Prometheus) -> None:
    wait_until(prometheus.has_answer)
    missing = dict.fromkeys(QUERIES)

    def all_have_data() -> bool:
        site.go_on()
        for key in list(missing):
            query = key[1].replace("$__rate_interval", "5s").replace("$partition", ".*")
            if any(not math.isnan(value) for value in prometheus.values(query)):
                del missing[key]
        return not missing

    wait_until(all_have_data, 30.0, "data for every panel", interval_s=0.3)
    (target,) = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    wait_until(lambda: {r["health"] for g in prometheus.get("rules")["groups"] for r in g["rules"]} == {"ok"})
    assert prometheus.values("gpusched_job_starts_total")[0] > 1
    assert prometheus.values("gpusched_job_wait_seconds_sum")[0] > 7


def test_a_scrape_equals_the_output_of_the_command(site: Site) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    server, _ = start(Client(site.state), "127.0.0.1:0")
    try:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers=accept)
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = answer.read().decode()
        found = {family.name: family for family in parser.text_string_to_metric_families(text)}
        assert set(found) == {family.metric.name for family in collect(site.store) if family.samples}
        for taken_or_no_name in (f"127.0.0.1:{server.server_port}", "a..b:0", "\udcff:0"):
            with pytest.raises(GpuschedError, match="cannot listen"):
                start(Client(site.state), taken_or_no_name)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("9836", ("127.0.0.1", 9836)), (":9836", ("127.0.0.1", 9836)), ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9836", ("::1", 9836)),
    ],
)  # fmt: skip
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "host", "host:", "1:65536", "host:²"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


# -- alerts: in minutes, what makes each fire, and what does not

_CYCLE = "gpusched_controller_last_cycle_timestamp_seconds"
_BUCKET = "gpusched_controller_cycle_seconds_bucket"
_ENDS = "gpusched_job_ends_total"
_IDLE, _HELD = (
    "gpusched_gpu_held_idle_seconds_total{partition='p'}",
    "gpusched_gpu_allocated_seconds_total{partition='p'}",
)
_FREE, _ALL = "gpusched_gpus{partition='p',state='FREE'}", "gpusched_gpus{partition='p',state='ALLOCATED'}"
_PENDING = "gpusched_pending_jobs{partition='p',reason='Resources'}"
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "GpuschedMetricsMissing": ({"up": "1+0x300"}, {_CYCLE: "0+60x300"}),
    "GpuschedControllerStopped": ({_CYCLE: "0+0x300"}, {_CYCLE: "0+60x300"}),
    "GpuschedControllerSlow": (
        {_BUCKET + "{le='10.0'}": "0+1x300", _BUCKET + "{le='30.0'}": "0+2x300", _BUCKET + "{le='+Inf'}": "0+2x300"},
        {_BUCKET + "{le='10.0'}": "0+2x300", _BUCKET + "{le='30.0'}": "0+2x300", _BUCKET + "{le='+Inf'}": "0+2x300"},
    ),
    "GpuschedStandbyMissing": (
        {"gpusched_controller_standbys": "1+0x60 0+0x240"}, {"gpusched_controller_standbys": "0+0x300"},
    ),
    "GpuschedInventoryInvalid": ({"gpusched_inventory_valid": "0+0x300"}, {"gpusched_inventory_valid": "1+0x300"}),
    "GpuschedBackupFailed": ({"gpusched_backup_failed": "1+0x300"}, {"gpusched_backup_failed": "0+0x300"}),
    "GpuschedNodeDown": (
        {"gpusched_node_up{node='n',partition='p'}": "0+0x300"},
        {"gpusched_node_up{node='n',partition='p'}": "1+0x300"},
    ),
    "GpuschedGpusFaulty": ({"gpusched_gpus{partition='p',state='LOST'}": "1+0x300"}, {_FREE: "1+0x300"}),
    "GpuschedConditions": (
        {"gpusched_node_conditions{node='n',partition='p',condition='ecc'}": "1+0x300"},
        {"gpusched_node_conditions{node='n',partition='p',condition='xid-program'}": "1+0x300"},
    ),
    "GpuschedGpusForeign": ({"gpusched_gpus{partition='p',state='BUSY'}": "1+0x300"}, {_FREE: "1+0x300"}),
    "GpuschedJobsFail": (
        {_ENDS + "{partition='p',state='FAILED'}": "0+2x300", _ENDS + "{partition='p',state='COMPLETED'}": "0+1x300"},
        {_ENDS + "{partition='p',state='FAILED'}": "0+1x300", _ENDS + "{partition='p',state='COMPLETED'}": "0+2x300"},
    ),
    "GpuschedNodesFailJobs": (
        {"gpusched_job_requeues_total{partition='p',cause='NODE_FAIL'}": "0+1x300"},
        {"gpusched_job_requeues_total{partition='p',cause='PREEMPTED'}": "0+1x300"},
    ),
    "GpuschedGpusUnused": (
        {_FREE: "6+0x300", _ALL: "2+0x300", _PENDING: "1+0x300"},
        {_FREE: "2+0x300", _ALL: "6+0x300", _PENDING: "1+0x300"},
    ),
    "GpuschedGpusHeldIdle": ({_IDLE: "0+40x300", _HELD: "0+60x300"}, {_IDLE: "0+6x300", _HELD: "0+60x300"}),
    "GpuschedAgentFallback": (
        {"gpusched_agent_fallback{partition='p'}": "1+0x300"}, {"gpusched_agent_fallback{partition='p'}": "0+0x300"},
    ),
    "GpuschedDeliveriesFail": (
        {"gpusched_events_unsent{receiver='file'}": "5000+0x300"},
        {"gpusched_events_unsent{receiver='file'}": "5+0x300", "gpusched_notices_failed": "0+0x300"},
    ),
}  # fmt: skip


def test_every_alert_is_tried() -> None:
    assert list(ALERTS) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("fires", [True, False])
def test_each_alert_fires_when_it_should_and_not_else(tmp_path: Path, fires: bool) -> None:
    needs("promtool")
    cases = []
    for name, series in ALERTS.items():
        given = [{"series": key, "values": value} for key, value in series[0 if fires else 1].items()]
        quiet = {"eval_time": "3h", "alertname": name, "exp_alerts": []}
        cases.append({"interval": "1m", "input_series": given, "alert_rule_test": [quiet]})
    path = tmp_path / "test.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(ALERT_RULES)], "evaluation_interval": "5m", "tests": cases}), "utf-8"
    )
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    quiet_failures = re.findall(r"alertname: (\w+)", done.stdout + done.stderr)
    assert quiet_failures == (list(ALERTS) if fires else [])
    assert (done.returncode != 0) == fires


def test_promtool_has_nothing_against_the_rules() -> None:
    needs("promtool")
    done = subprocess.run(["promtool", "check", "rules", str(ALERT_RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
