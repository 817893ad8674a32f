"""Reserving nodes, changing that, and what is reserved: checked here as far as can be seen, done by the controller."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from gpusched.client import options
from gpusched.client.context import Client, check_admin
from gpusched.config.reservations import changed_by, check_reservation, fewest_nodes, reservation_named
from gpusched.config.validate import known_partition
from gpusched.errors import UsageError
from gpusched.model.commands import AnyCommand, CancelReservation, ChangeReservation, Reserve
from gpusched.model.jobs import JobRecord
from gpusched.model.reports import ReservationRow
from gpusched.model.reservations import Reservation
from gpusched.model.suggest import did_you_mean
from gpusched.queue.inbox import ReceivedCommand
from gpusched.queue.snapshots import NOT_FOR_NEW_JOBS, expected_end

ReservationCommand = Reserve | ChangeReservation | CancelReservation


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, as typed; ``until`` or ``lasts``. None, (): nothing was said."""

    name: str | None = None
    nodes: tuple[str, ...] = ()
    partition: str | None = None
    gpus: int | None = None
    begin: str | None = None
    until: str | None = None
    lasts: str | None = None
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    reason: str = ""


class ReservationResult(msgspec.Struct, frozen=True):
    """What was asked for, and the running jobs that last, by their limits, into it: (id, user, end)."""

    what: str
    reservation: Reservation
    late: tuple[tuple[str, str, float], ...] = ()


def reserve(client: Client, wanted: Wanted, *, maintenance: bool) -> ReservationResult:
    """Keep nodes for some, or for nobody.

    Raises:
        UsageError: It cannot be; the first thing wrong, in one line.
        GpuschedError: The caller is no admin.
    """
    now = time.time()
    there = known_reservations(client, now)
    begin, end = _times(wanted, now)
    name = wanted.name if wanted.name is not None else _free_name(begin, there)
    if any(one.name == name for one in there):
        raise UsageError(f"reservation {name} already exists", f"gpusched reservations change {name}")
    one = Reservation(
        name=name, nodes=_nodes(client, wanted, there, begin, end), begin=begin, end=end,
        users=options.names(wanted.users), groups=options.names(wanted.groups), maintenance=maintenance,
        reason=wanted.reason,
    )  # fmt: skip
    check_reservation(one, client.inventory, there, now)
    return _ask(client, "maintenance" if maintenance else "reserve", Reserve(time=now, reservation=one), one)


def change(client: Client, name: str, wanted: Wanted) -> ReservationResult:
    """Change what is given of a reservation; raises as `reserve` does."""
    now = time.time()
    there = known_reservations(client, now)
    before = _named(name, there)
    begin = end = None
    if wanted.begin is not None:
        begin = options.moment("--from", wanted.begin, now)
    if wanted.until is not None or wanted.lasts is not None:
        start = before.begin if begin is None else begin
        end = _end(wanted, start, now)
    nodes = expanded(wanted.nodes) if wanted.nodes else None
    command = ChangeReservation(
        time=now, name=name, nodes=nodes, begin=begin, end=end, users=options.names(wanted.users) or None,
        groups=options.names(wanted.groups) or None, reason=wanted.reason or None,
    )  # fmt: skip
    after = changed_by(command, before, now)
    if after == before:
        raise UsageError(f"{before.what} would not change", "see gpusched reservations change --help")
    check_reservation(after, client.inventory, there, now)
    return _ask(client, "change", command, after)


def cancel(client: Client, name: str) -> ReservationResult:
    """Give a reservation's nodes free; raises as `reserve` does."""
    now = time.time()
    one = _named(name, known_reservations(client, now))
    return msgspec.structs.replace(_ask(client, "cancel", CancelReservation(time=now, name=name), one), late=())


def known_reservations(client: Client, now: float) -> tuple[Reservation, ...]:
    """Those that are not over, with what still lies in the inbox, as far as this user may read that."""
    found = {one.name: one for one in (client.reader.reservations(now) if client.reader else ())}
    for received in client.inbox.waiting():
        command = received.command if isinstance(received, ReceivedCommand) else None
        if isinstance(command, Reserve):
            found.setdefault(command.reservation.name, command.reservation)
        elif isinstance(command, CancelReservation):
            found.pop(command.name, None)
        elif isinstance(command, ChangeReservation) and (before := found.get(command.name)) is not None:
            if before.begin > now or command.begin is None:
                found[command.name] = changed_by(command, before, now)
    return tuple(sorted(found.values(), key=lambda one: (one.begin, one.name)))


def rows(client: Client) -> tuple[ReservationRow, ...]:
    """What is reserved, by begin."""
    now = time.time()
    active = client.reader.active() if client.reader else []
    gpus = {node.name: node.gpus for node in client.inventory.nodes}
    return tuple(
        ReservationRow(
            name=one.name, kind="maintenance" if one.maintenance else "reservation",
            state="active" if one.begin <= now else "planned", nodes=one.nodes,
            gpus=sum(gpus.get(node, 0) for node in one.nodes), begin=one.begin, end=one.end, users=one.users,
            groups=one.groups, by=one.by, reason=one.reason,
            running=tuple(job.id for job in active if job.spec.reservation == one.name),
            late=tuple(job for job, _, _ in late_jobs(active, one)),
        )
        for one in known_reservations(client, now)
    )  # fmt: skip


def late_jobs(active: Iterable[JobRecord], one: Reservation) -> tuple[tuple[str, str, float], ...]:
    """Running jobs that are not of it, on its nodes, and may last until after its begin: (id, user, end)."""
    found = []
    for job in active:
        if job.spec.reservation == one.name or job.allocation is None:
            continue
        end = expected_end(job, job.start_time if job.start_time is not None else time.time())
        if end > one.begin and any(part.node in one.nodes for part in job.allocation.parts):
            found.append((job.id, job.user, end))
    return tuple(sorted(found))


def _ask(client: Client, what: str, command: AnyCommand, one: Reservation) -> ReservationResult:
    check_admin(client)
    client.deliverable_inbox().deliver(command)
    return ReservationResult(what, one, late_jobs(client.reader.active() if client.reader else (), one))


def _named(name: str, there: Sequence[Reservation]) -> Reservation:
    names = [one.name for one in there]
    if name not in names:
        raise UsageError(f"no current reservation '{name}'{did_you_mean(name, names)}")
    return reservation_named(name, there)


def _free_name(begin: float, there: Iterable[Reservation]) -> str:
    """``maint-1123``, by the day it begins on."""
    taken = {one.name for one in there}
    base = time.strftime("maint-%m%d", time.localtime(begin))
    return next(name for i in range(len(taken) + 1) if (name := f"{base}-{i + 1}" if i else base) not in taken)


def _times(wanted: Wanted, now: float) -> tuple[float, float]:
    begin = now if wanted.begin is None else options.moment("--from", wanted.begin, now)
    return begin, _end(wanted, begin, now)


def _end(wanted: Wanted, begin: float, now: float) -> float:
    if (wanted.until is None) == (wanted.lasts is None):
        raise UsageError("no end given: use --to or --for", "--to 2026-11-20T18:00, --for 4h")
    if wanted.until is not None:
        return options.moment("--to", wanted.until, now)
    lasts = options.duration("--for", wanted.lasts)
    assert lasts is not None
    return begin + lasts


def _nodes(client: Client, wanted: Wanted, there: Sequence[Reservation], begin: float, end: float) -> tuple[str, ...]:
    """The nodes named, or of the partition, or the fewest with so many GPUs."""
    if wanted.gpus is not None:
        if wanted.nodes:
            raise UsageError("nodes and a number of GPUs cannot be combined", "use one")
        return _with_gpus(client, wanted, there, begin, end)
    if wanted.partition is not None:
        if wanted.nodes:
            raise UsageError("nodes and a partition cannot be combined", "use one")
        return tuple(node.name for node in known_partition(client.inventory, wanted.partition).nodes)
    if not wanted.nodes:
        raise UsageError("no nodes given: use names, dgx[1-4], or -p PARTITION for all of its nodes")
    return expanded(wanted.nodes)


def expanded(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of nodes, of lists as Slurm writes them.

    Raises:
        UsageError: It is no such list.
    """
    from gpusched.slurm.hostlist import expand

    found: dict[str, None] = {}
    for text in texts:
        try:
            found.update(dict.fromkeys(expand(text)))
        except ValueError as error:
            raise UsageError(f"found {text[:80]!r}, expected nodes such as dgx1,dgx[3-5]: {error}") from None
    return tuple(found)


def _with_gpus(
    client: Client, wanted: Wanted, there: Sequence[Reservation], begin: float, end: float
) -> tuple[str, ...]:
    assert wanted.gpus is not None
    active = client.reader.active() if client.reader else []
    records = client.reader.node_records() if client.reader else {}
    busy = {
        part.node
        for job in active
        if job.allocation is not None
        and expected_end(job, job.start_time if job.start_time is not None else time.time()) > begin
        for part in job.allocation.parts
    }
    unwell = {name for name, record in records.items() if record.state in NOT_FOR_NEW_JOBS}
    return fewest_nodes(client.inventory, wanted.partition, wanted.gpus, there, busy, unwell, begin, end)
