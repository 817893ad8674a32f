"""Waits of a cluster of SSH nodes: a slow node whose job has just been launched is heard without a tick."""

from __future__ import annotations

import threading
from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.cluster import ssh
from gpusched.cluster.base import Operation
from gpusched.model.readings import NodeReading
from gpusched.nodes.transport import TransportError
from gpusched.queue.store import RankRecord
from tests.controller.imagined import inventory
from tests.testbed import wait_until


def hung_probes(monkeypatch: pytest.MonkeyPatch, names: Container[str] | None = None) -> threading.Event:
    """Have probes of these nodes (None: all) wait for the event that is returned."""
    answers = threading.Event()

    def probe(transport: Any, node: Any, cluster_id: str, settings: Any, now: Any, **options: Any) -> NodeReading:
        if names is None or node.name in names:
            answers.wait(300)
        return NodeReading(node=node.name, time=now())

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(ssh, "open_transport", lambda node, settings: SimpleNamespace(close=lambda: None))
    return answers


def test_a_slow_node_is_heard_after_a_launch_and_an_older_answer_does_not_count(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = hung_probes(monkeypatch)
    clock = SimpleNamespace(time=1000.0, offset=0.0, boot=lambda: clock.time)
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path, clock)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "_dispatch", lambda operation, node: "")
    node = inventory(1).nodes[0]
    launch = Operation(verb="launch", node=node.name, rank=SimpleNamespace(job_id="1", attempt=1, rank=0))  # type: ignore[arg-type]
    try:
        assert cluster.observe([node], 0.0) == {}
        assert not cluster.has_news()
        clock.time = 1001.0
        cluster.perform([launch])
        wait_until(cluster.has_news, what="the launch")
        assert [outcome.error for outcome in cluster.finished()] == [""]
        assert not cluster.has_news(), "the node has been asked, and says nothing yet"
        answers.set()
        wait_until(cluster.has_news, what="the answer")
        assert cluster.observe([node], 60.0)[node.name].began == 1000.0
        assert cluster.has_news(), "it says how things were before"
        wait_until(lambda: cluster.observe([node], 60.0).get(node.name), what="what it says now")
        assert not cluster.has_news()
    finally:
        answers.set()
        cluster.close()


def test_a_job_is_not_launched_while_its_old_folder_is_removed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ended and was requeued at once lost its program and its progress to the removal of its folder."""
    removed, sent = threading.Event(), list[str]()
    (node, other), cluster = inventory(2).nodes, ssh.SshCluster(inventory(2), "c", tmp_path)
    cluster._use_nodes([node, other])

    def dispatch(operation: Operation, node: Any) -> str:
        sent.append(operation.verb)
        assert operation.verb == "launch" or removed.wait(300)
        return ""

    monkeypatch.setattr(cluster, "_dispatch", dispatch)
    rank = RankRecord(job_id="j", attempt=2, rank=0, node=node.name, runtime="process")
    folder = msgspec.structs.replace(rank, attempt=0)
    launch = Operation(verb="launch", node=node.name, rank=rank)
    try:
        cluster.perform([Operation(verb="forget", node=node.name, rank=folder), launch])
        wait_until(lambda: sent, what="the removal")
        assert (sent, cluster.busy()) == (["forget"], {("j", 0, 0)})
        removed.set()
        cluster.wait_for_operations(600)
        assert [outcome.error for outcome in cluster.finished()] == [""]
        cluster.perform([launch])
        cluster.wait_for_operations(600)
        assert sent == ["forget", "launch"]
        removed.clear()
        cluster.finished()
        cluster.perform([Operation(verb="forget", node=other.name, rank=folder), launch])
        wait_until(lambda: sent.count("launch") == 2, what="the launch on another node")
    finally:
        removed.set()
        cluster.close()


def test_nodes_that_hang_keep_no_others_from_being_heard(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More nodes hang at once than there are threads: the others are heard in the same cycle, and in the next ones."""
    hanging = {f"n{i}" for i in range(ssh.PROBE_THREADS + 8)}
    answers = hung_probes(monkeypatch, hanging)
    nodes = inventory(2 * len(hanging) + 10).nodes
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path)
    others = {node.name for node in nodes} - hanging
    try:
        assert cluster.observe(nodes, 10.0).keys() == others
        assert cluster.observe(nodes, 10.0).keys() == others
        answers.set()
        wait_until(lambda: cluster.observe(nodes, 10.0).keys() >= hanging, what="those that hung")
    finally:
        answers.set()
        cluster.close()


def test_nodes_that_leave_while_their_probes_wait_for_a_thread_end_no_cycle(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rack that is down is removed: those of its nodes that no thread had come to yet raised KeyError."""
    answers = hung_probes(monkeypatch)
    nodes = inventory(2 * ssh.PROBE_THREADS).nodes
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path)
    try:
        assert cluster.observe(nodes, 0.0) == {}
        assert cluster.observe(nodes[:1], 2 * ssh.STALL_S) == {}
        answers.set()
        wait_until(lambda: cluster.observe(nodes[:1], 10.0).get(nodes[0].name), what="the node that stayed")
    finally:
        answers.set()
        cluster.close()


def test_a_node_that_left_leaves_no_threads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept up to eight for ever: too many in a cluster whose nodes come and go."""
    go_on = threading.Event()
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path)
    monkeypatch.setattr(cluster, "_dispatch", lambda operation, node: "" if go_on.wait(300) else "late")
    (node,) = inventory(1).nodes
    cluster._use_nodes([node])
    before = set(threading.enumerate())
    try:
        rank = RankRecord(job_id="j", attempt=1, rank=0, node=node.name, runtime="process")
        others = (msgspec.structs.replace(rank, rank=number) for number in range(3))
        cluster.perform(Operation(verb="remove", node=node.name, rank=one) for one in others)
        own = set(threading.enumerate()) - before
        assert own
        cluster._use_nodes([])
        go_on.set()
        cluster.wait_for_operations(600)
        assert len(cluster.finished()) == 3, "what was under way is finished"
        wait_until(lambda: not any(thread.is_alive() for thread in own), what="the threads' end")
    finally:
        go_on.set()
        cluster.close()


def test_a_node_that_leaves_during_its_probe_is_connected_to_no_more(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, answers, opened, closed = threading.Event(), threading.Event(), list[object](), list[object]()

    def probe(transport: Any, node: Any, cluster_id: str, settings: Any, now: Any, **options: Any) -> NodeReading:
        began.set()
        answers.wait()
        return NodeReading(node=node.name, time=now())

    def open_transport(node: Any, settings: Any) -> Any:
        opened.append(node)
        return SimpleNamespace(close=lambda: closed.append(node))

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(ssh, "open_transport", open_transport)
    cluster = ssh.SshCluster(inventory(1), "c", tmp_path)
    node = inventory(1).nodes[0]
    try:
        cluster.observe([node], 0.0)
        began.wait()
        last = cluster._probes[node.name]
        cluster.observe([], 0.0)
        answers.set()
        last.result()
        assert (opened, closed) == ([node], [node])
    finally:
        answers.set()
        cluster.close()


def test_a_probe_that_fails_leaves_reported_ends_to_the_next_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*_: Any, **options: Any) -> NodeReading:
        raise TransportError("timeout", "no answer")

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(ssh, "open_transport", lambda node, settings: SimpleNamespace(close=lambda: None))
    cluster, failed = ssh.SshCluster(inventory(1), "c", tmp_path), list[str]()
    monkeypatch.setattr(cluster._ends, "probe_failed", failed.append)
    node = inventory(1).nodes[0]
    try:
        assert cluster._probe(node).result.kind == "timeout"  # type: ignore[union-attr]
        assert failed == [node.name]
    finally:
        cluster.close()
