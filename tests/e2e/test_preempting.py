"""A trained agent that stops running jobs, on real nodes: one of two long jobs makes room and goes on later."""

from __future__ import annotations

import pytest

from gpusched.config.paths import log_path
from tests.e2e.conftest import Cluster
from tests.e2e.failing import Traces
from tests.promotion import stopping
from tests.testbed import wait_until

pytestmark = pytest.mark.slow

# It saves its work, and the next attempt goes on from there; saving lasts until the test ends it.
SAVES = (
    "echo attempt $GPUSCHED_ATTEMPT;"
    " trap 'until [ -e /share/saves ]; do sleep 0.1; done;"
    " echo $GPUSCHED_ATTEMPT >>/share/saved.$GPUSCHED_JOB_ID; exit 0' TERM;"
    " until [ -e /share/long ]; do sleep 0.1; done"
)


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    stopping.compile_passes(tmp_path_factory.mktemp("warm"))


@pytest.fixture
def preempting(stopped: Cluster) -> Cluster:
    folder = stopped.folder / "policies"
    folder.mkdir()
    (folder / "stopper.yaml").write_text(stopping.YAML)
    stopping.write(folder / "stopper/A100.safetensors")
    stopped.write_inventory({"grace": "10m"}, policies={"A100": "stopper"})
    stopped.start_controller()
    return stopped


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_one_of_two_long_jobs_is_preempted_and_goes_on_later(preempting: Cluster, killed: bool) -> None:
    cluster, traces = preempting, Traces(preempting)
    solid = traces.until("long", "--gpus", "1", "-p", "V100", "--no-preemptible")
    longs = [traces.submit(SAVES, "--gpus", "8", "--preemptible") for _ in range(2)]
    for job in (*longs, solid):
        cluster.wait_state(job, "RUNNING")
    shorts = [traces.until("short", "--gpus", "4") for _ in range(2)]
    victim = wait_until(lambda: next((j for j in longs if cluster.state_of(j) == "COMPLETING"), ""), 30, "a stop")
    (other,) = set(longs) - {victim}
    if killed:
        cluster.kill_controller()
        assert cluster.state_of(victim) == "COMPLETING"
        cluster.start_controller()
    (traces.folder / "saves").touch()
    for job in shorts:
        cluster.wait_state(job, "RUNNING")
    waiting = cluster.wait_state(victim, "PENDING")
    assert (traces.folder / f"saved.{victim}").read_text() == "1\n", "it was asked to end, and given the time to"
    assert cluster.state_of(other) == "RUNNING"
    assert waiting.preemptions is not None
    assert waiting.preemptions.count == 1
    assert waiting.preemptions.for_job in shorts
    assert waiting.preemptions.kept_s > 3
    said = cluster.cli("why", victim).stdout
    assert "preempted: once, " in said
    assert f"by stopper for job {waiting.preemptions.for_job}" in said
    assert "(1 preempted)" in cluster.cli("status").stdout
    page = cluster.json("show", victim)
    assert page["preemptions"] == 1
    assert page["spec"]["preemptible"] is True
    assert [a["outcome"] for a in page["attempts"]] == ["PREEMPTED"]
    assert "attempt 1" in log_path(cluster.state, victim, 1, 0).read_text()
    traces.let_go("short")
    for job in shorts:
        assert cluster.wait_state(job).state == "COMPLETED"
    again = cluster.wait_state(victim, "RUNNING")
    assert (again.attempt, again.submit_time, again.priority) == (2, waiting.submit_time, waiting.priority)
    wait_until(lambda: len(traces.starts(victim)) == 2, 30, "its second start")
    traces.let_go("long")
    for job in (*longs, solid):
        assert cluster.wait_state(job).state == "COMPLETED"
    kinds = [e.kind for e in cluster.events(victim) if e.kind in ("running", "preempted", "requeued", "ended")]
    assert kinds == ["running", "preempted", "requeued", "running", "ended"]
    assert cluster.logs(victim) == "attempt 2\n"
    assert "attempt 1" in log_path(cluster.state, victim, 1, 0).read_text(), "of earlier attempts it is kept"
    assert [attempt for _, _, attempt, _ in traces.starts(victim)] == ["1", "2"]
    counted = traces.counted()
    assert {job: counted[job, "0"] for job in (other, solid, *shorts)} == dict.fromkeys((other, solid, *shorts), 1)
    cluster.wait_clean()


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_job_without_preemptible_is_never_preempted(preempting: Cluster) -> None:
    cluster, traces = preempting, Traces(preempting)
    longs = [traces.until("long", "--gpus", "8") for _ in range(2)]
    for job in longs:
        cluster.wait_state(job, "RUNNING")
    short = traces.submit("true", "--gpus", "1")
    cluster.wait_state(short, "PENDING")
    wait_until(lambda: (job := cluster.job(short)) is not None and job.reason == "Resources", 30, "a decision")
    began = float(next(e.time for e in cluster.events(longs[0]) if e.kind == "running"))
    wait_until(lambda: heartbeat(cluster) > began + 8, 30, "some seconds, in which it could have been stopped")
    assert [cluster.state_of(job) for job in longs] == ["RUNNING", "RUNNING"]
    traces.let_go("long")
    assert cluster.wait_state(short).state == "COMPLETED"
    assert set(traces.counted().values()) == {1}
    cluster.wait_clean()


def heartbeat(cluster: Cluster) -> float:
    with cluster.reader() as reader:
        return float((reader and reader.meta("heartbeat")) or 0)
