"""``gpusched train``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import activity, complete, output

if TYPE_CHECKING:
    from gpusched.agents.common.request import TrainingReport

app = typer.Typer()


@app.command("train")
def train(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", autocompletion=complete.agents, help="Name or file of a policy with an agent."
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            "-p", "--partition", autocompletion=complete.partitions, help="Only this partition; default: all."
        ),
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Train on this log.")] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            "--generate",
            metavar="FILE",
            help="Train on workloads generated from this description (of 'trace fit').",
        ),
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Jobs submitted since: 30d, 2017-10-01.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Jobs submitted before.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="Trace format; default: detected.")] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    load: Annotated[float | None, typer.Option("--load", help="Offered load, as in 'replay'.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Number of identical nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="GPUs per node; default 8.")
    ] = None,
    inventory: Annotated[
        str | None, typer.Option("--inventory", metavar="FILE", help="The nodes of this inventory.yaml.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", min=0, help="Random seeds: one agent each, the best is kept; default 0."),
    ] = None,
    hold_out: Annotated[float, typer.Option("--hold-out", help="Fraction of the time held out for evaluation.")] = 0.2,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Folder of the weights; default: beside the site's policy."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu; cuda for dl2 and the paper variants of gist.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Train even on too few jobs.")] = False,
    keep_anyway: Annotated[
        bool,
        typer.Option("--keep-anyway", help="Save weights even if they are worse."),
    ] = False,
    json: output.JsonOption = False,
) -> int:
    """Train a policy's agent (mostly a linear rule), one per partition, and evaluate it.

    Weights that are worse on held-out jobs than their untrained start, or than the best rule with the same information,
    are not saved (exit code 1).

    Trains on a trace, a description, or this cluster's last 30 days (its flavors if there are none yet).
    Started again after an interruption, it resumes from its last checkpoint.
    """
    from gpusched.agents.common import request as service
    from gpusched.agents.training.train import not_saved
    from gpusched.agents.training.train import train as trained
    from gpusched.views.training import screen

    request = service.TrainRequest(
        policy=policy, partition=partition, trace=trace, generate=generate, format=format, vc=vc, since=since,
        until=until, load=load, nodes=nodes, gpus_per_node=gpus_per_node, inventory=inventory,
        seeds=tuple(seed or (0,)), hold_out=hold_out, out=out, device=device, force=force,
        keep_anyway=keep_anyway,
    )  # fmt: skip
    with progress() as report:
        outcomes = trained(request, report)
    output.show(lambda: outcomes, lambda: screen(outcomes))
    error = not_saved(outcomes)
    if error is None:
        return 0
    if not output.json_mode():
        raise error
    output.warn(error.line())  # raised, it would be a second JSON value
    return error.exit_code


@contextmanager
def progress() -> Iterator[TrainingReport]:
    """Show reward, utilization and time left as a progress bar on stderr; without a terminal print notes."""
    from gpusched.agents.common.request import TrainingReport

    if output.json_mode() or not sys.stderr.isatty():
        yield TrainingReport(note=output.note)
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from gpusched.views.training import PROGRESS, progress_fields

    activity.stop()
    columns = [*Progress.get_default_columns()[:-1], TextColumn(PROGRESS)]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def show(update: object) -> None:
            fields = progress_fields(update)  # type: ignore[arg-type]
            name = fields.pop("description")
            if name not in tasks:
                tasks[name] = bar.add_task(name, **fields)
            bar.update(tasks[name], **fields)

        yield TrainingReport(show=show, note=lambda line: bar.console.print(output.printable(line), markup=False))
