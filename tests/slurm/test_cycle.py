"""The cycle beside real Slurm, through the command line: jobs mirrored, nodes, readings, energy, reasons."""

from __future__ import annotations

from tests.slurm.conftest import SlurmCluster


def test_a_tick_mirrors_what_slurm_has(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    one = site.sbatch("sleep 1000", "--gpus-per-node=2", "--nodes=2", "--time=1:00", user="games")
    site.wait(one, "RUNNING")
    other = site.sbatch("sleep 1000", "--gpus-per-node=8", "--time=2:00", user="news")
    slurm_cluster.cli("tick")
    shown = slurm_cluster.cli("status").stdout
    assert "1 PENDING, 1 RUNNING" in shown
    assert "dgx[001,003]" in shown
    job = slurm_cluster.job(str(one))
    assert job is not None
    assert job.allocation is not None
    assert {part.node: part.gpus for part in job.allocation.parts} == {"dgx001": (0, 1), "dgx003": (0, 1)}
    assert "6 of 8 GPUs free" in slurm_cluster.cli("why", str(other)).stdout
