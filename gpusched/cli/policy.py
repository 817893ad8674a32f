"""``gpusched policy``: which policies there are, who is in charge, and changing that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import complete, output

if TYPE_CHECKING:
    from gpusched.client.context import Client
    from gpusched.client.policy import Asked

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="policy", context_settings=_HELP, rich_markup_mode=None, invoke_without_command=True, add_completion=False,
    help="Who decides: policies listed, compared, tried in the shadow, promoted, rolled back.",
)  # fmt: skip

_Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", autocompletion=complete.policies, help="A name, NAME@VERSION, a file or a folder."
    ),
]
_Partition = Annotated[
    str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="In this partition.")
]


@app.callback()
def _help_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        output.print_line(context.get_help())


@app.command("list", context_settings=_HELP)
def list_(json: output.JsonOption = False) -> None:
    """All policies: in charge, in the shadow, candidates, and those that were in charge."""
    from gpusched.client.context import Client
    from gpusched.client.policies import rows
    from gpusched.views.policy import table

    found = rows(Client())
    if json:
        output.emit_json(found)
    else:
        output.print_rich(table(found))


@app.command("show", context_settings=_HELP)
def show(policy: _Policy, json: output.JsonOption = False) -> None:
    """One policy: how it decides, its training card, and what it would have done in the shadow."""
    from gpusched.client.context import Client
    from gpusched.client.policies import page
    from gpusched.views.policy import page_dict, page_screen

    found = page(Client(), policy)
    if json:
        output.emit_json(page_dict(found))
    else:
        output.print_rich(page_screen(found))


@app.command("compare", context_settings=_HELP)
def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", autocompletion=complete.policies, help="What is compared against.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", autocompletion=complete.policies, help="The other one.")],
    since: Annotated[str | None, typer.Option("--since", help="This cluster's jobs since: 30d; the usual.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="A trace file in place of them.")] = None,
    partition: _Partition = None,
    json: output.JsonOption = False,
) -> None:
    """Replay two policies on the same jobs: mean JCT, and how sure the difference is."""
    from gpusched.client.context import Client
    from gpusched.client.policy import compare as ask
    from gpusched.views.policy import verdict_table

    found = ask(Client(), first, second, since=since, trace=trace, partition=partition)
    if json:
        output.emit_json(found)
    else:
        output.print_rich(verdict_table(found))
        for verdict in found:
            output.print_line(f"{verdict.partition}: {verdict.line}")


@app.command("shadow", context_settings=_HELP)
def shadow(
    policy: Annotated[
        str | None,
        typer.Argument(metavar="[POLICY]", autocompletion=complete.policies, help="As in show.", show_default=False),
    ] = None,
    partition: _Partition = None,
    off: Annotated[bool, typer.Option("--off", help="Ask it no more.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Let a policy decide beside the live one without touching a job; what it would have done is recorded."""
    from gpusched.client import policy as client
    from gpusched.client.context import Client

    opened = Client()
    _say(client.shadow(opened, policy, partition, off), opened, json)


@app.command("promote", context_settings=_HELP)
def promote(
    policy: _Policy,
    partition: _Partition = None,
    force: Annotated[str | None, typer.Option("--force", metavar="REASON", help="Without proof, and why.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Judge by jobs since: 30d; the usual.")] = None,
    json: output.JsonOption = False,
) -> None:
    """Put a policy in charge, if a replay of days it has not learned from proves it no worse than the live one."""
    from gpusched.client import policy as client
    from gpusched.client.context import Client

    opened = Client()
    _say(client.promote(opened, policy, partition, force, since), opened, json)


@app.command("rollback", context_settings=_HELP)
def rollback(
    reason: Annotated[str | None, typer.Argument(metavar="[REASON]", help="Why.", show_default=False)] = None,
    partition: _Partition = None,
    json: output.JsonOption = False,
) -> None:
    """Put the policy back in charge that was before."""
    from gpusched.client import policy as client
    from gpusched.client.context import Client

    opened = Client()
    _say(client.rollback(opened, partition, reason), opened, json)


@app.command("history", context_settings=_HELP)
def history(
    partition: _Partition = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 50,
    json: output.JsonOption = False,
) -> None:
    """Every change of the live policies: who, when, why, from which version to which."""
    from gpusched.client.context import Client
    from gpusched.client.policies import history as changes
    from gpusched.views.policy import change_table

    found = changes(Client(), partition, number)
    if json:
        output.emit_json(found)
    else:
        output.print_rich(change_table(found))


def _say(asked: Asked, client: Client, json: bool) -> None:
    """What was asked for; the controller does it in its next cycle."""
    if json:
        output.emit_json(asked)
        return
    for verdict in asked.verdicts:
        output.print_line(f"{verdict.partition}: {verdict.line}")
    named = f"{asked.policy} in " if asked.policy else ""
    output.print_line(f"{asked.what} requested: {named}{', '.join(asked.partitions)}")
    if warning := client.controller_warning():
        output.note(warning)
