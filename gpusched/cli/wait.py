"""``gpusched wait``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.client.options import duration
from gpusched.client.wait import exit_code, wait_for, worst_exit_code
from gpusched.views.jobs import job_dict

app = typer.Typer()


@app.command("wait")
def wait(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete.live_jobs)],
    timeout: Annotated[str | None, typer.Option("--timeout", help="Give up (exit 1) after this time: 30s, 2h.")] = None,
    json: output.JsonOption = False,
) -> int:
    """Wait until jobs end; exits with the job's own code (several: the highest).

    Other ends than its own: CANCELLED and PREEMPTED 143, TIMEOUT 124, OUT_OF_MEMORY 137, NODE_FAIL 125.
    """
    ended = wait_for(Client(), jobs, duration("--timeout", timeout))
    if json:
        now = time.time()
        output.emit_json([job_dict(j, now) | {"wait_exit_code": exit_code(j)} for j in ended])
    else:
        for job in ended:
            output.print_line(f"{job.id} {job.state}" + (f" ({job.reason})" if job.reason else ""))
    return worst_exit_code(ended)
