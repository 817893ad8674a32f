"""A controller's machine dies with its disk: its store is rebuilt from a backup and from the nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.testbed import wait_until

pytestmark = pytest.mark.one_partition


def lose(cluster: Cluster) -> None:
    cluster.kill_controller()
    shutil.rmtree(cluster.state)


def use_energy(cluster: Cluster, job: str, joules: int) -> None:
    """Set the counters of the job's GPUs to so much more than they began with."""
    found = cluster.job(job)
    assert found is not None
    assert found.allocation is not None
    for part in found.allocation.parts:
        counters = {f"gpu{gpu}.energy_mj": 1_000_000 * (gpu + 1) + 1000 * joules for gpu in part.gpus}
        cluster.node(part.node).nvml_set(counters)


def outcomes(cluster: Cluster, *options: str) -> dict[str, tuple[str, str, int | None]]:
    """Job -> (outcome, state, exit code) by ``recover``."""
    report = cluster.json("recover", *options)
    return {job["id"]: (job["outcome"], job["state"], job["exit_code"]) for job in report["jobs"]}


def gone(cluster: Cluster, *jobs: str) -> None:
    """Wait until these have ended and nothing of them is left on the nodes."""
    for job in jobs:
        cluster.wait_state(job)

    def cleaned() -> bool:
        with cluster.reader() as reader:
            assert reader is not None
            return not any(reader.ranks(job_id=job) for job in jobs)

    wait_until(cleaned, 40, "the nodes to be tidied up")


def test_a_machine_that_died_with_its_disk_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    traces, backups = Traces(cluster), str(tmp_path / "backups")
    goes_on, ends = traces.until("go"), traces.submit("until [ -e /share/end ]; do sleep 0.1; done; exit 5")
    pending, never = traces.submit("exit 3", "--hold"), traces.submit("true", "--hold")
    gang = traces.until("go", "--hold", "--nodes", "2", "--gpus", "2")
    for job in (goes_on, ends):
        cluster.wait_state(job, "RUNNING")
    wait_until(lambda: cluster.state_of(gang) == "PENDING", 20, "the last submission")
    cluster.cli("backup", "--to", backups)
    cluster.cli("release", pending, gang)
    begun = traces.submit("echo of a job; until [ -e /share/go ]; do sleep 0.1; done; exit 4")
    done = traces.submit("exit 7")
    traces.let_go("end")
    gone(cluster, ends, pending, done)
    truth = {job: cluster.job(job) for job in (ends, pending, done)}
    for job in (begun, gang):
        cluster.wait_state(job, "RUNNING")
    refused = cluster.cli("recover", "--from", backups, "-y", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "already runs" in refused.stderr
    use_energy(cluster, begun, 3000)
    lose(cluster)

    known = {
        goes_on: ("running", "RUNNING", None), ends: ("settled", "FAILED", 5), pending: ("settled", "FAILED", 3),
        gang: ("settled", "STARTING", None), begun: ("recovered", "STARTING", None), done: ("recovered", "FAILED", 7),
    }  # fmt: skip
    assert outcomes(cluster, "--from", backups, "--dry-run") == known
    assert not (cluster.state / "gpusched.db").exists()
    assert outcomes(cluster, "--from", backups, "-y") == known
    again = cluster.cli("recover", "--from", backups, "-y", check=False)
    assert (again.returncode, "nothing to recover" in again.stderr) == (1, True)
    cluster.start_controller()
    for job in (goes_on, begun, gang):
        cluster.wait_state(job, "RUNNING")
    traces.let_go("go")
    ended = {job: cluster.wait_state(job) for job in (goes_on, begun, gang)}
    assert {job: found.exit_code for job, found in ended.items()} == {goes_on: 0, begun: 4, gang: 0}
    assert "of a job" in cluster.logs(begun)
    cluster.wait_clean()
    for job, before in truth.items():
        found = cluster.job(job)
        assert found is not None
        assert before is not None
        assert (found.state, found.exit_code, found.end_time) == (before.state, before.exit_code, before.end_time)
        assert before.energy_j in (0, None)
        assert found.energy_j in (0, None), "unknown where no record has the counters of its time"
    after = cluster.job(begun)
    assert after is not None
    assert after.energy_j == pytest.approx(6000), "of both its GPUs, before the loss, too"
    assert cluster.state_of(never) == "PENDING"
    assert set(traces.counted().values()) == {1}, "nothing ran twice"
    assert len(traces.lines) == 7


@pytest.mark.processes
def test_a_damaged_database_is_rebuilt_from_nodes_alone_and_a_silent_one_is_settled_later(cluster: Cluster) -> None:
    traces = Traces(cluster)
    jobs = {node: traces.until("go", "--nodelist", node) for node in ("dgx001", "dgx003")}
    for job in jobs.values():
        cluster.wait_state(job, "RUNNING")
    done = traces.submit("exit 6", "--nodelist", "dgx003")
    gone(cluster, done)
    cluster.kill_controller()
    for name in ("gpusched.db", "gpusched.db-wal"):  # which has all pages
        with (cluster.state / name).open("r+b") as file:
            file.write(b"no longer one" * (file.seek(0, 2) // 13 + file.seek(0) + 1))
    waits = traces.submit("true", "--nodelist", "dgx003")
    assert "--no-backup" in cluster.cli("recover", "-y", check=False).stderr
    cluster.node("dgx003").cut()
    assert outcomes(cluster, "--no-backup", "-y") == {jobs["dgx001"]: ("recovered", "STARTING", None)}
    assert len(list(cluster.state.glob("gpusched.db.damaged-*Z"))) == 1
    cluster.start_controller(nodes=False)
    cluster.wait_state(jobs["dgx001"], "RUNNING")
    wait_until(lambda: "may run it" in getattr(cluster.job(waits), "message", ""), 30, "the reason why it waits")
    cluster.node("dgx003").join()
    wait_until(lambda: cluster.state_of(jobs["dgx003"]) == "RUNNING", 60, "the node to be settled")
    assert (cluster.wait_state(done).state, cluster.wait_state(done).exit_code) == ("FAILED", 6)
    assert cluster.wait_state(waits).state == "COMPLETED"
    traces.let_go("go")
    for job in jobs.values():
        assert cluster.wait_state(job).state == "COMPLETED"
    assert set(traces.counted().values()) == {1}
    assert len(traces.lines) == 4
