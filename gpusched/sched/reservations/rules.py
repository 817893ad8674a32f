"""Whether a reservation excludes a job from a node, and the message: plain Python, for the check and `explain`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpusched.model.reservations import OVERRUN_S, Reservation
from gpusched.model.snapshot import NodeView, PendingView
from gpusched.model.units import format_duration


def closed_by(job: PendingView, node: NodeView, now: float) -> Reservation | None:
    """Return the reservation for which a job may not start on a node now; None: it may.

    A job must end before the next reservation of the node begins that is not its own. One of a reservation may use its
    nodes only, from its begin on, if it ends with it, or little later. Ends are by limits.
    """
    own, end = job.reserved, now + job.limit_s
    name = own.name if own is not None else ""
    if own is not None:
        on_node = any(r.name == name for r in node.reservations)
        if not on_node or now < own.begin or end > own.end + OVERRUN_S:
            return own
    return next((r for r in node.reservations if r.name != name and r.meets(now, end)), None)


def closed_text(job: PendingView, node: NodeView, now: float) -> str:
    """Return why a reservation excludes the job from the node now, as a remark on the node; "": none does."""
    reservation = closed_by(job, node, now)
    if reservation is None:
        return ""
    if job.reserved is not None and all(other.name != reservation.name for other in node.reservations):
        return f"is not in {reservation.what}"
    return f"is reserved ({reservation.what}) {reservation.when(now)}"


def reserved_text(reservations: Sequence[Reservation], own: str, limit_s: float, now: float) -> str:
    """Return why a job that would run into a reservation waits, in Slurm's words, with the purpose.

    ``reservations``: of nodes that it could use, such as are not over, by begin; ``own``: the one that it is of.
    """
    met = reservations[: bisect_left(reservations, now + limit_s, key=lambda r: r.begin)]
    if own:
        met = [r for r in met if r.name != own]
    if not met:
        return "Reserved"
    kind = "Reserved for maintenance" if all(r.maintenance for r in met) else "May be reserved for other job"
    named = ", ".join(f"{r.name} {r.when(now)}" for r in met[:2])
    more = f" and {len(met) - 2} more" if len(met) > 2 else ""
    return f"{kind}: {named}{more}; its time limit of {format_duration(limit_s)} ends too late"


def waits_for_own(job: PendingView, now: float) -> str:
    """Return why a job cannot start now under the reservation it requests; "": it can."""
    own = job.reserved
    if job.unreserved or own is None:
        return job.unreserved
    if now < own.begin:
        return f"waits for {own.what}, which begins in {format_duration(own.begin - now)}"
    if now + job.limit_s > own.end + OVERRUN_S:
        left, limit = format_duration(max(0.0, own.end - now)), format_duration(job.limit_s)
        return f"{own.what} ends in {left}, before its time limit of {limit}"
    return ""
