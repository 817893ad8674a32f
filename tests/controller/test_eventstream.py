"""Events as lines: each is sent, in order, at least once, and only after it is true; nobody waits for a receiver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.controller import eventstream
from gpusched.controller.eventstream import EventFile, EventStream, EventStreams
from gpusched.controller.reporting import Reporting
from gpusched.model.arrays import restricted_row
from gpusched.model.events import Event, EventLine
from gpusched.model.jobs import JobState
from gpusched.model.resources import EventSettings
from gpusched.queue.store import Reader, Store
from tests import builders
from tests.testbed.waiting import wait_until

T = 1_800_000_000.0
PATIENCE_S = 300.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path / "state")
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventstream, "RETRIES_S", (0.01,))
    monkeypatch.setattr(EventStreams.close, "__defaults__", (PATIENCE_S,))


class Streams:
    """Streams of one store that end with the test."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.all: list[EventStreams] = []

    def begin(self, **receivers: str) -> EventStreams:
        streams = EventStreams(self.store, Path(self.store._db.execute("PRAGMA database_list").fetchone()[2]).parent)
        self.all.append(streams)
        streams.step(EventSettings(**receivers))
        return streams


@pytest.fixture
def streams(store: Store) -> Iterator[Streams]:
    found = Streams(store)
    yield found
    for one in found.all:
        one.close(1.0)


def happen(store: Store, *kinds: str) -> None:
    store.append(Event(time=T, kind=kind, job_id="j", user="ada", data={"from": "PENDING"}) for kind in kinds)


def seqs(path: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_line_says_whose_job_it_is_and_what_happened(store: Store, streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    running = streams.begin(file=str(file))
    store.put_jobs([builders.job("j", user="ada"), builders.job("t", array_id="a", array_index=3, user="bob")])
    happen(store, "starting")
    store.append(
        [Event(time=T, kind="ended", job_id="a", data={"tasks": "4-9"}), Event(time=T, kind="node_up", node="n")]
    )
    running.step(EventSettings(file=str(file)))
    wait_until(lambda: len(seqs(file)) == 3)
    lines = [msgspec.json.decode(line, type=EventLine) for line in file.read_bytes().splitlines()]
    assert [(x.kind, x.job, x.name, x.user, x.partition, x.node) for x in lines] == [
        ("starting", "j", "j", "ada", "p", None), ("ended", "a", "j", "bob", "p", None),
        ("node_up", None, None, None, None, "n"),
    ]  # fmt: skip
    assert (lines[0].time, lines[0].unix_s, lines[0].data) == ("2027-01-15T08:00:00.000Z", T, {"from": "PENDING"})
    assert lines[0].cluster == store.meta("cluster_id")


def test_only_what_is_committed_is_sent(store: Store, streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    running = streams.begin(file=str(file))
    stream = running._streams["file"]
    looked, read = threading.Event(), stream._read

    def look(*given: Any) -> Any:
        found = read(*given)
        looked.set()
        return found

    stream._read = look

    def fails() -> None:
        with store.transaction():
            happen(store, "never")
            stream.wake()
            assert looked.wait(PATIENCE_S)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    happen(store, "true")
    stream.wake()
    wait_until(lambda: bool(seqs(file)))
    assert [json.loads(line)["kind"] for line in file.read_text().splitlines()] == ["true"]


def test_earlier_events_are_not_sent_and_missed_ones_are(store: Store, streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    happen(store, "before")
    first = streams.begin(file=str(file))
    happen(store, "one")
    first.close()
    first.write_positions()
    assert seqs(file) == [2]
    happen(store, "missed")
    second = streams.begin(file=str(file))
    wait_until(lambda: seqs(file) == [2, 3])
    second.step(EventSettings())
    second.write_positions()
    assert store.event_positions() == {}
    happen(store, "for nobody")
    second.step(EventSettings(file=str(file)))
    happen(store, "again")
    second.step(EventSettings(file=str(file)))
    wait_until(lambda: seqs(file) == [2, 3, 5])


def test_what_happens_while_the_last_events_are_read_is_sent_before_a_stream_ends(store: Store, tmp_path: Path) -> None:
    file, ends = tmp_path / "events.jsonl", list[threading.Thread]()

    def read(reader: Reader, position: int, most: int) -> list[EventLine]:
        found = reader.event_lines(position, most)
        if not ends:  # just now there was none
            with contextlib.closing(Store.create_or_open(tmp_path / "state")) as own:  # of this thread
                happen(own, "late")
            ends.append(threading.Thread(target=stream.stop, args=(PATIENCE_S,)))
            ends[0].start()
            assert stream._stopping.wait(PATIENCE_S)
        return found

    happen(store, "before")
    stream = EventStream(tmp_path / "state", "file", EventFile(str(file)), 1, read)
    stream.wake()
    stream._thread.join(PATIENCE_S)
    ends[0].join(PATIENCE_S)
    assert seqs(file) == [2]


def test_unseen_positions_are_kept(store: Store, tmp_path: Path) -> None:
    """A controller that ends before its first cycle forgets nothing."""
    store.put_event_position("file", 7)
    Reporting(store, tmp_path / "state").close()
    assert store.event_positions() == {"file": 7}


def test_a_file_that_is_moved_is_begun_anew(store: Store, streams: Streams, tmp_path: Path) -> None:
    file, moved = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    settings = EventSettings(file=str(file))
    running = streams.begin(file=str(file))
    happen(store, "a")
    running.step(settings)
    wait_until(lambda: seqs(file) == [1])
    file.rename(moved)
    happen(store, "b")
    running.step(settings)
    wait_until(lambda: seqs(file) == [2])
    os.truncate(file, 0)  # logrotate's copytruncate
    happen(store, "c")
    running.step(settings)
    wait_until(lambda: seqs(file) == [3])
    assert seqs(moved) == [1]


def test_half_a_line_of_a_killed_controller_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = b"x" * 200_000
    for before, left in (
        (b'{"seq":1}\n{"se', b'{"seq":1}\n'), (b'{"se' + long, b""), (b"", b""), (long + b"\n{", long + b"\n"),
    ):  # fmt: skip
        path.write_bytes(before)
        file = EventFile(str(path))
        file.write([b'{"seq":2}'])
        file.close()
        assert path.read_bytes() == left + b'{"seq":2}\n'


def test_a_full_disk_leaves_no_half_line_and_nothing_is_lost(
    store: Store, streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write = tmp_path / "events.jsonl", os.write
    full = threading.Event()

    def until_it_is_full(descriptor: int, content: bytes) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        full.set()
        return write(descriptor, content[:10])

    monkeypatch.setattr(eventstream.os, "write", until_it_is_full)
    running = streams.begin(file=str(file))
    happen(store, "a", "b")
    running.step(EventSettings(file=str(file)))
    wait_until(lambda: running._streams["file"]._failures > 1)
    assert (file.read_bytes(), running._streams["file"].position) == (b"", 0)
    monkeypatch.undo()
    monkeypatch.setattr(eventstream, "RETRIES_S", (0.01,))
    wait_until(lambda: seqs(file) == [1, 2])


def test_a_pipe_gets_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = EventFile(str(path))
    for number in (1, 2):
        file.write([b'{"seq":%d}' % number])
    assert os.read(reader, 99) == b'{"seq":1}\n{"seq":2}\n'
    file.close()
    os.close(reader)


def test_a_store_from_a_backup_goes_on_with_its_own_numbers(store: Store, streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    store.put_event_position("file", 70)  # sent since the backup was made
    streams.begin(file=str(file))
    happen(store, "a")
    streams.all[0].step(EventSettings(file=str(file)))
    wait_until(lambda: seqs(file) == [1])


class Hook(BaseHTTPRequestHandler):
    """Answers as the test says: "503", "hangs", "ok"."""

    answer, got, go_on = "ok", list[list[dict[str, Any]]](), threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (answer := Hook.answer) == "hangs":
            Hook.go_on.wait(PATIENCE_S)
        if answer != "503":
            Hook.got.append(body)
        self.send_response(503 if answer == "503" else 204)
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Hook.answer, Hook.got, Hook.go_on = "ok", [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        Hook.go_on.set()
        server.shutdown()


def test_a_webhook_gets_arrays_in_order_and_failures_are_repeated(store: Store, streams: Streams, url: str) -> None:
    Hook.answer = "503"
    running = streams.begin(webhook=url)
    happen(store, *"abc")
    running.step(EventSettings(webhook=url))
    wait_until(lambda: running._streams["webhook"]._failures > 2)
    assert (Hook.got, running._positions()) == ([], {"webhook": 0})
    Hook.answer = "ok"
    wait_until(lambda: running._positions() == {"webhook": 3})
    assert [[line["kind"] for line in body] for body in Hook.got] == [["a", "b", "c"]]


def test_a_receiver_that_hangs_delays_neither_the_cycle_nor_the_other(
    store: Store, streams: Streams, tmp_path: Path, url: str
) -> None:
    Hook.answer, file = "hangs", tmp_path / "events.jsonl"
    settings = EventSettings(file=str(file), webhook=url)
    running = streams.begin(file=str(file), webhook=url)
    for number in range(1, 4):  # each step returns while the webhook hangs
        happen(store, "a")
        running.step(settings)
        wait_until(lambda n=number: seqs(file) == list(range(1, n + 1)))  # type: ignore[misc]
    wait_until(lambda: running._positions() == {"file": 3, "webhook": 0})  # a position follows what was written
    Hook.go_on.set()
    wait_until(lambda: running._positions() == {"file": 3, "webhook": 3})


KILLED = """
import sys
from pathlib import Path
from gpusched.controller.reporting import Reporting
from gpusched.model.events import Event
from gpusched.model.resources import EventSettings
from gpusched.queue.store import Reader, Store

state, file = Path(sys.argv[1]), sys.argv[2]
store = Store.create_or_open(state)
reporting, settings = Reporting(store, state), EventSettings(file=file)
reporting.step(0.0, settings)
while True:
    with store.transaction():
        store.append(Event(time=1.0, kind="ended", job_id="j", data={"to": "FAILED"}) for _ in range(3))
    reporting.step(0.01, settings)
"""


@pytest.mark.slow
def test_kill_9_loses_no_event_and_repeats_only_numbered_ones(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "events.jsonl"
    Store.create_or_open(state).close()
    for number in range(1, 5):
        size = file.stat().st_size if file.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(state), str(file)])
        wait_until(lambda s=size, n=number: file.exists() and file.stat().st_size > s + 7000 * n)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = Store.create_or_open(state)
    last = Reporting(store, state)
    last.step(0.0, EventSettings(file=str(file)))
    last.close()
    found = seqs(file)
    first_times = list(dict.fromkeys(found))
    assert first_times == list(range(1, store.latest_event() + 1)), "all, in order"
    totals = store.metric_totals()
    assert totals is not None
    assert totals.ended == {"": {"FAILED": store.latest_event()}}, "and the totals counted each once"
    assert store.event_positions() == {"file": store.latest_event()}
    store.close()


def test_both_are_recorded_together_once_in_a_second(store: Store, tmp_path: Path) -> None:
    reporting = Reporting(store, tmp_path / "state")
    settings = EventSettings(file=str(tmp_path / "events.jsonl"))
    reporting.step(1.0, settings)
    assert store.metric_totals() is not None, "the first at once"
    version = store._db.total_changes
    happen(store, "a")
    reporting.step(1.0, settings)
    assert store._db.total_changes == version + 1, "only the event itself"
    reporting.close()
    totals = store.metric_totals()
    assert totals is not None
    assert (sum(totals.cycles.counts), store.event_positions()) == (2, {"file": 1})


def test_an_event_of_an_arrays_waiting_tasks_has_their_name(store: Store) -> None:
    store.put_jobs([restricted_row(builders.job("a", JobState.PENDING, array_id="a", attempt=0), ((0, 9),))])
    store.append([Event(time=T, kind="submitted", job_id="a", user="ada", data={"tasks": "0-9"})])
    (line,) = store.event_lines(0, 9)
    assert (line.job, line.name, line.partition) == ("a", "j", "p")
