"""Options that another one makes meaningless are refused, not ignored; and outputs that would replace an input."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpusched.errors import UsageError

if TYPE_CHECKING:
    import typer


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the command line gives this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_others(context: typer.Context, option: str, *allowed: str) -> None:
    """Refuse what the command line gives besides ``option``.

    Args:
        context: Of the command.
        option: As users write it.
        allowed: Names of parameters that have an effect together with it; ``--json`` always may be given.

    Raises:
        UsageError: It gives another one.
    """
    for parameter in context.command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        if option in names or parameter.name in (*allowed, "json") or not is_given(context, str(parameter.name)):
            continue
        shown = next((name for name in names if name.startswith("--")), names[0])
        raise UsageError(f"{option} and {shown} cannot be combined", "use one of them")


def refuse_inputs(option: str, path: str | None, sources: Iterable[str | None]) -> None:
    """Refuse an output, given by ``option``, that would replace one of the files that it is made from.

    Raises:
        UsageError: It would.
    """
    if not path or not os.path.exists(path):
        return
    if any(name and os.path.exists(name) and os.path.samefile(path, name) for name in sources):
        raise UsageError(f"{option} {path} is the source", "choose another name")
