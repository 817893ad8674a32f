"""Nodes whose engine starts nothing, and engines that lose sight of what they started."""

from __future__ import annotations

from functools import partial

import pytest

from gpusched.model.jobs import JobState
from tests.doctor.cdi import BREAK_CDI, MEND_CDI, MISSING
from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.testbed import TestNode, wait_until


def has_failed(cluster: Cluster, job: str) -> bool:
    return any(e.kind == "requeued" for e in cluster.events(job))


@pytest.mark.one_partition
def test_a_node_that_starts_nothing_does_not_eat_the_queue(cluster: Cluster) -> None:
    """A file of the driver is missing, as after an upgrade. All jobs are of one user and one image."""
    broken = cluster.node("dgx001")
    cluster.cli("drain", "dgx003", "--reason", "later")
    cluster.wait_node("dgx003", "DRAINED")

    broken.run(["sh", "-c", BREAK_CDI])
    try:
        jobs = [cluster.submit("--gpus", "2") for _ in range(3)]
        wait_until(lambda: all(has_failed(cluster, job) for job in jobs), 60, "three failed launches")
        assert cluster.nodes()["dgx001"]["state"] in ("IDLE", "MIXED"), "it may be the one image"
        cluster.cli("resume", "dgx003")
        for job in jobs:
            assert cluster.wait_state(job, timeout=90).state == JobState.COMPLETED, "they run elsewhere"
        cluster.wait_node("dgx001", "DRAINED")
        reason = str(cluster.nodes()["dgx001"]["reason"])
        assert "suspended: 3 launches of 3 jobs failed here" in reason
        assert "gpusched resume dgx001" in reason
        listed = cluster.cli("status")
        assert "nodes suspended after failed launches: dgx001" in listed.stdout + listed.stderr
        checked = {(f["check"], f["status"]): f for f in cluster.json("check", "dgx001", check=False)}
        assert MISSING in checked["container", "fail"]["message"]
        assert "resume dgx001" in checked["service", "fail"]["hint"]
    finally:
        broken.run(["sh", "-c", MEND_CDI])
    cluster.cli("resume", "dgx001")
    cluster.wait_node("dgx001", "IDLE")
    again = cluster.submit("--gpus", "2", "--nodelist", "dgx001")
    assert cluster.wait_state(again).state == JobState.COMPLETED


@pytest.mark.processes
@pytest.mark.one_partition
def test_one_users_folder_that_only_one_node_has_suspends_no_other(cluster: Cluster) -> None:
    """Their jobs run where it is; the other node goes on serving everybody."""
    here, bare = cluster.node("dgx001"), cluster.node("dgx003")
    here.run(["mkdir", "/root/only-here"])
    cluster.cli("drain", here.name, "--reason", "so that all fail on the other one first")
    jobs = [cluster.submit("--cpus", "1", "-o", "/root/only-here/%j.out") for _ in range(5)]
    for job in jobs:
        wait_until(partial(has_failed, cluster, job), 90, "a failed launch")
    cluster.cli("resume", here.name)
    for job in jobs:
        assert cluster.wait_state(job, timeout=90).state == JobState.COMPLETED
    with cluster.reader() as reader:
        assert reader is not None
        record = reader.node_records()[bare.name]
    assert record.drain_reason is None
    assert [f.own for f in record.failed_launches] == [True] * 5
    assert (
        cluster.wait_state(cluster.submit("--cpus", "1", "--nodelist", bare.name), timeout=90).state
        == JobState.COMPLETED
    )


def kill_conmon(node: TestNode, job: str, *, init: bool = False) -> None:
    """``kill -9`` of what waits for a container's end, and of its first process."""
    node.run(
        [
            "sh",
            "-c",
            f"""name=$(podman ps --format '{{{{.Names}}}}' | grep -e '-{job}-')
        init=$(podman inspect --format '{{{{.State.Pid}}}}' "$name")
        kill -KILL $(podman inspect --format '{{{{.State.ConmonPid}}}}' "$name") {"$init" if init else ""}""",
        ]
    )


def test_a_killed_conmon_ends_in_a_retry_and_frees_its_gpus(cluster: Cluster) -> None:
    traces = Traces(cluster)
    silent = "trap '' PIPE; until [ -e /share/go ]; do sleep 0.1; done"
    job = traces.submit(silent, "--nodelist", "dgx001")
    once = traces.submit(silent, "--no-requeue", "--nodelist", "dgx003")
    gang = traces.submit(silent, "-p", "V100", "-N", "2", "--gpus", "8")
    for each in (job, once, gang):
        cluster.wait_state(each, "RUNNING")
    kill_conmon(cluster.node("dgx001"), job, init=True)
    kill_conmon(cluster.node("dgx003"), once)
    kill_conmon(cluster.node("dgx002"), gang)
    wait_until(lambda: len(traces.starts(job)) == 2, 60, "the second attempt")
    assert cluster.state_of(once) == "RUNNING", "its work goes on"
    cluster.cli("cancel", "--now", once, gang)
    for each in (once, gang):
        assert cluster.wait_state(each).state == JobState.CANCELLED
    lost = [e.data.get("message", "") for e in cluster.events(job)]
    assert any("its supervisor on the node (conmon) was killed" in said for said in lost), lost
    full = cluster.submit("-p", "V100", "-N", "2", "--gpus", "8")  # no GPU is left behind
    assert cluster.wait_state(full).state == JobState.COMPLETED
    traces.let_go("go")
    assert cluster.wait_state(job).state == JobState.COMPLETED
    assert not [e for e in cluster.events(gang) if e.kind in ("work_failed", "stuck")]
    cluster.wait_clean()
