"""Completion callbacks for typer; each imports what it needs when the shell calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

Completer = Callable[[str], list[str]]


def parameter(name: str, kind: Any, default: Any, names: str, completer: str, **shown: Any) -> inspect.Parameter:
    """Return typer's parameter of an option with these ``names``; without any, of an argument.

    ``completer``: the function here that completes its value, or "".
    """
    offered = globals()[completer] if completer else None
    made: Any = typer.Option if names else typer.Argument
    annotation = Annotated[kind, made(*names.split(), autocompletion=offered, **shown)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _lazy(name: str) -> Completer:
    def offer(incomplete: str) -> list[str]:
        try:
            from gpusched.client import completions
            from gpusched.client.context import Client

            names = getattr(completions, name)(Client())
            return [found for found in names if found.startswith(incomplete)][: completions.MAX_OFFERED]
        except Exception:  # a completion must never show an error
            return []

    return offer


live_jobs = _lazy("live_jobs")
pending_jobs = _lazy("pending_jobs")
all_jobs = _lazy("all_jobs")
nodes = _lazy("nodes")
partitions = _lazy("partitions")
flavors = _lazy("flavors")
policies = _lazy("policies")
replays = _lazy("replays")
agents = _lazy("agents")
gpu_types = _lazy("gpu_types")
groups = _lazy("groups")
classes = _lazy("classes")
reservations = _lazy("reservations")


def states(incomplete: str) -> list[str]:
    """Complete the name of a job state, in the case the user types."""
    from gpusched.model.jobs import JobState

    found = [str(s) for s in JobState if s.startswith(incomplete.upper())]
    return [s.lower() if incomplete.islower() else s for s in found]


def spreads(incomplete: str) -> list[str]:
    """Complete ``--max-spread``."""
    return [word for word in ("server", "rack", "any") if word.startswith(incomplete)]


PartitionOption = Annotated[
    str | None, typer.Option("-p", "--partition", autocompletion=partitions, help="In this partition.")
]
NodesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="NODE", autocompletion=nodes, help="Only these.", show_default=False)
]
