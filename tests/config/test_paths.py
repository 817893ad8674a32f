"""Where the state folder is."""

from pathlib import Path

import pytest

from gpusched.config import paths


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GPUSCHED_STATE", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(paths, "SHARED_STATE", tmp_path / "shared")
    return tmp_path


def test_state_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.state_folder() == home / ".local/state/gpusched"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert paths.state_folder() == home / ".local/state/gpusched"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert paths.state_folder() == home / "xdg/gpusched"
    (home / "shared").mkdir()
    assert paths.state_folder() == home / "xdg/gpusched"
    (home / "shared/inbox").mkdir()
    assert paths.state_folder() == home / "shared"
    monkeypatch.setenv("GPUSCHED_STATE", "~/mine")
    assert paths.state_folder() == home / "mine"


def test_config_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.config_folder() == home / ".config/gpusched"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    assert paths.config_folder() == home / "xdg/gpusched"
