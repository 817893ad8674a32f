"""Components of another distribution: found, listed and used; where one is broken, it is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.config.plugins import OURS, ComponentError, components
from gpusched.controller.notices.service import NotificationService
from gpusched.errors import FileError, Warnings
from gpusched.model.events import Event
from gpusched.model.policy import ORDERS
from gpusched.model.resources import RuntimeName
from gpusched.queue.store import Store
from gpusched.sched.order import Keys, queue_order
from tests.logged import messages
from tests.plugin.conftest import Run

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
    why = f"IsADirectoryError: [Errno 21] Is a directory: '{chat}'"
    assert messages(caplog) == [f"a notice could not be sent and will be retried: {why}"]


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
    """Of three jobs on one node the one that takes least GPU time by its limit starts first, whoever was first."""
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
        "gpusched: error: order 'failing' of gpusched-example 1.0 does not work: ZeroDivisionError: no such thing; "
        "upgrade or remove gpusched-example"
    )
    assert (
        "no policy named 'short-and-smal'; did you mean 'short-and-small'?" in gpusched(*words, "short-and-smal").stderr
    )
    (tmp_path / "mine.yaml").write_text("order: short-and-smal\n")
    assert "did you mean short-and-small?" in gpusched(*words, "mine.yaml").stderr


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
    assert [line.rpartition("; ")[2] for line in lines] == ["fifo is used"] * 2


def test_what_this_package_knows_without_looking_is_what_it_registers() -> None:
    """Names that commands accept without reading entry points are those of the entry points."""
    for group, known in (("orders", ORDERS), ("runtimes", tuple(RuntimeName)), ("notifiers", ("webhook", "command"))):
        assert {c.name for c in components(group).values() if c.distribution == OURS} == set(known), group
        for component in components(group).values():
            assert callable(component.load()), component
