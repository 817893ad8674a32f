"""``gpusched web``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.cli.logoptions import LogFormatOption, start_log
from gpusched.cli.together import refuse_others
from gpusched.model.units import count_of

app = typer.Typer()


@app.command("web")
def web(
    context: typer.Context,
    bind: Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")] = 8765,
    user_header: Annotated[
        str | None,
        typer.Option("--user-header", metavar="NAME", help="Header in which the login proxy names the user."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="ACCOUNT|ADDRESS", help="Trust --user-header only from these addresses."),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Another host name under which browsers reach it.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="DIR", help="Write the page as files and exit (for cron).")
    ] = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve a read-only web page: nodes, queue, timeline, usage."""
    if export is not None:
        refuse_others(context, "--export")
        from gpusched.web.export import export as write

        with output.progress("writing the page") as advance:
            count = write(export, advance)
        output.note(f"{count_of(count, 'file')} written to {export}")
        return
    from gpusched.web.access import rules_of
    from gpusched.web.server import WebServer, is_loopback, serve

    rules = rules_of(user_header, proxy, name or ())
    start_log("gpusched.web", log_format)
    server = WebServer(bind, port, rules)
    log = logging.getLogger("gpusched.web")
    log.info("serving at %s (Ctrl-C stops it)", server.url)
    if not is_loopback(bind):
        log.warning("anyone who can reach this address sees what 'gpusched status' shows")
    serve(server)
