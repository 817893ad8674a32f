"""``gpusched controller`` and ``gpusched tick``: the same cycle, for ever or once."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.client.context import Client

app = typer.Typer()


@app.command("controller")
def controller(once: Annotated[bool, typer.Option("--once", help="One cycle only, as tick.")] = False) -> None:
    """Run the cluster until SIGTERM or Ctrl-C. Jobs go on without it; started again it takes them up."""
    _run(once)


@app.command("tick")
def tick() -> None:
    """Run one cycle (cron)."""
    _run(once=True)


def _run(once: bool) -> None:
    from gpusched.controller.lastgood import inventory_path
    from gpusched.controller.service import run_forever, tick_once

    state = Client().state
    (tick_once if once else run_forever)(inventory_path(state), state, output.note)
