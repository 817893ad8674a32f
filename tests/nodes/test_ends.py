"""The channel over which a node reports ends of jobs: processes of this machine, with python3 and without."""

from __future__ import annotations

import base64
import contextlib
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gpusched.cluster import ends
from gpusched.cluster.ends import EndWatch
from gpusched.cluster.ssh import SshCluster
from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.model.resources import RuntimeName
from gpusched.nodes import ends as builders
from gpusched.nodes import probe as probing
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.runtimes import LaunchRequest, runtime_for
from gpusched.nodes.transport import Session, SessionRefused, Transport, TransportError
from tests.controller import imagined
from tests.nodes.nodes import declare, settings_for
from tests.testbed import Testbed, wait_until

CLUSTER, NODE = "c1", "n1"


class Counting(LocalTransport):
    """This machine; ``refuses`` sessions, or none."""

    def __init__(self) -> None:
        super().__init__(NODE)
        self.sessions: list[Any] = []
        self.refuses: TransportError | None = None

    def session(self, argv: tuple[str, ...], terminal: object = None) -> Session:
        if self.refuses is not None:
            raise self.refuses
        self.sessions.append(super().session(argv))
        return cast(Session, self.sessions[-1])

    @property
    def left(self) -> list[int]:
        """Processes of sessions that have not ended."""
        return [session._process.pid for session in self.sessions if session._process.poll() is None]


class Job:
    """A process in an attempt's folder, with or without a launcher that is at work."""

    def __init__(self, root: Path, number: int, launcher: bool) -> None:
        self.name = f"gpusched-{number}-1-0"
        self.process = subprocess.Popen(["sleep", "7003"])
        self.launcher = launcher
        (root / self.name).mkdir(parents=True)
        if launcher:
            start = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            (root / self.name / "launcher.pid").write_text(f"{self.process.pid} {start}\n")

    @property
    def container(self) -> ContainerReading:
        return ContainerReading(name=self.name, phase="running", pid=None if self.launcher else self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made: list[Job] = []

    def job(launcher: bool = False) -> Job:
        made.append(Job(tmp_path / "gpusched-node" / CLUSTER / NODE, len(made), launcher))
        return made[-1]

    yield job
    for one in made:
        one.end()


@pytest.fixture
def transport() -> Iterator[Counting]:
    transport = Counting()
    yield transport
    for session in transport.sessions:
        session.close()
    wait_until(lambda: not transport.left, what="the channels to end")


@pytest.fixture
def watch() -> Iterator[EndWatch]:
    watch = EndWatch(CLUSTER)
    watch.begin(lambda: None)
    yield watch
    watch.close()


@pytest.fixture(params=["python3", "sh"])
def python(request: pytest.FixtureRequest, transport: Counting) -> bool:
    """Whether the node has python3."""
    memory = probing._states.setdefault(cast(Transport, transport), probing._ProbeState())
    memory.mode = "cached" if request.param == "python3" else "sh"
    return bool(request.param == "python3")


def reading(*jobs: Job) -> NodeReading:
    return NodeReading(node=NODE, time=0.0, source="none", containers=tuple(job.container for job in jobs))


@pytest.mark.parametrize("launcher", [True, False])
def test_an_end_is_reported_and_seen_by_the_next_probe(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], python: bool, launcher: bool
) -> None:
    first, second = jobs(launcher), jobs(launcher)
    watch.update(NODE, transport, reading(first, second))
    assert not watch.is_due(())
    second.end()
    wait_until(lambda: watch.is_due(()), what="the end to be reported")
    assert not watch.is_due({NODE}), "it is being asked"
    watch.probe_started(NODE)
    watch.update(NODE, transport, reading(first))
    assert not watch.is_due(())
    third = jobs(launcher)
    third.end()
    watch.update(NODE, transport, reading(first, third))
    wait_until(lambda: watch.is_due(()), what="an end before it was asked for")
    watch.probe_started(NODE)
    first.end()
    wait_until(lambda: watch.is_due(()), what="the first one's end")
    assert len(transport.sessions) == 1, "one channel for all"


def test_a_reported_end_wakes_the_controller(transport: Counting, jobs: Callable[..., Job], python: bool) -> None:
    woken, job = threading.Event(), jobs()
    watch = EndWatch(CLUSTER)
    watch.begin(woken.set)
    try:
        watch.update(NODE, transport, reading(job))
        assert not woken.is_set()
        job.end()
        assert woken.wait(300)
        assert watch.is_due(())
    finally:
        watch.close()


def test_launchers_on_nodes_without_python3_say_it_themselves(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], tmp_path: Path
) -> None:
    """Nothing looks at the process, which goes on: what comes is the launcher's word."""
    probing._states.setdefault(cast(Transport, transport), probing._ProbeState()).mode = "sh"
    first, second = jobs(True), jobs(True)
    pipe = tmp_path / "gpusched-node" / CLUSTER / NODE / "ended"
    watch.update(NODE, transport, reading(first, second))
    wait_until(pipe.is_fifo, what="the pipe")

    def reported() -> bool:  # again: what comes before the reader has opened the pipe is lost
        subprocess.run(["sh", "-c", f"echo nobody: 1<>{pipe}; echo {second.name}: 1<>{pipe}"], check=True, timeout=300)
        return watch.is_due(())

    wait_until(reported, what="the launcher's word")
    assert {name for name, _ in watch._nodes[NODE]._reported} == {second.name}
    watch.close()
    wait_until(lambda: not pipe.exists(), what="its removal")


def test_an_unrecorded_end_is_probed_a_few_times(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "RECHECK_S", 0.0)
    job = jobs()
    watch.update(NODE, transport, reading(job))
    job.end()
    looks = 0
    wait_until(lambda: watch.is_due(()), what="the end to be reported")
    while watch.is_due(()):
        looks += 1
        watch.probe_started(NODE)
        watch.update(NODE, transport, reading(job))
    assert looks == ends.MAX_RECHECKS + 1


def test_a_channel_ends_with_its_connection_and_is_opened_again_later(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs()
    watch.update(NODE, transport, reading(job))
    transport.sessions[0].close()
    wait_until(lambda: not transport.left, what="its process to end")
    wait_until(lambda: not watch._nodes[NODE]._channel.is_alive, what="its thread to end")  # type: ignore[union-attr]
    watch.update(NODE, transport, reading(job))
    assert len(transport.sessions) == 1, "not at once"
    watch._nodes[NODE]._not_before = 0.0
    watch.update(NODE, transport, reading(job))
    assert len(transport.sessions) == 2
    job.end()
    wait_until(lambda: watch.is_due(()), what="the end to be reported")


def test_without_jobs_there_is_no_channel(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.update(NODE, transport, reading())
    assert transport.sessions == []
    watch.update(NODE, transport, reading(jobs()))
    watch.update(NODE, transport, reading())
    assert len(transport.left) == 1, "the next job may come soon"
    monkeypatch.setattr(ends, "LINGER_S", -1.0)
    watch.update(NODE, transport, reading())
    wait_until(lambda: not transport.left, what="the channel to end")


def test_a_refused_channel_is_not_retried_all_the_time(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job]
) -> None:
    transport.refuses = SessionRefused("ssh", "no")
    job, pauses = jobs(), []
    for _ in range(9):
        watch.update(NODE, transport, reading(job))
        node = watch._nodes[NODE]
        pauses.append(round(node._not_before - time.monotonic()))
        node._not_before = 0.0
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]


def test_it_makes_room_for_others(watch: EndWatch, transport: Counting, jobs: Callable[..., Job]) -> None:
    assert not watch.yield_session(NODE)
    watch.update(NODE, transport, reading(jobs()))
    assert watch.yield_session(NODE)
    assert not watch.yield_session(NODE)
    watch.update(NODE, transport, reading(jobs()))
    assert len(transport.sessions) == 1


def test_a_rank_waiting_for_its_start_is_reported_only_when_its_launcher_ends(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], python: bool
) -> None:
    held, created = jobs(True), jobs()
    both = tuple(ContainerReading(name=job.name, phase="ready") for job in (held, created))
    watch.update(NODE, transport, NodeReading(node=NODE, time=0.0, source="none", containers=both))
    marker = jobs()
    marker.end()
    one = NodeReading(node=NODE, time=0.0, source="none", containers=(*both, marker.container))
    watch.update(NODE, transport, one)
    wait_until(lambda: watch.is_due(()), what="the marker")
    assert watch._nodes[NODE]._reported == {(marker.name, marker.process.pid)}
    held.end()
    wait_until(lambda: (held.name, -1) in watch._nodes[NODE]._reported, what="the launcher's end")


class Quiet:
    """A node whose sessions say nothing; ``during`` is called while one is opened."""

    def __init__(self) -> None:
        self.sessions: list[Quiet.Session] = []
        self.during: Callable[[], None] = lambda: None

    class Session:
        def __init__(self) -> None:
            self.closed = threading.Event()
            self.close = self.closed.set

        def pump(self, take: object) -> int:
            self.closed.wait()
            return 0

        def write(self, data: bytes) -> int:
            return len(data)

    def session(self, argv: tuple[str, ...], terminal: object = None) -> Quiet.Session:
        self.sessions.append(Quiet.Session())
        self.during()
        return self.sessions[-1]


def test_a_node_that_leaves_keeps_no_channel_whenever_its_last_probe_ends(watch: EndWatch) -> None:
    node = Quiet()
    running = ContainerReading(name="gpusched-1-1-0", phase="running", pid=1)

    def update() -> None:
        watch.update(NODE, cast(Transport, node), NodeReading(node=NODE, time=0.0, containers=(running,)))

    node.during = lambda: watch.drop(NODE)
    update()
    assert node.sessions[0].closed.is_set(), "it left while the channel was opened"
    node.during = lambda: None
    update()  # it had left before
    watch._nodes[NODE]._on_end((running.name, 1))
    watch.keep_only({NODE})
    assert watch.is_due(())
    assert not node.sessions[1].closed.is_set()
    watch.keep_only(())
    assert node.sessions[1].closed.is_set()
    assert not watch.is_due(()), "nobody probes it, so there would be news for ever"


@pytest.mark.parametrize("how", ["no answer", "no containers"])
def test_an_end_that_a_failed_probe_did_not_show_is_not_forgotten(
    watch: EndWatch, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(ends, "RECHECK_S", 0.0)
    node, running = cast(Transport, Quiet()), ContainerReading(name="gpusched-1-1-0", phase="running", pid=1)
    reading = NodeReading(node=NODE, time=0.0, containers=(running,))
    watch.update(NODE, node, reading)
    watch._nodes[NODE]._on_end((running.name, 1))
    probes = 0
    while watch.is_due(()):
        watch.probe_started(NODE)
        assert not watch.is_due(())
        probes += 1
        if how == "no answer":
            watch.probe_failed(NODE)
        else:
            watch.update(NODE, node, msgspec.structs.replace(reading, containers=None))
    assert probes == 1 + ends.MAX_RECHECKS
    watch.probe_failed("another")


def test_nothing_is_opened_before_it_begins(transport: Counting, jobs: Callable[..., Job]) -> None:
    watch = EndWatch(CLUSTER)
    watch.update(NODE, transport, reading(jobs()))
    assert transport.sessions == []


def test_a_process_that_the_kernel_gives_no_descriptor_for_is_looked_at(
    watch: EndWatch, transport: Counting, jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(probing.__file__).parent / "payload" / "ends.py").read_text()
    old = text.replace("def open_pid(", "def open_pid(pid):\n    return None\n\n\ndef unused(").replace("1.0", "0.05")
    sent = base64.b64encode(zlib.compress(old.encode())) + b"\n"
    monkeypatch.setattr(ends, "program", lambda python: sent)
    assert builders.program(True) != sent
    assert old.count("return None\n\n\ndef unused") == 1
    job = jobs()
    watch.update(NODE, transport, reading(job))
    job.end()
    wait_until(lambda: watch.is_due(()), what="the end to be reported")


def soon(ask: Callable[[], Any]) -> Any:
    """None where sshd still counts a session that has just ended."""
    with contextlib.suppress(SessionRefused):
        return ask()


def test_a_node_without_a_session_to_spare_is_asked_all_the_same(testbed: Testbed, tmp_path: Path) -> None:
    """Of two, something else has one: what waits for ends goes when the next probe comes."""
    machine = testbed.nodes[3]
    config = machine.disk / "ssh" / "sshd_config"
    before = config.read_text()
    node = declare(testbed, machine)
    empty = imagined.inventory(1)
    partition = msgspec.structs.replace(empty.partitions[0], nodes=(node,))
    site = msgspec.structs.replace(empty, partitions=(partition,), settings=settings_for(testbed, probe_timeout_s=60.0))
    cluster = SshCluster(site, CLUSTER, tmp_path)
    request = LaunchRequest(
        name="gpusched-0one-1-0", cluster_id=CLUSTER, node=node.name, job_id="0one", attempt=1, rank=0,
        command=("sleep", "7005"), cores=1, memory_mib=1,
    )  # fmt: skip
    runtime = runtime_for(RuntimeName.PROCESS)

    def is_read() -> bool:
        news = cluster.observe([node], 60).get(node.name)
        result = news.result if news is not None else None
        return isinstance(result, NodeReading) and [c.phase for c in result.containers or ()] == ["running"]

    def has_channel() -> bool:
        return is_read() and cluster._ends._nodes[node.name]._channel is not None

    try:
        config.write_text("MaxSessions 2\n" + before)
        machine.stop_sshd(sessions=True)
        machine.start_sshd()
        assert cluster._transport(node).run(runtime.launch(request), 60).stdout == b"launched\n"
        wait_until(is_read, what="the job")
        cluster.watch_ends(lambda: None)
        wait_until(has_channel, what="the channel")
        other = wait_until(lambda: soon(lambda: cluster._transport(node).session(("cat",))), what="another session")
        assert other is not None
        wait_until(is_read, what="a reading")
        assert cluster._ends._nodes[node.name]._channel is None
        other.close()
        assert wait_until(lambda: soon(lambda: cluster._transport(node).run(runtime.remove(request.ref), 60)))
    finally:
        cluster.close()
        config.write_text(before)
        machine.stop_sshd(sessions=True)
        machine.start_sshd()
