"""Job scripts over two nodes as users run them: the script once, srun on all its nodes."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Cluster

PYTHON = ("--mount", "/usr:/usr:ro", "--mount", "/usr/lib:/lib:ro", "--mount", "/usr/lib64:/lib64:ro",
          "--env", "PATH=/bin:/usr/bin")  # fmt: skip
"""Gives the testbed's image, which is busybox, the node's own python3."""


def submit(cluster: Cluster, folder: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    """`gpusched submit job.sh` on partition A100; returns the id."""
    (folder / "job.sh").write_text("#!/bin/sh\n" + script)
    words = ["submit", "-p", "A100", *PYTHON, "--mount", f"{folder}:/share", *options]
    return cluster.cli(*words, str(folder / "job.sh"), *arguments).stdout.strip()


def test_the_script_runs_once_and_srun_on_all_nodes(house: Cluster, share: Path) -> None:
    script = """
    echo "script $SLURMD_NODENAME $1 ${RANK-none} $SLURM_NTASKS $SLURM_TASKS_PER_NODE"
    scontrol show hostnames "$SLURM_JOB_NODELIST"
    export MINE=mine
    srun -l sh -c 'echo "$SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURMD_NODENAME $RANK/$WORLD_SIZE $MINE"'
    """
    job = submit(house, share, script, "-N", "2", "--ntasks-per-node", "2", arguments=("a b",))
    found = house.wait_state(job)
    lines = house.logs(job).splitlines()
    assert found.exit_code == 0, lines
    print(lines)
