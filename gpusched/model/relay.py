"""The protocol between clients and the controller on the socket in the state folder. Pure.

A connection is one request. Frames go both ways: a byte that says what it is, the length of what follows, and that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

SOCKET = "relay.sock"
"""Its name in the state folder."""
REQUEST, INPUT, INPUT_ENDED, RESIZED = b"qiew"
"""From the client: first the request (JSON), then what it types, the end of that, its terminal's new size."""
OUTPUT, ERRORS, EXITED, FAILED, BEGAN = b"orxfb"
"""To the client: bytes of stdout and of stderr, in the end an exit code or a `Failure` (JSON).

Of `Attach`, `BEGAN` comes before all output: from now on `INPUT` is the job's.
"""
NOT_STARTED = -1
"""In place of an exit code: the session could not be started."""
MAX_PAYLOAD = 1 << 18
CHUNK = 1 << 16

_HEADER = struct.Struct("!BI")
_SIZE = struct.Struct("!HH")
_EXIT = struct.Struct("!i")

Small = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Cells = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Terminal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller's terminal."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")] = "xterm"
    rows: Cells = 24
    columns: Cells = 80


class NodeLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="log"):
    """A request for output that is still on its node, see `Runtime.log`."""

    job: str
    attempt: Small
    rank: Small
    follow: bool = False
    tail_bytes: Small | None = None


class KeptLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kept"):
    """A request for collected output; ``result``: of a Python function."""

    job: str
    attempt: Small
    rank: Small
    result: bool = False


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="exec"):
    """A request to run a command beside a running job; ``stdin``: `INPUT` will come."""

    job: str
    rank: Small
    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    stdin: bool = False
    terminal: Terminal | None = None


class Attach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="attach"):
    """A request to attach to a session's stdin, stdout and stderr, or its terminal."""

    job: str
    attempt: Small
    terminal: Terminal | None = None
    rank: Literal[0] = 0


class Forward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="forward"):
    """A request to connect to a port of a session."""

    job: str
    attempt: Small
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank: Literal[0] = 0


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="audit"):
    """A request for the caller's entries of the audit log since a time (Unix seconds); an operator gets all."""

    since: float = 0.0


JobRequest = NodeLog | KeptLog | Exec | Attach | Forward
Request = JobRequest | AuditQuery


class Failure(msgspec.Struct, frozen=True):
    """Why the request failed or was cut off; ``transient``: a retry makes sense."""

    message: str
    hint: str = ""
    transient: bool = False


class ProtocolError(Exception):
    """Invalid data from the peer."""


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return _HEADER.pack(kind, len(payload)) + payload


def size_frame(rows: int, columns: int) -> bytes:
    """Encode a terminal's new size."""
    return frame(RESIZED, _SIZE.pack(min(rows, 65535), min(columns, 65535)))


def size(payload: bytes) -> tuple[int, int]:
    """Decode rows and columns of a `RESIZED` frame.

    Raises:
        ProtocolError: It is none.
    """
    if len(payload) != _SIZE.size:
        raise ProtocolError("a size")
    rows, columns = _SIZE.unpack(payload)
    return max(1, rows), max(1, columns)


def exit_frame(code: int) -> bytes:
    """Encode an exit code."""
    return frame(EXITED, _EXIT.pack(code))


def exit_code(payload: bytes) -> int:
    """Decode the exit code of an `EXITED` frame.

    Raises:
        ProtocolError: It is none.
    """
    if len(payload) != _EXIT.size:
        raise ProtocolError("an exit code")
    return int(_EXIT.unpack(payload)[0])


class Frames:
    """An incremental decoder of frames."""

    def __init__(self) -> None:
        self._held, self._at = b"", 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add received bytes, and yield the frames that are now complete.

        Raises:
            ProtocolError: One that is longer than any that is sent.
        """
        # Cut once for all frames: there may be thousands of empty ones. A caller may leave some for later.
        self._held, self._at = self._held[self._at :] + data, 0
        while len(self._held) >= (begin := self._at + _HEADER.size):
            kind, length = _HEADER.unpack_from(self._held, self._at)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(self._held) < begin + length:
                return
            self._at = begin + length
            yield kind, self._held[begin : self._at]
