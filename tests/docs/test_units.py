"""The systemd units of the guides are taken by systemd itself, and their commands by gpusched."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def units(page: str) -> dict[str, str]:
    """File name -> text, of the page's ini blocks."""
    blocks = re.findall(r"```ini\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)
    return {"nightly" + _suffix(b): b for b in blocks}


def _suffix(text: str) -> str:
    return ".timer" if "[Timer]" in text else ".service"


def test_systemd_takes_them(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    found = units("replay.md")
    assert len(found) == 2
    for name, text in found.items():
        own = text.replace("/opt/gpusched/bin/gpusched", "/bin/true").replace("User=gpusched", "User=root")
        (tmp_path / name).write_text(own)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / name) for name in found)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Unknown" not in done.stderr


def test_cron_and_timer_run_the_same_command() -> None:
    text = (GUIDES / "replay.md").read_text()
    commands = re.findall(r"/opt/gpusched/bin/gpusched (replay [^\n`]*)", text)
    assert len(commands) == 2
    assert len(set(commands)) == 1
    (line,) = re.findall(r"```crontab\n(.*?)```", text, re.DOTALL)
    assert re.fullmatch(r"\d+ \d+ \* \* \* (?:[A-Z_]+=\S+ )+/\S+ .*\n", line)
