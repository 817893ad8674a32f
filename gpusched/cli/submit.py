"""``gpusched submit``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from gpusched.cli import options, output
from gpusched.client.context import Client
from gpusched.client.request import SubmitRequest
from gpusched.client.submit import prepare, submit
from gpusched.config.users import user_name
from gpusched.config.validate import known_partition, may_share
from gpusched.errors import UsageError
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobSpec

app = typer.Typer()


@app.command("submit", cls=options.WithSbatch, context_settings={"allow_interspersed_args": False})
@options.with_options()
def submit_command(
    line: options.CommandLine,
    wrap: Annotated[str | None, typer.Option("--wrap", help="A shell command to run as the job script.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it ends; exit with the job's code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and explain; do not queue.")] = False,
    json: output.JsonOption = False,
) -> int:
    """Queue a job: SCRIPT ARG..., or -- COMMAND ARG..., which is passed on exactly.

    The first word after the options is a job script if it is a local file that begins with #!; its #GPUSCHED and
    #SBATCH lines hold options, which the command line overrides. Without a word, or with -, the script is read from
    stdin, as sbatch does.
    """
    if dry_run and wait:
        raise UsageError("--dry-run and --wait cannot be combined", "a dry run queues nothing")
    client = Client()
    prepared, notes = _prepare(client, line, wrap)
    notes = (*(line.sbatch.notes if line.sbatch else ()), *notes)
    if prepared.spec.elastic is not None and client.inventory.settings.job_dirs is None:
        output.note(
            "without settings.job_dirs, GPUSCHED_JOB_DIR is local to a node: keep checkpoints where all nodes see them"
        )
    if prepared.spec.share and not may_share(prepared.spec, known_partition(client.inventory, prepared.spec.partition)):
        output.note("no node it may use shares GPUs (sharing: in the inventory), so the job gets whole GPUs")
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


def _prepare(client: Client, line: options.CommandLine, wrap: str | None) -> tuple[Submit, Sequence[str]]:
    """Prepare a job script or a command; return it with notes on lines of the script without effect."""
    request = line.request()
    command = request.command
    behind_dashes = len(line.words) > len(command) and line.words[-len(command) - 1] == "--"
    if command and (wrap is not None or behind_dashes or not _may_be_script(command[0])):
        if wrap is not None:
            raise UsageError("--wrap already gives the command", "use one of the two")
        return _prepared(client, request)
    from gpusched.client.script import layers, source
    from gpusched.client.submit import current_folder

    script: source.JobScript | None
    if wrap is not None:
        script = source.wrapped(wrap)
    elif command:
        script = source.from_word(command[0])
    else:
        taken = behind_dashes or _reads_stdin(request)
        script = None if taken else source.from_stdin(wait=request.image is None)
    if script is None:
        return _prepared(client, request)
    read = layers.read_options(script, options.parse, client.inventory, current_folder(), user_name(os.getuid()))
    for note in read.notes:
        output.note(note)
    try:
        request = layers.request_of(layers.merge_typed(read, line.given, line.sbatch), script)
        if script.where == "stdin" and _reads_stdin(request):
            raise UsageError("--secret: stdin is already used for the script", "use NAME or NAME=@FILE")
        prepared, notes = _prepared(client, request)
        return prepared, (*read.notes, *notes)
    except UsageError as error:
        raise layers.with_origin(error, read, line.given) from None


def _prepared(client: Client, request: SubmitRequest) -> tuple[Submit, Sequence[str]]:
    """Prepare the request; return it with a note if one of several partitions was chosen."""
    prepared = prepare(client, request)
    if "," not in (request.partition or ""):
        return prepared, ()
    chosen = prepared.spec.partition
    note = f"-p {request.partition}: queued in {chosen} only, the first that can hold the job; a job has one partition"
    output.note(note)
    return prepared, (note,)


def _reads_stdin(request: SubmitRequest) -> bool:
    return any(text.endswith("=-") for text in request.secret)


def _may_be_script(word: str) -> bool:
    """Return whether to look for a local script: programs that run on the nodes need not exist here."""
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
