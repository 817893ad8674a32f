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
    from gpusched.agents.gist.setting import Published
    from gpusched.agents.gist.worked_example import Case

TITLE = "Narantuya et al. (CMC 2022), Section 6, again"


def _subtitle(made: Reproduction) -> str:
    return (
        f"PAPER: as printed there. EXACT: by enumeration over all {made.sequences} sequences of four jobs, no "
        "sampling. MEASURED: trained here, one figure per seed, each the exact mean of that agent. U of an "
        "episode: Eq. 4 when the f job can start."
    )


def _words(of: Published, made: Reproduction) -> str:
    once, claim = made.once, of.trained
    beyond = "lies above" if claim > once.u_optimum else "is within"
    return (
        f"The paper's 'more than {claim:g}' {beyond} the optimum of its own stated setting, {once.u_optimum:.4f}. That "
        f"needs no learning: never queueing a job that fits, largest first, reaches {once.u_never_waits_at_worst:.4f} "
        f"even on the worst server each time when all jobs arrive at once, first fit {once.u_first_fit:.4f}, an "
        f"untrained network with masks {mean(once.u_untrained):.4f}. When jobs arrive one by one, the only thing that "
        "helps is to keep a job waiting though it fits, which the published reward punishes with -1; the agent that is "
        "rewarded with the episode's U itself has "
        + ", ".join(f"{mean(s.u_agent):.4f} of {s.u_best_online:.4f} at {s.gap_h:g} h"
                    for s in (made.hour_apart, made.day_apart))
        + "."
    )  # fmt: skip


def screen(of: Published, made: Reproduction) -> RenderableType:
    """The table, speed and a word on what it means."""
    table = plain_table("FIGURE", "WHAT", "PAPER", "EXACT", "MEASURED", wrap=("WHAT",), drop=("EXACT",))
    for row in made.figures:
        table.add_row(row.of, row.what, row.paper, row.exact, row.measured)
    return Group(table, Text(), Text(_subtitle(made)), Text(_words(of, made)), Text(_speed(made)))


def _speed(made: Reproduction) -> str:
    seconds = ", ".join(f"{s:.1f}" for s in made.train_seconds)
    return (
        f"Training to {made.mark:.0%} of the optimum: {seconds} s. "
        f"Batched clusters with network: {made.decisions_per_s:,.0f} decisions/s."
    )


def page(of: Published, made: Reproduction) -> str:
    """Everything with plots."""
    rows = [[r.of, r.what, r.paper, r.exact, r.measured] for r in made.figures]
    parts = [plot.table(("figure", "what", "paper", "exact", "measured"), rows)]
    longest = max(case.end_d for case in made.fig3)
    drawings = [_schedule(case, longest) for case in made.fig3]
    for partition, course in made.fig5.items():
        drawings += [_episodes(made, f"Fig. 5a: {partition}, trained", "training", course["agent"], 0)]
        drawings += [_episodes(made, f"Fig. 5b: {partition}, naive", "naive", course["naive"], 1)]
    drawings += [_tests(made, partition) for partition in made.fig6]
    drawings += [_energy(of, made), _apart(made)]
    return plot.page(
        TITLE,
        _subtitle(made),
        [*parts, f'<div class="grid">{"".join(drawings)}</div>', f"<p>{_words(of, made)}</p><p>{_speed(made)}</p>"],
    )


def _schedule(case: Case, longest_d: float) -> str:
    blocks: list[plot.Block] = []
    for bar in sorted(case.bars, key=lambda b: (b.start_d, b.job)):
        lower = [b for b in blocks if int(b.row) == bar.server - 1 and b.end > bar.start_d and b.begin < bar.end_d]
        row = max((b.row + b.height for b in lower), default=float(bar.server - 1))
        blocks.append(plot.Block(bar.job[:1], row, bar.gpus / 8, bar.start_d, bar.end_d, int(bar.job[0]) - 1))
    paper = "" if case.paper_end_d is None else f"; the paper says {case.paper_end_d:g}"
    caption = f"f runs {case.f_run_d:g} days: all done after {case.end_d:g} days{paper}"
    drawing = plot.schedule(blocks, ("server 1", "server 2"), longest_d, "d", caption)
    return plot.figure(f"Fig. 3: {case.name}", caption, drawing)


def _episodes(made: Reproduction, title: str, what: str, values: Sequence[float], colour: int) -> str:
    smooth = [mean(values[max(0, i - 49) : i + 1]) for i in range(len(values))]
    drawing = plot.lines(
        [
            plot.Line(f"U by episode, {what}", values, colour, faint=True),
            plot.Line("mean of the last 50", smooth, colour),
            plot.Line("optimum", [made.once.u_optimum], 2, dashed=True),
        ],
        title,
    )
    return plot.figure(title, "utilization by episode", drawing)


def _tests(made: Reproduction, partition: str) -> str:
    played = made.fig6[partition]
    naive = mean(played["naive"])
    drawing = plot.lines(
        [
            plot.Line("trained", played["agent"], 0),
            plot.Line(f"naive, mean {naive:.3f}", [naive], 1, dashed=True),
            plot.Line("optimum, mean of all sequences", [made.once.u_optimum], 2, dashed=True),
        ],
        f"test episodes on {partition}",
    )
    caption = f"{len(played['agent'])} random test episodes; trained, mean {mean(played['agent']):.3f}"
    return plot.figure(f"Fig. 6: {partition}", caption, drawing)


def _energy(of: Published, made: Reproduction) -> str:
    groups = [(p, (*of.energy_mwh[p], e["naive"], e["agent"])) for p, e in made.inefficient_energy_mwh.items()]
    names = ("paper, naive", "paper, trained", "here, naive", "here, trained")
    drawing = plot.bars(groups, names, "MWh", "inefficient energy")
    return plot.figure("Fig. 7: inefficient energy", f"kW x {of.energy_h} h x (1 - U), two servers each", drawing)


def _apart(made: Reproduction) -> str:
    groups = []
    for setting in (made.once, made.hour_apart, made.day_apart):
        name = f"{setting.gap_h:g} h apart" if setting.gap_h else "at once"
        agent, published = mean(setting.u_agent), mean(setting.u_published)
        groups.append((name, (setting.u_naive, setting.u_first_fit, published, agent, setting.u_best_online)))
    names = ("naive", "first fit", "the paper's reward", "rewarded with U", "best online")
    drawing = plot.bars(groups, names, "mean U", "utilization by arrivals", digits=3)
    return plot.figure("Arrivals", "what can be gained by keeping a job waiting", drawing)
