"""The distribution in this folder, built and installed into a folder of its own beside the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusched.config import plugins
from tests.plugin.building import HERE, install

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the distribution; returns the folder for `sys.path`."""
    return install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def gpusched(installed: Path, tmp_path: Path) -> Run:
    """``gpusched WORDS`` with the distribution installed, in a folder of the test's own."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(installed)])
    env = os.environ | {"PYTHONPATH": paths, "GPUSCHED_STATE": str(tmp_path / "state"), "COLUMNS": "200"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpusched", *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def plugin(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution installed for this process."""
    monkeypatch.syspath_prepend(str(installed))
    plugins.components.cache_clear()
    yield
    plugins.components.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpusched_example"]:
        del sys.modules[name]
