"""What a client and the controller say to each other over the socket in the state folder. Pure.

A connection is one request. Frames go both ways: a byte that says what it is, the length of what follows, and that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

SOCKET = "relay.sock"
"""Its name in the state folder."""
REQUEST, INPUT, INPUT_ENDED, RESIZED = b"qiew"
"""From the client: first the request (JSON), then what it types, the end of that, its terminal's new size."""
OUTPUT, ERRORS, EXITED, FAILED = b"orxf"
"""To the client: bytes of stdout and of stderr, in the end an exit code or a `Failure` (JSON)."""
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
    """Output that is still on its node, see `Runtime.log`."""

    job: str
    attempt: Small
    rank: Small
    follow: bool = False
    tail_bytes: Small | None = None


class KeptLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kept"):
    """Output that was collected; ``result``: what a Python function left."""

    job: str
    attempt: Small
    rank: Small
    result: bool = False


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="exec"):
    """A command beside a running job; ``stdin``: `INPUT` will come."""

    job: str
    rank: Small
    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    stdin: bool = False
    terminal: Terminal | None = None


Request = NodeLog | KeptLog | Exec


class Failure(msgspec.Struct, frozen=True):
    """Why nothing (more) comes; ``transient``: asking again makes sense."""

    message: str
    hint: str = ""
    transient: bool = False


class Garbled(Exception):
    """The other side does not speak this."""


def frame(kind: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEADER.pack(kind, len(payload)) + payload


def size_frame(rows: int, columns: int) -> bytes:
    """The frame of a terminal's new size."""
    return frame(RESIZED, _SIZE.pack(min(rows, 65535), min(columns, 65535)))


def size(payload: bytes) -> tuple[int, int]:
    """Rows and columns of a `RESIZED` frame.

    Raises:
        Garbled: It is none.
    """
    if len(payload) != _SIZE.size:
        raise Garbled("a size")
    rows, columns = _SIZE.unpack(payload)
    return max(1, rows), max(1, columns)


def exit_frame(code: int) -> bytes:
    """The frame of an exit code."""
    return frame(EXITED, _EXIT.pack(code))


def exit_code(payload: bytes) -> int:
    """The exit code of an `EXITED` frame."""
    return int(_EXIT.unpack(payload)[0])


class Frames:
    """Takes bytes as they come and gives frames."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that are complete now.

        Raises:
            Garbled: One that is longer than any that is sent.
        """
        self._held += data
        while len(self._held) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._held)
            if length > MAX_PAYLOAD:
                raise Garbled(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            payload, self._held = self._held[_HEADER.size : end], self._held[end:]
            yield kind, payload
