"""``gpusched policy``: list and compare policies, and change the live ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.model.slurm import SlurmMode

if TYPE_CHECKING:
    from gpusched.client.policy import PolicyResult

app = output.group("policy", "List, compare, shadow, promote and roll back policies.")
_Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", autocompletion=complete.policies, help="A name, NAME@VERSION, a file or a folder."
    ),
]


@app.command("list")
def list_(json: output.JsonOption = False) -> None:
    """List all policies, live, shadow, candidate and former, and the package that each comes from."""
    from gpusched.client.policies import problems, rows
    from gpusched.views.policy import table

    client = Client()
    found = rows(client)
    output.show(lambda: found, lambda: table(found))
    for line in problems(client):
        output.warn(line)


@app.command("show")
def show(policy: _Policy, json: output.JsonOption = False) -> None:
    """Show one policy: how it decides, its training card, and its shadow decisions."""
    from gpusched.client.policies import page
    from gpusched.views.policy import page_dict, page_screen

    found = page(Client(), policy)
    output.show(lambda: page_dict(found), lambda: page_screen(found))


@app.command("compare")
def compare(
    first: Annotated[str, typer.Argument(metavar="A", autocompletion=complete.policies, help="The baseline policy.")],
    second: Annotated[
        str, typer.Argument(metavar="B", autocompletion=complete.policies, help="The policy compared with it.")
    ],
    since: Annotated[str | None, typer.Option("--since", help="This cluster's jobs since; default 30d.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="FILE", help="A trace file instead.")] = None,
    partition: complete.PartitionOption = None,
    json: output.JsonOption = False,
) -> None:
    """Replay two policies on the same jobs: mean JCT and its confidence interval."""
    from gpusched.client.policy import compare as ask
    from gpusched.views.policy import verdict_table

    with output.progress("replaying") as advance:
        found = ask(Client(), first, second, since=since, trace=trace, partition=partition, advance=advance)
    if json:
        output.emit_json(found)
    else:
        output.print_rich(verdict_table(found))
        for verdict in found:
            output.print_line(f"{verdict.partition}: {verdict.line}")


@app.command("shadow")
def shadow(
    policy: Annotated[
        str | None,
        typer.Argument(
            metavar="[POLICY]", autocompletion=complete.policies, help="Name or file, as in show.", show_default=False
        ),
    ] = None,
    partition: complete.PartitionOption = None,
    off: Annotated[bool, typer.Option("--off", help="Stop shadowing.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Record what a policy would decide next to the live one, without touching a job."""
    from gpusched.client.policy import shadow as ask

    _request(ask, policy, partition, off)


@app.command("promote")
def promote(
    policy: _Policy,
    partition: complete.PartitionOption = None,
    force: Annotated[
        str | None, typer.Option("--force", metavar="REASON", help="Promote without proof, for this reason.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Evaluate on jobs since; default 30d.")] = None,
    mode: Annotated[
        SlurmMode | None,
        typer.Option("--mode", help="Under Slurm: observe, advise through priorities, or decide what starts where."),
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Make a policy live, if a replay of held-out days proves it no worse than the live one."""
    from gpusched.client.policy import promote as ask

    _request(ask, policy, partition, force, since, mode)


@app.command("rollback")
def rollback(
    reason: Annotated[str | None, typer.Argument(metavar="[REASON]", help="Why.", show_default=False)] = None,
    partition: complete.PartitionOption = None,
    json: output.JsonOption = False,
) -> None:
    """Return to the previous live policy."""
    from gpusched.client.policy import rollback as ask

    _request(ask, partition, reason)


@app.command("history")
def history(
    partition: complete.PartitionOption = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many entries.")] = 50,
    json: output.JsonOption = False,
) -> None:
    """List every change of the live policies: who, when, why, which versions."""
    from gpusched.client.policies import history as changes
    from gpusched.views.policy import change_table

    found = changes(Client(), partition, number)
    output.show(lambda: found, lambda: change_table(found))


def _request(ask: Callable[..., PolicyResult], *given: object) -> None:
    """Send the request and print it; the controller carries it out in its next cycle."""
    client = Client()
    result = ask(client, *given)
    if output.json_mode():
        output.emit_json(result)
        return
    for verdict in result.verdicts:
        output.print_line(f"{verdict.partition}: {verdict.line}")
    target = f"{result.policy} in " if result.policy else ""
    mode = f", mode {result.mode}" if result.mode else ""
    warning = client.controller_warning()
    when = "" if warning else "; it takes effect in the controller's next cycle"
    output.print_line(f"{result.what} requested: {target}{', '.join(result.partitions)}{mode}{when}")
    if warning:
        output.note(warning)
        if result.hint:
            output.note(result.hint)
