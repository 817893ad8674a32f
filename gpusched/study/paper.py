"""A paper's setting: the section ``paper`` of a built-in scenario, and its run by ``gpusched reproduce``.

What differs from paper to paper is typed by its agent's folder, as a `Paper` with more keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from gpusched.config.yamlfile import parse_plain
from gpusched.errors import UsageError
from gpusched.study.options import PaperOptions, rows_of
from gpusched.traces.workload import PHILLY_LIKE

P = TypeVar("P", bound="Paper")
D = TypeVar("D")
R = TypeVar("R")
Advance = Callable[[float, int], None]
"""Receives how much is done, of how much."""


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column of the table: means over the rows of a line.

    Attributes:
        head: Its heading.
        of: Key of rows. "": how many rows there are.
        format: Of the mean. "", and nothing below: rows that have it in common are a line.
        per: What it is divided by: a number, or a key of rows.
        against: The policy for comparison: the change to its mean on the same draws, with an interval.
        above: The key, or the number, above which it is so many per cent.
        gain: (base, best): policies; the part of what the best one gains over the base.
        published: Policy -> key of `Paper.published`.
    """

    head: str
    of: str = ""
    format: str = ""
    per: str | float = 1.0
    against: str = ""
    above: str | float = ""
    gain: tuple[str, str] | None = None
    published: Mapping[str, str] = {}

    @property
    def in_common(self) -> bool:
        """Whether rows are grouped into lines by this column."""
        return bool(self.of) and not (self.format or self.against or self.above or self.gain)


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a paper's figures.

    Attributes:
        words: Text below the table; ``{key}``: a published figure.
        published: The paper's own figures. None of them was computed here, and none stands anywhere else.
        policies: Names, in the order of the table, and what they are. ablations: Played only where they are named.
        seeds: What workloads are drawn with.
        table: Columns. drop: Heads of those that a narrow screen does without, the least needed first.
        bound: Of a further line for each group of rows: key -> key that has its bound.
    """

    words: str = ""
    published: Any = {}
    policies: Any = {}
    ablations: Any = {}
    seeds: tuple[int, ...] = ()
    table: tuple[Column, ...] = ()
    drop: tuple[str, ...] = ()
    bound: Mapping[str, str] = {}

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the policies requested; none: all but ablations.

        Raises:
            UsageError: It has none of such a name.
        """
        known = (*self.policies, *self.ablations)
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"no policy of this setting is named {unknown[0]!r}", f"known: {', '.join(known)}")
        return tuple(dict.fromkeys(names)) or tuple(self.policies)

    def drawn_with(self, options: PaperOptions) -> tuple[int, ...]:
        """Return the seeds requested; one for a quick check."""
        return tuple(dict.fromkeys(options.seeds)) or self.seeds[: 1 if options.quick else None]


def check_options(paper: str, options: PaperOptions) -> None:
    """Refuse options that this paper, or what else was asked for, does not use.

    Raises:
        UsageError: One was given.
    """
    default, given = PaperOptions(), dict[str, str]()
    for name, (_, row) in rows_of(PaperOptions).items():
        if row.papers and getattr(options, name) != getattr(default, name):
            given[name] = row.long
            if paper not in row.papers:
                raise UsageError(f"{row.long} does not apply to {paper}", f"it is for {', '.join(row.papers)}")
    if paper == "rltune" and len(set(options.seeds)) > 1:
        raise UsageError("rltune trains with one seed", "use --seed once")
    figures = paper == "rltune" and options.out is None
    if figures and (of_out := [given[name] for name in ("policies", "loads") if name in given]):
        raise UsageError(f"{of_out[0]} of rltune is for training", "add --out FILE")
    if options.trace is None and (of_trace := [given[name] for name in ("format", "vcs") if name in given]):
        raise UsageError(f"{of_trace[0]} needs a log", "--trace FILE")
    if options.weights is not None and options.out is not None:
        raise UsageError("--weights and --out cannot be combined", "weights that are given are not trained")
    if options.out is not None and Path(options.out).is_dir():
        raise UsageError(f"--out {options.out} is a folder", "name a file in it, such as mine.safetensors")
    trains = paper != "dl2" or (options.weights is None and options.workloads is None)
    if not trains and (of_training := [given[name] for name in ("out", "device") if name in given]):
        raise UsageError(f"{of_training[0]} is for training", "nothing is trained with --workloads or --weights")


class PaperFigures(NamedTuple):
    """The results: one row for each draw and policy."""

    paper: Paper
    rows: Sequence[Any]


def read_paper(name: str, kind: type[P]) -> P:
    """Return the paper of a built-in scenario."""
    return msgspec.convert(parse_plain(PHILLY_LIKE.parent / f"{name}.yaml")["paper"], kind)


def play_all(draws: Sequence[D], play: Callable[[D], list[R]], options: PaperOptions, advance: Advance) -> list[R]:
    """Return the rows of all draws, in their order."""
    rows: list[R] = []
    with ThreadPoolExecutor(options.jobs or os.cpu_count()) as pool:  # compiled passes run side by side
        for done, found in enumerate(pool.map(play, draws), 1):
            rows += found
            advance(done, len(draws))
    return rows
