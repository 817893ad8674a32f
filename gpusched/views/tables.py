"""Tables that fit their screen: columns go by a declared priority, texts wrap between words, nothing else is cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2
_READABLE = 10  # a text column is not squeezed below this for the sake of others
_BREAK = re.compile(r"\s+|(?<=,)(?=\S)")  # between words, and in lists of names behind a comma


class FittedTable(Table):
    """A table without lines that decides on its screen's width what it shows.

    As long as it is too wide, the columns of ``drop`` go, in that order, and a line below says which. Columns of
    ``wrap`` take several lines, but words, and names in lists, stay whole. Where that is not enough either, each row
    becomes a block of lines, one for each column.
    """

    def __init__(
        self,
        columns: Sequence[str],
        right: Sequence[str] = (),
        wrap: Sequence[str] = (),
        drop: Sequence[str] = (),
        most: Mapping[str, int] | None = None,
        header: bool = True,
        whole: int = 1000,
    ) -> None:
        """As `common.plain_table`. ``whole``: from so many columns on nothing is shortened."""
        super().__init__(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=header)
        self._names, self._right, self._wrap = list(columns), set(right), set(wrap)
        self._whole = whole
        self._drop, self._most = [name for name in drop if name in columns], dict(most or {})
        self._cells: list[list[Text]] = []
        for column in columns:
            self.add_column(column, justify="right" if column in right else "left", no_wrap=column not in wrap)

    def add_row(self, *cells: RenderableType | None, style: object = None, end_section: bool = False) -> None:
        """Add a row; cells are texts."""
        del style, end_section
        row = [cell.copy() if isinstance(cell, Text) else Text(str(cell or "")) for cell in cells]
        self._cells.append(row + [Text() for _ in self._names[len(row) :]])
        super().add_row(*row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render it as wide as there is room."""
        width = options.max_width
        rows = self._cells if width >= self._whole else [self._shortened(row) for row in self._cells]
        shown, gone = list(range(len(self._names))), list[str]()
        while self._least(rows, shown) > width and len(gone) < len(self._drop):
            gone.append(self._drop[len(gone)])
            shown = [i for i in shown if self._names[i] not in gone]
        if self._least(rows, shown) > width:
            yield from self._blocks(rows, width)
            return
        yield self._table(rows, shown, width)
        if gone:
            line = Text(f"columns not shown: {', '.join(gone)}; a wider terminal and --json have them", "dim")
            yield from wrapped(line, width)

    def _shortened(self, row: list[Text]) -> list[Text]:
        row = [cell.copy() for cell in row]
        for name, cell in zip(self._names, row, strict=True):
            if name in self._most:
                cell.truncate(self._most[name], overflow="ellipsis")
        return row

    def _natural(self, rows: list[list[Text]], column: int) -> int:
        cells = [max((line.cell_len for line in row[column].split("\n")), default=0) for row in rows]
        return max([len(self._names[column]) if self.show_header else 0, *cells])

    def _narrowest(self, rows: list[list[Text]], column: int) -> int:
        """The least width in which no word of the column is cut."""
        natural = self._natural(rows, column)
        if self._names[column] not in self._wrap:
            return natural
        words = [len(word) for row in rows for word in _BREAK.split(row[column].plain)]
        return max(min(natural, _READABLE), len(self._names[column]) if self.show_header else 0, *words, 0)

    def _least(self, rows: list[list[Text]], shown: list[int]) -> int:
        return sum(self._narrowest(rows, i) for i in shown) + _GAP * (len(shown) - 1)

    def _table(self, rows: list[list[Text]], shown: list[int], width: int) -> Table:
        widths = self._widths(rows, shown, width)
        table = Table(
            box=None, pad_edge=False, padding=self.padding, header_style=self.header_style, show_header=self.show_header
        )
        for i in shown:
            name = self._names[i]
            table.add_column(name, justify="right" if name in self._right else "left", no_wrap=True, width=widths[i])
        for row in rows:
            table.add_row(*(Text("\n").join(wrapped(row[i], widths[i])) for i in shown))
        return table

    def _widths(self, rows: list[list[Text]], shown: list[int], width: int) -> dict[int, int]:
        """What is left beyond the least goes to the texts: each gets the same, none more than it needs."""
        widths = {i: self._narrowest(rows, i) for i in shown}
        natural = {i: self._natural(rows, i) for i in shown}
        left = width - sum(widths.values()) - _GAP * (len(shown) - 1)
        while left > 0 and (hungry := [i for i in shown if widths[i] < natural[i]]):
            for i in hungry[:left]:
                more = min(max(1, left // len(hungry)), natural[i] - widths[i])
                widths[i], left = widths[i] + more, left - more
        return widths

    def _blocks(self, rows: list[list[Text]], width: int) -> RenderResult:
        """A row as a block: its columns below each other, with their names; without a header only the text below."""
        side = max(len(name) for name in self._names) + _GAP if self.show_header else _GAP
        for number, row in enumerate(rows):
            if self.show_header:
                yield from [Text()] * (number > 0)
                for name, cell in zip(self._names, row, strict=True):
                    for at, line in enumerate(wrapped(cell, width - side) if cell.plain else ()):
                        yield Text.assemble((f"{name if not at else '':{side}}", "bold"), line)
                continue
            lead = Text("  ").join(c for n, c in zip(self._names, row, strict=True) if n not in self._wrap and c.plain)
            yield from wrapped(lead, width)
            for name, cell in zip(self._names, row, strict=True):
                if name in self._wrap:
                    yield from (Padding(line, (0, 0, 0, side)) for line in wrapped(cell, width - side))


def wrapped(text: Text, width: int) -> list[Text]:
    """The text in lines of at most ``width``, broken between words and behind commas; a longer word is broken, too."""
    lines: list[Text] = []
    for part in text.split("\n", allow_blank=True):
        begin, end, cuts = 0, 0, list[int]()
        for found in [*_BREAK.finditer(part.plain), None]:
            stop = found.start() if found is not None else len(part.plain)
            if stop - begin > width and end > begin:
                cuts.append(end)
                begin = end
            while stop - begin > max(width, 1):
                begin += max(width, 1)
                cuts.append(begin)
            end = found.end() if found is not None else stop
        for line in part.divide(cuts):
            line.rstrip()
            lines.append(line)
    return lines or [Text()]
