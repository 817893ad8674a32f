"""``gpusched nodes``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from gpusched.cli import complete, output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client

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
    from gpusched.client import overview

    client = Client()
    chosen: dict[str, Any] = {"names": names or (), "partition": partition}
    if failures:
        from gpusched.accounting.failures import DAYS
        from gpusched.views.failures import failures_screen

        refuse_others(context, "--failures", "names", "partition", "gpus", "watch")
        output.show_store(
            client,
            lambda: overview.failures_report(client.reader, client.inventory, time.time(), **chosen),
            lambda rows: failures_screen(rows, DAYS, everything=gpus),
            live=watch,
        )
    elif checks:
        from gpusched.views.healthchecks import checks_json, checks_screen

        refuse_others(context, "--checks", "names", "partition", "watch")
        output.show_store(
            client,
            lambda: overview.check_rows(client.reader, client.inventory, **chosen),
            lambda rows: checks_screen(rows, time.time()),
            checks_json,
            watch,
        )
    elif topology:
        from gpusched.views.topology import topology_screen

        output.show_store(
            client,
            lambda: overview.topology_report(client.reader, client.inventory, **chosen),
            lambda tree: topology_screen(tree, detail=gpus),
            live=watch,
        )
    else:
        from gpusched.views.nodes import nodes_json, nodes_screen

        output.show_store(
            client,
            lambda: overview.cluster_rows(client.reader, client.inventory, time.time(), **chosen),
            lambda rows: nodes_screen(
                rows, output.console().width, detail=gpus, warning=client.controller_warning(),
                default=client.inventory.default_partition,
            ),
            nodes_json,
            watch,
        )  # fmt: skip
