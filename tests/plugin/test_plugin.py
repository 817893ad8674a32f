"""Components of another distribution: found, listed and used; where one is broken, it is named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.agents.common.ordering import OrderingAgent
from gpusched.cluster.base import Operation
from gpusched.cluster.ssh import SshCluster
from gpusched.config.inventory import load_inventory
from gpusched.config.plugins import OURS, ComponentError, components
from gpusched.config.policies import load_policy
from gpusched.config.weights import load_model, save_model
from gpusched.controller.notices.service import NotificationService
from gpusched.doctor.files import examine_needs
from gpusched.errors import FileError, Warnings
from gpusched.forecast import component as of_component
from gpusched.forecast.assumptions import assumptions
from gpusched.forecast.queue import QueueForecast
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import StartForecast
from gpusched.model.events import Event
from gpusched.model.plan import Plan, Start
from gpusched.model.policy import AGENTS, ORDERS, Place, Sizing
from gpusched.model.resources import RuntimeName
from gpusched.model.snapshot import Snapshot
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.supervised import Process
from gpusched.queue.store import RankRecord, Store
from gpusched.sched.decide import decide
from gpusched.sched.order import Columns, Keys, queue_order
from gpusched.sched.placement import FittingNodes
from gpusched.sched.state import PlacementRequest
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.state import EventLog
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from tests.logged import messages
from tests.plugin.building import registered
from tests.plugin.conftest import Run
from tests.sched.sizes import waits
from tests.sched.sizes import world as sized
from tests.sched.worlds import NOW, node, pending, running, snapshot, snapshots, started
from tests.sim.worlds import trace_of
from tests.testbed import wait_until

TRACE = "# lanes\nada 2 0 100\nbob x 5 9\nbob 1 5 9\n"
NODES = """
partitions:
  A:
    defaults: {user: root, gpus: 8, cores: 8, memory: 4G, gpu_type: A100, runtime: podman, rated_power: 1kW}
    nodes: [n1]
    flavors: {s: {gpus: 1, cores: 1, memory: 1G, time: 1h}}
"""
BROKEN = "of gpusched-example 1.0 does not work: ModuleNotFoundError: No module named 'gpusched_example.missing'"


def test_formats_are_listed_with_the_package_that_they_come_from(gpusched: Run) -> None:
    said = gpusched("trace", "formats", "--json")
    rows = {row["name"]: row["origin"] for row in json.loads(said.stdout)}
    assert (rows["lanes"], rows["broken"], rows["swf"]) == ("gpusched-example 1.0",) * 2 + ("gpusched",)
    ignored = "trace format 'swf' of gpusched-example 1.0 is ignored: gpusched has one of that name"
    assert said.stderr == f"gpusched: {ignored}\n"
    assert "gpusched-example 1.0" in gpusched("trace", "formats").stdout


def test_a_format_is_recognized_and_its_bad_rows_are_named(gpusched: Run, tmp_path: Path) -> None:
    (tmp_path / "day.txt").write_text(TRACE)
    for words in ((), ("--format", "lanes")):
        said = gpusched("trace", "stats", "day.txt", "--json", *words)
        assert json.loads(said.stdout)["jobs"] == 2
    strict = gpusched("trace", "import", "day.txt", "-o", "day.gpusched.npz", "--strict")
    assert strict.returncode == 2
    assert "day.txt:3: gpus: found x, expected a number of GPUs of at least 1" in strict.stderr


def test_a_broken_component_is_one_line_and_costs_nothing_else(gpusched: Run, tmp_path: Path) -> None:
    (tmp_path / "day.txt").write_text(TRACE)
    said = gpusched("trace", "stats", "day.txt", "--format", "broken")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.splitlines()[-1] == (
        f"gpusched: error: trace format 'broken' {BROKEN}; upgrade or remove gpusched-example"
    )
    (tmp_path / "log.swf").write_text("1 0 -1 10 1 -1 -1 1 -1 -1 1 1 1 -1 1 -1 -1 -1\n")
    assert gpusched("trace", "stats", "log.swf").returncode == 0
    unknown = gpusched("trace", "stats", "day.txt", "--format", "lane")
    assert "no trace format 'lane'; did you mean 'lanes'" in unknown.stderr


def test_loading_raises_one_line_whatever_is_wrong(plugin: None) -> None:
    Warnings.given.clear()
    with pytest.raises(ComponentError, match=r"trace format 'broken' of gpusched-example 1\.0 does not work"):
        components("traces")["broken"].load()


def test_a_notifier_gets_what_happened_and_its_options(
    plugin: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = tmp_path / "chat"
    (tmp_path / "inventory.yaml").write_text(
        f"notices: {{to: [{{notifier: chat, options: {{file: {chat}, prefix: 'gpu: '}}, on: [node]}}]}}\n{NODES}"
    )
    inventory = load_inventory(tmp_path / "inventory.yaml")
    store = Store.create_or_open(tmp_path / "state")
    notices = NotificationService(store)
    store.append([Event(time=1e9, kind="node_down", node="n1", data={"reason": "no answer"})])
    notices.step(inventory, 1e9, wait_s=30)
    assert chat.read_text() == "gpu: node n1 is lost: no answer\n"
    chat.unlink()
    chat.mkdir()  # it fails now
    store.append([Event(time=1e9 + 1, kind="node_down", node="n1", data={"reason": "no answer"})])
    notices.step(inventory, 1e9 + 1, wait_s=30)
    why = f"notifier 'chat': IsADirectoryError: [Errno 21] Is a directory: '{chat}'"
    assert messages(caplog) == [f"a notice could not be sent and will be retried: {why}"]


HERE = """
partitions:
  A:
    defaults: {transport: local, gpus: 0, cores: 1, memory: 1M, runtime: RUNTIME}
    nodes: [n1]
    flavors: {s: {gpus: 0, cores: 1, memory: 1M, time: 1h}}
"""


@pytest.mark.parametrize(
    ("runtime", "status", "message"),
    [
        ("nice", "ok", "nice: from another package; only a job can test it"),
        ("hollow", "fail", "runtime 'hollow' of gpusched-example 1.0 does not work: it has no method launch"),
    ],
)  # fmt: skip
def test_a_check_names_a_runtime_that_cannot_be(
    gpusched: Run, tmp_path: Path, runtime: str, status: str, message: str
) -> None:
    (tmp_path / "inventory.yaml").write_text(HERE.replace("RUNTIME", runtime))
    rows = json.loads(gpusched("check", "--json").stdout)
    found = [(row["status"], row["message"]) for row in rows if row["check"] == "runtime"]
    assert found == [(status, message)]


class Raising(Process):
    """A runtime whose program cannot be built."""

    def program(self, request: LaunchRequest) -> str:
        """Fail."""
        raise KeyError("no such program")


def test_a_runtime_that_raises_is_named_with_its_package(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(HERE.replace("RUNTIME", "raising"))
    with registered(tmp_path, {"runtimes": {"raising": f"{__name__}:Raising"}}):
        cluster = SshCluster(load_inventory(tmp_path / "inventory.yaml"), "c", tmp_path)
        request = LaunchRequest(
            name="gpusched-j-1-0", cluster_id="c", node="n1", job_id="j", attempt=1, rank=0, cores=1, memory_mib=1
        )
        rank = RankRecord(job_id="j", attempt=1, rank=0, node="n1", runtime="raising")
        cluster.perform([Operation(verb="launch", node="n1", rank=rank, request=request)])
        (outcome,) = wait_until(cluster.finished, 30, "the launch to fail")
        cluster.close()
    assert outcome.error == "internal error: KeyError('no such program') (runtime 'raising' of acme 1)"


@pytest.mark.parametrize(
    ("receiver", "error"),
    [
        ("{notifier: chats}", "expected one of webhook, command, chat: did you mean chat?"),
        ("{notifier: chat, webhook: 'http://h/'}", "expected a webhook, a command or a notifier"),
        ("{webhook: 'http://h/', options: {a: b}}", "expected options only with a notifier"),
    ],
)  # fmt: skip
def test_a_receiver_that_cannot_be_is_one_line(plugin: None, tmp_path: Path, receiver: str, error: str) -> None:
    (tmp_path / "inventory.yaml").write_text(f"notices: {{to: [{receiver}]}}\n{NODES}")
    with pytest.raises(FileError) as raised:
        load_inventory(tmp_path / "inventory.yaml")
    assert error in raised.value.line()


def test_an_order_is_a_policy_of_replays_and_of_files(gpusched: Run, tmp_path: Path) -> None:
    """Of three jobs on one node the one that takes least GPU time by its limit starts first."""
    jobs = [(0, 50, 8, 50), (1, 400, 8, 500), (2, 90, 8, 100), (3, 200, 4, 150)]  # submit, run, GPUs, limit
    rows = [f"{n} {t} -1 {s} {g} -1 -1 {g} {most} -1 1 1 1 -1 1 -1 -1 -1" for n, (t, s, g, most) in enumerate(jobs)]
    (tmp_path / "day.swf").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.yaml").write_text("order: short-and-small\nplace: best-fit\nbackfill: none\n")
    words = ["replay", "day.swf", "--nodes", "1", "--json", "--policy"]
    means = {}
    for policy in ("short-and-small", "mine.yaml", "sjf", "fifo"):
        means[policy] = json.loads(gpusched(*words, policy).stdout)[0]["mean_jct_s"]
    # starts: 0 at 0 s, 3 (600 GPU s) at 50, 2 (800) at 250, 1 (4,000) at 340
    assert means["short-and-small"] == means["mine.yaml"] == pytest.approx((50 + 739 + 338 + 247) / 4)
    assert means["sjf"] != means["fifo"]
    words.remove("--json")
    assert gpusched(*words, "failing").stderr.splitlines()[-1] == (
        "gpusched: error: order 'failing' of gpusched-example 1.0 does not work: ZeroDivisionError: no such thing "
        "(gpusched_example/order.py:21); upgrade or remove gpusched-example"
    )
    assert (
        "no policy named 'short-and-smal'; did you mean 'short-and-small'?" in gpusched(*words, "short-and-smal").stderr
    )
    (tmp_path / "mine.yaml").write_text("order: short-and-smal\n")
    assert "did you mean short-and-small?" in gpusched(*words, "mine.yaml").stderr


def test_a_placement_is_one_of_replays_and_of_files(gpusched: Run, tmp_path: Path) -> None:
    """The job of 2 GPUs goes beside the first one, that of 4 to the first node; one of a whole node waits to 101."""
    jobs = [(n, 100, gpus) for n, gpus in enumerate((4, 6, 2, 4, 8))]  # submit, run, GPUs
    rows = [f"{n} {t} -1 {s} {g} -1 -1 {g} {s} -1 1 1 1 -1 1 -1 -1 -1" for n, (t, s, g) in enumerate(jobs)]
    (tmp_path / "day.swf").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.yaml").write_text("place: from-both-ends\nbackfill: easy\n")
    words = ["replay", "day.swf", "--nodes", "3", "--gpus-per-node", "8", "--json", "--policy"]
    found = {
        "--placement": json.loads(gpusched(*words, "fifo+easy", "--placement", "from-both-ends").stdout)[0],
        "mine.yaml": json.loads(gpusched(*words, "mine.yaml").stdout)[0],
    }
    assert {row["placement"] for row in found.values()} == {"from-both-ends"}
    assert {row["mean_jct_s"] for row in found.values()} == {(4 * 100 + 197) / 5}
    assert json.loads(gpusched(*words, "fifo+easy").stdout)[0]["mean_jct_s"] == 100
    words.remove("--json")
    for name, why in (
        ("raising", "ZeroDivisionError: no such place (gpusched_example/place.py:29)"),
        ("one-number", "it did not return one number for each node"),
        ("gone", "ModuleNotFoundError: No module named 'gpusched_example.missing'"),
    ):
        (tmp_path / "mine.yaml").write_text(f"place: {name}\n")
        said = gpusched(*words, "mine.yaml")
        assert (said.returncode, said.stderr.splitlines()[-1]) == (1, error_of("placement", name, why))
    assert "no placement named 'from-both-end'" in gpusched(*words, "fifo", "--placement", "from-both-end").stderr


def error_of(kind: str, name: str, why: str) -> str:
    return (
        f"gpusched: error: {kind} '{name}' of gpusched-example 1.0 does not work: {why}; "
        "upgrade or remove gpusched-example"
    )


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("place: from-both-end\n", "did you mean from-both-ends?"),
        ("place: from-both-ends\nbackfill: conservative\n", "none, skip or easy with place: from-both-ends"),
        ("place: from-both-ends\nsizes: drf\n", "a placement of gpusched's own with an agent, or with sizes"),
        ("place: from-both-ends\nagent: rltune\n", "a placement of gpusched's own with an agent, or with sizes"),
        ("sizes: one-at-a-tim\n", "did you mean one-at-a-time?"),
        ("agent: trustin\n", "did you mean trusting?"),
    ],
)
def test_a_policy_that_cannot_be_is_one_line(plugin: None, tmp_path: Path, lines: str, error: str) -> None:
    (tmp_path / "mine.yaml").write_text(lines)
    with pytest.raises(FileError) as raised:
        load_policy(tmp_path / "mine.yaml")
    assert error in raised.value.line()


@pytest.fixture
def lines(plugin: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of this process once components have been looked up."""
    for group in ("orders", "placements", "sizings"):
        components(group)
    found: list[str] = []
    monkeypatch.setattr(Warnings, "show", found.append)
    monkeypatch.setattr(Warnings, "given", set())
    return found


def test_a_placement_decides_live_and_one_that_fails_is_best_fit_with_one_line(plugin: None, lines: list[str]) -> None:
    nodes = [node("n0"), node("n1", 4), node("n2")]
    jobs = [pending("whole", 8, submit=0), pending("part", 2, submit=1)]

    def where(place: str) -> dict[str, list[str]]:
        plan = decide(snapshot(nodes, jobs, place=place))
        return {job: [name for name, _ in parts] for job, parts in started(plan).items()}

    assert where("from-both-ends") == {"whole": ["n0"], "part": ["n2"]}
    assert lines == []
    assert where("best-fit") == {"whole": ["n0"], "part": ["n1"]}
    for place in ("raising", "one-number", "gone", "of-a-package-that-is-gone"):
        assert where(place) == where("best-fit"), place
    assert [line.rpartition("; ")[2] for line in lines] == ["best-fit is used"] * 4
    assert "ZeroDivisionError: no such place" in lines[0]


def test_a_sizing_rule_decides_live_and_one_that_fails_is_greedy_gain_with_one_line(
    plugin: None, lines: list[str]
) -> None:
    """Of two that wait the older one gets all GPUs but the other's least one; greedy-gain gives both four."""
    jobs = [waits("a", 1, 2, 4, 6, submit=1.0), waits("b", 1, 2, 4, 6, submit=0.0)]

    def sizes(rule: str) -> dict[str, int]:
        plan = decide(sized(jobs, [], nodes=1, sizes=rule))
        return {a.job_id: a.allocation.gpus for a in plan.actions if isinstance(a, Start)}

    assert sizes("one-at-a-time") == {"a": 2, "b": 6}
    assert lines == []
    assert sizes("greedy-gain") == {"a": 4, "b": 4}
    for rule in ("half", "too-many", "dividing", "of-a-package-that-is-gone"):
        assert sizes(rule) == sizes("greedy-gain"), rule
    assert [line.rpartition("; ")[2] for line in lines] == ["greedy-gain is used"] * 4
    assert [why in line for why, line in zip(("whole number", "more GPUs than", "ZeroDivision", "no sizing rule"),
            lines, strict=True)] == [True] * 4  # fmt: skip


def test_a_sizing_rule_decides_in_replays(gpusched: Run, tmp_path: Path) -> None:
    rows = [f"{n} {n} -1 100 1 -1 -1 1 100 -1 1 1 1 -1 1 -1 -1 -1" for n in range(2)]
    (tmp_path / "day.swf").write_text("\n".join(rows) + "\n")
    words = ["replay", "day.swf", "--nodes", "1", "--gpus-per-node", "8", "--resizable", "1-8", "--policy", "mine.yaml"]

    def replayed(rule: str, *more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.yaml").write_text(f"sizes: {rule}\nbackfill: easy\n")
        return gpusched(*words, *more)

    found = json.loads(replayed("one-at-a-time", "--json").stdout)[0]
    # the first has all 8 GPUs for 100 / 8 s; the other one waits, and then has them
    assert found["mean_jct_s"] == pytest.approx((12.5 + 12.5 + 11.5) / 2)
    for rule, why in (
        ("dividing", "ZeroDivisionError: integer division or modulo by zero (gpusched_example/sizes.py:38)"),
        ("half", "its answer is not one whole number of GPUs for each job"),
        ("too-many", "it chose sizes that a job may not have now, or more GPUs than exist"),
    ):
        said = replayed(rule)
        assert (said.returncode, said.stderr.splitlines()[-1]) == (1, error_of("sizing rule", rule, why))


AGENT = "agent: {}\nfallback: easy\nplace: best-fit\n"


def test_an_agent_is_trained_and_decides_in_replays(gpusched: Run, tmp_path: Path) -> None:
    """Limits carry no information here, which it learns: then it goes by GPUs, as smallest does."""
    rng = np.random.default_rng(1)
    jobs = [(n * 10, int(rng.integers(50, 500)), int(rng.choice([1, 2, 4, 8]))) for n in range(150)]
    rows = [f"{n} {t} -1 {s} {g} -1 -1 {g} 600 -1 1 1 1 -1 1 -1 -1 -1" for n, (t, s, g) in enumerate(jobs)]
    (tmp_path / "day.swf").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.yaml").write_text(AGENT.format("trusting"))
    trained = gpusched("train", "mine.yaml", "--trace", "day.swf", "--nodes", "2", "--gpus-per-node", "8")
    assert trained.returncode == 0, trained.stderr
    assert "weights of another package's agent (trust 1)" in (tmp_path / "mine" / "default.card.yaml").read_text()
    words = ["replay", "day.swf", "--nodes", "2", "--gpus-per-node", "8", "--json", "--policy"]
    found = {
        name: json.loads(gpusched(*words, name).stdout)[0]["mean_jct_s"] for name in ("mine.yaml", "smallest", "fifo")
    }
    assert found["mine.yaml"] == found["smallest"] != found["fifo"]
    words.remove("--json")
    for name, why in (
        ("wrong-key", "KeyError: 'no such weight' (gpusched_example/agent.py:38)"),
        ("half-there", "it has no part 'replay'"),
        ("no-agent", "it is a type, not gpusched.agents.base.AgentParts"),
    ):
        (tmp_path / "mine.yaml").write_text(AGENT.format(name))
        as_of(tmp_path / "mine" / "default.safetensors", name)
        said = gpusched(*words, "mine.yaml")
        assert (said.returncode, said.stderr.splitlines()[-1]) == (1, error_of("agent", name, why))


def as_of(weights: Path, agent: str) -> None:
    """Rewrite weights as those of another agent."""
    save_model(weights, agent, {"trust": np.zeros(1)}, {"knows": "limit"})


def test_an_agent_decides_live_and_one_that_fails_leaves_it_to_the_fallback(plugin: None, tmp_path: Path) -> None:
    jobs = [pending("large", 8, submit=0), pending("small", 4, submit=1)]

    def plan_of(agent: str) -> Plan:
        (tmp_path / "mine.yaml").write_text(AGENT.format(agent))
        as_of(tmp_path / "mine" / "p.safetensors", agent)
        spec = load_policy(tmp_path / "mine.yaml")
        model = load_model(tmp_path / "mine", "p", agent)
        return decide(msgspec.structs.replace(snapshot([node("n0")], jobs), policies={"p": spec}), {"p": model})

    (tmp_path / "mine").mkdir()
    assert started(plan_of("trusting")).keys() == {"small"}
    assert plan_of("trusting").troubles == {}
    for agent, why in (("wrong-key", "KeyError"), ("half-there", "no part 'replay'"), ("no-agent", "AgentParts")):
        plan = plan_of(agent)
        assert started(plan).keys() == {"large"}
        assert why in plan.troubles["p"]


class Stopping(OrderingAgent):
    """Its replay fails on the way, not at the beginning."""

    def runner(self, world: SimWorld, prepared: object) -> tuple[SimWorld, Callable[[EventLog], int]]:
        return world, lambda log: 1 // 0


STOPPING = AgentParts(live=Stopping, replay=Stopping)


def test_a_replay_by_an_agent_that_fails_on_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.yaml").write_text(AGENT.format("stopping"))
    as_of(tmp_path / "mine" / "default.safetensors", "stopping")
    with registered(tmp_path, {"agents": {"stopping": f"{__name__}:STOPPING"}}):
        policy = policy_of_spec(load_policy(tmp_path / "mine.yaml"))
        with pytest.raises(ComponentError, match=r"agent 'stopping' of acme 1 does not work: ZeroDivisionError"):
            replay(trace_of([0], [1], [1]), Pool.uniform(1, 8), policy)


def test_a_forecast_of_a_short_queue_places_by_the_component(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a node goes to the last node, so that a whole one waits for the first; by best fit it need not."""
    nodes, busy = [node("n0"), node("n1")], [running("r", {"n0": (0,)}, NOW + 100)]
    jobs = [pending("part", 2, submit=0), pending("all", 8, submit=1), pending("then", 8, nodes=2, submit=2)]
    snap = snapshot(nodes, jobs, busy, place="from-both-ends")

    def ahead(snap: Snapshot, components: bool = True) -> tuple[list[float], tuple[str, ...]]:
        found = QueueForecast(snap, half_life_s=3600.0, tick_s=1.0, components=components)
        starts = [found.run(found.by_limits, target=i).start.tolist()[i] for i in range(2)]
        return starts, found.nodes_of(1)

    assert ahead(snap) == ([NOW, NOW + 100], ("n0",))
    assert started(decide(snap))["part"][0][0] == "n1", "as it is decided live"
    asked = StartForecast(snap, jobs[1], RunTimeSampler([]), half_life_s=3600.0, tick_s=1.0).expected()
    assert (asked.by_limits, asked.nodes) == (NOW + 100, ("n0",))
    best_fit = ahead(snapshot(nodes, jobs, busy, place="best-fit"))
    assert best_fit == ([NOW, NOW], ("n1",)) == ahead(snap, components=False)
    assert not any("from-both-ends" in line for line in assumptions(snap, jobs[1], 0))
    monkeypatch.setattr(of_component, "LONGEST_QUEUE", 3)
    assert ahead(snap) == best_fit
    line = "the placement from-both-ends is approximated by best-fit in long queues"
    assert line in assumptions(snap, jobs[1], 0)


def test_a_forecast_by_best_fit_as_a_component_is_that_by_best_fit(tmp_path: Path) -> None:
    """On any queue, also with limits, dependencies, holds and several partitions."""

    @settings(max_examples=80, deadline=None)
    @given(snapshots(), st.booleans())
    def same(snap: Snapshot, easy: bool) -> None:
        found = []
        for place in ("fitting", "best-fit"):
            changes = {"place": place} | ({"backfill": "easy"} if easy else {})
            policies = {name: msgspec.structs.replace(of, **changes) for name, of in snap.policies.items()}
            placed = msgspec.structs.replace(snap, policies=policies)
            ahead = QueueForecast(placed, half_life_s=3600.0, tick_s=1.0, components=True)
            assert ahead.by_components == (place == "fitting")
            starts = ahead.run(ahead.by_limits).start
            found.append((starts.tolist(), [ahead.nodes_of(i) for i in np.flatnonzero(np.isfinite(starts))]))
        assert found[0] == found[1]

    with registered(tmp_path, {"placements": {"fitting": "gpusched.sched.placement:best_fit"}}):
        same()


ASKED: list[int] = []


def counted(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """A placement that fails, and counts how often."""
    ASKED.append(len(nodes.rack))
    raise ValueError


def test_a_placement_that_fails_is_asked_once_in_a_decision(tmp_path: Path, lines: list[str]) -> None:
    jobs = [pending(str(i), 1, submit=i) for i in range(3)]
    with registered(tmp_path, {"placements": {"counted": f"{__name__}:counted"}}):
        assert len(started(decide(snapshot([node("n0")], jobs, place="counted")))) == 3
    assert ASKED == [1]


def test_a_check_names_the_policies_components_that_do_not_work(plugin: None, tmp_path: Path) -> None:
    specs = []
    for n, text in enumerate(("place: gone\n", "place: from-both-ends\norder: short-and-small\n", "order: lost\n")):
        (tmp_path / f"{n}.yaml").write_text(text.replace("lost", "fifo"))
        specs.append(load_policy(tmp_path / f"{n}.yaml"))
    specs[2] = msgspec.structs.replace(specs[2], order="lost")  # its package was removed later
    (tmp_path / "inventory.yaml").write_text(NODES)
    inventory = load_inventory(tmp_path / "inventory.yaml")
    found = list(examine_needs(inventory, dict(zip("ABC", specs, strict=True))))
    assert [(one.status, one.message) for one in found] == [
        ("warn", f"A: placement 'gone' {BROKEN}; upgrade or remove gpusched-example"),
        ("warn", "C: no order 'lost' is installed here; install the package that it came with"),
    ]


def test_policies_are_listed_with_the_package_that_they_come_from(gpusched: Run, tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "inventory.yaml").write_text(NODES.replace("defaults", "policy: mine\n    defaults", 1))
    files = {"mine": "place: from-both-ends\n", "lost": "order: fifo\nplace: gone\n", "own": "order: ljf\n",
             "wrong": "agent: trusting\nplace: from-both-ends\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / "policies" / f"{name}.yaml").write_text(text)
    said = gpusched("policy", "list", "--json")
    rows = {row["name"]: row for row in json.loads(said.stdout)}
    assert [rows[name]["origin"] for name in ("mine", "lost", "own", "easy")] == [
        *["gpusched-example 1.0"] * 2, *["gpusched"] * 2
    ]  # fmt: skip
    gone = f"placement 'gone' {BROKEN}; upgrade or remove gpusched-example"
    assert [rows[name]["fallback"] for name in ("mine", "lost")] == [None, gone]
    assert [line for line in said.stderr.splitlines() if "'gone'" in line] == [f"gpusched: {gone}"]
    assert "agent 'no-agent' of gpusched-example 1.0 does not work: it is a" in said.stderr
    assert 'wrong.yaml:2: place: found "from-both-ends"' in said.stderr
    assert "gpusched-example 1.0" in gpusched("policy", "list").stdout


def test_an_order_that_fails_live_is_fifo_with_one_line(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros(3, np.int64)
    limit, submit, gpus = np.array([9.0, 2, 9]), np.array([2.0, 3, 1]), np.array([1, 1, 1])
    keys = Keys(zeros, zeros, submit, gpus, zeros, zeros, limit, limit, np.zeros(3))
    ids = ["a", "b", "c"]
    assert queue_order("short-and-small", keys, ids).tolist() == [1, 2, 0]
    lines: list[str] = []
    monkeypatch.setattr(Warnings, "show", lines.append)
    monkeypatch.setattr(Warnings, "given", set())
    assert queue_order("failing", keys, ids).tolist() == queue_order("fifo", keys, ids).tolist() == [2, 0, 1]
    assert queue_order("of-a-package-that-is-gone", keys, ids).tolist() == [2, 0, 1]
    assert queue_order("sjf-estimate", keys, ids).tolist() == [1, 2, 0]
    assert queue_order("sjf-estimate", keys, ids, "last").tolist() == [1, 0, 2]
    assert [line.rpartition("; ")[2] for line in lines] == ["fifo is used"] * 2


def test_built_in_parts_are_those_that_the_package_registers() -> None:
    """Names that commands accept without reading entry points are those of the entry points."""
    for group, known in (
        ("orders", ORDERS), ("runtimes", tuple(RuntimeName)), ("notifiers", ("webhook", "command")),
        ("placements", get_args(Place)), ("sizings", set(get_args(Sizing)) - {"base"}), ("agents", tuple(AGENTS)),
    ):  # fmt: skip
        assert {c.name for c in components(group).values() if c.distribution == OURS} == set(known), group
        for component in components(group).values():
            found = component.load()
            assert found is REGISTRY[component.name] if group == "agents" else callable(found), component
