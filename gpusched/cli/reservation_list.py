"""``gpusched reservations``: list reservations and change them."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.cli.reservations import For, Groups, Nodes, Reason, To, Users, print_result
from gpusched.client.context import Client
from gpusched.client.reservations import ReservationRequest

app = typer.Typer(
    name="reservations",
    rich_markup_mode=None,
    invoke_without_command=True,
    add_completion=False,
    help="List, change and cancel reservations.",
)
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete.reservations)]


@app.callback()
def list_(context: typer.Context, json: output.JsonOption = False) -> None:
    """List reservations."""
    if context.invoked_subcommand is not None:
        return
    _refuse_under_slurm(what="")
    from gpusched.client.reservations import rows
    from gpusched.views.reservations import reservations_json, reservations_screen

    found = rows(Client())
    output.show(lambda: reservations_json(found), lambda: reservations_screen(found))


@app.command("change")
def change(
    name: Name,
    nodes: Nodes = None,
    begin: Annotated[str | None, typer.Option("--from", help="When: now+2h, 2026-11-20T18:00.")] = None,
    until: To = None,
    lasts: For = None,
    users: Users = None,
    groups: Groups = None,
    reason: Reason = "",
    json: output.JsonOption = False,
) -> None:
    """Change a reservation or a maintenance; omitted options stay unchanged (admins)."""
    from gpusched.client.reservations import change as ask

    _refuse_under_slurm("change", name, nodes=nodes, begin=begin, until=until, lasts=lasts, users=users, groups=groups)
    client = Client()
    request = ReservationRequest(
        nodes=tuple(nodes or ()), begin=begin, until=until, lasts=lasts, users=tuple(users or ()),
        groups=tuple(groups or ()), reason=reason,
    )  # fmt: skip
    print_result(ask(client, name, request), client)


@app.command("cancel")
def cancel(name: Name, json: output.JsonOption = False) -> None:
    """Cancel reservations; jobs running in them continue (admins)."""
    from gpusched.client.reservations import cancel as ask

    _refuse_under_slurm("cancel", name)
    client = Client()
    print_result(ask(client, name), client)


def _refuse_under_slurm(what: str, name: str = "", **given: object) -> None:
    """Raise an error that names Slurm's own command under ``engine: slurm``."""
    from gpusched.client import slurm

    if slurm.manages_jobs():
        slurm.refuse("reservations", {"what": what, "name": name, **given})
