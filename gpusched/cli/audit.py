"""``gpusched audit``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.client.context import Client
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean

app = typer.Typer()


@app.command("audit")
def audit(
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="Only this user's (name or id).")
    ] = None,
    since: Annotated[str, typer.Option("--since", help="12h, 7d, all, or a time such as 2026-11-20T18:00.")] = "7d",
    until: Annotated[str | None, typer.Option("--until", help="Like --since; exclusive.")] = None,
    command: Annotated[str | None, typer.Option("--command", help="Only this command, such as cancel.")] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    policy: Annotated[
        str | None, typer.Option("--policy", help="When this policy (name, version, digest) was active; its starts.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Commands: sender, origin and result of each."""
    from gpusched.accounting.report import parse_period
    from gpusched.client import audit as log
    from gpusched.views import audit as views

    begin, end = parse_period(since, until, time.time())
    client = Client()
    if policy is not None:
        if user is not None or command is not None or refused:
            raise UsageError("--policy goes with --since and --until only")
        periods = log.policy_decisions(client, policy, begin, end)
        output.show(lambda: views.decisions_json(periods), lambda: views.decisions_screen(periods))
        return
    wanted = log.AuditFilter(since=begin, until=end, user=user, command=command, refused=refused)
    found = log.audit_entries(client, wanted)
    if command is not None and not found:
        others = log.audit_entries(client, log.AuditFilter(since=begin, until=end))
        if command not in (names := sorted({entry.command for entry in others})):
            output.note(f"no entry of this time has the command '{command}'{did_you_mean(command, names)}")
    output.show(lambda: found, lambda: views.audit_screen(found))
