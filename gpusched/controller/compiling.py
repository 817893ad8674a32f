"""Compiling in another process: the cluster does not wait for that, and what it compiles is kept for all."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile

from gpusched.model.snapshot import Snapshot


def compiler_of(function: Callable[[Snapshot], object], snapshot: Snapshot) -> subprocess.Popen[bytes] | None:
    """Start a process that calls a module's ``function`` with a snapshot; None: it cannot be started now."""
    null, code = subprocess.DEVNULL, f"import os, pickle, sys; os.nice(10); from {function.__module__} import "
    code += f"{function.__name__} as run; run(pickle.load(sys.stdin.buffer))"
    with suppress(OSError), TemporaryFile() as given:
        pickle.dump(snapshot, given)
        given.seek(0)
        return subprocess.Popen([sys.executable, "-P", "-c", code], stdin=given, stdout=null, stderr=null)
    return None


def end(compiler: subprocess.Popen[bytes] | None) -> None:
    """Leave no process behind; what it had compiled by then is kept."""
    if compiler is not None:
        compiler.kill()
        compiler.wait()
