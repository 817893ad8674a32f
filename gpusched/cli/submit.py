"""``gpusched submit``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.cli.options import with_request
from gpusched.client.context import Client
from gpusched.client.submit import Request, prepare, submit
from gpusched.config.validate import known_partition, may_share
from gpusched.model.jobs import JobSpec

app = typer.Typer()


@app.command("submit", context_settings={"allow_interspersed_args": False})
@with_request()
def submit_command(
    request: Request,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit with the job's code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and explain; queue nothing.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Queue a job. Everything after the options, or after --, is its command and is passed on exactly."""
    client = Client()
    prepared = prepare(client, request)
    if prepared.spec.elastic is not None and client.inventory.settings.job_dirs is None:
        output.note(
            "without settings.job_dirs GPUSCHED_JOB_DIR stays on its node: keep checkpoints where all nodes see them"
        )
    if prepared.spec.share and not may_share(prepared.spec, known_partition(client.inventory, prepared.spec.partition)):
        output.note("no node that it may use lets jobs share GPUs (sharing: in the inventory), so it has them alone")
    if dry_run:
        return _show_dry_run(client, prepared.spec)
    job_id = submit(client, prepared)
    if json:
        output.emit_json({"id": job_id})
    else:
        output.print_line(job_id)
        if warning := client.controller_warning():
            output.note(warning)
    if not wait:
        return 0
    import sys

    from gpusched.client.wait import wait_for_ids, worst_exit_code

    sys.stdout.flush()
    return worst_exit_code(wait_for_ids(client, [job_id], None))


def _show_dry_run(client: Client, spec: JobSpec) -> int:
    from gpusched.client.why import dry_run
    from gpusched.views.why import dry_run_dict, dry_run_lines

    report = dry_run(client, spec)
    if output.json_mode():
        output.emit_json(dry_run_dict(report))
    else:
        output.print_line("\n".join(dry_run_lines(report)))
    return 0
