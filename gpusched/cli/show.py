"""``gpusched show``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.client.show import script_of
from gpusched.client.show import show as load_page
from gpusched.views.show import page_dict, page_lines

app = typer.Typer()


@app.command("show")
def show(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.all_jobs)],
    script: Annotated[bool, typer.Option("--script", help="Print only its job script.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Everything about one job: request, allocation, attempts, energy, events."""
    if script:
        text = script_of(Client(), job)
        output.emit_json({"script": text}) if json else output.print_text(text)
        return
    page = load_page(Client(), job)
    if json:
        output.emit_json(page_dict(page))
    else:
        output.print_line("\n".join(page_lines(page)))
