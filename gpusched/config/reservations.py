"""Validation of reservations, and the choice of nodes for a number of GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import msgspec

from gpusched.config.validate import check_nodes, check_text, known_partition
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.commands import ChangeReservation
from gpusched.model.jobs import JobSpec
from gpusched.model.reservations import MAX_RESERVATION_NAME, MAX_RESERVATIONS, Reservation, overlapping
from gpusched.model.resources import Inventory, Node
from gpusched.model.units import count_of, local_time

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_RESERVATION_NAME - 1}}}")
_MAX_S = 10 * 365 * 86400.0
_MAX_USERS = 1000


def check_reservation(wanted: Reservation, inventory: Inventory, others: Iterable[Reservation], now: float) -> None:
    """Check a new or changed reservation; ``others``: those that have not ended.

    Raises:
        UsageError: It cannot be, and why.
    """
    others = list(others)
    if not _NAME.fullmatch(wanted.name):
        raise UsageError(
            f"a reservation's name is one word of letters, digits, '.', '_', '-', at most {MAX_RESERVATION_NAME} long",
            f"found {wanted.name[:80]!r}",
        )
    if not wanted.nodes or len(set(wanted.nodes)) != len(wanted.nodes):
        raise UsageError("a reservation needs nodes, each once")
    check_nodes(inventory, None, wanted.nodes)
    _check_time(wanted, now)
    _check_users(wanted, inventory)
    check_text("the reason", wanted.reason, 4000)
    if wanted.reason and not wanted.reason.isprintable():
        raise UsageError("the reason is one line of text", f"found {wanted.reason[:80]!r}")
    if len(others) >= MAX_RESERVATIONS:
        raise UsageError(f"there are already {len(others)} reservations; the maximum is {MAX_RESERVATIONS}")
    if found := overlapping(wanted, others):
        other, node = found
        span = f"{local_time(other.begin)} to {local_time(other.end)}"
        raise UsageError(
            f"node {node} is already reserved ({other.what}, {span})",
            f"gpusched reservations change or cancel {other.name}",
        )


def _check_time(wanted: Reservation, now: float) -> None:
    if not (math.isfinite(wanted.begin) and math.isfinite(wanted.end)) or abs(wanted.begin - now) > _MAX_S:
        raise UsageError("--from and --to must be within ten years")
    if wanted.end <= wanted.begin:
        raise UsageError(f"--to ({local_time(wanted.end)}) is not after --from ({local_time(wanted.begin)})")
    if wanted.end <= now:
        raise UsageError(f"its end ({local_time(wanted.end)}) is in the past", "see --from, --to and --for")
    if wanted.end - wanted.begin > _MAX_S:
        raise UsageError("a reservation lasts at most ten years", "take nodes out with 'gpusched drain'")


def _check_users(wanted: Reservation, inventory: Inventory) -> None:
    if not wanted.maintenance and not wanted.users and not wanted.groups:
        raise UsageError(
            "a reservation needs users or groups",
            "use --users or --groups; to keep all jobs off: gpusched maintenance",
        )
    if len(wanted.users) + len(wanted.groups) > _MAX_USERS:
        raise UsageError(f"at most {_MAX_USERS} users and groups", "declare a group of them (groups of inventory.yaml)")
    for user in wanted.users:
        if not user or not user.isprintable() or len(user) > 256:
            raise UsageError(f"--users: found {user[:80]!r}, expected a login name")
    for group in wanted.groups:
        if inventory.groups.get(group) is None:
            raise UsageError(f"there is no group '{group[:80]}'", "groups are declared in inventory.yaml")


def check_use(spec: JobSpec, user: str, reservations: Iterable[Reservation], inventory: Inventory) -> None:
    """Check that a job may use the reservation it names, given all ``reservations``.

    Raises:
        UsageError: It may not.
    """
    name = spec.reservation
    found = next((one for one in reservations if one.name == name), None)
    if why := unusable_reason(spec.time_limit_s, name, user, found, inventory):
        raise UsageError(f"--reservation {name[:80]}: {why}")


def unusable_reason(limit_s: float, name: str, user: str, found: Reservation | None, inventory: Inventory) -> str:
    """Return why a job can currently never run in its reservation; "": it can."""
    if found is None:
        return f"no current reservation {name[:80]}; see gpusched reservations"
    if not found.serves(user, inventory.groups):
        whose = ", ".join((*found.users, *found.groups)) or "nobody"
        return f"{found.what} is for {whose}, not for {user}"
    lasts = found.end - found.begin
    if limit_s > lasts:
        return f"{found.what} lasts {lasts / 3600:.4g} h, less than its time limit of {limit_s / 3600:.4g} h (--time)"
    return ""


def fewest_nodes(
    inventory: Inventory, partition: str | None, gpus: int, taken: Iterable[Reservation], late: Collection[str],
    unwell: Collection[str], begin: float, end: float,
) -> tuple[str, ...]:  # fmt: skip
    """Return the fewest unreserved whole nodes with that many GPUs; among these, with the smallest surplus.

    Rather nodes that are well, and then such on which nothing runs that would last longer than until ``begin``
    (``late``).

    Raises:
        UsageError: There are not enough.
    """
    nodes = known_partition(inventory, partition).nodes if partition is not None else inventory.nodes
    then = [one for one in taken if one.meets(begin, end)]
    free = [node for node in nodes if node.gpus > 0 and all(node.name not in one.nodes for one in then)]

    def rank(node: Node) -> tuple[bool, bool]:
        return node.name in unwell, node.name in late

    chosen: list[Node] = []
    left = sorted(free, key=lambda node: (-node.gpus, *rank(node)))
    while left and sum(node.gpus for node in chosen) < gpus:
        missing = gpus - sum(node.gpus for node in chosen)
        last = [node for node in left if node.gpus >= missing]
        best = min(last, key=lambda node: (node.gpus, *rank(node))) if last else left[0]
        chosen.append(best)
        left.remove(best)
    if gpus < 1 or sum(node.gpus for node in chosen) < gpus:
        there = sum(node.gpus for node in free)
        where = f" in partition {partition}" if partition is not None else ""
        raise UsageError(f"--gpus {gpus}: only {count_of(there, 'GPU')}{where} not reserved then")
    names = {node.name for node in chosen}
    return tuple(node.name for node in nodes if node.name in names)


def reservation_named(name: str, reservations: Iterable[Reservation]) -> Reservation:
    """Return the reservation of that name.

    Raises:
        GpuschedError: There is none.
    """
    for one in reservations:
        if one.name == name:
            return one
    raise GpuschedError(f"no current reservation {name[:80]}")


def changed_by(command: ChangeReservation, before: Reservation, now: float) -> Reservation:
    """Return a reservation with a command's changes.

    Raises:
        GpuschedError: It has begun, and cannot begin at another time.
    """
    if before.begin <= now and command.begin is not None and command.begin != before.begin:
        raise GpuschedError(f"{before.what} has begun; only its end can be changed")
    names = ("nodes", "begin", "end", "users", "groups", "reason")
    given = {name: value for name in names if (value := getattr(command, name)) is not None}
    return msgspec.structs.replace(before, **given)
