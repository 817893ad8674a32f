"""Stdout has what the command says, whatever else prints there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpusched.cli import output
from tests.cli.conftest import Site

NOISY = """
import os, subprocess, sys
import gpusched.cli.main as cli

real = cli.run


def run(argv):
    os.write(1, b"a library\\n")
    subprocess.run(["echo", "a library's program"])
    return real(argv)


cli.run = run
from gpusched.__main__ import main

main()
"""


def test_json_is_one_value_whatever_a_library_prints(site: Site) -> None:
    words = [sys.executable, "-c", NOISY, "flavors", "--json"]
    done = subprocess.run(words, env=site.env, cwd=site.folder, capture_output=True, text=True, timeout=300)
    assert {"a library", "a library's program"} <= set(done.stderr.splitlines())
    assert json.loads(done.stdout)


@pytest.mark.parametrize("words", [["--json"], [], ["--json", "-p", "none"]], ids=["json", "table", "error"])
def test_a_closed_pipe_ends_the_command_quietly(site: Site, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "gpusched", "flavors", *words]
    done = subprocess.run(words, env=site.env, cwd=site.folder, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["--json"], [], ["--json", "-p", "none"]], ids=["json", "table", "error"])
def test_output_that_has_no_room_is_an_error_of_one_line(site: Site, words: list[str]) -> None:
    words = [sys.executable, "-m", "gpusched", "flavors", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, env=site.env, cwd=site.folder, stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert done.stderr == b"gpusched: error: stdout: No space left on device\n"


def test_a_command_without_stderr_still_prints(site: Site) -> None:
    words = ["/bin/sh", "-c", 'exec "$0" -m gpusched flavors --json 2>&-', sys.executable]
    done = subprocess.run(words, env=site.env, cwd=site.folder, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_a_command_whose_streams_are_closed_does_its_work(site: Site, closed: str) -> None:
    words = ["/bin/sh", "-c", f'exec "$0" -m gpusched submit -F s-V100 --json -- true {closed}', sys.executable]
    done = subprocess.run(words, env=site.env, cwd=site.folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(site.commands()) == 1


def test_a_terminal_of_unknown_width_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "0")
    assert output.console().width >= 80
