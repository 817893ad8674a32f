"""Imports of a command once all is compiled: neither numba's front end nor what only other commands need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup
from gpusched.compiled.loading import SUFFIX

COMMAND = """
import atexit, sys
from gpusched.__main__ import main
heavy = ("numba.core.compiler", "scipy", "torch", "pydantic", "invoke", "paramiko", "rich.table")
heavy += ("gpusched.queue.backup",)
atexit.register(lambda: print("imported:", *(name for name in heavy if name in sys.modules), file=sys.stderr))
main()
"""
VARIES = r'"20\d\d-[^"]*Z"|"(sim_seconds|jobs_per_s)":[\d.e+-]+'  # the time of the command, and how long it took
ALLOWED = {"tick": {"paramiko", "gpusched.queue.backup"}}


def env_of(folder: Path, **more: str) -> dict[str, str]:
    env = os.environ | {"GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    env |= {"GPUSCHED_STATE": str(folder / "now"), "PYTHONPATH": str(Path(startup.__file__).parents[1])}
    env.pop("NUMBA_DISABLE_JIT", None)
    return env | more


@pytest.mark.slow
def test_compiled_commands_leave_the_compiler_out(tmp_path: Path) -> None:
    commands = startup.commands(startup.site(tmp_path))
    env = env_of(tmp_path, GPUSCHED_COMPILED="always")
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


@pytest.mark.slow
def test_the_first_use_with_little_to_simulate_compiles_nothing_and_answers_the_same(tmp_path: Path) -> None:
    job = startup.site(tmp_path)
    (tmp_path / "state").rename(tmp_path / "now")
    for words in (["why", job, "--json"], ["replay", "log.swf", "-P", "easy", "-N", "2", "--json"]):
        answers = []
        for how in ("", "always"):
            env = env_of(tmp_path, GPUSCHED_COMPILED=how)
            if not how:
                env |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
            argv = [sys.executable, "-c", COMMAND, *words]
            done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            answers.append((re.sub(VARIES, "", done.stdout), how or done.stderr))
        assert answers[0][0] == answers[1][0]
        assert answers[0][1].split() == ["imported:"]
    assert [file.name for file in (tmp_path / "cache").rglob(f"*{SUFFIX}")] == []


ONE_THREAD = """
import os, subprocess
from gpusched.cli import blas
before = dict(os.environ)
blas.use_one_thread()
import numpy
assert dict(os.environ) == before
print(len(os.listdir("/proc/self/task")), subprocess.run(["sh", "-c", "echo $OPENBLAS_NUM_THREADS"],
      capture_output=True, text=True).stdout.strip())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="OpenBLAS starts no thread on one core")
@pytest.mark.parametrize(
    ("own", "seen"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2 2"), ({"OMP_NUM_THREADS": "2"}, "2")]
)
def test_numpy_starts_no_threads_unless_the_user_says_so_and_no_other_program_is_limited(
    own: dict[str, str], seen: str, tmp_path: Path
) -> None:
    env = {name: value for name, value in env_of(tmp_path).items() if not name.endswith("_NUM_THREADS")}
    argv = [sys.executable, "-c", ONE_THREAD]
    done = subprocess.run(argv, env=env | own, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == seen
