"""``gpusched policy``: which policies there are, who is in charge, and changing that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client
from gpusched.model.slurm import SlurmMode

if TYPE_CHECKING:
    from gpusched.client.policy import Asked

app = output.group("policy", "Who decides: policies listed, compared, tried in the shadow, promoted, rolled back.")
_Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", autocompletion=complete.policies, help="A name, NAME@VERSION, a file or a folder."
    ),
]


@app.command("list")
def list_(json: output.JsonOption = False) -> None:
    """All policies: in charge, in the shadow, candidates, and those that were in charge."""
    from gpusched.client.policies import rows
    from gpusched.views.policy import table

    found = rows(Client())
    output.show(lambda: found, lambda: table(found))


@app.command("show")
def show(policy: _Policy, json: output.JsonOption = False) -> None:
    """One policy: how it decides, its training card, and what it would have done in the shadow."""
    from gpusched.client.policies import page
    from gpusched.views.policy import page_dict, page_screen

    found = page(Client(), policy)
    output.show(lambda: page_dict(found), lambda: page_screen(found))


@app.command("compare")
def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", autocompletion=complete.policies, help="What is compared against.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", autocompletion=complete.policies, help="The other one.")],
    since: Annotated[str | None, typer.Option("--since", help="This cluster's jobs since: 30d; the usual.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="A trace file in place of them.")] = None,
    partition: complete.PartitionOption = None,
    json: output.JsonOption = False,
) -> None:
    """Replay two policies on the same jobs: mean JCT, and how sure the difference is."""
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
        typer.Argument(metavar="[POLICY]", autocompletion=complete.policies, help="As in show.", show_default=False),
    ] = None,
    partition: complete.PartitionOption = None,
    off: Annotated[bool, typer.Option("--off", help="Ask it no more.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Let a policy decide beside the live one without touching a job; what it would have done is recorded."""
    from gpusched.client.policy import shadow as ask

    _ask(ask, policy, partition, off)


@app.command("promote")
def promote(
    policy: _Policy,
    partition: complete.PartitionOption = None,
    force: Annotated[str | None, typer.Option("--force", metavar="REASON", help="Without proof, and why.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Judge by jobs since: 30d; the usual.")] = None,
    mode: Annotated[
        SlurmMode | None,
        typer.Option("--mode", help="Under Slurm: only observe, advise by priorities, or decide what starts where."),
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Put a policy in charge, if a replay of days it has not learned from proves it no worse than the live one."""
    from gpusched.client.policy import promote as ask

    _ask(ask, policy, partition, force, since, mode)


@app.command("rollback")
def rollback(
    reason: Annotated[str | None, typer.Argument(metavar="[REASON]", help="Why.", show_default=False)] = None,
    partition: complete.PartitionOption = None,
    json: output.JsonOption = False,
) -> None:
    """Put the policy back in charge that was before."""
    from gpusched.client.policy import rollback as ask

    _ask(ask, partition, reason)


@app.command("history")
def history(
    partition: complete.PartitionOption = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 50,
    json: output.JsonOption = False,
) -> None:
    """Every change of the live policies: who, when, why, from which version to which."""
    from gpusched.client.policies import history as changes
    from gpusched.views.policy import change_table

    found = changes(Client(), partition, number)
    output.show(lambda: found, lambda: change_table(found))


def _ask(ask: Callable[..., Asked], *given: object) -> None:
    """Ask, and say what for; the controller does it in its next cycle."""
    client = Client()
    asked = ask(client, *given)
    if output.json_mode():
        output.emit_json(asked)
        return
    for verdict in asked.verdicts:
        output.print_line(f"{verdict.partition}: {verdict.line}")
    named = f"{asked.policy} in " if asked.policy else ""
    mode = f", mode {asked.mode}" if asked.mode else ""
    output.print_line(f"{asked.what} requested: {named}{', '.join(asked.partitions)}{mode}")
    if warning := client.controller_warning():
        output.note(warning)
        if asked.hint:
            output.note(asked.hint)
