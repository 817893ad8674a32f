"""``gpusched init``, ``gpusched check`` and ``gpusched flavors``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.client.context import Client

app = typer.Typer()


@app.command("init")
def init(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST", help="[user@]host[:port]; ranges such as dgx[1-4].", show_default=False),
    ] = None,
    path: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("inventory.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    user: Annotated[str | None, typer.Option("--user", help="Who logs in.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, show_default=False, help="SSH port.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Private key file.", show_default=False)] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            show_default=False,
            help="Import switches: what ibnetdiscover prints, Slurm's topology.conf or topology.yaml.",
        ),
    ] = None,
    json: output.JsonOption = False,
) -> int:
    """Ask servers what they are and write an inventory.yaml to look over. Changes nothing on them.

    Exits 1 when one of them could not be asked; the others are in the file all the same. With --topology and without
    hosts, the section topology: is printed, to be put into an inventory.yaml that is there already.
    """
    from msgspec.structs import replace

    from gpusched.bootstrap import (
        Discovered,
        discover,
        inventory_text,
        names_here,
        parse_hosts,
        refuse_existing,
        topology_text,
        write_inventory,
    )
    from gpusched.config.fabric import import_topology
    from gpusched.views.check import host_json, host_line

    drawn = import_topology(topology) if topology is not None else None  # what is wrong with it is told before all else
    if drawn is not None and not hosts:
        if json:
            output.emit_json(drawn)
        else:
            output.print_line(topology_text(drawn).rstrip())
        return 0
    asked = [replace(host, port=host.port or port) for host in parse_hosts(hosts or ())]
    if not force:
        refuse_existing(path)
    outcomes = discover(asked, user=user, key=key, on_progress=lambda _, found: output.note(host_line(found)))
    if topology is not None and drawn is not None:
        known = drawn.racks()
        drawn = import_topology(topology, names_here(outcomes))
        output.note(f"{topology}: {len(drawn.racks())} of its {len(known)} nodes are among these hosts")
    write_inventory(path, inventory_text(outcomes, user=user, key=key, topology=drawn), force=force)
    if json:
        output.emit_json({"path": str(path), "hosts": [host_json(outcome) for outcome in outcomes]})
    else:
        output.print_line(f"wrote {path}; look it over, then run 'gpusched check'")
    return 0 if all(isinstance(outcome, Discovered) for outcome in outcomes) else 1


@app.command("check")
def check(
    names: complete.NodesArgument = None,
    json: output.JsonOption = False,
) -> int:
    """Examine everything end to end and say what to do; exits 1 when something must be mended."""
    from gpusched.doctor import Finding, examine, worst
    from gpusched.views.check import findings_screen, summary

    def show(findings: list[Finding]) -> None:
        if not json:
            output.print_rich(findings_screen(findings))

    findings = examine(nodes=names or (), on_findings=show)
    output.show(lambda: findings, lambda: summary(findings))
    return 1 if worst(findings) == "fail" else 0


@app.command("flavors")
def flavors(
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Of this partition.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """What can be asked for by name, and how much of it is free now."""
    from gpusched.client.overview import cluster_rows, flavor_rows
    from gpusched.views.nodes import flavors_screen

    client = Client()
    nodes = cluster_rows(client.reader, client.inventory, time.time(), partition=partition)
    rows = flavor_rows(client.inventory, nodes, partition)
    output.show(lambda: rows, lambda: flavors_screen(rows))
