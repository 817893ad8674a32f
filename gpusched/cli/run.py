"""``gpusched controller`` and ``gpusched tick``: the same cycle, repeated or once."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.client.context import Client

app = typer.Typer()


@app.command("controller")
def controller(once: Annotated[bool, typer.Option("--once", help="Run one cycle only, like tick.")] = False) -> None:
    """Run the controller until SIGTERM or Ctrl-C. Jobs continue without it; the next start picks them up."""
    _run(once)


@app.command("tick")
def tick() -> None:
    """Run one controller cycle (for cron)."""
    _run(once=True)


def _run(once: bool) -> None:
    from functools import partial

    from gpusched.cli import options
    from gpusched.client.sbatch_inside import prepare
    from gpusched.controller.service import run_forever, tick_once
    from gpusched.queue.lastgood import inventory_path

    state = Client().state
    sbatch_inside = partial(prepare, options)
    (tick_once if once else run_forever)(inventory_path(state), state, output.note, sbatch_inside)
