"""The effects of gpusched on real Slurm in each mode of a partition, and what is left of them afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpusched.model.jobs import JobState
from gpusched.model.plan import Preempt
from gpusched.slurm.lease import MAX_UPDATES
from tests.slurm.beside import Beside
from tests.slurm.conftest import SlurmCluster
from tests.slurm.leasing import full, leases, queue, start
from tests.testbed.slurm import SlurmSite
from tests.testbed.waiting import wait_until


def order(site: SlurmSite) -> list[str]:
    """Jobs that wait, as Slurm would start them."""
    jobs = [(-int(p), int(j)) for j, p in queue(site, "PriorityLong").items() if site.state(j) == "PENDING"]
    return [str(job) for _, job in sorted(jobs)]


@pytest.fixture
def beside(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.site.env["SLURM_CONF"])
    found = Beside(slurm_cluster)
    yield found
    found.store.close()


def test_observing_asks_nothing_of_slurm(beside: Beside) -> None:
    full(beside.site, "dgx001")
    jobs = [str(beside.site.sbatch("sleep 1000", "--gpus-per-node=8", "--nodes=2")) for _ in "ab"]
    beside.run()
    beside.run()
    assert beside.slurm.asked == []
    assert "No reservations" in leases(beside.site)
    assert order(beside.site) == jobs


def test_starts_go_through_the_lease_on_the_decided_nodes_in_the_decided_order(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    slurm_cluster.cli("policy", "promote", "easy", "-p", "A100", "--mode", "decide", "--force", "a test")
    slurm_cluster.start_controller()
    wait_until(lambda: "State=ACTIVE" in leases(site), what="the lease")
    assert "Nodes=dgx[001,003]" in leases(site), "of partition A100 alone"
    jobs = [str(site.sbatch("sleep 1000", f"--gpus-per-node={n}", user="games")) for n in (8, 4, 4, 8)]
    for job in jobs[:3]:
        site.wait(job, "RUNNING")
    where = queue(site, "NodeList")
    assert where[jobs[1]] == where[jobs[2]] != where[jobs[0]]
    assert {queue(site, "Reservation")[job] for job in jobs[:3]} == {"gpusched"}
    wait_until(lambda: (job := slurm_cluster.job(jobs[2])) and job.state is JobState.RUNNING)
    first = slurm_cluster.job(jobs[0])
    assert first is not None
    assert first.allocation is not None
    assert (first.policy, [p.node for p in first.allocation.parts]) == ("easy", [where[jobs[0]]])
    assert "Resources" in slurm_cluster.cli("why", jobs[3]).stdout
    assert site.state(jobs[3]) == "PENDING"


def test_a_plan_decides_against_slurms_own_order_and_places(beside: Beside) -> None:
    beside.promote("decide")
    beside.run()
    jobs = [str(beside.site.sbatch("sleep 1000", "--gpus-per-node=8")) for _ in "abc"]
    asked = beside.run(start(jobs[2], "dgx003"), start(jobs[1], "dgx001"))
    assert len(asked) == 2
    for job in jobs[1:]:
        beside.site.wait(job, "RUNNING")
    assert {j: n for j, n in queue(beside.site, "NodeList").items() if n} == {jobs[2]: "dgx003", jobs[1]: "dgx001"}
    assert beside.run() == [], "it reads what it has done, and does nothing twice"
    assert beside.slurm.asked == [], "the lease lasts"
    beside.run(later=16)
    assert [line.split("=")[1] for line in beside.slurm.asked] == ["gpusched EndTime"], "and is renewed in time"
    assert beside.site.state(jobs[0]) == "PENDING"


def test_a_controller_that_forgot_everything_reads_what_it_had_asked_for(beside: Beside) -> None:
    beside.promote("decide")
    (held,) = full(beside.site, "dgx001")
    beside.run()
    job = str(beside.site.sbatch("sleep 1000", "--gpus-per-node=8"))
    beside.run(start(job, "dgx001"))  # cannot come about yet
    beside.begin()
    beside.run()
    stored = beside.store.job(job)
    assert stored is not None
    assert stored.state is JobState.STARTING, "what waits for its start counts as placed"
    beside.site.run(["scancel", held])
    beside.site.wait(job, "RUNNING")
    assert queue(beside.site, "NodeList")[job] == "dgx001"


def test_a_start_on_a_node_that_is_drained_meanwhile_is_withdrawn_at_once(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    (held,) = full(site, "dgx001")
    beside.run()
    job = str(site.sbatch("sleep 1000", "--gpus-per-node=8"))
    beside.run(start(job, "dgx001"))  # cannot come about yet
    site.run(["scontrol", "update", "NodeName=dgx001", "State=DRAIN", "Reason=by hand"])
    asked = beside.run()
    assert asked[0] == f"update JobId={job} ReservationName= ReqNodeList="
    beside.run()
    site.wait(job, "RUNNING")
    assert queue(site, "NodeList")[job] == "dgx003"
    assert site.state(held) == "RUNNING"


def test_slurm_goes_on_by_itself_when_the_lease_ends(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    beside.run()
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8")) for _ in "ab"]
    beside.run(start(jobs[0], "dgx003"))
    site.wait(jobs[0], "RUNNING")
    before = queue(site, "StartTime")[jobs[0]]
    pinned = str(site.sbatch("sleep 1000", "--gpus-per-node=1"))
    site.run(["scontrol", "update", f"JobId={pinned}", "ReservationName=gpusched", "ReqNodeList=dgx003"])
    # gpusched is dead from here on: nobody renews the lease.
    site.run(["scontrol", "update", "ReservationName=gpusched", "EndTime=now+1"])
    site.wait(jobs[1], "RUNNING", timeout_s=11)
    assert queue(site, "StartTime")[jobs[0]] == before
    assert queue(site, "RestartCnt")[jobs[0]] == "0"
    site.run(["scancel", jobs[0]])
    site.wait(pinned, "RUNNING", timeout_s=60)  # what had been asked to start is not lost
    beside.begin()
    beside.run()
    assert "EndTime" in leases(site), "it takes over again"


def test_rollback_leaves_nothing_behind(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    full(site, "dgx001", "dgx003")
    beside.run()
    own, free = site.sbatch("sleep 1", "--gpus-per-node=8", "-w", "dgx003"), site.sbatch("sleep 1", "--gpus-per-node=8")
    beside.run(start(str(own), "dgx003"), start(str(free), "dgx001"))
    assert queue(site, "ReqNodes")[str(free)] == "dgx001"
    beside.cluster.cli("policy", "rollback", "-p", "A100")
    beside.run()
    assert set(queue(site, "Reservation")[str(j)] for j in (own, free)) == {"(null)"}
    assert {j: queue(site, "ReqNodes")[str(j)] for j in (own, free)} == {own: "dgx003", free: ""}
    wait_until(lambda: "State=ACTIVE" not in leases(site), 10, "the end of the lease")
    assert beside.run() == []


def test_a_job_that_is_requeued_after_the_lease_is_not_bound_to_our_nodes(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    beside.run()
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", *more)) for more in ((), ("-w", "dgx003"))]
    beside.run(start(jobs[0], "dgx001"), start(jobs[1], "dgx003"))
    for job in jobs:
        site.wait(job, "RUNNING")
    beside.run()
    beside.rollback()
    beside.run()
    wait_until(lambda: "State=ACTIVE" not in leases(site), 10, "the end of the lease")
    site.run(["scontrol", "update", "NodeName=dgx001", "State=DOWN", "Reason=broken"])  # its job is requeued
    site.run(["scontrol", "requeue", jobs[1]])
    for job in jobs:
        site.wait(job, "PENDING")
    for job in jobs:  # as Slurm itself does, half a minute after the lease
        site.run(["scontrol", "update", f"JobId={job}", "ReservationName="])
    assert queue(site, "ReqNodes")[jobs[0]] == "dgx001", "it keeps its node"
    assert beside.run() == [f"update JobId={jobs[0]} ReservationName= ReqNodeList="]
    assert {job: queue(site, "ReqNodes")[job] for job in jobs} == {jobs[0]: "", jobs[1]: "dgx003"}
    assert beside.run() == []


def test_a_start_that_does_not_come_about_is_withdrawn_then_left_to_slurm(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    (held,) = full(site, "dgx001")
    beside.run()
    job = str(site.sbatch("sleep 1000", "--gpus-per-node=8", "-w", "dgx001"))
    beside.at = time.time()
    for _ in range(2):
        assert beside.run(start(job, "dgx001")) == [f"update JobId={job} ReservationName=gpusched ReqNodeList=dgx001"]
        assert [*beside.run(), *beside.run(later=20)] == [], "it may take some time"
        assert beside.run(later=11)[0] == f"update JobId={job} ReservationName= ReqNodeList=dgx001"
    assert beside.run(start(job, "dgx001")) == [f"update JobId={job} ReservationName=gpusched"]
    stored = beside.store.job(job)
    assert stored is not None
    assert "it did not start on the chosen nodes" in stored.message
    site.run(["scancel", held])
    site.wait(job, "RUNNING")


def test_no_job_is_stuck_on_leased_nodes(beside: Beside) -> None:
    """Jobs that no policy can place are let in: of several parts, with some nodes named, of another partition."""
    site = beside.site
    site.run(["scontrol", "create", "PartitionName=other", "Nodes=dgx001,dgx003"])
    beside.promote("decide")
    beside.run()
    some = site.sbatch("sleep 1000", "--gpus-per-node=2", "-N2", "-w", "dgx003")
    other = site.sbatch("sleep 1000", "--gpus-per-node=2", "-p", "other")
    parts = site.sbatch(
        "#!/bin/sh\n#SBATCH --gpus-per-node=1 -p A100\n#SBATCH hetjob\n#SBATCH --gpus-per-node=2 -p A100\nsleep 9"
    )
    where = site.sbatch("sleep 1000", "--gpus-per-node=2", "-p", "A100,V100")
    asked = beside.run(start(str(some), "dgx001", "dgx003"), start(f"{parts}+0", "dgx001"), start(str(where), "dgx003"))
    assert f"update JobId={some} ReservationName=gpusched" in asked
    assert f"update JobId={other} ReservationName=gpusched" in asked
    assert [line for line in asked if f"JobId={parts}+" in line] == [
        f"update JobId={parts}+{n} ReservationName=gpusched" for n in (0, 1)
    ]
    for job in (some, other, where, f"{parts}+0", f"{parts}+1"):
        wait_until(lambda job=job: queue(site, "State").get(str(job)) == "RUNNING", 30, f"{job} to run")  # type: ignore[misc]
    assert queue(site, "NodeList")[str(some)] == "dgx[001,003]"


def test_slurm_may_place_what_gpusched_could_not(beside: Beside) -> None:
    site = beside.site
    nodes = {n.name: {"transport": "none"} for n in site.testbed.nodes}
    beside.cluster.write_inventory(nodes=nodes, leave_out=["dgx003"])
    beside.begin()
    beside.promote("decide")
    full(site, "dgx003")
    beside.run()
    job = str(site.sbatch("sleep 1000", "--gpus-per-node=2", "--nodes=2"))
    assert beside.run() == [f"update JobId={job} ReservationName=gpusched"]
    stored = beside.store.job(job)
    assert stored is not None
    assert "Slurm starts it as soon as it fits: gpusched finds no nodes for it" in stored.message
    assert beside.run() == [], "it stays let in"


def test_a_job_is_stopped_for_another_by_consent_and_waits_no_two_minutes(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    beside.run()
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", *more)) for more in ((), ("--no-requeue",))]
    beside.run(start(jobs[0], "dgx001"), start(jobs[1], "dgx003"))
    for job in jobs:
        site.wait(job, "RUNNING")
    waits = str(site.sbatch("sleep 1000", "--gpus-per-node=8"))
    beside.run()
    asked = beside.run(Preempt(jobs[0], waits), Preempt(jobs[1], waits))
    assert asked == [f"requeue {jobs[0]}"], "the other one did not consent"
    site.wait(jobs[0], "PENDING")
    wait_until(lambda: f"update JobId={jobs[0]} StartTime=now" in beside.run(start(waits, "dgx001")), 10)
    site.wait(waits, "RUNNING")
    wait_until(lambda: queue(site, "Reason")[jobs[0]] != "BeginTime", 5, "no more delay")
    stopped = beside.store.job(jobs[0])
    assert stopped is not None
    assert stopped.preemptions is not None
    assert (stopped.preemptions.count, stopped.preemptions.for_job) == (1, waits)


def test_no_more_than_200_jobs_are_updated_in_a_cycle(beside: Beside) -> None:
    site = beside.site
    full(site, "dgx001", "dgx003")
    site.sbatch("sleep 1", "--array=0-149", "--time=50", "--gpus-per-node=8", "--nodes=2")
    last = [str(site.sbatch("sleep 1", "-a0-149", f"--time={n}", "--gpus-per-node=8", "--nodes=2")) for n in (9, 8)]
    beside.promote("advise", "sjf")
    assert len(beside.run()) == MAX_UPDATES
    assert order_of_arrays(site) == [last[1], last[0]], "the shortest first"
    assert beside.run() == [], "they are in order, as far as they will start soon"


def order_of_arrays(site: SlurmSite) -> list[str]:
    """Arrays by the first of their tasks in the queue, for those that were put before the others."""
    tasks = [(-int(p), j.partition("_")[0]) for j, p in queue(site, "PriorityLong").items() if "_" in j]
    found = dict.fromkeys(array for priority, array in sorted(tasks) if priority < max(tasks)[0])
    return list(found)


@pytest.mark.parametrize("kind", ["priority/multifactor", "priority/basic"])
def test_advice_is_an_order_that_rollback_takes_back(beside: Beside, kind: str) -> None:
    site = beside.site
    site.configure(PriorityType=kind)
    (held, _) = full(site, "dgx001", "dgx003")
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", f"--time={n}")) for n in (50, 40, 30, 20)]
    first = order(site)
    assert first == jobs
    beside.promote("advise", "sjf")
    beside.run()
    assert order(site) == jobs[::-1]
    assert "No reservations" in leases(site), "Slurm itself places"
    assert beside.run() == [], "nothing is sent twice"
    new = str(site.sbatch("sleep 1000", "--gpus-per-node=8", "--time=35"))
    assert len(beside.run()) <= 3
    assert order(site) == [jobs[3], jobs[2], new, jobs[1], jobs[0]]
    site.run(["scancel", held])
    site.wait(jobs[3], "RUNNING")
    beside.rollback()
    beside.begin()
    beside.run()
    assert order(site) == [*jobs[:3], new]
    if kind == "priority/multifactor":
        factors = site.run(["sprio", "-h", "-o", "%S"]).stdout.split()
        assert set(factors) == {"0"}
    assert beside.run() == []


def test_a_site_factor_of_an_admin_stays(beside: Beside) -> None:
    site = beside.site
    full(site, "dgx001", "dgx003")
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", f"--time={n}")) for n in (50, 40)]
    site.run(["scontrol", "update", f"JobId={jobs[0]}", "SiteFactor=77"])
    beside.promote("advise", "sjf")
    beside.run()
    assert order(site) == jobs[::-1]
    beside.rollback()
    beside.run()
    assert order(site) == jobs
    assert site.run(["sprio", "-h", "-o", "%i %S"]).stdout.split() == [jobs[0], "77", jobs[1], "0"]


def test_another_reservations_nodes_are_not_leased(beside: Beside) -> None:
    site = beside.site
    site.run(["scontrol", "create", "reservation", "ReservationName=theirs", "Nodes=dgx003", "StartTime=now",
              "Duration=60", "Users=root"])  # fmt: skip
    beside.promote("decide")
    job = str(site.sbatch("sleep 1000", "--gpus-per-node=2"))
    beside.run()
    assert "ReservationName=gpusched" in leases(site)
    assert "Nodes=dgx001 " in leases(site)
    site.wait(job, "RUNNING")


def test_hostile_names_do_nothing(beside: Beside) -> None:
    site = beside.site
    beside.promote("decide")
    beside.run()
    other = str(site.sbatch("sleep 1000", "--hold"))
    name = f"x\nupdate JobId={other} Priority=1 ReservationName=gpusched ReqNodeList=dgx001\x1f;$(true)"
    job = str(site.sbatch("sleep 1000", "--gpus-per-node=2", f"--job-name={name}", user="games"))
    assert beside.run() == [f"update JobId={job} ReservationName=gpusched ReqNodeList=dgx001"]
    site.wait(job, "RUNNING")
    assert queue(site, "Reason")[other] == "JobHeldUser"
