"""``gpusched check`` beside real Slurm: each thing that can be wrong is found, and says what to do."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from gpusched.config.inventory import load_inventory
from gpusched.doctor.findings import Finding
from gpusched.doctor.slurm import examine_slurm, judge_positions
from gpusched.model.readings import GpuWiring, Wiring
from gpusched.model.slurm import SlurmMode, Trouble
from tests.slurm.conftest import SlurmCluster
from tests.testbed.slurm_files import OPERATOR, USERS


class Examined(dict[str, list[Finding]]):
    """Findings by what was examined."""

    def one(self, check: str) -> Finding:
        assert len(self[check]) == 1, self[check]
        return self[check][0]

    @property
    def wrong(self) -> set[str]:
        return {check for check, found in self.items() if any(f.status != "ok" for f in found)}


Examine = Callable[..., Examined]


@pytest.fixture
def examined(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines Slurm as ``check`` does, by a controller of this user, with partition A100 in this mode."""
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.site.env["SLURM_CONF"])

    def examine(mode: SlurmMode = SlurmMode.OBSERVE, user: str = "root", trouble: Trouble | None = None) -> Examined:
        slurm_cluster.state.mkdir(exist_ok=True)
        os.chown(slurm_cluster.state, pwd.getpwnam(user).pw_uid, -1)
        inventory = load_inventory(slurm_cluster.inventory)
        modes: Mapping[str, SlurmMode] = {"A100": mode, "V100": SlurmMode.OBSERVE}
        found = Examined()
        for finding in examine_slurm(inventory, slurm_cluster.state, modes, trouble, time.time())[0]:
            found.setdefault(finding.check, []).append(finding)
        return found

    return examine


def test_a_well_kept_site(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    found = examined()
    assert found.wrong == set()
    assert found.one("version").message.startswith("Slurm ")
    assert found.one("mode").message == "A100: observe, V100: observe"
    assert found.one("guard").message.startswith("before mode decide: users could start jobs by naming")
    assert 'if uid ~= 0 and job.reservation == "gpusched" then return slurm.ERROR end' in found.one("guard").hint
    assert examined(SlurmMode.DECIDE).wrong == {"guard"}
    whole = slurm_cluster.json("check")
    assert {f["status"] for f in whole if f["subject"] == "slurm" or f["subject"].startswith("dgx")} == {"ok"}
    assert {f["check"] for f in whole if f["subject"] == "dgx003"} == {"ssh", "disk", "nvml", "gpus", "clock"}


def test_rights_of_the_user_that_runs_gpusched_are_checked(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    assert examined(SlurmMode.DECIDE, OPERATOR).one("rights").status == "ok"
    user = USERS[0]
    looks_on = examined(SlurmMode.OBSERVE, user).one("rights")
    assert (looks_on.status, looks_on.hint) == ("ok", f"sacctmgr modify user {user} set adminlevel=Operator")
    refused = examined(SlurmMode.ADVISE, user).one("rights")
    assert (refused.status, refused.message) == (
        "fail", f"{user}, who runs gpusched, can only observe; modes advise and decide need an Operator",
    )  # fmt: skip


def test_settings_that_stand_in_the_way(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    slurm_cluster.site.configure(
        AccountingStorageTRES="", SchedulerParameters="", PriorityType="priority/basic", JobSubmitPlugins="lua",
        PrivateData="jobs",
    )  # fmt: skip
    found = examined(SlurmMode.DECIDE)
    assert found.wrong == {"gpus in tres", "priority", "scheduler"}
    assert "AccountingStorageTRES=gres/gpu" in found.one("gpus in tres").hint
    assert found.one("scheduler").message.startswith(
        "batch_sched_delay is 3, sched_interval is 60, bf_interval is 30 s"
    )
    assert "batch_sched_delay=0,sched_interval=5,bf_interval=5" in found.one("scheduler").hint
    assert "instead of SiteFactor" in found.one("priority").message
    blind = examined(user=USERS[0]).one("rights")
    assert (blind.status, blind.message[:16]) == ("fail", "PrivateData=jobs")
    assert examined().wrong == {"gpus in tres"}  # what only other modes need is no fault


def test_an_inventory_that_is_not_as_slurm_has_it(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    slurm_cluster.site.run("scontrol create PartitionName=both Nodes=dgx[001-002]".split())
    slurm_cluster.write_inventory(nodes={"dgx003": {"gpus": 4}}, leave_out=["dgx004"])
    text = slurm_cluster.inventory.read_text().replace('"dgx002"', '"dgx005"')
    slurm_cluster.inventory.write_text(text)
    found = examined()
    assert found.wrong == {"partitions", "sizes", "overlap"}
    assert {(f.status, f.message) for f in found["partitions"]} == {
        ("fail", "Slurm does not have dgx005 in V100"),
        ("warn", "Slurm's V100 also has dgx[002,004]"),
    }
    (size,) = found["sizes"]
    assert size.message.startswith("dgx003 is declared with 4 GPUs, 128 cores")
    (overlap,) = found["overlap"]
    assert overlap.message == "dgx001 of A100 is also in Slurm's both"
    slurm_cluster.inventory.write_text(text.replace('"V100"', '"V200"'))
    assert "Slurm has no partition V200" in {f.message for f in examined()["partitions"]}


def test_slurm_that_does_not_answer(slurm_cluster: SlurmCluster) -> None:
    nowhere = {"PATH": str(slurm_cluster.folder)}
    checked = slurm_cluster.cli("check", "dgx001", check=False, env=nowhere)
    assert checked.returncode == 1
    assert "squeue is not on PATH" in checked.stdout or "scontrol is not on PATH" in checked.stdout
    slurm_cluster.cli("tick", env=nowhere)
    findings = [f for f in slurm_cluster.json("check", check=False) if f["check"] == "controller"]
    assert any(f["message"].startswith("Slurm has not responded since") for f in findings)
    status = slurm_cluster.cli("status").stdout
    assert "warning: Slurm has not responded since" in status
    assert "no decisions are made" in status
    slurm_cluster.cli("tick")
    assert "has not answered" not in slurm_cluster.cli("status").stdout


def test_which_gpus_slurm_means_is_known(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    slurm_cluster.site.configure(orders={"dgx003": [3, 1, 2, 0, 7, 6, 5, 4]})
    (found,) = [f for f in slurm_cluster.json("check") if f["check"] == "gres.conf"]
    assert found["message"].endswith("; dgx003 in a different order")
    assert (found["status"], "ConstrainDevices" in found["hint"]) == ("warn", True), "jobs are kept from no GPU here"
    inventory = load_inventory(slurm_cluster.inventory)
    seen = examine_slurm(inventory, slurm_cluster.state, {"A100": SlurmMode.OBSERVE}, None, time.time())[1]
    assert seen is not None

    def judged(gres_conf: str | None) -> dict[str, str]:
        wiring = {"dgx001": Wiring(gpus=tuple(GpuWiring(index=i, minor=i) for i in range(8)))}
        kept = {**seen.config, "TaskPlugin": "task/affinity,task/cgroup", "ConstrainDevices": "yes"}
        found = judge_positions(inventory, structs.replace(seen, gres_conf=gres_conf, config=kept), wiring)
        return {f.subject: f.message for f in found if f.status == "warn"}

    assert list(judged(None)) == ["slurm"]
    lines = [f"NodeName={node.name} Name=gpu File=/dev/nvidia[0-7]" for node in inventory.nodes]
    assert judged("\n".join(lines)) == {}
    assert judged("\n".join(lines[1:]))[inventory.nodes[0].name].startswith("gres.conf names no device files")
    wrong = judged("\n".join(lines).replace("[0-7]", "[1-8]"))
    assert wrong == {"dgx001": "gres.conf names /dev/nvidia8, which is not one of its GPUs"}
    assert (
        judged("\n".join(lines).replace("[0-7]", "[0-3]"))["dgx002"]
        == "gres.conf names 4 device files, Slurm has 8 GPUs"
    )


def test_the_guard_of_the_guide_keeps_users_from_the_lease(slurm_cluster: SlurmCluster, examined: Examine) -> None:
    site, user = slurm_cluster.site, USERS[0]
    site.configure(JobSubmitPlugins="lua")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "slurm.md").read_text("utf-8")
    script = guide.partition("```lua\n")[2].partition("```")[0].replace("990", str(pwd.getpwnam(OPERATOR).pw_uid))
    lua = site.folder / "job_submit.lua"
    before = lua.read_text()
    lua.write_text(script)
    try:
        assert examined(SlurmMode.DECIDE).one("guard").message == "job_submit.lua is active"
        site.run(
            "scontrol create reservation ReservationName=gpusched Nodes=dgx001 StartTime=now Duration=5 "
            "Users=-nobody Flags=FLEX,IGNORE_JOBS".split()
        )
        named = ["sbatch", "--reservation=gpusched", "--wrap", "true", "-o", "/dev/null"]
        job = site.sbatch("sleep 1000", "--hold", user=user)
        change = ["scontrol", "update", f"JobId={job}", "ReservationName=gpusched"]
        for words in (named, change):
            assert site.run(words, user=user, check=False).returncode, words
        site.run(change, user=OPERATOR)
    finally:
        lua.write_text(before)
