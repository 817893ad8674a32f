"""``gpusched submit``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from gpusched.cli import options, output
from gpusched.client.context import Client
from gpusched.client.submit import Request, prepare, submit
from gpusched.config.validate import known_partition, may_share
from gpusched.errors import UsageError
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobSpec

app = typer.Typer()


class _Submit(TyperCommand):
    """Keeps the words as typed: they say whether ``--`` stands before the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["gpusched.words"] = tuple(args)
        return super().parse_args(ctx, args)


@app.command("submit", cls=_Submit, context_settings={"allow_interspersed_args": False})
@options.with_request()
def submit_command(
    request: Request,
    context: typer.Context,
    wrap: Annotated[str | None, typer.Option("--wrap", help="A line for sh, as a job script of its own.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit with the job's code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and explain; queue nothing.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Queue a job: SCRIPT ARG..., or -- COMMAND ARG..., which is passed on exactly.

    The first word behind the options is a job script if it is a file here that begins with #!; its #GPUSCHED and
    #SBATCH lines hold options, and those of the command line go before them. Without any word a script is read from
    stdin, as sbatch does; - says so.
    """
    client = Client()
    prepared, notes = _prepare(client, request, context, wrap)
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
        output.emit_json({"id": job_id} | ({"notes": notes} if notes else {}))
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


def _prepare(
    client: Client, request: Request, context: typer.Context, wrap: str | None
) -> tuple[Submit, Sequence[str]]:
    """Of a job script or a command; with notes on what in the script counts for nothing."""
    words, command = context.meta["gpusched.words"], request.command
    behind_dashes = len(words) > len(command) and words[len(words) - len(command) - 1] == "--"
    if command and (wrap is not None or behind_dashes or not _may_be_script(command[0])):
        if wrap is not None:
            raise UsageError("--wrap is the command, so no other has a place", "use one of the two")
        return prepare(client, request), ()
    from gpusched.client.script import layers, source
    from gpusched.client.submit import folder

    script: source.Script | None
    if wrap is not None:
        script = source.wrapped(wrap)
    elif command:
        script = source.from_word(command[0])
    else:
        taken = behind_dashes or _reads_stdin(request)
        script = None if taken else source.from_stdin(wait=request.image is None)
    if script is None:
        return prepare(client, request), ()
    typed = options.typed(context)
    read = layers.read(script, options.parse, client.inventory, folder())
    for note in read.notes:
        output.note(note)
    try:
        request = options.request_of(layers.complete(read, typed))
        if script.where == "stdin" and _reads_stdin(request):
            raise UsageError("--secret: stdin is the script already", "use NAME or NAME=@FILE")
        name = request.name if request.name is not None else script.name
        request = msgspec.structs.replace(request, command=command[1:], name=name, script=script.text)
        return prepare(client, request), read.notes
    except UsageError as error:
        raise layers.blamed(error, read, typed) from None


def _reads_stdin(request: Request) -> bool:
    return any(text.endswith("=-") for text in request.secret)


def _may_be_script(word: str) -> bool:
    """Whether it is worth looking: what runs on the nodes need not be here."""
    return word == "-" or os.path.exists(word) or word.endswith((".sh", ".bash", ".sbatch", ".slurm", ".job"))


def _show_dry_run(client: Client, spec: JobSpec) -> int:
    from gpusched.client.why import dry_run
    from gpusched.views.why import dry_run_dict, dry_run_lines

    report = dry_run(client, spec)
    if output.json_mode():
        output.emit_json(dry_run_dict(report))
    else:
        output.print_line("\n".join(dry_run_lines(report)))
    return 0
