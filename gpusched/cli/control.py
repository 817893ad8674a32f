"""Commands that request changes of jobs or nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client import control
from gpusched.client.context import Client
from gpusched.client.jobs import parse_states
from gpusched.errors import UsageError
from gpusched.model.units import count_of

app = typer.Typer()

PendingJobs = Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete.pending_jobs)]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", autocompletion=complete.nodes)]


@app.command("cancel")
def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]...", autocompletion=complete.live_jobs, show_default=False)
    ] = None,
    user: Annotated[str | None, typer.Option("-u", "--user", metavar="USER", help="All jobs of this user.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("-s", "--state", autocompletion=complete.states, help="All jobs in these states."),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Kill immediately, without a signal and grace period.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs have ended.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Cancel jobs: by id, user or state."""
    client, named = Client(), bool(jobs)
    if jobs and (user is not None or state):
        raise UsageError("job ids cannot be combined with --user or --state", "use one or the other")
    if not jobs:
        if user is None and not state:
            raise UsageError("no jobs given", "name job ids, or select with --user or --state")
        jobs, count = control.selected(client, user, parse_states(state or ()))
        if not jobs:
            _print_result(control.ControlResult("cancel", ()), client)
            return
        if not output.confirm(f"cancel {count_of(count, 'job')}", yes):
            output.note("nothing cancelled")
            return
    result = control.cancel(client, jobs, now=now, named=named)
    if wait and result.ids:
        from gpusched.client.wait import wait_for

        wait_for(client, result.ids, None)
    _print_result(result, client)


@app.command("hold")
def hold(jobs: PendingJobs, json: output.JsonOption = False) -> None:
    """Prevent pending jobs from starting."""
    _request(control.hold, jobs)


@app.command("release")
def release(jobs: PendingJobs, json: output.JsonOption = False) -> None:
    """Release held jobs."""
    _request(control.release, jobs)


@app.command("requeue")
def requeue(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete.all_jobs)],
    json: output.JsonOption = False,
) -> None:
    """Queue running or ended jobs again."""
    _request(control.requeue, jobs)


@app.command("priority", context_settings={"ignore_unknown_options": True})
def priority(
    job: Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete.pending_jobs)],
    number: Annotated[int, typer.Argument(metavar="N", help="Higher starts first; only admins may raise it.")],
    json: output.JsonOption = False,
) -> None:
    """Set the priority of a pending job."""
    _request(control.set_priority, [job], number)


@app.command("drain")
def drain(
    nodes: Nodes,
    reason: Annotated[str, typer.Option("--reason", help="The reason, shown to everyone.")],
    json: output.JsonOption = False,
) -> None:
    """Take nodes out of service after their jobs end."""
    _request(control.drain, nodes, reason)


@app.command("resume")
def resume(nodes: Nodes, json: output.JsonOption = False) -> None:
    """Return drained nodes to service."""
    _request(control.resume, nodes)


def _request(ask: Callable[..., control.ControlResult], *given: object) -> None:
    client = Client()
    _print_result(ask(client, *given), client)


def _print_result(result: control.ControlResult, client: Client) -> None:
    """Print the request, which the controller carries out in its next cycle."""
    if output.json_mode():
        output.emit_json({"requested": result.what, "ids": list(result.ids)})
        return
    output.print_line(f"{result.what} requested: {' '.join(result.ids)}" if result.ids else "no matching jobs")
    for note in result.notes:
        output.note(note)
    if result.ids and (warning := client.controller_warning()):
        output.note(warning)
