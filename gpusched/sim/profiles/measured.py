"""Tables of measurements that come along, each with its source and year in its first line."""

from __future__ import annotations

import csv
from pathlib import Path

import gpusched

FOLDER = Path(gpusched.__file__).with_name("data") / "measured"


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of ``data/measured/NAME.csv``, by column."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        next(file)
        return list(csv.DictReader(file))
