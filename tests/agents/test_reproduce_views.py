"""The pages of ``gpusched reproduce``: round values at the axis, bars on both sides of 0, the paper beside."""

from __future__ import annotations

import ast
import inspect
import re
from io import StringIO
from types import ModuleType
from typing import NamedTuple

import msgspec
import pytest
from rich.console import Console

from gpusched.agents.common.request import UNTRAINED
from gpusched.agents.gist import reproduce as gist_figures
from gpusched.agents.gist.reproduce import ArrivalSetting, Reproduction
from gpusched.agents.gist.section6 import Case
from gpusched.agents.gist.setting import gist as paper_of
from gpusched.agents.rltune import reproduce as rltune_figures
from gpusched.agents.rltune.reproduce import ComparisonLine
from gpusched.study.paper import Paper
from gpusched.views import figures, gist, reproduction, rltune


def line(base: str, wait_change: float | None, utilization: float = 0.5) -> ComparisonLine:
    wait = None if wait_change is None else 3600.0 * (1 + wait_change)
    return ComparisonLine(
        trace="drawn", base=base, trained="fcfs", knows="limit", jobs=1234, utilization_base=0.5,
        utilization=utilization, wait_base_s=3600.0, wait_s=wait, wait_change=wait_change, jct_base_s=7200.0,
        jct_s=3600.0, jct_change=-0.5, slowdown_base=2222.0, slowdown=3.25, notes=(),
    )  # fmt: skip


class Row(NamedTuple):
    load: float
    policy: str
    jct: float
    bound: float
    restarts: int
    jobs: int = 10


def test_a_scenario_says_what_the_table_shows() -> None:
    columns = [
        {"head": "LOAD", "of": "load"}, {"head": "POLICY", "of": "policy"}, {"head": "N"},
        {"head": "JCT", "of": "jct", "per": 60, "format": "{:.1f} min"},
        {"head": "AGAINST", "of": "jct", "against": "a"}, {"head": "ABOVE", "of": "jct", "above": "bound"},
        {"head": "TWICE", "of": "jct", "above": 60}, {"head": "GAIN", "of": "jct", "gain": ["a", "best"]},
        {"head": "PAPER", "published": {"b": "claim"}},
        {"head": "RESTARTS", "of": "restarts", "per": "jobs", "format": "{:.1f} a job"},
    ]  # fmt: skip
    fields = {"words": "It claims {claim:+.0%}.", "published": {"claim": -0.25}, "bound": {"jct": "bound"}}
    draws = {"a": (120.0, 240.0, 120.0), "b": (60.0, 120.0, 60.0), "best": (60.0, 60.0, 60.0)}
    rows = [Row(load, policy, jct[i], 40.0, 5) for load in (0.7, 1) for i in range(3) for policy, jct in draws.items()]
    shown = StringIO()
    paper = msgspec.convert(fields | {"table": columns}, Paper)
    Console(file=shown, width=200).print(reproduction.screen(paper, rows))
    head, *lines = (re.split(" {2,}", line.strip()) for line in shown.getvalue().splitlines())
    assert head == [column["head"] for column in columns]
    assert lines[:4] == [
        ["0.7", "a", "3", "2.7 min", "+0.0%", "+300.0%", "+166.7%", "0.0%", "-", "0.5 a job"],
        ["0.7", "b", "3", "1.3 min", "-50.0% ± 0.0%", "+100.0%", "+33.3%", "80.0%", "-25.0%", "0.5 a job"],
        ["0.7", "best", "3", "1.0 min", "-62.5% ± 35.8%", "+50.0%", "+0.0%", "100.0%", "-", "0.5 a job"],
        ["0.7", "bound", "3", "0.7 min", "-75.0% ± 23.9%", "+0.0%", "-33.3%", "120.0%", "-", "-"],
    ]
    assert [line[:2] for line in lines[4:8]] == [["1", name] for name in (*draws, "bound")]
    assert "It claims -25%." in shown.getvalue()


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 365.7, ["0", "100", "200", "300"]),
        (0.0, 0.04, ["0.00", "0.01", "0.02", "0.03", "0.04"]),
        (-95.0, 35.0, ["-50", "0"]),
    ],
)
def test_axes_have_round_values(low: float, high: float, expected: list[str]) -> None:
    assert texts(figures._levels(low, high)) == expected


def test_bars_go_up_and_down_from_nought_within_the_picture() -> None:
    svg = figures.bars([("a", (20.0,)), ("b", (-80.0,)), ("c", (0.0,))], ("change",), "", "title", digits=0)
    boxes = [tuple(map(float, b)) for b in re.findall(r'<rect x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)]
    (up, tall), (zero, deep), (nought, flat) = boxes
    assert up + tall == pytest.approx(zero, abs=0.11)
    assert deep == pytest.approx(4 * tall, rel=0.02)
    assert (nought, flat) == (zero, 0.0)
    assert 0 < up < zero + deep < 240 - 30
    assert {"20", "-80", "0"} <= set(texts(svg))
    assert "change (" not in svg


def test_the_page_puts_the_papers_best_beside_each_base() -> None:
    of, changes = rltune_figures.rltune(), (-0.98, -0.3, 0.25, None, 0.0, -0.1, 0.1, 0.2)
    lines = [line(name, change) for name, change in zip((*of.names.values(), UNTRAINED), changes, strict=True)]
    page = rltune.page(of, lines)
    assert page.count("<svg") == 3
    assert page.count("the last is the paper&#x27;s best") == 3
    assert {"-98", "-81", "-70", "25"} <= set(texts(page))
    assert "Mean JCT" in page
    assert "2,222 -&gt; 3.25" in page
    assert "nan" not in page.lower()


def setting(gap_h: float, at: float) -> ArrivalSetting:
    """Figures that no enumeration would give."""
    names = [f for f in ArrivalSetting.__struct_fields__ if f != "gap_h"]
    lists = ("u_agent", "u_untrained", "u_published", "u_paper")
    return ArrivalSetting(gap_h=gap_h, **{name: [at] if name in lists else at for name in names})  # type: ignore[arg-type]


def test_the_page_says_what_was_computed_and_what_the_paper_printed() -> None:
    """Other figures in, other figures out: nothing is written by hand but what the paper says, in one place."""
    case = Case(name="case", f_run_d=1.0, end_d=2.0, paper_end_d=None, bars=())
    made = Reproduction(
        sequences=7, mark=0.5, once=setting(0.0, 0.1234), hour_apart=setting(1.0, 0.2345),
        day_apart=setting(24.0, 0.3456),
        inefficient_energy_mwh={"A100": {"naive": 9.0, "agent": 8.0, "optimum": 7.0}}, train_seconds=[1.0],
        decisions_per_s=1.0, fig3=[case], fig5={"A100": {"agent": [0.5], "naive": [0.5]}},
        fig6={"A100": {"agent": [0.5], "naive": [0.5]}}, figures=[],
    )  # fmt: skip
    page = gist.page(paper_of(), made)
    assert "lies above the optimum of its own stated setting, 0.1234" in page.replace("&#x27;", "'")
    assert "over all 7 sequences" in page
    assert "to 50 % of the optimum" in page.replace("50%", "50 %")
    words = " ".join(re.findall(r"<p>(.*?)</p>", page, flags=re.DOTALL))
    assert set(re.findall(r"[0-9]+[.][0-9]{2,}", words)) == {
        "0.1234", "0.2345", "0.3456", f"{paper_of().published.trained:g}",
    }  # fmt: skip
    higher = msgspec.structs.replace(made, once=setting(0.0, 0.9))
    assert "lies above the optimum" not in gist.page(paper_of(), higher)


@pytest.mark.parametrize("module", [gist_figures, gist, rltune_figures, rltune])
def test_no_result_is_a_literal(module: ModuleType) -> None:
    """In what reproduces, a text with decimals or per cent in it would be a figure that nobody computed."""
    tree = ast.parse(inspect.getsource(module))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # these may
    texts = {n.value for n in ast.walk(tree)
             if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings}  # fmt: skip
    of_formats = {t for t in texts if re.fullmatch("[+,]*[.][0-9][f%g]", t)}
    assert of_formats < texts
    assert not {t for t in texts - of_formats if re.search("[0-9][.][0-9]|[0-9] ?%", t)}
