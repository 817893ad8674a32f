"""The output of a real Slurm's commands, and the requests to it."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusched.model.slurm import LEASE, SlurmJob
from gpusched.slurm.commands import NoAnswer, Slurm
from tests.testbed import wait_until
from tests.testbed.slurm import USERS, SlurmSite

SLEEP = "exec sleep 1000"
ANN = USERS[0]


@pytest.fixture(scope="module")
def site(slurm_session: SlurmSite) -> Iterator[SlurmSite]:
    """Slurm for all tests of this file, which leave jobs of others alone: to put it right takes seconds."""
    slurm_session.ready()
    yield slurm_session
    slurm_session.reset()


@pytest.fixture
def slurm(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    yield Slurm()
    for user in ("root", ANN):
        site.run(["scancel", f"--user={user}"])


def by_id(jobs: list[SlurmJob]) -> dict[str, SlurmJob]:
    found = {job.id: job for job in jobs}
    assert len(found) == len(jobs)
    return found


def test_texts_of_users_break_nothing(slurm: Slurm, site: SlurmSite) -> None:
    names = [
        "",
        "é | ,:;%i \x1f\x1e x\ny\n",
        "\nJobId=1 JobName=x UserId=",
        "a\tb\\n\"'$(x)",
        "N/A",
        "(null)",
        "x" * 300,
    ]
    fake = "x UserId=e(1) Nodes=dgx003 CPU_IDs=0 Mem=0 GRES=gpu:a100:8(IDX:0-7) MinCPUsNode=1 \n"
    words = ("-w", "dgx001", "--gpus-per-node=1", "--comment", fake, "--chdir", "/tmp")
    ids = [site.sbatch(SLEEP, "--job-name", name, *words, user=ANN) for name in [fake, *names]]
    site.wait(ids[-1], "RUNNING")
    jobs = by_id(slurm.jobs())
    assert [jobs[str(job)].name for job in ids] == [fake, *names]
    assert {jobs[str(job)].user for job in ids} == {ANN}
    positions = slurm.gpu_positions(list(jobs.values()))
    assert set(positions) >= set(map(str, ids))
    positions = {str(job): positions[str(job)] for job in ids}
    assert {node for held in positions.values() for node in held} == {"dgx001"}
    assert sorted(n for held in positions.values() for n in held["dgx001"]) == list(range(8))


def test_users_environment_settings_for_slurms_commands_are_ignored(
    slurm: Slurm, site: SlurmSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = str(site.sbatch(SLEEP, "--hold", user=ANN))
    before = by_id(slurm.jobs())[job], slurm.partitions()
    monkeypatch.setenv("SQUEUE_STATES", "R")
    monkeypatch.setenv("SQUEUE_USERS", USERS[1])
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert (by_id(Slurm().jobs())[job], Slurm().partitions()) == before


def test_requests(slurm: Slurm, site: SlurmSite) -> None:
    def held(*options: str) -> str:
        return str(site.sbatch(SLEEP, "--hold", *options, user=ANN))

    plain = held()
    typed = held("--gpus-per-node=a100:2", "-N2", "-t", "1-02:00:00", "-J", "typed", "--no-requeue")
    many = held("-p", "V100", "--gpus=6", "-n3", "-c4", "-w", "dgx004", "-C", "v100")
    either = held("-p", "A100,V100", "-N2-4", "-x", "dgx[001,003]", "--exclusive")
    tasks = held("-n4", "--gpus-per-task=2", f"--dependency=afterok:{plain}", "--begin=now+1hour")
    found = by_id(slurm.jobs())
    now = time.time()
    assert (found[plain].state, found[plain].reason, found[plain].priority) == ("PENDING", "JobHeldUser", 0)
    assert (found[plain].gpus, found[plain].partitions, found[plain].account) == ({}, ("A100",), "lab")
    assert abs(found[plain].submit_time - now) < 600
    assert found[plain].eligible_time is None
    job = found[typed]
    assert (job.gpus, job.nodes, job.time_limit_s, job.requeue) == ({"a100": 4}, 2, 93600, False)
    assert (found[plain].time_limit_s, found[plain].requeue) == (None, True)
    job = found[many]
    assert (job.gpus, job.cpus, job.req_nodes, job.features) == ({"": 6}, 12, ("dgx004",), "v100")
    job = found[either]
    assert (job.partitions, job.nodes, job.exclusive) == (("A100", "V100"), 2, True)
    assert job.exc_nodes == ("dgx001", "dgx003")
    assert (found[plain].exclusive, found[plain].exc_nodes) == (False, ())
    assert found[tasks].gpus == {"": 8}
    assert found[tasks].dependency.startswith(f"afterok:{plain}")


def test_memory_is_that_of_the_whole_job_where_slurm_counts_it(slurm: Slurm, site: SlurmSite) -> None:
    assert slurm.config()["SelectTypeParameters"] == "CR_CORE"
    options = [("--mem=3G", "-N2"), ("--mem-per-cpu=500", "-n6"), ("--mem=0",)]
    ids = [str(site.sbatch(SLEEP, "--hold", *words)) for words in options]
    assert [by_id(slurm.jobs())[job].memory_mib for job in ids] == [None, None, None]
    site.configure(SelectTypeParameters="CR_Core_Memory")
    found = by_id(Slurm().jobs())
    site.configure()
    assert [found[job].memory_mib for job in ids] == [6144, 3000, 1_000_000]


def test_arrays_and_heterogeneous_jobs(slurm: Slurm, site: SlurmSite) -> None:
    array = str(site.sbatch(SLEEP, "--array=3,8-12:2%2", "--gpus-per-node=1", user=ANN))
    sparse = str(site.sbatch(SLEEP, "--hold", f"--array={','.join(map(str, range(1, 99, 3)))}%7"))
    pair = str(site.sbatch("#!/bin/sh\n#SBATCH -H -n2\n#SBATCH hetjob\n#SBATCH -n3\nsleep 1000\n"))
    names = [f"{array}_{n}" for n in (3, 8, 10, 12)]
    site.wait(names[1], "RUNNING")
    found = by_id(slurm.jobs())
    assert [(found[name].state, found[name].array_index) for name in names] == [
        ("RUNNING", 3), ("RUNNING", 8), ("PENDING", 10), ("PENDING", 12)
    ]  # fmt: skip
    assert {(found[name].array_id, found[name].array_limit) for name in names} == {(array, 2)}
    assert (found[names[2]].raw_id, found[names[2]].gpus) == (array, {"": 1})
    assert sorted((job.array_index, job.array_limit) for job in found.values() if job.array_id == sparse) == [
        (n, 7) for n in range(1, 99, 3)
    ]
    assert [found[f"{pair}+{n}"].cpus for n in (0, 1)] == [2, 3]
    slurm.update([f"update JobId={sparse}_97 SiteFactor=1"])  # squeue has left out the last, and does the next to last
    tasks = {job.array_index: job.raw_id for job in slurm.jobs() if job.array_id == sparse}
    assert sorted(tasks) == list(range(1, 99, 3))
    assert tasks[94] == sparse != tasks[97]
    # the first update makes a task a job of its own; that is no reason to lose sight of it
    assert slurm.update([f"update JobId={names[3]} ReqNodeList=dgx003", f"requeue {names[0]}"]) == {}
    wait_until(lambda: site.state(names[0]) == "PENDING", what="the requeue")
    found = by_id(slurm.jobs())
    assert found[names[3]].req_nodes == ("dgx003",)
    assert found[names[2]].req_nodes == ()
    assert (found[names[0]].restarts, found[names[3]].restarts) == (1, 0)
    assert {found[name].array_limit for name in names} == {2}


def test_ended_jobs_and_what_they_had(slurm: Slurm, site: SlurmSite) -> None:
    begin = time.time()
    ok = str(site.sbatch("exit 0", "--gpus-per-node=2", "-w", "dgx001", user=ANN))
    bad = str(site.sbatch("exit 3"))
    site.wait(ok)
    site.wait(bad, "FAILED")
    found = by_id(slurm.jobs())
    assert [(found[job].state, found[job].exit_code) for job in (ok, bad)] == [("COMPLETED", 0), ("FAILED", 3)]
    job = found[ok]
    assert (job.gpus, job.node_names) == ({"a100": 2}, ("dgx001",))
    assert job.start_time is not None
    assert job.end_time is not None
    assert int(begin) <= job.submit_time <= job.start_time <= job.end_time <= time.time() + 1

    def row() -> dict[str, str]:
        head, *rows = [line.split("|") for line in slurm.ended(begin - 60, time.time() + 60, [ok]).splitlines()]
        assert {row[0] for row in rows} <= {ok}
        fields = {row[0]: dict(zip(head, row, strict=True)) for row in rows}.get(ok, {})
        return fields if fields.get("State") == "COMPLETED" else {}

    fields = wait_until(row, what="sacct")
    assert (fields["User"], fields["NodeList"]) == (ANN, "dgx001")
    assert int(fields["Submit"]) == job.submit_time


@pytest.mark.parametrize("time_s", [1_792_888_200, 1_792_891_800])  # 2:30, and 2:30 again
def test_sacct_is_asked_for_the_hour_that_is_meant_when_clocks_go_back(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, time_s: int
) -> None:
    """In the first of the two hours it was asked for the second, which had no jobs yet: ended ones were forgotten."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    with pytest.raises(NoAnswer, match=rf"Start time \({time_s}\) requested is after end time \({time_s - 1}\)"):
        slurm.ended(time_s, time_s - 1)


def test_unchanged_jobs_are_the_same_object(slurm: Slurm, site: SlurmSite) -> None:
    ids = [str(site.sbatch(SLEEP, "--hold")) for _ in range(3)]
    before = by_id(slurm.jobs())
    site.run(["scontrol", "update", f"JobId={ids[1]}", "Name=new"])
    after = by_id(slurm.jobs())
    assert [after[job] is before[job] for job in ids] == [True, False, True]


def test_nodes_partitions_and_the_lease(slurm: Slurm, site: SlurmSite) -> None:
    job = site.sbatch(SLEEP, "--gpus-per-node=3")
    site.wait(job, "RUNNING")
    site.run(["scontrol", "update", "NodeName=dgx002", "State=DRAIN", "Reason=fan 3\x1f|"])
    lease = f"create reservation ReservationName={LEASE} Nodes=dgx[001,003] StartTime=now Duration=5 Accounts=root"
    assert slurm.update([f"{lease} Flags=FLEX,IGNORE_JOBS,NO_HOLD_JOBS_AFTER_END"]) == {}
    nodes = {node.name: node for node in slurm.nodes()}
    assert sorted(nodes) == ["dgx001", "dgx002", "dgx003", "dgx004"]
    assert (nodes["dgx001"].gpus, nodes["dgx001"].gpus_used) == ({"a100": 8}, 3)
    assert (nodes["dgx001"].cpus, nodes["dgx001"].memory_mib) == (128, 1_000_000)
    assert nodes["dgx001"].version.split(".")[:2] == [f"{n:02}" for n in slurm.version()]
    assert set(nodes["dgx002"].states) == {"IDLE", "DRAIN"}
    assert nodes["dgx002"].reason.startswith("fan 3\x1f|")
    assert [(p.name, p.nodes, p.is_default) for p in slurm.partitions()] == [
        ("A100", ("dgx001", "dgx003"), True), ("V100", ("dgx002", "dgx004"), False)
    ]  # fmt: skip
    (found,) = slurm.reservations()
    assert (found.name, found.nodes, found.accounts) == (LEASE, ("dgx001", "dgx003"), ("root",))
    assert found.end_time - found.start_time == 300
    slurm.update([f"delete ReservationName={LEASE}", "update NodeName=dgx002 State=RESUME"])


def test_updates_say_which_failed(slurm: Slurm, site: SlurmSite) -> None:
    ids = [site.sbatch(SLEEP, "--hold") for _ in range(3)]
    many = ",".join(f"dgx{n:03}" for n in range(900))  # a line longer than any terminal
    errors = slurm.update(
        [
            f"update JobId={ids[0]} SiteFactor=7",
            "update JobId=999999 SiteFactor=7",
            f"update JobId={ids[1]} ReqNodeList={many}",
            f"update JobId={ids[1]} ReqNodeList=dgx003",
            f"update ReservationName={LEASE} EndTime=now+60",
            "nonsense",
            f"update JobId={ids[2]} Priority=x",
            f"release {ids[2]}",
        ]
    )
    assert sorted(errors) == [1, 2, 4, 5, 6]
    assert "999999" in errors[1]
    assert "Invalid node name" in errors[2]
    assert "reservation" in errors[4]
    found = by_id(slurm.jobs())
    assert found[str(ids[1])].req_nodes == ("dgx003",)
    site.wait(ids[2], "RUNNING")
    with pytest.raises(ValueError, match="one line"):
        slurm.update([f"update JobId={ids[0]} Name=a\nshutdown"])


def test_site_factors_of_jobs_that_wait_for_nodes(slurm: Slurm, site: SlurmSite) -> None:
    site.run(["scontrol", "update", "NodeName=dgx[001,003]", "State=DRAIN", "Reason=test"])
    ids = [site.sbatch(SLEEP) for _ in range(3)]
    slurm.update([f"update JobId={ids[0]} SiteFactor=70", f"update JobId={ids[1]} SiteFactor=-5"])
    found = by_id(slurm.jobs(site_factors=True))
    assert [found[str(job)].site_factor for job in ids] == [70, -5, 0]
    slurm.update(["update NodeName=dgx[001,003] State=RESUME"])


def test_a_command_that_ended_while_this_process_stood_still_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGSTOP: its time is over, and so is it."""
    given = subprocess.Popen.communicate

    def communicate(self: Any, input: bytes | None = None, timeout: float | None = None) -> Any:
        if timeout is not None:
            self.stdin.close()
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.stdin = None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return given(self, input, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(NoAnswer, match="got no answer from Slurm"):
        Slurm().run_command("true")


def test_a_frozen_and_a_dead_slurmctld_give_no_answer(slurm: Slurm, site: SlurmSite) -> None:
    job = site.sbatch(SLEEP, "--hold")
    short, update = Slurm(limit_s=0.6), [f"update JobId={job} SiteFactor=1"]
    site.freeze_slurmctld()
    for ask in (short.jobs, short.nodes, lambda: short.update(update)):
        begin = time.monotonic()
        with pytest.raises(NoAnswer) as error:
            ask()
        assert "got no answer from Slurm in 0.6" in error.value.line()
        assert time.monotonic() - begin < 300
    assert _children("squeue", "scontrol") == []
    site.thaw_slurmctld()
    wait_until(lambda: site.state(job) == "PENDING", what="slurmctld to answer again")
    site.wait_saved(job)
    site.kill_slurmctld()
    for ask in (short.jobs, lambda: short.update(update)):
        with pytest.raises(NoAnswer, match=r"no answer from Slurm in 0\.6"):
            ask()
    site.start_slurmctld()
    assert slurm.update(update) == {}


def test_the_error_of_a_command_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("Nonsense=1\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(NoAnswer) as error:
        Slurm().jobs()
    assert "failed (exit 1): scontrol: fatal: Unable to process configuration file" in error.value.line()


def test_updates_that_a_killed_scontrol_did_not_read_are_not_taken_for_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text('#!/bin/sh\nread line\nread show names mark\necho "$mark"\nkill -9 $$\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Slurm().update(["requeue 1"]) == {}
    with pytest.raises(NoAnswer, match="scontrol ended before its last command"):
        Slurm().update(["requeue 1", "requeue 2"])


def test_a_machine_without_slurm_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswer, match="scontrol is not on PATH") as error:
        Slurm().jobs()
    assert "where Slurm's commands are installed" in error.value.line()


def _children(*names: str) -> list[str]:
    """Commands with one of these names that this process started and that are still there."""
    mine = f"PPid:\t{os.getpid()}\n"
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if mine in text and text.startswith(tuple(f"Name:\t{name}\n" for name in names)):
            found.append(text)
    return found
