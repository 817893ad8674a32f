"""Plots as SVG text for pages without scripts: lines, bars and schedules, in the colors of the page's variables."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 240, 58, 12, 10, 30

STYLE = """:root { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --dim: #5b6570;
  --line: #d5dae0; --card: #f6f8fa;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b8860b; --c5: #56b4e9; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e9ed; --dim: #9aa5b1;
  --line: #363d46; --card: #1c2127;
  --c0: #4fa8e0; --c1: #ff9248; --c2: #2fc79b; --c3: #e6a2c8; --c4: #e0b64a; --c5: #8ecdf3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
.dim, figcaption { color: var(--dim); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1rem; }
.grid { margin: 1rem 0; }
figure { margin: 0; padding: .9rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; }
svg text.on { fill: var(--bg); font-weight: 600; } .axis { stroke: var(--line); } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th { color: var(--dim); }
i { font-style: normal; font-weight: 700; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
"""


class Curve(NamedTuple):
    """One curve over 1, 2, ..., or a constant if there is one value. colour: 0 to 5. faint: thin."""

    name: str
    ys: Sequence[float]
    colour: int
    faint: bool = False
    dashed: bool = False


class Rectangle(NamedTuple):
    """A labeled rectangle of a schedule."""

    name: str
    row: float
    height: float
    begin: float
    end: float
    colour: int


def lines(series: Sequence[Curve], label: str, low: float = 0.0, high: float = 1.0) -> str:
    """Return a plot of curves over 1, 2, ... with a legend."""
    count = max(len(s.ys) for s in series)
    parts = [_open(label), _levels(low, high)]
    for s in series:
        ys = list(s.ys) * 2 if len(s.ys) == 1 else s.ys
        step = (_W - _LEFT - _RIGHT) / max(1, len(ys) - 1)
        points = " ".join(f"{_LEFT + i * step:.1f},{_height(y, low, high):.1f}" for i, y in enumerate(ys))
        dash = ' stroke-dasharray="6 4"' if s.dashed else ""
        style = (
            f"fill:none;stroke:var(--c{s.colour});stroke-width:{0.8 if s.faint else 2};opacity:{0.55 if s.faint else 1}"
        )
        parts.append(f'<polyline points="{points}" style="{style}"{dash}/>')
    for i in (1, count // 2, count):
        x = _LEFT + (i - 1) / max(1, count - 1) * (_W - _LEFT - _RIGHT)
        parts.append(_text(x, _H - 12, str(i), "end" if i == count else "start" if i == 1 else "middle"))
    return "".join([*parts, "</svg>", _legend([(s.name, s.colour) for s in series])])


def bars(
    groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], unit: str, label: str, digits: int = 2
) -> str:
    """Return a bar chart: one bar per name in each group, up or down from 0, labeled with ``digits`` decimals."""
    heights = [0.0, *(value for _, values in groups for value in values)]
    low, top = min(heights), max(heights)
    margin = 0.15 * ((top - low) or 1.0)
    low, top = low - (margin if low < 0 else 0.0), top + (margin if top > 0 else 0.0)
    parts = [_open(label), _levels(low, top)]
    zero = _height(0.0, low, top)
    wide = (_W - _LEFT - _RIGHT) / len(groups)
    for g, (name, values) in enumerate(groups):
        bar = wide * 0.8 / len(values)
        for i, value in enumerate(values):
            x, y = _LEFT + wide * (g + 0.1) + i * bar, _height(value, low, top)
            box = f'x="{x:.1f}" y="{min(y, zero):.1f}" width="{bar * 0.9:.1f}" height="{abs(zero - y):.1f}"'
            parts.append(f'<rect {box} style="fill:var(--c{i})"/>')
            parts.append(_text(x + bar * 0.45, y - 3 if value >= 0 else y + 11, f"{value:.{digits}f}", "middle"))
        parts.append(_text(_LEFT + wide * (g + 0.5), _H - 12, name, "middle"))
    return "".join(
        [*parts, "</svg>", _legend([(f"{name} ({unit})" if unit else name, i) for i, name in enumerate(names)])]
    )


def schedule(blocks: Sequence[Rectangle], rows: Sequence[str], until: float, unit: str, label: str) -> str:
    """Return a chart of blocks in rows over time from 0."""
    high = 34 * len(rows)
    parts = [f'<svg viewBox="0 0 {_W} {high + 24}" role="img" aria-label="{html.escape(label)}">']
    wide = (_W - _LEFT - _RIGHT) / until
    for row, name in enumerate(rows):
        parts.append(_text(_LEFT - 6, 34 * row + 20, name, "end"))
    for b in blocks:
        x, y = _LEFT + b.begin * wide, 34 * b.row + 1
        box = f'x="{x:.1f}" y="{y:.1f}" width="{(b.end - b.begin) * wide - 1:.1f}" height="{34 * b.height - 2:.1f}"'
        parts.append(f'<rect {box} rx="2" style="fill:var(--c{b.colour})"/>')
        middle = (x + (b.end - b.begin) * wide / 2, y + 17 * b.height + 3)
        parts.append(f'<text class="on" x="{middle[0]:.1f}" y="{middle[1]:.1f}" text-anchor="middle">{b.name}</text>')
    step = max(1, round(until / 8))
    for t in range(0, int(until) + 1, step):
        parts.append(_text(_LEFT + t * wide, high + 16, f"{t} {unit}", "middle"))
    return "".join([*parts, "</svg>"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table."""
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """Return an HTML page of these parts that needs no network and no other file."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f'<body><h1>{html.escape(title)}</h1><p class="dim">{html.escape(subtitle)}</p>{"".join(parts)}</body></html>\n'
    )


def figure(title: str, caption: str, drawing: str) -> str:
    """Return a drawing with title and caption."""
    return f"<figure><h2>{html.escape(title)}</h2><figcaption>{html.escape(caption)}</figcaption>{drawing}</figure>"


def _open(label: str) -> str:
    return f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{html.escape(label)}">'


def _height(value: float, low: float, high: float) -> float:
    return _H - _BOTTOM - (value - low) / (high - low) * (_H - _TOP - _BOTTOM)


def _levels(low: float, high: float) -> str:
    """Return about five labeled grid lines at round values."""
    parts = []
    step = _round_step((high - low) / 5)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        y = _height(i * step, low, high)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{i * step:.{digits}f}", "end"))
    return "".join(parts)


def _round_step(minimum: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``minimum``."""
    power = 10.0 ** math.floor(math.log10(minimum)) if minimum > 0 else 1.0
    return next(power * k for k in (1, 2, 5, 10) if power * k >= minimum * (1 - 1e-9))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _legend(names: Sequence[tuple[str, int]]) -> str:
    marks = (
        f'<span><i style="color:var(--c{colour})">&#9632;</i> {html.escape(name)}</span>' for name, colour in names
    )
    return f"<figcaption>{' &nbsp; '.join(marks)}</figcaption>"
