"""Tables of measurements: built-in ones, each with its source and year in its first line, and other files."""

from __future__ import annotations

import csv
from pathlib import Path

import gpusched
from gpusched.errors import FileError
from gpusched.traces.readers.columns import Table, read_csv

FOLDER = Path(gpusched.__file__).with_name("data") / "measured"


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of ``data/measured/NAME.csv``, by column."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        next(file)
        return list(csv.DictReader(file))


def whole_table(path: Path, what: str, columns: tuple[str, ...]) -> Table:
    """Return these columns of a CSV file.

    Raises:
        FileError: It lacks one of them, or a line has more or fewer fields.
    """
    table = read_csv(path, what, columns)
    if table.ragged:
        line, has, expected = table.ragged[0]
        raise FileError(str(path), line, "", f"{has} fields", f"{expected} fields")
    return table


def number_at(
    path: Path, table: Table, row: int, column: str, what: str = "a number", *, above_0: bool = False
) -> float:  # fmt: skip
    """Return a number of a table, 0 or more; ``what``: its name in the error.

    Raises:
        FileError: It is none.
    """
    text = table.columns[column][row]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (above_0 and value == 0):
        expected = f"{what}, {'more than 0' if above_0 else '0 or more'}"
        raise FileError(str(path), int(table.lines[row]), column, repr(text), expected)
    return value
