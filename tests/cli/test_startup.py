"""Imports of a command once all is compiled: neither numba's front end nor what only other commands need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup

COMMAND = """
import atexit, sys
from gpusched.__main__ import main
heavy = ("numba.core.compiler", "scipy", "torch", "pydantic", "invoke", "paramiko", "rich.table")
heavy += ("gpusched.queue.backup",)
atexit.register(lambda: print("imported:", *(name for name in heavy if name in sys.modules), file=sys.stderr))
main()
"""
ALLOWED = {"tick": {"paramiko", "gpusched.queue.backup"}}


@pytest.mark.slow
def test_compiled_commands_leave_the_compiler_out(tmp_path: Path) -> None:
    commands = startup.commands(startup.site(tmp_path))
    env = os.environ | {"GPUSCHED_INVENTORY": str(tmp_path / "inventory.yaml")}
    env |= {"GPUSCHED_STATE": str(tmp_path / "now"), "PYTHONPATH": str(Path(startup.__file__).parents[1])}
    env.pop("NUMBA_DISABLE_JIT", None)
    for name, (_, _, *words) in list(commands.items())[1:]:
        allowed = ALLOWED.get(name, {"rich.table"})
        for _ in range(3):  # the first may compile, and a tick that did so predicts nothing before the next
            shutil.rmtree(tmp_path / "now", ignore_errors=True)
            shutil.copytree(tmp_path / "state", tmp_path / "now")
            argv = [sys.executable, "-c", COMMAND, *words]
            done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            found = set(done.stderr.rpartition("imported:")[2].split())
            if found <= allowed and name != "tick":
                break
        assert found <= allowed, name
