"""Beside real Slurm: its reservations and its priorities in plans, and what Slurm does to jobs in the lease undone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest

from gpusched.config.inventory import load_inventory
from gpusched.doctor.slurm import examine_slurm
from gpusched.model.slurm import SlurmMode
from tests.slurm.beside import Beside
from tests.slurm.conftest import SlurmCluster
from tests.slurm.leasing import full, leases, queue, start, wait_held
from tests.testbed.slurm import SlurmSite
from tests.testbed.waiting import wait_until


@pytest.fixture
def beside(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.site.env["SLURM_CONF"])
    found = Beside(slurm_cluster)
    found.promote("decide")
    yield found
    found.store.close()


def maintenance(site: SlurmSite, nodes: str, in_s: int, name: str = "maint") -> None:
    words = ["create", "reservation", f"ReservationName={name}", f"Nodes={nodes}", f"StartTime=now+{in_s}"]
    site.run(["scontrol", *words, "Duration=10", "Users=root", "Flags=MAINT,IGNORE_JOBS"])


def submitted(site: SlurmSite, *options: str, gpus: int = 8, limit: int = 10) -> str:
    return str(site.sbatch("sleep 1000", "-p", "A100", f"--gpus-per-node={gpus}", f"--time={limit}", *options))


def test_jobs_keep_clear_of_a_coming_maintenance_and_why_names_it(beside: Beside) -> None:
    site = beside.site
    maintenance(site, "dgx003", 170)
    beside.run()
    jobs = [submitted(site) for _ in "ab"]
    named, short = submitted(site, "-w", "dgx003"), submitted(site, limit=1)
    asked = beside.run()
    assert asked == [
        f"update JobId={jobs[0]} ReservationName=gpusched ReqNodeList=dgx001",
        f"update JobId={short} ReservationName=gpusched ReqNodeList=dgx003",
    ], "one that is over before may start there"
    for job in (jobs[0], short):
        site.wait(job, "RUNNING")
    assert beside.run() == []
    assert "BadConstraints" not in queue(site, "Reason").values()
    why = beside.cluster.cli("why", named).stdout
    said = r"ReqNodeNotAvail: Reserved for maintenance: maint in 0:0[12]:\d\d, for 0:10:00; its time limit"
    assert re.search(said, why)
    answer = beside.cluster.json("why", named)
    over = next(one.end_time for one in beside.slurm.reservations() if one.name == "maint")
    expected = answer["expected_start"]["median"]
    assert expected[:19] >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(over - 1)), "not before it is over"
    assert "maint" in beside.cluster.cli("nodes").stdout
    site.run(["scontrol", "delete", "ReservationName=maint"])
    site.run(["scancel", short])
    wait_until(lambda: beside.run() != [], 20, "a start")
    site.wait(jobs[1], "RUNNING")
    assert beside.store.reservations(time.time()) == ()


def test_a_job_that_names_a_reserved_node_is_not_let_into_the_lease(beside: Beside) -> None:
    """Of one that names some of its nodes Slurm has to choose the others, of one of another partition all."""
    site = beside.site
    site.run(["scontrol", "create", "PartitionName=other", "Nodes=dgx001,dgx003"])
    maintenance(site, "dgx003", 85)
    beside.run()
    assert "Nodes=dgx001 " in leases(site)
    job, other = (submitted(site, "-p", part, "-N2", "-w", "dgx003", gpus=1) for part in ("A100", "other"))
    assert [*beside.run(), *beside.run()] == []
    assert "0" not in queue(site, "PriorityLong").values()
    why = beside.cluster.cli("why", job).stdout
    assert re.search(r"ReqNodeNotAvail: dgx003, which it names, is reserved \(maintenance maint\) in 0:0[01]:\d\d", why)
    assert "expected to start at once" not in why
    assert "expected to start about" in why
    site.run(["scontrol", "delete", "ReservationName=maint"])
    admitted = [f"update JobId={name} ReservationName=gpusched" for name in (job, other)]
    wait_until(lambda: set(beside.run()) == set(admitted), 20, "their admission")
    for name in (job, other):
        site.wait(name, "RUNNING")


def race(beside: Beside, monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> None:
    """Let something happen once, between the next decision and what is asked for by it."""
    given, due = type(beside.slurm).update, [event]

    def update(self: object, lines: list[str]) -> dict[int, str]:
        if due and any("JobId=" in line for line in lines):
            due.pop()()
        return given(beside.slurm, lines)

    monkeypatch.setattr(beside.slurm, "update", lambda lines: update(beside.slurm, lines))


@pytest.mark.parametrize("left", ["in the lease", "by a controller that died", "by Slurm, when the lease was over"])
def test_jobs_that_slurm_holds_in_the_lease_are_released_at_once(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """A maintenance that is made between a decision and its start: Slurm takes the job's priority for ever."""
    site = beside.site
    beside.run()
    job, users = submitted(site), submitted(site, "--hold", gpus=1)
    race(beside, monkeypatch, lambda: maintenance(site, "dgx001", 100))
    assert beside.run(start(job, "dgx001")) == [f"update JobId={job} ReservationName=gpusched ReqNodeList=dgx001"]
    wait_held(site, job)
    if left != "in the lease":
        beside.begin()
    undone = [f"update JobId={job} ReservationName= ReqNodeList="]
    if left.startswith("by Slurm"):  # half a minute later; so, as it refuses a held job's Priority, it leaves the hold
        words = ["ReservationName=", "ReqNodeList=dgx001", "Priority=7"]
        assert site.run(["scontrol", "update", f"JobId={job}", *words], check=False).returncode
        wait_held(site, job)
        undone.append(f"release {job}")
    assert "JobHeld" not in beside.cluster.cli("why", job).stdout
    beside.run()
    assert [line for line in beside.slurm.asked if job in line] == undone
    assert queue(site, "PriorityLong")[job] != "0"
    assert beside.run() == [f"update JobId={job} ReservationName=gpusched ReqNodeList=dgx003"]
    site.wait(job, "RUNNING")
    assert queue(site, "Reason")[users] == "JobHeldUser", "a person's hold is no business of ours"


def test_a_job_that_slurm_holds_again_and_again_rests(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    site = beside.site
    beside.run()
    job = submitted(site)
    monkeypatch.setattr("gpusched.controller.slurm.applying.reservation_conflict", lambda *_: "")  # as if unknown
    maintenance(site, "dgx001", 100)
    for _ in range(2):
        assert beside.run(start(job, "dgx001"))
        wait_held(site, job)
        beside.run()
    assert beside.run(start(job, "dgx001")) == []
    stored = beside.store.job(job)
    assert stored is not None
    assert "Slurm held it in the lease (BadConstraints); it is asked for again in" in stored.message
    assert beside.run(start(job, "dgx001"), later=60), "not for ever"


def test_slurms_priority_goes_before_the_time_of_submission(beside: Beside) -> None:
    """Nice, QOS and Priority= are in it; policies with an order of their own keep that."""
    site = beside.site
    site.configure(PriorityType="priority/multifactor")
    held = full(site, "dgx001", "dgx003")
    beside.run()
    jobs = [submitted(site, *more, limit=limit) for more, limit in (([], 10), (["--nice=-5000"], 20), ([], 30))]
    site.run(["scontrol", "update", f"JobId={jobs[2]}", "Priority=90000"])
    assert [int(p) > 1 for p in map(queue(site, "PriorityLong").get, jobs[1:]) if p] == [True, True]
    beside.run()
    place = [beside.cluster.json("why", job)["position"] for job in jobs]
    assert place == [3, 2, 1]
    site.run(["scancel", held[0]])
    wait_until(lambda: any(jobs[2] in line for line in beside.run()), 20, "its start")
    site.wait(jobs[2], "RUNNING")
    beside.promote("decide", "sjf")
    beside.run()
    assert [beside.cluster.json("why", job)["position"] for job in jobs[:2]] == [1, 2]


def test_an_admins_reservation_that_begins_now_is_made_by_the_command_that_is_printed(beside: Beside) -> None:
    site = beside.site
    beside.run()
    said = beside.cluster.cli(
        "reserve", "dgx003", "--for", "1h", "--users", "games", "--name", "class", check=False
    ).stderr
    command = said.removeprefix("gpusched: error: use Slurm's command: ").strip()
    assert "Flags=OVERLAP,IGNORE_JOBS" in command
    site.run(["sh", "-c", command])
    waits = submitted(site, "-w", "dgx003", gpus=1)
    beside.run()
    assert "Nodes=dgx001 " in leases(site), "the lease gives way"
    theirs = site.sbatch("sleep 1000", "-p", "A100", "--reservation=class", "--gpus-per-node=1", user="games")
    site.wait(theirs, "RUNNING")
    assert "reservation class" in beside.cluster.cli("why", waits).stdout
    for words, flags in (("reserve --gpus 8 -p V100 --users games", "IGNORE_JOBS"), ("maintenance dgx002", "MAINT")):
        said = beside.cluster.cli(*words.split(), "--for", "1h", "--from", "now+2h", check=False).stderr
        command = said.removeprefix("gpusched: error: use Slurm's command: ").strip()
        assert flags in command
        assert "OVERLAP" not in command, "it has given way by then"
        site.run(["sh", "-c", command])


def test_with_its_own_account_the_lease_is_charged_to_no_user(beside: Beside) -> None:
    site = beside.site
    site.configure(AccountingStorageEnforce="associations")
    found, _ = examine_slurm(
        load_inventory(beside.cluster.inventory), beside.cluster.state, {"A100": SlurmMode.DECIDE}, None, time.time()
    )
    (accounts,) = [f for f in found if f.check == "accounts"]
    assert (accounts.status, "charged to account root" in accounts.message) == ("warn", True)
    site.run(["sacctmgr", "-i", "add", "account", "gpusched"])
    try:
        beside.run()
        assert "Accounts=-gpusched" in leases(site)
        inventory, modes = load_inventory(beside.cluster.inventory), {"A100": SlurmMode.DECIDE}
        found, _ = examine_slurm(inventory, beside.cluster.state, modes, None, time.time())
        assert [f.status for f in found if f.check == "accounts"] == ["ok"]
        jobs = [site.sbatch("sleep 1000", "-p", "A100", "--gpus-per-node=1", user=user) for user in ("games", "root")]
        assert len(beside.run()) == 2
        for job in jobs:
            site.wait(job, "RUNNING")
    finally:
        site.run(["sacctmgr", "-i", "delete", "account", "gpusched"])
