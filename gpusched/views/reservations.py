"""Reservations, as a table, as lines and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpusched.model.reports import ReservationRow
from gpusched.model.units import format_duration, iso_utc, local_clock, local_time
from gpusched.views import common

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpusched.client.reservations import ReservationResult

_DONE = {"reserve": "reservation", "maintenance": "maintenance", "change": "change", "cancel": "cancellation"}


def request_dict(result: ReservationResult) -> dict[str, Any]:
    """Return the request, with the running jobs that reach into the reservation."""
    reservation = result.reservation
    return {
        "requested": result.what,
        "name": reservation.name,
        "nodes": list(reservation.nodes),
        "begin": iso_utc(reservation.begin),
        "end": iso_utc(reservation.end),
        "late": [{"id": job, "user": user, "end": iso_utc(end)} for job, user, end in result.late],
    }


def request_lines(result: ReservationResult) -> list[str]:
    """Return one line for stdout, then notes on running jobs that reach into the reservation."""
    reservation, now = result.reservation, time.time()
    length = format_duration(reservation.end - reservation.begin)
    span = f"{local_time(reservation.begin)} to {local_time(reservation.end)} ({length})"
    lines = [f"{_DONE[result.what]} requested: {reservation.name}, {common.compress_names(reservation.nodes)}, {span}"]
    lines += [
        f"job {job} of {common.clean(user)} is running there; its time limit ends at {local_clock(end, now)}"
        for job, user, end in result.late
    ]
    return lines


def reservations_json(rows: Sequence[ReservationRow]) -> list[dict[str, Any]]:
    """Return one object per reservation."""
    return [msgspec.to_builtins(row) | {"begin": iso_utc(row.begin), "end": iso_utc(row.end)} for row in rows]


def reservations_screen(rows: Sequence[ReservationRow]) -> RenderableType:
    """Return the table."""
    from rich.text import Text

    if not rows:
        return Text("no reservations")
    now = time.time()
    columns = ("NAME", "KIND", "STATE", "FROM", "TO", "GPUS", "NODES", "FOR", "JOBS", "REASON")
    wrap = ("FROM", "TO", *columns[6:])
    table = common.plain_table(*columns, right=("GPUS",), wrap=wrap, drop=("KIND", "JOBS", "REASON"))
    for row in rows:
        until_begin = Text(f"in {common.age(row.begin - now)}" if row.begin > now else "starting")
        state = Text("active", "bold green") if row.state == "active" else until_begin
        jobs = [f"{len(row.running)} running"] if row.running else []
        jobs += [f"{', '.join(row.late[:3])}{' ...' if len(row.late) > 3 else ''} may overlap"] if row.late else []
        table.add_row(
            Text(row.name, "bold"),
            row.kind,
            state,
            local_clock(row.begin, now),
            local_clock(row.end, now),
            str(row.gpus),
            common.compress_names(row.nodes),
            Text(common.clean(", ".join((*row.users, *row.groups))) or "nobody"),
            Text("; ".join(jobs)),
            Text(common.clean(row.reason)),
        )
    return table
