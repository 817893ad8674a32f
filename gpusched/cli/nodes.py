"""``gpusched nodes``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpusched.model.reports import FailureRow, NodeRow, TopologyReport

app = typer.Typer()


@app.command("nodes")
def nodes(
    names: complete.NodesArgument = None,
    partition: complete.PartitionOption = None,
    gpus: Annotated[bool, typer.Option("-g", "--gpus", help="One line per GPU.")] = False,
    topology: Annotated[
        bool, typer.Option("--topology", help="The tree of switches; with -g also the GPUs and NICs.")
    ] = False,
    failures: Annotated[
        bool, typer.Option("--failures", help="Failures of 30 days against those of the same jobs elsewhere; -g: all.")
    ] = False,
    watch: output.WatchOption = False,
    json: output.JsonOption = False,
) -> None:
    """Nodes and their GPUs: free, in use, faulty."""
    from gpusched.client.overview import cluster_rows, topology_report
    from gpusched.views.nodes import nodes_json, nodes_screen

    client = Client()

    def rows() -> tuple[NodeRow, ...]:
        return cluster_rows(client.reader, client.inventory, time.time(), names=names or (), partition=partition)

    def screen() -> RenderableType:
        client.reopen()
        return nodes_screen(
            rows(), output.console().width, detail=gpus, warning=client.controller_warning(),
            default=client.inventory.default_partition,
        )  # fmt: skip

    def tree() -> TopologyReport:
        return topology_report(client.reader, client.inventory, names=names or (), partition=partition)

    def tree_screen() -> RenderableType:
        from gpusched.views.topology import topology_screen

        client.reopen()
        return topology_screen(tree(), detail=gpus)

    def failure_rows() -> list[FailureRow]:
        from gpusched.client.overview import failures_report

        return failures_report(client.reader, client.inventory, time.time(), names=names or (), partition=partition)

    def failures_screen() -> RenderableType:
        from gpusched.accounting.failures import DAYS
        from gpusched.views.failures import failures_screen

        client.reopen()
        return failures_screen(failure_rows(), DAYS, everything=gpus)

    if failures:
        from gpusched.views.failures import failures_json

        output.show(lambda: failures_json(failure_rows()), failures_screen, watch)
        return
    if topology:
        output.show(tree, tree_screen, watch)
        return
    output.show(lambda: nodes_json(rows()), screen, watch)
