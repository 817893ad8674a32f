"""The distribution in this folder, built and installed into a folder of its own beside the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusched.cli import main as cli
from gpusched.config import plugins
from tests.plugin.building import install

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the distribution; returns the folder for `sys.path`."""
    return install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def gpusched(plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``gpusched WORDS`` with the distribution installed, in a folder of the test's own.

    In this process, which finds components anew each time; processes of their own: tests/e2e/test_plugins.py.
    """
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        forget()
        capfd.readouterr()
        return subprocess.CompletedProcess(words, cli.run(words), *capfd.readouterr())

    return run


@pytest.fixture
def plugin(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution installed for this process."""
    monkeypatch.syspath_prepend(str(installed))
    plugins.components.cache_clear()
    yield
    forget()


def forget() -> None:
    """Have this process find and load components anew."""
    plugins.components.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpusched_example"]:
        del sys.modules[name]
