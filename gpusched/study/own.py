"""This cluster's own jobs, and the inventory under which they ran: for replays, training and predictors."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from gpusched.accounting.report import parse_since
from gpusched.config.paths import state_folder
from gpusched.errors import GpuschedError, NoHistory, UsageError
from gpusched.model.resources import Inventory
from gpusched.model.units import parse_time
from gpusched.queue.lastgood import inventory_or_kept
from gpusched.queue.store import Reader
from gpusched.study.study import FROM_EMPTY
from gpusched.traces.own import own_jobs
from gpusched.traces.slicing import slice_trace
from gpusched.traces.trace import Trace


def history(since: str, until: str | None = None, *, vc: str | None = None, inventory: str | None = None) -> Trace:
    """This cluster's own jobs, submitted in [since, until): ``30d``, ``all``, or a time.

    ``inventory``: its file, where it is not the one in force.

    Raises:
        NoHistory: There is no store yet, or no such job in it.
        GpuschedError: The store cannot be read.
        UsageError: A time cannot be read.
    """
    reader = Reader.open(state_folder())
    with nullcontext() if reader is None else closing(reader):
        return history_of(own_inventory(inventory), reader, since, until, vc)


def history_of(own: Inventory | None, reader: Reader | None, since: str, until: str | None, vc: str | None) -> Trace:
    """As `history`, of an inventory and a store that are open."""
    now, folder = time.time(), state_folder()
    if reader is None and (own is None or own.engine != "slurm"):
        raise NoHistory(f"{folder}: no history yet", "name a trace, or start the controller")
    try:
        end = None if until is None else parse_time(until, now)
        trace = own_jobs(own, reader, name=f"history of {folder}", since=parse_since(since, now), until=end)
    except ValueError:
        raise UsageError(f"--until {until!r} is not a time", "for example 2026-11-20T18:00") from None
    trace = replace(trace, notes=(*trace.notes, FROM_EMPTY))
    return trace if vc is None else slice_trace(trace, vc=vc)


def own_inventory(named: str | None = None) -> Inventory | None:
    """The inventory that says who runs the jobs; None where there is none to be read: the controller."""
    try:
        return inventory_or_kept(Path(named) if named else None, state_folder())
    except GpuschedError:
        return None
