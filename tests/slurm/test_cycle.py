"""The cycle beside real Slurm, through the command line: jobs mirrored, nodes, readings, energy, reasons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpusched.controller.slurm import cycle
from gpusched.controller.slurm.cycle import TROUBLE
from gpusched.model.jobs import ENDED, JobState
from gpusched.slurm import lease
from gpusched.slurm.commands import NoAnswer, Slurm
from tests.slurm.beside import Beside
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


def test_energy_is_charged_to_the_holders_of_the_gpus_in_any_order(slurm_cluster: SlurmCluster) -> None:
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
        joules = pytest.approx(gpus * gpus)  # each GPU as many as the job has GPUs
        assert job_of(slurm_cluster, job).energy_j == joules
    rows = {row["name"]: row["energy_kwh"] for row in slurm_cluster.json("power", "--by", "job")["rows"]}
    assert {job: rows[str(job)] for job in jobs.values()} == {jobs[n]: pytest.approx(n * n / 3.6e6) for n in jobs}


def test_a_job_that_slurm_requeues_is_one_job_with_two_attempts(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    go = site.shared / "go"
    job = site.sbatch(f"until [ -e {go} ]; do sleep 0.05; done; exit 3", "--gpus=1", "--requeue")
    site.wait(job, "RUNNING")
    slurm_cluster.cli("tick")
    site.run(["scontrol", "requeue", str(job)])
    site.wait(job, "PENDING")
    wait_until(lambda: "BeginTime" in site.run(["squeue", "-h", "-j", str(job), "-o", "%r"]).stdout, 30, "the requeue")
    slurm_cluster.cli("tick")
    waiting = job_of(slurm_cluster, job)
    assert (waiting.state, waiting.attempt, waiting.allocation) == (JobState.PENDING, 1, None)
    assert "BeginTime" in slurm_cluster.cli("why", str(job)).stdout
    go.touch()
    # slurmd refuses a credential of the second in which the job was requeued ("already killed, do not launch")
    site.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"])
    site.wait(job, "FAILED")
    slurm_cluster.cli("tick")
    ended = job_of(slurm_cluster, job)
    assert (ended.state, ended.attempt, ended.exit_code) == (JobState.FAILED, 2, 3)
    assert ended.reason == "NonZeroExitCode"
    assert ended.submit_time < ended.slurm.submit_time, "that of the requeue is Slurm's"
    with slurm_cluster.reader() as reader:
        assert reader is not None
        runs = {run.attempt: run.outcome for run in reader.runs(0, 1e12) if run.job_id == str(job)}
    assert runs == {1: "PENDING", 2: "FAILED"}
    assert kinds(slurm_cluster, job) == ["submitted", "running", "requeued", "running", "ended"]


def test_slurms_word_for_a_node_goes_before_ours(slurm_cluster: SlurmCluster) -> None:
    """One drained with a job on it, one that is down, one that is never asked, one that cannot be asked."""
    site, node = slurm_cluster.site, slurm_cluster.testbed.node("dgx001")
    slurm_cluster.write_inventory(nodes={"dgx002": {"transport": "none"}, "dgx003": {"port": 1}})
    script = f"echo $$ > {site.shared}/pid; sleep 1000"
    job = site.sbatch(script, "--gpus=2", "-w", "dgx001", user="games")
    site.wait(site.sbatch("sleep 1000", "--gpus=3", "-p", "V100", "-w", "dgx002", user="games"), "RUNNING")
    wide = site.sbatch("sleep 1000", "--gpus=8", "-w", "dgx003", "--hold", "--time=10")
    site.wait(job, "RUNNING")
    pid = wait_until(lambda: _text(site.shared / "pid"), 30, "the job's pid")
    node.nvml_set({f"gpu{gpu}.procs": f"{of}:{1 << 30}" for gpu, of in ((0, pid), (1, 1), (5, 1))})
    site.run(["scontrol", "update", "nodename=dgx001", "state=drain", "reason=a bad fan"])
    site.run(["scontrol", "update", "nodename=dgx004", "state=down", "reason=burnt"])
    slurm_cluster.cli("tick")
    nodes = {name: node_of(slurm_cluster, name) for name in ("dgx001", "dgx002", "dgx003", "dgx004")}
    assert [record.state for record in nodes.values()] == ["DRAINING", "MIXED", "IDLE", "DOWN"]
    assert "a bad fan" in nodes["dgx001"].reason
    assert "its GPUs are not probed" in nodes["dgx003"].reason, "ssh does not answer there, Slurm does"
    assert "burnt" in slurm_cluster.cli("nodes").stdout
    seen = {gpu.index: gpu.processes for gpu in nodes["dgx001"].reading.gpus if gpu.processes}
    assert {index: found[0].container for index, found in seen.items()} == {0: f"gpusched-{job}-1-0", 1: None, 5: None}
    site.run(["scontrol", "update", "nodename=dgx001", "state=resume"])
    wait_until(lambda: site.states()["dgx001"] == "MIXED", 30, "an answer of slurmd")
    two = site.sbatch("sleep 1000", "--gpus=7", "-N1", "-p", "V100", "-w", "dgx002", "--time=10")
    rest = site.sbatch("sleep 1000", "--gpus=7", "-N1", "-w", "dgx001", "--time=10")
    slurm_cluster.cli("tick")
    assert "5 of 8 GPUs free" in slurm_cluster.cli("why", str(two)).stdout
    assert "5 of 8 GPUs free" in slurm_cluster.cli("why", str(rest)).stdout, "a stranger has one of the other six"
    assert "dgx003  yes" in slurm_cluster.cli("why", str(wide)).stdout


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def test_a_job_chosen_to_start_counts_and_is_not_charged(slurm_cluster: SlurmCluster) -> None:
    """A pin holds GPUs that a plan must not give away, and that it does not have yet."""
    site, node = slurm_cluster.site, slurm_cluster.testbed.node("dgx001")
    site.wait(runs := site.sbatch("sleep 1000", "--gpus=4", "-w", "dgx001"), "RUNNING")
    waits = site.sbatch("sleep 1000", "--gpus=8", "-N1", "-w", "dgx001", "--time=10", user="games")

    def tick() -> None:
        begin = lease.create(["dgx001"], enforced=False)
        site.run(["scontrol"], input=f"{begin}\n{lease.start(str(waits), ['dgx001'])}\n", check=False)
        slurm_cluster.cli("tick")  # nobody has put gpusched in charge: it takes the pin back

    tick()
    assert kinds(slurm_cluster, waits) == ["submitted", "starting"]
    pinned = job_of(slurm_cluster, waits)
    assert (pinned.state, pinned.slurm.pinned) == (JobState.STARTING, ("dgx001",))
    assert gpus_of(slurm_cluster, waits) == {"dgx001": (4, 5, 6, 7)}, "what is there"
    node.nvml_set({f"gpu{i}.energy_mj": 1_000_000 * (i + 1) + 1000 for i in range(8)})
    tick()
    with slurm_cluster.reader() as reader:
        assert reader is not None
        assert reader.energy_of_jobs() == pytest.approx({str(runs): 4.0})


def test_where_slurm_does_not_answer_nothing_is_decided_and_time_goes_on(slurm_cluster: SlurmCluster) -> None:
    site, node = slurm_cluster.site, slurm_cluster.testbed.node("dgx001")
    job = site.sbatch("sleep 1000", "--gpus=8", "-w", "dgx001")
    site.wait(job, "RUNNING")
    slurm_cluster.cli("tick")
    node.nvml_set({"gpu5.energy_mj": 6_000_000 + 7_000})
    errors = slurm_cluster.cli("tick", env={"PATH": "/nonexistent"}).stderr
    assert "no decisions until Slurm responds" in errors
    with slurm_cluster.reader() as reader:
        assert reader is not None
        assert "not on PATH" in str(reader.meta(TROUBLE))
        assert reader.energy_of_jobs()[str(job)] == pytest.approx(7.0)
    assert job_of(slurm_cluster, job).state is JobState.RUNNING
    slurm_cluster.cli("tick")
    with slurm_cluster.reader() as reader:
        assert reader is not None
        assert reader.meta(TROUBLE) == ""


def test_jobs_that_slurmctld_has_forgotten_come_from_its_accounting(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    ran, waits = (site.sbatch("sleep 1000", "--gpus=8", "-w", "dgx001") for _ in range(2))
    site.wait(ran, "RUNNING")
    slurm_cluster.cli("tick")
    before = job_of(slurm_cluster, ran)
    command = ["sacct", "-n", "-X", "-o", "JobID,State", "-j", f"{ran},{waits}"]
    wait_until(lambda: "RUNNING" in (out := site.run(command).stdout) and "PENDING" in out, 30, "slurmdbd to know them")
    site.reset()

    def ended_after_a_tick() -> bool:
        slurm_cluster.cli("tick")
        return all(job_of(slurm_cluster, one).state in ENDED for one in (ran, waits))

    wait_until(ended_after_a_tick, 50, "their ends")
    ended = job_of(slurm_cluster, ran)
    assert (ended.state, ended.start_time) == (JobState.CANCELLED, before.start_time)
    assert ended.reason == ""
    assert job_of(slurm_cluster, waits).state is JobState.CANCELLED
    assert job_of(slurm_cluster, waits).start_time is None


@pytest.mark.parametrize("has_accounting", [True, False])
def test_purged_jobs_wait_while_slurmdbd_does_not_answer(
    slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, has_accounting: bool
) -> None:
    """Also across restarts of the controller. Without an accounting database they are forgotten."""
    site = slurm_cluster.site
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    beside = Beside(slurm_cluster)
    ran, waits = (site.sbatch("sleep 1000", "--gpus=8", "-w", "dgx001") for _ in range(2))
    site.wait(ran, "RUNNING")
    beside.run()
    before = job_of(slurm_cluster, ran)
    told = ["sacct", "-n", "-X", "-o", "JobID,State", "-j", f"{ran},{waits}"]
    wait_until(lambda: "RUNNING" in (out := site.run(told).stdout) and "PENDING" in out, 30, "slurmdbd to know them")
    site.reset()

    def silent(*_: object) -> str:
        raise NoAnswer("sacct failed (exit 1): slurmdbd is down")

    with monkeypatch.context() as patched:
        patched.setattr(Slurm, "ended", silent)
        if not has_accounting:
            patched.setattr(Slurm, "config", lambda _: {"AccountingStorageType": "accounting_storage/none"})
        for _ in range(3):
            beside.run(later=40.0)
            beside.store.close()
            beside.begin()
        found = [job_of(slurm_cluster, one) for one in (ran, waits)]
        if not has_accounting:
            assert [(job.state, job.reason) for job in found] == [(JobState.CANCELLED, "SlurmForgot")] * 2
            return
        assert [(job.state, job.reason) for job in found] == [(JobState.COMPLETING, "AccountingDown")] * 2
        assert "slurmdbd, which knows how it ended, does not answer" in slurm_cluster.cli("why", str(waits)).stdout
        assert "2 COMPLETING" in slurm_cluster.cli("status").stdout
        assert {node_of(slurm_cluster, "dgx001").state} == {"IDLE"}, "they hold nothing"

    asked = list[Sequence[str]]()

    def ended(self: Slurm, since: float, until: float, jobs: Sequence[str] = ()) -> str:
        asked.append(jobs)
        return ends(self, since, until, jobs)

    ends = Slurm.ended
    monkeypatch.setattr(Slurm, "ended", ended)
    monkeypatch.setattr(cycle, "MAX_ASKED", 1)

    def have_ended() -> bool:
        beside.run()
        return all(job_of(slurm_cluster, one).state in ENDED for one in (ran, waits))

    wait_until(have_ended, 50, "their ends")
    found = [job_of(slurm_cluster, one) for one in (ran, waits)]
    assert [(job.state, job.reason, job.start_time) for job in found] == [
        (JobState.CANCELLED, "", before.start_time), (JobState.CANCELLED, "", None),
    ]  # fmt: skip
    assert {*map(tuple, asked)} == {(str(ran),), (str(waits),)}, "not about all jobs of the time: these may be millions"
    assert gpus_of(slurm_cluster, ran) == {"dgx001": tuple(range(8))}
    beside.store.close()
