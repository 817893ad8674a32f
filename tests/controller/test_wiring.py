"""How often a node is asked for its wiring: at first contact, after a boot, and once an hour."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpusched.cluster import ssh
from gpusched.model.readings import NodeReading, Wiring
from tests.controller.imagined import inventory


def test_wiring_is_asked_for_seldom(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    boot = "one"

    def probe(transport: Any, node: Any, cluster_id: str, settings: Any, now: Any, want_links: bool) -> NodeReading:
        asked.append(want_links)
        return NodeReading(node=node.name, time=now(), boot_id=boot, wiring=Wiring() if want_links else None)

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(ssh, "open_transport", lambda node, settings: None)
    clock = SimpleNamespace(time=1000.0, boot=lambda: clock.time)
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path, clock)  # type: ignore[arg-type]
    node = inventory(1).nodes[0]

    def asks(after: float) -> list[bool]:
        clock.time += after
        asked.clear()
        assert isinstance(cluster._probe(node).result, NodeReading)
        return list(asked)

    assert [asks(0), asks(5), asks(3000)] == [[True], [False], [False]]
    assert [asks(600), asks(3500)] == [[True], [False]]
    boot = "two"
    assert [asks(1), asks(1)] == [[False, True], [False]]
