"""One channel to a node that reports at once when one of its jobs has ended. Builders only, see payload/ends.py."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from gpusched.model.readings import NodeReading

WatchedJob = tuple[str, int]
"""A job's name on its node, and its first process; 0 where that is not known, -1 where it has none yet."""

_PAYLOAD_FOLDER = Path(__file__).parent / "payload"
_PATH = 'umask 077; PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"; export PATH; '
# The program comes first on stdin, and no byte of what follows it may be read with it. No exclamation marks or line
# breaks: the login shell that takes this apart may be csh.
_PYTHON_LOADER = (
    "import zlib, base64; from io import FileIO; "
    "exec(zlib.decompress(base64.b64decode(FileIO(0, closefd=False).readline())))"
)
_END_OF_PROGRAM = "#end"
_SH_LOADER = (
    'text=$(while IFS= read -r line; do case $line in "#end") break ;; esac; printf "%s\\n" "$line"; done); '
    'eval "$text"'
)


def jobs_to_watch(reading: NodeReading) -> frozenset[WatchedJob]:
    """Return what can be waited for on a node, by its last reading."""
    containers = reading.containers or ()
    underway = ((c.name, c.pid or 0) for c in containers if c.phase in ("preparing", "running"))
    return frozenset((*underway, *((c.name, -1) for c in containers if c.phase == "ready")))


def channel_argv(cluster_id: str, node: str, python: bool) -> tuple[str, ...]:
    """Return the command for `Transport.session`; `program` is the first thing to write to it."""
    run = f'exec python3 -I -S -c "{_PYTHON_LOADER}" "$1"' if python else _SH_LOADER
    return ("sh", "-c", _PATH + run, "sh", f"{cluster_id}/{node}")


@lru_cache(maxsize=2)
def program(python: bool) -> bytes:
    """Return the program that runs on the node."""
    if python:
        return base64.b64encode(zlib.compress((_PAYLOAD_FOLDER / "ends.py").read_bytes())) + b"\n"
    return (_PAYLOAD_FOLDER / "ends.sh").read_bytes() + f"{_END_OF_PROGRAM}\n".encode()


def request(names: Iterable[WatchedJob]) -> bytes:
    """Return the line that says what is waited for from now on."""
    return " ".join(f"{name}:{pid}" for name, pid in sorted(names)).encode() + b"\n"


def parse_end(line: bytes) -> tuple[str, int | None]:
    """Return the job that a line reports as ended; its launcher reports it without the process."""
    name, _, pid = line.decode(errors="replace").rpartition(":")
    try:
        return name, int(pid) if pid else None
    except ValueError:
        return "", None
