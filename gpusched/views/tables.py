"""Tables that fit their screen: columns are dropped by priority, texts wrap between words, nothing else is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_GAP = 2
_MIN_TEXT_WIDTH = 10  # a text column is not squeezed below this for the sake of others
_MIN_SHORT_WIDTH = 12  # a name with an ellipsis is not shortened further; then its column is omitted
_BREAK = re.compile(r"\s+|(?<=,)(?=\S)")  # between words, and after a comma in lists of names


class FittedTable(Table):
    """A table without lines that adapts to its screen's width.

    While it is too wide, the columns of ``drop`` are omitted, in that order, and a line below names them; those of
    ``max_widths`` are shortened instead where that is enough. Columns of
    ``wrap`` wrap, but words, and names in lists, stay whole. If that is not enough, each row becomes a block of lines,
    one for each column.
    """

    def __init__(
        self,
        columns: Sequence[str],
        right: Sequence[str] = (),
        wrap: Sequence[str] = (),
        drop: Sequence[str] = (),
        max_widths: Mapping[str, int] | None = None,
        header: bool = True,
        whole: int = 1000,
    ) -> None:
        """Set up as `common.plain_table`. ``whole``: from this width on nothing is shortened."""
        super().__init__(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=header)
        self._names, self._right, self._wrap = list(columns), set(right), set(wrap)
        self._whole = whole
        self._drop, self._max_widths = [name for name in drop if name in columns], dict(max_widths or {})
        self._cells: list[list[Text]] = []
        for column in columns:
            self.add_column(column, justify="right" if column in right else "left", no_wrap=column not in wrap)

    def add_row(self, *cells: RenderableType | None, style: object = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        del style, end_section
        row = [cell.copy() if isinstance(cell, Text) else Text(str(cell or "")) for cell in cells]
        self._cells.append(row + [Text() for _ in self._names[len(row) :]])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as wide as the console."""
        width = options.max_width
        rows = self._cells if width >= self._whole else self._shortened(self._max_widths)
        shown, dropped = list(range(len(self._names))), list[str]()
        natural = [self._natural(rows, i) for i in shown]
        narrowest = [self._narrowest(rows, i, natural[i]) for i in shown]

        def missing() -> int:
            return sum(narrowest[i] for i in shown) + _GAP * (len(shown) - 1) - width

        while missing() > 0 and len(dropped) < len(self._drop):
            name = self._drop[len(dropped)]
            column = self._names.index(name)
            if name in self._max_widths and narrowest[column] - missing() >= _MIN_SHORT_WIDTH:
                natural[column] = narrowest[column] = narrowest[column] - missing()
                rows = self._shortened(self._max_widths | {name: natural[column]})
                break
            dropped.append(name)
            shown.remove(column)
        if missing() > 0:
            yield from self._blocks(rows, width)
            return
        yield from self._lines(console, rows, shown, self._widths(natural, narrowest, shown, -missing()))
        if dropped:
            line = Text(f"columns not shown: {', '.join(dropped)}; a wider terminal and --json have them", "dim")
            yield from wrapped(line, width)

    def _shortened(self, max_widths: Mapping[str, int]) -> list[list[Text]]:
        limits = [max_widths.get(name) for name in self._names]
        return [[_truncated(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in self._cells]

    def _natural(self, rows: list[list[Text]], column: int) -> int:
        lines = {line for row in rows for line in row[column].plain.split("\n")}
        return max([len(self._names[column]) if self.show_header else 0, *map(cell_len, lines)])

    def _narrowest(self, rows: list[list[Text]], column: int, natural: int) -> int:
        """Return the minimum width that cuts no word of the column."""
        if self._names[column] not in self._wrap:
            return natural
        words = {word for plain in {row[column].plain for row in rows} for word in _BREAK.split(plain)}
        least = max(min(natural, _MIN_TEXT_WIDTH), len(self._names[column]) if self.show_header else 0)
        return max([least, *map(cell_len, words)])

    def _lines(
        self, console: Console, rows: list[list[Text]], shown: list[int], widths: Mapping[int, int]
    ) -> Iterator[Segment]:
        """Render the header and the rows. Rich's own table takes five times as long, seconds for thousands of rows."""
        header = [[Text(name, "bold") for name in self._names]] if self.show_header else []
        for row in (*header, *rows):
            columns = [wrapped(row[i], widths[i]) for i in shown]
            for number in range(max(map(len, columns))):
                for i, lines in zip(shown, columns, strict=True):
                    cell = lines[number] if number < len(lines) else _EMPTY
                    padding = Segment(" " * (widths[i] - cell.cell_len))
                    text = cell.render(console) if cell.plain else ()
                    yield from (padding, *text) if self._names[i] in self._right else (*text, padding)
                    if i != shown[-1]:
                        yield Segment(" " * _GAP)
                yield Segment.line()

    def _widths(self, natural: Sequence[int], narrowest: Sequence[int], shown: list[int], spare: int) -> dict[int, int]:
        """Share the width beyond the minimum among the texts equally, none getting more than it needs."""
        widths = {i: narrowest[i] for i in shown}
        while spare > 0 and (growing := [i for i in shown if widths[i] < natural[i]]):
            for i in growing[:spare]:
                extra = min(max(1, spare // len(growing)), natural[i] - widths[i])
                widths[i], spare = widths[i] + extra, spare - extra
        return widths

    def _blocks(self, rows: list[list[Text]], width: int) -> RenderResult:
        """Render each row as a block: one named column per line; without a header, the wrapped texts below."""
        indent = max(len(name) for name in self._names) + _GAP if self.show_header else _GAP
        for number, row in enumerate(rows):
            if self.show_header:
                yield from [Text()] * (number > 0)
                for name, cell in zip(self._names, row, strict=True):
                    for line_number, line in enumerate(wrapped(cell, width - indent) if cell.plain else ()):
                        yield Text.assemble((f"{name if not line_number else '':{indent}}", "bold"), line)
                continue
            short = (c for n, c in zip(self._names, row, strict=True) if n not in self._wrap and c.plain)
            yield from wrapped(Text("  ").join(short), width)
            for name, cell in zip(self._names, row, strict=True):
                if name in self._wrap:
                    yield from (Padding(line, (0, 0, 0, indent)) for line in wrapped(cell, width - indent))


_EMPTY = Text()


def _truncated(cell: Text, width: int | None) -> Text:
    if width is None or cell.cell_len <= width:
        return cell
    short = cell.copy()
    short.truncate(width, overflow="ellipsis")
    return short


def wrapped(text: Text, width: int) -> list[Text]:
    """Wrap the text to ``width`` between words and after commas; a longer word is broken, too."""
    if len(plain := text.plain) <= width and plain.isascii() and "\n" not in plain and not plain.endswith(" "):
        return [text]
    lines: list[Text] = []
    for part in text.split("\n", allow_blank=True):
        begin, end, cuts = 0, 0, list[int]()
        for found in [*_BREAK.finditer(part.plain), None]:
            stop = found.start() if found is not None else len(part.plain)
            if end > begin and cell_len(part.plain[begin:stop]) > width:
                cuts.append(end)
                begin = end
            while (fits := _fitting(part.plain[begin:stop], width)) < stop - begin:
                begin += fits
                cuts.append(begin)
            end = found.end() if found is not None else stop
        for line in part.divide(cuts):
            line.rstrip()
            lines.append(line)
    return lines or [Text()]


def _fitting(text: str, width: int) -> int:
    """Return how many characters of the text fit into ``width`` columns, of which some take two; at least one."""
    if len(text) <= width and text.isascii():
        return len(text)
    taken = 0
    for count, character in enumerate(text):
        taken += cell_len(character)
        if count and taken > width:
            return count
    return len(text)
