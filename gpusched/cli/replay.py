"""``gpusched replay``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import activity, output
from gpusched.cli.rows import with_rows
from gpusched.cli.together import is_given, refuse_inputs, refuse_others
from gpusched.errors import UsageError
from gpusched.study.options import ReplayRequest, files_of, rows_of

if TYPE_CHECKING:
    from gpusched.study.study import StudyOutcome

app = typer.Typer()


class FigureGrouping(StrEnum):
    """The additional figures: per user or per group."""

    USER = "user"
    GROUP = "group"


@app.command("replay")
@with_rows(ReplayRequest)
def replay(
    request: ReplayRequest,
    context: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="FILE", help="YAML of these options; those given take precedence."),
    ] = None,
    by: Annotated[FigureGrouping | None, typer.Option("--by", help="Also show each user's or group's share.")] = None,
    schedule_out: Annotated[
        str | None, typer.Option("--schedule-out", metavar="FILE", help="Write job,start,end,nodes as CSV.")
    ] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    nightly: Annotated[
        bool, typer.Option("--nightly", help="Replay every policy; report in the state folder.")
    ] = False,
    fail_if_worse: Annotated[
        float | None,
        typer.Option("--fail-if-worse", min=0, help="With --nightly: exit 1 if the live policy got worse, by %."),
    ] = None,
    auto_retrain: Annotated[
        bool, typer.Option("--auto-retrain", help="With --nightly: retrain the agents as candidates.")
    ] = False,
    json: output.JsonOption = False,
) -> int | None:
    """Simulate a workload under other policies: JCT, waiting, utilization, energy.

    Replays traces, or without one this cluster's own history (--since 30d), and prints one line per policy.
    """
    if nightly:
        if request.traces or request.policies or scenario:
            raise UsageError("--nightly replays this cluster's history under every policy", "omit the other arguments")
        refuse_others(context, "--nightly", "since", "fail_if_worse", "workers", "auto_retrain")
        return _nightly(request.since or "1d", fail_if_worse, request.workers, auto_retrain, json)
    if fail_if_worse is not None or auto_retrain:
        option = "--auto-retrain" if auto_retrain else "--fail-if-worse"
        raise UsageError(f"{option} needs --nightly", "add --nightly")
    if schedule_out is not None and schedule_out == html:
        raise UsageError("--schedule-out and --html name one file", "choose two")
    for option, path in (("--schedule-out", schedule_out), ("--html", html)):
        refuse_inputs(option, path, [*files_of(request), scenario])
    from gpusched.study import request as service

    if scenario is not None:
        from gpusched.study.scenario import load_scenario, with_options

        given = [name for name in rows_of(ReplayRequest) if is_given(context, name)]
        request = with_options(load_scenario(scenario), request, given)
    with output.progress("replaying") as advance:
        outcomes = service.outcomes(request, advance)
    _show(outcomes, by.value if by else None, schedule_out, html)
    return None


def _show(outcomes: list[StudyOutcome], by: str | None, schedule_out: str | None, html: str | None) -> None:
    from gpusched.config.openers import open_output
    from gpusched.study.study import changes, row_of
    from gpusched.views import replay as view

    changed = changes(outcomes)
    if schedule_out is not None:
        for outcome, path in zip(outcomes, view.schedule_paths(outcomes, schedule_out), strict=True):
            with open_output(path) as file:
                view.write_schedule(outcome.result, file)
            output.note(f"schedule written to {path}")
    if html is not None:
        from gpusched.study.html import page

        output.write_page(html, page(outcomes, changed))
    output.show(
        lambda: [row_of(o, c) for o, c in zip(outcomes, changed, strict=True)],
        lambda: view.screen(outcomes, changed, by),
    )


def _nightly(since: str, fail_if_worse: float | None, workers: int, auto_retrain: bool, json: bool) -> int:
    from gpusched.client.context import Client
    from gpusched.nightly.replays import nightly

    client = Client()
    report = nightly(
        client.inventory,
        client.state,
        since,
        workers=max(1, workers),
        auto_retrain=auto_retrain,
        notify=activity.update,
    )
    if json:
        output.emit_json(report.as_json())
    else:
        output.print_line("\n".join((report.verdict, *report.more)))
    return 1 if fail_if_worse is not None and report.worst_loss * 100 > fail_if_worse else 0
