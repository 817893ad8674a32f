"""A running job queues another one with sbatch: as its user, once, within bounds, and of nothing but what it says."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cli import options
from gpusched.client.sbatch_inside import prepare
from gpusched.controller import injob
from gpusched.errors import UsageError
from gpusched.model.commands import Submit
from gpusched.model.jobs import Ending, JobRecord, JobState, Mount
from gpusched.model.readings import AskReading
from tests.builders import spec
from tests.controller.applying import ADMIN, ALICE, BOB, ME, NOW, InboxWorld, fresh_id
from tests.controller.injob import ask, running, world

__all__ = ["world"]

SCRIPT = '#!/bin/sh\n#SBATCH -n 2 -t 5\necho "$1"\n'


def sbatch(world: InboxWorld, job: str, *words: str, number: int = 1, **more: Any) -> str:
    """Return sbatch's output, with its exit code before it; a script is one of two lines."""
    more.setdefault("script", SCRIPT)
    for _ in range(3):
        if (said := ask(world, job, "sbatch", *words, number=number, **more)) is not None:
            return said
        world.apply_inbox()
    raise AssertionError("no answer")


def queued(world: InboxWorld, job: str, *words: str, number: int = 1, **more: Any) -> JobRecord:
    said = sbatch(world, job, "--parsable", *words, number=number, **more)
    assert said.startswith("0\n"), said
    return world.job(said.split()[1])


def others(world: InboxWorld, job: str) -> list[JobRecord]:
    return [one for one in world.store.jobs() if one.id != job]


def test_a_job_queues_another_one_and_hears_its_id(world: InboxWorld) -> None:
    job = running(world, ALICE)
    words = ("sbatch", "-p", "p", "-J", "next", "run.sh", "a b", "--parsable")
    assert ask(world, job, *words) == "3\n5\n", "the fifth word is the script, which it has to send"
    sent: dict[str, Any] = {"number": 2, "script": SCRIPT, "script_word": 5}
    assert ask(world, job, *words, **sent) is None
    assert ask(world, job, *words, **sent) is None, "it waits in the inbox"
    assert world.apply_inbox() == 1
    (new,) = others(world, job)
    for _ in range(2):
        assert ask(world, job, *words, **sent) == f"0\nSubmitted batch job {new.id}\n"
    assert world.apply_inbox() == 0
    assert (new.user, new.uid, new.asked_by, new.state) == (world.job(job).user, ALICE, job, JobState.PENDING)
    assert (new.spec.script, new.spec.command, new.spec.name) == (SCRIPT, ("a b", "--parsable"), "next")
    assert (new.spec.tasks_per_node, new.spec.time_limit_s, new.spec.slurm_env) == (2, 300, True)
    assert (new.submit_time, new.spec.gpus) == (NOW + 1, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("x.sh",), "3\n1\n"),
        (("-o", "out.txt", "-N1", "x.sh", "x.sh"), "3\n4\n"),
        (("--job-name", "x.sh", "--mem=1G", "--", "next.sh"), "3\n5\n"),
        ((), "3\n0\n"),
        (("-t", "5"), "3\n0\n"),
        (("-", "an argument"), "3\n0\n"),
        (("--wait", "x.sh"), "1\nsbatch: error: no such option: --wait"),
        (("--uid=0", "x.sh"), "1\nsbatch: error: --uid=0: not supported: jobs run as the submitting user"),
        (("--wrap", "true", "x.sh"), "1\nsbatch: error: --wrap already gives the command"),
        (("-w", "n[0-999999999999]", "x.sh"), "1\nsbatch: error: -w n[0-999999999999]: invalid node list: more than"),
    ],
)  # fmt: skip
def test_the_words_say_which_one_is_the_script(world: InboxWorld, words: tuple[str, ...], expected: str) -> None:
    assert (ask(world, running(world, ALICE), "sbatch", *words) or "").startswith(expected)
    assert world.apply_inbox() == 0


def test_it_is_queued_once_though_the_controller_dies_at_any_moment(world: InboxWorld) -> None:
    job = running(world, ALICE)
    said = {"script": SCRIPT, "script_word": 1}
    assert ask(world, job, "sbatch", "x.sh", **said) is None
    (file,) = world.inbox.new.iterdir()
    shutil.copy2(file, kept := world.state / "kept")
    world.apply_inbox()
    shutil.copy2(kept, file)  # it was applied, and not removed
    world.apply_inbox()
    (new,) = others(world, job)
    assert file.name == f"{new.id}.submit"
    world.now += 90000  # nobody remembers that it was applied
    world.store.forget_applied(world.now)
    assert ask(world, job, "sbatch", "x.sh", **said) == f"0\nSubmitted batch job {new.id}\n"
    world.apply_inbox()
    assert others(world, job) == [new]
    assert not world.refusals()
    assert sbatch(world, job, "x.sh", number=2) != f"0\nSubmitted batch job {new.id}\n", "another request, another job"


def test_requests_that_no_process_waits_for_are_not_executed(world: InboxWorld) -> None:
    job = running(world, ALICE)
    assert ask(world, job, "sbatch", "--wrap", "true", age_s=injob.STALE_S + 1) is None
    assert ask(world, job, "scancel", job, number=2, age_s=injob.STALE_S + 1) is None
    assert world.apply_inbox() == 0


def test_only_the_controller_submits_on_behalf_of_a_job(world: InboxWorld) -> None:
    job = running(world, ALICE)
    for uid in (ALICE, BOB, ADMIN):
        command = Submit(time=NOW, id=fresh_id(NOW), spec=spec(), asked_by=job)
        assert world.say(command, uid) == "only the controller forwards requests of jobs"
    assert world.say(Submit(time=NOW, id=fresh_id(NOW), spec=spec(), asked_by="nothere")) == "there is no job nothere"
    assert not others(world, job)


@pytest.mark.parametrize("uid", [ALICE, ADMIN, ME])
def test_it_has_no_powers_that_its_user_has_as_an_admin(world: InboxWorld, uid: int, tmp_path: Path) -> None:
    own = (Mount("/data/mine", "/w"), Mount("/data/models", "/m", True))
    job = running(world, uid, mounts=own)
    assert "needs an admin" in sbatch(world, job, "--priority=5", "x.sh", number=1)
    assert queued(world, job, "x.sh", number=2).spec.mounts == own, "without --mount those of the job that asks"
    mount = f"#!/bin/sh\n#GPUSCHED --mount {tmp_path}:/x\ntrue\n"
    assert f"mount of {tmp_path}: " in sbatch(world, job, "x.sh", number=3, script=mount)
    beneath = "#!/bin/sh\n#GPUSCHED --mount /data/mine/link:/x\ntrue\n"  # where it may have put a link to /
    writable = "#!/bin/sh\n#GPUSCHED --mount /data/models:/x\ntrue\n"
    for number, script in ((4, beneath), (5, writable)):
        said = sbatch(world, job, "x.sh", number=number, script=script)
        # Of others, the launcher makes sure of what lies beneath allowed_mounts.
        assert said.startswith("0\n") if uid == ALICE else "a job can only pass on mounts of its own" in said
    assert {one.uid for one in others(world, job)} == {uid}


def test_of_secrets_and_variables_it_has_those_of_the_job_that_asks(
    world: InboxWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROLLERS", "not for jobs")
    (tmp_path / "file").write_text("not for jobs")
    job = running(world, ALICE, secret_names=("TOKEN",), secrets={"TOKEN": "t"}, env={"DATA": "/d"})
    script = "#!/bin/sh\n#GPUSCHED --secret TOKEN --env DATA\ntrue\n"
    new = queued(world, job, "x.sh", script=script)
    assert (world.secrets.read(new.id), new.spec.env) == ({"TOKEN": "t"}, {"DATA": "/d"})
    no = "--secret {}: a job can only pass on secrets of its own, by name; it has TOKEN\n"
    for number, option in enumerate(("CONTROLLERS", f"TOKEN=@{tmp_path}/file", "TOKEN=-"), 2):
        said = sbatch(world, job, "--secret", option, "x.sh", number=number)
        assert said == "1\nsbatch: error: " + no.format(option[:80]), said
    said = sbatch(world, job, "--export", "CONTROLLERS", "x.sh", number=9)
    assert said.startswith("1\nsbatch: error: --env CONTROLLERS: no such variable")
    world.secrets.delete(job)
    assert "secrets named and secrets passed differ: TOKEN" in sbatch(world, job, "x.sh", number=10, script=script)


def test_no_file_of_the_login_node_is_read(world: InboxWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.sh").write_text("#!/bin/sh\n#SBATCH -J there\n")
    monkeypatch.chdir(tmp_path)
    job = world.job(running(world, ALICE))
    watching, seen = [False], list[str]()
    sys.addaudithook(lambda event, values: seen.append(f"{event} {values}") if watching[0] else None)
    script = "#!/bin/sh\n#GPUSCHED --mount ./a:/b --secret X\n#SBATCH -o x --mail-type END -d singleton --begin now+1\n"
    for word in ("./x.sh", str(tmp_path / "x.sh")):
        for text in (None, SCRIPT, script):
            asked = AskReading(id="1-1", attempt=1, words=("sbatch", word), script=text, script_word=1)
            for watched in (False, True):  # first the modules
                watching[0] = watched
                with contextlib.suppress(UsageError):
                    prepare(options, world.inventory, job, asked)
                watching[0] = False
    assert [event for event in seen if event.startswith(("open", "os.", "subprocess"))] == []


def test_jobs_of_a_user_queue_so_many_and_no_more(world: InboxWorld) -> None:
    settings = msgspec.structs.replace(world.inventory.settings, max_queued_jobs_by_jobs=3)
    world.inventory = msgspec.structs.replace(world.inventory, settings=settings)
    job, bobs = running(world, ALICE), running(world, BOB)
    world.submit(ALICE)  # her own count for nothing
    for number in range(2):
        assert sbatch(world, job, "x.sh", number=number).startswith("0")
    said = sbatch(world, job, "-a", "1-2", "x.sh", number=3)
    assert said == (
        f"1\nsbatch: error: {world.job(job).user} has 2 of 3 pending jobs that jobs submit; 2 more exceed the "
        "limit (settings.max_queued_jobs_by_jobs of inventory.yaml)\n"
    )
    assert sbatch(world, job, "x.sh", number=3) == said, "it stays so"
    assert sbatch(world, bobs, "-a", "1-3", "x.sh").startswith("0")
    first, last = (queued(world, job, "x.sh", number=number) for number in (1, 4))
    assert "1 more exceed the limit" in sbatch(world, job, "x.sh", number=5)
    for one in (first, last):
        world.put(one.id, JobState.RUNNING)
    assert sbatch(world, job, "x.sh", number=6).startswith("0")


def test_within_one_fold_they_are_counted_too(world: InboxWorld) -> None:
    settings = msgspec.structs.replace(world.inventory.settings, max_queued_jobs_by_jobs=2)
    world.inventory = msgspec.structs.replace(world.inventory, settings=settings)
    job = running(world, ALICE)
    for number in range(4):
        assert ask(world, job, "sbatch", "--wrap", "true", number=number) is None
    world.apply_inbox()
    assert (len(others(world, job)), len(world.refusals())) == (2, 2)


def test_of_one_user_so_many_scripts_are_read_in_a_cycle(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injob, "MAX_SCRIPTS_READ", 0)
    assert ask(world, running(world, ALICE), "sbatch", "--wrap", "true") is None
    assert world.apply_inbox() == 0


def test_a_cancelled_job_queues_nothing(world: InboxWorld) -> None:
    job = running(world, ALICE)
    assert ask(world, job, "sbatch", "--wrap", "true") is None  # before the cancel is known
    ending = Ending(outcome=JobState.CANCELLED, reason="Cancelled", message="", kill_at=NOW + 30)
    world.put(job, JobState.COMPLETING, ending=ending)
    world.apply_inbox()
    for number in (1, 2):
        said = ask(world, job, "sbatch", "--wrap", "true", number=number)
        assert said == f"1\nsbatch: error: job {job} was cancelled\n"
    assert not others(world, job)


def test_dependencies_are_on_jobs_of_its_user(world: InboxWorld) -> None:
    job, theirs = running(world, ALICE), world.submit(BOB)
    new = queued(world, job, f"--dependency=afterok:{job}", "x.sh")
    assert [one.job_id for one in new.spec.dependencies] == [job]
    for number, other in ((2, theirs), (3, "01234567890")):
        said = sbatch(world, job, "-d", f"afterany:{job}:{other}", "x.sh", number=number)
        assert said == f"1\nsbatch: error: --dependency: {new.user} has no job {other}\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo\n", 'x.sh:1: not a job script: its first line must begin with "#!"'),
        ("#!/bin/sh\r\n", "x.sh:1: a DOS line break"),
        ("#!/bin/sh\n\0", "x.sh:2: a NUL character"),
        ("#!/bin/sh\n\ufffd", "x.sh:1: a job script must be UTF-8 text"),
        ("#!/bin/sh\n#SBATCH --gres=fpga:1\n", "x.sh:2: #SBATCH --gres=fpga:1: the only generic resource is GPUs"),
        ("#!/bin/sh\n#SBATCH -p gone\n", "x.sh:2: #SBATCH -p gone: there is no partition 'gone'"),
        ("#!/bin/sh\n#SBATCH -J " + 4096 * "x" + "\n", "x.sh: its lines with options have more than 4096 characters"),
        ("#!/bin/sh\n" + 76 * "#SBATCH -n1\n", "x.sh: its lines with options have more than 4096 characters or 150 "),
        ("#!/bin/sh\n#SBATCH -a " + 300 * "0-99999," + "1\n", "x.sh:2: #SBATCH -a"),
    ],
)
def test_a_wrong_script_is_an_error_with_its_line(world: InboxWorld, script: str, why: str) -> None:
    said = sbatch(world, running(world, ALICE), "x.sh", script=script)
    assert said.startswith(f"1\nsbatch: error: {why}")
    assert said.count("\n") == 2


def test_a_fault_of_ours_in_one_script_is_its_own(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.client.sbatch_inside.build_submission", None)
    assert sbatch(world, running(world, ALICE), "x.sh") == "1\nsbatch: error: internal error: TypeError\n"


@pytest.mark.parametrize(
    ("cwd", "folder"),
    [("/w/runs/a", "/data/mine/runs/a"), ("/w/in/../x", "/data/mine/x"), ("/w/in/b", "/data/other/b"),
     ("/work", "/home/alice"), ("", "/home/alice"), ("/../w", "/data/mine")],
)  # fmt: skip
def test_paths_are_relative_to_the_folder_as_the_nodes_have_it(world: InboxWorld, cwd: str, folder: str) -> None:
    mounts = (Mount("/data/mine", "/w"), Mount("/data/other", "/w/in"))
    job = running(world, ALICE, mounts=mounts, submit_dir="/home/alice", image="own:1")
    new = queued(world, job, "-o", "out-%j", "x.sh", cwd=cwd)
    assert (new.spec.output, new.spec.submit_dir, new.spec.image) == (f"{folder}/out-%j", folder, "own:1")


def test_mail_goes_to_its_user_and_not_to_the_controllers(world: InboxWorld) -> None:
    assert os.getuid() != ALICE
    job = running(world, ALICE)
    new = queued(world, job, "x.sh", script="#!/bin/sh\n#SBATCH --mail-type=END\ntrue\n")
    assert new.spec.mail == new.user == str(ALICE)
    assert queued(world, job, "--mail-type=END", "x.sh", number=2).spec.mail == str(ALICE)
