"""``gpusched exec``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete
from gpusched.client.context import Client

app = typer.Typer()


@app.command("exec")
def exec_(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.live_jobs, show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", show_default=False)],
    rank: Annotated[int, typer.Option("--rank", min=0, help="In this rank of a gang.")] = 0,
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="With this stdin.")] = False,
    tty: Annotated[bool, typer.Option("-t", "--tty", help="With a terminal.")] = False,
) -> int:
    """Run a command inside a running job: gpusched exec -it JOB -- bash. Exits with its code."""
    from gpusched.client.attach import exec_in_job

    return exec_in_job(Client(), job, command, rank=rank, tty=tty, interactive=interactive)
