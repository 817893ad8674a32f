"""``gpusched controller`` and ``gpusched tick``: the same cycle, repeated or once."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli.logoptions import LogFormatOption, QuietOption, VerboseOption, start_log
from gpusched.cli.together import is_given
from gpusched.client.context import Client
from gpusched.controller.logsetup import LogFormat
from gpusched.errors import UsageError

app = typer.Typer()


@app.command("controller")
def controller(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Run one cycle only, like tick.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another controller runs, then take over.")
    ] = False,
    takeover_after: Annotated[
        int, typer.Option("--takeover-after", help="Take over after this long a silence.", min=5, metavar="SECONDS")
    ] = 15,
    verbose: VerboseOption = 0,
    quiet: QuietOption = False,
    log_format: LogFormatOption = None,
) -> None:
    """Run the controller until SIGTERM or Ctrl-C. Jobs continue without it; the next start picks them up."""
    if once and standby:
        raise UsageError("--once cannot be combined with --standby")
    if is_given(context, "takeover_after") and not standby:
        raise UsageError("--takeover-after needs --standby", "add it")
    _run(once, verbose, quiet, log_format, takeover_after if standby else None)


@app.command("tick")
def tick(verbose: VerboseOption = 0, quiet: QuietOption = False, log_format: LogFormatOption = None) -> None:
    """Run one controller cycle (for cron)."""
    _run(True, verbose, quiet, log_format)


def _run(
    once: bool, verbose: int, quiet: bool, log_format: LogFormat | None, takeover_after: int | None = None
) -> None:
    from functools import partial

    from gpusched.cli import options
    from gpusched.client.sbatch_inside import prepare
    from gpusched.controller.service import run_forever, run_standby, tick_once
    from gpusched.queue.lastgood import inventory_path

    start_log("gpusched.controller", log_format, verbose, quiet)
    state = Client().state
    sbatch_inside = partial(prepare, options)
    if takeover_after is not None:
        run_standby(inventory_path(state), state, takeover_after, sbatch_inside)
    else:
        (tick_once if once else run_forever)(inventory_path(state), state, sbatch_inside)
