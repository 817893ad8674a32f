"""What gpusched does to real Slurm in each mode of a partition, through the command line."""

from __future__ import annotations

from gpusched.model.jobs import JobState
from tests.slurm.conftest import SlurmCluster
from tests.testbed.slurm import SlurmSite
from tests.testbed.waiting import wait_until


def promote(cluster: SlurmCluster, mode: str, policy: str = "easy", partition: str = "A100") -> None:
    cluster.cli("policy", "promote", policy, "-p", partition, "--mode", mode, "--force", "a test")


def queue(site: SlurmSite, what: str) -> dict[str, str]:
    """Job -> what squeue says in this field, of all jobs that it has."""
    lines = site.run(["squeue", "-h", "-t", "all", "-O", f"JobArrayID:40,{what}:200"]).stdout.splitlines()
    return {line[:40].strip(): line[40:].strip() for line in lines}


def leases(site: SlurmSite) -> str:
    return site.run(["scontrol", "-o", "show", "reservation"]).stdout


def test_starts_go_through_the_lease_on_the_decided_nodes(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    promote(slurm_cluster, "decide")
    slurm_cluster.start_controller()
    wait_until(lambda: "State=ACTIVE" in leases(site), what="the lease")
    assert "Nodes=dgx[001,003]" in leases(site), "of partition A100 alone"
    jobs = [site.sbatch("sleep 1000", f"--gpus-per-node={n}", user="games") for n in (8, 4, 4, 8)]
    for job in jobs[:3]:
        site.wait(job, "RUNNING")
    where = queue(site, "NodeList")
    assert where[str(jobs[1])] == where[str(jobs[2])] != where[str(jobs[0])]
    assert set(list(queue(site, "Reservation").values())[:3]) == {"gpusched"}
    wait_until(lambda: (job := slurm_cluster.job(str(jobs[0]))) and job.state is JobState.RUNNING)
    first = slurm_cluster.job(str(jobs[0]))
    assert first is not None
    assert (first.policy, [p.node for p in first.allocation.parts]) == ("easy", [where[str(jobs[0])]])  # type: ignore[union-attr]
    assert "Resources" in slurm_cluster.cli("why", str(jobs[3])).stdout
    assert site.state(jobs[3]) == "PENDING"
