"""``gpusched backup``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.client.context import Client

app = typer.Typer()


@app.command("backup")
def backup(
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder of the backups [default: settings.backup.to].")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the backups; make none.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Open and read all backups; make none.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Back up the state folder now; the controller may be running. Exits 1 if the backup, or one of --check, is bad."""
    from gpusched.client.backups import listed_backups, make_now
    from gpusched.views.backups import backups_json, backups_screen, made_line

    client = Client()
    if listing or check:
        found = listed_backups(client, to, check)
        output.show(lambda: backups_json(found), lambda: backups_screen(found, time.time()))
        return int(check and any(one.error for one in found))
    made = make_now(client, to)
    if json:
        output.emit_json(backups_json([made])[0])
    else:
        output.print_line(made_line(made))
    return 0
