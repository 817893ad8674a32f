"""``gpusched web``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import output

app = typer.Typer()


@app.command("web")
def web(
    bind: Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="Listen there.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8765,
    user_header: Annotated[
        str | None, typer.Option("--user-header", metavar="NAME", help="In it the login proxy names the user.")
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="ACCOUNT|ADDRESS", help="From which alone --user-header counts."),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Another name by which browsers may ask for it.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="DIR", help="Write the page as files, and end (cron).")
    ] = None,
) -> None:
    """A page in the browser: nodes, queue, timeline, use; it only reads."""
    from gpusched.web.access import rules_of

    rules = rules_of(user_header, proxy, name or ())
    if export is not None:
        from gpusched.web.export import export as write

        with output.progress("writing the page") as told:
            count = write(export, told)
        output.note(f"{count} files written to {export}")
        return
    from gpusched.web.server import WebServer, is_loopback, serve

    server = WebServer(bind, port, rules)
    output.note(f"the page is at {server.url} (Ctrl-C ends it)")
    if not is_loopback(bind):
        output.note("everyone who reaches this address sees what 'gpusched status' shows")
    serve(server)
