"""The way from srun to the other nodes: frames over TLS, each side known to the other by the job's key."""

import asyncio
import json
import os
import ssl
import struct

MYPY = False  # as mypy knows it; importing typing costs time
if MYPY:
    from typing import Any

HERE = os.path.abspath(__file__).rsplit("/lib/", 1)[0]
"""The spool folder."""
_HEAD = struct.Struct("!Ici")
LARGEST = 64 << 20

# To a node: request, then start, stdin (empty: its end), signal. From it: accepted or refused, output, exits, done.
REQUEST, START, STDIN, SIGNAL = b"r", b"b", b"i", b"s"
ACCEPTED, REFUSED, WAITS, OUT, ERR, EXIT, DONE = b"a", b"n", b"w", b"o", b"e", b"x", b"d"


def settings() -> "dict[str, Any]":
    """Return what the controller has said about the job; see StepSettings in gpusched/nodes/batch/spool.py."""
    with open(os.path.join(HERE, "settings.json")) as file:
        found = json.load(file)  # type: dict[str, Any]
    return found


def context(server: bool) -> ssl.SSLContext:
    """TLS in which both sides must have the job's key: its own certificate is the only one that counts."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    key = os.path.join(HERE, "key.pem")
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(key)
    made.load_verify_locations(key)
    return made


def frame(kind: bytes, number: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame. ``number`` is a task's or a signal's; the payload depends on the kind."""
    return _HEAD.pack(len(payload), kind, number) + payload


async def read_frame(reader: asyncio.StreamReader) -> "tuple[bytes, int, bytes] | None":
    """Return (kind, number, payload), or None when the other side is gone."""
    try:
        length, kind, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > LARGEST:
            return None
        return kind, number, await reader.readexactly(length)
    except (OSError, EOFError, ssl.SSLError):
        return None
