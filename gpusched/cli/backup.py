"""``gpusched backup`` and ``gpusched recover``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client

app = typer.Typer()


@app.command("backup")
def backup(
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Folder of the backups [default: settings.backup.to].")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the backups; make none.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Open and read all backups; make none.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Back up the state folder now; the controller may be running.

    Exits 1 if the backup, or one of --check, is bad, or if --check finds none.
    """
    from gpusched.client.backups import listed_backups, make_now
    from gpusched.views.backups import backups_json, backups_screen, made_line

    client = Client()
    if listing or check:
        found = listed_backups(client, to, check)
        output.show(lambda: backups_json(found), lambda: backups_screen(found, time.time()))
        return int(check and (not found or any(one.error for one in found)))
    made = make_now(client, to)
    if json:
        output.emit_json(backups_json([made])[0])
    else:
        output.print_line(made_line(made))
    return 0


@app.command("recover")
def recover(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PATH|HOST:PATH",
            help="Folder of backups, or one backup [default: settings.backup.to].",
            show_default=False,
        ),
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option("--inventory", metavar="FILE", help="inventory.yaml with all nodes that may have jobs."),
    ] = None,
    cluster_id: Annotated[
        str, typer.Option("--cluster-id", help="Without a backup, if nodes have jobs of several installations.")
    ] = "",
    no_backup: Annotated[bool, typer.Option("--no-backup", help="Rebuild it from the nodes alone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be recovered.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Rebuild a lost or damaged store from its last backup and from what runs and ran on the nodes.

    Exits 1 if it was not put in place.
    """
    from gpusched.client.audit import record_command, recorded_failure
    from gpusched.config.inventory import load_inventory
    from gpusched.controller.rebuilding import rebuild
    from gpusched.views.backups import recovery_json, recovery_screen

    if no_backup:
        refuse_others(context, "--no-backup", "inventory", "cluster_id", "dry_run", "yes")
    client, declared = Client(), load_inventory(inventory)
    with (
        recorded_failure(client.state, "recover") if not dry_run else contextlib.nullcontext(),
        rebuild(client.state, declared, None if no_backup else source or "", cluster_id) as rebuilt,
    ):
        if not json:
            output.print_rich(recovery_screen(rebuilt.report, time.time()))
        committed = not dry_run and output.confirm("put the recovered store in place", yes)
        if committed:
            rebuilt.commit()
    if committed:
        client.deliverable_inbox()
        record_command(client.state, "recover")
    if json:
        output.emit_json(recovery_json(rebuilt.report, committed))
    elif committed:
        output.print_line("recovered; start the controller")
    return int(not committed and not dry_run)
