"""GPUs held idle: the idle hours of the power report by user and job."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpusched.accounting.report import power_report
from gpusched.model.jobs import ACTIVE, JobRecord
from gpusched.model.reports import IdleReport, IdleRow, PowerRow
from gpusched.model.resources import Inventory
from gpusched.queue.store import Reader

_HOURS_SHOWN = 0.005  # less is 0.00, as of the first readings of a job


def idle_report(
    reader: Reader | None,
    inventory: Inventory,
    *,
    since: float,
    until: float,
    user: str | None = None,
    partition: str | None = None,
) -> IdleReport:
    """Build the report from the store; of one ``user`` or ``partition`` only, where given.

    Raises:
        UsageError: There is no such partition.
    """
    report = power_report(reader, inventory, since=since, until=until, by="job", partition=partition)
    held = [row for row in report.rows if user in (None, row.user)]
    price = report.price_per_kwh
    jobs = [
        _row(row, reader.job(row.name) if reader is not None else None, price)
        for row in held
        if (row.idle_gpu_hours or 0.0) >= _HOURS_SHOWN
    ]
    by_user: dict[str, list[PowerRow]] = {}
    for row in held:
        by_user.setdefault(row.user or "", []).append(row)
    users = [_sum(rows, name, price) for name, rows in by_user.items()]
    return IdleReport(
        since=report.since,
        until=report.until,
        currency=report.currency,
        price_per_kwh=price,
        users=tuple(sorted((row for row in users if row.idle_gpu_hours >= _HOURS_SHOWN), key=_most_first)),
        jobs=tuple(sorted(jobs, key=_most_first)),
        total=_sum(held, user or "", price),
    )


def _most_first(row: IdleRow) -> tuple[float, str, str]:
    return -row.idle_gpu_hours, row.user, row.job or ""


def _row(row: PowerRow, job: JobRecord | None, price: float | None) -> IdleRow:
    return IdleRow(
        user=row.user or "",
        job=row.name,
        name=job.spec.name if job is not None else None,
        partition=row.partition,
        gpu_hours=row.gpu_hours,
        idle_gpu_hours=row.idle_gpu_hours or 0.0,
        energy_kwh=row.idle_energy_kwh,
        energy_unknown_share=row.idle_energy_unknown_share,
        cost=_cost(row.idle_energy_kwh, price),
        running=job is not None and job.state in ACTIVE,
    )


def _sum(rows: Iterable[PowerRow], user: str, price: float | None) -> IdleRow:
    rows = list(rows)

    def total(value: Callable[[PowerRow], float | None]) -> float:
        return sum(value(row) or 0.0 for row in rows)

    idle = total(lambda row: row.idle_gpu_hours)
    unknown = total(lambda row: (row.idle_gpu_hours or 0.0) * (row.idle_energy_unknown_share or 0.0))
    energy = total(lambda row: row.idle_energy_kwh) if unknown < idle else None
    return IdleRow(
        user=user,
        gpu_hours=total(lambda row: row.gpu_hours),
        idle_gpu_hours=idle,
        energy_kwh=energy,
        energy_unknown_share=unknown / idle if idle > 0 else None,
        cost=_cost(energy, price),
    )


def _cost(kwh: float | None, price: float | None) -> float | None:
    return kwh * price if kwh is not None and price is not None else None
