"""``gpusched quota``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client

app = typer.Typer()


@app.command("quota")
def quota(
    context: typer.Context,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="This user's limits (admins).")
    ] = None,
    everybody: Annotated[bool, typer.Option("-a", "--all", help="All users, groups and classes (admins).")] = False,
    watch: output.WatchOption = False,
    json: output.JsonOption = False,
) -> None:
    """Your limits: used and left; fair shares."""
    from gpusched.client.quota import quota_report
    from gpusched.views.quota import quota_json, quota_screen

    if everybody:
        refuse_others(context, "--all", "watch")
    client = Client()
    output.show_store(
        client,
        lambda: quota_report(client, user, everybody),
        lambda report: quota_screen(report, warning=client.controller_warning()),
        quota_json,
        watch,
    )
