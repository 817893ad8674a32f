"""Convert columns of text to a `Trace`; bad rows are rejected with their line and the reason."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusched.errors import FileError, GpuschedError
from gpusched.model.ids import id_key
from gpusched.model.units import count_of
from gpusched.traces.readers.columns import Table
from gpusched.traces.trace import Floats, Ints, Trace

Mask = npt.NDArray[np.bool_]
Names = tuple[Ints, tuple[str, ...]]  # index into the distinct names (-1 none), and these
_NOTHING = frozenset({"", "nan", "none", "null", "na", "n/a"})
_KEPT, _LEFT_OUT, _BAD = 0, 1, 2
MAX_WHOLE = 1 << 53  # beyond it a float no longer distinguishes whole numbers


class Draft:
    """Rows being converted into a trace. The first reason to reject a row is kept.

    Where ``strict``, `trace` refuses the first bad row instead of keeping it out.
    """

    def __init__(self, table: Table, *, strict: bool) -> None:
        self._table, self._strict = table, strict
        self._verdicts = np.zeros(len(table), np.int8)
        self._reasons: dict[int, tuple[str, str, str]] = {}  # row -> key, found, expected
        self._others: list[tuple[int, str, str, str]] = [
            (line, "", f"{found} fields", f"{expected} fields") for line, found, expected in table.ragged
        ]
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._table)

    @property
    def kept(self) -> Mask:
        """Return the rows not rejected so far."""
        kept: Mask = self._verdicts == _KEPT
        return kept

    def has(self, column: str) -> bool:
        """Return whether the file has this column."""
        return column in self._table.columns

    def text(self, column: str) -> Sequence[str]:
        """Return a column's text; empty strings where the file lacks the column."""
        return self._table.columns.get(column) or [""] * len(self)

    def where(self, column: str, holds: Callable[[str], bool]) -> Mask:
        """Return the rows whose text satisfies a predicate."""
        return np.fromiter(map(holds, self.text(column)), np.bool_, len(self))

    # Keeping rows out

    def reject(self, where: Mask, key: str, expected: str, found: Callable[[int], str] | None = None) -> None:
        """Reject these rows as invalid; ``found`` describes a row's value (default: the text of column ``key``)."""
        self._mark(where, _BAD, key, expected, found or (lambda row: _shown(self.text(key)[row])))

    def leave_out(self, where: Mask, key: str, expected: str, found: Callable[[int], str] | None = None) -> None:
        """Exclude valid rows that are of no use (never ran, still running): no error when strict."""
        self._mark(where, _LEFT_OUT, key, expected, found or (lambda row: _shown(self.text(key)[row])))

    def _mark(self, where: Mask, verdict: int, key: str, expected: str, found: Callable[[int], str]) -> None:
        for row in np.flatnonzero(where & self.kept).tolist():
            self._reasons[row] = (key, found(row), expected)
            self._verdicts[row] = verdict

    # Reading columns

    def numbers(
        self, column: str, expected: str = "a number", *, minimum: float = -np.inf, above: float = -np.inf,
        optional: bool = False,
    ) -> Floats:  # fmt: skip
        """Return a column as numbers; reject rows below ``minimum``, or not above ``above``. Unknown is NaN."""
        texts = self.text(column)
        values = to_numbers(texts)
        wrong = self._unreadable(texts, ~np.isfinite(values), optional)
        with np.errstate(invalid="ignore"):
            self.reject(wrong | (values < minimum) | (values <= above), column, expected)
        return values

    def whole(self, column: str, expected: str, *, minimum: int = 0, optional: bool = False, unknown: int = -1) -> Ints:
        """Return a column as whole numbers of at least ``minimum``."""
        values = self.numbers(column, expected, minimum=minimum, optional=optional)
        with np.errstate(invalid="ignore"):
            fraction = values != np.floor(values)
        known = np.isfinite(values)
        self.reject(fraction & known, column, expected)
        return np.where(known & ~fraction, values, unknown).astype(np.int64)

    def times(self, column: str, *, optional: bool = False) -> Floats:
        """Return a column of dates and times as Unix seconds; times without a zone are read as UTC."""
        texts = self.text(column)
        values = to_times(texts)
        wrong = self._unreadable(texts, np.isnan(values), optional)
        self.reject(wrong, column, "a time such as 2017-10-07 01:11:39")
        return values

    def names(self, column: str, *, optional: bool = False) -> Names:
        """Return a column of names as indices into the distinct ones; -1 for none."""
        texts = self.text(column)
        index, names = intern(texts)
        if not optional:
            self.reject(index < 0, column, "a name")
        return index, names

    def ids(self, column: str) -> tuple[str, ...]:
        """Return a column of job ids; reject repeated ids."""
        texts = self.text(column)
        self.reject(self.where(column, operator.not_), column, "a job id")
        first: dict[str, int] = {}
        again = np.zeros(len(texts), np.bool_)
        for row in np.flatnonzero(self.kept).tolist():
            again[row] = first.setdefault(texts[row], row) != row
        lines = self._table.lines
        self.reject(
            again, column, "each id once", lambda row: f"{texts[row]} again (first on line {lines[first[texts[row]]]})"
        )
        return tuple(texts)

    def _unreadable(self, texts: Sequence[str], unknown: Mask, optional: bool) -> Mask:
        """Return rows with an unknown value, except empty ones in optional columns."""
        if optional:
            for row in np.flatnonzero(unknown).tolist():
                unknown[row] = texts[row].lower() not in _NOTHING
        return unknown

    # The result

    def trace(
        self, name: str, *, epoch: float | None, ids: tuple[str, ...], submit: Floats, duration: Floats, gpus: Ints,
        names: Mapping[str, Names], columns: Mapping[str, Floats | Ints] | None = None, depends_on: Ints | None = None,
        rebase: bool = False, also_rejected: tuple[tuple[int, str], ...] = (),
    ) -> Trace:  # fmt: skip
        """Build the trace of the kept rows, sorted by (submit, id). Columns are as in `Trace`, one entry per file row.

        ``names``: ``user``, ``group``, ``model``, ``gpu_type`` and ``status`` as `intern` gives them; ``columns``: more
        columns, what is left out is unknown; ``depends_on``: the row of the job that must have ended before, or -1;
        ``rebase``: ``submit`` is Unix time, the first kept submission becomes time 0; ``also_rejected``: rows of other
        files that were kept out, (line, why).

        Raises:
            FileError: Strict, and a row is bad.
            GpuschedError: No row is left.
        """
        self.stop_if_strict()
        rows = np.flatnonzero(self.kept)
        if not len(rows):
            raise GpuschedError(f"{self._table.path}: no job in it can be replayed{self._first_reason()}")
        late = int(np.count_nonzero(submit[rows] < np.maximum.accumulate(submit[rows])))
        if late:
            self.notes.append(f"{count_of(late, 'row')} not in submission order, now sorted")
        order = rows[sorted_order(submit[rows], [ids[r] for r in rows.tolist()])]
        start = float(submit[order[0]]) if rebase else 0.0
        final: dict[str, Floats | Ints] = {column: values[order] for column, values in (columns or {}).items()}
        if depends_on is not None:
            final["depends_on"] = self._moved(depends_on, order)
        return assemble(
            name=name,
            epoch=start if rebase else epoch,
            ids=tuple(ids[r] for r in order.tolist()),
            submit=submit[order] - start,
            duration=duration[order].astype(np.float64),
            gpus=gpus[order],
            names={column: (index[order], words) for column, (index, words) in names.items()},
            columns=final,
            rejected=self.rejected() + also_rejected,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def rejected(self) -> tuple[tuple[int, str], ...]:
        """Return rows rejected so far: (line, why), by line."""
        return tuple((line, _why(*reason)) for line, *reason in self._all_reasons(bad_only=False))

    def _all_reasons(self, *, bad_only: bool) -> list[tuple[int, str, str, str]]:
        lines = self._table.lines
        found = [
            (int(lines[row]), *reason)
            for row, reason in self._reasons.items()
            if not bad_only or self._verdicts[row] == _BAD
        ]
        return sorted(found + self._others)

    def stop_if_strict(self) -> None:
        """Raise FileError for the first bad row when strict."""
        if self._strict and (bad := self._all_reasons(bad_only=True)):
            line, key, found, expected = bad[0]
            raise FileError(self._table.path, line, key, found, expected)

    def _moved(self, depends_on: Ints, order: Ints) -> Ints:
        """Apply `moved`, and drop dependencies on later jobs (or themselves), which would never be met."""
        places = moved(depends_on, order)
        lost = int(np.count_nonzero((places < 0) & (depends_on[order] >= 0)))
        later = places >= np.arange(len(places))
        if ignored := lost + int(np.count_nonzero(later)):
            self.notes.append(f"{count_of(ignored, 'dependency', 'dependencies')} on missing or later jobs ignored")
        return np.where(later, -1, places)

    def _first_reason(self) -> str:
        reasons = self.rejected()
        if not reasons:
            return ""
        line, why = reasons[0]
        return f" ({count_of(len(reasons), 'row')} rejected; line {line}: {why})"


def assemble(
    *, name: str, epoch: float | None, ids: tuple[str, ...], submit: Floats, duration: Floats, gpus: Ints,
    names: Mapping[str, Names], columns: Mapping[str, Floats | Ints],
    rejected: tuple[tuple[int, str], ...] = (), notes: tuple[str, ...] = (),
) -> Trace:  # fmt: skip
    """Build a trace from ordered columns; missing ones are unknown. Unused names are dropped."""
    n = len(submit)
    filled: dict[str, Any] = {
        "limit": np.full(n, np.nan), "wait": np.full(n, np.nan), "gpu_milli": np.full(n, 1000, np.int64),
        "nodes": np.zeros(n, np.int64), "cores": np.full(n, -1, np.int64), "memory_mib": np.full(n, -1, np.int64),
        "depends_on": np.full(n, -1, np.int64),
    }  # fmt: skip
    for column, plural in (
        ("user", "users"), ("group", "groups"), ("model", "models"), ("gpu_type", "gpu_types"), ("status", "statuses"),
    ):  # fmt: skip
        index, words = names.get(column, (np.full(n, -1, np.int64), ()))
        filled[column], filled[plural] = _used(index, words)
    return Trace(
        name=name, epoch=epoch, ids=ids, submit=submit, duration=duration, gpus=gpus, rejected=rejected, notes=notes,
        **(filled | dict(columns)),
    )  # fmt: skip


def to_numbers(texts: Sequence[str]) -> Floats:
    """Parse numbers; NaN for invalid text, and beyond `MAX_WHOLE`: sums and products of such would have no bound."""
    try:
        values = np.array(list(map(float, texts)), np.float64)
    except ValueError:
        values = np.fromiter(map(_number, texts), np.float64, len(texts))
    values[~(np.abs(values) <= MAX_WHOLE)] = np.nan
    return values


def to_times(texts: Sequence[str]) -> Floats:
    """Parse ISO dates with times into Unix seconds; NaN for invalid text."""
    if set(map(len, texts)) == {19}:
        try:
            with warnings.catch_warnings(action="error"):  # of times with a zone, which numpy leaves out
                return np.array(texts, "datetime64[s]").astype(np.float64)
        except (ValueError, Warning):
            pass
    return np.fromiter(map(_time, texts), np.float64, len(texts))


def intern(texts: Sequence[str]) -> Names:
    """Return texts as indices into the distinct ones, in order of appearance; -1 for empty ones."""
    index = {word: -1 for word in set(texts) if word.lower() in _NOTHING}
    skipped = len(index)
    values = np.fromiter((index.setdefault(t, len(index) - skipped) for t in texts), np.int64, len(texts))
    return values, tuple(index)[skipped:]


def sorted_order(submit: Floats, ids: Sequence[str]) -> Ints:
    """Return the order by (submit, id): whole numbers and Slurm's ids compare as numbers, others as text."""
    if all(map(str.isdecimal, ids)) and max(map(len, ids), default=0) <= 18:
        return np.lexsort((np.array(list(map(int, ids)), np.int64), submit)).astype(np.int64)
    order = np.argsort(submit, kind="stable").astype(np.int64)
    sorted_submit = submit[order]
    borders = [*np.flatnonzero(np.diff(sorted_submit, prepend=-np.inf) != 0).tolist(), len(order)]
    for begin, end in pairwise(borders):
        if end - begin > 1:
            order[begin:end] = sorted(order[begin:end].tolist(), key=lambda row: id_key(ids[row]))
    return order


def moved(depends_on: Ints, order: Ints) -> Ints:
    """Renumber row indices for ``order``'s rows only, in that order; -1 for dropped rows."""
    place = np.full(len(depends_on) + 1, -1, np.int64)  # the last entry stands for -1
    place[order] = np.arange(len(order))
    return place[depends_on[order]]


def _used(index: Ints, words: tuple[str, ...]) -> Names:
    present = np.flatnonzero(np.bincount(index[index >= 0]))
    place = np.full(len(words) + 1, -1, np.int64)
    place[present] = np.arange(len(present))
    return place[index], tuple(words[i] for i in present.tolist())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text) if len(text) >= 19 else None
    except ValueError:
        moment = None
    if moment is None:
        return np.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _shown(text: str) -> str:
    return text if text else "nothing"


def _why(key: str, found: str, expected: str) -> str:
    return f"{key}: found {found}, expected {expected}" if key else f"found {found}, expected {expected}"
