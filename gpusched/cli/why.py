"""``gpusched why``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.client.why import why as explain
from gpusched.views.why import why_dict, why_screen

app = typer.Typer()


@app.command("why")
def why(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.all_jobs)],
    json: output.JsonOption = False,
) -> None:
    """Why a job waits, node by node, and what to do; for an ended job, why it ended."""
    answer = explain(Client(), job)
    output.show(lambda: why_dict(answer), lambda: why_screen(answer))
