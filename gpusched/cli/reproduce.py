"""``gpusched reproduce``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import output
from gpusched.cli.together import refuse_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from gpusched.study.paper import Advance, PaperFigures, PaperOptions

app = typer.Typer()


class PaperName(StrEnum):
    """The papers whose figures can be reproduced."""

    GIST = "gist"
    RLTUNE = "rltune"
    DL2 = "dl2"
    MAIFS = "maifs"
    TOPOLOGY = "topology"


@app.command("reproduce")
def reproduce(
    paper: Annotated[PaperName, typer.Argument(metavar="PAPER", help="gist, rltune, dl2, maifs, topology.")],
    quick: Annotated[bool, typer.Option("--quick", help="Quick check: one seed, barely trained.")] = False,
    seed: Annotated[list[int] | None, typer.Option("--seed", min=0, help="Random seeds; default 0, 1, 2.")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=0, help="Processes; 0: one per core.")] = 0,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="rltune: on this log; default: on generated jobs.")
    ] = None,
    format: Annotated[str | None, typer.Option("--format", help="Its format; default: detected.")] = None,
    vc: Annotated[
        list[str] | None, typer.Option("--vc", help="rltune: only this virtual cluster; may be repeated.")
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option("--workloads", metavar="FILE", help="dl2: these traces; maifs: trace folder. Default: generated."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Only this policy (not gist; rltune: with --out); may be repeated."),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option("--speeds", metavar="FILE", help="Other measurements: dl2, config_speed.txt; maifs, a folder."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="FILE", help="dl2, maifs, topology: the agent's weights; default: trained, or shipped."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="Write trained weights to this file; maifs, rltune, topology: train."
        ),
    ] = None,
    restart: Annotated[
        str | None, typer.Option("--restart", help="dl2: cost of a resize, such as 120s; default none.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--change", help="dl2: MODEL:SLOT:FACTOR changes a model's speed; may be repeated."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="topology: a built-in cluster, or a YAML of switches; default: all built-in ones.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", help="topology: GPUs per node of a file; default 8, or its inventory's."),
    ] = None,
    nic: Annotated[
        str | None, typer.Option("--nic", help="topology: NIC rate of a file's nodes; default 100G.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="FILE", help="topology: CSV of measured pairs, from which jobs are drawn."),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option("--load", help="topology: offered load; default 0.7, 0.9, 1.1; rltune --out: 0.9, 1.1."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="dl2: device to train on, cpu or cuda; default cpu.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="gist, rltune: write a page with plots.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Reproduce a paper's figures: trained here, next to the paper's own and the exact ones. Takes some minutes.

    dl2: with --workloads the included weights are used, in seconds. rltune: --out trains weights on the virtual
    clusters of --trace, and judges them on each by weights of the others. maifs, topology: settings of our own.
    """
    from gpusched.study.paper import PaperOptions, check_options
    from gpusched.views import reproduction

    options = PaperOptions(
        quick=quick, seeds=tuple(seed or ()), policies=tuple(policy or ()), loads=tuple(load or ()), jobs=jobs,
        device=device, weights=weights, out=out, workloads=workloads, speeds=speeds, trace=trace, format=format,
        vcs=tuple(vc or ()), restart=restart, changes=tuple(change or ()), topology=topology,
        gpus_per_node=gpus_per_node, nic=nic, table=table, html=html,
    )  # fmt: skip
    check_options(paper, options)
    refuse_inputs("--out", out, (trace, workloads, speeds, topology, table))
    refuse_inputs("--html", html, (trace, weights))
    if paper is PaperName.RLTUNE and out is not None:
        return _public_weights(options)
    if paper in (PaperName.GIST, PaperName.RLTUNE):
        return _with_page(paper, options)
    with output.progress("playing") as advance:
        figures = _reproducer(paper)(options, advance or _no_progress)
    output.show(lambda: figures.rows, lambda: reproduction.screen(*figures))


def _reproducer(paper: PaperName) -> Callable[[PaperOptions, Advance], PaperFigures]:
    if paper is PaperName.DL2:
        from gpusched.agents.dl2 import reproduce as dl2

        return dl2.reproduce
    if paper is PaperName.MAIFS:
        from gpusched.agents.maifs import reproduce as maifs

        return maifs.reproduce
    from gpusched.agents.topology import reproduce as topology

    return topology.reproduce


def _with_page(paper: PaperName, options: PaperOptions) -> None:
    from gpusched.agents.common.torch_ import require

    require("torch")
    if paper is PaperName.RLTUNE:
        from gpusched.agents.rltune import reproduce as rltune
        from gpusched.views import rltune as rltune_view

        with output.progress("training") as advance:
            lines = rltune.reproduce(options, advance or _no_progress)
        paper_figures = rltune.rltune()
        return _show(
            options.html,
            rltune_view.page(paper_figures, lines),
            rltune.as_json(lines),
            rltune_view.screen(paper_figures, lines),
        )
    from gpusched.agents.gist import reproduce as gist
    from gpusched.agents.gist.setting import gist as paper_of
    from gpusched.views import gist as gist_view

    with output.progress("training") as advance:
        curves = gist.reproduce(options, advance or _no_progress)
    paper_gist = paper_of()
    _show(options.html, gist_view.page(paper_gist, curves), gist.as_json(curves), gist_view.screen(paper_gist, curves))


def _public_weights(options: PaperOptions) -> None:
    """Train rltune's weights for clusters without a record, on the virtual clusters of a public trace."""
    from gpusched.agents.training.public import make_public
    from gpusched.views.training import screen

    with output.progress("training") as advance:
        files = make_public(options, advance or _no_progress)
    output.show(lambda: files, lambda: screen(files))


def _show(html: str | None, page: str, data: object, screen: RenderableType) -> None:
    if html is not None:
        output.write_page(html, page)
    output.show(lambda: data, lambda: screen)


def _no_progress(done: float, total: int) -> None:
    """Ignore progress."""
