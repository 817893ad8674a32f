"""Commands whose options are the fields of a request: parameters made of its rows, and the request made of those."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, TypeVar, get_args

import msgspec

from gpusched.cli import complete
from gpusched.study.options import StudyOption, rows_of

T = TypeVar("T")


def with_rows(request: type[msgspec.Struct]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command, whose first argument is such a request, an option for each row, before those of its own."""
    rows, usual = rows_of(request), request()
    made = [_parameter(name, kind, row, getattr(usual, name)) for name, (kind, row) in rows.items()]

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = sorted((*made, *own), key=lambda p: p.default is not inspect.Parameter.empty)

        @functools.wraps(command)
        def run(**given: Any) -> T:
            values = {name: _value(row, given[name]) for name, (_, row) in rows.items() if given[name] is not None}
            return command(request(**values), **{p.name: given[p.name] for p in own})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, kind: Any, row: StudyOption, default: Any) -> inspect.Parameter:
    """Return typer's parameter of a row; text where the value is parsed, or where a scenario has a value of its own."""
    if isinstance(default, tuple):
        kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
    elif row.parse is not None:
        kind, default = (str, row.shown) if row.shown else (str | None, None)
    elif isinstance(kind, ForwardRef):
        kind = str | None
    shown: Any = {"help": row.help, "metavar": row.metavar, "min": row.least}
    return complete.parameter(name, kind, default, row.names, row.complete, **shown)


def _value(row: StudyOption, given: Any) -> Any:
    if row.parse is not None:
        return row.parse(row.long, given)
    return tuple(given) if isinstance(given, list) else given
