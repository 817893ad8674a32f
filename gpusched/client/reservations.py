"""Reservations: list them, and request new ones or changes. What can be checked is checked here."""

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


class ReservationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A requested reservation, as typed; ``until`` or ``lasts``. None and () mean not given."""

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
    """The request, and the running jobs with limits that reach into the reservation: (id, user, end)."""

    what: str
    reservation: Reservation
    late: tuple[tuple[str, str, float], ...] = ()


def reserve(client: Client, request: ReservationRequest, *, maintenance: bool) -> ReservationResult:
    """Request a reservation for users and groups, or for maintenance.

    Raises:
        UsageError: The first error, in one line.
        GpuschedError: The caller is not an admin.
    """
    now = time.time()
    existing = known_reservations(client, now)
    begin, end = _times(request, now)
    name = request.name if request.name is not None else _free_name(begin, existing)
    if any(reservation.name == name for reservation in existing):
        raise UsageError(f"reservation {name} already exists", f"gpusched reservations change {name}")
    reservation = Reservation(
        name=name, nodes=_nodes(client, request, existing, begin, end), begin=begin, end=end,
        users=options.names("--users", request.users), groups=options.names("--groups", request.groups),
        maintenance=maintenance, reason=request.reason,
    )  # fmt: skip
    check_reservation(reservation, client.inventory, existing, now)
    what = "maintenance" if maintenance else "reserve"
    return _deliver(client, what, Reserve(time=now, reservation=reservation), reservation)


def change(client: Client, name: str, request: ReservationRequest) -> ReservationResult:
    """Change the given properties of a reservation; raises as `reserve` does."""
    now = time.time()
    existing = known_reservations(client, now)
    current = _find(name, existing)
    begin = end = None
    if request.begin is not None:
        begin = options.unix_time("--from", request.begin, now)
    if request.until is not None or request.lasts is not None:
        start = current.begin if begin is None else begin
        end = _end(request, start, now)
    nodes = expand_hosts(request.nodes) if request.nodes else None
    command = ChangeReservation(
        time=now, name=name, nodes=nodes, begin=begin, end=end, users=options.names("--users", request.users) or None,
        groups=options.names("--groups", request.groups) or None, reason=request.reason or None,
    )  # fmt: skip
    changed = changed_by(command, current, now)
    if changed == current:
        raise UsageError(f"{current.what} would not change", "see gpusched reservations change --help")
    check_reservation(changed, client.inventory, existing, now)
    return _deliver(client, "change", command, changed)


def cancel(client: Client, name: str) -> ReservationResult:
    """Cancel a reservation; raises as `reserve` does."""
    now = time.time()
    reservation = _find(name, known_reservations(client, now))
    result = _deliver(client, "cancel", CancelReservation(time=now, name=name), reservation)
    return msgspec.structs.replace(result, late=())


def known_reservations(client: Client, now: float) -> tuple[Reservation, ...]:
    """Return current and future reservations, including inbox commands that this user may read."""
    found = {r.name: r for r in (client.reader.reservations(now) if client.reader else ())}
    for received in client.inbox.waiting():
        command = received.command if isinstance(received, ReceivedCommand) else None
        if isinstance(command, Reserve):
            found.setdefault(command.reservation.name, command.reservation)
        elif isinstance(command, CancelReservation):
            found.pop(command.name, None)
        elif isinstance(command, ChangeReservation) and (before := found.get(command.name)) is not None:
            if before.begin > now or command.begin is None:
                found[command.name] = changed_by(command, before, now)
    return tuple(sorted(found.values(), key=lambda r: (r.begin, r.name)))


def rows(client: Client) -> tuple[ReservationRow, ...]:
    """Return the reservations, by begin."""
    now = time.time()
    active = client.reader.active() if client.reader else []
    gpus = {node.name: node.gpus for node in client.inventory.nodes}
    return tuple(
        ReservationRow(
            name=r.name, kind="maintenance" if r.maintenance else "reservation",
            state="active" if r.begin <= now else "planned", nodes=r.nodes,
            gpus=sum(gpus.get(node, 0) for node in r.nodes), begin=r.begin, end=r.end, users=r.users,
            groups=r.groups, by=r.by, reason=r.reason,
            running=tuple(job.id for job in active if job.spec.reservation == r.name),
            late=tuple(job for job, _, _ in late_jobs(active, r)),
        )
        for r in known_reservations(client, now)
    )  # fmt: skip


def late_jobs(active: Iterable[JobRecord], reservation: Reservation) -> tuple[tuple[str, str, float], ...]:
    """Return running jobs on its nodes, not of the reservation, that may last past its begin: (id, user, end)."""
    found = []
    for job in active:
        if job.spec.reservation == reservation.name or job.allocation is None:
            continue
        end = expected_end(job, job.start_time if job.start_time is not None else time.time())
        if end > reservation.begin and any(part.node in reservation.nodes for part in job.allocation.parts):
            found.append((job.id, job.user, end))
    return tuple(sorted(found))


def _deliver(client: Client, what: str, command: AnyCommand, reservation: Reservation) -> ReservationResult:
    check_admin(client)
    client.deliverable_inbox().deliver(command)
    return ReservationResult(what, reservation, late_jobs(client.reader.active() if client.reader else (), reservation))


def _find(name: str, existing: Sequence[Reservation]) -> Reservation:
    names = [reservation.name for reservation in existing]
    if name not in names:
        raise UsageError(f"no current reservation '{name}'{did_you_mean(name, names)}")
    return reservation_named(name, existing)


def _free_name(begin: float, existing: Iterable[Reservation]) -> str:
    """Return an unused name such as ``maint-1123``, after the day it begins."""
    taken = {reservation.name for reservation in existing}
    base = time.strftime("maint-%m%d", time.localtime(begin))
    return next(name for i in range(len(taken) + 1) if (name := f"{base}-{i + 1}" if i else base) not in taken)


def _times(request: ReservationRequest, now: float) -> tuple[float, float]:
    begin = now if request.begin is None else options.unix_time("--from", request.begin, now)
    return begin, _end(request, begin, now)


def _end(request: ReservationRequest, begin: float, now: float) -> float:
    if request.until is not None and request.lasts is not None:
        raise UsageError("--to and --for cannot be combined", "use one of them")
    if request.until is None and request.lasts is None:
        raise UsageError("no end given: use --to or --for", "--to 2026-11-20T18:00, --for 4h")
    if request.until is not None:
        return options.unix_time("--to", request.until, now)
    lasts_s = options.duration("--for", request.lasts)
    assert lasts_s is not None
    return begin + lasts_s


def _nodes(
    client: Client, request: ReservationRequest, existing: Sequence[Reservation], begin: float, end: float
) -> tuple[str, ...]:
    """Return the named nodes, or the partition's, or the fewest with enough GPUs."""
    if request.gpus is not None:
        if request.nodes:
            raise UsageError("nodes and a number of GPUs cannot be combined", "use one")
        return _fewest_nodes(client, request, existing, begin, end)
    if request.partition is not None:
        if request.nodes:
            raise UsageError("nodes and a partition cannot be combined", "use one")
        return tuple(node.name for node in known_partition(client.inventory, request.partition).nodes)
    if not request.nodes:
        raise UsageError("no nodes given: use names, dgx[1-4], or -p PARTITION for all of its nodes")
    return expand_hosts(request.nodes)


def expand_hosts(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of nodes in host lists as Slurm writes them.

    Raises:
        UsageError: It is not a host list.
    """
    from gpusched.slurm.hostlist import expand

    found: dict[str, None] = {}
    for text in texts:
        try:
            found.update(dict.fromkeys(expand(text)))
        except ValueError as error:
            raise UsageError(f"found {text[:80]!r}, expected nodes such as dgx1,dgx[3-5]: {error}") from None
    return tuple(found)


def _fewest_nodes(
    client: Client, request: ReservationRequest, existing: Sequence[Reservation], begin: float, end: float
) -> tuple[str, ...]:
    assert request.gpus is not None
    active = client.reader.active() if client.reader else []
    records = client.reader.node_records() if client.reader else {}
    busy = {
        part.node
        for job in active
        if job.allocation is not None
        and expected_end(job, job.start_time if job.start_time is not None else time.time()) > begin
        for part in job.allocation.parts
    }
    unavailable = {name for name, record in records.items() if record.state in NOT_FOR_NEW_JOBS}
    return fewest_nodes(client.inventory, request.partition, request.gpus, existing, busy, unavailable, begin, end)
