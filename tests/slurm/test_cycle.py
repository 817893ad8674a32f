"""The cycle beside real Slurm, through the command line: jobs mirrored, nodes, readings, energy, reasons."""

from __future__ import annotations

from typing import Any

from gpusched.controller.slurm.cycle import TROUBLE
from gpusched.model.jobs import JobState
from gpusched.model.readings import NodeState
from tests.slurm.conftest import SlurmCluster
from tests.testbed import wait_until

ORDER = [3, 1, 0, 2, 7, 6, 5, 4]
"""Minor numbers by position in gres.conf, on dgx001; NVML counts there from the other end."""


def job_of(cluster: SlurmCluster, job: int | str) -> Any:
    found = cluster.job(str(job))
    assert found is not None
    return found


def gpus_of(cluster: SlurmCluster, job: int | str) -> dict[str, tuple[int, ...]]:
    return {part.node: part.gpus for part in job_of(cluster, job).allocation.parts}


def kinds(cluster: SlurmCluster, job: int | str) -> list[str]:
    with cluster.reader() as reader:
        assert reader is not None
        return [event.kind for event in reader.events(job_id=str(job))]


def node_of(cluster: SlurmCluster, name: str) -> Any:
    with cluster.reader() as reader:
        assert reader is not None
        return reader.node_records()[name]


def test_a_tick_mirrors_what_slurm_has(slurm_cluster: SlurmCluster) -> None:
    """A gang that runs, one that waits, an array with a limit, a held job, one that waits for another."""
    site = slurm_cluster.site
    gang = site.sbatch("sleep 1000", "--gpus-per-node=2", "--nodes=2", "--time=1:00", user="games")
    site.wait(gang, "RUNNING")
    whole = site.sbatch("sleep 1000", "--gpus-per-node=8", "--time=2:00", "-J", "it's \x1b[31m a|name", user="news")
    held = site.sbatch("true", "--gpus=1", "--hold", user="news")
    array = site.sbatch("sleep 1000", "--gpus=1", "--array=0-3%1", "--hold", "-p", "V100", user="games")
    after = site.sbatch("true", f"--dependency=afterok:{gang}", "--gpus=1", user="games")
    slurm_cluster.cli("tick")
    assert "1 RUNNING" in slurm_cluster.cli("status").stdout
    assert gpus_of(slurm_cluster, gang) == {"dgx001": (0, 1), "dgx003": (0, 1)}
    assert "6 of 8 GPUs free" in slurm_cluster.cli("why", str(whole)).stdout
    assert job_of(slurm_cluster, held).held_by == "user"
    assert "Dependency" in slurm_cluster.cli("why", str(after)).stdout
    assert [job_of(slurm_cluster, f"{array}_{i}").array_index for i in range(4)] == [0, 1, 2, 3]
    with slurm_cluster.reader() as reader:
        assert reader is not None
        assert reader.array_limits()[str(array)] == 1
        assert [run.job_id for run in reader.runs(0, 1e12)] == [str(gang)]
    assert kinds(slurm_cluster, gang) == ["submitted", "running"]
    site.run(["scancel", str(gang)])
    site.run(["scontrol", "release", str(held)])
    site.wait(held)
    slurm_cluster.cli("tick")
    ended = job_of(slurm_cluster, gang)
    assert (ended.state, ended.attempt) == (JobState.CANCELLED, 1)
    assert gpus_of(slurm_cluster, gang) == {"dgx001": (0, 1), "dgx003": (0, 1)}
    assert kinds(slurm_cluster, gang)[-1] == "ended"
    assert job_of(slurm_cluster, held).state is JobState.COMPLETED
    assert kinds(slurm_cluster, held) == ["submitted", "held", "running", "ended"]


def test_energy_is_charged_to_who_had_the_gpus_whatever_their_order(slurm_cluster: SlurmCluster) -> None:
    """Positions in gres.conf, minor numbers and NVML's indices are three orders; what each job drew is known."""
    site, node = slurm_cluster.site, slurm_cluster.testbed.node("dgx001")
    site.configure(orders={"dgx001": ORDER})
    node.nvml_set({f"gpu{index}.minor": 7 - index for index in range(8)})
    jobs = {2: 0, 3: 0}
    for gpus in jobs:
        jobs[gpus] = site.sbatch("sleep 1000", f"--gpus={gpus}", "-w", "dgx001")
        site.wait(jobs[gpus], "RUNNING")
    indices = {2: (4, 6), 3: (0, 5, 7)}  # of minor numbers 3 and 1; of 0, 2 and 7
    slurm_cluster.cli("tick")
    assert {gpus: gpus_of(slurm_cluster, job)["dgx001"] for gpus, job in jobs.items()} == indices
    drawn = {index: 1000 * gpus for gpus, of in indices.items() for index in of}
    node.nvml_set({f"gpu{i}.energy_mj": 1_000_000 * (i + 1) + drawn.get(i, 9_000_000) for i in range(8)})
    slurm_cluster.cli("tick")
    for job in jobs.values():
        site.run(["scancel", str(job)])
        site.wait(job, "CANCELLED")
    slurm_cluster.cli("tick")
    for gpus, job in jobs.items():
        assert job_of(slurm_cluster, job).energy_j == gpus * gpus, "joules: each GPU as many as the job has GPUs"
    rows = {row["key"]: row for row in slurm_cluster.json("power", "--by", "job")["rows"]}
    assert {str(job) for job in jobs.values()} <= rows.keys()
