"""The cycle beside real Slurm, through the command line: jobs mirrored, nodes, readings, energy, reasons."""

from __future__ import annotations

from tests.slurm.conftest import SlurmCluster


def test_a_tick_mirrors_what_slurm_has(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    one = site.sbatch("sleep 1000", "--gpus-per-node=2", "--nodes=2", "--time=1:00", user="games")
    site.wait(one, "RUNNING")
    other = site.sbatch("sleep 1000", "--gpus-per-node=8", "--time=2:00", user="news")
    print(slurm_cluster.cli("tick").stderr)
    for args in (["status"], ["show", str(one)], ["why", str(other)], ["nodes"], ["power", "--by", "job"]):
        print(slurm_cluster.cli(*args, check=False))
    job = slurm_cluster.job(str(one))
    assert job is not None
    print(job)
    assert 0
