"""``gpusched status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpusched.cli import complete, output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client
from gpusched.client.jobs import Query, listing, parse_states
from gpusched.views.jobs import job_dict, status_screen

if TYPE_CHECKING:
    from rich.console import Group

app = typer.Typer()


@app.command("status", help="The queue: jobs, their states, where they run and why they wait.")
def status(
    context: typer.Context,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]...", autocompletion=complete.all_jobs, show_default=False)
    ] = None,
    user: Annotated[str | None, typer.Option("-u", "--user", metavar="USER", help="Only this user's.")] = None,
    partition: complete.PartitionOption = None,
    state: Annotated[
        list[str] | None, typer.Option("-s", "--state", autocompletion=complete.states, help="Only in these states.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs, ended ones included.")] = False,
    since: Annotated[str | None, typer.Option("--since", help="Jobs that ended since: 90, 2h, 7d.")] = None,
    number: Annotated[int | None, typer.Option("-n", help="How many ended jobs to show; default 10.", min=0)] = None,
    watch: output.WatchOption = False,
    json: output.JsonOption = False,
) -> None:
    """List jobs."""
    if jobs:
        refuse_others(context, "JOB", "jobs", "user", "partition", "state", "everything", "watch")
    query = Query(
        jobs=tuple(jobs or ()),
        user=user,
        partition=partition,
        states=parse_states(state or ()),
        ended=-1 if everything and number is None else number,
        window_s=_window_s(since),
    )
    client = Client()

    def screen() -> Group:
        client.reopen()
        return status_screen(listing(client, query, for_people=True), output.screen_width())

    def data() -> list[dict[str, Any]]:
        found = listing(client, query, for_people=False)
        return [
            job_dict(
                j,
                found.now,
                found.energies.get(j.id),
                found.fallbacks,
                found.progress.get(j.id),
                found.partners.get(j.id),
                found.slower.get(j.id),
            )
            for j in found.jobs
        ]

    output.show(data, screen, watch)


def _window_s(since: str | None) -> int | None:
    if since is None:
        return None
    from gpusched.client.options import duration

    return duration("--since", since)
