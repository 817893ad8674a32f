"""``gpusched power``."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpusched.model.reports import IdleReport, PowerReport

app = typer.Typer()


class PowerGrouping(StrEnum):
    """The rows of the report."""

    PARTITION = "partition"
    NODE = "node"
    USER = "user"
    JOB = "job"


@app.command("power")
def power(
    since: Annotated[str, typer.Option("--since", help="12h, 7d, all, or a time such as 2026-11-20T18:00.")] = "7d",
    by: Annotated[PowerGrouping, typer.Option("--by", help="One row per.")] = PowerGrouping.PARTITION,
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Only this partition.")
    ] = None,
    idle: Annotated[bool, typer.Option("--idle", help="Idle GPUs, by user and job that held them.")] = False,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="With --idle: only this user.")
    ] = None,
    watch: output.WatchOption = False,
    json: output.JsonOption = False,
) -> None:
    """Energy and utilization: used, wasted, cost."""
    from gpusched.accounting.report import parse_since, power_report
    from gpusched.views.power import power_json, power_screen

    if idle:
        _show_idle(since, by, partition, user, watch, json)
        return
    if user is not None:
        raise UsageError("--user needs --idle", "or use --by user")
    client = Client()

    def report() -> PowerReport:
        now = time.time()
        return power_report(
            client.reader, client.inventory, since=parse_since(since, now), until=now, by=by.value, partition=partition
        )

    def screen(found: PowerReport) -> RenderableType:
        return power_screen(found, output.console().width, warning=client.controller_warning())

    output.show_store(client, report, screen, power_json, watch)


def _show_idle(since: str, by: PowerGrouping, partition: str | None, user: str | None, watch: bool, json: bool) -> None:
    from gpusched.accounting.idle_report import idle_report
    from gpusched.accounting.report import parse_since
    from gpusched.views.idle import idle_screen
    from gpusched.views.power import power_json

    if by is not PowerGrouping.PARTITION:
        raise UsageError("--by and --idle cannot be combined", "--idle is by user and job")
    client = Client()

    def report() -> IdleReport:
        now = time.time()
        begin = parse_since(since, now)
        return idle_report(client.reader, client.inventory, since=begin, until=now, user=user, partition=partition)

    def screen(found: IdleReport) -> RenderableType:
        return idle_screen(found, warning=client.controller_warning())

    output.show_store(client, report, screen, power_json, watch)
