"""``gpusched run`` and ``gpusched attach``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import activity, complete, output
from gpusched.cli.options import CommandLine, WithSbatch, with_options
from gpusched.client.context import Client

app = typer.Typer()

ForwardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--forward", metavar="[HERE:]PORT", help="Forward a port of the job to this machine: 8888, 9000:8888."
    ),
]


class _Screen:
    """Implements `gpusched.client.shell.Screen`."""

    _is_waiting = False

    def waiting(self, line: str) -> None:
        if line and not self._is_waiting:
            activity.begin(output.printable(line))
        elif line:
            activity.update(output.printable(line))
        else:
            activity.stop()
        self._is_waiting = bool(line)

    def note(self, line: str) -> None:
        self.waiting("")
        output.note(line)


@app.command("run", cls=WithSbatch, context_settings={"allow_interspersed_args": False})
@with_options(
    "array", "chain", "requeue", "preemptible", "resizable", "hot", "sizes", "base_gpus", "batch", "cooldown", "output",
    "error", "hold", "open_mode",
)  # fmt: skip
def run(
    line: CommandLine,
    pty: Annotated[bool, typer.Option("--pty", help="Allocate a terminal: gpusched run --gpus 1 --pty bash.")] = False,
    forward: ForwardOption = None,
) -> int:
    """Run a command in a job and stay attached to its stdin, stdout and stderr, or its terminal.

    Exits with the command's code. While the job is pending, Ctrl-C cancels it. If the connection is lost, it
    keeps running for a while (settings.session_keep): gpusched attach JOB.
    """
    from gpusched.client import shell
    from gpusched.client.forwarding import Forwards

    client = Client()
    prepared = shell.prepare_session(client, line.request(), pty)
    return shell.run(client, prepared, Forwards(forward or ()), _Screen())


@app.command("attach")
def attach(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.live_jobs, show_default=False)],
    forward: ForwardOption = None,
) -> int:
    """Reattach to a job of gpusched run after the connection was lost. Exits with its code."""
    from gpusched.client import shell
    from gpusched.client.forwarding import Forwards

    return shell.attach(Client(), job, Forwards(forward or ()), _Screen())
