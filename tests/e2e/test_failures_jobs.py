"""Containers that vanish, launches that hang or fail, disks that are full: each ends in a state with its reason."""

from __future__ import annotations

import signal
import time

import pytest

from gpusched.model.jobs import JobState
from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.testbed import TestNode, wait_until

pytestmark = pytest.mark.one_partition

ONCE = ("--no-requeue", "--nodelist", "dgx001")
# The engine takes for ever to create, as one that pulls a huge image does.
SLOW_PULL = '#!/bin/sh\n[ "$1" != create ] || sleep 1000\nexec /usr/bin/podman "$@"\n'


def container(cluster: Cluster, job: str) -> str:
    return next(name for _, name in cluster.containers() if f"-{job}-" in name)


def launchers(node: TestNode) -> list[int]:
    found = node.run(["pgrep", "-f", "launch launch"], check=False).stdout.split()
    return [int(pid) for pid in found]


def test_a_container_removed_by_hand(cluster: Cluster) -> None:
    job = cluster.sh("sleep 1000", "--gpus", "1", *ONCE)
    cluster.wait_state(job, "RUNNING")
    assert cluster.controller is not None
    cluster.controller.send_signal(signal.SIGSTOP)  # podman kills before it removes: a look in between finds exit 137
    try:
        cluster.node("dgx001").run(["podman", "rm", "-f", "-t", "0", container(cluster, job)])
    finally:
        cluster.controller.send_signal(signal.SIGCONT)
    ended = cluster.wait_state(job)
    assert (ended.state, ended.reason, ended.exit_code) == (JobState.NODE_FAIL, "NodeFail", None)
    assert "rank 0 on dgx001 vanished" in ended.message
    cluster.wait_clean()


def test_a_container_killed_by_hand_and_a_process_that_kills_itself(cluster: Cluster) -> None:
    job = cluster.sh("echo here; sleep 1000", "--gpus", "1", *ONCE)
    other = cluster.sh("kill -TERM $$", "--gpus", "1", *ONCE)
    cluster.wait_state(job, "RUNNING")
    cluster.node("dgx001").run(["podman", "kill", container(cluster, job)])
    assert cluster.wait_state(job).exit_code == 137
    ended = cluster.wait_state(other)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 143)
    cluster.wait_clean()
    assert cluster.logs(job) == "here\n"


def test_a_launcher_killed_on_its_node_and_a_cancel_while_it_pulls(cluster: Cluster) -> None:
    node = cluster.node("dgx001")
    node.install_script("podman", SLOW_PULL)
    killed = cluster.sh("true", "--gpus", "1", *ONCE)
    wait_until(lambda: len(launchers(node)) == 1, what="the launcher")
    pulling = cluster.sh("true", "--gpus", "1", *ONCE)
    wait_until(lambda: len(launchers(node)) == 2, what="two launchers")
    meanwhile = cluster.sh("true", "--gpus", "1", "--nodelist", "dgx003")
    assert cluster.wait_state(meanwhile).state == JobState.COMPLETED, "a pull holds up nobody"
    assert {cluster.state_of(killed), cluster.state_of(pulling)} == {"STARTING"}
    cluster.kill_controller()  # the pull goes on without it, and is not begun a second time
    cluster.start_controller()
    assert len(launchers(node)) == 2
    before = time.monotonic()
    cluster.cli("cancel", pulling)
    ended = cluster.wait_state(pulling)
    assert (ended.state, ended.attempt, ended.start_time) == (JobState.CANCELLED, 1, None)
    assert time.monotonic() - before < 900, "nobody waits for the pull"
    assert len(launchers(node)) == 1
    node.run(["pkill", "-KILL", "-f", "launch launch|podman create|sleep 1000"])
    ended = cluster.wait_state(killed)
    assert (ended.state, ended.reason) == (JobState.NODE_FAIL, "NodeFail")
    assert "the launcher died" in ended.message
    cluster.wait_clean()


def test_an_output_file_that_cannot_be_written(cluster: Cluster) -> None:
    job = cluster.sh("true", "--gpus", "1", "-o", "/proc/nowhere/%j.out")
    ended = cluster.wait_state(job)
    assert (ended.state, ended.reason) == (JobState.FAILED, "LaunchFailed")
    assert f"cannot write the output file /proc/nowhere/{job}.out" in ended.message
    cluster.wait_clean()


def test_a_disk_full_on_the_node(cluster: Cluster) -> None:
    node = cluster.node("dgx001")
    place = "/root/.local/state"
    node.run(["mkdir", "-p", place])
    node.run(["mount", "-t", "tmpfs", "-o", "size=32k,nr_inodes=8", "full", place])
    try:
        job = cluster.sh("true", "--gpus", "1", *ONCE)
        ended = cluster.wait_state(job)
        assert (ended.state, ended.reason) == (JobState.NODE_FAIL, "NodeFail")
        # Where not even the failure can be written down, the launcher is found dead.
        assert any(words in ended.message for words in ("No space left", "cannot write", "the launcher died"))
    finally:
        node.run(["umount", "-l", place])
    again = cluster.sh("true", "--gpus", "1", *ONCE)
    assert cluster.wait_state(again).state == JobState.COMPLETED


def test_an_output_larger_than_the_cap_keeps_its_beginning_and_its_end(stopped: Cluster) -> None:
    stopped.write_inventory({"logs": {"max_per_job": "1M"}})
    stopped.start_controller()
    job = stopped.sh("echo first; yes 0123456789 | head -n 300000; echo last", "--gpus", "1")
    assert stopped.wait_state(job).state == JobState.COMPLETED
    stopped.wait_clean()
    kept = stopped.logs(job)
    assert kept.startswith("first\n")
    assert kept.endswith("last\n")
    assert "bytes left out here" in kept
    assert 1024**2 <= len(kept) < 1024**2 + 200


@pytest.mark.slow
def test_an_array_of_120_tasks_with_the_controller_killed_in_between(stopped: Cluster) -> None:
    """Processes, since 120 containers would take podman a minute; every task once, none lost, none doubled."""
    process = {name: {"runtime": "process"} for name in ("dgx001", "dgx003")}
    stopped.write_inventory(nodes=process)
    stopped.start_controller()
    traces = Traces(stopped)
    line = f'echo "$GPUSCHED_JOB_ID 0 $GPUSCHED_ATTEMPT x" >>{traces.folder}/starts'
    array = stopped.sh(line, "--gpus", "0", "--cpus", "1", "--mem", "64M", "--array", "0-119")
    for target in (20, 60):
        wait_until(lambda target=target: len(traces.lines) >= target, 60, f"{target} starts")
        stopped.kill_controller()
        stopped.start_controller(nodes=False)

    def unended() -> bool:
        with stopped.reader() as reader:
            assert reader is not None
            return reader.has_unended(array)

    wait_until(lambda: not unended(), 90, "the array's end")
    with stopped.reader() as reader:
        assert reader is not None
        assert reader.counts() == {"COMPLETED": 120}
        again = [e for j in reader.jobs_of_array(array) if j.attempt > 1 for e in reader.events(job_id=j.id)]
    assert not again
    assert len(traces.lines) == len(set(map(tuple, traces.lines))) == 120
    assert {line[2] for line in traces.lines} == {"1"}
