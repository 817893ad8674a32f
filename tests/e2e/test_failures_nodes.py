"""Nodes that freeze, fall silent, reboot or change their keys: the others go on, and no job is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.model.jobs import JobState
from tests.e2e.conftest import IMAGE, Cluster
from tests.e2e.failing import Traces
from tests.testbed import wait_until

pytestmark = pytest.mark.impatient

PATIENT = {"node_fail_after": "10m"}


@pytest.fixture
def patient(stopped: Cluster) -> Cluster:
    """A cluster that does not give up a silent node's jobs within a test."""
    stopped.write_inventory(PATIENT)
    stopped.start_controller()
    return stopped


def placed(cluster: Cluster, job: str) -> str:
    found = cluster.job(job)
    assert found is not None
    assert found.allocation is not None
    return found.allocation.parts[0].node


def reason(cluster: Cluster, node: str) -> str:
    return str(cluster.nodes()[node]["reason"])


def partner(node: str) -> str:
    """The other node of its partition."""
    return {"dgx001": "dgx003", "dgx003": "dgx001", "dgx002": "dgx004", "dgx004": "dgx002"}[node]


@pytest.mark.processes
def test_a_frozen_node_holds_up_no_other_and_keeps_its_job(patient: Cluster) -> None:
    traces = Traces(patient)
    job = traces.until("go", "--nodelist", "dgx001", "--gpus", "2")
    patient.wait_state(job, "RUNNING")
    frozen = patient.node("dgx001")
    frozen.freeze()
    # While it hangs: a job on another node starts and ends, long before anything about the frozen one times out.
    others = [traces.submit("true", "--nodelist", "dgx003"), traces.submit("true", "-p", "V100", "-N", "2")]
    for other in others:
        assert patient.wait_state(other, timeout=20).state == JobState.COMPLETED
    patient.wait_node("dgx001", "DOWN")
    assert "the node may be frozen" in reason(patient, "dgx001")
    assert patient.state_of(job) == "RUNNING", "not given up yet"
    traces.let_go("go")
    frozen.thaw()
    patient.wait_node("dgx001", "IDLE", "MIXED")
    ended = patient.wait_state(job)
    assert (ended.state, ended.attempt) == (JobState.COMPLETED, 1)
    assert set(traces.counted().values()) == {1}
    patient.wait_clean()


def test_beyond_node_fail_after_jobs_go_elsewhere_and_old_attempts_are_fenced(cluster: Cluster) -> None:
    traces = Traces(cluster)
    job = traces.until("go", "--gpus", "2")
    gang = traces.until("go", "-p", "V100", "-N", "2", "--gpus", "4")
    first = cluster.wait_state(job, "RUNNING")
    cluster.wait_state(gang, "RUNNING")
    old = placed(cluster, job)
    for name in (old, "dgx004"):
        cluster.node(name).freeze()
    waiting = wait_until(lambda: (found := cluster.job(job)) and found.state == "PENDING" and found, 30, "the requeue")
    wait_until(lambda: cluster.state_of(gang) == "PENDING", 30, "the gang's requeue")
    dgx002 = cluster.node("dgx002").run(["podman", "ps", "-q"]).stdout
    assert dgx002 == "", "the gang's living rank ended too"
    cluster.node("dgx004").thaw()
    assert waiting
    assert f"node {old} is down" in waiting.message
    cluster.write_inventory({"tick": "1s"})  # a reload in the middle changes nothing
    again = cluster.wait_state(job, "RUNNING")
    assert (again.attempt, placed(cluster, job)) == (first.attempt + 1, partner(old))
    assert [line[2:] for line in traces.starts(job)] == [["1", old], ["2", partner(old)]]
    cluster.node(old).thaw()
    wait_until(lambda: cluster.wait_state(gang, "RUNNING", timeout=40).attempt == 2)
    both = sorted([partner(old), "dgx002", "dgx004"])
    wait_until(lambda: sorted(n for n, _ in cluster.containers(running=False)) == both, 30, "the fences")
    fences = [e for e in cluster.events(job) if e.kind == "fenced"]
    assert [(e.node, e.data["attempt"]) for e in fences] == [(old, 1)]
    assert cluster.state_of(job) == "RUNNING"
    traces.let_go("go")
    assert cluster.wait_state(job).state == JobState.COMPLETED
    assert cluster.wait_state(gang).state == JobState.COMPLETED
    assert (len(traces.starts(job)), len(traces.starts(gang))) == (2, 4)
    cluster.wait_clean()


@pytest.mark.parametrize("fault", ["link", "sshd"])
def test_cut_off_and_back(patient: Cluster, fault: str) -> None:
    traces = Traces(patient)
    ends_meanwhile = traces.until("first", "--nodelist", "dgx002", "-p", "V100")
    goes_on = traces.until("second", "--nodelist", "dgx002", "-p", "V100")
    for job in (ends_meanwhile, goes_on):
        patient.wait_state(job, "RUNNING")
    node = patient.node("dgx002")
    node.cut() if fault == "link" else node.stop_sshd(sessions=True)
    patient.wait_node("dgx002", "DOWN")
    expected = "no answer" if fault == "link" else "nothing is listening"
    assert expected in reason(patient, "dgx002")
    traces.let_go("first")  # ends on a node that nobody can ask
    wait_until(lambda: len([n for n, _ in patient.containers() if n == "dgx002"]) == 1, what="the first job's end")
    node.join() if fault == "link" else node.start_sshd()
    ended = patient.wait_state(ends_meanwhile)
    assert (ended.state, ended.attempt) == (JobState.COMPLETED, 1)
    assert patient.state_of(goes_on) == "RUNNING"
    patient.wait_node("dgx002", "MIXED")
    traces.let_go("second")
    assert patient.wait_state(goes_on).state == JobState.COMPLETED
    assert len(traces.lines) == 2


@pytest.mark.one_partition
def test_a_hung_runtime_takes_its_node_down_and_nothing_else(patient: Cluster) -> None:
    patient.write_inventory({**PATIENT, "probe_timeout": "4s"})
    traces = Traces(patient)
    job = traces.until("go", "--nodelist", "dgx001")
    patient.wait_state(job, "RUNNING")
    node = patient.node("dgx001")
    node.hang_runtime("podman")
    patient.wait_node("dgx001", "DOWN")
    wait_until(lambda: "podman did not answer within 3 s" in reason(patient, "dgx001"), what="the reason")
    other = traces.submit("true")
    assert patient.wait_state(other).state == JobState.COMPLETED
    assert traces.starts(other)[0][3] == "dgx003"
    traces.let_go("go")
    node.unhang_runtime("podman")
    assert patient.wait_state(job).state == JobState.COMPLETED
    patient.wait_node("dgx001", "IDLE")
    assert set(traces.counted().values()) == {1}


def test_a_reboot_ends_the_attempt_and_the_job_is_tried_elsewhere(patient: Cluster) -> None:
    traces = Traces(patient)
    job = traces.until("go")
    once = traces.until("go", "--no-requeue", "--nodelist", "dgx002", "-p", "V100")
    for each in (job, once):
        patient.wait_state(each, "RUNNING")
    old = placed(patient, job)
    patient.node(old).reboot()
    patient.node("dgx002").reboot()
    failed = patient.wait_state(once)
    assert (failed.state, failed.reason) == (JobState.NODE_FAIL, "NodeFail")
    assert "dgx002 vanished: the node was rebooted" in failed.message
    wait_until(lambda: len(traces.starts(job)) == 2, 40, "the second attempt")
    assert [line[2:] for line in traces.starts(job)] == [["1", old], ["2", partner(old)]]
    story = [e.data.get("message", "") for e in patient.events(job)]
    assert any("the node was rebooted" in said for said in story), story
    traces.let_go("go")
    assert patient.wait_state(job).state == JobState.COMPLETED
    assert len(traces.starts(once)) == 1
    patient.wait_clean()


@pytest.mark.one_partition
@pytest.mark.processes
def test_when_retries_are_used_up_it_is_a_node_failure(stopped: Cluster) -> None:
    stopped.write_inventory({"max_retries": 0})
    stopped.start_controller()
    job = stopped.sh("sleep 100", "--gpus", "1")
    stopped.wait_state(job, "RUNNING")
    old = placed(stopped, job)
    stopped.node(old).cut()
    ended = stopped.wait_state(job)
    assert (ended.state, ended.reason) == (JobState.NODE_FAIL, "NodeFail")
    assert ended.message == f"node {old} is down"
    assert stopped.cli("wait", job, check=False).returncode != 0


@pytest.mark.one_partition
@pytest.mark.processes
def test_cancelled_while_its_node_is_silent(patient: Cluster) -> None:
    traces = Traces(patient)
    job = traces.until("never", "--nodelist", "dgx001")
    patient.wait_state(job, "RUNNING")
    patient.node("dgx001").freeze()
    patient.wait_node("dgx001", "DOWN")
    patient.cli("cancel", job)
    patient.wait_state(job, "COMPLETING")
    patient.node("dgx001").thaw()
    assert patient.wait_state(job).state == JobState.CANCELLED
    patient.wait_clean()


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_changed_host_key_is_refused_loudly(patient: Cluster) -> None:
    node = patient.node("dgx003")
    node.stop_sshd(sessions=True)
    node.new_host_key()
    patient.wait_node("dgx003", "DOWN")
    said = reason(patient, "dgx003")
    assert "host key" in said.lower()
    assert "chang" in said.lower()
    job = patient.submit("--gpus", "1")
    assert patient.wait_state(job).state == JobState.COMPLETED
    events = patient.events(job)
    assert next(e for e in events if e.kind == "starting").data["nodes"].keys() == {"dgx001"}
    checked = patient.cli("check", check=False, timeout=300)
    assert checked.returncode == 1
    assert "dgx003" in checked.stdout + checked.stderr


@pytest.mark.processes
def test_an_unknown_host_key_is_refused_with_its_fingerprint(stopped: Cluster, tmp_path: Path) -> None:
    known = [
        line for line in stopped.testbed.known_hosts.read_text().splitlines() if not line.startswith("dgx004")
    ]  # fmt: skip
    partial = tmp_path / "known_hosts"
    partial.write_text("\n".join(known) + "\n")
    stopped.write_inventory({"known_hosts": str(partial)})
    stopped.start_controller(nodes=False)
    stopped.wait_node("dgx004", "DOWN")
    said = reason(stopped, "dgx004")
    assert "SHA256:" in said
    assert str(partial) in said or "known_hosts" in said
    partial.write_text(stopped.testbed.known_hosts.read_text())  # accepted: it comes up by itself
    stopped.wait_node("dgx004", "IDLE")


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_node_that_vanishes_from_the_inventory_keeps_its_job_to_the_end(stopped: Cluster) -> None:
    """Longer than node_fail_after, and past a controller that starts beside a garbled file."""
    cluster = stopped
    cluster.settings = {**cluster.settings, "probe_timeout": "60s", "connect_timeout": "30s"}
    cluster.write_inventory()
    cluster.start_controller()
    traces = Traces(cluster)
    job = traces.until("go", "--gpus", "1")
    cluster.wait_state(job, "RUNNING")
    old = placed(cluster, job)
    cluster.write_inventory(leave_out=[old])
    cluster.wait_node(old, "DRAINING")
    assert reason(cluster, old) == "no longer in inventory.yaml; its jobs keep running"
    assert f"node {old} is no longer in inventory.yaml" in " ".join(cluster.cli("status").stdout.split())
    cluster.kill_controller()
    good = cluster.inventory.read_text()
    cluster.inventory.write_text(good[: len(good) // 2])
    cluster.start_controller(nodes=False)
    assert "kept the old inventory" in cluster.controller_log
    said = " ".join(cluster.cli("status").stdout.split())
    assert f"the controller still uses the last valid inventory: {cluster.inventory}:" in said
    checked = cluster.cli("check", check=False, timeout=300)
    assert "still uses the last valid one" in " ".join(checked.stdout.split())
    other = traces.submit("true", "--gpus", "1", env={"GPUSCHED_INVENTORY": str(saved(cluster, good))})
    assert cluster.wait_state(other).state == JobState.COMPLETED
    assert [node for *_, node in traces.starts(other)] == [partner(old)], "nothing new goes there"
    left_at = seen(cluster, old)
    wait_until(lambda: seen(cluster, old) > left_at + 8, 30, "it to be looked after for twice node_fail_after")
    assert (cluster.state_of(job), placed(cluster, job)) == ("RUNNING", old)
    cluster.inventory.write_text(good)
    wait_until(lambda: "last good" not in cluster.cli("status").stdout, 20, "the reload")
    traces.let_go("go")
    ended = cluster.wait_state(job)
    assert (ended.state, ended.attempt) == (JobState.COMPLETED, 1)
    assert set(traces.counted().values()) == {1}
    cluster.wait_clean()
    cluster.stop_controller()
    cluster.inventory.write_text("{")
    assert "kept the old inventory" in cluster.cli("tick").stderr
    cluster.inventory.unlink()
    assert "kept the old inventory" in cluster.cli("tick").stderr
    with cluster.reader() as reader:
        assert reader is not None
        kinds = [e.kind for e in reader.events()]
    assert kinds.count("inventory_refused") == 3, "once for each way in which it was not in order"
    assert "node_down" not in kinds


def seen(cluster: Cluster, node: str) -> float:
    with cluster.reader() as reader:
        assert reader is not None
        return reader.node_records()[node].last_seen or 0.0


def saved(cluster: Cluster, text: str) -> Path:
    path = cluster.folder / "good.yaml"
    path.write_text(text)
    return path


@pytest.mark.one_partition
def test_a_job_that_outlives_its_node_in_the_inventory(cluster: Cluster) -> None:
    """The node left it for good reason, and does not respond: given up like any other, and fenced when it is back."""
    traces = Traces(cluster)
    job = traces.until("go", "--gpus", "1")
    cluster.wait_state(job, "RUNNING")
    old = placed(cluster, job)
    cluster.node(old).freeze()
    cluster.write_inventory(leave_out=[old])
    wait_until(lambda: cluster.state_of(job) == "PENDING", 30, "the requeue")
    assert cluster.wait_state(job, "RUNNING").attempt == 2
    assert placed(cluster, job) == partner(old)
    cluster.node(old).thaw()
    cluster.write_inventory()  # the node comes back with the old attempt still alive on it
    wait_until(lambda: [n for n, _ in cluster.containers()] == [partner(old)], 20, "the end of the old attempt")
    traces.let_go("go")
    assert cluster.wait_state(job).state == JobState.COMPLETED
    cluster.wait_clean()


@pytest.mark.one_partition
def test_foreign_containers_are_left_alone_and_strays_of_ours_are_reaped(cluster: Cluster) -> None:
    node = cluster.node("dgx001")
    with cluster.reader() as reader:
        assert reader is not None
        ours = reader.meta("cluster_id")
    sleep = [IMAGE, "sleep", "1000"]
    name = "gpusched-0123456789a-1-0"
    label = ["--label", f"gpusched.name={name}", "--label", "gpusched.node=dgx001"]
    node.run(["podman", "run", "-d", "--name", "theirs", *sleep])
    other = "gpusched-0123456789a-2-0"
    node.run(["podman", "run", "-d", "--name", other, "--label", "gpusched.cluster=another", *label, *sleep])
    node.run(["podman", "run", "-d", "--name", name, "--label", f"gpusched.cluster={ours}", *label, *sleep])
    wait_until(lambda: name not in node.run(["podman", "ps", "-a", "--format", "{{.Names}}"]).stdout, 20, "the reaper")
    left = node.run(["podman", "ps", "--format", "{{.Names}}"]).stdout.split()
    assert sorted(left) == [other, "theirs"]
    with cluster.reader() as reader:
        assert reader is not None
        assert [e.data["container"] for e in reader.events(node="dgx001") if e.kind == "reaped"][:1] == [name]
