"""A log-log line plot as SVG, by hand: the benchmarks need no plotting library."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 380, 64, 34, 150, 46
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#8a6d1c", "#444444")

Series = dict[str, list[tuple[float, float]]]


def loglog(title: str, x_name: str, y_name: str, series: Series) -> str:
    """Return the plot; every x and y must be above 0. ``series``: name -> points in order of x."""
    points = [p for line in series.values() for p in line]
    low_x, high_x = _decades([x for x, _ in points])
    low_y, high_y = _decades([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for power in range(low_x, high_x + 1):
        x, y = at(10.0**power, 10.0**low_y)
        parts += [_line(x, y, x, TOP), _text(x, y + 16, f"{10**power:,}", "middle")]
    for power in range(low_y, high_y + 1):
        x, y = at(10.0**low_x, 10.0**power)
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        parts += [_line(x, y, WIDTH - RIGHT, y), _text(x - 6, y + 4, label, "end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, "middle"))
    parts.append(f'<g transform="rotate(-90 14 {HEIGHT / 2})">{_text(14, HEIGHT / 2, y_name, "middle")}</g>')
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (at(*p) for p in line)]
        row = TOP + 14 + 18 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{row - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 28, row, name, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    body = "\n".join(parts)
    return f'{head} font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
