"""The controller's own troubles: a full disk, a broken inventory, a state folder it may not write."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpusched.model.jobs import JobState
from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.testbed import wait_until

pytestmark = pytest.mark.one_partition


@pytest.fixture
def small(stopped: Cluster) -> Iterator[Cluster]:
    """A cluster whose state folder is a file system of 8 MiB."""
    stopped.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", stopped.state], check=True)
    yield stopped
    if stopped.controller is not None and stopped.controller.poll() is None:
        stopped.stop_controller()
    subprocess.run(["umount", "-l", stopped.state], check=True)


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:  # even a name may find no room any more
        for size in (65536, 1024, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass


def fill_up(path: Path) -> None:
    for number in range(3):
        fill(path.with_name(f"filler{number}"))


def test_a_full_disk_loses_nothing_and_is_reported(small: Cluster) -> None:
    small.start_controller()
    traces = Traces(small)
    running = traces.until("go")
    small.wait_state(running, "RUNNING")
    fill_up(small.state / "filler")
    refused = small.cli("submit", "-p", "A100", "--gpus", "1", "--", "true", check=False)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "No space left on device" in refused.stderr
    traces.let_go("go")
    wait_until(lambda: small.containers() == [], 20, "the job's end")
    wait_until(lambda: "could not be recorded" in small.controller_log, 20, "a word about it")
    assert small.controller is not None
    assert small.controller.poll() is None, small.controller_log
    for filler in small.state.glob("filler*"):
        filler.unlink()
    assert small.wait_state(running).state == JobState.COMPLETED
    after = traces.submit("true")
    assert small.wait_state(after).state == JobState.COMPLETED
    assert set(traces.counted().values()) == {1}
    small.wait_clean()
    assert len([line for line in small.controller_log.splitlines() if "could not be recorded" in line]) < 10


def shrink(folder: Path) -> None:
    """Leave no block of a tmpfs free."""
    used = os.statvfs(folder)
    subprocess.run(
        ["mount", "-o", f"remount,size={(used.f_blocks - used.f_bfree) * used.f_frsize}", folder], check=True
    )


def test_commands_confirmed_before_the_disk_was_full_are_all_done_once(small: Cluster) -> None:
    """The transaction's body succeeds in memory, and its COMMIT finds no room."""
    small.start_controller()
    held = small.submit("--hold", "--gpus", "1")
    wait_until(lambda: small.state_of(held) == "PENDING", 20, "a job to give orders for")
    assert small.controller is not None
    small.controller.send_signal(signal.SIGSTOP)
    jobs = [small.submit("--hold", "--gpus", "1") for _ in range(3)]
    small.cli("cancel", jobs[0])
    small.cli("priority", held, "-1")
    small.cli("drain", "dgx003", "--reason", "look")
    confirmed = set(os.listdir(small.state / "inbox" / "new"))
    assert len(confirmed) == 6
    shrink(small.state)
    small.controller.send_signal(signal.SIGCONT)
    wait_until(lambda: "could not be recorded" in small.controller_log, 60, "a failed cycle")
    assert set(os.listdir(small.state / "inbox" / "new")) == confirmed, "not one of them is in the store"
    subprocess.run(["mount", "-o", "remount,size=8m", small.state], check=True)
    wait_until(lambda: not os.listdir(small.state / "inbox" / "new"), 90, "the commands to be taken")
    found = [small.job(job) for job in [*jobs, held]]
    assert [job and job.state for job in found] == ["CANCELLED", "PENDING", "PENDING", "PENDING"]
    assert found[3] is not None
    assert found[3].priority == -1
    with small.reader() as reader:
        assert reader is not None
        assert reader.node_records()["dgx003"].drain_reason == "look"
    small.cli("resume", "dgx003")
    wait_until(lambda: not os.listdir(small.state / "inbox" / "new"), 60, "the last command")
    with small.reader() as reader:
        assert reader is not None
        assert sum(e.kind == "submitted" for e in reader.events()) == 4


def test_a_read_only_state_folder(small: Cluster) -> None:
    junk = small.state / "logs" / "job" / "9.9.log"
    junk.parent.mkdir(parents=True)
    junk.symlink_to("nowhere")  # as a user could, when the folder was his; no tick failed by it
    small.cli("tick")
    subprocess.run(["mount", "-o", "remount,ro", small.state], check=True)
    for command in (["tick"], ["controller"], ["submit", "-p", "A100", "--gpus", "1", "--", "true"]):
        done = small.cli(*command, check=False)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done
        assert "ead-only" in done.stderr or "readonly" in done.stderr
        assert "internal error" not in done.stderr
    assert small.json("status") == []
    assert small.cli("nodes").returncode == 0
    subprocess.run(["mount", "-o", "remount,rw", small.state], check=True)


def test_a_state_folder_that_is_a_file(stopped: Cluster) -> None:
    stopped.state.write_text("")
    for command in ("tick", "controller", "status"):
        done = stopped.cli(command, check=False)
        assert done.returncode in (1, 2), done
        assert done.stderr.count("\n") == 1
        assert "internal error" not in done.stderr


def test_a_broken_inventory_is_refused_and_the_old_one_stays_in_force(cluster: Cluster) -> None:
    traces = Traces(cluster)
    running = traces.until("go")
    cluster.wait_state(running, "RUNNING")
    good = cluster.inventory.read_text()
    for number, broken in enumerate(("{", good.replace('"gpus": 8', '"gpus": "many"', 1), ""), 1):
        cluster.inventory.write_text(broken)
        wait_until(lambda number=number: cluster.controller_log.count("kept the old inventory") == number, 10, "a word")
    assert f"{cluster.inventory}:" in cluster.controller_log
    with cluster.reader() as reader:
        assert reader is not None
        assert [e.kind for e in reader.events()].count("inventory_refused") == 3
    assert cluster.state_of(running) == "RUNNING"
    cluster.inventory.write_text(good)
    wait_until(lambda: "reloaded" in cluster.controller_log, 10, "the reload")
    traces.let_go("go")
    assert cluster.wait_state(running).state == JobState.COMPLETED
    assert cluster.wait_state(traces.submit("true")).state == JobState.COMPLETED


def test_garbage_in_the_inbox_of_a_running_controller(cluster: Cluster) -> None:
    new = cluster.state / "inbox" / "new"
    (new / "bad.submit").write_bytes(b"\xff\xfe")
    (new / "folder.cancel").mkdir()
    (new / "link.cancel").symlink_to("/etc/passwd")
    job = cluster.submit("--gpus", "1")
    assert cluster.wait_state(job).state == JobState.COMPLETED
    wait_until(lambda: list(new.iterdir()) == [], what="the inbox to be empty")
    refused = sorted(p.name for p in (cluster.state / "inbox" / "refused").iterdir())
    assert refused == ["bad.submit"], "files are kept, for a person to look at"


LOOKS = ("status", "nodes", "why {job}", "show {job}", "wait {job}", "cancel {job}", "quota", "power", "logs {job}")


def test_a_damaged_row_is_set_aside_and_stops_no_other_jobs(cluster: Cluster) -> None:
    traces = Traces(cluster)
    running = traces.until("go")
    cluster.wait_state(running, "RUNNING")
    damaged = cluster.submit("--hold", "--gpus", "1")
    wait_until(lambda: cluster.state_of(damaged), 20, "a job to damage")
    assert cluster.controller is not None
    with contextlib.closing(sqlite3.connect(cluster.state / "gpusched.db", timeout=300)) as db, db:
        db.execute("UPDATE jobs SET data = CAST('{\"id\": ' AS BLOB) WHERE id = ?", (damaged,))
        # With the lock for writing here, the controller is not stopped in the middle of a transaction of its own.
        cluster.controller.send_signal(signal.SIGSTOP)
    for line in LOOKS:
        done = cluster.cli(*line.format(job=damaged).split(), check=False)
        assert "internal error" not in done.stderr + done.stdout, done
        if done.returncode:
            assert done.stderr.startswith(f"gpusched: error: the database is damaged: row {damaged} of jobs cannot"), (
                done
            )
            assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert cluster.cli("status", check=False).returncode == 1
    assert f"row {damaged} of jobs cannot be read" in cluster.cli("check", check=False).stdout
    cluster.controller.send_signal(signal.SIGCONT)
    wait_until(lambda: f"row {damaged} of jobs cannot be read" in cluster.controller_log, 60, "a word about it")
    wait_until(lambda: cluster.cli("status", "--all", check=False).returncode == 0, 60, "an end of it")
    found = cluster.wait_state(damaged, "FAILED")
    assert "set aside: its row" in found.message
    assert cluster.wait_state(traces.submit("true")).state == JobState.COMPLETED
    traces.let_go("go")
    assert cluster.wait_state(running).state == JobState.COMPLETED, "of another job nothing was lost"
    assert cluster.cli("status").returncode == 0
    assert set(traces.counted().values()) == {1}


def test_a_database_of_garbage_is_one_clear_line(stopped: Cluster) -> None:
    stopped.cli("tick")
    content = bytearray((stopped.state / "gpusched.db").read_bytes())
    for begin, said in ((4096, "the database is damaged"), (0, "file is not a database")):
        content[begin : begin + 30 * 4096] = b"\xa5" * len(content[begin : begin + 30 * 4096])
        (stopped.state / "gpusched.db").write_bytes(content)
        for command in ("status", "nodes", "tick", "controller"):
            done = stopped.cli(command, check=False)
            assert done.returncode == 1, done
            assert done.stderr.splitlines()[-1].endswith("see 'gpusched check'"), done
            assert said in done.stderr or "malformed" in done.stderr, done
            assert "Traceback" not in done.stderr
        assert stopped.cli("check", check=False).returncode == 1


def test_a_controller_whose_state_folder_was_replaced_takes_no_more_commands(stopped: Cluster) -> None:
    stopped.start_controller()
    first = stopped.controller
    assert first is not None
    stopped.state.rename(stopped.state.with_name("replaced"))
    assert first.wait(300) == 1
    assert "was removed or replaced while this controller used it; it stops" in stopped.controller_log
    stopped.start_controller()
    traces = Traces(stopped)
    job = traces.submit("true")
    assert stopped.wait_state(job).state == JobState.COMPLETED
    assert set(traces.counted().values()) == {1}
