"""Secrets of the controller's process."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpusched.controller.secretfiles import SecretFiles
from tests.builders import job

DUMPABLE = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE


def test_the_process_is_not_dumped_and_what_it_starts_may_be() -> None:
    code = f"""
import subprocess, sys
import pytest

from gpusched.controller.secretfiles import forbid_core_dumps
forbid_core_dumps()
{DUMPABLE}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {DUMPABLE!r}], check=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n1\n"


def test_of_a_longer_draft_that_a_killed_controller_left_nothing_is_stored(tmp_path: Path) -> None:
    files = SecretFiles(tmp_path)
    files.write("j", {"TOKEN": "long" * 9})
    (path,) = (tmp_path / "secrets").iterdir()
    path.rename(path.with_suffix(".tmp"))
    files.write("j", {"TOKEN": "short"})
    assert files.read("j") == {"TOKEN": "short"}


def test_a_task_has_the_common_beginning_of_its_array_and_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = SecretFiles(tmp_path).programs
    programs.of(7).write("a", {"": "all;", "0": "none", "12": "twelve"})
    programs.of(7).write("b", {"": "alone", "0": "nobody's"})
    reads, read = [], SecretFiles.read
    monkeypatch.setattr(SecretFiles, "read", lambda self, job_id: reads.append(job_id) or read(self, job_id))
    tasks = [job(f"a_{n}", array_id="a", array_index=n, uid=7) for n in (0, 1, 12)]
    for _ in range(2):
        assert [programs.read(task) for task in tasks] == ["all;none", "all;", "all;twelve"]
        assert programs.read(job("b", uid=7)) == "alone"
    assert reads == ["a", "b"] * 2, "once for an array's tasks that are launched in a row"


def test_a_program_that_was_not_there_is_looked_for_again(tmp_path: Path) -> None:
    programs = SecretFiles(tmp_path).programs
    programs.of(7).write("a", {"": "another user's"})
    assert programs.read(job("a", uid=8)) is None
    programs.of(8).write("a", {"": "late"})
    assert programs.read(job("a", uid=8)) == "late"


def test_programs_are_deleted_with_their_submissions_whoever_s_they_are(tmp_path: Path) -> None:
    programs = SecretFiles(tmp_path).programs
    programs.delete_unless(lambda _: False)  # there are none
    for uid, job_id in ((7, "a"), (7, "b"), (8, "c"), (8, "d")):
        programs.of(uid).write(job_id, {"": job_id})
    programs.delete_unless("bc".__contains__)
    assert [programs.of(uid).job_ids() for uid in (7, 8)] == [["b"], ["c"]]
