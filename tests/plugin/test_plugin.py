"""Components of another distribution: found, listed and used; where one is broken, it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpusched.config.inventory import load_inventory
from gpusched.config.plugins import ComponentError, components
from gpusched.controller.notices.desk import NotificationService
from gpusched.errors import FileError, Warnings
from gpusched.model.events import Event
from gpusched.queue.store import Store
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


def test_a_notifier_gets_what_happened_and_its_options(plugin: None, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    (tmp_path / "inventory.yaml").write_text(
        f"notices: {{to: [{{notifier: chat, options: {{file: {chat}, prefix: 'gpu: '}}, on: [node]}}]}}\n{NODES}"
    )
    inventory = load_inventory(tmp_path / "inventory.yaml")
    store = Store.create_or_open(tmp_path / "state")
    lines: list[str] = []
    notices = NotificationService(store, lines.append)
    store.append([Event(time=1e9, kind="node_down", node="n1", data={"reason": "no answer"})])
    notices.step(inventory, 1e9, wait_s=30)
    assert chat.read_text() == "gpu: node n1 is lost: no answer\n"
    chat.unlink()
    chat.mkdir()  # it fails now
    store.append([Event(time=1e9 + 1, kind="node_down", node="n1", data={"reason": "no answer"})])
    notices.step(inventory, 1e9 + 1, wait_s=30)
    why = f"IsADirectoryError: [Errno 21] Is a directory: '{chat}'"
    assert lines == [f"a notice could not be sent and will be retried: {why}"]


@pytest.mark.parametrize(
    ("receiver", "error"),
    [
        ("{notifier: chats}", "expected one of command, webhook, chat: did you mean chat?"),
        ("{notifier: chat, webhook: 'http://h/'}", "expected a webhook, a command or a notifier"),
        ("{webhook: 'http://h/', options: {a: b}}", "expected options only with a notifier"),
    ],
)  # fmt: skip
def test_a_receiver_that_cannot_be_is_one_line(plugin: None, tmp_path: Path, receiver: str, error: str) -> None:
    (tmp_path / "inventory.yaml").write_text(f"notices: {{to: [{receiver}]}}\n{NODES}")
    with pytest.raises(FileError) as raised:
        load_inventory(tmp_path / "inventory.yaml")
    assert error in raised.value.line()
