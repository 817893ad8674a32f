"""The page in a real browser: what is drawn, where, in which colours, and what hovering says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gpusched.sim.pool import Pool
from gpusched.sim.power import Draw, power_model
from gpusched.sim.result import ReplayResult
from gpusched.study.bounds import Bounds
from gpusched.study.html import page
from gpusched.study.metrics import metrics_of
from gpusched.study.study import Scenario, StudyOutcome, changes
from tests.study.build import Job, result_of
from tests.study.png import pixels
from tests.web import browser

NASTY = "</script><img src=x onerror=alert(1)>{{table}}"
WATCH = "<script>window.onerror = m => { document.title = 'BROKEN ' + m; };</script>"
HOVER = """<script>
const over = (q, fx, fy) => { const n = document.querySelector(q), b = n.getBoundingClientRect();
  const at = {clientX: b.left + fx * b.width, clientY: b.top + fy * b.height, bubbles: true};
  n.dispatchEvent(new MouseEvent('mousemove', at));
  const p = document.createElement('p'), tip = document.getElementById('tip');
  p.className = 'said'; p.textContent = tip.textContent; document.body.append(p); };
over('#gantt rect.bar', .5, .5); over('#utilization rect', .75, .5); over('#heat canvas', .25, .25);
over('#energy rect[fill=transparent]', .5, .5); over('#wait rect', .999, .5);
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    return browser.chromium()


def _browse(chromium: str, folder: Path, file: Path, *options: str) -> str:
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
         f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", *options, file.as_uri()],
        capture_output=True, text=True, timeout=300, check=True, cwd=folder, env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def alike(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Five policies that do the same, nobody ever waits: the page as drawn, and how far its table is wider than it."""
    result = _result("now", 0.0)
    power = power_model(result.pool, types={"": Draw(1000, 3000)})
    scenario = Scenario(result.trace, result.pool, power)
    names = ("fifo", "easy", "spread", "sjf-oracle+conservative", "rltune-preempt")
    results = [replace(result, policy=name) for name in names]
    outcomes = [StudyOutcome(r, metrics_of(r, power), Bounds(), scenario) for r in results]
    folder = tmp_path_factory.mktemp("alike")
    measure = (
        "<script>const w = document.querySelector('.wide'), p = document.createElement('p'); p.className = 'over';"
        "p.textContent = w.scrollWidth - w.clientWidth; document.body.append(p);</script>"
    )
    (folder / "page.html").write_text(page(outcomes, changes(outcomes)) + measure, encoding="utf-8")
    drawn = _browse(chromium, folder, folder / "page.html", "--dump-dom", "--window-size=1300,1600")
    return drawn, re.findall(r'<p class="over">(-?\d+)</p>', drawn)[0]


def test_the_table_fits_at_1300_pixels(alike: tuple[str, str]) -> None:
    assert alike[1] == "0"


def test_equal_curves_are_dashed_and_named(alike: tuple[str, str]) -> None:
    parsed = _Dom()
    parsed.feed(alike[0])
    for figure in ("jct", "wait", "utilization", "queue", "power"):
        first, *others = parsed.of(figure, "path", kind="series")
        assert "dasharray" not in first["style"], figure
        assert len({o["style"].partition("dasharray:")[2] for o in others} - {""}) == len(others) == 4, figure
    said = "easy, spread, sjf-oracle+conservative, rltune-preempt: the same as fifo (dashed)"
    assert alike[0].count(f">{said}</figcaption>") == 5


def test_an_empty_queue_has_a_plain_axis(alike: tuple[str, str]) -> None:
    queue = alike[0].partition('id="queue"')[2].partition("</figure>")[0]
    assert re.findall(r'text-anchor="end">([^<]*)</text>', queue)[:5] == ["0", "0.25", "0.5", "0.75", "1"]


def _result(policy: str, delay: float) -> ReplayResult:
    """Two nodes of 8: one is full for 100 s, the other half full from ``delay`` on, for 100 s."""
    jobs = [Job(0, 0, 100, (0,), 8, "ann"), Job(0, delay, delay + 100, (1,), 4, NASTY)]
    return result_of(jobs, Pool.uniform(2, 8), epoch=None, policy=policy)


@pytest.fixture(scope="module")
def text() -> str:
    outcomes = []
    scenario = None
    for policy, delay in (("now", 0.0), ("later", 100.0)):
        result = _result(policy, delay)
        power = power_model(result.pool, types={"": Draw(1000, 3000)})
        scenario = scenario or Scenario(result.trace, result.pool, power)
        outcomes.append(StudyOutcome(result, metrics_of(result, power), Bounds(), scenario))
    return page(outcomes, changes(outcomes), "A night & a day")


def test_the_time_axis_is_exact_however_long_ago_the_trace_began() -> None:
    begin = 8 * 365 * 86400.0
    result = result_of([Job(begin, begin, begin + 60, (0,), 8)], epoch=0.0)
    scenario = Scenario(result.trace, result.pool, power_model(result.pool))
    outcome = StudyOutcome(result, metrics_of(result), Bounds(), scenario)
    data = json.loads(page([outcome], changes([outcome])).partition('type="application/json">')[2].partition("</")[0])
    assert data["edges"] == [begin + 0.25 * at for at in range(241)]


class _Dom(HTMLParser):
    """Elements of interest with the figure that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.figure = ""
        self.found: list[tuple[str, str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        self.figure = values.get("id", "") if tag == "figure" else self.figure
        self.found.append((self.figure, tag, values))

    def of(self, figure: str, tag: str, **attrs: str) -> list[dict[str, str]]:
        return [
            a for f, t, a in self.found
            if (f, t) == (figure, tag) and all(a.get("class" if k == "kind" else k) == v for k, v in attrs.items())
        ]  # fmt: skip


@pytest.fixture(scope="module")
def dom_text(chromium: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dom")
    file = folder / "page.html"
    file.write_text(text.replace("<head>", "<head>" + WATCH) + HOVER, encoding="utf-8")
    return _browse(chromium, folder, file, "--dump-dom", "--window-size=1200,1600")


@pytest.fixture(scope="module")
def dom(dom_text: str) -> _Dom:
    parsed = _Dom()
    parsed.feed(dom_text)
    return parsed


def _points(d: str) -> list[tuple[float, float]]:
    """The corners of a step line ``Mx yHxVyHx...``."""
    x, y, found = 0.0, 0.0, []
    for letter, numbers in re.findall(r"([MHVL])([-\d. ]+)", d):
        values = [float(v) for v in numbers.split()]
        x, y = (values[0], y) if letter == "H" else (x, values[0]) if letter == "V" else (values[0], values[1])
        found.append((x, y))
    return found


def test_nothing_breaks_and_nothing_is_fetched(dom_text: str, text: str) -> None:
    assert "<title>A night &amp; a day</title>" in dom_text
    assert set(re.findall(r"https?://[^\"' )]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:link|img|iframe)\b|<script[^>]+src=|@import|url\(|fetch\(|XMLHttp", text)


def test_every_chart_has_a_line_for_each_policy(dom: _Dom) -> None:
    for figure in ("jct", "wait", "utilization", "queue", "power"):
        lines = dom.of(figure, "path", kind="series")
        assert [line["data-run"] for line in lines] == ["now", "later"], figure
        assert all("NaN" not in line["d"] for line in lines), figure


def test_utilization_is_drawn_where_it_was(dom: _Dom) -> None:
    """Top is y = 8 (100 %), the axis y = 210 (0 %); x goes from 58 (0 s) to 548 (200 s)."""
    now, later = (_points(line["d"]) for line in dom.of("utilization", "path", kind="series"))

    def level(points: list[tuple[float, float]], share: float) -> float:
        x = 58 + share * (548 - 58)
        y = [py for px, py in points if px <= x][-1]
        return (210 - y) / (210 - 8)

    assert level(now, 0.25) == pytest.approx(12 / 16, abs=0.01)
    assert level(now, 0.75) == pytest.approx(0.0, abs=0.01)
    assert level(later, 0.25) == pytest.approx(8 / 16, abs=0.01)
    assert level(later, 0.75) == pytest.approx(4 / 16, abs=0.01)


def test_distributions_end_at_the_top(dom: _Dom) -> None:
    for figure in ("jct", "wait"):
        for line in dom.of(figure, "path", kind="series"):
            points = _points(line["d"])
            assert points[-1] == pytest.approx((548, 8), abs=0.5)
            assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_the_gantt_has_a_bar_for_each_run_at_its_time_and_node(dom: _Dom) -> None:
    first, second = dom.of("nodes", "rect", kind="bar")  # of the first policy
    assert float(first["x"]) == pytest.approx(80)
    assert float(first["width"]) == pytest.approx(float(second["width"]))
    assert float(first["width"]) == pytest.approx((1140 - 80 - 12) / 2, abs=1)  # 100 of 200 s
    assert float(second["height"]) == pytest.approx(float(first["height"]) / 2)  # 4 of 8 GPUs
    assert float(second["y"]) > float(first["y"]) + float(first["height"])


def test_energy_bars_are_as_high_as_the_energy(dom: _Dom) -> None:
    heights = [float(bar["height"]) for bar in dom.of("energy", "rect", kind="bar")]
    now = 2 * 1000 * 100 + 2000 * (100 + 50)
    later = 2 * 1000 * 200 + 2000 * (100 + 50)
    assert heights[0] / heights[2] == pytest.approx(now / later)


def test_hovering_says_what_is_there(dom_text: str) -> None:
    said = re.findall(r'<p class="said">(.*?)</p>', dom_text, re.DOTALL)
    assert said[0].startswith("job j0 of ann\n8 GPUs on n0000\n0 s in to 1.67 min in")
    assert said[1].endswith("now: 0%\nlater: 25%")
    assert said[2].endswith("100% held")
    assert said[3].startswith("now\n")
    assert said[4].endswith("now: 100%\nlater: 50%")  # half of the jobs wait up to the axis' very end


def test_names_of_jobs_and_users_stay_text(dom: _Dom, dom_text: str) -> None:
    assert not [tag for _, tag, _ in dom.found if tag == "img"]
    assert "&lt;/script&gt;&lt;img" in dom_text
    assert dom_text.count("<table>") == 1 + 2  # figures, and each policy's users; {{table}} in a name is none


def test_the_summary_says_what_changed(text: str) -> None:
    summary = text.partition('id="summary">')[2].partition("</section>")[0]
    assert "Under later, jobs took 2.50 min on average, 50.0% more than under now (1.67 min)" in summary
    assert "1 day is too little data for a confidence interval" in summary


@pytest.mark.parametrize(
    ("scheme", "background", "first"), [(1, (255, 255, 255), (0, 114, 178)), (0, (20, 23, 27), (79, 168, 224))]
)
def test_colours_are_on_the_screen_in_light_and_dark(
    chromium: str, text: str, tmp_path: Path, scheme: int, background: tuple[int, ...], first: tuple[int, ...]
) -> None:
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    file.write_text(text, encoding="utf-8")
    options = ("--window-size=640,2000", f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
    _browse(chromium, tmp_path, file, *options)
    seen = pixels(shot.read_bytes())
    assert tuple(seen[3, 3]) == background
    near = (np.abs(seen.astype(int) - np.array(first)).sum(axis=2) < 30).sum()
    assert near > 800  # lines, legend and bars of the first policy
    assert len(np.unique(seen.reshape(-1, 3), axis=0)) > 100
