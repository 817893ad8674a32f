"""``gpusched replay``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import activity, complete, output
from gpusched.cli.together import is_given, refuse_inputs, refuse_others
from gpusched.errors import UsageError

if TYPE_CHECKING:
    from gpusched.study.study import StudyOutcome

app = typer.Typer()


class FigureGrouping(StrEnum):
    """The additional figures: per user or per group."""

    USER = "user"
    GROUP = "group"


@app.command("replay")
def replay(
    context: typer.Context,
    traces: Annotated[
        list[str] | None, typer.Argument(metavar="[TRACE...]", help="Trace files; default: this cluster's own history.")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="FILE", help="YAML of all that follows; other options take precedence."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "-P", "--policy", autocompletion=complete.replays, help="A policy's name or file; ORDER+BACKFILL: f1+easy."
        ),
    ] = None,
    format: Annotated[str | None, typer.Option("--format", help="The traces' format; default: detected.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Number of identical nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="GPUs per node; default 8.")
    ] = None,
    inventory: Annotated[
        str | None, typer.Option("--inventory", metavar="FILE", help="The nodes of this inventory.yaml.")
    ] = None,
    node_list: Annotated[
        str | None,
        typer.Option("--node-list", metavar="FILE", help="The nodes of this CSV: sn,cpu_milli,memory_mib,gpu,model."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="FILE", help="YAML of switches: jobs that share links slow down."),
    ] = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu-type", help="GPU type of these nodes: V100.")] = None,
    profiles: Annotated[
        list[str] | None, typer.Option("--profiles", metavar="FILE", help="Measured speeds: a file or folder of them.")
    ] = None,
    reference_gpu_type: Annotated[
        str | None,
        typer.Option("--reference-gpu-type", help="GPU type on which the trace was recorded; default: the profile's."),
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="GPU sharing: auto (fractions, if jobs request them), no, fractions, pairs.")
    ] = "auto",
    resizable: Annotated[
        str | None, typer.Option("--resizable", help="GPU counts that sizing policies may choose: 1-8.")
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option("--cpus", help="With --resizable: CPU cores: 2-12; default: in proportion to the GPUs."),
    ] = None,
    mem: Annotated[str | None, typer.Option("--mem", help="With --resizable: memory: 16G-64G.")] = None,
    load: Annotated[
        float | None, typer.Option("--load", help="Offered load: chooses the number of nodes; with nodes, the pace.")
    ] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    placement: Annotated[str | None, typer.Option("--placement", help="Override the policy's own.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Jobs submitted since: 30d, 2017-10-01.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Jobs submitted before.")] = None,
    estimates: Annotated[
        str | None, typer.Option("--estimates", help="Of run times: `history` (the default), or `last-two`.")
    ] = None,
    limits: Annotated[bool, typer.Option("--limits", help="Jobs end at their time limits.")] = False,
    restart: Annotated[str, typer.Option("--restart", help="Cost of a job restart: 30s, 5m.")] = "0s",
    restart_costs: Annotated[
        str | None,
        typer.Option(
            "--restart-costs", metavar="FILE", help="CSV model,restart_s: restarts by model; others as --restart."
        ),
    ] = None,
    backfill_every: Annotated[
        str, typer.Option("--backfill-every", help="Backfill interval: 30s (Slurm's bf_interval).")
    ] = "0s",
    outages: Annotated[
        str | None, typer.Option("--outages", metavar="FILE", help="CSV node,start,end,drain of failing nodes.")
    ] = None,
    reservations: Annotated[
        str | None,
        typer.Option(
            "--reservations", metavar="FILE", help="CSV node,start,end of planned maintenance, replacing recorded ones."
        ),
    ] = None,
    quotas: Annotated[
        bool | None,
        typer.Option(
            "--quotas/--no-quotas", help="Apply the inventory's user, group and class limits; default: own history."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", min=0, help="Random seed; several: one replay each.")
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=0, help="Worker processes; 0: automatic.")] = 0,
    backend: Annotated[str | None, typer.Option("--backend", help="A Dask or Ray cluster: dask://HOST:PORT.")] = None,
    power: Annotated[
        str | None, typer.Option("--power", metavar="FILE", help="YAML of idle and busy watts by GPU type and node.")
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
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")] = False,
    json: output.JsonOption = False,
) -> int | None:
    """Simulate a workload under other policies: JCT, waiting, utilization, energy.

    Replays traces, or without one this cluster's own history (--since 30d), and prints one line per policy.
    """
    if nightly:
        if traces or policy or scenario:
            raise UsageError("--nightly replays this cluster's history under every policy", "omit the other arguments")
        refuse_others(context, "--nightly", "since", "fail_if_worse", "jobs", "auto_retrain")
        return _nightly(since or "1d", fail_if_worse, jobs, auto_retrain, json)
    if fail_if_worse is not None or auto_retrain:
        option = "--auto-retrain" if auto_retrain else "--fail-if-worse"
        raise UsageError(f"{option} needs --nightly", "add --nightly")
    if schedule_out is not None and schedule_out == html:
        raise UsageError("--schedule-out and --html name one file", "choose two")
    sources = [
        *(traces or ()), *(profiles or ()), scenario, inventory, node_list, topology, restart_costs, outages,
        reservations, power,
    ]  # fmt: skip
    refuse_inputs("--schedule-out", schedule_out, sources)
    refuse_inputs("--html", html, sources)
    from gpusched.model.units import parse_duration
    from gpusched.study import request as service

    def seconds(option: str, text: str) -> float:
        try:
            return float(parse_duration(text)) if text not in ("0", "0s") else 0.0
        except ValueError:
            raise UsageError(f"{option} {text!r} is not a time", "for example 30s") from None

    request = service.ReplayRequest(
        traces=tuple(traces or ()), policies=tuple(policy or ()), format=format, nodes=nodes,
        gpus_per_node=gpus_per_node, inventory=inventory, load=load, vc=vc, placement=placement, since=since,
        until=until, limits=limits, restart_s=seconds("--restart", restart), outages=outages, reservations=reservations,
        seeds=tuple(seed or ()), workers=jobs, backend=backend, power=power, strict=strict, estimates=estimates,
        profiles=tuple(profiles or ()), reference_gpu_type=reference_gpu_type, gpu_type=gpu_type,
        node_list=node_list, share=share, resizable=resizable, cpus=cpus, mem=mem, restart_costs=restart_costs,
        topology=topology, backfill_every_s=seconds("--backfill-every", backfill_every), quotas=quotas,
    )  # fmt: skip
    if scenario is not None:
        from gpusched.study.scenario import load_scenario, with_options

        defaults = {"share": "share", "restart": "restart_s", "backfill_every": "backfill_every_s"}
        given = [field for option, field in defaults.items() if is_given(context, option)]
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
