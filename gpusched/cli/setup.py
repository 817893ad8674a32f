"""``gpusched init``, ``gpusched check`` and ``gpusched flavors``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gpusched.cli import activity, complete, output
from gpusched.cli.together import refuse_others
from gpusched.client.context import Client
from gpusched.errors import UsageError
from gpusched.model.units import count_of

app = typer.Typer()


@app.command("init")
def init(
    context: typer.Context,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST", help="[user@]host[:port]; ranges such as dgx[1-4].", show_default=False),
    ] = None,
    path: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")] = Path(
        "inventory.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    user: Annotated[str | None, typer.Option("--user", help="Login user.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, show_default=False, help="SSH port.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="FILE", help="Private key file.", show_default=False)
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            show_default=False,
            help="Import switches: what ibnetdiscover prints, Slurm's topology.conf or topology.yaml.",
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Read nodes, partitions and limits from Slurm; Slurm is not changed.")
    ] = False,
    ssh: Annotated[bool, typer.Option("--ssh/--no-ssh", help="With --slurm: probe its nodes over SSH, or not.")] = True,
    json: output.JsonOption = False,
) -> int:
    """Probe servers and write an inventory.yaml to review. Nothing is changed on them.

    Exits 1 if a server could not be probed; the others are written. With --topology and without
    hosts, the topology: section is printed, for an existing inventory.yaml.
    """
    from msgspec.structs import replace

    from gpusched.bootstrap import (
        Discovered,
        discover,
        inventory_text,
        known_names,
        parse_hosts,
        refuse_existing,
        topology_text,
        write_inventory,
    )
    from gpusched.config.fabric import import_topology
    from gpusched.views.check import host_json, host_line

    switches = import_topology(topology) if topology is not None else None  # its errors come first
    if not ssh and not slurm:
        raise UsageError("--no-ssh needs --slurm", "without it the nodes are probed over SSH")
    if switches is not None and not hosts and not slurm:
        refuse_others(context, "--topology", "hosts")
        if json:
            output.emit_json(switches)
        else:
            output.print_line(topology_text(switches).rstrip())
        return 0
    if slurm:
        if hosts:
            raise UsageError("--slurm uses the hosts that Slurm names", "omit HOSTS")
        return _init_slurm(path, force=force, ssh=ssh, user=user, port=port, key=key, topology=topology)
    targets = [replace(host, port=host.port or port) for host in parse_hosts(hosts or ())]
    if not force:
        refuse_existing(path)
    outcomes = discover(targets, user=user, key=key, on_progress=lambda _, found: output.note(host_line(found)))
    if topology is not None and switches is not None:
        known = switches.racks()
        switches = import_topology(topology, known_names(outcomes))
        output.note(f"{topology}: {len(switches.racks())} of {count_of(len(known), 'node')} found among these hosts")
    write_inventory(path, inventory_text(outcomes, user=user, key=key, topology=switches), force=force)
    if json:
        output.emit_json({"path": str(path), "hosts": [host_json(outcome) for outcome in outcomes]})
    else:
        output.print_line(f"wrote {path}; review it, then run 'gpusched check'")
    return 0 if all(isinstance(outcome, Discovered) for outcome in outcomes) else 1


def _init_slurm(
    path: Path, *, force: bool, ssh: bool, user: str | None, port: int | None, key: str | None, topology: Path | None
) -> int:
    """Write the inventory of a Slurm site."""
    from gpusched.bootstrap import refuse_existing, write_inventory
    from gpusched.bootstrap.slurm import ask_nodes, choose, inventory_of_site, read_site, without_ssh
    from gpusched.config.fabric import import_topology
    from gpusched.slurm.commands import Slurm
    from gpusched.views.check import host_json, host_line

    if not force:
        refuse_existing(path)
    site = read_site(Slurm())
    chosen = choose(site)
    answers = ask_nodes(chosen, user, port, key, lambda found: output.note(host_line(found))) if ssh else {}
    switches = import_topology(topology, lambda name: name) if topology is not None else None
    text = inventory_of_site(site, chosen, answers, user=user, port=port, key=key, topology=switches)
    write_inventory(path, text, force=force)
    for note in (*chosen.notes, *without_ssh(chosen, answers)):
        output.note(note)
    if output.json_mode():
        output.emit_json({"path": str(path), "hosts": [host_json(answer) for answer in answers.values()]})
    else:
        output.print_line(f"wrote {path}; review it, then run 'gpusched check'")
    return 0


@app.command("check")
def check(
    names: complete.NodesArgument = None,
    json: output.JsonOption = False,
) -> int:
    """Check everything end to end and say what to fix; exits 1 on a failure."""
    from gpusched.doctor import Finding, examine, worst
    from gpusched.views.check import findings_screen, summary

    def show(findings: list[Finding]) -> None:
        if not json:
            output.print_rich(findings_screen(findings))

    def progress(done: int, total: int) -> None:
        activity.update("examining nodes", done, total)

    findings = examine(nodes=names or (), on_findings=show, on_progress=progress)
    output.show(lambda: findings, lambda: summary(findings))
    return 1 if worst(findings) == "fail" else 0


@app.command("flavors")
def flavors(
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Only this partition.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Resource bundles that can be requested by name, and how many are free now."""
    from gpusched.client.overview import cluster_rows, flavor_rows
    from gpusched.views.nodes import flavors_screen

    client = Client()
    nodes = cluster_rows(client.reader, client.inventory, time.time(), partition=partition)
    rows = flavor_rows(client.inventory, nodes, partition)
    output.show(lambda: rows, lambda: flavors_screen(rows, client.inventory.default_partition))
