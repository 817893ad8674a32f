"""``gpusched reproduce``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import output
from gpusched.cli.rows import with_rows
from gpusched.cli.together import refuse_inputs
from gpusched.study.options import PaperOptions, files_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from gpusched.study.paper import Advance, PaperFigures

app = typer.Typer()


class PaperName(StrEnum):
    """The papers whose figures can be reproduced."""

    GIST = "gist"
    RLTUNE = "rltune"
    DL2 = "dl2"
    MAIFS = "maifs"
    TOPOLOGY = "topology"


@app.command("reproduce")
@with_rows(PaperOptions)
def reproduce(
    options: PaperOptions,
    paper: Annotated[PaperName, typer.Argument(metavar="PAPER", help="gist, rltune, dl2, maifs, topology.")],
    json: output.JsonOption = False,
) -> None:
    """Reproduce a paper's figures: trained here, next to the paper's own and the exact ones. Takes some minutes.

    dl2: with --workloads the included weights are used, in seconds. rltune: --out trains weights on the virtual
    clusters of --trace, and judges them on each by weights of the others. maifs, topology: settings of our own.
    """
    from gpusched.study.paper import check_options
    from gpusched.views import reproduction

    check_options(paper, options)
    refuse_inputs("--out", options.out, files_of(options, "out"))
    refuse_inputs("--html", options.html, files_of(options, "html"))
    if paper is PaperName.RLTUNE and options.out is not None:
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
