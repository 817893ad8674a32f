"""Mode decide when things go wrong, with real Slurm: each job runs once, where and in the order that was decided."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from itertools import product

import pytest

from gpusched.model.jobs import ENDED, JobState
from tests.slurm.conftest import SlurmCluster
from tests.slurm.faults import Asked, Decided, Proofs
from tests.slurm.mortal import STEPS
from tests.testbed import wait_until
from tests.testbed.slurm import OPERATOR, USERS, SlurmSite

SLEEP = "sleep 0.3"
ONE_PASS_S = 3.0
"""Slurm starts what it may in one pass over its queue, a second after the other or, on a busy machine, so late; in its
own order. What a pass took longer (`longest_pass_s`) is added."""


def shapes(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Short jobs of both users in both partitions, of 1 to 8 GPUs on one or two nodes."""
    drawn = random.Random(seed)
    jobs = []
    for at in range(count):
        part, gpus, limit = (
            drawn.choice(["A100", "V100"]),
            drawn.choice([1, 1, 1, 1, 2, 2, 4]),
            drawn.choice([1, 5, 60]),
        )
        nodes = 2 if drawn.random() < 0.1 else 1
        jobs.append((USERS[at % 2], f"-p {part} --nodes={nodes} --gpus-per-node={gpus} --time={limit}", SLEEP))
    return jobs


def recorded(site: SlurmSite) -> list[list[str]]:
    """Job, state, start, submission and end of what this test submitted, as the accounting database has it.

    slurmctld may send a record twice when it was kept from answering: rows that are equal in all of it are one run.
    """
    ask = ["sacct", "-a", "-X", "-D", "-n", "-P", "-S", "now-1hour", "-o", "JobID,State,Start,Submit,End"]
    text = site.run(["env", "SLURM_TIME_FORMAT=%s", *ask]).stdout
    rows = [line.split("|") for line in dict.fromkeys(text.split())]
    return [row for row in rows if int(row[0].split("_")[0]) >= site.first_job]


def longest_pass_s(site: SlurmSite) -> float:
    """Seconds that the longest pass over its queue has taken since slurmctld started, with or without backfill."""
    return max(map(int, re.findall(r"Max cycle: +(\d+)", site.run(["sdiag"]).stdout)), default=0) / 1e6


def completed(rows: list[list[str]]) -> int:
    return sum(row[1] == "COMPLETED" for row in rows)


def started(site: SlurmSite, count: int) -> dict[str, int]:
    """Job -> when it was started, in Slurm's own records; each one ran once and to its end."""

    def complete() -> list[list[str]]:
        rows = recorded(site)
        return rows if completed(rows) == count else []

    rows = wait_until(complete, 60, f"{count} jobs in the accounting database")
    assert len(rows) == count, "none was requeued, cancelled or lost"
    return {job: int(start) for job, _, start, *_ in rows}


def test_200_jobs_run_once_each_where_and_in_the_order_that_was_decided(slurm_cluster: SlurmCluster) -> None:
    """While controllers die at every step of a batch, slurmctld is frozen and killed, and people use Slurm as ever."""
    site, (user, other) = slurm_cluster.site, USERS
    site.configure(AccountingStorageEnforce="associations,limits")
    decided, proofs = Decided(slurm_cluster, limit_s=2), Proofs(site)
    decided.start()
    long = proofs.submit([(user, "-p A100 -w dgx001 --gpus-per-node=1", "while [ ! -e go ]; do sleep 0.1; done")])
    array = proofs.submit([(user, "-p A100 --array=0-23%4 --gpus-per-node=1", SLEEP)])[0]
    named = proofs.submit([(user, "-p A100 -w dgx003 --gpus-per-node=1", SLEEP)] * 5)
    held = proofs.submit([(user, "-p V100 --hold --gpus-per-node=2", SLEEP)] * 3)
    limited = proofs.submit([(other, "-p V100 -A small --gpus-per-node=1", SLEEP)] * 8)
    chain: list[str] = []
    for _ in range(4):
        after = f"--dependency=afterok:{chain[-1]}" if chain else ""
        chain += proofs.submit([(other, f"-p A100 {after} --gpus-per-node=1", SLEEP)])
    with decided.paused():  # or, on a busy machine, too few are left to start for the last ones to die at
        plain = proofs.submit(shapes(155, seed=1))
        site.run(["scontrol", "update", "NodeName=dgx004", "State=DRAIN", "Reason=by hand"])
        drained = time.time()
        decided.kill_at(STEPS)
    tasks = [f"{array}_{index}" for index in range(24)]
    jobs = [*long, *plain, *named, *held, *limited, *chain, *tasks]
    assert len(jobs) == 200

    decided.wait_deaths(1 + len(STEPS))
    assert decided.deaths()[1:] == list(STEPS)
    assert not {line.job for line in proofs.lines()} & set(held), "their user holds them"
    site.freeze_slurmctld()
    wait_until(lambda: _unanswered(slurm_cluster), 60, "no answer")
    site.thaw_slurmctld()
    resumed = time.time()
    site.run(["scontrol", "update", "NodeName=dgx004", "State=RESUME"])
    for job in held:
        site.run(["scontrol", "release", job], user)
    wait_until(lambda: not _unanswered(slurm_cluster), 60, "answers")
    with decided.paused():  # slurmctld forgets what it has not saved, in any mode
        wait_until(lambda: decided.going() == [long[0]], 60, "the end of short jobs")
        site.wait_saved(long[0])
        over = len(proofs.lines()) - 1
        wait_until(lambda: completed(recorded(site)) == over, 60, "the ends in the accounting database")
        pass_s = longest_pass_s(site)
        site.kill_slurmctld()
    wait_until(lambda: _unanswered(slurm_cluster), 60, "no answer")
    site.start_slurmctld()
    proofs.wait(len(jobs), 90)
    (site.shared / "go").touch()

    lines = {line.job: line for line in proofs.lines()}
    assert sorted(line.job for line in proofs.lines()) == sorted(jobs), "each once"
    pass_s = ONE_PASS_S + max(pass_s, longest_pass_s(site))
    starts = started(site, len(jobs))
    asked = {job: decided.last_asked(line) for job, line in lines.items()}
    for job, line in lines.items():
        ask = asked[job]
        assert ask is not None, f"{line} was never decided"
        assert (line.nodes, line.host) == (tuple(sorted(ask.nodes)), min(ask.nodes)), (line, ask)
        assert "dgx004" not in line.nodes or not drained + pass_s < starts[job] < int(resumed)
    for batch, plan in decided.batches():
        wanted = [ask[1:] for ask in batch]
        assert [ask[1:] for ask in plan if ask[1:] in wanted] == wanted, "what was decided, in the decision's order"
    overtaken = [pair for pair in product(jobs, jobs) if _overtakes(*pair, pass_s, asked, starts)]
    assert overtaken == []
    assert {lines[job].host for job in named} == {"dgx003"}
    assert [lines[job].time for job in chain] == sorted(lines[job].time for job in chain)
    with_limits = [(limited, 2), (tasks, 4)]
    for some, most in with_limits:
        begins = sorted(lines[job].time for job in some)
        assert all(late - soon >= 0.3 for soon, late in zip(begins, begins[most:], strict=False)), f"{most} at once"
    wait_until(lambda: _ended_in_store(slurm_cluster, jobs), 60, "the mirror to see the ends")


def _unanswered(cluster: SlurmCluster) -> bool:
    """Whether the controller has said last that Slurm does not answer; on a busy machine it says so uncalled, too."""
    log = cluster.controller_log
    return log.rfind("no decisions until Slurm responds") > log.rfind("Slurm responds again")


def _overtakes(
    late: str, soon: str, pass_s: float, asked: dict[str, Asked | None], starts: dict[str, int]
) -> bool:
    """Whether a job began before another that was to begin earlier in the same partition, on nodes that were there."""
    first, second = asked[soon], asked[late]
    assert first is not None
    assert second is not None
    there = {node in ("dgx001", "dgx003") for node in (*first.nodes, *second.nodes)}
    return (
        len(there) == 1 and "dgx004" not in first.nodes
        and first.time < second.time and starts[soon] > starts[late] + pass_s
    )  # fmt: skip


def _ended_in_store(cluster: SlurmCluster, jobs: list[str]) -> bool:
    with cluster.reader() as reader:
        assert reader is not None
        found = [reader.job(job) for job in jobs]
    states = {(job.state, job.attempt) for job in found if job is not None and job.state in ENDED}
    assert states <= {(JobState.COMPLETED, 1)}
    return all(job is not None and job.state in ENDED for job in found)


def test_a_controller_that_dies_in_a_batch_leaves_its_cluster_to_slurm(slurm_cluster: SlurmCluster) -> None:
    """The lease ends by the clock, Slurm starts what waits, and what runs runs on; the next controller takes over."""
    site, (user, other) = slurm_cluster.site, USERS
    decided, proofs = Decided(slurm_cluster), Proofs(site)
    decided.start()
    beats = "i=0; while [ ! -e go ]; do i=$((i + 1)); echo $i > beat; sleep 0.1; done"
    long = proofs.submit([(user, "-p A100 -w dgx001 --gpus-per-node=2", beats)])
    proofs.wait(1)
    decided.kill_at(["asked 1", *["began"] * 500])  # it dies at once whenever it is started again
    batch = proofs.submit([(other, "-p A100 --gpus-per-node=1", SLEEP)] * 6)
    wait_until(lambda: "asked 1" in decided.deaths(), 30, "a death in a batch")
    slurm_cluster.kill_controller()
    rest = proofs.submit([(user, f"-p {part} --gpus-per-node=1", SLEEP) for part in ("A100", "V100") for _ in range(9)])
    end = decided.shorten_lease(5)
    proofs.wait(1 + len(batch) + len(rest), 60)
    lines = {line.job: line for line in proofs.lines()}
    assert len(lines) == len(proofs.lines()), "each once"
    assert sorted(lines) == sorted([*long, *batch, *rest])
    assert all(end <= lines[job].time for job in rest), "only once the lease is over"
    beat = (site.shared / "beat").read_text()
    wait_until(lambda: (site.shared / "beat").read_text() != beat, 10, "the job that runs on")

    decided.start_again()
    decided.wait_lease()
    late = proofs.submit([(user, "-p A100 -w dgx001 --gpus-per-node=2", SLEEP)])[0]
    proofs.wait(2 + len(batch) + len(rest))
    (site.shared / "go").touch()
    assert decided.last_asked(proofs.lines()[-1]) is not None, "it decides again"
    assert proofs.lines()[-1].job == late
    assert {line.time for line in proofs.lines() if line.job in long} == {lines[long[0]].time}
    site.wait(long[0])


def test_an_id_that_slurm_gives_twice_is_two_jobs(slurm_cluster: SlurmCluster) -> None:
    """What was submitted in the last seconds of a slurmctld that is killed is lost, and its id goes to another."""
    site, user = slurm_cluster.site, USERS[0]
    decided, proofs = Decided(slurm_cluster), Proofs(site)
    first = proofs.submit([(user, "-p A100 --hold --gpus-per-node=1", SLEEP)])[0]
    site.wait_saved(first)
    saved = {path: path.read_bytes() for path in (site.folder / "state").iterdir() if path.is_file()}
    decided.start()
    lost = proofs.submit([(user, "-p A100 --hold --gpus-per-node=2", SLEEP)])[0]
    slurm_cluster.wait_state(lost, "PENDING")
    site.kill_slurmctld()
    for path, data in saved.items():
        path.write_bytes(data)
    wait_until(lambda: time.time() > slurm_cluster.job(lost).submit_time + 2, what="another second")
    site.start_slurmctld()
    again = proofs.submit([(user, "-p A100 --gpus-per-node=4", SLEEP)])[0]
    assert again == lost
    proofs.wait(1)
    ended = slurm_cluster.wait_state(f"{again}~2", "COMPLETED")
    assert (ended.user, ended.spec.gpus_per_node, ended.attempt) == (user, 4, 1)
    forgotten = slurm_cluster.wait_state(lost, "CANCELLED")
    assert (forgotten.user, forgotten.reason, forgotten.start_time) == (user, "SlurmForgot", None)
    assert [line.job for line in proofs.lines()] == [again]


@pytest.mark.parametrize(("who", "may"), [(OPERATOR, True), (USERS[0], False)])
def test_gpusched_may_do_what_its_user_may(slurm_cluster: SlurmCluster, who: str, may: bool) -> None:
    """An Operator suffices for mode decide; another user does no harm: Slurm starts its jobs as ever."""
    site, env = slurm_cluster.site, as_user(slurm_cluster, who)
    slurm_cluster.write_inventory(nodes={n.name: {"transport": "none"} for n in site.testbed.nodes})
    slurm_cluster.cli("tick", env=env)
    slurm_cluster.cli("policy", "promote", "easy", "-p", "A100", "--mode", "decide", "--force", "a test", env=env)
    errors = slurm_cluster.cli("tick", env=env).stderr
    assert ("gpusched" in site.run(["scontrol", "show", "reservation"]).stdout) == may
    job = site.sbatch("sleep 1000", "-p", "A100", "--gpus-per-node=2", user=USERS[1])
    if may:
        wait_until(lambda: site.run(["squeue", "-h", "-o", "%r"]).stdout.startswith("ReqNodeNotAvail"), 20, "the lease")
        slurm_cluster.cli("tick", env=env)
    else:
        assert "Slurm rejects the lease and decides itself: " in errors
    site.wait(job, "RUNNING")
    tick = slurm_cluster.cli("tick", env=env)
    assert "Traceback" not in tick.stderr
    assert slurm_cluster.state_of(str(job)) == "RUNNING"


def test_naming_the_lease_gives_users_no_advantage(slurm_cluster: SlurmCluster) -> None:
    """Without the guard of job_submit.lua too, once gpusched has seen it; with it they are refused."""
    site, user = slurm_cluster.site, USERS[0]
    decided = Decided(slurm_cluster)
    decided.start()
    full = [site.sbatch("sleep 1000", "-w", name, "--gpus-per-node=8", "-p", "A100") for name in ("dgx001", "dgx003")]
    for job in full:
        site.wait(job, "RUNNING")
    words = ["-p", "A100", "--gpus-per-node=8", "--reservation=gpusched", "-o", "/dev/null", "--wrap=sleep 1000"]
    sly = site.run(["sbatch", "--parsable", *words], user).stdout.strip()
    wait_until(lambda: site.run(["squeue", "-h", "-j", sly, "-o", "%v"]).stdout.strip() == "(null)", 20, "its removal")
    others = site.run(["scontrol", "update", f"JobId={full[0]}", "ReservationName=gpusched"], user, check=False)
    assert others.returncode, "of others' jobs they change nothing"
    for words_ in (["update", "ReservationName=gpusched", "EndTime=now+999"], ["delete", "ReservationName=gpusched"]):
        assert site.run(["scontrol", *words_], user, check=False).returncode
    site.configure(JobSubmitPlugins="lua")
    assert site.run(["sbatch", *words], user, check=False).returncode
    honest = str(site.sbatch("sleep 1000", "--hold", user=user))
    assert site.run(["scontrol", "update", f"JobId={honest}", "ReservationName=gpusched"], user, check=False).returncode


def as_user(cluster: SlurmCluster, user: str) -> dict[str, str]:
    """Variables with which gpusched is this user for Slurm."""
    folder = cluster.folder / "bin"
    folder.mkdir()
    for command in ("scontrol", "squeue", "sacct", "sprio", "sdiag", "sinfo", "sacctmgr"):
        path = folder / command
        path.write_text(
            f'#!/bin/sh\nexec setpriv --reuid {user} --regid nogroup --clear-groups {shutil.which(command)} "$@"\n'
        )
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
