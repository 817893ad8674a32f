"""``gpusched logs`` and ``exec``: collected files, a real attempt on this machine, and what cannot be had."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.client.attach import ssh_argv
from gpusched.model.jobs import Allocation, Elastic, Ending, JobRecord, JobState, Resizes
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.queue.store import RankRecord
from tests.cli.nodes.attempts import ID, Attempt
from tests.cli.nodes.conftest import Cluster, job, spec
from tests.testbed.waiting import wait_until


def ended(cluster: Cluster, state: JobState = JobState.COMPLETED, **fields: Any) -> JobRecord:
    made = job(ID, state, {"here": (0,)}, spec=spec("x", 1, 1, "local"), end_time=time.time(), **fields)
    cluster.store.put_jobs([made])
    return made


def keep(cluster: Cluster, text: bytes, attempt: int = 1, rank: int = 0, job_id: str = ID) -> Path:
    path = cluster.state / "logs" / job_id / f"{attempt}.{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def test_finished_job(cluster: Cluster) -> None:
    ended(cluster)
    keep(cluster, b"one\ntwo\nthree\n")
    assert cluster.run("logs", ID).stdout == "one\ntwo\nthree\n"
    assert cluster.run("logs", "0dd", "--tail", "2").stdout == "two\nthree\n"
    assert cluster.run("logs", ID, "--tail", "0").stdout == ""


def test_bytes_pass_unchanged(cluster: Cluster) -> None:
    ended(cluster)
    content = bytes(range(256)) * 3000
    keep(cluster, content)
    done = subprocess.run(
        [sys.executable, "-m", "gpusched.cli.main", "logs", ID], env=cluster.env(), capture_output=True, check=True
    )
    assert done.stdout == content


def test_rotated_log(cluster: Cluster) -> None:
    ended(cluster)
    path = keep(cluster, b"")
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(b"packed\n"))
    assert cluster.run("logs", ID).stdout == "packed\n"


def test_attempts(cluster: Cluster) -> None:
    ended(cluster, attempt=2)
    keep(cluster, b"first\n", 1)
    keep(cluster, b"second\n", 2)
    assert cluster.run("logs", ID).stdout == "second\n"
    assert cluster.run("logs", ID, "--attempt", "1").stdout == "first\n"
    assert "has attempts 1 to 2" in cluster.run("logs", ID, "--attempt", "3", code=2).stderr


def test_lines_of_a_gang_are_prefixed_with_their_rank(cluster: Cluster) -> None:
    cluster.store.put_jobs([job(ID, JobState.COMPLETED, {"dgx1": (0,), "dgx2": (0,)}, end_time=time.time())])
    keep(cluster, b"a\nb\n", rank=0)
    keep(cluster, b"c\nd", rank=1)
    assert cluster.run("logs", ID).stdout == "[0] a\n[0] b\n[1] c\n[1] d\n"
    assert cluster.run("logs", ID, "--rank", "1").stdout == "c\nd"
    assert "valid ranks: 0 to 1" in cluster.run("logs", ID, "--rank", "2", code=2).stderr


def test_ranks_that_joined_a_hot_job_later_or_have_left_it(cluster: Cluster) -> None:
    hot = job(ID, JobState.COMPLETED, {"dgx1": (0,), "dgx2": (0,)}, end_time=time.time())
    assert hot.allocation is not None
    first, last = hot.allocation.parts
    elastic = Elastic(sizes=(1, 2, 3), base_gpus=1, base_cores=1, base_memory_mib=1, rank_gpus=1)
    hot = msgspec.structs.replace(
        hot, spec=msgspec.structs.replace(hot.spec, elastic=elastic), resizes=Resizes(count=3, next_rank=4),
        allocation=Allocation(ID, (first, msgspec.structs.replace(last, rank=2))),
    )  # fmt: skip
    cluster.store.put_jobs([hot])
    for rank in (0, 1, 2):
        keep(cluster, f"{rank}\n".encode(), rank=rank)
    assert cluster.run("logs", ID).stdout == "[0] 0\n[2] 2\n"
    assert cluster.run("logs", ID, "--rank", "2").stdout == "2\n"
    assert cluster.run("logs", ID, "--rank", "1").stdout == "1\n", "it has left"
    assert "no output" in cluster.run("logs", ID, "--rank", "3", code=1).stderr
    assert "valid ranks: 0 to 3" in cluster.run("logs", ID, "--rank", "4", code=2).stderr


@pytest.mark.parametrize(
    ("state", "code", "exits"),
    [
        (JobState.COMPLETED, 0, 0),
        (JobState.FAILED, 7, 7),
        (JobState.FAILED, None, 1),
        (JobState.CANCELLED, None, 143),
        (JobState.TIMEOUT, 0, 124),
    ],
)
def test_following_an_ended_job_exits_with_its_code(cluster: Cluster, state: JobState, code: int, exits: int) -> None:
    ended(cluster, state, exit_code=code)
    keep(cluster, b"out\n")
    assert cluster.run("logs", "-f", ID, code=exits).stdout == "out\n"


def test_pending_job_says_why_there_is_nothing(cluster: Cluster) -> None:
    cluster.store.put_jobs(
        [job(ID, JobState.PENDING, {}, start_time=None, attempt=0, reason="Resources", message="2 of 8 GPUs are free")]
    )
    done = cluster.run("logs", ID, code=1)
    assert "has not started yet" in done.stderr
    assert "Resources: 2 of 8 GPUs are free" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_such_job_and_arrays(cluster: Cluster) -> None:
    assert "there is no job" in cluster.run("logs", "zzz", code=2).stderr
    tasks = [ended(cluster, array_id=ID, array_index=i) for i in (0, 1)]
    cluster.store.put_jobs([msgspec.structs.replace(t, id=f"{ID}_{i}") for i, t in enumerate(tasks)])
    cluster.store._db.execute("DELETE FROM jobs WHERE id = ?", (ID,))
    assert f"name one, such as {ID}_0" in cluster.run("logs", ID, code=2).stderr


def test_log_that_is_gone(cluster: Cluster) -> None:
    ended(cluster)
    done = cluster.run("logs", ID, code=1)
    assert "no output (it never ran" in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_file_of_an_ended_job(cluster: Cluster, tmp_path: Path) -> None:
    made = ended(cluster)
    cluster.store.put_jobs([msgspec.structs.replace(
        made, spec=msgspec.structs.replace(made.spec, output=str(tmp_path / "o-%j.txt")))])  # fmt: skip
    assert f"went to {tmp_path}/o-{ID}.txt on here" in cluster.run("logs", ID, code=1).stderr
    (tmp_path / f"o-{ID}.txt").write_text("shared\n")
    assert cluster.run("logs", ID).stdout == "shared\n"


def test_unreachable_node_is_one_line(cluster: Cluster) -> None:
    cluster.store.put_jobs([job(ID, JobState.RUNNING, {"dgx1": (0,)})])
    cluster.store.put_ranks([RankRecord(job_id=ID, attempt=1, rank=0, node="dgx1", runtime="podman")])
    done = cluster.run("logs", ID, code=1)
    assert "dgx1" in done.stderr
    assert done.stderr.count("\n") == 1


# -- a real attempt, on this machine, without containers --------------------------------------------------------------


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Attempt]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    made: list[Attempt] = []

    def launch(command: str) -> Attempt:
        made.append(Attempt(cluster, command))
        return made[-1]

    yield launch
    for attempt in made:
        attempt.remove()


@contextlib.contextmanager
def follow(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-u", "-m", "gpusched.cli.main", "logs", "-f", ID]
    with subprocess.Popen(argv, env=cluster.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        watchdog = threading.Timer(300, process.kill)  # so that a missing line fails the test instead of hanging it
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def test_running_job_is_read_from_its_node(cluster: Cluster, start: Callable[[str], Attempt]) -> None:
    start("echo hello; sleep 6000")
    assert wait_until(lambda: cluster.run("logs", ID).stdout, what="its output") == "hello\n"


def test_following_shows_output_as_it_comes_and_ends_with_the_job(
    cluster: Cluster, tmp_path: Path, start: Callable[[str], Attempt]
) -> None:
    go = tmp_path / "go"
    attempt = start(f"echo first; while [ ! -e {go} ]; do sleep 0.1; done; echo last; exit 3")
    with follow(cluster) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        go.touch()
        assert process.stdout.readline() == b"last\n"
        assert process.poll() is None
        keep(cluster, b"first\nlast\n")
        attempt.end(JobState.FAILED, 3)
        assert process.wait(300) == 3
        assert process.stdout.read() == b""


def test_following_waits_for_the_start(cluster: Cluster, start: Callable[[str], Attempt]) -> None:
    waiting = job(ID, JobState.PENDING, {}, start_time=None, attempt=0, spec=spec("x", 1, 1, "local"))
    cluster.store.put_jobs([waiting])
    with follow(cluster) as process:
        assert process.stderr is not None
        assert b"PENDING" in process.stderr.readline()
        attempt = start("echo now")
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        attempt.end(JobState.COMPLETED, 0)
        assert process.wait(300) == 0


def has_open(pid: int, folder: Path) -> bool:
    """Whether a process has a file below ``folder`` open; one that it closes just then does not count."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(folder) in os.readlink(descriptor):
                return True
    return False


def test_following_goes_on_with_the_next_attempt(cluster: Cluster) -> None:
    ending = Ending(outcome=JobState.PENDING, reason="Requeue", kill_at=0.0)
    made = job(ID, JobState.COMPLETING, {"here": (0,)}, spec=spec("x", 1, 1, "local"), ending=ending)
    cluster.store.put_jobs([made])
    with follow(cluster) as process:
        wait_until(lambda: has_open(process.pid, cluster.state), 30, "the follower's first look")
        time.sleep(0.5)
        keep(cluster, b"one\n", 1)
        cluster.store.put_jobs([msgspec.structs.replace(made, state=JobState.PENDING, allocation=None, ending=None)])
        assert process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        keep(cluster, b"two\n", 2)
        cluster.store.put_jobs(
            [msgspec.structs.replace(made, state=JobState.COMPLETED, attempt=2, exit_code=0, end_time=time.time())]
        )
        assert process.communicate(timeout=300)[0] == b"two\n"
        assert process.returncode == 0


def test_exec(cluster: Cluster, start: Callable[[str], Attempt]) -> None:
    start("sleep 6000")
    hostile = "a b'c\"d$(touch x)\nü"
    wait_until(lambda: not cluster.run("exec", ID, "--", "true", code=None).returncode, what="it to run")
    assert cluster.run("exec", ID, "--", "printf", "%s|", hostile, "-l").stdout == f"{hostile}|-l|"
    assert cluster.run("exec", ID, "--", "sh", "-c", "echo $COLOUR; exit 9", code=9).stdout == "blue\n"
    piped = cluster.run("exec", "-i", ID, "--", "cat", input="through")
    assert piped.stdout == "through"


def test_exec_needs_a_running_job_and_a_terminal_for_t(cluster: Cluster) -> None:
    ended(cluster)
    assert "is COMPLETED" in cluster.run("exec", ID, "--", "ls", code=1).stderr
    cluster.store.put_jobs([job(ID, JobState.RUNNING, {"dgx1": (0,)})])
    assert "has no rank 4" in cluster.run("exec", ID, "--rank", "4", "--", "ls", code=2).stderr
    assert "-t needs a terminal" in cluster.run("exec", "-it", ID, "--", "ls", code=2).stderr


def test_ssh_command_line_is_quoted_once_and_checks_host_keys() -> None:
    node = Node(
        name="dgx1", partition="p", address="10.0.0.1", user="op", port=2222, key="~/k", gpus=1, cores=1, memory_mib=1,
        runtime=RuntimeName.PODMAN,
    )  # fmt: skip
    argv = ssh_argv(node, Settings(known_hosts="/k h", ssh_config="/c"), ("echo", "a b", "$(x)"), True)
    assert argv[0] == "ssh"
    assert "StrictHostKeyChecking=yes" in argv
    assert 'UserKnownHostsFile="/k h"' in argv
    assert argv[-4:] == ("-t", "--", "10.0.0.1", "echo 'a b' '$(x)'")
    for pair in (("-l", "op"), ("-p", "2222"), ("-i", os.path.expanduser("~/k")), ("-F", "/c")):
        assert argv[argv.index(pair[0]) + 1] == pair[1]
