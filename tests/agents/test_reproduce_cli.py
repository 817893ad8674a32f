"""``gpusched reproduce gist --quick``."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.agents import inside


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("reproduce")
    done = inside.run("reproduce", "gist", "--quick", "--json", "--html", "page.html", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), (folder / "page.html").read_text("utf-8")


def test_the_keys_others_rely_on(made: tuple[dict[str, Any], str]) -> None:
    found, _ = made
    keys = {"u_naive", "u_first_fit", "u_best_online", "u_optimum", "u_agent", "makespan_naive_h", "makespan_agent_h"}
    for setting in ("once", "hour_apart", "day_apart"):
        assert keys <= set(found[setting])
    assert found["once"]["u_naive"] == pytest.approx(0.622, abs=0.005)
    assert found["once"]["makespan_naive_h"] == pytest.approx(467.0, abs=0.5)
    assert found["once"]["u_optimum"] == pytest.approx(0.741, abs=0.0005)
    assert found["day_apart"]["u_best_online"] == pytest.approx(0.6739, abs=0.0001)
    assert found["day_apart"]["u_optimum"] == pytest.approx(0.686, abs=0.0005)
    assert len(found["once"]["u_agent"]) == len(found["train_seconds"]) == 1
    assert found["once"]["u_agent"][0] >= 0.99 * 0.7409
    assert found["once"]["makespan_agent_h"] == pytest.approx(381.6, rel=0.01)
    assert found["inefficient_energy_mwh"]["A100"]["naive"] == pytest.approx(3.54, abs=0.01)
    assert found["inefficient_energy_mwh"]["V100"]["agent"] == pytest.approx(1.31, abs=0.03)
    assert found["decisions_per_s"] > 0
    assert found["train_seconds"][0] > 0


def test_figures_stand_beside_the_papers(made: tuple[dict[str, Any], str]) -> None:
    found, _ = made
    ends = {case["end_d"]: case["paper_end_d"] for case in found["fig3"]}
    assert ends == {31: 31, 27: 27, 24: None, 42: None, 38: None, 35: None}
    assert {line["paper"] for line in found["figures"]} >= {"31 d", "27 d", "> 0.75", "0.62", "3.55 to 2.15 MWh"}
    never = [line["exact"] for line in found["figures"] if line["what"].startswith("no agent: never queue")]
    assert never[0] == "0.7409 to 0.7409"
    assert any(line["what"] == "the same network before training" and line["measured"] for line in found["figures"])
    assert len(found["fig5"]["A100"]["agent"]) == len(found["fig5"]["A100"]["naive"]) >= 120
    assert len(found["fig6"]["V100"]["agent"]) == 20


def test_the_page_has_every_plot_and_needs_nothing_else(made: tuple[dict[str, Any], str]) -> None:
    _, page = made
    assert len(re.findall("<svg", page)) == 14
    assert page.count("<svg") == page.count("</svg>")
    assert not re.search(r"""(?:src|href)=["']?(?!#)""", page)
    assert "NaN" not in page
