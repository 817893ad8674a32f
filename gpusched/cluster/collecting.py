"""Copies a job's output from its node into the state folder, up to a size limit, and deletes the oldest copies.

Of a larger output the first quarter of the limit and the end are kept. The node cuts it (`_HEAD_AND_TAIL`); `_fetch`
relies on no more than that its last line, the trailer, came.
"""

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
_BLOCK = 65536  # bytes; that of dd below
# The trailer: this mark, the exit code, and how many bytes were left out. A stream has no exit code, and a failure to
# read an output must not look like an empty output.
_MARK = b"\0gpusched-output-ended "
_MAX_TRAILER = len(_MARK) + 32
# Arguments: blocks of the head, bytes of the tail, and the command that prints the output. The node cuts it, so that
# the rest is not sent. dd instead of head: it consumes no more input than it copies, and it counts bytes. Descriptor 4
# is our stdout; 3 gathers the command's exit code and the second dd's count. podman reads its log at about 10 MB/s per
# core, so the time limit is generous and the priority below that of jobs.
_HEAD_AND_TAIL = r"""
head=$1 tail=$2
shift 2
command -v timeout >/dev/null && set -- timeout 3600 "$@"
command -v nice >/dev/null && set -- nice -n 10 "$@"
LC_ALL=C
export LC_ALL
exec 4>&1
counts=$({
    { "$@" 2>&1 3>&- 4>&-; echo "exit $?" >&3; } | {
        dd bs=65536 count="$head" iflag=fullblock 2>/dev/null
        dd bs=65536 2>&3 | tail -c "$tail"
    } >&4
} 3>&1)
code=$(printf '%s\n' "$counts" | sed -n 's/^exit //p')
rest=$(printf '%s\n' "$counts" | sed -n 's/^\([0-9][0-9]*\) byte.*/\1/p')
[ "${rest:-0}" -gt "$tail" ] && left_out=$((rest - tail)) || left_out=0
printf '\0gpusched-output-ended %d %d\n' "${code:-1}" "$left_out"
"""


class _Unreadable(Exception):
    """The node cannot read the output; the argument says why."""


def collect_log(
    transport: Transport, script: RemoteScript, destination: Path, settings: LogSettings, readers: Iterable[int] = ()
) -> str:
    """Copy an output to ``destination``, replacing it when complete; return "", or why the node cannot read it.

    Of an output larger than the limit, the first quarter and the end are kept, since settings are printed first and
    errors last, separated by a line that says how much is missing.

    Args:
        transport: The connection to the node.
        script: What prints the output there (`Runtime.log`).
        destination: A file in the state folder.
        settings: The size limit.
        readers: User ids that may read the file, besides the controller's.

    Raises:
        TransportError: The connection was lost.
        OSError: The file cannot be written.
    """
    try:
        with log_file(destination, readers) as file:
            _fetch(transport, script, file, settings.max_mib_per_job * _MIB)
    except _Unreadable as error:
        return str(error)
    return ""


def _fetch(transport: Transport, script: RemoteScript, file: BinaryIO, cap: int) -> None:
    """Write at most ``cap`` bytes of the output, whole MiB, so that a quarter is whole blocks."""
    head_left, tail_size = cap // 4, cap - cap // 4
    argv = ("sh", "-c", _HEAD_AND_TAIL, "sh", str(head_left // _BLOCK), str(tail_size), *script.argv)
    tail, dropped, trailer = bytearray(), 0, _Trailer()  # dropped: bytes
    for chunk in trailer.payload(transport.stream(RemoteScript(argv, script.stdin))):
        if head_left:
            file.write(chunk[:head_left])
            chunk, head_left = chunk[head_left:], head_left - min(len(chunk), head_left)
        tail += chunk
        if len(tail) > cap:  # the node sends more than requested; trim it now and then, since it is held in memory
            dropped += len(tail) - tail_size
            del tail[:-tail_size]
    if trailer.exit_code is None:
        raise TransportError("ssh", "the output was cut off", "retrying")
    if trailer.exit_code:
        file.write(tail)
        file.seek(max(0, file.tell() - 2000))  # the last line is the command's error; the file is discarded
        lines = file.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1][:300] if lines else "no reason given"
        raise _Unreadable(f"the output cannot be read (exit code {trailer.exit_code}): {reason}")
    surplus = max(0, len(tail) - tail_size)
    dropped += surplus + trailer.left_out
    if dropped:
        file.write(f"\n[gpusched: {dropped} bytes left out here, settings.logs.max_per_job]\n".encode())
    file.write(tail[surplus:])


class _Trailer:
    """Removes the trailer from a stream and parses it.

    Attributes:
        exit_code: Of the command; None: no trailer came, so the stream was cut off.
        left_out: Bytes that the node left out between head and tail.
    """

    exit_code: int | None = None
    left_out = 0

    def payload(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the output, holding back as many bytes as a trailer may have; at the end, set the attributes."""
        buffer = b""
        for chunk in chunks:
            buffer += chunk
            if len(buffer) > _MAX_TRAILER:
                yield buffer[:-_MAX_TRAILER]
                buffer = buffer[-_MAX_TRAILER:]
        text, mark, fields = buffer.rpartition(_MARK)
        numbers = fields.split()
        if mark and len(numbers) == 2 and all(word.isdigit() and len(word) <= 18 for word in numbers):
            buffer, (self.exit_code, self.left_out) = text, map(int, numbers)
        if buffer:
            yield buffer


def rotate(folder: Path, settings: LogSettings) -> list[Path]:
    """Remove the oldest logs and results (``JOB/*.log``, ``JOB/*.result``) until the rest fits the limit.

    Returns:
        The removed paths.
    """
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
        with contextlib.suppress(OSError):  # the folder is not empty
            job_folder.rmdir()
    return removed


def _files(paths: Iterable[Path]) -> Iterator[tuple[float, int, Path]]:
    """Yield (modification time, bytes, path) of regular files, ignoring links and files that vanish meanwhile."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield status.st_mtime, status.st_size, path
