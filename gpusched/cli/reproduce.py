"""``gpusched reproduce``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import output

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer()


class Paper(StrEnum):
    """Whose figures."""

    GIST = "gist"
    RLTUNE = "rltune"
    DL2 = "dl2"


@app.command("reproduce")
def reproduce(
    paper: Annotated[Paper, typer.Argument(metavar="PAPER", help="gist, rltune or dl2.")],
    quick: Annotated[bool, typer.Option("--quick", help="In seconds: one seed, hardly trained.")] = False,
    seed: Annotated[list[int] | None, typer.Option("--seed", min=0, help="More than one: each; else 0, 1, 2.")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=0, help="Processes; 0: one per core.")] = 0,
    trace: Annotated[str | None, typer.Option("--trace", help="rltune: on this log; else on drawn jobs.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="Its format; else guessed.")] = None,
    vc: Annotated[list[str] | None, typer.Option("--vc", help="rltune: only this virtual cluster; may repeat.")] = None,
    workloads: Annotated[str | None, typer.Option("--workloads", help="dl2: these; else drawn ones.")] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="dl2: only this one; may repeat.")] = None,
    speeds: Annotated[str | None, typer.Option("--speeds", help="dl2: its measured speeds, config_speed.txt.")] = None,
    html: Annotated[str | None, typer.Option("--html", help="gist, rltune: write a page with plots.")] = None,
    json: output.JsonOption = False,
) -> None:
    """Make a paper's figures again: trained here, beside the paper's own and the exact ones. Takes some minutes.

    Of dl2 the setting and the rules it is compared with, no agent yet; takes seconds.
    """
    import msgspec

    if paper is Paper.DL2:
        from gpusched.agents.dl2 import reproduce as dl2
        from gpusched.views import dl2 as dl2_view

        rows = dl2.reproduce(workloads, speeds, policy or [], seed or [])
        return output.show(lambda: rows, lambda: dl2_view.screen(rows))
    from gpusched.agents.common.torch_ import need

    need("torch")
    if paper is Paper.RLTUNE:
        from gpusched.agents.rltune import reproduce as rltune
        from gpusched.views import rltune as rltune_view

        wanted = msgspec.structs.replace(
            rltune.QUICK if quick else rltune.Options(), trace=trace, format=format, vcs=tuple(vc or ()),
            seed=(seed or [0])[0],
        )  # fmt: skip
        with output.progress("training") as advance:
            lines = rltune.reproduce(wanted, advance or _unseen)
        return _show(html, rltune_view.page(lines), rltune.as_json(lines), rltune_view.screen(lines))
    from gpusched.agents.gist import reproduce as service
    from gpusched.views import reproduction as view

    options = service.QUICK if quick else service.Options(workers=jobs)
    if seed:
        options = msgspec.structs.replace(options, seeds=tuple(dict.fromkeys(seed)))
    with output.progress("training") as advance:
        made = service.reproduce(options, advance or _unseen)
    _show(html, view.page(made), service.as_json(made), view.screen(made))


def _show(html: str | None, page: str, data: object, screen: RenderableType) -> None:
    if html is not None:
        output.write_page(html, page)
    output.show(lambda: data, lambda: screen)


def _unseen(done: float, total: int) -> None:
    """Progress that nobody looks at."""
