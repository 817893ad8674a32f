"""Text files as columns of text, compressed or not, with each row's line number."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from gpusched.config.openers import require_input
from gpusched.errors import FileError, GpuschedError
from gpusched.traces.trace import Ints

_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.open(file, "rb"),
    b"\xfd7zXZ\x00": lambda file: lzma.open(file, "rb"),
    b"BZh": lambda file: bz2.open(file, "rb"),
}
_MIN_UNPACKED, _MAX_RATIO = 64 << 20, 200
_SEPARATORS = ("|", "\x1f", "\t")
_SUFFIXES = (".gz", ".xz", ".bz2")


@dataclass(frozen=True)
class Table:
    """Rows of text by column.

    Attributes:
        path: The file, as errors name it.
        lines: 1-based line on which each row begins.
        columns: Column name -> the texts of its rows, stripped of blanks around them.
        ragged: Rows of another number of fields, which are in no column: (line, fields found, fields expected).
    """

    path: str
    lines: Ints
    columns: dict[str, Sequence[str]]
    ragged: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.lines)


def stem(path: Path) -> str:
    """Return the file's name without compression suffixes."""
    return path.stem if path.suffix in _SUFFIXES else path.name


class CountedFile(io.FileIO):
    """A file that counts the bytes read."""

    latest: CountedFile | None = None
    """The file opened last, for progress bars."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path, self.size = path, os.fstat(self.fileno()).st_size
        CountedFile.latest = self

    @property
    def done(self) -> int:
        """Return the bytes of ``size`` that have been read; all of them once it is closed."""
        try:
            return self.tell()
        except ValueError:
            return self.size


class _Bomb(Exception):
    """A file that unpacks to much more than its size."""


class _Unpacked(io.RawIOBase):
    """A decompressed stream that refuses to grow far beyond any real table: a few MB may unpack to terabytes.

    Args:
        unpacked: The stream.
        packed: How many bytes the file has.
    """

    def __init__(self, unpacked: Any, packed: int) -> None:
        self._unpacked, self._left = unpacked, max(_MIN_UNPACKED, _MAX_RATIO * packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._unpacked.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise _Bomb(f"it unpacks to more than {_MAX_RATIO} times its size")
        return count


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file as UTF-8 text, decompressed by its magic bytes (gzip, xz, bzip2). Invalid bytes become U+FFFD.

    Raises:
        GpuschedError: It is damaged or ends early.
    """
    require_input(path)
    with open(path, "rb") as file:
        magic, size = file.read(6), os.fstat(file.fileno()).st_size
    opener = next((o for start, o in _OPENERS.items() if magic.startswith(start)), lambda p: p)
    try:
        with (
            io.BufferedReader(CountedFile(path), 1 << 16) as packed,
            opener(packed) as raw,
            io.BufferedReader(_Unpacked(raw, size), 1 << 16) if raw is not packed else packed as plain,
            io.TextIOWrapper(plain, "utf-8-sig", errors="replace", newline="") as text,
        ):
            yield text
    except _Bomb as error:
        raise GpuschedError(f"{path}: {error}", "unpack it yourself if that is meant") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise GpuschedError(f"{path}: cannot be unpacked: {error}", "download the file again") from None


def read_csv(
    path: Path,
    what: str,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    header: Sequence[str] | None = None,
) -> Table:
    """Read required and optional columns of a CSV file, skipping others. ``what``: its name in errors.

    ``header``: the columns of a file without a header line (one that is there all the same is skipped).

    Raises:
        FileError: A column is missing, or it is not CSV.
    """
    with open_text(path) as text:
        rows, lines = _rows(path, text)
    if header is None:
        if not rows:
            raise FileError(str(path), None, "", "nothing", f"{what} with a header line")
        names = [name.strip() for name in rows.pop(0)]
        lines = lines[1:]
    else:
        names = list(header)
        if rows and [field.strip() for field in rows[0][: len(names)]] == names:
            rows, lines = rows[1:], lines[1:]
    if missing := [name for name in required if name not in names]:
        raise FileError(str(path), 1, "", f"no column {', '.join(missing)}", f"{what}: {','.join(required)}")
    return _table(path, rows, lines, names, (*required, *optional))


def read_fields(path: Path, names: Sequence[str], separator: str | None, comment: str | None = None) -> Table:
    """Read lines split at ``separator`` (None: whitespace); skip empty lines and ``comment`` lines."""
    rows, lines = [], []
    with open_text(path) as text:
        for number, line in enumerate(text, 1):
            stripped = line.strip()
            if stripped and not (comment and stripped.startswith(comment)):
                rows.append(stripped.split(separator))
                lines.append(number)
    return _table(path, rows, np.array(lines, np.int64), list(names), names)


def read_lines(
    path: str, text: Iterable[str], what: str, needed: Sequence[str], any_of: Sequence[Sequence[str]],
    more: Sequence[str],
) -> Table:  # fmt: skip
    """Read lines split at the header's separator: the first of ``|``, the unit separator or tab in it.

    Columns: those ``needed``, of each of ``any_of`` at least one, and ``more`` where they are there.

    Raises:
        FileError: A column is missing.
    """
    lines = iter(text)
    header = next(lines, "").rstrip("\r\n")
    separator = next((s for s in _SEPARATORS if s in header), "|")
    names = [name.strip() for name in header.split(separator)]
    missing = [name for name in needed if name not in names]
    missing += [" or ".join(options) for options in any_of if not set(options) & set(names)]
    if missing:
        columns = "|".join((*(options[0] for options in any_of), *needed))
        raise FileError(path, 1, "", f"no column {', '.join(missing)}", f"{what}, such as {columns}")
    wanted = [name for name in (*needed, *chain(*any_of), *more) if name in names]
    pick, count = itemgetter(*map(names.index, wanted)), len(names)
    rows: list[tuple[str, ...]] = []
    numbers, ragged = [], []
    for number, line in enumerate(lines, 2):
        fields = line.rstrip("\r\n").split(separator)
        if len(fields) == count:
            rows.append(pick(fields))
            numbers.append(number)
        elif len(fields) > 1 or fields[0]:
            ragged.append((number, len(fields), count))
    found = list(zip(*rows, strict=True)) or [()] * len(wanted)
    return Table(path, np.array(numbers, np.int64), dict(zip(wanted, found, strict=True)), tuple(ragged))


def _rows(path: Path, text: TextIO) -> tuple[list[list[str]], Ints]:
    reader = csv.reader(text, strict=True)
    rows: list[list[str]] = []
    starts: list[int] = []
    try:
        begin = 1
        for row in reader:
            if row:
                rows.append(row)
                starts.append(begin)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise FileError(str(path), reader.line_num, "", f"a CSV error ({error})", "valid CSV") from None
    return rows, np.array(starts, np.int64)


def _table(path: Path, rows: list[list[str]], lines: Ints, names: list[str], wanted: Iterable[str]) -> Table:
    count = len(names)
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    whole = sizes == count
    ragged = tuple((int(lines[i]), int(sizes[i]), count) for i in np.flatnonzero(~whole))
    if ragged:
        rows, lines = [row for row in rows if len(row) == count], lines[whole]
    columns: dict[str, Sequence[str]] = {}
    for name in wanted:
        if name in names:
            at = names.index(name)
            columns[name] = [row[at].strip() for row in rows]
    return Table(str(path), lines, columns, ragged)
