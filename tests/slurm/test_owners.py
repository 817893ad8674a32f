"""Real controllers and real Slurm: what holds when one dies in the worst moment, and when there are two."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from gpusched.controller.slurm import deadman
from gpusched.model.jobs import JobState
from gpusched.model.slurm import LEASE, SlurmFacts, SlurmJob, SlurmReservation
from gpusched.queue.store import Store
from gpusched.slurm.commands import NoAnswer, Slurm
from tests import builders
from tests.slurm.conftest import SlurmCluster
from tests.slurm.faults import Decided, Proofs
from tests.slurm.leasing import leases, wait_held
from tests.testbed import wait_until
from tests.testbed.slurm import USERS

MAINTENANCE = (
    "scontrol create reservation ReservationName=maint Nodes=$1 StartTime=now+100 Duration=10 Users=root "
    "Flags=MAINT,IGNORE_JOBS"
)


def test_a_job_that_slurm_holds_as_the_controller_dies_is_slurms_again_when_the_lease_is_over(
    slurm_cluster: SlurmCluster,
) -> None:
    """Its node is reserved between the decision and the start, and the controller is killed for good right after it."""
    site, user = slurm_cluster.site, USERS[0]
    decided, proofs = Decided(slurm_cluster), Proofs(site)
    decided.start()
    (decided.folder / "race").write_text(MAINTENANCE)
    decided.kill_at(["sent", *["began"] * 500])
    job = proofs.submit([(user, "-p A100 --gpus-per-node=1 --time=10", "true")])[0]
    wait_until(lambda: "sent" in decided.deaths(), 30, "its death")
    slurm_cluster.kill_controller()
    wait_held(site, job)
    (asked,) = decided.asked("start")
    end = decided.shorten_lease(2)
    proofs.wait(1)
    (line,) = proofs.lines()
    assert line.time >= end
    assert line.host not in asked.nodes, "there Slurm starts nothing now"
    site.wait(job)
    assert not (decided.folder / "race").exists()


@pytest.mark.parametrize("runs_again", [False, True])
def test_the_last_heartbeat_of_a_clock_that_is_ahead_is_none_of_a_new_controller(
    tmp_path: Path, runs_again: bool
) -> None:
    """Up to two seconds go unnoticed: jobs that Slurm held in the lease stayed held until a controller ran again."""
    facts = SlurmFacts(leased=True, nodelist=("a2",))
    waiting = SlurmJob(
        id="7", raw_id="7", user="ann", uid=1000, partitions=("a",), name="x", state="PENDING", reason="Priority",
        priority=5, submit_time=0.0, time_limit_s=600, nodes=1, cpus=8, reservation=LEASE,
    )  # fmt: skip
    asked: list[str] = []

    class Seen(Slurm):
        def reservations(self) -> list[SlurmReservation]:
            if len(polls) < 3:
                raise NoAnswer("it restarts")
            return []

        def jobs(self, site_factors: bool = False) -> list[SlurmJob]:
            return [waiting]

        def update(self, lines: Sequence[str]) -> dict[int, str]:
            asked.extend(lines)
            return {}

    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs([builders.job("7", JobState.PENDING, slurm=facts, allocation=None)])
        store.set_meta("heartbeat", str(time.time() + 1.9))
        polls: list[float] = []

        def wait(seconds: float) -> None:
            polls.append(seconds)
            if runs_again:
                store.set_meta("heartbeat", str(time.time() + 2))

        assert deadman.undo(tmp_path, Seen(), wait) == (0 if runs_again else 1)
    assert asked == ([] if runs_again else ["update JobId=7 ReservationName= ReqNodeList=a2"])


@pytest.fixture
def another(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """A second installation on the same Slurm."""
    folder = Path(tempfile.mkdtemp(prefix="gs-slurm-"))
    cluster = SlurmCluster(slurm_cluster.site, folder)
    yield cluster
    if cluster.controller is not None and cluster.controller.poll() is None:
        cluster.kill_controller()
    shutil.rmtree(folder, ignore_errors=True)


def test_of_two_controllers_one_decides_and_the_other_reports_it(
    slurm_cluster: SlurmCluster, another: SlurmCluster
) -> None:
    site, first = slurm_cluster.site, slurm_cluster

    def decides(cluster: SlurmCluster) -> bool:
        job = str(site.sbatch("true", "-p", "A100", "--gpus-per-node=1"))
        site.wait(job)
        for seen_by in (first, another):
            if seen_by.controller is not None and seen_by.controller.poll() is None:
                seen_by.wait_state(job, "COMPLETED")
        found = cluster.job(job)
        return found is not None and found.policy == "easy"

    for cluster in (first, another):
        cluster.write_inventory(nodes={n.name: {"transport": "none"} for n in site.testbed.nodes})
        cluster.start_controller(nodes=False)
        cluster.cli("policy", "promote", "easy", "-p", "A100", "--mode", "decide", "--force", "a test")
        wait_until(lambda: "ReservationName=gpusched" in leases(site), 30, "the lease")
    wait_until(lambda: "another controller has the lease" in another.controller_log, 30, "its word")
    assert another.controller_log.count("another controller has the lease") == 1
    assert "another controller has the lease in Slurm" in another.cli("status").stdout
    assert decides(first)
    assert not decides(another)
    another.cli("policy", "rollback", "-p", "A100")
    wait_until(lambda: "another controller" not in another.cli("status").stdout, 30, "the rollback")
    assert "State=ACTIVE" in leases(site), "who only looks on does not end another's"
    another.cli("policy", "promote", "easy", "-p", "A100", "--mode", "decide", "--force", "a test")
    wait_until(lambda: another.controller_log.count("another controller has the lease") == 2, 30, "its word again")
    first.kill_controller()
    site.run(["scontrol", "update", "ReservationName=gpusched", "EndTime=now+1"])
    wait_until(lambda: another.controller_log.count("the lease works again") == 2, 90, "the takeover")
    assert decides(another)
