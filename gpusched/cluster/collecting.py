"""Bringing a job's output from its node into the state folder, no more of it than the cap allows."""

from __future__ import annotations

import os
from pathlib import Path

from gpusched.model.resources import LogSettings
from gpusched.nodes.transport import Script, Transport

_MIB = 1024 * 1024


def collect_log(transport: Transport, script: Script, destination: Path, settings: LogSettings) -> str:
    """Stream a log into ``destination``, replacing it when complete; returns "" or what went wrong.

    Of an output larger than the cap the first quarter and the end are kept, with a line between them that says how much
    is missing: the beginning holds the settings, the end the error.

    Raises:
        TransportError: The connection was lost.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = destination.with_suffix(".part")
    cap = settings.max_mib_per_job * _MIB
    head_room, tail, dropped = cap // 4, bytearray(), 0
    with draft.open("wb") as file:
        for chunk in transport.stream(script):
            if head_room:
                file.write(chunk[:head_room])
                chunk, head_room = chunk[head_room:], head_room - min(len(chunk), head_room)
            tail += chunk
            if len(tail) > cap:  # trimmed rarely, so that each byte is moved about once
                surplus = len(tail) - (cap - cap // 4)
                dropped += surplus
                del tail[:surplus]
        surplus = max(0, len(tail) - (cap - cap // 4))
        if dropped + surplus:
            file.write(
                f"\n[gpusched: {dropped + surplus} bytes left out here, settings.logs.max_mib_per_job]\n".encode()
            )
        file.write(tail[surplus:])
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, destination)
    return ""


def rotate(folder: Path, settings: LogSettings) -> list[Path]:
    """Remove the oldest logs until what is left fits the cap; returns what was removed."""
    logs = sorted(
        ((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*/*.log")), key=lambda log: log[0]
    )
    surplus = sum(size for _, size, _ in logs) - settings.max_total_mib * _MIB
    removed = []
    for _, size, path in logs:
        if surplus <= 0:
            break
        path.unlink(missing_ok=True)
        removed.append(path)
        surplus -= size
    for job_folder in {path.parent for path in removed}:
        if not any(job_folder.iterdir()):
            job_folder.rmdir()
    return removed
