"""Nodes that are leased from Slurm."""

from __future__ import annotations

from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.plan import Start
from tests.testbed.slurm import SlurmSite
from tests.testbed.waiting import wait_until


def queue(site: SlurmSite, what: str) -> dict[str, str]:
    """Job -> what squeue says in this field."""
    lines = site.run(["squeue", "-h", "-r", "-O", f"JobArrayID:40,{what}:200"]).stdout.splitlines()
    return {line[:40].strip(): line[40:].strip() for line in lines}


def leases(site: SlurmSite) -> str:
    return site.run(["scontrol", "-o", "show", "reservation"]).stdout


def start(job: str, *nodes: str, gpus: int = 8) -> Start:
    parts = [
        NodeAllocation(rank=r, node=n, gpus=tuple(range(gpus)), cores=1, memory_mib=1) for r, n in enumerate(nodes)
    ]
    return Start(job, Allocation(job, tuple(parts)))


def full(site: SlurmSite, *nodes: str) -> list[str]:
    """Running jobs that take these nodes."""
    jobs = [site.sbatch("sleep 1000", "--gpus-per-node=8", f"--nodelist={n}", "-p", "A100") for n in nodes]
    for job in jobs:
        site.wait(job, "RUNNING")
    return [str(job) for job in jobs]


def wait_held(site: SlurmSite, job: str) -> None:
    wait_until(lambda: queue(site, "Reason")[job] == "BadConstraints", 20, "Slurm to hold it")
    assert queue(site, "PriorityLong")[job] == "0"
