"""Bringing a job's output from its node into the state folder, no more of it than the cap allows."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gpusched.cluster.logfiles import log_file
from gpusched.model.resources import LogSettings
from gpusched.nodes.transport import RemoteScript, Transport, TransportError

_MIB = 1024 * 1024
_BLOCK = 65536
# A stream has no exit code, and an output that an engine could not give must not pass for an empty one.
_MARK = b"\0gpusched-output-ended "
_LONGEST_ENDING = len(_MARK) + 32
# Head and tail are taken on the node, so that what nobody will see does not travel. dd and not head: it takes no byte
# more from the pipe than it passes on. It also counts what goes by. podman reads its log at some 10 MB/s and a core:
# patience, but behind the jobs.
_KEEP = r"""
head=$1 tail=$2
shift 2
command -v timeout >/dev/null && set -- timeout 3600 "$@"
command -v nice >/dev/null && set -- nice -n 10 "$@"
LC_ALL=C
export LC_ALL
exec 4>&1
told=$({
    { "$@" 2>&1 3>&- 4>&-; echo "exit $?" >&3; } | {
        dd bs=65536 count="$head" iflag=fullblock 2>/dev/null
        dd bs=65536 2>&3 | tail -c "$tail"
    } >&4
} 3>&1)
code=$(printf '%s\n' "$told" | sed -n 's/^exit //p')
rest=$(printf '%s\n' "$told" | sed -n 's/^\([0-9][0-9]*\) byte.*/\1/p')
[ "${rest:-0}" -gt "$tail" ] && left_out=$((rest - tail)) || left_out=0
printf '\0gpusched-output-ended %d %d\n' "${code:-1}" "$left_out"
"""


class _Unreadable(Exception):
    """The node cannot give the output; the argument says why."""


def collect_log(
    transport: Transport, script: RemoteScript, destination: Path, settings: LogSettings, readers: Iterable[int] = ()
) -> str:
    """Stream a log (`Runtime.log`) into ``destination``, replacing it when complete; returns "" or what went wrong.

    Of an output larger than the cap the first quarter and the end are kept, with a line between them that says how much
    is missing: the beginning holds the settings, the end the error. No more than that travels. ``readers`` are user ids
    that may read it, besides the controller's.

    Raises:
        TransportError: The connection was lost.
        OSError: It cannot be written here.
    """
    try:
        with log_file(destination, readers) as file:
            _fetch(transport, script, file, settings.max_mib_per_job * _MIB)
    except _Unreadable as error:
        return str(error)
    return ""


def _fetch(transport: Transport, script: RemoteScript, file: BinaryIO, cap: int) -> None:
    head_room, most = cap // 4, cap - cap // 4
    argv = ("sh", "-c", _KEEP, "sh", str(head_room // _BLOCK), str(most), *script.argv)
    tail, dropped, ending = bytearray(), 0, _Ending()
    for chunk in ending.before(transport.stream(RemoteScript(argv, script.stdin))):
        if head_room:
            file.write(chunk[:head_room])
            chunk, head_room = chunk[head_room:], head_room - min(len(chunk), head_room)
        tail += chunk
        if len(tail) > cap:  # a node that sends more than it should; trimmed rarely
            dropped += len(tail) - most
            del tail[:-most]
    if ending.exit_code is None:
        raise TransportError("ssh", "the output was cut off", "retrying")
    if ending.exit_code:
        file.write(tail)
        file.seek(max(0, file.tell() - 2000))
        lines = file.read().decode(errors="replace").strip().splitlines()
        why = lines[-1][:300] if lines else "no reason given"
        raise _Unreadable(f"the output cannot be read (exit code {ending.exit_code}): {why}")
    surplus = max(0, len(tail) - most)
    dropped += surplus + ending.left_out
    if dropped:
        file.write(f"\n[gpusched: {dropped} bytes left out here, settings.logs.max_per_job]\n".encode())
    file.write(tail[surplus:])


class _Ending:
    """Takes the last line of `_KEEP` off the end of a stream."""

    exit_code: int | None = None
    left_out = 0

    def before(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        held = b""
        for chunk in chunks:
            held += chunk
            if len(held) > _LONGEST_ENDING:
                yield held[:-_LONGEST_ENDING]
                held = held[-_LONGEST_ENDING:]
        text, mark, figures = held.rpartition(_MARK)
        words = figures.split()
        if mark and len(words) == 2 and all(word.isdigit() for word in words):
            held, (self.exit_code, self.left_out) = text, map(int, words)
        if held:
            yield held


def rotate(folder: Path, settings: LogSettings) -> list[Path]:
    """Remove the oldest logs and results until what is left fits the cap; returns what was removed."""
    found = (path for kind in ("log", "result") for path in folder.glob(f"*/*.{kind}"))
    logs = sorted(_files(found), key=lambda log: log[0])
    surplus = sum(size for _, size, _ in logs) - settings.max_total_mib * _MIB
    removed = []
    for _, size, path in logs:
        if surplus <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
            surplus -= size
    for job_folder in {path.parent for path in removed}:
        with contextlib.suppress(OSError):  # something else is in it
            job_folder.rmdir()
    return removed


def _files(paths: Iterable[Path]) -> Iterator[tuple[float, int, Path]]:
    """Time, size and path of regular files; links, folders and what vanishes meanwhile do not count."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield status.st_mtime, status.st_size, path
