"""Slurm's history replayed: from a file of sacct and from slurmdbd, and how well it foretells Slurm's own starts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import SlurmCluster
from tests.testbed.slurm_load import completed, sleepers


@pytest.mark.slow
def test_a_replay_foretells_slurms_own_starts(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Within a fifth of the mean wait, in order of submission with backfill, and by no other rule.

    Jobs of 1 to 16 GPUs and 1 to 8 s, with limits of minutes. Who is backfilled next hangs on every start that is a
    moment late, and a machine with other things to do starts late: where it is near in none of three draws, jobs have
    waited longer than any scheduler had them wait. How near it is on a quiet machine is in docs/benchmarks.md.
    """
    site = slurm_cluster.site
    site.configure(
        PriorityType="priority/basic",
        SchedulerParameters="batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_resolution=1",
    )
    site.run(["scontrol", "update", "PartitionName=A100", "Nodes=ALL"])
    log, errors = tmp_path / "jobs.txt", {}
    for seed in (1, 2, 3):
        begin = time.time() + 1  # whole seconds: none of the draw before is of this one
        sleepers(site, 70, 8.0, 0.0, seed)
        log.write_text(completed(site, begin, 70))
        rows = slurm_cluster.json(
            "replay", str(log), "-N", "4", "-P", "fifo+conservative", "-P", "fifo+skip", "--backfill-every", "1s"
        )
        assert {row["jobs"] for row in rows} == {70}
        errors = {row["policy"]: row["wait_error"] for row in rows}
        if abs(errors["fifo+conservative"]) < 0.2:
            break
    assert errors["fifo+conservative"] < 0.2, errors
    others = (1 + errors["fifo+skip"]) / (1 + errors["fifo+conservative"])
    assert others < 0.85, "what knows no reservations is another scheduler"


def test_the_own_history_is_slurms(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Also of jobs that ended before gpusched was there; and neither a store nor slurmdbd is a one-line error."""
    site, begin = slurm_cluster.site, time.time()
    jobs = [site.sbatch("sleep 1.1", f"--gpus-per-node={n}", "--time=5", user="games") for n in (1, 2, 8)]
    other = site.sbatch("sleep 1.1", "--gpus-per-node=4", "--time=5", "--partition=V100", "--hold")
    for job in jobs:
        site.wait(job)
    site.run(["scontrol", "release", str(other)])
    site.wait(other)
    log = tmp_path / "jobs.txt"
    log.write_text(completed(site, begin, 4))

    def figures(*words: str) -> dict[str, Any]:
        (row,) = slurm_cluster.json("replay", "-P", "easy", *words)
        return {key: row[key] for key in ("jobs", "gpus", "gpu_hours", "mean_wait_s", "recorded_mean_wait_s", "groups")}

    assert not slurm_cluster.state.exists()
    own = figures("--since", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin - 1)))
    assert own == figures(str(log), "--inventory", str(slurm_cluster.inventory))
    assert (own["jobs"], own["gpus"]) == (4, 32)
    assert figures("--since", "all")["jobs"] >= 4
    assert own["gpu_hours"] > 14.9 / 3600
    assert {group["name"]: group["jobs"] for group in own["groups"]} == {"A100": 3, "V100": 1}
    without = ("env", "PATH=/nowhere")
    said = slurm_cluster.cli("replay", "--since", "1h", "-P", "easy", check=False, prefix=without)
    assert said.returncode == 1
    assert said.stderr.startswith("gpusched: error: sacct is not on PATH; ")
    assert said.stderr.count("\n") == 1

    slurm_cluster.cli("tick")
    since = ("--since", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin - 1)))
    report = json.loads(slurm_cluster.cli("replay", "--nightly", *since, "--json").stdout)
    assert {part["partition"]: part["runs"][0]["jobs"] for part in report["partitions"]} == {"A100": 3, "V100": 1}
    seen = slurm_cluster.cli("replay", *since, "-P", "easy", prefix=without).stdout
    assert "using the jobs that the controller has seen" in " ".join(seen.split())


def test_a_site_that_does_not_count_gpus_is_advised(slurm_cluster: SlurmCluster) -> None:
    site, begin = slurm_cluster.site, time.time()
    site.configure(AccountingStorageTRES="")
    job = site.sbatch("sleep 1.1", "--gpus-per-node=1", "--time=5")
    site.wait(job)
    completed(site, begin, 1)
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin))
    said = slurm_cluster.cli("replay", "--since", since, "-P", "easy", check=False)
    assert (said.returncode, said.stderr.count("\n")) == (1, 1)
    assert "has gres/gpu; add gres/gpu to AccountingStorageTRES in slurm.conf" in said.stderr
