"""This cluster's own jobs: from its store or, under Slurm, from Slurm's accounting."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gpusched.errors import GpuschedError, NoHistory
from gpusched.model.resources import Inventory
from gpusched.queue.store import Reader
from gpusched.traces.readers import history, sacct
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

_EARLIEST_S = 1e6  # Unix seconds: sacct takes no lower ones


def own_jobs(
    inventory: Inventory | None, reader: Reader | None, *, name: str, since: float | None, until: float | None = None
) -> Trace:
    """Return jobs that ran and ended, submitted in [since, until), Unix seconds; None: unbounded, now.

    Under Slurm they come from slurmdbd; if it does not respond, from the store as far as observed, with a note.

    Raises:
        NoHistory: No such job.
        GpuschedError: They cannot be read.
    """
    if inventory is not None and inventory.engine == "slurm":
        return _of_slurm(inventory, reader, name, since, until, carry=False)[0]
    if reader is None:
        raise NoHistory(f"{name}: no store", "start the controller")
    return history.trace_of(reader, name=name, since=since, until=until)


def own_window(
    inventory: Inventory, reader: Reader, *, name: str, since: float, until: float
) -> tuple[Trace, int]:  # fmt: skip
    """Return `own_jobs` plus earlier jobs that ran or waited when the window began: see `history.window_of`."""
    if inventory.engine == "slurm":
        return _of_slurm(inventory, reader, name, since, until, carry=True)
    return history.window_of(reader, name=name, since=since, until=until)


def _of_slurm(
    inventory: Inventory, reader: Reader | None, name: str, since: float | None, until: float | None, *, carry: bool
) -> tuple[Trace, int]:
    from gpusched.slurm.commands import NoAnswer, Slurm

    begin, end = max(since or 0.0, _EARLIEST_S), time.time() if until is None else until
    partitions = [partition.name for partition in inventory.partitions]
    slurm = Slurm()
    try:
        text = slurm.ended(begin, end)
    except NoAnswer as error:
        if reader is None:
            raise
        if carry:
            trace, carried = history.window_of(reader, name=name, since=begin, until=end)
        else:
            trace, carried = history.trace_of(reader, name=name, since=since, until=until), 0
        note = f"slurmdbd is not available ({error.message}): using the jobs that the controller has seen"
        return replace(trace, notes=(*trace.notes, note)), carried
    trace, carried = between(text.splitlines(), name, begin, end, partitions, carry=carry)
    if not trace.gpus.any() and "gres/gpu" not in slurm.config().get("AccountingStorageTRES", ""):
        raise GpuschedError(f"{name}: no job of Slurm's accounting has gres/gpu", sacct.ADD_GPUS)
    return trace, carried


def between(
    lines: Iterable[str], name: str, since: float, until: float, partitions: Iterable[str], *, carry: bool = False
) -> tuple[Trace, int]:
    """Read from sacct lines these partitions' jobs that became eligible in [since, until), ran, and ended.

    With ``carry`` those come before them that ran or waited at ``since`` and have run, with what was left of their run
    times and limits: see `history.window_of`; one that still runs is taken to end at ``until``. How many these are
    comes second.

    Raises:
        NoHistory: There is no such job, carried ones aside.
    """
    rows = sacct.rows_of(lines, "sacct", until=until if carry else None)
    draft, known = rows.draft, frozenset(partitions)
    draft.leave_out(draft.where("Partition", lambda p: p not in known), "Partition", "one of the inventory")
    early = rows.submit < since
    others = (rows.submit >= until) | (early & ((rows.end <= since) | (not carry))) | (~early & rows.running)
    draft.leave_out(others, "Submit", "a job of that time, which has ended")
    if not np.any(draft.kept & ~early):
        raise NoHistory(f"{name}: no job in it has run and ended")
    ran = np.where(early, np.maximum(since - rows.start, 0.0), 0.0)
    trace = sacct.trace_of(
        rows._replace(start=rows.start + ran, limit=rows.limit - ran, wait=rows.start - rows.submit), name
    )
    at = trace.submit + (trace.epoch or 0.0)
    first = int(np.count_nonzero(at < since))
    began = (at + trace.wait)[:first]
    running = began < since
    order = np.lexsort((np.where(running, began, at[:first]), ~running)).astype(np.int64)
    trace = select(trace, np.concatenate((order, np.arange(first, len(trace), dtype=np.int64))))
    trace = replace(trace, limit=np.maximum(trace.limit, 1.0), rejected=())
    return history.carried_first(trace, int(np.count_nonzero(running)), first, since), first
