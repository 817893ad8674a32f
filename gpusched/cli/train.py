"""``gpusched train``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import activity, complete, output

if TYPE_CHECKING:
    from gpusched.agents.common.request import Report

app = typer.Typer()


@app.command("train")
def train(
    policy: Annotated[
        str,
        typer.Argument(metavar="POLICY", autocompletion=complete.agents, help="A policy with an agent: name or file."),
    ],
    partition: Annotated[
        str | None,
        typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Only this one; else all."),
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Learn from this log.")] = None,
    generate: Annotated[
        str | None, typer.Option("--generate", help="Learn from draws of this description (YAML, as 'trace fit').")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Jobs submitted since: 30d, 2017-10-01.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="And before.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="The trace's format; else guessed.")] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster of the trace.")] = None,
    load: Annotated[float | None, typer.Option("--load", help="Offered load, as in 'replay'.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Number of identical nodes.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of each; else 8.")] = None,
    inventory: Annotated[str | None, typer.Option("--inventory", help="The partitions of this inventory.yaml.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", min=0, help="More than one: each is trained, the best kept; else 0.")
    ] = None,
    hold_out: Annotated[float, typer.Option("--hold-out", help="Part of the time to judge by, not learn from.")] = 0.2,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder of the weights; else beside the site's policy.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Learn from too few jobs, too.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Train a policy's agent (mostly a linear rule), one per partition; say what decides in it and how good it is.

    Learns from a trace, a description, or else this cluster's own last 30 days (where there are none yet, its flavors).
    Killed and called again, it goes on from its last checkpoint.
    """
    from gpusched.agents.common import request as service
    from gpusched.agents.training.train import train as trained
    from gpusched.views.training import screen

    asked = service.TrainRequest(
        policy=policy, partition=partition, trace=trace, generate=generate, format=format, vc=vc, since=since,
        until=until, load=load, nodes=nodes, gpus_per_node=gpus_per_node, inventory=inventory,
        seeds=tuple(seed or (0,)), hold_out=hold_out, out=out, device=device, force=force,
    )  # fmt: skip
    with progress() as report:
        made = trained(asked, report)
    output.show(lambda: made, lambda: screen(made))


@contextmanager
def progress() -> Iterator[Report]:
    """A bar on stderr with reward, utilization and time left, for people; sentences as notes."""
    from gpusched.agents.common.request import Report

    if output.json_mode() or not sys.stderr.isatty():
        yield Report(note=output.note)
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from gpusched.views.training import PROGRESS, progress_fields

    activity.stop()
    columns = [*Progress.get_default_columns()[:-1], TextColumn(PROGRESS)]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def show(of: object) -> None:
            fields = progress_fields(of)  # type: ignore[arg-type]
            name = fields.pop("description")
            if name not in tasks:
                tasks[name] = bar.add_task(name, **fields)
            bar.update(tasks[name], **fields)

        yield Report(show=show, note=lambda line: bar.console.print(output.printable(line), markup=False))
