"""How often a node is asked for its wiring: at first contact, after a boot, and once an hour."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpusched.cluster import ssh
from gpusched.model.readings import KernelLog, NodeReading, Wiring
from tests.controller.imagined import inventory


def test_wiring_is_asked_for_seldom(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    boot = "one"

    def probe(
        transport: Any, node: Any, cluster_id: str, settings: Any, now: Any, want_links: bool, **_: Any
    ) -> NodeReading:
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


def test_the_kernel_s_log_is_read_from_where_it_was_left_and_not_in_vain(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, int | None]] = []
    boot, source, us = "one", "kernel", 500_000_000

    def probe(transport: Any, node: Any, *rest: Any, want_kernel: bool, kernel_after_us: int | None, **_: Any) -> Any:
        asked.append((want_kernel, kernel_after_us))
        log = KernelLog(source=source, now_us=us) if want_kernel else None
        return NodeReading(node=node.name, time=1.0, boot_id=boot, kernel=log)

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(ssh, "open_transport", lambda node, settings: None)
    clock = SimpleNamespace(time=1000.0, boot=lambda: clock.time)
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path, clock)  # type: ignore[arg-type]
    node = inventory(1).nodes[0]

    def asks(after: float) -> list[tuple[bool, int | None]]:
        clock.time += after
        asked.clear()
        assert isinstance(cluster._probe(node).result, NodeReading)
        return list(asked)

    assert asks(0) == [(True, None)]
    us += 5_000_000
    assert asks(5) == [(True, 440_000_000)]  # with those of the last minute, which may not have been stored
    boot, us = "two", 9_000_000
    assert asks(5) == [(True, 445_000_000), (True, None)]
    source = ""
    assert asks(5) == [(True, None)]
    assert asks(5) == [(False, None)]
    source = "kernel"
    assert asks(3600) == [(True, None)]
    assert asks(5) == [(True, None)]
