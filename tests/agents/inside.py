"""Commands in this process, where what they import is shared: half of what a short training or a table costs."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

from gpusched.cli import main as cli


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``gpusched WORDS`` in a folder; as `tests.commands.run`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
