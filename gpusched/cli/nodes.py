"""``gpusched nodes``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gpusched.cli import complete, output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpusched.model.healthchecks import CheckRecord
    from gpusched.model.reports import FailureRow, NodeRow, TopologyReport

app = typer.Typer()


@app.command("nodes")
def nodes(
    context: typer.Context,
    names: complete.NodesArgument = None,
    partition: complete.PartitionOption = None,
    gpus: Annotated[bool, typer.Option("-g", "--gpus", help="One line per GPU.")] = False,
    topology: Annotated[
        bool, typer.Option("--topology", help="The tree of switches; with -g also the GPUs and NICs.")
    ] = False,
    checks: Annotated[bool, typer.Option("--checks", help="Results of the site's own checks.")] = False,
    failures: Annotated[
        bool, typer.Option("--failures", help="Failures of 30 days against those of the same jobs elsewhere; -g: all.")
    ] = False,
    watch: output.WatchOption = False,
    json: output.JsonOption = False,
) -> None:
    """Nodes and their GPUs: free, in use, faulty."""
    client = Client()
    chosen = _Chosen(names or (), partition)
    if failures:
        refuse_others(context, "--failures", "names", "partition", "gpus", "watch")
        _show_failures(client, chosen, gpus, watch)
    elif checks:
        refuse_others(context, "--checks", "names", "partition", "watch")
        _show_checks(client, chosen, watch)
    elif topology:
        _show_topology(client, chosen, gpus, watch)
    else:
        _show_nodes(client, chosen, gpus, watch)


class _Chosen(NamedTuple):
    """The nodes to show; all where nothing is chosen."""

    names: Sequence[str]
    partition: str | None


def _show_nodes(client: Client, chosen: _Chosen, gpus: bool, watch: bool) -> None:
    from gpusched.client.overview import cluster_rows
    from gpusched.views.nodes import nodes_json, nodes_screen

    def rows() -> tuple[NodeRow, ...]:
        return cluster_rows(client.reader, client.inventory, time.time(), **chosen._asdict())

    def screen() -> RenderableType:
        client.reopen()
        return nodes_screen(
            rows(), output.console().width, detail=gpus, warning=client.controller_warning(),
            default=client.inventory.default_partition,
        )  # fmt: skip

    output.show(lambda: nodes_json(rows()), screen, watch)


def _show_topology(client: Client, chosen: _Chosen, gpus: bool, watch: bool) -> None:
    from gpusched.client.overview import topology_report

    def tree() -> TopologyReport:
        return topology_report(client.reader, client.inventory, **chosen._asdict())

    def screen() -> RenderableType:
        from gpusched.views.topology import topology_screen

        client.reopen()
        return topology_screen(tree(), detail=gpus)

    output.show(tree, screen, watch)


def _show_checks(client: Client, chosen: _Chosen, watch: bool) -> None:
    from gpusched.client.overview import check_rows
    from gpusched.views.healthchecks import checks_json, checks_screen

    def rows() -> list[CheckRecord]:
        return check_rows(client.reader, client.inventory, **chosen._asdict())

    def screen() -> RenderableType:
        client.reopen()
        return checks_screen(rows(), time.time())

    output.show(lambda: checks_json(rows()), screen, watch)


def _show_failures(client: Client, chosen: _Chosen, everything: bool, watch: bool) -> None:
    from gpusched.accounting.failures import DAYS
    from gpusched.client.overview import failures_report
    from gpusched.views.failures import failures_json, failures_screen

    def rows() -> list[FailureRow]:
        return failures_report(client.reader, client.inventory, time.time(), **chosen._asdict())

    def screen() -> RenderableType:
        client.reopen()
        return failures_screen(rows(), DAYS, everything=everything)

    output.show(lambda: failures_json(rows()), screen, watch)
