"""``gpusched replay``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import activity, complete, output
from gpusched.errors import UsageError

if TYPE_CHECKING:
    from gpusched.study.study import Outcome

app = typer.Typer()


class By(StrEnum):
    """Whose figures are shown besides."""

    USER = "user"
    GROUP = "group"


@app.command("replay")
def replay(
    traces: Annotated[
        list[str] | None, typer.Argument(metavar="[TRACE...]", help="Trace files; none: this cluster's own history.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "-P", "--policy", autocompletion=complete.replays, help="A policy's name or file; ORDER+BACKFILL: f1+easy."
        ),
    ] = None,
    format: Annotated[str | None, typer.Option("--format", help="The traces' format; else guessed.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Number of identical nodes.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of each; else 8.")] = None,
    inventory: Annotated[str | None, typer.Option("--inventory", help="The nodes of this inventory.yaml.")] = None,
    node_list: Annotated[
        str | None, typer.Option("--node-list", help="The nodes of this CSV: sn,cpu_milli,memory_mib,gpu,model.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="YAML of switches: links that jobs share slow them down.")
    ] = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu-type", help="GPU type of these nodes: V100.")] = None,
    profiles: Annotated[
        list[str] | None, typer.Option("--profiles", help="Measured speeds: a file or folder of them.")
    ] = None,
    recorded_on: Annotated[
        str | None, typer.Option("--recorded-on", help="GPU type the trace's run times are from; else the profile's.")
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="Shared GPUs: auto (fractions, if jobs ask for them), no, fractions, pairs.")
    ] = "auto",
    resizable: Annotated[
        str | None, typer.Option("--resizable", help="GPUs that jobs may be given by policies that choose: 1-8.")
    ] = None,
    cpus: Annotated[
        str | None, typer.Option("--cpus", help="With --resizable: CPU cores, which else go with the GPUs: 2-12.")
    ] = None,
    mem: Annotated[str | None, typer.Option("--mem", help="Likewise memory: 16G-64G.")] = None,
    load: Annotated[
        float | None, typer.Option("--load", help="Offered load: chooses the number of nodes; with nodes, the pace.")
    ] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    placement: Annotated[str | None, typer.Option("--placement", help="In place of the policy's own.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Jobs submitted since: 30d, 2017-10-01.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="And before.")] = None,
    estimates: Annotated[
        str | None, typer.Option("--estimates", help="A trained predictor's file, for policies that go by estimates.")
    ] = None,
    limits: Annotated[bool, typer.Option("--limits", help="Time limits end jobs.")] = False,
    restart: Annotated[str, typer.Option("--restart", help="What a job's restart costs: 30s, 5m.")] = "0s",
    restart_costs: Annotated[
        str | None, typer.Option("--restart-costs", help="CSV model,restart_s: restarts by model; others as --restart.")
    ] = None,
    backfill_every: Annotated[
        str, typer.Option("--backfill-every", help="Backfill looks only so often: 30s (Slurm's bf_interval).")
    ] = "0s",
    outages: Annotated[str | None, typer.Option("--outages", help="CSV node,start,end,drain of failing nodes.")] = None,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="For what draws; more than one: each.")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=0, help="Worker processes; 0: as many as pay.")] = 0,
    backend: Annotated[str | None, typer.Option("--backend", help="A Dask or Ray cluster: dask://HOST:PORT.")] = None,
    power: Annotated[str | None, typer.Option("--power", help="YAML of idle and busy W by GPU type and node.")] = None,
    by: Annotated[By | None, typer.Option("--by", help="Show each user's or group's part, too.")] = None,
    schedule_out: Annotated[
        str | None, typer.Option("--schedule-out", help="Write job,start,end,nodes as CSV.")
    ] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page with plots.")] = None,
    nightly: Annotated[bool, typer.Option("--nightly", help="Every policy; report into the state folder.")] = False,
    fail_if_worse: Annotated[
        float | None, typer.Option("--fail-if-worse", min=0, help="With --nightly: exit 1 if the live policy is, by %.")
    ] = None,
    auto_retrain: Annotated[
        bool, typer.Option("--auto-retrain", help="With --nightly: train the agents anew; leaves candidates.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")] = False,
    json: output.JsonOption = False,
) -> int | None:
    """What a workload would have been under other policies: JCT, waiting, utilization, energy.

    Replays traces, or without one this cluster's own history (--since 30d), and prints one line per policy.
    """
    if nightly:
        if traces or policy:
            raise UsageError("--nightly replays this cluster's history under every policy", "leave out the rest")
        return _nightly(since or "1d", fail_if_worse, jobs, auto_retrain, json)
    if fail_if_worse is not None or auto_retrain:
        option = "--auto-retrain" if auto_retrain else "--fail-if-worse"
        raise UsageError(f"{option} goes with --nightly", "add --nightly")
    from gpusched.model.units import parse_duration
    from gpusched.study import request as service

    def seconds(option: str, text: str) -> float:
        try:
            return float(parse_duration(text)) if text not in ("0", "0s") else 0.0
        except ValueError:
            raise UsageError(f"{option} {text!r} is not a time", "say for example 30s") from None

    request = service.Request(
        traces=tuple(traces or ()), policies=tuple(policy or ()), format=format, nodes=nodes,
        gpus_per_node=gpus_per_node, inventory=inventory, load=load, vc=vc, placement=placement, since=since,
        until=until, limits=limits, restart_s=seconds("--restart", restart), outages=outages,
        seeds=tuple(seed or (0,)), workers=jobs, backend=backend, power=power, strict=strict, estimates=estimates,
        profiles=tuple(profiles or ()), recorded_on=recorded_on, gpu_type=gpu_type, node_list=node_list, share=share,
        resizable=resizable, cpus=cpus, mem=mem, restart_costs=restart_costs, topology=topology,
        backfill_every_s=seconds("--backfill-every", backfill_every),
    )  # fmt: skip
    with output.progress("replaying") as advance:
        outcomes = service.outcomes(request, advance)
    _show(outcomes, by.value if by else None, schedule_out, html)
    return None


def _show(outcomes: list[Outcome], by: str | None, schedule_out: str | None, html: str | None) -> None:
    from gpusched.study.study import changes, row_of
    from gpusched.views import replay as view

    changed = changes(outcomes)
    if schedule_out is not None:
        for outcome, path in zip(outcomes, view.schedule_paths(outcomes, schedule_out), strict=True):
            with open(path, "w", encoding="utf-8", newline="") as file:
                view.write_schedule(outcome.result, file)
            output.note(f"schedule written to {path}")
    if html is not None:
        from gpusched.study.html import page

        output.write_page(html, page(outcomes, changed))
    output.show(
        lambda: [row_of(o, c) for o, c in zip(outcomes, changed, strict=True)],
        lambda: view.screen(outcomes, changed, output.screen_width(), by),
    )


def _nightly(since: str, fail_if_worse: float | None, workers: int, auto_retrain: bool, json: bool) -> int:
    from gpusched.config.inventory import load_inventory
    from gpusched.config.paths import state_folder
    from gpusched.nightly.replays import nightly

    report = nightly(
        load_inventory(), state_folder(), since, workers=max(1, workers), auto_retrain=auto_retrain, tell=activity.tell
    )
    if json:
        output.emit_json(report.as_json())
    else:
        output.print_line("\n".join((report.verdict, *report.more)))
    return 1 if fail_if_worse is not None and report.worst_loss * 100 > fail_if_worse else 0
