"""``gpusched logs`` and ``gpusched exec``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client

app = typer.Typer()


def _write(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


@app.command("logs", help="A job's output; -f follows it. For multi-node jobs each line is prefixed with its rank.")
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.all_jobs, show_default=False)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until it ends; exit with its code.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.", show_default=False)] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="An earlier attempt.", show_default=False)
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last lines.", show_default=False)] = None,
) -> int:
    """Print the output of a job."""
    from gpusched.client.logs import LogRequest, PrefixedLines, ranks_of, show_log

    client = Client()
    request = LogRequest(job=job, rank=rank, attempt=attempt, tail=tail, follow=follow)
    if ranks_of(client, request) == 1:
        return show_log(client, request, lambda _, chunk: _write(chunk), output.note)
    lines = PrefixedLines(_write)
    try:
        return show_log(client, request, lines, output.note)
    finally:
        lines.finish()


@app.command("exec")
def exec_(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.live_jobs, show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", show_default=False)],
    rank: Annotated[int, typer.Option("--rank", min=0, help="In this rank of a multi-node job.")] = 0,
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="Pass stdin to it.")] = False,
    tty: Annotated[bool, typer.Option("-t", "--tty", help="Allocate a terminal.")] = False,
) -> int:
    """Run a command inside a running job: gpusched exec -it JOB -- bash. Exits with its code."""
    from gpusched.client.attach import exec_in_job

    return exec_in_job(Client(), job, command, rank=rank, tty=tty, interactive=interactive)
