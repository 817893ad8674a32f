"""The queue: arrays, dependencies, holds, priorities, requeueing, draining, backfill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import WAIT, Cluster
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def held(cluster: Cluster, share: Path, *options: str, name: str = "holder") -> str:
    """A running job that ends when /share/go is there."""
    job = cluster.shared(WAIT, share, "-J", name, *options)
    cluster.wait_state(job, "RUNNING")
    return job


def reason(cluster: Cluster, job: str) -> str:
    found = cluster.job(job)
    return found.reason if found else ""


def test_an_array_runs_each_index_once_and_no_more_at_once_than_asked(house: Cluster, share: Path) -> None:
    script = 'echo "$SLURM_ARRAY_TASK_ID $GPUSCHED_ARRAY_ID $SLURM_ARRAY_JOB_ID" >>/share/ran; '
    script += "mkdir /share/$GPUSCHED_ARRAY_INDEX; "
    script += 'until [ -e "/share/go$SLURM_ARRAY_TASK_ID" ]; do sleep 0.05; done; [ "$SLURM_ARRAY_TASK_ID" != 7 ]'
    array = house.shared(script, share, "--gpus", "1", "--array", "1,3-7:2%2")
    indices = (1, 3, 5, 7)

    def begun() -> set[str]:
        return {p.name for p in share.iterdir() if p.is_dir()}

    wait_until(lambda: begun() == {"1", "3"}, 20, "two tasks")
    wait_until(lambda: reason(house, f"{array}_5") == "JobArrayTaskLimit", what="a reason")
    states = [("RUNNING", None), ("RUNNING", None), ("PENDING", "5,7")]
    wait_until(
        lambda: [(j["state"], j["array_tasks"]) for j in house.json("status", array)] == states, what="two to run"
    )
    (share / "go1").touch()
    wait_until(lambda: begun() == {"1", "3", "5"}, 20, "the third task")
    assert house.state_of(f"{array}_7") == "PENDING"
    for index in indices:
        (share / f"go{index}").touch()
    done = house.cli("wait", array, check=False)
    assert done.returncode == 1
    states = {j["array_index"]: j["state"] for j in house.json("status", array)}
    assert states == {1: "COMPLETED", 3: "COMPLETED", 5: "COMPLETED", 7: "FAILED"}
    assert sorted((share / "ran").read_text().split("\n")[:-1]) == [f"{i} {array} {array}" for i in indices]
    house.wait_clean()


def test_a_chain_goes_on_at_its_limit_and_tasks_follow_their_partners(house: Cluster, share: Path) -> None:
    script = 'echo "$GPUSCHED_ARRAY_INDEX" >>/share/links; [ "$GPUSCHED_ARRAY_INDEX" != 1 ] || sleep 6000'
    chain = house.shared(script, share, "--gpus", "1", "--chain", "3", "-t", "0:00:03")
    failing = 'echo "a$GPUSCHED_ARRAY_INDEX" >>/share/order; [ "$GPUSCHED_ARRAY_INDEX" != 1 ]'
    first = house.shared(failing, share, "--gpus", "1", "--array", "0-2")
    after = house.shared(
        'echo "b$GPUSCHED_ARRAY_INDEX" >>/share/order', share, "--gpus", "1", "--array", "0-2", "--dependency",
        f"aftercorr:{first}",
    )  # fmt: skip
    house.wait_state(f"{after}_0", "COMPLETED")
    house.wait_state(f"{after}_2", "COMPLETED")
    wait_until(
        lambda: reason(house, f"{after}_1") == "DependencyNeverSatisfied", what="the partner's failure to be seen"
    )
    order = (share / "order").read_text().split()
    assert sorted(order) == ["a0", "a1", "a2", "b0", "b2"]
    assert all(order.index(f"a{i}") < order.index(f"b{i}") for i in (0, 2))
    house.wait_state(f"{chain}_3", "COMPLETED")
    assert house.state_of(f"{chain}_1") == "TIMEOUT"
    assert (share / "links").read_text().split() == ["1", "2", "3"]
    house.cli("cancel", after)
    house.wait_clean()


def test_dependencies(house: Cluster, share: Path) -> None:
    first = held(house, share, "--gpus", "1")
    bad = house.sh("exit 1", "--gpus", "1", "--dependency", f"afterany:{first}")
    jobs = {
        kind: house.shared(f"echo {kind} >>/share/order", share, "--gpus", "1", "--dependency", dependency)
        for kind, dependency in {
            "after": f"after:{first}", "ok": f"afterok:{first}", "any": f"afterany:{bad}", "notok": f"afternotok:{bad}",
            "both": f"afterok:{first},afternotok:{bad}", "never": f"afterok:{bad}", "never2": f"afternotok:{first}",
        }.items()
    }  # fmt: skip
    house.wait_state(jobs["after"], "COMPLETED")  # the first one has begun, that is all it asks for
    wait_until(lambda: reason(house, jobs["never"]) == "Dependency", what="a reason")
    why = house.json("why", jobs["ok"])
    assert (why["reason"], first in why["message"]) == ("Dependency", True)
    (share / "go").touch()
    for kind in ("ok", "any", "notok", "both"):
        house.wait_state(jobs[kind], "COMPLETED")
    for kind in ("never", "never2"):
        wait_until(lambda kind=kind: reason(house, jobs[kind]) == "DependencyNeverSatisfied", what="a reason")
    why = house.json("why", jobs["never"])
    assert bad in why["message"]
    assert "FAILED" in why["message"]
    assert any(f"cancel {jobs['never']}" in step for step in why["next_steps"])
    house.cli("cancel", jobs["never"], jobs["never2"], "--wait")
    assert sorted((share / "order").read_text().split()) == ["after", "any", "both", "notok", "ok"]
    house.wait_clean()


def test_hold_and_release_requeue_and_the_log_of_each_attempt(house: Cluster, share: Path) -> None:
    script = f"echo attempt $GPUSCHED_ATTEMPT; echo >/share/began$GPUSCHED_ATTEMPT; {WAIT}"
    job = house.shared(script, share, "--gpus", "1", "--hold")
    wait_until(lambda: reason(house, job) == "JobHeldUser", what="the hold to be seen")
    assert any("release" in step for step in house.json("why", job)["next_steps"])
    house.cli("release", job)
    house.wait_state(job, "RUNNING")
    wait_until((share / "began1").exists, what="the first attempt")
    house.cli("requeue", job)
    wait_until((share / "began2").exists, 20, "the second attempt")
    running = house.wait_state(job, "RUNNING")
    assert (running.attempt, running.retries) == (2, 0)
    (share / "go").touch()
    house.wait_state(job, "COMPLETED")
    house.cli("requeue", job)  # an ended one too
    wait_until((share / "began3").exists, 20, "the third attempt")
    done = house.wait_state(job, "COMPLETED")
    assert done.attempt == 3
    house.wait_clean()
    assert house.logs(job) == "attempt 3\n"
    assert house.logs(job, "--attempt", "1") == "attempt 1\n"
    shown = house.json("show", job)
    assert [a["outcome"] for a in shown["attempts"]] == ["PENDING", "PENDING", "COMPLETED"]
    assert house.cli("hold", job, check=False).returncode == 1


def test_priority_and_nice_decide_which_job_goes_first(house: Cluster, share: Path) -> None:
    blockers = [held(house, share, "-p", "V100", "--gpus", "8", "--nodelist", n) for n in ("dgx002", "dgx004")]
    option = (share, "-p", "V100", "--gpus", "8", "--nodelist", "dgx002")
    nice = house.shared("echo nice >>/share/order", *option, "--nice", "10")
    plain = house.shared("echo plain >>/share/order", *option)
    urgent = house.shared("echo urgent >>/share/order", *option, "--priority", "5")
    last = house.shared("echo last >>/share/order", *option)
    house.cli("priority", last, "-20")
    wait_until(lambda: (j := house.job(last)) is not None and j.priority == -20, what="the priority")
    assert [house.json("why", j)["position"] for j in (urgent, plain, nice, last)] == [1, 2, 3, 4]
    (share / "go").touch()
    for job in (*blockers, urgent, plain, nice, last):
        house.wait_state(job, "COMPLETED")
    assert (share / "order").read_text().split() == ["urgent", "plain", "nice", "last"]
    house.wait_clean()


def test_a_drained_node_finishes_what_it_has_and_takes_nothing_new(house: Cluster, share: Path) -> None:
    old = held(house, share, "--gpus", "1", "--nodelist", "dgx003")
    assert house.cli("drain", "dgx003", check=False).returncode == 2  # without a reason
    house.cli("drain", "dgx003", "--reason", 'fan 3 is "loud"')
    house.wait_node("dgx003", "DRAINING")
    new = house.submit("--gpus", "1", "--nodelist", "dgx003")
    other = house.submit("--gpus", "8", "--nodelist", "dgx001")
    house.wait_state(other, "COMPLETED")
    wait_until(lambda: reason(house, new) == "ReqNodeNotAvail", what="a reason")
    why = house.json("why", new)
    (verdict,) = [n for n in why["nodes"] if n["name"] == "dgx003"]
    assert (verdict["fits"], 'fan 3 is "loud"' in verdict["message"]) == (False, True)
    assert any("resume" in step and "dgx003" in step for step in why["next_steps"])
    node = house.nodes()["dgx003"]
    assert (node["state"], node["gpus_free"]) == ("DRAINING", 0)
    assert node["reason"] == 'fan 3 is "loud" (by root)'
    (share / "go").touch()
    house.wait_state(old, "COMPLETED")
    house.wait_node("dgx003", "DRAINED")
    assert house.state_of(new) == "PENDING"
    house.cli("resume", "dgx003")
    house.wait_state(new, "COMPLETED")
    house.wait_node("dgx003", "IDLE")
    house.wait_clean()


def test_backfill_fills_holes_without_delaying_the_head(house: Cluster, share: Path) -> None:
    """dgx002 has 6 of 8 GPUs taken for at most an hour, dgx004 all: the head waits, who fits before it may go."""
    six = held(house, share, "-p", "V100", "--gpus", "6", "-t", "30m", "--nodelist", "dgx002")
    full = held(house, share, "-p", "V100", "--gpus", "8", "-t", "1h", "--nodelist", "dgx004")
    head = house.submit("-F", "l-V100", "-t", "1h")
    wait_until(lambda: reason(house, head) == "Resources", what="the head to wait")
    long = house.submit("-p", "V100", "--gpus", "2", "-t", "2h")
    wait_until(lambda: reason(house, long) == "Backfill", what="the long one to wait")
    short = house.sh("true", "-p", "V100", "--gpus", "2", "-t", "10m")
    house.wait_state(short, "COMPLETED")
    assert [house.state_of(j) for j in (head, long)] == ["PENDING", "PENDING"]
    why = house.json("why", long)
    assert why["reason"] == "Backfill"
    assert head in why["message"]
    assert any("time limit" in step for step in why["next_steps"])
    why = house.json("why", head)
    assert (why["reason"], why["position"], why["queue_length"]) == ("Resources", 1, 2)
    assert {n["name"]: n["fits"] for n in why["nodes"]} == {"dgx002": False, "dgx004": False}
    assert "8 GPUs" in why["message"]
    assert "partition A100 could run it now" in json.dumps(why["next_steps"])
    assert "dgx002" in house.cli("why", head).stdout
    dry = house.json("submit", "-F", "l-V100", "--dry-run", "--", "true")
    assert dry["dry_run"] is True
    (share / "go").touch()
    for job in (six, full, head, long):
        house.wait_state(job, "COMPLETED")
    house.wait_clean()
