"""Runs tests on one copy of the tree, each time in a fork that has the libraries loaded already.

Reads one JSON object per line from stdin and answers with one. Nothing of gpusched is loaded before the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import numba  # noqa: F401  loaded once, for all forks
import numpy  # noqa: F401
import paramiko  # noqa: F401
import pytest
import rich.console  # noqa: F401
import typer.testing  # noqa: F401
import yaml  # noqa: F401

PR_SET_PDEATHSIG = 1
FLAGS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not testbed and not slow",
         "-W", "default::RuntimeWarning", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # fmt: skip


class Chosen:
    """Only these tests, the quickest first."""

    def __init__(self, ids: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(ids)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._place), key=lambda i: self._place[i.nodeid])


class Watched:
    """Which test reaches which line, and how long it takes, in seconds of the processors and of the clock."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self.passed: set[str] = set()
        self._coverage = coverage.Coverage(data_file=None, source=["gpusched"], config_file=False)
        self._coverage.start()  # before pytest loads conftest.py: what that imports runs once, when it is imported

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        begin, wall = cpu_s(), time.monotonic()
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")
            self.cpu_s[item.nodeid], self.wall_s[item.nodeid] = cpu_s() - begin, time.monotonic() - wall

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def lines(self, root: Path) -> dict[str, dict[int, list[str]]]:
        """File -> line -> tests."""
        self._coverage.stop()
        data = self._coverage.get_data()
        files = {str(Path(f).relative_to(root)): f for f in data.measured_files()}
        return {short: data.contexts_by_lineno(long) for short, long in files.items()}


def cpu_s() -> float:
    """Return this process's CPU seconds, and those of its children that have ended."""
    return sum(os.times()[:4])


def tests(root: Path, files: list[str], ids: list[str]) -> int:
    return int(pytest.main([*FLAGS, *files], plugins=[Chosen(ids)]))


def survey(root: Path, files: list[str], answer: Path) -> int:
    """All tests of these files, watched."""
    watched = Watched()
    pytest.main([flag for flag in FLAGS if flag != "-x"] + files, plugins=[watched])
    cpu_s = {test: s for test, s in watched.cpu_s.items() if test in watched.passed}
    found = {"cpu_s": cpu_s, "wall_s": watched.wall_s, "lines": watched.lines(root)}
    answer.write_text(json.dumps(found))
    return 0


def forked(root: Path, job: dict[str, Any]) -> int | None:
    """The exit status of the tests; None where they took too long."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its tests could go on for ever
        os.setsid()
        log = os.open(root.parent / f"{root.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = 70
        try:
            if answer := job.get("survey"):
                status = survey(root, job["files"], Path(answer))
            else:
                sys.dont_write_bytecode = True  # a mutant's must not be taken for the original's
                status = tests(root, job["files"], job["ids"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + job["timeout_s"]
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _kill_group(pid)  # what the tests started
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _kill_group(pid)
    os.waitpid(pid, 0)
    return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    root = Path.cwd()
    sys.path.insert(0, str(root))
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # the first failure will do
    hypothesis.settings.register_profile("mutate", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutate")
    for line in sys.stdin:
        job = json.loads(line)
        path = root / job["path"] if "path" in job else None
        original = path.read_text() if path else ""
        try:
            if path:
                for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    stale.unlink()
                path.write_text(job["text"])
            status = forked(root, job)
        finally:
            if path:
                path.write_text(original)
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
