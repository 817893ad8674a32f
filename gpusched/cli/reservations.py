"""``gpusched reserve``, ``gpusched maintenance`` and ``gpusched reservations``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.client.reservations import ReservationRequest, ReservationResult

app = typer.Typer()

Nodes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NODE]...", autocompletion=complete.nodes, help="Names, or dgx[1-4].", show_default=False),
]
From = Annotated[str | None, typer.Option("--from", help="When: now+2h, 2026-11-20T18:00. Default: now.")]
To = Annotated[str | None, typer.Option("--to", help="End, in the same format.")]
For = Annotated[str | None, typer.Option("--for", help="Duration, instead of --to: 4h, 2-00:00:00.")]
Users = Annotated[list[str] | None, typer.Option("--users", help="Users whose jobs may run in it: alice,bob.")]
Groups = Annotated[list[str] | None, typer.Option("--groups", help="Groups whose jobs may run in it.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason, shown to everyone.")]


@app.command("reserve")
def reserve(
    nodes: Nodes = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Instead of nodes: the fewest with this many GPUs.")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--partition",
            autocompletion=complete.partitions,
            help="All nodes of this partition; with --gpus, some.",
        ),
    ] = None,
    begin: From = None,
    until: To = None,
    lasts: For = None,
    users: Users = None,
    groups: Groups = None,
    name: Annotated[str | None, typer.Option("--name", help="The name that jobs use with --reservation.")] = None,
    reason: Reason = "",
    json: output.JsonOption = False,
) -> None:
    """Reserve nodes for some users' jobs for a period (admins)."""
    from gpusched.errors import UsageError

    if name is None:
        raise UsageError("a reservation needs a name that jobs can use", "--name class")
    _reserve(
        ReservationRequest(
            name=name, nodes=tuple(nodes or ()), partition=partition, gpus=gpus, begin=begin, until=until, lasts=lasts,
            users=tuple(users or ()), groups=tuple(groups or ()), reason=reason,
        ),
        maintenance=False,
    )  # fmt: skip


@app.command("maintenance")
def maintenance(
    nodes: Nodes = None,
    partition: Annotated[
        str | None,
        typer.Option("-p", "--partition", autocompletion=complete.partitions, help="All nodes of this partition."),
    ] = None,
    begin: From = None,
    until: To = None,
    lasts: For = None,
    users: Users = None,
    groups: Groups = None,
    name: Annotated[str | None, typer.Option("--name", help="Default: from its date, maint-1123.")] = None,
    reason: Reason = "",
    json: output.JsonOption = False,
) -> None:
    """Plan maintenance: no job starts whose time limit ends after its begin (admins)."""
    _reserve(
        ReservationRequest(
            name=name, nodes=tuple(nodes or ()), partition=partition, begin=begin, until=until, lasts=lasts,
            users=tuple(users or ()), groups=tuple(groups or ()), reason=reason,
        ),
        maintenance=True,
    )  # fmt: skip


def _reserve(request: ReservationRequest, *, maintenance: bool) -> None:
    from gpusched.client.reservations import reserve as ask

    client = Client()
    print_result(ask(client, request, maintenance=maintenance), client)


def print_result(result: ReservationResult, client: Client) -> None:
    """Print the request, which the controller carries out in its next cycle."""
    from gpusched.views.reservations import request_dict, request_lines

    if output.json_mode():
        output.emit_json(request_dict(result))
        return
    first, *notes = request_lines(result)
    output.print_line(first)
    for note in notes:
        output.note(note)
    if warning := client.controller_warning():
        output.note(warning)
