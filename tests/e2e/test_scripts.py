"""Job scripts over two nodes as users run them: the script once, srun on all its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = pytest.mark.one_partition
PYTHON = ("--mount", "/usr:/usr:ro", "--mount", "/usr/lib:/lib:ro", "--mount", "/usr/lib64:/lib64:ro",
          "--env", "PATH=/bin:/usr/bin")  # fmt: skip
"""Gives the testbed's image, which is busybox, the node's own python3."""

# What torchrun does of a rendezvous: all nodes meet at the first one's MASTER_PORT, each starts its workers.
TORCHRUN = """
import os, socket, subprocess, sys, time
nodes, each, (host, port) = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(":")
if os.environ["SLURM_NODEID"] == "0":
    server = socket.create_server(("", int(port)))
    members = [server.accept()[0] for _ in range(nodes - 1)]
    [member.sendall(b"go") for member in members]
else:
    while True:
        try:
            assert socket.create_connection((host, int(port)), 1).recv(2) == b"go"
            break
        except OSError:
            time.sleep(0.05)
first = int(os.environ["SLURM_NODEID"]) * each
workers = [
    subprocess.Popen([*sys.argv[4:]], env={**os.environ, "RANK": str(first + i), "LOCAL_RANK": str(i)})
    for i in range(each)
]
sys.exit(max(worker.wait() for worker in workers))
"""


def submit(cluster: Cluster, folder: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    """`gpusched submit job.sh` on partition A100; returns the id."""
    (folder / "job.sh").write_text("#!/bin/sh\n" + script)
    words = ["submit", "-p", "A100", "-t", "10", "--mount", f"{folder}:/share", *options]
    return cluster.cli(*words, str(folder / "job.sh"), *arguments).stdout.strip()


def test_the_script_runs_once_and_srun_on_all_nodes(house: Cluster, share: Path) -> None:
    (share / "torchrun.py").write_text(TORCHRUN)
    script = """
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
    echo "script $SLURMD_NODENAME $1 ${RANK-none} $SLURM_NTASKS $SLURM_TASKS_PER_NODE $SLURM_GPUS_ON_NODE"
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export LAUNCHED_FROM=$head
    srun python3 /share/torchrun.py $SLURM_NNODES 2 $MASTER_ADDR:$MASTER_PORT \\
        sh -c 'echo "rank $RANK on $SLURMD_NODENAME, $CUDA_VISIBLE_DEVICES, from $LAUNCHED_FROM"; exit $RANK'
    echo "srun says $?"
    """.replace("\n    ", "\n").lstrip("\n")
    output = share / "out-%j"
    job = submit(house, share, script, *PYTHON, "-o", str(output), arguments=("a b",))
    found = house.wait_state(job)
    lines = house.logs(job).splitlines()
    assert (found.state, found.exit_code) == ("COMPLETED", 0), lines
    assert lines[0] == "script dgx001 a b none 2 1(x2) 4"
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {rank} on {node}, 0,1,2,3, from dgx001"
        for rank, node in enumerate(("dgx001", "dgx001", "dgx003", "dgx003"))
    ]
    assert "srun: error: dgx003: task 1: Exited with exit code 3" in lines
    assert [line for line in lines if not line.startswith("srun: error")][-1] == "srun says 3"
    assert [path.name for path in share.glob("out-*")] == [f"out-{job}"]
    house.wait_clean()


def test_a_cancelled_step_saves_its_work_on_all_nodes(house: Cluster, share: Path) -> None:
    task = """trap 'echo saved >/share/$SLURM_PROCID; exit 0' TERM
    echo >/share/up-$SLURM_PROCID
    while :; do sleep 0.1; done"""
    (share / "task.sh").write_text(task)
    job = submit(house, share, "srun sh /share/task.sh\n", *PYTHON, "-N", "2", "--gpus-per-node", "1")
    wait_until(lambda: len(list(share.glob("up-*"))) == 2, what="both tasks to be up")
    assert house.cli("cancel", job).returncode == 0
    assert house.wait_state(job).state == "CANCELLED"
    assert [(share / rank).read_text() for rank in "01"] == ["saved\n"] * 2
    house.wait_clean()


def test_an_image_without_python_serves_no_steps_with_an_error(house: Cluster, share: Path) -> None:
    job = submit(house, share, "srun true; echo $?; exit 3\n", "-N", "2", "--gpus-per-node", "1")
    found = house.wait_state(job)
    assert (found.state, found.exit_code) == ("FAILED", 3)
    assert sorted(house.logs(job).splitlines()) == [  # stdout and stderr have no order between them
        "2",
        "srun: error: steps of jobs on several nodes need python3, which the image does not have; nothing was started",
    ]


def test_slurms_commands_inside_a_job_act_on_its_users_jobs(house: Cluster, share: Path) -> None:
    waiting = house.sh("true", "-p", "A100", "--gpus", "1", "--hold", "-J", "later")
    script = f"""
    #SBATCH --open-mode=append --gpus=1
    exec 2>&1  # an engine reads two pipes, in any order
    trap 'echo got TERM; exit 0' TERM
    echo "start $SLURM_RESTART_COUNT"
    [ "$SLURM_RESTART_COUNT" = 0 ] || exit 0
    squeue -h -j "$SLURM_JOB_ID" -o '%i %T "%j" %D'
    sacct -n -X -P -j {waiting},$SLURM_JOB_ID -o JobName,State,ExitCode
    squeue --me --steps; echo "squeue $?"
    sbatch --uid=0 other.sh; echo "sbatch $?"
    scontrol requeue nothere; echo "scontrol $?"
    scancel {waiting}; echo "scancel $?"
    scontrol requeue "$SLURM_JOB_ID"
    while :; do sleep 0.1; done
    """.replace("\n    ", "\n").lstrip("\n")
    job = submit(house, share, script, "-J", 'a "b"\\c', "-o", "/tmp/ignored", "-o", str(share / "out"))
    found = house.wait_state(job, timeout=90)
    wait_until(lambda: (share / "out").read_text().endswith("start 1\n"), what="its last line")
    lines = (share / "out").read_text().splitlines()
    assert (found.state, found.attempt) == ("COMPLETED", 2), lines
    assert lines == [
        "start 0",
        f'{job} RUNNING "a "b"\\c" 1',
        "later|PENDING|0:0",
        'a "b"\\c|RUNNING|0:0',
        next(line for line in lines if line.startswith("squeue: error: --steps is not understood inside jobs")),
        "squeue 1",
        "sbatch: error: --uid=0: not supported: jobs run as the submitting user; remove it",
        "sbatch 1",
        "scontrol: error: there is no job nothere",
        "scontrol 1",
        "scancel 0",
        "got TERM",
        "start 1",
    ]
    cancelled = house.wait_state(waiting)
    assert (cancelled.state, cancelled.message) == ("CANCELLED", f"cancelled by {cancelled.user}")
    house.wait_clean()


def test_a_job_queues_itself_once_more_and_another_one(house: Cluster, share: Path) -> None:
    script = r"""
    #SBATCH --gpus=1 --job-name=chain
    echo "run ${1-first} of $(id -u) in $SLURM_SUBMIT_DIR"
    [ $# = 0 ] || exit 0
    cd /share/sub
    next=$(sbatch --parsable "$0" 'a b') || exit 3
    echo "$next"
    sbatch -o wrapped --dependency=afterok:$next:$SLURM_JOB_ID --wrap 'echo "wrapped of $(id -u)"'
    sbatch </dev/null; echo "code $?"
    """.replace("\n    ", "\n").lstrip("\n")
    (share / "sub").mkdir()
    job = submit(house, share, script)
    first = house.wait_state(job, timeout=120)
    lines = house.logs(job).splitlines()
    assert (first.state, first.exit_code) == ("COMPLETED", 0), lines
    refusal = 'sbatch: error: stdin:1: not a job script: its first line must begin with "#!", such as #!/bin/bash'
    lines.remove(refusal)  # stdout and stderr have no order between them
    (run, again, queued, code) = lines
    uid = run.split()[3]
    assert (run, code) == (f"run first of {uid} in /", "code 1")
    wrapped = queued.removeprefix("Submitted batch job ")
    found = [house.wait_state(one, timeout=60) for one in (again, wrapped)]
    assert [(one.state, one.uid, one.user, one.asked_by) for one in found] == [
        ("COMPLETED", first.uid, first.user, job)
    ] * 2
    assert (found[0].spec.name, found[0].spec.mounts) == ("chain", first.spec.mounts)
    assert house.logs(again) == f"run a b of {uid} in {share}/sub\n"
    said = share / "sub/wrapped"  # the node brings it there, maybe after the job's end is known
    wait_until(lambda: said.read_text() == f"wrapped of {uid}\n", 60, "the output of the job that was wrapped")
    with house.reader() as reader:
        assert reader is not None
        assert len([one for one in reader.jobs() if one.asked_by == job]) == 2
    house.wait_clean()


def test_a_cancelled_job_does_not_bring_itself_back(house: Cluster, share: Path) -> None:
    script = """trap 'scontrol requeue "$SLURM_JOB_ID"; echo "said $?"; exit 0' TERM
    echo up; while :; do sleep 0.1; done\n"""
    job = submit(house, share, script, "--gpus", "1", "-o", str(share / "out"))
    wait_until(lambda: (share / "out").exists() and (share / "out").read_text() == "up\n", what="the job to be up")
    assert house.cli("cancel", job).returncode == 0
    found = house.wait_state(job)
    assert (found.state, found.attempt) == ("CANCELLED", 1)
    wait_until(lambda: "said" in (share / "out").read_text(), what="the answer to its requeue")
    lines = (share / "out").read_text().splitlines()
    assert lines[-2:] == [f"scontrol: error: job {job} was cancelled", "said 1"]  # sh reports its sleep's end before
    house.wait_clean()
