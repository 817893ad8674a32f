"""The GIST reproduction as a table and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.views import figures as plot
from gpusched.views.common import plain_table

if TYPE_CHECKING:
    from gpusched.agents.gist.reproduce import Reproduction
    from gpusched.agents.gist.section6 import Case
    from gpusched.agents.gist.setting import Gist

TITLE = "Narantuya et al. (CMC 2022), Section 6, again"


def _texts(paper: Gist, made: Reproduction) -> list[str]:
    """Return what the columns mean, the findings, and the training times."""
    above = paper.published.trained > made.once.u_optimum
    values = {
        "printed": paper.published, "made": made, "beyond": "lies above" if above else "is within",
        "untrained": mean(made.once.u_untrained), "seconds": ", ".join(f"{s:.1f}" for s in made.train_seconds),
        "hour_apart": mean(made.hour_apart.u_agent), "day_apart": mean(made.day_apart.u_agent),
    }  # fmt: skip
    return [text.format(**values) for text in paper.words.splitlines()]


def screen(paper: Gist, reproduction: Reproduction) -> RenderableType:
    """Return the table and its explanation."""
    table = plain_table("FIGURE", "WHAT", "PAPER", "EXACT", "MEASURED", wrap=("WHAT",), drop=("EXACT",))
    for row in reproduction.figures:
        table.add_row(row.of, row.what, row.paper, row.exact, row.measured)
    return Group(table, Text(), *map(Text, _texts(paper, reproduction)))


def page(paper: Gist, reproduction: Reproduction) -> str:
    """Return the page with all plots."""
    rows = [[r.of, r.what, r.paper, r.exact, r.measured] for r in reproduction.figures]
    parts = [plot.table(("figure", "what", "paper", "exact", "measured"), rows)]
    longest = max(case.end_d for case in reproduction.fig3)
    drawings = [_schedule(case, longest) for case in reproduction.fig3]
    for partition, course in reproduction.fig5.items():
        drawings += [_episodes(reproduction, f"Fig. 5a: {partition}, trained", "training", course["agent"], 0)]
        drawings += [_episodes(reproduction, f"Fig. 5b: {partition}, naive", "naive", course["naive"], 1)]
    drawings += [_tests(reproduction, partition) for partition in reproduction.fig6]
    drawings += [_energy(paper, reproduction), _arrivals(reproduction)]
    subtitle, *words = _texts(paper, reproduction)
    below = "".join(f"<p>{text}</p>" for text in words)
    return plot.page(TITLE, subtitle, [*parts, f'<div class="grid">{"".join(drawings)}</div>', below])


def _schedule(case: Case, longest_d: float) -> str:
    blocks: list[plot.Rectangle] = []
    for bar in sorted(case.bars, key=lambda b: (b.start_d, b.job)):
        lower = [b for b in blocks if int(b.row) == bar.server - 1 and b.end > bar.start_d and b.begin < bar.end_d]
        row = max((b.row + b.height for b in lower), default=float(bar.server - 1))
        blocks.append(plot.Rectangle(bar.job[:1], row, bar.gpus / 8, bar.start_d, bar.end_d, int(bar.job[0]) - 1))
    paper = "" if case.paper_end_d is None else f"; the paper says {case.paper_end_d:g}"
    caption = f"f runs {case.f_run_d:g} days: all done after {case.end_d:g} days{paper}"
    drawing = plot.schedule(blocks, ("server 1", "server 2"), longest_d, "d", caption)
    return plot.figure(f"Fig. 3: {case.name}", caption, drawing)


def _episodes(reproduction: Reproduction, title: str, what: str, values: Sequence[float], colour: int) -> str:
    smooth = [mean(values[max(0, i - 49) : i + 1]) for i in range(len(values))]
    drawing = plot.lines(
        [
            plot.Curve(f"U by episode, {what}", values, colour, faint=True),
            plot.Curve("mean of the last 50", smooth, colour),
            plot.Curve("optimum", [reproduction.once.u_optimum], 2, dashed=True),
        ],
        title,
    )
    return plot.figure(title, "utilization by episode", drawing)


def _tests(reproduction: Reproduction, partition: str) -> str:
    played = reproduction.fig6[partition]
    naive = mean(played["naive"])
    drawing = plot.lines(
        [
            plot.Curve("trained", played["agent"], 0),
            plot.Curve(f"naive, mean {naive:.3f}", [naive], 1, dashed=True),
            plot.Curve("optimum, mean of all sequences", [reproduction.once.u_optimum], 2, dashed=True),
        ],
        f"test episodes on {partition}",
    )
    caption = f"{len(played['agent'])} random test episodes; trained, mean {mean(played['agent']):.3f}"
    return plot.figure(f"Fig. 6: {partition}", caption, drawing)


def _energy(paper: Gist, reproduction: Reproduction) -> str:
    printed, found = paper.published, reproduction.inefficient_energy_mwh
    groups = [(p, (*printed.energy_mwh[p], e["naive"], e["agent"])) for p, e in found.items()]
    names = ("paper, naive", "paper, trained", "here, naive", "here, trained")
    drawing = plot.bars(groups, names, "MWh", "inefficient energy")
    caption = f"kW x {printed.energy_h} h x (1 - U), two servers each"
    return plot.figure("Fig. 7: inefficient energy", caption, drawing)


def _arrivals(reproduction: Reproduction) -> str:
    groups = []
    for setting in (reproduction.once, reproduction.hour_apart, reproduction.day_apart):
        name = f"{setting.gap_h:g} h apart" if setting.gap_h else "at once"
        agent, published = mean(setting.u_agent), mean(setting.u_published)
        groups.append((name, (setting.u_naive, setting.u_first_fit, published, agent, setting.u_best_online)))
    names = ("naive", "first fit", "the paper's reward", "rewarded with U", "best online")
    drawing = plot.bars(groups, names, "mean U", "utilization by arrivals", digits=3)
    return plot.figure("Arrivals", "what can be gained by keeping a job waiting", drawing)
