"""Bringing a job's output from its node into the state folder, no more of it than the cap allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpusched.model.resources import LogSettings
from gpusched.nodes.transport import Script, Transport, TransportError

_MIB = 1024 * 1024
# A stream has no exit code, and an output that an engine could not give must not pass for an empty one.
_MARK = b"\0gpusched-output-ended "
_LONGEST_ENDING = len(_MARK) + 8
_TOLD = """\
command -v timeout >/dev/null && set -- timeout 900 "$@"
"$@"
printf '\\0gpusched-output-ended %d\\n' $?
"""


def collect_log(transport: Transport, script: Script, destination: Path, settings: LogSettings) -> str:
    """Stream a log into ``destination``, replacing it when complete; returns "" or what went wrong.

    Of an output larger than the cap the first quarter and the end are kept, with a line between them that says how much
    is missing: the beginning holds the settings, the end the error.

    Raises:
        TransportError: The connection was lost.
        OSError: It cannot be written here.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = destination.with_suffix(".part")
    try:
        error = _fetch(transport, script, draft, settings)
        if not error:
            os.replace(draft, destination)
        return error
    finally:
        draft.unlink(missing_ok=True)  # on a full disk above all


def _fetch(transport: Transport, script: Script, draft: Path, settings: LogSettings) -> str:
    cap = settings.max_mib_per_job * _MIB
    head_room, tail, dropped = cap // 4, bytearray(), 0
    ending = _Ending()
    with draft.open("wb") as file:
        for chunk in ending.before(transport.stream(Script(("sh", "-c", _TOLD, "sh", *script.argv), script.stdin))):
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
            file.write(f"\n[gpusched: {dropped + surplus} bytes left out here, settings.logs.max_per_job]\n".encode())
        file.write(tail[surplus:])
        file.flush()
        os.fsync(file.fileno())
    if ending.exit_code is None:
        raise TransportError("ssh", "the output broke off", "it is asked for again")
    if ending.exit_code:
        said = draft.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
        why = said[-1][:300] if said else "no reason given"
        return f"the output cannot be read (exit code {ending.exit_code}): {why}"
    return ""


class _Ending:
    """Takes the line of `_TOLD` off the end of a stream."""

    exit_code: int | None = None

    def before(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        held = b""
        for chunk in chunks:
            held += chunk
            if len(held) > _LONGEST_ENDING:
                yield held[:-_LONGEST_ENDING]
                held = held[-_LONGEST_ENDING:]
        text, mark, code = held.rpartition(_MARK)
        if mark and code.strip().isdigit():
            held, self.exit_code = text, int(code)
        if held:
            yield held


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
