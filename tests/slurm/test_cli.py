"""The command line where jobs are Slurm's: what Slurm's own commands are, and what is said of its jobs."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.json import encode

from gpusched.cli.main import SLURM_COMMANDS
from gpusched.cli.main import run as gpusched
from gpusched.client.slurm import _TRANSLATIONS, manages_jobs
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.slurm import LEASE, TROUBLE, SlurmFacts, Trouble
from gpusched.queue.store import Store
from tests.slurm.conftest import SlurmCluster
from tests.testbed import wait_until

INVENTORY = """\
engine: slurm
partitions:
  A100:
    defaults: {gpus: 8, cores: 128, memory: 1000G, gpu_type: a100}
    nodes: ["n[1-3]"]
    flavors: {half: {gpus: 4, cores: 64, memory: 500G, time: 36h}}
  mixed:
    defaults: {gpus: 8, cores: 128, memory: 1000G, gpu_type: h100}
    nodes: [h1, {name: h2, gpu_type: b200}, {name: h3, gpu_type: l40}]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(path))
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    return tmp_path


SAID = [
    ("cancel 1234 5", "scancel 1234 5"),
    ("cancel --now 1234_5", "scancel -s KILL 1234_5"),
    ("cancel -u alice -s pending", "scancel -u alice -t PENDING"),
    ("hold 1 2", "scontrol hold 1,2"),
    ("release 7~2", "scontrol release 7"),
    ("requeue 7_3", "scontrol requeue 7_3"),
    ("priority 7 100", "scontrol update JobId=7 Nice=-100"),
    ("priority 7 -5", "scontrol update JobId=7 Nice=5"),
    ("drain n1 n2 --reason 'fan broken'", "scontrol update NodeName=n1,n2 State=DRAIN Reason='fan broken'"),
    ("resume n1", "scontrol update NodeName=n1 State=RESUME"),
    (
        "maintenance n1 n2 --from 2026-12-01T09:00 --for 4h --name disks",
        "scontrol create reservation ReservationName=disks StartTime=2026-12-01T09:00:00 Duration=4:00:00 Users=root "
        "Nodes=n1,n2 Flags=MAINT,IGNORE_JOBS",
    ),
    (
        "reserve --gpus 16 --from 2026-12-01T09:00 --to 2026-12-01T12:00 --users a,b --name class",
        "scontrol create reservation ReservationName=class StartTime=2026-12-01T09:00:00 EndTime=2026-12-01T12:00:00 "
        "Users=a,b Nodes=n1,n2 Flags=IGNORE_JOBS",
    ),
    ("reservations", "scontrol show reservation"),
    ("reservations cancel class", "scontrol delete ReservationName=class"),
    ("reservations change class --for 3h", "scontrol update ReservationName=class Duration=3:00:00"),
    ("run -p A100 --gpus 2 -t 90 --pty bash -l", "srun -p A100 --gpus-per-node=2 -t 01:30:00 --pty bash -l"),
    (
        "run -p A100 --gpus 1 --signal USR1@60 --env A=1 -- a 'b c'",
        "A=1 srun -p A100 --gpus-per-node=1 --signal=USR1@60 a 'b c'",
    ),
    ("attach 7", "sattach 7.0"),
    (
        "submit -p A100 --gpus 1 -A vision -q spare --mail ada --notify begin,limit,idle -- true",
        "sbatch -p A100 --gpus-per-node=1 --account=vision --qos=spare --mail-user=ada --mail-type=BEGIN,TIME_LIMIT_90 "
        "--wrap true",
    ),
    ("exec -it 7 -- bash -l", "srun --jobid=7 --overlap -N 1 -n 1 --pty bash -l"),
    ("exec --rank 1 7 -- nvidia-smi", "srun --jobid=7 --overlap -N 1 -n 1 -r 1 nvidia-smi"),
]
SUBMITTED = [
    ("-p A100 --gpus 2 -- python train.py --lr 0.1", "-p A100 --gpus-per-node=2 --wrap 'python train.py --lr 0.1'"),
    (
        "-p A100 --gpus-per-node 2 -N 2 --cpus 64 --mem 512G -t 2h -- python a.py",
        "-p A100 -N 2 --ntasks-per-node=1 --gpus-per-node=2 -c 32 --mem=256G -t 02:00:00 --wrap 'srun python a.py'",
    ),
    ("-p A100 --gpus 16 -- a", "-p A100 -N 2 --ntasks-per-node=1 --gpus-per-node=8 --wrap 'srun a'"),
    ("-F half -- a", "-p A100 --gpus-per-node=4 -c 64 --mem=500G -t 1-12:00:00 --wrap a"),
    (
        "-p A100 --cpus 3 --array 0-9%2 --dependency afterok:12 --begin now+2h --no-requeue --hold -J 'a b' -- a 'b c'",
        "-J 'a b' -p A100 -c 3 --array=0-9%2 --dependency=afterok:12 --begin=now+7200 --no-requeue -H "
        """--wrap 'a '"'"'b c'"'"''""",
    ),
    ("-p A100 --gpus 1 --nodelist n2,n3 -- a", "-p A100 --gpus-per-node=1 -x n1 --wrap a"),
    (
        "-p A100 --gpus 16 --nodelist n2,n3 -- a",
        "-p A100 -N 2 --ntasks-per-node=1 --gpus-per-node=8 -w 'n[2-3]' --wrap 'srun a'",
    ),
    ("-p mixed --gpus 1 --gpu-type b200 -- a", "-p mixed --gpus-per-node=b200:1 --wrap a"),
    ("-p mixed --gpus 1 --gpu-type b200,l40 -- a", "-p mixed --gpus-per-node=1 -x h1 --wrap a"),
    (
        "-p A100 --gpus 1 --signal USR1@300 --priority 5 --nice 2 --workdir /w -o %j.log --comment hi --exclusive -- a",
        "--comment hi -p A100 --gpus-per-node=1 -o %j.log --nice=-3 --signal=B:USR1@300 -D /w --exclusive "
        "--wrap 'exec a'",
    ),
    (
        "-p A100 --gpus 16 --max-spread rack --placement-wait 1h --wait -- a",
        "-p A100 -N 2 --ntasks-per-node=1 --gpus-per-node=8 --switches=1@01:00:00 -W --wrap 'srun a'",
    ),
    ("-p A100 --gpus 1 --dry-run -- a", "-p A100 --gpus-per-node=1 --test-only --wrap a"),
]


def slurm_command(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return Slurm's command as named in the error of this gpusched command."""
    assert gpusched(shlex.split(words)) == 2, words
    out, err = capsys.readouterr()
    head = "gpusched: error: use Slurm's command: "
    assert out == ""
    assert err.startswith(head), err
    assert err.count("\n") == 1
    return err.removeprefix(head).removesuffix("\n")


@pytest.mark.parametrize(("words", "slurms"), SAID, ids=[words for words, _ in SAID])
def test_commands_left_to_slurm_name_its_command(
    site: Path, capsys: pytest.CaptureFixture[str], words: str, slurms: str
) -> None:
    assert slurm_command(words, capsys) == slurms
    assert not (site / "state").exists()


@pytest.mark.parametrize(("words", "slurms"), SUBMITTED, ids=[words for words, _ in SUBMITTED])
def test_submit_says_sbatch(site: Path, capsys: pytest.CaptureFixture[str], words: str, slurms: str) -> None:
    assert slurm_command(f"submit {words}", capsys) == f"sbatch {slurms}"
    assert not (site / "state").exists()


@pytest.mark.parametrize(
    ("words", "slurms"),
    [
        ("train.sh 3 'a b'", "train.sh 3 'a b'"),
        ("-N 2 train.sh", "-N 2 train.sh"),
        (
            "-p A100 -N 2 --ntasks-per-node 4 --gpus-per-task 1 --mem-per-node 64G -e x.err --signal B:USR1@9 train.sh",
            "-p A100 -N 2 --ntasks-per-node=4 --gpus-per-task=1 --mem=64G -e x.err --signal=B:USR1@9 train.sh",
        ),
        ("-p A100 -n 4 --signal USR1@9 train.sh", "-p A100 --ntasks=4 --signal=USR1@9 train.sh"),
        ("-p A100 --gpus 1 --wrap 'a | b'", "-p A100 --gpus-per-node=1 --wrap 'a | b'"),
        ("-p A100 --gpus 16 train.sh", "-p A100 -N 2 --ntasks-per-node=1 --gpus-per-node=8 train.sh"),
    ],
)
def test_scripts_are_sbatchs(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, slurms: str
) -> None:
    monkeypatch.chdir(site)
    (site / "train.sh").write_text("#!/bin/sh\n")
    assert slurm_command(f"submit {words}", capsys) == f"sbatch {slurms}"


def test_every_command_that_acts_on_jobs_has_one_of_slurms() -> None:
    assert set(_TRANSLATIONS) == SLURM_COMMANDS
    assert {words.split()[0] for words, _ in SAID} | {"submit", "logs"} == SLURM_COMMANDS


def test_options_without_equivalent_in_slurm_are_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpusched(shlex.split("submit -p A100 --gpus 1 --image x --share pairs --env A=1 --env 'B=a b' -- a")) == 2
    assert capsys.readouterr().err == (
        "gpusched: error: use Slurm's command, which has no equivalent of --image, --share: "
        "A=1 B='a b' sbatch -p A100 --gpus-per-node=1 --wrap a\n"
    )
    assert gpusched(["cancel", "7", "--json"]) == 2
    assert capsys.readouterr().out == '{"error":"use Slurm\'s command: scancel 7"}\n'


def test_errors_of_a_request_come_first(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        ("submit -p B200 --gpus 1 -- a", "there is no partition 'B200'"),
        ("submit -p A100 --gpus 64 -- a", "64 GPUs"),
        ("submit -p A100 --gpus 1 --begin soon -- a", "--begin: found 'soon'"),
    ):
        assert gpusched(shlex.split(words)) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "is_slurm"),
    [
        (INVENTORY, True),
        ('{"settings": {}, "engine": "slurm", "partitions": {"A": {"nodes": [{"name": "n", "gpus": 1, "cores": 1, '
         '"memory": "1G"}]}}}', True),
        ("engine: 'slurm'\npartitions: broken", True),
        (INVENTORY.replace("engine: slurm", "engine: ssh\ndefaults: {runtime: process}"), False),
        (INVENTORY.replace("engine: slurm", "# engine: slurm\ndefaults: {runtime: process}"), False),
        ("", False),
    ],
)  # fmt: skip
def test_the_engine_is_read_from_any_inventory(site: Path, text: str, is_slurm: bool) -> None:
    (site / "inventory.yaml").write_text(text)
    assert manages_jobs() is is_slurm


# Beside real Slurm


def test_slurm_takes_what_submit_says(slurm_cluster: SlurmCluster) -> None:
    words = "-p A100 --gpus 4 -N 2 --cpus 8 -t 90m -J 'a name' --env 'WORD=a b,c' -o out-%j --"
    script = 'echo "$WORD" >> said'
    done = slurm_cluster.cli("submit", *shlex.split(words), "sh", "-c", script, check=False)
    command = done.stderr.removeprefix("gpusched: error: use Slurm's command: ").strip()
    assert done.returncode == 2
    job = int(slurm_cluster.site.run(["bash", "-c", command]).stdout.split()[-1])
    slurm_cluster.site.wait(job)
    assert (slurm_cluster.site.shared / "said").read_text() == "a b,c\n" * 2
    shown = slurm_cluster.site.run(["scontrol", "show", "job", str(job)]).stdout
    for fact in ("JobName=a name", "NumNodes=2", "CPUs/Task=4", "TresPerNode=gres:gpu:2", "TimeLimit=01:30:00"):
        assert fact in shown
    out = slurm_cluster.site.shared / f"out-{job}"
    for option, program in (("-f", "tail -f"), ("--tail=5", "tail -n 5"), ("", "cat")):
        said = slurm_cluster.cli("logs", str(job), *filter(None, [option]), check=False).stderr
        assert said.endswith(f": {program} {out}\n")
    forgotten = slurm_cluster.cli("logs", "999999", check=False).stderr
    assert forgotten.endswith(": sacct -X -P -j 999999 --format=WorkDir,SubmitLine\n")


def test_why_has_slurms_reason_beside_ours(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    runs = site.sbatch("sleep 1000", "-N2", "--gpus-per-node=2", "-t", "30", "-J", "first", user="games")
    site.wait(runs, "RUNNING")
    waits = site.sbatch("sleep 1000", "-N2", "--gpus-per-node=8", "-t", "30", user="games")
    held = site.sbatch("sleep 1000", "--hold", "--gpus-per-node=1", user="news")
    after = site.sbatch("sleep 1000", "-d", f"afterok:{runs}", "--gpus-per-node=1", user="news")
    wait_until(lambda: site.run(["squeue", "-h", "-j", str(waits), "-o", "%r"]).stdout == "Resources\n", 30, "reason")
    slurm_cluster.cli("tick")
    why = slurm_cluster.cli("why", str(waits)).stdout
    assert f"{waits} (sbatch) is PENDING\nSlurm says:    PENDING (Resources), priority " in why
    assert "gpusched says: Resources: waits for 8 GPUs on each of 2 nodes" in why
    assert "6 of 8 GPUs free, needs 8 (2 held by jobs)" in why
    assert "expected to start about" in why
    answer = slurm_cluster.json("why", str(waits))
    assert (answer["reason"], answer["job"]["slurm"]["account"]) == ("Resources", "lab")
    assert answer["job"]["slurm"]["reason"] == "Resources"
    why = slurm_cluster.cli("why", str(held)).stdout
    assert "Slurm says:    PENDING (JobHeldUser), priority 0" in why
    assert f"-> release the hold: scontrol release {held}" in why
    assert "gpusched release" not in why
    assert (
        "gpusched says: NotEligible: Slurm does not allow it to start: Dependency"
        in slurm_cluster.cli("why", str(after)).stdout
    )
    why = slurm_cluster.cli("why", str(runs)).stdout
    assert "Slurm says:    RUNNING, priority" in why
    shown = slurm_cluster.cli("show", str(runs)).stdout
    assert "account:      lab, qos normal" in shown
    assert "in Slurm:     RUNNING, priority" in shown
    assert "dgx003: GPUs 0-1" in shown
    assert "image:" not in shown
    status = slurm_cluster.cli("status").stdout
    assert "jobs are managed by Slurm; gpusched observes in A100, V100" in status
    assert "(Dependency)" in status
    assert "1M" not in shown + why + status


def test_ids_of_slurm_are_whole(slurm_cluster: SlurmCluster) -> None:
    site = slurm_cluster.site
    while (job := site.sbatch("sleep 1000", "--gpus-per-node=1")) < 10:
        pass
    array = site.sbatch("sleep 1000", "--array=1-3", "--hold", "--gpus-per-node=1")
    slurm_cluster.cli("tick")
    assert slurm_cluster.json("show", str(job))["id"] == str(job)
    assert "there is no job" in slurm_cluster.cli("show", str(job)[:-1], check=False).stderr
    assert slurm_cluster.json("show", f"{array}_2")["id"] == f"{array}_2"
    assert [t["id"] for t in slurm_cluster.json("show", str(array))["tasks"]] == [f"{array}_{i}" for i in (1, 2, 3)]
    assert "there is no job" in slurm_cluster.cli("show", f"{array}_4", check=False).stderr


SPEC = JobSpec(
    name="a", partition="A100", nodes=1, gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60
)


def store(site: Path, *jobs: JobRecord, **meta: str) -> None:
    """Write what the controller would have stored."""
    with closing(Store.create_or_open(site / "state")) as opened, opened.transaction():
        opened.put_jobs(jobs)
        for key, value in meta.items():
            opened.set_meta(key, value)


def test_an_id_that_slurm_used_again_means_its_latest_job(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = JobRecord(
        id="7", user="alice", uid=1, spec=SPEC, state=JobState.CANCELLED, submit_time=1.0, slurm=SlurmFacts()
    )
    store(site, old, *(structs.replace(old, id=f"7~{n}", state=JobState.PENDING) for n in (2, 3)))
    for typed, meant in (("7", "7~3"), ("7~2", "7~2")):
        assert gpusched(["show", typed, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == meant


def test_a_job_being_started_and_slurms_silence_are_shown(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = SlurmFacts(
        state="PENDING", reason="Reservation", priority=9, site_factor=2, account="lab", qos="normal", restarts=1,
        partitions=("A100", "mixed"), reservation=LEASE, pinned=("n1", "n2"), pinned_at=0.0,
    )  # fmt: skip
    job = JobRecord(
        id="7", user="alice", uid=1, spec=SPEC, state=JobState.STARTING, submit_time=1.0, policy="sjf", slurm=facts
    )
    trouble = encode(Trouble(since=time.time(), why="squeue got no answer")).decode()
    store(site, job, **{TROUBLE: trouble, "heartbeat": str(time.time())})
    assert gpusched(["show", "7"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "in Slurm:     PENDING (Reservation), priority 9, site factor 2", "account:      lab, qos normal",
        "partitions:   A100, mixed", "reservation:  gpusched", "sent to:      n[1-2], ", "requeued:     1 time",
    ):  # fmt: skip
        assert line in shown
    assert "no decisions are made: squeue got no answer" in shown
    assert gpusched(["why", "7"]) == 0
    why = capsys.readouterr().out
    assert "Slurm says:    PENDING (Reservation), priority 9, sent to n[1-2]" in why
    assert "gpusched says: sjf chose it; Slurm is starting it" in why
    assert "warning: Slurm has not responded since" in why
    assert gpusched(["status", "7", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["slurm"]["pinned"], row["slurm"]["site_factor"]) == (["n1", "n2"], 2)
