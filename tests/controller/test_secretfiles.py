"""Secrets of the controller's process."""

import subprocess
import sys
from pathlib import Path

from gpusched.controller.secretfiles import SecretFiles

DUMPABLE = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE


def test_the_process_is_not_dumped_and_what_it_starts_may_be() -> None:
    code = f"""
import subprocess, sys
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
