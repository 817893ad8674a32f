"""The site's own checks of its nodes: by interval, before jobs, and across a controller that dies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpusched.model.healthchecks import CheckRecord
from gpusched.model.jobs import JobState
from tests.e2e.conftest import Cluster
from tests.e2e.site_packages import python_for_nodes
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.one_partition]
NODES = ("dgx001", "dgx003")
SMALL = ("--gpus", "2", "--cpus", "1", "--mem", "256M")


def declare(
    cluster: Cluster, checks: Sequence[Mapping[str, object]], nodes: Sequence[str] = NODES[:1], **settings: object
) -> None:
    entry = {"health_checks": [{"timeout": "5m", **check} for check in checks]}
    cluster.write_inventory({"tick": "1s", **settings}, nodes=dict.fromkeys(nodes, entry))


def record_of(cluster: Cluster, check: str, node: str = "dgx001") -> CheckRecord | None:
    with cluster.reader() as reader:
        return reader.check_record(node, check) if reader else None


def wait_check(cluster: Cluster, check: str, state: str, node: str = "dgx001") -> CheckRecord:
    def arrived() -> CheckRecord | None:
        record = record_of(cluster, check, node)
        return record if record is not None and record.state == state else None

    try:
        record = wait_until(arrived, 60, f"check {check} on {node} to be {state}")
    except TimeoutError as error:
        error.add_note(f"{record_of(cluster, check, node)}\n{cluster.controller_log}")
        raise
    assert record is not None
    return record


def events_of(cluster: Cluster, node: str = "dgx001") -> list[tuple[str, str]]:
    with cluster.reader() as reader:
        assert reader is not None
        events = reader.events(node=node)
    return [(e.kind, e.data["check"]) for e in events if e.kind.startswith("check_")]


def test_a_node_whose_check_fails_takes_no_new_jobs_until_it_passes(stopped: Cluster, share: Path) -> None:
    (share / "ok").touch()
    disk = {"name": "disk", "command": f'echo "disk of $GPUSCHED_NODE"\n[ -e {share}/ok ]', "every": "1s"}
    declare(stopped, [disk])
    stopped.start_controller()
    passed = wait_check(stopped, "disk", "ok")
    assert passed.line == "disk of dgx001"
    assert events_of(stopped) == []
    running = stopped.sh(f"until [ -e {share}/go ]; do sleep 0.1; done", *SMALL, "--nodelist", "dgx001")
    stopped.wait_state(running, "RUNNING")

    (share / "ok").unlink()
    stopped.wait_node("dgx001", "DRAINING")
    reason = "check disk failed: disk of dgx001 (exit code 1)"
    assert stopped.nodes()["dgx001"]["reason"] == reason
    job = stopped.submit(*SMALL, "--nodelist", "dgx001")
    assert reason in stopped.cli("why", job).stdout.replace("\n", " ")
    (share / "go").touch()  # a job that ran goes on, to its own end
    assert stopped.wait_state(running).state is JobState.COMPLETED
    stopped.wait_node("dgx001", "DRAINED")
    assert stopped.state_of(job) == "PENDING"

    (share / "ok").touch()
    assert stopped.wait_state(job).state is JobState.COMPLETED
    assert events_of(stopped) == [("check_failed", "disk"), ("check_passed", "disk")]


def test_a_hanging_check_is_killed_on_the_node_and_others_go_on(stopped: Cluster, share: Path) -> None:
    hangs = "trap '' TERM; echo scanning; setsid sleep 4321 & sleep 4321"
    declare(
        stopped,
        [
            {"name": "scan", "command": hangs, "every": "1h", "timeout": "1s", "then": "drain"},
            {"name": "count", "command": f"echo . >>{share}/count; false", "every": "1s", "then": "warn"},
        ],
    )
    stopped.start_controller()
    scan = wait_check(stopped, "scan", "hung")
    assert scan.exit_code is None
    assert "scanning" in scan.line
    assert not [p for p in stopped.node("dgx001").run(["/bin/sh", "-c", "cat /proc/[0-9]*/cmdline"], check=False)
                .stdout.split("\n") if "4321" in p]  # fmt: skip
    wait_until(lambda: (share / "count").exists() and (share / "count").read_text().count(".") >= 3, 60, "three runs")
    # What only warns holds no node; what drains it does until somebody resumes it.
    assert stopped.nodes()["dgx001"]["reason"].startswith("check scan hangs: ")
    held = "nodes held by health checks: dgx001"
    assert held in " ".join(stopped.cli("status").stdout.split())
    stopped.cli("resume", "dgx001")
    stopped.wait_node("dgx001", "IDLE")
    assert held not in " ".join(stopped.cli("status").stdout.split())
    assert stopped.wait_state(stopped.submit(*SMALL, "--nodelist", "dgx001")).state is JobState.COMPLETED


def test_ranks_start_when_the_check_has_passed_on_all_nodes(stopped: Cluster, share: Path) -> None:
    meet = f"""env | grep -E "^(GPUSCHED|MASTER|CUDA)_" >{share}/part.$GPUSCHED_NODE_RANK
        mv {share}/part.$GPUSCHED_NODE_RANK {share}/env.$GPUSCHED_NODE_RANK
        until [ -e {share}/env.0 ] && [ -e {share}/env.1 ]; do sleep 0.1; done
        until [ -e {share}/judged ]; do sleep 0.1; done
        ! [ -e {share}/bad.$GPUSCHED_NODE ]"""
    declare(stopped, [{"name": "meet", "command": meet, "before_job": True}], NODES)
    (share / "bad.dgx003").touch()
    stopped.start_controller()
    job = stopped.sh(f"touch {share}/ran", "--nodes", "2", "--gpus", "4", "--cpus", "2", "--mem", "512M")
    wait_until(lambda: (share / "env.1").exists(), 60, "the check to run on both nodes")
    own = dict(line.split("=", 1) for line in (share / "env.1").read_text().splitlines())
    assert own["GPUSCHED_JOB_ID"] == job
    assert own["GPUSCHED_NODES"] == "dgx001,dgx003"
    assert (own["GPUSCHED_NNODES"], own["GPUSCHED_NODE"], own["GPUSCHED_GPUS"]) == ("2", "dgx003", "0,1")
    assert stopped.state_of(job) == "STARTING"
    (share / "judged").touch()

    stopped.wait_state(job, "PENDING")
    found = stopped.job(job)
    assert found is not None
    assert (found.attempt, found.retries) == (1, 0)
    stopped.wait_node("dgx003", "DRAINED")
    stopped.wait_node("dgx001", "IDLE")
    requeued = [e.data for e in stopped.events(job) if e.kind == "requeued"]
    assert requeued[0]["message"] == "check meet failed: exit code 1 on dgx003"
    assert not (share / "ran").exists()

    single = stopped.submit(*SMALL)  # a job of one node is checked on that alone
    assert stopped.wait_state(single, timeout=60).state is JobState.COMPLETED


@pytest.mark.parametrize("before_job", [False, True])
def test_a_controller_that_is_killed_amid_a_check_takes_its_result_later(
    stopped: Cluster, share: Path, before_job: bool
) -> None:
    slow = f"echo begin >>{share}/begun; until [ -e {share}/go ]; do sleep 0.1; done; echo done; echo value=7.5 GB/s"
    when: dict[str, object] = {"before_job": True} if before_job else {"every": "1h"}
    declare(stopped, [{"name": "slow", "command": slow, "timeout": "10m", **when}])
    stopped.start_controller()
    job = stopped.submit(*SMALL, "--nodelist", "dgx001") if before_job else ""
    wait_until((share / "begun").exists, 60, "the check to begin")
    stopped.kill_controller()
    stopped.start_controller()
    (share / "go").touch()
    record = wait_check(stopped, "slow", "ok")
    assert (record.line, record.value, record.unit, record.values) == ("done", 7.5, "GB/s", (7.5,))
    assert (share / "begun").read_text() == "begin\n"
    if before_job:
        assert stopped.wait_state(job).state is JobState.COMPLETED
    assert stopped.nodes()["dgx001"]["conditions"] == []


def test_a_node_below_its_own_median_is_named(stopped: Cluster, share: Path) -> None:
    (share / "speed").write_text("100")
    sent = share / "sent"
    notices = {"to": [{"command": ["/bin/sh", "-c", f"cat >>{sent}"], "on": ["node"]}]}
    declare(stopped, [{"name": "speed", "command": f"echo value=$(cat {share}/speed) GB/s", "every": "1s"}])
    text = stopped.inventory.read_text()
    stopped.inventory.write_text('{"notices": ' + json.dumps(notices) + ", " + text.removeprefix("{"))
    stopped.start_controller()

    def values() -> tuple[float, ...]:
        record = record_of(stopped, "speed")
        return record.values if record is not None else ()

    wait_until(lambda: len(values()) >= 5, 60, "five values")
    (share / "speed").write_text("79")
    wait_until(lambda: 79.0 in values(), 60, "a slow value")
    shown = stopped.cli("nodes").stdout
    assert "check-slow" in shown
    assert "check speed: 79 GB/s, its median is 100 GB/s" in " ".join(shown.split())
    listed = stopped.json("nodes", "--checks")[0]
    assert (listed["state"], listed["values"][-1], listed["median"], listed["exit_code"]) == ("ok", 79, 100, 0)
    assert "slow" in stopped.cli("nodes", "--checks").stdout.split()
    condition = stopped.nodes()["dgx001"]["conditions"][0]
    assert (condition["condition"], condition["gpu"], condition["action"]) == ("check-slow", None, "warn")
    assert stopped.nodes()["dgx001"]["state"] == "IDLE"  # a warning only
    wait_until(lambda: sent.exists() and "its median is 100 GB/s" in sent.read_text(), 60, "the notice")
    assert [kind for kind, _ in events_of(stopped)] == ["check_slow"]
    (share / "speed").write_text("81")
    wait_until(lambda: not stopped.nodes()["dgx001"]["conditions"], 60, "the condition to close")


def test_a_tick_waits_for_its_checks(stopped: Cluster, share: Path) -> None:
    slow = {"name": "slow", "command": f"sleep 1; echo . >>{share}/ran", "every": "1h"}
    declare(stopped, [slow, {"name": "first", "command": "exit 3", "before_job": True}])
    job = stopped.submit(*SMALL, "--nodelist", "dgx001")
    for _ in range(3):  # a node that was never read gets neither jobs nor checks
        stopped.cli("tick")
    assert wait_check(stopped, "slow", "ok").exit_code == 0
    assert wait_check(stopped, "first", "failed").exit_code == 3
    assert (share / "ran").read_text() == ".\n"
    assert stopped.state_of(job) == "PENDING"
    assert stopped.nodes()["dgx001"]["state"] == "DRAINED"


def test_a_node_that_cannot_start_a_check_is_held(stopped: Cluster) -> None:
    declare(stopped, [{"name": "any", "command": "true", "every": "1s"}])
    stopped.start_controller()
    wait_check(stopped, "any", "ok")
    stopped.node("dgx001").hide("setsid")
    assert "setsid (util-linux) is missing" in wait_check(stopped, "any", "failed").line
    stopped.wait_node("dgx001", "DRAINED")
    stopped.node("dgx001").unhide("setsid")
    stopped.wait_node("dgx001", "IDLE")


def test_a_job_that_is_cancelled_while_its_node_is_checked(stopped: Cluster, share: Path) -> None:
    command = f"touch {share}/begun; until [ -e {share}/go ]; do sleep 0.1; done"
    declare(stopped, [{"name": "slow", "command": command, "before_job": True}])
    stopped.start_controller()
    job = stopped.submit(*SMALL, "--nodelist", "dgx001")
    wait_until((share / "begun").exists, 60, "the check to begin")
    stopped.cli("cancel", job)
    assert stopped.wait_state(job).state is JobState.CANCELLED
    after = stopped.submit(*SMALL, "--nodelist", "dgx001")
    (share / "go").touch()
    assert stopped.wait_state(after).state is JobState.COMPLETED


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_the_all_reduce_of_the_examples_runs_between_a_jobs_nodes(stopped: Cluster) -> None:
    root = Path(__file__).parents[2]
    torch = Path(str(find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]
    command = (
        f"export PYTHONPATH={torch} GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1\n"
        f"{python_for_nodes(stopped.folder)} -m torch.distributed.run --nnodes $GPUSCHED_NNODES "
        "--node-rank $GPUSCHED_NODE_RANK --nproc-per-node 1 --master-addr $MASTER_ADDR --master-port $MASTER_PORT "
        f"{root}/docs/examples/allreduce_check.py --mib 1 --rounds 3"
    )
    declare(stopped, [{"name": "allreduce", "command": command, "before_job": True, "timeout": "5m"}], NODES)
    stopped.start_controller()
    gang = stopped.submit("--nodes", "2", "--gpus", "4", "--cpus", "2", "--mem", "512M")
    assert stopped.wait_state(gang, timeout=200).state is JobState.COMPLETED
    for node in NODES:
        record = record_of(stopped, "allreduce", node)
        assert record is not None
        assert (record.state, record.unit, len(record.values)) == ("ok", "GiB/s", 1)
        assert record.line.startswith("2 processes, 1 MiB in ")
        assert record.values[0] > 0
    # On one node there is no network to measure.
    single = stopped.submit(*SMALL, "--nodelist", "dgx003")
    assert stopped.wait_state(single, timeout=200).state is JobState.COMPLETED
    record = record_of(stopped, "allreduce", "dgx003")
    assert record is not None
    assert (record.line.partition(",")[0], len(record.values)) == ("1 processes", 1)


def test_failures_are_counted_by_gpu(stopped: Cluster) -> None:
    stopped.start_controller()
    jobs = [stopped.sh(f"exit {code}", *SMALL, "--nodelist", "dgx003") for code in (0, 1)]
    for job in jobs:
        stopped.wait_state(job)
    rows = {(row["node"], row["gpu"]): row for row in stopped.json("nodes", "--failures")}
    assert (rows["dgx003", None]["attempts"], rows["dgx003", None]["failed"]) == (2, 1)
    used = [gpu for node, gpu in rows if gpu is not None]
    assert sum(rows["dgx003", gpu]["attempts"] for gpu in used) == 4
    assert sum(rows["dgx003", gpu]["failed"] for gpu in used) == 2
