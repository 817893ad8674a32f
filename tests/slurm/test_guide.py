"""Every command of the guide to Slurm, run as it stands beside a real one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs import guides
from tests.slurm.conftest import SlurmCluster
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.slow

CODES = {"submit": 2, "cancel": 2}
"""They name Slurm's own command instead, as the guide shows."""


def test_every_command_of_the_guide_runs(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """History is what makes it slow: without it a promotion must be forced, and there is nothing to compare."""
    guides.write_files(slurm_cluster.folder)
    testbed, ssh = slurm_cluster.testbed, slurm_cluster.folder / ".ssh"
    ssh.mkdir()
    (ssh / "config").write_text(
        f"Host *\n  User root\n  IdentityFile {testbed.identity}\n  UserKnownHostsFile {testbed.known_hosts}\n"
    )
    monkeypatch.setenv("HOME", str(slurm_cluster.folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    slurm_cluster.start_controller()
    jobs = [str(slurm_cluster.site.sbatch("sleep 600", "--gpus=8", "--partition=A100")) for _ in range(3)]
    (page,) = (p for p in guides.GUIDES if p.stem == "slurm")
    failed = []
    for line in guides.examples(page):
        named = re.sub(r"why \d+", f"why {jobs[2]}", line).replace("cancel 1234 5", f"cancel {jobs[0]} {jobs[1]}")
        named = re.sub(r"(policy promote .*)", r"\1 --force test", named)
        if line.startswith("gpusched policy compare"):  # tests/promotion/test_lifecycle.py has the history for it
            continue
        try:
            changes = "policy promote" in line or "policy rollback" in line
            known = len(slurm_cluster.json("policy", "history")) if changes else 0
            guides.follow(slurm_cluster, named, slurm_cluster.folder, code=CODES.get(line.split()[1], 0))
            if changes:  # the controller's next cycle does it, and the next line goes by it
                wait_until(lambda n=known: len(slurm_cluster.json("policy", "history")) > n, 30, line)  # type: ignore[misc]
        except (AssertionError, TimeoutError) as error:
            failed.append(f"{line}\n{error}")
    assert not failed, "\n\n".join(failed)
