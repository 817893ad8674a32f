"""A picture's pixels, without an imaging library: 8-bit RGB and RGBA, not interlaced (PNG specification, section 9)."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt


def pixels(data: bytes) -> npt.NDArray[np.uint8]:
    """``uint8[height, width, 3]``."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, channels, width, height = 8, b"", 0, 0, 0
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height + 1, width * channels), np.uint8)
    for y in range(height):
        rows[y + 1] = _unfiltered(int(raw[y, 0]), raw[y, 1:], rows[y], channels)
    return rows[1:].reshape(height, width, channels)[:, :, :3]


def _unfiltered(
    kind: int, line: npt.NDArray[np.uint8], above: npt.NDArray[np.uint8], step: int
) -> npt.NDArray[np.uint8]:
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line.reshape(-1, step), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return line + above
    given = line.tolist()
    up = [0] * step + above.tolist()
    out = up.copy() if kind == 4 else [0] * len(up)
    change = np.flatnonzero(line)
    first, last = (0, len(line)) if kind == 3 else (int(change[0]), int(change[-1])) if change.size else (0, -1)
    for i in range(first - first % step, len(line)):
        if i > last and i % step == 0 and out[i : i + step] == up[i : i + step]:
            break  # as left of `first`: without a change, next to what is as above, a pixel is as above
        value, left, over, corner = given[i], out[i], up[i + step], up[i]
        if kind == 3:
            guess = (left + over) // 2
        else:
            a, b, c = abs(over - corner), abs(left - corner), abs(left + over - 2 * corner)
            guess = left if a <= b and a <= c else over if b <= c else corner
        out[i + step] = (value + guess) & 255
    return np.array(out[step:], np.uint8)
