"""``gpusched run`` and ``gpusched attach``."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.cli.options import with_request
from gpusched.client.context import Client
from gpusched.client.submit import Request

app = typer.Typer()

ForwardOption = Annotated[
    list[str] | None,
    typer.Option("--forward", metavar="[HERE:]PORT", help="Bring a port of the job to this machine: 8888, 9000:8888."),
]


class _Line:
    """A changing line on a terminal; in a pipe why one waits is said once, and no more."""

    def __init__(self) -> None:
        self._on_terminal, self._shown = sys.stderr.isatty(), ""

    def waiting(self, line: str) -> None:
        if not self._on_terminal:
            return
        line = output.printable(line)[: max(20, shutil.get_terminal_size().columns - 1)]
        if line != self._shown:
            sys.stderr.write("\r\033[K" + line)
            sys.stderr.flush()
            self._shown = line

    def note(self, line: str) -> None:
        self.waiting("")
        output.note(line)


@app.command("run", context_settings={"allow_interspersed_args": False})
@with_request(
    "array", "requeue", "preemptible", "resizable", "sizes", "base", "batch", "cooldown", "output_file", "hold"
)
def run(
    request: Request,
    pty: Annotated[bool, typer.Option("--pty", help="With a terminal: gpusched run --gpus 1 --pty bash.")] = False,
    forward: ForwardOption = None,
) -> int:
    """Run a command in a job and stay with it: stdin, stdout and stderr, or the terminal, are its own.

    It ends with its command, and exits with its code. While it waits, Ctrl-C cancels it. If the connection is lost it
    is kept for a while (settings.session_keep): gpusched attach JOB.
    """
    from gpusched.client import shell
    from gpusched.client.forwarding import Forwards

    client = Client()
    prepared = shell.prepare_session(client, request, pty)
    return shell.run(client, prepared, Forwards(forward or ()), _Line())


@app.command("attach")
def attach(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.live_jobs, show_default=False)],
    forward: ForwardOption = None,
) -> int:
    """Go on working in a job of gpusched run, after the connection was lost. Exits with its code."""
    from gpusched.client import shell
    from gpusched.client.forwarding import Forwards

    return shell.attach(Client(), job, Forwards(forward or ()), _Line())
