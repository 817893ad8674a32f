"""Mode decide when things go wrong, with real Slurm: each job runs once, where and in the order that was decided."""

from __future__ import annotations

import random
import time
from itertools import product

from gpusched.model.jobs import ENDED, JobState
from tests.slurm.conftest import SlurmCluster
from tests.slurm.faults import Asked, Decided, Line, Proofs
from tests.slurm.mortal import STEPS
from tests.testbed import wait_until
from tests.testbed.slurm import USERS, SlurmSite

SLEEP = "sleep 0.3"
ONE_PASS_S = 1.0
"""Slurm starts what it may in one pass over its queue, which takes this long at the most; in its own order."""


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


def started(site: SlurmSite, count: int) -> dict[str, int]:
    """Job -> when it was started, in Slurm's own records; each one ran once and to its end."""
    ask = ["sacct", "-a", "-X", "-D", "-n", "-P", "-S", "now-1hour", "-o", "JobID,State,Start"]

    def complete() -> list[list[str]]:
        env = {"SLURM_TIME_FORMAT": "%s"}
        rows = [
            line.split("|") for line in site.run(["env", *(f"{k}={v}" for k, v in env.items()), *ask]).stdout.split()
        ]
        now = [row for row in rows if int(row[0].split("_")[0]) >= site.first_job]
        return now if sum(row[1] == "COMPLETED" for row in now) == count else []

    rows = wait_until(complete, 20, f"{count} jobs in the accounting database")
    assert len(rows) == count, "none was requeued, cancelled or lost"
    return {job: int(start) for job, _, start in rows}


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
    plain = proofs.submit(shapes(155, seed=1))
    tasks = [f"{array}_{index}" for index in range(24)]
    jobs = [*long, *plain, *named, *held, *limited, *chain, *tasks]
    assert len(jobs) == 200

    site.run(["scontrol", "update", "NodeName=dgx004", "State=DRAIN", "Reason=by hand"])
    drained = time.time()
    decided.kill_at(STEPS)
    wait_until(lambda: len(decided.deaths()) == 1 + len(STEPS), 60, "the deaths of 15 controllers")
    assert decided.deaths()[1:] == list(STEPS)
    assert not {line.job for line in proofs.lines()} & set(held), "their user holds them"
    site.freeze_slurmctld()
    wait_until(lambda: "nothing is decided until Slurm answers" in slurm_cluster.controller_log, 30, "no answer")
    site.thaw_slurmctld()
    resumed = time.time()
    site.run(["scontrol", "update", "NodeName=dgx004", "State=RESUME"])
    for job in held:
        site.run(["scontrol", "release", job], user)
    wait_until(lambda: "Slurm answers again" in slurm_cluster.controller_log, 30, "answers")
    with decided.paused():  # what slurmctld has not saved it forgets, whoever decides
        wait_until(lambda: decided.going() == [long[0]], 30, "the end of short jobs")
        site.wait_saved(long[0])
        site.kill_slurmctld()
    wait_until(lambda: slurm_cluster.controller_log.count("nothing is decided until") == 2, 30, "no answer")
    site.start_slurmctld()
    proofs.wait(len(jobs), 90)
    (site.shared / "go").touch()

    lines = {line.job: line for line in proofs.lines()}
    assert sorted(line.job for line in proofs.lines()) == sorted(jobs), "each once"
    asked = {job: decided.last_asked(line) for job, line in lines.items()}
    for job, line in lines.items():
        ask = asked[job]
        assert ask is not None, f"{line} was never decided"
        assert (line.nodes, line.host) == (tuple(sorted(ask.nodes)), min(ask.nodes)), (line, ask)
        assert "dgx004" not in line.nodes or not drained + ONE_PASS_S < line.time < resumed
    starts = started(site, len(jobs))
    overtaken = [pair for pair in product(jobs, jobs) if _overtakes(*pair, lines, asked, starts)]
    assert overtaken == []
    assert {lines[job].host for job in named} == {"dgx003"}
    assert [lines[job].time for job in chain] == sorted(lines[job].time for job in chain)
    with_limits = [(limited, 2), (tasks, 4)]
    for some, most in with_limits:
        begins = sorted(lines[job].time for job in some)
        assert all(late - soon >= 0.3 for soon, late in zip(begins, begins[most:], strict=False)), f"{most} at once"
    wait_until(lambda: _ended_in_store(slurm_cluster, jobs), 30, "the mirror to see the ends")


def _overtakes(
    late: str, soon: str, lines: dict[str, Line], asked: dict[str, Asked | None], starts: dict[str, int]
) -> bool:
    """Whether a job began before another that was to begin earlier in the same partition, on nodes that were there."""
    first, second = asked[soon], asked[late]
    assert first is not None
    assert second is not None
    there = {node in ("dgx001", "dgx003") for node in (*first.nodes, *second.nodes)}
    return (
        len(there) == 1 and "dgx004" not in first.nodes
        and first.time < second.time and starts[soon] > starts[late] + ONE_PASS_S
    )  # fmt: skip


def _ended_in_store(cluster: SlurmCluster, jobs: list[str]) -> bool:
    with cluster.reader() as reader:
        assert reader is not None
        found = [reader.job(job) for job in jobs]
    states = {(job.state, job.attempt) for job in found if job is not None and job.state in ENDED}
    assert states <= {(JobState.COMPLETED, 1)}
    return all(job is not None and job.state in ENDED for job in found)
