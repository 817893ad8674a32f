"""The pages of ``gpusched reproduce``: round values at the axis, bars on both sides of 0, the paper beside."""

from __future__ import annotations

import re

import pytest

from gpusched.learn.rltune.reproduce import BASES, PAPER, Line
from gpusched.views import figures, rltune


def line(base: str, wait_change: float | None, utilization: float = 0.5) -> Line:
    wait = None if wait_change is None else 3600.0 * (1 + wait_change)
    return Line(
        trace="drawn", base=base, trained="fcfs", knows="limit", jobs=1234, utilization_base=0.5,
        utilization=utilization, wait_base_s=3600.0, wait_s=wait, wait_change=wait_change, jct_base_s=7200.0,
        jct_s=3600.0, jct_change=-0.5, slowdown_base=2222.0, slowdown=3.25, notes=(),
    )  # fmt: skip


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
    assert {name: value / 100 for name, value in rltune._PAPER.items()} == PAPER
    lines = [line(name, change) for name, change in zip(BASES, (-0.98, -0.3, 0.25, None, 0.0, -0.1, 0.1), strict=True)]
    page = rltune.page(lines)
    assert page.count("<svg") == 3
    assert page.count("the last is the paper&#x27;s best") == 3
    assert {"-98", "-81", "-70", "25"} <= set(texts(page))
    assert "Mean JCT" in page
    assert "2,222 -&gt; 3.25" in page
    assert "nan" not in page.lower()
