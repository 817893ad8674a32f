"""The Slurm site keeps its promises; its own commands are asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import processes, wait_until
from tests.testbed.slurm import OPERATOR, USERS, SlurmSite


def test_jobs_of_root_and_of_users_run_on_nodes_with_gpus(slurm_site: SlurmSite) -> None:
    script = "echo $(id -un) $(hostname) $SLURM_JOB_GPUS > $(id -un)"
    for user in ("root", *USERS):
        slurm_site.wait(slurm_site.sbatch(script, "--gres=gpu:2", "-w", "dgx003", user=user))
        assert (slurm_site.shared / user).read_text() == f"{user} dgx003 0,1\n"


def test_partitions_are_the_models(slurm_site: SlurmSite) -> None:
    lines = slurm_site.run(["sinfo", "-h", "-o", "%R %N %G"]).stdout.splitlines()
    assert lines == ["A100 dgx[001,003] gpu:a100:8", "V100 dgx[002,004] gpu:v100:8"]


def test_the_database_has_accounts_and_ended_jobs(slurm_site: SlurmSite) -> None:
    job = slurm_site.sbatch("true", "--gpus-per-node=1", user=USERS[0])
    slurm_site.wait(job)
    ask = ["sacct", "-n", "-P", "-X", "-j", str(job), "-o", "User,Account,State,AllocTRES"]
    row = wait_until(lambda: out if "COMPLETED" in (out := slurm_site.run(ask).stdout) else "", what="sacct")
    assert row.startswith(f"{USERS[0]}|lab|COMPLETED|")
    assert "gres/gpu=1" in row


def test_an_operator_may_reserve_and_users_may_not(slurm_site: SlurmSite) -> None:
    words = "scontrol create reservation ReservationName=r Nodes=dgx001 StartTime=now Duration=5 Accounts=root".split()
    assert slurm_site.run(words, user=USERS[0], check=False).returncode
    slurm_site.run(words, user=OPERATOR)


def test_reset_leaves_nothing_of_a_test(slurm_site: SlurmSite) -> None:
    slurm_site.run(
        "scontrol create reservation ReservationName=r Nodes=dgx001 StartTime=now Duration=5 Users=root".split()
    )
    slurm_site.run(["scontrol", "update", "NodeName=dgx002", "State=DRAIN", "Reason=test"])
    jobs = [slurm_site.sbatch("trap '' TERM; sleep 1000", "--gres=gpu:8", user=u) for u in USERS * 2]
    slurm_site.wait(jobs[0], "RUNNING")
    slurm_site.freeze_slurmctld()
    slurm_site.reset()
    assert set(slurm_site.states().values()) == {"IDLE"}
    assert slurm_site.run(["squeue", "-h", "-t", "all"]).stdout == ""
    assert "No reservations" in slurm_site.run(["scontrol", "show", "reservation"]).stdout
    assert slurm_site.sbatch("true") > max(jobs)


def test_a_killed_slurmctld_goes_on_with_its_jobs(slurm_site: SlurmSite) -> None:
    job = slurm_site.sbatch("while [ ! -e go ]; do sleep 0.05; done; echo done > proof", "--gres=gpu:1")
    slurm_site.wait(job, "RUNNING")
    slurm_site.wait_saved(job)
    slurm_site.kill_slurmctld()
    assert " is DOWN" in slurm_site.run(["scontrol", "ping"], check=False).stdout
    slurm_site.start_slurmctld()
    (slurm_site.shared / "go").touch()
    slurm_site.wait(job)
    assert (slurm_site.shared / "proof").read_text() == "done\n"


@pytest.mark.parametrize("guarded", [False, True])
def test_a_guard_keeps_users_from_a_reservation_by_name(slurm_site: SlurmSite, guarded: bool) -> None:
    if guarded:
        slurm_site.configure(JobSubmitPlugins="lua")
    slurm_site.run(
        "scontrol create reservation ReservationName=gpusched Nodes=dgx001 StartTime=now Duration=5"
        " Accounts=lab Flags=FLEX,IGNORE_JOBS".split()
    )
    done = slurm_site.run(["sbatch", "--wrap=true", "--reservation=gpusched"], user=USERS[0], check=False)
    assert bool(done.returncode) == guarded


def test_a_detached_site_ends_without_a_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.testbed"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    up = subprocess.run(
        [*command, "up", "1", "--slurm", "--root", tmp_path / "t"], env=environment, check=True, capture_output=True
    )
    site = json.loads(up.stdout)
    folder = Path(site["slurm_conf"]).parent
    sinfo = subprocess.run(["sinfo", "-h", "-o", "%N %T"], env={**os.environ, "SLURM_CONF": site["slurm_conf"]},
                            check=True, capture_output=True, text=True)  # fmt: skip
    assert sinfo.stdout == "dgx001 idle\n"
    assert len(_daemons(folder)) >= 4
    subprocess.run([*command, "down", "--root", tmp_path / "t"], env=environment, check=True)
    wait_until(lambda: not _daemons(folder), what="the last of them to be gone")
    assert not folder.exists()


def _daemons(folder: Path) -> list[int]:
    """Processes that belong to the site in this folder."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if str(folder) in _environment(pid) and processes.state(pid) != "Z"]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
