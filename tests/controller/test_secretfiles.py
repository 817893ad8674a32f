"""Secrets of the controller's process."""

import subprocess
import sys

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
