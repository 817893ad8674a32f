"""sbatch and the other programs of a job's folder that ask the controller, which is the test here."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpusched.nodes.batch.spool import StepNode, StepSettings, spool_files
from gpusched.nodes.payload import jobfiles

Answer = Callable[[dict[str, Any]], str]


class Job:
    """A job's own folder, and the spool of its script."""

    def __init__(self, folder: Path) -> None:
        self.own, self.spool = folder / "own", folder / "spool"
        self.own.mkdir()
        settings = StepSettings(attempt="gpusched-j-1-0", rank=0, nodes=(StepNode("n0", "n0"),))
        for name, text in spool_files("#!/bin/sh\n", settings, None).items():
            (self.spool / name).parent.mkdir(parents=True, exist_ok=True)
            (self.spool / name).write_text(text)
            (self.spool / name).chmod(0o755)
        own = {"GPUSCHED_SPOOL": self.spool, "GPUSCHED_JOB_DIR": self.own, "GPUSCHED_ATTEMPT": 1}
        self.env = os.environ | {name: str(value) for name, value in own.items()}
        self.seen: list[dict[str, Any]] = []

    def ask(
        self, answer: Answer, *words: str | bytes, stdin: bytes = b"", until: Iterable[Future[Any]] = ()
    ) -> tuple[int, str, str]:
        """Run a program: exit code, stdout, stderr. What it, and ``until``, asked is in `seen`."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._run, words, stdin)
            while not all(one.done() for one in (running, *until)):
                if (asked := self._asked()) is not None:
                    self.seen.append(asked)
                    (self.own / "answer.part").write_text(f"{asked['id']} {answer(asked)}")
                    (self.own / "answer.part").rename(self.own / "answer")
                time.sleep(0.02)
            return running.result()

    def _run(self, words: tuple[str | bytes, ...], stdin: bytes) -> tuple[int, str, str]:
        program = [self.spool / "bin" / os.fsdecode(words[0]), *words[1:]]
        done = subprocess.run(program, input=stdin, env=self.env, cwd=self.own.parent, capture_output=True, timeout=300)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def _asked(self) -> dict[str, Any] | None:
        found = jobfiles.parse(jobfiles.read(str(self.own)))
        assert found["job_file_error"] is None, found
        fresh = found["ask"] is not None and found["ask"]["id"] not in [one["id"] for one in self.seen]
        return found["ask"] if fresh else None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def after(word: int) -> Answer:
    """Ask for the script that this word names, then answer with an id."""
    return lambda asked: f"3\n{word}\n" if asked["script"] is None else "0\nSubmitted batch job 7\n"


SAID = (0, "Submitted batch job 7\n", "")
SCRIPT = '#!/bin/sh\n# ü \\n "a\\\\b"\tc\necho $1'


def test_the_script_is_sent_when_the_controller_knows_which_word_it_is(job: Job, tmp_path: Path) -> None:
    (tmp_path / "a b.sh").write_text(SCRIPT)
    words = ("sbatch", "-J", 'x "y"\\z\nü', "a b.sh", "-n", "")
    assert job.ask(after(3), *words) == SAID
    first, then = job.seen
    assert (first["words"], first["script"], first["cwd"]) == (list(words), None, str(tmp_path))
    assert (then["words"], then["script"].removesuffix("\n"), then["script_word"]) == (list(words), SCRIPT, 3)
    assert [path.name for path in job.own.iterdir()] == ["answer"]


def test_without_a_word_it_comes_from_stdin(job: Job) -> None:
    assert job.ask(after(0), "sbatch", "-t", "5", stdin=SCRIPT.encode()) == SAID
    assert (job.seen[1]["script"].removesuffix("\n"), job.seen[1]["script_word"]) == (SCRIPT, 0)


@pytest.mark.parametrize(
    ("name", "why"),
    [("gone.sh", "Unable to open file gone.sh"), ("own", "Unable to open file own"),
     ("large.sh", "the script has more than 64 KiB; put data into separate files")],
)  # fmt: skip
def test_an_unsendable_request_is_an_error_and_leaves_nothing(job: Job, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "large.sh").write_bytes(b"x" * 65537)
    assert job.ask(after(1), "sbatch", name) == (1, "", f"sbatch: error: {why}\n")
    assert [path.name for path in job.own.iterdir()] == ["answer"]
    (tmp_path / "large.sh").write_bytes(b'"' * 65536)
    assert job.ask(after(1), "sbatch", "large.sh") == SAID, "and that is how large it may be"


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_request_blocks_no_other(job: Job, reaped: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as dead:
        (job.own / ".asking.1").symlink_to(str(dead.pid))
        (job.own / ".asking.1.script").write_text("half a scr")
        dead.kill()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        assert job.ask(lambda asked: "0\nJOBID\n", "squeue") == (0, "JOBID\n", "")
    assert job.seen[0]["script"] is None
    assert [path.name for path in job.own.iterdir()] == ["answer"]


def test_several_ask_one_after_the_other_even_after_one_was_killed(job: Job) -> None:
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (job.own / ".asking.1").symlink_to(str(dead.pid))
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(job._run, ("squeue", f"w{n}"), b"") for n in range(4)]
        first = job.ask(lambda asked: f"0\n{asked['words']}\n", "squeue", "first", until=others)
    assert [first, *(one.result() for one in others)] == [
        (0, f"{['squeue', word]}\n", "") for word in ("first", "w0", "w1", "w2", "w3")
    ]


def test_a_refusal_goes_to_stderr(job: Job) -> None:
    said = job.ask(lambda asked: "1\nsbatch: error: no\n", "sbatch", "--wrap", "true")
    assert said == (1, "", "sbatch: error: no\n")
    assert job.ask(lambda asked: "3\n1\n", "squeue", "x") == (3, "", "1\n"), "only sbatch has a script"


@pytest.mark.parametrize(("od", "expected"), [("echo '   123456789'", "123456789-"), ("exit 127", "-")])
def test_nobody_foresees_a_request(job: Job, tmp_path: Path, od: str, expected: str) -> None:
    """Its name gives the id of sbatch's job, which another user could take before."""
    (tmp_path / "od").write_text(f"#!/bin/sh\n{od}\n")
    (tmp_path / "od").chmod(0o755)
    job.env["PATH"] = f"{tmp_path}:{job.env['PATH']}"
    assert job.ask(lambda asked: "0\nJOBID\n", "squeue") == (0, "JOBID\n", "")
    assert re.fullmatch(rf"[1-9][0-9]*{expected}[0-9]{{10}}", job.seen[0]["id"])
